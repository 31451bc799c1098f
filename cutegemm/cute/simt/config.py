"""Configurations of the family simt; `warps.config` explains the text form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from cutegemm.cute.launch_config import SLAB_ROWS
from cutegemm.cute.warps.config import TRANSPOSE_PAD, TileConfig
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Kind, Signature
from cutegemm.problem.dtypes import why_not_taken

TAKES: tuple[Kind, ...] = (("fp32", "ieee"),)
SPLIT_WIDE = (
    (128, 256, 16, 64, 64, 3, 1), (256, 128, 16, 64, 64, 3, 1), (128, 128, 8, 64, 64, 4, 1),
    (128, 64, 8, 64, 64, 3, 1), (64, 128, 8, 64, 64, 3, 1),
)  # fmt: skip
"""(bm, bn, bk, wm, wn, stages, slices) of 128 accumulators a thread whose kernels spill four registers at most with
splits of K."""

RESIDENT: Mapping[tuple[int, ...], int] = {
    (128, 128, 8, 64, 32): 2,
    (64, 128, 16, 32, 64): 3,
    (64, 128, 16, 32, 32): 2,
    (64, 64, 16, 32, 64): 6,
    (64, 64, 16, 32, 32): 4,
    (32, 128, 16, 32, 32): 4,
    (32, 64, 16, 32, 32): 8,
    (64, 32, 16, 32, 32): 8,
    (64, 64, 8, 32, 32): 4,
    (64, 128, 8, 32, 64): 3,
    (32, 64, 16, 32, 64): 12,
    (128, 32, 16, 64, 32): 6,
    (32, 128, 16, 32, 64): 6,
}
"""The most CTAs of an SM that the registers of a tile (bm, bn, bk, wm, wn) may be bounded for. A plain product of
operands aligned to 16 bytes spills none then, but for two registers of 64x128x16 with warps of 32x64 and majors `nn`,
and for 32x64x16 with warps of 32x64 and 128x32x16 with majors `tn`; `candidates` has what else spills."""


@dataclass(frozen=True)
class SimtConfig(TileConfig):
    """A configuration of `simt.kernel`: fp32 on CUDA cores. A warp is 4 x 8 lanes; the thread tile follows.

    `/xSLICES` at the end of the text, as in `simt/32x32x64/w32x32/s3/g8/x8`, is sliced K (`simt.sliced`): so
    many groups of warps share the CTA tile, each multiplies its part of a stage, and their sums meet at the end.

    `/rRESIDENT` matters for the smaller tiles: without it the compiler loads fragments ahead into every register that
    one CTA may have, and an SM holds one or two CTAs of 4 to 8 warps, which wait for each other at every stage.

    Attributes:
        slices: of each stage along K; 1: every warp multiplies the whole depth.
    """

    slices: int = 1

    family: ClassVar[str] = "simt"
    crossed: ClassVar[bool] = True
    PATTERN: ClassVar[str] = TileConfig.PATTERN + r"(?:/x(?P<slices>\d+))?"
    MOST_RESIDENT: ClassVar[Mapping[tuple[int, ...], int]] = RESIDENT
    CHUNK: ClassVar[int] = 4
    """Depth that a warp of a slice loads at a time: 16 bytes of a K-major row."""

    def _more_text(self) -> str:
        return f"/x{self.slices}" if self.slices != 1 else ""

    @classmethod
    def form(cls) -> str:
        return super().form().replace("[/kSPLITS]", "[/xSLICES][/rRESIDENT][/kSPLITS]")

    def _tile(self) -> tuple[int, ...]:
        return self.bm, self.bn, self.bk, self.wm, self.wn, self.stages, self.slices

    @property
    def threads(self) -> int:
        return super().threads * self.slices

    @property
    def chunks(self) -> int:
        """Steps of `CHUNK` that one slice makes in a stage."""
        return self.bk // (self.CHUNK * self.slices)

    @property
    def buffers(self) -> int:
        """Fragments that a thread of a sliced kernel holds: the next beside the current one where registers allow.

        They must allow all chunks of a stage: with two buffers the compiler loads as many ahead.
        """
        return 2 if self.chunks > 1 and self._registers(self.chunks) <= self._registers_at_most() else 1

    def _registers(self, buffers: int) -> int:
        """Registers of a thread of a sliced kernel: accumulators, fragments, addresses."""
        tm, tn = self.thread_tile
        return tm * tn + buffers * self.CHUNK * (tm + tn) + 64

    def _registers_at_most(self) -> int:
        return min(255, 65536 // self.threads // 8 * 8)

    def slab_bytes(self) -> int:
        """Shared memory of the epilogue; slices keep the sums of their whole warp tile there."""
        whole = self.slices * self.wm // SLAB_ROWS if self.slices > 1 else 1
        return super().slab_bytes() * whole

    def pieces(self, signature: Signature) -> tuple[int, int]:
        rows, columns = super().pieces(signature)
        # With slices a warp has every so many rows of the warp tile, as many as its lanes read at a time.
        return self._pass_rows(signature, columns) if self.slices > 1 else rows, columns

    @property
    def thread_tile(self) -> tuple[int, int]:
        """Outputs of one thread: (wm / 4, wn / 8)."""
        return self.wm // 4, self.wn // 8

    def smem_bytes(self, signature: Signature) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        pad = TRANSPOSE_PAD if self.slices == 1 else 0
        rows = sum(
            extent + (pad if major == "k" else 0)
            for extent, major in ((self.bm, signature.a_major), (self.bn, signature.b_major))
        )
        return max(self.stages * rows * self.bk * 4, self.slab_bytes())

    def why_invalid(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        if refused := why_not_taken("the CUDA-core kernel multiplies", TAKES, signature.kind):
            return refused
        common = self._why_common_invalid(signature)
        if common:
            return common
        tm, tn = self.thread_tile
        if tm % 4 or tn % 4 or tm == 0 or tn == 0:
            return (
                f"warp tile {self.wm}x{self.wn} gives a thread {tm}x{tn}; both must be multiples of 4 (16-byte loads)"
            )
        if tm * tn > 128:
            return f"thread tile {tm}x{tn}; more than 128 accumulators spill"
        if tm * tn + 32 > self._registers_at_most():
            return f"thread tile {tm}x{tn} with {self.threads} threads; accumulators spill"
        if self.splits != 1 and tm * tn > 64 and self._tile() not in SPLIT_WIDE:
            wide = ", ".join(f"{bm}x{bn}x{bk} (s{stages})" for bm, bn, bk, _, _, stages, _ in SPLIT_WIDE)
            return (
                f"thread tile {tm}x{tn} and {self.splits} splits of K; beside more than 64 accumulators the part's "
                f"place spills, but with {wide} and warps of 64x64"
            )
        if self.bk < 8:
            return f"bk is {self.bk}; at least 8"
        if self.slices != 1:
            problem = self._why_slices_invalid(signature)
            if problem:
                return problem
        if not 2 <= self.stages <= 8:
            return f"stages is {self.stages}; accepted are 2 to 8"
        for side, extent in (("bm", self.bm), ("bn", self.bn)):
            if extent * self.bk < 4 * self.threads:
                return f"{side} x bk is {extent * self.bk} elements for {self.threads} threads; each must load four"
        if self.smem_bytes(signature) > arch.smem_per_cta:
            return f"{self.smem_bytes(signature)} B of shared memory; {arch.name} gives a CTA {arch.smem_per_cta}"
        room = arch.smem_per_sm // self.resident - arch.smem_reserved_per_cta
        if self.resident > 1 and self.smem_bytes(signature) > room:
            return f"{self.smem_bytes(signature)} B of shared memory; {self.resident} CTAs on an SM have {room} each"
        return None

    def _why_slices_invalid(self, signature: Signature) -> str | None:
        tm, tn = self.thread_tile
        if self.slices not in (1, 2, 4, 8, 16):
            return f"slices is {self.slices}; accepted are 1, 2, 4, 8 and 16"
        if self.bk < 32 or self.chunks < 1:
            return f"bk is {self.bk}; at least {max(32, self.CHUNK * self.slices)} for {self.slices} slices"
        if self.chunks > 4:
            return (
                f"{self.bk // self.slices} of each stage a slice; over 16 the compiler loads too far ahead and spills"
            )
        if self._registers(1) > self._registers_at_most():
            return f"thread tile {tm}x{tn} with {self.threads} threads; accumulators and fragments spill"
        copies = self._copies(self.bm, signature.align_a) + self._copies(self.bn, signature.align_b)
        if self._registers(self.buffers) + 4 * max(copies - 4, 0) > self._registers_at_most():
            return f"{copies} copies a thread and stage; their addresses spill beside a thread tile of {tm}x{tn}"
        if tn > 8 and signature.b_major == "k" and copies > 6:
            return f"{copies} copies a thread and stage; they spill beside {tn} columns of a K-major B, 4 deep each"
        return None

    def _copies(self, extent: int, align: int) -> int:
        """Copies of an operand that a thread makes for a stage, at most 16 bytes each."""
        return max(extent * self.bk * 4 // (max(align, 4) * self.threads), 1)

    @classmethod
    def space(cls, itemsize: int = 4) -> Iterator[SimtConfig]:
        """Every configuration the tuner may consider, before the validity rule; operands have 4 bytes."""
        for bm, bn, bk, wm, wn, stages, group in product(
            (32, 64, 128, 256), (32, 64, 128, 256), (8, 16), (16, 32, 64), (32, 64, 128), (2, 3, 4, 5), (1, 4, 8)
        ):
            one = cls(bm, bn, bk, wm, wn, stages, group)
            yield one
            most = RESIDENT.get((bm, bn, bk, wm, wn), 1)
            for resident in range(max(most - 1, 2), most + 1):
                yield replace(one, resident=resident)
        tiles = ((16, 32), (32, 32), (32, 64), (64, 32), (64, 64))
        for (bm, bn), bk, (wm, wn), stages, group, slices in product(
            tiles, (32, 64, 128), ((16, 32), (32, 32), (32, 64)), (2, 3, 4), (1, 8), (2, 4, 8)
        ):
            yield cls(bm, bn, bk, wm, wn, stages, group, slices)
