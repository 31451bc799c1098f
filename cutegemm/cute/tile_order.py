"""The order in which CTAs take output tiles: what neighbours in time share, the L2 cache serves once.

A tile order is a strategy object chosen at compile time: `coordinates(tile, tiles_m, tiles_n)` runs on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def grouped(group: int, tile: Any, tiles_m: Any, tiles_n: Any, smallest: Callable[[Any, Any], Any] = min) -> tuple:
    """(tile row, tile column) of linear tile number `tile`; plain integers, or device integers with their own min.

    `group` tile rows are walked together, column by column, before the next group of rows:

        tiles in order, 4 x 4 tiles, group 2:    0  2  4  6
                                                 1  3  5  7
                                                 8 10 12 14
                                                 9 11 13 15
    """
    per_group = group * tiles_n
    first = (tile // per_group) * group
    height = smallest(tiles_m - first, group)
    within = tile % per_group
    column = within // height
    return first + within - column * height, column


@dataclass(frozen=True)
class Grouped:
    """The grouped order; group 1 is row by row.

    The CTAs resident at one time cover a compact block of the output: about sqrt(CTAs) rows of A tiles and as many
    columns of B tiles, instead of one row of A and every column of B.
    """

    group: int

    def coordinates(self, tile: Any, tiles_m: Any, tiles_n: Any) -> tuple:
        import cutlass

        return grouped(self.group, tile, tiles_m, tiles_n, lambda a, b: cutlass.min(a, cutlass.Int32(b)))
