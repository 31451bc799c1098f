"""What the tests of quantization share: inputs with every kind of number, and comparison bit by bit."""

from __future__ import annotations

import math

import torch

from cutegemm.problem import quantization
from cutegemm.problem.quantization import Format, Group


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> torch.Tensor:
    """Normal numbers over sixteen binades, with zeros, denormals, an infinity, a NaN and a row of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-8, 8, shape, generator=generator).float())
    flat = x.view(-1)
    places = torch.randperm(flat.numel(), generator=generator)
    for place, value in zip(places.tolist(), (0.0, -0.0, 1e-30, 6e-8, math.inf, -math.inf, math.nan), strict=False):
        flat[place] = value
    x[..., -1, :] = 0
    return x.to(dtype).to(device)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether all bits are equal, those of NaN in 32 or 16 bits aside."""
    got, want = got.cpu(), want.cpu()
    if got.dtype.itemsize == 1:
        return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    bits = torch.int16 if got.dtype.itemsize == 2 else torch.int32
    equal = got.contiguous().view(bits) == want.contiguous().view(bits)
    return bool((equal | (got.isnan() & want.isnan())).all())


def reference(x: torch.Tensor, format: Format, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales) by the definition, on the CPU."""
    scale = quantization.scale_of(x.cpu(), format, group)
    return quantization.values_of(x.cpu(), scale, format), scale
