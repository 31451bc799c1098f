"""Gradients by the kernels on the GPU: PyTorch's own samples, every activation, broadcasts, large products."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from tests import gradients, opinfo
from tests.problems import DTYPES
from tests.unit import test_torch_forward as tangent

pytestmark = pytest.mark.gpu


def draw(seed, *shapes, dtype=torch.float32):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def run(a, b, grad, c=None, bias=None, **numbers):
    leaves = {name: t.detach().requires_grad_() for name, t in zip("abc", (a, b, c), strict=True) if t is not None}
    if bias is not None:
        leaves["bias"] = bias.detach().requires_grad_()
    d = cutegemm.gemm(**leaves, out_dtype=grad.dtype, **numbers)
    assert torch.equal(d, cutegemm.gemm(a, b, c, bias=bias, out_dtype=grad.dtype, **numbers))
    d.backward(grad)
    numbers.pop("backend", None)
    gradients.check(
        {name: t.grad for name, t in leaves.items()}, gradients.expected(a, b, grad, c=c, bias=bias, **numbers)
    )


@pytest.mark.parametrize("dtype", opinfo.DTYPES, ids=str)
@pytest.mark.parametrize("name", opinfo.NAMES)
def test_torchs_own_samples(name, dtype, seed):
    """No sample of a supported dtype is left out; `python -m tests.opinfo` prints the count of the others and why."""
    operators = opinfo.operators()
    if name not in operators:
        pytest.skip(f"this torch has no {name}")
    passed, others = opinfo.run(name, operators[name], "cuda", dtype, seed)
    print(name, passed, others)
    assert passed > 0
    assert not others, f"samples of a supported dtype left out: {others}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_every_operand_and_activation(dtype, activation, seed):
    shapes = ((264, 72), (72, 136), (264, 136), (136,), (264, 136))
    a, b, c, bias, grad = draw(seed, *shapes, dtype=DTYPES[dtype])
    run(a, b, grad, c, bias, alpha=0.75, beta=-1.5, activation=activation, backend="cute")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_tangents(dtype, activation, seed):
    shapes = {"a": (264, 72), "b": (72, 136), "c": (264, 136), "bias": (136,)}
    tensors, tangents = (
        dict(zip(shapes, draw(s, *shapes.values(), dtype=DTYPES[dtype]), strict=True)) for s in (seed, seed + 1)
    )
    options = {"alpha": 0.75, "beta": -1.5, "activation": activation, "backend": "cute"}
    for names in (("a", "b", "c", "bias"), ("a",), ("b",), ("c", "bias")):
        tangent.run(cutegemm.gemm, tensors, {name: tangents[name] for name in names}, **options)


def test_batched_gradients(seed):
    """Autograd runs them in a thread of its own on a GPU."""
    a, b, grads = draw(seed, (264, 72), (72, 136), (3, 264, 136), dtype=torch.bfloat16)
    a, b = a.requires_grad_(), b.requires_grad_()
    d = cutegemm.gemm(a, b, activation="silu")
    got = torch.autograd.grad(d, (a, b), grads, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(d, (a, b), grad, retain_graph=True) for grad in grads]
    for x, y in zip(got, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(y))


@pytest.mark.parametrize("shapes", [((130, 70), (3, 70, 50)), ((3, 130, 70), (70, 50)), ((3, 130, 70), (3, 70, 50))])
def test_batches(shapes, seed):
    a, b, grad = draw(seed, *shapes, (3, 130, 50), dtype=torch.bfloat16)
    run(a, b, grad, activation="silu", backend="cute")


def test_tf32(seed):
    a, b, grad = draw(seed, (256, 128), (128, 192), (256, 192))
    run(a, b, grad, precision="tf32", backend="cute")


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_a_large_linear_layer(activation, seed):
    x, weight, bias, grad = draw(seed, (2048, 1024), (3072, 1024), (3072,), (2048, 3072), dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    cutegemm.linear(*leaves, activation).backward(grad)
    want = gradients.expected(x.detach(), weight.detach().t(), grad, bias=bias.detach(), activation=activation)
    gradients.check({"a": x.grad, "b": weight.grad.t(), "bias": bias.grad}, want)
    assert weight.grad.is_contiguous()


def test_backward_of_an_expanded_gradient_on_a_side_stream(seed):
    x, weight = draw(seed, (256, 128), (192, 128), dtype=torch.bfloat16)
    weight.requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cutegemm.linear(x, weight).sum().backward()
    torch.cuda.synchronize()
    ones = torch.ones(256, 192, device="cuda", dtype=torch.bfloat16)
    want = gradients.expected(x, weight.detach().t(), ones)
    gradients.check({"b": weight.grad.t()}, {"b": want["b"]})
