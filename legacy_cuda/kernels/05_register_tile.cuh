// 05 register tile: each thread computes 2x2 outputs straight from global memory.
//
// Idea      Two values of A and two of B give four multiply-adds, so a load is used twice: reuse in registers, the fastest memory
//           there is, before any shared memory. Rows and columns of a thread are a CTA apart, so that the warp stays coalesced.
// Per CTA   32x32 outputs by 16x16 threads: 4 loads (16 bytes) for 8 flops a thread: 0.5 flop/byte at L1, twice rung 02.
// Limit     Still the load pipe: one load per multiply-add; larger register tiles help until the registers run out.
// Published taught elsewhere without a figure.
#pragma once
#include "common.cuh"

template <typename S, int BM, int BN, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN)) register_tile(const __grid_constant__ GemmArgs args) {
    constexpr int ROWS = BM / TM, COLS = BN / TN;  // threads, and distance between the rows and columns of one thread
    const TileIndex tile = tile_of_cta<8>(args);
    const int row = tile.m * BM + threadIdx.x / COLS, col = tile.n * BN + threadIdx.x % COLS;
    using In = typename S::In;
    const In* a[TM];
    const In* b[TN];
#pragma unroll
    for (int i = 0; i < TM; ++i) a[i] = matrix_a<S>(args) + min(row + i * ROWS, args.m - 1) * a_row_stride<S>(args);
#pragma unroll
    for (int j = 0; j < TN; ++j) b[j] = matrix_b<S>(args) + min(col + j * COLS, args.n - 1) * b_col_stride<S>(args);

    float acc[TM][TN] = {};
#pragma unroll 4
    for (int k = 0; k < args.k; ++k) {
        float a_frag[TM], b_frag[TN];
#pragma unroll
        for (int i = 0; i < TM; ++i) a_frag[i] = to_float(a[i][k * a_k_stride<S>(args)]);
#pragma unroll
        for (int j = 0; j < TN; ++j) b_frag[j] = to_float(b[j][k * b_k_stride<S>(args)]);
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) acc[i][j] += a_frag[i] * b_frag[j];
    }
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) store_output<S>(args, row + i * ROWS, col + j * COLS, acc[i][j]);
}
