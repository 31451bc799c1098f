"""Problems with epilogue programs as keys of measurements: their texts, and which winner a call takes."""

from __future__ import annotations

import pytest
import torch

from cutegemm import ops
from cutegemm.choice import heuristics, plan
from cutegemm.choice.relatives import in_measured_types
from cutegemm.problem import Problem, text
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program_request import describe
from cutegemm.tuner import run as sweep_run
from cutegemm.winners import Measurement, Winners, neighbours
from cutegemm.winners.fingerprint import fingerprint
from cutegemm.winners.rules import why_invalid
from tests.tuning_fakes import H200

FIRST = "sm90/128x16x128/coop1/c1x1/s4/row/swap/once/skew/pdl"
SECOND = "sm90/128x32x64/coop1/c1x1/s5/row/swap"


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def posed(m: int, n: int, k: int, function, *operands) -> Problem:
    """As `gemm` poses it, of contiguous tensors with both operands K-major."""
    return describe(bf16(m, k), bf16(n, k).t(), function, operands, None, None, None).problem


def statistics(acc, rows, residual):
    h = acc / rows + residual
    return h, ops.cast(ops.silu(h), torch.float32), ops.row_sum(h * h), ops.column_max(h)


PROBLEMS = {
    "gate and up": posed(16, 256, 64, ops.swiglu),
    "pairs": posed(16, 256, 64, ops.geglu_pairs),
    "vector and matrix": posed(48, 96, 64, lambda acc, b, r: ops.gelu(acc + b) + r, bf16(96), bf16(48, 96)),
    "several results": posed(48, 96, 64, statistics, bf16(48, 1), bf16(48, 96)),
    "numbers": posed(48, 96, 64, lambda acc, s, i: ops.where(ops.column() // 3 <= i, acc * s, 0.0), 0.5, 3),
    "a single number in a tensor": posed(48, 96, 64, lambda acc, s: ops.tanh(acc * s), torch.zeros(())),
    "a batch": describe(
        bf16(4, 48, 64), bf16(4, 64, 96), lambda acc, s, r: ops.alibi(acc, s) + r, (bf16(4, 1, 1), bf16(4, 48, 96)),
        None, None, None,
    ).problem,
    "one column": posed(48, 1, 64, lambda acc, r: ops.tanh(acc) + r, bf16(48, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("constant", ["", "b"])
def test_the_text_of_a_problem_with_a_program_is_read_back(name, constant):
    problem = PROBLEMS[name]
    problem = Problem(**{**{field: getattr(problem, field) for field in problem.__match_args__}, "constant": constant})
    assert text.parse(str(problem)) == problem
    program = problem.epilogue.custom
    again = Problem.of(
        problem.m, problem.n, problem.k, majors=problem.signature.majors, batch=problem.batch, constant=constant,
        epilogue=Epilogue(custom=program),
    )  # fmt: skip
    assert again == problem, "of contiguous tensors a problem is known without them"


def test_a_matrix_without_neighbours_is_read_back_as_one():
    apart = posed(48, 96, 64, lambda acc, r: ops.tanh(acc) + r, bf16(96, 48).t())
    assert apart.epilogue.aligns == (0,)
    found = text.parse(str(apart))
    assert (found.signature, found.min_bytes) == (apart.signature, apart.min_bytes)
    assert not found.operands[0].row_major


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("-> (bf16,", "-> (fp16,", "the program is"),
        ("-> (bf16, fp32, fp32, fp32)", "-> (bf16, None, fp32, fp32)", "the program is"),
        ("@16,16", "", "has alignments of 0 matrices, expected 2"),
        ("@16,16", "@16", "has alignments of 1 matrices, expected 2"),
        ("@16,16", "@16,0", "result 1 is aligned to 0 bytes"),
        ("@16,16", "@16,2", "result 1 is aligned to 2 bytes"),
        ("@16,16", "@3,16", "operand x1 is aligned to 3 bytes"),
        ("x1: bf16[M, N]", "x1: e4m3[M, N]", "operand x1 is e4m3"),
        ("x1: bf16[M, N]", "x1: bf16[M, K]", "shape"),
        ("acc / x0", "acc/x0", "it would be written"),
        ("bf16->bf16", "fp64->fp64", "programs compute in fp32|the program is"),
        ("@16,16", "@16,16/masked", "accepted of masked products"),
    ],
)
def test_what_no_call_has_is_no_key(old, new, why):
    key = str(PROBLEMS["several results"])
    assert old in key
    with pytest.raises(ValueError, match=why):
        text.parse(key.replace(old, new))


def test_gate_and_up_need_an_even_number_of_columns():
    with pytest.raises(ValueError, match="N is 255; a program of gate and up"):
        text.parse(str(PROBLEMS["gate and up"]).replace("16x256", "16x255"))
    rope = posed(48, 96, 64, ops.rope, bf16(48, 96), bf16(48, 96))
    with pytest.raises(ValueError, match="N is 95; a program with partner"):
        text.parse(str(rope).replace("48x96", "48x95"))


@pytest.fixture
def store(tmp_path, monkeypatch) -> Winners:
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    return Winners()


def row(problem: Problem, config: str, seconds: float = 5e-5) -> Measurement:
    return Measurement("H200", 132, str(problem), "cute", config, fingerprint("cute", config), seconds, "ok")


def gated(m: int, function=ops.swiglu) -> Problem:
    return posed(m, 28672, 4096, function)


def test_a_winner_of_the_very_program_wins(store):
    problem = gated(16)
    assert why_invalid(row(problem, FIRST)) is None
    assert plan.choose(problem, H200).why.startswith("heuristic")
    store.record(row(problem, FIRST, 5.69e-5))
    chosen = plan.choose(problem, H200)
    assert (str(chosen.config), chosen.why) == (FIRST, "tuned winner, own: 56.9 us")
    assert "tuned winner" not in plan.choose(gated(16, ops.geglu), H200).why, "another program"
    assert "tuned winner" not in plan.choose(problem.without_terms(), H200).why, "the product alone"
    promised = Problem.of(16, 28672, 4096, epilogue=problem.epilogue, constant="b")
    assert plan.choose(promised, H200).why.startswith("tuned winner, own"), "as without the promise"


def test_the_very_program_comes_before_the_plain_product(store):
    problem = posed(4096, 4096, 4096, lambda acc, r: ops.tanh(acc) + r, bf16(4096, 4096))
    plain = "sm90/128x256x64/coop2/c2x1/s4/serp8"
    store.record(row(problem.without_terms(), plain, 1e-4))
    assert plan.choose(problem, H200).why.startswith(plan.OF_PLAIN)
    own = "sm90/128x128x64/coop2/c2x1/s4/serp8"
    store.record(row(problem, own, 2e-4))
    chosen = plan.choose(problem, H200)
    assert (str(chosen.config), chosen.why) == (own, "tuned winner, own: 200.0 us")


def test_the_same_program_in_the_other_16_bit_type(store):
    store.record(row(gated(16), FIRST))
    a, b = torch.empty(16, 4096, dtype=torch.float16), torch.empty(28672, 4096, dtype=torch.float16).t()
    chosen = plan.choose(describe(a, b, ops.swiglu, (), None, None, None).problem, H200)
    assert str(chosen.config) == FIRST
    assert chosen.why.startswith("tuned winner of the other 16-bit type")


SIDES = (128, 4096, 14336)


@pytest.mark.parametrize(
    ("dtype", "out", "measured"),
    [
        ("e4m3", "e4m3", "e4m3 -> bf16"),
        ("e5m2", "fp16", "e4m3 -> bf16"),
        ("e4m3", "fp32", "e4m3 -> bf16"),
        ("bf16", "int8", "bf16 -> bf16"),
        ("bf16", "fp32", "bf16 -> bf16"),
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_winners_of_the_usual_types_serve_others(store, dtype, out, measured, scaled):
    """Its own comes first, and a program takes them as those of the plain product."""
    usual = measured.split(" -> ")
    config = f"sm90/128x96x{128 if dtype[0] == 'e' else 64}/coop2/c1x1/s3/row/k3/pdl"
    store.record(row(Problem.of(*SIDES, usual[0], out_dtype=usual[1]), config))
    program = f"def epilogue(acc, x0: fp32[1]) -> {out}: return acc * x0"
    epilogue = Epilogue(
        custom=text.parse(f"128x4096x14336 bf16->{out}/ieee/ak16/bk16/c0/d16/{program}").epilogue.custom
    )
    problem = Problem.of(*SIDES, dtype, out_dtype=out, epilogue=epilogue if scaled else None)
    chosen = plan.choose(problem, H200)
    name = plan.OF_PLAIN if scaled else "tuned winner"
    assert (str(chosen.config), chosen.why) == (config, f"{name} for {measured}, own: 50.0 us")
    own = config.replace("/s3/", "/s4/")
    store.record(row(problem.without_terms(), own))
    chosen = plan.choose(problem, H200)
    assert (str(chosen.config), chosen.why) == (own, f"{name}, own: 50.0 us")


@pytest.mark.parametrize("epilogue", [Epilogue(bias_dtype="bf16"), Epilogue(bias_dtype="bf16", activation="silu")])
def test_terms_beside_the_product_take_its_winner(store, epilogue):
    """As a program of them does; a winner with these very terms comes first."""
    plain = "sm90/128x256x64/coop2/c2x1/s4/serp8"
    problem = Problem.of(4096, 4096, 4096, epilogue=epilogue)
    store.record(row(problem.without_terms(), plain, 1e-4))
    chosen = plan.choose(problem, H200)
    assert (str(chosen.config), chosen.why.split(",")[0]) == (plain, plan.OF_PLAIN)
    own = "sm90/128x128x64/coop2/c2x1/s4/serp8"
    store.record(row(problem, own, 2e-4))
    assert str(plan.choose(problem, H200).config) == own


def test_a_winner_that_stores_d_in_another_way_does_not_serve_it(store):
    """fp32 results of swapped operands go by slabs, those of 8 and 16 bits by TMA."""
    config = "sm90/64x64x64/coop1/c1x1/s4/row/swap"
    store.record(row(Problem.of(*SIDES, "bf16"), config))
    assert str(plan.choose(Problem.of(*SIDES, "bf16", out_dtype="e4m3"), H200).config) == config
    assert plan.choose(Problem.of(*SIDES, "bf16", out_dtype="fp32"), H200).why.startswith("heuristic")
    wide, with_c = "sm90/256x208x64/coop2/c1x2/s3/serp8/zig/pdl", Epilogue(c_dtype="bf16")
    store.record(row(Problem.of(4096, 4096, 4096), wide))
    assert str(plan.choose(Problem.of(4096, 4096, 4096, epilogue=Epilogue(bias_dtype="bf16")), H200).config) == wide
    assert plan.choose(Problem.of(4096, 4096, 4096, epilogue=with_c), H200).why.startswith("heuristic")


@pytest.mark.parametrize(("dtype", "out"), [("int8", "bf16"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_types_that_run_otherwise_have_no_usual_ones(dtype, out):
    problem = Problem.of(*SIDES, dtype, out_dtype=out)
    assert in_measured_types(problem) is problem


def test_gate_and_up_in_pairs_take_the_winner_of_halves(store):
    """Also with swapped operands."""
    halves, pairs = gated(16), gated(16, ops.swiglu_pairs)
    config = "sm90/64x128x128/coop1/c1x4/s4/serp8/pdl"
    store.record(row(halves, config))
    chosen = plan.choose(pairs, H200)
    assert str(chosen.config) == config
    assert chosen.why == "tuned winner of the program with gate and up in halves, own: 50.0 us"
    store.record(row(halves, FIRST, 1e-5))
    chosen = plan.choose(pairs, H200)
    assert str(chosen.config) == FIRST
    assert chosen.why == "tuned winner of the program with gate and up in halves, own: 10.0 us"


def test_a_winner_of_the_program_at_other_rows_takes_part(store):
    """Only of the same program: what was measured for another does not count."""
    heuristics.forget()
    before = plan.choose(gated(20), H200)
    assert str(before.config) != SECOND
    store.record(row(gated(16, ops.geglu), SECOND))
    assert plan.choose(gated(20), H200) == before
    store.record(row(gated(16), SECOND))
    assert neighbours.winners_of(gated(20).signature, H200, "cute") == [((16, 28672, 4096), SECOND)]
    chosen = plan.choose(gated(20), H200)
    assert str(chosen.config) == SECOND
    assert "winner at 16x28672x4096 nearby" in chosen.why
    assert plan.choose(gated(4096), H200).why.startswith("heuristic")


def test_a_search_begins_with_the_winners_of_the_plain_product_and_of_near_shapes(store):
    problem = gated(16)
    store.record(row(problem.without_terms(), FIRST), row(gated(20), SECOND))
    first = [each.text for each in sweep_run.seeds(problem, H200, store, ["cute"])]
    assert {FIRST, SECOND} <= {*first}
