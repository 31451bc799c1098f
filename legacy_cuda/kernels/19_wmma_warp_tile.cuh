// 19 WMMA warp tile: tiles in shared memory, and a grid of fragments for each warp.
//
// Idea      The CTA stages 256x16 of A and 16x128 of B in shared memory. 4x4 warps take 64x32 outputs each: 4 fragments of A and 2 of B
//           feed 8 multiplies, so that a fragment loaded once is used two or four times.
// Per CTA   and k-tile of 256x128x16: (256 + 128)*16*2 = 12 KiB from global memory for 1048576 flops: 85 flop/byte.
// Limit     Nothing overlaps: the tensor cores wait while the next tile comes from global memory, and 16 warps of 64 accumulator
//           registers leave room for one CTA per SM.
// Published 35 to 47 % of PyTorch on an RTX 4090.
#pragma once
#include "wmma_tile.cuh"

template <typename S, int BM, int BN, int BK, int WARPS_M, int WARPS_N>
__global__ void __launch_bounds__(WARPS_M* WARPS_N * 32) wmma_warp_tile(const __grid_constant__ GemmArgs args) {
    using In = typename S::In;
    constexpr int THREADS = WARPS_M * WARPS_N * 32, WM = BM / WARPS_M, WN = BN / WARPS_N, MT = WM / WMMA, NT = WN / WMMA;
    using TileA = WmmaTile<BM, BK, S::A_K_MAJOR>;
    using TileB = WmmaTile<BN, BK, S::B_K_MAJOR>;
    extern __shared__ __align__(32) unsigned char smem[];
    In* a_tile = reinterpret_cast<In*>(smem);
    In* b_tile = a_tile + TileA::SIZE;
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
    for (int t = 0; t < k_tiles.count; ++t) {
        if (t > 0) {
            a.template fetch<false>();
            b.template fetch<false>();
            a.advance(BK);
            b.advance(BK);
        }
        a.template put_straight<TileA::LD>(a_tile);
        b.template put_straight<TileB::LD>(b_tile);
        __syncthreads();
        multiply_tiles<S, TileA, TileB, BK>(acc, a_tile, b_tile, m, n);
        __syncthreads();
    }
    float* patch = reinterpret_cast<float*>(smem) + warp * PATCH;
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j) store_patch<S>(args, row0 + m + i * WMMA, col0 + n + j * WMMA, acc[i][j], patch);
}
