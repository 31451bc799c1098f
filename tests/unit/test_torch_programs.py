"""`gemm` with an epilogue program in torch: gradients, the operator, vmap, autocast, fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch import func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck

import cutegemm
from cutegemm import ops
from cutegemm.problem import program_request
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.pytorch import autograd, program_autograd
from tests.problems import draw

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")
OP = torch.ops.cutegemm.gemm_program.default
TEXT = "def epilogue(acc, x0: fp32[N], x1: fp32[M, N], x2: fp32): return gelu(acc + x0) * x1 * x2, row_sum(acc)"


def leaves(*tensors):
    return [each.detach().clone().requires_grad_() for each in tensors]


def tupled(results):
    return results if isinstance(results, tuple) else (results,)


def gelu_bias_gate(acc, bias, gate):
    return ops.gelu(acc + bias) * gate


PROGRAMS = {
    "linear": (lambda acc, bias: acc * 0.5 + bias, [(8,)]),
    "gelu, bias, gate": (gelu_bias_gate, [(8,), (4, 8)]),
    "swiglu": (ops.swiglu, []),
    "geglu of pairs": (lambda acc, scale: ops.geglu_tanh_pairs(acc) * scale, [(4, 1)]),
    "gate alone": (lambda acc: ops.tanh(ops.halves(acc)[0]), []),
    "sums": (lambda acc, res: (acc * res, ops.row_sum(acc * acc), ops.column_sum(ops.sigmoid(acc))), [(4, 8)]),
    "maxima": (lambda acc, res: (acc * res, ops.row_max_abs(acc * res), ops.column_max(acc)), [(4, 8)]),
    "partner": (lambda acc, cos, sin: (acc * cos + ops.partner(acc * acc) * sin) * acc, [(4, 8), (4, 8)]),
    "scalars": (lambda acc, scale, other: ops.exp(acc * scale * 0.1) / (2.0 + other * other), [(), (1, 1)]),
    "extremes": (lambda acc, low: ops.clamp(acc, low, 1.5) - abs(acc), [(8,)]),
    "no gradient": (lambda acc, x: ops.where(acc > x, 1.0, 2.0), [(8,)]),
}
"""Name: a function that also computes on tensors, and the shapes of its operands, for a product of 4 x 8."""


def expected(function, a, b, operands, grads, wanted):
    """Results and gradients of torch's own operators."""
    results = [each.reshape(grad.shape) for each, grad in zip(tupled(function(a @ b, *operands)), grads, strict=True)]
    if not any(each.requires_grad for each in results):
        return results, [torch.zeros_like(each) for each in wanted]
    found = torch.autograd.grad(results, wanted, grads, create_graph=True, allow_unused=True, materialize_grads=True)
    return results, list(found)


@pytest.mark.parametrize("save", ["outputs", "recompute"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_torch(name, save, seed):
    function, shapes = PROGRAMS[name]
    a, b, *operands = leaves(*draw(seed, (4, 6), (6, 8), *shapes))
    got = tupled(cutegemm.gemm(a, b, epilogue=function, operands=operands, save=save))
    grads = draw(seed + 1, *(each.shape for each in got))
    results, want = expected(function, a, b, operands, grads, (a, b, *operands))
    for x, y in zip(got, results, strict=True):
        torch.testing.assert_close(x, y)
    for _ in range(2):  # the second time the derived programs are remembered
        found = torch.autograd.grad(got, (a, b, *operands), grads, retain_graph=True)
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            plain = tupled(cutegemm.gemm(a, b, epilogue=function, operands=operands, save=save))
        assert all(map(torch.equal, plain, got)), "recording gradients changed the result"
        got = tupled(cutegemm.gemm(a, b, epilogue=function, operands=operands, save=save))


def in_float64(a, b, function, operands, monkeypatch, save=None):
    """The results of a call whose products and programs are computed in float64, recorded by the code of every call."""

    def product(x, y, *, alpha=1.0, out_dtype=None, precision=None, backend="auto", epilogue=None, operands=()):
        acc = alpha * (x @ y)
        if epilogue is None:
            return acc
        return evaluate(epilogue, acc, operands)

    def run(a, b, program, operands, out_dtype):
        return evaluate(program, a @ b, operands)

    monkeypatch.setattr(autograd, "_gemm", product)
    like = [each.float() if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in operands]
    program = program_request.traced(function, program_request.inputs_of(like, a.device))
    return program_autograd.record(
        a, b, operands, program_autograd.Settings(program, None, None, "auto", save, run)
    )  # fmt: skip


@pytest.mark.parametrize("save", ["outputs", "recompute"])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "no gradient"])
def test_gradients_to_the_second_order_in_float64(name, save, seed, monkeypatch):
    function, shapes = PROGRAMS[name]
    inputs = leaves(*draw(seed, (4, 6), (6, 8), *shapes, dtype=torch.float64))

    def call(a, b, *operands):
        return in_float64(a, b, function, operands, monkeypatch, save)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def test_gradients_of_gradients(seed):
    a, b, bias, gate = leaves(*draw(seed, (4, 6), (6, 8), (8,), (4, 8)))
    grad, *weights = draw(seed + 1, (4, 8), (4, 6), (6, 8), (8,), (4, 8))
    wanted = (a, b, bias, gate)

    def second(results):
        first = torch.autograd.grad(results, wanted, grad, create_graph=True)
        return torch.autograd.grad(sum((x * y).sum() for x, y in zip(first, weights, strict=True)), wanted)

    want = second(gelu_bias_gate(a @ b, bias, gate))
    for save in ("outputs", "recompute"):
        got = second(cutegemm.gemm(a, b, epilogue=gelu_bias_gate, operands=(bias, gate), save=save))
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "bias_shape"),
    [
        ((3, 4, 6), (6, 8), (3, 1, 8)),
        ((4, 6), (3, 6, 8), (4, 1)),
        ((3, 4, 6), (3, 6, 8), (1, 4, 8)),
        ((4, 6), (6, 8), (1, 4, 8)),
        ((1, 6), (6, 8), (1, 8)),
        ((0, 6), (6, 8), (8,)),
        ((0, 6), (6, 8), (0, 8)),
        ((4, 0), (0, 8), (8,)),
    ],
    ids=str,
)
def test_batches_and_broadcasts(a_shape, b_shape, bias_shape, seed):
    a, b, bias = leaves(*draw(seed, a_shape, b_shape, bias_shape))

    def function(acc, x):
        return ops.silu(acc + x) * x

    for save in ("outputs", "recompute"):
        got = cutegemm.gemm(a, b, epilogue=function, operands=(bias,), save=save)
        want = function(a @ b, bias).reshape(got.shape)
        torch.testing.assert_close(got, want)
        (grad,) = draw(seed + 1, got.shape)
        for x, y in zip(*(torch.autograd.grad(each, (a, b, bias), grad) for each in (got, want)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("m", "n"), [(0, 8), (4, 0), (0, 0)])
@pytest.mark.parametrize("compiled", [False, True])
def test_maxima_of_nothing_have_gradients(m, n, compiled):
    def call(a, b):
        return cutegemm.gemm(a, b, epilogue=lambda acc: (acc, ops.row_max_abs(acc), ops.column_max(acc)))

    a, b = torch.randn(m, 4, requires_grad=True), torch.randn(4, n, requires_grad=True)
    torch._dynamo.reset()
    results = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(a, b)
    grads = torch.autograd.grad(results, (a, b), [torch.ones_like(each) for each in results])
    for each, own in zip(grads, (a, b), strict=True):
        assert torch.equal(each, torch.zeros_like(own))


def test_half_precision_and_operands_of_other_dtypes(seed):
    a, b = leaves(*draw(seed, (32, 48), (48, 64), dtype=torch.bfloat16))
    (bias,) = leaves(*draw(seed, (64,)))
    steps = torch.tensor(3, dtype=torch.int32)

    def function(acc, bias, step, scale):
        return ops.cast(ops.gelu(acc + bias) * scale, torch.float16), ops.where(ops.column() < step, acc, 0.0)

    got = cutegemm.gemm(a, b, epilogue=function, operands=(bias, steps, 2.0))
    assert [each.dtype for each in got] == [torch.float16, torch.bfloat16]
    found = torch.autograd.grad(got, (a, b, bias), [torch.ones_like(each) for each in got])
    assert [each.dtype for each in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    wide = leaves(a.float(), b.float(), bias)
    acc = wide[0] @ wide[1]
    results = torch.nn.functional.gelu(acc + wide[2]) * 2, torch.where(torch.arange(64) < 3, acc, 0.0)
    want = torch.autograd.grad(results, wide, [torch.ones_like(each) for each in results])
    for x, y in zip(found, want, strict=True):
        # The saved accumulator and the gradient of it are rounded to bf16, 2^-9, before sums of up to 64 terms.
        torch.testing.assert_close(x.float(), y, rtol=2.0**-6, atol=2.0**-6 * float(y.abs().max()))


def saved_shapes(call):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
        call()
    return sorted(shapes)


def test_only_what_the_derivative_needs_is_saved(seed):
    a, b, x = draw(seed, (4, 6), (6, 8), (4, 8))
    a.requires_grad_()

    def saved(function, operands=(), save=None, b=b):
        return saved_shapes(lambda: cutegemm.gemm(a, b, epilogue=function, operands=operands, save=save))

    assert saved(lambda acc: acc * 2.0) == [(6, 8)]  # of a's gradient: b
    assert saved(lambda acc, x: acc + x, (x,)) == [(6, 8)]
    assert saved(lambda acc, x: acc * x, (x,)) == [(4, 8), (6, 8)]
    assert saved(ops.gelu) == [(4, 6), (4, 8), (6, 8)]
    assert saved(ops.gelu, save="recompute") == [(4, 6), (6, 8)]
    assert saved(ops.swiglu) == [(4, 4), (4, 4), (4, 6), (6, 8)]
    x.requires_grad_()
    assert saved(lambda acc, x: acc * x, (x,)) == [(4, 6), (4, 8), (4, 8), (6, 8)]  # of x's gradient: acc


def test_only_what_is_asked_for(seed):
    a, b, bias, gate = draw(seed, (4, 6), (6, 8), (8,), (4, 8))
    got = cutegemm.gemm(a, b, epilogue=gelu_bias_gate, operands=(bias.requires_grad_(), gate))
    got.sum().backward()
    assert a.grad is None
    assert gate.grad is None
    assert bias.grad is not None
    with torch.no_grad():
        assert not cutegemm.gemm(a, b, epilogue=gelu_bias_gate, operands=(bias, gate)).requires_grad
    first, second = cutegemm.gemm(a.requires_grad_(), b, epilogue=lambda acc: (ops.exp(acc), acc))
    (found,) = torch.autograd.grad(second.sum(), a)  # an output without a gradient
    torch.testing.assert_close(found, torch.ones(4, 8) @ b.T)
    assert first.requires_grad


def test_a_changed_tensor_is_noticed(seed):
    a, b, bias, gate = draw(seed, (4, 6), (6, 8), (8,), (4, 8))
    got = cutegemm.gemm(a.requires_grad_(), b, epilogue=gelu_bias_gate, operands=(bias, gate))
    gate.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.sum().backward()


def test_out(seed):
    a, b, bias = draw(seed, (4, 6), (6, 8), (8,))
    out, sums = torch.empty(4, 8), torch.empty(4, 1)

    def function(acc, bias):
        return acc + bias, ops.row_sum(acc)

    for _ in range(2):
        before = out._version
        assert cutegemm.gemm(a, b, epilogue=function, operands=(bias,), out=(out, sums))[0] is out
        assert out._version > before
    torch.testing.assert_close(out, a @ b + bias)
    torch.testing.assert_close(sums, (a @ b).sum(-1, keepdim=True))
    with pytest.raises(ValueError, match=r"out: it requires grad"):
        cutegemm.gemm(a, b, epilogue=function, operands=(bias,), out=(out, torch.empty(4, 1, requires_grad=True)))
    bias.requires_grad_()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out: an operand requires grad"):
            cutegemm.gemm(a, b, epilogue=function, operands=(bias,), out=(out, sums))
    with torch.inference_mode():
        inside = torch.empty(4, 8)
        assert cutegemm.gemm(a, b, epilogue=ops.relu).is_inference()
    with pytest.raises(ValueError, match=r"out: it is an inference tensor"):
        cutegemm.gemm(a, b, epilogue=ops.relu, out=inside)


def test_forward_mode_is_refused(seed):
    a, b = draw(seed, (4, 6), (6, 8))

    def call(a):
        return cutegemm.gemm(a, b, epilogue=ops.swiglu)

    with pytest.raises(NotImplementedError, match="forward-mode tangent"):
        func.jvp(call, (a,), (a,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode tangent"):
        call(forward_ad.make_dual(a, a))
    with forward_ad.dual_level():
        call(a)


def test_forward_mode_over_gradients_is_refused_too(seed):
    """The tangent is one level of torch.func below the gradient, and would be dropped: wrong second derivatives."""
    a, b = draw(seed, (4, 6), (6, 8))
    ends = torch.tensor([1, 4], dtype=torch.int32)

    def program(a):
        return cutegemm.gemm(a, b, epilogue=ops.silu).square().sum()

    def groups(a):
        return cutegemm.grouped_gemm(a, b.expand(2, 6, 8), ends, epilogue=ops.silu).square().sum()

    for call in (program, groups):
        with pytest.raises(NotImplementedError, match="forward-mode tangent"):
            func.jvp(func.grad(call), (a,), (a,))
    with pytest.raises(NotImplementedError, match="forward-mode tangent"):
        func.hessian(program)(a)


@pytest.mark.parametrize("save", ["outputs", "recompute"])
def test_opcheck(save, seed):
    a, b, bias, gate = leaves(*draw(seed, (4, 6), (6, 8), (8,), (4, 8)))
    opcheck(OP, (a, b, [bias, gate], [2.0], [], TEXT), {"save": save})
    opcheck(OP, (a, b, [], [], [3], "def epilogue(acc, x0: int32): return where(column() < x0, exp(acc), 0.0)"))
    opcheck(OP, (a, b, [], [], [], "def epilogue(gate: pairs[0], up: pairs[1]): return silu(gate) * up"))


def test_opcheck_of_out_and_bad_texts(seed):
    a, b, bias, gate = draw(seed, (3, 4, 6), (6, 8), (8,), (4, 8))
    out = [torch.empty(3, 4, 8), torch.empty(3, 4, 1)]
    opcheck(
        torch.ops.cutegemm.gemm_program_out.default,
        (a, b, [bias, gate], [2.0], [], TEXT, None, "auto", None, out),
    )
    with pytest.raises(ValueError, match="an epilogue's text is"):
        OP(a, b, [], [], [], "import os")
    with pytest.raises(ValueError, match=r"2 tensors, 1 floats and 0 integers, got 1 tensors"):
        OP(a, b, [bias], [2.0], [], TEXT)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) for each in (a, b, bias, torch.empty(4, 7))]
        with pytest.raises(ValueError, match=r"operands\[1\]: got shape \(4, 7\)"):
            OP(*fake[:2], fake[2:], [2.0], [], TEXT)


@pytest.mark.filterwarnings("error")
def test_fake_and_meta_tensors_have_shape_and_dtype():
    def function(acc, x):
        gate, up = ops.halves(acc)
        return gate * x, ops.row_sum(up), ops.cast(up, torch.float16)

    with FakeTensorMode():
        a, b, x = torch.empty(3, 4, 6), torch.empty(6, 10), torch.empty(5)
        found = cutegemm.gemm(a, b, epilogue=function, operands=(x,), out_dtype=torch.bfloat16)
        assert [tuple(each.shape) for each in found] == [(3, 4, 5), (3, 4, 1), (3, 4, 5)]
        assert [each.dtype for each in found] == [torch.bfloat16, torch.float32, torch.float16]
        with pytest.raises(ValueError, match=r"operands\[0\]: got shape \(4,\)"):
            cutegemm.gemm(a, b, epilogue=function, operands=(torch.empty(4),))
        with pytest.raises(ValueError, match="b: got 9 columns"):
            cutegemm.gemm(a, torch.empty(6, 9), epilogue=ops.swiglu)
    (meta,) = OP(
        torch.empty(4, 6, device="meta"), torch.empty(6, 8, device="meta"), [], [], [], "def epilogue(acc): return acc"
    )
    assert (meta.device.type, tuple(meta.shape)) == ("meta", (4, 8))


@pytest.mark.parametrize(
    ("dims", "shapes"),
    [
        ((0, None, None, None), ((3, 4, 6), (6, 8), (8,), (4, 8))),
        ((0, 0, 0, 0), ((3, 4, 6), (3, 6, 8), (3, 8), (3, 4, 8))),
        ((None, None, 0, None), ((4, 6), (6, 8), (3, 8), (4, 8))),
        ((0, None, None, 0), ((3, 2, 4, 6), (6, 8), (8,), (3, 2, 4, 8))),
        ((None, None, 1, None), ((2, 4, 6), (6, 8), (8, 3), (2, 1, 1))),
        ((1, 2, None, 0), ((4, 3, 6), (6, 8, 3), (8,), (3,))),
    ],
)
def test_vmap(dims, shapes, seed):
    def function(acc, x, y):
        return ops.gelu(acc + x) * y, ops.row_sum(acc)

    given = draw(seed, *shapes)
    got = torch.vmap(lambda a, b, *o: cutegemm.gemm(a, b, epilogue=function, operands=o), dims)(*given)
    want = torch.vmap(lambda a, b, *o: function(a @ b, *o), dims)(*given)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


def test_vmap_of_the_number_of_a_matrix(seed):
    """It counts within one call: mapped calls all have the same."""
    a, b = draw(seed, (3, 2, 4, 6), (6, 8))
    got = torch.vmap(lambda a: cutegemm.gemm(a, b, epilogue=lambda acc: acc * ops.matrix()))(a)
    torch.testing.assert_close(got, a @ b * torch.tensor([0.0, 1.0])[:, None, None])
    dropped = torch.vmap(lambda a: cutegemm.gemm(a, b, epilogue=lambda acc: ops.dropout(acc, 0.5, 7)))(
        a[:1].expand(3, 2, 4, 6)
    )
    assert torch.equal(dropped[0], dropped[2])


def test_functional_transforms(seed):
    a, b, bias, gate = draw(seed, (4, 6), (6, 8), (8,), (4, 8))

    def ours(a, b):
        return cutegemm.gemm(a, b, epilogue=gelu_bias_gate, operands=(bias, gate)).square().sum()

    def exact(a, b):
        return gelu_bias_gate(a @ b, bias, gate).square().sum()

    stacked = torch.stack((a, 2 * a))
    for transform in (
        lambda f: func.grad(f, (0, 1))(a, b),
        lambda f: func.jacrev(func.grad(f))(a, b),
        lambda f: torch.vmap(func.grad(f), (0, None))(stacked, b),
        lambda f: func.vjp(f, a, b)[1](torch.tensor(2.0)),
    ):
        torch.testing.assert_close(transform(ours), transform(exact), rtol=1e-3, atol=1e-3)
    wanted = leaves(a, b)
    grads = draw(seed + 1, (5,))[0]
    torch.testing.assert_close(
        *(torch.autograd.grad(f(*wanted), wanted, grads, is_grads_batched=True) for f in (ours, exact)),
        rtol=1e-3, atol=1e-3,
    )  # fmt: skip


def test_subclasses_of_tensor(seed):
    class Named(torch.Tensor):
        pass

    a, b, x = draw(seed, (4, 6), (6, 8), (8,))
    for _ in range(2):
        for inputs in ((a.as_subclass(Named), x), (a, x.as_subclass(Named))):
            got = cutegemm.gemm(inputs[0], b, epilogue=lambda acc, x: acc + x, operands=inputs[1:])
            assert type(got) is Named
            torch.testing.assert_close(got.as_subclass(torch.Tensor), a @ b + x)


def test_prepare_explain_and_tune(seed, capsys):
    a, b, x = draw(seed, (4, 6), (6, 8), (8,))
    options = {"epilogue": lambda acc, x: ops.tanh(acc) * x, "operands": (x,)}
    cutegemm.prepare(a, b, **options)
    cutegemm.explain(a, b, **options)
    assert "def epilogue(acc, x0: fp32[N]) -> fp32: return tanh(acc) * x0" in capsys.readouterr().out
    cutegemm.explain(a.requires_grad_(), b, **options)
    assert "-> (fp32, fp32): return tanh(acc) * x0, acc" in capsys.readouterr().out
    with pytest.raises(ValueError, match="a: got a tensor on cpu; tune times kernels on a CUDA device"):
        cutegemm.tune(a, b, **options)
    for call in (cutegemm.gemm, cutegemm.prepare, cutegemm.explain, cutegemm.tune):
        with pytest.raises(ValueError, match="operands: it is given without an epilogue"):
            call(a, b, operands=(x,))
    with pytest.raises(ValueError, match="epilogue: got one together with c, alpha"):
        cutegemm.explain(a, b, bias=x, **options)
    with pytest.raises(ValueError, match="save: got 'acc', accepted are None, 'outputs', 'recompute'"):
        cutegemm.gemm(a, b, save="acc", **options)


@pytest.mark.parametrize("records", [False, True])
def test_the_operators_name_a_save_that_they_do_not_take(records):
    a, b, text = torch.randn(4, 8, requires_grad=records), torch.randn(8, 6), "def epilogue(acc): return acc"
    ends = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(ValueError, match="save: got 'acc', accepted are"):
        torch.ops.cutegemm.gemm_program(a, b, [], [], [], text, save="acc")
    with pytest.raises(ValueError, match="save: got 'acc', accepted are"):
        torch.ops.cutegemm.grouped_gemm(a, b[None], ends, None, None, None, None, [], [], [], text, save="acc")
