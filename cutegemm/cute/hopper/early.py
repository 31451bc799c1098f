"""Constant operands: what the producer may load while the kernel in front still runs.

Under programmatic dependent launch a kernel begins before the one in front of it has ended, and waits for it before it
reads or writes anything in global memory (`kernel`). Where a call promises that no running kernel writes an operand
(`gemm(..., constant="b")`, say a layer's weights), its tiles need not wait: the ring is empty, so the producer fills
its stages with the tiles of that operand, and adds those of the other one behind the wait.

    producer     | B of stages 0 .. S-1 | wait for the kernel in front | A of stages 0 .. S-1 | A and B, stage by stage
    consumers                           | wait for the kernel in front | WGMMA as stages become full

A stage's full barrier is armed once, for the bytes of both operands, by the first of the two loads. Everything else,
the epilogue's operands and the workspace of a split sum, is touched behind the wait only, as without a promise.

The promise belongs to the signature, because it makes other machine code. It changes nothing where `constant` says that
a kernel makes no use of it: without option `pdl`, in `solo`, whose warps all load and multiply in turn, for works whose
sizes lie on the device, and for fp32 operands that are split into parts.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.operand import Loader
from cutegemm.cute.hopper.pipeline import Ring, advance
from cutegemm.cute.hopper.producer import Producer
from cutegemm.cute.hopper.work import Work
from cutegemm.problem import Signature


def is_constant(config: HopperConfig, signature: Signature) -> tuple[bool, bool]:
    """Whether the WGMMA's operands "a" and "b" are constant: those of the problem, or exchanged."""
    a, b = signature.constant == "a", signature.constant == "b"
    return (b, a) if config.swapped else (a, b)


class EarlyProducer(Producer):
    """A producer that loads one operand, `early`, before it waits for the kernel in front, and `behind` after it."""

    def __init__(
        self, ring: Ring, work: Work, load_a: Loader, load_b: Loader, ahead: Any, constant: tuple[bool, bool]
    ) -> None:
        super().__init__(ring, work, load_a, load_b, ahead)
        self.a_is_ahead = constant[0]
        self.early, self.behind = (load_a, load_b) if constant[0] else (load_b, load_a)

    def _places(self, tile):
        """Where the tiles of `early` and `behind` lie for a tile of D."""
        places = self.load_a.place(tile.row, tile), self.load_b.place(tile.column, tile)
        return places if self.a_is_ahead else places[::-1]

    @cute.jit
    def fetch(self):
        """Before the wait: fills the stages with the first tiles of the constant operand."""
        stage, phase = Int32(0), Int32(1)
        if self.work.first < self.work.end:
            tile = self.work.at(self.work.first)
            place, _ = self._places(tile)
            k_tile, k_step = self.work.k_walk(tile)
            for _ in cutlass.range(cutlass.min(tile.k_tiles, Int32(self.ring.stages)), unroll=1):
                self.early.load(place, k_tile, stage, self.ring.acquire(stage, phase))
                stage, phase = advance(stage, phase, self.ring.stages)
                k_tile = self.work.k_next(tile, k_tile, k_step)

    @cute.jit
    def run(self):
        """Behind the wait: the other operand for these stages, then everything as `Producer` does."""
        stage, phase, count = Int32(0), Int32(1), Int32(0)
        left = Int32(self.ring.stages)
        for number in cutlass.range(self.work.first, self.work.end, self.work.step, unroll=1):
            tile = self.work.at(number)
            early, behind = self._places(tile)
            k_tile, k_step = self.work.k_walk(tile)
            left = cutlass.min(left, tile.k_tiles)
            for _ in cutlass.range(tile.k_tiles, unroll=1):
                if left == 0:
                    self.early.load(early, k_tile, stage, self.ring.acquire(stage, phase))
                else:
                    left = left - 1
                self.behind.load(behind, k_tile, stage, self.ring.full + stage)
                stage, phase = advance(stage, phase, self.ring.stages)
                k_tile = self.work.k_next(tile, k_tile, k_step)
            if cutlass.const_expr(self.ahead is not None):
                stage, phase = self.ahead.load(self.work, tile, count, stage, phase)
                count = count + 1
        if cutlass.const_expr(self.load_a.multicasts or self.load_b.multicasts):
            self.ring.drain(stage, phase)
