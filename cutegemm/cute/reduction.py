"""Results of an epilogue program that are reduced over a row or a column of D: the partial results that kernels write.

A kernel reduces what one warp or warpgroup has of a row or column, a *piece*, and writes one number for it to scratch
memory (fp32: matrix, piece, row or column). `run.fused` reduces the pieces. Every number has one writer and every sum
one order of its terms, so that a result has the same bits on every run. A configuration's `pieces` says how many
elements make up a piece. Elements beyond the edge of D count as the identity; a maximum is NaN where one element is.

Of products in groups a row (of groups of columns: a column) is reduced that belongs to one group. Its number stands
where the whole D has it; rows of no group have none.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cutegemm.problem import Signature
from cutegemm.problem.work import TABLE


def either(chosen, one, other) -> Any:
    """`one` where chosen, else `other`; of one type."""
    return type(other)(cutlass.select_(chosen, one, other))


class Partial:
    """One reduced output: its arithmetic, and where its pieces go.

    number: of the program's output. of_rows: it has a number for each row of D. work: that of the signature.
    """

    def __init__(self, number: int, reduce: str, work: str) -> None:
        self.work = TABLE[work]
        self.number, self.name = number, f"y{number}"
        self.of_rows = reduce.startswith("row")
        self.sums, self.magnitudes = reduce.endswith("sum"), reduce.endswith("abs")
        self.identity = 0.0 if self.sums else -math.inf

    def start(self, args, matrix, pieces, extent) -> None:
        """Binds to a launch's arguments and to a matrix of the batch, whose `extent` numbers have `pieces` each.

        The extent of a group is where its last row or column ends. Its numbers lie among those of the whole D.
        """
        if self.work.indexed == "d":
            extent = args.index_rows
        elif self.work.masked or self.work.ragged in ("m", "n"):
            extent = args.m if self.of_rows else args.n
        self.extent, self.base = extent, getattr(args, self.name)
        if self.work.matrices("d", 2) > 1:
            self.base = self.base + Int64(matrix) * (Int64(pieces) * extent)

    def at(self, piece, place) -> Any:
        """The pointer to a piece of row or column number `place`."""
        return self.base + (Int64(piece) * self.extent + Int64(place))

    def elements(self, values, size: int) -> Any:
        """A vector of the program's values, one by one, as they are to be combined."""
        found = cute.make_rmem_tensor(size, Float32)
        found.store(cute.math.abs(values) if self.magnitudes else values)
        return found

    def empty(self, size: int) -> Any:
        """Room for so many results, with nothing in them yet."""
        found = cute.make_rmem_tensor(size, Float32)
        found.fill(self.identity)
        return found

    def inside(self, value, there) -> Any:
        """The value, or the identity where it is not there."""
        return either(there, value, Float32(self.identity))

    def combine(self, x, y) -> Any:
        return x + y if self.sums else cute.arch.fmax(x, y, nan=True)

    def over_lanes(self, value, steps) -> Any:
        """Combined over the lanes whose numbers differ by sums of `steps`, powers of 2; all of them get the result. By
        whole warps only.
        """
        for step in steps:
            value = self.combine(value, cute.arch.shuffle_sync_bfly(value, step))
        return value


def partials(signature: Signature) -> list[Partial]:
    """The reduced outputs of a signature's program whose pieces kernels write."""
    return [Partial(number, reduce, signature.work) for number, reduce in signature.epilogue.pieced]
