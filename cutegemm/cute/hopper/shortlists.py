"""Lookup table: the 16-bit Hopper configurations that the heuristic compares at a given size.

`tuning.candidates` writes it. It lists a few hundred candidates. A cell holds the sizes whose M, N and K round up to
the same powers of two; for the majors of A and B and each cell the table has a shortlist of candidates. It is made for
single products on one GPU; `shortlist` looks up batches and smaller GPUs in it too.

Elements of other widths have the same candidates, with k steps of as many bytes and tiles as they take them
(`of_width`), and the shortlist of a K of as many bytes: tensor cores take as long for a byte of K in any width.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.hardware.arch import Arch

TABLE = Path(__file__).parents[2] / "data" / "candidates.json"
LEAST_BITS, MOST_BITS = 4, 15
"""log2 of the least and greatest size in `TABLE`; smaller and larger sizes count as these."""
BITS = range(LEAST_BITS, MOST_BITS + 1)
MAJORS = ("tn", "tt", "nn", "nt")
"""The values of `Signature.majors`."""
NARROW, WIDE = 64, 256
"""Rows or columns of D that the clusters of `_extra_of_batches` cover: at least, and at most."""
WIDE_COLUMNS = 16
"""Of which BN is a multiple in tiles that serve everything, see `validity.odd_eights`."""

Cell = tuple[int, int, int]
"""log2 of M, N and K, rounded up, within the bounds of `TABLE`."""
Candidate = tuple[str, bool]
"""The text of a configuration, and whether K is split."""


def cell_of(m: int, n: int, k: int) -> Cell:
    """The cell of these sizes."""
    return _bits(m), _bits(n), _bits(k)


def configurations() -> tuple[str, ...]:
    """The texts of all candidates, large tiles first."""
    return _table().texts


def split() -> frozenset[str]:
    """The texts of those that any cell's shortlist has with K split."""
    return _table().split


@functools.lru_cache(maxsize=8192)
def of_width(text: str, itemsize: int, wide: bool = False) -> str:
    """A configuration of 16 bits for elements of so many bytes. wide: with a BN of whole multiples of `WIDE_COLUMNS`,
    and fewer stages where the ring would grow."""
    tile, schedule, cluster, stages, rest = text.removeprefix("sm90/").split("/", 4)
    bm, bn, bk = map(int, tile.split("x"))
    columns = -(-bn // WIDE_COLUMNS) * WIDE_COLUMNS if wide else bn
    count = int(stages[1:]) * (bm + bn) // (bm + columns)
    return f"sm90/{bm}x{columns}x{bk * 2 // itemsize}/{schedule}/{cluster}/s{count}/{rest}"


def cell(majors: str, m: int, n: int, k: int) -> list[Candidate]:
    """The shortlist of the cell of these sizes."""
    texts = _table().texts
    return [(texts[entry // 2], entry % 2 == 1) for entry in _cells(majors)[cell_of(m, n, k)]]


def shortlist(arch: Arch, majors: str, m: int, n: int, k: int, batch: int) -> list[Candidate]:
    """The candidates to compare for products of about these sizes, each once.

    A batch has more tiles of the same matrices: it is looked up as taller and as wider matrices with as many elements
    as the whole batch. So is a problem on a GPU with fewer SMs than the table's, which it fills sooner.
    """
    more = (batch - 1).bit_length() + max(0, round(math.log2(_table().sm_count / arch.sm_count)))
    if not more:
        return cell(majors, m, n, k)
    return list(
        dict.fromkeys((*cell(majors, m << more, n, k), *cell(majors, m, n << more, k), *_extra_of_batches(m, n)))
    )


def _extra_of_batches(m: int, n: int) -> Iterator[Candidate]:
    """Extra candidates for batches, whose other matrices keep the SMs busy that a small matrix leaves idle: small
    clusters without CTAs outside the matrix, which cost nothing in a single product but take the place of others here.
    """
    most_m, most_n = max(m, NARROW), max(n, NARROW)
    for text, tile_m, tile_n, ctas in _cluster_tiles():
        fits = tile_m <= most_m <= WIDE and tile_n <= most_n <= WIDE
        if ctas == 1 or (ctas == 2 and fits):
            yield text, False


def _bits(size: int) -> int:
    return min(max((size - 1).bit_length(), LEAST_BITS), MOST_BITS)


@dataclass(frozen=True)
class _Table:
    """The file `TABLE`.

    sm_count: SMs of the GPU it was made for. texts: all candidates. split: those that a shortlist has with K split.
    rows: majors -> "MxN" -> the shortlist of each K; an entry is twice the number of a candidate, plus 1 for K split.
    """

    sm_count: int
    texts: tuple[str, ...]
    split: frozenset[str]
    rows: dict[str, dict[str, list[list[int]]]]


@functools.cache
def _table() -> _Table:
    data = json.loads(TABLE.read_text())
    texts = tuple(data["configurations"])
    return _Table(data["sm_count"], texts, frozenset(texts[number] for number in data["split"]), data["cells"])


@functools.cache
def _cells(majors: str) -> dict[Cell, list[int]]:
    return {
        (_bits(m), _bits(n), bits): entries
        for pair, row in _table().rows[majors].items()
        for m, n in [map(int, pair.split("x"))]
        for bits, entries in zip(BITS, row, strict=True)
    }


@functools.cache
def _cluster_tiles() -> list[tuple[str, int, int, int]]:
    """Each candidate, the rows and columns of D that its cluster computes together, and the cluster's CTAs."""
    found = []
    for text in configurations():
        config = HopperConfig.parse(text)
        rows, columns = config.cluster[::-1] if config.swapped else config.cluster
        bm, bn, _ = config.tile()
        found.append((text, bm * rows, bn * columns, config.cluster_ctas))
    return found
