"""The epilogue of single WGMMA fragments: four accumulators at a time, straight to global memory.

Split-K and clusters along K store their sums this way, because any thread may add up any fragment. A fragment is 2
neighbouring columns in each of 2 rows that lie 8 apart; a warp's make up 8-column pieces of 16 rows, so that half of
each sector is written. There is little to write: with many splits D is much smaller than what was read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutegemm.cute import whole
from cutegemm.cute.hopper.config import WARPGROUP, HopperConfig
from cutegemm.cute.hopper.memory import SharedMemory
from cutegemm.cute.hopper.output import Output
from cutegemm.cute.hopper.slab_store import up_offset
from cutegemm.cute.lowering import finish, rounded
from cutegemm.cute.source import aligned, sources, targets
from cutegemm.problem import Signature
from cutegemm.problem.program.graph import Node


class FragmentStore:
    """The epilogue's program for one fragment of sums, or of gate and up in halves for one fragment of each."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self.columns_of_8 = config.out_columns(signature) // 8
        self.block_step = config.block_step
        # From a vector of gate to the one of up that it is finished with; 0 without.
        self.up = up_offset(config, signature) // 4 if signature.epilogue.gating else 0
        self.swapped = config.swapped
        self.rows = (0, 1, 0, 1) if config.swapped else (0, 0, 1, 1)
        self.program = whole.program_of(signature)
        self.read = whole.reader(signature)
        self.targets = targets(signature, 2)
        self.sources = sources(signature)

    def initialize(self, memory: SharedMemory) -> None:
        """Needs no barriers."""

    def make_atoms(self, args) -> tuple:
        """Needs no tensor maps."""
        return ()

    def start(self, output: Output, *_: Any) -> None:
        self.args = output.args

    def exchange(self, accumulators):
        """The accumulators whose sums this CTA finishes: all of them."""
        return accumulators

    @cute.jit
    def store(self, sums, place, region):
        """Stores the four `sums` of vector `place` of a warpgroup's `region`, or four results of gate and up."""
        number, thread = place // WARPGROUP, place % WARPGROUP
        block = number // self.columns_of_8
        row = region.row + block * self.block_step + (thread // 32 * 16 + thread % 32 // 4)
        column = region.column + ((number - block * self.columns_of_8) * 8 + 2 * (thread % 4))
        places = [self._own(row, column, q & 1, q >> 1) for q in range(4)]

        values = finish(self.program, 4, partial(self._leaf, sums, places, region), self.rows)
        for t in cutlass.range_constexpr(len(self.targets)):
            self.targets[t].start(self.args, region.matrix)
            self._put(self.targets[t], values[self.targets[t].number], row, column, region)

    @cute.jit
    def _put(self, target: cutlass.Constexpr, values, row, column, region):
        m, n = region.m, region.n
        # Numbers of their own: what runs in a branch knows no object.
        base, leading = target.base, target.leading
        result = cute.make_rmem_tensor(4, target.type)
        result.store(rounded(values, target.type, 4))
        for r in cutlass.range_constexpr(2):
            y, x = self._own(row, column, 0, r)
            if cutlass.const_expr(target.vector == 2 and not self.swapped):
                pair = cute.make_tensor(result.iterator + 2 * r, cute.make_layout(2))
                begin = target.at(y, x)
                if (y < m) & (x + 1 < n):
                    place_of = cute.make_tensor(aligned(begin, 2 * target.bytes), cute.make_layout(2))
                    cute.autovec_copy(pair, place_of)
                elif (y < m) & (x < n):
                    cute.make_tensor(begin, cute.make_layout(1))[0] = pair[0]
            else:
                for c in cutlass.range_constexpr(2):
                    y, x = self._own(row, column, c, r)
                    if (y < m) & (x < n):
                        place_of = base + (Int64(y) * leading + Int64(x))
                        cute.make_tensor(place_of, cute.make_layout(1))[0] = result[2 * r + c]

    def _own(self, row, column, c: int, r: int) -> tuple:
        """(row, column) of D of accumulator (c, r) of the fragment."""
        return (column + c, row + 8 * r) if self.swapped else (row + 8 * r, column + c)

    def _leaf(self, sums, places, region, node: Node) -> Any:
        if node.op == "acc":
            return self.read((sums[None, int(bool(node.attribute))] if self.up else sums).load())
        if node.op == "input":
            assert isinstance(node.attribute, int)
            return self._operand(self.program.inputs[node.attribute], places, region)
        return self._index(node.op, places, region)

    def _operand(self, given, places, region) -> Any:
        """An operand's elements at `places`; addresses are clamped to its edge."""
        if given.by_value:
            return getattr(self.args, given.name)
        source = self.sources[given.name]
        source.start(self.args, region.matrix)
        return source.numbers(places, region.m, region.n)

    def _index(self, axis: str, places, region) -> Any:
        if axis == "matrix":
            return Int32(region.matrix)
        values = cute.make_rmem_tensor(4, Int32)
        for q, (row, column) in enumerate(places):
            values[q] = Int32(row if axis == "row" else column)
        return values.load()
