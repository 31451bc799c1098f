"""What depends on the place of an element in D: indices, gating, its neighbour, random numbers, reductions, scales."""

from __future__ import annotations

from typing import Any

import torch

from cutegemm.ops.elements import Operand
from cutegemm.problem import quantization
from cutegemm.problem.program import value

__all__ = [
    "column", "column_max", "column_max_abs", "column_sum", "halves", "matrix", "pairs", "partner", "quantize",
    "random", "repeated", "row", "row_max", "row_max_abs", "row_sum",
]  # fmt: skip


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


def repeated(operand: Operand, columns: int) -> Any:
    """An operand (M, P) or (P,), P = columns, that repeats along the columns of D: column j of D takes column j % P.

    So what all heads of an attention layer share is read as it is, and is not copied for each. It holds for the
    operand wherever the epilogue uses it. columns: a Python int from 2 on; each makes a kernel of its own. N need not
    be a multiple of it. An operand of one column, or a number, is the same in every column, as ever.

    Raises EpilogueError for anything but an operand as it was given.

    Example, a scale for each of the 128 columns of a head (operands=(scale,)):
        lambda acc, scale: acc * ops.repeated(scale, 128)
    """
    return value.repeated(operand, columns)


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
    """A result: the greatest |x| of each row of D, (M, 1) in fp32 unless cast; for the scales of a quantized copy. A
    row without columns gives minus infinity, as with `row_max`.

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
    """A result: the greatest |x| of each column of D, (1, N) in fp32 unless cast. A column without rows gives
    minus infinity, as with `column_max`.

    >>> column_max_abs(torch.tensor([[1.0, -5.0], [3.0, 4.0]]))
    tensor([[3., 5.]])
    """
    return _reduced("column_max_abs", x)


def quantize(x: Operand, dtype: torch.dtype | str) -> tuple[Any, Any]:
    """Quantizes x with one scale for every 128 columns of a row of D. Returns (values, scales): values (M, N) in that
    dtype, and scales (M, ceil(N / 128)) in fp32; with a batch (L, ...). They have the bits of `cutegemm.quantize(x,
    dtype, "blocks")` for x in fp32. Return both as results of the epilogue, and pass them as `a` and `scale_a` to the
    next product, which so need not read D in 16 bits.

    dtype: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8, or "e4m3", "e5m2" or "int8".

    On GPUs of compute capability 9.0 a kernel does this, where rows of D are multiples of 16 bytes and there are no
    other results and no (M, N) operands. Else backend "auto" computes the call by torch's operations, and "cute" raises
    UnsupportedError.

    Raises EpilogueError for another dtype, and for a tensor that is no matrix. The call raises ValueError where it
    would record a gradient, and for groups of columns.

    Example, the hidden layer of a gated MLP, which is rounded to bf16 first:
        lambda acc: ops.quantize(ops.cast(ops.swiglu(acc), torch.bfloat16), torch.float8_e4m3fn)

    >>> values, scales = quantize(torch.full((1, 256), 448.0), torch.float8_e4m3fn)
    >>> scales
    tensor([[1., 1.]])
    """
    name = value.name_of(dtype)
    if name not in quantization.NAMED:
        names = ", ".join(quantization.NAMED)
        value.fail(f"quantize: dtype {dtype!r}, accepted are {names} and {quantization.ACCEPTED}")
    if not isinstance(x, torch.Tensor):
        return value.quantized(x, name)
    if x.dim() not in (2, 3):
        value.fail(f"quantize: x has shape {tuple(x.shape)}, accepted are (M, N) and (L, M, N)")
    format, group = quantization.NAMED[name], quantization.Group(1, quantization.BLOCK)
    scale = quantization.scale_of(x, format, group)
    return quantization.values_of(x, scale, format), scale
