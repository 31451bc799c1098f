"""The kernel that adds up the rows of a mixture's tokens, or gathers rows; see `config.py`.

It reads each row and writes each sum once: 2 top_k + 2 bytes for each 16-bit element of a sum, which is all that it
does. With 16 bytes a thread, and two rows a token, an SM has 64 KiB of loads under way.
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
    (name, Int32) for name in ("tokens", "vectors", "top_k", "ctas", "early", "rows", "part_pitch", "sum_pitch")
)  # fmt: skip
"""The entry's numbers behind the stream. vectors: of a row. rows: of `parts`. pitches: vectors from one row of `parts`,
or of `sums`, to the next.
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
        token = number // args.vectors
        self._add_up(token, number - token * args.vectors)

    @cute.jit
    def _add_up(self, token, vector):
        """Writes a vector of a token's sum, if there is such a token."""
        args, top_k = self.args, self.signature.top_k
        if token < args.tokens:
            target = self._vector(args.sums, token, args.sum_pitch, vector)
            total = cute.make_rmem_tensor(self.width, Float32)
            if cutlass.const_expr(top_k == 1):
                cute.autovec_copy(self._part(element(args.row_of, token), vector), target)
            elif cutlass.const_expr(top_k):
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
            if cutlass.const_expr(top_k != 1):
                rounded = cute.make_rmem_tensor(self.width, self.dtype)
                rounded.store(total.load().to(self.dtype))
                cute.autovec_copy(rounded, target)

    def _vector(self, pointer, row, pitch, vector) -> Any:
        """The vector of that number in a row."""
        place = pointer + (Int64(row) * pitch + vector) * self.width
        return cute.make_tensor(aligned(place, self.signature.bytes), cute.make_layout(self.width))

    @cute.jit
    def _part(self, row, vector):
        """The vector of a row, in registers; zeros where there is no such row."""
        found = cute.make_rmem_tensor(self.width, self.dtype)
        source = self._vector(self.args.parts, row, self.args.part_pitch, vector)
        if cutlass.const_expr(self.signature.checked):
            found.fill(0)
            if (row >= 0) & (row < self.args.rows):
                cute.autovec_copy(source, found)
        else:
            cute.autovec_copy(source, found)
        return found
