// torch.ops.cutegemm.gemm for plain tensors; cutegemm/pytorch/operator.py defines it and computes all other calls.
#pragma once

#include <atomic>

#include "recorded.h"
#include "serving.h"

namespace cutegemm {

namespace in_python {
inline Hook plan{"plan"}, compute{"compute"}, record{"record"};
}

using OptionalDtype = std::optional<at::ScalarType>;

// The arguments of the operator.
struct Arguments {
  const at::Tensor &a, &b;
  const OptionalTensor& c;
  double alpha, beta;
  const OptionalTensor& bias;
  OptionalText activation;
  OptionalDtype out_dtype;
  std::array<OptionalText, FIELDS> how;

  Options options() const {
    Options made;
    made.activation = activations.find(activation);
    for (int i = 0; i < FIELDS; ++i) made.take(i, how[i]);
    if (out_dtype) made.out_dtype = static_cast<int>(*out_dtype);
    return made;
  }

  // False where Python must look at them.
  bool operands(Operands& made) const {
    made.device = a.device().index();
    const auto fits = [&](const at::Tensor& tensor, Matrix& matrix) {
      return describe(tensor, matrix) && tensor.device().index() == made.device;
    };
    return std::abs(alpha) <= FLT_MAX && std::abs(beta) <= FLT_MAX && fits(a, made.a) && fits(b, made.b) &&
           (!c || fits(*c, made.c)) && (!bias || fits(*bias, made.bias));
  }

  // hook(keys, *arguments) with `out`, which the operator does not have.
  at::Tensor by_python(const Hook& hook, FromOperator from = {}) const {
    WithInterpreter held;
    std::vector<PyObject*> given{
        from.to_python(), to_python(a), to_python(b), to_python(c), to_python(alpha), to_python(beta),
        to_python(bias), to_python(activation), none(), to_python(out_dtype)};
    for (const OptionalText& each : how) given.push_back(to_python(each));
    return taken(call(hook, given));
  }
};

// Whether Python decides the precision of float32 products that name none.
inline std::atomic<bool> leaves_float32{false};

// The product where it can be computed here. What was never met before is planned by Python first.
inline std::optional<at::Tensor> product(const Arguments& given, const Options& options) {
  Operands of;
  if (!options.known() || !given.operands(of)) return std::nullopt;
  if (!given.how[PRECISION] && leaves_float32 && given.a.scalar_type() == at::ScalarType::Float) return std::nullopt;
  Known launch;
  Found found = look_up(of, given.beta, options, launch);
  if (found == Found::unknown) {
    given.by_python(in_python::plan);
    found = look_up(of, given.beta, options, launch);
  }
  if (found != Found::launch) return std::nullopt;
  return multiply(*launch, of, given.alpha, given.beta, launch->shape);
}

// For the device's key: below autograd, autocast and all modes.
template <typename... Texts>
at::Tensor gemm_on_device(
    const at::Tensor& a, const at::Tensor& b, const OptionalTensor& c, double alpha, double beta,
    const OptionalTensor& bias, OptionalText activation, OptionalDtype out_dtype, Texts... how) {
  const Arguments given{a, b, c, alpha, beta, bias, activation, out_dtype, {how...}};
  auto d = product(given, given.options());
  return d ? std::move(*d) : given.by_python(in_python::compute);
}

// For autograd's key of the device.
template <typename... Texts>
at::Tensor gemm_recorded(
    c10::DispatchKeySet keys, const at::Tensor& a, const at::Tensor& b, const OptionalTensor& c, double alpha,
    double beta, const OptionalTensor& bias, OptionalText activation, OptionalDtype out_dtype, Texts... how) {
  const Arguments given{a, b, c, alpha, beta, bias, activation, out_dtype, {how...}};
  const FromOperator from{&keys};
  const std::array<const at::Tensor*, 4> tensors{&a, &b, c ? &*c : nullptr, bias ? &*bias : nullptr};
  if (from.is_plain() && !has_tangent(tensors)) {
    const Options options = given.options();
    const bool records = to_be_recorded(tensors);
    if (!records || may_record(options, a)) {
      if (auto d = product(given, options)) {
        if (records)
          record(*d, a, b, c.value_or(at::Tensor()), bias.value_or(at::Tensor()), {options, alpha, beta, false});
        return std::move(*d);
      }
    }
  }
  return given.by_python(in_python::record, from);
}

inline const Operator serves_gemm{"gemm", kernel<gemm_on_device<OPTION_TYPES>>, kernel<gemm_recorded<OPTION_TYPES>>};

}  // namespace cutegemm
