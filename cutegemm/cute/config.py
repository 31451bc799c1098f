"""Configurations of the CuTe kernels: frozen, printable, and valid by ONE function per class.

The text form is `family/BMxBNxBK/wWMxWN/sSTAGES/gGROUP`, for example `sm80/128x256x64/w64x64/s3/g8`: the CTA
tile, the warp tile, the stages of the cp.async ring, and how many tile rows the grouped tile order walks
together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from cutegemm.arch import Arch
from cutegemm.problem import ITEMSIZE, Problem, Signature

SLAB_ROWS = 16
"""Rows of the accumulator tile that a warp stages through shared memory at a time in the epilogue."""

SLAB_PAD = 8
"""fp32 words after each slab row: with them the 8-byte stores of an m16n8 fragment hit all 32 banks once."""


@dataclass(frozen=True)
class TileConfig:
    """What the kernels of this package share: a CTA of bm x bn outputs, made of warps of wm x wn.

    Attributes:
        bm, bn, bk: CTA tile in elements. wm, wn: warp tile. stages: depth of the cp.async ring.
        group: tile rows walked together by the grouped tile order (1: plain row by row).
    """

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    stages: int
    group: int = 8

    splits: ClassVar[int] = 1
    """Parts of K that different CTAs sum: these kernels know no split-K."""
    family: ClassVar[str] = ""
    PATTERN: ClassVar[str] = (
        r"FAMILY/(?P<bm>\d+)x(?P<bn>\d+)x(?P<bk>\d+)/w(?P<wm>\d+)x(?P<wn>\d+)/s(?P<stages>\d+)(?:/g(?P<group>\d+))?"
    )

    @property
    def warps(self) -> tuple[int, int]:
        return self.bm // self.wm, self.bn // self.wn

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    def tile(self) -> tuple[int, int, int]:
        return self.bm, self.bn, self.bk

    def __str__(self) -> str:
        return f"{self.family}/{self.bm}x{self.bn}x{self.bk}/w{self.wm}x{self.wn}/s{self.stages}/g{self.group}"

    @classmethod
    def parse(cls, text: str) -> TileConfig:
        """The configuration of a text form; ValueError when the text is not one."""
        found = re.fullmatch(cls.PATTERN.replace("FAMILY", cls.family), text)
        if not found:
            raise ValueError(f"config: got {text!r}, accepted is {cls.form()}")
        return cls(**{name: int(number) for name, number in found.groupdict().items() if number})

    @classmethod
    def form(cls) -> str:
        """The text form, for messages."""
        return f"{cls.family}/BMxBNxBK/wWMxWN/sSTAGES[/gGROUP]"

    @classmethod
    def split_space(cls, problem: Problem, arch: Arch) -> Iterator[TileConfig]:
        """The configurations with splits of K that the tuner may consider for a problem: none."""
        yield from ()

    def slab_bytes(self) -> int:
        """Shared memory of the epilogue: one fp32 slab a warp. It reuses the ring's memory."""
        return self.warps[0] * self.warps[1] * SLAB_ROWS * (self.wn + SLAB_PAD) * 4

    def problem(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        raise TypeError(f"{type(self).__name__} has no validity rule of its own")

    def _common_problem(self, signature: Signature) -> str | None:
        sizes = {"bm": self.bm, "bn": self.bn, "bk": self.bk, "wm": self.wm, "wn": self.wn}
        for name, value in sizes.items():
            if value <= 0 or value & (value - 1):
                return f"{name} is {value}; it must be a power of two"
        if self.bm % self.wm or self.bn % self.wn:
            return f"warp tile {self.wm}x{self.wn} does not divide the CTA tile {self.bm}x{self.bn}"
        if not 1 <= self.group <= 64:
            return f"group is {self.group}; accepted are 1 to 64"
        if self.threads > 512:
            return f"{self.threads} threads; at most 512 (16 warps), more leave too few registers a thread"
        if self.wn * ITEMSIZE[signature.out_dtype] > 32 * 16:
            return f"wn is {self.wn}; a warp stores a row of {signature.out_dtype} at once, at most 512 bytes"
        return None


@dataclass(frozen=True)
class AmpereConfig(TileConfig):
    """A configuration of `kernels.ampere`: mma.sync tensor cores (fp16, bf16, tf32)."""

    family: ClassVar[str] = "sm80"

    def smem_bytes(self, signature: Signature) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        ring = self.stages * (self.bm + self.bn) * self.bk * ITEMSIZE[signature.dtype]
        return max(ring, self.slab_bytes())

    def problem(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        if signature.dtype == "fp32" and signature.precision != "tf32":
            return "the tensor-core kernel multiplies fp32 only as tf32"
        common = self._common_problem(signature)
        if common:
            return common
        itemsize = ITEMSIZE[signature.dtype]
        k_step = 32 // itemsize
        if self.wm < 16 or self.wn < 16:
            return f"warp tile {self.wm}x{self.wn}; each side must be at least 16 (one m16n8 pair)"
        if self.bk < 2 * k_step:
            return f"bk is {self.bk}; at least {2 * k_step} (two k-steps, for register double buffering)"
        if not 2 <= self.stages <= 8:
            return f"stages is {self.stages}; accepted are 2 to 8"
        if self.wm * self.wn > 64 * 64:
            return f"warp tile {self.wm}x{self.wn}; accumulators and fragments over 64x64 spill"
        k_major = signature.a_major == signature.b_major == "k"
        if signature.dtype == "fp32" and not k_major and self.wm * self.wn > 64 * 32:
            return f"warp tile {self.wm}x{self.wn}; tf32 operands that are not K-major spill over 64x32"
        for side, extent in (("bm", self.bm), ("bn", self.bn)):
            vectors = extent * self.bk * itemsize // 16
            if vectors < self.threads:
                return f"{side} x bk is {vectors} 16-byte vectors for {self.threads} threads; each must load one"
        if self.smem_bytes(signature) > arch.smem_per_cta:
            return f"{self.smem_bytes(signature)} B of shared memory; {arch.name} gives a CTA {arch.smem_per_cta}"
        return None

    @classmethod
    def space(cls, itemsize: int = 2) -> Iterator[AmpereConfig]:
        """Every configuration the tuner may consider, before the validity rule; whatever the operands' `itemsize`."""
        for bm, bn, bk, wm, wn, stages, group in product(
            (32, 64, 128, 256), (32, 64, 128, 256), (16, 32, 64), (16, 32, 64), (16, 32, 64), (2, 3, 4, 5), (1, 4, 8)
        ):
            yield cls(bm, bn, bk, wm, wn, stages, group)


@dataclass(frozen=True)
class SimtConfig(TileConfig):
    """A configuration of `kernels.simt`: fp32 on CUDA cores. A warp is 4 x 8 lanes; the thread tile follows.

    `/xSLICES` at the end of the text, as in `simt/32x32x64/w32x32/s3/g8/x8`, is sliced K (`kernels.simt_sliced`): so
    many groups of warps share the CTA tile, each multiplies its part of a stage, and their sums meet at the end.

    Attributes:
        slices: of each stage along K; 1: every warp multiplies the whole depth.
    """

    slices: int = 1

    family: ClassVar[str] = "simt"
    TRANSPOSE_PAD: ClassVar[int] = 4
    """Words after each k-row of a tile that was K-major, see `tile_load.TransposingLoader`."""
    PATTERN: ClassVar[str] = TileConfig.PATTERN + r"(?:/x(?P<slices>\d+))?"
    CHUNK: ClassVar[int] = 4
    """Depth that a warp of a slice loads at a time: 16 bytes of a K-major row."""

    def __str__(self) -> str:
        return super().__str__() + (f"/x{self.slices}" if self.slices != 1 else "")

    @classmethod
    def form(cls) -> str:
        return f"{super().form()}[/xSLICES]"

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

    @property
    def thread_tile(self) -> tuple[int, int]:
        """Outputs of one thread: (wm / 4, wn / 8)."""
        return self.wm // 4, self.wn // 8

    def smem_bytes(self, signature: Signature) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        pad = self.TRANSPOSE_PAD if self.slices == 1 else 0
        rows = sum(
            extent + (pad if major == "k" else 0)
            for extent, major in ((self.bm, signature.a_major), (self.bn, signature.b_major))
        )
        return max(self.stages * rows * self.bk * 4, self.slab_bytes())

    def problem(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        if signature.dtype != "fp32" or signature.precision != "ieee":
            return "the CUDA-core kernel multiplies fp32 in IEEE arithmetic only"
        common = self._common_problem(signature)
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
        if self.bk < 8:
            return f"bk is {self.bk}; at least 8"
        if self.slices != 1:
            problem = self._slices_problem(signature)
            if problem:
                return problem
        if not 2 <= self.stages <= 8:
            return f"stages is {self.stages}; accepted are 2 to 8"
        for side, extent in (("bm", self.bm), ("bn", self.bn)):
            if extent * self.bk < 4 * self.threads:
                return f"{side} x bk is {extent * self.bk} elements for {self.threads} threads; each must load four"
        if self.smem_bytes(signature) > arch.smem_per_cta:
            return f"{self.smem_bytes(signature)} B of shared memory; {arch.name} gives a CTA {arch.smem_per_cta}"
        return None

    def _slices_problem(self, signature: Signature) -> str | None:
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
            yield cls(bm, bn, bk, wm, wn, stages, group)
        tiles = ((16, 32), (32, 32), (32, 64), (64, 32), (64, 64))
        for (bm, bn), bk, (wm, wn), stages, group, slices in product(
            tiles, (32, 64, 128), ((16, 32), (32, 32), (32, 64)), (2, 3, 4), (1, 8), (2, 4, 8)
        ):
            yield cls(bm, bn, bk, wm, wn, stages, group, slices)
