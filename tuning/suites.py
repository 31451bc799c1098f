"""Shapes by name and by text: what the sweep and the benchmark run over.

square   64 ... 8192: how a kernel grows with the problem
llm      the four linear layers of an 8B transformer, for 16 (decoding) to 4096 (a prompt) rows
deep     few outputs and a long sum, and the reverse: split-K and stores
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

Shape = tuple[int, int, int]
"""(M, N, K) in elements."""

LARGEST = 2**31 - 1

_ROWS = (16, 128, 1024, 4096)
_LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))

SUITES: Mapping[str, tuple[Shape, ...]] = MappingProxyType(
    {
        "square": tuple((n, n, n) for n in (64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)),
        "llm": tuple((m, n, k) for n, k in _LAYERS for m in _ROWS),
        "deep": ((256, 256, 65536), (512, 512, 16384), (64, 64, 16384), (2048, 128, 8192), (8192, 8192, 512)),
    }
)


def suite(names: str) -> list[Shape]:
    """The shapes of one suite or several, comma-separated, each shape once. Raises ValueError naming the suites."""
    shapes: dict[Shape, None] = {}
    for name in names.split(","):
        if name not in SUITES:
            raise ValueError(f"suite: got {name!r}, accepted are {', '.join(SUITES)}")
        shapes.update(dict.fromkeys(SUITES[name]))
    return list(shapes)


def parse(text: str) -> list[Shape]:
    """Shapes of a text such as `4096x4096x4096,16x28672x4096,512`: MxNxK, or one number for a square product.

    Raises ValueError naming the part that is neither.
    """
    shapes = []
    for part in text.split(","):
        sizes = [int(size) if size.strip().isdecimal() else 0 for size in part.split("x")]
        if len(sizes) not in (1, 3) or not all(1 <= size <= LARGEST for size in sizes):
            raise ValueError(
                f"shapes: got {part!r}, expected MxNxK or one number for a square product, sizes from 1 to {LARGEST}"
            )
        m, n, k = sizes * 3 if len(sizes) == 1 else sizes
        shapes.append((m, n, k))
    return shapes


def read(path: str | Path) -> list[Shape]:
    """The shapes of a file: `parse`'s texts, one a line; `#` begins a comment. Raises ValueError with the line."""
    shapes: list[Shape] = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
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
    if not dots or not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last) <= LARGEST:
        raise ValueError(f"square: got {text!r}, expected FIRST..LAST, for example 64..8192")
    sizes, size = [], int(first)
    while size <= int(last):
        sizes.append(size)
        size *= 2
    return [(size, size, size) for size in sizes]


def text(shape: Shape) -> str:
    """`MxNxK`."""
    return "x".join(map(str, shape))
