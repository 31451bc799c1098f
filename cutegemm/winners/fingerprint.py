"""What a measured time depends on besides the GPU: the sources of the kernel, and the compiler.

A fingerprint is `<digest of the kernel family's sources> <compiler>=<version>`. Each backend declares the sources; they
leave out what decides which kernel is taken but not what the kernel does (candidates, cost model), and the files of
other kernel families, so that work on one family leaves the measurements of the others fresh. Comments and docstrings
do not count (`source_digest`).
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from cutegemm import backend as backends
from cutegemm.run.source_digest import source_digest

if TYPE_CHECKING:
    from cutegemm.winners.row import Measurement


def fingerprint(backend: str, config: str) -> str:
    """The fingerprint of today's kernel of that configuration's family.

    Raises ValueError for a backend that has no kernels of ours, and for a configuration of no known family.
    """
    kernels = backends.get(backend)
    return f"{_digest(tuple(kernels.sources(config)))} {_compiler(kernels.compiler)}"


def is_fresh(row: Measurement) -> bool:
    """Whether a row was measured with today's kernel sources and compiler."""
    try:
        return row.fingerprint == fingerprint(row.backend, row.config)
    except ValueError:
        return False


@cache
def _digest(sources: tuple[Path, ...]) -> str:
    return source_digest(*sources)


@cache
def _compiler(package: str) -> str:
    try:
        return f"{package}={version(package)}"
    except PackageNotFoundError:
        return f"{package}=none"
