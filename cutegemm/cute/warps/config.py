"""What the configurations of the kernels without TMA share: frozen, printable, and valid by ONE function per class.

The text form is `family/BMxBNxBK/wWMxWN/sSTAGES/gGROUP`, for example `sm80/128x256x64/w64x64/s3/g8`: the CTA
tile, the warp tile, the stages of the cp.async ring, and how many tile rows the grouped tile order walks
together. `/rRESIDENT` after it bounds a thread's registers, so that so many CTAs fit on an SM (else the compiler takes
what one may have). `/kSPLITS` at its end is split-K: so many CTAs sum a part of K each (`warps.part_sum`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from cutegemm.choice.footprint import registers_of_warps, resident
from cutegemm.cute.launch_config import PROGRAMMATIC, SLAB_PAD, SLAB_ROWS, LaunchedConfig, slab_chunk, word_bytes
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Problem, Signature
from cutegemm.problem.dtypes import why_not_rounded
from cutegemm.problem.work import DENSE

if TYPE_CHECKING:
    from typing_extensions import Self

TRANSPOSE_PAD = 4
"""Words after each k-row of a tile that was K-major, see `tile_load.TransposingLoader`."""


@dataclass(frozen=True)
class TileConfig(LaunchedConfig):
    """What the kernels of this package share: a CTA of bm x bn outputs, made of warps of wm x wn.

    Attributes:
        bm, bn, bk: CTA tile in elements. wm, wn: warp tile. stages: depth of the cp.async ring.
        group: tile rows walked together by the grouped tile order (1: plain row by row).
        splits: CTAs that sum a part of K each of one tile.
        resident: CTAs for which an SM's registers must suffice.
    """

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    stages: int
    group: int = 8
    splits: int = field(default=1, kw_only=True)
    resident: int = field(default=1, kw_only=True)

    MOST_SPLITS: ClassVar[int] = 128
    """A state word counts to 255; half of that leaves an A100's or H200's SMs one CTA each."""
    MOST_RESIDENT: ClassVar[Mapping[tuple[int, ...], int]] = {}
    """Of a tile (bm, bn, bk, wm, wn): the most CTAs that `resident` may be, where more than one."""
    crossed: ClassVar[bool] = False
    """Whether accumulators of neighbouring columns change places in pairs where they are stored for the epilogue."""
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
        text = f"{self.family}/{self.bm}x{self.bn}x{self.bk}/w{self.wm}x{self.wn}/s{self.stages}/g{self.group}"
        last = (("r", self.resident), ("k", self.splits))
        return text + self._more_text() + "".join(f"/{letter}{number}" for letter, number in last if number != 1)

    def _more_text(self) -> str:
        """What a family adds to the text, before the splits of K."""
        return ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The configuration of a text form; ValueError when the text is not one."""
        last = r"(?:/r(?P<resident>\d+))?(?:/k(?P<splits>\d+))?"
        found = re.fullmatch(cls.PATTERN.replace("FAMILY", cls.family) + last, text)
        if not found:
            raise ValueError(f"config: got {text!r}, accepted is {cls.form()}")
        return cls(**{name: int(number) for name, number in found.groupdict().items() if number})

    @classmethod
    def form(cls) -> str:
        """The text form, for messages."""
        return f"{cls.family}/BMxBNxBK/wWMxWN/sSTAGES[/gGROUP][/kSPLITS]"

    @classmethod
    def split_space(cls, problem: Problem, arch: Arch) -> Iterator[Self]:
        """The same as `space` with splits of K, in one tile order: as many as fill the SMs one to four times, an SM
        with one CTA, or with as many as it has registers for.
        """
        for one in cls.space(ITEMSIZE[problem.dtype]):
            if one.group != 8:
                continue
            tiles = max(problem.tiles(one.bm, one.bn), 1)
            # Many of the space are invalid, also such that have no warp.
            unbounded = resident(arch, 0, max(one.threads, 32), arch.registers_per_thread)
            ctas = {waves * on_sm for waves in range(1, 5) for on_sm in (1, max(one.resident, unbounded))}
            for splits in sorted({each * arch.sm_count // tiles for each in ctas}):
                if 2 <= splits <= cls.MOST_SPLITS:
                    yield replace(one, splits=splits)

    @classmethod
    def space(cls, itemsize: int) -> Iterator[Self]:
        """Every configuration without splits of K that the tuner may consider, before the validity rule."""
        raise TypeError(f"{cls.__name__} has no space of its own")

    @property
    def extra_arguments(self) -> tuple[str, ...]:
        return ("early", "workspace") if self.splits > 1 else ("early",)

    def launch_arguments(self, problem: Problem, arch: Arch) -> dict[str, int]:
        return {"early": int(self.begins_early(problem, arch))}

    def begins_early(self, problem: Problem, arch: Arch) -> bool:
        """Whether a launch may begin before the kernel in front of it has ended (programmatic dependent launch).

        The next launch may then begin before this one has ended. This saves about 0.5 us a launch in a CUDA graph on an
        H200. Only launches that fill at most half of the GPU do so: CTAs that begin beside those of another kernel take
        the places that these leave, and too many CTAs of a larger launch come to lie on one SM (44 us became 59 at
        3232x152x1592).
        """
        if arch.capability < PROGRAMMATIC:
            return False
        ctas = problem.tiles(self.bm, self.bn) * self.splits
        return 2 * ctas <= arch.sm_count * self.on_an_sm(problem.signature, arch)

    def on_an_sm(self, signature: Signature, arch: Arch) -> int:
        """CTAs of an SM, by an estimate of a thread's registers."""
        registers = self.estimated_registers(signature, arch)
        return resident(arch, self.smem_bytes(signature), self.threads, registers)

    def estimated_registers(self, signature: Signature, arch: Arch) -> int:
        slices = getattr(self, "slices", 1)
        return registers_of_warps((self.wm, self.wn), self.threads, signature, arch, slices, self.resident)

    def smem_bytes(self, signature: Signature) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        raise TypeError(f"{type(self).__name__} does not say how much shared memory it takes")

    def workspace_bytes(self, problem: Problem, arch: Arch) -> tuple[int, int]:
        """(bytes that a launch takes and leaves zero, bytes of anything): with splits of K a state word for each tile,
        and room in fp32 for each part of it.
        """
        if self.splits == 1:
            return 0, 0
        tiles = problem.tiles(self.bm, self.bn)
        return word_bytes(tiles), tiles * self.splits * self.bm * self.bn * 4

    def slab_bytes(self) -> int:
        """Shared memory of the epilogue: one fp32 slab a warp. It reuses the ring's memory."""
        return self.warps[0] * self.warps[1] * SLAB_ROWS * (self.wn + SLAB_PAD) * 4

    def pieces(self, signature: Signature) -> tuple[int, int]:
        columns = self.wn // (2 if signature.epilogue.gating else 1)
        return SLAB_ROWS if self.splits == 1 else self._pass_rows(signature, columns), columns

    def _pass_rows(self, signature: Signature, columns: int) -> int:
        """Rows of a warp tile, `columns` of D wide, that a warp's lanes store at a time."""
        return 32 * slab_chunk(signature, columns) // columns

    def why_invalid(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        raise TypeError(f"{type(self).__name__} has no validity rule of its own")

    def _why_common_invalid(self, signature: Signature) -> str | None:
        if refused := why_not_rounded("the kernels without TMA round", signature.narrow):
            return refused
        sizes = {"bm": self.bm, "bn": self.bn, "bk": self.bk, "wm": self.wm, "wn": self.wn}
        for name, value in sizes.items():
            if value <= 0 or value & (value - 1):
                return f"{name} is {value}; it must be a power of two"
        if self.bm % self.wm or self.bn % self.wn:
            return f"warp tile {self.wm}x{self.wn} does not divide the CTA tile {self.bm}x{self.bn}"
        if not 1 <= self.group <= 64:
            return f"group is {self.group}; accepted are 1 to 64"
        if not 1 <= self.splits <= self.MOST_SPLITS:
            return f"{self.splits} splits of K; accepted are 1 to {self.MOST_SPLITS}"
        if self.splits > 1 and signature.work != DENSE:
            return f"{self.splits} splits of K; a {signature.work} product has its K in one part"
        most = self.MOST_RESIDENT.get((*self.tile(), self.wm, self.wn), 1)
        if not 1 <= self.resident <= most:
            return f"registers for {self.resident} CTAs on an SM; accepted with this tile are 1 to {most}"
        if self.threads > 512:
            return f"{self.threads} threads; at most 512 (16 warps), more leave too few registers a thread"
        if self.wn * ITEMSIZE[signature.out_dtype] > 32 * 16:
            return f"wn is {self.wn}; a warp stores a row of {signature.out_dtype} at once, at most 512 bytes"
        return None
