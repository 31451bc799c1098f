// 15 warp tile: between the CTA tile and the thread tile, a tile for each warp.
//
// Idea      A warp is what issues, and what shared memory serves at once. Give each warp a compact 64x64 piece of the CTA tile, cut it
//           into WNITER subtiles of 16 columns, and the lanes of a warp read few lines of each operand: per k 64 + 64 words for
//           64*64 multiply-adds. Each thread gets 8 rows x (4 subtiles x 4 columns) = 128 outputs, twice those of rung 12.
// Per CTA   and k-tile of 128x128x16: 16 KiB for 524288 flops: 32 flop/byte from global memory; 128 multiply-adds per 6 shared loads
//           of 16 bytes a thread. 128 threads, two CTAs per SM with 255 registers each; two stages as in rung 12.
// Limit     Instruction issue: at 128 per 6 the FP32 pipe can be 95 % busy; only 8 warps per SM to hide latency, all of it by the
//           order of instructions.
// Published 93.7 % of cuBLAS SGEMM on an A6000 (siboehm/SGEMM_CUDA), 54 % on an RTX 4090.
#pragma once
#include "warp_tile_shape.cuh"

template <typename S, int BM, int BN, int BK, int WM, int WN, int WNITER, int TM, int TN>
__device__ __forceinline__ void warp_tile_body(const GemmArgs& args) {
    using Shape = WarpTileShape<BM, BN, WM, WN, WNITER, TM, TN>;
    using LayoutA = Padded<BM>;
    using LayoutB = Padded<BN>;
    constexpr int STAGE_A = BK * LayoutA::SIZE_PER_K, STAGE = STAGE_A + BK * LayoutB::SIZE_PER_K;
    extern __shared__ __align__(16) unsigned char smem[];
    float* stages = reinterpret_cast<float*>(smem);  // [2][A tile, B tile]
    const TileIndex tile = tile_of_cta<8>(args);
    const int row0 = tile.m * BM, col0 = tile.n * BN;
    const Place warp = Shape::warp_origin(), lane = Shape::lane();
    ReaderA<S, BM, BK, Shape::THREADS> a(matrix_a<S>(args), row0, args.m, args.lda);
    ReaderB<S, BN, BK, Shape::THREADS> b(matrix_b<S>(args), col0, args.n, args.ldb);

    const KTiles<BK> k_tiles(args.k);
    float acc[Shape::ROWS][Shape::COLS] = {};
    a.template fetch<true>(k_tiles.first);
    b.template fetch<true>(k_tiles.first);
    a.advance(k_tiles.first);
    b.advance(k_tiles.first);
    a.template put<LayoutA>(stages);
    b.template put<LayoutB>(stages + STAGE_A);
    __syncthreads();

    // Rows of a thread: groups of four, LANES_M * 4 apart; so are the columns. A subtile of TM = 8 rows is two groups of it.
    const float* a_part = stages + warp.m + lane.m * 4;
    const float* b_part = stages + STAGE_A + warp.n + lane.n * 4;
    int now = 0, next = STAGE;
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
            float a_frag[Shape::ROWS], b_frag[Shape::COLS];
            load_groups<LayoutA, Shape::ROWS, Shape::LANES_M * 4>(a_frag, a_part + now, k, 0);
            load_groups<LayoutB, Shape::COLS, Shape::LANES_N * 4>(b_frag, b_part + now, k, 0);
            outer_product(acc, a_frag, b_frag);
        }
        if (more) {
            a.template put<LayoutA>(stages + next);
            b.template put<LayoutB>(stages + next + STAGE_A);
            __syncthreads();
            const int was = now;
            now = next;
            next = was;
        }
    }
    store_groups<S, Shape::LANES_M * 4, Shape::LANES_N * 4>(args, row0 + warp.m + lane.m * 4, col0 + warp.n + lane.n * 4, acc);
}

template <typename S, int BM, int BN, int BK, int WM, int WN, int WNITER, int TM, int TN>
__global__ void __launch_bounds__(WarpTileShape<BM, BN, WM, WN, WNITER, TM, TN>::THREADS,
                                  min_ctas(WarpTileShape<BM, BN, WM, WN, WNITER, TM, TN>::THREADS, WM* WN / 32))
    warp_tile(const __grid_constant__ GemmArgs args) {
    warp_tile_body<S, BM, BN, BK, WM, WN, WNITER, TM, TN>(args);
}
