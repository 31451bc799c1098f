"""Split-K of the kernels without TMA: the parts of a tile, summed by different CTAs, are added up in a fixed order.

Each CTA leaves its part of the sum over K in the workspace and counts itself in (`cute.state_word`). The tile is shared
out again: it falls into *units*, as many rows of a warp tile as a warp's lanes store at a time, and split number i adds
up and stores the units i, i + owners, i + 2 owners ...; its warps take them in turn. Owners are the first 32 splits, as
a state word has a bit for each; later ones only leave their part. A unit is added up by the epilogue itself, which
reads its accumulators from all parts, in the order of the splits, where it would otherwise read a slab of shared
memory. So all that an epilogue can do goes with splits of K, and a result has the same bits on every run.

    workspace   state words (uint64), one a tile, padded to whole lines
                parts (fp32): tile, split, warp tile, then the warp tile's rows

A unit is a piece of one row or some rows for results that are reduced (`TileConfig.pieces`). Units are whole lines of
the L2 cache; what has been added up is discarded from it where parts are large, as it would be written to memory when
other data displaces it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute import whole
from cutegemm.cute.epilogue import SlabEpilogue
from cutegemm.cute.launch_config import word_bytes
from cutegemm.cute.source import aligned
from cutegemm.cute.state_word import MOST_SLICES, abandon, arrive, clear, leave
from cutegemm.hardware.arch import LINE
from cutegemm.problem import Signature

LEAST_DISCARDED = 64 * 1024
"""Bytes of a tile's part from which on what is read is discarded: of smaller ones, all SMs leave 8 MB at most."""
AT_ONCE = 8
"""Parts of which a lane loads its elements before it adds them."""


class PartEpilogue(SlabEpilogue):
    """The epilogue of a warp whose accumulators are sums of parts that lie `distance` words apart, a tile each.

    A part is the tile's warp tiles (wm, wn) one after the other, each with its rows side by side, and falls into units.
    """

    def __init__(self, config: Any, signature: Signature, parts: int, distance: int) -> None:
        super().__init__(config, signature)
        self.adder = whole.adder(signature)
        self.parts, self.distance = parts, distance
        self.pitch, self.wm, self.tile_columns = config.wn, config.wm, config.bn // config.wn
        self.pieces = config.pieces(signature)
        self.in_unit = min(self.rows_per_pass, config.wm) * config.wn
        self.units_of_warp_tile = max(config.wm // self.rows_per_pass, 1)
        self.units = config.bm * config.bn // (config.wm * config.wn) * self.units_of_warp_tile

    def _stored(self, begin, count: int):
        return self.sum_of(begin, count)

    def sum_of(self, begin, count: int) -> Any:
        """The sum of `count` neighbours over all parts, in their order; those of the first part lie at `begin`."""
        if self.parts > MOST_SLICES:
            return self._sum_of_many(begin, count)
        total: Any = None
        for some in range(0, self.parts, AT_ONCE):
            total = self._added(total, begin, range(some, min(some + AT_ONCE, self.parts)), count)
        return total

    @cute.jit
    def _sum_of_many(self, begin, count: cutlass.Constexpr):
        """The same by a loop: written out, so many addresses would take too many registers."""
        total = cute.make_rmem_tensor(count, Float32)
        total.store(self._added(None, begin, range(AT_ONCE), count))
        for turn in cutlass.range(1, self.parts // AT_ONCE, unroll=1):
            total.store(self._added(total.load(), begin + turn * (AT_ONCE * self.distance), range(AT_ONCE), count))
        left = self.parts % AT_ONCE
        return self._added(total.load(), begin + (self.parts - left) * self.distance, range(left), count)

    def _added(self, total, begin, parts: range, count: int) -> Any:
        """`total`, None at first, and those parts of the ones from `begin` on."""
        loaded = cute.make_rmem_tensor((count, max(len(parts), 1)), Float32)
        for i, part in enumerate(parts):
            source = aligned(begin + part * self.distance, min(4 * count, 16))
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), loaded[None, i])
        for i in range(len(parts)):
            values = loaded[None, i].load()
            total = values if total is None else self.adder(total, values)
        return total

    @cute.jit
    def finish_unit(self, parts, unit, matrix, row, column, lane, args):
        """Finishes and stores unit number `unit` of a tile. `parts` points to the first part of its sum, (row, column)
        is the tile's first output.
        """
        warp_tile, number = unit // self.units_of_warp_tile, unit % self.units_of_warp_tile
        row = row + warp_tile // self.tile_columns * self.wm
        column = column + warp_tile % self.tile_columns * self.wn
        n = args.n
        if cutlass.const_expr(self.fold == 2):
            column, n = column // 2, n // 2
        self.start(parts + warp_tile * (self.wm * self.wn), matrix, row, column, args.m, n, 0, lane, args)
        self._store_lanes_rows(number * self.rows_per_pass + self.lane_row)

    @cute.jit
    def _store_lanes_rows(self, slab_row):
        row = self.row + slab_row
        inside = row < self.m
        if cutlass.const_expr(self.rows_per_pass > self.wm):
            inside = inside & (slab_row < self.wm)
        self._begin_columns()
        self._begin_rows()
        if inside:
            self._store_chunk(slab_row, row)
        self._end_rows(row, inside)
        self._end_columns(row - self.lane_row, True)


class PartSum:
    """The sum of a tile's parts, see the module docstring; one object for all threads of a CTA."""

    def __init__(self, config: Any, signature: Signature) -> None:
        self.in_part = config.bm * config.bn
        self.epilogue = PartEpilogue(config, signature, config.splits, self.in_part)
        self.config, self.splits, self.units = config, config.splits, self.epilogue.units
        self.owners = min(config.splits, MOST_SLICES)
        self.turns = -(-self.units // (self.owners * (config.threads // 32)))
        self.discards = self.in_part * 4 >= LEAST_DISCARDED and self.epilogue.in_unit * 4 % LINE == 0

    def start(self, args, share, split, tid) -> None:
        """Binds to a launch's workspace, to tile number `share` and to the CTA that sums part number `split` of it."""
        config, self.args, self.split, self.tid = self.config, args, split, tid
        words = cute.recast_ptr(args.workspace, dtype=Int64)
        tiles = cute.ceil_div(args.m, config.bm) * cute.ceil_div(args.n, config.bn) * args.batch
        parts = args.workspace + Int64(word_bytes(tiles) // 4)
        self.word = words + share
        self.parts = parts + Int64(share) * (self.splits * self.in_part)

    def part_of(self, warp_tile) -> Any:
        """The pointer to this split's part of a warp tile, (wm, wn) with rows side by side."""
        offset = self.split * self.in_part + warp_tile * (self.config.wm * self.config.wn)
        return aligned(self.parts + Int64(offset), 16)

    @cute.jit
    def finish(self, answer, matrix, row, column):
        """Adds up and stores the units that fall to this CTA, when all its threads have left their parts.

        `answer`: a pointer to a free word in shared memory. (row, column): the tile's first output.
        """
        slices = self._ask(answer, False)
        if slices == 0:
            slices = self._ask(answer, True)
        state = leave(self.word, self.tid)
        warp = cute.arch.make_warp_uniform(self.tid // 32)
        warps = self.config.threads // 32
        for number in cutlass.range(self.owners, unroll=1):
            if (slices >> number) & 1 == 1:
                for turn in cutlass.range(self.turns, unroll=1):
                    unit = number + self.owners * (warp + warps * turn)
                    if unit < self.units:
                        self._add_up(unit, matrix, row, column)
        clear(self.word, self.tid, state, self.splits)

    @cute.jit
    def _ask(self, answer, late: cutlass.Constexpr):
        """Bit mask of the slices that this CTA adds up; 0 while parts are missing, and for good when `late`."""
        told = cute.make_tensor(cute.recast_ptr(answer, dtype=Int32), cute.make_layout(1))
        cute.arch.sync_threads()
        if self.tid == 0:
            ask = abandon if cutlass.const_expr(late) else arrive
            mine = Int32(1) << self.split
            if cutlass.const_expr(self.owners < self.splits):
                mine = mine if self.split < self.owners else Int32(0)
            told[0] = ask(self.word, mine, self.splits)
        cute.arch.sync_threads()
        return told[0]

    @cute.jit
    def _add_up(self, unit, matrix, row, column):
        lane = self.tid % 32
        self.epilogue.finish_unit(self.parts, unit, matrix, row, column, lane, self.args)
        if cutlass.const_expr(self.discards):
            cute.arch.sync_warp()
            self._discard(self.parts + unit * self.epilogue.in_unit, lane)

    @cute.jit
    def _discard(self, begin, lane):
        """Discards what the warp has read of all parts, a line a lane."""
        lines = self.epilogue.in_unit * 4 // LINE
        for first in cutlass.range_constexpr(0, lines * self.splits, 32):
            number = first + lane
            if number < lines * self.splits:
                line = begin + Int64(number // lines * self.in_part + number % lines * (LINE // 4))
                cute.arch.inline_ptx("discard.global.L2 [{$r0}], 128;", read_only_args=[line.toint()])
