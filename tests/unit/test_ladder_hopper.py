"""The Hopper ladder's steps and tools, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutegemm import backend
from cutegemm.hardware import arch
from tuning import ladder, ladder_hopper
from tuning.ladder_hopper import RAGGED, STEPS, Measured, chosen, draw, table

HOPPER = arch.get("sm_90a")


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.idea)
def test_steps_are_valid_for_what_the_ladder_measures(step):
    own = backend.get(step.backend)
    for shape in (RAGGED, (8192, 8192, 8192)):
        problem = step.problem(*shape)
        assert own.check(own.parse(step.config), problem, HOPPER) is None


def test_published_figures_climb():
    published = [step.published for step in STEPS if step.published is not None]
    assert published == sorted(published)
    assert len({step.config for step in STEPS}) == len(STEPS)


def test_steps_by_number():
    assert chosen(None) == list(STEPS)
    assert chosen(["2", "1"]) == [STEPS[1], STEPS[0]]
    with pytest.raises(ValueError, match="accepted for this ladder are 1 to"):
        chosen(["0"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rung", "99"],
        ["--dtype", "fp16"],
        ["--autotune", "5"],
        ["--rounds", "0"],
        ["--emulate", "--size", "512"],
        ["--emulate", "--plot", "x.png"],
    ],
)
def test_arguments_that_do_not_apply(arguments, capsys):
    with pytest.raises(SystemExit):
        ladder.main(["--ladder", "hopper", *arguments])
    assert "--" in capsys.readouterr().err


def test_a_step_runs_in_the_emulator(capsys):
    pytest.importorskip("llvmlite")
    assert ladder.main(["--ladder", "hopper", "--emulate", "--rung", "2"]) == 0
    assert "one warpgroup: ok" in capsys.readouterr().out


def _rows() -> list[Measured]:
    return [Measured(step, 8192, 2.0 * 8192**3 / (100 + 50 * i) * 1e-12, 0.5, "ok") for i, step in enumerate(STEPS)]


def test_the_table_shows_measured_beside_published():
    text = table(_rows())
    assert all(step.config in text for step in STEPS)
    line = next(line for line in text.splitlines() if STEPS[1].config in line)
    assert "150" in line
    assert "317" in line


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw(_rows(), str(tmp_path / "ladder.png"))
    assert (tmp_path / "ladder.png").stat().st_size > 10_000


@pytest.mark.parametrize("size", [4096, 8192])
def test_the_plot_has_marks_where_its_label_says_so(size, tmp_path, monkeypatch):
    """Figures are published at 8192; a plot of another size has no marks, and its axis does not speak of any."""
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    draw([replace(row, size=size) for row in _rows()], str(tmp_path / "ladder.png"))
    (axes,) = figures[0].axes
    published = [step for step in STEPS if step.published is not None]
    assert len(axes.lines) == (len(published) if size == 8192 else 0)
    assert ("black: published on an H100 SXM at 8192" in axes.get_xlabel()) == (size == 8192)
    assert "share of cuBLAS" in axes.get_xlabel()


def test_a_step_that_is_wrong_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(ladder, "cuda_is_there", lambda: True)
    monkeypatch.setattr(ladder_hopper.Arch, "of_device", lambda: HOPPER)
    monkeypatch.setattr(ladder_hopper, "compile_all", lambda wanted, arch: (len(set(wanted)), 1.0, {}))
    monkeypatch.setattr(ladder_hopper, "_checked", lambda steps, m, n, k, arch: {})
    rows = [Measured(STEPS[1], 8192, 1.0, 0.5, "1 of 2 elements outside the bound")]
    monkeypatch.setattr(ladder_hopper, "_measure", lambda *arguments: rows)
    assert ladder.main(["--ladder", "hopper", "--rung", "2"]) == 1
    assert "outside the bound" in capsys.readouterr().out
