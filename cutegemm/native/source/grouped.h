// torch.ops.cutegemm.grouped_gemm for plain tensors, as a program whose arrays stand in front of its operands;
// cutegemm/pytorch/grouped_operator.py defines it and computes all other calls.
#pragma once

#include <cstdlib>

#include "programs.h"

namespace cutegemm {

namespace in_python {
inline Hook grouped_gemm{"grouped_gemm"};
}

// A text of its own for each kind of groups: that of the program, and what divides them.
inline std::string text_of_groups(Text program, bool counts, bool rows) {
  std::string made(program.data(), program.size());
  return made + (counts ? "\ncounts" : "\noffsets") + (rows ? " rows" : "");
}

// Whether sizes are to be looked at, which Python does; CUTEGEMM_DEBUG may change between two calls.
inline bool looks_at_sizes() {
  const char* debug = std::getenv("CUTEGEMM_DEBUG");
  return debug != nullptr && std::string_view(debug) != "0";
}

// Its hook in Python is called as hook(keys, unknown, *arguments).
inline std::vector<at::Tensor> grouped_gemm_by_operator(
    FromOperator from, const at::Tensor& a, const at::Tensor& b, const OptionalTensor& offsets,
    const OptionalTensor& counts, const OptionalTensor& rows, const OptionalTensor& places,
    std::optional<c10::SymInt> out_rows, at::TensorList operands, c10::ArrayRef<double> numbers,
    c10::SymIntArrayRef integers, Text program, std::optional<at::ScalarType> out_dtype, OptionalText precision,
    Text backend, OptionalText config, Text save, bool zeros) {
  Found found = Found::python;
  c10::SmallVector<const at::Tensor*, 8> tensors{&a, &b};
  for (const OptionalTensor* array : {&offsets, &counts, &rows})
    if (*array) tensors.push_back(&**array);
  for (const at::Tensor& operand : operands) tensors.push_back(&operand);
  if (from.is_plain() && offsets.has_value() != counts.has_value() && !places && !out_rows && !config && !zeros &&
      saves(save) && nothing_recorded(tensors) && !looks_at_sizes()) {
    ToProgram of;
    of.program = number_of(text_of_groups(program, counts.has_value(), rows.has_value()));
    if (out_dtype) of.options.out_dtype = static_cast<int>(*out_dtype);
    of.options.take(PRECISION, precision), of.options.take(BACKEND, backend);
    bool described = of.describe(a, b);
    for (size_t i = 2; i < tensors.size(); ++i) described = described && of.add(*tensors[i]);
    if (auto made = computed(of, described, numbers, integers, found)) return std::move(*made);
  }
  WithInterpreter held;
  return taken_list(call(
      in_python::grouped_gemm,
      {from.to_python(), to_python(found == Found::unknown), to_python(a), to_python(b), to_python(offsets),
       to_python(counts), to_python(rows), to_python(places), out_rows ? to_python(*out_rows) : none(),
       to_python(operands), to_python(numbers), to_python(integers), to_python(OptionalText(program)),
       to_python(out_dtype), to_python(precision), to_python(OptionalText(backend)), to_python(config),
       to_python(OptionalText(save)), to_python(zeros)}));
}

inline const Operator serves_grouped_gemm = served_with_lists_by<grouped_gemm_by_operator>("grouped_gemm");

}  // namespace cutegemm
