"""Tiles of products in groups, for the kernels whose CTAs compute one tile each.

The host does not know how many tiles the groups have. So the grid has as many CTAs as there can be at most
(`Work.tiles`). Each one looks for its number among the tiles, which are numbered group by group, and within a group in
the configuration's tile order. The CTAs behind the last tile end at once.

A tile begins at its group's first row (or column) of D, and what is stored of it ends with the group. Loads go on to
the end of the operand: what they bring of another group is multiplied, and nobody stores it. Sums of a ragged K end
with the group, since copies beyond K write zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.cute.groups import Groups
from cutegemm.problem import Signature
from cutegemm.problem.work import TABLE


class Place(NamedTuple):
    """A tile of a group.

    matrix: the group's number. row, column: of D, where the tile begins. m, n: before which row and column the group
    ends. first_k, k: where its K begins, and how long it is.
    """

    matrix: Any
    row: Any
    column: Any
    m: Any
    n: Any
    first_k: Any
    k: Any


class GroupTiles:
    """The tiles of a launch of a configuration, in an order of `tile_order`."""

    def __init__(self, config: Any, signature: Signature, order: Any) -> None:
        self.bm, self.bn, _ = config.tile()
        self.order, self.work = order, TABLE[signature.work]
        self.along = str("m" if self.work.masked else self.work.ragged)
        self.groups = Groups(self.work.masked)

    def most(self, args, tiles_m, tiles_n) -> Any:
        """How many tiles there can be; `args`: the host entry's arguments by name."""
        return self.work.most(tiles_m, tiles_n, args.m, args.n, args.batch, cutlass.min, cutlass.max)

    def find(self, args, number) -> tuple[Place, Any]:
        """(tile `number`, whether there is one). For all lanes of a warp together."""
        tiles_m, tiles_n = args.tiles_m, args.tiles_n
        across = {"m": tiles_n, "n": tiles_m, "k": tiles_m * tiles_n}[self.along]
        extent = {"m": args.m, "n": args.n, "k": args.k}[self.along]
        tile = {"m": self.bm, "n": self.bn}.get(self.along)

        def works(begin, end) -> Any:
            return Int32(across) if tile is None else cute.ceil_div(end - begin, tile) * across

        self.groups.start(getattr(args, self.work.arrays[0].name), args.batch, extent, works)
        group, begin, end, first, exists = self.groups.find_alone(number)
        if self.along == "m":
            tiles_m = cute.ceil_div(end - begin, tile)
        elif self.along == "n":
            tiles_n = cute.ceil_div(end - begin, tile)
        tile_m, tile_n = self.order.coordinates(number - first, tiles_m, tiles_n)
        row, column = tile_m * self.bm, tile_n * self.bn
        m, n, first_k, k = args.m, args.n, Int32(0), args.k
        if self.along == "m":
            row, m = begin + row, end
        elif self.along == "n":
            column, n = begin + column, end
        else:
            first_k, k = begin, end - begin
        return Place(group, row, column, m, n, first_k, k), exists
