"""The cost model's view of the family simt: its footprints, and the constants that the fit begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutegemm.choice.cost_rates import CostFamily, Rates
from cutegemm.choice.footprint import Footprint
from cutegemm.cute.warps import footprint

if TYPE_CHECKING:
    from cutegemm.cute.simt.config import SimtConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

SIMT = CostFamily("simt", "cute", Rates(math=0.84, l2=40.0, latency=0.9, step=40.0, tile=900.0, flop_pj=6.0))


def of(config: SimtConfig, signature: Signature, arch: Arch) -> Footprint:
    """One CTA of `simt.kernel` or `simt.sliced`."""
    return footprint.of(SIMT, config, signature, arch, config.slices)
