"""The kernel that adds up, gathers, spreads or clears the rows of a mixture's tokens; see `config.py`.

To add up, it reads each row and writes each sum once: 2 top_k + 2 bytes for each 16-bit element of a sum, which is all
that it does. With 16 bytes a thread, and two rows a token, an SM has 64 KiB of loads under way.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute import types
from cutegemm.cute.combine.config import POINTERS, Signature, Tile
from cutegemm.cute.source import aligned, element
from cutegemm.cute.standalone_operator import StandaloneOperator

NUMBERS: tuple[tuple[str, Any], ...] = tuple(
    (name, Int32) for name in ("tokens", "vectors", "top_k", "rows", "given_pitch", "made_pitch", "ctas", "early")
)  # fmt: skip
"""The entry's numbers behind the stream. vectors: of a row. rows: that are given. pitches: vectors from one row that is
given, or made, to the next.
"""


class Combine(StandaloneOperator):
    """Host entry and kernel; `config` is the tile."""

    POINTERS, NUMBERS = POINTERS, NUMBERS

    def __init__(self, config: Tile, signature: Signature) -> None:
        self.config, self.signature = config, signature
        self.dtype: Any = types.NUMERIC[signature.dtype]
        self.width = signature.bytes * 8 // self.dtype.width

    def pointee(self, name: str) -> tuple[Any, int]:
        return (Int32, 4) if name == "row_of" else (self.dtype, self.signature.bytes)

    @cute.kernel
    def kernel(self, args):
        self.args = args
        self.await_front()
        number = cute.arch.block_idx()[0] * self.config.threads + cute.arch.thread_idx()[0]
        if cutlass.const_expr(self.signature.does == "clear"):
            self._clear(number)
        else:
            self._copy(number)

    @cute.jit
    def _copy(self, number):
        """Writes the vector of that number of what is made, or where it spreads, of what is given."""
        args = self.args
        token = number // args.vectors
        vector = number - token * args.vectors
        if token < args.tokens:
            if cutlass.const_expr(self.signature.does == "spread"):
                self._spread(token, vector)
            elif cutlass.const_expr(self.signature.top_k == 1):
                cute.autovec_copy(self._part(element(args.row_of, token), vector), self._made(token, vector))
            else:
                self._add_up(token, vector)

    @cute.jit
    def _clear(self, number):
        """Writes zeros behind the last group. Thread `number` of the grid takes the vector of that number there, and
        every further one that lies as many vectors on as there are threads.
        """
        args = self.args
        last = Int32(0)
        # An end counts as at least the one before it: the last group ends at the largest.
        for group in cutlass.range(cute.arch.lane_idx(), args.top_k, cute.arch.WARP_SIZE, unroll=1):
            last = cutlass.max(last, element(args.row_of, group))
        for bit in cutlass.range_constexpr(5):
            last = cutlass.max(last, cute.arch.shuffle_sync_bfly(last, 1 << bit))
        zeros = cute.make_rmem_tensor(self.width, self.dtype)
        zeros.fill(0)
        first = cutlass.min(last, args.tokens) * args.vectors + number
        for place in cutlass.range(first, args.tokens * args.vectors, args.ctas * self.config.threads, unroll=1):
            row = place // args.vectors
            cute.autovec_copy(zeros, self._made(row, place - row * args.vectors))

    @cute.jit
    def _add_up(self, token, vector):
        """Writes a vector of a token's sum."""
        args, top_k = self.args, self.signature.top_k
        total = cute.make_rmem_tensor(self.width, Float32)
        if cutlass.const_expr(top_k):
            rows = [element(args.row_of, token * top_k + choice) for choice in range(top_k)]
            parts = [self._part(row, vector) for row in rows]
            total.store(parts[0].load().to(Float32))
            for part in parts[1:]:
                total.store(total.load() + part.load().to(Float32))
        else:
            first = Int64(token) * args.top_k
            total.store(self._part(element(args.row_of, first), vector).load().to(Float32))
            for choice in cutlass.range(1, args.top_k, unroll=1):
                part = self._part(element(args.row_of, first + choice), vector)
                total.store(total.load() + part.load().to(Float32))
        rounded = cute.make_rmem_tensor(self.width, self.dtype)
        rounded.store(total.load().to(self.dtype))
        cute.autovec_copy(rounded, self._made(token, vector))

    @cute.jit
    def _spread(self, token, vector):
        """Writes a vector of a token's row to each of its places that there are."""
        args, top_k = self.args, self.signature.top_k
        first, part = Int64(token) * args.top_k, self._part(token, vector)
        if cutlass.const_expr(top_k):
            rows = [element(args.row_of, first + choice) for choice in range(top_k)]
            for row in rows:
                self._write(part, row, vector)
        else:
            for choice in cutlass.range(args.top_k, unroll=1):
                self._write(part, element(args.row_of, first + choice), vector)

    @cute.jit
    def _write(self, part, row, vector):
        if (row >= 0) & (Int64(row) < Int64(self.args.tokens) * self.args.top_k):
            cute.autovec_copy(part, self._made(row, vector))

    def _made(self, row, vector) -> Any:
        """The vector of that number in a row that is made."""
        return self._vector(self.args.made, row, self.args.made_pitch, vector)

    def _vector(self, pointer, row, pitch, vector) -> Any:
        place = pointer + (Int64(row) * pitch + vector) * self.width
        return cute.make_tensor(aligned(place, self.signature.bytes), cute.make_layout(self.width))

    @cute.jit
    def _part(self, row, vector):
        """A vector of a given row, in registers. Where the kernel gathers, a number that names no row gives zeros."""
        found = cute.make_rmem_tensor(self.width, self.dtype)
        source = self._vector(self.args.given, row, self.args.given_pitch, vector)
        if cutlass.const_expr(self.signature.does == "gather"):
            found.fill(0)
            if (row >= 0) & (row < self.args.rows):
                cute.autovec_copy(source, found)
        else:
            cute.autovec_copy(source, found)
        return found
