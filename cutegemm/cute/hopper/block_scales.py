"""Scales of blocks of K: the partial sums of 128 of K are multiplied by A's and B's scales when they are promoted.

    accumulators += partial sums * (scale of the row * scale of the column)

Scales lie in global memory in any strides, fp32. They travel through the ring as operands do: each stage has room for
the scales of its k tile, and three warps of the producer's warpgroup copy them there (`ScaleProducer`) as many stages
ahead as the ring is deep. No warpgroup that multiplies waits for global memory:

    TMA warp       tiles of A and B  -> stage s     1 arrival at `full`, and the bytes of TMA
    other warps    cp.async, 4 bytes -> stage s     1 arrival a thread, made by the hardware when its copies have landed
    consumers      wait for `full`; WGMMA reads the tiles; the scales are read into registers while it runs

The scales of the rows of a stage come first, then those of its columns: as many as the tile has rows (columns), or one
for each block of 128 that the tile may lie in. Along the rows of the accumulators, and along their columns where 128 of
these share one, a thread keeps a few numbers in registers, and its stage is released before the promotion. Where every
column has its own the promotion reads them in pairs, and the stage is released behind it.

With swapped operands the rows of the accumulators are columns of B. Places outside of the matrices take the scale of
the last row, column or block.

Of a gated program ("halves") a tile has columns of B at two places, gate's and up's. A stage has a number for each
`promotion.grain` columns of the tile, whichever blocks they lie in: so F may be any.

Tiles of option `half` have no room for scales in a stage: `direct_scales` loads them another way.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.hopper.config import BLOCK_ROWS, HopperConfig
from cutegemm.cute.hopper.direct_scales import DirectScales
from cutegemm.cute.hopper.mma import Products
from cutegemm.cute.hopper.pipeline import Ring, Turns, advance
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.promoted import (
    CompensatedProducts,
    HalfProducts,
    PartProducts,
    PromotedProducts,
    Promotion,
    TwinProducts,
)
from cutegemm.cute.hopper.promotion import (
    FRAGMENT,
    SCALE_THREADS,
    compensates,
    grain,
    interval,
    lies_in_halves,
    scale_counts,
)
from cutegemm.cute.hopper.work import Work
from cutegemm.cute.source import ScaleSource
from cutegemm.problem import Signature
from cutegemm.problem.program.graph import SCALE_K, Input

NUMBER = 4
"""Bytes of a scale."""


class _Side(ScaleSource):
    """The scales along the rows or the columns of the accumulators, of which there are some.

    count: of scales in a stage. begin: where a stage has them, in numbers. grain: rows (columns) that share one.
    in_halves: whether a tile has gate's columns of B in front of up's. by_block: whether the numbers are for the blocks
    that the tile may lie in; else each is for so many rows (columns) of the tile.
    """

    def __init__(self, config: HopperConfig, signature: Signature, given: Input, count: int, begin: int) -> None:
        super().__init__(given)
        self.count, self.begin, self.grain = count, begin, grain(config, signature, given)
        self.in_halves = lies_in_halves(signature, given)
        self.by_block = self.grain == SCALE_K and not self.in_halves

    def start(self, args) -> None:
        super().start(args)
        self.to_up = args.n // 2 if self.in_halves else None

    @cute.jit
    def load(self, first, matrix, k_block, stage, thread):
        """Copies this thread's share of the scales of a tile to address `stage`.

        first: the tile's first row (column). k_block: the block of 128 of K.
        """
        begin = first // SCALE_K if cutlass.const_expr(self.by_block) else first
        beyond = Int64(matrix) * self.of_matrix + Int64(k_block) * self.along_k
        for i in cutlass.range_constexpr(-(-self.count // SCALE_THREADS)):
            number = thread + i * SCALE_THREADS
            if cutlass.const_expr(self.count % SCALE_THREADS == 0) or number < self.count:
                offset = Int64(cutlass.min(self._place(begin, number), self.extent - 1)) * self.along + beyond
                cute.arch.inline_ptx(
                    f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {NUMBER};",
                    read_only_args=[stage + NUMBER * (self.begin + number), (self.base + offset).toint()],
                )

    def _place(self, first, number) -> Any:
        """Of a stage's number, among the operand's scales along its rows (columns); first: as a block if `by_block`."""
        if self.by_block:
            return first + number
        if self.to_up is not None:
            of_half = self.count // 2
            first = first + cutlass.select_(number < of_half, Int32(0), self.to_up)
            number = number - cutlass.select_(number < of_half, 0, of_half)
        place = first + number * self.grain
        return place if self.each else place // SCALE_K


class Scales:
    """The scales of both sides; None for one that has none. stage: numbers of a stage."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        given = signature.epilogue.program.block_scales
        rows, columns = scale_counts(config, signature)
        down, across = (given.get(name) for name in ("ba" if config.swapped else "ab"))
        sides = (down, rows, 0), (across, columns, _rounded(rows))
        made: list[Any] = [None if given is None else _Side(config, signature, given, *rest) for given, *rest in sides]
        self.down, self.across = made
        self.stage = _rounded(rows) + _rounded(columns)
        # In pairs two rows or columns of accumulators, those of B, are one column of D.
        folds = 2 if signature.epilogue.gating == "pairs" else 1
        self.of_row, self.of_column = (folds, 1) if config.swapped else (1, folds)

    def corner(self, region) -> tuple:
        """The first row and column of a tile's accumulators."""
        return self.of_row * region.row, self.of_column * region.column


def _rounded(count: int) -> int:
    """Numbers that a side takes up in a stage: whole 16 bytes."""
    return -(-count // 4) * 4


class ScaleProducer:
    """The warps that bring the scales of every k tile into the ring."""

    def __init__(self, config: HopperConfig, signature: Signature, ring: Ring, work: Work) -> None:
        self.scales, self.ring, self.work = Scales(config, signature), ring, work

    def start(self, args, memory, position: Position) -> None:
        """Binds to the kernel's arguments, the shared memory of the CTA, and this thread."""
        self.args, self.base = args, memory.scales.toint()
        self.thread = position.own_thread - 32  # the first warp asks TMA
        for side in (self.scales.down, self.scales.across):
            if side is not None:
                side.start(args)

    @cute.jit
    def run(self):
        """Copies everything, one stage after the other as they fall empty."""
        stage, phase = Int32(0), Int32(1)
        last = cute.ceil_div(self.args.k, SCALE_K) - 1
        for number in cutlass.range(self.work.first, self.work.end, self.work.step, unroll=1):
            tile = self.work.at(number)
            region = self.work.region(tile)
            k_tile, k_step = self.work.k_walk(tile)
            for _ in cutlass.range(tile.k_tiles, unroll=1):
                cute.arch.mbarrier_wait(self.ring.empty + stage, phase)
                self.copy(region, k_tile, last, stage)
                cute.arch.cp_async_mbarrier_arrive_noinc(self.ring.full + stage)
                stage, phase = advance(stage, phase, self.ring.stages)
                k_tile = self.work.k_next(tile, k_tile, k_step)

    def copy(self, region, k_tile, last, stage) -> None:
        """Copies this thread's part of the scales of a k tile into a stage. last: number of the last k tile."""
        k_block = cutlass.max(cutlass.min(k_tile, last), 0)
        place = self.base + stage * (self.scales.stage * NUMBER)
        corner = self.scales.corner(region)
        for side, first in zip((self.scales.down, self.scales.across), corner, strict=True):
            if side is not None:
                side.load(first, region.matrix, k_block, place, self.thread)


class BlockScales(Promotion):
    """What a warpgroup that multiplies does with scales of blocks of K in the ring."""

    reads_stage = True

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self.config, self.scales = config, Scales(config, signature)
        self.blocks = config.group_rows // BLOCK_ROWS
        across = self.scales.across
        self.reads_pairs = across is not None and across.grain == 1
        shares = math.gcd(config.bn, SCALE_K) if across is None or across.by_block else max(across.grain, FRAGMENT)
        self.run = shares // FRAGMENT
        """Fragments of neighbouring columns that share a scale wherever the tile lies."""

    def start(self, products: PromotedProducts, position: Position, args, work, memory) -> None:
        self.own, self.thread = work.of_warpgroup(position.group), position.own_thread
        self.base = cute.recast_ptr(memory.scales, dtype=Float32)

    def open(self, tile) -> None:
        row, column = self.scales.corner(self.own.region(tile))
        self.own_row = self.scales.of_row * self.own.first_row
        # Where the CTA's tile begins within a block of 128.
        self.row_in_block = (row - self.own_row) % SCALE_K
        self.column_in_block = column % SCALE_K

    def fetch(self, stage) -> tuple:
        """(scales of this thread's rows, scales of its runs of columns, address of the scales of single columns)"""
        first = self.base + stage * self.scales.stage
        return self._rows(first), self._columns(first), first

    def _rows(self, first) -> list[Any]:
        """Of the rows r and r + 8 of each block of 64 rows."""
        side, found = self.scales.down, list[Any]()
        if side is None:
            return [None] * (2 * self.blocks)
        for block in range(self.blocks):
            row = self.own_row + block * self.config.block_step
            if side.by_block:
                found += [_number(first + (self.row_in_block + row) // SCALE_K)] * 2
            elif side.grain >= BLOCK_ROWS:
                found += [_number(first + row // side.grain)] * 2
            else:
                row = row + (self.thread // 32 * 16 + self.thread % 32 // 4)
                found += [_number(first + _share(row + 8 * r, side.grain)) for r in range(2)]
        return found

    def _columns(self, first) -> list[Any]:
        """Of each run of columns; None where single columns have scales, or none."""
        side, length = self.scales.across, FRAGMENT * self.run
        begins = range(0, self.config.bn, length)
        if side is None or self.reads_pairs:
            return [None] * len(begins)
        if not side.by_block:
            own = 2 * (self.thread % 4) // side.grain if side.grain < FRAGMENT else 0
            places = [own + begin // side.grain for begin in begins]
        elif self.config.bn == length:
            places = [0]
        else:
            places = [(self.column_in_block + begin) // SCALE_K for begin in begins]
        return [_number(first + (side.begin + place)) for place in places]

    def add(self, accumulators, partial, fetched, half: int = 0) -> None:
        rows, columns, first = fetched
        size, fragments = cute.size(accumulators), self.config.bn // 8
        sums = cute.make_tensor(accumulators.iterator, cute.make_layout(size))
        parts = cute.make_tensor(partial.iterator, cute.make_layout(size))
        for number, column in enumerate(columns):
            factors = [[_product(row, column)] * 2 for row in rows]
            for j in range(number * self.run, (number + 1) * self.run):
                if self.reads_pairs:
                    pair = self._pair(first, j)
                    factors = [[_product(row, pair[c]) for c in range(2)] for row in rows]
                for place in range(4 * self.blocks):
                    block, r, c = place // 4, place // 2 % 2, place % 2
                    at = block * 4 * fragments + 4 * j + 2 * r + c
                    sums[at] = parts[at].to(Float32) * factors[2 * block + r][c] + sums[at]

    def _pair(self, first, j: int) -> Any:
        """The scales of this thread's two columns of fragment j."""
        begin = first + (self.scales.across.begin + 8 * j + 2 * (self.thread % 4))
        pair = cute.make_rmem_tensor(2, Float32)
        aligned = cute.make_ptr(Float32, begin.toint(), begin.memspace, assumed_align=8)
        cute.autovec_copy(cute.make_tensor(aligned, cute.make_layout(2)), pair)
        return pair


def _number(pointer) -> Any:
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def _share(place: Any, grain: int) -> Any:
    """The number, from 0, of the `grain` places among which a place is."""
    return place if grain == 1 else place // grain


def _product(row: Any, column: Any) -> Any:
    """Of the scales of a row and a column, of which one may be None."""
    return column if row is None else row if column is None else row * column


def make_products(config: HopperConfig, signature: Signature, ring: Ring, turns: Turns) -> Products:
    """How a signature's products are accumulated."""
    tiles = interval(config, signature)
    if not tiles:
        return Products(config, ring, turns)
    if signature.parts is not None:
        kind = CompensatedProducts if compensates(config, signature) else PartProducts
        return kind(config, ring, turns, tiles, Promotion(), signature.parts)
    scaled = bool(signature.epilogue.program.block_scales)
    if "half" in config.options:
        return HalfProducts(config, ring, turns, tiles, DirectScales(config, signature) if scaled else Promotion())
    made = TwinProducts if "twin" in config.options else PromotedProducts
    return made(config, ring, turns, tiles, BlockScales(config, signature) if scaled else Promotion())
