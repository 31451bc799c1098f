"""The cost model's view of the CUTLASS 2.x kernels: footprints, and the constants that their fits begin with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cutegemm.choice.cost_rates import CostFamily, Rates
from cutegemm.choice.footprint import Footprint, of_warps

if TYPE_CHECKING:
    from cutegemm.cutlass2x.config import Cutlass2xConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Kind, Signature


def _family(name: str, like: CostFamily | None = None, *, math: float, step: float, flop_pj: float) -> CostFamily:
    first = Rates(math=math, l2=40.0, latency=0.9, step=step, tile=1200.0, flop_pj=flop_pj)
    return CostFamily(name, "cutlass2x", first, like)


TENSOR = _family("cutlass2x", math=0.62, step=20.0, flop_pj=0.95)
FAMILIES: Mapping[Kind, CostFamily] = {
    ("fp16", "ieee"): TENSOR,
    ("bf16", "ieee"): TENSOR,
    ("fp32", "ieee"): _family("cutlass2x/simt", math=0.82, step=60.0, flop_pj=6.0),
    ("fp32", "tf32"): _family("cutlass2x/tf32", TENSOR, math=0.55, step=20.0, flop_pj=2.0),
    ("fp32", "tf32x3"): _family("cutlass2x/tf32x3", math=0.19, step=40.0, flop_pj=6.0),
}


def of(config: Cutlass2xConfig, signature: Signature, arch: Arch) -> Footprint:
    """One CTA of a configuration."""
    return of_warps(
        FAMILIES[signature.kind],
        config.threadblock,
        config.warp[:2],
        config.stages,
        config.smem_bytes(signature),
        signature,
        arch,
        group=int(config.swizzle[2:]) if config.swizzle.startswith("id") else 1,
        splits=config.splits,
    )
