"""The works of products whose sizes lie on the device: tiles that begin and end with the groups of an array.

ragged M or N    the tiles of a group begin at its first row (or column) of D, and the last ones end with it
ragged K         every product has the same tiles; their k tiles are those of its group
masked           as ragged M, but each product has rows of its own, of which the first ones count

The numbers of works run group by group, and within a group in the configuration's tile order: what a CTA computes next
to its neighbours in time belongs to the same weights, which the L2 cache then serves. `groups` finds a work's group.

With option `fit` all tiles of a group have equally many columns, and the last one may have fewer. Without it all but
the last are full; the last may be nearly empty, and loads all of the group's weights all the same.

With stream-K each warp, once it has counted the tiles, cuts those that are left over behind whole waves (`work.Tail`):
all of them have the same K, unless it is K that the groups divide.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.cute.groups import Groups
from cutegemm.cute.hopper import grouping
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.work import Region, Tail, Tile, Work
from cutegemm.cute.hopper.work_count import narrowed
from cutegemm.cute.tile_order import device_min
from cutegemm.problem import Signature
from cutegemm.problem.work import DENSE, TABLE

SMALL_TILE = 128 * 128
"""Cooperative tiles of more elements are left to fewer clusters where the waves do not need all."""


class GroupedWork(Work):
    """Works of products in groups, whose sizes lie on the device; as `work.Work`.

    between: from one of the cluster's works to its next, whichever warpgroup has it. narrows: clusters that the waves
    do not need compute nothing.
    """

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        super().__init__(config, signature)
        # Ping-pong and small tiles, which wait for memory, lose as often as they gain.
        self.narrows = not config.ping_pong and config.persistent and config.bm * config.bn > SMALL_TILE
        if config.stream_k:
            self.division = Tail(self.narrows)
        self.array = TABLE[signature.work].arrays[0]
        self.grouping = grouping.of(config, signature.work)
        self.along = self.grouping.along
        self.groups = Groups(self.grouping.masked, config.stream_k)
        cm, cn = config.cluster
        # Warpgroups that skip products run ahead of the others, and what they load leaves the L2 cache too early
        # (docs/grouped_measured.md#tall-bands-of-tiles). So kernels skip only where the cluster has several CTAs along
        # the rows. A CTA alone with one warpgroup never lacks rows. Its kernels ask all the same, as when they were
        # measured.
        asks = cm > 1 or config.consumers == 1
        self.may_lack_rows = self.along == "row" and not config.ping_pong and not config.stream_k and asks
        self.extent = config.bm * cm if self.along == "row" else config.bn * cn
        if self.fold > 1 and config.swapped != (self.along == "column"):
            raise ValueError("groups of columns have no gate and up")

    def start(self, position: Position, args) -> None:
        self.m, self.n = args.m, args.n // self.fold if self.fold > 1 else args.n
        self.k, self.tiles_m, self.tiles_n = args.k, args.tiles_m, args.tiles_n
        self.cluster_row, self.cluster_column = position.row, position.column
        self.position = position
        self.first, self.step, self.between = position.cluster, args.clusters, args.clusters
        self.first_row = Int32(0)
        in_d = args.n if self.along == ("row" if self.config.swapped else "column") else args.m
        extent = args.k if self.along == "k" else in_d
        self.groups.start(getattr(args, self.array.name), args.batch, extent, self._works)

    def read(self) -> None:
        self.end = self.groups.read()
        if self.config.stream_k:
            # `step` is the number of clusters so far.
            k_tiles = cute.ceil_div(self.k, self.config.bk)
            self.first, self.end, self.step = self.division.start(self.end, k_tiles, self.step, self.position)
        elif self.narrows:
            self.step = self.between = narrowed(self.end, self.step, device_min)
            self.end = self._unless_idle(self.end)

    @cute.jit
    def _unless_idle(self, end):
        """The end of this cluster's works: none where it is one of those that the waves do not need."""
        if self.first >= self.step:
            end = Int32(0)
        return end

    def _works(self, begin, end):
        """The number of works of a group."""
        if self.along == "k":
            return Int32(self.tiles_m * self.tiles_n)
        across = self.tiles_n if self.along == "row" else self.tiles_m
        return self._along(begin, end) * across

    def _along(self, begin, end):
        """The cluster tiles that a group's rows or columns fill."""
        return (end - begin + (self.extent - 1)) // self.extent

    def at(self, number) -> Tile:
        cluster_tile, cut_first, cut_count = number, None, None
        if self.config.stream_k:
            cluster_tile, cut_first, cut_count = self.division.item(number)
        group, begin, end, first = self.groups.find(cluster_tile)
        tiles_m, tiles_n = self.tiles_m, self.tiles_n
        k = self.k
        if self.along == "k":
            k = end - begin
        elif self.along == "row":
            tiles_m = self._along(begin, end)
        else:
            tiles_n = self._along(begin, end)
        row, column = self.order.coordinates(cluster_tile - first, tiles_m, tiles_n)
        cm, cn = self.config.cluster
        # Without anything to sum, one k tile beyond K, which is loaded as zeros.
        k_tiles = cutlass.max(cute.ceil_div(k, self.config.bk), Int32(1))
        first_k = Int32(0)
        if self.along != "k":
            first_k = self._beyond(k)
        if self.config.stream_k:
            first_k, k_tiles = first_k + cut_first, cut_count
        row, column = row * cm + self.cluster_row, column * cn + self.cluster_column
        if self.config.fits:
            begin, end = self._fitted(begin, end, column, tiles_n * cn)
        return Tile(number, cluster_tile, row, column, group, first_k, k_tiles, begin, end)

    def _fitted(self, begin, end, column, tiles) -> tuple:
        """Where a tile of a group begins, less what `region` adds for the tiles before it, and where it ends: the
        columns of the group are divided evenly among so many tiles.
        """
        each = (end - begin + (tiles - 1)) // tiles
        first = begin + column * each
        return first - column * self.config.bn, cutlass.min(end, first + each)

    @cute.jit
    def _beyond(self, k):
        """The first k tile: one beyond K where K is 0."""
        first = Int32(0)
        if k == 0:
            first = Int32(1)
        return first

    def region(self, tile: Tile) -> Region:
        found = super().region(tile)
        if self.along == "k":
            return found
        row, column, m, n = found.row, found.column, self.m, self.n
        if self.along == "row":
            row = tile.begin + row
        else:
            column = tile.begin + column
        if self.along == ("column" if self.config.swapped else "row"):
            m = tile.end
        else:
            n = tile.end
        return Region(row, column, tile.matrix, m, n)

    def has_rows(self, tile: Tile) -> Any:
        return self.region(tile).row < tile.end

    def k_tiles_before(self, group):
        """As `Work.k_tiles_before`."""
        if self.along == "k":
            return group * self._k_tiles_of(self.first - group * self.between)
        return group * cutlass.max(cute.ceil_div(self.k, self.config.bk), Int32(1))

    def k_tiles_after(self, tile: Tile):
        """As `Work.k_tiles_after`; with a ragged K those of the other warpgroup's next work."""
        return self._k_tiles_of(tile.work + self.between) if self.along == "k" else tile.k_tiles

    @cute.jit
    def _k_tiles_of(self, number):
        """Ragged K: the k tiles of a work; none behind the last one."""
        count = Int32(0)
        if number < self.end:
            _, begin, end, _ = self.groups.find(number)
            count = cutlass.max(cute.ceil_div(end - begin, self.config.bk), Int32(1))
        return count


def make_work(config: HopperConfig, signature: Signature) -> Work:
    """What a kernel of that signature has to compute."""
    return (Work if signature.work == DENSE else GroupedWork)(config, signature)
