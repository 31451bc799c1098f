"""Quantization to 8 bits: the formats, groups of elements that share a scale, and the definition in torch.

    scale = max(amax / largest, 2^-126)      amax: the largest |x| of a group; largest: of the format
    value = round(x * (1 / scale))           to nearest even, saturating

The division, the reciprocal and the product are each rounded once, in fp32, and last comes the rounding to the format.
So the result is defined to the bit, and whoever quantizes with a given scale gets what the group's own would give.
Kernels and the functions below compute the same.

    Inf      counts as the largest finite fp32 number in amax, and saturates
    NaN      fp8: left out of amax, and stays NaN (0x7f). int8, which has none: becomes 0, and the scale of its group is
             NaN, so that no product hides it. With a given scale it becomes 0
    zeros    a group of zeros has the scale 2^-126, the smallest normal fp32 number, and values 0
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from cutegemm.problem.dtypes import TABLE, TERMS, torch_dtype
from cutegemm.problem.extents import are_equal, is_one

FLT_MAX = 3.4028234663852886e38
SMALLEST_SCALE = 2.0**-126
"""The least scale: its reciprocal is a normal fp32 number."""
BLOCK = 128
"""Extent of a block along K, and of a square block along the other dimension too."""
PITCH = 16
"""Bytes that divide the distance of the rows of new values: TMA reads no others."""


class Format(NamedTuple):
    """A format of 8 bits. `largest`: what the largest magnitude of a group becomes."""

    name: str
    dtype: torch.dtype
    largest: float


def _format(name: str, largest: float | None) -> Format:
    assert largest is not None
    return Format(name, torch_dtype(name), largest)


NAMED: Mapping[str, Format] = MappingProxyType(
    {row.name: _format(row.name, row.largest) for row in TABLE.values() if row.itemsize == 1}
)
"""The formats by name: e4m3, e5m2, int8."""
FORMATS: Mapping[torch.dtype, Format] = MappingProxyType({format.dtype: format for format in NAMED.values()})
ACCEPTED = ", ".join(str(dtype) for dtype in FORMATS)
INPUTS: Mapping[torch.dtype, str] = MappingProxyType({torch_dtype(name): name for name in TERMS})
"""What can be quantized, and what values can be dequantized into; by their names."""
ACCEPTED_INPUTS = ", ".join(str(dtype) for dtype in INPUTS)


class Group(NamedTuple):
    """The elements that share a scale, as extents along the rows and along K; 0 means all of them."""

    rows: int
    k: int

    def __str__(self) -> str:
        return "x".join(str(extent or "all") for extent in self)

    def scales(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of matrices of shape (..., rows, K)."""
        if self == TENSOR:
            return ()
        rows, k = (-(-extent // size) if size else 1 for extent, size in zip(extents[-2:], self, strict=True))
        return (*extents[:-2], rows, k)


TENSOR, ROWS = Group(0, 0), Group(1, 0)
BLOCKS: Mapping[tuple[int, int], Group] = MappingProxyType(
    {(1, BLOCK): Group(1, BLOCK), (BLOCK, BLOCK): Group(BLOCK, BLOCK)}
)


def group_along(extent: int, scales: int) -> int | None:
    """The `Group` extent of a dimension that has so many scales, or None when there is none: 1 scale is for all."""
    if is_one(scales):
        return 0
    if are_equal(scales, extent):
        return 1
    return BLOCK if scales == -(-extent // BLOCK) else None


def new_values(shape: tuple[int, ...], turned: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for values: of unit stride along K, the last dimension, or the last but one where it is `turned`.

    A row along K that 16 bytes do not divide is padded to the next multiple of them, so that TMA reads any K.
    """
    rows, k = shape[-2:][::-1] if turned else shape[-2:]
    pitch = -(-k // PITCH) * PITCH
    strides = (1, pitch) if turned else (pitch, 1)
    return torch.empty_strided(shape, (rows * pitch, *strides)[-len(shape) :], dtype=dtype, device=device)


def expanded(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A scale for each element of a tensor of this shape."""
    if scale.dim() == 0:
        return scale.expand(shape)
    for dim in (-2, -1):
        if group_along(shape[dim], scale.shape[dim]) == BLOCK:
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])
    return scale.expand(shape)


def scale_of(x: torch.Tensor, format: Format, group: Group) -> torch.Tensor:
    """The scales of x (..., rows, K), of shape `group.scales(x.shape)`, fp32."""
    magnitude = x.float().abs()
    if format.name != "int8":
        magnitude = torch.where(magnitude.isnan(), 0.0, magnitude)
    if group == TENSOR:
        amax = magnitude.amax() if x.numel() else magnitude.new_zeros(())
    else:
        rows, k = group.scales(tuple(x.shape))[-2:]
        for dim, size, count in ((-1, group.k, k), (-2, group.rows, rows)):
            magnitude = _largest(magnitude, dim, size, count)
        amax = magnitude
    largest = torch.full_like(amax, format.largest)
    return (amax.clamp(max=FLT_MAX) / largest).clamp(min=SMALLEST_SCALE)


def _largest(magnitude: torch.Tensor, dim: int, size: int, count: int) -> torch.Tensor:
    """The maximum of every `size` elements along a dimension, of all for 0; so many maxima."""
    if size == 1:
        return magnitude
    extent = magnitude.shape[dim]
    rest = count * size - extent if size else int(extent == 0)
    shape = list(magnitude.shape)
    shape[dim] = rest
    padded = torch.cat((magnitude, magnitude.new_zeros(shape)), dim) if rest else magnitude
    return padded.unflatten(dim, (count, size or extent + rest)).amax(dim)


def values_of(x: torch.Tensor, scale: torch.Tensor, format: Format) -> torch.Tensor:
    """x divided by its scales and rounded; `scale` broadcasts by blocks as in `expanded`."""
    scaled = x.float() * expanded(torch.ones_like(scale) / scale, tuple(x.shape))
    if format.name == "int8":
        return torch.where(scaled.isnan(), 0.0, scaled.round().clamp(-128, 127)).to(torch.int8)
    bits = scaled.clamp(-format.largest, format.largest).to(format.dtype).view(torch.uint8)
    return torch.where(scaled.isnan(), 0x7F, bits).to(torch.uint8).view(format.dtype)


def original(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values * scale, in fp32, rounded to `dtype`."""
    return (values.float() * expanded(scale, tuple(values.shape))).to(dtype)
