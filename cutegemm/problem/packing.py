"""Operands of one byte: tensor cores read them along K, in rows that begin at multiples of 16 bytes.

Instructions that transpose shared tiles move elements of 16 bits. So an operand of fp8 or int8 whose K is not
contiguous, or whose rows begin elsewhere, is copied into rows that are padded to whole 16 bytes. TMA ends at K, so that
nothing reads what lies behind it.
"""

from __future__ import annotations

import torch

from cutegemm.problem.operand import Matrix

STEP = 16
"""Bytes that the distance of packed rows is a multiple of."""


def operands(
    a: torch.Tensor, b: torch.Tensor, matrix_a: Matrix, matrix_b: Matrix, copies: list[tuple[str, str]]
) -> tuple[Matrix, Matrix]:
    """How kernels see A (M, K) and B (K, N) of one byte; names in `copies` what must be packed for that."""
    return _seen("a", a, matrix_a, copies), _seen("b", b, matrix_b.transposed(), copies).transposed()


def _seen(name: str, tensor: torch.Tensor, matrix: Matrix, copies: list[tuple[str, str]]) -> Matrix:
    """The operand as (rows, K)."""
    rows, k = matrix.rows, matrix.cols
    padded = -(-max(k, 1) // STEP) * STEP
    if rows == 0 or k == 0:
        return Matrix(rows, k, padded, 1, 0, 16)
    along_k = matrix.stride_col == 1 and (rows == 1 or matrix.stride_row >= k)
    if along_k and max(matrix.align, matrix.begins) >= 16:
        # Of a single row the distance to the next is free, and TMA wants 16 bytes.
        return matrix._replace(stride_row=padded if rows == 1 else matrix.stride_row, align=16, begins=0)
    strides = tuple(tensor.stride())
    if along_k:
        why = f"strides {strides} and address: rows of one-byte elements must begin at multiples of 16 bytes"
    else:
        why = f"strides {strides}: tensor cores read elements of one byte along K"
    copies.append((name, why))
    matrices = tensor.shape[0] if tensor.dim() == 3 else 1
    return Matrix(rows, k, padded, 1, rows * padded if matrices > 1 else 0, 16)


def packed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of operand "a" or "b" as `operands` describes it: K contiguous, rows padded to a multiple of `STEP`."""
    bits = tensor.detach().view(torch.uint8)
    bits = bits if name == "a" else bits.transpose(-1, -2)
    k = bits.shape[-1]
    made = torch.empty((*bits.shape[:-1], -(-k // STEP) * STEP), dtype=torch.uint8, device=bits.device)[..., :k]
    found = made.copy_(bits).view(tensor.dtype)
    return found if name == "a" else found.transpose(-1, -2)


def copied(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The copy of operand "a" or "b" that a request with it among its copies stands for."""
    return packed(name, tensor) if tensor.element_size() == 1 else tensor.contiguous()
