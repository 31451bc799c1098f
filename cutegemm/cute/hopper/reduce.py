"""Reduced results in the Hopper epilogue that stores by TMA: from accumulators to pieces (`cute.reduction`).

Rows and columns are those of the accumulators; with swapped operands they are the columns and rows of D.

    Across    over a row: a thread combines its columns of a tile, four lanes share a row. A piece is a tile wide
    Down      over a column: eight lanes have two rows each of the same columns. They send each other half of what they
              have, three times over, so that in the end each has another column. A piece is a warp's 16 rows
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.cute.hopper.config import WARP_ROWS, HopperConfig
from cutegemm.cute.reduction import Partial, either, partials
from cutegemm.problem import Signature


def make_reductions(config: HopperConfig, signature: Signature) -> list[Any]:
    """The strategy for each reduced result of the signature's program."""
    return [
        (Across if each.of_rows != config.swapped else Down)(config, signature, each) for each in partials(signature)
    ]


class _Reduction:
    def __init__(self, config: HopperConfig, signature: Signature, partial: Partial) -> None:
        self.config, self.partial, self.number = config, partial, partial.number
        self.width, self.block_step = config.out_columns(signature), config.block_step

    def start(self, args, region, warp, lane) -> None:
        """Binds to a launch, to a warpgroup's `region` of a tile, and to this thread."""
        self.region, self.warp, self.lane = region, warp, lane
        self.rows, self.columns = (region.n, region.m) if self.config.swapped else (region.m, region.n)
        self._bind(args)

    def _bind(self, args) -> None:
        """Binds the scratch memory of the pieces."""
        raise TypeError(f"{type(self).__name__} does not implement _bind")

    def turned(self, place: tuple) -> tuple:
        """(row, column) of D as that of the accumulators."""
        return (place[1], place[0]) if self.config.swapped else place

    def begin(self) -> None:
        """Before the first values of a block of 64 rows."""

    def end(self, block: int) -> None:
        """After the last values of a block of 64 rows."""


class Across(_Reduction):
    """Reduces each row of the accumulators; four lanes share a row."""

    def _bind(self, args) -> None:
        self.partial.start(args, self.region.matrix, cute.ceil_div(self.columns, self.width), self.rows)

    def begin(self) -> None:
        self.totals = self.partial.empty(2)

    def add(self, values, corner: tuple, own: tuple, first: int, count: int) -> None:
        """Takes `count` blocks of 8 columns from block `first` of the box at `corner`, (c, r, j), c fastest; `own`: of
        this thread's first accumulator there.
        """
        elements = self.partial.elements(values, 4 * count)
        # Behind a move that the compiler cannot see through: comparisons kept for the next block would take registers.
        left = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[self.columns - self.turned(own)[1]]
        )
        for j in range(count):
            for c in range(2):
                there = left > 8 * (first + j) + c
                for r in range(2):
                    value = self.partial.inside(elements[4 * j + 2 * r + c], there)
                    self.totals[r] = self.partial.combine(self.totals[r], value)

    def end(self, block: int) -> None:
        row = self.region.row + (block * self.block_step + WARP_ROWS * self.warp + self.lane // 4)
        for r in range(2):
            self._put(self.partial.over_lanes(self.totals[r], (1, 2)), row + 8 * r)

    @cute.jit
    def _put(self, total, row):
        place = self.partial.at(self.region.column // self.width, row)
        if (self.lane % 4 == 0) & (row < self.rows) & (self.region.column < self.columns):
            cute.make_tensor(place, cute.make_layout(1))[0] = total


class Down(_Reduction):
    """Reduces each column of the accumulators; eight lanes have two rows each of the same columns."""

    def _bind(self, args) -> None:
        self.partial.start(args, self.region.matrix, cute.ceil_div(self.rows, WARP_ROWS), self.columns)

    def add(self, values, corner: tuple, own: tuple, first: int, count: int) -> None:
        """As `Across.add`."""
        partial, elements = self.partial, self.partial.elements(values, 4 * count)
        row = self.turned(own)[0]
        # By j, then c: the halves that two lanes exchange.
        columns = [
            partial.combine(*(partial.inside(elements[4 * j + 2 * r + c], row + 8 * r < self.rows) for r in range(2)))
            for j in range(count)
            for c in range(2)
        ]
        place, step = 2 * (self.lane % 4), 4
        while len(columns) > 1:
            half, upper = len(columns) // 2, self.lane & step != 0
            kept = [either(upper, columns[half + i], columns[i]) for i in range(half)]
            sent = [either(upper, columns[i], columns[half + i]) for i in range(half)]
            columns = [
                partial.combine(own_one, cute.arch.shuffle_sync_bfly(other, step))
                for own_one, other in zip(kept, sent, strict=True)
            ]
            # The upper half are the next block's columns, or the next column.
            place = place + either(upper, Int32(8 if half == 2 else 1), Int32(0))
            step *= 2
        steps = [each for each in (4, 8, 16) if each >= step]
        total = partial.over_lanes(columns[0], steps)
        base = self.turned(corner)
        self._put(total, base[0] // WARP_ROWS + self.warp, base[1] + 8 * first + place, sum(steps))

    @cute.jit
    def _put(self, total, piece, column, idle: cutlass.Constexpr):
        """Of the lanes that have the same, those without the bits `idle` write."""
        place = self.partial.at(piece, column)
        if (self.lane & idle == 0) & (column < self.columns) & (piece * WARP_ROWS < self.rows):
            cute.make_tensor(place, cute.make_layout(1))[0] = total
