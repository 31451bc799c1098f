"""The general epilogue of the Hopper kernel, for what TMA cannot store and for C in any strides.

A warp copies 16 rows of accumulators at a time into shared memory (a *slab*), and its threads finish them and store
them in vectors; the kernels without TMA store in the same way. `store` says which accumulators a thread holds.
"""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutegemm.cute.epilogue import SlabEpilogue
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.memory import SharedMemory
from cutegemm.cute.hopper.output import Output
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.launch_config import SLAB_ROWS
from cutegemm.problem import Signature

MOST_UNROLLED_STRIPS = 4
"""Strips of a `SlabStore` that have code of their own each; of more than that the first has."""


def up_offset(config: HopperConfig, signature: Signature) -> int:
    """From a thread's accumulator of gate to the one of up."""
    if signature.epilogue.gating == "pairs":
        return 1
    columns = config.out_columns(signature)
    return config.out_blocks(signature) * (config.bn // 2) if columns == config.bn else columns // 2


class SlabStore:
    """The general epilogue: `epilogue.SlabEpilogue` on strips of columns, a slab a warp.

    Many strips share the code from the slab to D, which with C, a bias and an activation is long: 26 copies of it
    took the compiler 3 s, and spilled where D is unaligned. Accumulators have no run-time index, so that filling the
    slab keeps code for each strip, found by a tree of branches. The first strip comes before the loop: its accumulators
    are free when the loop, which holds all others, needs registers.
    """

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self.config, self.signature = config, signature
        self.blocks, self.block_step = config.out_blocks(signature), config.block_step
        self.columns, self.block_size = config.slab_columns, config.bn // 2
        self.strips = config.bn // self.columns
        # Of a gated program a strip is `step` columns of results, and its slab has the accumulators of both.
        self.step = self.columns * config.out_columns(signature) // config.bn
        self.halves, self.up = signature.epilogue.gating == "halves", up_offset(config, signature)
        strip: Any = types.SimpleNamespace(wn=config.slab_width(signature), crossed=False)
        self.slabs = SlabEpilogue(strip, signature, late_bias=True)

    def narrowed(self, columns: int) -> SlabStore:
        """As `TmaEpilogue.narrowed`; a slab is as large for every width."""
        return type(self)(replace(self.config, bn=columns), self.signature)

    def make_atoms(self, args) -> tuple:
        """Needs no tensor maps."""
        return ()

    def start(self, output: Output, memory: SharedMemory, position: Position) -> None:
        """Binds to a launch's output, to the slabs of this warpgroup, and to this thread."""
        thread = position.own_thread
        self.args = output.args
        self.warp = thread // 32
        self.lane = thread % 32
        words = 4 * SLAB_ROWS * self.slabs.pitch
        self.memory = cute.recast_ptr(memory.staging, dtype=Float32) + position.group * words

    @cute.jit
    def store(self, accumulators, region):
        """Stores the warpgroup's blocks of 64 rows of a tile."""
        strips = self.blocks * self.strips
        unrolled = strips if cutlass.const_expr(strips <= MOST_UNROLLED_STRIPS) else 1
        row = region.row + self.warp * SLAB_ROWS
        for number in cutlass.range_constexpr(unrolled):
            self._open(*self._corner(number, row, region.column), region)
            self._fill(self._strip(accumulators, number))
            self.slabs.store_rows(0)
        if cutlass.const_expr(unrolled < strips):
            for number in cutlass.range(unrolled, strips, unroll=1):
                self._open(*self._corner(number, row, region.column), region)
                self._fill_one_of(accumulators, number, unrolled, strips)
                self.slabs.store_rows(0)

    def _corner(self, number, row, column) -> tuple[Any, Any]:
        """(row, column) of the first accumulator of strip `number`. row: the warp's first row."""
        block = number // self.strips
        return row + block * self.block_step, column + (number - block * self.strips) * self.step

    @cute.jit
    def _fill_one_of(self, accumulators, number, first: cutlass.Constexpr, end: cutlass.Constexpr):
        """`_fill` with strip `number`, which is one from `first` to `end` - 1."""
        if cutlass.const_expr(end - first == 1):
            self._fill(self._strip(accumulators, first))
        else:
            middle = (first + end) // 2
            if number < middle:
                self._fill_one_of(accumulators, number, first, middle)
            else:
                self._fill_one_of(accumulators, number, middle, end)

    def _strip(self, accumulators, number: int):
        """This thread's accumulators of strip `number`, 64 rows x `columns`: (c, r, j), c fastest; of gate and of up
        a half each, or with swapped operands both of as many.
        """
        if not self.halves:
            values = accumulators.iterator + number * (self.columns // 2)
            return cute.make_tensor(values, cute.make_layout((2, 2, self.columns // 8)))
        block, strip = divmod(number, self.strips)
        first = block * self.block_size + strip * (self.step // 2)
        layout = cute.make_layout((2, 2, (self.step // 8, 2)), stride=(1, 2, (4, self.up)))
        return cute.make_tensor(accumulators.iterator + first, layout)

    def _open(self, row, column, region) -> None:
        self.slabs.start(self.memory, region.matrix, row, column, region.m, region.n, self.warp, self.lane, self.args)

    def _fill(self, values) -> None:
        slab = self.slabs.slab.iterator + (self.lane // 4) * self.slabs.pitch + 2 * (self.lane % 4)
        for j in range(self.columns // 8):
            for r in range(2):
                pair = cute.make_rmem_tensor(2, Float32)
                for c in range(2):
                    pair[c] = values[c, r, j]
                place = cute.make_tensor(slab + (8 * r * self.slabs.pitch + 8 * j), cute.make_layout(2))
                cute.autovec_copy(pair, place)

    def finish(self) -> None:
        """Nothing is in flight."""


class TransposedSlabStore(SlabStore):
    """The same for swapped operands: a strip of 16 accumulator columns is 16 rows of D, a warp's rows 16 columns."""

    def _open(self, row, column, region) -> None:
        super()._open(column, row, region)

    def _fill(self, values) -> None:
        pitch = self.slabs.pitch
        slab = self.slabs.slab.iterator + 2 * (self.lane % 4) * pitch + self.lane // 4
        for j in range(4 if self.halves else 2):
            for r in range(2):
                for c in range(2):
                    place = slab + ((8 * (j % 2) + c) * pitch + 8 * r + 16 * (j // 2))
                    cute.make_tensor(place, cute.make_layout(1))[0] = values[c, r, j]
