"""Configurations of the family sm80; `warps.config` explains the text form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from cutegemm.cute.warps.config import TileConfig
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Kind, Signature
from cutegemm.problem.dtypes import why_not_taken

TAKES: tuple[Kind, ...] = (("fp16", "ieee"), ("bf16", "ieee"), ("fp32", "tf32"))


@dataclass(frozen=True)
class AmpereConfig(TileConfig):
    """A configuration of `ampere.kernel`: mma.sync tensor cores."""

    family: ClassVar[str] = "sm80"

    def smem_bytes(self, signature: Signature) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        ring = self.stages * (self.bm + self.bn) * self.bk * ITEMSIZE[signature.dtype]
        return max(ring, self.slab_bytes())

    def why_invalid(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        if refused := why_not_taken("the mma.sync kernel multiplies", TAKES, signature.kind):
            return refused
        common = self._why_common_invalid(signature)
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
        if itemsize == 4 and not k_major and self.wm * self.wn > 64 * 32:
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
