"""A consumer warpgroup of the Hopper kernel: it multiplies what the producer brings, and finishes its rows of D."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.mma import Products
from cutegemm.cute.hopper.pipeline import Turns, advance, skip
from cutegemm.cute.hopper.sums import Sums
from cutegemm.cute.hopper.work import Work


class Consumer:
    """Warpgroup `group`: for each of its works, the products of the k tiles, then the settlement of the sum.

    `work` is its own (`Work.of_warpgroup`); `products` and `sums` have been started. In ping-pong the warpgroup waits
    for its turn, and skips those stages of the ring that the other one reads.

    narrow: (columns, sums) of fitted tiles with fewer columns, ascending. Each width has accumulators of its own, and
    multiplies and stores in one branch: where branches share accumulators, ptxas serializes their WGMMAs.
    """

    def __init__(
        self, config: HopperConfig, group: Any, work: Work, turns: Turns, products: Products, sums: Sums, ahead: Any,
        narrow: Sequence[tuple[int, Sums]] = (),
    ) -> None:  # fmt: skip
        self.config, self.group, self.work = config, group, work
        self.narrow = [(products.narrowed(columns), sums) for columns, sums in narrow]
        self.turns, self.products, self.sums, self.ahead = turns, products, sums, ahead
        # Stages of the ring that hold operands of the epilogue, behind the k tiles of each tile.
        self.more = 0 if ahead is None else ahead.stages

    @cute.jit
    def run(self):
        """All works of this warpgroup."""
        config = self.config
        stage, phase, done = Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(config.ping_pong):
            before = self.work.k_tiles_before(self.group)
            if cutlass.const_expr(self.more > 0):
                before = before + self.group * self.more
            stage, phase = skip(stage, phase, before, config.stages)
        if cutlass.const_expr(self.products.prefetches):
            self._prefetch(self.work.first)
        for number in cutlass.range(self.work.first, self.work.end, self.work.step, unroll=1):
            tile = self.work.at(number)
            if cutlass.const_expr(config.ping_pong):
                self.turns.wait(self.group, done)
            if cutlass.const_expr(len(self.narrow) > 0):
                columns = tile.end - (tile.begin + tile.column * config.bn)
                stage, phase = self._fitted(stage, phase, tile, columns, 0)
            else:
                stage, phase = self._multiply(stage, phase, tile)
            if cutlass.const_expr(self.more > 0):
                self.ahead.open(stage, done)
                stage, phase = skip(stage, phase, Int32(self.more), config.stages)
            if cutlass.const_expr(config.ping_pong):
                stage, phase = skip(stage, phase, self.work.k_tiles_after(tile) + self.more, config.stages)
            if cutlass.const_expr(config.ping_pong or self.more > 0):
                done = done + 1
            if cutlass.const_expr(self.products.prefetches):
                self._prefetch(number + self.work.step)
            if cutlass.const_expr(len(self.narrow) == 0):
                self.sums.finish(self.products.accumulators, tile, self.work)
        self.sums.end()

    @cute.jit
    def _fitted(self, stage, phase, tile, columns, number: cutlass.Constexpr):
        """Multiplies and finishes a tile, with the narrowest products from the `number`-th on that have its columns."""
        if cutlass.const_expr(number == len(self.narrow)):
            stage, phase = self._compute((self.products, self.sums), stage, phase, tile)
        else:
            if columns <= self.narrow[number][0].columns:
                stage, phase = self._compute(self.narrow[number], stage, phase, tile)
            else:
                stage, phase = self._fitted(stage, phase, tile, columns, number + 1)
        return stage, phase

    def _compute(self, by: tuple[Products, Sums], stage, phase, tile) -> tuple:
        products, sums = by
        stage, phase = products.add_up(stage, phase, tile)
        sums.finish(products.accumulators, tile, self.work)
        return stage, phase

    @cute.jit
    def _prefetch(self, number):
        """Before the epilogue of the work before: what the products of a work read first, if there is such a work."""
        if number < self.work.end:
            self.products.prefetch(self.work.at(number))

    @cute.jit
    def _multiply(self, stage, phase, tile):
        """The products of a tile; where all rows of this warpgroup lie beyond their group's end, its stages pass by."""
        if cutlass.const_expr(not self.work.may_lack_rows):
            stage, phase = self.products.add_up(stage, phase, tile)
        else:
            if self.work.has_rows(tile):
                stage, phase = self.products.add_up(stage, phase, tile)
            else:
                for _ in cutlass.range(tile.k_tiles, unroll=1):
                    self.products.ring.wait(stage, phase)
                    cute.arch.sync_warp()  # WGMMA, which holds the warp together elsewhere, is missing
                    self.products.ring.release(stage, self.products.lane)
                    stage, phase = advance(stage, phase, self.products.ring.stages)
        return stage, phase
