"""What a sweep tells: the summary, its plot, and progress while it goes on."""

from __future__ import annotations

import io
import json

import pytest

from cutegemm.hardware.roofline import roofline
from cutegemm.problem import Problem
from cutegemm.run import progress as bars
from cutegemm.tuner import report as sweep_report
from cutegemm.tuner.search import Outcome, Result
from cutegemm.winners.row import METHOD
from tests.terminal import terminal
from tests.tuning_fakes import H200, PROBLEM, candidate
from tests.waiting import wait_until
from tuning import plot


def test_the_summary(tmp_path):
    fast, second = candidate("sm90/fast"), candidate("sm90/second")
    done = Outcome(PROBLEM, 300, {
        fast.key: Result(fast, "ok", 4e-6, 5e-6, "final"),
        second.key: Result(second, "ok", 4.4e-6, 5e-6, "final"),
        ("cute", "bad"): Result(candidate("bad"), "wrong: 3 elements"),
        ("cute", "burst"): Result(candidate("burst"), "ok", 3e-6, 5e-6, "quick"),
    }, 5e-6, 12.34)  # fmt: skip
    empty = Outcome(Problem.of(64, 64, 64, batch=4), 10, ended="interrupted")
    text = sweep_report.table([done, empty], H200)
    line = next(line for line in text.splitlines() if line.startswith("1024x1024x1024"))
    assert "sm90/fast" in line
    for figure in ("4.00", "536.9", "1.250", "sm90/second +10.0 %", "3/1/0 of 300", "12.3"):
        assert figure in line
    assert "4x64x64x64" in text
    assert "none (interrupted)" in text
    assert "1.250 (geometric mean)" in text
    data = json.loads(sweep_report.as_json([done, empty], H200, {"made": "now"}))
    assert data["shapes"][0]["winner"]["config"] == "sm90/fast"
    assert {r["method"] for r in data["shapes"][0]["results"]} == {METHOD}
    assert [r["config"] for r in data["shapes"][0]["results"]] == ["sm90/fast", "sm90/second", "burst", "bad"]
    assert data["shapes"][1]["winner"] is None
    drawn = tmp_path / "plot.png"
    pytest.importorskip("matplotlib")
    plot.plot_sweep([done, empty], H200, drawn)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing"):
        plot.plot_sweep([empty], H200, drawn)


def test_no_share_of_a_bound_for_groups_of_rows():
    """Weights of groups without rows are not read: with 8 rows for 256 groups the share would be 2812 %."""
    for work, share in (("dense", " %"), ("ragged_k", " %"), ("ragged_m", ""), ("ragged_n", "")):
        majors = "nt" if work == "ragged_k" else "tn"
        problem = Problem.of(8 if work != "ragged_n" else 4096, 4096 if work != "ragged_n" else 8, 512, batch=256,
                             work=work, majors=majors)  # fmt: skip
        done = Outcome(problem, 3, {("cute", "x"): Result(candidate("sm90/x"), "ok", 1e-5, 2e-5)}, elapsed=1.0)
        line = sweep_report.table([done], H200).splitlines()[2]
        assert (" %" in line) == bool(share), (work, line)


def test_the_plot_shows_a_shape_that_memory_limits(tmp_path, monkeypatch):
    """Its TFLOP/s are a sliver beside a square's; its share of the bound is not."""
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    def outcome(problem, share, slower):
        seconds = roofline(problem, H200).bound_s / share
        one = candidate("sm90/one")
        return Outcome(problem, 1, {one.key: Result(one, "ok", seconds, slower * seconds, "final")}, seconds, 1.0)

    groups = Problem.of(8, 8192, 8192, batch=256, work="ragged_m")
    found = [outcome(Problem.of(8192, 8192, 8192), 0.8, 1.25), outcome(Problem.of(8, 8192, 8192), 0.6, 2.0),
             outcome(groups, 20.0, 3.0)]  # fmt: skip
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    plot.plot_sweep(found, H200, tmp_path / "plot.png")
    speed, shares = figures[0].axes
    tall, sliver = (speed.patches[place].get_height() for place in (0, 2))
    assert sliver < 0.05 * tall
    assert [round(bar.get_height(), 3) for bar in shares.patches] == [80.0, 64.0, 60.0, 30.0]
    assert [text.get_text() for text in shares.texts] == ["1.25x", "2.00x", "3.00x"]
    assert len(speed.lines) == 2, "groups of rows have no bound"


def test_progress(monkeypatch):
    outcome = Outcome(PROBLEM, 300, {("cute", "x"): Result(candidate("sm90/x"), "ok", 4e-6, 5e-6)}, elapsed=3.0)
    screen = terminal(monkeypatch)
    progress = sweep_report.Progress(2, 160, screen)
    progress.update(0, "exploring", outcome)
    progress.update(1, "halving", outcome)
    wait_until(lambda: "halving" in screen.getvalue())
    assert "0/2 shapes" in screen.getvalue()
    assert "1024x1024x1024 exploring 1/160 of 300  best 536.9 TFLOP/s 1.250x cuBLAS sm90/x" in screen.getvalue()
    progress.finished(0, outcome)
    wait_until(lambda: "1/2 shapes" in screen.getvalue())
    assert "1024x1024x1024: best 536.9 TFLOP/s 1.250x cuBLAS sm90/x in 3.0 s\n" in screen.getvalue()
    progress.close()
    plain = io.StringIO()
    progress = sweep_report.Progress(2, 160, plain)
    progress.update(0, "exploring", outcome)
    progress.finished(0, Outcome(PROBLEM, 3, ended="budget", elapsed=1.0))
    progress.close()
    assert plain.getvalue() == "1024x1024x1024: nothing right was measured in 1.0 s (budget)\n"


def test_progress_in_a_log(monkeypatch):
    monkeypatch.setattr(bars, "QUIET_SECONDS", 0.01)
    outcome = Outcome(PROBLEM, 300, {("cute", "x"): Result(candidate("sm90/x"), "ok", 4e-6, 5e-6)}, elapsed=3.0)
    log = io.StringIO()
    progress = sweep_report.Progress(2, 160, log)
    progress.update(0, "exploring", outcome)
    progress.update(1, "halving", outcome)
    wait_until(lambda: "halving" in log.getvalue())
    progress.close()
    line = next(line for line in log.getvalue().splitlines() if "halving" in line)
    assert line.startswith("0/2 shapes (0 s) | 1024x1024x1024 exploring 1/160 of 300  best 536.9 TFLOP/s")
    assert line.count("sm90/x") == 2
