"""The producer warp of the Hopper kernel: it brings the k tiles of A and B into the ring by TMA."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.cute.hopper.operand import Loader
from cutegemm.cute.hopper.pipeline import Ring, advance
from cutegemm.cute.hopper.work import Work


class Producer:
    """One warp: for each work of its CTA, the k tiles of both operands into the stages of the ring, in turn."""

    def __init__(self, ring: Ring, work: Work, load_a: Loader, load_b: Loader, ahead: Any) -> None:
        """ahead: `ahead.Ahead` where operands of the epilogue follow a tile's k tiles, or None."""
        self.ring, self.work, self.load_a, self.load_b, self.ahead = ring, work, load_a, load_b, ahead

    @cute.jit
    def run(self):
        """Loads the tiles of all works, then waits until the neighbours have read what this CTA multicast to them."""
        stage, phase, count = Int32(0), Int32(1), Int32(0)
        for number in cutlass.range(self.work.first, self.work.end, self.work.step, unroll=1):
            tile = self.work.at(number)
            place_a, place_b = self.load_a.place(tile.row, tile), self.load_b.place(tile.column, tile)
            k_tile, k_step = self.work.k_walk(tile)
            for _ in cutlass.range(tile.k_tiles, unroll=1):
                full = self.ring.acquire(stage, phase)
                self.load_a.load(place_a, k_tile, stage, full)
                self.load_b.load(place_b, k_tile, stage, full)
                stage, phase = advance(stage, phase, self.ring.stages)
                k_tile = self.work.k_next(tile, k_tile, k_step)
            if cutlass.const_expr(self.ahead is not None):
                stage, phase = self.ahead.load(self.work, tile, count, stage, phase)
                count = count + 1
        if cutlass.const_expr(self.load_a.multicasts or self.load_b.multicasts):
            # Neighbours still arrive at this CTA's barriers, and this CTA's copies still land in their shared memory.
            self.ring.drain(stage, phase)
