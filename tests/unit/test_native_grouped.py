"""The C++ part for products in groups: it launches what Python launches, and leaves it the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import cutegemm
from cutegemm import ops
from cutegemm.problem import packing
from cutegemm.pytorch.program_operator import divided
from cutegemm.run import grouped
from tests.native_cases import (
    FP32,
    assert_each_has_a_launch_of_its_own,
    assert_launched_alike,
    assert_same_outcome,
    autocast,
    both,
    numbers,
    refuse_next,
    served,
)
from tuning import host_stub

pytestmark = pytest.mark.usefixtures("no_native_part")

GROUPS, T, N, K = 3, 24, 32, 64
X, W, GRAD = numbers(T, K), numbers(GROUPS, K, N), numbers(T, K, grad=True)
ENDS, COUNTS = torch.tensor([5, 5, T], dtype=torch.int32), torch.tensor([5, 0, 8], dtype=torch.int32)
ROWS = torch.tensor([*range(T - 1, -1, -1), 3, 3], dtype=torch.int32)
OF_ROWS = torch.tensor([5, 5, T + 2], dtype=torch.int32)
COLUMN, MATRIX = numbers(T, 1, dtype=FP32), numbers(T, N)


def product(a: Any = X, b: Any = W, offsets: Any = ENDS, **options: Any) -> Any:
    return cutegemm.grouped_gemm(a, b, offsets, **options)


def residual(acc: Any, c: Any) -> Any:
    return ops.gelu(acc) + c


def shifted(acc: Any, scale: Any, column: Any, shift: Any) -> Any:
    return acc * scale + column * shift


SERVED: dict[str, Callable[[], Any]] = {
    "groups of rows": product,
    "weights as they are stored": lambda: product(b=numbers(GROUPS, N, K).mT),
    "other ends": lambda: product(offsets=torch.tensor([0, 3, T], dtype=torch.int32)),
    "an epilogue": lambda: product(epilogue=ops.relu),
    "gate and up": lambda: product(epilogue=ops.swiglu),
    "an operand": lambda: product(epilogue=residual, operands=(MATRIX,)),
    "numbers among operands": lambda: product(epilogue=shifted, operands=[0.5, COLUMN, 3]),
    "fp32 results": lambda: product(out_dtype=FP32),
    "rows": lambda: product(offsets=OF_ROWS, rows=ROWS),
    "rows and an operand": lambda: product(
        offsets=OF_ROWS, rows=ROWS, epilogue=lambda acc, c: acc * c, operands=(numbers(T + 2, 1, dtype=FP32),)),
    "by name of the backend": lambda: product(backend="cute", precision="ieee"),
    "groups of columns": lambda: product(numbers(GROUPS, N, K), numbers(T, K).t(), ENDS),
    "groups of K": lambda: product(numbers(N, T).t().contiguous().t(), numbers(T, K), ENDS),
    "counts": lambda: product(numbers(GROUPS, 8, K), W, None, counts=torch.full((GROUPS,), 8, dtype=torch.int32)),
    "inference mode": lambda: torch.inference_mode()(product)(),
    "recorded nowhere": lambda: torch.no_grad()(product)(GRAD),
}  # fmt: skip


def by_operator(a: Any = X, b: Any = W, offsets: Any = ENDS, **options: Any) -> Any:
    operands = options.pop("operands", ())
    sizes = offsets, *(options.pop(name, None) for name in ("counts", "rows", "places")), None
    text = cutegemm.trace_epilogue(options.pop("epilogue", lambda acc: acc), operands).text
    return torch.ops.cutegemm.grouped_gemm(a, b, *sizes, *divided(operands), text, **options)


SERVED_OPERATORS: dict[str, Callable[[], Any]] = {
    "groups of rows": by_operator,
    "an operand": lambda: by_operator(epilogue=residual, operands=(MATRIX,)),
    "numbers among operands": lambda: by_operator(epilogue=shifted, operands=[0.5, COLUMN, 3]),
    "an integer first": lambda: by_operator(epilogue=shifted, operands=[3, COLUMN, 0.5]),
    "fp32 results": lambda: by_operator(out_dtype=FP32),
    "rows": lambda: by_operator(offsets=OF_ROWS, rows=ROWS),
    "counts": lambda: by_operator(
        numbers(GROUPS, 8, K), W, None, counts=torch.full((GROUPS,), 8, dtype=torch.int32)),
    "groups of K": lambda: by_operator(numbers(N, T).t().contiguous().t(), numbers(T, K), ENDS),
    "inference mode": lambda: torch.inference_mode()(by_operator)(),
    "recorded nowhere": lambda: torch.no_grad()(by_operator)(GRAD),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED_OPERATORS)
def test_operators_are_launched_from_cpp_as_python_launches_them(name):
    assert len(assert_launched_alike(SERVED_OPERATORS[name])) == 1


@pytest.mark.parametrize("name", SERVED)
def test_calls_are_launched_from_cpp_as_python_launches_them(name):
    assert len(assert_launched_alike(SERVED[name])) == 1


def _gradients() -> list[torch.Tensor]:
    a, b = X.detach().clone().requires_grad_(), W.detach().clone().requires_grad_()
    return list(torch.autograd.grad(product(a, b), (a, b), MATRIX))


def _with_tangent() -> Any:
    with forward_ad.dual_level():
        return product(forward_ad.make_dual(X, X))


def _debugged(call: Callable[..., Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        call()
        patch.setenv("CUTEGEMM_DEBUG", "1")
        return call(offsets=torch.tensor([5, 4, T], dtype=torch.int32))


OTHERS: dict[str, Callable[[], Any]] = {
    "gradients": _gradients,
    "a tangent": _with_tangent,
    "sizes that are looked at": lambda: _debugged(product),
    "the operator, sizes that are looked at": lambda: _debugged(by_operator),
    "bias": lambda: product(bias=numbers(N)),
    "out": lambda: product(out=torch.empty(T, N).bfloat16()),
    "places": lambda: product(places=torch.arange(T - 1, -1, -1, dtype=torch.int32)),
    "offsets and counts": lambda: product(counts=COUNTS),
    "neither": lambda: product(offsets=None),
    "offsets of int64": lambda: product(offsets=ENDS.long()),
    "offsets apart": lambda: product(offsets=torch.stack((ENDS, ENDS), 1)[:, 0]),
    "offsets that are a list": lambda: product(offsets=[5, 5, T]),
    "no groups": lambda: product(b=W[:0], offsets=ENDS[:0]),
    "rows of int64": lambda: product(offsets=OF_ROWS, rows=ROWS.long()),
    "no rows": lambda: product(X[:0]),
    "no k": lambda: product(X[:, :0], W[:, :0]),
    "operands without an epilogue": lambda: product(operands=(MATRIX,)),
    "operands that are a tensor": lambda: product(epilogue=residual, operands=MATRIX),
    "an operand of another shape": lambda: product(epilogue=residual, operands=(MATRIX[:7],)),
    "a number beyond fp32": lambda: product(epilogue=shifted, operands=(1e39, COLUMN, 3)),
    "no such save": lambda: product(save="all"),
    "no such backend": lambda: product(backend="none"),
    "no such dtype": lambda: product(out_dtype="bf16"),
    "an epilogue that is none": lambda: product(epilogue=3),
    "torch's backend": lambda: product(backend="torch"),
    "a configuration": lambda: product(config="sm90/64x64x64/coop1/c1x1/s4/row"),
    "fp32": lambda: product(X.float(), W.float()),
    "dtypes that differ": lambda: product(X.float()),
    "autocast": lambda: autocast(lambda: product(X.float(), W.float())),
    "the operator, gradients": lambda: torch.autograd.grad(by_operator(GRAD), GRAD, [MATRIX]),
    "the operator, zeros behind the groups": lambda: by_operator(
        offsets=torch.tensor([5, 5, 9], dtype=torch.int32), zeros=True),
    "the operator, places": lambda: by_operator(places=torch.arange(T - 1, -1, -1, dtype=torch.int32)),
    "the operator, offsets and counts": lambda: by_operator(counts=COUNTS),
    "the operator, neither": lambda: by_operator(offsets=None),
    "the operator, a configuration": lambda: by_operator(config="sm90/64x64x64/coop1/c1x1/s4/row"),
    "the operator, no such save": lambda: by_operator(save="all"),
    "the operator, no such backend": lambda: by_operator(backend="none"),
    "the operator, an operand of another shape": lambda: by_operator(epilogue=residual, operands=(MATRIX[:7],)),
    "the operator, a number beyond fp32": lambda: by_operator(epilogue=shifted, operands=(1e39, COLUMN, 3)),
    "the operator, fp32": lambda: by_operator(X.float(), W.float()),
    "the operator, autocast": lambda: autocast(lambda: by_operator(X.float(), W.float())),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_results_and_errors_are_those_of_python(name):
    assert_same_outcome(OTHERS[name])


def test_calls_with_one_key_launch_one_kernel():
    calls: list[Callable[[], Any]] = [
        *(SERVED[name] for name in SERVED if name != "by name of the backend"),
        lambda: cutegemm.gemm(X, W[0]),
        lambda: cutegemm.gemm(X, W[0], epilogue=ops.relu),
        lambda: product(epilogue=shifted, operands=(2, COLUMN, 3.5)),
        lambda: product(X.half(), W.half()),
        *(lambda call=SERVED_OPERATORS[name]: call()[0] for name in SERVED_OPERATORS),
    ]
    assert_each_has_a_launch_of_its_own(calls)


@pytest.mark.parametrize("name", ["gemm_program", "grouped_gemm"])
def test_a_known_call_refuses_what_it_cannot_save(name):
    first = (X, W[0]) if name == "gemm_program" else (X, W, ENDS, None, None, None, None)
    given = *first, [], [], [], cutegemm.trace_epilogue(ops.relu, ()).text
    with served(in_cpp=True):
        for _ in range(2):
            getattr(torch.ops.cutegemm, name)(*given)
        with pytest.raises(ValueError, match="save: got 'all', accepted are"):
            getattr(torch.ops.cutegemm, name)(*given, save="all")


def test_a_pass_in_front_is_left_to_python(monkeypatch):
    """It gathers the rows of wide products."""
    monkeypatch.setattr(packing, "gathers_first", lambda *given: True)
    grouped.memo.clear()
    (expected, by_python), (found, by_cpp) = both(SERVED["rows"])
    assert torch.equal(expected[0], found[0])
    assert {by for by, _ in by_python} == {by for by, _ in by_cpp} == {"Python"}


@pytest.mark.parametrize("name", ["groups of rows", "rows"])
def test_a_launch_that_fails_is_left_to_python(name):
    with served(in_cpp=True) as launched:
        expected = [SERVED[name]() for _ in range(2)][-1]
        launched.clear()
        refuse_next.append(-1)
        assert torch.equal(SERVED[name](), expected)
        assert [each.by for each in launched] == ["C++", "Python"]


def test_what_is_forgotten_in_python_is_forgotten_there():
    with served(in_cpp=True) as launched:
        for _ in range(2):
            product()
        assert host_stub.extension().known() == 1
        grouped.memo.clear()
        assert host_stub.extension().known() == 0
        for by in ("Python", "C++"):
            product()
            assert launched[-1].by == by


def test_gradients_of_weights_are_launched_from_cpp():
    """Those of tokens need a launch in front, which clears rows that are in no group."""
    with served(in_cpp=True) as launched:
        for _ in range(3):
            launched.clear()
            _gradients()
        assert [each.by for each in launched] == ["C++", "Python", "Python", "C++"]
