"""Inputs that are hard on sums, and how far off a product is: for tests and plots of fp32 precisions."""

from __future__ import annotations

import torch

INPUTS = ("normal", "uniform", "exponents", "cancelling", "powers")


def inputs(kind: str, m: int, n: int, k: int, seed: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 A (m, k) and column-major B (k, n).

    kind: "normal"; "uniform" in [0, 1), whose sums have one sign; "exponents" from 2^-40 to 2^40 within a sum;
    "cancelling": the second half of K undoes the first but for one part in 2^12; "powers" of two of both signs.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def one(rows: int) -> torch.Tensor:
        normal = torch.randn(rows, k, generator=generator, device=device)
        if kind == "uniform":
            return torch.rand(rows, k, generator=generator, device=device)
        if kind == "exponents":
            return normal * 2.0 ** torch.randint(-20, 21, (rows, k), generator=generator, device=device)
        if kind == "powers":
            return normal.sign() * 2.0 ** torch.randint(-8, 9, (rows, k), generator=generator, device=device)
        return normal

    a, b = one(m), one(n)
    if kind == "cancelling":
        half = k // 2
        a[:, half : 2 * half] = -a[:, :half] * (1 + 2.0**-12)
        b[:, half : 2 * half] = b[:, :half]
    return a, b.T


def error(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """(largest, root mean square) of |got - a b| relative to |a||b|."""
    a, b = a.double(), b.double()
    relative = (got.double() - a @ b).abs() / (a.abs() @ b.abs())
    return float(relative.max()), float(relative.square().mean().sqrt())


def by_sgemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each result as one chain of fused multiply-adds in the order of K, as SGEMM's threads compute it."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for k in range(a.shape[1]):
        total = (total + a[:, k : k + 1].double() * b[k : k + 1].double()).float().double()
    return total.float()
