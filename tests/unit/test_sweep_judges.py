"""How far the sweep is from the best, and the heuristic from the sweep: the two commands, on a fake timer."""

from __future__ import annotations

import functools
import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cutegemm import backend as backends
from cutegemm.choice import heuristics
from cutegemm.hardware.roofline import roofline
from cutegemm.problem import Problem
from cutegemm.tuner.space import Candidate
from cutegemm.tuner.spread import Seconds
from cutegemm.tuner.timer import Check, TimerLost
from cutegemm.winners import Winners
from tests.tuning_fakes import H200, Clock, FakeCompiler, FakeTimer
from tuning import contest, exhaustive, random_shapes, untuned

SMALL = Problem.of(256, 320, 512, "bf16")


def truth(candidate: Candidate) -> float:
    """Invented seconds: any configuration has its own."""
    return 1e-5 * (1 + sum(map(ord, candidate.text)) % 97 / 97)


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    heuristics.forget()


def test_half_of_some_are_the_models_and_half_are_everywhere(monkeypatch):
    monkeypatch.setattr(heuristics, "ranked", functools.cache(heuristics.ranked))  # a second each time
    small = Problem.of(256, 320, 512, "fp32")  # which has fewer configurations than others
    found = exhaustive.some_of(small, H200, "cute", 200)
    texts = [str(config) for _, config in found]
    assert len(set(texts)) == 200
    everything = [str(config) for _, config in heuristics.ranked(small, H200)]
    places = sorted(everything.index(text) for text in texts)
    assert places[0] == 0
    assert sum(place >= len(everything) // 2 for place in places) >= 30
    other = {str(c) for _, c in exhaustive.some_of(Problem.of(4096, 4096, 4096, "fp32"), H200, "cute", 200)}
    assert len(other & set(texts)) >= 60  # shared, so that they are compiled once
    few = Problem.of(64, 64, 64, "bf16")
    assert len(exhaustive.some_of(few, H200, "legacy", 10**6)) == len(list(backends.get("legacy").configs(few, H200)))


def test_the_best_of_all_is_found_although_the_sweep_missed_it(tmp_path):
    listed = exhaustive.some_of(SMALL, H200, "legacy", 40)
    hidden = max(listed, key=lambda pair: pair[0])[1]  # what the model likes least

    def seconds(candidate: Candidate) -> float:
        return 0.5e-5 if candidate.text == str(hidden) else truth(candidate)

    timer, compiler = FakeTimer(seconds), FakeCompiler()
    store, aside = Winners(tmp_path / "w"), Winners(tmp_path / "aside")
    (line,), missed = exhaustive.compare(
        [SMALL], ["legacy"], timer, compiler, store, aside, limit=40, budget=600.0, most=600.0
    )  # fmt: skip
    assert missed == []
    assert all(row.config != str(hidden) for row in store.rows())
    assert line.best == f"legacy {hidden}"
    assert line.best_us == pytest.approx(5.0)
    assert line.swept_us >= 10.0
    assert line.ratio == pytest.approx(line.best_us / line.swept_us)
    assert line.whole
    assert line.timed >= 40
    assert line.enumerated > 40
    assert set(timer.checked) >= {("legacy", str(config)) for _, config in listed}
    # The sweep's choice and the best of all once more, checked anew and in turns; no time of before is compared.
    keys, rounds, _ = timer.timed[-1]
    assert rounds == contest.ROUNDS
    assert keys[0][1] == line.swept.removeprefix("legacy ")
    assert ("legacy", str(hidden)) in keys
    assert len(keys) <= 1 + exhaustive.MEETING
    text = exhaustive.table([line])
    assert "256x320x512" in text
    assert f"at least {line.ratio:.4f} of the best" in text
    assert "over 1 of 1 shapes" in text
    assert "cut short" not in text
    text = exhaustive.table([replace(line, whole=False)], [contest.Missed("8x8x8 bf16", "it broke")])
    assert "over 1 of 2 shapes" in text
    assert "cut short, so that their best may have been missed: 1" in text
    assert text.endswith("not compared: 8x8x8: it broke")


def test_the_sweep_is_not_taught_by_what_is_timed_exhaustively(tmp_path):
    """All sweeps come before, and a winner of an earlier sweep can be taken instead."""
    problems = [SMALL, Problem.of(512, 320, 512, "bf16")]
    timer, stores = FakeTimer(truth), (Winners(tmp_path / "w"), Winners(tmp_path / "aside"))
    given = {"limit": 10, "budget": 600.0, "most": 600.0}
    lines, _ = exhaustive.compare(problems, ["legacy"], timer, FakeCompiler(), *stores, **given)
    assert timer.opened == problems * 2
    again = FakeTimer(truth)
    more, _ = exhaustive.compare(problems, ["legacy"], again, FakeCompiler(), *stores, resume=True, **given)
    assert again.opened == problems
    assert [line.swept for line in more] == [line.swept for line in lines]


def test_ctrl_c_in_a_sweep_ends_the_comparison_too(tmp_path, monkeypatch):
    from cutegemm.tuner import run as sweep_run

    real, runs = sweep_run.run, []

    def interrupted(*given, stop, **more):
        runs.append(stop)
        outcomes = real(*given, stop=stop, **more)
        if len(runs) == 1:
            stop.set()  # as Ctrl-C does
        return outcomes

    monkeypatch.setattr(sweep_run, "run", interrupted)
    timer, stores = FakeTimer(truth), (Winners(tmp_path / "w"), Winners(tmp_path / "aside"))
    given = {"limit": 10, "budget": 600.0, "most": 600.0}
    lines, missed = exhaustive.compare([SMALL], ["legacy"], timer, FakeCompiler(), *stores, **given)
    assert lines == []
    assert [(one.problem, one.why) for one in missed] == [(str(SMALL), "not begun")]
    assert timer.opened == [SMALL]
    assert stores[1].rows() == []


def test_the_meeting_names_what_cannot_be_timed():
    good, bad, worse = (Candidate("legacy", text) for text in ("good", "bad", "worse"))
    timer = FakeTimer({good.key: 1e-5}, wrong={bad.key: "wrong: all"})
    compiler = FakeCompiler(fails={worse.key: "no"})
    met = contest.meet(timer, compiler, SMALL, [good, bad, worse, good])
    assert met.seconds == {good.key: 1e-5}
    assert met.failed == {bad.key: "wrong: all", worse.key: "failed to compile: no"}
    assert timer.timed == [((good.key,), contest.ROUNDS, 0.0)]
    contest.meet(timer, compiler, Problem.of(8192, 8192, 8192), [good])
    assert timer.timed[-1][1:] == (contest.SUSTAINED_ROUNDS, contest.BLOCK_SECONDS)
    begun = len(timer.timed)
    contest.meet(timer, compiler, Problem.of(2048, 2048, 2048), [good])
    assert [turn[1:] for turn in timer.timed[begun:]] == [(contest.ROUNDS, 0.0), (2, contest.PERIOD_SECONDS)]
    timer.time = lambda *rest: (_ for _ in ()).throw(TimerLost("gone"))
    met = contest.meet(timer, compiler, SMALL, [good, bad])
    assert met == contest.Met({}, {good.key: "could not be timed: gone", bad.key: "wrong: all"})
    assert compiler.cancelled


def test_of_products_that_run_in_either_state_the_middle_of_both_times_counts():
    fast, cool = Candidate("legacy", "fast"), Candidate("legacy", "cool")
    rounds = {fast.key: [1.0, 2.0, 3.0], cool.key: [2.0, 4.0, 9.0]}
    blocks = {fast.key: 8.0, cool.key: 2.0}
    timer = FakeTimer({})
    timer.time = lambda candidates, rounds_, block: {
        c.key: blocks[c.key] if block else Seconds(rounds[c.key]) for c in candidates
    }
    met = contest.meet(timer, FakeCompiler(), Problem.of(2048, 2048, 2048), [fast, cool])
    assert met.seconds == pytest.approx({fast.key: 4.0, cool.key: 8.0**0.5})  # of 2 and 8, of 4 and 2
    spread = met.spread(fast, cool)
    assert (spread.low, spread.high) == pytest.approx((0.5**0.5, (0.5**0.5 + 0.75**0.5) / 2))
    assert not spread.parity


def test_a_meeting_checks_once_more_and_waits_for_no_compiler_that_is_stopped():
    racy, slow = Candidate("legacy", "racy"), Candidate("legacy", "slow")
    timer = FakeTimer({})
    timer.after_check = lambda: timer._wrong.update({racy.key: "wrong: 1 of 9"} if timer.timed else {})
    met = contest.meet(timer, FakeCompiler(), SMALL, [racy])
    assert met == contest.Met({}, {racy.key: "wrong: 1 of 9"})
    compiler = FakeCompiler(clock=Clock(), seconds=1e6)
    met = contest.meet(timer, compiler, SMALL, [slow], lambda: True)
    assert met.failed == {slow.key: "was not compiled in time"}
    assert ("legacy", "slow") not in timer.checked


def test_random_shapes_are_bounded_and_repeatable():
    drawn = random_shapes.sizes(40, 5, "bf16", "tn", H200)
    assert drawn == random_shapes.sizes(40, 5, "bf16", "tn", H200)
    assert drawn != random_shapes.sizes(40, 6, "bf16", "tn", H200)
    assert len(set(map(str, drawn))) == 40
    for problem in drawn:
        assert problem.m % 8 == problem.n % 8 == problem.k % 8 == 0
        assert min(problem.m, problem.n, problem.k) >= 16
        assert roofline(problem, H200).bound_s <= random_shapes.MOST_SECONDS
    assert len({p.signature for p in drawn}) == 1
    assert max(p.flops for p in drawn) > 1e10


def test_layers_are_those_of_models():
    weights = set(random_shapes._weights(random_shapes.MODELS))
    assert {(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096)} <= weights
    found = {}
    for majors in ("tn", "tt", "nn", "nt"):
        found[majors] = random_shapes.layers(60, 3, "bf16", majors, H200)
        assert found[majors] == random_shapes.layers(60, 3, "bf16", majors, H200)
    assert all((p.n, p.k) in weights and 1 <= p.m <= 8192 for p in (*found["tn"], *found["nn"]))
    assert all((p.k, p.n) in weights for p in found["tt"]), "gradients go back by the weight"
    assert all((p.m, p.n) in weights and 8 <= p.k <= 8192 for p in found["nt"]), "a weight's gradient sums over tokens"
    assert all(p.m % 8 == 0 for p in found["nn"])
    assert any(p.m % 8 for p in found["tn"])


def test_other_layers_share_no_weight_with_those_that_taught():
    weights = set(random_shapes._weights(random_shapes.MODELS))
    for p in random_shapes.others(80, 1, "bf16", "tn", H200):
        assert (p.n, p.k) not in weights


def test_the_heuristic_is_compared_with_what_was_tuned(tmp_path):
    problems = random_shapes.sizes(3, 1, "bf16", "tn", H200)
    timer = FakeTimer(truth)
    lines, missed = untuned.compare(problems, ["legacy"], timer, FakeCompiler(), Winners(tmp_path / "w"), 600.0)
    assert missed == []
    assert [line.problem for line in lines] == list(map(str, problems))
    for line, problem in zip(lines, problems, strict=True):
        backend, config, _ = heuristics.untuned(problem, H200)
        assert line.chosen == str(Candidate(backend, config))
        assert line.chosen_us == pytest.approx(truth(Candidate(backend, config)) * 1e6)
        assert line.ratio <= 1.0
        assert (backend, str(config)) in timer.checked
    text = untuned.table(lines)
    assert f"at least {min(line.ratio for line in lines):.3f}" in text
    assert "geometric mean of 3 of 3 shapes" in text


@pytest.mark.parametrize("command", [exhaustive, untuned])
@pytest.mark.product(keep=1)
def test_the_commands(command, monkeypatch, capsys, tmp_path):
    @contextmanager
    def machine(jobs):
        yield SimpleNamespace(timer=FakeTimer(truth), pool=FakeCompiler())

    monkeypatch.setattr(contest, "machine", machine)
    out = tmp_path / "out.json"
    what = ["--shapes", "256x320x512", "--limit", "20"] if command is exhaustive else ["--count", "1"]
    assert command.main([*what, "--budget", "600s", "--store", str(tmp_path / "w"), "--json", str(out)]) == 0
    assert "at least" in capsys.readouterr().out
    (shape,) = json.loads(out.read_text())["shapes"]
    assert 0 < shape["ratio"] <= 1
    assert json.loads(out.read_text())["missed"] == []
    assert Winners(tmp_path / "w").rows()


@pytest.mark.parametrize("command", [exhaustive, untuned])
def test_without_a_gpu_or_with_bad_arguments_they_say_so(command, monkeypatch, capsys):
    @contextmanager
    def machine(jobs):
        raise contest.NoGpu("torch sees no CUDA device")
        yield

    monkeypatch.setattr(contest, "machine", machine)
    assert command.main([]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err
    for bad, complaint in (
        (["--backends", "magic"], "--backends: got 'magic', accepted are cute, cutlass2x, legacy"),
        (["--jobs", "0"], "must be at least"),
    ):
        with pytest.raises(SystemExit):
            command.main(bad)
        assert complaint in capsys.readouterr().err


def test_a_selected_minimum_is_compared_with_nothing(tmp_path):
    """A time that luck made short in the sweep does not count: both are timed afresh, and a slower pick loses."""

    class Lucky(FakeTimer):
        """The first of a sweep's candidates that is not the heuristic's looks twice as fast until the meeting."""

        lucky = None

        def time(self, candidates, rounds, block_seconds):
            found = dict(super().time(candidates, rounds, block_seconds))
            for candidate in candidates:
                if self.lucky is None and candidate.key not in own:
                    self.lucky = candidate.key
                if candidate.key == self.lucky and rounds != contest.ROUNDS:
                    found[candidate.key] = 1e-7
            return found

    backend, config, _ = heuristics.untuned(SMALL, H200)
    own = {(backend, str(config))}
    timer = Lucky(lambda candidate: 1e-5 if candidate.key in own else 2e-5)
    (line,), missed = untuned.compare([SMALL], ["legacy"], timer, FakeCompiler(), Winners(tmp_path / "w"), 600.0)
    assert missed == []
    assert line.tuned == str(Candidate(*timer.lucky))
    assert (line.chosen_us, line.tuned_us) == (pytest.approx(10.0), pytest.approx(20.0))
    assert line.ratio == pytest.approx(2.0)
    # The sweep's error does not make the heuristic better than tuning.
    text = untuned.table([line, replace(line, tuned_us=8.1)])
    assert "0.900 (geometric mean of 2 of 2 shapes)" in text
    assert "taken as equal in the mean: 1" in text
    stores = Winners(tmp_path / "v"), Winners(tmp_path / "aside")
    given = {"limit": 20, "budget": 600.0, "most": 600.0}
    timer.lucky = None
    (line,), _ = exhaustive.compare([SMALL], ["legacy"], timer, FakeCompiler(), *stores, **given)
    assert line.swept_us == pytest.approx(20.0)
    assert line.ratio < 1  # the heuristic's choice was among the sweep's best, and so among all


def test_an_untuned_shape_is_named_with_the_reason(tmp_path, capsys):
    """Never silently missing, never compared with a sweep that had no chance."""
    problems = random_shapes.sizes(2, 1, "bf16", "tn", H200)
    choices = [Candidate(*heuristics.untuned(problem, H200)[:2]) for problem in problems]

    def missed(timer: FakeTimer, compiler: FakeCompiler, stop: threading.Event | None = None) -> set[str]:
        store = Winners(tmp_path / str(len(list(tmp_path.iterdir()))))
        lines, found = untuned.compare(problems, ["legacy"], timer, compiler, store, 600.0, stop)
        assert lines == []
        assert [one.problem for one in found] == list(map(str, problems))
        text = untuned.table(lines, found)
        assert all(f"not compared: {one.problem.split(' ')[0]}: {one.why}" in text for one in found)
        assert all(one.why in capsys.readouterr().err or one.why == "not begun" for one in found[:1])
        return {one.why for one in found}

    (why,) = missed(FakeTimer({}, open_fails="out of memory"), FakeCompiler())
    assert why == "the sweep: not timed: out of memory"
    # Nobody compiles, but the heuristic's choices are in the store.
    compiler = FakeCompiler(stored=[c.key for c in choices], clock=Clock(), broken_after=2.0)
    (why,) = missed(FakeTimer(truth), compiler)
    assert why == "the sweep: no compile worker comes up: it ended with status 1"

    class OnlyChoice(FakeTimer):
        def check(self, candidate, timeout):
            self._wrong = {} if candidate.key in {c.key for c in choices} else {candidate.key: "wrong: all"}
            return super().check(candidate, timeout)

    (why,) = missed(OnlyChoice(truth), FakeCompiler())
    assert why == "the sweep timed nothing but the heuristic's choice (done)"
    found = missed(FakeTimer(truth, wrong={c.key: "wrong: 7 of 9" for c in choices}), FakeCompiler())
    assert found == {f"the heuristic's choice, {choice}: wrong: 7 of 9" for choice in choices}
    stop, timer = threading.Event(), FakeTimer(truth)
    timer.after_check = stop.set
    assert missed(timer, FakeCompiler(), stop) == {"the sweep: interrupted", "not begun"}


def test_a_shape_that_is_not_compared_exhaustively_is_named(tmp_path):
    given = {"limit": 10, "budget": 600.0, "most": 600.0}
    bad = FakeTimer(truth)
    bad.check = lambda candidate, timeout: Check("wrong: all")
    for timer, why in (
        (FakeTimer(truth, open_fails="out of memory"), "the sweep: not timed: out of memory"),
        (bad, "the sweep measured nothing right (done; "),
    ):
        stores = Winners(tmp_path / f"w{why[10]}"), Winners(tmp_path / f"aside{why[10]}")
        lines, (missed,) = exhaustive.compare([SMALL], ["legacy"], timer, FakeCompiler(), *stores, **given)
        assert lines == []
        assert missed.why.startswith(why)
    stores = Winners(tmp_path / "w"), Winners(tmp_path / "aside")
    (line,), _ = exhaustive.compare([SMALL], ["legacy"], FakeTimer(truth), FakeCompiler(), *stores, **given)
    keys = [("cute", line.swept), ("legacy", line.swept.removeprefix("legacy "))]
    wrong = FakeTimer(truth, wrong=dict.fromkeys(keys, "wrong: since"))
    aside = Winners(tmp_path / "elsewhere")
    lines, (missed,) = exhaustive.compare(
        [SMALL], ["legacy"], wrong, FakeCompiler(), stores[0], aside, resume=True, **given
    )
    assert lines == []
    assert missed.why == f"the sweep's choice, {line.swept}: wrong: since"


def test_an_untaught_sweep_knows_no_winner(tmp_path, monkeypatch):
    """Seeds are what the shipped table and the store say of the very shape; without them the sweep must find it."""
    from cutegemm.tuner import run as sweep_run

    shipped = exhaustive.some_of(SMALL, H200, "legacy", 10**6)[-1][1]
    monkeypatch.setattr(sweep_run, "seeds", lambda *rest: [Candidate("legacy", shipped)])
    for untaught in (False, True):
        timer = FakeTimer(truth)
        stores = Winners(tmp_path / f"w{untaught}"), Winners(tmp_path / f"aside{untaught}")
        (line,), _ = exhaustive.compare(
            [SMALL], ["legacy"], timer, FakeCompiler(), *stores, limit=10, budget=600.0, most=600.0, untaught=untaught
        )
        ours = Candidate(*heuristics.untuned(SMALL, H200)[:2])
        assert timer.checked[0] == (ours.key if untaught else ("legacy", str(shipped)))
        assert (str(shipped) in {row.config for row in stores[0].rows()}) == (not untaught)
        assert str(shipped) in {row.config for row in stores[1].rows()}  # but the best of all may be it
        assert line.timed >= 10
    for more in (["--resume"], ["--store", "x"]):
        with pytest.raises(SystemExit):
            exhaustive.main(["--untaught", *more])


@pytest.mark.parametrize("command", [exhaustive, untuned])
def test_the_commands_fail_when_a_shape_is_missing(command, monkeypatch, capsys, tmp_path):
    @contextmanager
    def machine(jobs):
        yield SimpleNamespace(timer=FakeTimer(truth, open_fails="out of memory"), pool=FakeCompiler())

    monkeypatch.setattr(contest, "machine", machine)
    out = tmp_path / "out.json"
    what = ["--shapes", "256x320x512", "--limit", "20"] if command is exhaustive else ["--count", "1"]
    assert command.main([*what, "--budget", "600s", "--json", str(out)]) == 1
    said = capsys.readouterr()
    assert "the sweep: not timed: out of memory" in said.out
    (missed,) = json.loads(out.read_text())["missed"]
    assert missed["why"] == "the sweep: not timed: out of memory"
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "is not counted" in " ".join(capsys.readouterr().out.split())

    @contextmanager
    def interrupted(jobs):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(contest, "machine", interrupted)
    assert command.main([*what]) == 130
