// 17 warp tile, 16-bit: rung 15 with fp16 or bf16 operands, still without tensor cores.
//
// Idea      Operands of two bytes halve the traffic from global memory, and nothing else: each element is widened to fp32 on its way
//           into shared memory (once, not at each of its 128 uses), and FFMA does the rest. What this rung shows is how far CUDA
//           cores are from the unit made for these types.
// Per CTA   and k-tile of 128x128x16: 8 KiB from global memory for 524288 flops: 64 flop/byte; shared memory as in rung 15.
// Limit     The FP32 pipe: 67 TFLOP/s on an H200 whose tensor cores do 989.
// Published about a quarter of PyTorch on an RTX 4090.
#pragma once
#include "15_warp_tile.cuh"

template <typename S, int BM, int BN, int BK, int WM, int WN, int WNITER, int TM, int TN>
__global__ void __launch_bounds__(WarpTileShape<BM, BN, WM, WN, WNITER, TM, TN>::THREADS,
                                  min_ctas(WarpTileShape<BM, BN, WM, WN, WNITER, TM, TN>::THREADS, WM* WN / 32))
    warp_tile_16bit(const __grid_constant__ GemmArgs args) {
    static_assert(sizeof(typename S::In) == 2, "this rung is for fp16 and bf16");
    warp_tile_body<S, BM, BN, BK, WM, WN, WNITER, TM, TN>(args);
}
