"""Which candidates meet again after the heats and how often, and what a disturbed or a lost timing does to that."""

from __future__ import annotations

import random

import pytest

from cutegemm.problem import Problem
from cutegemm.tuner.halving import SHORT_BLOCK_SECONDS, STEADY_ROUNDS, STEADY_SECONDS, STEADY_STRETCH, Plan
from cutegemm.tuner.search import HEAT_BLOCK_SECONDS, Options, Outcome, Result
from cutegemm.tuner.timer import TORCH, TimerLost
from cutegemm.tuner.timing import BLOCK_SECONDS, PERIOD_SECONDS
from cutegemm.winners.row import BOTH, SHORT, pick
from tests.tuning_fakes import PROBLEM, Clock, FakeCompiler, FakeTimer, search, space

LARGE = Problem.of(8192, 8192, 8192)
BETWEEN = Problem.of(2048, 2048, 2048)
"""Repeated without a pause it reaches the power limit."""


def final_of(timer: FakeTimer) -> tuple[int, int, float]:
    """How many met in the final, in how many rounds, of blocks of how many seconds; there is one such meeting."""
    ((keys, rounds, block),) = (timed for timed in timer.timed if timed[2] != HEAT_BLOCK_SECONDS)
    return len(keys), rounds, block


@pytest.mark.parametrize(("budget", "final"), [(12.5, (8, 2, 0.3)), (34.0, (7, 2, 1.15)), (60.0, (7, 2, 1.18))])
def test_large_products_are_timed_in_blocks_as_long_as_there_is_time_for(store, budget, final):
    """Alike whether the kernels were compiled before, or one of them, or none."""
    finals = []
    for compiled in (0, 1, 150):
        clock = Clock()
        candidates = space(150)
        new = {c.key for c in candidates[:compiled]}
        compiler = FakeCompiler(clock=clock, seconds=1.0, workers=15)
        compiler.stored = lambda c, new=new: c.key not in new
        timer = FakeTimer({}, clock=clock, costs=(0.03, 0.005))
        options = Options(budget=budget, patience=None)
        outcome = search(candidates, timer, store, compiler, LARGE, options, clock=clock).run()
        assert timer.timed[0][2] == HEAT_BLOCK_SECONDS
        assert outcome.elapsed <= budget + 0.5
        finals.append(final_of(timer))
    assert [(met, rounds) for met, rounds, _ in finals] == [final[:2]] * 3
    assert [block for _, _, block in finals] == pytest.approx([final[2]] * 3, abs=0.1)


def test_few_large_candidates_all_get_into_the_final(store):
    """There is time to tell them apart: whole blocks for those that may be the best."""
    clock = Clock()
    candidates = space(6)
    timer = FakeTimer({c.key: (1 + 0.01 * i) * 1e-3 for i, c in enumerate(candidates)}, clock=clock)
    outcome = search(candidates, timer, store, problem=LARGE, options=Options(budget=80.0), clock=clock).run()
    assert final_of(timer) == (6, 2, pytest.approx(STEADY_SECONDS / 15, rel=0.02))
    assert {result.kind for result in outcome.results.values()} == {"final"}
    assert outcome.elapsed < 30


def test_a_final_at_the_power_limit_has_who_may_be_the_best_and_no_others(store):
    candidates = space(40)
    times = {c.key: (1.05 if i % 4 == 0 else 1.07) * 1e-3 for i, c in enumerate(candidates)}
    timer = FakeTimer({**times, candidates[9].key: 1e-3})
    outcome = search(candidates, timer, store, problem=LARGE).run()
    assert final_of(timer)[:2] == (7, 2)
    assert outcome.winner is not None
    assert outcome.winner.candidate == candidates[9]
    clear = FakeTimer({c.key: (1 + 0.065 * i) * 1e-3 for i, c in enumerate(candidates)})
    search(candidates, clear, store, problem=LARGE).run()
    assert final_of(clear) == (4, 2, pytest.approx(STEADY_SECONDS / 11, rel=0.02))


@pytest.mark.parametrize("seed", range(8))
def test_noise_of_short_blocks_does_not_keep_the_best_of_large_products_from_the_final(store, seed):
    """By its short block it may be 4 % behind."""
    chance = random.Random(seed)

    class Noisy(FakeTimer):
        def time(self, candidates, rounds, block_seconds):
            spread = 0.002 if block_seconds >= SHORT_BLOCK_SECONDS else 0.02
            times = super().time(candidates, rounds, block_seconds)
            return {key: seconds * (1 + chance.uniform(-spread, spread)) for key, seconds in times.items()}

    candidates = space(30)
    times = {c.key: (1.01 + 0.01 * i) * 1e-3 for i, c in enumerate(candidates)}
    best_one = candidates[chance.randrange(30)]
    for budget in (9.0, 30.0, 60.0):
        clock = Clock()
        timer = Noisy({**times, best_one.key: 1e-3}, clock=clock)
        outcome = search(candidates, timer, store, problem=LARGE, options=Options(budget), clock=clock).run()
        assert outcome.winner is not None
        assert outcome.winner.candidate == best_one
        assert outcome.elapsed <= max(10.0, budget)


def test_a_launch_that_lasts_longer_than_a_block_gets_fewer_rounds(store):
    slow = Plan.of(LARGE, STEADY_SECONDS, launch=3.0)
    assert (slow.finalists, slow.stretched(2, STEADY_SECONDS).rounds(2, STEADY_SECONDS)) == (2, 1)
    assert Plan.of(LARGE, STEADY_SECONDS).finalists == 7
    assert Plan.of(LARGE, 60.0).stretched(4, 60.0).block == BLOCK_SECONDS


class TwoStates(FakeTimer):
    """As long as on a GPU: with the pause and the warm-up, and long blocks of replays that were counted at full clock.

    limited: at the power limit, in long blocks, these candidates take so many times as long. breaks: those that kill
    the process in long blocks, and recovery: the seconds that it then needs. during: called within a block, with its
    seconds.
    """

    def __init__(self, seconds, limited=None, breaks=(), during=lambda block: None, recovery=0.0, **options):
        super().__init__(seconds, **options)
        self.limited, self.broken, self.during, self.recovery = limited or {}, set(breaks), during, recovery

    def time(self, candidates, rounds, block_seconds):
        limit = block_seconds >= PERIOD_SECONDS
        costs, self._costs = self._costs, (self._costs[0], 0.026)
        pretended = block_seconds * STEADY_STRETCH
        self._pass((1 if limit else len(candidates) + 1) * max(0.026, pretended))  # the warm-up
        times = super().time(candidates, rounds, pretended)
        self._costs = costs
        self.timed[-1] = (*self.timed[-1][:2], block_seconds)
        self.during(block_seconds)
        if not limit:
            return times
        if self.broken & {c.key for c in candidates}:
            self._pass(self.recovery)
            raise TimerLost("the process died")
        return {key: 1.5 * seconds * self.limited.get(key, 1.0) for key, seconds in times.items()}


def two_states(store, budget=60.0, count=6, **options):
    """The first is 3 % faster than torch at full clock, and 4 % slower at the power limit; the second neither."""
    first, second, *_ = candidates = space(count)
    times = {c.key: 1.1e-3 for c in candidates} | {first.key: 0.97e-3, second.key: 1e-3}
    clock = Clock()
    timer = TwoStates(times, {first.key: 1.04 / 0.97}, clock=clock, torch=1e-3, **options)
    asked = Options(budget, patience=None)
    made = search(candidates, timer, store, problem=BETWEEN, options=asked, clock=clock)
    return made, timer, (first, second)


def finals(store):
    return {row.config: row for row in store.rows() if row.kind == "final" and row.ok}


def test_a_product_between_is_chosen_by_its_ratios_at_full_clock_and_at_the_power_limit(store):
    made, timer, (first, second) = two_states(store)
    found = made.run()
    assert found.winner is not None
    assert found.winner.candidate == second
    assert timer.timed[-1][1:] == (STEADY_ROUNDS, PERIOD_SECONDS)
    assert {row.method for row in store.rows() if row.kind == "quick"} == {SHORT}
    by_config = finals(store)  # the later row of a configuration
    assert {row.method for row in by_config.values()} == {BOTH}
    assert by_config[second.text].ratio == pytest.approx(1.0)
    assert by_config[first.text].ratio == pytest.approx((1 / 0.97 / 1.04) ** 0.5)
    assert by_config[second.text].seconds == pytest.approx(1e-3 * 1.5**0.5)
    assert pick(store.rows()).config == second.text


@pytest.mark.parametrize("budget", [5.0, 9.0, 20.0, 30.0, 34.0, 37.0, 38.0, 40.0, 60.0])
def test_a_budget_is_neither_exceeded_nor_left_for_what_never_comes(store, budget):
    made, _, _ = two_states(store, budget, count=1500, costs=(0.2, 0.005))
    found = made.run()
    assert found.ended == "budget"
    assert budget - 2.5 <= found.elapsed <= budget + 1.0
    assert {row.method for row in finals(store).values()} == {BOTH if budget >= 38 else SHORT}


def test_without_long_blocks_its_final_is_that_of_short_rounds(store):
    made, _, (first, _) = two_states(store, budget=9.0)
    found = made.run()
    assert found.winner is not None
    assert (found.winner.candidate, found.winner.kind) == (first, "final")
    assert {row.method for row in store.rows()} == {SHORT}


def test_who_breaks_the_timer_in_long_blocks_does_not_win(store):
    """Each is timed by itself then, and there is time for it."""
    first = space(6)[0]
    made, _, (_, second) = two_states(store, budget=200.0, breaks=[first.key])
    found = made.run()
    assert found.results[first.key].verdict.startswith("failed to run")
    assert found.winner is not None
    assert found.winner.candidate == second
    assert finals(store)[second.text].method == BOTH


def test_who_was_timed_in_both_ways_ranks_before_who_was_not():
    short, both = (
        Result(c, "ok", 1e-3, reference, "final", method)
        for c, reference, method in zip(space(2), (1.2e-3, 1e-3), (SHORT, BOTH), strict=True)
    )
    outcome = Outcome(BETWEEN, 2, {result.candidate.key: result for result in (short, both)})
    assert outcome.ranking == [both, short]


def test_where_not_all_finalists_have_long_blocks_the_short_rounds_decide(store):
    """The process has to be started again, twice, which takes 16 s; one attempt begins before the budget ends."""
    third = space(6)[2]
    made, _, (first, _) = two_states(store, budget=40.0, breaks=[third.key], recovery=16.0)
    found = made.run()
    assert found.elapsed <= 40.0 + 16.0 + 11 * PERIOD_SECONDS * STEADY_STRETCH
    assert found.winner is not None
    assert found.winner.candidate == first
    assert {row.method for row in store.rows() if row.ok} == {SHORT}
    assert pick(store.rows()).config == first.text


def test_a_search_that_is_stopped_in_the_short_rounds_has_no_long_blocks(store):
    made, timer, (first, _) = two_states(store)
    timer.during = lambda block: stop.append(block) if timer.timed[-1][1] == Plan.of(BETWEEN).final_rounds else None
    stop: list[float] = []
    made._stopped = lambda: bool(stop)
    found = made.run()
    assert found.ended == "interrupted"
    assert all(block == 0.0 for _, _, block in timer.timed)
    assert finals(store)[first.text].method == SHORT


def test_an_interrupt_in_long_blocks_leaves_the_final_of_short_rounds(store):
    made, timer, (first, _) = two_states(store)

    def during(block):
        if block >= PERIOD_SECONDS:
            raise KeyboardInterrupt

    timer.during = during
    assert made.run().ended == "interrupted"
    assert finals(store)[first.text].method == SHORT
    assert pick(store.rows()).config == first.text


def test_a_finalist_that_is_wrong_the_second_time_does_not_win(store):
    made, timer, (_, second) = two_states(store)
    timer.during = lambda block: timer._wrong.update({second.key: "wrong: 3 elements"}) if block else None
    found = made.run()
    assert found.winner is not None
    assert found.winner.candidate != second
    assert found.results[second.key].verdict == "wrong: 3 elements"


def test_resume_has_another_final_of_a_product_between_where_there_is_time_for_both(store):
    two_states(store, budget=9.0)[0].run()
    for budget, ended in ((9.0, "resumed"), (60.0, "done"), (60.0, "resumed"), (9.0, "resumed")):
        timer = FakeTimer({}, torch=1e-3)
        found = search(space(6), timer, store, problem=BETWEEN, options=Options(budget, resume=True)).run()
        assert (found.ended, bool(timer.timed)) == (ended, ended == "done")


def test_an_older_final_of_short_rounds_does_not_outdo_one_of_both(store):
    """A sweep of 9 s, whose winner does not come into the final of the next one, and one of 9 s after that."""
    for budget, torch, method, ratio in ((9.0, 1.2e-3, SHORT, 1.2), (60.0, 1e-3, BOTH, 1.0), (9.0, 1.2e-3, BOTH, 1.0)):
        timer = TwoStates({c.key: 1e-3 for c in space(6)}, torch=torch, clock=Clock())
        search(space(6), timer, store, problem=BETWEEN, options=Options(budget), clock=timer._clock).run()
        decides = pick(store.rows())
        assert decides is not None
        assert (decides.method, decides.ratio) == (method, pytest.approx(ratio))


class Disturbed(FakeTimer):
    """torch takes `factor` times as long in one heat, the first or a later one."""

    def __init__(self, seconds, heat, factor):
        super().__init__(seconds)
        self.heat, self.factor = heat, factor

    def time(self, candidates, rounds, block_seconds):
        times = super().time(candidates, rounds, block_seconds)
        return {**times, TORCH: self.factor * times[TORCH]} if len(self.timed) == self.heat else times


def test_a_heat_in_which_torch_was_disturbed_does_not_decide(store):
    """Here the clock had gone to sleep before the fourth heat, and torch came first."""
    candidates = space(64)
    fast = candidates[6]
    outcome = search(candidates, Disturbed({fast.key: 0.9e-3}, heat=4, factor=1.4), store).run()
    assert outcome.winner is not None
    assert outcome.winner.candidate == fast


def test_a_first_heat_in_which_torch_was_disturbed_does_not_fill_the_semifinal(store):
    """The clock was asleep when torch was timed first: everything in that heat seems faster than it is."""
    candidates = space(64)
    fast = candidates[40]
    timer = Disturbed({c.key: 1e-3 for c in candidates} | {fast.key: 0.9e-3}, heat=1, factor=1.5)
    outcome = search(candidates, timer, store).run()
    assert fast.key in {key for keys, _, _ in timer.timed[:9] for key in keys}
    assert outcome.winner is not None
    assert outcome.winner.candidate == fast
    assert {row.reference_seconds for row in {row.config: row for row in store.rows()}.values()} == {1e-3}


def test_a_clock_that_settles_elsewhere_does_not_disturb(store):
    """From the fifth heat on everything takes a tenth longer: none of the heats is judged by the others."""
    candidates = space(64)
    factors = iter([1.0] * 4 + [1.1] * 100)
    timer = FakeTimer({c.key: 1e-3 for c in candidates}, drift=lambda: next(factors))
    outcome = search(candidates, timer, store).run()
    assert [result.score for result in outcome.results.values()] == pytest.approx([1.0] * 64)
    assert {row.reference_seconds for row in store.rows()} >= {1e-3, 1.1e-3}


def test_a_disturbed_first_heat_does_not_end_the_search(store):
    """Nothing after it seems to bring anything, until it is judged by the heats after it."""
    candidates = space(200)
    times = {c.key: (1 - 0.006 * min(i, 70)) * 1e-3 for i, c in enumerate(candidates)}
    options = Options(budget=1e6, patience=20)
    results = [
        search(candidates, timer, store, FakeCompiler(workers=8), options=options).run().results
        for timer in (FakeTimer(times), Disturbed(times, heat=1, factor=1.5))
    ]
    assert len(results[0]) >= 70
    assert list(results[0]) == list(results[1])


def test_what_was_known_before_gets_into_the_semifinal(store):
    """However badly it did in its heat, where it was timed once and shortly."""
    candidates = space(100)
    seed = candidates[99]

    class Unlucky(FakeTimer):
        def time(self, candidates, rounds, block_seconds):
            times = super().time(candidates, rounds, block_seconds)
            return {**times, seed.key: 2e-3} if len(self.timed) == 1 and seed.key in times else times

    outcome = search(candidates, Unlucky({seed.key: 0.9e-3}), store, seeds=[seed]).run()
    assert outcome.winner is not None
    assert outcome.winner.candidate == seed


def test_seeds_named_twice_are_timed_once(store):
    candidates = space(100)
    slow, also_slow = candidates[98:]
    timer = FakeTimer({slow.key: 15e-3, also_slow.key: 15e-3})
    search(candidates, timer, store, seeds=[slow, slow, also_slow]).run()
    assert all(len(keys) == len(set(keys)) for keys, _, _ in timer.timed)
    semifinal = max((keys for keys, rounds, _ in timer.timed if rounds == Plan.of(PROBLEM).semifinal_rounds), key=len)
    assert {slow.key, also_slow.key} <= set(semifinal)


def test_a_small_products_halving_is_short(store):
    clock = Clock()
    timer = FakeTimer({}, clock=clock, costs=(0.0, 0.005))
    outcome = search(space(30), timer, store, FakeCompiler(stored=True), clock=clock).run()
    heats = sum(rounds * (len(keys) + 1) * 0.005 for keys, rounds, _ in timer.timed[:4])
    assert outcome.elapsed - heats < 1.5
    assert [(len(keys), rounds) for keys, rounds, _ in timer.timed[4:]] == [(14, 7), (4, 21)]


class Hangs(FakeTimer):
    """One that hangs where it is timed in at least so many rounds is given up after half a minute."""

    def __init__(self, culprit, seconds, clock, least_rounds=1) -> None:
        super().__init__(seconds, clock=clock)
        self.culprit, self.sleep, self.least_rounds = culprit, clock.sleep, least_rounds

    def time(self, candidates, rounds, block_seconds):
        times = super().time(candidates, rounds, block_seconds)
        if rounds >= self.least_rounds and self.culprit in candidates:
            self.sleep(30)
            raise TimerLost("no answer within 30 s")
        return times


@pytest.mark.parametrize(("budget", "named"), [(20.0, False), (300.0, True)])
def test_one_that_hangs_in_a_heat_is_sought_as_long_as_there_is_time(store, budget, named):
    clock = Clock()
    candidates = space(40)
    culprit = candidates[12]
    timer = Hangs(culprit, {candidates[5].key: 0.9e-3}, clock)
    outcome = search(candidates, timer, store, FakeCompiler(stored=True), options=Options(budget), clock=clock).run()
    assert [r.config for r in store.rows() if r.verdict != "ok"] == ([culprit.text] if named else [])
    assert outcome.winner is not None
    assert outcome.winner.candidate == candidates[5]
    assert outcome.elapsed < (65 if named else 31)
    assert outcome.ended == ("done" if named else "budget")
    assert outcome.count("ok") == (39 if named else 16)
    assert len(timer.timed) == (5 + 9 + 2 if named else 3)


@pytest.mark.parametrize(("budget", "named"), [(20.0, False), (300.0, True)])
def test_one_that_hangs_in_the_final_costs_no_measurement(store, budget, named):
    clock = Clock()
    candidates = space(20)
    culprit = candidates[5]
    timer = Hangs(culprit, {culprit.key: 0.8e-3, candidates[7].key: 0.9e-3}, clock, least_rounds=21)
    outcome = search(candidates, timer, store, FakeCompiler(stored=True), options=Options(budget), clock=clock).run()
    assert len(outcome.results) == 20
    assert outcome.count("ok") == (19 if named else 20)
    assert outcome.winner is not None
    assert outcome.winner.candidate == (candidates[7] if named else culprit)
    assert outcome.winner.kind == ("final" if named else "quick")
    assert outcome.elapsed < (65 if named else 32)
