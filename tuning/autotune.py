"""The autotuned rungs: enumerate a family of configurations, check and time each, keep the winner.

Every measurement goes to the winners store, wrong ones as wrong. Kernels are compiled ahead on a few threads while the
GPU times those in front of them; the most promising come first, so that a search cut short has seen the best
candidates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem
from cutegemm.winners import Measurement, Winners
from cutegemm.winners.fingerprint import fingerprint
from legacy_cuda.backend import BACKEND
from legacy_cuda.config import LegacyConfig
from legacy_cuda.kernel import LegacyKernel
from legacy_cuda.space import family, promise
from tuning.workbench import Workbench

FINALISTS = 4


def autotune(
    bench: Workbench,
    name: str,
    *,
    budget_s: float = 60.0,
    winners: Winners | None = None,
    report: Callable[[str], None] | None = None,
) -> LegacyConfig | None:
    """Searches one family ("thread_tile" or "warp_tile") for the problem on the bench.

    Args:
        bench: the problem with its inputs on the current CUDA device.
        name: the family, see `legacy_cuda.space.family`.
        budget_s: seconds to spend; the search stops in time for the finalists to be timed again.
        winners: where measurements go; the default store when None.
        report: called with a line about each new best.

    Returns:
        The fastest right configuration, or None when the family has none that is right.
    """
    store = winners or Winners()
    problem, arch = bench.problem, bench.arch
    frontier = _Frontier(sorted(family(name, problem.signature, arch), key=lambda c: -promise(c, problem, arch)))
    total = len(frontier)
    deadline = time.monotonic() + 0.8 * budget_s
    found: list[tuple[float, LegacyConfig]] = []
    for tried, (config, kernel) in enumerate(_compiled_ahead(frontier, problem, arch, deadline), 1):
        verdict, seconds = ("did not compile", None) if kernel is None else _judge(bench, config)
        store.record(_row(problem, arch, config, seconds, verdict))
        if verdict == "ok" and seconds is not None:
            if report is not None and seconds < min((s for s, _ in found), default=float("inf")):
                report(f"  {name} {tried}/{total}: {config} {problem.flops / seconds * 1e-12:.2f} TFLOP/s")
            found.append((seconds, config))
            frontier.measured(seconds, config)
        elif report is not None:
            report(f"  {name} {tried}/{total}: {config}: {verdict}")
    finalists = [config for _, config in sorted(found, key=lambda pair: pair[0])[:FINALISTS]]
    if not finalists:
        return None
    final = [bench.measure(config, rounds=3) for config in finalists]
    store.record(*(_row(problem, arch, row.config, row.seconds, row.verdict) for row in final))
    right = [row for row in final if row.verdict == "ok"]
    return min(right, key=lambda row: row.seconds).config if right else None


class _Frontier:
    """What to try next: in turn the most promising candidate, and a neighbour of the best one so far.

    A neighbour is an untried candidate of the same kernel that differs in the fewest parameters.
    """

    def __init__(self, by_promise: list[LegacyConfig]) -> None:
        self._rest = dict.fromkeys(by_promise)
        self._best: tuple[float, LegacyConfig] | None = None
        self._turn = 0

    def __len__(self) -> int:
        return len(self._rest)

    def measured(self, seconds: float, config: LegacyConfig) -> None:
        if self._best is None or seconds < self._best[0]:
            self._best = (seconds, config)

    def next(self) -> LegacyConfig | None:
        if not self._rest:
            return None
        self._turn += 1
        chosen = next(iter(self._rest))
        if self._best is not None and self._turn % 2:
            best = self._best[1]
            chosen = min(self._rest, key=lambda c: (c.rung != best.rung, _distance(c, best)))
        del self._rest[chosen]
        return chosen


def _distance(one: LegacyConfig, other: LegacyConfig) -> int:
    theirs = other.parameters
    return sum(value != theirs.get(name) for name, value in one.parameters.items())


def _judge(bench: Workbench, config: LegacyConfig) -> tuple[str, float | None]:
    try:
        verdict = bench.check(config)
        return verdict, bench.quick_seconds(config) if verdict == "ok" else None
    except GemmError as why:
        return str(why), None


def _row(problem: Problem, arch: Arch, config: LegacyConfig, seconds: float | None, verdict: str) -> Measurement:
    made_of = fingerprint(BACKEND.name, str(config))
    return Measurement(
        arch.name, arch.sm_count, str(problem), BACKEND.name, str(config), made_of, seconds, verdict, kind="family"
    )


def _compiled_ahead(
    frontier: _Frontier, problem: Problem, arch: Arch, deadline: float
) -> Iterable[tuple[LegacyConfig, LegacyKernel | None]]:
    """Candidates in order, each with its kernel compiled (None when that failed), until the deadline."""

    def build(config: LegacyConfig) -> LegacyKernel | None:
        if time.monotonic() > deadline:
            return None
        try:
            kernel = BACKEND.build(problem.signature, config, arch)
            return kernel if kernel.cubin else None
        except GemmError:
            return None

    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        waiting: list[tuple[LegacyConfig, Future[LegacyKernel | None]]] = []
        while time.monotonic() < deadline:
            while len(waiting) < 2 * workers and (config := frontier.next()) is not None:
                waiting.append((config, pool.submit(build, config)))
            if not waiting:
                return
            config, future = waiting.pop(0)
            kernel = future.result()
            if kernel is not None or time.monotonic() < deadline:
                yield config, kernel
