// A small host program for the tests of launch capture: a GEMM with a split along K, its reduction, and what CUDA
// host code does around launches.
#include <cuda_runtime.h>

#include <string>

__constant__ float scale_table[4] = {1.0f, 2.0f, 3.0f, 4.0f};

// C[s] = A[:, s-th share of K] B, one thread an element, a row of A in dynamic shared memory.
template <int Threads>
__global__ void __launch_bounds__(Threads) gemm(const float* a, const float* b, float* partial, int m, int n, int k) {
  extern __shared__ float row[];
  const int share = (k + gridDim.z - 1) / gridDim.z;
  const int first = blockIdx.z * share, last = min(k, first + share);
  const int i = blockIdx.y, j = blockIdx.x * Threads + threadIdx.x;
  for (int p = first + threadIdx.x; p < last; p += Threads) row[p - first] = a[i * k + p];
  __syncthreads();
  if (j >= n) return;
  float sum = 0;
  for (int p = first; p < last; ++p) sum += row[p - first] * b[p * n + j];
  partial[(blockIdx.z * m + i) * n + j] = sum;
}

static __global__ void reduce(const float* partial, float* c, int count, int splits, char factor) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
  for (int s = 0; s < splits; ++s) sum += partial[s * count + i];
  c[i] = sum * scale_table[factor];
}

extern "C" int gemm_run(const float* a, const float* b, float* c, float* partial, int m, int n, int k, int splits,
                        int factor, cudaStream_t stream) {
  const int share = (k + splits - 1) / splits * sizeof(float);
  auto kernel = &gemm<64>;
  cudaError_t error = cudaSuccess;
  if (share > 48 * 1024) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, share);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(partial, 255, size_t(splits) * m * n * sizeof(float), stream);
  if (error != cudaSuccess) return error;
  kernel<<<dim3((n + 63) / 64, m, splits), 64, share, stream>>>(a, b, partial, m, n, k);
  reduce<<<(m * n + 127) / 128, 128, 0, stream>>>(partial, c, m * n, splits, char(factor));
  return cudaGetLastError();
}

extern "C" int device_facts(int* facts) {
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  cudaDeviceGetAttribute(&facts[0], cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&facts[1], cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&facts[2], cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&facts[3], &gemm<64>, 64, 32 * 1024);
  facts[4] = std::string(cudaGetErrorString(cudaErrorInvalidValue)) == "cudaErrorInvalidValue";
  return 0;
}

extern "C" int ask_for_the_unknown() {
  int value = 0;
  return cudaDeviceGetAttribute(&value, cudaDevAttrPciBusId, 0);
}
