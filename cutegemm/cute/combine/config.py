"""Which kernel adds up the rows of a mixture's tokens, or gathers rows: its signature, and the tile of a CTA.

A thread has `bytes` neighbouring bytes of one token's sum. It loads the numbers of the token's rows, then its part of
each row, adds these up in fp32 in the order of the choices, and rounds once. No atomics: every run gives the same. One
row a token is copied as it is: that gathers rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutegemm.cute.standalone import begins_early
from cutegemm.hardware.arch import Arch

POINTERS = ("parts", "row_of", "sums")
"""The addresses that a kernel takes: the rows, the number of each slot's row, and what is written."""
OLDEST = (8, 0)
"""The compute capability of the oldest GPU that the kernels are compiled for."""
MOST_UNROLLED = 16
"""Rows of a token whose loads are all under way at a time; more of them are added up in a loop."""
MOST_VECTORS = 2**31 - 2**16
"""Vectors are counted in 32 bits, up to the end of the last CTA's."""


@dataclass(frozen=True)
class Signature:
    """What the machine code of a kernel depends on, besides its tile.

    Attributes:
        dtype: "fp16", "bf16" or "fp32". bytes: of a vector, 16 or what divides a row. top_k: rows of a token; 0: any
            number. checked: a number may be of no row, for which zeros are taken.
    """

    dtype: str
    bytes: int
    top_k: int
    checked: bool = False

    def __str__(self) -> str:
        return f"combine {self.top_k or 'any'} {self.dtype} {self.bytes}" + " checked" * self.checked


class Tile(NamedTuple):
    """A CTA of so many threads."""

    threads: int = 256

    def begins_early(self, ctas: int, arch: Arch) -> bool:
        """Whether a launch of so many CTAs may begin before the kernel in front of it has ended."""
        return begins_early(ctas, self.threads, arch)

    def __str__(self) -> str:
        return f"combine/t{self.threads}"

    def why_invalid(self, arch: Arch) -> str | None:
        """None when that GPU can run a kernel of this tile, else a sentence."""
        if arch.capability < OLDEST:
            return f"{self}: the kernel needs compute capability {OLDEST[0]}.{OLDEST[1]} or newer"
        return None
