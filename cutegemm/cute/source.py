"""The operands of an epilogue program, as kernels read them from global memory."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute import types
from cutegemm.problem import Signature
from cutegemm.problem.program.graph import I32, SCALE_K, Input
from cutegemm.run.arguments import strides_of


def aligned(pointer, align: int):
    """The same pointer with the promise that `align` bytes divide it (`Pointer.align` would round it up)."""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=align)


def element(pointer, offset) -> Any:
    """The number at that many elements behind a pointer."""
    return cute.make_tensor(pointer + offset, cute.make_layout(1))[0]


class Source:
    """One tensor operand.

    Attributes:
        given: which, and along what it varies. dtype: as it lies in memory. wide: fp32, or int32 for integers.
        vector: elements that may be loaded at once, in a matrix whose rows are aligned; 0 where rows have no unit
            stride.
    """

    def __init__(self, given: Input, align: int = 0) -> None:
        self.given = given
        self.dtype = types.NUMERIC[given.dtype]
        self.wide: Any = Int32 if given.type == I32 else Float32
        self.vector = align // (self.dtype.width // 8)
        self.strides = strides_of(given)

    def start(self, args, matrix) -> None:
        """Binds to a launch's arguments and to a matrix of the batch."""
        self.args = args
        self.base = getattr(args, self.given.name)
        if self.given.batched:
            self.base = self.base + Int64(matrix) * self._stride("batch")

    def _stride(self, along: str) -> Any:
        """The stride among the arguments; 1 where it is none, which no multiplication needs."""
        name = f"{self.given.name}_{along}"
        return getattr(self.args, name) if name in self.strides else 1

    def _column(self, column) -> Any:
        """The column of the operand that belongs to one of D."""
        period = self.given.period
        if not period or isinstance(column, int):
            return column % period if period else column
        return column & (period - 1) if period & (period - 1) == 0 else column % period

    def offset(self, row, column) -> Any:
        """Elements from the matrix's first to the one of D's (row, column)."""
        along = [(row, "row")] * self.given.m + [(self._column(column), "col")] * self.given.n
        found: Any = Int64(0)
        for number, (place, axis) in enumerate(along):
            stride = self._stride(axis)
            term = Int64(place) if isinstance(stride, int) else Int64(place) * stride
            found = term if number == 0 else found + term
        return found

    def at(self, row, column) -> Any:
        """The pointer to the element of D's (row, column)."""
        return self.base + self.offset(row, column)

    def in_row(self, row, column) -> Any:
        """The same for a matrix whose rows are contiguous."""
        return self.base + (Int64(row) * self._stride("row") + Int64(self._column(column)))

    def along(self, place) -> Any:
        """The pointer to element `place` of a vector."""
        place = self._column(place) if self.given.n else place
        stride = self._stride("row" if self.given.m else "col")
        return self.base + (Int64(place) if isinstance(stride, int) else Int64(place) * stride)

    def number(self, row, column) -> Any:
        """The element of D's (row, column), in `wide`."""
        return element(self.base, self.offset(row, column)).to(self.wide)

    def numbers(self, places, rows, columns) -> Any:
        """The elements at `places`, (row, column) of D, as a vector. Addresses are clamped to (rows, columns)."""
        values = cute.make_rmem_tensor(len(places), self.wide)
        for i, (row, column) in enumerate(places):
            row = cutlass.min(row, rows - 1) if self.given.m else 0
            column = cutlass.min(column, columns - 1) if self.given.n else 0
            values[i] = self.number(row, column)
        return values.load()


class ScaleSource:
    """Scales of blocks of K, of A or of B.

    each: whether every row of A (column of B) has its own, else 128 share one.
    """

    def __init__(self, given: Input) -> None:
        self.given = given
        self.is_a = given.scales.startswith("a")
        self.each = int(given.scales[1:]) == 1

    def start(self, args) -> None:
        """Binds to a launch's arguments by name."""
        name = self.given.name
        self.base = getattr(args, name)
        strides = [getattr(args, f"{name}_{axis}") for axis in ("row", "col")]
        self.along, self.along_k = strides if self.is_a else strides[::-1]
        self.of_matrix = getattr(args, f"{name}_batch") if self.given.batched else Int64(0)
        self.extent = args.m if self.is_a else args.n
        if not self.each:
            self.extent = cute.ceil_div(self.extent, SCALE_K)


class Target:
    """A matrix that a result goes to: D, or another one of its shape.

    number: of the program's output. vector: elements that are stored at once.
    """

    def __init__(self, number: int, name: str, dtype: str, align: int, most: int) -> None:
        self.number, self.name, self.type = number, name, types.NUMERIC[dtype]
        self.bytes = self.type.width // 8
        self.vector = max(min(align // self.bytes, most), 1)

    def start(self, args, matrix) -> None:
        """Binds to a launch's arguments and to a matrix of the batch."""
        self.leading, of_matrix = strides(args, self.name)
        self.base = getattr(args, self.name) + Int64(matrix) * of_matrix

    def at(self, row, column):
        """The pointer to the element (row, column)."""
        return self.base + (Int64(row) * self.leading + Int64(column))


def strides(args, name: str) -> tuple[Any, Any]:
    """(distance of rows, distance of matrices) of the result `name`, among a launch's arguments."""
    return (args.ldd if name == "d" else getattr(args, f"{name}_ld")), getattr(args, f"{name}_batch")


def sources(signature: Signature) -> dict[str, Source]:
    """The tensor operands of a signature's epilogue by name."""
    aligns = {"c": signature.align_c, **signature.epilogue.matrices}
    given = (each for each in signature.epilogue.program.inputs if not each.by_value and not each.scales)
    return {each.name: Source(each, aligns.get(each.name, 0)) for each in given}


def targets(signature: Signature, most: int) -> list[Target]:
    """The matrices that a signature's results go to, in their order; at most `most` elements are stored at once."""
    return [Target(*result, most) for result in signature.results]
