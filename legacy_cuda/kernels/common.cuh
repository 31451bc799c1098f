// What every rung shares: the arguments, the traits of an operand signature, the walk over output tiles, the epilogue.
//
//     D (M, N) = alpha * A (M, K) @ B (K, N) + beta * C (M, N),     blockIdx.z counts the matrices of a batch
//
// A is row-major ("k"-major) or column-major ("m"-major), B row-major ("n"-major) or column-major ("k"-major), D row-major with
// any leading dimension, C has any strides. Offsets are 64-bit; extents are below 2^31 - 1024, so a tile's end fits an int.
//
// Edges cost the main loop nothing. Rows of A and columns of B beyond the matrix are clamped to the last one: what is computed
// there is never stored. The part of K that fills no whole tile comes FIRST and is loaded under a guard with zeros in the gap;
// every later tile is whole.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct GemmArgs {  // packed by legacy_cuda/kernel.py in this order
    const void* a;
    const void* b;
    const void* c;
    void* d;
    long long lda, ldb, ldd;  // elements between rows (or columns, whichever are not contiguous)
    long long c_row, c_col;
    long long batch_a, batch_b, batch_c, batch_d;
    int m, n, k;
    int tiles_m, tiles_n;
    float alpha, beta;
};

struct NoC {};  // stands for the element type of C where C is not read

// What of a problem a compiled kernel depends on. VEC_x: elements that may be accessed at once (a power of two).
template <typename In_, typename CIn_, typename Out_, bool A_K_MAJOR_, bool B_K_MAJOR_, int VEC_A_, int VEC_B_, int VEC_C_, int VEC_D_>
struct Signature {
    using In = In_;
    using CIn = CIn_;
    using Out = Out_;
    static constexpr bool A_K_MAJOR = A_K_MAJOR_, B_K_MAJOR = B_K_MAJOR_;
    static constexpr int VEC_A = VEC_A_, VEC_B = VEC_B_, VEC_C = VEC_C_, VEC_D = VEC_D_;
};

template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT) Pack {
    T v[COUNT];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void round_to(float x, float& y) { y = x; }
__device__ __forceinline__ void round_to(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void round_to(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

template <typename S>
__device__ __forceinline__ const typename S::In* matrix_a(const GemmArgs& args) {
    return static_cast<const typename S::In*>(args.a) + blockIdx.z * args.batch_a;
}

template <typename S>
__device__ __forceinline__ const typename S::In* matrix_b(const GemmArgs& args) {
    return static_cast<const typename S::In*>(args.b) + blockIdx.z * args.batch_b;
}

// Distance in memory between neighbours along each axis; one of a pair is the constant 1.
template <typename S>
__device__ __forceinline__ long long a_row_stride(const GemmArgs& args) { return S::A_K_MAJOR ? args.lda : 1; }
template <typename S>
__device__ __forceinline__ long long a_k_stride(const GemmArgs& args) { return S::A_K_MAJOR ? 1 : args.lda; }
template <typename S>
__device__ __forceinline__ long long b_k_stride(const GemmArgs& args) { return S::B_K_MAJOR ? 1 : args.ldb; }
template <typename S>
__device__ __forceinline__ long long b_col_stride(const GemmArgs& args) { return S::B_K_MAJOR ? args.ldb : 1; }

struct TileIndex {
    int m, n;
};

// The output tile of this CTA. CTAs that run at the same time should share rows of A and columns of B in L2: the walk goes down
// GROUP tiles, then one to the right, so that a wave covers a patch near a square instead of one long row (GROUP = 1).
template <int GROUP>
__device__ __forceinline__ TileIndex tile_of_cta(const GemmArgs& args) {
    const int linear = blockIdx.x;
    if (GROUP == 1) return {linear / args.tiles_n, linear % args.tiles_n};
    const int per_band = GROUP * args.tiles_n;
    const int band = linear / per_band, within = linear % per_band;
    const int height = min(GROUP, args.tiles_m - band * GROUP);
    return {band * GROUP + within % height, within / height};
}

// How K divides into tiles: the partial tile first, `first` of BK valid; then whole ones. K = 0 is one tile with nothing valid.
template <int BK>
struct KTiles {
    int count, first;
    __device__ __forceinline__ explicit KTiles(int k) : count(k > 0 ? (k - 1) / BK + 1 : 1), first(k - (count - 1) * BK) {}
};

// Registers per thread that a tile of `accumulators` outputs a thread should get, and the CTAs per SM that this asks for.
__host__ __device__ constexpr int min_ctas(int threads, int accumulators) {
    const int registers = accumulators >= 128 ? 255 : accumulators >= 40 ? 2 * accumulators : 80;
    const int ctas = 65536 / (threads * registers);
    return ctas < 1 ? 1 : ctas > 16 ? 16 : ctas;
}

// Writes COUNT neighbouring outputs of a row; what lies outside the matrix is skipped. C is read only when beta is not 0.
template <typename S, int COUNT>
__device__ __forceinline__ void store_outputs(const GemmArgs& args, int row, int col, const float (&acc)[COUNT]) {
    using CIn = typename S::CIn;
    using Out = typename S::Out;
    if (row >= args.m || col >= args.n) return;
    Out* d = static_cast<Out*>(args.d) + blockIdx.z * args.batch_d + row * args.ldd + col;
    float value[COUNT];
    // A vector is whole or absent: VEC_x > 1 promises extents that are multiples of it.
    constexpr bool WHOLE = COUNT > 1 && S::VEC_D % COUNT == 0;
    const int valid = WHOLE ? COUNT : min(COUNT, args.n - col);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) value[j] = args.alpha * acc[j];
    if constexpr (sizeof(CIn) > 1) {
        if (args.beta != 0.0f) {
            const CIn* c = static_cast<const CIn*>(args.c) + blockIdx.z * args.batch_c + row * args.c_row;
            if constexpr (COUNT > 1 && S::VEC_C % COUNT == 0) {
                const Pack<CIn, COUNT> pack = *reinterpret_cast<const Pack<CIn, COUNT>*>(c + col);
#pragma unroll
                for (int j = 0; j < COUNT; ++j) value[j] = fmaf(args.beta, to_float(pack.v[j]), value[j]);
            } else {
#pragma unroll
                for (int j = 0; j < COUNT; ++j)
                    if (j < valid) value[j] = fmaf(args.beta, to_float(c[(col + j) * args.c_col]), value[j]);
            }
        }
    }
    Pack<Out, COUNT> out;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) round_to(value[j], out.v[j]);
    if constexpr (WHOLE) {
        *reinterpret_cast<Pack<Out, COUNT>*>(d) = out;
    } else {
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            if (j < valid) d[j] = out.v[j];
    }
}

template <typename S>
__device__ __forceinline__ void store_output(const GemmArgs& args, int row, int col, float acc) {
    const float one[1] = {acc};
    store_outputs<S, 1>(args, row, col, one);
}
