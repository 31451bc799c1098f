"""Programs of gate and up before any kernel is compiled: validity, choice, alignment, bytes."""

from __future__ import annotations

import re

import pytest
import torch

import cutegemm
from cutegemm import backend
from cutegemm.choice import heuristics
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from cutegemm.problem.program_request import describe

CUTE = backend.get("cute")
H200 = arch.get("H200")


def swiglu(gating: str = "halves", dtype: str = "bf16", value: str = "gate") -> Epilogue:
    text = f"def epilogue(gate: {gating}[0], up: {gating}[1]) -> {dtype}: return silu({value}) * up"
    return Epilogue(custom=simplified(parse(text)))


def problem(m: int, n: int, k: int, gating: str = "halves", dtype: str = "bf16", **options) -> Problem:
    return Problem.of(m, n, k, dtype, epilogue=swiglu(gating, dtype), **options)


@pytest.mark.parametrize(
    ("config", "gating", "why"),
    [
        (
            "128x128x64/coop2/c1x1/s4/row/k4",
            "halves",
            "splits of K finish single accumulators, gate and up are finished",
        ),
        (
            "128x128x64/coop2/c1x1x2/s4/row",
            "pairs",
            "clusters along K finish gate and up in halves; these lie in pairs",
        ),
        ("128x32x64/coop1/c1x1/s4/row/slab/swap", "pairs", "exchange them on the way to TMA.s boxes"),
        ("64x32x64/coop1/c1x1/s4/row/swap", "halves", "a warpgroup has 64 rows; .* gate and up take multiples of 128"),
        ("192x32x64/coop1/c1x1/s4/row/swap", "halves", "a warpgroup has 192 rows"),
    ],
)
def test_hopper_refuses_what_cannot_hold_gate_and_up(config, gating, why):
    reason = CUTE.check(CUTE.parse(f"sm90/{config}"), problem(512, 512, 512, gating), H200)
    assert reason is not None
    assert re.search(why, reason)


def test_halves_of_a_row_major_b_need_whole_boxes_and_alignment():
    config = CUTE.parse("sm90/64x48x64/coop1/c1x1/s4/row")
    assert CUTE.check(config, problem(512, 512, 512), H200) is None
    assert "need a multiple of 32" in CUTE.check(config, problem(512, 512, 512, majors="tt"), H200)
    # 8 columns of 2 bytes begin on 16 bytes, their halves on 8.
    unaligned = problem(512, 520, 512, majors="tt")
    assert unaligned.b.align == 16
    assert unaligned.signature.align_b == 8
    reason = CUTE.check(CUTE.parse("sm90/64x64x64/coop1/c1x1/s4/row"), unaligned, H200)
    assert "each half of the columns need 16 bytes, they have 8" in reason
    assert CUTE.default(unaligned, H200).family == "sm80"
    for served in (problem(512, 520, 512), problem(512, 520, 512, "pairs", majors="tt")):
        assert CUTE.default(served, H200).family == "sm90"


def test_swapped_operands_with_partner():
    """Neighbouring columns meet in a slab only."""
    config = CUTE.parse("sm90/128x32x64/coop1/c1x1/s4/row/swap")
    plain = problem(512, 512, 512).signature
    partner = Problem.of(512, 512, 512, epilogue=swiglu(value="partner(gate)")).signature
    assert config.uses_tma_store(plain)
    assert not config.uses_tma_store(partner)
    single = Epilogue(custom=simplified(parse("def epilogue(acc) -> bf16: return partner(acc)")))
    split = CUTE.parse("sm90/128x32x64/coop1/c1x1/s4/row/k2/swap")
    assert "partner" in CUTE.check(split, Problem.of(512, 512, 512, epilogue=single), H200)


@pytest.mark.parametrize("gating", ["halves", "pairs"])
@pytest.mark.parametrize(("dtype", "precision"), [("bf16", "ieee"), ("fp32", "tf32"), ("fp32", "ieee")])
@pytest.mark.parametrize("majors", ["tn", "tt"])
def test_the_choice_is_valid_and_about_as_fast_as_without_gating(gating, dtype, precision, majors):
    if precision == "tf32" and majors == "tt":
        majors = "tn"  # TF32 WGMMA takes K-major operands only
    for m, n, k in ((1, 28672, 4096), (16, 28672, 4096), (512, 28672, 4096), (8192, 28672, 8192), (300, 1024, 320)):
        gated = problem(m, n, k, gating, dtype, precision=precision, majors=majors)
        chosen = CUTE.default(gated, H200)
        assert CUTE.check(chosen, gated, H200) is None
        assert chosen.family == ("simt" if precision == "ieee" and dtype == "fp32" else "sm90")
        plain = Problem.of(m, n, k, dtype, precision=precision, majors=majors)
        if CUTE.default(plain, H200).family == "vector":
            continue  # vector kernels have no gating
        few_rows_of_pairs = 1.6 if gating == "pairs" and m <= 16 and precision == "tf32" else 1.06
        estimates = (
            heuristics.terms(gated, chosen, "cute", H200),
            heuristics.terms(plain, CUTE.default(plain, H200), "cute", H200),
        )
        # What was learned is of plain products on tensor cores.
        with_gating, without = (terms.seconds / terms.learned for terms in estimates)
        assert with_gating <= few_rows_of_pairs * without


def test_d_has_half_of_the_bytes():
    gated, plain = problem(8192, 8192, 64), Problem.of(8192, 8192, 64)
    assert gated.columns == 4096
    assert plain.min_bytes - gated.min_bytes == 8192 * 4096 * 2
    config = CUTE.parse("sm90/128x256x64/coop2/c2x1/s4/hilbert")
    memory = [heuristics.terms(each, config, "cute", H200).memory for each in (gated, plain)]
    assert memory[0] < 0.55 * memory[1]


def test_shapes_that_do_not_pair_are_refused():
    a, b = torch.zeros(4, 16), torch.zeros(16, 6)
    gated = swiglu().custom
    with pytest.raises(ValueError, match="got 5 columns; an epilogue of gate and up needs an even number"):
        describe(a, b[:, :5], gated, (), None, None, None)
    partner = swiglu(value="partner(gate)").custom
    with pytest.raises(ValueError, match="partner exchanges neighbouring columns, and its result has 3"):
        describe(a, b, partner, (), None, None, None)
    with pytest.raises(ValueError, match="n: got 5"):
        problem(4, 5, 16)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((8.0, 4), TypeError, "in_features: got float, expected an int"),
        ((8, -4), ValueError, "hidden_features: got -4, accepted are 0 or more"),
        ((8, 4, "8"), TypeError, "out_features: got str, expected an int"),
    ],
)
def test_sizes_of_a_gated_mlp_are_checked(sizes, error, message):
    with pytest.raises(error, match=message):
        cutegemm.nn.SwiGLU(*sizes)
