"""The cost model's view of the Hopper kernel: its footprints, and the constants that the fits begin with."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cutegemm.choice import program_cost
from cutegemm.choice.cost_rates import CostFamily, Rates
from cutegemm.choice.footprint import ALL_ROWS, Footprint, resident
from cutegemm.cute.hopper import options, promotion
from cutegemm.cute.hopper.config import BLOCK_ROWS
from cutegemm.cute.tile_order import HILBERT_LEVELS
from cutegemm.hardware.arch import LINE
from cutegemm.problem import ITEMSIZE
from cutegemm.problem.work import DENSE

if TYPE_CHECKING:
    from cutegemm.cute.hopper.config import HopperConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

_SM90 = Rates(
    alone=0.06, early=0.3, sync=8.0, crew=0.1, outside=11.0, tail=0.3, lines=1.0, writes=0.1, sectors=0.3, seams=0.2,
    apart=0.02, torn=0.05, swapped=0.1, rows=0.5, drains=2.0,
)  # fmt: skip
SM90 = CostFamily("sm90", "cute", _SM90)
SM90_TF32 = CostFamily("sm90/tf32", "cute", replace(_SM90, flop_pj=1.2), SM90)
SM90_FP8 = CostFamily("sm90/fp8", "cute", replace(_SM90, flop_pj=0.4), SM90)
SM90_INT8 = CostFamily("sm90/int8", "cute", replace(_SM90, flop_pj=0.4), SM90)
_FAMILIES = {
    "float16": SM90, "bfloat16": SM90, "tfloat32": SM90_TF32, "float8": SM90_FP8, "int8": SM90_INT8,
}  # fmt: skip
"""By arithmetic unit."""
SLABS = 3
"""How much longer several matrix operands take in groups where slabs store the results, than the model says of operands
that are waited for: read off times on an H200 (docs/grouped.md#matrix-operands)."""
ACROSS = 1
"""What the model adds to the number of matrix operands that a tile waits for, where a swapped tile of groups reads
several of them from the ring, across their rows. For the gradient of gate and up of 8x4096x14336x4096 a swapped tile of
256x96 took 995 us on an H200, and one of 128x192 that is not swapped took 924 (mean of three draws of sizes). Without
this the model expects 943 and 956."""
OTHERS_WAIT = 0.15
"""Share of a promotion during which the CTA's other warpgroups do not multiply either: from what 128 x 128 tiles of two
gain by twins at 4096x7168x2048 on an H200."""
HALF_WAITS, HALF_OF_ROWS_WAITS = 0.25, 0.30
"""The same with option half: from its times with scales of rows at the four large shapes of docs/fp8.md. The second is
of halves of rows with scales of blocks: at each of eleven shapes 256 x 128 took 0.5 to 3.4 % longer than 128 x 256 (an
H200, blocks of a second)."""


def of(config: HopperConfig, signature: Signature, arch: Arch) -> Footprint:
    """One CTA of the Hopper kernel."""
    bm, bn, bk = config.tile()
    size, terms = ITEMSIZE[signature.dtype], 1
    if signature.parts is not None:
        size, terms = ITEMSIZE[signature.parts.element], len(signature.parts.terms)
    # Each WGMMA reads its 64 rows of A and all of B, or half of it where half of a tile are columns.
    by_columns = 2 if "half" in config.options and config.group_rows == BLOCK_ROWS else 1
    smem = config.bm // BLOCK_ROWS * (BLOCK_ROWS * by_columns + config.bn) * bk * size * terms
    cluster = config.cluster[::-1] if config.swapped else config.cluster
    # One consumer warpgroup keeps the registers it was compiled to, its accumulators and about 32 more; with several,
    # setmaxnreg deals out all.
    registers = min(config.accumulators + 32, 255) if config.consumers == 1 else 168
    ctas = resident(arch, config.smem_bytes(signature), config.threads, registers)
    flags = options.footprint_flags(config)
    # A store of swapped operands is 64 columns wide, or 32, whatever the tile.
    out = ITEMSIZE[signature.out_dtype]
    columns = config.block_rows(signature) if config.swapped else config.store_columns(out, signature)
    return Footprint(
        _FAMILIES[signature.unit],
        bm,
        bn,
        bk,
        config.stages,
        smem,
        config.threads,
        ctas=1 if config.persistent else ctas,
        cluster=cluster,
        parts=config.cluster_k,
        splits=config.splits,
        serial=False,
        group=order_rows(config.order),
        overlapped=config.ping_pong,
        curve=config.order == "hilbert",
        segment=min(columns * out, LINE),
        narrow=_narrow(config, signature),
        leaves_room=flags["pdl"] and ctas > 1,
        stays=config.persistent,
        terms=terms,
        itemsize=None if signature.parts is None else signature.parts.itemsize,
        program=_program(config, signature),
        **_promotion(config, signature),
        **flags,
    )


def _program(config: HopperConfig, signature: Signature) -> float:
    """Cycles of an epilogue program for a tile; `program_cost` explains them."""
    custom = signature.epilogue.custom
    if custom is None:
        return 0.0
    waited_for, plan = len(config.matrices(signature)), config.through_ring(signature)
    if plan is not None and not config.ping_pong:
        waited_for -= len(plan.operands)
    elif config.loads_ahead(signature) and config.staged_matrix(signature) is not None:
        waited_for = 0
    if signature.work != DENSE and len(config.matrices(signature)) > 1:
        if not config.uses_tma_store(signature):
            waited_for *= SLABS if waited_for > 1 else 1
        elif config.swapped and not config.ping_pong:
            waited_for += ACROSS
    elements = config.bm * config.bn // (2 if custom.gating else 1)
    return program_cost.cycles(custom, elements, config.accumulators, waited_for, config.ping_pong)


def _promotion(config: HopperConfig, signature: Signature) -> dict[str, Any]:
    """`Footprint.promoted`, `exposed` and `scaled`.

    Twins hide a promotion. Without them nothing hides it where one warpgroup multiplies at a time (a CTA with one, or
    ping-pong). Else the other warpgroups multiply meanwhile, but for the share `OTHERS_WAIT` (with half `HALF_WAITS`
    or `HALF_OF_ROWS_WAITS`). Scales that the consumers load (with half) cost 3 to 7 % there, which is left out: no
    other tile is near.
    """
    every = promotion.interval(config, signature)
    if not every:
        return {}
    promoted = config.bm * config.bn / every
    alone = config.consumers == 1 or config.ping_pong
    share = 0.0 if "twin" in config.options else OTHERS_WAIT
    if "half" in config.options:
        of_rows = config.group_rows > BLOCK_ROWS and promotion.shares_factors(config, signature)
        share = HALF_OF_ROWS_WAITS if of_rows else HALF_WAITS
    exposed = promoted * (1.0 if alone and "twin" not in config.options else share)
    return {"promoted": promoted, "exposed": exposed, "scaled": promotion.copies(config, signature) > 0}


def order_rows(order: str) -> int:
    """Tile rows that a tile order walks together; see `cute.tile_order`."""
    found = re.fullmatch(r"(?:g|serp)(\d+)", order)
    if found:
        return int(found[1])
    return {"row": 1, "hilbert": 1 << HILBERT_LEVELS}.get(order, ALL_ROWS)


def _narrow(config: HopperConfig, signature: Signature) -> tuple[float, float]:
    """`Footprint.narrow`. A row of a TMA box is as long as the greatest common divisor of a line and the tile's extent
    along the operand's major.
    """
    size = ITEMSIZE[signature.dtype]
    majors = (signature.a_major, signature.b_major)[:: -1 if config.swapped else 1]
    if signature.parts is not None:
        size, majors = ITEMSIZE[signature.parts.element], ("k", "k")
    halves = signature.epilogue.gating == "halves"
    parts = (2 if halves and config.swapped else 1, 2 if halves and not config.swapped else 1)
    first, second = (
        LINE / math.gcd(config.bk * size if major == "k" else extent * size // part, LINE)
        for extent, major, part in zip((config.bm, config.bn), majors, parts, strict=True)
    )
    return (second, first) if config.swapped else (first, second)
