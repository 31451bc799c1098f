"""Scales of blocks of K: the partial sums of 128 of K are multiplied by A's and B's scales when they are promoted.

    accumulators += partial sums * (scale of the row * scale of the column)

Scales lie in global memory in any strides, fp32. Along the rows of the accumulators, and along their columns where 128
of these share one, a thread needs a few numbers only: it loads them into registers. Where every column has its own, the
warpgroup loads them together, each thread one or two, and hands them round through shared memory:

    open      loads the numbers of the first k tile
    fetch     while WGMMA of a k tile run: what was loaded becomes current, the numbers of the next k tile are asked for
    add       reads the current ones

so that a load has the time of a whole k tile. Two buffers in shared memory, written in turn, need one barrier of the
warpgroup a k tile: who writes one again has passed the barrier behind which the others have read it.

With swapped operands the rows of the accumulators are columns of B. Places outside of the matrices take the scale of
the last row, column or block.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.hopper.config import BLOCK_ROWS, WARPGROUP, HopperConfig
from cutegemm.cute.hopper.mma import Products
from cutegemm.cute.hopper.pipeline import Ring, Turns
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.promoted import CompensatedProducts, PartProducts, PromotedProducts, Promotion
from cutegemm.cute.hopper.promotion import column_blocks, compensates, interval, shared_columns
from cutegemm.cute.source import element
from cutegemm.problem import Signature
from cutegemm.problem.program.graph import SCALE_K, Input


class _Side:
    """The scales along the rows or the columns of the accumulators; `given` is None where there are none.

    each: whether every row (column) has its own, else 128 share one.
    """

    def __init__(self, given: Input | None) -> None:
        self.given = given
        self.is_a = given is not None and given.scales.startswith("a")
        self.each = given is not None and given.scales.endswith("1")

    def start(self, args) -> None:
        """Binds to a launch's arguments by name."""
        if self.given is None:
            return
        name = self.given.name
        self.base = getattr(args, name)
        strides = [getattr(args, f"{name}_{axis}") for axis in ("row", "col")]
        self.along, self.along_k = strides if self.is_a else strides[::-1]
        self.of_matrix = getattr(args, f"{name}_batch") if self.given.batched else Int64(0)
        self.extent = args.m if self.is_a else args.n
        if not self.each:
            self.extent = cute.ceil_div(self.extent, SCALE_K)

    def offset(self, place, matrix):
        """Elements to the scale of row (column) or block of 128 number `place`, of the first 128 of K."""
        return Int64(cutlass.min(place, self.extent - 1)) * self.along + Int64(matrix) * self.of_matrix

    def load(self, offsets, target, k_block) -> None:
        """The scales of a block of K into registers."""
        for i in range(cute.size(target)):
            target[i] = element(self.base, offsets[i] + Int64(k_block) * self.along_k)


class BlockScales(Promotion):
    """See the module docstring."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        scales = signature.epilogue.program.block_scales
        down, across = (scales.get(name) for name in ("ba" if config.swapped else "ab"))
        self.config = config
        self.down, self.across = _Side(down), _Side(across)
        self.blocks = config.group_rows // BLOCK_ROWS
        self.shared_columns = shared_columns(config, signature)

    def start(self, products: PromotedProducts, position: Position, args, work, memory) -> None:
        self.args, self.work, self.own = args, work, work.of_warpgroup(position.group)
        self.thread, self.barrier = position.own_thread, position.group_barrier
        for side in (self.down, self.across):
            side.start(args)
        rows = 0 if self.down.given is None else self.blocks * (2 if self.down.each else 1)
        columns = 0 if self.across.given is None else (
            self.shared_columns // WARPGROUP if self.across.each else column_blocks(self.config)
        )  # fmt: skip
        # What lasts from one k tile to the next stands in registers that loops may change.
        self.walk = cute.make_rmem_tensor(4, Int32)  # k tile, step, column within its 128, buffer
        self.row_offsets, self.next_rows, self.rows = self._registers(rows)
        self.column_offsets, self.next_columns, self.columns = self._registers(columns)
        if self.across.each:
            buffers = cute.recast_ptr(memory.scales, dtype=Float32) + position.group * (2 * self.shared_columns)
            self.buffers = cute.make_tensor(buffers, cute.make_layout(2 * self.shared_columns))

    def _registers(self, count: int) -> tuple[Any, Any, Any]:
        """(offsets, numbers of the next k tile, numbers of the current one)"""
        return (
            cute.make_rmem_tensor(max(count, 1), Int64) if count else None,
            cute.make_rmem_tensor(max(count, 1), Float32) if count else None,
            cute.make_rmem_tensor(max(count, 1), Float32) if count else None,
        )

    def open(self, tile) -> None:
        region = self.own.region(tile)
        self.walk[0], self.walk[1] = self.work.k_walk(tile)
        self.walk[2], self.walk[3] = region.column % SCALE_K, Int32(0)
        if self.down.given is not None:
            per = 2 if self.down.each else 1
            for block in range(self.blocks):
                first = region.row + block * self.config.block_step
                for r in range(per):
                    lane_row = self.thread // 32 * 16 + self.thread % 32 // 4 + 8 * r
                    place = first + lane_row if self.down.each else first // SCALE_K
                    self.row_offsets[block * per + r] = self.down.offset(place, region.matrix)
        if self.across.given is not None:
            for i in range(cute.size(self.column_offsets)):
                if self.across.each:
                    place = region.column + self.thread + i * WARPGROUP
                else:
                    place = region.column // SCALE_K + i
                self.column_offsets[i] = self.across.offset(place, region.matrix)
        self._load()

    def _load(self) -> None:
        last = cute.ceil_div(self.args.k, SCALE_K) - 1
        k_block = cutlass.max(cutlass.min(self.walk[0], last), 0)
        if self.down.given is not None:
            self.down.load(self.row_offsets, self.next_rows, k_block)
        if self.across.given is not None:
            self.across.load(self.column_offsets, self.next_columns, k_block)

    def fetch(self, tile) -> None:
        for now, after in ((self.rows, self.next_rows), (self.columns, self.next_columns)):
            for i in range(0 if now is None else cute.size(now)):
                now[i] = after[i]
        if self.across.each:
            self.walk[3] = self.walk[3] ^ 1
            for i in range(cute.size(self.columns)):
                self.buffers[self.walk[3] * self.shared_columns + i * WARPGROUP + self.thread] = self.columns[i]
            cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
        self.walk[0] = self.work.k_next(tile, self.walk[0], self.walk[1])
        self._load()

    def add(self, accumulators, partial) -> None:
        size = cute.size(accumulators)
        sums = cute.make_tensor(accumulators.iterator, cute.make_layout(size))
        parts = cute.make_tensor(partial.iterator, cute.make_layout(size))
        fragments = self.config.bn // 8
        shared = {} if self.across.each else self._shared_factors()
        for j in range(fragments):
            pair = self._pair(j) if self.across.each else None
            for block in range(self.blocks):
                for r in range(2):
                    factors = self._own_factors(pair, block, r) if pair is not None else [
                        self._chosen(shared[block, r], j)
                    ] * 2  # fmt: skip
                    for c in range(2):
                        place = block * 4 * fragments + 4 * j + 2 * r + c
                        sums[place] = parts[place].to(Float32) * factors[c] + sums[place]

    def _own_factors(self, pair, block: int, r: int) -> list[Any]:
        """The factors of a row at two columns that have scales of their own."""
        row = self._row(block, r)
        return [pair[c] if row is None else row * pair[c] for c in range(2)]

    def _row(self, block: int, r: int) -> Any:
        """The scale of a row of accumulators; None where there is none."""
        if self.down.given is None:
            return None
        return self.rows[2 * block + r] if self.down.each else self.rows[block]

    def _shared_factors(self) -> dict[tuple[int, int], list[Any]]:
        """(block, r) -> the factors of a row, one for each of the tile's blocks of 128 columns."""
        found = {}
        for block in range(self.blocks):
            for r in range(2):
                row = self._row(block, r)
                if self.columns is None:
                    found[block, r] = [row]
                    continue
                columns = [self.columns[i] for i in range(cute.size(self.columns))]
                found[block, r] = [column if row is None else row * column for column in columns]
        return found

    def _chosen(self, factors: list[Any], j: int) -> Any:
        """Of one or two blocks of columns the one that fragment j lies in."""
        if len(factors) == 1:
            return factors[0]
        return Float32(cutlass.select_(self.walk[2] + 8 * j >= SCALE_K, factors[1], factors[0]))

    def _pair(self, j: int) -> Any:
        """The scales of this thread's two columns of fragment j."""
        begin = self.buffers.iterator + (self.walk[3] * self.shared_columns + 8 * j + 2 * (self.thread % 4))
        pair = cute.make_rmem_tensor(2, Float32)
        aligned = cute.make_ptr(Float32, begin.toint(), begin.memspace, assumed_align=8)
        cute.autovec_copy(cute.make_tensor(aligned, cute.make_layout(2)), pair)
        return pair


def make_products(config: HopperConfig, signature: Signature, ring: Ring, turns: Turns) -> Products:
    """How a signature's products are accumulated."""
    tiles = interval(config, signature)
    if not tiles:
        return Products(config, ring, turns)
    if signature.parts is not None:
        kind = CompensatedProducts if compensates(config, signature) else PartProducts
        return kind(config, ring, turns, tiles, Promotion(), signature.parts)
    scaled = bool(signature.epilogue.program.block_scales)
    return PromotedProducts(config, ring, turns, tiles, BlockScales(config, signature) if scaled else Promotion())
