"""Many problems on one or several GPUs: a search a problem, a process a GPU; a GPU that is free takes the next."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cutegemm import backend as backends
from cutegemm import winners_table
from cutegemm.errors import UnsupportedError
from cutegemm.winners import Measurement, Winners, standing
from tuning.sweep_candidates import Candidate, Ranker, enumerate_all
from tuning.sweep_compile import CompilePool
from tuning.sweep_search import Options, Outcome, Search
from tuning.sweep_timer import Timer, TimerBroken

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.problem import Problem

Report = Callable[[int, str, Outcome], None]
"""report(number of the GPU's lane, phase, outcome so far); the phase of a finished search is "finished"."""

SEEDS = 4


def run_one(
    problem: Problem,
    names: Sequence[str],
    timer: Timer,
    pool: CompilePool,
    store: Winners,
    options: Options,
    *,
    report: Callable[[str, Outcome], None] = lambda phase, outcome: None,
    stopped: Callable[[], bool] = lambda: False,
    ranker: Ranker | None = None,
) -> Outcome:
    """Searches one problem in the backends named. Raises TimerBroken when the GPU or its memory will not do."""
    arch = timer.arch
    candidates = enumerate_all(problem, arch, names, ranker)
    session = pool.session(problem.signature, arch)
    search = Search(
        problem, candidates, timer, session, store, options,
        seeds=seeds(problem, arch, store, names), report=report, stopped=stopped,
    )  # fmt: skip
    return search.run()


def run(
    problems: Sequence[Problem],
    names: Sequence[str],
    timers: Sequence[Timer],
    pool: CompilePool,
    store: Winners,
    options: Options,
    *,
    report: Report = lambda lane, phase, outcome: None,
    stop: threading.Event | None = None,
    ranker: Ranker | None = None,
) -> list[Outcome]:
    """Searches every problem; one thread a timer. Those that were not begun when `stop` was set have no outcome.

    Ctrl-C sets `stop`; a second one is raised.
    """
    stop = stop or threading.Event()
    todo: queue.SimpleQueue[tuple[int, Problem]] = queue.SimpleQueue()
    for item in enumerate(problems):
        todo.put(item)
    outcomes: dict[int, Outcome] = {}
    failures: list[BaseException] = []

    def work(lane: int, timer: Timer) -> None:
        while not stop.is_set():
            try:
                number, problem = todo.get_nowait()
            except queue.Empty:
                return
            try:
                outcomes[number] = run_one(
                    problem, names, timer, pool, store, options, stopped=stop.is_set, ranker=ranker,
                    report=lambda phase, outcome: report(lane, phase, outcome),
                )  # fmt: skip
            except TimerBroken as why:
                outcomes[number] = Outcome(problem, 0, ended=f"not timed: {why}")
            except BaseException as why:
                failures.append(why)
                stop.set()
                return
            report(lane, "finished", outcomes[number])

    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def work_and_tell(lane: int, timer: Timer) -> None:
        try:
            work(lane, timer)
        finally:
            ended.put(lane)

    for lane, timer in enumerate(timers):
        threading.Thread(target=work_and_tell, args=(lane, timer), daemon=True).start()
    running = len(timers)
    while running:
        # Not Thread.join: interrupted, it takes a thread that still runs for one that has ended (Python 3.10, 3.11).
        try:
            with contextlib.suppress(queue.Empty):
                ended.get(timeout=0.2)
                running -= 1
        except KeyboardInterrupt:
            if stop.is_set():
                raise
            stop.set()
    if failures:
        raise failures[0]
    return [outcomes[number] for number in sorted(outcomes)]


def seeds(problem: Problem, arch: Arch, store: Winners, names: Sequence[str]) -> list[Candidate]:
    """What must be timed first: what `gemm` would run today, and earlier winners here or shipped, stale ones too."""
    found: list[Candidate] = []
    today = _today(problem, arch)
    if today is not None:
        found.append(today)
    own = [row for row in store.rows(str(problem)) if (row.gpu, row.sm_count) == (arch.name, arch.sm_count)]
    for rows in (own, winners_table.shipped(arch.name, arch.sm_count).get(str(problem), ())):
        best = sorted(standing(rows), key=lambda row: 1 / row.ratio if row.ratio else float("inf"))
        candidates = (_candidate(row, problem, arch) for row in best[:SEEDS] if row.backend in names)
        found += [candidate for candidate in candidates if candidate is not None]
    return list({candidate.key: candidate for candidate in found}.values())


def _today(problem: Problem, arch: Arch) -> Candidate | None:
    from cutegemm import plan

    try:
        choice = plan.choose(problem, arch)
    except (UnsupportedError, ValueError):
        return None
    return None if choice.backend == "torch" else Candidate(choice.backend, choice.config)


def _candidate(row: Measurement, problem: Problem, arch: Arch) -> Candidate | None:
    try:
        backend = backends.get(row.backend)
        config = backend.parse(row.config)
    except ValueError:
        return None  # of a version with other configurations
    return Candidate(row.backend, config) if backend.check(config, problem, arch) is None else None
