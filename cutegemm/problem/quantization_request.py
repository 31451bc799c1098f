"""Checks of the arguments of `quantize` and `dequantize`: names what is wrong, and finds what is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from cutegemm.problem import overlap, request
from cutegemm.problem.quantization import (
    ACCEPTED,
    ACCEPTED_INPUTS,
    BLOCK,
    BLOCKS,
    FORMATS,
    INPUTS,
    ROWS,
    TENSOR,
    Format,
    Group,
    group_along,
)  # fmt: skip

SCALINGS = ("tensor", "rows", "blocks")
DEFAULT_BLOCK = (1, 128)
BACKENDS = ("auto", "cute", "torch")


class Asked(NamedTuple):
    """A checked call of `quantize`.

    Attributes:
        format: of the values. group: the elements that share a scale, or None where the scales are given.
        turned: K is the last dimension but one. scales: the shape of the scales, as the caller sees them.
    """

    format: Format
    group: Group | None
    turned: bool
    scales: tuple[int, ...]


def describe(x: Any, dtype: Any, scaling: Any, dim: Any, block: Any, scale: Any) -> Asked:
    """Checks what shapes and dtypes tell, also of fake tensors.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is accepted.
    """
    _check_matrix("x", x)
    if x.dtype not in INPUTS:
        raise TypeError(f"x: got dtype {x.dtype}, accepted are {ACCEPTED_INPUTS}")
    if not isinstance(dtype, torch.dtype) or dtype not in FORMATS:
        raise TypeError(f"dtype: got {request.shown(dtype)}, accepted are {ACCEPTED}")
    turned = _is_turned(dim, x.dim())
    if scale is not None:
        refuse_beside_scale(scaling, block)
        check_scale(scale, x, "x")
        return Asked(FORMATS[dtype], None, turned, tuple(scale.shape))
    scaling = "rows" if scaling is None else scaling
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        accepted = ", ".join(map(repr, SCALINGS))
        raise ValueError(f"scaling: got {request.shown(scaling)}, accepted are {accepted}")
    blocks = _block(block, scaling)
    group = {"tensor": TENSOR, "rows": ROWS, "blocks": blocks}[scaling]
    shape = tuple(x.shape)
    scales = group.scales((*shape[:-2], shape[-1], shape[-2]) if turned else shape)
    if turned and scales:
        scales = (*scales[:-2], scales[-1], scales[-2])
    return Asked(FORMATS[dtype], group, turned, scales)


def refuse_beside_scale(scaling: Any, block: Any) -> None:
    """Raises ValueError for a scaling, or extents of blocks, beside given scales: their shape says what is meant."""
    if scaling is not None:
        raise ValueError(f"scaling: got {scaling!r} beside scale, whose shape tells; leave one of them away")
    if block is not None:
        _block(block, scaling)


def _is_turned(dim: Any, dims: int) -> bool:
    if isinstance(dim, bool) or not isinstance(dim, int) or dim not in (-1, -2, dims - 1, dims - 2):
        raise ValueError(
            f"dim: got {request.shown(dim)}, accepted are -1, for x (..., M, K), and -2, for x (..., K, N)"
        )
    return dim in (-2, dims - 2)


def _block(block: Any, scaling: Any) -> Group:
    """The blocks of these extents. Raises ValueError for others, and where the scaling has no blocks to have them."""
    if not isinstance(block, Sequence) or any(type(each) is not int for each in block) or tuple(block) not in BLOCKS:
        accepted = " and ".join(map(str, BLOCKS))
        raise ValueError(f"block: got {request.shown(block)}, accepted are {accepted}, the latter extent along K")
    if scaling != "blocks" and tuple(block) != DEFAULT_BLOCK:
        raise ValueError(f"block: got {tuple(block)} without scaling='blocks', which alone has blocks")
    return BLOCKS[tuple(block)]


def check_scale(scale: Any, of: torch.Tensor, name: str) -> None:
    """Raises unless `scale` has a number for each group of the elements of the tensor `of`, called `name`."""
    request.check_type("scale", scale)
    if scale.dtype != torch.float32:
        raise TypeError(f"scale: got dtype {scale.dtype}, accepted is torch.float32")
    request.check_device("scale", scale, of.device, name)
    if scale.dim() == 0:
        return
    shape = tuple(of.shape)
    fits = scale.dim() == of.dim() and all(
        group_along(extent, count) is not None for extent, count in zip(shape[-2:], scale.shape[-2:], strict=True)
    )
    if not fits or (of.dim() == 3 and scale.shape[0] not in (1, shape[0])):
        rows, columns = shape[-2:]
        counts = [f"1, {extent} or {-(-extent // BLOCK)}" for extent in (rows, columns)]
        batch = f"1 or {shape[0]}; " if of.dim() == 3 else ""
        raise ValueError(
            f"scale: got shape {tuple(scale.shape)} for {name} of shape {shape}, accepted are () and one extent for "
            f"each dimension of {name}: ({batch}{counts[0]}; {counts[1]}), for all, each one, or each {BLOCK} elements"
        )


def describe_values(values: Any, scale: Any, dtype: Any) -> Format:
    """Checks the arguments of `dequantize`; returns the values' format."""
    _check_matrix("values", values)
    if values.dtype not in FORMATS:
        raise TypeError(f"values: got dtype {values.dtype}, accepted are {ACCEPTED}")
    check_scale(scale, values, "values")
    if not isinstance(dtype, torch.dtype) or dtype not in INPUTS:
        raise TypeError(f"dtype: got {request.shown(dtype)}, accepted are {ACCEPTED_INPUTS}")
    return FORMATS[values.dtype]


def check_out(
    name: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, inputs: dict[str, torch.Tensor | None],
    contiguous: int | None = None,
) -> None:  # fmt: skip
    """Raises unless a result of this shape can be written into `out`, which overlaps no input.

    contiguous: the dimension along which neighbours must be neighbours in memory.
    """
    request.check_type(name, out)  # which refuses None too
    check_plain(**{name: out})
    (device,) = {tensor.device for tensor in inputs.values() if tensor is not None}
    if tuple(out.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(out.shape)}, expected {shape}")
    if out.dtype != dtype:
        raise TypeError(f"{name}: got dtype {out.dtype}, expected {dtype}")
    if out.device != device:
        raise ValueError(f"{name}: it is on {out.device}, expected {device}")
    if contiguous is not None and out.shape[contiguous] > 1 and out.stride(contiguous) != 1:
        raise ValueError(
            f"{name}: got strides {out.stride()}, accepted is stride 1 along dimension {contiguous}, which is K"
        )
    overlap.check_self(out, name)
    overlap.check(out, inputs, name)


def check_backend(backend: Any) -> None:
    """Raises ValueError unless it is one of `BACKENDS`."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend: got {request.shown(backend)}, accepted are {', '.join(map(repr, BACKENDS))}")


def refuse_gradient(name: str, tensor: torch.Tensor) -> None:
    """Raises RuntimeError where autograd would have to record a quantization, NotImplementedError for a tangent."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: it requires grad, and no gradient passes a quantization (a straight-through estimate belongs "
            f"to the trainer); call it under torch.no_grad(), or pass {name}.detach()"
        )
    follows = forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()
    if follows and forward_ad.unpack_dual(tensor).tangent is not None:
        raise NotImplementedError(
            f"{name}: it carries a forward-mode tangent (torch.func.jvp, jacfwd, dual tensors), and none passes a "
            f"quantization; pass forward_ad.unpack_dual({name}).primal"
        )


def check_plain(**tensors: Any) -> None:
    """Raises unless each is a dense tensor on the CPU or a GPU with memory of its own, or None."""
    for name, tensor in tensors.items():
        if tensor is not None:
            request.check_tensor(name, tensor)
            if not (tensor.is_cuda or tensor.is_cpu):
                raise ValueError(f"{name}: it is on {tensor.device}, accepted are CUDA and CPU tensors")


def _check_matrix(name: str, tensor: Any) -> None:
    request.check_type(name, tensor)
    request.check_dims(name, tensor.dim())
