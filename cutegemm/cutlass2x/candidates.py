"""The candidates of the CUTLASS 2.x kernels: what the heuristic chooses among when nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cutegemm.cutlass2x.config import TAKES, Cutlass2xConfig, narrowed

if TYPE_CHECKING:
    from cutegemm.problem import Signature

# Largest first; the first that is valid and gives every SM a tile is taken. Each list ends in the one that suits all.
_16_BIT = (
    "128x256x64/w64x64x64/s3/i16x8x16/id4",
    "128x128x32/w64x64x32/s4/i16x8x16/id4",
    "128x64x32/w64x32x32/s4/i16x8x16/id2",
    "64x64x32/w32x32x32/s5/i16x8x16/id1",
    "64x32x32/w32x32x32/s5/i16x8x16/id1",
)
_TF32 = (
    "128x128x16/w64x64x16/s4/i16x8x8/id4",
    "128x64x16/w64x32x16/s4/i16x8x8/id2",
    "64x64x16/w32x32x16/s4/i16x8x8/id1",
)
_SIMT = (
    "256x128x8/w64x64x8/s4/i1x1x1/id4",
    "128x128x8/w32x64x8/s4/i1x1x1/id4",
    "64x64x8/w32x32x8/s4/i1x1x1/id1",
    "32x32x8/w16x32x8/s4/i1x1x1/id1",
)
_BY_UNIT = {"float16": _16_BIT, "bfloat16": _16_BIT, "tfloat32": _TF32, "float32": _SIMT}


def listed(signature: Signature) -> Iterator[Cutlass2xConfig]:
    """The candidates for a signature, before the validity rule; none for one that the backend does not take."""
    texts = _BY_UNIT[signature.unit] if signature.kind in TAKES else ()
    return (narrowed(Cutlass2xConfig.parse(f"cutlass2x/{text}"), signature) for text in texts)
