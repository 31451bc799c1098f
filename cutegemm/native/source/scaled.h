// Products with scales, act(scale_a scale_b (a b) + bias), by prepared launches; cutegemm/pytorch/scaled.py tells of them.
#pragma once

#include "quantize.h"

namespace cutegemm {

namespace in_python {
inline Hook scaled{"scaled"};
}

// A launch of the tensors A, B, bias and the two scales, of which some are null pointers.
struct ScaledProduct : ProgramLaunch {};

struct ToScale {
  Matrix a, b, scale_a, scale_b, bias;
  int device = 0;

  // False where Python must look at them; those not there are null pointers.
  bool describe(
      const at::Tensor* a_, const at::Tensor* b_, const at::Tensor* scale_a_, const at::Tensor* scale_b_,
      const at::Tensor* bias_) {
    device = a_->device().index();
    const auto fits = [&](const at::Tensor* tensor, Matrix& matrix) {
      return tensor == nullptr || (cutegemm::describe(*tensor, matrix) && tensor->device().index() == device);
    };
    return fits(a_, a) && fits(b_, b) && fits(scale_a_, scale_a) && fits(scale_b_, scale_b) && fits(bias_, bias);
  }
};

inline Key key_of(const ToScale& of, const Options& options) {
  Key key;
  key.add(!!of.scale_a | (!!of.scale_b << 1) | (!!of.bias << 2) | (options.activation << 8), of.device, options);
  for (const Matrix* matrix : {&of.a, &of.b, &of.scale_a, &of.scale_b, &of.bias})
    if (*matrix) key.add(*matrix, 15);
  return key;
}

inline Found look_up(const ToScale& of, const Options& options, Table<ScaledProduct>::Known& found) {
  return table_of<ScaledProduct>().find(key_of(of, options), found);
}

// False where Python must compute. shape: as in `compute`.
inline bool multiply(
    const ScaledProduct& launch, const ToScale& of, at::Tensor& d,
    std::optional<c10::IntArrayRef> shape = std::nullopt) {
  Results made;
  if (!compute(launch, of.device, {&of.a, &of.b, &of.bias, &of.scale_a, &of.scale_b}, {}, made, shape)) return false;
  d = std::move(made[0]);
  return true;
}

inline Found scaled_product(const ToScale& of, const Options& options, at::Tensor& d) {
  Table<ScaledProduct>::Known launch;
  const Found found = look_up(of, options, launch);
  return found != Found::launch || multiply(*launch, of, d) ? found : Found::python;
}

// The operator scaled_gemm, below autograd. Its hook in Python is called as hook(unknown, *arguments).
template <typename... Rest>
at::Tensor scaled_gemm_on_device(
    const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& scale_a,
    const std::optional<at::Tensor>& scale_b, const std::optional<at::Tensor>& c, double alpha, double beta,
    const std::optional<at::Tensor>& bias, OptionalText activation, std::optional<at::ScalarType> out_dtype,
    Rest... rest) {
  Options options;
  options.activation = activations.find(activation);
  if (out_dtype) options.out_dtype = static_cast<int>(*out_dtype);
  bool by_shapes = true;  // nothing said of how operands are scaled
  int field = 0;
  const auto take = [&](const auto& option) {
    if constexpr (std::is_same_v<std::decay_t<decltype(option)>, OptionalTexts>)
      by_shapes = !option.has_value();
    else
      options.take(field++, option);
  };
  (take(rest), ...);
  Found found = Found::python;
  ToScale of;
  const auto pointer = [](const std::optional<at::Tensor>& tensor) { return tensor ? &*tensor : nullptr; };
  if (by_shapes && !c && alpha == 1 && beta == 0 && options.known() &&
      of.describe(&a, &b, pointer(scale_a), pointer(scale_b), pointer(bias))) {
    at::Tensor d;
    found = scaled_product(of, options, d);
    if (found == Found::launch) return d;
  }
  WithInterpreter held;
  std::vector<PyObject*> given{
      to_python(found == Found::unknown), to_python(a), to_python(b), to_python(scale_a), to_python(scale_b),
      to_python(c), to_python(alpha), to_python(beta), to_python(bias), to_python(activation), to_python(out_dtype)};
  const auto pass = [&](const auto& option) {
    if constexpr (std::is_same_v<std::decay_t<decltype(option)>, OptionalTexts>)
      given.push_back(to_python(option));
    else
      given.push_back(to_python(OptionalText(option)));
  };
  (pass(rest), ...);
  return taken(call(in_python::scaled, given));
}

inline const Operator serves_scaled_gemm{"scaled_gemm", kernel<scaled_gemm_on_device<SCALED_OPTION_TYPES>>, nullptr};

}  // namespace cutegemm
