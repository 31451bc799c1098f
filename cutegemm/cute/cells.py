"""Which Hopper configurations in 16 bit a choice weighs, by size: the table that `tuning.candidates` writes.

The table lists a few hundred configurations, and for the majors of A and B and each cell of sizes, M, N and K up to a
power of two and beyond the one before, which of them are worth a look. It is made for single products on one GPU;
`weighed` looks up batches and smaller GPUs in it too.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cutegemm.arch import Arch
from cutegemm.cute.hopper_config import HopperConfig

TABLE = Path(__file__).parents[1] / "data" / "candidates.json"
LEAST_BITS, MOST_BITS = 4, 15
"""Of a size in `TABLE`: what is smaller or larger counts as these."""
BITS = range(LEAST_BITS, MOST_BITS + 1)
MAJORS = ("tn", "tt", "nn", "nt")
"""What `Signature.majors` may be."""
NARROW, WIDE = 64, 256
"""Rows or columns of D, see `_beside`."""

Cell = tuple[int, int, int]
"""log2 of M, N and K, rounded up, within the bounds of `TABLE`."""
Named = tuple[str, bool]
"""A configuration, and whether with K split."""


def cell_of(m: int, n: int, k: int) -> Cell:
    """The cell of these sizes."""
    return _bits(m), _bits(n), _bits(k)


def configurations() -> tuple[str, ...]:
    """All that the table lists, large tiles first."""
    return _table().texts


def may_split(text: str) -> bool:
    """Whether any cell has this configuration with K split."""
    return text in _table().split


def cell(majors: str, m: int, n: int, k: int) -> list[Named]:
    """What the cell of these sizes has."""
    texts = _table().texts
    return [(texts[entry // 2], entry % 2 == 1) for entry in _cells(majors)[cell_of(m, n, k)]]


def weighed(arch: Arch, majors: str, m: int, n: int, k: int, batch: int) -> list[Named]:
    """What is worth a look for products of about these sizes, each once.

    A batch has more tiles of the same matrices: it is looked up as taller and as wider matrices of as many elements as
    all. So is anything on a GPU with fewer SMs than the table's: it fills them sooner.
    """
    more = (batch - 1).bit_length() + max(0, round(math.log2(_table().sm_count / arch.sm_count)))
    if not more:
        return cell(majors, m, n, k)
    return list(dict.fromkeys((*cell(majors, m << more, n, k), *cell(majors, m, n << more, k), *_beside(m, n))))


def _beside(m: int, n: int) -> Iterator[Named]:
    """What a cell may lack where its clusters fill the GPU: in a single small product the CTAs of a cluster that are
    beyond its edges cost nothing, here they take the place of others.
    """
    most_m, most_n = max(m, NARROW), max(n, NARROW)
    for text, unit_m, unit_n, ctas in _units():
        fits = unit_m <= most_m <= WIDE and unit_n <= most_n <= WIDE
        if ctas == 1 or (ctas == 2 and fits):
            yield text, False


def _bits(size: int) -> int:
    return min(max((size - 1).bit_length(), LEAST_BITS), MOST_BITS)


@dataclass(frozen=True)
class _Table:
    """sm_count: of the GPU it was made for. split: configurations that a cell has with K split. rows: by majors, and by
    M and N, for each K the entries of a cell: twice the number of a configuration, and one more for K split.
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
def _units() -> list[tuple[str, int, int, int]]:
    """Each configuration, the rows and columns of D that its cluster computes, and the CTAs of that."""
    found = []
    for text in configurations():
        config = HopperConfig.parse(text)
        rows, columns = config.cluster[::-1] if config.swapped else config.cluster
        bm, bn, _ = config.tile()
        found.append((text, bm * rows, bn * columns, config.cluster_ctas))
    return found
