// How a CTA brings one operand's tile (EXTENT rows of A or columns of B, by BK) from global to shared memory, and how a thread reads
// its fragment of it. Used from rung 08 on; A and B are the same problem seen from two sides, so one struct serves both.
#pragma once
#include "common.cuh"

// ---- Where element (k, x) of a tile stored k by k lies: x is a row of A or a column of B ----

template <int EXTENT>
struct Plain {
    static constexpr int SIZE_PER_K = EXTENT;
    static constexpr int PERIOD = 4;  // at(k, x + PERIOD) == at(k, x) + PERIOD
    __device__ static constexpr int at(int k, int x) { return k * EXTENT + x; }
};

// Four words more in a line shift every next k by four banks, and keep 16-byte alignment.
template <int EXTENT>
struct Padded {
    static constexpr int SIZE_PER_K = EXTENT + 4;
    static constexpr int PERIOD = 4;
    __device__ static constexpr int at(int k, int x) { return k * (EXTENT + 4) + x; }
};

// The same effect without the extra words: k permutes the groups of four words within a line of 32 banks. Bits 2, 3 and 4 of x
// are flipped by the low three bits of k, so that eight neighbouring k's, and k's four apart, fall on different banks.
template <int EXTENT>
struct Swizzled {
    static constexpr int SIZE_PER_K = EXTENT;
    static constexpr int PERIOD = 32;
    __device__ static constexpr int at(int k, int x) { return k * EXTENT + (x ^ ((k & 7) << 2)); }
};

// What a run of so many bytes is made of while a register holds it.
template <int BYTES>
struct WordType {
    using type = unsigned;
};
template <>
struct WordType<2> {
    using type = unsigned short;
};
template <int BYTES>
using WordOf = typename WordType<BYTES>::type;

// ---- Global memory -> registers -> shared memory ----
//
// A tile is read in runs of VEC elements along the axis that is contiguous in memory.
//   contiguous along x: neighbouring lanes take neighbouring runs of one k.
//   contiguous along k: as many lanes as fill a 32-byte sector take neighbouring runs of one x, the next lanes the next x. Stored k
//                       by k, each run is transposed on its way: VEC scalar stores.
template <typename T, int EXTENT, int BK, int THREADS, bool K_CONTIGUOUS, int VEC>
struct TileReader {
    static constexpr int SECTOR = 32 / sizeof(T) < BK ? 32 / sizeof(T) : BK;
    static constexpr int RUNS = K_CONTIGUOUS ? SECTOR / VEC : EXTENT / VEC;    // runs that lie side by side
    static constexpr int LANES = RUNS < THREADS ? RUNS : THREADS;              // threads that lie side by side
    static constexpr int LINES = THREADS / LANES;                              // lines that one pass of the CTA covers
    static constexpr int X_LINES = LINES < EXTENT ? LINES : EXTENT;            // contiguous along k: of them, different x
    static constexpr int K_PER_PASS = K_CONTIGUOUS ? SECTOR * (LINES / X_LINES) : LINES;
    static constexpr int X_PASSES = K_CONTIGUOUS ? EXTENT / X_LINES : RUNS / LANES;
    static constexpr int X_STEP = K_CONTIGUOUS ? X_LINES : LANES * VEC;
    static constexpr int K_PASSES = K_PER_PASS < BK ? BK / K_PER_PASS : 1;
    static constexpr bool SOME_IDLE = K_PER_PASS > BK;
    static_assert(VEC <= SECTOR && SECTOR % VEC == 0 && EXTENT % VEC == 0, "a run does not fit");
    static_assert(THREADS % LANES == 0 && RUNS % LANES == 0 && LINES % X_LINES == 0 && EXTENT % X_STEP == 0, "the threads do not tile the operand");
    static_assert(SOME_IDLE || BK % K_PER_PASS == 0, "the threads do not tile K");

    using Run = Pack<T, VEC>;
    // In flight a run is held as whole words: taken apart into 16-bit elements, it would have to arrive first.
    using Held = Pack<WordOf<VEC * sizeof(T)>, (VEC * sizeof(T) + 3) / 4>;
    static_assert(sizeof(Held) == sizeof(Run), "the same bytes");
    const T* from[X_PASSES];
    long long k_stride;
    int x0, k0;
    Held held[X_PASSES][K_PASSES];

    // `origin`: first x of the tile, `limit`: extent of the matrix along x, `ld`: its leading dimension.
    __device__ __forceinline__ TileReader(const T* matrix, int origin, int limit, long long ld) {
        const int lane = threadIdx.x % LANES, line = threadIdx.x / LANES;
        x0 = K_CONTIGUOUS ? line % X_LINES : lane * VEC;
        k0 = K_CONTIGUOUS ? line / X_LINES * SECTOR + lane * VEC : line;
        k_stride = K_CONTIGUOUS ? 1 : ld;
#pragma unroll
        for (int i = 0; i < X_PASSES; ++i) {
            // Beyond the edge: read the last line or run again. Limits are multiples of VEC, so the run stays inside.
            const int x = min(origin + x0 + i * X_STEP, limit - (K_CONTIGUOUS ? 1 : VEC));
            from[i] = matrix + x * (K_CONTIGUOUS ? ld : 1) + k0 * k_stride;
        }
    }

    __device__ __forceinline__ bool idle() const { return SOME_IDLE && k0 >= BK; }

    __device__ __forceinline__ void advance(int k) {
#pragma unroll
        for (int i = 0; i < X_PASSES; ++i) from[i] += k * k_stride;
    }

    // Reads the tile into registers; with GUARD only its first `valid` k's, zeros for the rest.
    template <bool GUARD>
    __device__ __forceinline__ void fetch(int valid = BK) {
        if (idle()) return;
#pragma unroll
        for (int i = 0; i < X_PASSES; ++i)
#pragma unroll
            for (int j = 0; j < K_PASSES; ++j) {
                if (!GUARD || k0 + j * K_PER_PASS < valid) {
                    held[i][j] = *reinterpret_cast<const Held*>(from[i] + j * K_PER_PASS * k_stride);
                } else {
                    held[i][j] = {};
                }
            }
    }

    // Registers to a tile of floats stored k by k as `Layout` says.
    template <typename Layout>
    __device__ __forceinline__ void put(float* tile) const {
        if (idle()) return;
#pragma unroll
        for (int i = 0; i < X_PASSES; ++i)
#pragma unroll
            for (int j = 0; j < K_PASSES; ++j) {
                const int k = k0 + j * K_PER_PASS, x = x0 + i * X_STEP;
                Run run;
                memcpy(&run, &held[i][j], sizeof(Run));
                if constexpr (!K_CONTIGUOUS && VEC == 4) {
                    *reinterpret_cast<float4*>(tile + Layout::at(k, x)) =
                        make_float4(to_float(run.v[0]), to_float(run.v[1]), to_float(run.v[2]), to_float(run.v[3]));
                } else {
#pragma unroll
                    for (int e = 0; e < VEC; ++e)
                        tile[K_CONTIGUOUS ? Layout::at(k + e, x) : Layout::at(k, x + e)] = to_float(run.v[e]);
                }
            }
    }

    // Registers to a tile that keeps the order of global memory: lines of `LD` elements along the contiguous axis.
    template <int LD>
    __device__ __forceinline__ void put_straight(T* tile) const {
        if (idle()) return;
#pragma unroll
        for (int i = 0; i < X_PASSES; ++i)
#pragma unroll
            for (int j = 0; j < K_PASSES; ++j) {
                const int k = k0 + j * K_PER_PASS, x = x0 + i * X_STEP;
                *reinterpret_cast<Held*>(tile + (K_CONTIGUOUS ? x * LD + k : k * LD + x)) = held[i][j];
            }
    }

    // Global to shared memory without registers in between: cp.async writes while the threads go on. It moves 4, 8 or 16 bytes as
    // they are, so a tile that is to be transposed goes element by element (VEC = 1); the lanes of a sector still share it.
    template <typename Layout, bool GUARD>
    __device__ __forceinline__ void copy_async(float* tile, int valid = BK) const {
        static_assert(sizeof(T) == 4 && (!K_CONTIGUOUS || VEC == 1), "cp.async neither widens nor transposes");
        if (idle()) return;
        constexpr int BYTES = VEC * sizeof(T);
#pragma unroll
        for (int i = 0; i < X_PASSES; ++i)
#pragma unroll
            for (int j = 0; j < K_PASSES; ++j) {
                const int k = k0 + j * K_PER_PASS, x = x0 + i * X_STEP;
                const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(tile + Layout::at(k, x)));
                const T* source = from[i] + j * K_PER_PASS * k_stride;
                // Where the size is 0 nothing is read and zeros are written.
                const int size = !GUARD || k < valid ? BYTES : 0;
                if constexpr (BYTES == 16)
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(size) : "memory");
                else
                    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(source), "n"(BYTES), "r"(size) : "memory");
            }
    }
};

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

template <typename S, int BM, int BK, int THREADS>
using ReaderA = TileReader<typename S::In, BM, BK, THREADS, S::A_K_MAJOR, S::VEC_A>;
template <typename S, int BN, int BK, int THREADS>
using ReaderB = TileReader<typename S::In, BN, BK, THREADS, S::B_K_MAJOR, S::VEC_B>;

// The same for copy_async.
template <typename S, int BM, int BK, int THREADS>
using AsyncReaderA = TileReader<typename S::In, BM, BK, THREADS, S::A_K_MAJOR, S::A_K_MAJOR ? 1 : S::VEC_A>;
template <typename S, int BN, int BK, int THREADS>
using AsyncReaderB = TileReader<typename S::In, BN, BK, THREADS, S::B_K_MAJOR, S::B_K_MAJOR ? 1 : S::VEC_B>;

// ---- Shared memory -> fragments ----

// Where a thread stands among the threads of a tile.
struct Place {
    int m, n;
};

// The 32 lanes of a warp as a patch of LANES_M x LANES_N threads, the lowest bits alternating between n and m. A 16-byte shared
// load is served in half-warps at full speed when neighbouring pairs of lanes, or pairs two apart, read the same 16 bytes; this
// order gives one to A's fragments and the other to B's.
template <int LANES_M, int LANES_N>
__device__ __forceinline__ Place lane_place(int lane) {
    static_assert(LANES_M * LANES_N == 32, "a warp has 32 lanes");
    if constexpr (LANES_M >= 2 && LANES_N >= 2) {
        const int high = lane / 4;
        return {lane / 2 % 2 + high / (LANES_N / 2) * 2, lane % 2 + high % (LANES_N / 2) * 2};
    } else {
        return {lane / LANES_N, lane % LANES_N};
    }
}

// A grid of ROWS x COLS threads, warp by warp, each warp a patch of 4x8 lanes (8x4, 2x16, 16x2 where that does not fit).
template <int ROWS, int COLS>
__device__ __forceinline__ Place thread_place() {
    constexpr int LANES_N = COLS % 8 == 0 && ROWS % 4 == 0 ? 8 : COLS % 4 == 0 && ROWS % 8 == 0 ? 4 : COLS % 16 == 0 ? 16 : 2;
    constexpr int LANES_M = 32 / LANES_N;
    static_assert(ROWS % LANES_M == 0 && COLS % LANES_N == 0, "no patch of 32 lanes tiles the threads");
    const Place lane = lane_place<LANES_M, LANES_N>(threadIdx.x % 32);
    const int warp = threadIdx.x / 32;
    return {warp / (COLS / LANES_N) * LANES_M + lane.m, warp % (COLS / LANES_N) * LANES_N + lane.n};
}

// COUNT values of one k: groups of four side by side (one 16-byte load each), GROUP_STEP apart, so that the lanes' groups lie
// side by side too and a warp reads whole lines of banks.
template <typename Layout, int COUNT, int GROUP_STEP>
__device__ __forceinline__ void load_groups(float (&fragment)[COUNT], const float* tile, int k, int x) {
    static_assert(COUNT % 4 == 0, "groups of four");
    static_assert(COUNT == 4 || GROUP_STEP % Layout::PERIOD == 0, "a group step must keep the place within the layout's period");
#pragma unroll
    for (int g = 0; g < COUNT / 4; ++g) {
        const float4 four = *reinterpret_cast<const float4*>(tile + Layout::at(k, x) + g * GROUP_STEP);
        fragment[4 * g] = four.x;
        fragment[4 * g + 1] = four.y;
        fragment[4 * g + 2] = four.z;
        fragment[4 * g + 3] = four.w;
    }
}

template <int TM, int TN>
__device__ __forceinline__ void outer_product(float (&acc)[TM][TN], const float (&a)[TM], const float (&b)[TN]) {
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
}

// The epilogue of a thread tile of groups of four rows and of four columns.
template <typename S, int ROW_STEP, int COL_STEP, int TM, int TN>
__device__ __forceinline__ void store_groups(const GemmArgs& args, int row, int col, const float (&acc)[TM][TN]) {
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int g = 0; g < TN / 4; ++g) {
            const float four[4] = {acc[i][4 * g], acc[i][4 * g + 1], acc[i][4 * g + 2], acc[i][4 * g + 3]};
            store_outputs<S, 4>(args, row + i / 4 * ROW_STEP + i % 4, col + g * COL_STEP, four);
        }
}
