// 14 async copy: cp.async moves global memory into shared memory without passing through registers.
//
// Idea      The copy of tile t+1 is one instruction per 16 bytes: no register holds the data, nobody waits for it before
//           wait_group, and no store follows. But cp.async cannot transpose 16 bytes: row-major A stays m by m in shared memory. A
//           16-byte load of a row then brings FOUR k's of one row, which costs as many loads per multiply-add as before.
// Per CTA   and k-tile of 128x128x16: 16 KiB from global memory for 524288 flops: 32 flop/byte; two stages, 36 KiB of shared memory;
//           4 copies a thread instead of 4 loads and 10 stores.
// Limit     Instruction issue: 64 multiply-adds per 4 shared loads; 24 more registers for the fragments of A (4 k's at once).
// Published 42.8 TFLOP/s = 83 % of cuBLAS SGEMM on an H200 at 8192.
#pragma once
#include "async_fragment.cuh"

template <typename S, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), min_ctas((BM / TM) * (BN / TN), TM* TN))
    async_copy(const __grid_constant__ GemmArgs args) {
    constexpr int ROWS = BM / TM, COLS = BN / TN, THREADS = ROWS * COLS;
    using TileA = AsyncTile<BM, BK, S::A_K_MAJOR>;
    using TileB = AsyncTile<BN, BK, S::B_K_MAJOR>;
    constexpr int STAGE = TileA::SIZE + TileB::SIZE;
    extern __shared__ __align__(16) unsigned char smem[];
    float* stages = reinterpret_cast<float*>(smem);  // [2][A tile, B tile]
    const TileIndex tile = tile_of_cta<8>(args);
    const int row0 = tile.m * BM, col0 = tile.n * BN;
    const Place place = thread_place<ROWS, COLS>();
    ReaderA<S, BM, BK, THREADS> a(matrix_a<S>(args), row0, args.m, args.lda);
    ReaderB<S, BN, BK, THREADS> b(matrix_b<S>(args), col0, args.n, args.ldb);

    const KTiles<BK> k_tiles(args.k);
    float acc[TM][TN] = {};
    a.template copy_async<TileA::LD, true>(stages, k_tiles.first);
    b.template copy_async<TileB::LD, true>(stages + TileA::SIZE, k_tiles.first);
    cp_async_commit();
    a.advance(k_tiles.first);
    b.advance(k_tiles.first);

    int now = 0;  // offset of the stage that is multiplied; the other one is at STAGE - now
    for (int t = 0; t < k_tiles.count; ++t) {
        cp_async_wait<0>();
        __syncthreads();  // this tile is there for everyone, and everyone is done with the other stage
        if (t + 1 < k_tiles.count) {
            a.template copy_async<TileA::LD, false>(stages + (STAGE - now));
            b.template copy_async<TileB::LD, false>(stages + (STAGE - now) + TileA::SIZE);
            a.advance(BK);
            b.advance(BK);
        }
        cp_async_commit();
#pragma unroll
        for (int k = 0; k < BK; k += 4) {
            float a_frag[4][TM], b_frag[4][TN];
            TileA::template load<ROWS>(a_frag, stages + now, place.m, k);
            TileB::template load<COLS>(b_frag, stages + now + TileA::SIZE, place.n, k);
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) outer_product(acc, a_frag[kk], b_frag[kk]);
        }
        now = STAGE - now;
    }
    store_fragments<S, TileA, TileB, ROWS, COLS>(args, row0, col0, place, acc);
}
