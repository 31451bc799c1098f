"""The counter-based generator of epilogues: each element of D has a random number of its own, on every device the same.

It is Philox 2x32 with 10 rounds (J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011; the constants are those of Random123). All numbers are unsigned, of 32 bits:

    key   = seed xor (matrix * 0x85EBCA6B mod 2^32)
    (a, b) = (column, row)
    10 times: (a, b) = (high(0xD256D193 * a) xor key xor b, low(0xD256D193 * a)); key = key + 0x9E3779B9 mod 2^32
    number = floor(a / 2^8) * 2^-24

where high and low are the two halves of the product of 64 bits. `row` and `column` count the elements of one matrix of
D as the user sees it (whatever the kernel exchanges), `matrix` its number in the batch. An int32 seed counts as the
unsigned number with the same bits. The numbers are 0, 2^-24, ..., 1 - 2^-24, each of which is exact in fp32.
"""

from __future__ import annotations

import torch

MULTIPLIER = 0xD256D193
"""Philox 2x32's multiplier."""
KEY_STEP = 0x9E3779B9
"""What Philox adds to the key after each round: the golden ratio's fraction."""
MATRIX_STEP = 0x85EBCA6B
"""An odd number (of MurmurHash3's last step), so that the matrices of a batch have different keys."""
ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox(first: torch.Tensor, second: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Philox 2x32-10 of the counter (first, second): two words. All tensors are int64 with values in [0, 2^32)."""
    for _ in range(ROUNDS):
        high, low = _product(first)
        first, second = high ^ key ^ second, low
        key = (key + KEY_STEP) & _LOW
    return first, second


def _product(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves of MULTIPLIER * x, by halves of x: int64 does not hold the whole product."""
    lower = MULTIPLIER * (x & 0xFFFF)
    upper = MULTIPLIER * (x >> 16) + (lower >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (lower & 0xFFFF)


def uniform(seed: torch.Tensor, row: torch.Tensor, column: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The numbers in [0, 1), as float64, for integer tensors that broadcast; see the module docstring."""
    seed, row, column, matrix = (each.long() & _LOW for each in (seed, row, column, matrix))
    key = seed ^ ((matrix * MATRIX_STEP) & _LOW)
    shape = torch.broadcast_shapes(key.shape, row.shape, column.shape)
    first, _ = philox(column.expand(shape), row.expand(shape), key.expand(shape))
    return (first >> 8).double() * 2.0**-24
