"""The weights of layers with 8-bit operands: how they are quantized, and what is asked of ones that are already."""

from __future__ import annotations

from typing import Any

import torch

from cutegemm.problem import quantization_request, request
from cutegemm.problem.quantization import ACCEPTED, BLOCK, FORMATS, PITCH, new_values
from cutegemm.quantize import dequantize, quantize

PROBED = 16
"""So many rows of a matrix, or more, are looked at first. Where no scale of them is exact, no other is taken to be."""


def quantized(
    weight: torch.Tensor, dtype: torch.dtype, scaling: str, name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scale) of a weight (..., N, K) in a floating dtype. Where a power of two as scale gives its numbers
    exactly, that is the scale (`_keep_exact`). Raises TypeError naming the weight if it is sparse.
    """
    if weight.layout != torch.strided:
        raise TypeError(f"{name}: got layout {weight.layout}, expected a dense (strided) tensor")
    weight = weight.detach()
    weight = weight.float() if weight.dtype == torch.float64 else weight
    block = (BLOCK if scaling == "blocks" else 1, BLOCK)
    if weight.is_meta:
        asked = quantization_request.describe(weight, dtype, scaling, -1, block, None)
        scale = torch.empty(asked.scales, dtype=torch.float32, device="meta")
        return new_values(tuple(weight.shape), False, dtype, weight.device), scale
    values, scale = quantize(weight, dtype, scaling, block=block)
    if dtype.is_floating_point and type(weight) is torch.Tensor and weight.numel():
        _keep_exact(weight, values, scale)
    return values, scale


def _keep_exact(weight: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """Puts the next power of two in the place of each scale where that gives its numbers exactly; values accordingly.

    It does for numbers that were MXFP4 before. The scales of `quantize` round them: where the largest of a row is 6, it
    becomes 448 in e4m3, and 4 becomes 298.7, which is no number of e4m3.
    """
    mantissa, exponent = torch.frexp(scale)
    powers = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    count = weight.shape[-2]
    few = torch.arange(0, count, max(count // PROBED, 1), device=weight.device)
    of_few = powers
    if scale.dim():
        of_few = powers.index_select(-2, few if scale.shape[-2] == count else few // BLOCK)
    elements = _inexact(weight.index_select(-2, few), of_few, values.dtype).flatten(0, -2)
    if _of_scales(elements, of_few.flatten(0, -2) if scale.dim() else elements[:, :1]).all():
        return
    parts = [(weight, values, scale, powers)]
    if weight.dim() == 3 and scale.dim():  # one after the other, to need less memory
        parts = list(zip(*parts[0], strict=True))
    for part, into, of_part, power in parts:
        inexact = _of_scales(_inexact(part, power, values.dtype), power)
        of_part.copy_(torch.where(inexact, of_part, power))
        into.copy_(quantize(part, values.dtype, scale=of_part)[0])


def _inexact(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Which elements differ from their values by these scales; all infinite ones, which `quantize` saturates."""
    values, _ = quantize(weight, dtype, scale=scale)
    return (dequantize(values, scale, weight.dtype) != weight) | weight.isinf()


def _of_scales(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Whether any element of those that share a scale is true, in the scale's shape."""
    if scale.dim() == 0:
        return elements.any()
    (rows, columns), (n, k) = elements.shape, scale.shape
    of_rows, of_columns = (size if count == 1 else 1 if count == size else BLOCK
                           for size, count in ((rows, n), (columns, k)))  # fmt: skip
    padded = torch.nn.functional.pad(elements, (0, k * of_columns - columns, 0, n * of_rows - rows))
    return padded.view(n, of_rows, k, of_columns).any(3).any(1)


_DIMS = {2: "two", 3: "three"}


def check_pair(weight: Any, scale: Any, dims: int, name: str, of_scale: str) -> torch.Tensor:
    """The scale of a quantized weight, in fp32, on its device. Raises TypeError or ValueError naming the argument."""
    if not isinstance(weight, torch.Tensor) or weight.dtype not in FORMATS or weight.dim() != dims:
        got = f"{weight.dtype} of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight)
        raise TypeError(f"{name}: got {got}, accepted are {_DIMS[dims]} dimensions of {ACCEPTED}")
    if not isinstance(scale, torch.Tensor) or not scale.is_floating_point():
        raise TypeError(f"{of_scale}: got {request.shown(scale)}, expected a tensor of a floating dtype")
    if scale.is_meta and not weight.is_meta:
        raise ValueError(f"{of_scale}: it is on meta, expected the device of the weight, {weight.device}")
    return scale.detach().to(device=weight.device, dtype=torch.float32)


def padded(values: torch.Tensor) -> torch.Tensor:
    """The values in rows as TMA reads them; a copy only where they do not lie so."""
    apart = values.stride()[:-1]
    if values.is_meta or (values.stride(-1) == 1 and not any(x % PITCH for x in (*apart, values.data_ptr()))):
        return values
    return new_values(tuple(values.shape), False, values.dtype, values.device).copy_(values)
