"""GEMM in IEEE fp32 on CUDA cores with sliced K: the warps of a CTA divide each stage's depth as well as its outputs.

A small product has few tiles, and a CTA of one to four warps has nothing to do while it waits for a copy, a barrier or
a shared load. Here `slices` groups of warps share the CTA tile. A stage is deep (32 to 128 along K), so barriers are
few; slice s multiplies its own part of the depth,

    k in [s * bk / slices, (s + 1) * bk / slices)   of each stage,

into accumulators of its own. At the end every slice writes them to shared memory, where the ring was, and the epilogue
adds them, always in the order of the slices: the result does not depend on timing.

A thread owns the outputs that it owns in `simt.kernel`. It loads fragments for four k at a time, so that either major
comes in 16-byte shared loads and no operand is transposed on its way: both come by cp.async, all stages at once.

    K along the rows ([k][m]):   for each of the 4 k, 4 neighbours along m
    K-major ([m][k]):            for each m, 4 neighbours along k; rows are swizzled so that lanes hit different banks
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutegemm.cute.entry import Gemm
from cutegemm.cute.epilogue import SlabEpilogue
from cutegemm.cute.simt.config import SimtConfig
from cutegemm.cute.simt.kernel import LANES_M, LANES_N, SimtGemm, outer_product, place_of_lane
from cutegemm.cute.source import aligned
from cutegemm.cute.warps.copy_ring import CopyRing
from cutegemm.cute.warps.tile_load import TileLoader, loader_of
from cutegemm.problem import Signature

CHUNK = SimtConfig.CHUNK
BLOCK = 32
"""Words of a row of a swizzled tile: TileLoader cuts it into blocks 128 bytes wide."""


def swizzle_of(extent: int) -> tuple[int, int, int]:
    """Of a K-major tile: the 16-byte piece within a 128-byte row is XORed with row / 4, as a lane's rows begin at
    multiples of 4. A tile of 16 rows has 4 such, and the bit above them would be that of the block.
    """
    return (3 if extent >= 32 else 2), 4, 5


def simt_gemm(config: SimtConfig, signature: Signature) -> Gemm:
    """The operator of a configuration of the simt family."""
    return SimtGemm(config, signature) if config.slices == 1 else SlicedSimtGemm(config, signature)


class Fragments:
    """One operand's tiles in shared memory as a thread reads them: `CHUNK` deep, `count` wide.

    Args:
        loader: of the operand. warp: its extent of a warp tile. lanes: of a warp along it.
    """

    def __init__(self, loader: TileLoader, warp: int, lanes: int, config: SimtConfig) -> None:
        self.loader, self.warp, self.lanes, self.config = loader, warp, lanes, config
        self.count = warp // lanes

    def start(self, memory, warp, lane, piece) -> None:
        """Binds to the thread `lane` along this operand, of warp number `warp` along it, in slice `piece`."""
        loader, chunks = self.loader, self.config.chunks
        self.pieces = 1 << swizzle_of(loader.extent)[0]
        self.memory = cute.recast_ptr(memory, dtype=Float32)
        first = warp * self.warp + lane * 4
        if loader.k_major:
            chunk = piece * chunks
            self.place = first * BLOCK + (((chunk % 8) ^ ((first >> 2) % self.pieces)) << 2)
            self.place += (chunk // 8) * (loader.extent * BLOCK)
            # The row's 16-byte piece alone: what the steps of a slice XOR it with never carries into other bits.
        else:
            self.place = piece * (chunks * CHUNK * loader.extent) + first
        # (1, outputs, k, buffer), as `outer_product` takes a step of it; the four words of a load lie together.
        strides = (0, CHUNK, 1, CHUNK * self.count) if loader.k_major else (0, 1, self.count, CHUNK * self.count)
        shape = (1, self.count, CHUNK, self.config.buffers)
        self.held = cute.make_rmem_tensor(cute.make_layout(shape, stride=strides), Float32)

    def load(self, stage, chunk: int, buffer: int) -> None:
        """Loads chunk number `chunk` of this slice from ring stage `stage`."""
        loader = self.loader
        start = stage * (loader.stage_bytes // 4)
        group = 4 * self.lanes
        for g in range(self.count // 4):
            for i in range(4):
                if loader.k_major:
                    # A slice's few chunks lie within one block: they differ in the piece of the row alone.
                    flips = chunk ^ (g * self.lanes % self.pieces)
                    place = (self.place ^ (flips << 2)) + (g * group + i) * BLOCK
                    target = self.held[0, 4 * g + i, None, buffer]
                else:
                    place = self.place + (chunk * CHUNK + i) * loader.extent + g * group
                    target = cute.local_tile(self.held[0, None, i, buffer], (4,), (g,))
                source = aligned(self.memory + (start + place), 16)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), target)


class SlicedEpilogue(SlabEpilogue):
    """The epilogue of the warps that share a warp tile, one a slice: they add their sums and store a part of it each.

    `memory` of `start` is the warp tile's: a slab of its whole height for each slice.
    """

    def __init__(self, config: SimtConfig, signature: Signature) -> None:
        super().__init__(config, signature)
        self.wm, self.slices = config.wm, config.slices
        self.slab_words = config.wm * self.pitch
        self.pieces = config.pieces(signature)

    def slab_of(self, memory, piece):
        """The slab of slice `piece`, (wm, wn)."""
        layout = cute.make_layout((self.wm, self.wn), stride=(self.pitch, 1))
        return cute.make_tensor(memory + piece * self.slab_words, layout)

    def _stored(self, begin, count: int):
        return self.sum_of(begin, count)

    def sum_of(self, begin, count: int) -> Any:
        """The slices' sums of `count` neighbours, the first slice's at `begin`, added in the order of the slices."""
        total: Any = None
        for piece in range(self.slices):
            values = cute.make_rmem_tensor(count, Float32)
            source = aligned(begin + piece * self.slab_words, min(4 * count, 16))
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), values)
            total = values.load() if total is None else total + values.load()
        return total

    @cute.jit
    def store_part(self, piece: Int32):
        """Finishes and stores every `slices`-th pass over the warp tile, from number `piece` on."""
        passes = self.wm // self.rows_per_pass
        for p in cutlass.range_constexpr(0, passes, self.slices):
            slab_row = self.lane_row + (p + piece) * self.rows_per_pass
            row = self.row + slab_row
            inside = row < self.m
            if cutlass.const_expr(passes % self.slices != 0):
                inside = inside and slab_row < self.wm
            self._begin_columns()
            self._begin_rows()
            if inside:
                self._store_chunk(slab_row, row)
            self._end_rows(row, inside)
            self._end_columns(row - self.lane_row, slab_row < self.wm)


class SlicedSimtGemm(Gemm):
    """The fp32 kernel for small products: slices of warps share a tile and divide each stage's depth among them."""

    epilogue: SlicedEpilogue

    def __init__(self, config: SimtConfig, signature: Signature) -> None:
        super().__init__(config, signature)
        self.epilogue = SlicedEpilogue(config, signature)
        self.a = self._operand("a", signature.a_major == "k", config.bm, signature.align_a)
        self.b = self._operand("b", signature.b_major == "k", config.bn, signature.align_b, self.halves)
        self.ring = CopyRing(self.a, self.b, config.stages)
        self.rows = Fragments(self.a, config.wm, LANES_M, config)
        self.columns = Fragments(self.b, config.wn, LANES_N, config)

    def _operand(self, name: str, k_major: bool, extent: int, align: int, halves: int = 0) -> TileLoader:
        config, swizzle = self.config, swizzle_of(extent) if k_major else None
        given = self.ab_type, extent, config.bk, k_major, align, config.threads, swizzle, halves
        return loader_of(name, self.signature.work)(*given)

    @cute.jit
    def _place(self, block, tiles_m, tiles_n):
        """As `Gemm._place`, and remembered: here no registers are wanting. The first matrix costs no division."""
        tiles = tiles_m * tiles_n
        matrix = Int32(0)
        if block >= tiles:
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
        warp_tiles = config.warps[0] * config.warps[1]
        piece, warp_tile = warp // warp_tiles, warp % warp_tiles
        warp_m, warp_n = warp_tile // config.warps[1], warp_tile % config.warps[1]

        memory = cutlass.memory.SmemAllocator().allocate(config.smem_bytes(self.signature), byte_alignment=1024)
        self.a.find(self.args)
        self.ring.start(memory, a, b, lda, ldb, m, n, k, row, column, tid, self.await_front)

        place = place_of_lane(lane)
        lane_m, lane_n = place // LANES_N, place % LANES_N
        self.rows.start(self.ring.memory_a, warp_m, lane_m, piece)
        self.columns.start(self.ring.memory_b, warp_n, lane_n, piece)
        accumulators = cute.make_rmem_tensor((1, self.rows.count, self.columns.count), Float32)
        accumulators.fill(0.0)

        ahead = config.buffers - 1
        read, write = Int32(0), Int32(config.stages - 1)
        if cutlass.const_expr(ahead):
            cute.arch.cp_async_wait_group(config.stages - 2)
            cute.arch.sync_threads()
            self._load(read, 0, 0)

        for k_tile in cutlass.range(self.ring.k_tiles, unroll=1):
            for chunk in cutlass.range_constexpr(config.chunks):
                if cutlass.const_expr((chunk + ahead) % config.chunks == 0):
                    if cutlass.const_expr(ahead):
                        read = read + 1
                        if read == config.stages:
                            read = Int32(0)
                    cute.arch.cp_async_wait_group(config.stages - 2)
                    cute.arch.sync_threads()
                self._load(read, (chunk + ahead) % config.chunks, (chunk + ahead) % config.buffers)
                if cutlass.const_expr(chunk == 0):
                    # The stage after the last k tile is written as well: with `ahead` it is read, though not used.
                    if k_tile + (config.stages - 1) <= self.ring.k_tiles:
                        self.ring.copy(k_tile + (config.stages - 1), write)
                    cute.arch.cp_async_commit_group()
                    write = write + 1
                    if write == config.stages:
                        write = Int32(0)
                for step in cutlass.range_constexpr(CHUNK):
                    fragment_a = self.rows.held[None, None, step, chunk % config.buffers]
                    fragment_b = self.columns.held[None, None, step, chunk % config.buffers]
                    outer_product(accumulators, fragment_a, fragment_b)
            if cutlass.const_expr(not ahead):
                read = read + 1
                if read == config.stages:
                    read = Int32(0)

        # The slabs of the epilogue reuse the ring: nothing may still be in flight or being read.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        slabs = memory + warp_tile * (config.slices * self.epilogue.slab_words * 4)
        slab = self.epilogue.slab_of(cute.recast_ptr(slabs, dtype=Float32), piece)
        for i in cutlass.range_constexpr(self.rows.count):
            for j in cutlass.range_constexpr(self.columns.count // 4):
                four = cute.make_rmem_tensor(4, Float32)
                for x in cutlass.range_constexpr(4):
                    four[x] = accumulators[0, i, 4 * j + (x ^ 1)]
                slab_row = lane_m * 4 + (i // 4) * (4 * LANES_M) + i % 4
                target = slab.iterator + slab_row * self.epilogue.pitch + lane_n * 4 + j * (4 * LANES_N)
                cute.autovec_copy(four, cute.make_tensor(aligned(target, 16), cute.make_layout(4)))
        cute.arch.sync_threads()
        if cutlass.const_expr(self.parts is None):
            first_row, first_column = row + warp_m * config.wm, column + warp_n * config.wn
            slab = cute.recast_ptr(slabs, dtype=Float32)
            matrix = self.matrix if self.own is None else self.own.matrix
            m, n = self.ends()
            first_column, n = self.in_d(first_column), self.in_d(n)
            self.epilogue.start(slab, matrix, first_row, first_column, m, n, 0, lane, self.args)
            self.epilogue.store_part(piece)
        else:
            self._leave_part(cute.recast_ptr(memory, dtype=Float32), tid)
            self.finish_parts(memory)

    @cute.jit
    def _leave_part(self, slabs, tid):
        """Adds up the slices' sums of the whole tile, four neighbours a thread at a time, and leaves them as a part."""
        target = self.start_parts(tid).part_of(0)
        vectors = self.config.bm * self.config.bn // 4
        for turn in cutlass.range_constexpr(-(-vectors // self.config.threads)):
            place = turn * self.config.threads + tid
            if place < vectors:
                self._leave_four(slabs, target, place)

    def _leave_four(self, slabs, target, place) -> None:
        wm, in_row = self.config.wm, self.config.wn // 4
        warp_tile, row, column = place // (wm * in_row), place // in_row % wm, place % in_row * 4
        begin = slabs + warp_tile * (self.config.slices * self.epilogue.slab_words)
        total = cute.make_rmem_tensor(4, Float32)
        total.store(self.epilogue.sum_of(begin + row * self.epilogue.pitch + column, 4))
        cute.autovec_copy(total, cute.make_tensor(aligned(target + place * 4, 16), cute.make_layout(4)))

    def _load(self, stage, chunk: int, buffer: int) -> None:
        self.rows.load(stage, chunk, buffer)
        self.columns.load(stage, chunk, buffer)
