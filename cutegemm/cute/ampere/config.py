"""Configurations of the family sm80; `warps.config` explains the text form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from cutegemm.cute import operand_parts
from cutegemm.cute.warps.config import TileConfig
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Kind, Problem, Signature
from cutegemm.problem.dtypes import kind_names, why_not_taken
from cutegemm.problem.parts import TABLE as SPLIT
from cutegemm.problem.program.graph import SCALE_K
from cutegemm.problem.work import DENSE

FP8: tuple[Kind, ...] = (("e4m3", "ieee"), ("e4m3", "fast"), ("e5m2", "ieee"), ("e5m2", "fast"))
TAKES: tuple[Kind, ...] = (("fp16", "ieee"), ("bf16", "ieee"), ("fp32", "tf32"), ("int8", "ieee"), *SPLIT, *FP8)
OLDEST_FP8 = (8, 9)
"""The least compute capability whose mma.sync multiplies fp8."""


@dataclass(frozen=True)
class AmpereConfig(TileConfig):
    """A configuration of `ampere.kernel`: mma.sync tensor cores."""

    family: ClassVar[str] = "sm80"

    def smem_bytes(self, signature: Signature) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        ring = self.stages * (self.bm + self.bn) * self.bk * operand_parts.staged_itemsize(signature)
        return max(ring, self.slab_bytes())

    def launch_arguments(self, problem: Problem, arch: Arch) -> dict[str, int]:
        """Besides, for operands that are split: after how many lines of the workspace their parts lie."""
        found = super().launch_arguments(problem, arch)
        if problem.signature.parts is None:
            return found
        return {**found, "operand_lines": operand_parts.in_lines(sum(super().workspace_bytes(problem, arch)))}

    def workspace_bytes(self, problem: Problem, arch: Arch) -> tuple[int, int]:
        """What splits of K need (`TileConfig.workspace_bytes`); the operands' parts, if any, lie behind it."""
        words, sums = super().workspace_bytes(problem, arch)
        return words, sums + operand_parts.workspace_bytes(problem)

    def why_invalid(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        if refused := why_not_taken("the mma.sync kernel multiplies", TAKES, signature.kind):
            return refused
        if refused := _why_bytes_refused(signature, arch):
            return refused
        if signature.work != DENSE and signature.parts is not None:
            return f"operands are split into parts for dense products; this one is {signature.work}"
        common = self._why_common_invalid(signature)
        if common:
            return common
        split = signature.parts
        itemsize = ITEMSIZE[signature.dtype if split is None else split.element]
        k_step = 32 // itemsize
        if self.wm < 16 or self.wn < 16:
            return f"warp tile {self.wm}x{self.wn}; each side must be at least 16 (one m16n8 pair)"
        if self.bk < 2 * k_step:
            return f"bk is {self.bk}; at least {2 * k_step} (two k-steps, for register double buffering)"
        if not 2 <= self.stages <= 8:
            return f"stages is {self.stages}; accepted are 2 to 8"
        if self.wm * self.wn > 64 * 64:
            return f"warp tile {self.wm}x{self.wn}; accumulators and fragments over 64x64 spill"
        if itemsize == 1 and (refused := self._why_bytes_spill(signature, arch)):
            return refused
        if split is not None and (refused := self._why_parts_spill(signature, itemsize)):
            return refused
        k_major = split is not None or signature.a_major == signature.b_major == "k"
        if itemsize == 4 and not k_major and self.wm * self.wn > 64 * 32:
            return f"warp tile {self.wm}x{self.wn}; tf32 operands that are not K-major spill over 64x32"
        for side, extent in (("bm", self.bm), ("bn", self.bn)):
            vectors = extent * self.bk * itemsize // 16
            if vectors < self.threads:
                return f"{side} x bk is {vectors} 16-byte vectors for {self.threads} threads; each must load one"
        if self.smem_bytes(signature) > arch.smem_per_cta:
            return f"{self.smem_bytes(signature)} B of shared memory; {arch.name} gives a CTA {arch.smem_per_cta}"
        return None

    def _why_bytes_spill(self, signature: Signature, arch: Arch) -> str | None:
        """None when the sums of operands of one byte fit into registers, promoted ones twice; else why not.

        The limits are those up to which ptxas spilled nothing (tests/compile/test_mma_bytes.py).
        """
        promoted = signature.promotion is not None
        if promoted and self.bk != SCALE_K:
            return f"bk is {self.bk}; sums promoted every {SCALE_K} of K need a k tile of {SCALE_K}"
        halves = signature.kind in FP8 and arch.capability[0] == 9  # which ptxas makes of them, see `mma`
        most = 64 * 64 if self.bk == 64 and self.threads >= 128 else 64 * 32
        scaled = bool(signature.epilogue.program.block_scales)
        if halves or scaled or (promoted and self.threads == 32):
            most = 16 * 32 if halves and scaled else 32 * 32
        if self.threads > 256:
            most = min(most // 2, 16 * 32 if promoted else 32 * 32)
        if self.wm * self.wn > most:
            return _spilling(self, most, "sums, promoted in as many more registers," if promoted else "sums")
        return None

    def _why_parts_spill(self, signature: Signature, itemsize: int) -> str | None:
        """None when the sums of operands that are split into parts fit into registers twice; else why not.

        The limits are those up to which ptxas spilled nothing (tests/compile/test_precisions_mma.py). Of tf32,
        fragments of B of four k steps stay in registers from one term to the next.
        """
        every = signature.promotion
        if self.bk != every:
            return f"bk is {self.bk}; sums promoted every {every} of K need a k tile of {every}"
        most = {32: 32 * 32, 512: 32 * 16}.get(self.threads, 64 * 32)
        if itemsize == 4 and self.wn > 32:
            most = min(most, 32 * 32)
        if self.wm * self.wn <= most:
            return None
        return _spilling(self, most, "sums, promoted in as many more registers,")

    @classmethod
    def space(cls, itemsize: int = 2) -> Iterator[AmpereConfig]:
        """Every configuration the tuner may consider for operands of `itemsize` bytes, before the validity rule."""
        depths = (64, 128) if itemsize == 1 else (16, 32, 64, 128) if itemsize == 2 else (16, 32, 64)
        for bm, bn, bk, wm, wn, stages, group in product(
            (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), depths, (16, 32, 64), (16, 32, 64), (2, 3, 4, 5), (1, 4, 8)
        ):
            yield cls(bm, bn, bk, wm, wn, stages, group)


def _spilling(config: AmpereConfig, most: int, what: str) -> str:
    """Why a warp tile of more than `most` elements is refused."""
    return f"{config.threads} threads with warp tiles {config.wm}x{config.wn}; over {most // 32} {what} a thread spill"


def _why_bytes_refused(signature: Signature, arch: Arch) -> str | None:
    """None when operands are wider than a byte, or lie as mma.sync reads bytes on this GPU; else why not."""
    if signature.kind in FP8 and arch.capability < OLDEST_FP8:
        old, new = (".".join(map(str, each)) for each in (arch.capability, OLDEST_FP8))
        older = kind_names(kind for kind in TAKES if kind not in FP8)
        return f"mma.sync multiplies fp8 from compute capability {new} on; {arch.name} has {old}, and takes {older}"
    if signature.epilogue.gating and signature.epilogue.program.block_scales:
        return "gate and up are columns of two places; scales of blocks of K are not for them"
    if ITEMSIZE[signature.dtype] > 1:
        return None
    lying = ("A", signature.a_major, signature.align_a), ("B", signature.b_major, signature.align_b)
    for name, major, align in lying:
        if major != "k":
            return f"mma.sync takes {signature.dtype} K-major only; {name} is {major.upper()}-major: copy it first"
        if align < 16:
            return f"rows of {signature.dtype} must begin at multiples of 16 bytes; {name} has {align}: copy it first"
    return None
