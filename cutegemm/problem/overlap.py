"""Whether a result may be written where it lies: it must not overlap itself, nor an input that is still to be read."""

from __future__ import annotations

import math

import torch


def reach(tensor: torch.Tensor) -> int:
    """Bytes from the first to past the last element; 0 for an empty tensor. It depends on shape and strides alone."""
    if tensor.numel() == 0:
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def check_self(out: torch.Tensor, name: str = "out") -> None:
    """Raises ValueError when two elements of `out` share an address, or may: three and more strides that interleave."""
    if out.numel() == 0:
        return
    along = sorted((s, e) for s, e in zip(out.stride(), out.shape, strict=True) if e > 1)
    if len(along) == 2 and along[0][0] > 0:
        # (i, j) and (i + s1 / g, j - s0 / g) share an address, and no nearer two elements do.
        (inner, columns), (outer, rows) = along
        common = math.gcd(inner, outer)
        if outer // common >= columns or inner // common >= rows:
            return
    covered = 0
    for stride, extent in along:
        if stride <= covered:
            raise ValueError(
                f"{name}: strides {out.stride()} of shape {tuple(out.shape)} write one address several times"
                f"{', or may' if len(along) > 2 else ''}"
            )
        covered += (extent - 1) * stride


def check(out: torch.Tensor, inputs: dict[str, torch.Tensor | None], result: str = "out") -> None:
    """Raises ValueError naming the input that shares memory with `out`. `inputs["c"]` may be `out` itself.

    result: the name of `out`.
    """
    start, size = out.data_ptr(), reach(out)
    for name, tensor in inputs.items():
        if tensor is None or size == 0 or tensor.numel() == 0:
            continue
        first = tensor.data_ptr()
        if first >= start + size or start >= first + reach(tensor):
            continue
        if (name == "c" and _same_view(tensor, out)) or _side_by_side(tensor, out):
            continue
        raise _refusal(name, result)


def check_identity(out: torch.Tensor, inputs: dict[str, torch.Tensor | None]) -> None:
    """Raises ValueError when `out` is one of the inputs: all that tensors without an address tell, in torch.compile."""
    for name, tensor in inputs.items():
        if tensor is not None and tensor is out and tensor.numel() != 0:
            raise _refusal(name)


def _refusal(name: str, result: str = "out") -> ValueError:
    return ValueError(f"{result}: it overlaps {name} in memory; pass another tensor, or a clone of {name}")


def _same_view(x: torch.Tensor, y: torch.Tensor) -> bool:
    same_layout = x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
    return same_layout and x.data_ptr() == y.data_ptr()


def _side_by_side(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether both lie in rows of one pitch and share no column of them: slices of a QKV buffer, even and odd columns.

    For a pitch P, the addresses of a tensor are multiples of P (from dimensions whose stride P divides) plus an offset
    within its reach along the others; two tensors are apart when those reaches are disjoint modulo P.
    """
    pitches = {
        stride * tensor.element_size()
        for tensor in (x, y)
        for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if extent > 1
    }
    for pitch in pitches - {0}:
        width_x, width_y = _width(x, pitch), _width(y, pitch)
        offset = (y.data_ptr() - x.data_ptr()) % pitch
        if width_x <= offset and offset + width_y <= pitch:
            return True
    return False


def _width(tensor: torch.Tensor, pitch: int) -> int:
    """Bytes that the tensor reaches along the dimensions whose stride is no multiple of `pitch`."""
    size = tensor.element_size()
    strides = ((extent, stride * size) for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return size + sum((extent - 1) * stride for extent, stride in strides if stride % pitch)
