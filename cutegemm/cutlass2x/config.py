"""Configurations of the CUTLASS 2.x kernels: frozen, printable, and valid by ONE function, `why_invalid`.

The text form is `cutlass2x/BMxBNxBK/wWMxWNxWK/sSTAGES/iIMxINxIK/SWIZZLE[/kSPLITS][/aBYTES]`, for example
`cutlass2x/128x128x32/w64x64x32/s4/i16x8x16/id4`: threadblock tile, warp tile, stages, instruction (1x1x1 is SIMT: CUDA
cores), threadblock swizzle; split-K slices when there are several, and a cap on the access width of A and B when it is
narrower than 16 bytes. SWIZZLE is id1, id2, id4, id8 (identity), h (horizontal) or streamk.

The rules come from compiling configurations with nvcc 13.0; `tests/compile/test_cutlass2x.py` repeats the probes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from cutegemm.problem import ITEMSIZE, Kind, work
from cutegemm.problem.dtypes import why_not_rounded, why_not_taken

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

FORM = "cutlass2x/BMxBNxBK/wWMxWNxWK/sSTAGES/iIMxINxIK/SWIZZLE[/kSPLITS][/aBYTES]"
SWIZZLES = ("id1", "id2", "id4", "id8", "h", "streamk")
SIMT = (1, 1, 1)
MAX_ACCESSES = 64
MAX_SPLITS = 64

_TEXT = re.compile(
    r"cutlass2x/(\d+)x(\d+)x(\d+)/w(\d+)x(\d+)x(\d+)/s(\d+)/i(\d+)x(\d+)x(\d+)/([a-z]+\d*)(?:/k(\d+))?(?:/a(\d+))?"
)


@dataclass(frozen=True)
class Math:
    """What the configurations of a kind of product share.

    Attributes:
        instructions: the accepted (M, N, K), the tuner's first.
        stages: those that the tuner considers, the fewest that are accepted first.
        depths, warp_rows: BK and WM that the tuner considers.
    """

    instructions: tuple[tuple[int, int, int], ...]
    stages: tuple[int, ...] = (2, 3, 4, 5)
    depths: tuple[int, ...] = (32, 64)
    warp_rows: tuple[int, ...] = (32, 64)


_16_BIT = Math(((16, 8, 16), (16, 8, 8)))
_TF32 = Math(((16, 8, 8),), stages=(3, 4, 5), depths=(16, 32))
TAKES: Mapping[Kind, Math] = {
    ("fp16", "ieee"): _16_BIT,
    ("bf16", "ieee"): _16_BIT,
    ("fp32", "ieee"): Math((SIMT,), depths=(8, 16), warp_rows=(16, 32, 64)),
    ("fp32", "tf32"): _TF32,
    ("fp32", "tf32x3"): _TF32,
}
"""The kinds of products that the backend takes."""
WORKS = (work.DENSE,)
"""Names of `problem.work` that it takes."""


@dataclass(frozen=True)
class Cutlass2xConfig:
    """One instantiation of `cutlass::gemm::device::Gemm`, apart from what the signature says.

    Attributes:
        threadblock: (M, N, K) of the tile of a CTA, elements. warp: of the tile of a warp.
        stages: 2 is the pipeline through registers, 3 and more the cp.async ring.
        instruction: (M, N, K) of the tensor-core instruction, or `SIMT`.
        swizzle: one of `SWIZZLES`. splits: slices of K, 1 without split-K.
        align: bytes that one access to A or B has at most (the signature may allow fewer).
    """

    threadblock: tuple[int, int, int]
    warp: tuple[int, int, int]
    stages: int
    instruction: tuple[int, int, int]
    swizzle: str = "id1"
    splits: int = 1
    align: int = 16

    @property
    def warps(self) -> int:
        return (self.threadblock[0] // self.warp[0]) * (self.threadblock[1] // self.warp[1])

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def simt(self) -> bool:
        return self.instruction == SIMT

    def tile(self) -> tuple[int, int, int]:
        """(M, N, K) of the CTA tile, in elements."""
        return self.threadblock

    def access(self, signature: Signature) -> tuple[int, int, int]:
        """Elements that one access to A, to B, and to C and D has."""
        if self.simt:
            return 1, 1, 1
        size, out = ITEMSIZE[signature.dtype], ITEMSIZE[signature.out_dtype]
        narrow = min(signature.align_d, signature.align_c) if signature.epilogue.c_dtype else signature.align_d
        return min(self.align, signature.align_a) // size, min(self.align, signature.align_b) // size, narrow // out

    def smem_bytes(self, signature: Signature) -> int:
        """Shared memory of the main loop of a CTA, in bytes."""
        bm, bn, bk = self.threadblock
        return self.stages * (bm + bn) * bk * ITEMSIZE[signature.dtype]

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        tile, warp, instruction = ("x".join(map(str, t)) for t in (self.threadblock, self.warp, self.instruction))
        text = f"cutlass2x/{tile}/w{warp}/s{self.stages}/i{instruction}/{self.swizzle}"
        text += f"/k{self.splits}" if self.splits != 1 else ""
        return text + (f"/a{self.align}" if self.align != 16 else "")

    @classmethod
    def parse(cls, text: str) -> Cutlass2xConfig:
        """The configuration of a text form; ValueError when the text is not one."""
        found = _TEXT.fullmatch(text)
        if not found:
            raise ValueError(f"config: got {text!r}, accepted for backend 'cutlass2x' is {FORM}")
        *numbers, swizzle, splits, align = found.groups()
        bm, bn, bk, wm, wn, wk, stages, im, in_, ik = map(int, numbers)
        if swizzle not in SWIZZLES:
            raise ValueError(f"config: got swizzle {swizzle!r} in {text!r}, accepted are {', '.join(SWIZZLES)}")
        return cls((bm, bn, bk), (wm, wn, wk), stages, (im, in_, ik), swizzle, int(splits or 1), int(align or 16))

    def why_invalid(self, signature: Signature, arch: Arch) -> str | None:
        """None when this configuration is valid for the signature on that architecture, else why not."""
        if refused := work.why_not_taken("it computes", WORKS, signature.work):
            return refused
        if refused := why_not_taken("it multiplies", TAKES, signature.kind):
            return refused
        if refused := why_not_rounded("it rounds", signature.narrow):
            return refused
        for rule in (self._instruction, self._tiles, self._pipeline, self._split):
            invalid = rule(signature)
            if invalid:
                return invalid
        if self.smem_bytes(signature) > arch.smem_per_cta:
            return f"{self.smem_bytes(signature)} B of shared memory; {arch.name} gives a CTA {arch.smem_per_cta}"
        return None

    def _instruction(self, signature: Signature) -> str | None:
        accepted = instructions(signature)
        if self.instruction not in accepted:
            names = " or ".join("x".join(map(str, i)) for i in accepted)
            got = "x".join(map(str, self.instruction))
            return f"instruction {got}; {signature.dtype} with precision {signature.precision!r} takes {names}"
        return None

    def _tiles(self, signature: Signature) -> str | None:
        (bm, bn, bk), (wm, wn, wk), (im, in_, ik) = self.threadblock, self.warp, self.instruction
        for name, value in zip(("BM", "BN", "BK", "WM", "WN", "WK"), (*self.threadblock, *self.warp), strict=True):
            if value <= 0 or value & (value - 1):
                return f"{name} is {value}; it must be a power of two"
        if bm % wm or bn % wn:
            return f"warp tile {wm}x{wn} does not divide the threadblock tile {bm}x{bn}"
        if wk != bk:
            return f"WK is {wk} and BK {bk}; the warps of a CTA share K, so both must be equal"
        if self.warps > 16:
            return f"{self.warps} warps; at most 16, more leave too few registers a thread"
        if wm * wn > 64 * 64:
            return f"warp tile {wm}x{wn}; accumulators and fragments over 64x64 spill"
        if self.simt:
            if wm < 16 or wn < 16 or wm * wn < 32 * 16:
                return f"warp tile {wm}x{wn}; SIMT takes 16x32 and more"
            if bk not in (8, 16):
                return f"BK is {bk}; SIMT takes 8 or 16"
            if bk == 16 and self.stages == 2:
                return "BK is 16; SIMT with 2 stages takes 8 (the padding of its transposed tiles)"
            vector = 1
        else:
            if wm < 32 or wn < 32 or wm % im or wn % in_:
                return f"warp tile {wm}x{wn}; tensor cores take multiples of {im}x{in_} from 32x32"
            if bk < 2 * ik:
                return f"BK is {bk}; at least {2 * ik} (two instructions, for double-buffered fragments)"
            line = bk * ITEMSIZE[signature.dtype]
            if line < 64:
                return f"BK is {bk}, {line} bytes; the shared-memory layouts take 64 and more"
            vector = 16 // ITEMSIZE[signature.dtype]
        for name, extent in (("BM", bm), ("BN", bn)):
            if extent * bk // vector < self.threads:
                return f"{name} x BK is {extent * bk // vector} accesses for {self.threads} threads; each must make one"
        return None

    def _pipeline(self, signature: Signature) -> str | None:
        if not 2 <= self.stages <= 8:
            return f"stages is {self.stages}; accepted are 2 to 8"
        if self.align not in (2, 4, 8, 16) or self.align < ITEMSIZE[signature.dtype]:
            return f"align is {self.align} bytes; accepted are 2, 4, 8, 16, and at least one element"
        least = TAKES[signature.kind].stages[0]
        if self.stages < least:
            return f"stages is {self.stages}; {signature.dtype} on tensor cores takes {least} and more"
        narrow = min(self.align, signature.align_a, signature.align_b)
        if narrow < 4 and self.stages > 2:
            return f"A or B is aligned to {narrow} bytes; cp.async copies at least 4, so such operands take 2 stages"
        for name, extent, access in zip("AB", self.threadblock, self.access(signature), strict=False):
            count = extent * self.threadblock[2] // (self.threads * access)
            if count > MAX_ACCESSES:
                return f"{count} accesses of {name} a thread and stage; CUTLASS has predicates for {MAX_ACCESSES}"
        return None

    def _split(self, signature: Signature) -> str | None:
        if self.swizzle not in SWIZZLES:
            return f"swizzle is {self.swizzle!r}; accepted are {', '.join(SWIZZLES)}"
        if not 1 <= self.splits <= MAX_SPLITS:
            return f"splits is {self.splits}; accepted are 1 to {MAX_SPLITS}"
        if self.splits > 1 and self.swizzle == "streamk":
            return "stream-K divides K itself; splits must be 1"
        if self.splits > 1 and self.swizzle == "h":
            return "the horizontal swizzle is without split-K; take an identity swizzle"
        return None


def instructions(signature: Signature) -> tuple[tuple[int, int, int], ...]:
    """The instruction shapes that serve a signature; none where no kernel does."""
    return TAKES[signature.kind].instructions if signature.kind in TAKES else ()


_PUBLISHED: str = """
128x256x64/64x64x64/3 64x256x32/32x64x32/4 128x128x32/64x64x32/4 128x64x32/64x32x32/4 64x128x32/32x64x32/4
128x32x32/64x32x32/4 64x32x32/32x32x32/5 32x64x32/32x32x32/5 128x128x64/64x64x64/4 128x64x64/64x32x64/4
64x128x64/32x64x64/4 256x256x32/64x64x32/3 256x128x32/64x64x32/3 128x256x32/64x64x32/3 64x64x32/32x32x32/5
256x256x64/64x64x64/3 256x128x64/64x64x64/3 128x256x64/64x64x64/4 256x256x64/64x64x64/4 128x128x64/64x64x64/3
"""


def published(swizzle: str = "id1", splits: int = 1) -> tuple[Cutlass2xConfig, ...]:
    """The 20 published tunings for 16-bit operands (instruction 16x8x16), with a swizzle and split of choice.

    Two of them, 256x256x64 with 4 stages and (on GPUs with less than 192 KiB) with 3, need more shared memory than
    most GPUs have: `Cutlass2xConfig.why_invalid` says so.
    """
    found = []
    for text in _PUBLISHED.split():
        tile, warp, stages = text.split("/")
        found.append(Cutlass2xConfig.parse(f"cutlass2x/{tile}/w{warp}/s{stages}/i16x8x16/{swizzle}/k{splits}"))
    return tuple(found)


def space(signature: Signature) -> Iterator[Cutlass2xConfig]:
    """Every configuration the tuner may consider, before the validity rule."""
    math = TAKES.get(signature.kind)
    if math is None:
        return
    extents = (32, 64, 128, 256)
    tiles = product(extents, extents, math.depths, math.warp_rows, (32, 64), math.stages)
    instruction = math.instructions[0]
    schedules = [(swizzle, 1) for swizzle in SWIZZLES] + [("id1", splits) for splits in (2, 4, 8)]
    for bm, bn, bk, wm, wn, stages in tiles:
        for swizzle, splits in schedules:
            yield Cutlass2xConfig((bm, bn, bk), (wm, wn, bk), stages, instruction, swizzle, splits)


def narrowed(config: Cutlass2xConfig, signature: Signature) -> Cutlass2xConfig:
    """`config`, with two stages where the alignment of the operands rules out cp.async."""
    if min(signature.align_a, signature.align_b) < 4 and config.stages > 2:
        return replace(config, stages=2)
    return config
