// 11 swizzled: bank-conflict free without spending a word.
//
// Idea      Instead of longer lines, the words of each line are permuted by its k: address = k * 128 + (x ^ (k % 8 * 4)). XOR keeps
//           groups of four words whole, so that fragments are still 16-byte loads, and sends neighbouring k's to different banks.
// Per CTA   and k-tile of 128x128x8: as rung 10, with lines of 128 words: tiles stay powers of two, as TMA and ldmatrix like them.
// Limit     As rung 10. The XOR itself is done once, before the loop: k is a compile-time constant there. Yet it takes a base address
//           for each of the 8 patterns, and measured on an H200 it is 10 % slower than padding.
// Published tried elsewhere, no figure kept.
#pragma once
#include "operand.cuh"

template <typename S, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), min_ctas((BM / TM) * (BN / TN), TM* TN))
    swizzled(const __grid_constant__ GemmArgs args) {
    constexpr int ROWS = BM / TM, COLS = BN / TN, THREADS = ROWS * COLS;
    using LayoutA = Swizzled<BM>;
    using LayoutB = Swizzled<BN>;
    __shared__ alignas(16) float a_tile[BK * LayoutA::SIZE_PER_K];
    __shared__ alignas(16) float b_tile[BK * LayoutB::SIZE_PER_K];
    const TileIndex tile = tile_of_cta<8>(args);
    const int row0 = tile.m * BM, col0 = tile.n * BN;
    const Place place = thread_place<ROWS, COLS>();
    const int ty = place.m * 4, tx = place.n * 4;
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
            load_groups<LayoutA, TM, ROWS * 4>(a_frag, a_tile, k, ty);
            load_groups<LayoutB, TN, COLS * 4>(b_frag, b_tile, k, tx);
            outer_product(acc, a_frag, b_frag);
        }
        __syncthreads();
    }
    store_groups<S, ROWS * 4, COLS * 4>(args, row0 + ty, col0 + tx, acc);
}
