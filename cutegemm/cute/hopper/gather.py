"""Rows of A that an index names, on their way from global memory into the ring: by cp.async, since TMA of compute
capability 9.0 loads neighbouring rows only.

All four warps of the producer warpgroup copy, 16 bytes a thread at a time, into the places where TMA's swizzle would
have put them. A stage is full when TMA has brought the other operand and every thread's copies have arrived:

    full      1 arrival of the warp that announces TMA's bytes, and 1 of each of the 128 threads, which the hardware
              makes when that thread's copies have landed (cp.async.mbarrier.arrive.noinc)

cp.async writes through the generic proxy, and WGMMA reads through the asynchronous one: a consumer warp fences
(fence.proxy.async) between its wait for the barrier and its WGMMA (`Ring.wait`).

Scales of blocks of K, in the order of the rows of the product, are copied by the three warps that do not ask TMA: a
thread arrives when its rows and its scales have landed.

An entry of the index that is no row of A (negative, or too large) gives a row of zeros, as do rows behind a group's
end and what lies beyond K: such copies read nothing, or as many bytes as there are.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutegemm.cute.hopper.config import WARPGROUP
from cutegemm.cute.hopper.operand import Loader, Operand
from cutegemm.cute.hopper.pipeline import Ring, advance
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.work import Work

COPY_BYTES = 16
"""Of one cp.async."""


class GatherLoader:
    """Loads a tile of a K-major operand whose rows an index names."""

    multicasts = False

    def __init__(self, operand: Operand, position: Position, args: Any) -> None:
        self.operand, self.args, self.thread = operand, args, position.own_thread
        self.pieces = operand.bk * operand.itemsize // COPY_BYTES
        """Copies of a tile's row."""
        self.step = WARPGROUP // self.pieces
        self.count = -(-operand.extent // self.step)
        self.piece, self.row = self.thread % self.pieces, self.thread // self.pieces
        self.vector = COPY_BYTES // operand.itemsize
        self.indices = cute.make_rmem_tensor(self.count, Int32)
        self._start_addresses()

    def _start_addresses(self) -> None:
        """Where the thread's copies go in a stage; see `Operand.stage_layout`."""
        operand = self.operand
        bits, width = operand._swizzle()
        per_line = width // self.vector
        line, inner = self.piece // per_line, self.piece % per_line
        self.base = operand.shared.iterator.toint()
        self.line_bytes, self.bits = width * operand.itemsize, bits
        self.column = line * (operand.extent * self.line_bytes)
        self.inner = inner * COPY_BYTES

    @cute.jit
    def place(self, row, tile):
        """Reads the indices of this thread's rows of a tile; -1 for those that are loaded as zeros."""
        first = tile.begin + row * self.operand.extent + self.row
        for i in cutlass.range_constexpr(self.count):
            found = Int32(-1)
            if (first + i * self.step < tile.end) & (self.row + i * self.step < self.operand.extent):
                index = cute.make_tensor(self.args.index + (first + i * self.step), cute.make_layout(1))[0]
                if (index >= 0) & (index < self.args.index_rows):
                    found = index
            self.indices[i] = found

    @cute.jit
    def load(self, k_tile, stage, barrier):
        """Asks for a k tile of the rows of the last `place`; `barrier` counts the thread when they have landed."""
        operand = self.operand
        k = k_tile * operand.bk + self.piece * self.vector
        inside = k < self.args.k
        stage_base = self.base + stage * (operand.extent * operand.bk * operand.itemsize)
        for i in cutlass.range_constexpr(self.count):
            row = self.row + i * self.step
            if cutlass.const_expr(operand.extent % self.step == 0) or row < operand.extent:
                index = self.indices[i]
                size, element = Int32(0), Int64(0)
                if (index >= 0) & inside:
                    size = Int32(COPY_BYTES)
                    if cutlass.const_expr(operand.itemsize == 1):  # whose K no 16 bytes need divide
                        size = cutlass.min(self.args.k - k, Int32(COPY_BYTES))
                    element = Int64(index) * self.args.lda + Int64(k)
                offset = self.column + row * self.line_bytes + self.inner
                offset = offset ^ (((offset >> 7) & ((1 << self.bits) - 1)) << 4)
                cute.arch.inline_ptx(
                    "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                    read_only_args=[stage_base + offset, (self.args.a + element).toint(), size],
                )
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)


class GatherProducer:
    """The producer warpgroup: its first warp asks TMA for one operand, all of them copy the other.

    across: whether the gathered operand is the WGMMA's B. scales: a started `block_scales.ScaleProducer`, or None.
    """

    def __init__(
        self, ring: Ring, work: Work, gathered: GatherLoader, other: Loader, across: bool, first: Any, scales: Any
    ) -> None:
        self.ring, self.work, self.gathered, self.other = ring, work, gathered, other
        self.across, self.first, self.scales = across, first, scales

    @cute.jit
    def run(self):
        """Loads the tiles of all works. The first of the warps also issues the TMA loads."""
        stage, phase = Int32(0), Int32(1)
        last = None if self.scales is None else cute.ceil_div(self.gathered.args.k, self.gathered.operand.bk) - 1
        for number in cutlass.range(self.work.first, self.work.end, self.work.step, unroll=1):
            tile = self.work.at(number)
            along, across = (tile.column, tile.row) if self.across else (tile.row, tile.column)
            self.gathered.place(along, tile)
            place = self.other.place(across, tile)
            k_tile, k_step = self.work.k_walk(tile)
            for _ in cutlass.range(tile.k_tiles, unroll=1):
                full = self.ring.full + stage
                if self.first:
                    full = self.ring.acquire(stage, phase)
                    self.other.load(place, k_tile, stage, full)
                else:
                    cute.arch.mbarrier_wait(self.ring.empty + stage, phase)
                    if cutlass.const_expr(self.scales is not None):
                        self.scales.copy(self.work.region(tile), k_tile, last, stage)
                self.gathered.load(k_tile, stage, full)
                stage, phase = advance(stage, phase, self.ring.stages)
                k_tile = self.work.k_next(tile, k_tile, k_step)
        if cutlass.const_expr(self.other.multicasts):
            self.ring.drain(stage, phase)
