"""The configurations each family may take when nothing was measured: the cost model chooses among them.

They are few beside the whole space, so that a choice costs microseconds, and differ in what matters: the tile and the
cluster, and with them how a small problem fills the SMs. `splits` says of which there are split-K variants. None spills
for the signatures it is listed for (tests/compile).
"""

from __future__ import annotations

from cutegemm.problem import Signature

_HOPPER = (
    "sm90/256x208x64/coop2/c1x2/s3/serp8/pdl",
    "sm90/256x208x64/coop2/c2x1/s3/serp8/pdl",
    "sm90/256x192x64/coop2/c1x2/s3/serp8/zig/pdl",
    "sm90/256x160x64/coop2/c2x1/s4/serp8/pdl",
    "sm90/256x128x64/coop2/c1x2/s4/serp8/zig/pdl",
    "sm90/128x256x64/coop2/c1x1/s4/serp8/pdl",
    "sm90/128x256x64/coop2/c2x1/s4/serp8/zig/pdl",
    "sm90/192x160x64/coop3/c1x2/s4/serp8/pdl",
    "sm90/128x224x64/coop2/c1x1/s4/serp8/pdl",
    "sm90/128x208x64/coop2/c2x1/s4/serp8/pdl",
    "sm90/256x96x64/coop2/c1x1/s4/serp8/pdl",
    "sm90/256x96x64/coop2/c1x2/s4/serp8/swap/pdl",
    "sm90/256x96x64/pp/c1x2/s4/serp8/swap/pdl",
    "sm90/192x128x64/pp/c1x4/s4/serp8/pdl",
    "sm90/128x192x64/coop1/c1x2/s5/serp8/pdl",
    "sm90/128x192x64/pp/c2x1/s4/serp8/pdl",
    "sm90/128x176x64/coop2/c2x2/s5/serp8/pdl",
    "sm90/128x160x64/pp/c1x2/s5/serp8/pdl",
    "sm90/192x96x64/coop3/c1x2/s5/serp8/swap/pdl",
    "sm90/192x96x64/coop3/c2x1/s5/serp8/swap/pdl",
    "sm90/192x96x64/pp/c1x2/s5/serp8/swap/pdl",
    "sm90/128x144x64/coop2/c2x1x2/s5/row/pdl",
    "sm90/128x128x64/coop2/c2x1/s6/serp8/pdl",
    "sm90/128x128x64/coop2/c2x2x2/s7/row/pdl",
    "sm90/128x128x64/pp/c1x1/s6/serp8/pdl",
    "sm90/128x128x64/pp/c4x1/s5/serp8/pdl",
    "sm90/128x112x64/coop2/c1x2/s6/serp8/swap/pdl",
    "sm90/128x112x64/coop2/c1x4/s6/serp8/pdl",
    "sm90/64x224x64/coop1/c1x4/s5/serp8/pdl",
    "sm90/192x64x64/coop1/c2x2x2/s7/row/pdl",
    "sm90/192x64x64/coop1/c4x1/s6/serp8/pdl",
    "sm90/128x96x64/coop2/c1x1/s7/serp8/pdl",
    "sm90/128x96x64/coop2/c2x2/s7/serp8/swap/pdl",
    "sm90/128x96x64/pp/c1x2/s6/serp8/swap/pdl",
    "sm90/128x96x64/pp/c4x1/s7/serp8/swap/pdl",
    "sm90/128x96x128/coop2/c2x1/s3/row/pdl",
    "sm90/64x192x64/coop1/c4x1/s6/serp8/pdl",
    "sm90/64x192x64/pp/c2x2/s6/serp8/pdl",
    "sm90/64x144x64/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x144x64/coop1/c2x1x2/s8/row/pdl",
    "sm90/64x144x64/coop1/c2x2/s8/serp8/pdl",
    "sm90/64x128x64/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x128x64/coop1/c1x4/s8/serp8/swap/pdl",
    "sm90/64x128x64/coop1/c2x1/s8/row/swap/pdl",
    "sm90/64x128x64/pp/c1x1/s7/serp8/pdl",
    "sm90/64x128x64/pp/c2x2/s7/serp8/pdl",
    "sm90/64x96x64/coop1/c1x4/s8/serp8/pdl",
    "sm90/64x96x64/coop1/c4x1/s8/serp8/pdl",
    "sm90/64x96x64/pp/c1x4/s8/serp8/swap/pdl",
    "sm90/64x96x64/pp/c4x1/s8/serp8/pdl",
    "sm90/64x96x64/pp/c4x1/s8/serp8/swap/pdl",
    "sm90/64x96x128/coop1/c1x1x4/s5/row/swap/pdl",
    "sm90/64x96x128/coop1/c2x1/s5/serp8/pdl",
    "sm90/64x96x128/pp/c4x1/s5/serp8/pdl",
    "sm90/64x64x64/coop1/c1x4/s8/serp8/pdl",
    "sm90/64x64x64/coop1/c4x1/s8/serp8/pdl",
    "sm90/64x64x128/coop1/c1x2/s6/serp8/swap/pdl",
    "sm90/64x48x64/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/64x48x64/coop1/c1x2x2/s12/row/pdl",
    "sm90/64x48x64/coop1/c2x1/s8/serp8/swap/pdl",
    "sm90/64x48x64/coop1/c2x1x2/s12/row/pdl",
    "sm90/64x48x64/pp/c2x2/s8/serp8/swap/pdl",
    "sm90/64x48x128/coop1/c1x1x4/s8/row/pdl",
    "sm90/64x48x128/coop1/c1x4/s7/serp8/pdl",
    "sm90/64x48x128/coop1/c1x4/s7/serp8/swap/pdl",
    "sm90/64x48x128/coop1/c2x1/s7/row/swap/pdl",
    "sm90/64x32x64/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x32x64/coop1/c2x1/s8/serp8/swap/pdl",
    "sm90/64x32x64/coop1/c2x2x2/s12/row/pdl",
    "sm90/64x32x128/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/64x32x128/coop1/c1x1x4/s9/row/pdl",
    "sm90/64x32x128/coop1/c2x1/s8/serp8/pdl",
    "sm90/64x16x64/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x16x64/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/64x16x64/coop1/c2x2/s8/serp8/pdl",
    "sm90/64x16x64/pp/c1x1/s8/serp8/pdl",
    "sm90/64x16x128/coop1/c1x1/s5/row/swap/once/skew/pdl",
    "sm90/64x16x128/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/64x16x128/coop1/c1x1x2/s10/row/swap/pdl",
    "sm90/64x16x128/coop1/c1x1x2/s11/row/pdl",
    "sm90/64x16x128/coop1/c1x1x4/s11/row/pdl",
    "sm90/64x16x128/coop1/c1x2/s8/serp8/swap/pdl",
)
_HOPPER_TF32 = (
    "sm90/128x256x32/coop2/c2x1/s4/serp8/zig/pdl",
    "sm90/128x256x32/coop2/c1x1/s4/serp8/pdl",
    "sm90/256x128x32/coop2/c1x2/s4/serp8/zig/pdl",
    "sm90/256x192x32/coop2/c1x2/s3/serp8/zig/pdl",
    "sm90/128x192x32/pp/c2x1/s4/serp8/pdl",
    "sm90/128x128x32/pp/c2x1/s6/serp8/pdl",
    "sm90/128x128x32/coop2/c1x1/s6/serp8/pdl",
    "sm90/64x128x32/coop1/c1x1/s8/serp8/pdl",
    "sm90/128x64x32/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x64x64/coop1/c1x1/s6/serp8/pdl",
    "sm90/64x32x64/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x16x64/coop1/c1x1/s8/serp8/pdl",
    "sm90/64x32x64/coop1/c1x1/s8/serp8/swap/pdl",
    "sm90/64x16x64/coop1/c1x1/s8/serp8/swap/pdl",
)
_TENSOR_CORES = (
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
_TF32 = (
    "sm80/128x128x32/w64x32/s4/g8",
    "sm80/128x128x16/w64x32/s3/g8",
    "sm80/128x64x32/w64x32/s3/g8",
    "sm80/64x128x32/w32x64/s3/g8",
    "sm80/64x64x32/w32x32/s3/g8",
    "sm80/64x32x32/w32x16/s4/g8",
    "sm80/32x32x32/w16x16/s5/g8",
)
_SIMT = (
    "simt/256x128x16/w64x64/s3/g8",
    "simt/128x128x16/w64x32/s3/g8",
    "simt/128x128x8/w32x64/s4/g8",
    "simt/128x64x16/w32x32/s3/g8",
    "simt/64x128x16/w32x32/s3/g8",
    "simt/64x64x16/w32x32/s3/g8",
    "simt/64x64x8/w32x32/s4/g8",
    "simt/64x32x16/w16x32/s3/g8",
    "simt/32x64x16/w16x32/s3/g8",
    "simt/32x32x16/w16x32/s4/g8",
    "simt/32x32x8/w16x32/s4/g8",
    "simt/64x32x32/w16x32/s4/g8/x2",
    "simt/32x64x32/w16x32/s4/g8/x2",
    "simt/32x32x64/w32x32/s3/g8/x4",
    "simt/32x32x32/w16x32/s3/g8/x2",
    "simt/16x32x64/w16x32/s4/g8/x8",
)
_SPLIT = frozenset(
    (
        "sm90/256x208x64/coop2/c1x2/s3/serp8/pdl",
        "sm90/256x160x64/coop2/c2x1/s4/serp8/pdl",
        "sm90/192x160x64/coop3/c1x2/s4/serp8/pdl",
        "sm90/128x208x64/coop2/c2x1/s4/serp8/pdl",
        "sm90/256x96x64/coop2/c1x2/s4/serp8/swap/pdl",
        "sm90/128x176x64/coop2/c2x2/s5/serp8/pdl",
        "sm90/192x96x64/coop3/c2x1/s5/serp8/swap/pdl",
        "sm90/128x144x64/coop2/c2x1x2/s5/row/pdl",
        "sm90/128x128x32/coop2/c1x1/s6/serp8/pdl",
        "sm90/128x128x64/coop2/c2x1/s6/serp8/pdl",
        "sm90/128x128x64/coop2/c2x2x2/s7/row/pdl",
        "sm90/128x112x64/coop2/c1x2/s6/serp8/swap/pdl",
        "sm90/64x224x64/coop1/c1x4/s5/serp8/pdl",
        "sm90/192x64x64/coop1/c2x2x2/s7/row/pdl",
        "sm90/128x96x64/coop2/c1x1/s7/serp8/pdl",
        "sm90/128x96x64/coop2/c2x2/s7/serp8/swap/pdl",
        "sm90/128x96x128/coop2/c2x1/s3/row/pdl",
        "sm90/64x192x64/coop1/c4x1/s6/serp8/pdl",
        "sm90/64x144x64/coop1/c2x2/s8/serp8/pdl",
        "sm90/64x128x64/coop1/c2x1/s8/row/swap/pdl",
        "sm90/64x64x64/coop1/c1x1/s6/serp8/pdl",
        "sm90/64x64x64/coop1/c4x1/s8/serp8/pdl",
        "sm90/64x48x64/coop1/c1x1/s8/serp8/swap/pdl",
        "sm90/64x48x64/coop1/c1x2x2/s12/row/pdl",
        "sm90/64x48x64/coop1/c2x1/s8/serp8/swap/pdl",
        "sm90/64x48x128/coop1/c2x1/s7/row/swap/pdl",
        "sm90/64x32x64/coop1/c1x1/s8/serp8/pdl",
        "sm90/64x32x64/coop1/c2x2x2/s12/row/pdl",
        "sm90/64x32x128/coop1/c1x1/s8/serp8/swap/pdl",
        "sm90/64x16x64/coop1/c1x1/s8/serp8/swap/pdl",
        "sm90/64x16x128/coop1/c1x1x2/s10/row/swap/pdl",
    )
)
_NUMBERS = tuple(range(2, 33))
"""Every split that a configuration may have."""


def splits(text: str) -> tuple[int, ...]:
    """The splits of K, ascending, that a configuration listed here may have as well."""
    return _NUMBERS if text in _SPLIT else ()


def hopper(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.hopper`."""
    return _HOPPER_TF32 if signature.dtype == "fp32" else _HOPPER


def ampere(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.ampere`."""
    return _TF32 if signature.dtype == "fp32" else _TENSOR_CORES


def simt(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.simt`."""
    return _SIMT
