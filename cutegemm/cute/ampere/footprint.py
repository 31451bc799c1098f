"""The cost model's view of the family sm80: its footprints, and the constants that the fits begin with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cutegemm.choice.cost_rates import CostFamily, Rates
from cutegemm.choice.footprint import Footprint
from cutegemm.cute.warps import footprint

if TYPE_CHECKING:
    from cutegemm.cute.ampere.config import AmpereConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

_SM80 = Rates(math=0.62, l2=40.0, latency=0.9, step=20.0, tile=900.0, flop_pj=1.2)
SM80 = CostFamily("sm80", "cute", _SM80)
SM80_TF32 = CostFamily("sm80/tf32", "cute", replace(_SM80, flop_pj=2.2), SM80)
SM80_BYTES = CostFamily("sm80/bytes", "cute", replace(_SM80, flop_pj=0.6), SM80)
_FAMILIES = {
    "float16": SM80, "bfloat16": SM80, "tfloat32": SM80_TF32, "int8": SM80_BYTES, "float8": SM80_BYTES,
}  # fmt: skip
"""By arithmetic unit."""


def of(config: AmpereConfig, signature: Signature, arch: Arch) -> Footprint:
    """One CTA of `ampere.kernel`."""
    return footprint.of(_FAMILIES[signature.unit], config, signature, arch)
