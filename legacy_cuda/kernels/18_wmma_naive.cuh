// 18 WMMA naive: one warp, one 16x16 output tile, fragments straight from global memory.
//
// Idea      wmma::load_matrix_sync, mma_sync, store_matrix_sync: the tensor core multiplies two 16x16 tiles of 16-bit numbers into
//           fp32 in one warp-wide call. Nothing is staged and nothing is reused.
//           A fragment cannot be loaded in part, nor from an address that is not a multiple of 32 bytes. Where a tile meets an edge, or
//           the matrix is aligned otherwise, the warp gathers the tile, zeros in the gaps, in shared memory of its own first.
// Per warp  and k-step of 16: (16*16 + 16*16)*2 = 1 KiB from L1 or L2 for 2*16*16*16 = 8192 flops: 8 flop/byte.
// Limit     Latency and the load pipe: each multiply waits for two fragment loads from L1 or L2.
// Published slow; taught elsewhere without a figure.
#pragma once
#include "wmma_tile.cuh"

template <typename S, int WARPS>
__global__ void __launch_bounds__(WARPS * 32) wmma_naive(const __grid_constant__ GemmArgs args) {
    using In = typename S::In;
    using TileA = WmmaTile<WMMA, WMMA, S::A_K_MAJOR>;
    using TileB = WmmaTile<WMMA, WMMA, S::B_K_MAJOR>;
    // Per warp: the gathered tiles while multiplying, the output patch afterwards.
    constexpr int GATHER_BYTES = (TileA::SIZE + TileB::SIZE) * sizeof(In), PATCH_BYTES = PATCH * sizeof(float);
    constexpr int WARP_BYTES = GATHER_BYTES > PATCH_BYTES ? GATHER_BYTES : PATCH_BYTES;
    static_assert(WARP_BYTES % 32 == 0, "fragments begin on 32-byte boundaries");
    __shared__ alignas(32) unsigned char smem[WARPS * WARP_BYTES];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const TileIndex tile = tile_of_cta<8>(args);
    const int row = tile.m * WMMA, col = (tile.n * WARPS + warp) * WMMA;
    if (col >= args.n) return;  // the whole warp leaves

    const In* a = matrix_a<S>(args);
    const In* b = matrix_b<S>(args);
    const bool direct = row + WMMA <= args.m && col + WMMA <= args.n && args.lda % 8 == 0 && args.ldb % 8 == 0 &&
                        reinterpret_cast<unsigned long long>(a) % 32 == 0 && reinterpret_cast<unsigned long long>(b) % 32 == 0;
    In* a_gather = reinterpret_cast<In*>(smem + warp * WARP_BYTES);
    In* b_gather = a_gather + TileA::SIZE;

    FragmentAcc acc;
    nvcuda::wmma::fill_fragment(acc, 0.0f);
    for (int k0 = 0; k0 < args.k; k0 += WMMA) {
        FragmentA<S> a_frag;
        FragmentB<S> b_frag;
        if (direct && k0 + WMMA <= args.k) {
            nvcuda::wmma::load_matrix_sync(a_frag, a + row * a_row_stride<S>(args) + k0 * a_k_stride<S>(args), args.lda);
            nvcuda::wmma::load_matrix_sync(b_frag, b + col * b_col_stride<S>(args) + k0 * b_k_stride<S>(args), args.ldb);
        } else {
#pragma unroll
            for (int i = lane; i < WMMA * WMMA; i += 32) {
                // Neighbouring lanes along the contiguous axis.
                const int am = S::A_K_MAJOR ? i / WMMA : i % WMMA, ak = S::A_K_MAJOR ? i % WMMA : i / WMMA;
                const int bn = S::B_K_MAJOR ? i / WMMA : i % WMMA, bk = S::B_K_MAJOR ? i % WMMA : i / WMMA;
                In a_value, b_value;
                round_to(0.0f, a_value);
                round_to(0.0f, b_value);
                if (row + am < args.m && k0 + ak < args.k)
                    a_value = a[(row + am) * a_row_stride<S>(args) + (k0 + ak) * a_k_stride<S>(args)];
                if (col + bn < args.n && k0 + bk < args.k)
                    b_value = b[(col + bn) * b_col_stride<S>(args) + (k0 + bk) * b_k_stride<S>(args)];
                a_gather[TileA::at(ak, am)] = a_value;
                b_gather[TileB::at(bk, bn)] = b_value;
            }
            __syncwarp();
            nvcuda::wmma::load_matrix_sync(a_frag, a_gather, TileA::LD);
            nvcuda::wmma::load_matrix_sync(b_frag, b_gather, TileB::LD);
            __syncwarp();
        }
        nvcuda::wmma::mma_sync(acc, a_frag, b_frag, acc);
    }
    store_patch<S>(args, row, col, acc, reinterpret_cast<float*>(a_gather));
}
