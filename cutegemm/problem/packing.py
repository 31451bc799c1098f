"""Operands of one byte: tensor cores read them along K, in rows of whole 16 bytes; all others are packed first.

Instructions that transpose shared tiles move elements of 16 bits. So an operand of fp8 or int8 whose K is not contiguous,
or whose rows do not begin at multiples of 16 bytes, is copied into rows that do, with zeros behind them. A call then
multiplies matrices of a K that 16 divides; zeros change no sum.
"""

from __future__ import annotations

import torch

from cutegemm.problem.operand import Matrix

STEP = 16
"""Elements of K that a row of a packed operand is a multiple of."""


def operands(
    a: torch.Tensor, b: torch.Tensor, matrix_a: Matrix, matrix_b: Matrix, copies: list[tuple[str, str]]
) -> tuple[Matrix, Matrix, int]:
    """How kernels see A (M, K) and B (K, N) of one byte, and their K; names in `copies` what must be packed for that."""
    k = matrix_a.cols
    padded = -(-k // STEP) * STEP
    found_a, found_b = _seen("a", a, matrix_a, copies), _seen("b", b, matrix_b.transposed(), copies)
    return found_a._replace(cols=padded), found_b._replace(cols=padded).transposed(), padded


def _seen(name: str, tensor: torch.Tensor, matrix: Matrix, copies: list[tuple[str, str]]) -> Matrix:
    """The operand as (rows, K)."""
    rows, k = matrix.rows, matrix.cols
    padded = -(-k // STEP) * STEP
    if rows == 0 or k == 0:
        return Matrix(rows, k, max(padded, STEP), 1, 0, 16)
    along_k = matrix.stride_col == 1 and (rows == 1 or matrix.stride_row >= k)
    if along_k and matrix.align >= 16:
        return matrix
    strides = tuple(tensor.stride())
    if not along_k:
        why = f"strides {strides}: tensor cores read operands of one byte along K"
    elif k % STEP:
        why = f"K = {k}: rows of one-byte elements need a multiple of {STEP}; padded with zeros"
    else:
        why = f"strides {strides} and address: rows must begin at multiples of 16 bytes"
    copies.append((name, why))
    matrices = tensor.shape[0] if tensor.dim() == 3 else 1
    return Matrix(rows, k, padded, 1, rows * padded if matrices > 1 else 0, 16)


def packed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of operand "a" or "b" as `operands` describes it: K contiguous, padded with zeros to a multiple of `STEP`."""
    bits = tensor.detach().view(torch.uint8)
    bits = bits if name == "a" else bits.transpose(-1, -2)
    k = bits.shape[-1]
    padded = -(-k // STEP) * STEP
    made = torch.empty((*bits.shape[:-1], padded), dtype=torch.uint8, device=bits.device)
    made[..., :k].copy_(bits)
    made[..., k:].zero_()
    found = made.view(tensor.dtype)
    return found if name == "a" else found.transpose(-1, -2)


def copied(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The copy of operand "a" or "b" that a request with it among its copies stands for."""
    return packed(name, tensor) if tensor.element_size() == 1 else tensor.contiguous()
