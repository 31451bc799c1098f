"""The candidates of the family simt: what the cost model chooses among when nothing was measured."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from cutegemm.cute.simt.config import SimtConfig
from cutegemm.cute.simt.registers import is_narrow
from cutegemm.problem.work import DENSE, MASKED, ROWS

if TYPE_CHECKING:
    from cutegemm.problem import Signature

_FP32 = (
    "simt/256x128x16/w64x64/s3/g8",
    "simt/128x256x16/w64x64/s3/g8",
    "simt/128x128x8/w64x32/s4/g8/r2",
    "simt/64x128x16/w32x64/s3/g8/r3",
    "simt/64x64x16/w32x64/s2/g8/r6",
    "simt/128x64x8/w32x64/s3/g8",
    "simt/64x128x16/w32x32/s3/g8/r2",
    "simt/64x128x8/w32x64/s3/g8/r3",
    "simt/64x64x16/w32x32/s2/g8/r4",
    "simt/64x64x16/w32x32/s3/g8/r4",
    "simt/64x64x8/w32x32/s2/g8/r4",
    "simt/64x64x8/w32x32/s3/g8/r4",
    "simt/128x128x8/w64x64/s4/g8",
    "simt/128x64x8/w64x64/s3/g8",
    "simt/128x64x8/w64x64/s2/g8",
    "simt/64x128x8/w64x64/s3/g8",
    "simt/128x32x16/w64x32/s2/g8/r6",
    "simt/32x128x16/w32x64/s2/g8/r6",
    "simt/32x64x16/w32x64/s2/g8/r12",
    "simt/32x128x8/w32x64/s3/g8",
    "simt/32x64x16/w16x32/s3/g8",
    "simt/64x32x16/w32x32/s2/g8/r7",
    "simt/32x64x16/w32x32/s2/g8/r7",
    "simt/64x32x32/w32x32/s4/g8/x2",
    "simt/32x64x32/w16x32/s4/g8/x2",
    "simt/32x32x64/w32x32/s3/g8/x4",
    "simt/32x32x32/w16x32/s3/g8/x2",
    "simt/32x32x32/w16x32/s4/g8/x4",
    "simt/64x64x32/w32x64/s2/g8/x2",
    "simt/32x64x32/w32x32/s2/g8/x2",
    "simt/16x32x32/w16x32/s4/g8/x4",
    "simt/16x32x64/w16x32/s4/g8/x8",
    "simt/16x32x128/w16x32/s4/g8/x8",
)
_SPILLS = {
    "simt/128x32x16/w64x32/s2/g8/r6": ("tn",),
    "simt/32x64x16/w32x64/s2/g8/r12": ("tn",),
}
"""Majors with which these kernels keep 18 registers or more in local memory."""
_NOT_NARROW = {
    "simt/128x32x16/w64x32/s2/g8/r6": ("tt",),
    "simt/32x128x16/w32x64/s2/g8/r6": ("tn", "tt"),
    "simt/32x64x16/w32x64/s2/g8/r12": ("tt", "nn"),
    "simt/128x128x8/w64x32/s4/g8/r2": ("nn",),
    "simt/64x128x16/w32x64/s3/g8/r3": ("tn",),
    "simt/64x64x16/w32x32/s2/g8/r4": ("tn",),
    "simt/64x64x16/w32x32/s3/g8/r4": ("tn",),
    "simt/64x64x8/w32x32/s2/g8/r4": ("tn",),
    "simt/64x64x8/w32x32/s3/g8/r4": ("tn",),
    "simt/64x128x16/w32x32/s3/g8/r2": ("tn",),
    "simt/64x128x8/w32x64/s3/g8/r3": ("tn",),
    "simt/64x32x16/w32x32/s2/g8/r7": ("tn",),
    "simt/32x64x16/w32x32/s2/g8/r7": ("tn",),
}
"""Majors with which these kernels keep some registers in local memory where rows of A or B are not aligned to 16 bytes:
a thread then makes more copies, each with an address. Tiles with 128 sums a thread keep up to six there, and some with
aligned rows (256x128 six with `nn`, 64x128 four with `tn`, 128x128 two with `nn`). They are taken all the same: no
other has as many outputs a thread."""
_NARROW_TN = ("simt/64x64x16/w32x32/s3/g8/r3", "simt/64x64x8/w32x32/s2/g8/r3")
"""Take the place of some of those for `tn`."""
_SPILLS_SPLIT = {
    "simt/32x128x16/w32x64/s2/g8/r6": ("tt",),
    "simt/32x64x16/w32x64/s2/g8/r12": ("tt",),
    "simt/64x128x16/w32x64/s3/g8/r3": ("tn", "tt"),
    "simt/64x128x16/w32x32/s3/g8/r2": ("tt",),
    "simt/64x128x8/w32x64/s3/g8/r3": ("tn",),
    "simt/64x64x16/w32x64/s2/g8/r6": ("tt",),
    "simt/64x64x8/w32x32/s2/g8/r4": ("tn",),
    "simt/64x64x8/w32x32/s3/g8/r4": ("tn",),
    "simt/128x128x8/w64x32/s4/g8/r2": ("nn",),
}
"""Majors with which these kernels keep some registers in local memory where K is split. So does, by two to four and
for some numbers of parts, `64x128x16/w32x32/s3/g8/r2` with `tn`; an H200 took 56 us with it (and three parts) and 66
without the bound at 300x1000x3000, so it is taken all the same. `32x64x16/w32x64/s2/g8/r12` keeps two
registers there with `nn`, and is taken as well."""
_SPILLS_SPLIT_NARROW = {
    "simt/128x64x8/w64x64/s3/g8": ("nn",),
    "simt/64x128x8/w64x64/s3/g8": ("tn", "tt"),
    "simt/32x128x16/w32x64/s2/g8/r6": ("nn",),
    "simt/64x128x16/w32x64/s3/g8/r3": ("nn",),
    "simt/64x128x8/w32x64/s3/g8/r3": ("tt", "nn"),
    "simt/64x64x16/w32x64/s2/g8/r6": ("tn", "nn"),
    "simt/32x128x8/w32x64/s3/g8": ("tn", "nn"),
    "simt/64x32x16/w32x32/s2/g8/r7": ("tt",),
    "simt/32x64x16/w32x32/s2/g8/r7": ("nn",),
    "simt/64x64x16/w32x32/s2/g8/r4": ("nt",),
}
"""Further ones where, besides, rows of A or B are not aligned to 16 bytes."""

_SPILLS_IN_GROUPS = {"simt/32x128x16/w32x64/s2/g8/r6": ("tn",)}
"""Majors with which this kernel keeps 28 registers in local memory where a CTA has to find its group of columns, when
compiled for an A100."""

_IN_GROUPS = (
    "simt/128x256x16/w64x64/s3/g8",
    "simt/128x128x8/w64x64/s4/g8",
    "simt/64x128x16/w32x64/s3/g8/r3",
    "simt/64x128x8/w32x64/s3/g8/r3",
    "simt/64x64x16/w32x64/s2/g8/r6",
    "simt/64x32x32/w32x32/s4/g8/x2",
    "simt/32x64x32/w32x32/s2/g8/x2",
    "simt/32x32x64/w32x32/s3/g8/x4",
    "simt/16x32x32/w16x32/s4/g8/x4",
)
"""Of groups of rows. An H200 was never faster with another one in eleven such products, and the factors of `footprint`
were read off these."""

_UNSPLIT = ("simt/128x64x8/w64x64/s2/g8",)
"""Never split: `SimtConfig.why_invalid` refuses it. The same tile with a stage more may be split."""

_FEW = tuple(range(2, 34))
NUMBERS = (*_FEW, 36, 44, 54, 66)
"""The numbers of parts that a candidate may split K into; one of fewer than 8 warps takes none above 33. Its last CTA
adds up what the others left: with 44 parts an H200 took 122 us for 944x48x23056, where 26 parts took 78."""


def listed(signature: Signature) -> tuple[str, ...]:
    """The candidates for a signature that the family takes."""
    if signature.work in (*ROWS, MASKED):
        return tuple(text for text in _IN_GROUPS if not (is_narrow(signature) and _spills_narrow(text, signature)))
    tables = (_SPILLS,) if signature.work == DENSE else (_SPILLS, _SPILLS_IN_GROUPS)
    found = tuple(text for text in _FP32 if all(signature.majors not in table.get(text, ()) for table in tables))
    if is_narrow(signature):
        found = tuple(text for text in found if not _spills_narrow(text, signature))
        found += _NARROW_TN if signature.majors == "tn" else ()
    return found


def _spills_narrow(text: str, signature: Signature) -> bool:
    return signature.majors in _NOT_NARROW.get(text, ())


def splits(text: str, signature: Signature) -> tuple[int, ...]:
    """The splits of K, ascending, that a candidate may have as well as none."""
    if text in _UNSPLIT or signature.work != DENSE:
        return ()
    tables = (_SPILLS_SPLIT, _SPILLS_SPLIT_NARROW) if is_narrow(signature) else (_SPILLS_SPLIT,)
    if any(signature.majors in table.get(text, ()) for table in tables):
        return ()
    return _numbers(text)


@functools.cache
def _numbers(text: str) -> tuple[int, ...]:
    return NUMBERS if SimtConfig.parse(text).threads >= 256 else _FEW
