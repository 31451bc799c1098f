"""The order of rounds, the spread of a ratio and the note of the timing method."""

from __future__ import annotations

import contextlib
import pickle
import sqlite3
import statistics
from collections import Counter

import pytest

from cutegemm.problem import Problem
from cutegemm.tuner import timing
from cutegemm.tuner.problem_bench import Bench
from cutegemm.tuner.spread import Seconds, Spread, order_of_round, spread, spread_of
from cutegemm.winners import Measurement, Winners, table
from cutegemm.winners.row import METHOD
from tests.tuning_fakes import PROBLEM, FakeCompiler, FakeTimer, space
from tuning import bench, bench_report, contest


def test_two_take_turns_in_alternating_order():
    assert [order_of_round("AB", number) for number in range(4)] == [["A", "B"], ["B", "A"]] * 2


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_nobody_has_a_place_of_his_own(count):
    names = list(range(count))
    orders = [order_of_round(names, number) for number in range(2 * count * max(count - 1, 1))]
    assert all(sorted(order) == names for order in orders)
    pairs = Counter((o[i], o[j]) for o in orders for i in range(count) for j in range(i + 1, count))
    assert all(pairs[a, b] == pairs[b, a] for a in names for b in names if a != b), "each goes before each as often"


class _Lane:
    """A lane on a card that slows down by the place in a round: who comes second takes a tenth longer."""

    place = 0

    def __init__(self, us: float) -> None:
        self.us = us

    def block(self, seconds: float = 0.0) -> float:
        _Lane.place += 1
        return self.us * (1.1 if _Lane.place % 2 == 0 else 1.0)


def test_a_card_that_favours_the_first_does_not_favour_a_name(monkeypatch):
    monkeypatch.setattr(timing, "Lane", lambda calls, seconds: _Lane(calls[0]()))
    _Lane.place = 0
    found = timing.interleaved({"torch": [lambda: 10.0], "ours": [lambda: 10.0]}, 1.0, rounds=8)
    assert found["torch"].us == found["ours"].us
    ratio = found["ours"].spread(found["torch"])
    assert ratio is not None
    assert ratio.parity
    assert ratio == pytest.approx((1 / 1.1, 1.1))
    faster = timing.interleaved({"torch": [lambda: 10.0], "ours": [lambda: 5.0]}, 1.0, rounds=8)
    assert not faster["ours"].spread(faster["torch"]).parity


def test_large_products_are_timed_in_a_few_long_blocks(monkeypatch):
    asked = []

    class Lane:
        def __init__(self, calls, seconds):
            self.name = calls[0]()

        def block(self, seconds=0.0):
            asked.append((self.name, seconds))
            return 3.0

    monkeypatch.setattr(timing, "Lane", Lane)
    found = timing.interleaved({"torch": [lambda: "t"], "ours": [lambda: "o"]}, 2 * timing.SUSTAINED_FLOPS, rounds=9)
    assert "".join(name for name, _ in asked) == "t" + "to" + "ot" + "to"
    assert {seconds for _, seconds in asked} == {timing.BLOCK_SECONDS}
    assert found["ours"].samples == (3.0,) * timing.MOST_BLOCKS
    asked.clear()
    bench._timer(sustained=True)({"torch": [lambda: "t"]}, 2 * timing.PAUSED_FLOPS, 2)
    assert asked == [("t", timing.BLOCK_SECONDS)] * 3
    asked.clear()
    bench._timer(sustained=False)({"torch": [lambda: "t"]}, 2 * timing.PAUSED_FLOPS, 2)
    assert asked == [("t", 0.0)] * 3


@pytest.mark.parametrize(("flops", "pauses"), [(1e10, False), (2e10, True), (1e11, True), (1.01e11, False)])
def test_short_rounds_of_products_that_could_reach_the_power_limit_have_a_pause_before_them(flops, pauses, monkeypatch):
    """Each of them, for bench and tuner alike; long blocks have none."""
    done = []

    class Lane:
        def __init__(self, *arguments):
            pass

        def block(self, seconds=0.0):
            done.append("block")
            return 3.0

    monkeypatch.setattr(timing, "Lane", Lane)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: done.append(seconds))
    timing.interleaved({"torch": [print], "ours": [print]}, flops, rounds=2)
    rest = timing.PAUSE_SECONDS if pauses else 0.0
    warm_up = 1 if flops > timing.SUSTAINED_FLOPS else 2
    settled = [] if flops > timing.SUSTAINED_FLOPS else [timing.SETTLE_SECONDS]
    assert done == settled + ["block"] * warm_up + [rest, "block"] * 4
    bench = object.__new__(Bench)
    bench.problem = Problem.of(1000, 1000, int(flops / 2e6))
    monkeypatch.setattr(bench, "_lane", Lane, raising=False)
    for block_seconds, expected in ((0.0, rest), (timing.PERIOD_SECONDS, 0.0)):
        done.clear()
        bench.time([("cute", "x")], 1, block_seconds)
        assert done == ["block"] * (1 if block_seconds else 2) + [expected, "block"] * 2


def test_a_block_of_whole_swings_has_their_mean_and_a_shorter_one_the_median_of_its_second_half():
    swings = [90.0] * 20 + [1.0, 2.0, 3.0, 2.0] * 20
    assert timing.typical(swings, timing.BLOCK_SECONDS) == timing.typical(swings, timing.PERIOD_SECONDS) == 2.0
    assert timing.typical([9.0, 9.0, 1.0, 1.0, 7.0], 0.04) == 1.0
    assert timing.typical([5.0], 0.0) == timing.typical([5.0], timing.BLOCK_SECONDS) == 5.0


def test_the_tuner_takes_turns_in_the_same_way(monkeypatch):
    asked = []

    class Lane:
        def __init__(self, key):
            self.key = key

        def block(self, seconds=0.0):
            asked.append(self.key)
            return 2.0

    bench = object.__new__(Bench)
    bench.problem = Problem.of(512, 512, 512)
    monkeypatch.setattr(bench, "_lane", Lane, raising=False)
    times = bench.time([("cute", "x")], 4, 0.0)
    torch, ours = ("torch", ""), ("cute", "x")
    assert asked == [torch, ours, torch, ours, ours, torch, torch, ours, ours, torch]
    assert times[ours] == 2e-6
    assert times[ours].samples == (2e-6,) * 4


def test_spread_is_the_middle_half_of_the_rounds():
    ours, theirs = [10.0] * 8, [9.0, 9.9, 10.1, 10.2, 10.3, 10.4, 10.5, 30.0]
    found = spread(ours, theirs)
    quartiles = statistics.quantiles([value / 10 for value in theirs], n=4, method="inclusive")
    assert found == (quartiles[0], quartiles[2])
    assert not found.parity, "one round that was disturbed does not make parity"
    assert str(Spread(0.99, 1.004)) == "0.990..1.004 parity"
    assert spread([1.0], [1.0]) is None


def test_times_keep_their_rounds_across_processes():
    times = pickle.loads(pickle.dumps({"a": Seconds([3e-6, 1e-6, 2e-6])}))
    assert times["a"] == 2e-6
    assert times["a"].samples == (3e-6, 1e-6, 2e-6)
    assert spread_of(times["a"], Seconds([3e-6, 1e-6, 2e-6])) == (1.0, 1.0)
    assert spread_of(times["a"], 2e-6) is None


def test_a_contest_says_parity():
    one, other = space(2)
    met = contest.Met({one.key: Seconds([1.0, 1.1, 0.9]), other.key: Seconds([1.0, 1.0, 1.0])}, {})
    assert contest.spread_text(met.spread(one, other)).endswith(" parity")
    assert contest.spread_text(None) == ""


def test_the_benchmark_counts_parity():
    rows = [
        bench_report.Result("p", 8, 8, n, "ours", "ok", us=1.0, ratio=ratio, ratio_low=low, ratio_high=high)
        for n, ratio, low, high in ((1, 1.2, 1.1, 1.3), (2, 0.99, 0.97, 1.01), (3, 0.9, 0.8, 0.95))
    ]
    first = bench_report.Result("p", 8, 8, 1, "torch", "ok", us=1.0, ratio=1.0)
    lines = bench_report.summary([first, *rows]).splitlines()
    assert lines[0].endswith("; 1 faster, 1 at parity, 1 slower")
    assert lines[1:] == ["  below 1: 8x8x3 0.900, 8x8x2 0.990"]


def test_rows_say_how_they_were_timed(tmp_path):
    from cutegemm.tuner.search import Options, Search

    store, candidates = Winners(tmp_path / "w.sqlite3"), space(3)
    Search(PROBLEM, candidates, FakeTimer({}), FakeCompiler(), store, Options(heat=2)).run()
    assert {row.method for row in store.rows()} == {METHOD}
    assert table.load(table.dump(store.rows()))[0].method == METHOD


def test_older_rows_and_tables_have_no_note(tmp_path):
    old = Measurement("H200", 132, "p", "cute", "c", "f", 1e-6, "ok", "2026-11-01")
    text = table.dump([old])
    assert "method" not in text
    assert table.load(text)[0].method == ""
    path = tmp_path / "w.sqlite3"
    Winners(path).record(old)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("ALTER TABLE measurement DROP COLUMN method; PRAGMA user_version = 2;")
    store = Winners(path)
    assert store.rows() == [old]
    store.record(Measurement("H200", 132, "p", "cute", "c", "f", 1e-6, "ok", "2026-11-02", method=METHOD))
    assert [row.method for row in store.rows()] == ["", METHOD]
