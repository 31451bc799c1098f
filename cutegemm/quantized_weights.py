"""The weights of layers with 8-bit operands: how they are quantized, and what is asked of ones that are already."""

from __future__ import annotations

from typing import Any

import torch

from cutegemm import replacing
from cutegemm.problem import quantization_request, request
from cutegemm.problem.quantization import ACCEPTED, BLOCK, FORMATS, PITCH, new_values
from cutegemm.quantize import dequantize, quantize


def quantized(
    weight: torch.Tensor, dtype: torch.dtype, scaling: str, name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scale) of a weight (..., N, K) in a floating dtype, exact where `_exact` finds them. Raises TypeError
    naming it if it is sparse.
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
    return _exact(weight, scale, dtype) or (values, scale)


def _exact(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(values, scale) with the next powers of two in place of these scales, where they give every element of the weight
    exactly; None where they do not.

    They do for numbers that were MXFP4 before. The scales of `quantize` would round those: where the largest of a row
    is 6, it becomes 448 in e4m3, and 4 becomes 298.7, which is no number of e4m3.
    """
    if not dtype.is_floating_point or weight.dim() < 2 or not (weight.numel() and replacing.has_values(weight)):
        return None
    mantissa, exponent = torch.frexp(scale)
    powers = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    made = new_values(tuple(weight.shape), False, dtype, weight.device)
    # Of one weight a row first, which decides mostly; of several one after the other, to need less memory.
    for part in (slice(0, 1), slice(None)) if weight.dim() == 2 else range(weight.shape[0]):
        of_part, values = powers if powers.dim() == 0 else powers[part], made[part]
        quantize(weight[part], dtype, scale=of_part, out=values)
        if not torch.equal(dequantize(values, of_part, weight.dtype), weight[part]):
            return None
    return made, powers


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
