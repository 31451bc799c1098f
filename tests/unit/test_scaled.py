"""Scaled operands: which recipe a shape says, what is refused, and torch's backend against the reference."""

from __future__ import annotations

import re

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import cutegemm
from cutegemm import backend, ops
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch
from cutegemm.problem import Problem, reference, request, scales, text
from cutegemm.problem.program.text import parse
from cutegemm.problem.rounding import rounded
from cutegemm.pytorch import compiled, program_operator, scaled
from tests.scaled import check

M, N, K = 300, 200, 500
A = torch.zeros(M, K).to(torch.float8_e4m3fn)
B = torch.zeros(N, K).to(torch.float8_e5m2).t()


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "expected"),
    [
        ((), (), ("tensor", "tensor")),
        ((1,), (1, 1), ("tensor", "tensor")),
        ((M, 1), (1, N), ("rows", "rows")),
        ((M, 1), (), ("rows", "tensor")),
        ((M, 4), (4, 2), ("a1", "b128")),
        ((3, 4), (4, N), ("a128", "b1")),
        ((M, 4), (1, N), ("a1", "rows")),
    ],
)
def test_the_shape_says_the_recipe(shape_a, shape_b, expected):
    found = scales.recipes(A, B, torch.ones(shape_a), torch.ones(shape_b), None)
    assert tuple(each.input.scales or each.name for each in found) == expected
    assert scales.recipes(A, B, None, torch.ones(shape_b), None)[0] is None


def test_a_shape_of_two_recipes_takes_the_cheaper_which_means_the_same():
    """K of one block: scales of rows are those of blocks, and may be named either way."""
    a, b = A[:, :100], B[:100]
    for scaling in (None, "rows", "blocks", ("blocks", "rows")):
        found = scales.recipes(a, b, torch.ones(M, 1), torch.ones(1, N), scaling)
        assert [each.name for each in found] == ["rows", "rows"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"scale_a": torch.ones(M)}, ValueError, r"scale_a: got shape \(300,\); .*\(300, 1\) \(rows\), \(300, 4\)"),
        ({"scale_a": torch.ones(M, 5)}, ValueError, r"scale_a: got shape \(300, 5\)"),
        ({"scale_b": torch.ones(N, 1)}, ValueError, r"scale_b: got shape \(200, 1\); .*\(1, 200\) \(rows\), \(4, 2\)"),
        ({"scale_a": torch.ones(2, M, 1)}, ValueError, "scale_a: .* a batch of 1"),
        ({"scale_a": 1.0}, TypeError, "scale_a: got float, expected a torch.Tensor"),
        ({"scale_a": torch.ones(M, 1).half()}, TypeError, "scale_a: got dtype torch.float16, accepted"),
        ({"scale_a": torch.ones(()), "scaling": "rows"}, ValueError, r"accepted are \(300, 1\) \(rows\)"),
        ({"scaling": "rows"}, ValueError, "scaling: got 'rows' without scale_a and scale_b"),
        (
            {"scale_a": torch.ones(()), "scaling": ("tensor", "rows")}, ValueError,
            r"scale_b: got None with scaling=\('tensor', 'rows'\); pass it, or None in its place",
        ),
        ({"scale_a": torch.ones(()), "scaling": "mx"}, ValueError, "scaling: got 'mx', accepted are None, 'tensor'"),
        ({"accumulate": "fast", "scale_a": torch.ones(M, 4)}, ValueError, r"accumulate: got 'fast' with scales"),
        ({"accumulate": "slow"}, ValueError, "accumulate: got 'slow', accepted are None, 'promoted', 'fast'"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype: got dtype torch.int32, .* products of torch.int8"),
        ({"scale_a": torch.ones((), requires_grad=True)}, ValueError, "scale_a: it requires grad, .*detached"),
        ({"scale_a": torch.ones(()), "bias": torch.ones(N, requires_grad=True)}, ValueError, "bias: it requires grad"),
    ],
)  # fmt: skip
def test_bad_arguments(given, error, message):
    with pytest.raises(error, match=message):
        cutegemm.gemm(A, B, **given)


def test_what_other_operands_do_not_take():
    x = torch.zeros(4, 4)
    with pytest.raises(TypeError, match=r"scale_a: a has dtype torch\.float32; scales are for torch\.float8_e4m3fn"):
        cutegemm.gemm(x, x, scale_a=torch.ones(()))
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=rf"accumulate: got 'fast' for {dtype}, whose sums are never promoted"):
            cutegemm.gemm(x.to(dtype), x.to(dtype), accumulate="fast")
    with pytest.raises(TypeError, match=r"b: got dtype torch\.int8, accepted with float8_e4m3fn are float8_e4m3fn, fl"):
        cutegemm.gemm(A, torch.zeros(K, N, dtype=torch.int8))
    with pytest.raises(TypeError, match=r"c: got dtype torch\.float8_e4m3fn, accepted are torch\.float16"):
        cutegemm.gemm(x, x, torch.zeros(4, 4).to(torch.float8_e4m3fn), beta=1.0)
    with pytest.raises(ValueError, match=r"no gradients"):
        cutegemm.gemm(A.float().to(torch.float8_e4m3fn).requires_grad_(), B)


@pytest.mark.parametrize("accumulate", [None, "fast"])
@pytest.mark.parametrize("recipes", [("tensor", "rows"), ("rows", "blocks128"), ("blocks", "blocks"), (None, None)])
@pytest.mark.parametrize("kinds", [("e4m3", "e5m2"), ("int8", "int8")])
def test_torch_computes_every_recipe(kinds, recipes, accumulate, seed):
    if accumulate and (kinds[0] == "int8" or "blocks" in str(recipes)):
        pytest.skip("sums of int8 are exact, and scales of blocks are applied at promotions")
    options = {} if recipes == (None, None) else {"bias": True, "alpha": 0.5, "activation": "relu"}
    check(70, 150, 300, a=kinds[0], b=kinds[1], recipes=recipes, seed=seed, options=options, accumulate=accumulate)
    if recipes == ("rows", "blocks128"):
        check(70, 150, 300, a=kinds[0], recipes=recipes, seed=seed, batch=3, out_dtype=torch.float32)


def test_sums_of_int8_are_exact_and_take_no_alpha():
    a = torch.full((2, 2**16), -128, dtype=torch.int8)
    assert cutegemm.gemm(a, a.t()).tolist() == [[2**30] * 2] * 2
    with pytest.raises(ValueError, match=r"out_dtype: got torch\.int32 .* with alpha"):
        cutegemm.gemm(a, a.t(), alpha=2.0, backend="torch")
    assert cutegemm.gemm(a, a.t(), alpha=2.0**-30, out_dtype=torch.bfloat16).tolist() == [[1.0] * 2] * 2


def test_alpha_of_a_remembered_int32_product_is_looked_at(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    a, b = torch.ones(4, 32, dtype=torch.int8), torch.ones(16, 32, dtype=torch.int8).t()
    given = {"backend": "cute", "config": "sm90/64x16x32/coop1/c1x1/s2/row"}
    assert (cutegemm.gemm(a, b, **given) == 32).all()
    with pytest.raises(ValueError, match=r"alpha: got 2\.0 with D in torch\.int32"):
        cutegemm.gemm(a, b, alpha=2.0, **given)


def test_gated_programs_have_the_scales_of_both_halves(seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(40, 96, generator=generator).to(torch.float8_e4m3fn)
    b = torch.randn(64, 96, generator=generator).to(torch.float8_e4m3fn).t()
    scale_a, scale_b = torch.rand(40, 1, generator=generator), torch.rand(1, 64, generator=generator)
    exact = (a.float() * scale_a) @ (b.float() * scale_b)
    for gating, parts in (("halves", exact.chunk(2, -1)), ("pairs", (exact[:, 0::2], exact[:, 1::2]))):

        def gated(acc, gating=gating):
            gate, up = getattr(ops, gating)(acc)
            return gate * up

        got = cutegemm.gemm(a, b, scale_a=scale_a, scale_b=scale_b, epilogue=gated, out_dtype=torch.float32)
        assert torch.allclose(got, parts[0] * parts[1], rtol=1e-4, atol=1e-4)


def test_texts_are_read_back():
    for given in ({}, {"b_dtype": "e5m2"}, {"precision": "fast", "out_dtype": "e4m3"}):
        problem = Problem.of(64, 48, 80, "e4m3", **given)
        assert text.parse(str(problem)) == problem
        assert problem.transposed().transposed() == problem
    assert str(Problem.of(64, 48, 80, "e5m2", b_dtype="e4m3").signature).startswith("e5m2*e4m3->bf16/ieee/")
    for line in ("fp32[A, 1, 128]", "fp32[L, A, 128, 128]", "fp32[B, 128, 128]", "fp32[L, B, 1, 128]"):
        written = f"def epilogue(acc, x0: {line}): return acc"
        assert parse(written).text == written


def test_packing_is_named_and_leaves_what_lies_right():
    def copies(a, b):
        return request.describe(a, b, None, 1.0, 0.0, None, None, None, None, None).copies

    wide = torch.zeros(40, 112, dtype=torch.int8)
    assert copies(wide[:, :100], wide[:24, :100].t()) == ()  # rows begin at multiples of 16 bytes, whatever K
    ((name, why),) = copies(wide, torch.zeros(112, 16, dtype=torch.int8))
    assert name == "b"
    assert "along K" in why
    assert [name for name, _ in copies(wide[:, 1:], wide[:24, :111].t())] == ["a"]
    # The transposed problem of a column-major D packs what the caller calls so.
    out = torch.empty(24, 40, dtype=torch.int32).t()
    asked = request.describe(wide[:, 1:101], wide[:24, :100].t(), None, 1.0, 0.0, None, None, out, None, None)
    assert (asked.swapped, [name for name, _ in asked.copies]) == (True, ["a"])


def test_results_of_one_byte_saturate():
    x = torch.tensor([1e9, -1e9, float("inf"), float("nan"), 0.5, 1.5, 17.0])
    assert rounded(x, "int8").tolist() == [127, -128, 127, 0, 0, 2, 17]
    assert rounded(x, "e4m3").float()[:3].tolist() == [448.0, -448.0, 448.0]
    assert rounded(x, "e5m2").float()[2] == 57344.0
    assert rounded(x, "e4m3").float().isnan().tolist() == [False] * 3 + [True] + [False] * 3
    got = cutegemm.gemm(torch.full((1, 1), 30.0), torch.full((1, 1), 30.0), out_dtype=torch.float8_e4m3fn)
    assert got.float().item() == 448.0


def test_the_reference_saturates_integers_as_kernels_do():
    a = torch.tensor([[-3.0], [3.0], [0.25], [float("nan")]]).mul(100)
    got = cutegemm.gemm(a, torch.ones(1, 1), out_dtype=torch.int8)
    assert got.flatten().tolist() == [-128, 127, 25, 0]
    want = reference.expected(a, torch.ones(1, 1), out_dtype=torch.int8)
    verdict = reference.check(got, want)
    assert verdict.ok, verdict.message
    assert not reference.check(got + torch.tensor([[1], [0], [0], [0]], dtype=torch.int8), want).ok
    assert not reference.check(got + torch.tensor([[0], [0], [0], [1]], dtype=torch.int8), want).ok


def test_explain_says_what_runs(capsys, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    cutegemm.explain(A[:, :480], B[:480], scale_a=torch.ones(M, 4), scale_b=torch.ones(4, 2), backend="cute")
    said = capsys.readouterr().out
    assert re.search(r"fp32\[A, 1, 128\].*fp32\[B, 128, 128\]", said)
    assert "copied first: a" in said  # rows of 500 bytes


def test_the_operator_and_its_fake(seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(24, 40, generator=generator).to(torch.float8_e4m3fn)
    b = torch.randn(16, 40, generator=generator).to(torch.float8_e4m3fn).t()
    given = {"scale_a": torch.rand(24, 1, generator=generator), "scale_b": torch.rand(1, 16, generator=generator)}
    eager = cutegemm.gemm(a, b, bias=torch.ones(16), **given)
    assert eager.dtype == torch.bfloat16

    def layer(a, b, scale_a, scale_b):
        return cutegemm.gemm(a, b, bias=torch.ones(16), scale_a=scale_a, scale_b=scale_b) * 2

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(a, b, **given), eager * 2)
    with torch._subclasses.FakeTensorMode() as mode:
        x, y = mode.from_tensor(a), mode.from_tensor(b)
        assert cutegemm.gemm(x, y, scale_a=mode.from_tensor(torch.ones(()))).dtype == torch.bfloat16
        assert cutegemm.gemm(x, y).dtype == torch.bfloat16


def _gate_and_residual(acc, residual, factor):
    gate, up = cutegemm.ops.halves(acc)
    return cutegemm.ops.silu(gate) * up + factor * residual, gate


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
def test_programs_with_scales_stay_whole_in_a_graph(dtype, seed):
    torch.manual_seed(seed)
    a, b = (torch.randn(rows, 256).mul(3).to(dtype) for rows in (24, 16))
    scales = {"scale_a": torch.rand(24, 2), "scale_b": torch.rand(2, 1)} if dtype != torch.int8 else {
        "scale_a": torch.rand(24, 1), "scale_b": torch.rand(1, 16), "scaling": ("rows", "rows")}  # fmt: skip
    residual = torch.randn(24, 8)

    def layer(a, b, residual, factor):
        options = {"epilogue": _gate_and_residual, "operands": (residual, factor), **scales}
        first, gate = cutegemm.gemm(a, b.t(), **options)
        return first * 2, gate, cutegemm.gemm(a, b.t(), epilogue=cutegemm.ops.swiglu, **scales)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(a, b, residual, 0.5), layer(a, b, residual, 0.5), strict=True):
        assert got.dtype == want.dtype == torch.bfloat16
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
def test_opcheck(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(rows, 64, generator=generator).mul(3).to(dtype) for rows in (24, 16))
    scales = torch.rand(24, 1, generator=generator), torch.rand(1, 16, generator=generator)
    # torch compares tensors before and after by a function that it does not have for fp8.
    schema = () if dtype.is_floating_point else ("test_schema",)
    tests = *schema, "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    residual = torch.ones(24, 8)
    program = compiled.text_of(_gate_and_residual, (residual, 0.5))
    operators = torch.ops.cutegemm
    given = a, b.t(), *scales
    opcheck(operators.scaled_gemm.default, given, test_utils=tests)
    for recipes in (None, ["rows", "rows"]):
        more = recipes, *program_operator.divided((residual, 0.5)), program
        opcheck(operators.scaled_gemm_program.default, (*given, *more), test_utils=tests)


def test_programs_with_scales_are_exported_and_seen_by_modes(seed):
    """Non-strict export and FakeTensorMode run the eager path on tensors without memory."""
    torch.manual_seed(seed)
    a, b, scale = (
        torch.randn(8, 32).to(torch.float8_e4m3fn),
        torch.randn(16, 32).to(torch.float8_e4m3fn).t(),
        torch.rand(8, 1),
    )
    residual = torch.randn(8, 8)

    class Layer(torch.nn.Module):
        def forward(self, a, b, scale, residual):
            return cutegemm.gemm(a, b, scale_a=scale, epilogue=_gate_and_residual, operands=(residual, 0.5))

    rows = torch.export.Dim("rows", min=2, max=512)
    varies = {0: rows}, None, {0: rows}, {0: rows}
    exported = torch.export.export(Layer(), (a, b, scale, residual), strict=False, dynamic_shapes=varies)
    assert "cutegemm.scaled_gemm_program" in exported.graph_module.code
    for given in ((a, b, scale, residual), (a[:5], b, scale[:5], residual[:5])):
        for got, want in zip(exported.module()(*given), Layer()(*given), strict=True):
            assert torch.equal(got, want)
    with torch._subclasses.FakeTensorMode() as mode:
        gated = cutegemm.gemm(*map(mode.from_tensor, (a, b)), scale_a=mode.from_tensor(scale), epilogue=ops.swiglu)
    assert (gated.shape, gated.dtype) == ((8, 8), torch.bfloat16)
    out = torch.empty(8, 8)
    with FlopCounterMode(display=False) as counter:
        cutegemm.gemm(a, b, scale_a=scale, epilogue=ops.swiglu, out=out)
    assert counter.get_total_flops() == 2 * 8 * 16 * 32
    assert torch.equal(out, cutegemm.gemm(a, b, scale_a=scale, epilogue=ops.swiglu, out_dtype=torch.float32))


def test_vmap_of_programs_with_scales_is_refused_by_name_under_a_mode():
    a, b = torch.ones(2, 16, 32).to(torch.float8_e4m3fn), torch.ones(32, 16).to(torch.float8_e4m3fn)

    def layer(a):
        return cutegemm.gemm(a, b, scale_a=torch.ones(()), epilogue=lambda acc: acc * 2.0)

    with FlopCounterMode(display=False), pytest.raises(NotImplementedError, match=NO_VMAP):
        torch.vmap(layer)(a)


NO_VMAP = r"gemm, scaled_mm: torch\.vmap is not supported with scales; gemm takes a, b and their scales as batches"
A8, B8, ONE = torch.ones(2, 16, 32).to(torch.int8), torch.ones(32, 16).to(torch.int8), torch.ones(2)
MAPPED = {
    "a": (lambda a: cutegemm.gemm(a, B8, scale_a=ONE[0], scale_b=ONE[0]), A8),
    "a scale": (lambda scale: cutegemm.gemm(A8[0], B8, scale_a=scale), ONE),
    "a bias": (lambda bias: cutegemm.gemm(A8[0], B8, scale_a=ONE[0], bias=bias), torch.ones(2, 16)),
    "a with an epilogue": (lambda a: cutegemm.gemm(a, B8, scale_a=ONE[0], epilogue=ops.relu), A8),
    "scaled_mm": (lambda a: cutegemm.scaled_mm(a, B8, ONE[0], "TensorWise", ONE[0], "TensorWise"), A8),
}


@pytest.mark.parametrize("case", MAPPED)
def test_vmap_with_scales_is_refused_by_name(case):
    function, mapped = MAPPED[case]
    with pytest.raises(NotImplementedError, match=NO_VMAP):
        torch.vmap(function)(mapped)


def test_vmap_of_an_operand_beside_scales():
    rows = torch.arange(32.0).view(2, 16)
    given = {"scale_a": ONE[0], "epilogue": lambda acc, row: acc + row}
    got = torch.vmap(lambda row: cutegemm.gemm(A8[0], B8, operands=(row,), **given))(rows)
    assert torch.equal(got, torch.stack([cutegemm.gemm(A8[0], B8, operands=(row,), **given) for row in rows]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode calls it
def test_transforms_of_products_with_scales():
    """Derivatives are refused as without a transform; functionalize, which has none, serves."""
    scale = torch.full((16, 1), 0.5)

    def call(scale):
        return cutegemm.gemm(A8[0], B8, scale_a=scale, out_dtype=torch.float32)

    assert torch.equal(torch.func.functionalize(call)(scale), call(scale))
    with pytest.raises(ValueError, match="scale_a: it requires grad, and products of fp8 or int8"):
        torch.func.grad(lambda scale: call(scale).sum())(scale)
    with pytest.raises(NotImplementedError, match="a tensor carries a forward-mode tangent"):
        torch.func.jvp(call, (scale,), (scale,))
    with pytest.raises(ValueError, match=r"out: got a tensor with scales under .*vmap"):
        torch.vmap(lambda a: cutegemm.gemm(a, B8, scale_a=ONE[0], out=torch.empty(16, 16)))(A8)


def test_what_a_graph_refuses_of_programs_with_scales():
    a, b, one = torch.ones(8, 32).to(torch.int8), torch.ones(16, 32).to(torch.int8).t(), torch.ones(())

    def call(a, b, **options):
        return cutegemm.gemm(a, b, scale_a=one, epilogue=cutegemm.ops.swiglu, **options)

    for options, named in (
        ({"out": torch.empty(8, 8)}, "out: got a tensor with scales under torch.compile"),
        ({"save": "nothing"}, "save: got 'nothing'"),
        ({"bias": torch.ones(16)}, "epilogue: got one together with c"),
    ):
        with pytest.raises(Exception, match=named):
            torch.compile(call, backend="eager", fullgraph=True)(a, b, **options)


def test_an_empty_batch_has_its_scales():
    a, b = torch.ones(0, 4, 256).to(torch.int8), torch.ones(256, 16).to(torch.int8)
    for shape in ((), (4, 1), (0, 4, 1), (0, 4, 2)):
        for options in ({}, {"epilogue": ops.swiglu}):
            got = cutegemm.gemm(a, b, scale_a=torch.ones(shape), **options)
            assert got.shape == (0, 4, 8 if options else 16)
    with pytest.raises(ValueError, match=r"scale_a: got shape \(2, 4, 1\); .* a batch of 0"):
        cutegemm.gemm(a, b, scale_a=torch.ones(2, 4, 1))


def test_autocast_leaves_operands_of_one_byte_alone(seed):
    torch.manual_seed(seed)
    a, b = (torch.randn(4, 32).to(torch.float8_e4m3fn) for _ in range(2))
    scale, b = torch.tensor(0.5), b.t()
    plain = cutegemm.gemm(a, b), cutegemm.gemm(a, b, scale_a=scale, scale_b=scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = cutegemm.gemm(a, b), cutegemm.gemm(a, b, scale_a=scale, scale_b=scale)
    assert all(torch.equal(x, y) for x, y in zip(plain, cast, strict=True))


@pytest.mark.parametrize(("name", "value"), [("operands", (1.0,)), ("save", "outputs")])
def test_what_an_epilogue_has_is_refused_beside_scales_alone(name, value):
    a, b = torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(16, 8).to(torch.float8_e4m3fn)
    for call in (cutegemm.gemm, cutegemm.prepare):
        with pytest.raises(ValueError, match=f"{name}: it is given without an epilogue"):
            call(a, b, scale_a=torch.ones(()), **{name: value})


def test_operands_that_are_no_tuple_are_named():
    a, b = torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(16, 8).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="operands: got NoneType, expected a tuple"):
        cutegemm.gemm(a, b, scale_a=torch.ones(()), epilogue=ops.relu, operands=None)


def test_a_bias_of_one_element_is_not_spread_over_columns():
    a, b = torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(16, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"bias: got shape \(1,\), expected \(8,\)"):
        cutegemm.gemm(a, b, scale_a=torch.ones(()), bias=torch.ones(1))


@pytest.mark.filterwarnings("error:Dynamo detected a call")
@pytest.mark.parametrize("options", [{"accumulate": "fast"}, {"bias": torch.ones(16)}], ids=["accumulate", "bias"])
def test_a_graph_gets_no_warning_of_dynamo(options, monkeypatch):
    """Dynamo warns of every function that it follows whose results are cached."""
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())
    torch._dynamo.reset()
    a, b = torch.ones(4, 32).to(torch.float8_e4m3fn), torch.ones(2, 16, 32).to(torch.float8_e4m3fn).mT
    ends = torch.tensor([1, 4], dtype=torch.int32)
    compiled = torch.compile(
        lambda a, b: cutegemm.grouped_gemm(a, b, ends, scale_a=torch.ones(()), **options),
        backend="eager",
        fullgraph=True,
    )
    assert torch.equal(compiled(a, b), cutegemm.grouped_gemm(a, b, ends, scale_a=torch.ones(()), **options))


def test_torch_products_whose_dtypes_are_decided_are_not_cast_by_autocast(seed):
    """torch.matmul within backend "torch" was cast once more: of groups with scales or `out`, and of `gemm_out`."""
    torch.manual_seed(seed)
    a, b, ends = torch.randn(20, 64), torch.randn(2, 64, 8), torch.tensor([7, 20], dtype=torch.int32)
    (va, sa), (vb, sb) = cutegemm.quantize(a, torch.float8_e4m3fn), cutegemm.quantize(b, torch.float8_e4m3fn, dim=-2)
    scales = {"scale_a": sa, "scale_b": sb, "out_dtype": torch.float32}

    def calls():
        yield cutegemm.grouped_gemm(va, vb, ends, **scales)
        yield cutegemm.grouped_gemm(a, b, ends, out=torch.empty(20, 8))
        yield cutegemm.gemm(va, vb[0], **{**scales, "scale_b": sb[0]})
        out = torch.empty(20, 8)
        torch.ops.cutegemm.gemm_out(a, b[0], None, 1.0, 0.0, None, None, None, "torch", None, out)
        yield out

    want = list(calls())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for got, each in zip(calls(), want, strict=True):
            assert torch.equal(got, each)


def test_kernels_refuse_sums_of_int8_that_int32_may_not_hold():
    """With a D of another type; torch adds them up in float64. Up to K = 131071 all of them fit."""
    k = 131072
    a, b = torch.full((1, k), -128, dtype=torch.int8), torch.full((k, 1), -128, dtype=torch.int8)
    one = torch.ones(())
    for options in ({"scale_a": one, "scale_b": one}, {}, {"alpha": 0.5}):
        given = {**options, "out_dtype": torch.float32}
        assert cutegemm.gemm(a, b, **given).item() == 2.0**31 * options.get("alpha", 1)
        with pytest.raises(UnsupportedError, match=r"along K = 131072 may not fit into int32, .* up to 131071, or"):
            cutegemm.gemm(a, b, **given, backend="cute")
    cute, gpu = backend.get("cute"), arch.get("H200")
    assert cute.supports(Problem.of(64, 64, 131056, "int8", out_dtype="fp32"), gpu) is None
    assert cute.supports(Problem.of(64, 64, k, "int8"), gpu) is None
    assert "accepted is K up to 131071" in cute.supports(Problem.of(64, 64, k, "int8", out_dtype="fp32"), gpu)


def test_a_repeated_call_with_an_epilogue_remembers_its_program(monkeypatch):
    """The program follows what the function reads, and scales of other kinds."""
    a, b = torch.ones(4, 256).to(torch.float8_e4m3fn), torch.ones(8, 256).to(torch.float8_e4m3fn).t()
    size, of_a, of_b = [2.0], torch.full((4, 1), 0.5), torch.full((), 3.0)

    def call(scale_a=of_a):
        factor = size[0]
        return cutegemm.gemm(a, b, scale_a=scale_a, scale_b=of_b, epilogue=lambda acc: acc * factor, backend="torch")

    for _ in range(2):  # what the function means is known from the second call on
        assert torch.equal(call(), torch.full((4, 8), 768.0).bfloat16())
    asked, real = [], scaled.arguments
    monkeypatch.setattr(scaled, "arguments", lambda *given, **named: asked.append(given) or real(*given, **named))
    assert torch.equal(call(), torch.full((4, 8), 768.0).bfloat16())
    assert asked == []
    size[0] = 4.0
    assert torch.equal(call(), torch.full((4, 8), 1536.0).bfloat16())
    assert torch.equal(call(torch.full((), 0.25)), torch.full((4, 8), 768.0).bfloat16())
    assert len(asked) == 2
