"""The candidates of the Hopper kernel for operands of one byte: fp8 and int8.

A k tile is 128 elements: a line of 128 bytes, and what a promotion takes. Promoted sums need two sets of registers, so
that tiles have at most 112 accumulators a thread (`promotion`); fast sums and those of int8 take the large ones too.
Nothing here was measured yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutegemm.cute.hopper import promotion
from cutegemm.cute.hopper.config import HopperConfig

if TYPE_CHECKING:
    from cutegemm.problem import Signature

_LARGE = (
    "sm90/128x256x128/coop2/c2x1/s4/serp8/zig/pdl",
    "sm90/256x128x128/coop2/c1x2/s4/serp8/zig/pdl",
    "sm90/256x192x128/coop2/c1x2/s3/serp8/zig/pdl",
    "sm90/128x192x128/pp/c2x1/s4/serp8/pdl",
)
_BOTH = (
    "sm90/128x192x128/coop2/c2x1/s4/serp8/zig/pdl",
    "sm90/128x192x128/coop2/c1x2/s4/serp8/zig/pdl",
    "sm90/128x160x128/coop2/c2x1/s5/serp8/zig/pdl",
    "sm90/128x224x128/coop2/c2x1/s4/serp8/zig/pdl",
    "sm90/192x128x128/coop3/c1x2/s4/serp8/zig/pdl",
    "sm90/128x128x128/coop2/c2x1/s5/serp8/zig/pdl",
    "sm90/128x128x128/coop2/c1x1/s5/serp8/pdl",
    "sm90/128x96x128/coop2/c1x1/s6/serp8/pdl",
    "sm90/128x64x128/coop2/c1x1/s7/serp8/pdl",
    "sm90/64x128x128/coop1/c1x1/s6/serp8/pdl",
    "sm90/64x64x128/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x32x128/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x16x128/coop1/c1x1/s8/serp8/pdl",
    "sm90/128x64x128/coop2/c1x1/s6/serp8/swap/pdl",
    "sm90/128x128x128/coop2/c1x2/s5/serp8/swap/pdl",
    "sm90/128x32x128/coop2/c1x1/s8/serp8/swap/pdl",
    "sm90/128x16x128/coop2/c1x1/s8/serp8/swap/pdl",
    "sm90/64x64x128/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/64x32x128/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/64x16x128/coop1/c1x1/s8/serp8/swap/pdl",
)
SPLIT = frozenset(
    (
        "sm90/128x128x128/coop2/c1x1/s5/serp8/pdl",
        "sm90/64x64x128/coop1/c1x1/s8/serp8/pdl",
        "sm90/128x64x128/coop2/c1x1/s6/serp8/swap/pdl",
        "sm90/128x32x128/coop2/c1x1/s8/serp8/swap/pdl",
        "sm90/64x64x128/coop1/c1x1/s8/serp8/swap/pdl",
        "sm90/64x32x128/coop1/c1x1/s8/serp8/swap/pdl",
        "sm90/64x16x128/coop1/c1x1/s8/serp8/swap/pdl",
    )
)
"""Those that may have K split."""


def listed(signature: Signature) -> tuple[str, ...]:
    """The candidates for a signature whose operands have elements of one byte."""
    texts = (*_LARGE, *_BOTH)
    if signature.promotion is None:
        return texts
    return tuple(text for text in texts if promotion.why_invalid(HopperConfig.parse(text), signature) is None)
