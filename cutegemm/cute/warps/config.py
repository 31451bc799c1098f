"""What the configurations of the kernels without TMA share: frozen, printable, and valid by ONE function per class.

The text form is `family/BMxBNxBK/wWMxWN/sSTAGES/gGROUP`, for example `sm80/128x256x64/w64x64/s3/g8`: the CTA
tile, the warp tile, the stages of the cp.async ring, and how many tile rows the grouped tile order walks
together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cutegemm.cute.launch_config import SLAB_PAD, SLAB_ROWS, LaunchedConfig
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Problem, Signature

TRANSPOSE_PAD = 4
"""Words after each k-row of a tile that was K-major, see `tile_load.TransposingLoader`."""


@dataclass(frozen=True)
class TileConfig(LaunchedConfig):
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

    def pieces(self, signature: Signature) -> tuple[int, int]:
        return SLAB_ROWS, self.wn // (2 if signature.epilogue.gating else 1)

    def why_invalid(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        raise TypeError(f"{type(self).__name__} has no validity rule of its own")

    def _why_common_invalid(self, signature: Signature) -> str | None:
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
