"""What an epilogue is written with: functions of fp32 values, indices, casts, gating, reductions, and ready programs.

An epilogue is a Python function of `acc`, the fp32 accumulators of a product, and of its operands. It is written for
one element of D and called once, with symbolic values; every kernel then computes what it returns:

    y = cutegemm.gemm(x, w, epilogue=lambda acc, bias, res: ops.gelu(acc + bias) + res, operands=(bias, residual))
    h = cutegemm.gemm(x, w_gate_up, epilogue=ops.swiglu)

Functions of numbers also take a torch.Tensor and compute on it in its dtype, so that an epilogue can be tried on
tensors; those that need an element's place in D raise EpilogueError there. All raise EpilogueError, a TypeError that
names the line of the epilogue, for what they do not take.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch

from cutegemm.problem.dtypes import TABLE, torch_dtype
from cutegemm.problem.program import value
from cutegemm.problem.program.evaluate import UNARY

__all__ = [
    "abs", "alibi", "cast", "causal", "clamp", "column", "column_max", "column_max_abs", "column_sum", "dropout", "erf",
    "exp", "exp2", "geglu", "geglu_pairs", "geglu_tanh", "geglu_tanh_pairs", "gelu", "gelu_tanh", "halves", "log",
    "log2", "matrix", "maximum", "minimum", "pairs", "partner", "random", "reciprocal", "reglu", "reglu_pairs", "relu",
    "rope", "row", "row_max", "row_max_abs", "row_sum", "rsqrt", "scaled", "sigmoid", "silu", "sqrt", "swiglu",
    "swiglu_pairs", "tanh", "where",
]  # fmt: skip

Operand = Any
"""A value of the epilogue, a Python number, or a torch.Tensor when an epilogue is tried on tensors."""


def _unary(op: str, x: Operand) -> Any:
    if isinstance(x, torch.Tensor):
        return UNARY[op](x)
    if isinstance(x, numbers.Real):
        return float(UNARY[op](torch.tensor(float(x), dtype=torch.float64)))
    return value.function(op, x)


def _binary(op: str, x: Operand, y: Operand) -> Any:
    if not any(isinstance(each, value.Value) for each in (x, y)):
        tensors = [each for each in (x, y) if isinstance(each, torch.Tensor)]
        dtype = tensors[0].dtype if tensors else torch.float64
        result = getattr(torch, op)(torch.as_tensor(x, dtype=dtype), torch.as_tensor(y, dtype=dtype))
        return result if tensors else float(result)
    return value.function(op, x, y)


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
    """The lesser of two, elementwise, broadcast; NaN if one is NaN.

    >>> minimum(torch.tensor([1.0, 5.0]), 3.0)
    tensor([1., 3.])
    """
    return _binary("minimum", x, y)


def maximum(x: Operand, y: Operand) -> Any:
    """The greater of two, elementwise, broadcast; NaN if one is NaN.

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


def row() -> Any:
    """The element's row in D, an int32 from 0 to M - 1. Integers have + - * // % and comparisons; with fp32 they are
    converted.

    Example, the lower triangle of D:
        lambda acc: ops.where(ops.column() <= ops.row(), acc, 0.0)
    """
    return value.leaf("row")


def column() -> Any:
    """The element's column in D, an int32 from 0 to N - 1 (to N / 2 - 1 with gating).

    Example, a stripe of every fourth column:
        lambda acc: ops.where(ops.column() % 4 == 0, acc, 0.0)
    """
    return value.leaf("column")


def matrix() -> Any:
    """The number of the matrix in the batch, an int32 from 0 to L - 1; 0 without a batch.

    Example, only the first matrix with an activation:
        lambda acc: ops.where(ops.matrix() == 0, ops.relu(acc), acc)
    """
    return value.leaf("matrix")


def halves(acc: Operand) -> tuple[Any, Any]:
    """(gate, up): columns j and N / 2 + j of the product, for a weight that stacks [gate; up]. D has N / 2 columns.

    acc itself, (M, N), may then not be used otherwise; N is even.

    Example, SwiGLU:
        lambda acc: (lambda gate, up: ops.silu(gate) * up)(*ops.halves(acc))
    """
    if isinstance(acc, torch.Tensor):
        _even(acc, "halves")
        gate, up = acc.chunk(2, -1)
        return gate, up
    return value.divided("halves", acc)


def pairs(acc: Operand) -> tuple[Any, Any]:
    """(gate, up): columns 2j and 2j + 1 of the product, for a weight that interleaves them. D has N / 2 columns.

    acc itself, (M, N), may then not be used otherwise; N is even.

    >>> pairs(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    (tensor([[1., 3.]]), tensor([[2., 4.]]))
    """
    if isinstance(acc, torch.Tensor):
        _even(acc, "pairs")
        return acc[..., 0::2], acc[..., 1::2]
    return value.divided("pairs", acc)


def partner(x: Operand) -> Any:
    """The value at the neighbouring column of D: columns 2j and 2j + 1 exchanged. N is even.

    >>> partner(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    tensor([[2., 1., 4., 3.]])
    """
    if isinstance(x, torch.Tensor):
        _even(x, "partner")
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return value.function("partner", x)


def _even(x: torch.Tensor, what: str) -> None:
    if x.dim() == 0 or x.shape[-1] % 2:
        value.fail(f"{what}: expected an even number of columns, got a tensor of shape {tuple(x.shape)}")


def random(seed: Operand) -> Any:
    """A random number in [0, 1) for each element of D, of 24 bits: the same for the same seed, row, column and matrix,
    whatever kernel computes it (Philox 2x32-10, see `cutegemm.problem.program.random`).

    seed: a Python int, which becomes part of the kernel, or an int32 operand, which does not.

    Example, stochastic masking with a seed that changes every step (operands=(step,)):
        lambda acc, seed: ops.where(ops.random(seed) < 0.5, acc, 0.0)
    """
    return value.random(seed)


def _reduced(kind: str, x: Operand) -> Any:
    if not isinstance(x, torch.Tensor):
        return value.reduction(kind, x)
    axis = -1 if kind.startswith("row") else -2
    if kind.endswith("sum"):
        return x.sum(axis, keepdim=True)
    return (x.abs() if kind.endswith("abs") else x).amax(axis, keepdim=True)


def row_sum(x: Operand) -> Any:
    """A result: the sum of x over each row of D, (M, 1) in fp32 unless cast. The same bits every run.

    Example, a second result for a following RMSNorm:
        lambda acc, residual: (y := acc + residual, ops.row_sum(y * y))
    """
    return _reduced("row_sum", x)


def row_max(x: Operand) -> Any:
    """A result: the greatest x of each row of D, (M, 1) in fp32 unless cast; NaN if one is NaN.

    >>> row_max(torch.tensor([[1.0, 2.0]]))
    tensor([[2.]])
    """
    return _reduced("row_max", x)


def row_max_abs(x: Operand) -> Any:
    """A result: the greatest |x| of each row of D, (M, 1) in fp32 unless cast; for the scales of a quantized copy.

    >>> row_max_abs(torch.tensor([[1.0, -2.0]]))
    tensor([[2.]])
    """
    return _reduced("row_max_abs", x)


def column_sum(x: Operand) -> Any:
    """A result: the sum of x over each column of D, (1, N) in fp32 unless cast, such as the gradient of a bias.

    >>> column_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[4., 6.]])
    """
    return _reduced("column_sum", x)


def column_max(x: Operand) -> Any:
    """A result: the greatest x of each column of D, (1, N) in fp32 unless cast; NaN if one is NaN.

    >>> column_max(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 4.]])
    """
    return _reduced("column_max", x)


def column_max_abs(x: Operand) -> Any:
    """A result: the greatest |x| of each column of D, (1, N) in fp32 unless cast.

    >>> column_max_abs(torch.tensor([[1.0, -5.0], [3.0, 4.0]]))
    tensor([[3., 5.]])
    """
    return _reduced("column_max_abs", x)


def swiglu(acc: Operand) -> Any:
    """silu(gate) * up with (gate, up) = halves(acc): (M, 2F) of accumulators to (M, F).

    Example, the first projection of a Llama MLP, whose weight is [gate; up]:
        h = cutegemm.gemm(x, w_gate_up, epilogue=ops.swiglu)
    """
    gate, up = halves(acc)
    return silu(gate) * up


def geglu(acc: Operand) -> Any:
    """gelu(gate) * up with (gate, up) = halves(acc): (M, 2F) of accumulators to (M, F).

    Example:
        h = cutegemm.gemm(x, w_gate_up, epilogue=ops.geglu)
    """
    gate, up = halves(acc)
    return gelu(gate) * up


def geglu_tanh(acc: Operand) -> Any:
    """gelu_tanh(gate) * up with (gate, up) = halves(acc), as Gemma has it: (M, 2F) of accumulators to (M, F).

    Example:
        h = cutegemm.gemm(x, w_gate_up, epilogue=ops.geglu_tanh)
    """
    gate, up = halves(acc)
    return gelu_tanh(gate) * up


def reglu(acc: Operand) -> Any:
    """relu(gate) * up with (gate, up) = halves(acc): (M, 2F) of accumulators to (M, F).

    >>> reglu(torch.tensor([[1.0, -1.0, 5.0, 5.0]]))
    tensor([[5., 0.]])
    """
    gate, up = halves(acc)
    return relu(gate) * up


def swiglu_pairs(acc: Operand) -> Any:
    """`swiglu` of (gate, up) = pairs(acc), for a weight that interleaves the two: (M, 2F) to (M, F).

    Example:
        h = cutegemm.gemm(x, w_interleaved, epilogue=ops.swiglu_pairs)
    """
    gate, up = pairs(acc)
    return silu(gate) * up


def geglu_pairs(acc: Operand) -> Any:
    """`geglu` of (gate, up) = pairs(acc), for a weight that interleaves the two: (M, 2F) to (M, F).

    Example:
        h = cutegemm.gemm(x, w_interleaved, epilogue=ops.geglu_pairs)
    """
    gate, up = pairs(acc)
    return gelu(gate) * up


def geglu_tanh_pairs(acc: Operand) -> Any:
    """`geglu_tanh` of (gate, up) = pairs(acc), for a weight that interleaves the two: (M, 2F) to (M, F).

    Example:
        h = cutegemm.gemm(x, w_interleaved, epilogue=ops.geglu_tanh_pairs)
    """
    gate, up = pairs(acc)
    return gelu_tanh(gate) * up


def reglu_pairs(acc: Operand) -> Any:
    """`reglu` of (gate, up) = pairs(acc), for a weight that interleaves the two: (M, 2F) to (M, F).

    >>> reglu_pairs(torch.tensor([[1.0, 5.0, -1.0, 5.0]]))
    tensor([[5., 0.]])
    """
    gate, up = pairs(acc)
    return relu(gate) * up


def dropout(x: Operand, p: Operand, seed: Operand) -> Any:
    """x / (1 - p) with probability 1 - p, else 0, elementwise: inverted dropout by `random(seed)`.

    p: a number in [0, 1), or a value. seed: a Python int, or an int32 operand that changes without a new kernel.

    Example (operands=(residual, step)):
        lambda acc, residual, seed: ops.dropout(acc, 0.1, seed) + residual
    """
    if isinstance(p, (int, float)) and not 0 <= p < 1:
        value.fail(f"dropout: p is {p}, accepted are 0 <= p < 1")
    return where(random(seed) >= p, x * (1.0 / (1.0 - p)), 0.0)


def causal(x: Operand, fill: Operand = float("-inf"), offset: Operand = 0) -> Any:
    """x where column <= row + offset, else `fill`, elementwise: the causal mask of attention scores, (M, N).

    offset: a Python int or an int32 operand, such as the length of a cache of earlier keys.

    Example:
        scores = cutegemm.gemm(q, k.mT, epilogue=lambda acc: ops.causal(acc * 0.125))
    """
    return where(column() <= row() + offset, x, fill)


def alibi(x: Operand, slope: Operand) -> Any:
    """x - slope |row - column|, elementwise: attention with linear biases (Press, Smith, Lewis, 2022).

    slope: a number, or an operand with one for each matrix (head), of shape (L, 1, 1).

    Example (operands=(slopes,)):
        lambda acc, slopes: ops.causal(ops.alibi(acc * 0.125, slopes))
    """
    return x - slope * abs(row() - column())


def rope(x: Operand, cos: Operand, sin: Operand) -> Any:
    """Rotary position embedding on interleaved pairs: columns (2j, 2j + 1) of x are rotated.

    out = x cos + (partner(x) at odd columns, -partner(x) at even ones) sin. cos, sin: (M, N), where columns 2j and
    2j + 1 have the same angle; with cos 1 and sin 0 a column (of V) stays as it is.

    Example, the queries and keys of a QKV projection (operands=(cos, sin)):
        lambda acc, cos, sin: ops.rope(acc, cos, sin)
    """
    return x * cos + where(column() % 2 == 1, partner(x), -partner(x)) * sin


def scaled(x: Operand, rows: Operand, columns: Operand) -> Any:
    """x times a scale of its row and a scale of its column, elementwise. rows: (M, 1). columns: (N,) or (1, N).

    >>> scaled(torch.ones(1, 2), torch.tensor([[2.0]]), torch.tensor([1.0, 3.0]))
    tensor([[2., 6.]])
    """
    return x * rows * columns
