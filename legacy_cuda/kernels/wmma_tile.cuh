// What the WMMA rungs share: fragment types, tiles of 16-bit operands in shared memory, and the epilogue through shared memory.
#pragma once
#include <mma.h>

#include "operand.cuh"

constexpr int WMMA = 16;            // fragments are 16x16x16
constexpr int PATCH_LD = WMMA + 4;  // an fp32 output tile in shared memory; the padding spreads its rows over the banks
constexpr int PATCH = WMMA * PATCH_LD;

template <bool ROW_MAJOR>
struct WmmaOrder {
    using type = nvcuda::wmma::row_major;
};
template <>
struct WmmaOrder<false> {
    using type = nvcuda::wmma::col_major;
};

template <typename S>
using FragmentA = nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, WMMA, WMMA, WMMA, typename S::In, typename WmmaOrder<S::A_K_MAJOR>::type>;
template <typename S>
using FragmentB = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, WMMA, WMMA, WMMA, typename S::In, typename WmmaOrder<!S::B_K_MAJOR>::type>;
using FragmentAcc = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, WMMA, WMMA, WMMA, float>;

// A tile of 16-bit elements in the order of global memory: lines along the contiguous axis, 8 elements (16 bytes) longer than they
// need be, so that the lines of one fragment fall on different banks. Every 16x16 fragment begins on a 32-byte boundary, as WMMA asks.
template <int EXTENT, int BK, bool K_CONTIGUOUS>
struct WmmaTile {
    static constexpr int LD = (K_CONTIGUOUS ? BK : EXTENT) + 8;
    static constexpr int SIZE = (K_CONTIGUOUS ? EXTENT : BK) * LD;
    __device__ static constexpr int at(int k, int x) { return K_CONTIGUOUS ? x * LD + k : k * LD + x; }
    static_assert(EXTENT % WMMA == 0 && BK % WMMA == 0, "whole fragments");
};

// acc += A tile * B tile for a warp of MT x NT fragments whose corner is (m, n) of the CTA tile.
template <typename S, typename TileA, typename TileB, int BK, int MT, int NT>
__device__ __forceinline__ void multiply_tiles(
    FragmentAcc (&acc)[MT][NT], const typename S::In* a_tile, const typename S::In* b_tile, int m, int n) {
#pragma unroll
    for (int k = 0; k < BK; k += WMMA) {
        FragmentA<S> a[MT];
        FragmentB<S> b[NT];
#pragma unroll
        for (int i = 0; i < MT; ++i) nvcuda::wmma::load_matrix_sync(a[i], a_tile + TileA::at(k, m + i * WMMA), TileA::LD);
#pragma unroll
        for (int j = 0; j < NT; ++j) nvcuda::wmma::load_matrix_sync(b[j], b_tile + TileB::at(k, n + j * WMMA), TileB::LD);
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int j = 0; j < NT; ++j) nvcuda::wmma::mma_sync(acc[i][j], a[i], b[j], acc[i][j]);
    }
}

// Which element of a fragment a register holds is nobody's business, so the epilogue lays each output tile down in a patch of
// shared memory of its warp; then two lanes take a row, eight columns each.
template <typename S>
__device__ __forceinline__ void store_patch(const GemmArgs& args, int row, int col, const FragmentAcc& acc, float* patch) {
    const int lane = threadIdx.x % 32;
    nvcuda::wmma::store_matrix_sync(patch, acc, PATCH_LD, nvcuda::wmma::mem_row_major);
    __syncwarp();
    const int r = lane / 2, c = lane % 2 * 8;
#pragma unroll
    for (int h = 0; h < 8; h += 4) {
        const float4 v = *reinterpret_cast<const float4*>(patch + r * PATCH_LD + c + h);
        const float four[4] = {v.x, v.y, v.z, v.w};
        store_outputs<S, 4>(args, row + r, col + c + h, four);
    }
    __syncwarp();
}
