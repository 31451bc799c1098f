"""Configurations of the family dmma; `warps.config` explains the text form.

`/iROWSxDEPTH` at its end is the instruction: `i8x4`, mma.m8n8k4 of sm_80 and newer, or `i16x4`, `i16x8`, `i16x16`,
mma.m16n8k* of sm_90. For example `dmma/128x128x16/w64x32/s4/g8/i16x8`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from cutegemm.cute.warps.config import TileConfig
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Kind, Signature
from cutegemm.problem.dtypes import why_not_taken

TAKES: tuple[Kind, ...] = (("fp64", "ieee"),)
INSTRUCTIONS = {"8x4": (8, 4), "16x4": (16, 4), "16x8": (16, 8), "16x16": (16, 16)}
"""Rows and depth of the instructions; all have 8 columns."""
MOST_COPIES = 16
"""Copies a thread and stage; the addresses of more spill."""


@dataclass(frozen=True)
class DmmaConfig(TileConfig):
    """A configuration of `dmma.kernel`.

    Attributes:
        instruction: a name of `INSTRUCTIONS`.
    """

    instruction: str = "8x4"

    family: ClassVar[str] = "dmma"
    PATTERN: ClassVar[str] = TileConfig.PATTERN + r"/i(?P<instruction>\d+x\d+)"

    def _more_text(self) -> str:
        return f"/i{self.instruction}"

    @classmethod
    def parse(cls, text: str) -> DmmaConfig:
        """The configuration of a text form; ValueError when the text is not one."""
        found = re.fullmatch(cls.PATTERN.replace("FAMILY", cls.family), text)
        if not found or found["instruction"] not in INSTRUCTIONS:
            raise ValueError(f"config: got {text!r}, accepted is {cls.form()}")
        numbers = {name: int(value) for name, value in found.groupdict().items() if value and name != "instruction"}
        return cls(**numbers, instruction=found["instruction"])

    @classmethod
    def form(cls) -> str:
        return super().form().replace("[/kSPLITS]", "/iINSTRUCTION") + f", INSTRUCTION one of {', '.join(INSTRUCTIONS)}"

    @property
    def step(self) -> tuple[int, int]:
        """Rows and depth of the instruction."""
        return INSTRUCTIONS[self.instruction]

    def smem_bytes(self, signature: Signature) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        return self.stages * (self.bm + self.bn) * self.bk * ITEMSIZE[signature.dtype]

    def registers(self) -> int:
        """Registers of a thread at most: accumulators, two sets of fragments, two each; addresses."""
        depth = self.step[1]
        return 2 * (self.wm * self.wn // 32 + 2 * (self.wm + self.wn) * depth // 32) + 5 * self.copies + 28

    def estimated_registers(self, signature: Signature, arch: Arch) -> int:
        return min(self.registers(), arch.registers_per_thread)

    @property
    def copies(self) -> int:
        """Copies of 16 bytes that a thread makes for a stage."""
        return (self.bm + self.bn) * self.bk // (2 * self.threads)

    def why_invalid(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        if refused := why_not_taken("the fp64 kernel multiplies", TAKES, signature.kind):
            return refused
        common = self._why_common_invalid(signature)
        if common:
            return common
        if self.splits != 1:
            return f"{self.splits} splits of K; sums of parts are in fp32, accepted is 1"
        if self.instruction != "8x4" and arch.capability < (9, 0):
            return f"instruction {self.instruction}; {arch.name} has 8x4, the others came with compute capability 9.0"
        if self.wm < 16 or self.wn < 16:
            return f"warp tile {self.wm}x{self.wn}; each side must be at least 16"
        if self.bk not in (16, 32):
            return f"bk is {self.bk}; accepted are 16 and 32"
        if not 2 <= self.stages <= 8:
            return f"stages is {self.stages}; accepted are 2 to 8"
        if self.wm * self.wn > 64 * 32:
            return f"warp tile {self.wm}x{self.wn}; accumulators over 64x32 spill"
        if self.registers() > min(255, 65536 // self.threads // 8 * 8):
            return f"{self.registers()} registers a thread of {self.threads}; accumulators and fragments spill"
        if self.copies > MOST_COPIES:
            return f"{self.copies} copies a thread and stage; the addresses of more than {MOST_COPIES} spill"
        for side, extent in (("bm", self.bm), ("bn", self.bn)):
            if extent * self.bk < 2 * self.threads:
                return f"{side} x bk is {extent * self.bk} elements for {self.threads} threads; each must load two"
        if self.smem_bytes(signature) > arch.smem_per_cta:
            return f"{self.smem_bytes(signature)} B of shared memory; {arch.name} gives a CTA {arch.smem_per_cta}"
        return None

    @classmethod
    def space(cls, itemsize: int = 8) -> Iterator[DmmaConfig]:
        """Every configuration the tuner may consider, before the validity rule."""
        for (bm, bn), bk, (wm, wn), stages, group, instruction in product(
            product((32, 64, 128, 256), (32, 64, 128, 256)), (16, 32),
            ((64, 32), (32, 64), (32, 32), (16, 32), (32, 16), (16, 16)), (2, 3, 4, 5), (1, 4, 8), INSTRUCTIONS,
        ):  # fmt: skip
            yield cls(bm, bn, bk, wm, wn, stages, group, instruction)
