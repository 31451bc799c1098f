// 09 vectorized both: the fragments come from shared memory 16 bytes at a time, too.
//
// Idea      TM = 8 values of A are two LDS.128 instead of eight LDS.32: 4 shared loads for 64 multiply-adds. (Compilers often see this
//           by themselves; here it is said.)
// Per CTA   and k-tile of 128x128x8: 32 flop/byte from global memory as before; a quarter of the shared-memory instructions.
// Limit     Bank conflicts, now the largest part: A's transposing stores (two passes), B's fragments, 32 bytes a lane, so that a
//           quarter warp reads 8 times 16 bytes out of 256 (two passes).
// Published 78.4 % of cuBLAS SGEMM on an A6000 (siboehm/SGEMM_CUDA), 46 % on an RTX 4090, 33.9 TFLOP/s = 66 % on an H200 at 8192.
#pragma once
#include "operand.cuh"

template <typename S, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), min_ctas((BM / TM) * (BN / TN), TM* TN))
    vectorized_both(const __grid_constant__ GemmArgs args) {
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
            load_groups<LayoutA, TM, 4>(a_frag, a_tile, k, ty);
            load_groups<LayoutB, TN, 4>(b_frag, b_tile, k, tx);
            outer_product(acc, a_frag, b_frag);
        }
        __syncthreads();
    }
    store_groups<S, 4, 4>(args, row0 + ty, col0 + tx, acc);
}
