"""Ready programs: gating, dropout, the masks and embeddings of attention, scales."""

from __future__ import annotations

import numbers
from typing import Any

from cutegemm.ops.elements import Operand, abs, clamp, gelu, gelu_tanh, minimum, relu, sigmoid, silu, where
from cutegemm.ops.places import column, halves, pairs, partner, random, repeated, row
from cutegemm.problem.program import value

__all__ = [
    "alibi", "causal", "clamped_swiglu", "dropout", "geglu", "geglu_pairs", "geglu_tanh", "geglu_tanh_pairs", "reglu",
    "reglu_pairs", "rope", "scaled", "swiglu", "swiglu_pairs",
]  # fmt: skip


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


def clamped_swiglu(gate: Operand, up: Operand, limit: Operand, alpha: Operand = 1.0, offset: Operand = 0.0) -> Any:
    """g sigmoid(alpha g) (clamp(up, -limit, limit) + offset) with g = minimum(gate, limit), elementwise.

    Experts of gpt-oss have limit=7, alpha=1.702 and offset=1 with (gate, up) = pairs(acc), those of DeepSeek-V4 a limit
    alone with halves(acc) (transformers 5.17).

    >>> clamped_swiglu(torch.tensor([9.0, 0.0]), torch.tensor([1.0, 5.0]), 7.0)
    tensor([6.9936, 0.0000])
    """
    gate = minimum(gate, limit)
    return gate * sigmoid(gate * alpha) * (clamp(up, -limit, limit) + offset)


def dropout(x: Operand, p: Operand, seed: Operand) -> Any:
    """x / (1 - p) with probability 1 - p, else 0, elementwise: inverted dropout by `random(seed)`.

    p: a number in [0, 1), or a value; where that is 1 or more the result and its gradient are 0. seed: a Python int, or
    an int32 operand that changes without a new kernel.

    Example (operands=(residual, step)):
        lambda acc, residual, seed: ops.dropout(acc, 0.1, seed) + residual
    """
    if isinstance(p, numbers.Real):
        p = float(p)
        if not 0 <= p < 1:
            value.fail(f"dropout: p is {p}, accepted are 0 <= p < 1")
        kept: Any = 1.0 - p
    else:
        kept = 1.0 - p
        kept = where(kept > 0.0, kept, 1.0)  # a derivative is 0 times the factor, which must be finite
    return where(random(seed) >= p, x * (1.0 / kept), 0.0)


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


def rope(x: Operand, cos: Operand, sin: Operand, head: int | None = None) -> Any:
    """Rotary position embedding on interleaved pairs: columns (2j, 2j + 1) of x are rotated.

    out = x cos + (partner(x) at odd columns, -partner(x) at even ones) sin. cos, sin: (M, N), where columns 2j and
    2j + 1 have the same angle; with cos 1 and sin 0 a column (of V) stays as it is.

    head: the columns of a head, an even number, where all heads have the same angles. cos and sin are then (M, head),
    as models hold them, and are `repeated`.

    Models of Hugging Face rotate columns j and j + head / 2 of a head instead. Rows of their query and key weights (and
    biases), reordered once, give neighbouring pairs, and the same scores, because queries and keys are reordered alike:
        weight = weight.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)
    Of their tables the first half of the columns counts: cos = cos[:, : head // 2].repeat_interleave(2, dim=1).

    Example, the queries and keys of a QKV projection, whose V begins at column 5120 (operands=(cos, sin)):
        lambda acc, cos, sin: ops.where(ops.column() < 5120, ops.rope(acc, cos, sin, head=128), acc)
    """
    if head is not None:
        if isinstance(head, int) and head % 2:
            value.fail(f"rope: got head={head}, accepted are even numbers: two neighbouring columns rotate together")
        cos, sin = repeated(cos, head), repeated(sin, head)
    return x * cos + where(column() % 2 == 1, partner(x), -partner(x)) * sin


def scaled(x: Operand, rows: Operand, columns: Operand) -> Any:
    """x times a scale of its row and a scale of its column, elementwise. rows: (M, 1). columns: (N,) or (1, N).

    >>> scaled(torch.ones(1, 2), torch.tensor([[2.0]]), torch.tensor([1.0, 3.0]))
    tensor([[2., 6.]])
    """
    return x * rows * columns
