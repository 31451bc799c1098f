"""The tables of winners that come with the package."""

from __future__ import annotations

import pytest

from cutegemm import backend
from cutegemm.choice import heuristics, plan
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem import text as problem_text
from cutegemm.winners import table as winners_table
from cutegemm.winners.fingerprint import fingerprint
from tests.unit.conftest import SHIPPED

TABLES = sorted(SHIPPED.glob("winners-*.json"))
ROWS = [row for path in TABLES for row in winners_table.load(path.read_text())]


def problem_of(text: str) -> Problem:
    """The problem of a row."""
    problem = problem_text.parse(text)
    assert str(problem) == text
    return problem


@pytest.fixture
def shipped(monkeypatch):
    """Chooses by these tables; what was remembered without them is forgotten, and what is remembered with them."""
    monkeypatch.setattr(winners_table, "DATA", SHIPPED)
    heuristics.forget()
    yield
    heuristics.forget()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.problem.split()[0]} {row.config}")
def test_a_row_is_valid_today(row):
    assert row.ok
    assert row.reference_seconds
    gpu = arch.get(row.gpu)
    assert gpu.sm_count == row.sm_count
    kernels = backend.get(row.backend)
    assert str(kernels.parse(row.config)) == row.config
    assert kernels.check(kernels.parse(row.config), problem_of(row.problem), gpu) is None


def test_the_kernels_are_those_that_were_measured():
    """Where this fails: `python -m tuning.winners restamp`, docs/tuning.md. Another compiler may be installed."""
    changed = {
        row.fingerprint for row in ROWS if row.fingerprint.split()[0] != fingerprint(row.backend, row.config).split()[0]
    }
    assert not changed


def test_each_table_is_named_for_its_gpu():
    for path in TABLES:
        assert {winners_table.table_name(row.gpu) for row in winners_table.load(path.read_text())} == {path.name}


@pytest.mark.parametrize(("gpu", "majors"), [("H200", "tn"), ("H200", "tt"), ("H100 SXM", "tn")])
def test_the_choice_follows_the_table(shipped, gpu, majors):
    problem = Problem.of(4096, 4096, 4096, "bf16", majors=majors)
    choice = plan.choose(problem, arch.get(gpu))
    best = max((row for row in ROWS if (row.gpu, row.problem) == (gpu, str(problem))), key=lambda row: row.ratio or 0.0)
    assert str(choice.config) == best.config
    assert "shipped" in choice.why


def test_fp16_takes_what_is_fast_in_bf16(shipped):
    pairs = {(row.gpu, row.problem) for row in ROWS if " bf16->" in row.problem}
    assert len(pairs) > 120
    for gpu, text in sorted(pairs):
        chosen = [plan.choose(problem_of(each), arch.get(gpu)).config for each in (text, text.replace("bf16", "fp16"))]
        assert chosen[0] == chosen[1], (gpu, text)
