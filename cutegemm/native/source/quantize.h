// `cutegemm.quantize` of plain tensors by prepared launches; cutegemm/run/quantizing.py prepares them.
#pragma once

#include <ATen/ops/empty_strided.h>

#include "programs.h"

namespace cutegemm {

// The launches of a call, in order. Each takes the addresses of x, values, scales and of the maxima that they exchange,
// or in their place of the rows that the values go to.
struct Quantization {
  std::vector<Launch> steps;
  std::vector<int64_t> shape, strides;         // of the values
  std::optional<std::vector<int64_t>> scales;  // the shape of new ones
  int64_t maxima = 0;
};

struct ToQuantize {
  Matrix x, scale;  // a scale that is given
  at::ScalarType dtype = at::ScalarType::Undefined;
  int scaling = 0, backend = 0;  // their places among the names
  int device = 0;

  bool known() const { return scaling >= 0 && backend >= 0; }

  // False where Python must look at them.
  bool describe(const at::Tensor& x_, const at::Tensor* scale_) {
    device = x_.device().index();
    return cutegemm::describe(x_, x) && describe_scale(scale_);
  }

  bool describe_scale(const at::Tensor* scale_) {
    return scale_ == nullptr || (scale_->device().index() == device && cutegemm::describe(*scale_, scale));
  }
};

// Vectors of up to 64 bytes are loaded, so that the kernel depends on so much of an address.
inline Key key_of(const ToQuantize& of) {
  Key key;
  key.add(static_cast<int64_t>(of.dtype) | (of.scaling << 8) | (of.backend << 16) | (!!of.scale << 24));
  key.add(of.device);
  key.add(of.x, 63);
  if (of.scale) key.add(of.scale, 63);
  return key;
}

inline Found look_up(const ToQuantize& of, Table<Quantization>::Known& found) {
  return table_of<Quantization>().find(key_of(of), found);
}

struct Quantized {
  at::Tensor values, scales;

  // Memory for the results; scales may be given.
  Quantized(const Quantization& how, const ToQuantize& of, const at::Tensor* given)
      : values(at::empty_strided(how.shape, how.strides, options(of).dtype(of.dtype))),
        scales(given ? *given : at::empty(*how.scales, options(of))) {}

  // Enqueues the launches; false where Python must. between: the fourth address of one that exchanges no maxima.
  bool launch(const Quantization& how, const ToQuantize& of, const void* between = nullptr) {
    at::Tensor maxima;
    if (how.maxima != 0) {
      maxima = at::empty({how.maxima}, options(of));
      between = maxima.const_data_ptr();
    }
    for (const Launch& step : how.steps)
      if (!enqueue(step, of.device, {of.x.data, values.const_data_ptr(), scales.const_data_ptr(), between}, {}))
        return false;
    return true;
  }

 private:
  static at::TensorOptions options(const ToQuantize& of) {
    return at::TensorOptions().dtype(at::ScalarType::Float).device(served.type, of.device);
  }
};

// The values and scales of rows as a step of a larger call. row_of: of each slot its row, if the results are those of all
// slots. Returns false if Python must launch it. `rows` may be the very matrix `values`.
inline bool quantize_rows(
    const Quantization& how, at::ScalarType dtype, int device, Matrix rows, const void* row_of,
    std::optional<Quantized>& made, Matrix& values, Matrix& scales) {
  ToQuantize of;
  of.x = rows, of.dtype = dtype, of.device = device;
  made.emplace(how, of, nullptr);
  values = {}, scales = {};
  values.data = made->values.const_data_ptr(), scales.data = made->scales.const_data_ptr();
  return made->launch(how, of, row_of);
}

inline Found quantized(const ToQuantize& of, const at::Tensor* scale, std::optional<Quantized>& made) {
  Table<Quantization>::Known how;
  const Found found = look_up(of, how);
  if (found != Found::launch) return found;
  made.emplace(*how, of, scale);
  return made->launch(*how, of) ? Found::launch : Found::python;
}

inline Found quantized(const at::Tensor& x, const at::Tensor* scale, ToQuantize of, std::optional<Quantized>& made) {
  return of.known() && of.describe(x, scale) ? quantized(of, scale, made) : Found::python;
}

namespace in_python {
inline Hook quantize{"quantize"}, quantize_given{"quantize_given"};
}

// -- the operators quantize and quantize_given, whose hooks in Python are called as hook(keys, unknown, *arguments) -----
inline std::tuple<at::Tensor, at::Tensor> quantize_by_operator(
    FromOperator from, const at::Tensor& x, at::ScalarType dtype, Text scaling, int64_t dim, c10::IntArrayRef block,
    Text backend) {
  Found found = Found::python;
  if (dim == -1 && block == c10::IntArrayRef({1, 128}) && from.is_plain() && nothing_recorded({&x})) {
    std::optional<Quantized> made;
    found = quantized(x, nullptr, {{}, {}, dtype, scalings.find(scaling), quantizers.find(backend)}, made);
    if (found == Found::launch) return {std::move(made->values), std::move(made->scales)};
  }
  WithInterpreter held;
  return taken_pair(call(
      in_python::quantize,
      {from.to_python(), to_python(found == Found::unknown), to_python(x), to_python(std::optional(dtype)),
       to_python(OptionalText(scaling)), to_python(dim), to_python(block), to_python(OptionalText(backend))}));
}

inline at::Tensor quantize_given_by_operator(
    FromOperator from, const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, int64_t dim, Text backend) {
  Found found = Found::python;
  if (dim == -1 && from.is_plain() && nothing_recorded({&x, &scale})) {
    std::optional<Quantized> made;
    found = quantized(x, &scale, {{}, {}, dtype, 0, quantizers.find(backend)}, made);
    if (found == Found::launch) return std::move(made->values);
  }
  WithInterpreter held;
  return taken(call(
      in_python::quantize_given,
      {from.to_python(), to_python(found == Found::unknown), to_python(x), to_python(scale),
       to_python(std::optional(dtype)), to_python(dim), to_python(OptionalText(backend))}));
}

inline const Operator serves_quantize = served_by<quantize_by_operator>("quantize"),
                      serves_quantize_given = served_by<quantize_given_by_operator>("quantize_given");

}  // namespace cutegemm
