"""The dynamic shared memory of a CTA of the Hopper kernel, from its first byte on.

    ring        `stages` tiles of A, then `stages` tiles of B, and unused bytes up to a multiple of 1024
    staging     what the epilogue needs for itself: staging buffers and a bias, or slabs
    barriers    two mbarriers a stage (`pipeline.Ring`), then the two of ping-pong (`pipeline.Turns`)
    answers     an int32 a consumer warpgroup: what one of its threads has read of the workspace, for the other 127
    meeting     mbarriers of a sum within a cluster (`cluster_sum`), or of operands in the ring (`ahead`)
    scales      of blocks of K, for each stage of the ring (`block_scales`)

`HopperConfig.smem_bytes` adds up the same sizes.
"""

from __future__ import annotations

import cutlass

from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.promotion import shared_bytes
from cutegemm.problem import Signature

BARRIER = 8
"""Bytes of an mbarrier."""


class SharedMemory:
    """Pointers to the first byte of each part; made on the device, where it allocates the memory."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        size = config.smem_bytes(signature)
        self.ring = cutlass.memory.SmemAllocator().allocate(size, byte_alignment=1024)
        self.staging = self.ring + config.ring_bytes(signature)
        self.barriers = self.staging + config.epilogue_bytes(signature)
        self.turns = self.barriers + 2 * config.stages * BARRIER
        self.answers = self.turns + 2 * BARRIER
        self.meeting = self.answers + 16
        self.scales = self.ring + (size - shared_bytes(config, signature))
