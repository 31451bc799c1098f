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

if TYPE_CHECKING:
    from cutegemm.cute.hopper.config import HopperConfig
    from cutegemm.problem import Signature

MOST_ACCUMULATORS = {1: 112, 2: 112, 3: 64}
"""Most accumulators a thread, by consumer warpgroups; with more, ptxas spills (tests/compile/test_fp8.py)."""
MOST_SCALED = {1: 80, 2: 96, 3: 64}
"""The same with scales of blocks of K."""
MOST_DIVIDED = {1: 96, 2: 96, 3: 48}
"""The same for clusters along K, whose exchange needs more addresses."""
MOST_COMPENSATED = 32
"""Most accumulators a thread of sums of parts that are compensated, in twice as many registers as other promoted sums.
Tiles of more are for results that fill the GPU, where the time of promotions counts."""
CONSUMER_REGISTERS = (24, 240)
"""Registers a thread of (producer, consumers) after setmaxnreg, for two consumer warpgroups."""


def interval(config: HopperConfig, signature: Signature) -> int:
    """K tiles from one promotion to the next; 0 for products that are not promoted."""
    return (signature.promotion or 0) // config.bk


def registers(config: HopperConfig, signature: Signature) -> tuple[int, int] | None:
    """Registers a thread of (producer, consumers) after setmaxnreg; None where the even share is already 255."""
    if signature.promotion and config.consumers == 2 and config.registers is not None:
        return CONSUMER_REGISTERS
    return config.registers


def compensates(config: HopperConfig, signature: Signature) -> bool:
    """Whether what promotions round off is kept and added at the end (`promoted.CompensatedProducts`)."""
    return signature.parts is not None and config.accumulators <= MOST_COMPENSATED


def column_blocks(config: HopperConfig) -> int:
    """The most blocks of 128 columns of accumulators that a tile lies in."""
    last = SCALE_K - math.gcd(config.bn, SCALE_K)
    return -(-(last + config.bn) // SCALE_K)


def _across(config: HopperConfig, signature: Signature) -> int:
    """Columns of the accumulators that share a scale: 1 or 128; 0 where they have none."""
    given = signature.epilogue.program.block_scales.get("a" if config.swapped else "b")
    return int(given.scales[1:]) if given else 0


def shared_columns(config: HopperConfig, signature: Signature) -> int:
    """Numbers of a buffer in shared memory for the scales of a tile's columns: whole rounds of 128 threads, or 0."""
    return -(-config.bn // 128) * 128 if _across(config, signature) == 1 else 0


def shared_bytes(config: HopperConfig, signature: Signature) -> int:
    """Bytes of shared memory behind the barriers: two such buffers a warpgroup, fp32."""
    return 2 * config.consumers * 4 * shared_columns(config, signature)


def why_invalid(config: HopperConfig, signature: Signature) -> str | None:
    """None when the configuration can promote as the signature asks, or need not; else why not."""
    if TYPES[signature.dtype].is_integer and config.in_arrival_order:
        return "arrival adds up fp32 numbers in the L2 cache; sums of int8 products are int32"
    every = signature.promotion
    if every is None:
        return None
    if every % config.bk:
        return f"bk is {config.bk}; sums promoted every {every} of K need a k tile that divides {every}"
    scales = signature.epilogue.program.block_scales
    if scales and config.bk != SCALE_K:
        return f"bk is {config.bk}; scales of {SCALE_K} of K need a k tile of {SCALE_K}"
    if scales and signature.epilogue.gating:
        return "gate and up are columns of two places; scales of blocks of K are not for them"
    if scales and _across(config, signature) == SCALE_K and column_blocks(config) > 2:
        return f"bn is {config.bn}; scales of {SCALE_K} columns need one that lies within two blocks of {SCALE_K}"
    lessons = [name for name in ("solo", "fat", "zero") if name == config.schedule or name in config.options]
    if lessons:
        return f"{lessons[0]} of the teaching ladder adds up all of K in the tensor cores; these sums are promoted"
    most = (MOST_DIVIDED if config.cluster_k > 1 else MOST_ACCUMULATORS)[config.consumers]
    if scales:
        most = min(most, MOST_SCALED[config.consumers])
    if config.accumulators > most:
        return f"{config.accumulators} accumulators a thread and as many partial sums; more than {most} spill"
    return None
