"""Which kernel sorts the slots of a mixture by expert: its signature, and the tile of a CTA.

A slot is one choice of one token: slot = token * top_k + choice. A thread has `deep` slots, a warp neighbouring ones. A
CTA counts the slots of each expert warp by warp, adds the counts up, and so knows the place of each slot; slots of one
expert keep their order. No atomics: every run gives the same.

    passes                   where
    "whole"                  one CTA takes all slots
    "count", then "place"    more slots: the first launch writes the counts of each CTA, the second one adds them up
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutegemm.cute.standalone import why_too_old
from cutegemm.hardware.arch import Arch

WARP = 32
MOST_WARPS = 32
LEAST_EXPERTS, MOST_EXPERTS = 32, 1024
PASSES = ("whole", "count", "place")
INDICES, WEIGHTS = ("int32", "int64"), ("fp16", "bf16", "fp32")
POINTERS = ("experts", "weights", "ends", "places", "rows", "sorted", "row_of", "counts")
"""The addresses that a kernel takes: what is read (of each token and choice); what is written, by expert, by place and
by slot; and the counts that two launches exchange, by CTA and expert."""
MOST_OF_ONE = 1024
"""Slots that one CTA sorts alone. Its stores go to as many sectors, one after the other: 4096 take it 14.6 us, eight
CTAs 4.4 (H200)."""
STEPS = (16, 1, 48), (32, 1, 128)
"""(warps, slots of a thread, most CTAs) of more slots: each of the CTAs that place reads the counts of all."""
MOST_DEEP = 4


@dataclass(frozen=True)
class Signature:
    """What the machine code of a kernel depends on, besides its tile.

    Attributes:
        does: one of `PASSES`. index: dtype of the experts' numbers, one of `INDICES`. weight: one of `WEIGHTS`.
    """

    does: str
    index: str
    weight: str

    def __str__(self) -> str:
        return f"{self.does} {self.index} {self.weight}"


class Tile(NamedTuple):
    """A CTA: its warps, for how many experts it has counters (a power of 2), and the slots of each thread."""

    warps: int
    experts: int
    deep: int

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def slots(self) -> int:
        """Slots of a CTA."""
        return self.threads * self.deep

    def smem_bytes(self) -> int:
        """Shared memory: a counter of each expert for each warp, a sum of each warp, two sums of each thread."""
        return 4 * (self.warps * (self.experts + 1) + 2 * self.threads)

    def __str__(self) -> str:
        return f"routing/w{self.warps}/e{self.experts}/d{self.deep}"

    def why_invalid(self, arch: Arch) -> str | None:
        """None when that GPU can run a kernel of this tile, else a sentence."""
        if self.experts & (self.experts - 1) or not LEAST_EXPERTS <= self.experts <= MOST_EXPERTS:
            return f"{self}: counters are those of a power of 2 experts, {LEAST_EXPERTS} to {MOST_EXPERTS}"
        if not 1 <= self.warps <= MOST_WARPS or self.threads % self.experts or self.deep < 1:
            return f"{self}: each expert has threads that add its counters up, and a CTA has at most {MOST_WARPS} warps"
        if (why := why_too_old(self, arch)) is not None:
            return why
        if self.smem_bytes() > arch.smem_per_cta:
            return f"{self}: it needs {self.smem_bytes()} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return None


def choose(slots: int, experts: int) -> tuple[Tile, int]:
    """(the tile, how many CTAs) for so many slots and experts, as timed on an H200 (docs/mixtures.md)."""
    capacity = max(1 << (experts - 1).bit_length(), LEAST_EXPERTS)
    least = capacity // WARP
    if slots <= MOST_OF_ONE:
        warps = least
        while warps < MOST_WARPS // 2 and warps * WARP < slots:
            warps *= 2
        return Tile(warps, capacity, -(-slots // (warps * WARP))), 1
    for warps, deep, most in STEPS:
        tile = Tile(max(warps, least), capacity, deep)
        if slots <= most * tile.slots:
            break
    else:
        tile = Tile(MOST_WARPS, capacity, MOST_DEEP)
    return tile, -(-slots // tile.slots)
