"""The candidates of the Hopper kernel for operands of one byte: fp8 and int8.

A k tile is 128 elements: a line of 128 bytes, and what a promotion takes. Promoted sums need two sets of registers, so
that tiles have at most 112 accumulators a thread (`promotion`); fast sums and those of int8 take the large ones too.
Where one warpgroup multiplies at a time, nothing else hides its promotions: it gets twin sums.
Nothing here was measured yet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cutegemm.cute.hopper import options, promotion
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
    "sm90/128x208x128/coop2/c2x1/s4/serp8/zig/pdl",
    "sm90/128x176x128/coop2/c2x1/s4/serp8/zig/pdl",
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
_FEW = (
    "sm90/128x64x128/coop2/c1x1/s7/serp8/skew/pdl",
    "sm90/128x112x128/coop2/c1x1x2/s6/row/pdl",
    "sm90/64x112x128/coop1/c2x1/s8/row/pdl",
    "sm90/128x128x128/coop2/c1x1x2/s6/row/swap/pdl",
    "sm90/128x64x128/coop2/c1x1x2/s8/row/swap/pdl",
    "sm90/128x32x128/coop2/c1x1x2/s8/row/swap/pdl",
    "sm90/128x16x128/coop2/c1x1x2/s8/row/swap/pdl",
    "sm90/64x128x128/coop1/c2x1/s6/serp8/pdl",
    "sm90/64x64x128/coop1/c1x1x2/s8/row/pdl",
    "sm90/64x64x128/coop1/c1x1x2/s8/row/swap/pdl",
    "sm90/64x64x128/coop1/c1x2x2/s8/row/pdl",
    "sm90/64x32x128/coop1/c1x2/s8/serp8/swap/pdl",
    "sm90/64x32x128/coop1/c1x1x2/s8/row/swap/pdl",
    "sm90/64x16x128/coop1/c2x1/s16/serp8/swap/pdl",
    "sm90/64x16x128/coop1/c1x1x2/s8/row/swap/pdl",
)
"""For few rows, and for small products: clusters that share what they load, or the sum over K."""
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
    texts = (*_LARGE, *_BOTH, *_FEW)
    if signature.promotion is None:
        return texts
    return tuple(
        str(with_twin(config, signature))
        for config in map(HopperConfig.parse, texts)
        if promotion.why_invalid(config, signature) is None
    )


def with_twin(config: HopperConfig, signature: Signature) -> HopperConfig:
    """The configuration with twin sums, where one warpgroup multiplies at a time and has the registers."""
    if config.consumers > 1 and not config.ping_pong:
        return config
    twin = replace(config, options=options.read((*config.options, "twin")) or config.options)
    return twin if promotion.why_invalid(twin, signature) is None else config


def may_split(text: str) -> bool:
    """Whether a candidate may have K split."""
    return text.removesuffix("/twin") in SPLIT
