// The hierarchy of the warp-tile rungs: CTA tile -> warp tile (WM x WN) -> WMITER x WNITER warp subtiles -> thread tile (TM x TN).
#pragma once
#include "operand.cuh"

template <int BM, int BN, int WM_, int WN_, int WNITER_, int TM, int TN>
struct WarpTileShape {
    static constexpr int WM = WM_, WN = WN_, WNITER = WNITER_;
    static constexpr int SUB_N = WN / WNITER;                  // columns of a warp subtile
    static constexpr int LANES_N = SUB_N / TN, LANES_M = 32 / LANES_N;
    static constexpr int SUB_M = LANES_M * TM;                 // rows of a warp subtile
    static constexpr int WMITER = WM / SUB_M;
    static constexpr int WARPS_N = BN / WN, WARPS = BM / WM * WARPS_N, THREADS = 32 * WARPS;
    static constexpr int ROWS = WMITER * TM, COLS = WNITER * TN;  // outputs of a thread along each axis
    static_assert(WN % WNITER == 0 && SUB_N % TN == 0 && 32 % LANES_N == 0, "the lanes do not tile the warp subtile's columns");
    static_assert(WM % SUB_M == 0 && BM % WM == 0 && BN % WN == 0, "the tiles do not divide each other");

    // First row and column of this thread's warp within the CTA tile.
    __device__ __forceinline__ static Place warp_origin() {
        const int warp = threadIdx.x / 32;
        return {warp / WARPS_N * WM, warp % WARPS_N * WN};
    }
    __device__ __forceinline__ static Place lane() { return lane_place<LANES_M, LANES_N>(threadIdx.x % 32); }
};
