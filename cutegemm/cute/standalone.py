"""Kernels without a product: the host entry takes addresses, the stream, and the kernel's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutegemm.cute import compile as compiler
from cutegemm.cute.compile import CuteKernel
from cutegemm.cute.launch_config import PROGRAMMATIC
from cutegemm.emulator.launch import Captured
from cutegemm.hardware.arch import Arch
from cutegemm.run import kernel_store

OLDEST = (8, 0)
"""The compute capability of the oldest GPU that the kernels are compiled for; quantization to fp8 needs a newer one."""


def why_too_old(tile: Any, arch: Arch) -> str | None:
    """None where that GPU can run kernels of this kind, else a sentence that names the tile."""
    if arch.capability < OLDEST:
        return f"{tile}: the kernel needs compute capability {OLDEST[0]}.{OLDEST[1]} or newer"
    return None


def begins_early(ctas: int, threads: int, arch: Arch) -> bool:
    """Whether a launch of so many CTAs of so many threads may begin before the kernel in front of it has ended: on GPUs
    that have programmatic dependent launch, where it fills at most half of their threads (see `warps.config`).
    """
    return arch.capability >= PROGRAMMATIC and 2 * ctas * threads <= arch.sm_count * arch.threads_per_sm


class StandaloneKernel(CuteKernel):
    """A compiled one; `signature` and `config` are of its own family."""

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


def build(
    signature: Any, config: Any, arch: Arch, operator: Callable[[], Any], more: dict[str, str] | None = None
) -> StandaloneKernel:
    """The kernel, from the store or compiled now (0.2-0.5 s).

    Args:
        operator: makes the DSL operator; called only where the kernel must be compiled.
        more: what its machine code depends on besides `compile.store_key`.

    Raises GemmError with the compiler's words.
    """
    key = {**compiler.store_key(signature, config, arch.target), **(more or {})}
    entry = kernel_store.default_store().get_or_build(
        key, lambda: compiler.compile_operator(compiler._made(operator), arch.target)
    )
    return StandaloneKernel(signature, config, arch, entry)
