"""Functions of the numbers of an epilogue, element by element: exponentials, activations, comparisons, casts."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from cutegemm.problem.dtypes import TABLE, torch_dtype
from cutegemm.problem.program import value
from cutegemm.problem.program.evaluate import UNARY

__all__ = [
    "abs", "cast", "clamp", "erf", "exp", "exp2", "gelu", "gelu_tanh", "log", "log2", "logical_not", "maximum",
    "minimum", "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sqrt", "tanh", "where",
]  # fmt: skip

Operand = Any
"""A value of the epilogue, a Python number, or a torch.Tensor when an epilogue is tried on tensors."""


def _unary(op: str, x: Operand) -> Any:
    if isinstance(x, torch.Tensor):
        return UNARY[op](x)
    if isinstance(x, numbers.Real):
        return _of_numbers(op, slice(x, None))
    return value.function(op, x)


def _binary(op: str, x: Operand, y: Operand) -> Any:
    if isinstance(x, numbers.Real) and isinstance(y, numbers.Real):
        return _of_numbers(op, slice(x, y))
    tensors = [each for each in (x, y) if isinstance(each, torch.Tensor)]
    if tensors and not any(isinstance(each, value.Value) for each in (x, y)):
        dtype, device = tensors[0].dtype, tensors[0].device
        return getattr(torch, op)(*(torch.as_tensor(each, dtype=dtype, device=device) for each in (x, y)))
    return value.function(op, x, y)


def _of_numbers(op: str, given: slice) -> float:
    """A function of one number or two. torch.compile calls it, and makes constants of numbers in a slice, which it
    guards.
    """
    known = [float(each) for each in (given.start, given.stop) if each is not None]
    function: Any = UNARY[op] if len(known) == 1 else getattr(torch, op)
    return float(function(*(torch.tensor(each, dtype=torch.float64, device="cpu") for each in known)))


_of_numbers._dynamo_marked_constant = True  # type: ignore[attr-defined]


def exp(x: Operand) -> Any:
    """e to the power of x, elementwise; relative error about 2^-22 + 2^-23 |x| on a GPU.

    >>> exp(0.0)
    1.0
    """
    return _unary("exp", x)


def exp2(x: Operand) -> Any:
    """2 to the power of x, elementwise; the fastest of the exponentials.

    >>> exp2(3.0)
    8.0
    """
    return _unary("exp2", x)


def log(x: Operand) -> Any:
    """The natural logarithm, elementwise; NaN for negative x.

    >>> log(1.0)
    0.0
    """
    return _unary("log", x)


def log2(x: Operand) -> Any:
    """The logarithm to the base 2, elementwise; NaN for negative x.

    >>> log2(8.0)
    3.0
    """
    return _unary("log2", x)


def sqrt(x: Operand) -> Any:
    """The square root, elementwise; NaN for negative x.

    >>> sqrt(9.0)
    3.0
    """
    return _unary("sqrt", x)


def rsqrt(x: Operand) -> Any:
    """1 / sqrt(x), elementwise.

    >>> rsqrt(4.0)
    0.5
    """
    return _unary("rsqrt", x)


def reciprocal(x: Operand) -> Any:
    """1 / x, elementwise.

    >>> reciprocal(4.0)
    0.25
    """
    return _unary("reciprocal", x)


def tanh(x: Operand) -> Any:
    """The hyperbolic tangent, elementwise; absolute error about 2^-21.

    >>> tanh(torch.tensor([0.0]))
    tensor([0.])
    """
    return _unary("tanh", x)


def sigmoid(x: Operand) -> Any:
    """1 / (1 + exp(-x)), elementwise; absolute error about 2^-21.

    >>> sigmoid(0.0)
    0.5
    """
    return _unary("sigmoid", x)


def erf(x: Operand) -> Any:
    """The error function, elementwise; absolute error about 2^-21.

    >>> erf(torch.tensor([0.0]))
    tensor([0.])
    """
    return _unary("erf", x)


def abs(x: Operand) -> Any:
    """|x|, elementwise; Python's own `abs` does the same.

    >>> abs(torch.tensor([-2.0]))
    tensor([2.])
    """
    return _unary("abs", x)


def minimum(x: Operand, y: Operand) -> Any:
    """The smaller of two numbers, elementwise with broadcasting; NaN if one of them is NaN.

    >>> minimum(torch.tensor([1.0, 5.0]), 3.0)
    tensor([1., 3.])
    """
    return _binary("minimum", x, y)


def maximum(x: Operand, y: Operand) -> Any:
    """The larger of two numbers, elementwise with broadcasting; NaN if one of them is NaN.

    >>> maximum(torch.tensor([1.0, 5.0]), 3.0)
    tensor([3., 5.])
    """
    return _binary("maximum", x, y)


def clamp(x: Operand, least: Operand, greatest: Operand) -> Any:
    """minimum(maximum(x, least), greatest), elementwise.

    >>> clamp(torch.tensor([-9.0, 0.5]), -1.0, 1.0)
    tensor([-1.0000,  0.5000])
    """
    return minimum(maximum(x, least), greatest)


def where(condition: Operand, x: Operand, y: Operand) -> Any:
    """x where the condition holds, else y, elementwise and in fp32: what Python's `if` cannot do in an epilogue.

    >>> where(torch.tensor([True, False]), 1.0, 2.0)
    tensor([1., 2.])
    """
    return torch.where(condition, x, y) if isinstance(condition, torch.Tensor) else value.where(condition, x, y)


def logical_not(condition: Operand) -> Any:
    """Whether a condition does not hold, elementwise: `~condition`, which torch.compile does not follow.

    >>> logical_not(torch.tensor([True, False]))
    tensor([False,  True])
    """
    if isinstance(condition, torch.Tensor):
        return torch.logical_not(condition)
    return value.condition("not", "logical_not", condition)


def relu(x: Operand) -> Any:
    """max(x, 0), elementwise; NaN stays NaN.

    >>> relu(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    return _unary("relu", x)


def gelu(x: Operand) -> Any:
    """x times the standard normal distribution function of x, elementwise (torch's gelu with approximate="none").

    >>> gelu(torch.tensor([0.0]))
    tensor([0.])
    """
    return _unary("gelu", x)


def gelu_tanh(x: Operand) -> Any:
    """The tanh approximation of gelu, elementwise (torch's gelu with approximate="tanh").

    >>> gelu_tanh(torch.tensor([0.0]))
    tensor([0.])
    """
    return _unary("gelu_tanh", x)


def silu(x: Operand) -> Any:
    """x sigmoid(x), elementwise; also called swish.

    >>> silu(torch.tensor([0.0]))
    tensor([0.])
    """
    return _unary("silu", x)


def cast(x: Operand, dtype: torch.dtype | str) -> Any:
    """x rounded to a dtype, elementwise. As a result of an epilogue it says the dtype of that output.

    dtype: a torch.dtype that kernels have, or its short name ("bf16"). Of a reduction: the dtype it is stored in.

    >>> cast(torch.tensor([1.001]), torch.bfloat16).dtype
    torch.bfloat16
    """
    if not isinstance(x, torch.Tensor):
        return value.cast(x, dtype)
    return x.to(torch_dtype(dtype) if isinstance(dtype, str) and dtype in TABLE else dtype)
