"""`python -m tuning.ladder` and its plot, as far as a machine without a GPU goes."""

from __future__ import annotations

import pytest

from cutegemm.problem import Problem
from legacy_cuda.config import parse
from tuning import ladder
from tuning.workbench import Row


def rows() -> list[Row]:
    problem = Problem.of(8192, 8192, 8192, "fp32", majors="tt")
    seconds = problem.flops / 49e12
    return [
        Row(parse("naive"), problem, problem.flops / 5e11, 0.01, "ok"),
        Row(parse("async_copy"), problem, problem.flops / 40e12, 0.8, "ok"),
        Row(parse("async_copy/bk8"), problem, seconds, 0.96, "wrong at (1, 2)"),
        Row(parse("warp_tile/bk8"), problem, seconds, 0.96, "ok", family="warp_tile"),
    ]


def test_table_shows_measured_beside_published():
    lines = ladder.table(rows()).splitlines()[2:]
    assert "0.50" in lines[0]
    assert "A6000 1.3 %" in lines[0]
    assert "42.8 MISSED" in lines[1]
    assert "80.0 %" in lines[1]
    assert "H200 42.8 TF = 83 %" in lines[1]
    assert "async_copy/bk8" in lines[2]
    assert "42.8 met" in lines[2]
    assert "wrong at (1, 2)" in lines[2]
    assert "autotuned warp_tile: warp_tile/bk8" in lines[3]
    assert "48.6 met" in lines[3]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "ladder.png"
    ladder.draw(rows(), path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="nothing to draw"):
        ladder.draw([], path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ladder fp64", "invalid choice"),
        ("--size 12,x", "no list of sizes"),
        ("--size 0", "must be positive"),
        ("--rung wmma_naive", "is on the ladder '16bit'"),
        ("--rung nonsense", "no rung is called 'nonsense'"),
        ("--rounds 0", "expected at least 1"),
        ("--emulate --plot x.png", "need a GPU"),
        ("--emulate --size 4096", "up to 512"),
    ],
)
def test_command_line_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        ladder.main(arguments.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_emulated_at_a_size_of_ones_own(capsys):
    assert (
        ladder.main(["--emulate", "--ladder", "16bit", "--dtype", "fp16", "--rung", "wmma_naive", "--size", "17,32"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "at 17x17x17, fp16" in printed
    assert "at 32x32x32, fp16" in printed


def test_without_a_gpu_the_ladder_is_profiled(capsys):
    assert ladder.main(["--emulate", "--rung", "naive,padded"]) == 0
    printed = capsys.readouterr().out
    assert "run in the emulator at 128x128x32" in printed
    naive = next(line for line in printed.splitlines() if line.startswith("naive "))
    assert naive.split()[-1] == "ok"
    assert float(naive.split()[6]) > 5, "sectors touched over sectors needed"
