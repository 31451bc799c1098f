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
from cutlass import Float32, Int64

from cutegemm.cute import types
from cutegemm.cute.epilogue import aligned, finish
from cutegemm.cute.hopper.config import WARPGROUP, HopperConfig
from cutegemm.cute.hopper.memory import SharedMemory
from cutegemm.cute.hopper.output import Output
from cutegemm.problem import Signature


class FragmentStore:
    """D = act(alpha * sum + beta * C + bias) of one fragment."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self.columns_of_8 = config.bn // 8
        self.block_step = config.block_step
        self.swapped = config.swapped
        self.epilogue = signature.epilogue
        self.out_type = types.NUMERIC[signature.out_dtype]
        self.pair_bytes = self.out_type.width // 4
        self.in_pairs = not config.swapped and signature.align_d >= self.pair_bytes

    def initialize(self, memory: SharedMemory) -> None:
        """Needs no barriers."""

    def make_atom(self, d, m, n, ldd, d_batch, batch) -> tuple[None, None]:
        """Needs no tensor map."""
        return None, None

    def start(self, output: Output, *_: Any) -> None:
        self.args = output.args

    def exchange(self, accumulators):
        """The accumulators whose sums this CTA finishes: all of them."""
        return accumulators

    @cute.jit
    def store(self, sums, place, region):
        """Stores the four `sums` of vector `place` of a warpgroup's `region`."""
        args, m, n = self.args, region.m, region.n
        number, thread = place // WARPGROUP, place % WARPGROUP
        block = number // self.columns_of_8
        row = region.row + block * self.block_step + (thread // 32 * 16 + thread % 32 // 4)
        column = region.column + ((number - block * self.columns_of_8) * 8 + 2 * (thread % 4))
        c, bias = partial(self._load_c, row, column, region), partial(self._load_bias, row, column, region)
        result = cute.make_rmem_tensor(4, self.out_type)
        result.store(finish(sums.load(), self.epilogue, args, c, bias).to(self.out_type))
        d = args.d + Int64(region.matrix) * args.d_batch
        for r in cutlass.range_constexpr(2):
            y, x = self._own(row, column, 0, r)
            if cutlass.const_expr(self.in_pairs):
                pair = cute.make_tensor(result.iterator + 2 * r, cute.make_layout(2))
                target = d + (Int64(y) * args.ldd + Int64(x))
                if (y < m) & (x + 1 < n):
                    place_of = cute.make_tensor(aligned(target, self.pair_bytes), cute.make_layout(2))
                    cute.autovec_copy(pair, place_of)
                elif (y < m) & (x < n):
                    cute.make_tensor(target, cute.make_layout(1))[0] = pair[0]
            else:
                for c in cutlass.range_constexpr(2):
                    y, x = self._own(row, column, c, r)
                    if (y < m) & (x < n):
                        target = d + (Int64(y) * args.ldd + Int64(x))
                        cute.make_tensor(target, cute.make_layout(1))[0] = result[2 * r + c]

    def _own(self, row, column, c: int, r: int) -> tuple:
        """(row, column) of D of accumulator (c, r) of the fragment."""
        return (column + c, row + 8 * r) if self.swapped else (row + 8 * r, column + c)

    def _load_c(self, row, column, region):
        """C of the fragment, a vector; addresses are clamped to its edge."""
        values = cute.make_rmem_tensor(4, Float32)
        base = self.args.c + Int64(region.matrix) * self.args.c_batch
        for q in range(4):
            y, x = self._own(row, column, q & 1, q >> 1)
            y, x = cutlass.min(y, region.m - 1), cutlass.min(x, region.n - 1)
            place = base + (Int64(y) * self.args.c_row + Int64(x) * self.args.c_col)
            values[q] = cute.make_tensor(place, cute.make_layout(1))[0].to(Float32)
        return values.load()

    def _load_bias(self, row, column, region):
        values = cute.make_rmem_tensor(4, Float32)
        along_n = self.epilogue.bias_axis == "n"
        for q in range(4):
            y, x = self._own(row, column, q & 1, q >> 1)
            place = cutlass.min(x, region.n - 1) if along_n else cutlass.min(y, region.m - 1)
            values[q] = cute.make_tensor(self.args.bias + Int64(place), cute.make_layout(1))[0].to(Float32)
        return values.load()
