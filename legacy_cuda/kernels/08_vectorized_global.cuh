// 08 vectorized global: 16-byte global loads, and A transposed on its way into shared memory.
//
// Idea      One LDG.128 moves four elements with one address: a quarter of the load instructions and of the index arithmetic.
//           A's tile is stored k by k, so that a thread's TM values of one k lie side by side like B's TN already do.
// Per CTA   and k-tile of 128x128x8: as rung 07, 32 flop/byte; 2 global loads a thread instead of 8.
// Limit     The transposing stores: 16 rows times 2 groups of k per warp fall on 16 banks, two passes each; fragment loads with lanes
//           eight words apart, two passes; no overlap of global loads with arithmetic inside a CTA.
// Published 32.5 TFLOP/s = 63 % of cuBLAS SGEMM on an H200 at 8192.
#pragma once
#include "operand.cuh"

template <typename S, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), min_ctas((BM / TM) * (BN / TN), TM* TN))
    vectorized_global(const __grid_constant__ GemmArgs args) {
    constexpr int ROWS = BM / TM, COLS = BN / TN, THREADS = ROWS * COLS;
    using LayoutA = Plain<BM>;
    using LayoutB = Plain<BN>;
    __shared__ alignas(16) float a_tile[BK * LayoutA::SIZE_PER_K];
    __shared__ alignas(16) float b_tile[BK * LayoutB::SIZE_PER_K];
    const TileIndex tile = tile_of_cta<8>(args);
    const int row0 = tile.m * BM, col0 = tile.n * BN;
    const int ty = threadIdx.x / COLS * TM, tx = threadIdx.x % COLS * TN;
    ReaderA<S, BM, BK, THREADS> a(matrix_a<S>(args), row0, args.m, args.lda);
    ReaderB<S, BN, BK, THREADS> b(matrix_b<S>(args), col0, args.n, args.ldb);

    const KTiles<BK> k_tiles(args.k);
    float acc[TM][TN] = {};
    a.template fetch<true>(k_tiles.first);
    b.template fetch<true>(k_tiles.first);
    a.advance(k_tiles.first);
    b.advance(k_tiles.first);
    for (int t = 0; t < k_tiles.count; ++t) {
        if (t > 0) {
            a.template fetch<false>();
            b.template fetch<false>();
            a.advance(BK);
            b.advance(BK);
        }
        a.template put<LayoutA>(a_tile);
        b.template put<LayoutB>(b_tile);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a_frag[TM], b_frag[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) a_frag[i] = a_tile[LayoutA::at(k, ty + i)];
#pragma unroll
            for (int j = 0; j < TN; ++j) b_frag[j] = b_tile[LayoutB::at(k, tx + j)];
            outer_product(acc, a_frag, b_frag);
        }
        __syncthreads();
    }
    store_groups<S, 4, 4>(args, row0 + ty, col0 + tx, acc);
}
