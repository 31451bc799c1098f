"""Candidates for fp32 operands that are split into parts: what the cost model chooses among. They were picked by
estimates; docs/precision.md has what the choice among them reached on an H200.

A stage holds two or three parts of each operand, so that a tile has few stages; each has three to nine times the work
of a stage of native operands. Two sets of accumulators leave room for 128x208 elements. Where K is divided, sums are
stored straight from registers: the ring may be as deep without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutegemm.cute.hopper.config import HopperConfig
    from cutegemm.problem import Signature

_BF16 = (
    "sm90/128x192x32/coop2/c2x1/s3/serp8/pdl",
    "sm90/128x192x32/coop2/c1x1/s3/serp8/pdl",
    "sm90/128x208x32/coop2/c2x1/s3/serp8/pdl",
    "sm90/256x96x32/coop2/c1x2/s2/serp8/pdl",
    "sm90/128x160x32/coop2/c1x1/s3/serp8/pdl",
    "sm90/128x128x32/coop2/c2x1/s4/serp8/pdl",
    "sm90/128x128x32/coop2/c1x1/s4/serp8/pdl",
    "sm90/128x96x32/coop2/c1x1/s4/serp8/pdl",
    "sm90/128x64x32/coop2/c1x1/s5/serp8/pdl",
    "sm90/64x128x32/coop1/c1x1/s5/serp8/pdl",
    "sm90/64x64x32/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x32x32/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x32x32/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/64x16x32/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/128x16x32/coop1/c1x1/s6/serp8/swap/pdl",
)
_TF32 = (
    "sm90/128x192x32/coop2/c2x1/s2/serp8/pdl",
    "sm90/128x192x32/coop2/c1x1/s2/serp8/pdl",
    "sm90/128x160x32/coop2/c2x1/s2/serp8/pdl",
    "sm90/128x128x32/coop2/c2x1/s3/serp8/pdl",
    "sm90/128x128x32/coop2/c1x1/s3/serp8/pdl",
    "sm90/128x96x32/coop2/c1x1/s3/serp8/pdl",
    "sm90/128x64x32/coop2/c1x1/s4/serp8/pdl",
    "sm90/64x128x32/coop1/c1x1/s4/serp8/pdl",
    "sm90/64x64x32/coop1/c1x1/s6/serp8/pdl",
    "sm90/64x32x32/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x32x32/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/64x16x32/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/128x16x32/coop1/c1x1/s5/serp8/swap/pdl",
)
_SPLIT = ("/128x128x32/coop2/c1x1/", "/128x64x32/coop2/", "/64x64x32/", "/64x32x32/", "/64x16x32/")
"""In the texts of those that may also have K split."""
_DEPTH = 32
"""Elements of K of a stage: a promotion follows every one."""


def listed(signature: Signature) -> tuple[str, ...]:
    """The candidates for operands that are split."""
    assert signature.parts is not None
    return _BF16 if signature.parts.element == "bf16" else _TF32


def may_split(text: str) -> bool:
    return any(part in text for part in _SPLIT) and text in (*_BF16, *_TF32)


def space(made: type[HopperConfig], tiles: tuple[tuple[int, int], ...], ring_bytes: int, itemsize: int) -> Iterator:
    """Configurations that the tuner considers beside the general ones, whose rings are too deep for all parts.

    made: the class. ring_bytes: room of the ring. itemsize: bytes of all parts of an element.
    """
    for (bm, bn), schedule in product(tiles, ("coop1", "coop2", "coop3")):
        deepest = min(8, ring_bytes // ((bm + bn) * _DEPTH * itemsize))
        general = min(8, (ring_bytes - 2 * bn) // ((bm + bn) * _DEPTH * 4))
        for stages, cluster, order in product(
            range(max(deepest - 1, 2), deepest + 1), ((1, 1), (2, 1), (1, 2), (2, 2)), ("serp8", "hilbert")
        ):
            if stages not in (general, general - 1, general // 2):
                yield made(bm, bn, _DEPTH, schedule, cluster, stages, order, ("pdl",))
