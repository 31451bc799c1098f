"""Shapes by name and by text: what the sweep and the benchmark run over.

square   64 ... 8192: how a kernel grows with the problem
llm      the four linear layers of an 8B transformer, for 16 (decoding) to 4096 (a prompt) rows
deep     few outputs and a long sum, and the reverse: split-K and stores

Two more say how A and B lie as well:

gradients   dW = dY^T X of the same layers: both operands MN-major, the sum over 1024 to 16384 tokens
misaligned  16-bit operands whose rows are no multiples of 16 bytes: odd vocabularies, an odd K, odd rows

`MOE` lists products in groups instead, the experts of published models (`python -m tuning.grouped`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from cutegemm.problem import MAX_EXTENT

Shape = tuple[int, int, int]
"""(M, N, K) in elements."""

MOST_START = 7
"""Elements of 16 bits up to the next multiple of 16 bytes."""

_ROWS = (16, 128, 1024, 4096)
_LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))

SUITES: Mapping[str, tuple[Shape, ...]] = MappingProxyType(
    {
        "square": tuple((n, n, n) for n in (64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)),
        "llm": tuple((m, n, k) for n, k in _LAYERS for m in _ROWS),
        "deep": ((256, 256, 65536), (512, 512, 16384), (64, 64, 16384), (2048, 128, 8192), (8192, 8192, 512)),
    }
)


class Laid(NamedTuple):
    """A shape, and how A and B lie: BLAS letters as of `Problem.of`."""

    shape: Shape
    majors: str


LAID: Mapping[str, tuple[Laid, ...]] = MappingProxyType(
    {
        "gradients": tuple(Laid((n, k, rows), "nt") for n, k in _LAYERS for rows in (1024, 4096, 16384)),
        "misaligned": (
            Laid((16, 50257, 1600), "tt"),  # logits of GPT-2 (XL), decoding and a prompt
            Laid((1024, 50257, 768), "tt"),
            Laid((4096, 32001, 4096), "tt"),  # a Llama with one token more
            Laid((50257, 768, 4096), "nt"),  # gradients of such weights
            Laid((32001, 4096, 2048), "nt"),
            Laid((1025, 4096, 4096), "nn"),  # an odd number of rows in a column-major A
            Laid((4095, 4096, 4096), "nn"),
            Laid((2048, 2048, 1001), "tn"),  # an odd K
            Laid((4096, 4096, 4097), "tn"),
            Laid((1023, 1025, 4099), "tt"),
        ),
    }
)
"""Suites whose shapes say how the operands lie."""


class Experts(NamedTuple):
    """The products of one layer of experts: D (rows, n) of A (rows, k) and weights (experts, k, n).

    model: whose sizes these are. rows: tokens times the experts that each token goes to. skew: how the rows are divided
    among experts: "uniform" (each token draws its experts), "zipf" (expert i in proportion to 1 / (i + 1)), "one",
    "even" (all alike), "uneven" (in proportion to the square of a uniform number, multiples of 8). aim: microseconds in
    bf16 on an H200 that are wanted, where somebody has said so.
    """

    model: str
    experts: int
    rows: int
    n: int
    k: int
    skew: str
    aim: float | None = None

    def __str__(self) -> str:
        return f"{self.experts}x{self.rows}x{self.n}x{self.k} {self.skew} ({self.model})"


MOE = (
    # (experts, hidden, F of an expert): gate and up are 2 F x hidden, down is hidden x F.
    Experts("Mixtral 8x7B, gate and up", 8, 2, 28672, 4096, "uniform"),
    Experts("Mixtral 8x7B, gate and up", 8, 128, 28672, 4096, "uniform"),
    Experts("Mixtral 8x7B, gate and up", 8, 8192, 28672, 4096, "zipf"),
    Experts("Mixtral 8x7B, down", 8, 32, 4096, 14336, "uniform"),
    Experts("Mixtral 8x7B, down", 8, 8192, 4096, 14336, "uniform"),
    Experts("Mixtral 8x22B, down", 8, 4096, 6144, 16384, "zipf"),
    Experts("DBRX, gate and up", 16, 1024, 21504, 6144, "uniform"),
    Experts("Phi-3.5-MoE, down", 16, 512, 4096, 6400, "zipf"),
    Experts("Llama 4 Scout, gate and up", 16, 64, 16384, 5120, "uniform"),
    Experts("Llama 4 Scout, gate and up", 16, 4096, 16384, 5120, "one"),
    Experts("gpt-oss-20b, gate and up", 32, 64, 5760, 2880, "uniform"),
    Experts("gpt-oss-20b, down", 32, 16384, 2880, 2880, "zipf"),
    Experts("OLMoE, gate and up", 64, 1024, 2048, 2048, "uniform"),
    Experts("OLMoE, down", 64, 32768, 2048, 1024, "zipf"),
    Experts("Qwen3-30B-A3B, gate and up", 128, 8, 1536, 2048, "uniform"),
    Experts("Qwen3-30B-A3B, gate and up", 128, 1024, 1536, 2048, "zipf"),
    Experts("Qwen3-30B-A3B, gate and up", 128, 65536, 1536, 2048, "uniform"),
    Experts("Qwen3-30B-A3B, down", 128, 8192, 2048, 768, "zipf"),
    Experts("Qwen3-235B-A22B, gate and up", 128, 128, 3072, 4096, "uniform"),
    Experts("Qwen3-235B-A22B, down", 128, 16384, 4096, 1536, "zipf"),
    Experts("gpt-oss-120b, gate and up", 128, 512, 5760, 2880, "uniform"),
    Experts("DeepSeek-V3, gate and up", 256, 8, 4096, 7168, "uniform"),
    Experts("DeepSeek-V3, gate and up", 256, 8192, 4096, 7168, "zipf"),
    Experts("DeepSeek-V3, down", 256, 32768, 7168, 2048, "uniform"),
    # Sizes at which other libraries were measured on an H200 before ours were.
    Experts("8 x 1024", 8, 8192, 4096, 7168, "even", 707),
    Experts("8 x 1024", 8, 8192, 7168, 2048, "even", 358),
    Experts("32 uneven", 32, 8096, 4096, 2048, "uneven", 272),
    Experts("128 uneven", 128, 7760, 1536, 2048, "uneven", 186),
    Experts("8 x 64", 8, 512, 4096, 7168, "even", 112),
    Experts("64 x 16", 64, 1024, 2048, 2048, "even", 124),
)
"""The suite `moe`: 1 to 65536 rows."""


def suite(names: str) -> list[Shape]:
    """The shapes of one suite or several, comma-separated, each shape once, without the suites of `LAID`.

    Raises ValueError naming the suites.
    """
    shapes: dict[Shape, None] = {}
    for name in names.split(","):
        if name not in SUITES and name not in LAID:
            raise ValueError(f"suite: got {name!r}, accepted are {', '.join([*SUITES, *LAID])}")
        shapes.update(dict.fromkeys(SUITES.get(name, ())))
    return list(shapes)


def laid(names: str) -> list[Laid]:
    """Those of `LAID` among the suites that `suite` takes."""
    return [each for name in names.split(",") for each in LAID.get(name, ())]


def parse(text: str) -> list[Shape]:
    """Shapes of a text such as `4096x4096x4096,16x28672x4096,512`: MxNxK, or one number for a square product.

    Raises ValueError naming the part that is neither.
    """
    shapes = []
    for part in text.split(","):
        sizes = [int(size) if size.strip().isdecimal() else 0 for size in part.split("x")]
        if len(sizes) not in (1, 3) or not all(1 <= size <= MAX_EXTENT for size in sizes):
            raise ValueError(
                f"shapes: got {part!r}, expected MxNxK or one number for a square product, sizes from 1 to {MAX_EXTENT}"
            )
        m, n, k = sizes * 3 if len(sizes) == 1 else sizes
        shapes.append((m, n, k))
    return shapes


def read(path: str | Path) -> list[Shape]:
    """The shapes of a file: `parse`'s texts, one a line; `#` begins a comment. Raises ValueError with the line, or
    where the file cannot be read.
    """
    shapes: list[Shape] = []
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as why:
        raise ValueError(f"{path}: it cannot be read as text: {why}") from None
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            shapes += parse(text)
        except ValueError as why:
            raise ValueError(f"{path}, line {number}: {why}") from None
    if not shapes:
        raise ValueError(f"{path}: no shapes in it")
    return shapes


def squares(text: str) -> list[Shape]:
    """Square shapes of `64..8192`: powers of two from the first size to the last. Raises ValueError."""
    first, dots, last = text.partition("..")
    if not dots or not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last) <= MAX_EXTENT:
        raise ValueError(f"square: got {text!r}, expected FIRST..LAST, for example 64..8192")
    sizes, size = [], int(first)
    while size <= int(last):
        sizes.append(size)
        size *= 2
    return [(size, size, size) for size in sizes]


def text(shape: Shape) -> str:
    """`MxNxK`."""
    return "x".join(map(str, shape))


def starts(text: str) -> list[tuple[int, int]]:
    """Elements by which A and B begin behind an aligned address, of a text such as `0,3,a1,b7`: both, or one of them.

    `all` is every number up to 7 for both, for A and for B, which in 16 bits is every place. Raises ValueError naming
    a part that is no such number.
    """
    every = range(MOST_START + 1)
    if text == "all":
        text = ",".join([*map(str, every), *(f"{name}{count}" for name in "ab" for count in every[1:])])
    found: dict[tuple[int, int], None] = {}
    for part in text.split(","):
        read = re.fullmatch(f"([ab]?)([0-{MOST_START}])", part.strip())
        if read is None:
            raise ValueError(f"offsets: got {part!r}, accepted are all, and 0 to {MOST_START} behind a, b or nothing")
        count = int(read[2])
        found[0 if read[1] == "b" else count, 0 if read[1] == "a" else count] = None
    return list(found)
