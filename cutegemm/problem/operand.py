"""How a matrix lies in memory: extents, strides, and the alignment class that loads may rely on."""

from __future__ import annotations

from typing import NamedTuple


class Matrix(NamedTuple):
    """How one (possibly batched) matrix lies in memory, in elements.

    Attributes:
        rows, cols: extents as the kernel sees them.
        stride_row, stride_col: distance between neighbours along each; one of them is 1, except for C.
        stride_batch: distance between matrices of the batch; 0 broadcasts one matrix.
        align: bytes (16, 8, 4 or 2) that divide the address of every run of elements a kernel may read at
            once: the base address, the leading stride, the batch stride and the contiguous extent.
        begins: bytes (up to 16) that divide the addresses at which its rows begin, whatever their extent; 0 where that
            is not more than `align`.
    """

    rows: int
    cols: int
    stride_row: int
    stride_col: int
    stride_batch: int
    align: int
    begins: int = 0

    @property
    def row_major(self) -> bool:
        return self.stride_col == 1

    @property
    def leading(self) -> int:
        """The leading dimension: the stride that is not 1."""
        return self.stride_row if self.stride_col == 1 else self.stride_col

    def transposed(self) -> Matrix:
        return Matrix(
            self.cols, self.rows, self.stride_col, self.stride_row, self.stride_batch, self.align, self.begins
        )


def alignment(base: int, itemsize: int, *counts: int) -> int:
    """The largest of 16, 8, 4, 2 bytes dividing `base` (an address) and every count of elements given."""
    bits = base | 16
    for count in counts:
        bits |= count * itemsize
    return bits & -bits


def begins(align: int, base: int, itemsize: int, leading: int, others: int, stride_batch: int) -> int:
    """`Matrix.begins` of a matrix of `others` rows at a distance of `leading` elements, where `align` is its class."""
    found = alignment(base, itemsize, leading if others > 1 else 0, stride_batch)
    return found if found > align else 0


def compact(rows: int, cols: int, batch: int, row_major: bool, itemsize: int) -> Matrix:
    """A contiguous matrix on a 16-byte aligned address; one of one row or column is contiguous along the other."""
    row_major = reads_by_rows(rows, cols, cols if row_major else 1, 1 if row_major else rows)
    inner, others = (cols, rows) if row_major else (rows, cols)
    strides = (max(cols, 1), 1) if row_major else (1, max(rows, 1))
    stride_batch, align = rows * cols if batch > 1 else 0, alignment(0, itemsize, max(inner, 1))
    return Matrix(rows, cols, *strides, stride_batch, align, begins(align, 0, itemsize, inner, others, stride_batch))


def reads_by_rows(rows: int, cols: int, stride_row: int, stride_col: int) -> bool:
    """Whether a kernel shall read a matrix of these strides as row-major.

    The stride of an extent of 1 is never used, so that a matrix of one row or one column can be read either way. It
    is read along its elements where they are neighbours: only that way can a kernel load more than one at a time.
    """
    if cols == 1 and rows != 1:
        return stride_row != 1
    if rows == 1:
        return cols == 1 or stride_col == 1
    return stride_col == 1
