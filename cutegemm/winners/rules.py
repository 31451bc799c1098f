"""Which measurements may decide what `gemm` runs.

Rows of a winners store may have been imported, or written by another version or program. Two questions are asked of
each before it counts: is it a measurement that today's kernels can have made (`why_invalid`), and may its configuration
be chosen by anyone but the user (`Backend.only_by_name`). No row raises an exception, whatever is in it.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cutegemm import backend as backends
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import text as problem_text

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem
    from cutegemm.winners.row import Measurement

MOST_SMS = 1024
"""SMs of a GPU at most; the largest of today has 188."""
SECONDS = (1e-9, 1e6)
"""Least and most seconds that a launch can have taken."""

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 120


def shown(value: Any) -> str:
    """The `repr` of a value that somebody else wrote, shortened."""
    return _shown.repr(value)


def why_passed_over(row: Measurement) -> str | None:
    """None when a row may decide what `gemm` runs, as far as its configuration goes; else why it never does."""
    return _why_numbers(row) or _judged(row.gpu, row.sm_count, row.problem, row.backend, row.config)[1]


def why_invalid(row: Measurement) -> str | None:
    """None, or why a row is no measurement that today's kernels can have made: the column, what it has, what is
    accepted. A configuration that only a call may name is valid here.
    """
    return _why_numbers(row) or _judged(row.gpu, row.sm_count, row.problem, row.backend, row.config)[0]


def _why_numbers(row: Measurement) -> str | None:
    if not 1 <= row.sm_count <= MOST_SMS:
        return f"sm_count is {shown(row.sm_count)}, accepted are 1 to {MOST_SMS}"
    least, most = SECONDS
    for name, seconds in (("seconds", row.seconds), ("reference_seconds", row.reference_seconds)):
        if seconds is not None and not least <= seconds <= most:
            return f"{name} is {shown(seconds)}, accepted are {least:g} to {most:g}"
    return None


@lru_cache(maxsize=16384)
def _judged(gpu: str, sm_count: int, problem: str, backend: str, config: str) -> tuple[str | None, str | None]:
    """(why invalid, why passed over), None where there is no reason."""
    if not (gpu.strip() and gpu.isprintable()):
        invalid = f"gpu is {shown(gpu)}, expected the name of a GPU"
        return invalid, invalid
    meant = _problem(problem)
    if isinstance(meant, str):
        invalid = f"problem is {shown(problem)}: {meant}"
        return invalid, invalid
    read = _config(backend, config)
    if isinstance(read, str):
        return read, read
    serves, parsed, only_by_name = read
    refusals = [serves.check(parsed, meant, arch) for arch in _archs(gpu, sm_count)]
    if None not in refusals:
        invalid = f"config {shown(config)} cannot serve the problem: {refusals[0]}"
        return invalid, invalid
    return None, only_by_name


@lru_cache(maxsize=4096)
def _problem(text: str) -> Problem | str:
    """The problem that a text describes, or why it describes none."""
    try:
        return problem_text.parse(text)
    except ValueError as why:
        return str(why)


@lru_cache(maxsize=4096)
def _config(name: str, text: str) -> tuple[Any, Any, str | None] | str:
    """(backend, configuration, why only a call may name it) of a row's texts, or what is wrong with them."""
    if name not in backends.WITH_KERNELS:
        return f"backend is {shown(name)}, and no such backend has kernels"
    backend = backends.get(name)
    try:
        config = backend.parse(text)
    except ValueError:
        return f"config is {shown(text)}, which is no configuration of backend {name!r}"
    if str(config) != text:
        return f"config is {shown(text)}, which backend {name!r} writes {shown(str(config))}"
    return backend, config, backend.only_by_name(config)


@lru_cache(maxsize=64)
def _archs(gpu: str, sm_count: int) -> tuple[Arch, ...]:
    """The GPU's entry of the table; for one that the table lacks, what it may be like."""
    known = [arch for arch in arch_table.ARCHS.values() if arch.name == gpu]
    similar = known or [arch for arch in arch_table.ARCHS.values() if arch.generic]
    return tuple(replace(arch, sm_count=sm_count) for arch in similar)
