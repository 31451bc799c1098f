// 14 async copy: cp.async moves global memory into shared memory without passing through registers.
//
// Idea      One instruction starts the copy of tile t+1 into the other stage: no register holds the data, nobody waits for it before
//           wait_group, and no store follows. cp.async moves 4, 8 or 16 bytes as they are, so it cannot transpose a run of four:
//           row-major A goes 4 bytes at a time, eight lanes to a 32-byte sector, each element to its own line.
// Per CTA   and k-tile of 128x128x16: 16 KiB from global memory for 524288 flops: 32 flop/byte; two stages, 33 KiB of shared memory;
//           10 copies a thread instead of 4 loads and 10 stores, and 16 registers less.
// Limit     Instruction issue: 64 multiply-adds per 4 shared loads.
// Published 42.8 TFLOP/s = 83 % of cuBLAS SGEMM on an H200 at 8192.
#pragma once
#include "operand.cuh"

template <typename S, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), min_ctas((BM / TM) * (BN / TN), TM* TN))
    async_copy(const __grid_constant__ GemmArgs args) {
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
    AsyncReaderA<S, BM, BK, THREADS> a(matrix_a<S>(args), row0, args.m, args.lda);
    AsyncReaderB<S, BN, BK, THREADS> b(matrix_b<S>(args), col0, args.n, args.ldb);

    const KTiles<BK> k_tiles(args.k);
    float acc[TM][TN] = {};
    a.template copy_async<LayoutA, true>(stages, k_tiles.first);
    b.template copy_async<LayoutB, true>(stages + STAGE_A, k_tiles.first);
    cp_async_commit();
    a.advance(k_tiles.first);
    b.advance(k_tiles.first);

    int now = 0;  // offset of the stage that is multiplied; the other one is at STAGE - now
    for (int t = 0; t < k_tiles.count; ++t) {
        cp_async_wait<0>();
        __syncthreads();  // this tile is there for everyone, and everyone is done with the other stage
        if (t + 1 < k_tiles.count) {
            a.template copy_async<LayoutA, false>(stages + (STAGE - now));
            b.template copy_async<LayoutB, false>(stages + (STAGE - now) + STAGE_A);
            a.advance(BK);
            b.advance(BK);
        }
        cp_async_commit();
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a_frag[TM], b_frag[TN];
            load_groups<LayoutA, TM, ROWS * 4>(a_frag, stages + now, k, ty);
            load_groups<LayoutB, TN, COLS * 4>(b_frag, stages + now + STAGE_A, k, tx);
            outer_product(acc, a_frag, b_frag);
        }
        now = STAGE - now;
    }
    store_groups<S, ROWS * 4, COLS * 4>(args, row0 + ty, col0 + tx, acc);
}
