// 03 block tile: the CTA stages a tile of A and a tile of B in shared memory and multiplies from there.
//
// Idea      Every element of the 32x32 tiles is used by 32 threads. Loaded once by one thread into shared memory, it costs one
//           global access instead of 32.
// Per CTA   and k-tile: (32*32 + 32*32)*4 = 8 KiB from global memory for 2*32*32*32 = 65536 flops: 8 flop/byte.
// Limit     Shared-memory loads: B needs one per multiply-add; A, whose four next k lie side by side, a quarter. The FP32 lanes
//           cannot be more than about a third busy.
// Published 12.8 % of cuBLAS SGEMM on an A6000 (siboehm/SGEMM_CUDA), 8.9 TFLOP/s = 17 % on an H200 at 8192.
#pragma once
#include "common.cuh"

template <typename S, int BM, int BN, int BK>
__global__ void __launch_bounds__(BM* BN, 2048 / (BM * BN)) block_tile(const __grid_constant__ GemmArgs args) {
    static_assert(BM == BK && BN == BK, "one thread loads one element of each tile");
    __shared__ alignas(16) float a_tile[BM][BK];
    __shared__ alignas(16) float b_tile[BK][BN];
    const TileIndex tile = tile_of_cta<8>(args);
    const int ty = threadIdx.x / BN, tx = threadIdx.x % BN;
    const int row = tile.m * BM + ty, col = tile.n * BN + tx;

    // The axis that is contiguous in memory runs along tx, whatever the major; the tile in shared memory is always the same.
    const int a_m = S::A_K_MAJOR ? ty : tx, a_k = S::A_K_MAJOR ? tx : ty;
    const int b_n = S::B_K_MAJOR ? ty : tx, b_k = S::B_K_MAJOR ? tx : ty;
    const auto* a = matrix_a<S>(args) + min(tile.m * BM + a_m, args.m - 1) * a_row_stride<S>(args) + a_k * a_k_stride<S>(args);
    const auto* b = matrix_b<S>(args) + min(tile.n * BN + b_n, args.n - 1) * b_col_stride<S>(args) + b_k * b_k_stride<S>(args);

    const KTiles<BK> k_tiles(args.k);
    float acc = 0.0f;
    for (int t = 0, valid = k_tiles.first; t < k_tiles.count; ++t, valid = BK) {
        a_tile[a_m][a_k] = a_k < valid ? to_float(*a) : 0.0f;
        b_tile[b_k][b_n] = b_k < valid ? to_float(*b) : 0.0f;
        a += valid * a_k_stride<S>(args);
        b += valid * b_k_stride<S>(args);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BK; ++k) acc += a_tile[ty][k] * b_tile[k][tx];
        __syncthreads();
    }
    store_output<S>(args, row, col, acc);
}
