"""The epilogue that quantizes D with scales of blocks (`ops.quantize`): a box of D has the 128 columns of a block.

A thread has 32 values of each of two rows of a box, and four lanes share a row. They are kept in fp32, in the registers
of the accumulators that they were made of, until the lanes have found the largest magnitude of their row. Then the
scale is known, and the values are rounded into the staging buffer. So neither D in 16 bits nor its reading again by a
kernel that quantizes takes the memory's time.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.plain_store import PlainTmaEpilogue
from cutegemm.cute.lowering import rounded
from cutegemm.cute.quantize.scale import larger, of_largest, reciprocal
from cutegemm.cute.reduction import either
from cutegemm.problem import Signature
from cutegemm.problem.program import quantized
from cutegemm.problem.program.graph import SCALED
from cutegemm.problem.quantization import NAMED
from cutegemm.problem.work import TABLE as WORKS


class QuantizedEpilogue(PlainTmaEpilogue):
    """`PlainTmaEpilogue` for results that are quantized box by box."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        super().__init__(config, signature)
        found = quantized.read(signature.epilogue.program)
        assert found is not None
        self.program, self.format, self.number = found.program, NAMED[found.dtype], found.scales
        self.many = WORKS[signature.work].matrices("d", 2) > 1

    def _stage(self, accumulators, corner, i, part, buffer) -> None:
        count = 2 // self.neighbours  # four results at a time
        firsts = range(0, self.columns // self.block, count)
        # Behind a move that the compiler cannot see through, as in `reduce.Across`.
        left = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};",
            write_only_types=[Int32],
            read_only_args=[self.region.n - self.own_corner(corner)[1]],
        )
        kept, largest = [], [Float32(0), Float32(0)]
        for first in firsts:
            values = cute.make_rmem_tensor(4, Float32)
            values.store(self._finished(accumulators, corner, i, part, first, count, None)[0])
            for q in range(4):
                there = left > self._column(first, q)
                size = cute.make_rmem_tensor(1, Float32)
                size.store(cute.math.abs(cute.make_tensor(values.iterator + q, cute.make_layout(1)).load()))
                own = either(there, size[0], Float32(0))
                largest[self._row(q)] = larger(self.format, largest[self._row(q)], own)
            kept.append(values)
        scales = [of_largest(self.format, self._over_row(each)) for each in largest]
        self._put_scales(scales, corner)
        inverses = [reciprocal(each) for each in scales]
        for first, values in zip(firsts, kept, strict=True):
            for q in range(4):
                values[q] = values[q] * inverses[self._row(q)]
            result = cute.make_rmem_tensor(4, self.out_type)
            result.store(rounded(values.load(), self.out_type, 4))
            for j in range(count):
                address = self.own.address(first + j) + buffer * self.buffer_bytes
                for r in range(2):
                    self._put(address + 8 * r * self.row_bytes, result, 2 * j + r)

    def _row(self, q: int) -> int:
        """Which of a thread's two rows the q-th of four values is in."""
        return q // self.neighbours % 2

    def _column(self, first: int, q: int) -> int:
        """How many columns of D the q-th of four values from block `first` lies behind the thread's first."""
        return self.block * (first + q // (2 * self.neighbours)) + q % self.neighbours

    def _over_row(self, value) -> Any:
        """The largest number of the four lanes of a row."""
        for step in (1, 2):
            value = larger(self.format, value, cute.arch.shuffle_sync_bfly(value, step))
        return value

    def _put_scales(self, scales, corner) -> None:
        if self.number is None:
            return
        blocks = cute.ceil_div(self.region.n, SCALED)
        start = getattr(self.args, f"y{self.number}")
        if self.many:
            start = start + Int64(self.region.matrix) * (Int64(self.args.m) * blocks)
        row = self.own_corner(corner)[0]
        for r in range(2):
            place = start + (Int64(row + 8 * r) * blocks + corner[1] // SCALED)
            self._put_scale(scales[r], place, row + 8 * r, corner[1])

    @cute.jit
    def _put_scale(self, value, place, row, column):
        if (self.lane % 4 == 0) & (row < self.region.m) & (column < self.region.n):
            cute.make_tensor(place, cute.make_layout(1))[0] = value
