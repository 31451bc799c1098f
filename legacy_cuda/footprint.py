"""The cost model's view of the ladder's kernels: footprints, and the constants that their fits begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutegemm.choice.cost_rates import CostFamily, Rates
from cutegemm.choice.footprint import Footprint, of_warps

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature
    from legacy_cuda.config import LegacyConfig

FFMA = CostFamily("legacy", "legacy", Rates(math=0.8, l2=40.0, latency=1.2, step=80.0, tile=1200.0, flop_pj=6.5))
WMMA = CostFamily("legacy/wmma", "legacy", Rates(math=0.4, l2=40.0, latency=1.2, step=80.0, tile=1200.0, flop_pj=1.2))


def of(config: LegacyConfig, signature: Signature, arch: Arch) -> Footprint:
    """One CTA of a configuration; a thread tile counts as the warp tile of 4 x 8 such threads."""
    bm, bn, bk = config.tile()
    p = config.parameters
    if "warps_m" in p:
        warp = bm // p["warps_m"], bn // p["warps_n"]
    elif "wm" in p:
        warp = p["wm"], p["wn"]
    else:
        warp = 4 * p.get("tm", 1), 8 * p.get("tn", 1)
    return of_warps(
        WMMA if config.spec.tensor_cores else FFMA,
        (bm, bn, bk),
        (min(warp[0], bm), min(warp[1], bn)),
        p.get("stages", 2),
        config.dynamic_smem(signature) + config.static_smem(),
        signature,
        arch,
        group=p.get("group", 1),
    )
