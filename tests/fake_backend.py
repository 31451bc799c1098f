"""Stand-ins for backends: one that is all defaults, and real ones that compile nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cutegemm.backend import Backend


class FakeBackend(Backend[Any]):
    """Serves every problem by the configuration "fake", which is only a text, with the kernel that it is given."""

    name = "fake"
    compiler = "none"

    def __init__(self, kernel: Any = None) -> None:
        self._kernel = kernel

    def supports(self, problem, arch) -> str | None:
        return None

    def check(self, config, problem, arch) -> str | None:
        return None

    def configs(self, problem, arch) -> Iterable[Any]:
        return ["fake"]

    def default(self, problem, arch) -> Any:
        return "fake"

    def parse(self, text: str) -> Any:
        return text

    def build(self, signature, config, arch) -> Any:
        return self._kernel

    def sources(self, config: str) -> tuple[Path, ...]:
        return ()

    def footprint(self, config, signature, arch) -> Any:
        raise NotImplementedError


def uncompiled(backend: Backend[Any], build: Callable[..., Any]) -> Backend[Any]:
    """A backend like this one, whose kernels are what `build(signature, config, arch)` gives."""
    return type("Uncompiled", (type(backend),), {"build": staticmethod(build)})()
