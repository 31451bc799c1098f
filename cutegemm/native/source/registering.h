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
  device.impl("gemm_program", TORCH_FN((gemm_program_on_device<PROGRAM_OPTION_TYPES>)));
  device.impl("quantize", TORCH_FN(quantize_on_device));
  device.impl("quantize_given", TORCH_FN(quantize_given_on_device));
  device.impl("scaled_gemm", TORCH_FN((scaled_gemm_on_device<SCALED_OPTION_TYPES>)));
  device.impl("quantized_linear", TORCH_FN((quantized_linear_on_device<OPTION_TYPES>)));
  device.impl("moe", TORCH_FN(moe_on_device));
  torch::Library& autograd = on(served.autograd);
  autograd.impl("gemm", TORCH_FN((gemm_recorded<OPTION_TYPES>)));
  autograd.impl("gemm_program", TORCH_FN((gemm_program_recorded<PROGRAM_OPTION_TYPES>)));
  autograd.impl("quantize", TORCH_FN(quantize_recorded));
  autograd.impl("quantize_given", TORCH_FN(quantize_given_recorded));
  autograd.impl("quantized_linear", TORCH_FN((quantized_linear_recorded<OPTION_TYPES>)));
  autograd.impl("moe", TORCH_FN(moe_recorded));
}

inline void unregister_operators() { registrations().clear(); }

}  // namespace cutegemm
