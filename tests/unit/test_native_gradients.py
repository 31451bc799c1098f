"""What the C++ part records for autograd: gradients are those that Python records, and autograd's promises are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutegemm
from tests.native_cases import (
    BIAS,
    FP32,
    A,
    B,
    C,
    W,
    autocast,
    both,
    linear_module,
    numbers,
    served,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_native_part")


def _trained(module: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor | None = None) -> list[torch.Tensor]:
    """y, dx, and the gradients of the parameters."""
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(numbers(*y.shape, seed=1) if grad is None else grad)
    found = [y, x.grad, *(each.grad for each in module.parameters())]
    module.zero_grad()
    return found


def _gradients(of: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
    leaves = [each.detach().clone(memory_format=torch.preserve_format).requires_grad_() for each in tensors]
    d = of(*leaves)
    return [d, *torch.autograd.grad(d, leaves, numbers(*d.shape, dtype=d.dtype, seed=2))]


RECORDED: dict[str, tuple[Callable[[], Any], int]] = {
    "nn.Linear": (lambda: _trained(linear_module(), A), 3),
    "nn.Linear, three dimensions": (lambda: _trained(linear_module(), numbers(2, 3, 40)), 3),
    "nn.Linear without a bias": (lambda: _trained(linear_module(bias=False), A), 3),
    "nn.Linear, x without a gradient": (lambda: linear_module()(A), 1),
    "a product": (lambda: _gradients(cutegemm.gemm, A, B), 3),
    "a product, column-major": (lambda: _gradients(cutegemm.gemm, numbers(40, 24).t(), W.t()), 3),
    "alpha, an fp32 bias": (
        lambda: _gradients(lambda a, b, bias: cutegemm.gemm(a, b, bias=bias, alpha=2.0), A, B, BIAS.float()), 3,
    ),
    "the operator": (lambda: _gradients(torch.ops.cutegemm.gemm, A, B), 3),
}  # fmt: skip
BY_PYTHON: dict[str, Callable[[], Any]] = {
    "gelu": lambda: _trained(linear_module("gelu"), A),
    "relu": lambda: _trained(linear_module("relu"), A),
    "a C": lambda: _gradients(lambda a, b, c: cutegemm.gemm(a, b, c, beta=0.5), A, B, C),
    "a batch": lambda: _gradients(cutegemm.gemm, numbers(2, 24, 40), numbers(2, 40, 16)),
    "a batch whose rows are apart": lambda: _trained(linear_module(), numbers(4, 6, 40)[:, :3]),
    "an expanded gradient": lambda: _trained(linear_module(), A, numbers(1, 1).expand(24, 16)),
    "backward under autocast": lambda: autocast(lambda: _trained(linear_module(), A)),
}


@pytest.mark.parametrize("name", [*RECORDED, *BY_PYTHON])
def test_gradients_are_those_that_python_records(name):
    road, launches = RECORDED[name] if name in RECORDED else (BY_PYTHON[name], None)
    (expected, by_python), (found, by_cpp) = both(road)
    assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(expected, found, strict=True))
    assert len(by_python) == len(by_cpp)
    if launches is not None:
        assert [by for by, _ in by_cpp] == ["C++"] * launches


def test_recorded_calls_keep_autograds_promises():
    with served(in_cpp=True):
        module, x = linear_module(), A.clone().requires_grad_()
        for _ in range(2):
            y = module(x)
            assert y.grad_fn.name() == "GemmBackward"
            with torch.no_grad():
                module.weight.add_(0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        y = module(x)
        y.backward(C)
        with pytest.raises(RuntimeError, match="second time"):
            y.backward(C)
        packed: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
            y = module(x)
        assert len(packed) == 2
        again = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
        for each in (y, again):
            x.grad = None
            each.backward(C)
            assert torch.equal(x.grad, (C.float() @ W.float()).bfloat16())
        # A batch of gradients, and a tensor that is frozen.
        d = module(x)
        (batched,) = torch.autograd.grad(d, x, torch.stack([C, 2 * C]), is_grads_batched=True)
        assert torch.equal(batched[1], (2 * C.float() @ W.float()).bfloat16())
        module.zero_grad()
        module.weight.requires_grad_(False)
        _, _dx, dw, dbias = _trained(module, A, C)
        assert dw is None
        assert torch.equal(dbias, C.float().sum(0).bfloat16())


def test_derivatives_of_derivatives():
    a, b = (numbers(*shape, dtype=FP32, grad=True) for shape in ((4, 8), (8, 4)))

    def twice() -> list[torch.Tensor]:
        da, db = torch.autograd.grad((cutegemm.gemm(a, b) ** 2).sum(), (a, b), create_graph=True)
        return [da, db, *torch.autograd.grad((da**2).sum() + (db**2).sum(), (a, b))]

    (expected, _), (found, _) = both(twice)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


def test_compiled_autograd_follows_the_node():
    from torch._dynamo import compiled_autograd

    with served(in_cpp=True):
        module, x = linear_module(), A.clone().requires_grad_()
        for _ in range(2):
            y = module(x)
        assert y.grad_fn.name() == "GemmBackward"
        with compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward(C)
        assert torch.equal(x.grad, (C.float() @ W.float()).bfloat16())
        assert torch.equal(module.weight.grad, (C.float().t() @ A.float()).bfloat16())
