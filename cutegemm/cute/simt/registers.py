"""Registers that a thread of the candidates has whose configuration does not bound them (`/r`).

They decide how many CTAs an SM holds, so that the cost model needs them before a kernel is compiled. The compiler takes
what it likes: 128x64x8 with warps of 32x64 has 136 with one pair of majors and 236 with another. They were read from
the machine code (CuTe DSL 4.8, sm_90a), with three parts of K for those with splits; `tests/compile/test_candidates.py`
compares. Two kernels with splits (`32x64x16/w16x32`; `32x64x32/w32x32/x2` with `nt` and rows that are not aligned)
have 98 and 130 registers with some numbers of parts, and those of the table with others. The table serves every GPU,
every tile order and every epilogue: a few registers more or fewer seldom change the number of CTAs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutegemm.cute.simt.config import SimtConfig
    from cutegemm.problem import Signature

MAJORS = ("tn", "tt", "nn", "nt")
_OF: Mapping[str, tuple[tuple[int, int, int, int], ...]] = {
    "simt/128x64x8/w32x64/s3/g8": (
        (236, 136, 233, 160),
        (252, 244, 246, 242),
        (249, 248, 236, 252),
        (254, 255, 246, 252),
    ),
    "simt/32x128x8/w32x64/s3/g8": (
        (251, 243, 156, 240),
        (251, 254, 254, 248),
        (254, 238, 255, 255),
        (255, 250, 255, 252),
    ),
    "simt/32x64x16/w16x32/s3/g8": (
        (94, 190, 90, 96),
        (202, 208, 202, 202),
        (208, 224, 218, 240),
        (220, 242, 236, 236),
    ),
    "simt/64x32x32/w32x32/s4/g8/x2": (
        (155, 160, 154, 152),
        (168, 168, 164, 158),
        (217, 220, 202, 204),
        (246, 226, 212, 222),
    ),
    "simt/32x64x32/w16x32/s4/g8/x2": (
        (184, 194, 186, 192),
        (192, 202, 192, 200),
        (220, 234, 234, 230),
        (220, 238, 238, 236),
    ),
    "simt/32x32x64/w32x32/s3/g8/x4": (
        (161, 168, 162, 156),
        (167, 168, 168, 164),
    ),
    "simt/32x32x32/w16x32/s3/g8/x2": (
        (198, 202, 202, 198),
        (204, 208, 210, 204),
        (230, 252, 248, 248),
        (228, 254, 248, 250),
    ),
    "simt/32x32x32/w16x32/s4/g8/x4": (
        (114, 120, 118, 114),
        (122, 128, 128, 126),
        (138, 156, 156, 148),
        (146, 164, 162, 158),
    ),
    "simt/64x64x32/w32x64/s2/g8/x2": (
        (208, 214, 212, 200),
        (220, 220, 216, 202),
    ),
    "simt/32x64x32/w32x32/s2/g8/x2": (
        (164, 162, 158, 156),
        (173, 168, 162, 166),
        (224, 236, 214, 128),
        (254, 230, 212, 228),
    ),
    "simt/16x32x32/w16x32/s4/g8/x4": (
        (124, 126, 122, 126),
        (128, 138, 132, 136),
        (158, 164, 168, 166),
        (162, 168, 168, 168),
    ),
    "simt/16x32x64/w16x32/s4/g8/x8": (
        (122, 126, 122, 126),
        (128, 138, 128, 138),
        (168, 166, 168, 164),
        (168, 168, 166, 168),
    ),
    "simt/16x32x128/w16x32/s4/g8/x8": (
        (210, 208, 206, 208),
        (218, 220, 216, 218),
        (255, 254, 254, 240),
        (255, 254, 254, 254),
    ),
}
"""For each of `MAJORS`: without and with splits of K; then the same where rows of A or B are not aligned to 16 bytes,
which makes more copies, each with an address. A configuration without the latter is not valid there."""


def is_narrow(signature: Signature) -> bool:
    """Whether rows of A or B are not aligned to 16 bytes."""
    return min(signature.align_a, signature.align_b) < 16


def known(config: SimtConfig, signature: Signature) -> int | None:
    """The registers of a thread, None for a tile that is not in the table."""
    rows = _OF.get(str(replace(config, splits=1, group=8)))
    row = (config.splits > 1) + 2 * is_narrow(signature)
    return None if rows is None or row >= len(rows) else rows[row][MAJORS.index(signature.majors)]
