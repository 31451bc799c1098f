"""GEMM with a thin result in IEEE fp32: one operand is a matrix that is streamed once, the other a few vectors.

With M (or N) of 1 to 8 there is next to nothing to multiply: the time is that of reading the matrix, K x N (or M x K)
elements of 4 bytes. Memory of an H200 brings 4.8 TB/s with about 1 us from a request to its data, so that by Little's
law 4.8 MB must be under way, 36 KB on each of 132 SMs. Here nothing but registers stands in between: a lane has
`stages` steps of 8 loads of 16 bytes under way, 256 bytes with two stages. A thread takes 164 registers for one row, so
that an SM has three CTAs of 128 threads: 96 KB under way at most, and over 48 KB, which leaves room for the time
between a step's use and its next load. What else an SM does at that
rate, 21 bytes of the matrix a clock: 5 FFMA a clock for each of the thin side, of 128, and loads of the thin operand
from the L1 cache, as many bytes again for each 8 rows of a K-major matrix. So 1x16384x4096 (268 MB) should take
56 us / 0.9. Not measured yet.

The lanes of a warp lie side by side along the matrix's contiguous side, whichever it is:

    K-major         lane l has 4 k of each of `across` (8) rows; its sums are those of its k. At the end the lanes
                    exchange them by shuffles: a fixed order
    else            lane l has 4 neighbours of each of `depth` (8) rows of K; its sums are whole. The thin operand's
                    values are the same for all lanes: one transaction a load

    thin x across accumulators += outer products: thin operand at k, matrix at k, for each k that the lane holds

A CTA's warps lie along the matrix's other side, and `slices` groups of them take steps along K in turn. Their sums meet
in shared memory and are added in the order of the slices; with splits of K those of several CTAs meet as in
`warps.part_sum`. The epilogue is that of the other kernels without TMA: any program of acc.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cutegemm.cute.entry import Gemm
from cutegemm.cute.source import aligned
from cutegemm.cute.vector.config import VectorConfig
from cutegemm.cute.warps.part_sum import PartEpilogue
from cutegemm.problem import Signature


class Stream:
    """One operand as the lanes of a warp load it: `across` of its rows or columns, `depth` along K.

    Fragments have the shape (1, across, depth), as `cute.gemm` takes a k of them.

    Args:
        k_major: whether K is the contiguous side. vector: elements of a load, along the contiguous side.
        lanes: "k", "across" or "": along what the 32 lanes lie side by side, `group` elements each.
        cached: whether the L1 cache keeps what is loaded.
    """

    def __init__(
        self, across: int, depth: int, k_major: bool, vector: int, lanes: str, group: int, cached: bool
    ) -> None:
        self.across, self.depth, self.k_major, self.cached = across, depth, k_major, cached
        self.lanes, self.group = lanes, group
        self.vector = min(vector, depth if k_major else across)

    def start(self, base, leading, first, limit, k, lane) -> None:
        """Binds to a matrix whose rows (or columns) `first` .. are the warp's, of `limit`; `leading` is Int64."""
        self.base, self.leading, self.limit, self.k, self.lane = base, leading, limit, k, lane
        self.first = first

    def fragments(self, stages: int) -> Any:
        """Room for `stages` steps; the elements of a load lie side by side."""
        strides = (0, self.depth, 1) if self.k_major else (0, 1, self.across)
        layout = cute.make_layout(
            (1, self.across, self.depth, stages), stride=(*strides, self.across * self.depth)
        )  # fmt: skip
        return cute.make_rmem_tensor(layout, Float32)

    def load(self, fragment, k) -> None:
        """Loads the step from `k` on into a fragment; zeros beyond K, the last row's elements beyond the limit."""
        for outer in range(self.across if self.k_major else self.depth):
            for start in range(0, self.depth if self.k_major else self.across, self.vector):
                own = (start, outer) if self.k_major else (outer, start)
                at_k, across = self.place(*own)
                found = self._loaded(k + at_k, across)
                for v, value in enumerate(found):
                    if self.k_major:
                        fragment[0, outer, start + v] = value
                    else:
                        fragment[0, start + v, outer] = value

    def place(self, k: int, across: int) -> tuple[Any, Any]:
        """(k within the step, row or column within the warp's) of this lane's own element (k, across).

        Of what lanes share out a lane has whole groups, each of them next to the other lanes' ones.
        """
        return (
            (self._shared_out(k), across)
            if self.lanes == "k"
            else ((k, self._shared_out(across)) if self.lanes else (k, across))
        )

    def _shared_out(self, number: int) -> Any:
        return (number // self.group * 32 + self.lane) * self.group + number % self.group

    def _loaded(self, k, across) -> tuple[Any, ...]:
        if self.k_major:
            place = cutlass.min(self.first + across, self.limit - 1)
            offset = Int64(place) * self.leading + Int64(k)
        else:
            place = cutlass.min(self.first + across, self.limit - self.vector)
            offset = Int64(k) * self.leading + Int64(place)
        loaded = cute.arch.inline_ptx(
            load_instruction(self.vector, self.cached),
            write_only_types=[Float32] * self.vector,
            read_only_args=[(self.base + offset).toint(), self.k - k],
        )
        return tuple(loaded) if self.vector > 1 else (loaded,)


def load_instruction(vector: int, cached: bool) -> str:
    """PTX that loads so many fp32 values, or zeros when nothing is left of K. Operands: address, elements left."""
    outputs = [f"{{$w{i}}}" for i in range(vector)]
    zeros = " ".join(f"mov.f32 {output}, 0f00000000;" for output in outputs)
    kind = f"v{vector}.f32 {{{', '.join(outputs)}}}" if vector > 1 else f"f32 {outputs[0]}"
    cache = "" if cached else ".L1::no_allocate"
    return (
        f"{{ .reg .pred valid; setp.gt.s32 valid, {{$r1}}, 0; {zeros} @valid ld.global.nc{cache}.{kind}, [{{$r0}}]; }}"
    )


class VectorGemm(Gemm):
    """The fp32 kernel for results of one to eight rows or columns: it streams the other operand through registers."""

    def __init__(self, config: VectorConfig, signature: Signature) -> None:
        super().__init__(config.in_slabs(), signature)
        self.config = config
        self.along_k = along_k = config.along_k(signature)
        across, depth = config.held(along_k)
        vector = config.vectors(signature)
        self.matrix_stream = Stream(across, depth, along_k, vector, "k" if along_k else "across", vector, cached=False)
        # Of the thin operand a lane has the very k that it has of the matrix.
        k_major, align = (signature.a_major == "k", signature.align_a)
        if not config.thin_m:
            k_major, align = (signature.b_major == "k", signature.align_b)
        width = min(align // 4, vector) if along_k and k_major else min(align // 4, 4)
        self.thin_stream = Stream(config.thin, depth, k_major, width, "k" if along_k else "", vector, cached=True)
        self.sums = PartEpilogue(config.in_slabs(), signature, config.slices, config.bm * config.bn)

    @cute.jit
    def _place(self, block, tiles_m, tiles_n):
        """As `Gemm._place`, and remembered: here no registers are wanting."""
        tiles = tiles_m * tiles_n
        matrix = block // tiles
        tile_m, tile_n = self.order.coordinates(block - matrix * tiles, tiles_m, tiles_n)
        self.matrix = matrix
        return matrix, tile_m * self.config.bm, tile_n * self.config.bn

    @cute.jit
    def compute_tile(self, a, b, lda, ldb, m, n, k, row, column):
        config = self.config
        tid = cute.arch.thread_idx()[0]
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        tile, across = config.long
        in_row = tile // across
        piece, place = warp // in_row, warp % in_row
        memory = cutlass.memory.SmemAllocator().allocate(max(config.smem_bytes(self.signature), 16), byte_alignment=128)
        if cutlass.const_expr(config.thin_m):
            self.matrix_stream.start(b, ldb, column + place * across, n, k, lane)
            self.thin_stream.start(a, lda, row, m, k, lane)
        else:
            self.matrix_stream.start(a, lda, row + place * across, m, k, lane)
            self.thin_stream.start(b, ldb, column, n, k, lane)

        stages, step = config.stages, config.bk * config.slices
        steps = cute.ceil_div(k, step)
        held, thin = self.matrix_stream.fragments(stages), self.thin_stream.fragments(1)
        accumulators = cute.make_rmem_tensor((1, config.thin, self.matrix_stream.across), Float32)
        accumulators.fill(0.0)
        first = piece * config.bk
        mma = cute.make_tiled_mma(cute.nvgpu.MmaUniversalOp(Float32), cute.make_layout((1, 1, 1)))
        self.await_front()
        for stage in cutlass.range_constexpr(stages):
            self.matrix_stream.load(held[None, None, None, stage], first + stage * step)
        for turn in cutlass.range(cute.ceil_div(steps, stages), unroll=1):
            for stage in cutlass.range_constexpr(stages):
                begin = first + (turn * stages + stage) * step
                self.thin_stream.load(thin[None, None, None, 0], begin)
                for i in cutlass.range_constexpr(self.matrix_stream.depth):
                    rows, columns = thin[None, None, i, 0], held[None, None, i, stage]
                    cute.gemm(mma, accumulators, rows, columns, accumulators)
                self.matrix_stream.load(held[None, None, None, stage], begin + stages * step)

        sums = cute.recast_ptr(memory, dtype=Float32)
        self._leave(sums + piece * (config.bm * config.bn), accumulators, place, lane)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.parts is None):
            self._store(sums, row, column, warp, lane)
        else:
            self._leave_part(sums, tid)
            # The last word of the slabs, which another warp reads: the emulator then sees that a barrier is missing.
            self.finish_parts(memory + (config.smem_bytes(self.signature) - 4))

    @cute.jit
    def _leave(self, slab, accumulators, place, lane):
        """Leaves a warp's sums in shared memory, as rows of the tile's slabs."""
        across = self.matrix_stream.across
        for i in cutlass.range_constexpr(self.config.thin):
            for j in cutlass.range_constexpr(across):
                value = accumulators[0, i, j]
                if cutlass.const_expr(self.along_k):
                    for bit in cutlass.range_constexpr(5):
                        value = value + cute.arch.shuffle_sync_bfly(value, 1 << bit)
                    if lane == (i * across + j) % 32:
                        slab[self._in_slab(i, place * across + j)] = value
                else:
                    _, own = self.matrix_stream.place(0, j)
                    slab[self._in_slab(i, place * self.config.long[1] + own)] = value

    def _in_slab(self, thin, along) -> Any:
        """Where the output (thin, along) of the tile lies among the words of the slabs."""
        rows, columns = self.config.slab
        if self.config.thin_m:
            return along // columns * (rows * columns) + thin * columns + along % columns
        return along * columns + thin

    @cute.jit
    def _store(self, sums, row, column, warp, lane):
        """Adds up the slices' sums and stores them, the warps a unit of the tile at a time."""
        warps = self.config.threads // 32
        for turn in cutlass.range_constexpr(-(-self.sums.units // warps)):
            unit = turn * warps + warp
            if unit < self.sums.units:
                self.sums.finish_unit(sums, unit, self.matrix, row, column, lane, self.args)

    @cute.jit
    def _leave_part(self, sums, tid):
        """Leaves the sum of the slices as this CTA's part of the tile, four neighbours a thread at a time."""
        target = self.start_parts(tid).part_of(0)
        vectors = self.config.bm * self.config.bn // 4
        for turn in cutlass.range_constexpr(-(-vectors // self.config.threads)):
            place = turn * self.config.threads + tid
            if place < vectors:
                self._leave_four(sums, target, place)

    def _leave_four(self, sums, target, place) -> None:
        total = cute.make_rmem_tensor(4, Float32)
        total.store(self.sums.sum_of(sums + place * 4, 4))
        cute.autovec_copy(total, cute.make_tensor(aligned(target + place * 4, 16), cute.make_layout(4)))
