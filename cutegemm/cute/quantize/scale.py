"""The scale of a group from its largest magnitude, as instructions; `problem.quantization` defines it to the bit."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from cutegemm.problem.quantization import FLT_MAX, SMALLEST_SCALE, Format


def larger(format: Format, x: Any, y: Any) -> Any:
    """The larger one. Of int8 a NaN wins, else a number does."""
    return cute.arch.fmax(x, y, nan=format.name == "int8")


def of_largest(format: Format, amax: Any) -> Any:
    """The scale of a group with this maximum."""
    integer = format.name == "int8"
    scale = cute.arch.inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[cute.arch.fmin(amax, Float32(FLT_MAX), nan=integer), Float32(format.largest)],
    )
    return cute.arch.fmax(scale, Float32(SMALLEST_SCALE), nan=integer)


def reciprocal(scale: Any) -> Any:
    """1 / scale, rounded to nearest."""
    return cute.arch.inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[scale])
