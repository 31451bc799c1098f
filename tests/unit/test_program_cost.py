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
PING_PONG = MIDDLE.replace("coop2", "pp")


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
    # Through the ring they cost nothing but their bytes, which are counted elsewhere.
    for config, elements in ((MIDDLE, 128 * 128), (WIDE, 256 * 192)):
        assert cycles(one, config) == pytest.approx(2 * elements / program_cost.LANES)
        assert cycles(two, config) == pytest.approx(4 * elements / program_cost.LANES)
    # fp32 operands of a bf16 result have another way, and are waited for.
    other = posed(lambda acc, x: acc * x, 512, 512, 512, torch.float32)
    assert cycles(other, MIDDLE) == pytest.approx(cycles(one, MIDDLE) + 64 * program_cost.WAIT)


def test_ping_pong_has_one_warpgroup_for_a_tile():
    one = posed(lambda acc, x: acc * x, 512, 512, 512, torch.bfloat16)
    two = posed(lambda acc, x, y: acc * x * y, 512, 512, 512, torch.bfloat16, torch.bfloat16)
    # One operand is loaded ahead; two are waited for, in the ring (192 accumulators) or not (128).
    assert cycles(one, PING_PONG) == pytest.approx(2 * cycles(one, MIDDLE))
    assert cycles(two, PING_PONG) == pytest.approx(2 * cycles(two, MIDDLE) + 2 * 128 * program_cost.WAIT)
    large = PING_PONG.replace("128x128", "128x192").replace("s5", "s4")
    assert cycles(two, large) > 2 * 192 * program_cost.WAIT


@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (512, 4096, 14336), SIZES])
def test_operands_through_the_ring_lead_to_cooperative_tiles(sizes):
    """As measured on an H200: 86 us instead of 91 at 512x4096x14336, where the plain product chooses ping-pong."""
    for problem in (
        posed(lambda acc, x: ops.gelu(acc + 1.5) + x, *sizes, torch.bfloat16),
        posed(ops.rope, *sizes, torch.bfloat16, torch.bfloat16),
    ):
        chosen = heuristics.choose(problem, H200)[1]
        assert not chosen.ping_pong
        assert chosen.through_ring(problem.signature) is not None


def test_the_winner_of_the_plain_product_is_left_where_the_model_says_so(monkeypatch):
    winner = "cute", backend.get("cute").parse(WIDE), f"{plan.OF_PLAIN}, shipped"
    monkeypatch.setattr(plan, "_tuned", lambda *arguments: winner)
    for kept in (
        posed(lambda acc: acc * acc, *SIZES),
        posed(lambda acc, x, y: acc * x + y, *SIZES, torch.bfloat16, torch.bfloat16),
    ):
        assert plan.choose(kept, H200)[1:] == winner[1:]
    problem = posed(lambda acc, x, y: acc * x + y, *SIZES, torch.float32, torch.float32)
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
        terms = [heuristics.terms(each, config, "cute", H200) for config in (liked[1], winner[1])]
        seconds = [found.seconds / found.learned for found in terms]
        assert seconds[0] < plan.PROGRAM_GAINS * seconds[1]
    monkeypatch.setattr(plan, "_tuned", lambda *arguments: winner)
    assert plan.choose(problem, H200)[1:] == winner[1:]
