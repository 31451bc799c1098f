"""The cost model's view of the family simt: its footprints, and the constants that the fit begins with."""

from __future__ import annotations

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
    math=0.84, l2=40.0, latency=0.9, step=40.0, fill=80.0, tile=900.0, thread=10.0, each=0.1, beside=0.8, bunch=0.7,
    crowded=0.5, flop_pj=6.0,
)  # fmt: skip
SIMT = CostFamily("simt", "cute", _FIRST)


def of(config: SimtConfig, signature: Signature, arch: Arch) -> Footprint:
    """One CTA of `simt.kernel` or `simt.sliced`.

    4 x 8 lanes read 16 bytes each: a load touches 16 rows of A or 32 columns of B, and takes shared memory as long for
    either. So a row costs as much as two columns: warps of 64x32 take 1.14 times as long as those of 32x64 in the same
    CTA tile (5640x296x2816 on an H200).
    """
    found = footprint.of(SIMT, config, signature, arch, config.slices)
    warps = found.threads // (32 * config.slices)
    read = warps * (2 * config.wm + config.wn) * config.bk * 4
    return replace(found, smem_step=read, outputs=config.wm * config.wn // 32)
