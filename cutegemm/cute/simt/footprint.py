"""The cost model's view of the family simt: its footprints, and the constants that the fit begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from cutegemm.choice.cost_rates import CostFamily, Rates
from cutegemm.choice.footprint import Footprint
from cutegemm.cute.warps import footprint

if TYPE_CHECKING:
    from cutegemm.cute.simt.config import SimtConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

_FIRST = Rates(
    early=0.5, math=0.84, l2=40.0, latency=0.9, step=40.0, fill=80.0, tile=900.0, thread=10.0, each=0.1, beside=0.8,
    bunch=0.7, solo=0.1, crowded=0.5, turned=0.5, deep=0.2, flop_pj=6.0,
)  # fmt: skip
SIMT = CostFamily("simt", "cute", _FIRST, blurred=True)
MAJORS = ("tn", "tt", "nn", "nt")
SLOWER: Mapping[str, tuple[float, ...]] = {
    "simt/128x128x8/w64x32/s4/g8/r2": (1.22, 1.19, 1.14, 1.13),
    "simt/128x128x8/w64x64/s4/g8": (1.03, 1.02, 1.00, 1.01),
    "simt/128x256x16/w64x64/s3/g8": (1.01, 0.98, 0.97, 0.97),
    "simt/128x32x16/w64x32/s2/g8/r6": (1.00, 1.05, 1.00, 1.02),
    "simt/128x64x8/w32x64/s3/g8": (1.10, 0.92, 1.01, 0.99),
    "simt/128x64x8/w64x64/s2/g8": (1.07, 1.23, 1.13, 1.05),
    "simt/128x64x8/w64x64/s3/g8": (1.02, 1.04, 1.01, 1.01),
    "simt/16x32x128/w16x32/s4/g8/x8": (0.85, 0.85, 0.85, 0.85),
    "simt/16x32x32/w16x32/s4/g8/x4": (0.85, 0.98, 0.85, 0.88),
    "simt/16x32x64/w16x32/s4/g1/x4": (0.96, 1.00, 0.96, 1.00),
    "simt/16x32x64/w16x32/s4/g8/x8": (0.85, 0.90, 0.86, 0.87),
    "simt/256x128x16/w64x64/s3/g8": (1.00, 1.01, 0.95, 0.96),
    "simt/32x128x16/w32x64/s2/g8/r6": (1.05, 0.98, 1.04, 1.01),
    "simt/32x128x8/w32x64/s3/g8": (1.10, 0.98, 0.86, 1.05),
    "simt/32x32x32/w16x32/s3/g8/x2": (0.96, 1.04, 1.03, 1.01),
    "simt/32x32x32/w16x32/s4/g8/x4": (0.86, 0.98, 0.92, 0.96),
    "simt/32x32x64/w32x32/s3/g8/x4": (0.97, 0.85, 0.98, 0.88),
    "simt/32x64x16/w16x32/s3/g8": (0.95, 1.00, 1.04, 1.00),
    "simt/32x64x16/w32x32/s2/g8/r7": (0.96, 0.97, 0.95, 0.98),
    "simt/32x64x16/w32x64/s2/g8/r12": (1.00, 1.00, 0.95, 1.00),
    "simt/32x64x32/w16x32/s4/g8/x2": (0.96, 0.96, 0.96, 1.00),
    "simt/32x64x32/w32x32/s2/g8/x2": (1.11, 0.92, 1.10, 0.99),
    "simt/64x128x16/w32x32/s3/g8/r2": (1.15, 1.20, 1.10, 1.19),
    "simt/64x128x16/w32x64/s3/g8/r3": (1.14, 1.09, 1.10, 1.07),
    "simt/64x128x8/w32x64/s3/g8/r3": (1.10, 1.11, 1.00, 1.12),
    "simt/64x128x8/w64x64/s3/g8": (1.04, 1.01, 1.02, 1.02),
    "simt/64x32x16/w32x32/s2/g8/r7": (0.94, 0.97, 0.94, 1.01),
    "simt/64x32x32/w32x32/s4/g8/x2": (1.08, 0.90, 1.09, 0.96),
    "simt/64x64x16/w32x32/s2/g8/r4": (1.07, 1.10, 1.05, 1.11),
    "simt/64x64x16/w32x32/s3/g8/r4": (1.07, 1.08, 1.05, 1.07),
    "simt/64x64x16/w32x64/s2/g8/r6": (1.12, 1.12, 1.11, 1.02),
    "simt/64x64x32/w32x64/s2/g8/x2": (1.37, 1.08, 1.33, 1.05),
    "simt/64x64x8/w32x32/s2/g8/r4": (1.04, 1.10, 1.05, 1.04),
    "simt/64x64x8/w32x32/s3/g8/r4": (1.04, 1.04, 1.00, 1.01),
}
"""What the multiplications of a candidate take relative to what the model expects of such a tile, for each of `MAJORS`.
`python -m tuning.slower tuning/times/fsimt37.txt`, three times, worked them out, and then once with fsimt38.txt
besides, and of both only the times of candidates."""


def of(config: SimtConfig, signature: Signature, arch: Arch) -> Footprint:
    """One CTA of `simt.kernel` or `simt.sliced`.

    4 x 8 lanes read 16 bytes each: a load touches 16 rows of A or 32 columns of B, and takes shared memory as long for
    either. So a row costs as much as two columns: warps of 64x32 take 1.14 times as long as those of 32x64 in the same
    CTA tile (5640x296x2816 on an H200).
    """
    found = footprint.of(SIMT, config, signature, arch, config.slices)
    warps = found.threads // (32 * config.slices)
    read = warps * (2 * config.wm + config.wn) * config.bk * 4
    a_by_k, b_by_k = signature.a_major == "k", signature.b_major == "k"
    turned = deep = 0
    if config.slices == 1:
        turned = (config.bm * a_by_k + config.bn * b_by_k) * config.bk * 4
    else:
        deep = warps * (2 * config.wm * a_by_k + config.wn * b_by_k) * config.bk * 4
    more = slower(str(replace(config, splits=1)), signature.majors)
    return replace(found, smem_step=read, outputs=config.wm * config.wn // 32, turned=turned, deep=deep, slower=more)


def slower(text: str, majors: str) -> float:
    """The factor of a candidate without splits of K in `SLOWER`, 1 where it has none."""
    return SLOWER[text][MAJORS.index(majors)] if text in SLOWER else 1.0
