"""The candidates of the family dmma: what the cost model chooses among when nothing was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutegemm.problem import Signature

_WIDE = ("dmma/128x128x16/w64x32/s4/g8",)
"""Whose accumulators leave registers for two sets of fragments of the smallest instructions only."""
_TILES = (
    "dmma/128x64x16/w32x32/s4/g8",
    "dmma/64x128x16/w32x32/s4/g8",
    "dmma/64x64x16/w32x32/s4/g8",
    "dmma/64x32x16/w32x16/s4/g8",
    "dmma/32x64x16/w16x32/s4/g8",
    "dmma/32x32x32/w16x16/s4/g8",
)


def listed(signature: Signature) -> tuple[str, ...]:
    """The candidates for a signature that the family takes: on each GPU those whose instruction it has are valid."""
    asked = (("16x4", _WIDE), ("16x8", _TILES), ("8x4", (*_WIDE, *_TILES)))
    return tuple(f"{tile}/i{instruction}" for instruction, tiles in asked for tile in tiles)
