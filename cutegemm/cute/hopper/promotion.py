"""Rules of promotion: which configurations may add the tensor cores' sums into fp32 registers every few k tiles.

A promoted kind of products (`DType.promoted`) keeps two sets of registers a consumer thread: partial sums, which WGMMA
writes, and the accumulators. So a tile has half as many elements as without promotion. `promoted` is the device's side.

Here is no DSL: the rule of validity is asked before anything is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutegemm.problem.dtypes import TABLE

if TYPE_CHECKING:
    from cutegemm.cute.hopper.config import HopperConfig
    from cutegemm.problem import Signature

MOST_ACCUMULATORS = {1: 112, 2: 112, 3: 64}
"""Most accumulators a thread, by consumer warpgroups; with more, ptxas spills (tests/compile/test_fp8.py)."""
MOST_DIVIDED = {1: 96, 2: 96, 3: 48}
"""The same for clusters along K, whose exchange needs more addresses."""
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


def why_invalid(config: HopperConfig, signature: Signature) -> str | None:
    """None when the configuration can promote as the signature asks, or need not; else why not."""
    if TABLE[signature.dtype].is_integer and config.in_arrival_order:
        return "arrival adds up fp32 numbers in the L2 cache; sums of int8 products are int32"
    every = signature.promotion
    if every is None:
        return None
    if every % config.bk:
        return f"bk is {config.bk}; sums promoted every {every} of K need a k tile that divides {every}"
    lessons = [name for name in ("solo", "fat", "zero") if name == config.schedule or name in config.options]
    if lessons:
        return f"{lessons[0]} of the teaching ladder adds up all of K in the tensor cores; these sums are promoted"
    most = (MOST_DIVIDED if config.cluster_k > 1 else MOST_ACCUMULATORS)[config.consumers]
    if config.accumulators > most:
        return f"{config.accumulators} accumulators a thread and as many partial sums; more than {most} spill"
    return None
