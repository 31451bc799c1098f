// Fragments of tiles that cp.async wrote: such a copy cannot transpose, so a tile keeps the order of global memory.
#pragma once
#include "operand.cuh"

// A tile in the order of global memory, and a thread's fragment of four k's of it.
//   contiguous along x: lines of EXTENT words, one per k. Groups of four x, one 16-byte load per k and group.
//   contiguous along k: lines of BK + 4 words, one per x. Single x, LANES apart; a 16-byte load brings four k of one of them. The
//                       padding puts the lines of 8 neighbouring lanes on different banks (BK a multiple of 8).
// Loads per multiply-add are the same both ways.
template <int EXTENT, int BK, bool K_CONTIGUOUS>
struct AsyncTile {
    static constexpr int LD = K_CONTIGUOUS ? BK + 4 : EXTENT;
    static constexpr int SIZE = K_CONTIGUOUS ? EXTENT * LD : BK * LD;

    // The x of the i-th value of a thread, from the x where the part it shares with LANES - 1 others begins.
    template <int LANES>
    __device__ __forceinline__ static int position(int lane, int i) {
        return K_CONTIGUOUS ? lane + i * LANES : i / 4 * (LANES * 4) + lane * 4 + i % 4;
    }

    // values[kk][i] = the i-th value of this thread at k + kk.
    template <int LANES, int COUNT>
    __device__ __forceinline__ static void load(float (&values)[4][COUNT], const float* part, int lane, int k) {
        if constexpr (K_CONTIGUOUS) {
            const float* line = part + lane * LD + k;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const float4 four = *reinterpret_cast<const float4*>(line + i * LANES * LD);
                values[0][i] = four.x;
                values[1][i] = four.y;
                values[2][i] = four.z;
                values[3][i] = four.w;
            }
        } else {
            const float* line = part + k * LD + lane * 4;
#pragma unroll
            for (int kk = 0; kk < 4; ++kk)
#pragma unroll
                for (int g = 0; g < COUNT / 4; ++g) {
                    const float4 four = *reinterpret_cast<const float4*>(line + kk * LD + g * LANES * 4);
                    values[kk][4 * g] = four.x;
                    values[kk][4 * g + 1] = four.y;
                    values[kk][4 * g + 2] = four.z;
                    values[kk][4 * g + 3] = four.w;
                }
        }
    }

    // The part of the tile that begins at x.
    __device__ __forceinline__ static const float* part(const float* tile, int x) { return tile + (K_CONTIGUOUS ? x * LD : x); }
};

// The epilogue: groups of four columns where B's fragments are groups, single columns LANES_N apart where they are not.
template <typename S, typename TileA, typename TileB, int LANES_M, int LANES_N, int TM, int TN>
__device__ __forceinline__ void store_fragments(const GemmArgs& args, int row, int col, Place lane, const float (&acc)[TM][TN]) {
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int r = row + TileA::template position<LANES_M>(lane.m, i);
        if constexpr (S::B_K_MAJOR) {
#pragma unroll
            for (int j = 0; j < TN; ++j) store_output<S>(args, r, col + lane.n + j * LANES_N, acc[i][j]);
        } else {
#pragma unroll
            for (int g = 0; g < TN / 4; ++g) {
                const float four[4] = {acc[i][4 * g], acc[i][4 * g + 1], acc[i][4 * g + 2], acc[i][4 * g + 3]};
                store_outputs<S, 4>(args, r, col + g * LANES_N * 4 + lane.n * 4, four);
            }
        }
    }
}
