"""What a backend is: four functions and the kernels they give. Nothing outside a backend knows more of it.

A backend is a module or object with

    name                               the text that `backend=` accepts
    supports(problem, arch)            None, or a sentence saying why not and what would do
    check(config, problem, arch)       None, or why this configuration cannot serve the problem; what `supports` refuses
                                       none can
    configs(problem, arch)             every valid configuration, for the tuner
    default(problem, arch)             the configuration to use when nothing was measured
    parse(text)                        a configuration from its text form, ValueError naming what is accepted
    build(signature, config, arch)     a `Kernel`: compiled, or loaded from the kernel store

and may have

    candidates(signature, arch)        (configuration, splits of K that it may also have) of the few that the heuristic
                                       weighs; without it `default` decides
    weighed(signature, arch, m, n, k, batch)
                                       (text, whether K is split) of those candidates that are worth weighing for
                                       matrices of about these sizes; all are where it names none of them
    missing()                          None, or which tool it needs is not installed
    passed_over(problem, arch)         None, or why its faster kernels cannot serve the problem
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.emulator.launch import Launch
    from cutegemm.problem import Problem, Signature

BoundLaunch = Callable[[int, int, int, int, int, float, float, int], None]
"""run(a, b, c, bias, d, alpha, beta, stream): device addresses (0 for an absent operand), two numbers, and
the CUDA stream handle. It enqueues the kernel on the current device and returns at once."""


class Config(Protocol):
    """A frozen dataclass whose `str()` is stable and is read back by the backend's `parse`."""

    def tile(self) -> tuple[int, int, int]:
        """(M, N, K) of the CTA tile, in elements."""
        ...


class Kernel(Protocol):
    """A compiled kernel: signature + configuration + architecture."""

    signature: Signature
    config: Any
    arch: Arch

    @property
    def ptx(self) -> str:
        """The PTX text the compiler made; what the emulator runs."""
        ...

    @property
    def cubin(self) -> bytes:
        """The machine code, for disassembly and the occupancy tool."""
        ...

    def bind(self, problem: Problem) -> BoundLaunch:
        """The launch with the problem's sizes and strides filled in."""
        ...

    def capture(
        self, problem: Problem, a: int, b: int, c: int, bias: int, d: int, alpha: float, beta: float
    ) -> list[Launch]:
        """What `bind(problem)(...)` would ask of the driver: grid, block, shared memory, parameter bytes.

        The list may carry `scratch` (workspaces by name) and `checks` (what the emulator shall check).
        """
        ...


class Backend(Protocol):
    """See the module docstring."""

    name: str

    def supports(self, problem: Problem, arch: Arch) -> str | None: ...

    def check(self, config: Any, problem: Problem, arch: Arch) -> str | None: ...

    def configs(self, problem: Problem, arch: Arch) -> Iterable[Any]: ...

    def default(self, problem: Problem, arch: Arch) -> Any: ...

    def parse(self, text: str) -> Any: ...

    def build(self, signature: Signature, config: Any, arch: Arch) -> Kernel: ...


@dataclass(frozen=True)
class _Entry:
    module: str
    attribute: str


_REGISTRY: dict[str, _Entry] = {
    "cute": _Entry("cutegemm.cute", "BACKEND"),
    "cutlass2x": _Entry("cutegemm.cutlass2x", "BACKEND"),
    "legacy": _Entry("legacy_cuda.backend", "BACKEND"),
}

AUTO_ORDER = ("cute", "cutlass2x", "legacy")
"""Backends that backend="auto" asks for a CUDA tensor: a later one serves what the earlier cannot, or what it is
estimated to do clearly faster. torch is the last resort."""

NAMES = ("auto", *_REGISTRY, "torch")


def get(name: str) -> Backend:
    """The backend of that name, imported at first use.

    Raises:
        ValueError: no such backend.
    """
    entry = _REGISTRY.get(name)
    if entry is None:
        raise ValueError(f"backend: got {name!r}, accepted are {', '.join(map(repr, NAMES))}")
    return getattr(importlib.import_module(entry.module), entry.attribute)
