"""The order in which CTAs take output tiles: what neighbours in time share, the L2 cache serves once.

A tile order is a strategy object chosen at compile time: `coordinates(tile, tiles_m, tiles_n)` gives (tile row, tile
column) of linear tile number `tile`. The functions under it are arithmetic without branches, so that the same text runs
on the device and, for the tests and the occupancy tools, on plain integers.

About 130 CTAs are resident at a time. Row by row they read one row of A tiles and every column of B tiles; an order
that keeps them in a compact block of the output reads about sqrt(130) of each instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Smallest = Callable[[Any, Any], Any]
HILBERT_LEVELS = 4
"""A Hilbert block is 2^4 x 2^4 tiles: about two waves of the resident CTAs."""


def grouped(group: int, tile: Any, tiles_m: Any, tiles_n: Any, smallest: Smallest = min) -> tuple:
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


def serpentine(group: int, tile: Any, tiles_m: Any, tiles_n: Any, smallest: Smallest = min) -> tuple:
    """The grouped order with every other group walked backwards, so that the columns of B at the turn are still cached.

    tiles in order, 4 x 4 tiles, group 2:    0  2  4  6
                                             1  3  5  7
                                            15 13 11  9
                                            14 12 10  8
    """
    band, first, height, within = _band(group, tile, tiles_m, tiles_n, smallest)
    within = _turned(band, within, height * tiles_n)
    column = within // height
    return first + within - column * height, column


def hilbert(levels: int, tile: Any, tiles_m: Any, tiles_n: Any, smallest: Smallest = min) -> tuple:
    """Square blocks of 2^levels tiles a side, along a serpentine; within a whole block, the Hilbert curve.

    A block's curve enters at its first column and leaves at its last, next to the entry of the next block. Any stretch
    of 4^j tiles of it lies in about 2^j x 2^j tiles, at every j: whatever the number of resident CTAs, they share rows
    and columns. A block that the edge of D cuts is walked column by column, up and down.

        one block of 4 x 4:     0  1 14 15
                                3  2 13 12
                                4  7  8 11
                                5  6  9 10
    """
    side = 1 << levels
    band, first, height, within = _band(side, tile, tiles_m, tiles_n, smallest)
    within = _turned(band, within, height * tiles_n)
    block = within // (height * side)
    inner = within - block * (height * side)
    width = smallest(tiles_n - block * side, side)
    y, x = hilbert_square(levels, inner)
    column = inner // height
    row = _turned(column, inner - column * height, height)
    whole = (height // side) * (width // side)
    return first + row + whole * (y - row), block * side + column + whole * (x - column)


def hilbert_square(levels: int, distance: Any) -> tuple:
    """(y, x) at `distance` along the Hilbert curve of a square of 2^levels a side, from (0, 0) to (0, side - 1).

    Bits are taken two at a time from the lowest: each pair names the quadrant, and the first and last quadrants hold
    the curve of the level below mirrored at a diagonal (C. Hamilton, "Compact Hilbert Indices", 2006, gives the
    derivation).
    """
    x, y = distance * 0, distance * 0
    for level in range(levels):
        side = 1 << level
        pair = distance >> (2 * level)
        right = (pair >> 1) & 1
        up = (pair ^ right) & 1
        # In the quadrants below (up = 0) the axes change places; in the last of them both are mirrored first.
        mirror = right * (1 - up)
        x, y = x + mirror * (side - 1 - 2 * x), y + mirror * (side - 1 - 2 * y)
        swapped = (1 - up) * (y - x)
        x, y = x + swapped, y - swapped
        x, y = x + side * right, y + side * up
    return y, x


def _band(size: int, tile: Any, tiles_m: Any, tiles_n: Any, smallest: Smallest) -> tuple:
    """(number, first row, rows, place within it) of the band of `size` tile rows that holds the tile."""
    band = tile // (size * tiles_n)
    return band, band * size, smallest(tiles_m - band * size, size), tile - band * (size * tiles_n)


def _turned(number: Any, place: Any, length: Any) -> Any:
    """`place`, counted from the other end where `number` is odd."""
    return place + (number & 1) * (length - 1 - 2 * place)


def device_min(a: Any, b: Any) -> Any:
    """The smaller of a device integer and an integer of either kind."""
    import cutlass

    return cutlass.min(a, cutlass.Int32(b))


@dataclass(frozen=True)
class Grouped:
    """The grouped order; group 1 is row by row. See `grouped`."""

    group: int

    def coordinates(self, tile: Any, tiles_m: Any, tiles_n: Any, smallest: Smallest = device_min) -> tuple:
        return grouped(self.group, tile, tiles_m, tiles_n, smallest)


@dataclass(frozen=True)
class Columns:
    """Column by column."""

    def coordinates(self, tile: Any, tiles_m: Any, tiles_n: Any, smallest: Smallest = device_min) -> tuple:
        column = tile // tiles_m
        return tile - column * tiles_m, column


@dataclass(frozen=True)
class Serpentine:
    """The serpentine order, see `serpentine`."""

    group: int

    def coordinates(self, tile: Any, tiles_m: Any, tiles_n: Any, smallest: Smallest = device_min) -> tuple:
        return serpentine(self.group, tile, tiles_m, tiles_n, smallest)


@dataclass(frozen=True)
class Hilbert:
    """The Hilbert order, see `hilbert`."""

    levels: int = HILBERT_LEVELS

    def coordinates(self, tile: Any, tiles_m: Any, tiles_n: Any, smallest: Smallest = device_min) -> tuple:
        return hilbert(self.levels, tile, tiles_m, tiles_n, smallest)


TileOrder = Grouped | Columns | Serpentine | Hilbert


def parse(text: str) -> TileOrder:
    """The tile order of a name: row, col, gN, serpN or hilbert (N from 1 to 64). Raises ValueError."""
    plain: dict[str, TileOrder] = {"row": Grouped(1), "col": Columns(), "hilbert": Hilbert()}
    found = re.fullmatch(r"(g|serp)(\d+)", text)
    if text in plain:
        return plain[text]
    if not found or not 1 <= int(found[2]) <= 64:
        raise ValueError(f"tile order: got {text!r}, accepted are row, col, gN, serpN (N from 1 to 64), hilbert")
    group = int(found[2])
    return Grouped(group) if found[1] == "g" else Serpentine(group)
