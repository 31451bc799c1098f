// 07 thread tile 2-D: each thread computes TM x TN outputs as a sum of outer products.
//
// Idea      Per k a thread reads TM values of A and TN of B into registers and multiplies each with each: 64 multiply-adds for 16
//           words at 8x8. From here on registers, not shared memory, hold the reuse.
// Per CTA   and k-tile of 128x128x8: (128*8 + 8*128)*4 = 8 KiB for 2*128*128*8 = 262144 flops: 32 flop/byte from global memory, and
//           8 flops per word of shared memory.
// Limit     Scalar global loads with their address arithmetic, scalar stores to shared memory, bank conflicts of both fragments (the
//           rows of A are 8 words apart, a lane's columns of B too), and no overlap of loads with arithmetic within a CTA.
// Published 68.7 % of cuBLAS SGEMM on an A6000 (siboehm/SGEMM_CUDA), 37 % on an RTX 4090, 18.6 TFLOP/s = 36 % on an H200 at 8192.
#pragma once
#include "common.cuh"

template <typename S, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), min_ctas((BM / TM) * (BN / TN), TM* TN))
    thread_tile_2d(const __grid_constant__ GemmArgs args) {
    constexpr int COLS = BN / TN, THREADS = (BM / TM) * COLS;
    constexpr int A_PASSES = BM * BK / THREADS, B_PASSES = BN * BK / THREADS;
    static_assert(BM * BK % THREADS == 0 && BN * BK % THREADS == 0, "the threads do not tile the operands");
    __shared__ alignas(16) float a_tile[BM][BK];
    __shared__ alignas(16) float b_tile[BK][BN];
    const TileIndex tile = tile_of_cta<8>(args);
    const int tid = threadIdx.x;
    const int row0 = tile.m * BM, col0 = tile.n * BN;
    const int ty = tid / COLS * TM, tx = tid % COLS * TN;
    const auto* a = matrix_a<S>(args);
    const auto* b = matrix_b<S>(args);

    const KTiles<BK> k_tiles(args.k);
    float acc[TM][TN] = {};
    for (int t = 0, valid = k_tiles.first; t < k_tiles.count; ++t, valid = BK) {
#pragma unroll
        for (int p = 0; p < A_PASSES; ++p) {
            const int i = tid + p * THREADS;
            const int m = S::A_K_MAJOR ? i / BK : i % BM, k = S::A_K_MAJOR ? i % BK : i / BM;
            const long long offset = min(row0 + m, args.m - 1) * a_row_stride<S>(args) + k * a_k_stride<S>(args);
            a_tile[m][k] = k < valid ? to_float(a[offset]) : 0.0f;
        }
#pragma unroll
        for (int p = 0; p < B_PASSES; ++p) {
            const int i = tid + p * THREADS;
            const int n = S::B_K_MAJOR ? i / BK : i % BN, k = S::B_K_MAJOR ? i % BK : i / BN;
            const long long offset = min(col0 + n, args.n - 1) * b_col_stride<S>(args) + k * b_k_stride<S>(args);
            b_tile[k][n] = k < valid ? to_float(b[offset]) : 0.0f;
        }
        a += valid * a_k_stride<S>(args);
        b += valid * b_k_stride<S>(args);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a_frag[TM], b_frag[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) a_frag[i] = a_tile[ty + i][k];
#pragma unroll
            for (int j = 0; j < TN; ++j) b_frag[j] = b_tile[k][tx + j];
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) acc[i][j] += a_frag[i] * b_frag[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) store_output<S>(args, row0 + ty + i, col0 + tx + j, acc[i][j]);
}
