"""How far the sweep is from the best, and the heuristic from the sweep: the two commands, on a fake timer."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from cutegemm import backend as backends
from cutegemm import heuristics
from cutegemm.problem import Problem
from cutegemm.roofline import roofline
from cutegemm.winners import Winners
from tests.tuning_fakes import H200, FakeCompiler, FakeTimer
from tuning import contest, exhaustive, untuned
from tuning.sweep_candidates import Candidate
from tuning.sweep_timer import TimerLost

SMALL = Problem.of(256, 320, 512, "bf16")


def truth(candidate: Candidate) -> float:
    """Invented seconds: any configuration has its own."""
    return 1e-5 * (1 + sum(map(ord, candidate.text)) % 97 / 97)


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    heuristics.forget()


def test_half_of_some_are_the_models_and_half_are_everywhere():
    found = exhaustive.some_of(SMALL, H200, "cute", 200)
    texts = [str(config) for _, config in found]
    assert len(set(texts)) == 200
    everything = [str(config) for _, config in heuristics.ranked(SMALL, H200)]
    places = sorted(everything.index(text) for text in texts)
    assert places[0] == 0
    assert sum(place >= len(everything) // 2 for place in places) >= 30
    other = {str(c) for _, c in exhaustive.some_of(Problem.of(4096, 4096, 4096, "bf16"), H200, "cute", 200)}
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
    (line,) = exhaustive.compare(
        [SMALL], ["legacy"], timer, compiler, store, aside, limit=40, budget=60.0, most=60.0
    )  # fmt: skip
    assert all(row.config != str(hidden) for row in store.rows())
    assert line.best == f"legacy {hidden}"
    assert line.best_us == pytest.approx(5.0)
    assert line.swept_us >= 10.0
    assert line.ratio == pytest.approx(line.best_us / line.swept_us)
    assert line.whole
    assert line.timed >= 40
    assert line.enumerated > 40
    assert set(timer.checked) >= {("legacy", str(config)) for _, config in listed}
    text = exhaustive.table([line])
    assert "256x320x512" in text
    assert f"at least {line.ratio:.4f} of the best" in text


def test_the_sweep_is_not_taught_by_what_is_timed_exhaustively(tmp_path):
    """All sweeps come before, and a winner of an earlier sweep can be taken instead."""
    problems = [SMALL, Problem.of(512, 320, 512, "bf16")]
    timer, stores = FakeTimer(truth), (Winners(tmp_path / "w"), Winners(tmp_path / "aside"))
    given = {"limit": 10, "budget": 60.0, "most": 60.0}
    lines = exhaustive.compare(problems, ["legacy"], timer, FakeCompiler(), *stores, **given)
    assert timer.opened == problems * 2
    again = FakeTimer(truth)
    more = exhaustive.compare(problems, ["legacy"], again, FakeCompiler(), *stores, resume=True, **given)
    assert again.opened == problems
    assert [line.swept for line in more] == [line.swept for line in lines]


def test_ctrl_c_in_a_sweep_ends_the_comparison_too(tmp_path, monkeypatch):
    from tuning import sweep_run

    real, runs = sweep_run.run, []

    def interrupted(*given, stop, **more):
        runs.append(stop)
        outcomes = real(*given, stop=stop, **more)
        if len(runs) == 1:
            stop.set()  # as Ctrl-C does
        return outcomes

    monkeypatch.setattr(sweep_run, "run", interrupted)
    timer, stores = FakeTimer(truth), (Winners(tmp_path / "w"), Winners(tmp_path / "aside"))
    given = {"limit": 10, "budget": 60.0, "most": 60.0}
    assert exhaustive.compare([SMALL], ["legacy"], timer, FakeCompiler(), *stores, **given) == []
    assert timer.opened == [SMALL]
    assert stores[1].rows() == []


def test_the_duel_leaves_out_what_cannot_be_timed():
    good, bad, worse = (Candidate("legacy", text) for text in ("good", "bad", "worse"))
    timer = FakeTimer({good.key: 1e-5}, wrong={bad.key: "wrong: all"})
    compiler = FakeCompiler(fails={worse.key: "no"})
    assert contest.seconds_of(timer, compiler, SMALL, [good, bad, worse, good]) == {good.key: 1e-5}
    assert timer.timed[-1] == ((good.key,), contest.ROUNDS, 0.0)
    contest.seconds_of(timer, compiler, Problem.of(8192, 8192, 8192), [good])
    assert timer.timed[-1][1:] == (contest.SUSTAINED_ROUNDS, contest.BLOCK_SECONDS)
    timer.time = lambda *rest: (_ for _ in ()).throw(TimerLost("gone"))
    assert contest.seconds_of(timer, compiler, SMALL, [good]) == {}


def test_random_shapes_are_bounded_and_repeatable():
    drawn = untuned.draw(40, 5, "bf16", "tn", H200)
    assert drawn == untuned.draw(40, 5, "bf16", "tn", H200)
    assert drawn != untuned.draw(40, 6, "bf16", "tn", H200)
    assert len(set(map(str, drawn))) == 40
    for problem in drawn:
        assert problem.m % 8 == problem.n % 8 == problem.k % 8 == 0
        assert min(problem.m, problem.n, problem.k) >= 16
        assert roofline(problem, H200).bound_s <= untuned.MOST_SECONDS
    assert len({p.signature for p in drawn}) == 1
    assert max(p.flops for p in drawn) > 1e10


def test_the_heuristic_is_compared_with_what_was_tuned(tmp_path):
    problems = untuned.draw(3, 1, "bf16", "tn", H200)
    timer = FakeTimer(truth)
    lines = untuned.compare(problems, ["legacy"], timer, FakeCompiler(), Winners(tmp_path / "w"), 60.0)
    assert [line.problem for line in lines] == list(map(str, problems))
    for line, problem in zip(lines, problems, strict=True):
        backend, config, _ = heuristics.untuned(problem, H200)
        assert line.chosen == str(Candidate(backend, config))
        assert line.chosen_us == pytest.approx(truth(Candidate(backend, config)) * 1e6)
        assert line.ratio <= 1.0
        assert (backend, str(config)) in timer.checked
    text = untuned.table(lines)
    assert f"at least {min(line.ratio for line in lines):.3f}" in text
    assert "geometric mean of 3 shapes" in text


@pytest.mark.parametrize("command", [exhaustive, untuned])
def test_the_commands(command, monkeypatch, capsys, tmp_path):
    @contextmanager
    def machine(jobs):
        yield SimpleNamespace(timer=FakeTimer(truth), pool=FakeCompiler())

    monkeypatch.setattr(contest, "machine", machine)
    out = tmp_path / "out.json"
    what = ["--shapes", "256x320x512", "--limit", "20"] if command is exhaustive else ["--count", "1"]
    assert command.main([*what, "--budget", "5s", "--store", str(tmp_path / "w"), "--json", str(out)]) == 0
    assert "at least" in capsys.readouterr().out
    (shape,) = json.loads(out.read_text())["shapes"]
    assert 0 < shape["ratio"] <= 1
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
    for bad in (["--backends", "magic"], ["--jobs", "0"]):
        with pytest.raises(SystemExit):
            command.main(bad)
    assert "--backends of cute, cutlass2x, legacy" in capsys.readouterr().err
