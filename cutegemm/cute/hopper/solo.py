"""One warpgroup that loads and multiplies by itself: the Hopper kernel before it had roles, to measure what they bring.

    load k tile 0 | WGMMA | load k tile 1 | WGMMA | ... | store

Its first warp asks TMA for a k tile, everyone waits until it has arrived, multiplies, and waits for the result. The
ring and its barriers are those of the other schedules; a depth of one stage is enough.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cutegemm.cute.hopper.mma import Products
from cutegemm.cute.hopper.operand import Loader
from cutegemm.cute.hopper.pipeline import Ring, advance
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.sums import Sums
from cutegemm.cute.hopper.work import Work


class Solo:
    """The whole CTA; `products` and `sums` have been started."""

    def __init__(
        self,
        position: Position,
        ring: Ring,
        work: Work,
        load_a: Loader,
        load_b: Loader,
        products: Products,
        sums: Sums,
    ) -> None:
        self.warp, self.lane = position.warp, position.lane
        self.ring, self.work, self.load_a, self.load_b = ring, work, load_a, load_b
        self.products, self.sums = products, sums

    @cute.jit
    def run(self):
        """All tiles of this CTA."""
        stage, phase = Int32(0), Int32(0)
        for number in cutlass.range(self.work.first, self.work.end, self.work.step, unroll=1):
            tile = self.work.at(number)
            place_a, place_b = self.load_a.place(tile.row, tile), self.load_b.place(tile.column, tile)
            # WGMMA adds from the first k tile on: peeling it would take a second copy of the loads.
            self.products.clear()
            warpgroup.fence()
            for k_tile in cutlass.range(tile.first_k, tile.first_k + tile.k_tiles, unroll=1):
                if self.warp == 0:
                    full = self.ring.acquire(stage, phase ^ 1)
                    self.load_a.load(place_a, k_tile, stage, full)
                    self.load_b.load(place_b, k_tile, stage, full)
                self.ring.wait(stage, phase)
                self.products.issue(stage, False)
                warpgroup.wait_group(0)
                self.ring.release(stage, self.lane)
                stage, phase = advance(stage, phase, self.ring.stages)
            self.sums.finish(self.products.accumulators, tile, self.work)
        self.sums.end()
