// One CUTLASS 2.x configuration behind a C function: fp16 in and out, fp32 accumulation, split-K through a semaphore.
#include <cutlass/gemm/device/gemm.h>

using Element = cutlass::half_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using Gemm = cutlass::gemm::device::Gemm<
    Element, RowMajor, Element, ColumnMajor, Element, RowMajor, float, cutlass::arch::OpClassTensorOp,
    cutlass::arch::Sm80, cutlass::gemm::GemmShape<64, 64, 32>, cutlass::gemm::GemmShape<32, 32, 32>,
    cutlass::gemm::GemmShape<16, 8, 16>, cutlass::epilogue::thread::LinearCombination<Element, 8, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<1>, 4, 8, 8, /*split K*/ true>;

extern "C" int gemm_run(void* a, void* b, void* c, void* d, int m, int n, int k, float alpha, float beta, int splits,
                        void* workspace, cudaStream_t stream) {
  auto of = [](void* pointer) { return static_cast<Element*>(pointer); };
  Gemm::Arguments arguments({m, n, k}, {of(a), k}, {of(b), k}, {of(c), n}, {of(d), n}, {alpha, beta}, splits);
  cutlass::Status status = Gemm::can_implement(arguments);
  if (status != cutlass::Status::kSuccess) return 100 + int(status);
  Gemm gemm;
  status = gemm.initialize(arguments, workspace, stream);
  if (status != cutlass::Status::kSuccess) return 200 + int(status);
  return int(gemm.run(stream));
}
