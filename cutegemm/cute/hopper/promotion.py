"""Rules of promotion: which configurations may add the tensor cores' sums into fp32 registers every few k tiles.

A promoted kind of products (`DType.promoted`) keeps two sets of registers a consumer thread: partial sums, which WGMMA
writes, and the accumulators. So a tile has half as many elements as without promotion. `promoted` is the device's side.

Here is no DSL: the rule of validity is asked before anything is compiled.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cutegemm.problem.dtypes import TYPES
from cutegemm.problem.program.graph import SCALE_K
from cutegemm.problem.work import DENSE, GATHERED, RAGGED_N, SCATTERED

if TYPE_CHECKING:
    from cutegemm.cute.hopper.config import HopperConfig
    from cutegemm.problem import Signature
    from cutegemm.problem.program.graph import Input

MOST_ACCUMULATORS = {1: 112, 2: 112, 3: 64}
"""Most accumulators a thread, by consumer warpgroups; with more, ptxas spills (tests/compile/test_fp8.py)."""
MOST_SCALED = {1: 112, 2: 104, 3: 64}
"""The same with scales of blocks of K."""
FEW_COPIES = 3
"""Scales of blocks of K that a thread copies for a k tile with the registers that large tiles leave it."""
MOST_WITH_COPIES = 96
"""Most accumulators a thread, with two consumer warpgroups, where it copies more; it gets 16 registers more then."""
MOST_TWIN = {1: 72, 2: 64, 3: 40}
"""The same with option twin, which has a third set of registers."""
MOST_DIVIDED = {1: 96, 2: 96, 3: 48}
"""The same for clusters along K, whose exchange needs more addresses."""
MOST_COMPENSATED = 32
"""Most accumulators a thread of sums of parts that are compensated, in twice as many registers as other promoted sums.
Tiles of more are for results that fill the GPU, where the time of promotions counts."""
MOST_HALF = 128
"""The same with option half, which has half as many partial sums."""
MOST_HALF_SCATTERED = 112
"""The same where groups are columns, or rows of D are scattered: slabs store such results, which takes addresses."""
SCALE_THREADS = 96
"""Threads of the producer's warpgroup that copy scales of blocks of K: all but those of its first warp."""
BLOCK_ROWS = 64
"""Rows of one WGMMA, and of D that a warpgroup stores at a time."""
FRAGMENT = 8
"""Columns of a warp's fragment of accumulators."""
CONSUMER_REGISTERS = (24, 240)
WITH_COPIES = (40, 232)
"""Registers a thread of (producer, consumers) after setmaxnreg, for two consumer warpgroups; the second where a thread
copies more than `FEW_COPIES` scales, in ping-pong, in groups and of gate and up any, or gathers rows."""


def interval(config: HopperConfig, signature: Signature) -> int:
    """K tiles from one promotion to the next; 0 for products that are not promoted."""
    return (signature.promotion or 0) // config.bk


def registers(config: HopperConfig, signature: Signature) -> tuple[int, int] | None:
    """Registers a thread of (producer, consumers) after setmaxnreg; None where the even share is already 255."""
    if signature.promotion and config.consumers == 2 and config.registers is not None:
        more = _copies_much(config, signature) or (config.ping_pong and copies(config, signature) > 0)
        return WITH_COPIES if more else CONSUMER_REGISTERS
    return config.registers


def _copies_much(config: HopperConfig, signature: Signature) -> bool:
    """Whether the warps that copy need the registers of `WITH_COPIES`: where they copy many scales, or any scales of
    groups (each warp keeps the groups' ends) or of gate and up, or gather rows. With option half the warps copy no
    scales, but in groups ptxas spilled the groups' ends without these registers.
    """
    if "half" in config.options:
        return signature.work != DENSE
    few = FEW_COPIES if signature.work == DENSE and not signature.epilogue.gating else 0
    return signature.work == GATHERED or copies(config, signature) > few


def shares_factors(config: HopperConfig, signature: Signature) -> bool:
    """Whether many partial sums are multiplied by one factor (`reuse`)."""
    return "half" in config.options and bool(signature.epilogue.program.block_scales)


def compensates(config: HopperConfig, signature: Signature) -> bool:
    """Whether what promotions round off is kept and added at the end (`promoted.CompensatedProducts`)."""
    return signature.parts is not None and config.accumulators <= MOST_COMPENSATED


def scale_counts(config: HopperConfig, signature: Signature) -> tuple[int, int]:
    """Scales of blocks of K that a stage of the ring has, along the rows and the columns of the accumulators: one for
    `grain`, or for each block of 128 that the tile may lie in; 0 without scales, and where no stage has them.
    """
    given = {} if "half" in config.options else signature.epilogue.program.block_scales
    operands = [given.get(name) for name in ("ba" if config.swapped else "ab")]
    down, across = (
        0 if each is None else _count(config, signature, each, extent)
        for each, extent in zip(operands, (config.bm, config.bn), strict=True)
    )
    return down, across


def _count(config: HopperConfig, signature: Signature, given: Input, extent: int) -> int:
    share = grain(config, signature, given)
    by_block = share == SCALE_K and not lies_in_halves(signature, given)
    return blocks_of_columns(extent) if by_block else extent // share


def lies_in_halves(signature: Signature, given: Input) -> bool:
    """Whether those are scales of gate's columns and, F columns further on, of up's."""
    return signature.epilogue.gating == "halves" and given.scales[0] == "b"


def grain(config: HopperConfig, signature: Signature, given: Input) -> int:
    """How many rows (columns) of a tile one number in a stage of the ring is for: as many as share a scale.

    With gate and up in halves it is how many neighbouring columns of gate, or of up, lie in one block of 128 wherever
    the tile lies: up's columns may begin anywhere in a block, unless 128 divides F. If these are fewer than a
    fragment's columns, or with swapped operands fewer than a WGMMA's rows, a number is for at most 8 columns.
    """
    size = int(given.scales[1:])
    if size == 1 or not lies_in_halves(signature, given):
        return size
    extent, least = (config.bm, BLOCK_ROWS) if config.swapped else (config.bn, FRAGMENT)
    share = math.gcd(extent // 2, signature.halves)
    return share if share >= least else min(FRAGMENT, signature.halves)


def blocks_of_columns(extent: int) -> int:
    """The most blocks of 128 that a tile of that extent lies in, which begins at a multiple of it."""
    last = SCALE_K - math.gcd(extent, SCALE_K)
    return -(-(last + extent) // SCALE_K)


def copies(config: HopperConfig, signature: Signature) -> int:
    """Scales of blocks of K that a thread copies for a k tile, at most."""
    return sum(-(-count // SCALE_THREADS) for count in scale_counts(config, signature))


def shared_bytes(config: HopperConfig, signature: Signature) -> int:
    """Bytes of shared memory behind the barriers for these scales, fp32: each side in whole 16 bytes."""
    return config.stages * sum(-(-count // 4) * 16 for count in scale_counts(config, signature))


def why_invalid(config: HopperConfig, signature: Signature) -> str | None:
    """None when the configuration can promote as the signature asks, or need not; else why not."""
    if TYPES[signature.dtype].is_integer and config.in_arrival_order:
        return "arrival adds up fp32 numbers in the L2 cache; sums of int8 products are int32"
    every, twin, half = signature.promotion, "twin" in config.options, "half" in config.options
    if (twin or half) and (every != config.bk or signature.parts is not None):
        name = "twin" if twin else "half"
        return (
            f"{name} is for sums promoted after every k tile; accepted are promoted sums of fp8 and a bk of {SCALE_K}"
        )
    if every is None:
        return None
    if every % config.bk:
        return f"bk is {config.bk}; sums promoted every {every} of K need a k tile that divides {every}"
    scales = signature.epilogue.program.block_scales
    if scales and config.bk != SCALE_K:
        return f"bk is {config.bk}; scales of {SCALE_K} of K need a k tile of {SCALE_K}"
    lessons = [name for name in ("solo", "fat", "zero") if name == config.schedule or name in config.options]
    if lessons:
        return f"{lessons[0]} of the teaching ladder adds up all of K in the tensor cores; these sums are promoted"
    if half:
        return _why_not_half(config, signature)
    most = (MOST_DIVIDED if config.cluster_k > 1 else MOST_ACCUMULATORS)[config.consumers]
    if scales:
        most = min(most, MOST_SCALED[config.consumers])
    if scales and signature.epilogue.gating and signature.work != DENSE and config.consumers == 3:
        most = min(most, MOST_DIVIDED[3])
    if config.consumers == 2 and _copies_much(config, signature):
        most = min(most, MOST_WITH_COPIES)
    if twin:
        most = min(most, MOST_TWIN[config.consumers])
    if config.accumulators > most:
        return f"{config.accumulators} accumulators a thread and as many partial sums; more than {most} spill"
    return None


def _why_not_half(config: HopperConfig, signature: Signature) -> str | None:
    """Why a configuration with option half cannot promote as the signature asks."""
    scales = signature.epilogue.program.block_scales
    if any(given.scales not in ("a1", f"b{SCALE_K}") for given in scales.values()):
        return f"half has scales of 1 x {SCALE_K} of A and of {SCALE_K} x {SCALE_K} of B, or none of blocks"
    if signature.halves < SCALE_K:
        return (
            f"{signature.halves} is the largest power of two that divides the columns of gate and those of up; half "
            f"has scales of blocks of them where {SCALE_K} does"
        )
    if config.group_rows == BLOCK_ROWS and config.bn % 32:
        return f"bn is {config.bn}; half of a tile's columns, which one WGMMA has with half, need a multiple of 32"
    most = MOST_HALF_SCATTERED if signature.work in (SCATTERED, RAGGED_N) else MOST_HALF
    if config.accumulators > most:
        return f"{config.accumulators} accumulators a thread and half as many partial sums; more than {most} spill"
    return None
