"""Weights in MXFP4, in which gpt-oss is published: blocks of 32 numbers of four bits that share a power of two.

The format is that of the OCP Microscaling Formats specification, version 1.0: numbers E2M1, scales E8M0. Hugging Face's
states have two numbers in a byte, the first in its lower half.
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 32
ENDINGS = ("_blocks", "_scales")
"""Endings of the two names in a state, behind that of the weight."""
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255


def unpacked(blocks: Any, scales: Any, name: str) -> torch.Tensor:
    """The weights in bf16: (experts, rows, K). They are exact, but numbers of 2^128 and more become infinite.

    Args:
        blocks: (experts, rows, K / 32, 16) uint8. scales: (experts, rows, K / 32) uint8. name: of the weight.

    Raises TypeError or ValueError naming the argument, what was given and what is accepted.
    """
    for end, tensor, dims in ((ENDINGS[0], blocks, 4), (ENDINGS[1], scales, 3)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8 or tensor.dim() != dims:
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor)
            raise TypeError(f"{name}{end}: got {got}, expected {dims} dimensions of torch.uint8")
    if blocks.shape[-1] != BLOCK // 2:
        raise ValueError(f"{name}{ENDINGS[0]}: got shape {tuple(blocks.shape)}, expected {BLOCK // 2} bytes in a block")
    if scales.shape != blocks.shape[:-1]:
        raise ValueError(f"{name}{ENDINGS[1]}: got shape {tuple(scales.shape)}, expected {tuple(blocks.shape[:-1])}")
    experts, rows, count = scales.shape
    made = torch.empty((experts, rows, count, BLOCK), dtype=torch.bfloat16, device=blocks.device)
    numbers = torch.tensor([*_NUMBERS, *(-each for each in _NUMBERS)], dtype=torch.bfloat16, device=blocks.device)
    for part, block, scale in zip(made, blocks, scales.to(blocks.device), strict=True):  # indices take 8 bytes each
        powers = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - _BIAS)
        powers = powers.masked_fill(scale == _NAN, torch.nan)[..., None]
        for half, index in enumerate((block & 15, block >> 4)):
            part[..., half::2] = numbers[index.long()] * powers
    return made.view(experts, rows, count * BLOCK)
