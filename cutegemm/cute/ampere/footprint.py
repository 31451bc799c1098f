"""The cost model's view of the family sm80: its footprints, and the constants that the fits begin with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cutegemm.choice.cost_rates import CostFamily, Rates
from cutegemm.choice.footprint import Footprint, resident
from cutegemm.cute.ampere.steps import steps_of
from cutegemm.cute.launch_config import PROGRAMMATIC
from cutegemm.cute.warps import footprint
from cutegemm.problem import ITEMSIZE

if TYPE_CHECKING:
    from cutegemm.cute.ampere.config import AmpereConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

_SM80 = Rates(early=0.5, math=0.62, l2=40.0, latency=0.9, step=20.0, tile=900.0, flop_pj=1.2, promote=64.0)
"""promote: the additions of an A100's SM a clock, from its data sheet; it serves operands that are split into parts."""
SM80 = CostFamily("sm80", "cute", _SM80)
SM80_TF32 = CostFamily("sm80/tf32", "cute", replace(_SM80, flop_pj=2.2), SM80)
SM80_BYTES = CostFamily("sm80/bytes", "cute", replace(_SM80, flop_pj=0.6), SM80)
SM80_SMALL = CostFamily("sm80/small", "cute", _SM80, SM80)
"""Small tiles on GPUs where launches begin early: fitted to tiny products on an H200, where they stand beside sm90."""
SMALL_TILE = 64 * 64
SM_PARTS = 4
"""Parts of an SM, each with tensor cores of its own."""
_FAMILIES = {
    "float16": SM80, "bfloat16": SM80, "tfloat32": SM80_TF32, "int8": SM80_BYTES, "float8": SM80_BYTES,
}  # fmt: skip
"""By arithmetic unit."""


def of(config: AmpereConfig, signature: Signature, arch: Arch) -> Footprint:
    """One CTA of `ampere.kernel`."""
    family = _FAMILIES[signature.unit]
    if family is SM80 and arch.capability >= PROGRAMMATIC and config.bm * config.bn <= SMALL_TILE:
        family = SM80_SMALL
    found = footprint.of(family, config, signature, arch)
    return found if signature.parts is None else _of_parts(found, config, signature, arch)


def _of_parts(found: Footprint, config: AmpereConfig, signature: Signature, arch: Arch) -> Footprint:
    """The same for operands that are split into parts. Guesses: registers, and what a promotion hides behind."""
    parts = signature.parts
    assert parts is not None
    (bm, bn, bk), warps = config.tile(), config.threads // 32
    steps, size = steps_of(signature, 1), ITEMSIZE[parts.element]
    rows = sum(config.wm * step.loads_a + config.wn * step.loads_b for step in steps)
    registers = min(config.wm * config.wn // 16 + config.wm + config.wn + 60, arch.registers_per_thread)
    ctas = resident(arch, config.smem_bytes(signature), config.threads, registers)
    # The tensor cores of a part of an SM rest while its only warp promotes.
    exposed = bm * bn if warps * ctas <= SM_PARTS else 0
    return replace(
        found, smem_step=warps * rows * bk * size, ctas=ctas, copies=1.0, terms=len(steps), itemsize=parts.itemsize,
        promoted=bm * bn, exposed=exposed,
    )  # fmt: skip
