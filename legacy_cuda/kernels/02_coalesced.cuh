// 02 coalesced: the same dot product, but consecutive threads walk ALONG a row of D.
//
// Idea      All lanes of a warp share a row: A[row][k] is one address, broadcast to the warp; B[k][col .. col + 31] and D are one
//           128-byte line. Four sectors where rung 01 needed thirty-two, and not one line of arithmetic has changed.
// Per CTA   32x32 outputs: 2*32*32*K flops; per warp and k one broadcast (4 bytes) and one line (128 bytes) for 64 flops.
// Limit     Load instructions: two loads per multiply-add keep the LSU pipe busy while the FP32 lanes wait; 0.25 flop/byte at L1.
// Published 8.5 % of cuBLAS SGEMM on an A6000 (siboehm/SGEMM_CUDA), 6 % on an RTX 4090, 3171 GFLOP/s on an H100 PCIe,
//           4.1 TFLOP/s = 8 % on an H200 at 8192.
#pragma once
#include "common.cuh"

template <typename S, int BM, int BN>
__global__ void __launch_bounds__(BM* BN, 2048 / (BM * BN)) coalesced(const __grid_constant__ GemmArgs args) {
    const TileIndex tile = tile_of_cta<1>(args);
    const int row = tile.m * BM + threadIdx.x / BN;
    const int col = tile.n * BN + threadIdx.x % BN;
    if (row >= args.m || col >= args.n) return;

    const auto* a = matrix_a<S>(args) + row * a_row_stride<S>(args);
    const auto* b = matrix_b<S>(args) + col * b_col_stride<S>(args);
    const long long a_step = a_k_stride<S>(args), b_step = b_k_stride<S>(args);
    float acc = 0.0f;
#pragma unroll 8
    for (int k = 0; k < args.k; ++k) {
        acc += to_float(*a) * to_float(*b);
        a += a_step;
        b += b_step;
    }
    store_output<S>(args, row, col, acc);
}
