// 01 naive: one thread, one output.
//
// Idea      Thread (x, y) computes D[row = x][col = y] with one dot product of length K read from global memory. Consecutive
//           threads of a warp walk DOWN a column, on purpose: with row-major matrices every lane then touches another row, so each
//           load of A and each store of D is 32 sectors of which 4 bytes each are used.
// Per CTA   32x32 outputs: 2*32*32*K flops; 8 bytes loaded for 2 flops by every thread, so 32*32*K*8 bytes asked of L1.
// Limit     L1 and L2 sectors: 32 sectors per load of A, of which 28 of 32 bytes are wasted; arithmetic intensity 0.25 flop/byte.
// Published 1.3 % of cuBLAS SGEMM on an A6000 (siboehm/SGEMM_CUDA); others' ladders: 0.8 % on an RTX 4090, 243 GFLOP/s on an H100
//           PCIe.
#pragma once
#include "common.cuh"

template <typename S, int BM, int BN>
__global__ void __launch_bounds__(BM* BN) naive(const __grid_constant__ GemmArgs args) {
    const TileIndex tile = tile_of_cta<1>(args);
    const int row = tile.m * BM + threadIdx.x % BM;
    const int col = tile.n * BN + threadIdx.x / BM;
    if (row >= args.m || col >= args.n) return;

    const auto* a = matrix_a<S>(args) + row * a_row_stride<S>(args);
    const auto* b = matrix_b<S>(args) + col * b_col_stride<S>(args);
    float acc = 0.0f;
    for (int k = 0; k < args.k; ++k) acc += to_float(a[k * a_k_stride<S>(args)]) * to_float(b[k * b_k_stride<S>(args)]);
    store_output<S>(args, row, col, acc);
}
