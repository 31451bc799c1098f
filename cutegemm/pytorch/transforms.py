"""`gemm` of tensors that stand for others, under torch.vmap, torch.func or a batch of gradients."""

from __future__ import annotations

from typing import Any

import torch

from cutegemm.problem import request
from cutegemm.pytorch import sharded

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def active(*tensors: Any) -> bool:
    """Whether one of the tensors stands for others, under torch.vmap, torch.func or autograd's older vmap."""
    for tensor in tensors:
        if tensor is not None and isinstance(tensor, torch.Tensor) and (_is_wrapped(tensor) or _is_batched(tensor)):
            return True
    return False


def refuse(tensors: dict[str, Any], out: Any) -> None:
    """Raises ValueError for a tensor that is used after its torch.vmap has ended, and for `out` under a transform."""
    level = torch._C._functorch.maybe_current_level() or 0
    for name, tensor in tensors.items():
        mapped = isinstance(tensor, torch.Tensor) and torch._C._functorch.is_batchedtensor(tensor)
        if mapped and torch._C._functorch.maybe_get_level(tensor) > level:
            raise ValueError(
                f"{name}: got a tensor that escaped from a function mapped by torch.vmap, which has ended; "
                "return the tensor from that function and pass what vmap returns"
            )
    if out is not None:
        raise ValueError(
            "out: got a tensor under vmap or torch.func, where nothing can be written into it; leave it away"
        )


def unwrap(tensors: tuple[Any, ...]) -> tuple[int, int, tuple, tuple]:
    """Takes the innermost level of autograd's older vmap off tensors of which one at least is batched.

    Returns:
        The level, its number of elements, the tensors, and their mapped dimensions, as `merge` takes both.
    """
    level = max(_innermost(tensor) for tensor in tensors if tensor is not None)
    extents = [None if tensor is None else _extent(tensor, level) for tensor in tensors]
    found = tuple(
        tensor if extent is None else torch._remove_batch_dim(tensor, level, extent, 0)
        for tensor, extent in zip(tensors, extents, strict=True)
    )
    size = next(extent for extent in extents if extent is not None)
    return level, size, found, tuple(None if extent is None else 0 for extent in extents)


def _innermost(tensor: torch.Tensor) -> int:
    """The highest level that a tensor is batched at, 0 for none. Torch's own count of levels is one of this thread."""
    level = 0
    while _is_batched(tensor):
        level += 1
        extent = _extent(tensor, level)
        if extent is not None:
            tensor = torch._remove_batch_dim(tensor, level, extent, 0)
    return level


def _extent(tensor: torch.Tensor, level: int) -> int | None:
    """The number of tensors that this one stands for at a level, or None. One that it does not have is as asked for."""
    if not _is_batched(tensor):
        return None
    one, two = (torch._remove_batch_dim(tensor, level, size, 0).shape[0] for size in (1, 2))
    return one if one == two else None


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The first two dimensions made one, also of a tensor that autograd's older vmap batches: it lacks `flatten`."""
    return sharded.merging(tensor, range(2)).reshape(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:])


def merge(size: int, tensors: tuple[Any, ...], dims: tuple[Any, ...], beta: float) -> tuple[tuple, float, tuple]:
    """One gemm for `size` of them.

    Args:
        tensors: a, b, c, bias, each with the mapped dimension that `dims` names (None: the same for all).

    Returns:
        (a, b, c, bias) and beta of the one gemm, and the shape of all results, mapped dimension first.

    Raises:
        ValueError: a wrong number of dimensions, as `gemm` says it; the mapped dimension must not hide it.
    """
    mapped = [tensor is not None and dim is not None for tensor, dim in zip(tensors, dims, strict=True)]
    for name, tensor, is_mapped in zip(("a", "b"), tensors, mapped, strict=False):
        request.check_dims(name, tensor.dim() - is_mapped)
    if mapped[3] and tensors[3].dim() != 2:
        raise ValueError(f"bias: got {tensors[3].dim() - 1} dimensions, expected 1, one number a column of the result")
    a, b, c, bias = (
        tensor.movedim(dim, 0) if is_mapped else tensor
        for tensor, dim, is_mapped in zip(tensors, dims, mapped, strict=True)
    )
    a_batched, b_batched = a.dim() - mapped[0] == 3, b.dim() - mapped[1] == 3
    if not mapped[0] and not mapped[1]:
        a, mapped[0] = a.expand(size, *a.shape), True
    m, n = a.shape[-2], b.shape[-1]
    shape: tuple[int, ...] = (size, m, n)
    if a_batched or b_batched:
        batch = b.shape[-3] if b_batched and (not a_batched or a.shape[-3] == 1) else a.shape[-3]
        shape = (size, batch, m, n)
        a = a if a_batched else a.unsqueeze(-3)
        b = b if b_batched else b.unsqueeze(-3)
        a, b = (rows(t.expand(size, batch, *t.shape[-2:])) for t in (a, b))

    def spread(tensor: Any, is_mapped: bool) -> Any:
        """One value for every element of the one gemm's result."""
        if is_mapped:
            ones = (1,) * (len(shape) - tensor.dim())
            tensor = tensor.reshape(size, *ones, *tensor.shape[1:])
        tensor = tensor.expand(shape)
        return rows(tensor) if len(shape) == 4 else tensor

    if mapped[3]:
        # A kernel takes one bias for all matrices: this one becomes a C.
        term = spread(bias.unsqueeze(1), True)
        if c is not None and beta != 0:
            wide = torch.promote_types(term.dtype, torch.float32)
            term = term.to(wide) + beta * spread(c, mapped[2]).to(wide)
        return (a, b, term, None), 1.0, shape
    if c is not None:
        c = spread(c, mapped[2])
    return (a, b, c, bias), beta, shape
