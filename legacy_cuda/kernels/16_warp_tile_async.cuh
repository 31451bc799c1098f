// 16 warp tile, async: rung 15's hierarchy fed by rung 14's copies, through a ring of STAGES tiles. The top of the ladder: the
// autotuner searches here.
//
// Idea      With cp.async no register and no instruction is spent on data in flight, so that the ring can be three or four tiles deep
//           and a thread can keep 128 accumulators and its fragments without spilling. One barrier per tile: it says both that
//           tile t has arrived and that the slot of tile t - 1 is free for tile t + STAGES - 1.
// Per CTA   and k-tile of 64x128x8: 6 KiB from global memory for 131072 flops: 21 flop/byte; 128 multiply-adds per 6 shared loads of
//           16 bytes. Two warps of 32x128 outputs, four such CTAs per SM, which never wait for one another.
// Limit     Instruction issue, 91 % of it multiply-adds; then power: fp32 multiply-adds at this rate draw what the card may draw.
// Published best of a ladder after autotuning: 84.8 % (thread tile) and 93.7 % (warp tile) of cuBLAS SGEMM on an A6000
//           (siboehm/SGEMM_CUDA), 45.4 TFLOP/s = 89 % on an H200 at 8192 (thread tile 64x256x16, 8x8).
#pragma once
#include "warp_tile_shape.cuh"

template <typename S, int BM, int BN, int BK, int WM, int WN, int WNITER, int TM, int TN, int STAGES, int GROUP>
__global__ void __launch_bounds__(WarpTileShape<BM, BN, WM, WN, WNITER, TM, TN>::THREADS,
                                  min_ctas(WarpTileShape<BM, BN, WM, WN, WNITER, TM, TN>::THREADS, WM* WN / 32))
    warp_tile_async(const __grid_constant__ GemmArgs args) {
    using Shape = WarpTileShape<BM, BN, WM, WN, WNITER, TM, TN>;
    using LayoutA = Padded<BM>;
    using LayoutB = Padded<BN>;
    constexpr int STAGE_A = BK * LayoutA::SIZE_PER_K, STAGE = STAGE_A + BK * LayoutB::SIZE_PER_K;
    extern __shared__ __align__(16) unsigned char smem[];
    float* stages = reinterpret_cast<float*>(smem);  // [STAGES][A tile, B tile]
    const TileIndex tile = tile_of_cta<GROUP>(args);
    const int row0 = tile.m * BM, col0 = tile.n * BN;
    const Place warp = Shape::warp_origin(), lane = Shape::lane();
    AsyncReaderA<S, BM, BK, Shape::THREADS> a(matrix_a<S>(args), row0, args.m, args.lda);
    AsyncReaderB<S, BN, BK, Shape::THREADS> b(matrix_b<S>(args), col0, args.n, args.ldb);

    const KTiles<BK> k_tiles(args.k);
    float acc[Shape::ROWS][Shape::COLS] = {};
    a.template copy_async<LayoutA, true>(stages, k_tiles.first);
    b.template copy_async<LayoutB, true>(stages + STAGE_A, k_tiles.first);
    cp_async_commit();
    a.advance(k_tiles.first);
    b.advance(k_tiles.first);
#pragma unroll
    for (int s = 1; s < STAGES - 1; ++s) {
        if (s < k_tiles.count) {
            a.template copy_async<LayoutA, false>(stages + s * STAGE);
            b.template copy_async<LayoutB, false>(stages + s * STAGE + STAGE_A);
            a.advance(BK);
            b.advance(BK);
        }
        cp_async_commit();  // an empty group keeps the count of groups equal to the count of tiles
    }

    const float* a_part = stages + warp.m + lane.m * 4;
    const float* b_part = stages + STAGE_A + warp.n + lane.n * 4;
    int read = 0, write = (STAGES - 1) * STAGE;
    for (int t = 0; t < k_tiles.count; ++t) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (t + STAGES - 1 < k_tiles.count) {
            a.template copy_async<LayoutA, false>(stages + write);
            b.template copy_async<LayoutB, false>(stages + write + STAGE_A);
            a.advance(BK);
            b.advance(BK);
        }
        cp_async_commit();
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a_frag[Shape::ROWS], b_frag[Shape::COLS];
            load_groups<LayoutA, Shape::ROWS, Shape::LANES_M * 4>(a_frag, a_part + read, k, 0);
            load_groups<LayoutB, Shape::COLS, Shape::LANES_N * 4>(b_frag, b_part + read, k, 0);
            outer_product(acc, a_frag, b_frag);
        }
        read = read == (STAGES - 1) * STAGE ? 0 : read + STAGE;
        write = write == (STAGES - 1) * STAGE ? 0 : write + STAGE;
    }
    store_groups<S, Shape::LANES_M * 4, Shape::LANES_N * 4>(args, row0 + warp.m + lane.m * 4, col0 + warp.n + lane.n * 4, acc);
}
