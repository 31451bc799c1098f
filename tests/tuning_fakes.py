"""Stand-ins for the GPU's process and the compile workers: invented times, invented failures, a clock of its own."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from cutegemm.tuner.search import Search
from cutegemm.tuner.space import Candidate
from cutegemm.tuner.timer import TORCH, Check, TimerBroken, TimerLost

H200 = arch_table.get("H200")
PROBLEM = Problem.of(1024, 1024, 1024, "bf16")


class Config:
    """A configuration that is only a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def tile(self) -> tuple[int, int, int]:
        return 64, 64, 64


def candidate(text: str, estimate: float = 1.0, backend: str = "cute") -> Candidate:
    return Candidate(backend, Config(text), estimate)


def space(count: int) -> list[Candidate]:
    """Candidates of the cute backend's family sm90, named by number, with estimates in that order."""
    return [candidate(f"sm90/{64 * (1 + i % 4)}x{16 * (i + 1)}x64/c1x1/s4", 1.0 + 0.01 * i) for i in range(count)]


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeTimer:
    """Times by candidate key; what is not listed takes `otherwise`.

    wrong: verdicts by key. breaks: keys that break the timer whenever they are timed. drift: factor on every time, by
    call. costs: seconds of the clock for a check and for a round of one candidate.
    """

    def __init__(
        self,
        seconds: Mapping[tuple[str, str], float] | Callable[[Candidate], float],
        *,
        torch: float = 1e-3,
        wrong: Mapping[tuple[str, str], str] | None = None,
        breaks: Sequence[tuple[str, str]] = (),
        noise: float = 0.0,
        drift: Callable[[], float] = lambda: 1.0,
        clock: Clock | None = None,
        costs: tuple[float, float] = (0.01, 0.005),
        open_fails: str = "",
    ) -> None:
        self.arch = H200
        self._seconds, self._torch, self._wrong, self._breaks = seconds, torch, dict(wrong or {}), breaks
        self._noise, self._drift, self._clock, self._costs = noise, drift, clock, costs
        self._open_fails = open_fails
        self._random = random.Random(1)
        self.opened: list[Problem] = []
        self.checked: list[tuple[str, str]] = []
        self.timed: list[tuple[tuple[tuple[str, str], ...], int, float]] = []
        self.after_check: Callable[[], None] = lambda: None
        self.closed = False

    def open(self, problem: Problem) -> None:
        if self._open_fails:
            raise TimerBroken(self._open_fails)
        self.opened.append(problem)

    def check(self, candidate: Candidate, timeout: float) -> Check:
        self.checked.append(candidate.key)
        self._pass(self._costs[0])
        self.after_check()
        verdict = self._wrong.get(candidate.key, "ok")
        return Check(verdict, self._of(candidate)) if verdict == "ok" else Check(verdict)

    def time(self, candidates, rounds, block_seconds):
        self.timed.append((tuple(c.key for c in candidates), rounds, block_seconds))
        self._pass(rounds * (len(candidates) + 1) * max(self._costs[1], block_seconds))
        if any(c.key in self._breaks for c in candidates):
            raise TimerLost("the process died")
        drift = self._drift()
        noisy = {c.key: self._of(c) * drift * (1 + self._noise * self._random.uniform(-1, 1)) for c in candidates}
        return {TORCH: self._torch * drift, **noisy}

    def describe(self) -> str:
        return "a fake GPU"

    def close(self) -> None:
        self.closed = True

    def _of(self, candidate: Candidate) -> float:
        if callable(self._seconds):
            return self._seconds(candidate)
        return self._seconds.get(candidate.key, 2e-3)

    def _pass(self, seconds: float) -> None:
        if self._clock is not None:
            self._clock.sleep(seconds)


class FakeCompiler:
    """Compiles at once, or after some seconds of the clock with so many workers.

    fails: reasons by key. stored: whether everything is in the kernel store, or what is. starts: seconds of the clock
    from the first job on until the workers stand. broken_after: seconds from then on until they are given up, in place
    of that.
    """

    def __init__(
        self,
        *,
        fails: Mapping[tuple[str, str], str] | None = None,
        stored: bool | Collection[tuple[str, str]] = False,
        clock: Clock | None = None,
        seconds: float = 0.0,
        workers: int = 4,
        starts: float = 0.0,
        broken_after: float | None = None,
    ) -> None:
        self._starts, self._broken_after, self._first = starts, broken_after, math.inf
        self._fails, self._stored, self._clock = dict(fails or {}), stored, clock
        self._seconds, self._workers = seconds, workers
        self._pending: list[tuple[float, Candidate]] = []
        self._free = [0.0] * workers
        self.submitted: list[tuple[str, str]] = []
        self.before: list[tuple[str, str]] = []
        self.cancelled = False

    def stored(self, candidate: Candidate) -> bool:
        return self._stored if isinstance(self._stored, bool) else candidate.key in self._stored

    def submit(self, candidate: Candidate) -> None:
        self.submitted.append(candidate.key)
        self._first = min(self._first, self._now())
        worker = self._free.index(min(self._free))
        begin = max(self._free[worker], self._now(), self._first + self._starts)
        self._free[worker] = begin + self._seconds
        self._pending.append((self._free[worker], candidate))

    def ahead(self, candidates) -> None:
        self.before += [candidate.key for candidate in candidates]

    @property
    def standing(self) -> bool:
        return self._now() >= self._first + self._starts and not self.broken

    @property
    def broken(self) -> str:
        gone = self._broken_after is not None and self._now() >= self._first + self._broken_after
        return "no compile worker comes up: it ended with status 1" if gone else ""

    @property
    def outstanding(self) -> int:
        return len(self._pending)

    @property
    def room(self) -> int:
        return max(0, self._workers + 2 - len(self._pending))

    def collect(self, timeout: float):
        if self._broken_after is not None and self._pending:
            if not self.broken and self._clock is not None:
                self._clock.sleep(min(timeout, self._first + self._broken_after - self._now()))
            given_up, self._pending = (self._pending, []) if self.broken else ([], self._pending)
            return [(c, self.broken) for _, c in given_up]
        done = [c for when, c in self._pending if when <= self._now()]
        if not done and timeout > 0 and self._pending and self._clock is not None:
            self._clock.sleep(min(timeout, max(0.001, min(when for when, _ in self._pending) - self._now())))
            done = [c for when, c in self._pending if when <= self._now()]
        self._pending = [(when, c) for when, c in self._pending if c not in done]
        return [(c, self._fails.get(c.key)) for c in done]

    def cancel(self) -> None:
        self.cancelled = True
        self._pending = []

    def session(self, signature, arch) -> FakeCompiler:
        return self

    def close(self) -> None: ...

    def _now(self) -> float:
        return self._clock() if self._clock is not None else time.monotonic()


def search(candidates, timer, store, compiler=None, problem=PROBLEM, options=None, clock=None, **more) -> Search:
    """Without a clock time stands still: the budget, and who gets into the final, must not depend on the machine."""
    compiler = compiler or FakeCompiler()
    return Search(problem, candidates, timer, compiler, store, options, clock=clock or Clock(), **more)


LIGHT = f"""
import sys, types
sys.modules["cutegemm"] = types.ModuleType("cutegemm")
sys.modules["cutegemm"].__path__ = [{str(Path(__file__).parent.parent / "cutegemm")!r}]
"""
"""Begins a child that takes the package without its public calls, and so without torch: it starts in 0.1 s, not 2."""
