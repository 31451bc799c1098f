"""The tables of winners that come with the package."""

from __future__ import annotations

import re

import pytest

from cutegemm import backend
from cutegemm.choice import heuristics, plan
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.winners import table as winners_table
from tests.unit.conftest import SHIPPED

TABLES = sorted(SHIPPED.glob("winners-*.json"))
ROWS = [row for path in TABLES for row in winners_table.load(path.read_text())]


def problem_of(text: str) -> Problem:
    """The problem of a row; the tables hold plain products of compact matrices."""
    found = re.match(r"(\d+)x(\d+)x(\d+) (\w+)->.*/a([km])\d+/b([kn])\d+/", text)
    assert found
    majors = {"k": "t", "m": "n"}[found[5]] + {"k": "n", "n": "t"}[found[6]]
    problem = Problem.of(int(found[1]), int(found[2]), int(found[3]), found[4], majors=majors)
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


def test_each_table_is_named_for_its_gpu():
    for path in TABLES:
        assert {winners_table.table_name(row.gpu) for row in winners_table.load(path.read_text())} == {path.name}


def test_the_choice_follows_the_table(shipped):
    for majors in ("tn", "tt"):
        problem = Problem.of(4096, 4096, 4096, "bf16", majors=majors)
        choice = plan.choose(problem, arch.get("H200"))
        best = max((row for row in ROWS if row.problem == str(problem)), key=lambda row: row.ratio or 0.0)
        assert str(choice.config) == best.config
        assert "shipped" in choice.why


def test_fp16_takes_what_is_fast_in_bf16(shipped):
    problems = [problem_of(text) for text in dict.fromkeys(row.problem for row in ROWS) if " bf16->" in text]
    assert len(problems) > 20
    for problem in problems:
        other = problem_of(str(problem).replace("bf16", "fp16"))
        chosen = [plan.choose(each, arch.get("H200")).config for each in (problem, other)]
        assert chosen[0] == chosen[1], problem
