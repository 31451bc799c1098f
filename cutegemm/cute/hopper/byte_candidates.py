"""The candidates of the Hopper kernel for operands of one byte: fp8 and int8.

A k tile is 128 elements: a line of 128 bytes, and what a promotion takes. Promoted sums need two sets of registers, so
that tiles have at most 112 accumulators a thread (`promotion`); fast sums and those of int8 take the large ones too.
With scales of rows and of blocks the promoted ones were measured on an H200, at the seven shapes of docs/fp8.md:

- Twin sums were faster with one warpgroup wherever both were timed; with two up to 128 x 128, but for 128 x 64 once by
  2 %, and slower at 128 x 144 (`twins_pay`).
- Ping-pong with twins was slower than the best by a fifth and more: promoted sums have none.
- With scales of blocks and without option half, 128 x 192 was the fastest large tile of a cluster; most others were 5
  to 12 % slower. Option half is faster: 256 x 128 by 10 to 20 % at 4096^3, 8192^3 and 4096x7168x2048, and 128 x 256
  with stream-K at 2048x7168x16384, where its tiles fill 3.4 waves. In groups of 128 rows and more 128 x 256 is the
  fastest (docs/grouped_measured.md#in-fp8).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from cutegemm.cute.hopper import options, promotion, shortlists
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.problem.work import DENSE, MASKED, ROWS

if TYPE_CHECKING:
    from cutegemm.problem import Signature

_LARGE = (
    "sm90/128x256x128/coop2/c2x1/s4/serp8/zig/pdl",
    "sm90/256x128x128/coop2/c1x2/s4/serp8/zig/pdl",
    "sm90/256x192x128/coop2/c1x2/s3/serp8/zig/pdl",
    "sm90/128x192x128/pp/c2x1/s4/serp8/pdl",
)
_BOTH = (
    "sm90/128x208x128/coop2/c1x2/s4/serp8/zig/pdl",
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
_HALF = (
    "sm90/256x128x128/coop2/c1x2/s4/serp8/zig/pdl/half",
    "sm90/128x256x128/coop2/c2x1/s4/serp8/zig/pdl/half",
    "sm90/128x256x128/coop2/c2x1/s4/serp8/zig/streamk/pdl/half",
    "sm90/128x256x128/coop2/c1x2/s4/serp8/zig/pdl/half",
    "sm90/128x256x128/coop2/c1x2/s4/serp8/zig/streamk/pdl/half",
    "sm90/128x256x128/coop2/c1x1/s4/serp8/zig/pdl/half",
)
"""For large dense products whose sums are promoted."""
_HALF_IN_GROUPS = (
    "sm90/128x256x128/coop2/c1x2/s4/serp16/zig/pdl/half",
    "sm90/128x256x128/coop2/c1x2/s4/serp16/zig/streamk/pdl/half",
    "sm90/128x256x128/coop2/c1x1/s4/serp8/zig/pdl/half",
)
"""The same for groups of more than `FEW_ROWS` rows, with which no other tiles are compared then: on an H200 each of
them took up to 12 % longer, where the model expects as much of both (docs/grouped_measured.md#in-fp8)."""
_LAYERS = (
    "sm90/192x80x128/coop3/c1x2/s5/serp8/swap/pdl",
    "sm90/128x160x128/coop2/c2x1/s5/serp8/swap/pdl",
    "sm90/128x144x128/coop2/c2x2/s6/serp8/swap/pdl",
    "sm90/192x112x128/coop3/c2x2/s5/serp8/swap/pdl",
    "sm90/128x176x128/coop2/c2x1/s5/serp8/swap/pdl",
    "sm90/128x160x128/coop2/c1x4/s5/serp8/pdl",
    "sm90/128x96x128/coop2/c1x2/s7/serp8/swap/pdl",
    "sm90/128x208x128/coop2/c1x1/s4/serp8/swap/pdl",
    "sm90/128x224x128/coop2/c2x2/s4/serp8/swap/pdl",
    "sm90/128x96x128/coop2/c4x1/s7/serp8/swap/pdl",
    "sm90/192x96x128/coop3/c1x4/s5/serp8/pdl",
    "sm90/128x160x128/coop2/c4x1/s5/serp8/swap/pdl",
    "sm90/128x144x128/coop2/c1x2/s6/serp8/swap/pdl",
    "sm90/128x160x128/coop2/c1x2/s5/serp8/pdl",
    "sm90/128x96x128/coop2/c2x1/s7/serp8/swap/pdl",
    "sm90/64x128x128/coop1/c1x4/s8/serp8/pdl",
    "sm90/64x96x128/coop1/c1x4/s8/serp8/pdl",
    "sm90/64x64x128/coop1/c1x4/s8/serp8/pdl",
)
"""Compared for every dense product with promoted sums of more than `FEW_OF_LAYERS` rows. The cells
of `shortlists` were made for 16 bits, so that they lack tiles that are fast in fp8. By the model a choice among a cell
alone lost 2.3 % at layers of 65 to 8192 rows with scales of rows, and one among these too loses 0.5 %."""
FEW_OF_LAYERS = 64
"""Products of up to so many rows, rounded up to a power of two, do not compare `_LAYERS`: their cells are unchecked."""
FEW_ROWS = 64
"""Of a group on average, rounded up to a power of two: up to here swapped tiles that hold a group were faster on an
H200 (32 rows in 256 groups of 4096x7168 took 2.1 ms by halves, and 1.9 by tiles of 64 tokens; 64 rows in 128 groups of
1536x2048 125 us and 117 by 96)."""
SOME_ROWS = 256
_IN_GROUPS = (
    "sm90/128x144x128/coop2/c2x1/s5/serp8/swap/pdl",
    "sm90/256x96x128/coop2/c2x1/s4/serp8/swap/pdl",
    "sm90/128x96x128/coop2/c2x1/s6/serp8/swap/pdl",
    "sm90/256x64x128/coop2/c2x1/s4/serp8/swap/pdl",
    "sm90/256x48x128/coop2/c2x1/s5/serp8/swap/pdl",
    "sm90/256x32x128/coop2/c2x1/s5/serp8/swap/pdl",
    "sm90/256x16x128/coop2/c2x1/s5/serp8/swap/pdl",
    "sm90/256x96x128/coop2/c1x1/s4/serp8/swap/pdl",
    "sm90/256x64x128/coop2/c1x1/s4/serp8/swap/pdl",
)
"""For groups of up to `SOME_ROWS` rows, whose weights are read at the memory's speed: swapped tiles that hold one.
The last two are for gathered rows, which clusters cannot share."""
_FEW = (
    "sm90/128x112x128/coop2/c1x1x2/s6/row/pdl",
    "sm90/64x112x128/coop1/c2x1/s8/row/pdl",
    "sm90/128x128x128/coop2/c1x1x2/s6/row/swap/pdl",
    "sm90/128x64x128/coop2/c1x1x2/s8/row/swap/pdl",
    "sm90/128x32x128/coop2/c1x1x2/s8/row/swap/pdl",
    "sm90/128x16x128/coop2/c1x1x2/s8/row/swap/pdl",
    "sm90/64x64x128/coop1/c1x1x2/s8/row/swap/pdl",
    "sm90/64x64x128/coop1/c1x2x2/s8/row/pdl",
    "sm90/64x32x128/coop1/c1x2/s4/serp8/swap/pdl",
    "sm90/64x32x128/coop1/c1x1x2/s8/row/swap/pdl",
    "sm90/64x16x128/coop1/c2x1/s8/serp8/swap/pdl",
    "sm90/64x16x128/coop1/c1x1x2/s8/row/swap/pdl",
)
"""For few rows, and for small products: clusters that share what they load, or the sum over K."""
_GATED_FEW = (
    "sm90/128x16x128/coop1/c1x1x2/s5/row/swap/pdl",
    "sm90/128x16x128/coop1/c1x1x4/s5/row/swap/pdl",
    "sm90/128x16x128/coop1/c1x1x4/s6/row/swap/pdl",
    "sm90/128x16x128/coop1/c1x1x8/s5/row/swap/pdl",
    "sm90/128x32x128/coop1/c1x1x2/s5/row/swap/pdl",
    "sm90/128x32x128/coop1/c1x1x4/s5/row/swap/pdl",
    "sm90/128x64x128/coop1/c1x1x2/s4/row/swap/pdl",
    "sm90/128x64x128/coop1/c1x1x4/s4/row/swap/pdl",
    "sm90/64x96x128/coop1/c1x4/s5/serp8/pdl",
    "sm90/64x128x128/coop1/c1x4/s8/serp8/pdl",
)
"""Compared for up to `FEW_OF_LAYERS` rows of a dense product with gate and up in halves. Nearly all have clusters along
K, which keep the SMs busy where there are few columns."""
_GATED = (
    "sm90/128x16x128/coop1/c1x1/s5/row/swap/pdl",
    "sm90/128x16x128/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/128x32x128/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/128x64x128/coop1/c1x1/s8/serp8/swap/pdl",
)
"""For few rows of a program with gate and up, whose swapped tiles have 128 rows a warpgroup. Without them 1, 8 and 16
rows of 28672x4096 with scales of rows took 44, 39 and 40 us on an H200, with them 31."""
_GATED_LAYERS = (
    "sm90/64x80x128/coop1/c1x4/s8/serp8/pdl",
    "sm90/64x144x128/coop1/c2x1/s8/serp8/pdl",
    "sm90/128x128x128/coop2/c1x2/s6/serp8/pdl",
    "sm90/192x64x128/coop1/c1x2/s6/serp8/pdl",
    "sm90/192x96x128/coop3/c1x4/s5/serp8/pdl",
    "sm90/256x112x128/coop2/c1x1/s4/serp8/swap/pdl",
)
"""For more rows of such a program. By the model a choice without them loses 0.7 to 0.9 % at first products of gated
MLPs, and with them 0.6 %."""
_SMALLEST = "sm90/64x16x128/coop1/c1x1/s8/serp8/pdl"
_LARGE_SCALED = (128, 192)
"""The only large tile without half whose CTAs share loads that takes long sums with scales of blocks."""
_LARGE_SCALED_DENSE = (128, 160)
"""The same, for dense products without swapped operands. At 58 layers of 129 to 6000 rows on an H200 this tile took
0.95 to 0.97 of the time that the model expected, relative to the other candidates; other such tiles took 1.02 to 1.19.
"""
SHORT_SUM = 1024
"""Up to this K, rounded up to a power of two, large tiles of a cluster take scales of blocks as fast as others."""
MOST_OF_TWO = 48
"""Accumulators a thread of two warpgroups up to which twins and swapped tiles spill with no scales of blocks."""
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
"""Of the above those that may have K split."""


def listed(signature: Signature) -> tuple[str, ...]:
    """The candidates for a signature whose operands have elements of one byte: the above and those of `shortlists`."""
    texts = dict.fromkeys((*_own(signature), *_in_cells(signature).values()))
    return tuple(texts) or (_SMALLEST,)  # of which the rule of validity says why it is none


def shortlist(signature: Signature, cell: Iterable[tuple[str, bool]], m: int, k: int) -> list[tuple[str, bool]]:
    """The listed configurations to compare where a product has about m rows and its sums are about k long, each with
    whether K is split: of the above those that are not left out at such sizes, and those of a cell of `shortlists`,
    which names them as for 16 bits."""
    halves = [(text, False) for text in _own(signature) if text in _HALF_IN_GROUPS]
    if signature.work != DENSE and halves and m > FEW_ROWS:
        return halves
    left_out: tuple[str, ...] = () if m <= FEW_OF_LAYERS else _GATED_FEW
    if signature.work != DENSE:
        left_out = _HALF_IN_GROUPS if m <= FEW_ROWS else _IN_GROUPS if m > SOME_ROWS else ()
    found = [(text, False) for text in _own(signature) if text.removesuffix("/twin") not in left_out]
    found += ((text, True) for text in _own(signature) if text.removesuffix("/twin") in SPLIT)
    known = _in_cells(signature)
    found += ((known[text], split) for text, split in cell if text in known)
    if known and m > FEW_OF_LAYERS:
        found += ((text, False) for text in _of_layers(signature))
    is_plain = signature.work == DENSE and not signature.epilogue.gating
    poor = frozenset() if k <= SHORT_SUM and is_plain else _poor_with_blocks(signature)
    return [each for each in dict.fromkeys(found) if each[0] not in poor]


def is_divided(signature: Signature) -> bool:
    """Whether it is a dense product with gate and up in halves, which take clusters along K."""
    return signature.epilogue.gating == "halves" and signature.work == DENSE


@functools.lru_cache(maxsize=64)
def _own(signature: Signature) -> tuple[str, ...]:
    """Those of the above that serve a signature."""
    texts: tuple[str, ...] = (*_LARGE, *_BOTH, *_FEW, *(_GATED if signature.epilogue.gating else ()))
    texts += _GATED_FEW if is_divided(signature) else ()
    if signature.work in (*ROWS, MASKED):
        texts += _IN_GROUPS
    if signature.promotion is not None and signature.work in (DENSE, *ROWS, MASKED):
        texts += _HALF if signature.work == DENSE else _HALF_IN_GROUPS
    forms = (form(text, signature) for text in texts)
    return tuple(dict.fromkeys(each for each in forms if each is not None))


@functools.lru_cache(maxsize=64)
def _of_layers(signature: Signature) -> tuple[str, ...]:
    """The configurations of `_LAYERS`, and with gate and up `_GATED_LAYERS`, that can run this signature; none unless
    its sums are promoted."""
    if signature.promotion is None:
        return ()
    texts = (*_LAYERS, *(_GATED_LAYERS if signature.epilogue.gating else ()))
    return tuple(each for each in (form(text, signature) for text in texts) if each is not None)


@functools.lru_cache(maxsize=64)
def _in_cells(signature: Signature) -> dict[str, str]:
    """The candidates of `shortlists` that serve a signature, in their order: as of 16 bits, and in the form that serves
    it. None where they were not timed: for promoted sums of groups, and for gate and up but for promoted sums of dense
    products with these in halves."""
    promoted, gating = signature.promotion is not None, signature.epilogue.gating
    if (promoted and signature.work != DENSE) or (gating and not (promoted and is_divided(signature))):
        return {}
    forms = ((text, form(shortlists.of_width(text, 1, wide=True), signature)) for text in shortlists.configurations())
    return {text: served for text, served in forms if served is not None}


@functools.lru_cache(maxsize=64)
def _poor_with_blocks(signature: Signature) -> frozenset[str]:
    """Those of the list that are slow with scales of blocks of K where the sum is long: large tiles of clusters."""
    if not signature.epilogue.program.block_scales:
        return frozenset()
    dense = signature.work == DENSE
    own = () if dense else _IN_GROUPS
    return frozenset(text for text in listed(signature) if text not in own and _is_poor_with_blocks(text, dense))


def form(text: str, signature: Signature) -> str | None:
    """What serves a signature: the configuration, or with twin sums; None if neither does."""
    config = HopperConfig.parse(text)
    if signature.work != DENSE and config.parts > 1:  # whose CTAs sum all of K
        return None
    if signature.promotion is None:
        return text
    if config.ping_pong or promotion.why_invalid(config, signature) is not None:
        return None
    if "half" in config.options:
        return text
    most = MOST_OF_TWO if config.swapped or config.cluster_k > 1 else promotion.MOST_WITH_COPIES
    if _needs_more_registers(signature) and _is_full(config, most):
        return None
    return str(_with_twin(config) if twins_pay(config, signature) else config)


def _is_full(config: HopperConfig, most: int = MOST_OF_TWO) -> bool:
    return config.consumers == 2 and config.accumulators > most


def _needs_more_registers(signature: Signature) -> bool:
    """Whether scales of blocks are of another recipe than 1 x 128 with 128 x 128, or those of a batch's matrices."""
    scales = signature.epilogue.program.block_scales
    usual, in_batches = {"a": "a1", "b": "b128"}, signature.work == DENSE
    return any((given.batched and in_batches) or given.scales != usual[operand] for operand, given in scales.items())


def _is_poor_with_blocks(text: str, dense: bool) -> bool:
    config = HopperConfig.parse(text)
    shared = config.cluster != (1, 1) and config.bm * config.bn >= 128 * 128
    known = (_LARGE_SCALED, _LARGE_SCALED_DENSE) if dense and not config.swapped else (_LARGE_SCALED,)
    return shared and "half" not in config.options and (config.bm, config.bn) not in known


def twins_pay(config: HopperConfig, signature: Signature) -> bool:
    """Whether the configuration is faster with twin sums than without, and valid with them.

    With scales of blocks and two warpgroups, twins of more than `MOST_OF_TWO` accumulators a thread spill 8 bytes or
    more where CTAs share loads, and everywhere with other recipes than the usual one and in batches. Those of swapped
    operands spill nothing, but in a cluster of four one took 38.9 us where 128 x 128 without a cluster took 31.3.
    """
    if config.ping_pong or config.consumers > 2 or "half" in config.options:
        return False
    sharers = config.cluster[0] * config.cluster[1]
    crowded = sharers >= (4 if config.swapped else 2) and signature.epilogue.program.block_scales
    if _is_full(config) and (crowded or _needs_more_registers(signature)):
        return False
    return promotion.why_invalid(_with_twin(config), signature) is None


def tries(config: HopperConfig, signature: Signature) -> bool:
    """Whether the tuner tries a valid configuration for operands of one byte. With promoted sums it tries no ping-pong,
    and a tile either with twin sums or without them, as `twins_pay` says.
    """
    if signature.promotion is None:
        return True
    return not config.ping_pong and ("twin" in config.options) == twins_pay(config, signature)


def _with_twin(config: HopperConfig) -> HopperConfig:
    return replace(config, options=options.read({*config.options, "twin"}) or ())


@functools.cache
def _split_in_cells() -> frozenset[str]:
    return frozenset(shortlists.of_width(text, 1, wide=True) for text in shortlists.split())


def may_split(text: str, signature: Signature) -> bool:
    """Whether a candidate may have K split."""
    text = text.removesuffix("/twin")
    return text in SPLIT or bool(_in_cells(signature) and text in _split_in_cells())
