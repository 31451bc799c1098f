"""The candidates of the family sm80: what the cost model chooses among when nothing was measured."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from cutegemm.cute.ampere.config import AmpereConfig
from cutegemm.problem import ITEMSIZE
from cutegemm.problem.work import DENSE

if TYPE_CHECKING:
    from cutegemm.problem import Signature

_16_BIT = (
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
_BESIDE = (
    "sm80/16x16x64/w16x16/s4/g8",
    "sm80/16x32x64/w16x16/s4/g8",
    "sm80/16x32x128/w16x16/s3/g8",
    "sm80/32x32x64/w16x16/s4/g8",
    "sm80/32x32x32/w16x16/s5/g8",
    "sm80/32x64x64/w16x32/s4/g8",
    "sm80/64x32x64/w32x16/s4/g8",
    "sm80/64x64x64/w32x32/s4/g8",
)
_TINY, _SHALLOW = 1 << 19, 512
"""The most outputs, and the most k, for which they are compared: beyond, they won 3 % at most on an H200."""
_OF_BATCHES = 1 << 12
"""The most outputs of each matrix of a batch of any size: there sweeps of 256 matrices found them ahead."""
_TF32 = (
    "sm80/128x128x32/w64x32/s4/g8",
    "sm80/128x128x16/w64x32/s3/g8",
    "sm80/128x64x32/w64x32/s3/g8",
    "sm80/64x128x32/w32x64/s3/g8",
    "sm80/64x64x32/w32x32/s3/g8",
    "sm80/64x32x32/w32x16/s4/g8",
    "sm80/32x32x32/w16x16/s5/g8",
)
_BF16_PARTS = (
    "sm80/128x128x32/w64x32/s3/g8",
    "sm80/128x128x32/w64x32/s2/g8",
    "sm80/128x64x32/w64x32/s4/g8",
    "sm80/128x64x32/w64x32/s2/g8",
    "sm80/64x128x32/w64x32/s2/g8",
    "sm80/64x64x32/w32x32/s3/g8",
    "sm80/64x64x32/w32x32/s2/g8",
    "sm80/64x32x32/w32x16/s4/g8",
    "sm80/32x64x32/w16x32/s4/g8",
    "sm80/32x32x32/w16x16/s5/g8",
)
_TF32_PARTS = (
    "sm80/128x128x32/w64x32/s2/g8",
    "sm80/128x64x32/w64x32/s3/g8",
    "sm80/128x64x32/w64x32/s2/g8",
    "sm80/64x128x32/w64x32/s2/g8",
    "sm80/64x64x32/w32x32/s3/g8",
    "sm80/64x64x32/w32x32/s2/g8",
    "sm80/64x32x32/w32x16/s4/g8",
    "sm80/32x64x32/w16x32/s4/g8",
    "sm80/32x32x32/w16x16/s5/g8",
)
"""Of operands that are split into parts: rings as deep as shared memory allows, and two stages for two CTAs an SM.
Nothing here was measured."""
_BYTES = (
    "sm80/128x128x128/w64x32/s3/g8",
    "sm80/128x64x128/w64x32/s3/g8",
    "sm80/64x128x128/w32x64/s3/g8",
    "sm80/128x64x128/w32x32/s3/g8",
    "sm80/64x64x128/w32x32/s4/g8",
    "sm80/64x32x128/w32x16/s4/g8",
    "sm80/32x64x128/w16x32/s4/g8",
    "sm80/32x32x128/w16x16/s4/g8",
)
"""They fit the shared memory of every GPU, and promoted sums. Nothing here was measured yet."""
_INT8 = (
    "sm80/128x256x64/w64x64/s4/g8",
    "sm80/256x128x64/w64x64/s4/g8",
    "sm80/128x128x64/w64x64/s4/g8",
    *_BYTES,
    "sm80/64x64x64/w32x32/s5/g8",
    "sm80/32x32x64/w16x16/s5/g8",
)
_BY_UNIT = {"float16": _16_BIT, "bfloat16": _16_BIT, "tfloat32": _TF32, "int8": _INT8, "float8": _BYTES}
_MOST_COPIES = {64 * 64: 18, 64 * 32: 36}
"""By the warp tile: the most copies of a stage, of both operands, that a thread has registers for, since each has an
address of its own; of smaller warp tiles `_MOST_OF_SMALL`. With more, an H200 took 549 us for 2737x64x7969 with both
operands K-major in 128x64x64, and 77 in 64x64x32; 53 us for 1128x128x6114, and 17."""
_MOST_OF_SMALL = 48
NUMBERS = tuple(range(2, 33))
"""The numbers of parts that a candidate may split K into."""


def listed(signature: Signature) -> tuple[str, ...]:
    """The candidates for a signature that the family takes."""
    if signature.parts is not None:
        return _BF16_PARTS if signature.parts.element == "bf16" else _TF32_PARTS
    found = _BY_UNIT[signature.unit]
    aligns = (signature.align_a, signature.align_b)
    if min(aligns) >= 16 or ITEMSIZE[signature.dtype] == 1:
        return found
    return tuple(text for text in found if not _spills(text, ITEMSIZE[signature.dtype], aligns))


@functools.cache
def _spills(text: str, size: int, aligns: tuple[int, int]) -> bool:
    """Whether copies as narrow as operands of these alignment classes have too many addresses a thread."""
    config = AmpereConfig.parse(text)
    sides = zip((config.bm, config.bn), aligns, strict=True)
    copies = sum(extent * config.bk * size // (align * config.threads) for extent, align in sides)
    return copies > _MOST_COPIES.get(config.wm * config.wn, _MOST_OF_SMALL)


def splits(text: str, signature: Signature) -> tuple[int, ...]:
    """The splits of K, ascending, that a candidate may have as well as none."""
    return NUMBERS if signature.work == DENSE else ()


def beside(signature: Signature) -> tuple[str, ...]:
    """The candidates that stand beside those of sm90: a tiny product has no use for a ring that TMA fills, and begins
    sooner without it. An H200 takes 1.25 us for 64^3 in bf16, and 1.54 with sm90's fastest.
    """
    plain = signature.work == DENSE and signature.epilogue.custom is None and not signature.constant
    return _BESIDE if plain and signature.dtype in ("bf16", "fp16") else ()


def worth_comparing(m: int, n: int, k: int, batch: int) -> bool:
    """Whether those can win at about these sizes."""
    return k <= _SHALLOW and (m * n * batch <= _TINY or m * n <= _OF_BATCHES)
