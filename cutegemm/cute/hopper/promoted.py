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

Partial sums take as many registers as accumulators. With option `half` they take half as many (`HalfProducts`), so that
a tile may have 128 x 256 elements: larger tiles load less.

The idea is that of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from cutegemm.cute.hopper.config import BLOCK_ROWS, HopperConfig
from cutegemm.cute.hopper.mma import Products
from cutegemm.cute.hopper.operand import Operand
from cutegemm.cute.hopper.pipeline import Ring, Turns, advance
from cutegemm.cute.hopper.position import Position
from cutegemm.problem.parts import Parts


class Promotion:
    """How partial sums become accumulators: added as they are. A class that scales them overrides these methods.

    reads_stage: whether `fetch` reads the stage with plain loads. reads_pairs: whether `add` does. prefetches: whether
    `prefetch` loads anything.
    """

    reads_stage = reads_pairs = prefetches = False

    def start(self, products: PromotedProducts, position: Position, args, work, memory) -> None:
        """Binds to a warpgroup's products, the kernel's arguments, the works of the CTA, its shared memory."""

    def prefetch(self, tile) -> None:
        """Before the epilogue of the work before `tile`: loads what the first promotions of `tile` need."""

    def open(self, tile) -> None:
        """Before the first k tile of a work."""

    def fetch(self, stage) -> Any:
        """When an interval's last WGMMA has been issued, on that stage: loads what its promotion needs."""

    def add(self, accumulators, partial, fetched, half: int = 0) -> None:
        """Adds an interval's partial sums to the accumulators; `fetched` is what `fetch` returned.

        half: where there are half as many partial sums, to which half of the accumulators they are added.
        """
        # One by one: as a vector, they would be vectors in the main loop too.
        first = half * cute.size(partial)
        for i in range(cute.size(partial)):
            accumulators[first + i] = accumulators[first + i] + partial[i]


def _pin(accumulators, first: int, count: int) -> None:
    """Keeps additions before the next WGMMA, which overwrites the partial sums: the compiler would put them off beyond
    it, and copy the partial sums before.
    """
    for i in range(first, first + count):
        accumulators[i] = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[accumulators[i]]
        )


class PromotedProducts(Products):
    """Products whose partial sums are added to the accumulators after each interval. tiles: k tiles of an interval."""

    def __init__(self, config: HopperConfig, ring: Ring, turns: Turns, tiles: int, promotion: Promotion) -> None:
        super().__init__(config, ring, turns)
        self.tiles, self.promotion = tiles, promotion
        self.prefetches = promotion.prefetches

    def start(self, a: Operand, b: Operand, position: Position, args: Any, work: Any, memory: Any) -> None:
        super().start(a, b, position, args, work, memory)
        self.accumulators = cute.make_rmem_tensor(self.target.layout, Float32)
        self.promotion.start(self, position, args, work, memory)

    def prefetch(self, tile) -> None:
        self.promotion.prefetch(tile)

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
        """One lane arrives for its warp, once all lanes have read their scales in that stage."""
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
        """Promotes the twin with the sums of that stage, while `in_flight` later k tiles are multiplied."""
        fetched = self.promotion.fetch(stage)
        warpgroup.wait_group(in_flight)
        self._add(stage, self.twins[turn], fetched)
        _pin(self.accumulators, 0, cute.size(self.accumulators))


class HalfProducts(PromotedProducts):
    """Partial sums of half of a warpgroup's tile: of one of its two blocks of 64 rows, or of one block with half of the
    columns. A promotion is after every k tile, of one half after the other:

        WGMMA of half 0; wait; promote it        the other warpgroup's WGMMA runs meanwhile
        WGMMA of half 1; wait; release the stage; look whether the next one is full; promote it

    A half's WGMMA takes as long as the other warpgroup needs to promote and to issue its next one, so that whatever a
    warpgroup waits for in between costs time. So it looks at the next stage's barrier before it promotes: the answer
    arrives under the additions.
    """

    def __init__(self, config: HopperConfig, ring: Ring, turns: Turns, tiles: int, promotion: Promotion) -> None:
        super().__init__(config, ring, turns, tiles, promotion)
        self.by_rows = config.group_rows > BLOCK_ROWS
        if not self.by_rows:
            self.columns = config.bn // 2

    def start(self, a: Operand, b: Operand, position: Position, args: Any, work: Any, memory: Any) -> None:
        super().start(a, b, position, args, work, memory)
        # By a shuffle, which ptxas does not repeat: it would read the thread's number again for each release, behind
        # the additions.
        self.lane = cute.arch.shuffle_sync_bfly(position.lane ^ 1, 1)
        rows = self.config.bm // (2 if self.by_rows else 1)
        self.target = self.mma.make_fragment_C(self.mma.partition_shape_C((rows, self.columns)))

    @cute.jit
    def add_up(self, stage, phase, tile):
        """As `Products.add_up`."""
        self.promotion.open(tile)
        self.clear()
        full = self.ring.is_full(stage, phase)
        for _ in cutlass.range(tile.k_tiles, unroll=1):
            self.ring.wait_unless(full, stage, phase)
            self._multiply(stage, 0)
            fetched = self.promotion.fetch(stage)
            warpgroup.wait_group(0)
            self._promote(fetched, 0)
            self._multiply(stage, 1)
            warpgroup.wait_group(0)
            self.ring.release(stage, self.lane)
            stage, phase = advance(stage, phase, self.ring.stages)
            full = self.ring.is_full(stage, phase)
            self._promote(fetched, 1)
        return stage, phase

    def _multiply(self, stage, half: int) -> None:
        """Issues a k tile's WGMMA of a half."""
        warpgroup.fence()
        for step in range(cute.size(self.fragment_a, mode=[2])):
            self.mma.set(warpgroup.Field.ACCUMULATE, step != 0)
            a = self._block(self.fragment_a, half if self.by_rows else 0, step, stage)
            b = self._block(self.fragment_b, 0 if self.by_rows else half, step, stage)
            cute.gemm(self.mma, self.target, a, b, self.target)
        warpgroup.commit_group()

    @staticmethod
    def _block(fragment, number: int, step: int, stage):
        """Of a step of a k tile one block, as a fragment that has one."""
        block = fragment[None, number, step, stage]
        return cute.make_tensor(block.iterator, cute.append(block.layout, cute.make_layout(1)))

    def _promote(self, fetched, half: int) -> None:
        self.promotion.add(self.accumulators, self.target, fetched, half)
        _pin(self.accumulators, half * cute.size(self.target), cute.size(self.target))


class PartProducts(PromotedProducts):
    """Products of operands that are sums of parts: the products of their parts, the smallest first in each k tile."""

    def __init__(
        self, config: HopperConfig, ring: Ring, turns: Turns, tiles: int, promotion: Promotion, parts: Parts
    ) -> None:
        super().__init__(config, ring, turns, tiles, promotion)
        self.parts = parts

    def issue(self, stage, overwrite: bool) -> None:
        """All products of one k tile as a group."""
        self._issue(stage, self._products(), self.target, overwrite)

    def _products(self) -> list[tuple[int, int, int]]:
        """(part of A, part of B, step of the k tile) of each WGMMA of a k tile, the smallest products first."""
        return [(i, j, step) for i, j in self.parts.terms for step in range(cute.size(self.fragment_a, mode=[2]))]

    def _issue(self, stage, products: list[tuple[int, int, int]], target, overwrite: bool) -> None:
        """Some products of one k tile as a group; the first may overwrite `target`."""
        first = stage * self.parts.count
        for number, (i, j, step) in enumerate(products):
            self.mma.set(warpgroup.Field.ACCUMULATE, not (overwrite and number == 0))
            a, b = (None, None, step, first + i), (None, None, step, first + j)
            cute.gemm(self.mma, target, self.fragment_a[a], self.fragment_b[b], target)
        warpgroup.commit_group()


class CompensatedProducts(PartProducts):
    """The same with less error, for tiles of few accumulators: four sets of registers instead of two.

    The second half of the largest products of a k tile has partial sums of its own, `late`, so that sums as large as
    the tile's are truncated half as often:

        target    small products, then the largest of the first half of the k tile
        late      the largest of the second half

    And what an addition of partial sums p to the accumulators a rounds off is summed in `lost`, which is added at the
    end: with s = fl(a + p) it is p - (s - a), exactly where |a| >= |p| (Dekker 1971), and elsewhere up to one rounding
    of p. So however long K is, promotions err as two or three additions do, and a sum without roundings stays exact.

    The few products of `late` are multiplied first: their promotion takes place while the others run. Nothing is under
    way at the end of a k tile: else ptxas waits after every WGMMA.
    """

    def start(self, a: Operand, b: Operand, position: Position, args: Any, work: Any, memory: Any) -> None:
        super().start(a, b, position, args, work, memory)
        self.late, self.lost = (cute.make_rmem_tensor(self.target.layout, Float32) for _ in range(2))

    @cute.jit
    def add_up(self, stage, phase, tile):
        """As `Products.add_up`; a promotion for each half of a k tile."""
        self.clear()
        self.lost.fill(0.0)
        half = cute.size(self.fragment_a, mode=[2]) // 2
        for left in cutlass.range(tile.k_tiles, 0, -1, unroll=1):
            self.ring.wait(stage, phase)
            warpgroup.fence()
            self._issue(stage, self._products()[-half:], self.late, True)
            self._issue(stage, self._products()[:-half], self.target, True)
            if cutlass.const_expr(self.config.ping_pong):  # noqa: SIM102
                if left == 1:
                    self.turns.hand_over(self.group, self.lane)
            warpgroup.wait_group(1)
            self._promote(self.late)
            warpgroup.wait_group(0)
            self.ring.release(stage, self.lane)
            self._promote(self.target)
            stage, phase = advance(stage, phase, self.ring.stages)
        self._close()
        return stage, phase

    def _promote(self, partial) -> None:
        for i in range(cute.size(partial)):
            before = self.accumulators[i]
            self.accumulators[i] = before + partial[i]
            self.lost[i] = self.lost[i] + (partial[i] - (self.accumulators[i] - before))

    def _close(self) -> None:
        for i in range(cute.size(self.lost)):
            total = self.accumulators[i] + self.lost[i]
            # Behind an infinity what was lost is no number; the sum is right without it.
            self.accumulators[i] = Float32(cutlass.select_(total == total, total, self.accumulators[i]))
