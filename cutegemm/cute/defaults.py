"""The configurations each family may take when nothing was measured: the cost model chooses among them.

They are few beside the whole space, so that a choice costs microseconds, and differ in what matters: the tile and the
cluster, and with them how a small problem fills the SMs. Those of Hopper in 16 bit are more than a choice can look at:
`cells` has them, and which are worth a look for which sizes. `splits` says of which there are split-K variants.
tests/compile builds one for each tile, schedule and role of operands, without C and bias: none spills.
"""

from __future__ import annotations

from cutegemm.cute import cells
from cutegemm.problem import Signature

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
_SPLIT_TF32 = frozenset(
    (
        "sm90/128x128x32/coop2/c1x1/s6/serp8/pdl",
        "sm90/64x64x64/coop1/c1x1/s6/serp8/pdl",
        "sm90/64x32x64/coop1/c1x1/s8/serp8/pdl",
        "sm90/64x16x64/coop1/c1x1/s8/serp8/swap/pdl",
    )
)
NUMBERS = tuple(range(2, 33))
"""Every split that a configuration may have."""


def splits(text: str) -> tuple[int, ...]:
    """The splits of K, ascending, that a configuration listed here may have as well."""
    return NUMBERS if text in _SPLIT_TF32 or cells.may_split(text) else ()


def hopper(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.hopper`."""
    return _HOPPER_TF32 if signature.dtype == "fp32" else cells.configurations()


def ampere(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.ampere`."""
    return _TF32 if signature.dtype == "fp32" else _TENSOR_CORES


def simt(signature: Signature) -> tuple[str, ...]:
    """Configurations of `kernels.simt`."""
    return _SIMT
