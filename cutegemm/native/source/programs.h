// Products with an epilogue program by prepared launches; cutegemm/run/fused.py tells of them.
#pragma once

#include <c10/util/SmallVector.h>

#include "multiply.h"
#include "serving.h"

namespace cutegemm {

namespace in_python {
inline Hook gemm_program{"gemm_program"};
}

// A launch whose arguments are read off the tensors and numbers of a call.
struct ProgramLaunch : Launch {
  // An address: that of a tensor given or, behind those, of a result, and bytes from there. -1: a null pointer.
  struct Place {
    int tensor = -1;
    int64_t offset = 0;
  };
  // A number given, or a constant (-1).
  struct Number {
    int given = -1;
    double constant = 0;
  };
  struct Result {
    std::vector<int64_t> shape;
    at::ScalarType dtype = at::ScalarType::Undefined;
  };
  std::vector<Place> addresses;
  std::vector<Number> numbers;
  std::vector<Result> results;
};

using Results = c10::SmallVector<at::Tensor, 2>;
using Values = c10::SmallVector<Value, 4>;

// Computes into new tensors, all on that device. shape: of the first, in place of the launch's own with as many elements.
// False where Python must compute.
inline bool compute(
    const ProgramLaunch& launch, int device, c10::ArrayRef<const Matrix*> tensors, const Values& numbers, Results& made,
    std::optional<c10::IntArrayRef> shape = std::nullopt) {
  for (const ProgramLaunch::Result& each : launch.results) {
    const c10::IntArrayRef own = made.empty() && shape ? *shape : c10::IntArrayRef(each.shape);
    made.push_back(at::empty(own, at::TensorOptions().dtype(each.dtype).device(served.type, device)));
  }
  c10::SmallVector<const void*, 16> addresses;
  for (const ProgramLaunch::Place& place : launch.addresses) {
    const int count = static_cast<int>(tensors.size());
    const void* start = place.tensor < 0        ? nullptr
                        : place.tensor < count ? tensors[place.tensor]->data
                                               : made[place.tensor - count].const_data_ptr();
    addresses.push_back(static_cast<const char*>(start) + place.offset);
  }
  Values given;
  for (const ProgramLaunch::Number& number : launch.numbers)
    given.push_back(number.given < 0 ? Value::of(number.constant) : numbers[number.given]);
  return enqueue(launch, device, addresses, given);
}

// A call of `gemm` with a program.
struct ToProgram {
  int64_t program = 0;  // its number; 0: none
  Matrix a, b;
  c10::SmallVector<Matrix, 4> operands;
  Values numbers;
  int64_t order = 0;  // which of the operands are numbers; of an operator's call how many integers there are
  int device = 0;
  Options options;

  bool describe(const at::Tensor& a_, const at::Tensor& b_) {
    device = a_.device().index();
    return describe_factor(a_, a) && describe_factor(b_, b) && b_.device().index() == device;
  }

  // Also of K = 0, where the epilogue is all that is computed: of tensors without elements nothing is read.
  static bool describe_factor(const at::Tensor& tensor, Matrix& made) {
    if (tensor.numel() != 0) return cutegemm::describe(tensor, made);
    if (!is_plain(tensor) || tensor.dim() > 3) return false;
    made.dim = static_cast<int>(tensor.dim());
    for (int i = 0; i < made.dim; ++i) made.sizes[i] = tensor.size(i), made.strides[i] = tensor.stride(i);
    made.dtype = tensor.scalar_type();
    return true;
  }

  bool add(const at::Tensor& tensor, Matrix& matrix) const {
    return cutegemm::describe(tensor, matrix) && tensor.device().index() == device;
  }

  bool add(const at::Tensor& tensor) { return add(tensor, operands.emplace_back()); }

  // Numbers that fp32 and int32 do not hold are for Python to refuse.
  bool add(double number) {
    numbers.push_back(Value::of(number));
    return !(std::abs(number) > FLT_MAX && std::isfinite(number));
  }

  bool add(int64_t number) {
    numbers.push_back(Value::of(number));
    return number == static_cast<int32_t>(number);
  }

  // Those of an operator.
  bool add(c10::ArrayRef<double> floats, c10::SymIntArrayRef integers) {
    bool right = true;
    for (double number : floats) right = add(number) && right;
    order = static_cast<int64_t>(integers.size());
    for (const c10::SymInt& integer : integers) {
      const auto number = integer.maybe_as_int();
      right = number && add(*number) && right;
    }
    return right;
  }
};

// False where it is too long.
inline bool key_of(const ToProgram& of, Key& key) {
  if (of.operands.size() > 4 || of.numbers.size() > 16) return false;
  key.add(of.program), key.add(of.order);
  key.add((of.operands.size() << 8) | of.numbers.size(), of.device, of.options);
  key.add(of.a, 15), key.add(of.b, 15);
  for (const Matrix& operand : of.operands) key.add(operand, 15);
  return true;
}

// The tables of programs' calls and of products with scales hold launches of one kind by keys of their own.
struct OfProgram : ProgramLaunch {};

inline Found computed(const ToProgram& of, Results& made) {
  Key key;
  if (of.program == 0 || !of.options.known() || !key_of(of, key)) return Found::python;
  Table<OfProgram>::Known launch;
  const Found found = table_of<OfProgram>().find(key, launch);
  if (found != Found::launch) return found;
  c10::SmallVector<const Matrix*, 8> tensors{&of.a, &of.b};
  for (const Matrix& operand : of.operands) tensors.push_back(&operand);
  return compute(*launch, of.device, tensors, of.numbers, made) ? Found::launch : Found::python;
}

// The numbers of the texts of programs, which operators carry: below zero, where Python's have none. 0: too many.
class Texts {
 public:
  int64_t number_of(Text text) {
    const std::string_view found(text.data(), text.size());
    {
      std::shared_lock lock(mutex_);
      const auto place = numbers_.find(found);
      if (place != numbers_.end()) return place->second;
    }
    std::unique_lock lock(mutex_);
    if (numbers_.size() >= MOST) return 0;
    return numbers_.try_emplace(std::string(found), -1 - static_cast<int64_t>(numbers_.size())).first->second;
  }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  static constexpr size_t MOST = 65536;
  std::shared_mutex mutex_;
  std::unordered_map<std::string, int64_t, Hash, std::equal_to<>> numbers_;
};

inline int64_t number_of(Text text) {
  return kept<Texts>().number_of(text);
}

// The results of an operator whose tensors were described, where they can be computed here.
inline std::optional<std::vector<at::Tensor>> computed(
    ToProgram& of, bool described, c10::ArrayRef<double> numbers, c10::SymIntArrayRef integers, Found& found) {
  if (!described || !of.add(numbers, integers)) return std::nullopt;
  Results made;
  found = computed(of, made);
  if (found != Found::launch) return std::nullopt;
  return std::vector<at::Tensor>(std::make_move_iterator(made.begin()), std::make_move_iterator(made.end()));
}

// What operators take as `save`, which a call that records nothing only checks.
inline bool saves(Text how) { return how == "outputs" || how == "recompute"; }

// The operator gemm_program, whose hook in Python is called as hook(keys, unknown, *arguments).
template <typename... Rest>
std::vector<at::Tensor> gemm_program_by_operator(
    FromOperator from, const at::Tensor& a, const at::Tensor& b, at::TensorList operands, c10::ArrayRef<double> numbers,
    c10::SymIntArrayRef integers, Text program, std::optional<at::ScalarType> out_dtype, Rest... rest) {
  Found found = Found::python;
  c10::SmallVector<const at::Tensor*, 8> tensors{&a, &b};
  for (const at::Tensor& operand : operands) tensors.push_back(&operand);
  if (from.is_plain() && nothing_recorded(tensors)) {
    ToProgram of;
    of.program = number_of(program);
    if (out_dtype) of.options.out_dtype = static_cast<int>(*out_dtype);
    int position = 0, field = 0;
    bool described = of.describe(a, b);
    const auto take = [&](const OptionalText& option) {
      if (position++ == OWN_OPTION)
        described = described && saves(*option);
      else
        of.options.take(field++, option);
    };
    (take(rest), ...);
    for (const at::Tensor& operand : operands) described = described && of.add(operand);
    if (auto made = computed(of, described, numbers, integers, found)) return std::move(*made);
  }
  WithInterpreter held;
  std::vector<PyObject*> given{
      from.to_python(), to_python(found == Found::unknown), to_python(a), to_python(b), to_python(operands),
      to_python(numbers), to_python(integers), to_python(OptionalText(program)), to_python(out_dtype)};
  (given.push_back(to_python(OptionalText(rest))), ...);
  return taken_list(call(in_python::gemm_program, given));
}

inline const Operator serves_gemm_program =
    served_with_lists_by<gemm_program_by_operator<PROGRAM_OPTION_TYPES>>("gemm_program");

}  // namespace cutegemm
