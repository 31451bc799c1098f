"""Many problems on one or several GPUs: a search a problem, a process a GPU; a GPU that is free takes the next."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cutegemm import backend as backends
from cutegemm.errors import UnsupportedError
from cutegemm.problem import Problem
from cutegemm.problem.text import other_16_bit
from cutegemm.tuner.compile_pool import CompilePool, CompileSession
from cutegemm.tuner.search import Options, Outcome, Search
from cutegemm.tuner.space import Candidate, Frontier, Ranker, enumerate_all
from cutegemm.tuner.timer import Timer, TimerBroken
from cutegemm.winners import Winners, neighbours, standing
from cutegemm.winners import table as winners_table
from cutegemm.winners.fingerprint import is_fresh
from cutegemm.winners.row import sureness
from cutegemm.winners.rules import why_passed_over

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch

Report = Callable[[int, str, Outcome], None]
"""report(number of the GPU's lane, phase, outcome so far); the phase of a finished search is "finished"."""

First = Callable[["Problem", "Arch"], Sequence[Candidate]]
"""first(problem, arch): what to try before everything else."""


class Claims(Protocol):
    """Who searches which problem, by its number in the list."""

    def take(self, stopped: Callable[[], bool]) -> int | None:
        """A problem to search now, None when there is none any more."""

    def upcoming(self, number: int) -> int | None:
        """The problem that probably comes after that one."""

    def finished(self, number: int, outcome: Outcome) -> None:
        """It has been searched."""

    def failed(self, number: int, outcome: Outcome) -> bool:
        """A GPU would not do it. Returns whether that GPU shall be given another."""


class InOrder:
    """Claims of one process: every problem once, in order. Safe for threads."""

    def __init__(self, count: int) -> None:
        self._count, self._next, self._lock = count, 0, threading.Lock()

    def take(self, stopped: Callable[[], bool]) -> int | None:
        with self._lock:
            number = self._next
            self._next += 1
        return number if number < self._count else None

    def upcoming(self, number: int) -> int | None:
        return number + 1 if number + 1 < self._count else None

    def finished(self, number: int, outcome: Outcome) -> None: ...

    def failed(self, number: int, outcome: Outcome) -> bool:
        return True


SEEDS = 4
"""Of each source of seeds at most; of the same problem in other majors one."""
NEAR = 1.5
"""Winners of shapes up to this distance (`neighbours.distance`) are seeds."""
AHEAD = 48
"""Candidates of the next problem that are compiled while the present one is timed."""


def nothing(problem: Problem, arch: Arch) -> Sequence[Candidate]:
    """A `First` that names none."""
    return ()


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
    first: First = nothing,
    seeded: bool = True,
    prepared: Future[Prepared] | None = None,
) -> Outcome:
    """Searches one problem in the backends named. Raises TimerBroken when the GPU or its memory will not do.

    Args:
        report: called with the phase and the outcome so far. stopped: asked often; the search ends when it says so.
        ranker: lists the configurations, in place of the cost model. first: comes before the seeds. seeded: whether
            there are any beside it.
        prepared: what is being made ready already.
    """
    arch = timer.arch
    if not options.resume:  # then it may turn out that nothing is to be timed
        timer.open(problem)
    ready = prepared.result() if prepared is not None else Prepared.of(problem, arch, names, pool, ranker)
    own = [row for row in store.rows(str(problem)) if (row.gpu, row.sm_count) == (arch.name, arch.sm_count)]
    search = Search(
        problem, ready.frontier, timer, ready.session, store, options,
        seeds=_sure(problem, arch, store, names, first, seeded),
        known=any(row.kind == "final" and is_fresh(row) for row in own),
        opened=not options.resume, report=report, stopped=stopped,
    )  # fmt: skip
    return search.run()


def _sure(
    problem: Problem, arch: Arch, store: Winners, names: Sequence[str], first: First, seeded: bool
) -> list[Candidate]:
    """What is tried whatever the model thinks of it."""
    return [*first(problem, arch), *(seeds(problem, arch, store, names) if seeded else ())]


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
    first: First = nothing,
    seeded: bool = True,
    ahead: int = AHEAD,
    claims: Claims | None = None,
) -> list[Outcome]:
    """Searches every problem; one thread a timer. Those that were not begun when `stop` was set have no outcome.

    The candidates of the next problem are enumerated, and the first `ahead` of them compiled, while the present one is
    timed. Ctrl-C sets `stop`; a second one is raised. `ranker`, `first` and `seeded` as in `run_one`. A problem is
    still open in its lane's timer when `report` is called with "finished". `claims`: which problems are for this
    process, by default all; the outcomes are of these.
    """
    claims = claims or InOrder(len(problems))
    stop = stop or threading.Event()
    outcomes: dict[int, Outcome] = {}
    failures: list[BaseException] = []
    ended: list[int] = []
    told: queue.SimpleQueue[int] = queue.SimpleQueue()

    def prepare(problem: Problem, arch: Arch) -> Prepared:
        made = Prepared.of(problem, arch, names, pool, ranker)
        if not (options.resume and _has_final(problem, arch, store)):
            sure = _sure(problem, arch, store, names, first, seeded)
            made.session.ahead([*sure, *made.frontier.first(min(ahead, options.limit))])
        return made

    def work(lane: int, timer: Timer) -> None:
        try:
            search(lane, timer)
        except BaseException as why:
            failures.append(why)
            stop.set()
        finally:
            ended.append(lane)
            told.put(lane)

    def search(lane: int, timer: Timer) -> None:
        goes_on = True
        while goes_on and not stop.is_set():
            taken = todo.take(timer, stop.is_set)
            if taken is None:
                return
            number, problem, prepared = taken
            try:
                outcomes[number] = run_one(
                    problem, names, timer, pool, store, options, stopped=stop.is_set, ranker=ranker, first=first,
                    seeded=seeded, report=lambda phase, outcome: report(lane, phase, outcome), prepared=prepared,
                )  # fmt: skip
            except TimerBroken as why:
                outcomes[number] = Outcome(problem, 0, ended=f"not timed: {why}")
                goes_on = claims.failed(number, outcomes[number])
            if outcomes[number].searched:
                claims.finished(number, outcomes[number])
            report(lane, "finished", outcomes[number])

    with _Todo(problems, prepare, claims) as todo:
        for lane, timer in enumerate(timers):
            threading.Thread(target=work, args=(lane, timer), daemon=True).start()
        while len(ended) < len(timers):
            # Not Thread.join: interrupted, it takes a running thread for one that has ended (Python 3.10, 3.11). Nor
            # are lanes counted here: Ctrl-C may come between taking one from the queue and counting it.
            try:
                with contextlib.suppress(queue.Empty):
                    told.get(timeout=0.2)
            except KeyboardInterrupt:
                if stop.is_set():
                    raise
                stop.set()
    if failures:
        raise failures[0]
    return [outcomes[number] for number in sorted(outcomes)]


@dataclass(frozen=True)
class Prepared:
    """What a search needs besides the GPU. `session` compiles the first candidates ahead."""

    frontier: Frontier
    session: CompileSession

    @classmethod
    def of(
        cls, problem: Problem, arch: Arch, names: Sequence[str], pool: CompilePool, ranker: Ranker | None
    ) -> Prepared:
        """The frontier of every valid configuration, nothing compiled."""
        return cls(Frontier(enumerate_all(problem, arch, names, ranker)), pool.session(problem.signature, arch))


class _Todo:
    """Problems as they are claimed; the one that comes next is prepared meanwhile, in a thread of its own."""

    def __init__(
        self, problems: Sequence[Problem], prepare: Callable[[Problem, Arch], Prepared], claims: Claims
    ) -> None:
        self._problems, self._prepare, self._claims = problems, prepare, claims
        self._lock = threading.Lock()
        self._prepared: dict[tuple[int, Arch], Future[Prepared]] = {}
        self._thread = ThreadPoolExecutor(1, "prepare")

    def take(self, timer: Timer, stopped: Callable[[], bool]) -> tuple[int, Problem, Future[Prepared] | None] | None:
        """(number, problem, what it needs, in the making), or None when none is left."""
        try:
            arch = timer.arch
        except TimerBroken:  # as `run_one` will say
            arch = None
        number = self._claims.take(stopped)
        if number is None:
            return None
        if arch is None:
            return number, self._problems[number], None
        following = self._claims.upcoming(number)
        with self._lock:
            for wanted in (number, following):
                if wanted is not None and (wanted, arch) not in self._prepared:
                    problem = self._problems[wanted]
                    self._prepared[wanted, arch] = self._thread.submit(self._prepare, problem, arch)
            return number, self._problems[number], self._prepared.pop((number, arch))

    def __enter__(self) -> _Todo:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _has_final(problem: Problem, arch: Arch, store: Winners) -> bool:
    """Whether a sweep with today's kernels has finished this problem."""
    return any(
        row.kind == "final" and row.ok and is_fresh(row) and why_passed_over(row) is None
        for row in store.rows(str(problem))
        if (row.gpu, row.sm_count) == (arch.name, arch.sm_count)
    )


def seeds(problem: Problem, arch: Arch, store: Winners, names: Sequence[str]) -> list[Candidate]:
    """What must be timed first: what `gemm` would run today; earlier winners here or shipped, stale ones too, and those
    of the same problem in the other 16-bit type, without its epilogue program and in other majors; the winners of the
    nearest shapes.
    """
    found = today(problem, arch)
    shipped = winners_table.shipped(arch.name, arch.sm_count)
    for text, most in _kin(problem):
        own = [row for row in store.rows(text) if (row.gpu, row.sm_count) == (arch.name, arch.sm_count)]
        for rows in (own, shipped.get(text, ())):
            best = sorted(standing(rows), key=lambda row: (-sureness(row.kind, row.method), -(row.ratio or 0.0)))
            keys = ((row.backend, row.config) for row in best if row.backend in names)
            found += _candidates(keys, problem, arch, most)
    for name in names:
        here = (problem.m, problem.n, problem.k)
        if problem.batch == 1 and all(here):
            known = neighbours.winners_of(problem.signature, arch, name, store=store)
            far = sorted((neighbours.distance(here, sizes), text) for sizes, text in known)
            found += _candidates(((name, text) for distance, text in far if distance <= NEAR), problem, arch)
    return list({candidate.key: candidate for candidate in found}.values())


def _kin(problem: Problem) -> list[tuple[str, int]]:
    """(text, how many seeds it may give) of a problem, and of the same in the other 16-bit type, without its epilogue
    program and, of contiguous tensors, in all majors: how an operand is aligned depends on which of its extents is
    contiguous.
    """
    p = problem
    others = [
        Problem.of(
            p.m, p.n, p.k, p.dtype, majors=majors, batch=p.batch, out_dtype=p.out_dtype, precision=p.precision,
            epilogue=p.epilogue,
        )
        for majors in ("tn", "tt", "nn", "nt")
    ]  # fmt: skip
    found: dict[str, int] = {}
    alone = [(p.without_terms(), SEEDS)] if p.epilogue.custom is not None else []
    for kin, most in [(p, SEEDS), *alone, *((other, 1) for other in others)]:
        for text in (str(kin), other_16_bit(str(kin))):
            found.setdefault(text, most)
    return list(found.items())


def today(problem: Problem, arch: Arch) -> list[Candidate]:
    """What `gemm` would run now, in a list; an empty one where nothing serves the problem, or torch. A `First`."""
    from cutegemm.choice import plan

    try:
        choice = plan.choose(problem, arch)
    except (UnsupportedError, ValueError):
        return []
    return [] if choice.config is None else [Candidate(choice.backend, choice.config)]


def _candidates(keys: Iterable[tuple[str, str]], problem: Problem, arch: Arch, most: int = SEEDS) -> list[Candidate]:
    """The first `most` of (backend, text) that can serve the problem."""
    found = (_candidate(backend, text, problem, arch) for backend, text in dict.fromkeys(keys))
    return list(itertools.islice((candidate for candidate in found if candidate is not None), most))


def _candidate(name: str, text: str, problem: Problem, arch: Arch) -> Candidate | None:
    try:
        backend = backends.get(name)
        config = backend.parse(text)
    except ValueError:
        return None  # of a version with other configurations
    unfit = backend.only_by_name(config) or backend.check(config, problem, arch)
    return None if unfit else Candidate(name, config)
