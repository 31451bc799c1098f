"""The configuration each family takes when nothing was measured: the largest tile that still gives every SM work.

The lists are ordered from large to small. Those at the head are the fastest measured on an H200 at 4096^3 and 8192^3;
none spills for the signatures it is listed for (tests/compile).
"""

from __future__ import annotations

from cutegemm.problem import Signature

_HOPPER = (
    "sm90/128x256x64/coop2/c2x1/s4/hilbert",
    "sm90/128x128x64/coop2/c2x1/s5/hilbert",
    "sm90/128x128x64/coop2/c1x1/s5/serp8",
    "sm90/64x128x64/coop1/c1x1/s6/serp8",
    "sm90/64x64x64/coop1/c1x1/s8/serp8",
    "sm90/64x32x64/coop1/c1x1/s8/serp8",
)
_TENSOR_CORES = (
    "sm80/128x256x64/w64x64/s3/g8",
    "sm80/128x128x32/w64x64/s4/g8",
    "sm80/128x64x32/w64x32/s4/g8",
    "sm80/64x64x32/w32x32/s5/g8",
    "sm80/64x32x32/w32x16/s5/g8",
    "sm80/32x32x32/w16x16/s5/g8",
)
_TF32 = (
    "sm80/128x128x32/w64x32/s4/g8",
    "sm80/128x128x16/w64x32/s3/g8",
    "sm80/64x64x32/w32x32/s3/g8",
    "sm80/32x32x32/w16x16/s5/g8",
)
_SIMT = (
    "simt/256x128x16/w64x64/s3/g8",
    "simt/128x128x8/w32x64/s4/g8",
    "simt/64x64x8/w16x32/s4/g8",
    "simt/32x32x8/w16x32/s4/g8",
)


def hopper(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.hopper`, largest first; not measured yet."""
    return _HOPPER


def ampere(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.ampere`, largest first."""
    return _TF32 if signature.dtype == "fp32" else _TENSOR_CORES


def simt(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.simt`, largest first."""
    return _SIMT
