"""The rows of a mixture's tokens copied and added up: the kernel of `cute.combine` on GPUs, torch elsewhere."""

from __future__ import annotations

import torch

from cutegemm import torch_grouped
from cutegemm.pytorch.dispatch import is_beyond_autograd
from cutegemm.run import runner

MOST_UNROLLED = 16
"""Rows of a token that torch.compile adds up one by one: its own sum of 8 rows took three times as long as torch's."""


def combine(rows: torch.Tensor, row_of: torch.Tensor, top_k: int, backend: str) -> torch.Tensor:
    """Each token's rows added up in fp32, in the order of its choices, and rounded once: (tokens, N).

    Args:
        rows: (tokens * top_k, N), fp16, bf16 or fp32. row_of: of each slot = token * top_k + choice its row, int32.
        backend: "auto" and "cute": by a kernel, where the GPU can run it and no gradient is recorded ("cute" emulates
            it for CPU tensors); every other one: by torch.
    """
    if torch.compiler.is_dynamo_compiling():
        return by_torch(rows, row_of, top_k, unrolled=top_k <= MOST_UNROLLED)
    found = None
    if by_kernel(rows, row_of, backend):
        from cutegemm.run import combining  # with the kernel families, when one is first needed

        found = combining.run(rows, row_of, top_k)
    return by_torch(rows, row_of, top_k) if found is None else found


def spread(rows: torch.Tensor, token_of: torch.Tensor, row_of: torch.Tensor, top_k: int, backend: str) -> torch.Tensor:
    """Each token's row at all of its places: (tokens * top_k, N).

    Args:
        rows: (tokens, N), fp16, bf16 or fp32. token_of: of each place its token, int32. row_of, backend: as of
            `combine`.
    """
    if torch.compiler.is_dynamo_compiling():  # inductor would write them twice: for a product and for its transpose
        copied: torch.Tensor = torch.ops.cutegemm.spread_rows(rows, token_of, row_of, top_k, backend)
        return copied
    found = None
    if by_kernel(rows, row_of, backend):
        from cutegemm.run import combining

        found = combining.spread(rows, row_of, top_k)
    return rows.index_select(0, token_of) if found is None else found


def gathered(rows: torch.Tensor, index: torch.Tensor, backend: str) -> torch.Tensor:
    """The rows that an int32 index names; zeros for an entry that is no row. rows: fp32, fp16 or bf16. backend: as of
    `combine`.
    """
    found = None
    if by_kernel(rows, index, backend):
        from cutegemm.run import combining

        found = combining.gathered(rows, index)
    return torch_grouped.gathered(rows, index) if found is None else found


def by_kernel(rows: torch.Tensor, index: torch.Tensor, backend: str) -> bool:
    """Whether a kernel may compute: plain tensors with elements, no lazily negated rows, no gradient recorded."""
    on = backend == "cute" or (backend == "auto" and rows.device != runner._CPU)
    recorded = torch.is_grad_enabled() and rows.requires_grad
    if not on or recorded or is_beyond_autograd(rows, index) or rows.is_neg():
        return False
    return bool(rows.numel() and index.numel())


def check_places(rows: torch.Tensor, token_of: torch.Tensor, row_of: torch.Tensor, top_k: int) -> None:
    """Raises ValueError unless both name the places of all slots. They must tell of the same: one of them is read."""
    for name, each in (("token_of", token_of), ("row_of", row_of)):
        if each.dtype != torch.int32 or each.dim() != 1 or each.shape[0] != rows.shape[0] * top_k:
            given = f"{each.dtype} of shape {tuple(each.shape)}"
            raise ValueError(f"{name}: got {given}, expected torch.int32 of shape (tokens * top_k,)")
        if each.device != rows.device:
            raise ValueError(f"{name}: it is on {each.device}, expected the device of rows, {rows.device}")


def by_torch(rows: torch.Tensor, row_of: torch.Tensor, top_k: int, unrolled: bool = False) -> torch.Tensor:
    """`combine` by operators of torch, which every transform knows."""
    each = rows.index_select(0, row_of)
    if top_k == 1:
        return each
    each = each.view(rows.shape[0] // top_k, top_k, rows.shape[1])
    if not unrolled:
        return each.sum(1)
    total = each[:, 0].float()
    for choice in range(1, top_k):
        total = total + each[:, choice]
    return total.to(rows.dtype)
