"""The order in which CTAs take output tiles: what neighbours in time share, the L2 cache serves once.

A tile order is a strategy object chosen at compile time: `coordinates(tile, tiles_m, tiles_n)` runs on the device.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Grouped:
    """Walks `group` tile rows together, column by column, before the next group of rows.

    The CTAs resident at one time then cover a compact block of the output: about sqrt(CTAs) rows of A tiles and
    as many columns of B tiles, instead of one row of A and every column of B. `group` 1 is row-by-row order.

        tiles in order, 4 x 4 tiles, group 2:    0  2  4  6
                                                 1  3  5  7
                                                 8 10 12 14
                                                 9 11 13 15
    """

    def __init__(self, group: int) -> None:
        self.group = group

    @cute.jit
    def coordinates(self, tile: Int32, tiles_m: Int32, tiles_n: Int32) -> tuple[Int32, Int32]:
        """(tile row, tile column) of linear tile number `tile` in [0, tiles_m * tiles_n)."""
        if cutlass.const_expr(self.group == 1):
            row = tile // tiles_n
            column = tile - row * tiles_n
        else:
            per_group = self.group * tiles_n
            first = (tile // per_group) * self.group
            height = cutlass.min(tiles_m - first, Int32(self.group))
            within = tile % per_group
            column = within // height
            row = first + within - column * height
        return row, column
