"""Which products one launch computes, and which tiles of D they have: one row of `TABLE` is a kind of work.

A dense work is a batch of products of one size. In a ragged work the products, called groups, divide one of M, N and K
among them, and where one ends is known on the device only. Kernel families and backends list the works that they take.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

DENSE = "dense"
INTEGERS: Mapping[str, int] = MappingProxyType({"int32": 4, "int64": 8})
"""Types of the elements of device arrays, with their bytes; torch and the CuTe DSL have them by these names."""
SMALL_SHARE = 32
"""Rows (or columns) a group up to which its weights take longer to read than to multiply on every GPU of the table."""
SKEW = 2
"""What such a share counts for: of rows drawn uniformly few groups have more than twice the mean; not measured."""
LARGE_SHARE = 54
"""Rows (or columns) a group from which the cost model counts tiles beyond those that the rows fill. A share that
`evened` doubled stays below this number, so that unequal sizes are not counted a second time."""
_AXES = {"a": "mk", "b": "kn", "c": "mn", "d": "mn"}


class DeviceArray(NamedTuple):
    """An array in the GPU's memory, which a launch takes as one more operand.

    name: of the kernel's argument. dtype: a name of `INTEGERS`. rows: whether it has an element a row of A, not one a
    product.
    """

    name: str
    dtype: str
    rows: bool = False


@dataclass(frozen=True)
class Work:
    """One kind of work. Sizes are those of `Problem`: `batch` products; a ragged extent is the sum over all of them.

    Attributes:
        name: as `Problem.work` and signatures have it. transposed: the name of the work of D^T = B^T A^T; None where
            no kernel computes that.
        ragged: the extent, "m", "n" or "k", that the products divide among them; None where all have the same sizes.
        arrays: what the kernel reads of the sizes on the device.
        masked: whether each product has rows of its own that count, the first ones, and others that nobody touches.
        indexed: "a" or "d", the operand whose rows the array `index` names, one for each row of the product; or None.
    """

    name: str
    transposed: str | None
    ragged: Literal["m", "n", "k"] | None = None
    arrays: tuple[DeviceArray, ...] = ()
    masked: bool = False
    indexed: Literal["a", "d"] | None = None

    @property
    def divided(self) -> Literal["a", "b"] | None:
        """The operand whose rows, of B columns, the groups divide."""
        return {"m": "a", "n": "b"}.get(self.ragged or "")  # type: ignore[return-value]

    def matrices(self, operand: str, batch: int) -> int:
        """How many matrices "a", "b", "c" or "d" consists of: one where the products are parts of the same."""
        return 1 if self.ragged is not None and self.ragged in _AXES[operand] else batch

    def flops(self, m: int, n: int, k: int, batch: int) -> int:
        """2 M N K of all products."""
        return 2 * m * n * k * (batch if self.ragged is None else 1)

    def evened(self, m: int, n: int, k: int, batch: int, skewed: bool = True) -> tuple[int, int, int, int]:
        """(m, n, k, batch) of the dense work that the cost model judges by: every product has its share of the ragged
        extent, of which at most so many products have any. skewed: sizes are so in practice, and a small share of rows
        or columns counts twice (up to `LARGE_SHARE`), or a tile that fits it would be too small for many groups and
        read their weights often.
        """
        if self.ragged is None:
            return m, n, k, batch
        each = {"m": m, "n": n, "k": k}
        extent = each[self.ragged]
        batch = max(min(batch, extent), 1) if self.ragged != "k" else max(batch, 1)
        share = -(-extent // batch)
        if skewed and self.ragged != "k" and share <= SMALL_SHARE:
            share = min(SKEW * share, extent, LARGE_SHARE - 1)
        each[self.ragged] = share
        return each["m"], each["n"], each["k"], batch

    def tiles(self, m: int, n: int, batch: int, rows: int, columns: int) -> int:
        """Tiles of `rows` x `columns` elements of D, of all products; of a ragged D at most so many."""
        return self.most(-(-m // rows), -(-n // columns), m, n, batch)

    def most(
        self, along_m: Any, along_n: Any, m: Any, n: Any, batch: Any, smallest: Any = min, largest: Any = max
    ) -> Any:
        """The same where D as a whole has so many tiles along M and N; numbers of either kind, with their own minimum
        and maximum.
        """
        if self.ragged is None or self.ragged == "k":
            return along_m * along_n * batch
        # Each end of a group but the last may lie within a tile, which then counts for two groups.
        # Groups with anything in them are no more than there are rows (or columns).
        more = largest(smallest(batch, m if self.ragged == "m" else n) - 1, 0)
        return (along_m + more) * along_n if self.ragged == "m" else along_m * (along_n + more)


RAGGED_M, RAGGED_N, RAGGED_K, MASKED = "ragged_m", "ragged_n", "ragged_k", "masked"
GATHERED, SCATTERED = "gathered_m", "scattered_m"
ROWS = (RAGGED_M, GATHERED, SCATTERED)
"""Works whose groups are rows."""
_ENDS, _INDEX = DeviceArray("ends", "int32"), DeviceArray("index", "int32", rows=True)
_ROWS = {
    row.name: row
    for row in (
        Work(DENSE, transposed=DENSE),
        Work(RAGGED_M, transposed=RAGGED_N, ragged="m", arrays=(_ENDS,)),
        Work(RAGGED_N, transposed=RAGGED_M, ragged="n", arrays=(_ENDS,)),
        Work(RAGGED_K, transposed=RAGGED_K, ragged="k", arrays=(_ENDS,)),
        Work(GATHERED, transposed=None, ragged="m", arrays=(_ENDS, _INDEX), indexed="a"),
        Work(SCATTERED, transposed=None, ragged="m", arrays=(_ENDS, _INDEX), indexed="d"),
        Work(MASKED, transposed=None, arrays=(DeviceArray("counts", "int32"),), masked=True),
    )
}
TABLE: Mapping[str, Work] = MappingProxyType(_ROWS)
"""The kinds of work by name."""


def why_not_taken(what: str, takes: Collection[str], work: str) -> str | None:
    """None when kernels that compute the works `takes` are for this one, else a sentence; `what` is its subject."""
    return None if work in takes else f"{what} {', '.join(takes)} products; this one is {work}"
