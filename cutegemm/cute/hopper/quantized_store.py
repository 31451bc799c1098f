"""The epilogue that quantizes D with scales of blocks (`ops.quantize`): a box of D has the 128 columns of a block.

A thread has 32 values of each of two rows of a box, and four lanes share a row. They are kept in fp32, in the registers
of the accumulators that they were made of, until the lanes have found the largest magnitude of their row. Then the
scale is known, and the values are rounded into the staging buffer. So neither D in 16 bits nor its reading again by a
kernel that quantizes takes the memory's time.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

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
        self.program, self.format, self.scales_output = found.program, NAMED[found.dtype], found.scales
        self.several_matrices = WORKS[signature.work].matrices("d", 2) > 1

    def _stage(self, accumulators, corner, i, part, buffer) -> None:
        count = 4 // self.neighbours  # of each row four results at a time, which share a reciprocal (`cute.lowering`)
        firsts = range(0, self.columns // self.block, count)
        kept = cute.make_rmem_tensor((8, len(firsts)), Float32)
        for place, first in enumerate(firsts):
            kept[None, place].store(self._finished(accumulators, corner, i, part, first, count, None)[0])
        largest = self._largest(kept, self.region.n - self.own_corner(corner)[1])
        scales = [of_largest(self.format, self._over_row(largest[r])) for r in range(2)]
        self._put_scales(scales, corner)
        inverses = [reciprocal(each) for each in scales]
        for place, first in enumerate(firsts):
            values = cute.make_rmem_tensor(8, Float32)
            for q in range(8):
                values[q] = kept[q, place] * inverses[self._row(q)]
            result = cute.make_rmem_tensor(8, self.out_type)
            result.store(rounded(values.load(), self.out_type, 8))
            for j in range(count):
                address = self.own.address(first + j) + buffer * self.buffer_bytes
                for r in range(2):
                    self._put(address + 8 * r * self.row_bytes, result, 2 * j + r)

    @cute.jit
    def _largest(self, kept, left):
        """The largest magnitude of each row, of `left` columns from this thread's first on."""
        largest = cute.make_rmem_tensor(2, Float32)
        largest.fill(0)
        if left >= self.columns:
            for place in cutlass.range_constexpr(kept.shape[1]):
                for q in cutlass.range_constexpr(8):
                    self._take(largest, self._row(q), _magnitude(kept[q, place]))
        else:
            for place in cutlass.range_constexpr(kept.shape[1]):
                for q in cutlass.range_constexpr(8):
                    there = left > self._column(place, q)
                    self._take(largest, self._row(q), either(there, _magnitude(kept[q, place]), Float32(0)))
        return largest

    def _take(self, largest, row: int, size) -> None:
        largest[row] = larger(self.format, largest[row], size)

    def _row(self, q: int) -> int:
        """Which of a thread's two rows the q-th of eight values is in."""
        return q // self.neighbours % 2

    def _column(self, place: int, q: int) -> int:
        """How many columns of D the q-th of the eight values number `place` lies behind the thread's first."""
        block = place * (4 // self.neighbours) + q // (2 * self.neighbours)
        return self.block * block + q % self.neighbours

    def _over_row(self, value) -> Any:
        """The largest number of the four lanes of a row."""
        for step in (1, 2):
            value = larger(self.format, value, cute.arch.shuffle_sync_bfly(value, step))
        return value

    def _put_scales(self, scales, corner) -> None:
        if self.scales_output is None:
            return
        blocks = cute.ceil_div(self.region.n, SCALED)
        start = getattr(self.args, f"y{self.scales_output}")
        if self.several_matrices:
            start = start + Int64(self.region.matrix) * (Int64(self.args.m) * blocks)
        row = self.own_corner(corner)[0]
        for r in range(2):
            place = start + (Int64(row + 8 * r) * blocks + corner[1] // SCALED)
            self._put_scale(scales[r], place, row + 8 * r, corner[1])

    @cute.jit
    def _put_scale(self, value, place, row, column):
        if (self.lane % 4 == 0) & (row < self.region.m) & (column < self.region.n):
            cute.make_tensor(place, cute.make_layout(1))[0] = value


def _magnitude(x: Any) -> Any:
    """|x|, of one number; `cute.math.abs` is of vectors."""
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
