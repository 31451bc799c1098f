"""fp32 operands as sums of narrower numbers: what the tensor cores multiply to give fp32 accuracy.

An fp32 number has 24 significant bits. A bf16 number holds 8 of them and a tf32 number 11, so that

    x = x0 + x1 + x2     three bf16 numbers: exactly, down to 2^-133
    x = x0 + x1 + rest   two tf32 numbers: |rest| <= 2^-23 |x|

Each part is what is left of x by the parts before it, rounded to nearest; where that would overflow, the first part is
the largest finite number of its type. A product of two such sums has as many terms as there are pairs of parts; the
smallest may be left out:

    precision   parts     terms (i, j), of x_i y_j                     left out, relative to |x y|
    bf16x9      3, bf16   all nine                                     nothing
    bf16x6      3, bf16   those with i + j <= 2                        2^-24 (1 + 2^-7)
    tf32x3      2, tf32   those with i + j <= 1                        2^-21 (1 + 2^-9)

The names are those of torch and of the field. Sources: Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial
intelligence datatype for higher-precision computations", ARITH 2019 (three bf16 parts); Ootomo and Yokota, "Recovering
single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", IJHPCA 2022 (two
tf32 parts; that the sums must leave the tensor cores, which truncate, every so often).

`TABLE` is what the kernels of backend "cute" multiply. CUTLASS 2.x has a tf32x3 of its own (`problem.reference` says
how it differs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cutegemm.problem.dtypes import ITEMSIZE, Kind


@dataclass(frozen=True)
class Parts:
    """How operands are split, and which products of their parts are added.

    Attributes:
        element: dtype name of a part in memory: "bf16", or "fp32" that holds tf32. count: parts of an operand.
        terms: (part of A, part of B) of each product, the smallest first.
        omitted: bound on what is left out of a product x y, relative to |x y|, for finite numbers below 2^127.
        lost: bound on |x - sum of its parts|, in absolute terms, where parts are below the smallest numbers.
    """

    element: str
    count: int
    terms: tuple[tuple[int, int], ...]
    omitted: float
    lost: float

    @property
    def itemsize(self) -> int:
        """Bytes of all parts of an element."""
        return self.count * ITEMSIZE[self.element]

    def leading(self, k: int) -> int:
        """Elements from one row of parts to the next: K in whole 16 bytes, as TMA and cp.async ask."""
        step = 16 // ITEMSIZE[self.element]
        return max(-(-k // step), 1) * step


def _terms(count: int, most: int) -> tuple[tuple[int, int], ...]:
    """Pairs of parts with i + j <= most, the smallest products first."""
    pairs = [(i, j) for i in range(count) for j in range(count) if i + j <= most]
    # Of two that are as large the one with the last part, which holds infinities, before the one without.
    return tuple(sorted(pairs, key=lambda pair: (-sum(pair), -max(pair), pair)))


TABLE: Mapping[Kind, Parts] = MappingProxyType(
    {
        ("fp32", "tf32x3"): Parts("fp32", 2, _terms(2, 1), 2.0**-21 * (1 + 2.0**-9), 2.0**-137),
        ("fp32", "bf16x6"): Parts("bf16", 3, _terms(3, 2), 2.0**-24 * (1 + 2.0**-7), 2.0**-134),
        ("fp32", "bf16x9"): Parts("bf16", 3, _terms(3, 4), 0.0, 2.0**-134),
    }
)
"""By kind of product."""
