"""`gemm(..., constant=)`: what becomes of the promise on its way to a kernel, and where it must not go."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

import cutegemm
import cutegemm.nn
from cutegemm import backend as backends
from cutegemm.choice import plan as planning
from cutegemm.cute.hopper import candidates
from cutegemm.cute.hopper.constant import for_constant
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem, text
from cutegemm.run import call, runner
from cutegemm.run.runner import Call
from cutegemm.winners import Measurement, Winners, table
from cutegemm.winners.fingerprint import fingerprint
from tuning import sweep

PDL, PLAIN = "sm90/64x64x64/coop1/c1x1/s3/serp8/pdl", "sm90/64x64x64/coop1/c1x1/s3/serp8"
DEEP = "sm90/64x16x128/coop1/c1x1/s8/row/swap/pdl"
NEAR = "sm90/64x16x128/coop1/c1x1/s5/row/swap/once/skew/pdl"


class Built:
    """Stands for a compiled kernel."""

    def __init__(self, signature, config, arch) -> None:
        self.signature, self.config, self.arch = signature, config, arch


@pytest.fixture
def planned(monkeypatch):
    """The plan of a call on CPU tensors for an H200, without compiling."""
    monkeypatch.setattr(planning, "emulated_arch", lambda: arch_table.get("H200"))
    monkeypatch.setattr(type(backends.get("cute")), "build", lambda self, *given: Built(*given))
    monkeypatch.setattr(type(backends.get("cute")), "preparer", lambda self, asked, arch: None)
    monkeypatch.setattr(runner, "_kernels", planning.Memo(8))

    def plan(a, b, config=PDL, **options):
        return Call.of(a, b, None, runner.complete({"backend": "cute", "config": config, **options})).plan()

    return plan


@pytest.fixture
def seen(monkeypatch):
    """The promises of the calls that are planned."""
    found: list[str | None] = []
    of = Call.of.__func__  # type: ignore[attr-defined]

    def recorded(cls, a, b, c, options):
        found.append(options["constant"])
        return of(cls, a, b, c, options)

    monkeypatch.setattr(Call, "of", classmethod(recorded))
    call.memo.clear()
    return found


def operands(m=64, n=128, k=256, dtype=torch.bfloat16):
    return torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype).t()


def test_the_text_of_a_signature_without_a_promise_stays():
    signature = Problem.of(64, 64, 64).signature
    assert str(signature) == "bf16->bf16/ieee/ak16/bk16/c0/d16/alpha*acc"
    promised = replace(signature, constant="b")
    assert str(promised) == f"{signature}/constant_b"
    assert promised != signature
    assert hash(promised) != hash(signature)
    assert str(Problem.of(64, 64, 64)).endswith(str(signature)), "winners are kept by this text"


def test_the_kernel_knows_the_promise_and_the_choice_does_not(planned):
    a, b = operands()
    made = planned(a, b, constant="b")
    assert made.kernel.signature.constant == "b"
    assert made.problem.signature.constant == ""
    assert made.choice == planned(a, b).choice, "a configuration asked for stays as it is"
    assert planned(a, b).kernel.signature.constant == ""
    assert "B: its first tiles are loaded while" in planning.describe(made)
    assert "constant" not in planning.describe(planned(a, b))


def test_a_transposed_problem_exchanges_the_operands(planned):
    a, b = operands()
    out = torch.empty(128, 64, dtype=torch.bfloat16).t()
    made = planned(a, b, constant="b", out=out)
    assert made.swapped
    assert made.kernel.signature.constant == "a"


def test_a_copy_is_not_constant(planned):
    a, b = operands()
    wide = torch.ones(512, 256, dtype=torch.bfloat16)[::2, ::2]
    made = planned(a, wide, constant="b", config=None)
    assert [name for name, _ in made.copies] == ["b"]
    assert made.constant == ""
    assert made.kernel.signature.constant == ""
    assert planned(a, wide, constant="a", config=None).constant == "a"
    assert planned(a, b, constant="b").constant == "b"


def test_a_packed_operand_is_not_constant(planned):
    """Its ring was made deeper for a promise that its kernel cannot use."""
    a, b = torch.ones(2048, 4096, dtype=torch.bfloat16), torch.ones(4096, 2049, dtype=torch.bfloat16)
    plain, promised = (planned(a, b, config=None, constant=constant) for constant in (None, "b"))
    assert [each.operand for each, _ in promised.preparations] == ["b"]
    assert promised.kernel.signature.constant == ""
    assert promised.choice == plain.choice


def test_where_a_kernel_makes_no_use_of_it_the_plain_one_serves(planned):
    a, b = operands()
    made = planned(a, b, config=PLAIN, constant="b")
    assert str(made.choice.config) == PLAIN, "a configuration asked for stays as it is"
    assert made.kernel.signature.constant == ""
    assert "this kernel makes no use of the promise" in planning.describe(made)
    a, b = operands(dtype=torch.float32)
    made = planned(a, b, config=None, constant="b")
    assert made.kernel.config.family != "sm90"
    assert made.kernel.signature.constant == ""


def test_a_choice_without_pdl_gets_it(planned, monkeypatch):
    a, b = operands()
    plain = "cute", backends.get("cute").parse(PLAIN), "tuned winner"
    monkeypatch.setattr(planning, "_tuned", lambda problem, *given: None if problem.constant else plain)
    assert str(planned(a, b, config=None, constant="b").choice.config) == PDL
    assert str(planned(a, b, config=None).choice.config) == PLAIN


@pytest.mark.parametrize(
    ("config", "m", "n", "k", "stages"),
    [
        (NEAR, 16, 6144, 4096, 11),  # 96 CTAs: as many as fit, 20 kB each
        (NEAR, 16, 6144, 640, 5),  # five k tiles
        (NEAR, 16, 28672, 4096, 5),  # more CTAs than SMs: two on an SM may load side by side
        ("sm90/64x16x128/coop1/c1x1x2/s5/row/swap/pdl", 16, 4096, 4096, 11),
        ("sm90/64x16x128/coop1/c1x1x2/s5/row/swap/pdl", 16, 4096, 1664, 7),  # 13 k tiles in two parts
        ("sm90/64x16x128/coop1/c1x2/s8/row/k15/swap/pdl", 16, 256, 65536, 11),
        ("sm90/64x16x32/coop1/c1x1/s4/row/swap/pdl", 16, 4096, 4096, 16),
        ("sm90/64x32x128/coop1/c1x2/s8/serp8/swap/pdl", 64, 4096, 4096, 8),  # nine fit; not measured
    ],
)
def test_in_one_wave_the_ring_is_as_deep_as_it_can_be(config, m, n, k, stages):
    cute, h200, problem = backends.get("cute"), arch_table.get("H200"), Problem.of(m, n, k, constant="b")
    found = cute.for_constant(cute.parse(config), problem, h200)
    assert found == replace(cute.parse(config), stages=stages)
    assert cute.check(found, problem, h200) is None
    assert stages != 11 or cute.check(replace(found, stages=stages + 1), problem, h200), "one more would fit"
    assert cute.for_constant(cute.parse(config), replace(problem, constant="a"), h200) == cute.parse(config)
    assert cute.for_constant(cute.parse("simt/64x64x16/w32x32/s2/g8"), problem, h200).family == "simt"


def measured(problem, config, seconds=1e-5):
    return Measurement("H200", 132, str(problem), "cute", config, fingerprint("cute", config), seconds, "ok")


def test_a_winner_measured_with_the_promise_serves_calls_that_make_it(planned, monkeypatch, tmp_path):
    """A deep ring pays where the kernel fills it before it waits, and costs time where it does not."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUTEGEMM_WINNERS", raising=False)
    monkeypatch.setattr(table, "shipped", lambda gpu, sm_count: {})
    plain, promised = (Problem.of(16, 4096, 4096, constant=constant) for constant in ("", "b"))
    a, b = operands(16, 4096, 4096)
    Winners().record(measured(plain, NEAR, 1e-6), measured(promised, DEEP))
    made = planned(a, b, config=None, constant="b")
    assert str(made.choice.config) == DEEP
    assert made.choice.why == "tuned winner with a constant B, own: 10.0 us"
    assert made.problem == plain, "the kernel is bound to the problem without the promise"
    assert made.kernel.signature.constant == "b"
    for options in ({}, {"constant": "a"}):
        assert str(planned(a, b, config=None, **options).choice.config) == NEAR
    a, b = operands(16, 4096, 2048)
    Winners().record(measured(Problem.of(16, 4096, 2048), NEAR))
    why = planned(a, b, config=None).choice.why
    deeper = planned(a, b, config=None, constant="b").choice
    assert str(deeper.config) == NEAR.replace("s5", "s11")
    assert deeper.why == f"{why}, of {NEAR}, which runs without the promise", "what was measured is another kernel"
    half = operands(16, 4096, 4096, torch.float16)
    why = planned(*half, config=None, constant="b").choice.why
    assert why == "tuned winner with a constant B of the other 16-bit type, own: 10.0 us"


def test_the_tuner_measures_with_the_promise():
    """The text that rows are kept by says so, is read back, and names the operand that the kernel sees."""
    found = Call.of(*operands(), None, runner.complete({"constant": "b"})).request.problem
    assert found == Problem.of(64, 128, 256, constant="b")
    assert text.parse(str(found)) == found
    assert found.transposed().constant == "a"
    assert Problem.of(64, 1, 256, constant="b").constant == "a", "one column is computed as one row"
    (asked,) = sweep.problems(sweep.parser().parse_args(["--shapes", "64x128x256", "--constant", "b"]))
    assert asked == found
    parse, signature = backends.get("cute").parse, found.signature
    assert [candidates.tries(parse(each), signature) for each in (PDL, PLAIN)] == [True, False]
    assert candidates.tries(parse(PLAIN), Problem.of(64, 128, 256).signature)
    in_parts = planning.measured(
        Problem.of(64, 128, 256, "fp32", precision="tf32x3", constant="b"), arch_table.get("H200")
    ).signature
    for each in ("sm90/64x64x32/coop1/c1x1/s3/serp8/pdl", "sm90/64x64x32/coop1/c1x1/s3/serp8"):
        assert candidates.tries(parse(each), in_parts), "none uses it: all are tried"
    blocks = ["--shapes", "64x128x256", "--constant", "b", "--dtype", "e4m3", "--scaling", "blocks"]
    (scaled,) = sweep.problems(sweep.parser().parse_args(blocks))
    assert scaled.constant == "b"
    assert text.parse(str(scaled)) == scaled
    for other in (["--work", "ragged_m"], ["--moe"]):
        shapes = [] if "--moe" in other else ["--shapes", "64x128x256"]
        with pytest.raises(ValueError, match="--constant"):
            sweep.problems(sweep.parser().parse_args([*shapes, "--constant", "b", *other]))
    with pytest.raises(ValueError, match="constant: got 'c', accepted are '', 'a' and 'b'"):
        Problem.of(64, 64, 64, constant="c")


def test_configurations_that_use_it():
    parse, signature = backends.get("cute").parse, Problem.of(64, 64, 64).signature
    assert str(for_constant(parse(PLAIN), signature)) == PDL
    assert for_constant(parse(PDL), signature) == parse(PDL)
    assert for_constant(parse("sm90/64x64x64/solo/c1x1/s1/row"), signature) is None


def test_bad_promises_are_refused():
    a, b = operands(dtype=torch.float32)
    for bad in ("c", "B", True, 1):
        with pytest.raises(ValueError, match=r"constant: got .*, accepted are None, 'a' and 'b'"):
            cutegemm.gemm(a, b, constant=bad)
        with pytest.raises(ValueError, match=r"constant: got .*, accepted are None, 'a' and 'b'"):
            cutegemm.gemm(a, b, constant=bad, epilogue=lambda acc: acc + 1)


def test_linear_passes_it_on_and_the_backward_pass_does_not(seen):
    x, weight = torch.ones(3, 8, requires_grad=True), torch.ones(5, 8, requires_grad=True)
    for given in (x, x[None], x[0], x[:, None]):
        cutegemm.linear(given, weight, constant_weight=True).sum().backward()
    cutegemm.linear(x, weight[0], constant_weight=True)
    assert "b" in seen
    seen.clear()
    call.memo.clear()
    cutegemm.linear(x, weight, constant_weight=True).sum().backward()
    assert seen == ["b", None, None]
    seen.clear()
    cutegemm.linear(x, weight)
    assert seen == [None]


def test_layers(seen):
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    assert not cutegemm.nn.replace_linears(torch.nn.Sequential(torch.nn.Linear(8, 4)))[0].constant_weight
    cutegemm.nn.replace_linears(model, constant_weights=True)
    assert all(layer.constant_weight for layer in (model[0], model[2]))
    assert "constant_weight=True" in repr(model[0])
    assert "constant_weight" not in repr(cutegemm.nn.Linear(8, 4))
    model(torch.ones(3, 8))
    assert seen == ["b", "b"]


def test_what_is_cast_or_mapped_is_not_constant(seen):
    x, weight = torch.ones(3, 8), torch.ones(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cutegemm.linear(x, weight, constant_weight=True)
        cutegemm.linear(x, weight.bfloat16(), constant_weight=True)
        cutegemm.gemm(x.bfloat16(), weight.t(), constant="a")
    assert seen == [None, "b", "a"]
    seen.clear()
    torch.vmap(lambda each: cutegemm.linear(each, weight, constant_weight=True))(torch.ones(2, 3, 8))
    torch.vmap(lambda each: cutegemm.linear(x, each, constant_weight=True))(torch.ones(2, 5, 8))
    assert set(seen) == {None}


def test_the_operator_and_torch_compile(seen):
    a, b = torch.ones(4, 6), torch.ones(6, 5)
    opcheck(torch.ops.cutegemm.gemm.default, (a, b), {"constant": "b"})
    opcheck(
        torch.ops.cutegemm.gemm_out.default,
        (a, b, None, 1.0, 0.0, None, None, None, "auto", None, torch.empty(4, 5), "a"),
    )
    seen.clear()
    call.memo.clear()
    torch._dynamo.reset()
    step = torch.compile(
        lambda x, w: cutegemm.linear(x, w, constant_weight=True) + 1, fullgraph=True, backend="aot_eager"
    )
    assert (step(a, b.t().contiguous()) == 7).all()
    assert seen == ["b"]
    with pytest.raises(Exception, match="constant: got 'c'"):
        torch.compile(lambda x, y: cutegemm.gemm(x, y, constant="c"), fullgraph=True, backend="aot_eager")(a, b)


def test_calls_with_and_without_are_remembered_apart(seen):
    a, b = torch.ones(4, 6), torch.ones(6, 5)
    for constant in (None, "b", "a", None, "b", "a"):
        cutegemm.gemm(a, b, constant=constant)
    assert seen == [None, "b", "a"]
    cutegemm.prepare(a, b, constant="b")
    assert seen[3:] == ["b"]


@pytest.mark.parametrize(
    ("arch", "dtype", "precision", "majors", "n", "used"),
    [
        ("H200", "bf16", "ieee", "tn", 4096, True),
        ("H200", "fp16", "ieee", "nt", 4096, True),
        ("H200", "bf16", "ieee", "tt", 4095, False),  # TMA does not take this B
        ("H200", "e4m3", "ieee", "tn", 16, True),
        ("H200", "e4m3", "ieee", "tn", 17, False),  # it would cost time
        ("H200", "fp32", "tf32", "tn", 4096, True),
        ("H200", "fp32", "tf32", "tt", 4096, False),
        ("H200", "fp32", "ieee", "tn", 4096, False),
        ("H200", "fp32", "tf32x3", "tn", 4096, False),
        ("H200", "fp64", "ieee", "tn", 4096, False),
        ("A100", "bf16", "ieee", "tn", 4096, False),
    ],
)
@pytest.mark.product(keep=3)
def test_a_promise_is_measured_where_a_kernel_that_the_tuner_tries_uses_it(arch, dtype, precision, majors, n, used):
    gpu, cute = arch_table.get(arch), backends.get("cute")
    problem = Problem.of(16, n, 4096, dtype, majors=majors, precision=precision, constant="a")
    assert planning.measured(problem, gpu) == (problem if used else problem.without_constant())
    assert any(cute.uses_constant(config, problem) for config in cute.configs(problem, gpu)) == used
