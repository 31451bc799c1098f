// 13 double buffer, shared + register: fragments are prefetched as well.
//
// Idea      A shared load takes about 30 clocks. While k is multiplied, the fragments of k+1 are loaded into a second set of
//           registers. At the end of a tile the stores and the barrier come before its last k, so that the first fragments of the
//           next tile are prefetched, too: the multiply-adds never wait for a shared load.
// Per CTA   and k-tile of 128x128x16: as rung 12; 16 registers more a thread for the second set.
// Limit     The register file: two CTAs per SM leave 128 registers a thread, and the second set is some too many (compilers spill a
//           few). They also hoist loads within a tile by themselves, so that all there is to win is the wait at its boundary:
//           measured on an H200, this rung is 5 % slower than rung 12. More registers a thread (rungs 15 and 16) pay better.
// Published 41.5 TFLOP/s = 81 % of cuBLAS SGEMM on an H200 at 8192.
#pragma once
#include "operand.cuh"

template <typename S, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), min_ctas((BM / TM) * (BN / TN), TM* TN))
    double_buffer_registers(const __grid_constant__ GemmArgs args) {
    constexpr int ROWS = BM / TM, COLS = BN / TN, THREADS = ROWS * COLS;
    static_assert(BK % 2 == 0, "the two fragment sets take turns");
    using LayoutA = Padded<BM>;
    using LayoutB = Padded<BN>;
    constexpr int STAGE_A = BK * LayoutA::SIZE_PER_K, STAGE = STAGE_A + BK * LayoutB::SIZE_PER_K;
    extern __shared__ __align__(16) unsigned char smem[];
    float* stages = reinterpret_cast<float*>(smem);  // [2][A tile, B tile]
    const TileIndex tile = tile_of_cta<8>(args);
    const int row0 = tile.m * BM, col0 = tile.n * BN;
    const Place place = thread_place<ROWS, COLS>();
    const int ty = place.m * 4, tx = place.n * 4;
    ReaderA<S, BM, BK, THREADS> a(matrix_a<S>(args), row0, args.m, args.lda);
    ReaderB<S, BN, BK, THREADS> b(matrix_b<S>(args), col0, args.n, args.ldb);

    const KTiles<BK> k_tiles(args.k);
    float acc[TM][TN] = {};
    float a_frag[2][TM], b_frag[2][TN];
    a.template fetch<true>(k_tiles.first);
    b.template fetch<true>(k_tiles.first);
    a.advance(k_tiles.first);
    b.advance(k_tiles.first);
    a.template put<LayoutA>(stages);
    b.template put<LayoutB>(stages + STAGE_A);
    __syncthreads();
    load_groups<LayoutA, TM, ROWS * 4>(a_frag[0], stages, 0, ty);
    load_groups<LayoutB, TN, COLS * 4>(b_frag[0], stages + STAGE_A, 0, tx);

    int now = 0;  // offset of the stage that is multiplied; the other one is at STAGE - now
    for (int t = 0; t < k_tiles.count; ++t) {
        const bool more = t + 1 < k_tiles.count;
        if (more) {
            a.template fetch<false>();
            b.template fetch<false>();
            a.advance(BK);
            b.advance(BK);
        }
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            if (k == BK - 1 && more) {
                now = STAGE - now;
                a.template put<LayoutA>(stages + now);
                b.template put<LayoutB>(stages + now + STAGE_A);
                __syncthreads();
            }
            if (k < BK - 1 || more) {
                load_groups<LayoutA, TM, ROWS * 4>(a_frag[(k + 1) % 2], stages + now, (k + 1) % BK, ty);
                load_groups<LayoutB, TN, COLS * 4>(b_frag[(k + 1) % 2], stages + now + STAGE_A, (k + 1) % BK, tx);
            }
            outer_product(acc, a_frag[k % 2], b_frag[k % 2]);
        }
    }
    store_groups<S, ROWS * 4, COLS * 4>(args, row0 + ty, col0 + tx, acc);
}
