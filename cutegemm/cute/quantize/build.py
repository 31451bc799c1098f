"""The compiled kernels of `kernel.py`, from the kernel store."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cutegemm.cute import compile as compiler
from cutegemm.cute.compile import CuteKernel
from cutegemm.cute.quantize.config import Signature, Tile
from cutegemm.emulator.launch import Captured
from cutegemm.errors import UnsupportedError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import quantization
from cutegemm.run import kernel_store
from cutegemm.run.source_digest import source_digest

OLDEST, OLDEST_FP8 = (8, 0), (8, 9)
"""Compute capabilities: of any kernel, and of one that converts to or from fp8."""


class QuantizeKernel(CuteKernel):
    """A kernel without a product: its host entry takes four addresses, the stream and `kernel.NUMBERS`."""

    @property
    def function(self) -> Callable[..., None]:
        """Enqueues the kernel: function(*addresses, stream, *numbers)."""
        launch: Callable[..., None] = self._load()
        return launch

    @property
    def address(self) -> int | None:
        """Of the launcher behind `function`, where it lies in a library."""
        self._load()
        return self._address

    def captured(self, *values: int) -> Captured:
        """What the call of `function` would launch, for the emulator."""
        from cutegemm.emulator.capture import HostObject

        with self._lock:
            if self._host is None:
                self._host = HostObject.load(self.object_path, compiler.FUNCTION, self.ptx, arch=self.arch)
        return Captured(self._host.capture(*values))


def why_unsupported(signature: Signature, arch: Arch) -> str | None:
    """None when the GPU has the kernel's instructions, else a sentence."""
    fp8 = signature.values != "int8" and signature.does != "amax"
    needed = OLDEST_FP8 if fp8 else OLDEST
    if arch.capability >= needed:
        return None
    what = f"conversions of {signature.values}" if fp8 else "quantization kernels"
    has, oldest = (".".join(map(str, version)) for version in (arch.capability, needed))
    return f"{what} need compute capability {oldest} or newer; {arch.name} has {has}. backend='torch' serves any GPU"


def build(signature: Signature, tile: Tile, arch: Arch) -> QuantizeKernel:
    """The kernel, from the store or compiled now (0.2-0.5 s).

    Raises UnsupportedError for a GPU that lacks its instructions, GemmError with the compiler's words.
    """
    if refused := why_unsupported(signature, arch):
        raise UnsupportedError(f"quantize: {refused}")
    assert tile.why_invalid(signature) is None
    named: Any = signature
    config: Any = tile

    def operator() -> Any:
        from cutegemm.cute.quantize.kernel import Quantize

        return Quantize(tile, signature)

    key = {**compiler.store_key(named, config, arch.target), "definition": _definition()}
    entry = kernel_store.default_store().get_or_build(
        key, lambda: compiler.compile_operator(compiler._made(operator), arch.target)
    )
    return QuantizeKernel(named, config, arch, entry)


@functools.cache
def _definition() -> str:
    """A digest of the constants of the definition, which are compiled into the kernels."""
    return source_digest(Path(quantization.__file__))
