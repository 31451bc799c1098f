// 20 WMMA double buffer: rung 19 with two stages in shared memory.
//
// Idea      While tile t is multiplied from one stage, tile t+1 is stored to the other, and tile t+2 is on its way into registers: a
//           load has two tiles' time to arrive. Where rung 19 added the time of loading to that of multiplying, this one takes
//           the longer of the two, and needs one barrier a tile instead of two.
// Per CTA   and k-tile of 256x128x16: 12 KiB for 1048576 flops: 85 flop/byte; two stages, 33 KiB of shared memory.
// Limit     The latency of global memory still: two tiles are some 800 clocks of tensor work; then the shared loads of fragments.
//           Deeper rings, longer k-tiles and wgmma are the next ladders.
// Published about 30 % over the single buffer on an RTX 4090.
#pragma once
#include "wmma_tile.cuh"

template <typename S, int BM, int BN, int BK, int WARPS_M, int WARPS_N>
__global__ void __launch_bounds__(WARPS_M* WARPS_N * 32) wmma_double_buffer(const __grid_constant__ GemmArgs args) {
    using In = typename S::In;
    constexpr int THREADS = WARPS_M * WARPS_N * 32, WM = BM / WARPS_M, WN = BN / WARPS_N, MT = WM / WMMA, NT = WN / WMMA;
    using TileA = WmmaTile<BM, BK, S::A_K_MAJOR>;
    using TileB = WmmaTile<BN, BK, S::B_K_MAJOR>;
    constexpr int STAGE = TileA::SIZE + TileB::SIZE;
    static_assert(TileA::SIZE * sizeof(In) % 32 == 0 && STAGE * sizeof(In) % 32 == 0, "fragments begin on 32-byte boundaries");
    extern __shared__ __align__(32) unsigned char smem[];
    In* stages = reinterpret_cast<In*>(smem);  // [2][A tile, B tile]
    const int warp = threadIdx.x / 32, m = warp / WARPS_N * WM, n = warp % WARPS_N * WN;
    const TileIndex tile = tile_of_cta<8>(args);
    const int row0 = tile.m * BM, col0 = tile.n * BN;
    ReaderA<S, BM, BK, THREADS> a(matrix_a<S>(args), row0, args.m, args.lda);
    ReaderB<S, BN, BK, THREADS> b(matrix_b<S>(args), col0, args.n, args.ldb);

    FragmentAcc acc[MT][NT];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j) nvcuda::wmma::fill_fragment(acc[i][j], 0.0f);
    const KTiles<BK> k_tiles(args.k);
    a.template fetch<true>(k_tiles.first);
    b.template fetch<true>(k_tiles.first);
    a.advance(k_tiles.first);
    b.advance(k_tiles.first);
    a.template put_straight<TileA::LD>(stages);
    b.template put_straight<TileB::LD>(stages + TileA::SIZE);
    if (k_tiles.count > 1) {
        a.template fetch<false>();
        b.template fetch<false>();
    }
    __syncthreads();

    int now = 0;  // offset of the stage that is multiplied; the other one is at STAGE - now
    for (int t = 0; t < k_tiles.count; ++t) {
        if (t + 1 < k_tiles.count) {
            // The barrier of the last iteration said that nobody reads this stage any more.
            a.template put_straight<TileA::LD>(stages + STAGE - now);
            b.template put_straight<TileB::LD>(stages + STAGE - now + TileA::SIZE);
        }
        if (t + 2 < k_tiles.count) {
            a.advance(BK);
            b.advance(BK);
            a.template fetch<false>();
            b.template fetch<false>();
        }
        multiply_tiles<S, TileA, TileB, BK>(acc, stages + now, stages + now + TileA::SIZE, m, n);
        __syncthreads();
        now = STAGE - now;
    }
    float* patch = reinterpret_cast<float*>(smem) + warp * PATCH;
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j) store_patch<S>(args, row0 + m + i * WMMA, col0 + n + j * WMMA, acc[i][j], patch);
}
