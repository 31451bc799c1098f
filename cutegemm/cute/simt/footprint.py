"""The cost model's view of the family simt: its footprints, and the constants that the fit begins with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cutegemm.choice.cost_rates import CostFamily, Rates
from cutegemm.choice.footprint import Footprint, resident
from cutegemm.cute.simt import registers
from cutegemm.cute.warps import footprint
from cutegemm.problem.work import MASKED, ROWS

if TYPE_CHECKING:
    from cutegemm.cute.simt.config import SimtConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

_FIRST = Rates(
    early=0.5, math=0.84, l2=40.0, latency=0.9, step=40.0, fill=80.0, tile=900.0, thread=10.0, each=0.1, beside=0.8,
    bunch=0.7, solo=0.1, crowded=0.5, turned=0.5, deep=0.2, flop_pj=6.0,
)  # fmt: skip
SIMT = CostFamily("simt", "cute", _FIRST, blurred=True)


IN_GROUPS = {(1, 64): 1.17, (1, 32): 1.2, (2, 64): 1.37, (2, 32): 1.03, (2, 16): 0.78}
"""How much longer than the model says k steps take in groups of rows, by (1 or at least 2 slices, sums a thread):
medians over seven products on an H200, in which a configuration's figures differ by 5 %, but more where groups are
skewed (docs/grouped.md#older-gpus-and-odd-extents)."""


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
    held = registers.known(config, signature)
    ctas = resident(arch, config.smem_bytes(signature), found.threads, held) if held else found.ctas
    outputs, slower = config.wm * config.wn // 32, 1.0
    if signature.work in (*ROWS, MASKED):
        slower = IN_GROUPS.get((min(config.slices, 2), outputs), 1.0)
    return replace(found, smem_step=read, outputs=outputs, turned=turned, deep=deep, ctas=ctas, slower=slower)
