"""The kernel "pack": copies a matrix whose rows begin at any address into rows that are multiples of 16 bytes.

A row is a run of contiguous elements, along whichever extent. The kernel knows no dtype: it reads units of 1, 2, 4 or 8
bytes, the largest that divides every address of the source, and writes vectors of 16 bytes. A warp copies 512 bytes of
one row:

    global -> registers   lane l reads units l, l + 32, l + 64 ...: neighbouring lanes, neighbouring addresses
    -> shared -> registers   the same bytes, 16 consecutive ones to a lane
    -> global             lane l writes vector l

Behind the end of a row it writes zeros, up to the next row.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from cutegemm.cute.prepare import PIECE, UNITS, VECTOR

WARPS = 8
"""Warps of a CTA. Each works for itself."""
LANES = 32


class Pack:
    """The host entry and the kernel, for units of so many bytes."""

    def __init__(self, unit: int) -> None:
        if unit not in UNITS:
            raise ValueError(f"unit: got {unit} bytes, accepted are {', '.join(map(str, UNITS))}")
        self.config = f"pack/{unit}"
        self.unit = unit
        self.in_vector = VECTOR // unit
        self.held = Int64 if unit == 8 else Int32
        width, bits = ("b64", 64) if unit == 8 else ("b32", 32)
        self.load = (
            f"{{ .reg .pred valid; setp.lt.s32 valid, {{$r1}}, {{$r2}}; mov.{width} {{$w0}}, 0; "
            f"@valid ld.global.u{min(8 * unit, bits)} {{$w0}}, [{{$r0}}]; }}"
        )
        self.store = f"st.shared.u{8 * unit} [{{$r0}}], {{$r1}};"

    def fake_arguments(self) -> tuple[Any, ...]:
        """Stand-ins that give `cute.compile` the types of the entry's arguments."""
        source = make_ptr(cutlass.Uint8, 16, cute.AddressSpace.gmem, assumed_align=self.unit)
        target = make_ptr(cutlass.Uint8, 16, cute.AddressSpace.gmem, assumed_align=VECTOR)
        return (
            source, target, make_fake_stream(), Int32(1), Int32(1), Int32(1), Int64(1), Int64(1), Int32(1), Int64(1)
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, source, target, stream, units, rows, matrices, source_row, source_batch, vectors, target_batch
    ):  # fmt: skip
        """Copies `matrices` matrices of `rows` rows.

        Args:
            units: of a row of the source. vectors: of 16 bytes, of a row of the target.
            source_row, source_batch, target_batch: distances of rows and of matrices, in bytes.
        """
        pieces = cute.ceil_div(vectors, PIECE // VECTOR)
        warps = pieces * rows * matrices
        self.kernel(
            source, target, units, rows, matrices, source_row, source_batch, vectors, target_batch, pieces
        ).launch(grid=(cute.ceil_div(warps, WARPS), 1, 1), block=(WARPS * LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, source, target, units, rows, matrices, source_row, source_batch, vectors, target_batch, pieces
    ):  # fmt: skip
        """One warp: one piece of a row."""
        memory = cutlass.memory.SmemAllocator().allocate(WARPS * PIECE, byte_alignment=VECTOR)
        thread = cute.arch.thread_idx()[0]
        lane, warp = thread % LANES, cute.arch.make_warp_uniform(thread // LANES)
        number = cute.arch.block_idx()[0] * WARPS + warp
        line = number // pieces
        piece = number - line * pieces
        matrix = line // rows
        row = line - matrix * rows
        if matrix < matrices:
            begin = (source + (Int64(matrix) * source_batch + Int64(row) * source_row)).toint()
            room = memory.toint() + warp * PIECE
            self._stage(begin, piece * (PIECE // self.unit) + lane, units, room, lane)
            cute.arch.sync_warp()
            column = piece * (PIECE // VECTOR) + lane
            if column < vectors:
                offset = Int64(matrix) * target_batch + (Int64(row) * vectors + column) * VECTOR
                self._write(room + lane * VECTOR, (target + offset).toint())

    def _stage(self, begin, first, units, room, lane) -> None:
        """Brings this lane's units of a piece to shared memory, each to its place; zeros where the row has ended."""
        values = []
        for j in range(self.in_vector):
            place = first + j * LANES
            address = begin + Int64(place) * self.unit
            values.append(
                cute.arch.inline_ptx(self.load, write_only_types=[self.held], read_only_args=[address, place, units])
            )
        for j, value in enumerate(values):
            at = room + (lane + j * LANES) * self.unit
            cute.arch.inline_ptx(self.store, read_only_args=[at, value])

    def _write(self, source, target) -> None:
        """A vector from shared to global memory."""
        words = cute.arch.inline_ptx(
            "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[source],
        )
        cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[target, *words])
