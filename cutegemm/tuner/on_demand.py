"""One search for one problem from a program: what `cutegemm.tune` and `CUTEGEMM_TUNE=1` run.

`gemm` itself never tunes unless that variable is set, and never while a CUDA graph is being captured.
"""

from __future__ import annotations

import numbers
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutegemm import locks
from cutegemm.backend import WITH_KERNELS
from cutegemm.errors import GemmError, UnsupportedError

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem

BUDGET = 60.0
"""Seconds that a search takes when nothing else is said; `CUTEGEMM_TUNE_BUDGET` changes it for `CUTEGEMM_TUNE=1`."""

_lock = locks.reentrant()
_met: set[tuple[str, int, str]] = set()


@dataclass(frozen=True)
class Tuned:
    """What a search found for a problem.

    backend, config: the winner, and `gemm`'s choice from now on. seconds: per launch; of a product that was timed at
    full clock and at the power limit (`tuner.timing`) the geometric mean of both. ratio: speed over cuBLAS's product in
    the same rounds. tried: configurations measured or refused. enumerated: valid ones.
    """

    backend: str
    config: str
    seconds: float
    ratio: float | None
    tried: int
    enumerated: int


def search(
    problem: Problem,
    arch: Arch,
    device: int,
    *,
    budget: float = BUDGET,
    backends: Sequence[str] = ("cute",),
    jobs: int | None = None,
    progress: bool = False,
    timer: Any = None,
    pool: Any = None,
) -> Tuned:
    """Searches for a problem on CUDA device `device` and records everything in the user's winners store.

    Args:
        budget: seconds. backends: where to look, of `WITH_KERNELS`. jobs: compile processes; by default as cores and
            memory allow.
        progress: tell on stderr how far it is.
        timer, pool: stand-ins for the GPU's process and the compile workers.

    Raises:
        ValueError: budget, backends or jobs are none of these.
        UnsupportedError: there is nothing to time, or no backend named serves the problem.
        GemmError: nothing right was measured within the budget, or the GPU cannot be used by another process.
    """
    _check_budget(budget)
    _check_jobs(jobs)
    backends = _names(backends)
    if not (problem.m and problem.n and problem.k and problem.batch):
        raise UnsupportedError(f"tune: {problem} has an empty extent; there is nothing to time")
    from cutegemm import winners  # when a search is wanted: importing cutegemm is cheap
    from cutegemm.choice import plan
    from cutegemm.tuner import run as sweep_run
    from cutegemm.tuner.compile_pool import CompilePool
    from cutegemm.tuner.report import Progress
    from cutegemm.tuner.search import Options
    from cutegemm.tuner.timer import GpuProcess, TimerBroken

    problem = plan.measured(problem, arch)
    own_timer, own_pool = timer is None, pool is None
    options = Options(budget=budget)
    shown = Progress(1, options.limit) if progress else None
    tell: Callable[[str, Any], None] = lambda phase, outcome: shown.update(0, phase, outcome) if shown else None  # noqa: E731
    with _lock:
        timer = timer or GpuProcess(device)
        try:
            pool = pool or CompilePool(jobs)
            outcome = sweep_run.run_one(problem, backends, timer, pool, winners.Winners(), options, report=tell)
        except TimerBroken as why:
            raise GemmError(f"tune: {why}") from why
        finally:
            if own_timer:
                timer.close()
            if own_pool and pool is not None:
                pool.close()
            if shown is not None:
                shown.close()
    if outcome.ended == "interrupted":
        raise KeyboardInterrupt
    if outcome.enumerated == 0:
        raise UnsupportedError(f"tune: no configuration of {', '.join(backends)} serves {problem} on {arch.name}")
    best = outcome.winner
    if best is None or best.seconds is None:
        wrong = f"{outcome.count('wrong')} wrong, {outcome.count('failed')} failed"
        broke = "" if outcome.searched else f"; {outcome.ended}"
        raise GemmError(f"tune: nothing right was measured for {problem} within {budget:g} s ({wrong}{broke})")
    ratio = 1 / best.score if best.reference_seconds else None
    return Tuned(*best.candidate.key, best.seconds, ratio, len(outcome.results), outcome.enumerated)


def _budget() -> float:
    """Seconds of a search under `CUTEGEMM_TUNE=1`. Raises ValueError unless `CUTEGEMM_TUNE_BUDGET` is positive."""
    text = os.environ.get("CUTEGEMM_TUNE_BUDGET") or str(BUDGET)
    try:
        budget = float(text)
    except ValueError:
        budget = 0.0
    if not budget > 0:
        raise ValueError(f"CUTEGEMM_TUNE_BUDGET: got {text!r}, accepted is a positive number of seconds")
    return budget


def on_demand(problem: Problem, arch: Arch, device: int, **stand_ins: Any) -> None:
    """What `gemm` does under `CUTEGEMM_TUNE=1` with a problem it has no winner for: tunes it, once a process.

    A search that finds nothing is a warning: `gemm` goes on with the heuristic.
    """
    if not (problem.m and problem.n and problem.k and problem.batch):
        return
    from cutegemm import winners
    from cutegemm.choice import plan

    problem = plan.measured(problem, arch)
    met = (arch.name, arch.sm_count, str(problem))
    with _lock:
        if met in _met:
            return
        budget = _budget()  # a bad one is an error for every call, not for the first alone
        _met.add(met)
        found = winners.lookup(problem, arch)
        if found is not None and found.origin != winners.STALE_ORIGIN:
            return
        try:
            search(problem, arch, device, budget=budget, progress=True, **stand_ins)
        except GemmError as why:
            warnings.warn(f"CUTEGEMM_TUNE: {why}", RuntimeWarning, stacklevel=2)


def _check_budget(budget: Any) -> None:
    if not isinstance(budget, numbers.Real) or isinstance(budget, bool) or not float(budget) > 0:
        raise ValueError(f"budget: got {budget!r}, expected a positive number of seconds")


def _check_jobs(jobs: Any) -> None:
    if jobs is not None and (not isinstance(jobs, numbers.Integral) or isinstance(jobs, bool) or jobs < 1):
        raise ValueError(f"jobs: got {jobs!r}, expected a positive number of processes, or None")


def _names(names: Any) -> tuple[str, ...]:
    """The backends named, each once."""
    accepted = f"a sequence of some of {', '.join(map(repr, WITH_KERNELS))}"
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(f"backends: got {names!r}, expected {accepted}")
    found = tuple(names)
    wrong = [name for name in found if not isinstance(name, str) or name not in WITH_KERNELS]
    if wrong or not found:
        raise ValueError(f"backends: got {wrong[0] if wrong else found!r}, expected {accepted}")
    return tuple(dict.fromkeys(found))
