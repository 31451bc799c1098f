"""Which configurations of the Hopper kernel are valid, by ONE function: `HopperConfig.why_invalid` asks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutegemm.cute import operand_parts
from cutegemm.cute.hopper import grouping, options, promotion
from cutegemm.cute.hopper.promotion import BLOCK_ROWS
from cutegemm.problem.dtypes import ITEMSIZE, why_not_taken
from cutegemm.problem.parts import TABLE as SPLIT
from cutegemm.problem.program import quantized
from cutegemm.problem.program.graph import SCALED
from cutegemm.problem.work import DENSE

if TYPE_CHECKING:
    from cutegemm.cute.hopper.config import HopperConfig
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Kind, Signature

TAKES: tuple[Kind, ...] = (
    ("fp16", "ieee"), ("bf16", "ieee"), ("fp32", "tf32"), *SPLIT,
    ("e4m3", "ieee"), ("e4m3", "fast"), ("e5m2", "ieee"), ("e5m2", "fast"), ("int8", "ieee"),
)  # fmt: skip
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))
CLUSTER_PARTS = (1, 2, 4, 8)
"""Accepted numbers of CTAs of a cluster along K."""
CLUSTER_CTAS = 8
"""Most CTAs of a cluster; more are not portable between GPUs of compute capability 9.0."""


def why_invalid(config: HopperConfig, signature: Signature, arch: Arch) -> str | None:
    """None when this configuration is valid for the signature on that architecture, else why not."""
    if arch.capability != (9, 0):
        return f"WGMMA and its TMA ring exist on compute capability 9.0 only; {arch.name} has another"
    if refused := why_not_taken("the WGMMA kernel multiplies", TAKES, signature.kind):
        return refused
    if ITEMSIZE[signature.dtype] != 2 and signature.parts is None:  # it transposes elements of 16 bits
        element = signature.dtype if signature.precision == "ieee" else signature.precision
        for name, major in (("A", signature.a_major), ("B", signature.b_major)):
            if major != "k":
                return f"WGMMA takes {element} operands K-major only; {name} is {major.upper()}-major"
    for name, align in (("A", signature.align_a), ("B", signature.align_b)):
        if align < 16 and signature.parts is None:
            extent = "each half of the columns" if _by_halves(signature, name) else "contiguous extent"
            return f"TMA cannot load {name}: address, strides and {extent} need 16 bytes, they have {align}"
    return (
        _tile(config)
        or odd_eights(config, signature)
        or grouping.why_invalid(config, signature)
        or _program(config, signature)
        or operand_parts.why_invalid(signature)
        or promotion.why_invalid(config, signature)
        or _resources(config, signature, arch)
    )


def _program(config: HopperConfig, signature: Signature) -> str | None:
    gating = signature.epilogue.gating
    if config.splits > 1 and gating:
        return (
            "splits of K finish single accumulators, gate and up are finished together; accepted are clusters along K"
        )
    if config.cluster_k > 1 and gating == "pairs":
        return "clusters along K finish gate and up in halves; these lie in pairs"
    if config.parts > 1 and config.swapped and signature.epilogue.program.uses("partner"):
        return (
            "splits of K and clusters along K finish rows of D apart where operands are swapped; a program with "
            "partner needs neighbours"
        )
    if gating == "pairs" and config.swapped and not config.uses_tma_store(signature):
        return (
            "with swapped operands gate and up in pairs lie in different threads, which exchange them on the way to "
            "TMA's boxes; D, or the program's results and operands, do not go that way"
        )
    if gating == "halves" and config.swapped and config.group_rows % (2 * BLOCK_ROWS):
        return (
            f"a warpgroup has {config.group_rows} rows; with swapped operands gate and up take multiples of "
            f"{2 * BLOCK_ROWS}"
        )
    if _by_halves(signature, "B") and config.bn * ITEMSIZE[signature.dtype] % 64 and not config.swapped:
        return f"bn is {config.bn}; halves of a row-major B need a multiple of {64 // ITEMSIZE[signature.dtype]}"
    return _quantized(config, signature) if signature.epilogue.program.quantizes else None


def _quantized(config: HopperConfig, signature: Signature) -> str | None:
    """Why it gives no quantized results, None where it does. What no other configuration would change comes first."""
    columns = config.out_columns(signature)
    if why := quantized.why_other(signature.epilogue.program):
        return why
    if matrices := config.matrices(signature):
        return f"ops.quantize beside the matrix operand {matrices[0].name}; accepted are operands of rows and columns"
    if signature.align_d < 16 or not grouping.stores_boxes(signature.work):
        return f"ops.quantize needs rows of D of 16-byte multiples, stored by TMA; D is aligned to {signature.align_d}"
    if config.swapped:
        return "with swapped operands the columns of a block lie in several warps; accepted is no swap"
    if columns % SCALED:
        return f"a tile has {columns} columns of results; accepted are multiples of {SCALED}, the columns of a block"
    if not config.uses_tma_store(signature):
        return "quantized results go through TMA, without parts of K and with fewer accumulators a thread"
    return None


def _tile(config: HopperConfig) -> str | None:
    groups = 1 if config.ping_pong else config.consumers
    if config.bm % (BLOCK_ROWS * groups) or not BLOCK_ROWS <= config.bm <= 256:
        return f"bm is {config.bm}; accepted are multiples of 64 a warpgroup, up to 256"
    if config.bn % 8 or not 8 <= config.bn <= 256:
        return f"bn is {config.bn}; accepted are multiples of 8 up to 256 (the n of a WGMMA)"
    if config.bk not in (32, 64, 128, 256):
        return f"bk is {config.bk}; accepted are 32, 64, 128 and 256"
    if config.cluster not in CLUSTERS:
        return f"cluster is {config.cluster}; accepted are {', '.join(f'{m}x{n}' for m, n in CLUSTERS)}"
    if not 1 <= config.splits <= 32 or (config.splits > 1 and config.ping_pong):
        return f"{config.splits} splits of K; accepted are 1 to 32, and 1 in ping-pong"
    if config.cluster_k not in CLUSTER_PARTS or config.cluster_ctas > CLUSTER_CTAS:
        return (
            f"a cluster has {config.cluster_ctas} CTAs, {config.cluster_k} along K; accepted are up to {CLUSTER_CTAS}, "
            f"and {', '.join(map(str, CLUSTER_PARTS))} along K"
        )
    if why := options.why_excluded(config):
        return why
    if config.bm // config.cluster[1] % 8 or config.bn // config.cluster[0] % 8:
        return f"tile {config.bm}x{config.bn} cannot be loaded in shares of whole 8 rows by a {config.cluster} cluster"
    return None


def odd_eights(config: HopperConfig, signature: Signature) -> str | None:
    """Why a BN that is a multiple of 8 and not of 16 is refused; None where it is not. A box of D has rows of 64
    columns there, any multiple of 8 of them; of other tiles it would have columns of 16 bytes."""
    if config.bn % 16 == 0:
        return None
    epilogue = signature.epilogue
    taken = {
        "operands are swapped": config.swapped,
        "A lies along K": signature.a_major == "k",
        "A and B have 16 bits": ITEMSIZE[signature.dtype] == 2 and signature.parts is None,
        "the product is no group's": signature.work == DENSE,
        "the epilogue has no gate and up": not epilogue.gating,
        "the epilogue has no matrix operand and no reduced result": not (
            epilogue.reductions or config.matrices(signature)
        ),
        "D goes through TMA, or parts of K are summed": config.parts > 1 or config.uses_tma_store(signature),
    }
    missing = next((condition for condition, holds in taken.items() if not holds), None)
    return missing and f"bn is {config.bn}, no multiple of 16, which is accepted where {missing}"


def _resources(config: HopperConfig, signature: Signature, arch: Arch) -> str | None:
    # A tile that is shared out over a cluster is stored by more addresses at a time than TMA takes.
    most = (208, 96) if config.cluster_k == 1 else (128, 72)
    limit = most[config.consumers == 3]
    if config.accumulators > limit:
        return f"{config.accumulators} accumulators a thread; more than {limit} spill"
    reductions = len(signature.epilogue.reductions)
    if reductions > 2 and config.accumulators > 176:
        return f"{config.accumulators} accumulators a thread and {reductions} reduced results; more than 176 spill"
    if not (1 if config.solo else 2) <= config.stages <= 16:
        return f"stages is {config.stages}; accepted are 2 to 16, in solo 1 to 16"
    width = 2 if signature.epilogue.gating else 1
    received = (config.cluster_k - 1) * config.consumers * config.owned_bytes(width)
    if received > config.stages * config.stage_bytes(signature):
        ring = config.stages * config.stage_bytes(signature)
        return f"{received} B of a tile's sums from the other CTAs along K do not fit into the ring of {ring} B"
    if config.parts > 1 and signature.epilogue.reductions:
        return "rows and columns are reduced in whole sums; accepted are 1 split of K and no cluster along K"
    if config.smem_bytes(signature) > arch.smem_per_cta:
        return f"{config.smem_bytes(signature)} B of shared memory; {arch.name} gives a CTA {arch.smem_per_cta}"
    return None


def _by_halves(signature: Signature, name: str) -> bool:
    """Whether it is the operand of that name whose contiguous columns are loaded as two halves."""
    by_rows = signature.b_major == "n" and signature.parts is None
    return name == "B" and by_rows and signature.epilogue.gating == "halves"
