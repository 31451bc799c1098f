// 04 warp shuffle: the registers of a warp are its shared memory.
//
// Idea      One warp computes a 32x32 tile with no shared memory and no barrier. It loads a 32x8 piece of A and an 8x32 piece of
//           B, one element a lane and register, coalesced. Then, k by k, the lanes that hold a column of A and a row of B send
//           them round with __shfl_sync, and each lane adds the outer product of 8 rows and 4 columns to its 8x4 accumulators.
// Per warp  and 8 k: (32*8 + 8*32)*4 = 2 KiB from L1 for 2*32*32*8 = 16384 flops: 8 flop/byte.
// Limit     Shuffles: 8 + 4 of them feed 32 multiply-adds. An SM shuffles one warp a clock, 12 clocks, and multiplies four warps
//           a clock, 8 clocks: the FP32 lanes are busy 2/3 of the time at best, and waiting for global memory on top of it.
// Published taught elsewhere without a figure.
#pragma once
#include "common.cuh"

template <typename S, int WARPS>
__global__ void __launch_bounds__(WARPS * 32) warp_shuffle(const __grid_constant__ GemmArgs args) {
    constexpr int TILE = 32, KC = 8, TM = 8, TN = 4;
    constexpr unsigned ALL = 0xffffffffu;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const TileIndex tile = tile_of_cta<8>(args);
    const int row0 = tile.m * TILE, col0 = (tile.n * WARPS + warp) * TILE;
    if (col0 >= args.n) return;  // the whole warp leaves

    // Register i of lane l holds A[i*4 + l/8][l%8], or for m-major A its transpose A[l][i]; of B likewise B[i][l] or B[l%8][i*4 + l/8].
    const auto* a_base = matrix_a<S>(args);
    const auto* b_base = matrix_b<S>(args);
    const long long a_row = a_row_stride<S>(args), a_k = a_k_stride<S>(args);
    const long long b_col = b_col_stride<S>(args), b_k = b_k_stride<S>(args);
    const decltype(a_base) a = a_base + (S::A_K_MAJOR ? 0 : min(row0 + lane, args.m - 1) * a_row);
    const decltype(b_base) b = b_base + (S::B_K_MAJOR ? 0 : min(col0 + lane, args.n - 1) * b_col);

    const int ty = lane / 8, tx = lane % 8;  // rows ty + 4 i, columns tx + 8 j
    float acc[TM][TN] = {};
    for (int k0 = 0; k0 < args.k; k0 += KC) {
        const int valid = min(KC, args.k - k0);
        float a_reg[KC], b_reg[KC];
#pragma unroll
        for (int i = 0; i < KC; ++i) {
            a_reg[i] = b_reg[i] = 0.0f;
            if (S::A_K_MAJOR) {
                if (lane % 8 < valid) a_reg[i] = to_float(a[min(row0 + i * 4 + lane / 8, args.m - 1) * a_row + k0 + lane % 8]);
            } else if (i < valid) {
                a_reg[i] = to_float(a[(k0 + i) * a_k]);
            }
            if (S::B_K_MAJOR) {
                if (lane % 8 < valid) b_reg[i] = to_float(b[min(col0 + i * 4 + lane / 8, args.n - 1) * b_col + k0 + lane % 8]);
            } else if (i < valid) {
                b_reg[i] = to_float(b[(k0 + i) * b_k]);
            }
        }
#pragma unroll
        for (int k = 0; k < KC; ++k) {
            float a_frag[TM], b_frag[TN];
            // Row ty + 4 i of A at k: register i, lane ty*8 + k; or register k, lane ty + 4 i.
#pragma unroll
            for (int i = 0; i < TM; ++i)
                a_frag[i] = S::A_K_MAJOR ? __shfl_sync(ALL, a_reg[i], ty * 8 + k) : __shfl_sync(ALL, a_reg[k], ty + 4 * i);
            // Column tx + 8 j of B at k: register k, lane tx + 8 j; or register (tx + 8 j) / 4, lane (tx + 8 j) % 4 * 8 + k.
#pragma unroll
            for (int j = 0; j < TN; ++j) {
                if (S::B_K_MAJOR) {
                    const float low = __shfl_sync(ALL, b_reg[2 * j], tx % 4 * 8 + k);
                    const float high = __shfl_sync(ALL, b_reg[2 * j + 1], tx % 4 * 8 + k);
                    b_frag[j] = tx < 4 ? low : high;
                } else {
                    b_frag[j] = __shfl_sync(ALL, b_reg[k], tx + 8 * j);
                }
            }
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) acc[i][j] += a_frag[i] * b_frag[j];
        }
    }
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) store_output<S>(args, row0 + ty + 4 * i, col0 + tx + 8 * j, acc[i][j]);
}
