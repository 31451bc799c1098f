// 10 padded: bank-conflict free by four more words a line.
//
// Idea      Shared memory has 32 banks of 4 bytes. (1) A's tile has lines of 128 words, so a step of k stays in the same bank and the
//           transposing store of two k groups collides; lines of 132 words move every k by four banks. (2) B's fragment of 8
//           neighbouring columns puts the lanes 32 bytes apart; two groups of 4 columns, half a tile apart, put them side by side.
// Per CTA   and k-tile of 128x128x8: 32 flop/byte; 128 bytes of padding per k-tile of A. No conflicts are left but for the scalar
//           path of operands whose alignment forbids vectors.
// Limit     Nothing overlaps inside a CTA: load, wait, store, wait, multiply. Other CTAs of the SM fill in.
// Published tried elsewhere, no figure kept.
#pragma once
#include "operand.cuh"

template <typename S, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), min_ctas((BM / TM) * (BN / TN), TM* TN))
    padded(const __grid_constant__ GemmArgs args) {
    constexpr int ROWS = BM / TM, COLS = BN / TN, THREADS = ROWS * COLS;
    using LayoutA = Padded<BM>;
    using LayoutB = Padded<BN>;
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
