"""What host code asks of the GPU: kernel launches and clears, all that the engine needs to know besides the PTX."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from cutegemm.emulator.report import Checks

Dim3 = tuple[int, int, int]


def as_dim3(value: int | tuple[int, ...], name: str) -> Dim3:
    """``value`` as three positive integers; 1 to 3 of them may be given, the rest are 1."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(numbers) <= 3 or not all(isinstance(n, int) and n >= 1 for n in numbers):
        raise ValueError(f"{name}: expected 1 to 3 positive integers, got {value!r}")
    padded = (*numbers, 1, 1, 1)
    return padded[0], padded[1], padded[2]


@dataclass(frozen=True)
class Launch:
    """A launch of one entry function of a PTX module.

    kernel: the name of the ``.entry``. grid: CTAs per axis (x, y, z), clusters not counted apart. block:
    threads per axis of a CTA. cluster: CTAs per axis of a cluster; (1, 1, 1) without clusters. dynamic_smem:
    bytes of dynamic shared memory per CTA. params: the parameter bytes laid out exactly as the ``.param``
    declarations of the entry: each at the next multiple of its
        alignment, padding zero.
    programmatic: launched with programmatic stream serialization, so that the kernel may start before the one
    in front of it has
        finished and has to ask for its results with ``griddepcontrol.wait``.
    """

    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    dynamic_smem: int = 0
    params: bytes = b""
    programmatic: bool = False

    def __post_init__(self) -> None:
        for name in ("grid", "block", "cluster"):
            object.__setattr__(self, name, as_dim3(getattr(self, name), name))
        if self.dynamic_smem < 0:
            raise ValueError(f"dynamic_smem: expected at least 0 bytes, got {self.dynamic_smem}")
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise ValueError(f"grid {self.grid} is no multiple of the cluster {self.cluster} on every axis")

    @property
    def ctas(self) -> int:
        """Number of CTAs of the grid."""
        return math.prod(self.grid)

    @property
    def threads(self) -> int:
        """Number of threads of one CTA."""
        return math.prod(self.block)

    def __str__(self) -> str:
        cluster = "" if self.cluster == (1, 1, 1) else f" cluster {self.cluster}"
        pdl = " programmatic" if self.programmatic else ""
        shape = f"{self.grid}, {self.block}{cluster}, {self.dynamic_smem} B"
        return f"{self.kernel}<<<{shape}>>>{pdl} with {len(self.params)} parameter bytes"


@dataclass(frozen=True)
class Memset:
    """A ``cudaMemsetAsync`` of the host code: ``count`` bytes at ``address`` set to ``value``."""

    address: int
    value: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.value <= 255 or self.count < 0:
            raise ValueError(f"memset of {self.count} bytes to {self.value}: needs count >= 0 and a value of 0 to 255")


class Captured(list[Launch | Memset]):
    """The launches and clears of one call, in order.

    scratch: the workspaces that they use, by name. checks: what the emulator shall check; None: everything.
    constant: names of the operands that no running kernel writes, as the call promised.
    """

    def __init__(
        self,
        operations: Iterable[Launch | Memset],
        scratch: dict[str, torch.Tensor] | None = None,
        checks: Checks | None = None,
        constant: tuple[str, ...] = (),
    ) -> None:
        super().__init__(operations)
        self.scratch, self.checks, self.constant = scratch or {}, checks, constant
        self._fresh: dict[str, torch.Tensor] = {}
        self._ran = ""

    def starts(self, text: str) -> None:
        """To be called before a kernel of that text runs: where another ran last, the workspaces become again what they
        were at first. A mutant that breaks off leaves state words with which the next kernel would be wrong.
        """
        if not self._ran:
            self._fresh = {name: workspace.clone() for name, workspace in self.scratch.items()}
        elif self._ran != text:
            for name, workspace in self.scratch.items():
                workspace.copy_(self._fresh[name])
        self._ran = text
