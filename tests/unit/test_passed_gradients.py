"""Gradients that are an upstream gradient as it is: no kernel copies them, and they are right."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.problem import program_request
from cutegemm.pytorch import grouped_operator, program_autograd
from cutegemm.pytorch.program_gradients import Needed, needed, passed_on
from cutegemm.run import combining, grouped
from tuning import host_stub

M, N, K = 24, 16, 32
ENDS = torch.tensor([5, 5, 20], dtype=torch.int32)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).requires_grad_()


def asked(epilogue, *operands: torch.Tensor) -> Needed:
    program = program_request.program_for(epilogue, operands, torch.device("cpu"))
    return needed(program, tuple(range(len(program.outputs))), True, tuple(range(len(operands))))


@pytest.mark.parametrize(
    ("ends", "launches"), [(ENDS, 2), (torch.tensor([5, 5, M], dtype=torch.int32), 2)], ids=["rows in no group", "all"]
)
def test_a_product_in_groups_has_two_products_for_its_gradients(ends, launches, monkeypatch):
    """As many as torch's; until 29 November 2026 a third launch copied the upstream gradient."""
    a, b, seen = random(M, K, dtype=torch.bfloat16), random(3, K, N, dtype=torch.bfloat16), []
    with host_stub.on_cpu(in_cpp=False):
        found = cutegemm.grouped_gemm(a, b, ends, backend="cute")

        def count(*given, compute=grouped.compute):
            seen.append(given)
            return compute(*given)

        monkeypatch.setattr(grouped_operator.grouped, "compute", count)
        torch.autograd.grad(found, (a, b), torch.ones_like(found))
    assert len(seen) == launches


def test_only_rows_in_no_group_are_zeroed_first(monkeypatch):
    a, b, cleared = random(M, K, dtype=torch.bfloat16), random(3, K, N, dtype=torch.bfloat16), []
    with host_stub.on_cpu(in_cpp=False):
        found = cutegemm.grouped_gemm(a, b, ENDS, backend="cute")

        def note(made, ends, clear=combining.clear_behind):
            cleared.append((tuple(made.shape), ends))
            return clear(made, ends)

        monkeypatch.setattr(combining, "clear_behind", note)
        monkeypatch.setattr(torch.Tensor, "zero_", None)  # which would be called
        torch.autograd.grad(found, (a, b), torch.ones_like(found))
    assert cleared == [((M, K), ENDS)]


def test_a_sum_needs_no_kernel_for_its_gradients(monkeypatch):
    a, b, x = random(M, K, dtype=torch.bfloat16), random(K, N, dtype=torch.bfloat16), random(M, N, dtype=torch.bfloat16)
    with host_stub.on_cpu(in_cpp=False):
        found = cutegemm.gemm(a, b, epilogue=lambda acc, x: acc + x, operands=(x,), backend="cute")
        monkeypatch.setattr(program_autograd, "_by_kernel", None)  # which would be called
        grad = torch.randn(M, N).bfloat16()
        (dx,) = torch.autograd.grad(found, x, grad)
    assert torch.equal(dx, grad)


CASES = {
    "a sum": (lambda acc, x: acc + x, [(M, N)], {"acc", "operand"}),
    "a column": (lambda acc, x: acc + x, [(M, 1)], {"acc", "operand"}),
    "a bias": (lambda acc, x: acc + x, [(1, N)], {"acc", "operand"}),
    "a difference": (lambda acc, x: acc - x, [(M, N)], {"acc"}),
    "a factor": (lambda acc, x: acc * x + 1, [(M, 1)], set()),
    "sums of rows": (lambda acc: (acc + 1, ops.row_sum(acc)), [], set()),
    "a second result": (lambda acc, x: (ops.gelu(acc), x * 1.0), [(M, N)], {"operand"}),
}
"""Epilogue, shapes of its operands, and which gradients are an upstream gradient as it is."""


@pytest.mark.parametrize("name", CASES)
def test_which_gradients_are_passed_on(name):
    epilogue, shapes, expected = CASES[name]
    found = asked(epilogue, *(random(*shape) for shape in shapes)).backward
    passed = passed_on(found)
    assert {source.kind for source, _ in passed.passed} == expected
    rest = () if passed.rest is None else passed.rest.gives
    assert {*dict(passed.passed), *rest} == set(found.gives)
    assert {source.kind for source, _ in passed_on(found, of_operands=False).passed} == expected - {"operand"}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right(name):
    epilogue, shapes, _ = CASES[name]
    a, b, given = random(M, K), random(K, N), [random(*shape) for shape in shapes]
    inputs = [a, b, *given]
    found = cutegemm.gemm(a, b, epilogue=epilogue, operands=tuple(given))
    outs = found if isinstance(found, tuple) else (found,)
    upstream = [torch.randn_like(out) for out in outs]
    got = torch.autograd.grad(outs, inputs, upstream)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    product = wide[0] @ wide[1]
    x = wide[2] if given else None
    exact = {
        "a sum": lambda: (product + x,), "a column": lambda: (product + x,), "a bias": lambda: (product + x,),
        "a difference": lambda: (product - x,), "a factor": lambda: (product * x + 1,),
        "sums of rows": lambda: (product + 1, product.sum(1, keepdim=True)),
        "a second result": lambda: (torch.nn.functional.gelu(product), x * 1.0),
    }[name]()  # fmt: skip
    want = torch.autograd.grad(exact, wide, [each.double() for each in upstream])
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(M, N), (1, M, N)])
def test_a_gradient_that_is_passed_on_is_not_shared(shape):
    """With the upstream gradient, or with another operand's: they may be changed in place."""
    a, b, upstream = random(M, K), random(K, N), torch.randn(M, N)
    x, y = (torch.randn(shape, requires_grad=True) for _ in range(2))
    found = cutegemm.gemm(a, b, epilogue=lambda acc, x, y: acc + x + y, operands=(x, y))
    found.backward(upstream)
    want = upstream.clone()
    upstream.zero_()
    assert torch.equal(x.grad.reshape(M, N), want)
    x.grad.zero_()
    assert torch.equal(y.grad.reshape(M, N), want)


def test_rows_in_no_group_have_no_part_in_the_gradients():
    """Their upstream gradient may be anything."""
    a, b, x = random(M, K), random(3, K, N), random(M, N)
    found = cutegemm.grouped_gemm(a, b, ENDS, epilogue=lambda acc, x: acc + x, operands=(x,))
    upstream = torch.randn_like(found)
    upstream[int(ENDS[-1]) :] = float("nan")
    da, db, dx = torch.autograd.grad(found, (a, b, x), upstream)
    assert not da[int(ENDS[-1]) :].any()
    assert not dx[int(ENDS[-1]) :].any()
    assert all(torch.isfinite(each).all() for each in (da, db, dx))
    torch.testing.assert_close(db[0], a[:5].mT @ upstream[:5], rtol=1e-4, atol=1e-4)


def test_rows_behind_a_mask_have_no_part_in_the_gradients():
    a, b, counts = random(3, M, K), random(3, K, N), torch.tensor([5, 0, M], dtype=torch.int32)
    found = cutegemm.grouped_gemm(a, b, counts=counts)
    upstream = torch.randn_like(found)
    upstream[0, 5:] = upstream[1] = float("nan")
    da, db = torch.autograd.grad(found, (a, b), upstream)
    assert torch.isfinite(da).all()
    assert torch.isfinite(db).all()
    torch.testing.assert_close(db[0], a[0, :5].mT @ upstream[0, :5], rtol=1e-4, atol=1e-4)
