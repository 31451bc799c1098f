// 06 thread tile 1-D: each thread computes TM outputs of one column.
//
// Idea      B's value, read once from shared memory into a register, serves TM rows. The rows of A are the same for a whole warp:
//           one broadcast per row, and four k at a time where they lie side by side.
// Per CTA   and k-tile of 64x64x8: (64*8 + 8*64)*4 = 4 KiB for 2*64*64*8 = 65536 flops: 16 flop/byte from global memory. Shared
//           memory: TM + 1 words for TM multiply-adds instead of 2 TM.
// Limit     Shared-memory loads still (more than one word a multiply-add), and scalar global loads.
// Published 36.5 % of cuBLAS SGEMM on an A6000 (siboehm/SGEMM_CUDA), 22 % on an RTX 4090.
#pragma once
#include "common.cuh"

template <typename S, int BM, int BN, int BK, int TM>
__global__ void __launch_bounds__(BM* BN / TM) thread_tile_1d(const __grid_constant__ GemmArgs args) {
    constexpr int THREADS = BM * BN / TM;
    constexpr int A_PASSES = BM * BK / THREADS, B_PASSES = BN * BK / THREADS;
    static_assert(BM * BK % THREADS == 0 && BN * BK % THREADS == 0, "the threads do not tile the operands");
    __shared__ alignas(16) float a_tile[BM][BK];
    __shared__ alignas(16) float b_tile[BK][BN];
    const TileIndex tile = tile_of_cta<8>(args);
    const int tid = threadIdx.x;
    const int row0 = tile.m * BM, col0 = tile.n * BN;
    const int ty = tid / BN * TM, tx = tid % BN;
    const auto* a = matrix_a<S>(args);
    const auto* b = matrix_b<S>(args);

    const KTiles<BK> k_tiles(args.k);
    float acc[TM] = {};
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
            const float b_value = b_tile[k][tx];
#pragma unroll
            for (int i = 0; i < TM; ++i) acc[i] += a_tile[ty + i][k] * b_value;
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < TM; ++i) store_output<S>(args, row0 + ty + i, col0 + tx, acc[i]);
}
