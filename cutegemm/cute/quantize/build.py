"""The compiled kernels of `kernel.py`, from the kernel store."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from cutegemm.cute import standalone
from cutegemm.cute.quantize.config import Signature, Tile
from cutegemm.cute.standalone import OLDEST, StandaloneKernel
from cutegemm.errors import UnsupportedError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import quantization
from cutegemm.run.source_digest import source_digest

OLDEST_FP8 = (8, 9)
"""The compute capability of the oldest GPU that converts to or from fp8."""


def why_unsupported(signature: Signature, arch: Arch) -> str | None:
    """None when the GPU has the kernel's instructions, else a sentence."""
    fp8 = signature.values != "int8" and signature.does != "amax"
    needed = OLDEST_FP8 if fp8 else OLDEST
    if arch.capability >= needed:
        return None
    what = f"conversions of {signature.values}" if fp8 else "quantization kernels"
    has, oldest = (".".join(map(str, version)) for version in (arch.capability, needed))
    return f"{what} need compute capability {oldest} or newer; {arch.name} has {has}. backend='torch' serves any GPU"


def build(signature: Signature, tile: Tile, arch: Arch) -> StandaloneKernel:
    """The kernel, from the store or compiled now (0.2-0.5 s).

    Raises UnsupportedError for a GPU that lacks its instructions, GemmError with the compiler's words.
    """
    if refused := why_unsupported(signature, arch):
        raise UnsupportedError(f"quantize: {refused}")
    assert tile.why_invalid(signature) is None

    def operator() -> Any:
        from cutegemm.cute.quantize.kernel import Quantize

        return Quantize(tile, signature)

    return standalone.build(signature, tile, arch, operator, {"definition": _definition()})


@functools.cache
def _definition() -> str:
    """A digest of the constants of the definition, which are compiled into the kernels."""
    return source_digest(Path(quantization.__file__))
