"""`gemm(..., constant=)` with an epilogue and with scales, and the layers that are made of such calls."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

import cutegemm
from cutegemm import backend as backends
from cutegemm import ops
from cutegemm.choice import plan as planning
from cutegemm.hardware import arch as arch_table
from cutegemm.nn import Fp8Linear, SwiGLU, replace_linears, replace_mlps
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.graph import Input
from cutegemm.problem.program.known import lookup
from cutegemm.problem.scaling import scaled as with_scales
from cutegemm.pytorch import program_operator, programs, scaled
from cutegemm.run import call, fused, runner
from cutegemm.run.how import How, passed, refuse_promise
from cutegemm.run.runner import Call
from cutegemm.winners import Measurement, Winners, table
from cutegemm.winners.fingerprint import fingerprint
from tests.unit.test_constant import Built, operands
from tests.unit.test_torch_mlp import MLP

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
H200 = arch_table.get("H200")
CUTE = backends.get("cute")
PDL, PLAIN = "sm90/64x64x128/coop1/c1x1/s3/serp8/pdl", "sm90/64x64x128/coop1/c1x1/s3/serp8"
DEEP = "sm90/64x16x128/coop1/c1x1/s16/row/swap/pdl"


def scales(recipe: str, m: int, n: int, k: int) -> dict[str, torch.Tensor]:
    blocks = -(-k // 128)
    shapes = {"rows": ((m, 1), (1, n)), "tensor": ((), ()), "blocks": ((m, blocks), (blocks, -(-n // 128)))}
    return {name: torch.ones(shape) for name, shape in zip(("scale_a", "scale_b"), shapes[recipe], strict=True)}


def eight_bits(m=16, n=128, k=256, dtype=E4M3):
    return operands(m, n, k, dtype)


CALLS = {
    "epilogue": (operands, {"epilogue": lambda acc: ops.relu(acc) + 1}),
    "swiglu": (operands, {"epilogue": ops.swiglu}),
    "operand": (operands, {"epilogue": lambda acc, x: ops.silu(acc) * x, "operands": (torch.ones(64, 128),)}),
    "rows": (eight_bits, scales("rows", 16, 128, 256)),
    "tensor": (eight_bits, scales("tensor", 16, 128, 256)),
    "blocks": (eight_bits, scales("blocks", 16, 128, 256)),
    "bias and rows": (eight_bits, {"bias": torch.ones(128), **scales("rows", 16, 128, 256)}),
    "swiglu and rows": (eight_bits, {"epilogue": ops.swiglu, **scales("rows", 16, 128, 256)}),
    "swiglu and blocks": (eight_bits, {"epilogue": ops.swiglu, **scales("blocks", 16, 128, 256)}),
    "int8": (functools.partial(eight_bits, dtype=torch.int8), scales("rows", 16, 128, 256)),
}  # fmt: skip


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """The plan of a call on CPU tensors for an H200, without compiling, and without winners but the test's own."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUTEGEMM_WINNERS", raising=False)
    monkeypatch.setattr(table, "shipped", lambda gpu, sm_count: {})
    monkeypatch.setattr(type(CUTE), "build", lambda self, *given: Built(*given))
    monkeypatch.setattr(type(CUTE), "preparer", lambda self, asked, arch: None)
    monkeypatch.setattr(runner.spills, "spilled", lambda *given: 0)
    monkeypatch.setattr(runner, "_kernels", planning.Memo(8))
    monkeypatch.setattr(fused, "_emulated_core", lambda plan, asked: None)
    fused.memo.clear()

    def plan(a, b, **options):
        return programs.plan_of(*scaled.unscaled(a, b, None, {"backend": "cute", **options}))

    yield plan
    fused.memo.clear()


@pytest.fixture
def seen(monkeypatch):
    """The promises of the calls that are planned."""
    found: list[str | None] = []
    posed = Call.posed.__func__  # type: ignore[attr-defined]

    def recorded(cls, asked, how):
        found.append(how.constant)
        return posed(cls, asked, how)

    monkeypatch.setattr(Call, "posed", classmethod(recorded))
    forget()
    yield found
    forget()


def forget() -> None:
    call.memo.clear()
    fused.memo.clear()
    programs._recorded.clear()


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_knows_the_promise_and_the_choice_does_not(planned, name):
    tensors, options = CALLS[name]
    a, b = tensors()
    made, plain = planned(a, b, config=PDL, constant="b", **options), planned(a, b, config=PDL, **options)
    assert made.kernel.signature == replace(plain.kernel.signature, constant="b")
    assert made.problem == plain.problem
    assert made.problem.constant == ""
    assert made.choice == plain.choice, "a configuration asked for stays as it is"
    assert "B: its first tiles are loaded while" in planning.describe(made)
    assert "constant" not in planning.describe(plain)
    other = planned(a, b, config=PDL, constant="a", **options)
    assert other.constant == "a"
    assert other.kernel.signature.constant == ("a" if a.element_size() > 1 else ""), (
        "beside more than 16 columns of bytes"
    )
    unused = planned(a, b, config=PLAIN, constant="b", **options)
    assert unused.kernel.signature.constant == ""
    assert "this kernel makes no use of the promise" in planning.describe(unused)


@pytest.mark.parametrize("name", ["rows", "swiglu and rows", "blocks", "int8"])
def test_a_transposing_copy_is_not_constant(planned, name):
    tensors, options = CALLS[name]
    a, b = tensors()
    made = planned(a, b.contiguous(), constant="b", **options)
    assert [copied for copied, _ in made.copies] == ["b"]
    assert (made.constant, made.kernel.signature.constant) == ("", "")
    assert planned(a, b.contiguous(), constant="a", **options).constant == "a"


def test_a_packed_operand_is_not_constant(planned):
    a, b = torch.ones(2048, 4096, dtype=BF16), torch.ones(4096, 2049, dtype=BF16)
    made = planned(a, b, constant="b", epilogue=ops.silu)
    assert [each.operand for each, _ in made.preparations] == ["b"]
    assert made.kernel.signature.constant == ""


def test_a_kernel_that_the_promise_alone_makes_spill_is_not_taken(planned, monkeypatch):
    """It makes no use of the promise then, and the configuration stays."""
    stacks = {"b": 16, "": 0}

    def spilled(problem, kernel, config, backend, arch):
        return stacks[kernel.signature.constant]

    monkeypatch.setattr(runner.spills, "spilled", spilled)
    a, b = operands()
    chosen = planned(a, b, epilogue=ops.swiglu).choice
    for config in (PDL, None):
        made = planned(a, b, config=config, constant="b", epilogue=ops.swiglu)
        assert made.kernel.signature.constant == ""
        assert str(made.choice.config) == (config or str(CUTE.for_constant(chosen.config, made.problem, H200)))
        assert "spill" not in made.choice.why
    stacks[""] = 16
    fused.memo.clear()
    runner._kernels.clear()
    with pytest.raises(cutegemm.UnsupportedError, match="spills 16 bytes"):
        planned(a, b, config=PDL, constant="b", epilogue=ops.swiglu)


def test_lighter_candidates_in_the_place_of_one_that_spills_are_any(planned, monkeypatch):
    """They need not take packed operands, since none is packed."""
    answers = []

    def settled(problem, choice, arch, build, suits):
        answers.append(suits(CUTE.parse("sm80/128x128x32/w64x64/s4/g8")))
        return choice, build(choice.config)[0]

    monkeypatch.setattr(runner.spills, "settled", settled)
    for constant in (None, "b"):
        planned(*operands(), constant=constant, epilogue=ops.swiglu)
    assert answers == [True, True]


def problem(epilogue=None, recipe="", dtype="e4m3", m=16, n=4096, k=4096, constant="b"):
    program = lookup(epilogue or (lambda acc: acc), ())
    program = replace(program, outputs=tuple(each._replace(dtype="bf16") for each in program.outputs))
    sides = {
        "rows": (Input("", "fp32", m=True), Input("", "fp32", n=True)),
        "blocks": (Input("", "fp32", scales="a1"), Input("", "fp32", scales="b128")),
        "columns": (Input("", "fp32", scales="a1"), Input("", "fp32", scales="b1")),
    }
    program = with_scales(program, *sides[recipe]) if recipe else program
    more = len(program.outputs) - 1
    epilogue = Epilogue(custom=program, aligns=(16,) * more)
    found = Problem.of(m, n, k, dtype, out_dtype="bf16", epilogue=epilogue, constant=constant)
    return replace(found, outputs=(found.d,) * more)


def two(acc):
    return acc, acc + 1


@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "int8"])
@pytest.mark.parametrize("recipe", ["", "rows", "blocks", "columns"])
@pytest.mark.parametrize("epilogue", [None, ops.swiglu, two], ids=["plain", "swiglu", "two"])
def test_a_deeper_ring_leaves_room_for_a_program_and_for_scales(dtype, recipe, epilogue):
    if (recipe != "") == (dtype == "bf16") or (dtype == "int8" and epilogue is two):
        return
    asked = problem(epilogue, recipe, dtype)
    deepened = 0
    for config, _ in CUTE.candidates(asked.signature, H200):
        if CUTE.check(config, asked, H200) is None:
            found = CUTE.for_constant(config, asked, H200)
            assert CUTE.check(found, asked, H200) is None, (str(config), str(found))
            assert found.stages >= config.stages
            deepened += found.stages > config.stages
            more = replace(found, stages=found.stages + 1)
            full = found.stages == 16 or more.smem_bytes(asked.signature) > H200.smem_per_cta
            assert found.stages == config.stages or full or found.stages * found.bk * found.parts >= asked.k
    assert deepened


@pytest.mark.parametrize("name", ["swiglu", "epilogue", "rows", "blocks", "swiglu and rows", "swiglu and blocks"])
def test_what_was_chosen_without_the_promise_makes_use_of_it(planned, name):
    """No winner is known."""
    of_call, options = CALLS[name]
    m, n, k = 16, 4096, 4096
    a, b = of_call(m, n, k)
    if "scale_a" in options:
        options = {**options, **scales("blocks" if "blocks" in name else "rows", m, n, k)}
    plain, promised = (planned(a, b, constant=constant, **options) for constant in (None, "b"))
    deeper = CUTE.for_constant(plain.choice.config, replace(plain.problem, constant="b"), H200)
    assert promised.choice.config == deeper
    assert deeper.stages > plain.choice.config.stages or name in ("swiglu", "epilogue"), "theirs are deep already"
    assert promised.kernel.signature.constant == "b"


def measured(problem, config, seconds):
    return Measurement("H200", 132, str(problem), "cute", config, fingerprint("cute", config), seconds, "ok")


def test_winners_with_and_without_the_promise_serve_calls_with_scales(planned):
    """The winner of the plain product with the promise comes first, then any without."""
    plain, promised = (Problem.of(16, 4096, 4096, "e4m3", constant=constant) for constant in ("", "b"))
    a, b = eight_bits(16, 4096, 4096)
    options = scales("rows", 16, 4096, 4096)
    near = DEEP.replace("s16", "s5")
    Winners().record(measured(plain, near, 1e-6))
    deeper = planned(a, b, constant="b", **options).choice
    assert deeper.config.stages > 5
    assert replace(deeper.config, stages=5) == CUTE.parse(near)
    assert deeper.why == f"tuned winner of the plain product, own: 1.0 us, of {near}, which runs without the promise"
    other = "sm90/64x16x128/coop1/c1x2/s9/row/swap/pdl"
    Winners().record(measured(promised, other, 1e-6))
    found = planned(a, b, constant="b", **options).choice
    assert str(found.config) == other
    assert found.why == "tuned winner of the plain product with a constant B, own: 1.0 us"
    assert str(planned(a, b, **options).choice.config) == near


def test_bad_promises_are_refused(seen):
    for tensors, options in CALLS.values():
        for bad in ("c", "B", True, ["b"]):
            with pytest.raises(ValueError, match=r"constant: got .*, accepted are None, 'a' and 'b'"):
                cutegemm.gemm(*tensors(), constant=bad, **options)
    with pytest.raises(ValueError, match=r"constant: got 'c', accepted are None, 'a' and 'b'"):
        cutegemm.gemm(*eight_bits(), accumulate="fast", constant="c")
    cutegemm.gemm(*eight_bits(), accumulate="fast", constant="b")
    with pytest.raises(TypeError, match="constant"):
        cutegemm.grouped_gemm(torch.ones(4, 8), torch.ones(1, 8, 6), torch.tensor([4]), constant="b")


def test_calls_with_and_without_are_remembered_apart(seen):
    for tensors, options in CALLS.values():
        a, b = tensors()
        forget()
        seen.clear()
        for constant in (None, "b", "a", None, "b", "a"):
            cutegemm.gemm(a, b, constant=constant, **options)
        assert seen == [None, "b", "a"]
        cutegemm.prepare(a, b, constant="b", **options)
        cutegemm.explain(a, b, constant="b", **options)
        assert set(seen[3:]) <= {"b"}


@pytest.mark.parametrize("save", ["outputs", "recompute"])
def test_the_backward_pass_of_a_program_makes_no_promise(seen, save):
    a, b = (torch.ones(*shape, requires_grad=True) for shape in ((4, 6), (6, 8)))
    for _ in range(2):
        cutegemm.gemm(a, b, epilogue=ops.swiglu, save=save, constant="b").sum().backward()
    assert seen[0] == "b"
    assert seen.count("b") == 1
    assert len(seen) > 2


def test_what_is_cast_or_mapped_is_not_constant(seen):
    x, weight = torch.ones(3, 8), torch.ones(6, 8)
    with torch.autocast("cpu", dtype=BF16):
        cutegemm.gemm(x, weight.t(), constant="b", epilogue=ops.swiglu)
        cutegemm.gemm(x, weight.bfloat16().t(), constant="b", epilogue=ops.swiglu)
        cutegemm.gemm(x.bfloat16(), weight.t(), constant="a", epilogue=ops.swiglu)
        assert seen == [None, "b", "a"]
        torch.ops.cutegemm.gemm_program(x, weight.t(), [], [], [], lookup(ops.silu, ()).text, constant="b")
        cutegemm.gemm(*eight_bits(), constant="b", **scales("rows", 16, 128, 256))
        assert seen[3:] == [None, "b"]
    seen.clear()
    forget()
    for each, dims in (((x[None], weight.t()), (0, None)), ((x, weight.t()[None]), (None, 0))):
        torch.vmap(functools.partial(cutegemm.gemm, constant="b", epilogue=ops.silu), in_dims=dims)(*each)
    assert set(seen) == {None}
    with pytest.raises(NotImplementedError, match="vmap is not supported with scales"):
        torch.vmap(lambda a, b: cutegemm.gemm(a, b, scale_a=torch.ones(()), constant="b"), in_dims=(0, None))(
            eight_bits()[0][None], eight_bits()[1]
        )


def test_the_operators(seen):
    a, b = torch.ones(4, 6), torch.ones(6, 8)
    text = lookup(ops.swiglu, ()).text
    opcheck(torch.ops.cutegemm.gemm_program.default, (a, b, [], [], [], text), {"constant": "b"})
    opcheck(
        torch.ops.cutegemm.gemm_program_out.default,
        (a, b, [], [], [], text, None, "auto", None, [torch.empty(4, 4)], "a"),
    )
    tests = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    a, b = eight_bits(4, 6, 8)
    given = a, b, *scales("rows", 4, 6, 8).values()
    seen.clear()
    opcheck(torch.ops.cutegemm.scaled_gemm.default, given, {"constant": "b"}, test_utils=tests)
    opcheck(
        torch.ops.cutegemm.scaled_gemm_program.default, (*given, None, [], [], [], text), {"constant": "b"},
        test_utils=tests,
    )  # fmt: skip
    assert set(seen) == {"b"}
    programs_of = {
        "gemm_program": ([], [], [], text), "scaled_gemm_program": (None, None, None, [], [], [], text)
    }  # fmt: skip
    for operator, more in programs_of.items():
        with torch._subclasses.FakeTensorMode() as mode, pytest.raises(ValueError, match="constant: got 'c'"):
            getattr(torch.ops.cutegemm, operator)(*map(mode.from_tensor, (a, b)), *more, constant="c")


@pytest.mark.parametrize("name", ["swiglu", "operand", "rows", "swiglu and blocks"])
def test_torch_compile_passes_the_promise_on(seen, name):
    tensors, options = CALLS[name]
    a, b = tensors()
    torch._dynamo.reset()
    step = torch.compile(lambda a, b: cutegemm.gemm(a, b, constant="b", **options) + 1, fullgraph=True,
                         backend="aot_eager")  # fmt: skip
    got = step(a, b)
    assert seen == ["b"]
    assert torch.equal(got, cutegemm.gemm(a, b, **options) + 1)
    with pytest.raises(Exception, match="constant: got 'c'"):
        torch.compile(
            lambda a, b: cutegemm.gemm(a, b, constant="c", **options), fullgraph=True, backend="aot_eager"
        )(a, b)  # fmt: skip


def test_swiglu_makes_the_promise_of_both_weights_in_forward_passes(seen):
    layer = SwiGLU(8, 12, constant_weights=True)
    assert "constant_weights=True" in repr(layer)
    assert "constant_weights" not in repr(SwiGLU(8, 12))
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        layer(x)
    assert seen == ["b", "b"]
    forget()
    seen.clear()
    layer(x).sum().backward()
    assert seen[:2] == ["b", "b"]
    assert set(seen[2:]) == {None}
    assert len(seen) > 5
    forget()
    seen.clear()
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert seen[:2] == ["b", "b"]
    grad.sum().backward()
    assert set(seen[2:]) == {None}
    forget()
    seen.clear()
    SwiGLU(8, 12)(x).sum().backward()
    assert set(seen) == {None}


def test_swiglu_drops_the_promise_of_weights_that_are_copied_or_cast(seen):
    x = torch.randn(3, 8)
    layer = SwiGLU(8, 12, constant_weights=True)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=BF16):
            layer(x)
            layer.bfloat16()(x.bfloat16())
        assert seen == [None, None, "b", "b"]
        layer = SwiGLU(8, 12, constant_weights=True)
        for weight, want in (
            (layer.gate_up_weight.view(2, 12, 8), "b"),
            (layer.gate_up_weight.view(2, 12, 8).transpose(1, 2).contiguous().transpose(1, 2), None),
        ):
            forget()
            seen.clear()
            layer.gate_up_weight = torch.nn.Parameter(weight)
            layer(x)
            assert seen == [want, want]
        forget()
        seen.clear()
        stacked = SwiGLU(8, 12, constant_weights=True)
        torch.vmap(stacked)(x[None])
        assert set(seen) == {None}
        torch._dynamo.reset()
        forget()
        seen.clear()
        assert torch.compile(stacked, fullgraph=True, backend="aot_eager")(x).shape == (3, 8)
        assert seen == ["b", "b"]


@pytest.mark.parametrize("scaling", ["rows", "tensor", "blocks"])
def test_quantized_layers_make_the_promise(seen, scaling):
    layer = Fp8Linear(256, 48, scaling=scaling, constant_weight=True)
    assert "constant_weight=True" in repr(layer)
    assert "constant_weight" not in repr(Fp8Linear(8, 4))
    x = torch.randn(2, 3, 256)
    got = layer(x)
    assert seen == ["b"]
    layer.load_state_dict(torch.nn.Linear(256, 48).state_dict())
    assert layer.settings.constant_weight
    layer = Fp8Linear.from_quantized(layer.weight, layer.weight_scale, bias=layer.bias, constant_weight=True)
    torch._dynamo.reset()
    seen.clear()
    forget()
    assert torch.compile(layer, fullgraph=True, backend="aot_eager")(x).shape == got.shape
    assert seen == ["b"]
    made = Fp8Linear.from_linear(torch.nn.Linear(8, 4), constant_weight=True)
    assert made.settings.constant_weight
    assert not Fp8Linear.from_linear(torch.nn.Linear(8, 4)).settings.constant_weight


def test_replacements_pass_the_promise_on(seen):
    for promised in (True, False):
        options = {"constant_weights": True} if promised else {}
        linears = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        replace_linears(linears, dtype="fp8", **options)
        mlps = torch.nn.Sequential(MLP(torch.nn.SiLU()), MLP(torch.nn.GELU()))
        replace_mlps(mlps, **options)
        assert [each.settings.constant_weight for each in (linears[0], linears[2])] == [promised] * 2
        assert [each.settings.constant_weights for each in mlps] == [promised] * 2
        seen.clear()
        forget()
        with torch.no_grad():
            linears(torch.ones(3, 8))
            mlps(torch.ones(3, 24))
        assert set(seen) == {"b" if promised else None}


def test_a_promise_about_weights_is_true_or_false():
    linears, mlps = torch.nn.Sequential(torch.nn.Linear(8, 4)), torch.nn.Sequential(MLP(torch.nn.SiLU()))
    for make, name in (
        (lambda bad: SwiGLU(8, 4, constant_weights=bad), "constant_weights"),
        (lambda bad: SwiGLU.from_weights(*(torch.ones(4, 4),) * 3, constant_weights=bad), "constant_weights"),
        (lambda bad: replace_mlps(mlps, constant_weights=bad), "constant_weights"),
        (lambda bad: replace_linears(linears, dtype="fp8", constant_weights=bad), "constant_weights"),
        (lambda bad: Fp8Linear(8, 4, constant_weight=bad), "constant_weight"),
        (lambda bad: Fp8Linear.from_linear(linears[0], constant_weight=bad), "constant_weight"),
    ):
        for bad in ("b", 1, None):
            with pytest.raises(TypeError, match=f"^{name}: got {type(bad).__name__}, accepted are True and False"):
                make(bad)
    assert type(mlps[0]) is MLP
    assert type(linears[0]) is torch.nn.Linear


def test_dtensors_are_refused():
    for name, given in (("constant", "b"), ("constant_weights", True)):
        with pytest.raises(ValueError, match=f"^{name}: got {given!r} with DTensors"):
            refuse_promise(name, given)
    refuse_promise("constant", None)
    refuse_promise("constant_weights", False)
    with pytest.raises(ValueError, match="constant: got 'b' with DTensors"):
        program_operator._sharded(None, None, [], [], [], lookup(ops.silu, ()).text, None,
                                  *passed(How(constant="b"), "outputs"))  # fmt: skip
