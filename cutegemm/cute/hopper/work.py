"""What a CTA of the Hopper kernel has to compute: its works, one after the other.

A *work* is a tile of D for each CTA of a cluster, with the k tiles of it that the cluster sums. Every role of a CTA
walks the same works in the same order, and asks for no more than this:

    for number in cutlass.range(work.first, work.end, work.step, unroll=1):
        tile = work.at(number)          row, column, matrix; first k tile, number of k tiles

`Work` is composed of a tile order (`tile_order`), which says where tile number i lies, and of a way to divide K, which
says which works there are:

    WholeK       a work is a tile with all of its k tiles. Cluster c of C takes the works c, c + C, c + 2 C, ...
    PartsOfK     split-K and clusters along K: a tile is so many works; parts of K take its k tiles in turn
    Stretches    stream-K: a cluster computes whole tiles, then a stretch of k tiles that may cut the first and the last
    Tail         stream-K in groups: a cluster computes whole tiles, then a part of one that is left over

`Work.of_warpgroup` is what one consumer warpgroup has of its CTA's works: some rows of each, or in ping-pong every
other one. Products whose sizes lie on the device have another class with these attributes and methods, in
`grouped_work`, whose `make_work` chooses between the two; it finds its device arrays among the kernel's arguments. Only
these two files know how a work's number becomes a place in the operands and in D. The host's side, how many works and
clusters a launch has, is `work_count`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.cute import tile_order
from cutegemm.cute.hopper.config import BLOCK_ROWS, HopperConfig
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.work_count import narrowed, whole_tiles
from cutegemm.cute.tile_order import device_min
from cutegemm.problem import Signature

MOST_PARTS = 8
"""Parts of a tile behind the whole waves at most: whoever adds them up reads them all."""
LEAST_OF_PART = 8
"""k tiles that such a part has at least, because adding it up takes about as long as a few k tiles."""


@dataclass(frozen=True)
class Tile:
    """A CTA's tile of one work; device integers.

    work: the work's number. cluster_tile: the number of the tiles that the CTAs of the cluster compute in this work.
    row, column: the tile's place among the CTA tiles of its matrix, along the rows and columns of the accumulators.
    matrix: of the batch. first_k, k_tiles: the first k tile, and how many there are to sum, at least 1.
    begin, end: where the tile's group begins and ends in the array that groups divide; None in dense works.
    """

    work: Any
    cluster_tile: Any
    row: Any
    column: Any
    matrix: Any
    first_k: Any
    k_tiles: Any
    begin: Any = None
    end: Any = None


@dataclass(frozen=True)
class Region:
    """The part of a tile that one warpgroup finishes; device integers.

    row, column: of the warpgroup's first result, in the orientation of the accumulators: with swapped operands D's
    column and row. matrix: of the batch. m, n: rows and columns of D; nothing beyond them is stored.
    """

    row: Any
    column: Any
    matrix: Any
    m: Any
    n: Any


class Work:
    """Dense works, see the module docstring; `start` binds it to a cluster and to the sizes of a launch.

    first, end, step: the numbers of this cluster's works are `range(first, end, step)`.
    may_lack_rows: whether all rows of a warpgroup may lie outside of what a tile computes, which `has_rows` tells.
    """

    may_lack_rows = False

    def __init__(self, config: HopperConfig, signature: Signature | None = None) -> None:
        """Of a gated program D has half as many columns as the product, and its tiles as those of accumulators."""
        gated = signature is not None and signature.epilogue.gating is not None
        self.config, self.fold = config, 2 if gated else 1
        self.block_rows = BLOCK_ROWS if signature is None else config.block_rows(signature)
        self.order = tile_order.parse(config.order)
        self.division = make_division(config)

    def start(self, position: Position, args) -> None:
        """For the cluster at that position. `args`: the kernel's arguments by name."""
        self.m, self.n = args.m, args.n // self.fold if self.fold > 1 else args.n
        self.tiles_m, self.tiles_n = args.tiles_m, args.tiles_n
        self.cluster_row, self.cluster_column = position.row, position.column
        tiles = args.tiles_m * args.tiles_n * args.batch
        self.k_tiles = cute.ceil_div(args.k, self.config.bk)
        self.first, self.end, self.step = self.division.start(tiles, self.k_tiles, args.clusters, position)
        self.first_row = Int32(0)

    def read(self) -> None:
        """Reads the works' device arrays, if there are any; what an earlier kernel writes is there by now."""

    def of_warpgroup(self, group) -> Work:
        """What consumer warpgroup `group` has to compute: rows of each tile, in ping-pong all of every other one."""
        own = copy.copy(self)
        if self.config.ping_pong:
            own.first, own.step = self.first + group * self.step, 2 * self.step
        else:
            own.first_row = group * self.block_rows
        return own

    def has_rows(self, tile: Tile) -> Any:
        """Whether any row of this warpgroup is one of D."""
        return True

    def at(self, number) -> Tile:
        """This CTA's tile of work `number`."""
        cluster_tile, first_k, k_tiles = self._k_range(number)
        row, column, matrix = self._place(cluster_tile)
        return Tile(number, cluster_tile, row, column, matrix, first_k, k_tiles)

    @cute.jit
    def _k_range(self, number):
        """(cluster tile, first k tile, how many) of a work; one k tile beyond K where there is nothing to sum."""
        tile, first, count = self.division.item(number)
        if (count == 0) | (self.k_tiles == 0):
            first = self.k_tiles + 1
            count = Int32(1)
        return tile, first, count

    def _place(self, tile) -> tuple:
        """(tile row, tile column, matrix) of this CTA's tile of cluster tile `tile`."""
        tiles = self.tiles_m * self.tiles_n
        matrix = tile // tiles
        row, column = self.order.coordinates(tile - matrix * tiles, self.tiles_m, self.tiles_n)
        cm, cn = self.config.cluster
        return row * cm + self.cluster_row, column * cn + self.cluster_column, matrix

    def region(self, tile) -> Region:
        """Where in D this warpgroup's rows of a tile lie."""
        config = self.config
        rows, columns = config.bm // (self.fold if config.swapped else 1), config.bn
        columns = columns if config.swapped else columns // self.fold
        return Region(tile.row * rows + self.first_row, tile.column * columns, tile.matrix, self.m, self.n)

    def k_tiles_before(self, group):
        """Ping-pong: k tiles that the other warpgroup takes from the ring before warpgroup `group` begins."""
        return group * self._k_range(Int32(0))[2]

    def k_tiles_after(self, tile: Tile):
        """Ping-pong: k tiles that the other warpgroup takes between `tile` and this one's next: as many as `tile` has,
        because nothing divides K in ping-pong.
        """
        return tile.k_tiles

    @cute.jit
    def k_walk(self, tile):
        """(first k tile to load, step to the next one) of a tile; the order of its k tiles is the producer's choice."""
        parts = self.config.parts
        k_tile, step = tile.first_k, Int32(parts)
        if cutlass.const_expr("zig" in self.config.options):  # noqa: SIM102
            # Every other wave walks K backwards, and begins with the k tiles that the L2 cache still holds.
            if ((tile.work - self.first) // self.step) & 1 == 1:
                k_tile, step = tile.first_k + (tile.k_tiles - 1) * parts, Int32(-parts)
        if cutlass.const_expr("skew" in self.config.options):
            k_tile = tile.first_k + tile.cluster_tile % tile.k_tiles * parts
        return k_tile, step

    @cute.jit
    def k_next(self, tile, k_tile, step):
        """The k tile to load after `k_tile`; with `skew` the walk goes round."""
        k_tile = k_tile + step
        if cutlass.const_expr("skew" in self.config.options):  # noqa: SIM102
            if k_tile >= tile.first_k + tile.k_tiles * self.config.parts:
                k_tile = tile.first_k
        return k_tile


class WholeK:
    """Each work is a tile with all of its k tiles.

    k_tiles: of every tile that is not divided. All ways to divide K have this attribute and the methods below.
    """

    def start(self, tiles, k_tiles, clusters, position: Position) -> tuple:
        """(first, end, step) of the works of the cluster at `position`.

        All matrices of the batch have `tiles` cluster tiles of `k_tiles` k tiles each; the grid has `clusters`.
        """
        self.k_tiles = k_tiles
        return position.cluster, tiles, clusters

    def item(self, number) -> tuple:
        """(cluster tile, first k tile, how many) of work `number`."""
        return number, Int32(0), self.k_tiles


class PartsOfK:
    """Split-K and clusters along K: `splits` works a tile, each of `cluster_k` parts, a part for each CTA along K.

    Parts take the k tiles of a tile in turn: CTAs that run side by side then read the same DRAM pages.
    """

    def __init__(self, splits: int, cluster_k: int) -> None:
        self.splits, self.cluster_k = splits, cluster_k
        self.parts = splits * cluster_k

    def start(self, tiles, k_tiles, clusters, position: Position) -> tuple:
        """As `WholeK.start`."""
        self.k_tiles, self.k_rank = k_tiles, position.k_rank
        return position.cluster, tiles * self.splits, clusters

    def item(self, number) -> tuple:
        """(cluster tile, first k tile, how many) of work `number`; from one of its k tiles to the next `parts`."""
        tile = number // self.splits
        part = number - tile * self.splits
        if self.cluster_k > 1:
            part = part * self.cluster_k + self.k_rank
        return tile, part, (self.k_tiles - part + (self.parts - 1)) // self.parts


class Stretches:
    """Stream-K: the tiles that do not fill a wave are cut along K, so that every cluster has the same to do.

    Whole waves of tiles come first, a tile a cluster. The last whole wave and what is left beyond it, between C and 2 C
    tiles for C clusters, are laid end to end along K and cut into C equal stretches:

        4 clusters, 6 tiles    | cluster 0 . . . | cluster 1 . . . | cluster 2 . . . | cluster 3 . . . |
                               | tile 0    | tile 1    | tile 2    | tile 3    | tile 4    | tile 5    |

    A stretch is longer than a tile, so that a tile is cut at most once, and its two parts belong to neighbouring
    clusters; `stream_sum` adds them up. With no tile left over, or fewer tiles than clusters, nothing is cut. The idea
    is that of M. Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on
    the GPU" (2023).
    """

    def start(self, tiles, k_tiles, clusters, position: Position) -> tuple:
        """As `WholeK.start`; works are numbered from 0 in each cluster."""
        cluster, k_tiles = position.cluster, cutlass.max(k_tiles, Int32(1))
        self.clusters, self.cluster, self.k_tiles = clusters, cluster, k_tiles
        self.whole, self.before, self.low, self.high, works = self._cut(tiles, clusters, cluster, k_tiles)
        return Int32(0), works, Int32(1)

    @cute.jit
    def _cut(self, tiles, clusters, cluster, k_tiles):
        whole = whole_tiles(tiles, clusters, device_min)
        before = (whole - cluster + clusters - 1) // clusters
        low, high = self._stretch((tiles - whole) * k_tiles, clusters, cluster)
        works = before
        if high > low:
            works = before + (high - 1) // k_tiles - low // k_tiles + 1
        return whole, before, low, high, works

    @cute.jit
    def _stretch(self, total, clusters, cluster):
        """Where the stretch of a cluster begins and ends, of `total` k tiles."""
        # total // clusters k tiles each, the first total % clusters one more: no product that could overflow.
        each, more = total // clusters, total % clusters
        low = cluster * each + cutlass.min(cluster, more)
        high = low + each
        if cluster < more:
            high = high + 1
        return low, high

    @cute.jit
    def item(self, number):
        """(cluster tile, first k tile, how many) of the `number`-th work of this cluster."""
        tile, first, count = self.cluster + number * self.clusters, Int32(0), self.k_tiles
        if number >= self.before:
            place = self.low // self.k_tiles + (number - self.before)
            begin = cutlass.max(self.low, place * self.k_tiles)
            end = cutlass.min(self.high, (place + 1) * self.k_tiles)
            tile, first, count = self.whole + place, begin - place * self.k_tiles, end - begin
        return tile, first, count


class Tail:
    """Stream-K for groups: the tiles left over behind whole waves are cut along K into equal parts.

    Whole waves of tiles come first, a tile a cluster. Then follow the tiles that are left over, each cut into as many
    parts as the clusters have room for at a time, within `MOST_PARTS` and `LEAST_OF_PART`; `tail_sum` adds them up.

        4 clusters, 6 tiles    | cluster 0      | cluster 1      | cluster 2       | cluster 3       |
                               | tile 0         | tile 1         | tile 2          | tile 3          |
                               | tile 4, part 0 | tile 5, part 0 | tile 4, part 1  | tile 5, part 1  |

    Parts with the same number walk the same k tiles at the same time, so that the tiles of a group share what the L2
    cache holds. `Stretches` would each begin at another k tile: with a long K the operands of each tile would be read
    from memory again.

    tiles, clusters: how many there are, and how many compute. No more is kept from tile to tile, because registers are
    scarce. narrows: tiles that would not be cut are left to fewer clusters, where the waves do not need all.
    """

    def __init__(self, narrows: bool) -> None:
        self.narrows = narrows

    def start(self, tiles, k_tiles, clusters, position: Position) -> tuple:
        """As `Stretches.start`."""
        self.tiles, self.clusters, self.cluster = tiles, clusters, position.cluster
        self.k_tiles = cutlass.max(k_tiles, Int32(1))
        if not self.narrows:
            return Int32(0), self._works(), Int32(1)
        self.clusters = self._computing()
        return Int32(0), self._unless_idle(self._works()), Int32(1)

    @cute.jit
    def _computing(self):
        """How many clusters compute."""
        clusters = self.clusters
        if self.rest()[1] == 1:
            clusters = narrowed(self.tiles, clusters, device_min)
        return clusters

    @cute.jit
    def _works(self):
        """How many works this cluster has: a tile of each whole wave, and a part behind them if there is one."""
        works, (rest, parts) = self.tiles // self.clusters, self.rest()
        if self.cluster < rest * parts:
            works = works + 1
        return works

    @cute.jit
    def _unless_idle(self, works):
        """None where this is one of the clusters that the waves do not need."""
        if self.cluster >= self.clusters:
            works = Int32(0)
        return works

    def rest(self) -> tuple:
        """(how many tiles are left over behind the whole waves, into how many parts each is cut)."""
        rest = self.tiles % self.clusters
        room = self.clusters // cutlass.max(rest, Int32(1))
        most = cutlass.min(room, cutlass.max(self.k_tiles // LEAST_OF_PART, Int32(1)))
        return rest, cutlass.min(most, Int32(MOST_PARTS))

    @cute.jit
    def item(self, number):
        """As `Stretches.item`."""
        tile = number * self.clusters
        first, count = Int32(0), self.k_tiles
        if tile + self.clusters <= self.tiles:
            tile = tile + self.cluster
        else:
            rest, parts = self.rest()
            part = self.cluster // rest
            first = self.k_tiles * part // parts
            count = self.k_tiles * (part + 1) // parts - first
            tile = tile + (self.cluster - part * rest)
        return tile, first, count


def make_division(config: HopperConfig) -> WholeK | PartsOfK | Stretches | Tail:
    """The way of a configuration to divide K."""
    if config.stream_k:
        return Stretches()
    return PartsOfK(config.splits, config.cluster_k) if config.parts > 1 else WholeK()
