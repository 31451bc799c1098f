"""What a program's instructions and operands cost a choice: nothing without one; a winner only where they allow it."""

from __future__ import annotations

import pytest
import torch

from cutegemm import backend, ops
from cutegemm.choice import heuristics, plan, program_cost
from cutegemm.hardware import arch
from cutegemm.problem import Problem, program_request

H200 = arch.get("H200")
SIZES = 4096, 6144, 4096
WIDE, MIDDLE = "sm90/256x192x64/coop2/c1x2/s3/hilbert/pdl", "sm90/128x128x64/coop2/c2x1/s5/serp8/pdl"


def posed(epilogue, m, n, k, *operands) -> Problem:
    """The problem of a program with matrix operands of these dtypes."""
    a, b = (torch.empty(rows, columns, dtype=torch.bfloat16) for rows, columns in ((m, k), (n, k)))
    given = tuple(torch.empty(m, n, dtype=dtype) for dtype in operands)
    return program_request.describe(a, b.t(), epilogue, given, None, None, None).problem


def cycles(problem, config):
    cute = backend.get("cute")
    return cute.footprint(cute.parse(config), problem.signature, H200).program


def test_without_a_program_nothing_changes():
    for problem in (Problem.of(512, 512, 512, "bf16"), posed(ops.silu, 512, 512, 512)):
        assert problem.epilogue.custom is None
        assert cycles(problem, MIDDLE) == 0


def test_instructions_and_operands_count():
    light, heavy = (posed(each, 512, 512, 512) for each in (lambda acc: acc + 1.5, lambda acc: ops.erf(acc) + 1.5))
    assert 0 < cycles(light, MIDDLE) < cycles(heavy, MIDDLE)
    one, two = (
        posed(each, 512, 512, 512, *(torch.bfloat16,) * count)
        for count, each in enumerate((lambda acc, x: acc * x, lambda acc, x, y: acc * x * y), 1)
    )
    # One operand is loaded ahead where registers allow, two are waited for.
    assert cycles(one, MIDDLE) == pytest.approx(128 * 128 * 2 / program_cost.LANES)
    assert cycles(two, MIDDLE) > cycles(one, MIDDLE) + 2 * 64 * program_cost.WAIT
    assert cycles(one, WIDE) > 192 * program_cost.WAIT


def test_the_winner_of_the_plain_product_is_left_where_the_model_says_so(monkeypatch):
    winner = "cute", backend.get("cute").parse(WIDE), f"{plan.OF_PLAIN}, shipped"
    monkeypatch.setattr(plan, "_tuned", lambda *arguments: winner)
    assert plan.choose(posed(lambda acc: acc * acc, *SIZES), H200)[1:] == winner[1:]
    problem = posed(lambda acc, x, y: acc * x + y, *SIZES, torch.bfloat16, torch.bfloat16)
    left = plan.choose(problem, H200)
    assert left.why.startswith("heuristic")
    seconds = [heuristics.terms(problem, each, "cute", H200).seconds for each in (left.config, winner[1])]
    assert seconds[0] < plan.PROGRAM_GAINS * seconds[1]


def test_a_winner_that_the_model_did_not_expect_is_not_left_for_that(monkeypatch):
    """Only what the program adds counts: without it the winner was measured, and the model errs."""
    winner = "cute", backend.get("cute").parse("sm90/64x16x128/coop1/c1x1/s5/row/swap/once/skew/pdl"), plan.OF_PLAIN
    problem = posed(lambda acc, x: acc * x + 1.5, 8, 6144, 4096, torch.bfloat16)
    liked = heuristics.choose(problem, H200)
    for each in (problem, problem.without_program()):
        seconds = [heuristics.terms(each, config, "cute", H200).seconds for config in (liked[1], winner[1])]
        assert seconds[0] < plan.PROGRAM_GAINS * seconds[1]
    monkeypatch.setattr(plan, "_tuned", lambda *arguments: winner)
    assert plan.choose(problem, H200)[1:] == winner[1:]
