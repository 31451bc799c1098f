"""Gradients of `gemm` on the CPU: every operand, activation, layout and broadcast, against float64."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.problem import reference
from tests import gradients, opinfo
from tests.problems import DTYPES, draw, matrix

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")


def run(a, b, grad, c=None, bias=None, backend="auto", **numbers):
    """Forward and backward by gemm; checks every gradient."""
    leaves = {name: t.detach().requires_grad_() for name, t in zip("abc", (a, b, c), strict=True) if t is not None}
    if bias is not None:
        leaves["bias"] = bias.detach().requires_grad_()
    d = cutegemm.gemm(**leaves, out_dtype=grad.dtype, backend=backend, **numbers)
    plain = cutegemm.gemm(a, b, c, bias=bias, out_dtype=grad.dtype, backend=backend, **numbers)
    assert torch.equal(d, plain), "recording gradients changed the result"
    d.backward(grad)
    gradients.check(
        {name: t.grad for name, t in leaves.items()}, gradients.expected(a, b, grad, c=c, bias=bias, **numbers)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_operand_and_activation(dtype, activation, seed):
    a, b, c, bias, grad = draw(seed, (9, 7), (7, 5), (9, 5), (5,), (9, 5), dtype=DTYPES[dtype])
    run(a, b, grad, c, bias, alpha=0.75, beta=-1.5, activation=activation)
    run(a, b, grad.float(), activation=activation)
    run(a, b, grad, c, bias.float(), beta=0.0, activation=activation)


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "c_shape"),
    [
        ((9, 7), (4, 7, 5), (5,)),
        ((4, 9, 7), (7, 5), (9, 1)),
        ((1, 9, 7), (4, 7, 5), (4, 1, 1)),
        ((4, 9, 7), (1, 7, 5), ()),
        ((4, 9, 7), (4, 7, 5), (1, 9, 5)),
        ((1, 9, 7), (7, 5), (1, 9, 5)),
        ((9, 7), (1, 7, 5), (9, 5)),
        ((0, 9, 7), (7, 5), (5,)),
        ((4, 0, 7), (7, 5), (5,)),
        ((9, 7), (7, 0), (9, 1)),
        ((9, 0), (0, 5), (9, 5)),
        ((4, 9, 0), (0, 5), ()),
    ],
    ids=str,
)
def test_batches_broadcasts_and_empty_operands(a_shape, b_shape, c_shape, seed):
    shape = (*torch.broadcast_shapes(a_shape[:-2], b_shape[:-2]), a_shape[-2], b_shape[-1])
    a, b, c, bias, grad = draw(seed, a_shape, b_shape, c_shape, (b_shape[-1],), shape)
    for activation in (None, "silu"):
        run(a, b, grad, c, bias, alpha=1.5, beta=0.5, activation=activation)


def test_gradients_have_the_layout_of_their_operand(seed):
    generator = torch.Generator().manual_seed(seed)
    for a_row in (True, False):
        for b_row in (True, False):
            a = matrix(9, 7, torch.float32, generator, row_major=a_row).requires_grad_()
            b = matrix(7, 5, torch.float32, generator, row_major=b_row).requires_grad_()
            found = torch.autograd.grad(cutegemm.gemm(a, b), (a, b), torch.ones(9, 5))
            assert [g.stride() for g in found] == [a.stride(), b.stride()]


def test_only_what_is_asked_for(seed):
    a, b, grad = draw(seed, (9, 7), (7, 5), (9, 5))
    a.requires_grad_()
    d = cutegemm.gemm(a, b, activation="gelu")
    d.backward(grad)
    assert b.grad is None
    assert a.grad is not None
    with torch.no_grad():
        assert not cutegemm.gemm(a, b).requires_grad
    assert not cutegemm.gemm(a.detach(), b).requires_grad
    d = cutegemm.gemm(a.detach(), b)
    assert d.grad_fn is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("route", ["eager", "operator"])
def test_gradients_of_gradients(activation, route, seed):
    """Against torch's own second derivatives in float64, on numbers of a size where fp32 is exact enough."""
    a, b, c, bias, grad, *weights = (
        t.requires_grad_() for t in draw(seed, (4, 6), (6, 5), (4, 5), (5,), (4, 5), (4, 6), (6, 5), (4, 5), (5,))
    )

    def ours(a, b, c, bias):
        if route == "operator":
            return torch.ops.cutegemm.gemm(a, b, c, 0.5, 2.0, bias, activation)
        return cutegemm.gemm(a, b, c, alpha=0.5, beta=2.0, bias=bias, activation=activation)

    def exact(a, b, c, bias):
        return reference.activate(0.5 * a @ b + 2 * c + bias, activation)

    def second(function, leaves, grad, weights):
        first = torch.autograd.grad(function(*leaves), leaves, grad, create_graph=True)
        total = sum((x * y).sum() for x, y in zip(first, weights, strict=True))
        return torch.autograd.grad(total, (*leaves, grad), allow_unused=True, materialize_grads=True)

    leaves = (a, b, c, bias)
    got = second(ours, leaves, grad, weights)
    double = [[t.detach().double().requires_grad_() for t in group] for group in (leaves, (grad,), weights)]
    want = second(exact, tuple(double[0]), double[1][0], double[2])
    # Every value is a sum of under 200 products of up to five normal numbers; fp32 rounds each step to 2^-24.
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2.0**-24 * 256, atol=2.0**-24 * 256 * 16)


def test_results_that_nobody_records_are_refused(seed):
    a, b = draw(seed, (9, 7), (7, 5))
    out = torch.empty(9, 5)
    with pytest.raises(ValueError, match=r"out: an operand requires grad"):
        cutegemm.gemm(a.requires_grad_(), b, out=out)
    with pytest.raises(ValueError, match=r"out: it requires grad.*out\.detach"):
        cutegemm.gemm(a.detach(), b, out=torch.empty(9, 5, requires_grad=True))
    with torch.no_grad():
        assert cutegemm.gemm(a, b, out=out) is out
    cutegemm.gemm(a.detach(), b, out=out)
    with pytest.raises(ValueError, match=r"out: an operand requires grad"):
        cutegemm.gemm(a, b, out=out)


def test_a_changed_operand_is_noticed(seed):
    a, b = draw(seed, (9, 7), (7, 5))
    a.requires_grad_()
    d = cutegemm.gemm(a, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        d.sum().backward()


@pytest.mark.parametrize("dtype", opinfo.DTYPES, ids=str)
@pytest.mark.parametrize("name", opinfo.NAMES)
@pytest.mark.product(keep=10)
def test_torchs_own_samples(name, dtype, seed):
    operators = opinfo.operators()
    if name not in operators and torch.__version__ < (2, 13):
        pytest.skip(f"torch {torch.__version__} has no samples of {name}")
    passed, others = opinfo.run(name, operators[name], "cpu", dtype, seed)
    print(name, passed, others)
    assert passed > 0
    assert not others, f"samples of a supported dtype left out: {others}"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("way", ["terms", "outputs", "recompute", "grouped"])
def test_a_result_in_fp8_has_gradients(way, activation, seed):
    """Torch computes nothing with fp8, in which the gradient of such a result comes, and no epilogue reads it."""
    a, b, c = draw(seed, (9, 16), (2, 16, 8) if way == "grouped" else (16, 8), (9, 8), dtype=torch.bfloat16)
    function = getattr(cutegemm.ops, activation or "abs")

    def product(a, b, c, dtype):
        if way == "terms":
            return cutegemm.gemm(a, b, c, beta=0.5, activation=activation, out_dtype=dtype)
        call = cutegemm.grouped_gemm if way == "grouped" else cutegemm.gemm
        ends = (torch.tensor([4, 9], dtype=torch.int32),) if way == "grouped" else ()
        epilogue = lambda acc, c: function(acc + 0.5 * c)  # noqa: E731
        save = "outputs" if way == "grouped" else way
        return call(a, b, *ends, epilogue=epilogue, operands=(c,), out_dtype=dtype, save=save)

    found = []
    for dtype in (torch.float8_e4m3fn, torch.float32):
        leaves = [each.clone().requires_grad_() for each in (a, b, c)]
        d = product(*leaves, dtype).float()
        d.sum().backward()
        found.append([each.grad for each in leaves])
    if activation == "relu" and way == "terms":  # whose slope is read off D, and fp8 rounds small numbers to 0
        same = (d == 0) | (d > 2.0**-9)
        found = [[each[2][same]] for each in found]
    torch.testing.assert_close(*found, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_second_order_gradients_of_relu_with_a_result_in_fp8(dtype):
    """Torch adds no numbers of 8 bits; all numbers here are exact in both types."""
    a, b = torch.tensor([[1.0, -1.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
    found = []
    for product in (
        lambda a, b: cutegemm.gemm(a, b, activation="relu", out_dtype=dtype),
        lambda a, b: torch.relu(a @ b).to(dtype),
    ):
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        d = product(x, y).float()
        first = torch.autograd.grad(d.pow(2).sum(), (x, y), create_graph=True)
        loss = sum(each.pow(2).sum() for each in first) + d.sum()
        found.append((*first, *torch.autograd.grad(loss, (x, y))))
    for got, want in zip(*found, strict=True):
        assert want.any()
        assert torch.equal(got, want)
