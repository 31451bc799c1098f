"""The search on a fake timer: what wins, what is recorded and when, how it ends."""

from __future__ import annotations

import pytest

from cutegemm.problem import Problem
from cutegemm.tuner.search import Options
from cutegemm.tuner.timer import TimerBroken, TimerLost
from cutegemm.winners import Measurement, Winners
from cutegemm.winners.fingerprint import fingerprint
from cutegemm.winners.row import METHOD, STEADY
from tests.tuning_fakes import H200, PROBLEM, Clock, FakeCompiler, FakeTimer, candidate, search, space


def best(store: Winners, problem: Problem = PROBLEM) -> Measurement:
    found = store.best(H200.name, H200.sm_count, str(problem))
    assert found is not None
    return found


def test_the_fastest_right_one_wins_and_everything_is_recorded(store):
    candidates = space(30)
    fast, wrong, uncompiled = candidates[17], candidates[3], candidates[5]
    timer = FakeTimer(
        {fast.key: 0.8e-3, wrong.key: 0.1e-3, uncompiled.key: 0.1e-3}, wrong={wrong.key: "wrong: 7 elements outside"}
    )
    outcome = search(candidates, timer, store, FakeCompiler(fails={uncompiled.key: "ptxas said no"})).run()
    assert outcome.ended == "done"
    assert outcome.winner is not None
    assert outcome.winner.candidate == fast
    assert outcome.winner.kind == "final"
    assert outcome.winner.score == pytest.approx(0.8)
    assert outcome.enumerated == len(outcome.results) == 30
    assert (outcome.count("ok"), outcome.count("wrong"), outcome.count("failed to compile")) == (28, 1, 1)
    row = best(store)
    assert (row.config, row.seconds, row.reference_seconds, row.kind) == (fast.text, 0.8e-3, 1e-3, "final")
    assert row.fingerprint == fingerprint("cute", fast.text)
    verdicts = {r.config: r.verdict for r in store.rows()}
    assert verdicts[wrong.text] == "wrong: 7 elements outside"
    assert verdicts[uncompiled.text] == "failed to compile: ptxas said no"
    assert len(verdicts) == 30


def test_every_candidate_is_checked_before_it_is_timed(store):
    candidates = space(20)
    timer = FakeTimer({})
    search(candidates, timer, store).run()
    timed = [key for keys, _, _ in timer.timed for key in keys]
    for key in set(timed):
        assert key in timer.checked
    wrong = FakeTimer({}, wrong={c.key: "wrong: everything" for c in candidates})
    outcome = search(candidates, wrong, store).run()
    assert wrong.timed == []
    assert outcome.winner is None


def test_one_found_wrong_after_the_final_does_not_win(store):
    candidates = space(10)
    fast = candidates[4].key
    timer = FakeTimer({fast: 0.5e-3, candidates[7].key: 0.6e-3})

    def race() -> None:
        if timer.checked.count(fast) == 2:
            timer._wrong[fast] = "wrong: a race"

    timer.after_check = race
    outcome = search(candidates, timer, store).run()
    assert outcome.winner is not None
    assert outcome.winner.candidate == candidates[7]
    assert best(store).config == candidates[7].text


def test_heats_compare_although_the_clock_drifts(store):
    candidates = space(64)
    factors = iter([1.0, 0.7, 1.3, 0.9, 1.1, 0.8, 1.2] * 20)
    timer = FakeTimer({candidates[40].key: 0.9e-3}, drift=lambda: next(factors), torch=1e-3)
    outcome = search(candidates, timer, store).run()
    assert outcome.winner is not None
    assert outcome.winner.candidate == candidates[40]


def test_with_noise_the_result_is_within_two_percent_of_the_best(store):
    candidates = space(200)

    def seconds(c) -> float:
        m, n = (int(size) for size in c.text.split("/")[1].split("x")[:2])
        return 1e-3 * (1 + ((m - 128) / 600) ** 2 + ((n - 900) / 3000) ** 2)

    timer = FakeTimer(seconds, noise=0.01)
    outcome = search(candidates, timer, store, options=Options(budget=1e6)).run()
    assert outcome.winner is not None
    fastest = min(map(seconds, candidates))
    assert seconds(outcome.winner.candidate) <= 1.02 * fastest
    assert len(outcome.results) <= 180


@pytest.mark.parametrize("budget", [3.0, 6.0, 20.0, 60.0])
@pytest.mark.parametrize("problem", [PROBLEM, Problem.of(8192, 8192, 8192)], ids=["small", "large"])
def test_the_budget_is_kept(store, budget, problem):
    clock = Clock()
    timer = FakeTimer({}, clock=clock)
    compiler = FakeCompiler(clock=clock, seconds=5.0, workers=15)
    outcome = search(
        space(1000), timer, store, compiler, problem, Options(budget=budget, limit=10**6, patience=None), clock=clock
    ).run()
    assert outcome.ended == "budget"
    assert outcome.elapsed <= budget + 1.0
    if budget >= 20:
        assert outcome.winner is not None
        assert outcome.winner.kind == "final"
        assert outcome.elapsed >= 0.8 * budget
    assert compiler.cancelled


@pytest.mark.parametrize("budget", [2.0, 3.0, 5.0, 8.0])
def test_a_small_budget_still_finds_a_winner(store, budget):
    """Half of it at least is for exploring, also where sustained blocks alone would take it all."""
    clock = Clock()
    timer, compiler = FakeTimer({}, clock=clock), FakeCompiler(clock=clock, seconds=0.8, workers=15)
    large = Problem.of(8192, 8192, 8192)
    outcome = search(space(1000), timer, store, compiler, large, Options(budget=budget), clock=clock).run()
    assert outcome.winner is not None
    assert outcome.winner.kind == "final"
    assert outcome.elapsed <= budget + 1.0


def test_a_minute_with_fifteen_workers_times_over_a_hundred(store):
    clock = Clock()
    timer = FakeTimer({}, clock=clock, costs=(0.02, 0.005))
    compiler = FakeCompiler(clock=clock, seconds=5.0, workers=15)
    options = Options(budget=60.0, limit=10**6, patience=None)
    outcome = search(space(1000), timer, store, compiler, Problem.of(4096, 4096, 4096), options, clock=clock).run()
    assert len(outcome.results) > 100
    warm = Clock()
    timer = FakeTimer({}, clock=warm, costs=(0.005, 0.005))
    again = search(
        space(1000), timer, store, FakeCompiler(stored=True, clock=warm), Problem.of(4096, 4096, 4096), clock=warm
    ).run()
    assert again.ended == "done"
    assert again.elapsed < 30
    assert len(again.results) >= 96


def test_it_ends_early_when_nothing_gets_better(store):
    timer = FakeTimer({})
    outcome = search(space(1000), timer, store, options=Options(budget=1e6, patience=20, limit=500)).run()
    assert outcome.ended == "done"
    assert 30 <= len(outcome.results) < 80


def test_patience_is_shorter_where_less_can_be_expected(store):
    def tried(stored, known, **options):
        compiler = FakeCompiler(stored=stored)
        wanted = Options(budget=1e6, limit=10**6, **options)
        return len(search(space(300), FakeTimer({}), store, compiler, options=wanted, known=known).run().results)

    new, stored, known = tried(False, False), tried(True, False), tried(True, True)
    assert Options.patience is not None
    assert new >= 1.5 * Options.patience > stored >= 1.5 * Options.stored_patience > known
    assert known >= 1.5 * Options.known_patience
    assert tried(False, True) < 1.5 * Options.stored_patience
    assert tried(True, True, patience=8) < known
    assert tried(True, True, patience=None) == 300


def test_a_very_slow_launch_is_left_at_its_first_measurement(store):
    candidates = space(12)
    slow = candidates[11]
    timer = FakeTimer({slow.key: 3.0})
    outcome = search(candidates, timer, store).run()
    assert outcome.results[slow.key].seconds == 3.0
    assert all(slow.key not in keys for keys, _, _ in timer.timed)


def test_a_candidate_that_breaks_the_timer_is_found_out(store):
    candidates = space(10)
    culprit = candidates[2]
    timer = FakeTimer({candidates[6].key: 0.9e-3}, breaks=[culprit.key])
    outcome = search(candidates, timer, store).run()
    assert outcome.results[culprit.key].verdict == "failed to run: the process died"
    assert outcome.count("ok") == 9
    assert outcome.winner is not None
    assert outcome.winner.candidate == candidates[6]
    assert {r.config for r in store.rows() if r.verdict != "ok"} == {culprit.text}


def test_no_candidate_is_blamed_when_torch_cannot_be_timed(store):
    class NoTorch(FakeTimer):
        def time(self, candidates, rounds, block_seconds):
            super().time(candidates, rounds, block_seconds)
            raise TimerLost("cuBLAS said no")

    timer = NoTorch({})
    with pytest.raises(TimerBroken, match="torch's product cannot be timed: cuBLAS said no"):
        search(space(20), timer, store).run()
    assert store.rows() == []
    assert len(timer.timed) == 3  # the heat, the first of it alone, torch alone


def test_a_timer_that_cannot_serve_the_problem_says_so(store):
    compiler = FakeCompiler()
    with pytest.raises(TimerBroken, match="out of memory"):
        search(space(3), FakeTimer({}, open_fails="out of memory"), store, compiler).run()
    assert compiler.cancelled
    assert store.rows() == []


def test_ctrl_c_keeps_what_was_measured(store):
    timer = FakeTimer({})

    def interrupt() -> None:
        if len(timer.checked) == 20:
            raise KeyboardInterrupt

    timer.after_check = interrupt
    outcome = search(space(100), timer, store).run()
    assert outcome.ended == "interrupted"
    assert 8 <= len(outcome.results) < 20
    assert outcome.winner is not None
    assert len(store.rows()) == len(outcome.results)


def test_stopping_from_outside(store):
    timer = FakeTimer({})
    outcome = search(space(100), timer, store, stopped=lambda: len(timer.checked) >= 12).run()
    assert outcome.ended == "interrupted"
    assert outcome.winner is not None
    assert all(result.kind == "quick" for result in outcome.results.values())


def test_every_heat_is_in_the_store_before_the_next_begins(store):
    seen: list[tuple[int, int]] = []
    timer = FakeTimer({})
    timer.after_check = lambda: seen.append((sum(len(keys) for keys, _, _ in timer.timed), len(store.rows())))
    search(space(40), timer, store).run()
    assert all(timed <= recorded for timed, recorded in seen)
    assert seen[-1][1] >= 40


def test_resume_skips_what_was_measured(store):
    candidates = space(40)
    first = FakeTimer({candidates[3].key: 0.9e-3}, wrong={candidates[1].key: "wrong: 2 elements"})
    search(candidates, first, store, stopped=lambda: len(first.checked) >= 16).run()
    known = {row.config for row in store.rows()}
    assert 8 <= len(known) < 40
    second = FakeTimer({candidates[30].key: 0.95e-3})
    outcome = search(candidates, second, store, options=Options(resume=True)).run()
    explored = {key for keys, rounds, _ in second.timed for key in keys if rounds == 3}
    assert len(explored) == 40 - len(known)
    assert not explored & {("cute", text) for text in known}
    assert len(outcome.results) == 40
    assert outcome.results[candidates[1].key].verdict == "wrong: 2 elements"
    third = FakeTimer({})
    again = search(candidates, third, store, options=Options(resume=True)).run()
    assert again.ended == "resumed"
    assert third.opened == []
    assert again.winner is not None
    assert outcome.winner is not None
    assert again.winner.candidate == outcome.winner.candidate
    assert again.winner.score == outcome.winner.score


@pytest.mark.parametrize(("budget", "again"), [(60.0, True), (8.0, False)])
def test_resume_has_another_final_of_large_products_where_there_is_time_for_long_blocks(store, budget, again):
    """A final of short blocks is some 3 % off."""
    candidates, large = space(6), Problem.of(8192, 8192, 8192)
    times = {c.key: (1 + 0.01 * i) * 1e-3 for i, c in enumerate(candidates)}
    search(candidates, FakeTimer(times), store, problem=large, options=Options(budget=8.0)).run()
    assert {row.method for row in store.rows()} == {METHOD}
    timer = FakeTimer(times)
    resumed = search(candidates, timer, store, problem=large, options=Options(budget, resume=True)).run()
    assert bool(timer.timed) == again
    assert resumed.ended == ("done" if again else "resumed")
    if again:
        assert STEADY in {row.method for row in store.rows() if row.kind == "final"}
        last = FakeTimer(times)
        options = Options(budget, resume=True)
        assert search(candidates, last, store, problem=large, options=options).run().ended == "resumed"
        assert not last.timed


def test_resume_does_not_trust_other_kernels_or_gpus(store):
    candidates = space(4)
    for change in ({"fingerprint": "older"}, {"gpu": "A100"}, {"sm_count": 114}, {"kind": "family"}):
        known = {"gpu": "H200", "sm_count": 132, "fingerprint": fingerprint("cute", "sm90/")}
        for c in candidates:
            row = {**known, **change}
            store.record(Measurement(
                row["gpu"], row["sm_count"], str(PROBLEM), *c.key, row["fingerprint"], 1e-6, "ok",
                kind=row.get("kind", "final"),
            ))  # fmt: skip
    timer = FakeTimer({})
    outcome = search(candidates, timer, store, options=Options(resume=True)).run()
    assert outcome.ended == "done"
    assert {key for keys, _, _ in timer.timed for key in keys} == {c.key for c in candidates}


def test_resume_does_not_wait_for_a_backend_that_cannot_win(store):
    """A backend that was never tried, for its estimates, does not keep a shape from being finished."""
    fast, slow, rival = (
        candidate("sm90/fast", 1e-3),
        candidate("slow", 2e-3, "legacy"),
        candidate("rival", 1.2e-3, "legacy"),
    )
    arch = (H200.name, H200.sm_count, str(PROBLEM))
    store.record(Measurement(*arch, *fast.key, fingerprint(*fast.key), 1e-3, "ok", reference_seconds=1e-3))
    resume = Options(resume=True)
    assert search([fast, slow], FakeTimer({}), store, options=resume).run().ended == "resumed"
    timer = FakeTimer({})
    assert search([fast, rival], timer, store, options=resume).run().ended == "done"
    assert timer.checked[0] == rival.key


def test_a_known_winner_ends_it_sooner(store):
    candidates = space(200)
    options = Options(budget=1e6)
    known = search(candidates, FakeTimer({}), store, options=options, seeds=candidates[:1], known=True).run()
    unknown = search(candidates, FakeTimer({}), store, options=options, seeds=candidates[:1]).run()
    assert len(known.results) <= 70
    assert len(unknown.results) >= 90


def test_seeds_come_first(store):
    candidates = space(50)
    seed = candidates[49]
    timer = FakeTimer({})
    search(candidates, timer, store, seeds=[seed, candidate("outside", backend="legacy")]).run()
    assert timer.checked[:2] == [seed.key, ("legacy", "outside")]
    assert timer.checked.count(seed.key) <= 2
