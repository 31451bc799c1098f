"""Measurements of products with scales: under which key they stand, and which recipe takes which."""

from __future__ import annotations

import pytest
import torch

from cutegemm.choice import plan
from cutegemm.hardware import arch
from cutegemm.problem import Problem, grouped_request, text
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.grouped_request import Sizes
from cutegemm.problem.program.text import parse
from cutegemm.pytorch import grouped_scaled
from cutegemm.winners import Winners
from cutegemm.winners.fingerprint import fingerprint
from cutegemm.winners.row import METHOD, Measurement
from tests.unit.scaled import scaled_problem
from tuning import sweep

H200 = arch.get("H200")
SIZES = (64, 4096, 7168)
PLAIN, BLOCKED = "sm90/64x64x128/coop1/c1x1/s4/g8", "sm90/64x48x128/coop1/c1x1x2/s5/row/pdl/twin"


def asked(*options: str) -> list[Problem]:
    return sweep.problems(sweep.parser().parse_args(["--shapes", "64x4096x7168", "--dtype", "e4m3", *options]))


def of_recipe(recipe: str) -> Problem:
    """As `gemm` poses it."""
    return scaled_problem(recipe, *SIZES)


def store(problem: Problem, config: str) -> None:
    row = Measurement(
        H200.name, H200.sm_count, str(problem), "cute", config, fingerprint("cute", config), 1e-5, "ok",
        measured_at="2026-11-23T00:00:00+00:00", method=METHOD,
    )  # fmt: skip
    Winners().record(row)


def test_a_sweep_of_blocks_has_a_key_of_its_own_that_can_be_read_back():
    (plain,), (rows,), (blocks,) = (asked(*more) for more in ([], ["--scaling", "rows"], ["--scaling", "blocks"]))
    assert plain == rows
    assert plain == text.parse(str(plain))
    assert blocks == text.parse(str(blocks)) == of_recipe("blocks")
    assert [(matrix.rows, matrix.cols) for matrix in blocks.operands] == [(64, 56), (56, 32)]
    assert blocks.min_bytes == plain.min_bytes + 4 * (64 * 56 + 56 * 32)


def test_scales_within_other_programs_are_keys_too():
    key = str(of_recipe("blocks"))
    for other in (key.replace("return acc", "return acc * 2.0"), str(of_recipe("rows"))):
        assert str(text.parse(other)) == other
    for changed in (key.replace("-> bf16:", "-> fp16:"), key.replace("A, 1, 128", "A, 7, 128")):
        with pytest.raises(ValueError, match=r"the program is|shape"):
            text.parse(changed)
    (grouped,) = asked("--scaling", "blocks", "--work", "ragged_m", "--batch", "8")
    with pytest.raises(ValueError, match="accepted of ragged_m products are scales of blocks of K alone"):
        text.parse(str(grouped).replace("return acc", "return acc * 2.0"))


def test_recipes_take_the_winner_that_was_measured_for_them(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    store(asked()[0], PLAIN)
    for recipe in ("tensor", "rows"):
        chosen = plan.choose(of_recipe(recipe), H200)
        assert str(chosen.config) == PLAIN
        assert chosen.why.startswith(plan.OF_PLAIN)
    assert "heuristic" in plan.choose(of_recipe("blocks"), H200).why
    store(asked("--scaling", "blocks")[0], BLOCKED)
    assert str(plan.choose(of_recipe("blocks"), H200).config) == BLOCKED
    assert str(plan.choose(of_recipe("rows"), H200).config) == PLAIN
    # A bias and an activation behind it: as the product with these scales.
    scales = "x0: fp32[N], x1: fp32[A, 1, 128], x2: fp32[B, 128, 128]"
    program = parse(f"def epilogue(acc, {scales}) -> bf16: return relu(acc + x0)")
    biased = Problem.of(*SIZES, "e4m3", epilogue=Epilogue(custom=program))
    assert [(each.rows, each.cols) for each in biased.operands] == [(1, 4096), (64, 56), (56, 32)]
    chosen = plan.choose(biased, H200)
    assert str(chosen.config) == BLOCKED
    assert chosen.why.startswith(plan.OF_PLAIN)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--scaling", "blocks", "--bias", "bf16"], "--scaling: got blocks with --bias"),
        (["--scaling", "blocks", "--precision", "tf32"], "--scaling: got blocks with --precision tf32"),
        (["--scaling", "blocks", "--work", "ragged_k"], "scaling: got blocks for groups of K, which end within blocks"),
        (["--scaling", "blocks", "--dtype", "bf16"], "--scaling: got blocks with bf16; scales are of fp8"),
    ],
)
def test_what_scales_of_blocks_are_not_measured_with(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        asked(*options)


def test_groups_with_blocks_have_a_key_that_gathered_and_masked_ones_read(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    (measured,) = asked("--scaling", "blocks", "--work", "ragged_m", "--batch", "8")
    assert measured == text.parse(str(measured))
    assert [(matrix.rows, matrix.cols, matrix.stride_batch > 0) for matrix in measured.operands] == [
        (64, 56, False), (56, 32, True)
    ]  # fmt: skip
    config = "sm90/64x64x128/coop1/c1x1/s6/g8/swap/twin"
    store(measured, config)
    ends = torch.tensor([10, 10, 20, 30, 40, 50, 60, 70], dtype=torch.int32)
    for sizes, shape in (
        (Sizes(ends), (70, 7168)),
        (Sizes(ends, rows=torch.zeros(70, dtype=torch.int32)), (5, 7168)),
        (Sizes(None, ends), (8, 9, 7168)),
    ):
        a = torch.empty(shape, dtype=torch.float8_e4m3fn)
        b = torch.empty(8, 4096, 7168, dtype=torch.float8_e4m3fn).mT
        scales = grouped_scaled.Scaling(torch.ones(*shape[:-1], 56), torch.ones(8, 56, 32))
        for epilogue in (lambda acc: acc, lambda acc: acc * 2.0):
            program, operands, _ = grouped_scaled.arguments(a, b, sizes, epilogue, (), scales, None, None, None)
            problem = grouped_request.describe(a, b, sizes, program, operands, None, None, None).problem
            assert str(plan.choose(problem, H200).config) == config
