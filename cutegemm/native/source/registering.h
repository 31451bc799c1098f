// The operators that are served here: while they are registered, they are called in place of Python's kernels.
#pragma once

#include <torch/library.h>

#include "grouped.h"
#include "layer.h"
#include "mixture.h"
#include "mlp.h"
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

template <auto by_operator>
void serve(const char* name, torch::Library& device, torch::Library& autograd) {
  device.impl(name, TORCH_FN((Served<by_operator>::on_device)));
  autograd.impl(name, TORCH_FN((Served<by_operator>::recorded)));
}

template <auto by_operator>
void serve_with_lists(const char* name, torch::Library& device, torch::Library& autograd) {
  device.impl(name, with_lists(TORCH_FN((Served<by_operator>::on_device))));
  autograd.impl(name, with_lists(TORCH_FN((Served<by_operator>::recorded))));
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
  torch::Library &device = on(served.key), &autograd = on(served.autograd);
  device.impl("gemm", TORCH_FN((gemm_on_device<OPTION_TYPES>)));
  autograd.impl("gemm", TORCH_FN((gemm_recorded<OPTION_TYPES>)));
  device.impl("scaled_gemm", TORCH_FN((scaled_gemm_on_device<SCALED_OPTION_TYPES>)));
  serve<quantize_by_operator>("quantize", device, autograd);
  serve<quantize_given_by_operator>("quantize_given", device, autograd);
  serve<quantized_linear_by_operator<OPTION_TYPES>>("quantized_linear", device, autograd);
  serve<quantized_mlp_by_operator<OPTION_TYPES>>("quantized_mlp", device, autograd);
  serve<moe_by_operator>("moe", device, autograd);
  serve_with_lists<gemm_program_by_operator<PROGRAM_OPTION_TYPES>>("gemm_program", device, autograd);
  serve_with_lists<grouped_gemm_by_operator>("grouped_gemm", device, autograd);
}

inline void unregister_operators() { registrations().clear(); }

}  // namespace cutegemm
