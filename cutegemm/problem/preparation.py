"""Preparations: what kernels make of operands, in memory of the launch's own, before a product is computed."""

from __future__ import annotations

from typing import NamedTuple

from cutegemm.problem.dtypes import ITEMSIZE
from cutegemm.problem.operand import Matrix

ALIGNMENT = 16
"""Bytes that divide the address of the memory, and the size of everything in it."""


class Preparation(NamedTuple):
    """One operand, read once and written again as a kernel of products wants it.

    Attributes:
        kind: which kernel does it, a key of `cutegemm.cute.prepare.KERNELS`: "pack" copies rows.
        operand: "a" or "b" of the problem, as the kernel of the product sees them (with D transposed, b is the
            caller's a).
        source: how the operand lies. target: how it lies afterwards, from the beginning of the memory; its extents may
            be others (the terms of a number one behind the other, say).
        matrices: of the batch that are prepared; 1 where one matrix serves all.
        dtype, target_dtype: names of `problem.dtypes.TABLE`.
    """

    kind: str
    operand: str
    source: Matrix
    target: Matrix
    matrices: int
    dtype: str
    target_dtype: str

    @property
    def variant(self) -> tuple[str, int, str, str, bool]:
        """All that its compiled kernel depends on: kind, alignment class, dtypes, and whether rows are contiguous."""
        return self.kind, self.source.align, self.dtype, self.target_dtype, self.source.row_major

    @property
    def bytes_read(self) -> int:
        return self.source.rows * self.source.cols * self.matrices * ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, which are also those that are written."""
        target = self.target
        lines = (target.rows if target.row_major else target.cols) * target.leading
        elements = lines + (self.matrices - 1) * target.stride_batch
        return -(-elements * ITEMSIZE[self.target_dtype] // ALIGNMENT) * ALIGNMENT

    @property
    def text(self) -> str:
        """For `explain`."""
        target = self.target
        row = target.leading * ITEMSIZE[self.target_dtype]
        of = "rows" if target.row_major else "columns"
        dtype = "" if self.target_dtype == self.dtype else f" as {self.target_dtype}"
        return f"{self.kind}{dtype} into {of} of {row} bytes, {self.nbytes:.3g} bytes of memory"
