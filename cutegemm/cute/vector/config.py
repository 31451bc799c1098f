"""Configurations of the family vector; `vector.kernel` explains what the numbers mean.

The text form is that of `warps.config`, `vector/BMxBNxBK/wWMxWN/sSTAGES/gGROUP[/xSLICES][/kSPLITS]`, for example
`vector/1x64x128/w1x8/s2/g1`. One of BM and BN is small, 1 to 8: the *thin* side. The other operand is the *matrix*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from cutegemm.cute.warps.config import TileConfig
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Kind, Signature
from cutegemm.problem.dtypes import why_not_taken

TAKES: tuple[Kind, ...] = (("fp32", "ieee"),)
THIN = (1, 2, 4, 8)
"""Sizes of the thin side."""
COLUMNS = 8
"""The thin side along N has these columns: the epilogue stores rows by pieces of four at least, two lanes a row."""
LANE_BYTES = 16


@dataclass(frozen=True)
class Slabs:
    """A tile as the epilogue of `warps.part_sum` sees it: slabs of (wm, wn) take the place of warp tiles."""

    config: VectorConfig
    bm: int
    bn: int
    wm: int
    wn: int
    group: int
    splits: int
    threads: int
    crossed: bool = False

    def pieces(self, signature: Signature) -> tuple[int, int]:
        return self.config.pieces(signature)


@dataclass(frozen=True)
class VectorConfig(TileConfig):
    """A configuration of `vector.kernel`.

    Attributes:
        wm, wn: a warp's part of the tile: the whole thin side, and rows or columns of the matrix. bk: depth of a step
            of one slice. stages: steps whose loads are under way. slices: groups of warps that share the tile's depth.
    """

    slices: int = 1

    family: ClassVar[str] = "vector"
    PATTERN: ClassVar[str] = TileConfig.PATTERN + r"(?:/x(?P<slices>\d+))?"

    def _more_text(self) -> str:
        return f"/x{self.slices}" if self.slices != 1 else ""

    @classmethod
    def form(cls) -> str:
        return super().form().replace("[/kSPLITS]", "[/xSLICES][/kSPLITS]")

    @property
    def thin_m(self) -> bool:
        """Whether the thin side is M; else it is N."""
        return self.bm in THIN

    @property
    def thin(self) -> int:
        return self.bm if self.thin_m else self.bn

    @property
    def long(self) -> tuple[int, int]:
        """The tile's and a warp's extent along the matrix's side."""
        return (self.bn, self.wn) if self.thin_m else (self.bm, self.wm)

    @property
    def threads(self) -> int:
        return super().threads * self.slices

    @property
    def slab(self) -> tuple[int, int]:
        """(rows, columns) of the tile that the epilogue takes for a warp tile: a warp stores a row of 128 at most."""
        return (self.bm, min(self.bn, 128)) if self.thin_m else (self.bm, self.bn)

    def along_k(self, signature: Signature) -> bool:
        """Whether the matrix is K-major: lanes lie along K; else along its other side."""
        return (signature.b_major if self.thin_m else signature.a_major) == "k"

    def vectors(self, signature: Signature) -> int:
        """Elements of a lane's loads of the matrix: as many as its alignment allows, at most 16 bytes."""
        return min(signature.align_b if self.thin_m else signature.align_a, LANE_BYTES) // 4

    def held(self, along_k: bool) -> tuple[int, int]:
        """(rows or columns, depth) of the matrix that a lane holds of a step."""
        _, warp = self.long
        return (warp, self.bk // 32) if along_k else (warp // 32, self.bk)

    def smem_bytes(self, signature: Signature) -> int:
        """Dynamic shared memory of a CTA in bytes: the sums of all slices."""
        return self.slices * self.bm * self.bn * 4

    def pieces(self, signature: Signature) -> tuple[int, int]:
        rows, columns = self.slab
        return min(self._pass_rows(signature, columns), rows), columns

    def in_slabs(self) -> Slabs:
        """The tile as the epilogue sees it."""
        return Slabs(self, self.bm, self.bn, *self.slab, self.group, self.splits, self.threads)

    def why_invalid(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        if refused := why_not_taken("the kernel for thin results multiplies", TAKES, signature.kind):
            return refused
        if signature.epilogue.gating:
            return "gate and up need two columns of a wide tile; the kernel for thin results takes programs of acc"
        if not self.thin_m and self.bn != COLUMNS:
            return f"tile {self.bm}x{self.bn}; bm is 1, 2, 4 or 8 (the thin side), or bn is {COLUMNS}"
        if (self.wm if self.thin_m else self.wn) != self.thin:
            return f"warp tile {self.wm}x{self.wn}; a warp has the whole thin side of {self.bm}x{self.bn}"
        common = self._why_common_invalid(signature)
        if common:
            return common
        if self.slab[1] * ITEMSIZE[signature.out_dtype] > 32 * 16 or self.long[0] < 16:
            return f"tile {self.bm}x{self.bn}; the long side is 16 or more"
        return self._why_loads_invalid(signature)

    def _why_loads_invalid(self, signature: Signature) -> str | None:
        along_k = self.along_k(signature)
        least = 32 * (LANE_BYTES // 4)
        across, _ = self.long[1], self.bk
        if along_k and (self.bk % least or across > 16):
            return (
                f"bk is {self.bk} and a warp has {across} rows of a K-major matrix; accepted are {least}s and 1 to 16"
            )
        if not along_k and (across % least or not 4 <= self.bk <= 32):
            return f"a warp has {across} of a row of the matrix and {self.bk} rows; accepted are {least}s, and 4 to 32"
        if not 1 <= self.stages <= 4:
            return f"stages is {self.stages}; accepted are 1 to 4"
        if self.slices not in (1, 2, 4, 8, 16):
            return f"slices is {self.slices}; accepted are 1, 2, 4, 8 and 16"
        if self.registers(along_k) > min(255, 65536 // self.threads // 8 * 8):
            return f"{self.registers(along_k)} registers a thread of {self.threads}; accumulators and loads spill"
        return None

    def registers(self, along_k: bool) -> int:
        """Registers of a thread: accumulators, loads of the matrix and of the thin operand, addresses."""
        across, depth = self.held(along_k)
        return self.thin * across + self.stages * across * depth + 2 * self.thin * depth + 2 * across + 64

    def estimated_registers(self, signature: Signature, arch: Arch) -> int:
        return min(self.registers(self.along_k(signature)), arch.registers_per_thread)

    @classmethod
    def space(cls, itemsize: int = 4) -> Iterator[VectorConfig]:
        """Every configuration the tuner may consider, before the validity rule; operands have 4 bytes."""
        for thin, (across, bk), crew, slices, stages in product(
            THIN, ((4, 128), (8, 128), (8, 256), (16, 128), (128, 4), (128, 8), (128, 16), (256, 8)), (1, 2, 4, 8),
            (1, 2, 4, 8), (1, 2, 3),
        ):  # fmt: skip
            yield cls(thin, across * crew, bk, thin, across, stages, 8, slices)
            if thin == COLUMNS:
                yield cls(across * crew, thin, bk, across, thin, stages, 8, slices)
