"""What a provider of `tuning.bench` is, and what it prepares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem
from cutegemm.tuner.timing import Call

Inputs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class NotServed(Exception):
    """The provider cannot serve the problem; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """calls: one an input set, each writes the output. config: what runs, as text; empty where that is not known."""

    calls: list[Call]
    config: str = ""
    backend: str = ""


class Provider(Protocol):
    """name: in tables. `kernels` lists what to compile ahead; `prepare` readies the calls."""

    name: str

    def kernels(self, problem: Problem, arch: Arch) -> list[tuple[str, Any]]:
        """(backend, configuration) of the kernels of ours that the problem will run."""
        ...

    def prepare(self, problem: Problem, arch: Arch, inputs: Inputs, out: torch.Tensor) -> Prepared: ...
