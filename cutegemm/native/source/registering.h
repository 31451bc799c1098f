// The operators that are served here: while they are registered, they are called in place of Python's kernels.
#pragma once

#include <torch/library.h>

#include "layer.h"
#include "mixture.h"
#include "operator.h"

namespace cutegemm {

inline std::vector<std::unique_ptr<torch::Library>>& registrations() {
  static auto* made = new std::vector<std::unique_ptr<torch::Library>>;  // torch may be gone when the process ends
  return *made;
}

// A kernel whose lists may be None, which AOTInductor's runtime gives for an empty list.
class WithLists : public c10::OperatorKernel {
 public:
  template <typename Function>
  explicit WithLists(Function function) : kernel_(c10::KernelFunction::makeFromUnboxedFunction(function)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto& arguments = op.schema().arguments();
    const auto given = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!given[i].isNone()) continue;
      const auto list = arguments[i].type()->cast<c10::ListType>();
      if (list) given[i] = c10::impl::GenericList(list->getElementType());
    }
    kernel_.callBoxed(op, keys, stack);
  }

 private:
  c10::KernelFunction kernel_;
};

template <typename Function>
torch::CppFunction with_lists(Function function) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<WithLists>(function));
}

inline void register_operators() {
  class Silent : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // torch would say, once for all operators, that a kernel of Python's is overridden
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  const auto on = [](c10::DispatchKey key) -> torch::Library& {
    return *registrations().emplace_back(
        std::make_unique<torch::Library>(torch::Library::IMPL, "cutegemm", key, __FILE__, __LINE__));
  };
  torch::Library& device = on(served.key);
  device.impl("gemm", TORCH_FN((gemm_on_device<OPTION_TYPES>)));
  device.impl("gemm_program", with_lists(TORCH_FN((gemm_program_on_device<PROGRAM_OPTION_TYPES>))));
  device.impl("quantize", TORCH_FN(quantize_on_device));
  device.impl("quantize_given", TORCH_FN(quantize_given_on_device));
  device.impl("scaled_gemm", TORCH_FN((scaled_gemm_on_device<SCALED_OPTION_TYPES>)));
  device.impl("quantized_linear", TORCH_FN((quantized_linear_on_device<OPTION_TYPES>)));
  device.impl("moe", TORCH_FN(moe_on_device));
  torch::Library& autograd = on(served.autograd);
  autograd.impl("gemm", TORCH_FN((gemm_recorded<OPTION_TYPES>)));
  autograd.impl("gemm_program", with_lists(TORCH_FN((gemm_program_recorded<PROGRAM_OPTION_TYPES>))));
  autograd.impl("quantize", TORCH_FN(quantize_recorded));
  autograd.impl("quantize_given", TORCH_FN(quantize_given_recorded));
  autograd.impl("quantized_linear", TORCH_FN((quantized_linear_recorded<OPTION_TYPES>)));
  autograd.impl("moe", TORCH_FN(moe_recorded));
}

inline void unregister_operators() { registrations().clear(); }

}  // namespace cutegemm
