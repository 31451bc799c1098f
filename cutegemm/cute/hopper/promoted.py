"""Promoted products: every few k tiles the tensor cores' sums are added into registers, which round to nearest.

The tensor cores add with fewer bits than fp32 has, and truncate. So WGMMA writes *partial sums* of an interval of k
tiles, and the CUDA cores add them to the accumulators:

    for each interval of the tile
        WGMMA of its k tiles: the first overwrites the partial sums, the others add to them
        wait for the last, release its stage
        accumulators += partial sums                  `Promotion.add`

A warpgroup that promotes does not multiply. In a cooperative schedule the CTA's other warpgroups keep the tensor cores
busy meanwhile: each has its own rows and meets the others at the ring's barriers only, so that their promotions fall
apart by themselves. In ping-pong one warpgroup multiplies at a time, and nothing hides a promotion; nor where a CTA has
one. There option `twin` gives a warpgroup a second set of partial sums (`TwinProducts`).

The idea is that of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.mma import Products
from cutegemm.cute.hopper.operand import Operand
from cutegemm.cute.hopper.pipeline import Ring, Turns, advance
from cutegemm.cute.hopper.position import Position
from cutegemm.problem.parts import Parts


class Promotion:
    """How partial sums become accumulators: added as they are. A class that scales them overrides these methods.

    reads_stage: whether `fetch` reads the stage with plain loads. reads_pairs: whether `add` does.
    """

    reads_stage = reads_pairs = False

    def start(self, products: PromotedProducts, position: Position, args, work, memory) -> None:
        """Binds to a warpgroup's products, the kernel's arguments, the works of the CTA, its shared memory."""

    def open(self, tile) -> None:
        """Before the first k tile of a work."""

    def fetch(self, stage) -> Any:
        """When an interval's last WGMMA has been issued, on that stage: loads what its promotion needs."""

    def add(self, accumulators, partial, fetched) -> None:
        """Adds an interval's partial sums to the accumulators; `fetched` is what `fetch` returned."""
        # One by one: as a vector, they would be vectors in the main loop too.
        for i in range(cute.size(accumulators)):
            accumulators[i] = accumulators[i] + partial[i]


class PromotedProducts(Products):
    """See the module docstring. tiles: k tiles of an interval."""

    def __init__(self, config: HopperConfig, ring: Ring, turns: Turns, tiles: int, promotion: Promotion) -> None:
        super().__init__(config, ring, turns)
        self.tiles, self.promotion = tiles, promotion

    def start(self, a: Operand, b: Operand, position: Position, args: Any, work: Any, memory: Any) -> None:
        super().start(a, b, position, args, work, memory)
        self.accumulators = cute.make_rmem_tensor(self.target.layout, Float32)
        self.promotion.start(self, position, args, work, memory)

    @cute.jit
    def add_up(self, stage, phase, tile):
        """As `Products.add_up`, by intervals."""
        self.clear()
        self.promotion.open(tile)
        left = tile.k_tiles
        for _ in cutlass.range(cute.ceil_div(tile.k_tiles, self.tiles), unroll=1):
            self.ring.wait(stage, phase)
            warpgroup.fence()
            self.issue(stage, True)
            before = stage
            stage, phase = advance(stage, phase, self.ring.stages)
            if cutlass.const_expr(self.tiles > 1):
                for _ in cutlass.range(cutlass.min(left, self.tiles) - 1, unroll=1):
                    self.ring.wait(stage, phase)
                    self.issue(stage, False)
                    warpgroup.wait_group(1)
                    self.ring.release(before, self.lane)
                    before = stage
                    stage, phase = advance(stage, phase, self.ring.stages)
            left = left - self.tiles
            if cutlass.const_expr(self.config.ping_pong):  # noqa: SIM102
                if left <= 0:
                    self.turns.hand_over(self.group, self.lane)
            fetched = self.promotion.fetch(before)
            warpgroup.wait_group(0)
            self._add(before, self.target, fetched)
        return stage, phase

    def _add(self, stage, partial, fetched) -> None:
        """Adds partial sums whose last k tile lies in that stage, and releases it as soon as nobody reads it."""
        if not self.promotion.reads_pairs:
            self._release(stage)
        self.promotion.add(self.accumulators, partial, fetched)
        if self.promotion.reads_pairs:
            self._release(stage)

    def _release(self, stage) -> None:
        """A lane arrives for its warp, whose other lanes have read scales in that stage."""
        if self.promotion.reads_stage:
            cute.arch.sync_warp()
        self.ring.release(stage, self.lane)


class TwinProducts(PromotedProducts):
    """Two sets of partial sums, in turn: while one is promoted the next k tile is multiplied into the other.

    Its warpgroup keeps the tensor cores busy by itself. A promotion is after every k tile.
    """

    def start(self, a: Operand, b: Operand, position: Position, args: Any, work: Any, memory: Any) -> None:
        super().start(a, b, position, args, work, memory)
        self.twins = self.target, cute.make_rmem_tensor_like(self.target)

    @cute.jit
    def add_up(self, stage, phase, tile):
        """As `Products.add_up`."""
        self.clear()
        self.promotion.open(tile)
        self._multiply(stage, phase, 0)
        before = stage
        stage, phase = advance(stage, phase, self.ring.stages)
        more = tile.k_tiles - 1
        for _ in cutlass.range(more // 2, unroll=1):
            for turn in cutlass.range_constexpr(2):
                self._multiply(stage, phase, 1 - turn)
                self._promote(before, turn, 1)
                before = stage
                stage, phase = advance(stage, phase, self.ring.stages)
        if more % 2 == 1:
            self._multiply(stage, phase, 1)
            self._hand_over()
            self._promote(before, 0, 1)
            self._promote(stage, 1, 0)
            stage, phase = advance(stage, phase, self.ring.stages)
        else:
            self._hand_over()
            self._promote(before, 0, 0)
        return stage, phase

    def _multiply(self, stage, phase, turn: int) -> None:
        """Issues a k tile's WGMMA into one of the twins."""
        self.ring.wait(stage, phase)
        warpgroup.fence()
        self.target = self.twins[turn]
        self.mma = self.new_mma()  # whose state is not that of another branch
        self.issue(stage, True)

    def _hand_over(self) -> None:
        """In ping-pong, when the tile's last WGMMA has been issued."""
        if self.config.ping_pong:
            self.turns.hand_over(self.group, self.lane)

    def _promote(self, stage, turn: int, in_flight: int) -> None:
        """Promotes a twin, which that stage went into; so many younger k tiles go on being multiplied."""
        fetched = self.promotion.fetch(stage)
        warpgroup.wait_group(in_flight)
        self._add(stage, self.twins[turn], fetched)
        # The compiler would put off the additions beyond the next WGMMA into these registers, and copy them before.
        for i in range(cute.size(self.accumulators)):
            self.accumulators[i] = cute.arch.inline_ptx(
                "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[self.accumulators[i]]
            )


class PartProducts(PromotedProducts):
    """Products of operands that are sums of parts: the products of their parts, the smallest first in each k tile."""

    def __init__(
        self, config: HopperConfig, ring: Ring, turns: Turns, tiles: int, promotion: Promotion, parts: Parts
    ) -> None:
        super().__init__(config, ring, turns, tiles, promotion)
        self.parts = parts

    def issue(self, stage, overwrite: bool) -> None:
        """All products of one k tile as a group."""
        first = stage * self.parts.count
        for number, (i, j) in enumerate(self.parts.terms):
            for step in range(cute.size(self.fragment_a, mode=[2])):
                self.mma.set(warpgroup.Field.ACCUMULATE, not (overwrite and number == 0 and step == 0))
                a, b = (None, None, step, first + i), (None, None, step, first + j)
                cute.gemm(self.mma, self.target, self.fragment_a[a], self.fragment_b[b], self.target)
        warpgroup.commit_group()
