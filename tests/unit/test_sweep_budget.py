"""When a shape's budget runs, and what becomes of a search whose compile workers are slow to come up or never do."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest

from cutegemm.problem import Problem
from cutegemm.tuner import report as sweep_report
from cutegemm.tuner import run as sweep_run
from cutegemm.tuner import search as sweep_search
from cutegemm.tuner.budget import MOST_WAITED
from cutegemm.tuner.search import STARTING, Options, Outcome, Search
from tests.tuning_fakes import H200, PROBLEM, Clock, FakeCompiler, FakeTimer, space
from tuning import sweep, sweep_dry


@pytest.fixture
def clock() -> Clock:
    return Clock()


def search(candidates, timer, compiler, store, clock, options=None, **more) -> Search:
    options = options or Options(budget=7.0)
    return Search(PROBLEM, candidates, timer, compiler, store, options, opened=True, clock=clock, **more)


@pytest.mark.parametrize("starts", [0.0, 6.0, 60.0])
def test_the_budget_begins_when_a_worker_stands(starts, store, clock):
    timer = FakeTimer({}, clock=clock)
    compiler = FakeCompiler(clock=clock, seconds=1.0, starts=starts)
    phases: list[tuple[str, float]] = []
    outcome = search(
        space(1000), timer, compiler, store, clock, report=lambda phase, _: phases.append((phase, clock.now))
    ).run()
    assert outcome.winner is not None
    assert outcome.winner.kind == "final"
    # As many candidates as with workers that stand already, and the same time beside the wait.
    assert outcome.waited == pytest.approx(starts, abs=0.3)
    warm = Clock()
    settled = search(space(1000), FakeTimer({}, clock=warm), FakeCompiler(clock=warm, seconds=1.0), store, warm).run()
    assert len(outcome.results) == pytest.approx(len(settled.results), abs=4)
    assert outcome.elapsed - outcome.waited == pytest.approx(settled.elapsed, abs=1.0)
    assert outcome.elapsed <= outcome.waited + 7.0 + 1.0
    assert any(phase == STARTING for phase, _ in phases) == (starts > 0)
    assert all(when <= 1000.0 + starts for phase, when in phases if phase == STARTING)


def test_what_is_stored_is_timed_at_once_and_does_not_use_up_the_budget(store, clock):
    """A single kernel in the store must not make the search begin, and end, while no worker stands."""
    candidates = space(100)
    compiler = FakeCompiler(stored=[candidates[0].key], clock=clock, seconds=0.5, starts=20.0)
    timer = FakeTimer({}, clock=clock)
    times: list[float] = []
    timer.after_check = lambda: times.append(clock.now - 1000.0)
    outcome = search(candidates, timer, compiler, store, clock).run()
    assert timer.checked[0] == candidates[0].key
    assert times[0] < 0.1
    assert times[1] >= 20.0
    assert len(outcome.results) > 10
    assert outcome.waited == pytest.approx(20.0, abs=0.5)
    assert outcome.elapsed <= outcome.waited + 8.0


def test_warm_kernels_wait_for_no_worker(store, clock):
    timer = FakeTimer({}, clock=clock)
    outcome = search(
        space(100), timer, FakeCompiler(stored=True, clock=clock, starts=1e9), store, clock, Options(budget=60.0)
    ).run()
    assert outcome.ended == "done"
    assert outcome.waited == 0.0
    assert outcome.elapsed < 10.0
    assert outcome.winner is not None


def test_workers_that_never_come_up_end_it(store, clock):
    timer, compiler = FakeTimer({}, clock=clock), FakeCompiler(clock=clock, starts=1e9)
    outcome = search(space(100), timer, compiler, store, clock).run()
    assert outcome.ended == f"no compile worker came up within {MOST_WAITED:.0f} s"
    assert not outcome.searched
    assert outcome.winner is None
    assert MOST_WAITED <= outcome.elapsed <= MOST_WAITED + 1.0
    assert store.rows() == []
    assert compiler.cancelled


def test_workers_that_are_given_up_blame_no_candidate(store, clock):
    """What is in the store is timed all the same, before and after."""
    candidates = space(100)
    stored = [candidate.key for candidate in candidates[::5]]
    compiler = FakeCompiler(stored=stored, clock=clock, broken_after=3.0)
    timer = FakeTimer({}, clock=clock)
    options = Options(budget=7.0, patience=None)
    outcome = search(candidates, timer, compiler, store, clock, options).run()
    assert outcome.ended == "no compile worker comes up: it ended with status 1"
    assert outcome.winner is not None
    assert set(timer.checked) == set(stored)
    assert outcome.count("failed") == 0
    assert {row.verdict for row in store.rows()} == {"ok"}
    assert outcome.elapsed < 3.0 + 8.0
    # The next shape knows it from the start.
    later = search(candidates, FakeTimer({}, clock=clock), compiler, store, clock, options).run()
    assert later.ended == outcome.ended
    assert later.waited == 0.0
    assert len(later.results) == len(stored)


def test_ctrl_c_while_workers_start(store, clock):
    timer, compiler = FakeTimer({}, clock=clock), FakeCompiler(clock=clock, starts=100.0)
    outcome = search(
        space(10), timer, compiler, store, clock, stopped=lambda: clock.now > 1005.0
    ).run()  # fmt: skip
    assert outcome.ended == "interrupted"
    assert outcome.elapsed < 6.0

    def interrupt(timeout: float):
        raise KeyboardInterrupt

    compiler = FakeCompiler(clock=clock, starts=100.0)
    compiler.collect = interrupt
    assert search(space(10), timer, compiler, store, clock).run().ended == "interrupted"
    assert compiler.cancelled


def test_only_the_first_shape_waits(store, clock, monkeypatch):
    monkeypatch.setattr(sweep_run, "today", lambda *rest: [])
    monkeypatch.setattr(sweep_search.Search.__init__, "__kwdefaults__", {
        **sweep_search.Search.__init__.__kwdefaults__, "clock": clock
    })  # fmt: skip
    timer, compiler = FakeTimer({}, clock=clock), FakeCompiler(clock=clock, seconds=0.5, starts=9.0)
    found = sweep_run.run(
        [Problem.of(64 * number, 64, 64) for number in (1, 2, 3)], ["cute"], [timer], compiler, store,
        Options(budget=7.0), ranker=lambda *rest: [(1.0 + n, c.config) for n, c in enumerate(space(500))],
    )  # fmt: skip
    assert [outcome.waited for outcome in found] == [pytest.approx(9.0, abs=0.3), 0.0, 0.0]
    assert all(outcome.winner is not None for outcome in found)
    assert all(outcome.elapsed - outcome.waited <= 8.0 for outcome in found)
    counts = [len(outcome.results) for outcome in found]
    assert max(counts) - min(counts) <= 8


def test_ctrl_c_in_a_sweep_whose_workers_hang(store, monkeypatch):
    """On the real clock: the wait asks for `stop` several times a second."""
    monkeypatch.setattr(sweep_run, "today", lambda *rest: [])

    class Hung(FakeCompiler):
        standing, outstanding = False, 1

        def collect(self, timeout: float):
            time.sleep(timeout)
            return []

    stop = threading.Event()
    told: list[str] = []

    def tell(lane: int, phase: str, outcome: Outcome) -> None:
        told.append(phase)
        if phase == STARTING:
            stop.set()

    begun = time.monotonic()
    found = sweep_run.run(
        [PROBLEM, Problem.of(64, 64, 64)], ["cute"], [FakeTimer({})], Hung(), store, Options(budget=60.0),
        ranker=lambda *rest: [(1.0, space(1)[0].config)], report=tell, stop=stop,
    )  # fmt: skip
    assert [outcome.ended for outcome in found] == ["interrupted"]
    assert time.monotonic() - begun < MOST_WAITED / 2  # it would wait as long for the first worker
    assert STARTING in told


def test_compile_only_counts_its_budget_alike(clock):
    candidates = space(12)
    entries = sweep_dry.compile_only(
        candidates, FakeCompiler(clock=clock, seconds=0.5, starts=30.0), 12, 7.0, clock=clock
    )
    assert {entry.outcome for entry in entries} == {"compiled"}
    entries = sweep_dry.compile_only(candidates, FakeCompiler(clock=clock, starts=1e9), 12, 7.0, clock=clock)
    assert {entry.outcome for entry in entries} == {"not compiled: no compile worker came up"}
    entries = sweep_dry.compile_only(candidates, FakeCompiler(clock=clock, broken_after=2.0), 12, 7.0, clock=clock)
    assert "failed to compile: no compile worker comes up: it ended with status 1" in {e.outcome for e in entries}


def test_the_wait_is_shown(capsys):
    screen = io.StringIO()
    progress = sweep_report.Progress(1, 160, screen)
    outcome = Outcome(PROBLEM, 300, elapsed=12.0, waited=5.04)
    progress.finished(0, outcome)
    progress.close()
    assert "in 12.0 s, 5.0 s of them for the compile workers\n" in screen.getvalue()
    assert json.loads(sweep_report.as_json([outcome], H200, {}))["shapes"][0]["waited"] == 5.04
    gone = Outcome(PROBLEM, 300, ended="no compile worker comes up: " + "its last words " * 20)
    table = sweep_report.table([gone], H200)
    assert "none (no compile worker comes up: its last words" in table
    assert "not finished: 1024x1024x1024" in table
    assert max(map(len, table.splitlines())) < 250
    with pytest.raises(SystemExit):
        sweep.main(["--help"])
    assert "waited for up to 125 s, is not counted" in " ".join(capsys.readouterr().out.split())
