"""Operands that kernels read along K, in rows that begin at multiples of 16 bytes, and are copied into such rows.

Of one byte: instructions that transpose shared tiles move elements of 16 bits. So an operand of fp8 or int8 whose K is
not contiguous, or whose rows begin elsewhere, is copied into rows that are padded to whole 16 bytes. TMA ends at K, so
that nothing reads what lies behind it.

Divided by groups: a box of TMA begins at a multiple of 16 bytes of a contiguous row, elsewhere the GPU stops with an
illegal instruction; and a group begins anywhere. So an operand whose rows (or B's columns) groups divide is copied
where these are contiguous in memory. With groups of K an operand that lies along K is copied so that it lies across.

Rows of A that an index names are copied into their order where `gathers_first` says that this is faster.
"""

from __future__ import annotations

import torch

from cutegemm.problem.operand import Matrix, alignment
from cutegemm.problem.work import DENSE, RAGGED_K
from cutegemm.problem.work import TABLE as WORKS

STEP = 16
"""Bytes that the distance of packed rows is a multiple of."""
GATHERED_ROWS, GATHERED_COLUMNS, GATHERED_BYTES = 256, 5760, 2
"""The least rows a group, the least columns of the product, and the most bytes of an element, for which rows that an
index names are copied into their order first (docs/grouped_measured.md#gathering-in-a-pass-of-its-own)."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def operands(
    a: torch.Tensor, b: torch.Tensor, matrix_a: Matrix, matrix_b: Matrix, copies: list[tuple[str, str]]
) -> tuple[Matrix, Matrix]:
    """How kernels see A (M, K) and B (K, N) of one byte; names in `copies` what must be packed for that."""
    return _seen("a", a, matrix_a, copies), columns(b, matrix_b, copies)


def columns(b: torch.Tensor, matrix: Matrix, copies: list[tuple[str, str]]) -> Matrix:
    """The same of B alone."""
    return _seen("b", b, matrix.transposed(), copies).transposed()


def _seen(name: str, tensor: torch.Tensor, matrix: Matrix, copies: list[tuple[str, str]]) -> Matrix:
    """The operand as (rows, K)."""
    rows, k = matrix.rows, matrix.cols
    padded = pitch_of(k, 1)
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
    return _rows(tensor, rows, k)


def _rows(tensor: torch.Tensor, rows: int, k: int) -> Matrix:
    """The copy of a tensor as (rows, K)."""
    padded = pitch_of(k, tensor.element_size())
    batched = tensor.dim() == 3 and tensor.shape[0] > 1
    return Matrix(rows, k, padded, 1, rows * padded if batched else 0, 16)


def pitch_of(k: int, itemsize: int) -> int:
    """Elements from one row of so many to the next."""
    step = STEP // itemsize
    return -(-max(k, 1) // step) * step


def divided(
    name: str, tensor: torch.Tensor, matrix: Matrix, copies: list[tuple[str, str]], work: str, whole: bool = False
) -> Matrix:
    """How kernels see operand "a" or "b" of more than a byte in a work of groups; names in `copies` what must be packed
    for that. `matrix` is how it lies. whole: they load whole vectors, which may not end behind a row.
    """
    turned = (name == "a") == (work == RAGGED_K)  # its rows in memory are the columns of `matrix`
    seen = matrix.transposed() if turned else matrix
    if seen.stride_col == 1:
        if seen.rows == seen.cols == 1:  # which lies either way; the distance of a single row to the next is free
            seen = seen._replace(stride_row=pitch_of(1, tensor.element_size()))
            return seen.transposed() if turned else seen
        return matrix
    why = f"strides {tuple(tensor.stride())}: groups begin anywhere, loads at multiples of 16 bytes of contiguous rows"
    copies.append((name, why))
    found = _rows(tensor, seen.rows, seen.cols)
    if work == RAGGED_K or whole:  # what pads its rows is not read
        align = alignment(0, tensor.element_size(), seen.cols)
        found = found._replace(align=align, begins=STEP if align < STEP else 0)
    return found.transposed() if turned else found


def gathers_first(a_rows: int, rows: int, groups: int, columns: int, itemsize: int) -> bool:
    """Whether `rows` rows of A, in all groups, are copied in front of the product; not where A has more. Without our
    kernel torch copies A itself too.
    """
    wide = columns >= GATHERED_COLUMNS and itemsize <= GATHERED_BYTES
    return wide and rows >= GATHERED_ROWS * groups and a_rows <= rows


def ordered(a: torch.Tensor, rows: int, copies: list[tuple[str, str]]) -> Matrix:
    """How kernels see the copy of so many rows of A, (rows, K), that `in_order` makes; names A in `copies`."""
    copies.append(("a", f"rows: {rows} rows are gathered in front of a product of so many columns, not within it"))
    return _rows(a, rows, a.shape[1])


def in_order(a: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows of A that an int32 index names, as `ordered` describes them; zeros for an entry that is no row."""
    count, k = a.shape
    bits = as_bits(a.detach())
    made = bits.new_empty(count + 1, pitch_of(k, a.element_size()))
    made[:count, :k] = bits
    made[count:] = 0
    # -1 becomes the last row, which is zero, as all that lies beyond does.
    return made.index_select(0, index.clamp(-1, count).remainder(count + 1))[:, :k].view(a.dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, and where its elements have one byte, these as integers: torch copies no rows of fp8 on the CPU."""
    return tensor.view(torch.int8) if tensor.element_size() == 1 else tensor


def packed(name: str, tensor: torch.Tensor, along_k: bool = True) -> torch.Tensor:
    """A copy of operand "a" or "b" as `operands` and `divided` describe it: K contiguous, or what crosses it, in rows
    that are padded to a multiple of `STEP` bytes, with zeros: where rows are gathered, kernels load whole 16 bytes.
    """
    turned = (name == "a") != along_k
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    bits = bits.transpose(-1, -2) if turned else bits
    k = bits.shape[-1]
    made = torch.empty((*bits.shape[:-1], pitch_of(k, bits.element_size())), dtype=bits.dtype, device=bits.device)
    if made.shape[-1] != k:
        made[..., k:] = 0
    found = made[..., :k].copy_(bits).view(tensor.dtype)
    return found.transpose(-1, -2) if turned else found


def copied(name: str, tensor: torch.Tensor, work: str = DENSE) -> torch.Tensor:
    """The copy of operand "a" or "b" that a request of that work with it among its copies stands for."""
    if tensor.element_size() == 1 or WORKS[work].divided == name:
        return packed(name, tensor)
    return packed(name, tensor, along_k=False) if work == RAGGED_K else tensor.contiguous()
