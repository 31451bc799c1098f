"""Sums of products of fp64 numbers as if computed with twice the digits: the reference of fp64 kernels.

Each product is split without error into its rounded value and the rest (two-product, with the splitting of T. J.
Dekker, "A floating-point technique for extending the available precision", 1971), each addition likewise (two-sum, D.
E. Knuth, "The Art of Computer Programming", volume 2, 4.2.2); the rests are added up apart. T. Ogita, S. M. Rump and S.
Oishi, "Accurate sum and dot product", 2005, theorem 3.4 and algorithm 5.3 (Dot2): the result is off by at most

    u |value| + gamma_K^2 (|A||B|),    u = 2^-53, gamma_K = K u / (1 - K u)

as long as no product and no rest underflows. Splitting overflows for numbers over 2^996.
"""

from __future__ import annotations

import torch

SPLITTER = 2.0**27 + 1


def two_sum(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + y rounded, its error)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts of 26 bits each whose sum is x."""
    scaled = SPLITTER * x
    high = scaled - (scaled - x)
    return high, x - high


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp64, see the module docstring.

    Args:
        a: (M, K) or (L, M, K), fp64. b: (K, N) or (L, K, N), fp64.

    Returns:
        (M, N) or (L, M, N). Where an operand is not finite, or a step overflows, what torch.matmul gives.
    """
    a_high, a_low = split(a)
    b_high, b_low = split(b)
    plain = torch.matmul(a, b)
    high, low = torch.zeros_like(plain), torch.zeros_like(plain)
    for k in range(a.shape[-1]):
        row = slice(k, k + 1)
        product = a[..., row] * b[..., row, :]
        left, left_low = a_high[..., row], a_low[..., row]
        right, right_low = b_high[..., row, :], b_low[..., row, :]
        rest = ((left * right - product) + left * right_low + left_low * right) + left_low * right_low
        high, error = two_sum(high, product)
        low = low + (error + rest)
    total = high + low
    return torch.where(torch.isfinite(total), total, plain)
