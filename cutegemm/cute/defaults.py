"""The configurations each family may take when nothing was measured: the cost model chooses among them.

They are few beside the whole space, so that a choice costs microseconds, and differ in what matters: the tile and the
cluster, and with them how a small problem fills the SMs. Those of Hopper in 16 bit are more than a choice can look at;
`cell` says which are worth a look for which sizes. `splits` says of which there are split-K variants. tests/compile
builds one for each tile, schedule and role of operands, without C and bias: none spills.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from cutegemm.problem import Signature

_HOPPER_TF32 = (
    "sm90/128x256x32/coop2/c2x1/s4/serp8/zig/pdl",
    "sm90/128x256x32/coop2/c1x1/s4/serp8/pdl",
    "sm90/256x128x32/coop2/c1x2/s4/serp8/zig/pdl",
    "sm90/256x192x32/coop2/c1x2/s3/serp8/zig/pdl",
    "sm90/128x192x32/pp/c2x1/s4/serp8/pdl",
    "sm90/128x128x32/pp/c2x1/s6/serp8/pdl",
    "sm90/128x128x32/coop2/c1x1/s6/serp8/pdl",
    "sm90/64x128x32/coop1/c1x1/s8/serp8/pdl",
    "sm90/128x64x32/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x64x64/coop1/c1x1/s6/serp8/pdl",
    "sm90/64x32x64/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x16x64/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x32x64/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/64x16x64/coop1/c1x1/s8/serp8/swap/pdl",
)
_TENSOR_CORES = (
    "sm80/128x256x64/w64x64/s3/g8",
    "sm80/256x128x32/w64x64/s4/g8",
    "sm80/128x128x64/w64x64/s3/g8",
    "sm80/128x128x32/w64x64/s4/g8",
    "sm80/128x128x64/w64x32/s3/g8",
    "sm80/128x64x64/w64x32/s3/g8",
    "sm80/128x64x32/w64x32/s4/g8",
    "sm80/64x128x64/w32x64/s3/g8",
    "sm80/64x64x64/w32x32/s4/g8",
    "sm80/64x64x32/w32x32/s5/g8",
    "sm80/64x32x64/w32x16/s4/g8",
    "sm80/32x64x64/w16x32/s4/g8",
    "sm80/64x32x32/w32x16/s5/g8",
    "sm80/32x32x64/w16x16/s4/g8",
    "sm80/32x32x32/w16x16/s5/g8",
)
_TF32 = (
    "sm80/128x128x32/w64x32/s4/g8",
    "sm80/128x128x16/w64x32/s3/g8",
    "sm80/128x64x32/w64x32/s3/g8",
    "sm80/64x128x32/w32x64/s3/g8",
    "sm80/64x64x32/w32x32/s3/g8",
    "sm80/64x32x32/w32x16/s4/g8",
    "sm80/32x32x32/w16x16/s5/g8",
)
_SIMT = (
    "simt/256x128x16/w64x64/s3/g8",
    "simt/128x128x16/w64x32/s3/g8",
    "simt/128x128x8/w32x64/s4/g8",
    "simt/128x64x16/w32x32/s3/g8",
    "simt/64x128x16/w32x32/s3/g8",
    "simt/64x64x16/w32x32/s3/g8",
    "simt/64x64x8/w32x32/s4/g8",
    "simt/64x32x16/w16x32/s3/g8",
    "simt/32x64x16/w16x32/s3/g8",
    "simt/32x32x16/w16x32/s4/g8",
    "simt/32x32x8/w16x32/s4/g8",
    "simt/64x32x32/w16x32/s4/g8/x2",
    "simt/32x64x32/w16x32/s4/g8/x2",
    "simt/32x32x64/w32x32/s3/g8/x4",
    "simt/32x32x32/w16x32/s3/g8/x2",
    "simt/16x32x64/w16x32/s4/g8/x8",
)
_SPLIT_TF32 = frozenset(
    (
        "sm90/128x128x32/coop2/c1x1/s6/serp8/pdl",
        "sm90/64x64x64/coop1/c1x1/s6/serp8/pdl",
        "sm90/64x32x64/coop1/c1x1/s8/serp8/pdl",
        "sm90/64x16x64/coop1/c1x1/s8/serp8/swap/pdl",
    )
)
NUMBERS = tuple(range(2, 33))
"""Every split that a configuration may have."""
TABLE = Path(__file__).parents[1] / "data" / "candidates.json"
"""Configurations of `kernels.hopper` in 16 bit, and which of them each cell of sizes has: `tuning.candidates`."""
LEAST_BITS, MOST_BITS = 4, 15
"""Of a size in `TABLE`: what is smaller or larger counts as these."""
BITS = range(LEAST_BITS, MOST_BITS + 1)

Cell = tuple[int, int, int]
"""log2 of M, N and K, rounded up, within the bounds of `TABLE`."""


def cell_of(m: int, n: int, k: int) -> Cell:
    """The cell of these sizes."""
    return _bits(m), _bits(n), _bits(k)


def _bits(size: int) -> int:
    return min(max((size - 1).bit_length(), LEAST_BITS), MOST_BITS)


@functools.cache
def _table() -> tuple[tuple[str, ...], frozenset[str], dict[Cell, list[int]]]:
    """The configurations, those of which there are variants with K split, and what the cells have: twice the number of
    a configuration, and one more for K split.
    """
    data = json.loads(TABLE.read_text())
    texts = tuple(data["configurations"])
    cells = {
        (_bits(m), _bits(n), bits): entries
        for pair, row in data["cells"].items()
        for m, n in [map(int, pair.split("x"))]
        for bits, entries in zip(BITS, row, strict=True)
    }
    return texts, frozenset(texts[entry // 2] for row in cells.values() for entry in row if entry % 2), cells


def cell(m: int, n: int, k: int) -> list[tuple[str, bool]]:
    """The Hopper configurations in 16 bit worth a look for matrices of about these sizes, and whether with K split."""
    texts, _, cells = _table()
    return [(texts[entry // 2], entry % 2 == 1) for entry in cells[cell_of(m, n, k)]]


def splits(text: str) -> tuple[int, ...]:
    """The splits of K, ascending, that a configuration listed here may have as well."""
    return NUMBERS if text in _SPLIT_TF32 or text in _table()[1] else ()


def hopper(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.hopper`."""
    return _HOPPER_TF32 if signature.dtype == "fp32" else _table()[0]


def ampere(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.ampere`."""
    return _TF32 if signature.dtype == "fp32" else _TENSOR_CORES


def simt(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.simt`."""
    return _SIMT
