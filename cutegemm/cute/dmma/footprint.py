"""The cost model's view of the family dmma: its footprints, and the constants that the fit begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutegemm.choice.cost_rates import CostFamily, Rates
from cutegemm.choice.footprint import Footprint
from cutegemm.cute.launch_config import PROGRAMMATIC

if TYPE_CHECKING:
    from cutegemm.cute.dmma.config import DmmaConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

DMMA = CostFamily(
    "dmma", "cute", Rates(launch=1.5, early=0.5, math=0.8, l2=40.0, latency=0.9, step=40.0, tile=900.0, flop_pj=9.0)
)
DMMA_NARROW = CostFamily(
    "dmma/8x4",
    "cute",
    Rates(launch=1.5, early=0.5, math=0.7, l2=40.0, latency=0.9, step=60.0, tile=900.0, flop_pj=9.0),
    DMMA,
)
"""Not fitted: nothing was measured. math is 53 TFLOP/s of the data sheet's 67, what cuBLAS reaches on an H200; the
instructions of 8 rows, of which there are more, are taken to reach less."""


def of(config: DmmaConfig, signature: Signature, arch: Arch) -> Footprint:
    """One CTA of `dmma.kernel`."""
    warps = config.threads // 32
    narrowest = min(signature.align_a, signature.align_b)
    return Footprint(
        DMMA_NARROW if config.instruction == "8x4" else DMMA,
        config.bm,
        config.bn,
        config.bk,
        config.stages,
        warps * (config.wm + config.wn) * config.bk * 8,
        config.threads,
        ctas=config.on_an_sm(signature, arch),
        group=config.group,
        copies=16 / narrowest,
        early=arch.capability >= PROGRAMMATIC,
    )
