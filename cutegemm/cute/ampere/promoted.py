"""Promoted products by mma.sync: after each k tile the tensor cores' sums are added to registers of their own.

The tensor cores add fp8 products with fewer bits than fp32 has, and cut off what they add. So sums are promoted every
128 of K, and every 32 for operands that are split into parts, whose smallest products come first. The first
instructions of a k tile begin from zeros instead of the sums so far, and at its end the CUDA cores add what the tile
gave to the accumulators, in fp32:

    accumulators += sums                                                          `Promotion`
    accumulators += sums * (scale of the row * scale of the column)               `BlockScales`

Scales of blocks of K, fp32 in any strides, go from global memory into registers when a k tile begins, and are used at
its end: each thread loads those of its own rows and columns, one number where 128 of them share it (no warp tile lies
in two blocks). Places outside of the matrices take the scale of the last row, column or block.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cutegemm.cute.ampere.config import AmpereConfig
from cutegemm.cute.source import ScaleSource, element
from cutegemm.problem import Signature
from cutegemm.problem.program.graph import SCALE_K


class Promotion:
    """Adds a k tile's sums as they are."""

    def start(self, gemm: Any, warp_m, warp_n, lane) -> None:
        """Binds to a thread of the CTA that runs the operator `gemm`."""

    def fetch(self, k_tile) -> None:
        """When the products of a k tile of this CTA's part of K begin."""

    def add(self, accumulators, sums) -> None:
        """Adds the k tile's sums to the accumulators."""
        for i in range(cute.size(accumulators)):
            accumulators[i] = accumulators[i] + sums[i]


class BlockScales(Promotion):
    """Multiplies a k tile's sums by the scales of its blocks, and adds them."""

    def __init__(self, config: AmpereConfig, signature: Signature) -> None:
        self.config, self.scales = config, signature.epilogue.program.block_scales

    def start(self, gemm: Any, warp_m, warp_n, lane) -> None:
        config, args = self.config, gemm.args
        matrix, row, column = gemm.corner()
        row, column = row + warp_m * config.wm, column + warp_n * config.wn
        # What a thread has of an m16n8 tile: two rows, 8 apart, and two neighbouring columns.
        rows = [row + lane // 4 + 8 * i for i in range(config.wm // 8)]
        columns = [column + lane % 4 * 2 + 8 * (j // 2) + j % 2 for j in range(config.wn // 4)]
        self.first = gemm.first_k_tile()
        self.sides = [self._side(*one, args, matrix) for one in (("a", rows, row), ("b", columns, column))]

    def _side(self, name: str, places, first, args, matrix) -> tuple[Any, Any, Any]:
        """(pointers to a thread's scales of the first block of K, elements to the next block, the current numbers)"""
        if name not in self.scales:
            ones = cute.make_rmem_tensor(1, Float32)
            ones.fill(1.0)
            return (), None, ones
        side = ScaleSource(self.scales[name])
        side.start(args)
        places = [cutlass.min(place, side.extent - 1) for place in (places if side.each else [first // SCALE_K])]
        own = [side.base + (Int64(place) * side.along + Int64(matrix) * side.of_matrix) for place in places]
        return own, side.along_k, cute.make_rmem_tensor(len(own), Float32)

    def fetch(self, k_tile) -> None:
        for pointers, along_k, numbers in self.sides:
            for i, pointer in enumerate(pointers):
                numbers[i] = element(pointer, Int64(self.first + k_tile) * along_k)

    def add(self, accumulators, sums) -> None:
        rows, columns = (numbers for *_, numbers in self.sides)
        for c in range(2):
            for r in range(2):
                for i in range(self.config.wm // 16):
                    row = rows[(2 * i + r) % cute.size(rows)]
                    for j in range(self.config.wn // 8):
                        place = ((c, r), i, j)
                        factor = row * columns[(2 * j + c) % cute.size(columns)]
                        accumulators[place] = sums[place].to(Float32) * factor + accumulators[place]


def promotion_of(config: AmpereConfig, signature: Signature) -> Promotion | None:
    """How a signature's sums are promoted; None for those that the tensor cores add up to the end."""
    if signature.promotion is None:
        return None
    return BlockScales(config, signature) if signature.epilogue.program.block_scales else Promotion()
