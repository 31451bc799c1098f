"""The candidates of the Hopper kernel: what the cost model chooses among when nothing was measured.

There are few of them, so that a choice costs microseconds. They differ in the tile and the cluster, and with these in
how a small problem fills the SMs. In most dtypes there are more than a choice can compare: `shortlists` lists them,
with a shortlist for each size. `splits` says which may have K split. Several results of a program, results of four
bytes, and scales of blocks need more shared memory, so a candidate then has as many stages as still fit.

tests/compile builds one for each tile, schedule and order of operands, without C and bias: none spills.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cutegemm.cute.hopper import byte_candidates, constant, part_candidates, promotion, shortlists
from cutegemm.cute.hopper.config import BLOCK_ROWS, WHOLE_RING_BYTES, HopperConfig
from cutegemm.cute.hopper.validity import odd_eights
from cutegemm.cute.hopper.work_count import works
from cutegemm.hardware.residency import resident_clusters
from cutegemm.problem import ITEMSIZE
from cutegemm.problem.program.graph import PACKERS
from cutegemm.problem.work import DENSE, MASKED, RAGGED_M, RAGGED_N, ROWS, SCATTERED

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem, Signature

_OF_GROUPS = ("sm90/256x96x64/coop2/c2x1/s4/serp8/swap/pdl",)
"""In the shortlists of groups of up to `UNSWAPPED_ROWS` rows too: tiles that hold half as many again, since about half
of the groups have more than their share. No dense product of so many rows wants them."""
_ROW_BY_ROW = (
    "sm90/128x192x64/pp/c1x1/s4/row/pdl",
    "sm90/128x192x64/pp/c2x1/s4/row/pdl",
    "sm90/128x192x64/pp/c1x2/s4/row/pdl",
)
"""In the shortlists of large results of short sums too, whose time is that of writing D: tiles that follow one another
along D's rows, which memory takes faster (docs/performance.md#large-results-of-short-sums)."""
LARGE_RESULT, SHORT_SUM = 1 << 26, 1024
"""The least elements of such a D and the largest K, of sizes rounded up to powers of two."""
_GATED = (
    "sm90/128x16x64/coop1/c1x1x2/s6/row/swap/pdl",
    "sm90/128x16x64/coop1/c1x1x4/s6/row/swap/pdl",
    "sm90/128x16x64/coop1/c1x1x8/s6/row/swap/pdl",
    "sm90/128x16x128/coop1/c1x1x4/s6/row/swap/pdl",
    "sm90/128x32x64/coop1/c1x1x2/s5/row/swap/pdl",
    "sm90/128x32x64/coop1/c1x1x4/s5/row/swap/pdl",
    "sm90/128x48x64/coop1/c1x1x2/s4/row/swap/pdl",
    "sm90/128x48x64/coop1/c1x1x4/s4/row/swap/pdl",
    "sm90/128x64x64/coop1/c1x1x2/s4/row/swap/pdl",
    "sm90/128x64x64/coop1/c1x1x4/s4/row/swap/pdl",
)
"""Compared for dense products of up to `UNSWAPPED_ROWS` rows whose program has gate and up in halves: swapped tiles
that hold both, in clusters along K, which keep the SMs busy where there are few columns."""
_GATED_LAYERS = (
    "sm90/64x64x128/coop1/c2x1/s6/serp8/pdl",
    "sm90/64x128x64/coop1/c1x2/s8/serp8/pdl",
    "sm90/128x96x64/coop1/c2x1/s7/serp8/swap/pdl",
    "sm90/192x96x64/coop3/c1x4/s5/serp8/pdl",
)
"""Compared for such products of more rows. The cells of `shortlists` were made for plain products: by the model a
choice among a cell alone lost 1.0 % at first products of gated MLPs, and 17 % at most; among these too it loses 0.6 and
7 %."""
_IN_PARTS = ("sm90/128x256x64/coop2/c1x2/s4/serp8/zig/pdl",)
"""In the shortlists of small results of long sums too, with K split: large tiles in parts fill the SMs once, and load
least for each multiplication (592x2048x18048 on an H200: 70 us in three parts, 94 by the best of the others)."""
SMALL_RESULT, LONG_SUM = 1 << 22, 8192
"""The most elements of such a D and the least K, of sizes rounded up to powers of two."""
_STREAMED = ("sm90/128x256x64/coop2/c1x2/s4/serp16/zig/streamk/pdl",)
"""In the shortlists of groups of `STREAMED_ROWS` rows and more too: tiles left over behind whole waves are cut along K,
and bands of sixteen tiles hold all rows of most groups, whose weights are then read once
(docs/grouped_measured.md#tall-bands-of-tiles)."""
_BANDED = ("sm90/128x256x64/coop2/c1x2/s4/serp16/zig/pdl",)
"""Compared for programs of gate and up besides: the same in whole tiles. On an H200 it took 0.97 to 1.01 of the time of
`_STREAMED` for experts with 3072 to 28672 columns of gate and up
(docs/grouped_measured.md#gathering-in-a-pass-of-its-own), and for 2048 rows a group 0.93 and 1.00 of it in two runs. It
comes first, so that it is taken where the model expects the same time of both."""
_RINGED = ("sm90/128x192x64/coop2/c1x2/s4/serp8/zig/pdl", *_BANDED)
"""Compared for groups of `RINGED_ROWS` rows and more whose program has several matrix operands: these travel through
the ring, and results are stored by TMA. In ping-pong, which such tiles of the shortlists have, slabs store them
(docs/grouped.md#matrix-operands)."""
RINGED_ROWS = 64
_WIDE = ("sm90/256x176x64/coop2/c2x1/s3/serp8/swap/zig/streamk/fit/pdl",)
"""Compared for groups of `WIDE_ROWS` rows, rounded up to a power of two, whose program gives several results of gate
and up and weights the rows, as that of `moe` does in training; most others spill 8 to 40 bytes of registers with it. On
an H200 it took 0.94 to 1.00 of the time of the same with 128 columns, and with other numbers of rows 0.96 to 1.06
(docs/grouped_measured.md#the-products-of-a-training-step)."""
WIDE_ROWS = 1024
FITTED_ROWS: Mapping[int, tuple[str, ...]] = {
    64: ("sm90/256x96x64/coop2/c2x1/s4/serp8/swap/zig/fit/pdl",),
    128: ("sm90/256x176x64/coop2/c2x1/s4/serp8/swap/zig/streamk/fit/pdl",),
    256: (
        "sm90/256x176x64/coop2/c2x1/s4/serp8/swap/zig/streamk/fit/pdl",
        "sm90/256x160x64/coop2/c1x2/s4/serp8/swap/zig/streamk/fit/pdl",
    ),
    512: (
        "sm90/256x128x64/coop2/c2x1/s4/serp8/swap/zig/streamk/fit/pdl",
        "sm90/256x160x64/coop2/c1x2/s4/serp8/swap/zig/streamk/fit/pdl",
        "sm90/128x192x64/pp/c2x1/s5/serp8/swap/zig/fit/pdl",
    ),
}
"""In the shortlists of groups of so many rows, rounded up to a power of two: tiles that divide a group evenly
(docs/grouped_measured.md#tiles-that-fit-a-group)."""
FITTED_PAIRS = ("sm90/192x128x64/pp/c2x1/s5/serp8/swap/zig/fit/pdl",)
"""Compared for groups of `PAIRED_ROWS` rows, rounded up to a power of two, with one result of gate and up in pairs. On
an H200 it took 0.96 and 0.91 of the time of what was chosen for gpt-oss with 119 and 238 rows, and 1.01 with 476
(docs/grouped_measured.md#tiles-that-fit-a-group)."""
PAIRED_ROWS = (128, 256)
STREAMED_ROWS, LARGE_TILE = 256, 128 * 224
"""Rows of a group, rounded up to a power of two. In groups of `LARGE_GROUP` rows cooperative tiles of so many elements
are not compared otherwise: they took longer on an H200 than `_STREAMED`, where the model expects the opposite."""
MOST_SWAPPED = 128
"""Rows of D that a swapped tile has at most where a program has several results."""
LARGE_GROUP, MOST_TOKENS = 512, 96
"""For groups of so many rows, rounded up to a power of two, swapped tiles have at most so many tokens: wider ones took
10 % longer than 128 x 256 on an H200, where the model expects them to be as fast (docs/learning.md)."""
UNSWAPPED_ROWS = 64
"""From this many rows on, the shortlists have tiles whose operands are not swapped."""
FEW_SUMS = 1 << 19
"""Results of up to so many elements are computed by tiles with compensated sums alone, where operands are split into
parts: cuBLAS SGEMM, beside which their error is judged, splits K most there. By the cost model, which does not count
compensation, such tiles take up to an eighth longer."""
COMPENSATED_ROWS = 256
"""Larger results with more rows and columns than this are not computed by them: at 1024^3 in `bf16x6` an H200 took 35.7
us with tiles of 128x64, where the model expected 21.4. On 23 November, with the tile chosen then, it took 27.7 us. With
fewer rows or columns most other tiles would be mostly empty."""
COUNTED_WORKS = (*ROWS, RAGGED_N, MASKED)
"""Works of which nobody can know on the host how many tiles there are."""
RINGED_WORKS = (RAGGED_M, MASKED)
"""Works of groups of rows whose kernels load matrix operands of the epilogue through the ring (`ahead_plan`); tiles of
groups of K were not timed with them."""
STREAMED_WORKS = (RAGGED_M, SCATTERED)
"""Works of which `_STREAMED` computes groups of many rows, and `FITTED_ROWS` those of fewer, too."""
NUMBERS = tuple(range(2, 33))
"""The numbers of parts that a candidate may split K into."""
MOST_ROWS = 16
"""Rows beside a constant operand up to which `for_constant` deepens the ring, and `uses_constant` loads elements of one
byte early."""
MOST_STAGES = 16
"""That the rule of validity takes."""


@functools.lru_cache(maxsize=64)
def _with_shortlists(signature: Signature) -> tuple[str, ...]:
    """The candidates with shortlists, as they serve a signature."""
    texts = (*shortlists.configurations(), *_ROW_BY_ROW, *_IN_PARTS, *_STREAMED, *_BANDED, *_RINGED)
    texts += (*_GATED, *_GATED_LAYERS) if byte_candidates.is_divided(signature) else ()
    texts += _fitted(signature, [text for each in FITTED_ROWS.values() for text in each])
    texts += _WIDE if _takes_wide(signature) else ()
    texts += FITTED_PAIRS if _takes_pairs(signature) else ()
    return tuple(dict.fromkeys(_served(text, signature) for text in texts))


def _served(text: str, signature: Signature) -> str:
    """A candidate of 16 bits as it serves a signature: with k steps of as many bytes, and tiles that it takes."""
    is_odd = int(text.split("x", 2)[1]) % shortlists.WIDE_COLUMNS
    wide = is_odd and odd_eights(HopperConfig.parse(text), signature) is not None
    return shortlists.of_width(text, ITEMSIZE[signature.dtype], bool(wide))


@functools.lru_cache(maxsize=64)
def _split(signature: Signature) -> frozenset[str]:
    """Those of them that may have K split."""
    return frozenset(_served(text, signature) for text in (*shortlists.split(), *_IN_PARTS))


def listed(signature: Signature) -> tuple[str, ...]:
    """The candidates for a signature that the family takes."""
    texts = _as_listed(signature)
    return tuple(dict.fromkeys(_fitting(signature).values())) if _is_crowded(signature) else texts


def _fitted(signature: Signature, texts: Sequence[str]) -> tuple[str, ...]:
    """Those of `FITTED_ROWS` as they serve a signature; none with gate and up of a row-major B, which spill registers.
    The slabs of scattered rows leave no room for four stages of 176 rows. The buffers of several results leave none for
    four stages of more than 128. With three stages such tiles took 3 to 5 % longer on an H200 (mean of three draws).
    """
    if not _may_be_fitted(signature):
        return ()
    if len(signature.results) > 1:
        texts = [text.replace("256x176", "256x128").replace("256x160", "256x128") for text in texts]
    elif signature.work == SCATTERED:
        texts = [text.replace("256x176", "256x160") for text in texts]
    return tuple(dict.fromkeys(texts))


def _may_be_fitted(signature: Signature) -> bool:
    gated = signature.epilogue.gating == "halves" and signature.b_major == "n"
    return signature.work in STREAMED_WORKS and ITEMSIZE[signature.dtype] == 2 and not gated


def _gives_several(signature: Signature) -> bool:
    """Whether there are several results of gate and up."""
    return signature.epilogue.gating is not None and len(signature.results) > 1


def _takes_pairs(signature: Signature) -> bool:
    """Whether `FITTED_PAIRS` are compared for groups of a signature."""
    return signature.epilogue.gating == "pairs" and _may_be_fitted(signature) and len(signature.results) == 1


def _takes_wide(signature: Signature) -> bool:
    """Whether `_WIDE` is compared for groups of a signature."""
    if signature.work != RAGGED_M or not (_may_be_fitted(signature) and _gives_several(signature)):
        return False
    return any(each.m and not each.n for each in signature.epilogue.program.inputs)


def _is_crowded(signature: Signature) -> bool:
    """Whether more room in shared memory is needed than the candidates leave: for several results or one of four bytes,
    or for scales of blocks."""
    wide = signature.parts is None and ITEMSIZE[signature.out_dtype] > 2
    return len(signature.results) > 1 or wide or bool(signature.epilogue.program.block_scales)


def _as_listed(signature: Signature) -> tuple[str, ...]:
    if signature.parts is not None:
        return part_candidates.listed(signature)
    return byte_candidates.listed(signature) if ITEMSIZE[signature.dtype] == 1 else _with_shortlists(signature)


@functools.lru_cache(maxsize=64)
def _fitting(signature: Signature) -> Mapping[str, str]:
    """Each candidate as listed, and the same with fewer stages where the buffers of results need the room."""
    return {text: _with_room(text, signature) for text in _as_listed(signature)}


def _with_room(text: str, signature: Signature) -> str:
    config = HopperConfig.parse(text)
    return str(replace(config, stages=min(config.stages, max(most_stages(config, signature), 2))))


def most_stages(config: HopperConfig, signature: Signature) -> int:
    """How many stages, each with its scales of blocks of K, fit into shared memory beside the epilogue's buffers."""
    room = WHOLE_RING_BYTES - config.epilogue_bytes(signature)
    stage = config.stage_bytes(signature) + promotion.shared_bytes(config, signature) // config.stages
    return min(room // stage, MOST_STAGES)


def tries(config: HopperConfig, signature: Signature) -> bool:
    """Whether the tuner tries a configuration that is valid for a signature. With a constant operand it tries those
    alone that load it before the wait.
    """
    if signature.constant and not constant.uses_constant(config, signature):
        return False
    return ITEMSIZE[signature.dtype] > 1 or byte_candidates.tries(config, signature)


def stores_alike(config: HopperConfig, problem: Problem, other: Problem) -> bool:
    """See `Backend.stores_alike`: not where D goes through TMA for the other one alone."""
    return config.uses_tma_store(problem.signature) or not config.uses_tma_store(other.signature)


def uses_constant(config: HopperConfig, problem: Problem) -> bool:
    """Whether the kernel of a configuration makes use of the problem's constant operand.

    Elements of one byte in more than `MOST_ROWS` rows are loaded behind the wait with the others: on an H200 the
    promise cost products of 64 and 128 such rows up to 8 %.
    """
    if ITEMSIZE[problem.dtype] == 1 and _rows_beside_constant(problem) > MOST_ROWS:
        return False
    return constant.uses_constant(config, problem.signature)


def _rows_beside_constant(problem: Problem) -> int:
    """Rows, or columns, of the operand that is not constant."""
    return problem.n if problem.constant == "a" else problem.m


def for_constant(config: HopperConfig, problem: Problem, arch: Arch) -> HopperConfig:
    """What runs for a problem with a constant operand in the place of a configuration that was chosen without.

    Its kernel fills the ring before it waits. So with few rows a ring as deep as fits pays, where there is one wave of
    CTAs: on an H200 products of 1 to 16 rows with 4096 to 6144 columns took 8 to 19 % less time so than with rings of
    half the shared memory, which are the faster ones without a constant operand. With more rows it was not measured.
    """
    signature = problem.signature
    found = constant.for_constant(config, signature)
    if found is None or _rows_beside_constant(problem) > MOST_ROWS:
        return found or config
    if works(found, problem) > resident_clusters(arch, found.cluster_ctas):
        return found
    k_tiles = -(-problem.k // (found.bk * found.parts))
    for stages in range(min(most_stages(found, signature), k_tiles), found.stages, -1):
        deeper = replace(found, stages=stages)
        if deeper.smem_bytes(signature) <= arch.smem_per_cta:
            return deeper
    return found


def shortlist(signature: Signature, arch: Arch, m: int, n: int, k: int, batch: int) -> list[shortlists.Candidate]:
    """Those to compare for about these sizes, and whether with K split; none where all are compared."""
    if signature.parts is not None and m * n * batch <= FEW_SUMS:
        return _in_parts(signature, True)
    if signature.parts is not None and min(m, n) > COMPENSATED_ROWS:
        return _in_parts(signature, False)
    if signature.parts is not None:
        return []
    itemsize = ITEMSIZE[signature.dtype]
    elements, k = k, k * itemsize // 2  # of 16 bits
    found = shortlists.shortlist(arch, signature.majors, m, n, k, batch)
    if signature.work in (*ROWS, MASKED) and m >= LARGE_GROUP:
        found = [each for each in found if not _is_swapped_beyond(each[0], MOST_TOKENS)]
    if itemsize == 1:
        return _as_they_fit(byte_candidates.shortlist(signature, found, m, elements), signature)
    if signature.work in COUNTED_WORKS and m <= UNSWAPPED_ROWS:
        found += ((text, False) for text in _OF_GROUPS)
    if signature.work in STREAMED_WORKS and m >= LARGE_GROUP:
        found = [each for each in found if not _is_large(each[0])]
    if signature.work in STREAMED_WORKS and m >= STREAMED_ROWS:
        found += ((text, False) for text in (*(_BANDED if signature.epilogue.gating else ()), *_STREAMED))
    if len(signature.epilogue.matrices) > 1 and signature.work in RINGED_WORKS:
        found += ((text, False) for text in _RINGED if m >= RINGED_ROWS)
    else:
        # The large tiles that larger groups take spill registers with several results of gate and up, or lack a stage.
        rows = min(m, LARGE_GROUP) if _gives_several(signature) else m
        found += ((text, False) for text in _fitted(signature, FITTED_ROWS.get(rows, ())))
    found += beside_cells(m, n, k, batch)
    if signature.epilogue.gating and m < UNSWAPPED_ROWS:
        # Few of the swapped tiles, which fill the shortlists of few rows, can hold gate and up.
        found += shortlists.shortlist(arch, signature.majors, UNSWAPPED_ROWS, n, k, batch)
    if byte_candidates.is_divided(signature):
        found += ((text, False) for text in (_GATED if m <= UNSWAPPED_ROWS else _GATED_LAYERS))
    if signature.epilogue.custom is not None:
        # A plain product in one round takes as long with either schedule; a program takes longer in ping-pong.
        twins = [(text.replace("/pp/", "/coop2/"), split) for text, split in found]
        found += (each for each in twins if each[0] in shortlists.configurations())
    if signature.epilogue.gating == "pairs" and signature.work == DENSE:
        # Of some cells hardly any tile can hold pairs; wider products have tiles that neither swap nor divide K.
        found += shortlists.shortlist(arch, signature.majors, m, 4 * n, k, batch)
    packs = any(map(signature.epilogue.program.uses, PACKERS))  # two results in one
    # Wider ones keep 8 to 112 bytes of registers in local memory with some programs.
    if packs or len(signature.results) > 1:
        found = [each for each in found if not _is_swapped_beyond(each[0], MOST_SWAPPED)]
    if signature.epilogue.gating == "pairs":
        if signature.work != DENSE:  # as halves are, whose swapped tiles were timed
            found = [each for each in found if not _is_swapped_beside_halves(each[0])]
        found += ((text, False) for text in (FITTED_PAIRS if m in PAIRED_ROWS and _takes_pairs(signature) else ()))
    if m == WIDE_ROWS and _takes_wide(signature):
        found += ((text, False) for text in _WIDE)
    return _as_they_fit([(_served(text, signature), split) for text, split in found], signature)


def _is_swapped_beyond(text: str, most: int) -> bool:
    config = HopperConfig.parse(text)
    return config.swapped and config.bn > most


def _is_swapped_beside_halves(text: str) -> bool:
    """Whether it is a swapped tile that has no room for gate and up in halves. Groups do not compare these.

    Those of 192 rows, which the model takes to be fastest for pairs, took 6 % longer on an H200 than 128x48 with 32
    experts of gpt-oss and 1024 rows, and 8 % longer than 128x256 with 16384.
    """
    config = HopperConfig.parse(text)
    return config.swapped and config.group_rows % (2 * BLOCK_ROWS) != 0


def _is_large(text: str) -> bool:
    config = HopperConfig.parse(text)
    return not config.ping_pong and config.bm * config.bn >= LARGE_TILE


def _as_they_fit(named: list[shortlists.Candidate], signature: Signature) -> list[shortlists.Candidate]:
    """Each once, with the stages that fit."""
    if _is_crowded(signature):
        fitting = _fitting(signature)
        named = [(fitting[text], split) for text, split in named]
    return list(dict.fromkeys(named))


def beside_cells(m: int, n: int, k: int, batch: int) -> list[shortlists.Candidate]:
    """Candidates besides those of `shortlists`: where writing D takes most of the time, and where there are too few
    tiles for the SMs and K is long; sizes are powers of two.
    """
    if m * n * batch >= LARGE_RESULT and k <= SHORT_SUM:
        return [(text, False) for text in _ROW_BY_ROW]
    if m * n * batch <= SMALL_RESULT and k >= LONG_SUM:
        return [(text, True) for text in _IN_PARTS]
    return []


@functools.lru_cache(maxsize=64)
def _in_parts(signature: Signature, compensated: bool) -> list[shortlists.Candidate]:
    """Candidates for fp32 operands in parts, those whose sums are compensated or the others; each also with K split,
    where it may be."""
    found = [
        text for text in listed(signature) if promotion.compensates(HopperConfig.parse(text), signature) is compensated
    ]
    return [(text, split) for text in found for split in (False, True) if not split or splits(text, signature)]


def splits(text: str, signature: Signature) -> tuple[int, ...]:
    """The splits of K, ascending, that a candidate may have as well as none."""
    texts = [text]
    if _is_crowded(signature):
        texts = [one for one, fits in _fitting(signature).items() if fits == text]
    return NUMBERS if any(_may_split(one, signature) for one in texts) else ()


def _may_split(text: str, signature: Signature) -> bool:
    if signature.parts is not None:
        return part_candidates.may_split(text)
    return byte_candidates.may_split(text, signature) if ITEMSIZE[signature.dtype] == 1 else text in _split(signature)
