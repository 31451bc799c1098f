// 12 double buffer, shared: two stages, the next tile is on its way while this one is multiplied.
//
// Idea      At the top of an iteration the loads of tile t+1 are issued into registers; they take some 600 clocks to arrive, during
//           which tile t is multiplied; then they are stored to the OTHER stage. One barrier per tile instead of two.
// Per CTA   and k-tile of 128x128x16: 16 KiB from global memory for 524288 flops: 32 flop/byte; two stages, 33 KiB of shared memory.
// Limit     Instruction issue: 64 multiply-adds per 4 shared loads, plus the transposing stores; and registers: 16 more for the tile
//           in flight, with 128 a thread for two CTAs per SM.
// Published 41.3 TFLOP/s = 81 % of cuBLAS SGEMM on an H200 at 8192.
#pragma once
#include "operand.cuh"

template <typename S, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), min_ctas((BM / TM) * (BN / TN), TM* TN))
    double_buffer_shared(const __grid_constant__ GemmArgs args) {
    constexpr int ROWS = BM / TM, COLS = BN / TN, THREADS = ROWS * COLS;
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
    a.template fetch<true>(k_tiles.first);
    b.template fetch<true>(k_tiles.first);
    a.advance(k_tiles.first);
    b.advance(k_tiles.first);
    a.template put<LayoutA>(stages);
    b.template put<LayoutB>(stages + STAGE_A);
    __syncthreads();

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
            float a_frag[TM], b_frag[TN];
            load_groups<LayoutA, TM, ROWS * 4>(a_frag, stages + now, k, ty);
            load_groups<LayoutB, TN, COLS * 4>(b_frag, stages + now + STAGE_A, k, tx);
            outer_product(acc, a_frag, b_frag);
        }
        if (more) {
            // The barrier of the last iteration said that nobody reads this stage any more.
            now = STAGE - now;
            a.template put<LayoutA>(stages + now);
            b.template put<LayoutB>(stages + now + STAGE_A);
            __syncthreads();
        }
    }
    store_groups<S, ROWS * 4, COLS * 4>(args, row0 + ty, col0 + tx, acc);
}
