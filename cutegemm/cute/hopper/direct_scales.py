"""Scales of blocks of K that the promoting warpgroups load themselves, four k tiles ahead: those of option `half`.

Large tiles leave no shared memory for scales beside a ring of four stages. A thread needs few of them: one for each of
its rows of A, and one for each block of 128 columns of B that the tile lies in. The four lanes of a quad have the same
rows and blocks, so that each loads the scales of one k tile out of four, multiplies them, and gives the products to the
others by shuffles:

    k tile      0         1         2         3         4 ...
    lane 0      products  .         .         .         products      loaded while k tiles 0 to 3 are multiplied
    lane 1      .         products  .         .         .
    every lane  shfl 0    shfl 1    shfl 2    shfl 3    shfl 0

A product of two scales is one factor for all of a row's partial sums in a block. Places outside of the matrices take
the scale of the last row or block. Those of a tile's first four k tiles are loaded before the epilogue of the tile
before, or nothing would hide that they come from far.

Of a gated program ("halves") half of a tile's columns are gate's, and the others are up's, F columns further on. 128
divides F (`promotion.why_invalid`), so that both lie alike in blocks.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.hopper.config import BLOCK_ROWS, HopperConfig
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.promoted import PromotedProducts, Promotion
from cutegemm.cute.hopper.promotion import blocks_of_columns, lies_in_halves
from cutegemm.cute.source import ScaleSource, element
from cutegemm.problem import Signature
from cutegemm.problem.program.graph import SCALE_K

NUMBER = 4
"""Bytes of a scale."""
AHEAD = 4
"""K tiles whose scales a quad loads at a time: one a lane."""
IN_QUADS = 0x1C03
"""How lanes are numbered in a shuffle (PTX, shfl.sync.idx): modulo 4, each quad for itself."""


class DirectScales(Promotion):
    """Promotes with scales that each thread loads: of each row of A, of each 128 columns of B, or of one of the two.

    rows, columns: how many scales a thread loads of A and of B for a k tile. parts: 2 where half of a tile's columns
    are gate's and half up's, else 1. width: columns of a part.
    """

    prefetches = True

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        given = signature.epilogue.program.block_scales
        self.config, self.in_pairs = config, signature.epilogue.gating == "pairs"
        self.a, self.b = (ScaleSource(given[name]) if name in given else None for name in "ab")
        self.rows = 0 if self.a is None else 2 * (config.group_rows // BLOCK_ROWS)
        self.parts = 2 if "b" in given and lies_in_halves(signature, given["b"]) else 1
        self.width = config.bn // self.parts
        self.columns = 0 if self.b is None else self.parts * blocks_of_columns(self.width)

    def start(self, products: PromotedProducts, position: Position, args, work, memory) -> None:
        self.own, self.work, self.thread = work.of_warpgroup(position.group), work, position.own_thread
        self.k, self.to_up = args.k, args.n // 2 // SCALE_K
        for side in (self.a, self.b):
            if side is not None:
                side.start(args)
        count = self.rows + self.columns
        self.loaded, self.places = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Int64)
        self.factors = cute.make_rmem_tensor(max(self.rows, 1) * max(self.columns, 1), Float32)
        # This lane's next k tile to load, the step to the one after it, and how many k tiles have been promoted.
        self.walk = cute.make_rmem_tensor(3, Int32)

    def prefetch(self, tile) -> None:
        region = self.own.region(tile)
        column = self._column(region)
        for i in range(self.rows):
            block, r = i // 2, i % 2
            own = self.thread // 32 * 16 + self.thread % 32 // 4
            self._place(i, self.a, region.row + (block * self.config.block_step + own + 8 * r), region.matrix)
        of_part = self.columns // self.parts
        for i in range(self.columns):
            place = column // SCALE_K + i % of_part
            self._place(self.rows + i, self.b, place + self.to_up if i >= of_part else place, region.matrix)
        k_tile, step = self.work.k_walk(tile)
        self.walk[0] = k_tile + self.thread % AHEAD * step
        self.walk[1] = AHEAD * step
        self._load()

    def open(self, tile) -> None:
        self.column_in_block = self._column(self.own.region(tile)) % SCALE_K
        self.walk[2] = Int32(0)

    def _column(self, region) -> Any:
        """The first column of the product that a tile holds."""
        return 2 * region.column if self.in_pairs else region.column

    def _place(self, number: int, side: Any, place, matrix) -> None:
        """Keeps where the scales of a row (a block of columns) begin."""
        offset = Int64(cutlass.min(place, side.extent - 1)) * side.along + Int64(matrix) * side.of_matrix
        self.places[number] = (side.base + offset).toint()

    def _load(self) -> None:
        """Loads this lane's scales of the next four k tiles."""
        last = cute.ceil_div(self.k, SCALE_K) - 1
        k_tile = Int64(cutlass.max(cutlass.min(self.walk[0], last), 0))
        for i in range(self.rows + self.columns):
            side: Any = self.a if i < self.rows else self.b
            address = self.places[i] + k_tile * (side.along_k * NUMBER)
            self.loaded[i] = element(cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4), 0)
        self.walk[0] = self.walk[0] + self.walk[1]

    @cute.jit
    def _turn_if(self, due):
        """If `due`, at every fourth k tile: multiplies the scales loaded for the next four, and loads more."""
        if due:
            self._multiply()
            self._load()

    def _multiply(self) -> None:
        rows = [self.loaded[i] for i in range(self.rows)]
        columns = [self.loaded[self.rows + i] for i in range(self.columns)]
        found = [row * column for row in rows for column in columns] or rows or columns
        for i, factor in enumerate(found):
            self.factors[i] = factor

    def fetch(self, stage) -> list[list[Any]]:
        """For each segment of columns the factors of this thread's rows."""
        k_tile = self.walk[2]
        self._turn_if(k_tile % AHEAD == 0)
        self.walk[2] = k_tile + 1
        count, columns = cute.size(self.factors), max(self.columns, 1)
        factors = [cute.arch.shuffle_sync(self.factors[i], k_tile, mask_and_clamp=IN_QUADS) for i in range(count)]
        of_rows = [factors[i : i + columns] for i in range(0, count, columns)]
        if self.a is None:
            of_rows *= 2 * (self.config.group_rows // BLOCK_ROWS)
        return [[self._of_segment(i, each) for each in of_rows] for i in range(self.config.bn // self.segment)]

    @property
    def segment(self) -> int:
        """Neighbouring columns that share a scale wherever the tile lies."""
        return math.gcd(self.width, SCALE_K)

    def _of_segment(self, number: int, factors: list[Any]) -> Any:
        """The factor of a row for a segment, which lies in one of two blocks: where the tile begins decides."""
        part, begin = divmod(number * self.segment, self.width)
        count = len(factors) // self.parts
        factors = factors[part * count : (part + 1) * count]
        least, most = (min(place // SCALE_K, len(factors) - 1) for place in (begin, begin + SCALE_K - self.segment))
        if least == most:
            return factors[least]
        return cutlass.select_(self.column_in_block + begin >= most * SCALE_K, factors[most], factors[least])

    def add(self, accumulators, partial, fetched, half: int = 0) -> None:
        count, fragments = cute.size(partial), self.config.bn // 8
        for i in range(count):
            at = half * count + i
            block, column, r = at // (4 * fragments), 8 * (at // 4 % fragments), at // 2 % 2
            factor = fetched[column // self.segment][2 * block + r]
            accumulators[at] = partial[i].to(Float32) * factor + accumulators[at]
