"""PyTorch on top of the emulated kernels: gradients, linear layers, the operator, a transformer's training step."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import cutegemm
from tests import gradients, opinfo, transformer
from tests.problems import draw
from tests.unit import test_torch_forward as tangent
from tests.unit.test_torch_gradients import run

pytest.importorskip("llvmlite")


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.product(keep=1)
def test_gradients_by_the_kernels(activation, seed):
    a, b, c, bias, grad = draw(seed, (24, 16), (16, 40), (24, 40), (40,), (24, 40), dtype=torch.bfloat16)
    run(a, b, grad, c, bias, backend="cute", alpha=0.75, beta=-1.5, activation=activation)


@pytest.mark.parametrize(
    ("of_a", "of_b", "activation"), [((3, 12, 8), (8, 4), "silu"), ((12, 8), (3, 8, 4), None)], ids=["one B", "one A"]
)
@pytest.mark.product(keep=1)
def test_gradients_of_broadcast_batches(of_a, of_b, activation, seed):
    a, b, grad = draw(seed, of_a, of_b, (3, 12, 4))
    run(a, b, grad, backend="cute", activation=activation)


def test_a_legacy_kernel_trains_too(seed):
    a, b, grad = draw(seed, (9, 7), (7, 5), (9, 5))
    run(a, b, grad, backend="legacy")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_tangents_by_the_kernels(activation, seed):
    shapes = {"a": (24, 16), "b": (16, 40), "c": (24, 40), "bias": (40,)}
    tensors, tangents = (
        dict(zip(shapes, draw(s, *shapes.values(), dtype=torch.bfloat16), strict=True)) for s in (seed, seed + 1)
    )
    options = {"alpha": 0.75, "beta": -1.5, "activation": activation, "backend": "cute"}
    tangent.run(cutegemm.gemm, tensors, tangents, **options)
    tangent.run(cutegemm.gemm, tensors, {"a": tangents["a"]}, **options)


def test_batched_gradients_by_the_kernels(seed):
    a, b, grads = draw(seed, (12, 8), (8, 4), (2, 12, 4))
    a.requires_grad_()
    d = cutegemm.gemm(a, b, activation="silu", backend="cute")
    (got,) = torch.autograd.grad(d, a, grads, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(d, a, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(got, torch.stack(want))


def test_operator_of_a_named_backend(seed):
    a, b, bias = (t.requires_grad_() for t in draw(seed, (16, 8), (8, 24), (24,)))
    opcheck(torch.ops.cutegemm.gemm.default, (a, b, None, 1.0, 0.0, bias, "silu", None, None, "cute"))
    torch._dynamo.reset()
    step = torch.compile(
        lambda x, w, bias: cutegemm.linear(x, w, bias, "relu", backend="cute"), fullgraph=True, backend="aot_eager"
    )
    x, weight = a.detach(), b.detach().t().contiguous()
    got, want = step(x, weight, bias), cutegemm.linear(x, weight, bias, "relu", backend="cute")
    assert torch.equal(got, want)


def test_one_configuration_by_name_or_object(seed):
    from cutegemm.cute import BACKEND

    a, b = draw(seed, (16, 8), (8, 24))
    text = "simt/32x32x8/w16x32/s2/g1"
    a.requires_grad_()
    got = [cutegemm.gemm(a, b, backend="cute", config=config) for config in (text, BACKEND.parse(text))]
    assert torch.equal(*got)
    torch._dynamo.reset()
    config = BACKEND.parse(text)
    step = torch.compile(
        lambda a, b: cutegemm.gemm(a, b, backend="cute", config=config), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(step(a, b), got[0])
    got[0].sum().backward()
    assert a.grad is not None


def test_threads_share_one_kernel(seed):
    from concurrent.futures import ThreadPoolExecutor

    a, b = draw(seed, (16, 8), (8, 24))
    want = cutegemm.gemm(a, b, backend="cute")
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: cutegemm.gemm(a, b, backend="cute"), range(8)):
            assert torch.equal(got, want)


def test_torchs_own_samples(seed):
    """Those of one operator, for the compiler's time; all of them with -m slow, or `python -m tests.opinfo`."""
    for dtype in (torch.bfloat16,):
        passed, others = opinfo.run("bmm", opinfo.operators()["bmm"], "cpu", dtype, seed, backend="cute")
        assert passed > 0
        assert not others


@pytest.mark.slow
@pytest.mark.parametrize("dtype", opinfo.DTYPES, ids=str)
@pytest.mark.parametrize("name", opinfo.NAMES)
def test_torchs_own_samples_all(name, dtype, seed):
    passed, others = opinfo.run(name, opinfo.operators()[name], "cpu", dtype, seed, backend="cute")
    assert passed > 0
    assert not others


@pytest.mark.slow
def test_a_transformer(seed):
    size = transformer.Size(layers=1, width=32, hidden=48, vocabulary=32, batch=1, length=8)
    theirs, ours = transformer.compare_logits(size, torch.bfloat16, "cpu", seed, backend="cute", plain=True)
    assert ours <= 1.25 * theirs, f"root-mean-square error {ours:.3e}, torch's {theirs:.3e}"
    curves = transformer.compare_curves(size, 3, "cpu", seed, autocast=True, backend="cute", runs=1, plain=True)
    print(transformer.check_curves(*curves, fall=0.95))


def test_gradients_of_tf32_are_within_its_bound(seed):
    a, b, grad = draw(seed, (48, 32), (32, 40), (48, 40))
    run(a, b, grad, precision="tf32", backend="cute")
    assert gradients.expected(a, b, grad, precision="tf32")["a"].bound.max() > 1e-3, "it is that of IEEE products"
