"""Works whose groups have sizes that the device knows: where they lie in the WGMMA's operands, and which configurations
compute them. Here is no DSL.

A tile belongs to one group. It begins at a row (or column, or k) that no tile divides, and ends where the group ends:

    loads     begin anywhere. What lies beyond the group's end is loaded as zeros where it is a row in memory (`clip`),
              and is another group's, whose results nobody stores, where rows of the operand are contiguous in memory
    sums      of a ragged K must be clipped, on both sides: a zero times a NaN of another group would be a NaN
    stores    are clipped where D's groups are rows in memory; where they are columns, the slabs store them one by one
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from cutegemm.cute.hopper.promotion import registers
from cutegemm.problem.dtypes import ITEMSIZE
from cutegemm.problem.work import DENSE, GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, ROWS, SCATTERED

if TYPE_CHECKING:
    from cutegemm.cute.hopper.config import HopperConfig
    from cutegemm.problem import Signature

WORKS = (DENSE, RAGGED_M, RAGGED_N, RAGGED_K, MASKED, GATHERED, SCATTERED)
"""Names of `problem.work` that the kernel takes; `grouped_work.make_work` has the classes."""

WARPGROUP = 128
GATHER_REGISTERS = 40
"""Registers of a producer thread that keeps the indices of its rows."""
MOST_GATHERED = 16
"""Most rows of a tile that such a thread copies pieces of; ptxas spilled with 32."""


class Grouping(NamedTuple):
    """Where the ragged extent lies.

    along: "row" or "column" of the accumulators, or "k"; None in dense works. masked: it begins at 0 in each matrix.
    """

    along: Literal["row", "column", "k"] | None
    masked: bool = False

    def of_operand(self, side: Literal["row", "column"]) -> Literal["rows", "k"] | None:
        """What the groups divide of the WGMMA's operand along that side: its "rows", its "k", or None for nothing."""
        if self.along == "k":
            return "k"
        return "rows" if self.along == side and not self.masked else None


def of(config: HopperConfig, work: str) -> Grouping:
    """The grouping of a work in a configuration."""
    if work == RAGGED_K:
        return Grouping("k")
    if work == RAGGED_N:
        return Grouping("row" if config.swapped else "column")
    if work in (*ROWS, MASKED):
        return Grouping("column" if config.swapped else "row", work == MASKED)
    return Grouping(None)


def clips_results(work: str) -> bool:
    """Whether the groups are rows of D, at whose ends TMA stores are clipped."""
    return work in (RAGGED_M, GATHERED, MASKED)


def stores_boxes(work: str) -> bool:
    """Whether TMA can store the results: rows of D are neighbours, and tiles begin at columns that 16 bytes divide."""
    return work not in (RAGGED_N, SCATTERED)


def why_invalid(config: HopperConfig, signature: Signature) -> str | None:
    """None when a configuration computes the signature's work, else why not."""
    work = signature.work
    if config.fits and (why := _why_not_fitted(config, signature)):
        return why
    if work == DENSE:
        return None
    if config.parts > 1:
        return f"{work} products have K in one part, which streamk may cut; accepted are no splits or clusters along K"
    if config.solo:
        return f"solo is a lesson in dense products; this one is {work}"
    if work == RAGGED_K and config.stream_k:
        return "streamk cuts tiles that all have the same K; with a ragged K they differ from group to group"
    return _why_not_gathered(config, signature) if work == GATHERED else None


def _why_not_fitted(config: HopperConfig, signature: Signature) -> str | None:
    """Why tiles cannot be fitted to the rows of groups; None where they can."""
    if signature.work not in ROWS:
        return (
            f"fit divides the rows of groups among tiles; this product is {signature.work}, accepted: {', '.join(ROWS)}"
        )
    if not config.swapped:
        return "fit narrows the n of WGMMAs, along which rows lie with swapped operands; accepted is fit with swap"
    if ITEMSIZE[signature.dtype] != 2:
        return f"fit narrows WGMMAs of operands of 16 bits; these are {signature.dtype}"
    if config.bn % 16:
        return f"fit narrows tiles by 16 columns; bn is {config.bn}, no multiple of 16"
    return None


def _why_not_gathered(config: HopperConfig, signature: Signature) -> str | None:
    if signature.precision == "tf32":
        return "cp.async, which gathers rows of A, does not round them to tf32; gather them first"
    if config.cluster[0 if config.swapped else 1] > 1:
        return "each CTA gathers its rows of A by itself; accepted are clusters that share B only"
    extent = config.bn if config.swapped else config.bm
    copies = -(-extent * config.bk * ITEMSIZE[signature.dtype] // (16 * WARPGROUP))
    if copies > MOST_GATHERED:
        return f"a producer thread would gather {copies} rows of a tile; accepted are up to {MOST_GATHERED}"
    dealt = registers(config, signature)
    if dealt is not None and config.stream_k:
        return "a producer thread that gathers rows has no registers left for streamk; accepted is coop1, or no streamk"
    if dealt is not None and dealt[0] < GATHER_REGISTERS:
        return f"a producer thread has {dealt[0]} registers; gathering rows takes {GATHER_REGISTERS}"
    return None
