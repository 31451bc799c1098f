"""The ring of stages in shared memory that a CTA's own threads fill with k tiles of A and B.

The kernels without TMA begin alike. Both loaders (`tile_load`) are bound to the CTA's rows and columns, and all stages
but one are filled; what the last one gets, the main loop asks for, while it multiplies the first:

    stage     0 | 1 | ... | stages - 2 | stages - 1
    k tile    0 | 1 | ... | stages - 2 | left to the main loop

What cp.async brings is a commit group for each tile. What takes the way through registers
(`tile_load.TransposingLoader`) is stored at once; of the last stage's tile it is in registers when the main loop
begins. Tiles beyond K are copied as well: such copies write zeros and read nothing.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from cutegemm.cute.warps.tile_load import TileLoader


class CopyRing:
    """The ring of stages that a CTA's threads fill: the prologue, and what a main loop does to a stage of A and B."""

    def __init__(self, a: TileLoader, b: TileLoader, stages: int) -> None:
        self.a, self.b, self.stages = a, b, stages

    def start(self, memory, a, b, lda, ldb, m, n, k, row, column, tid, await_front) -> None:
        """Binds to the ring's memory and to the tile whose first output is (row, column), and fills it.

        `a`, `b`: this matrix of the operands, with leading dimensions (Int64) `lda`, `ldb`; `tid`: the thread.
        `await_front()` waits until operands may be read.
        """
        self.memory_a, self.memory_b = memory, memory + self.stages * self.a.stage_bytes
        self.base_a, self.base_b = self.memory_a.toint(), self.memory_b.toint()
        self.a.start(a, lda, row, m, k, tid)
        self.b.start(b, ldb, column, n, k, tid)
        self.k_tiles = cute.ceil_div(k, self.a.bk)
        await_front()
        for stage in range(self.stages - 1):
            self.copy(Int32(stage), stage)
            cute.arch.cp_async_commit_group()
        # All that comes through registers is under way before the first of it is awaited; the main loop's is in room 0.
        for stage in range(self.stages):
            self.fetch(Int32(stage), (stage + 1) % self.stages)
        for stage in range(self.stages - 1):
            self.settle(stage, stage + 1)

    def tensors(self) -> tuple[cute.Tensor, cute.Tensor]:
        """The ring as tensors (bm, bk, stages) of A and (bn, bk, stages) of B."""
        return self.a.ring(self.memory_a, self.stages), self.b.ring(self.memory_b, self.stages)

    def copy(self, k_tile, stage, part: int = 0, parts: int = 1) -> None:
        """Starts the copies of a k tile into a stage; with `parts` only share `part` of them."""
        self.a.copy(k_tile, self.base_a + stage * self.a.stage_bytes, part, parts)
        self.b.copy(k_tile, self.base_b + stage * self.b.stage_bytes, part, parts)

    def fetch(self, k_tile, room: int = 0) -> None:
        """Loads what of a k tile takes the way through registers into their set number `room`."""
        self.a.fetch(k_tile, room)
        self.b.fetch(k_tile, room)

    def settle(self, stage, room: int = 0) -> None:
        """Stores into a stage what was fetched into set `room` of the registers."""
        self.a.settle(self.base_a + stage * self.a.stage_bytes, room)
        self.b.settle(self.base_b + stage * self.b.stage_bytes, room)
