"""Which kernel adds up, gathers, spreads or clears rows of a mixture: its signature, and the tile of a CTA.

A thread has `bytes` neighbouring bytes of one token's row. It loads the numbers of the token's other rows, and then:

    add up   its part of each of these rows, which it adds up in fp32 in the order of the choices, and rounds once
    gather   its part of the one row, which it copies; zeros where the number is of no row
    spread   its part of the token's row, which it copies to all of them: each byte is read once

Or rows are groups, whose ends stand in place of the numbers of rows:

    clear    writes zeros into the rows behind the last group, and nothing else

No atomics: every run gives the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutegemm.cute.standalone import why_too_old
from cutegemm.hardware.arch import Arch

DOES = ("add up", "gather", "spread", "clear")
POINTERS = ("given", "row_of", "made")
"""The addresses that a kernel takes: the rows that it reads, the number of each slot's row, and what it writes."""
MOST_UNROLLED = 16
"""Rows of a token whose loads are all under way at a time; more of them are added up in a loop."""
MOST_VECTORS = 2**31 - 2**16
"""Vectors are counted in 32 bits, up to the end of the last CTA's."""
MOST_CLEARED = 2**30
"""Vectors of a result that is cleared: a thread's next vector lies as far on as there are threads, in 32 bits too."""


@dataclass(frozen=True)
class Signature:
    """What the machine code of a kernel depends on, besides its tile.

    Attributes:
        dtype: "fp16", "bf16" or "fp32". bytes: of a vector, 16 or what divides a row. top_k: rows of a token; 0: any
            number. does: one of `DOES`.
    """

    dtype: str
    bytes: int
    top_k: int
    does: str = "add up"

    def __str__(self) -> str:
        return f"{self.does} {self.top_k or 'any'} {self.dtype} {self.bytes}"


class Tile(NamedTuple):
    """A CTA of so many threads."""

    threads: int = 256

    def __str__(self) -> str:
        return f"combine/t{self.threads}"

    def why_invalid(self, arch: Arch) -> str | None:
        """None when that GPU can run a kernel of this tile, else a sentence."""
        return why_too_old(self, arch)
