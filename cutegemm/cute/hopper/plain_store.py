"""Epilogues of the Hopper kernel that put results into TMA's boxes by plain shared stores, where no matrix of 8 x 8
16-bit numbers is at hand: results of 32 and of 8 bits, and those of gate and up in pairs. `store` explains the rest.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int8, Int16, Int32

from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.store import TmaEpilogue, TransposedTmaEpilogue, swizzle_bits
from cutegemm.cute.reduction import either
from cutegemm.problem import Signature


class PlainTmaEpilogue(TmaEpilogue):
    """`TmaEpilogue` for results of 32 and of 8 bits, and those of gate and up in pairs: stores of what a thread has
    side by side take stmatrix's place.

    unit: bytes of such a store. With up to 4 bytes no two lanes meet in a bank: a warp stores to 8 rows, which the
    swizzle puts into 8 different pieces of 16 bytes.
    """

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        super().__init__(config, signature)
        self.unit = self.neighbours * self.itemsize

    def _start_addresses(self, base, lane) -> None:
        self.own = self.of_operands = _Lane(base, self.warp, lane, self.row_bytes, self.unit)
        if self.ahead is not None and self.ahead.row_bytes != self.row_bytes:
            self.of_operands = _Lane(base, self.warp, lane, self.ahead.row_bytes, 2 * self.ahead.plan.itemsize)

    def _stage(self, accumulators, corner, i, part, buffer) -> None:
        count = 2 // self.neighbours  # four results at a time
        for first in range(0, self.columns // self.block, count):
            address = None if self.ahead is None else self.of_operands.address(first) + buffer * self.buffer_bytes
            results = self._values(accumulators, corner, i, part, first, count, address)
            for j in range(count):
                address = self.own.address(first + j) + buffer * self.buffer_bytes
                for number, result in enumerate(results):
                    place = address + number * self.result_bytes if number else address
                    for r in range(2):
                        self._put(place + 8 * r * self.row_bytes, result, 2 * j + r)

    def _put(self, place, result, number: int) -> None:
        """Stores the `number`-th unit of a thread's results."""
        if self.unit == 8:
            word = "f32" if self.out_type is Float32 else "s32"
            cute.arch.inline_ptx(
                f"st.shared.v2.{word} [{{$r0}}], {{{{$r1}}, {{$r2}}}};",
                read_only_args=[place, result[2 * number], result[2 * number + 1]],
            )
            return
        unit = cute.recast_tensor(result, {1: Int8, 2: Int16, 4: Int32}[self.unit])[number]
        unit = unit.to(Int16) if self.unit == 1 else unit
        cute.arch.inline_ptx(f"st.shared.b{8 * self.unit} [{{$r0}}], {{$r1}};", read_only_args=[place, unit])


class _Lane:
    """Where a lane's columns lie in boxes at shared address `base`, whose rows have so many bytes; `unit`: bytes of the
    columns that it has side by side in a block.
    """

    def __init__(self, base, warp, lane, row_bytes: int, unit: int) -> None:
        row, own = warp * 16 + lane // 4, (lane & 3) * unit
        swizzle = ((row * row_bytes) >> 7) & ((1 << swizzle_bits(row_bytes)) - 1)
        self.unit, self.row_address = unit, base + row * row_bytes + (own & 15)
        # Rows 8 further on have the same swizzle.
        self.own_piece = (own >> 4) ^ swizzle

    def address(self, j: int):
        """Of block `j` of a box, in the first of the lane's rows."""
        piece, within = divmod(4 * j * self.unit, 16)
        return self.row_address + ((self.own_piece ^ piece) << 4) + within


class _OneByOne(TransposedTmaEpilogue):
    """`TransposedTmaEpilogue` whose results are stored one by one."""

    def _address(self, j: int):
        """Where this lane's first result of block `j` of a buffer lies."""
        return self.row_address + 8 * j * self.row_bytes


class TransposedByteEpilogue(_OneByOne):
    """`TransposedTmaEpilogue` for results of 8 bits, stored one by one: a thread has those of two rows of D, 8 columns
    apart.
    """

    def _start_addresses(self, base, lane) -> None:
        # Rows of D of 64 bytes: two neighbours share a line of 128, and so the swizzle. A warp has one piece of a row.
        quad = lane & 3
        self.row_address = base + 2 * self.row_bytes * quad + ((self.warp ^ quad) << 4) + lane // 4

    def _stage(self, accumulators, corner, i, part, buffer) -> None:
        for j in range(self.columns // 8):
            address = self._address(j) + buffer * self.buffer_bytes
            for number, result in enumerate(self._values(accumulators, corner, i, part, j, 1, None)):
                place = address + number * self.result_bytes if number else address
                word = cute.recast_tensor(result, Int32)[0]
                for q in range(4):
                    own = place + (q % 2 * self.row_bytes + q // 2 * 8)
                    cute.arch.inline_ptx("st.shared.b8 [{$r0}], {$r1};", read_only_args=[own, word >> (8 * q)])


class TransposedPairsEpilogue(_OneByOne):
    """`TransposedTmaEpilogue` for gate and up in pairs, which are neighbouring rows of accumulators, in lanes 4 apart.

    Of the two rows that a thread has of each column it keeps one and sends the other, so that it has gate and up of one
    result. Results, of 16 and 8 bits, are stored one by one: those of a warp are 8 columns of D.
    """

    def _start_addresses(self, base, lane) -> None:
        quad, own = lane & 3, self.itemsize * self._own_row()
        swizzle = quad >> 1 if self.itemsize == 1 else quad
        self.row_address = base + 2 * self.row_bytes * quad + (((own >> 4) ^ swizzle) << 4) + (own & 15)

    def _sums(self, begin, size: int) -> list[Any]:
        held = cute.make_tensor(begin, cute.make_layout(2 * size))
        upper = self.lane & 4 != 0
        gate, up = (cute.make_rmem_tensor(size, Float32) for _ in range(2))
        for q in range(size):
            first, second = held[q // 2 * 4 + q % 2], held[q // 2 * 4 + 2 + q % 2]
            sent = cute.arch.shuffle_sync_bfly(either(upper, first, second), 4)
            gate[q], up[q] = either(upper, sent, first), either(upper, second, sent)
        return [gate, up]

    def _stage(self, accumulators, corner, i, part, buffer) -> None:
        unit = {1: Int8, 2: Int16}[self.itemsize]
        for first in range(0, self.columns // 8, 2):
            count = min(2, self.columns // 8 - first)
            for number, result in enumerate(self._values(accumulators, corner, i, part, first, count, None)):
                place = self._address(first) + (buffer * self.buffer_bytes + number * self.result_bytes)
                units = cute.recast_tensor(result, unit)
                for q in range(2 * count):
                    cute.arch.inline_ptx(
                        f"st.shared.b{8 * self.itemsize} [{{$r0}}], {{$r1}};",
                        read_only_args=[place + (q // 2 * 8 + q % 2) * self.row_bytes, units[q].to(Int16)],
                    )
