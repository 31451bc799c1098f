"""TMA boxes that end where a group of rows ends: one tensor map serves every group of an array, wherever it ends.

TMA clips a box at the end of the array's dimension, and at no other place. So the map pretends that the dimension has
ROWS = 2^30 rows, and the box is asked for so far behind, ROWS - end rows, that the group's last row is the
dimension's last. Two more dimensions, of one element a box, bring the address back:

    dimension     extent    stride in elements      coordinate of a box that begins at `row`
    row           2^30      S                       2^30 - end + row
    up            2^31-2^16 S                       end
    down          2^31-2^16 2^34 - S                2^30

    address = base + S (2^30 - end + row + end) + 2^30 (2^34 - S) = base + S row + 2^64

in elements, which is base + S row in addresses of 64 bits. What lies beyond the group's last row is loaded as zeros and
not stored. The array may have 2^30 rows. The idea is that of Triton's `tools/ragged_tma.py`. Rows need a stride that 16
bytes divide; where the rows of an operand are contiguous in memory, its groups cannot be clipped.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

ROWS = 1 << 30
_EXTENT = 0x7FFF0000


def dimensions(stride, divby: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(extents, strides) of the dimensions `up` and `down` of rows that lie `stride` elements apart."""
    down = cute.assume(Int64(1 << 34) - stride, divby=divby)
    return (Int32(_EXTENT), Int32(_EXTENT)), (stride, down)


def coordinates(end) -> tuple:
    """Of the dimensions `up` and `down`, for a group that ends before row `end`."""
    return end, Int32(ROWS)


def row(row, end):
    """The coordinate of a row of a group that ends before row `end`."""
    return (ROWS - end) + row


def boxes(tensor: cute.Tensor, box: tuple[int, int], clipped: bool) -> cute.Tensor:
    """A coordinate tensor of results, divided into boxes: first the modes of a box, then the modes that choose one.

    Boxes lie side by side. If `clipped`, there is one at each element instead, because groups begin anywhere.
    """
    if not clipped:
        return cute.local_tile(tensor, box, (None, None, None))
    shape, stride = tensor.layout.shape, tensor.layout.stride
    layout = cute.make_layout((*box, *shape), stride=(*stride[: len(box)], *stride))
    return cute.make_tensor(tensor.iterator, layout)


def results(shape: tuple, stride: tuple, divby: int, clipped: bool):
    """The layout of row-major matrices (row, column, matrix) of results; clipped, with the dimensions up and down."""
    if not clipped:
        return cute.make_layout(shape, stride=stride)
    extents, strides = dimensions(stride[0], divby)
    return cute.make_layout((ROWS, *shape[1:], *extents), stride=(*stride, *strides))


def place(corner: tuple, matrix, end) -> tuple:
    """Where a box that begins at (row, column) `corner` of a clipped matrix lies; its group ends before row `end`."""
    return row(corner[0], end), corner[1], matrix, *coordinates(end)
