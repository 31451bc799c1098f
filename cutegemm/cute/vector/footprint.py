"""The cost model's view of the family vector: its footprints, and the constants that the fit begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutegemm.choice.cost_rates import CostFamily, Rates
from cutegemm.choice.footprint import Footprint
from cutegemm.cute.launch_config import PROGRAMMATIC

if TYPE_CHECKING:
    from cutegemm.cute.vector.config import VectorConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

VECTOR = CostFamily(
    "vector",
    "cute",
    Rates(
        launch=1.5, early=0.5, math=0.8, l2=40.0, latency=1.0, held=0.0, step=60.0, tile=900.0, split=2.0, parts=31.0,
        hbm=0.9, idle=0.5, flop_pj=6.0,
    ),
)  # fmt: skip
"""The fit begins with these. launch, split and parts are about what fits found for the other kernels on an H200 (the
meeting of CTAs is that of sm90); latency is memory's; hbm is the share of its bandwidth that the kernel is made for."""

SPREAD = 4
"""By hand: the choice at 60 thin products (`tuning/times/fsimt34.txt`) then loses 3.5 % to the fastest, else 4.9 %."""


def of(config: VectorConfig, signature: Signature, arch: Arch) -> Footprint:
    """One CTA of `vector.kernel`; a k step is one of all its slices."""
    bk = config.bk * config.slices
    along_k = config.along_k(signature)
    tile, across = config.long
    # What goes through the L1 cache beside the matrix: each warp loads the thin operand's part of its step.
    # Where that is not K-major and the matrix is, its lanes read as many lines as they have k.
    thin_major = signature.a_major if config.thin_m else signature.b_major
    spread = 1 if thin_major == "k" else SPREAD
    thin = tile // across * config.thin * bk * 4 * (spread if along_k else 4)
    return Footprint(
        VECTOR,
        config.bm,
        config.bn,
        bk,
        config.stages,
        thin,
        config.threads,
        ctas=config.on_an_sm(signature, arch),
        splits=config.splits,
        serial=False,
        group=config.group,
        copies=4 / config.vectors(signature),
        early=arch.capability >= PROGRAMMATIC,
    )
