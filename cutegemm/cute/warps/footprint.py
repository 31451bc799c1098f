"""The cost model's view of the kernels whose warps read their fragments from shared memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cutegemm.choice.footprint import Footprint, of_warps
from cutegemm.cute.launch_config import PROGRAMMATIC

if TYPE_CHECKING:
    from cutegemm.choice.cost_rates import CostFamily
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature


def of(family: CostFamily, config: Any, signature: Signature, arch: Arch, slices: int = 1) -> Footprint:
    """One CTA of a `TileConfig`; `slices` as in `of_warps`."""
    warp, smem_bytes = (config.wm, config.wn), config.smem_bytes(signature)
    found = of_warps(
        family, config.tile(), warp, config.stages, smem_bytes, signature, arch, group=config.group,
        splits=config.splits, slices=slices, bounded_for=config.resident,
    )  # fmt: skip
    return replace(found, serial=False, early=arch.capability >= PROGRAMMATIC)
