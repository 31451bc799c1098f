"""The candidates of the family vector: for results of few rows or columns, beside those of the family simt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutegemm.problem import Signature

NUMBERS = tuple(range(2, 33))
"""The numbers of parts that a candidate may split K into."""
_ALONG_K = (
    "vector/1x32x128/w1x8/s2/g1",
    "vector/1x16x128/w1x8/s2/g1/x2",
    "vector/1x16x128/w1x8/s2/g1/x4",
    "vector/1x16x128/w1x8/s3/g8/x4",
    "vector/2x32x128/w2x8/s2/g1",
    "vector/4x32x128/w4x8/s2/g1",
    "vector/8x32x128/w8x4/s2/g1",
)
_ACROSS = (
    "vector/1x256x8/w1x128/s2/g1/x2",
    "vector/1x128x8/w1x128/s2/g1/x4",
    "vector/1x128x8/w1x128/s2/g1/x8",
    "vector/2x128x8/w2x128/s2/g1/x4",
    "vector/4x128x8/w4x128/s2/g1/x4",
    "vector/8x128x4/w8x128/s3/g1/x4",
)
_COLUMNS = {
    True: ("vector/32x8x128/w4x8/s2/g1",),
    False: ("vector/128x8x4/w128x8/s3/g1/x4", "vector/256x8x4/w128x8/s3/g8/x2"),
}
"""For few columns, by whether A is K-major."""
_ALIGNED = ("vector/1x16x128/w1x8/s3/g8/x4", "vector/256x8x4/w128x8/s3/g8/x2")
"""Candidates only where rows of A and B are aligned to 16 bytes: with others they spill registers."""


def listed(signature: Signature) -> tuple[str, ...]:
    """The candidates for a signature that the family takes."""
    rows = _ALONG_K if signature.b_major == "k" else _ACROSS
    narrow = min(signature.align_a, signature.align_b) < 16
    return tuple(text for text in (*rows, *_COLUMNS[signature.a_major == "k"]) if not (narrow and text in _ALIGNED))


def splits(text: str, signature: Signature) -> tuple[int, ...]:
    """The splits of K, ascending, that a candidate may have as well as none."""
    return NUMBERS
