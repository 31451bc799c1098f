"""What a measured time depends on beside the GPU: the sources of the kernel, and the compiler.

A fingerprint is `<digest of the kernel family's sources> <compiler>=<version>`. It leaves out what decides which kernel
is taken but not what the kernel does (defaults, cost model), and the files of other kernel families, so that work on
one family leaves the measurements of the others fresh.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutegemm.winners import Measurement

CUTE_FAMILIES = {"sm90": "hopper", "sm80": "ampere", "simt": "simt"}
"""The name that begins the files of each kernel family in cute/kernels."""
_NOT_IN_KERNELS = ("defaults.py", "cells.py", "__init__.py")
_COMPILERS = {"cute": "nvidia-cutlass-dsl", "cutlass2x": "nvidia-cutlass", "legacy": "nvidia-cuda-nvrtc"}


def fingerprint(backend: str, config: str) -> str:
    """The fingerprint of today's kernel of that configuration's family.

    Raises ValueError for a backend that has no kernels of ours.
    """
    return _fingerprint(backend, config.split("/", 1)[0] if backend == "cute" else "")


def is_fresh(row: Measurement) -> bool:
    """Whether a row was measured with today's kernel sources and compiler."""
    try:
        return row.fingerprint == fingerprint(row.backend, row.config)
    except ValueError:
        return False


@cache
def _fingerprint(backend: str, family: str) -> str:
    if backend not in _COMPILERS:
        raise ValueError(f"backend: got {backend!r}, accepted are {', '.join(_COMPILERS)}")
    sources = {"cute": lambda: _cute(family), "cutlass2x": _cutlass2x, "legacy": _legacy}[backend]()
    package = _COMPILERS[backend]
    try:
        return f"{sources} {package}={version(package)}"
    except PackageNotFoundError:
        return f"{sources} {package}=none"


def _cute(family: str) -> str:
    from cutegemm.kernel_store import fingerprint

    return fingerprint(*cute_sources(family))


def cute_sources(family: str) -> list[Path]:
    """The files that decide what a kernel of a CuTe family does."""
    if family not in CUTE_FAMILIES:
        raise ValueError(f"config: got the family {family!r}, accepted are {', '.join(CUTE_FAMILIES)}")
    package = Path(__file__).parent
    others = tuple(name for key, name in CUTE_FAMILIES.items() if key != family)
    own = [
        path
        for path in (package / "cute").rglob("*.py")
        if path.name not in _NOT_IN_KERNELS
        and not (path.parent.name == "kernels" and path.name.startswith(others))
        and not (path.name == "hopper_config.py" and family != "sm90")
    ]
    return [*own, package / "epilogue.py"]


def _cutlass2x() -> str:
    from cutegemm.cutlass2x.build import source_fingerprint

    return source_fingerprint()


def _legacy() -> str:
    from legacy_cuda.build import source_fingerprint

    return source_fingerprint()
