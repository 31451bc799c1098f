"""Exactness at any K: operands of integers so small that no sum of their products can round, whatever the order.

The error bound of `cutegemm.problem.reference` grows with K, so that at a large K it lets pass what a lost or doubled
product changes. Sums of integers below 2^24 are exact in fp32, and in the sums of tensor cores, which keep 24 bits
below the largest addend. Every split of K, every order and every tile must then give the very integers of the product.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import cutegemm
from tests.problems import Case

LARGEST_SUM = 2**24 - 1
"""Magnitude up to which sums are exact: fp32 has 24 bits."""

LARGEST_TERM = 128
"""Magnitude of the integers of C and the bias, which every dtype holds."""

LARGEST_OPERAND = {"fp16": 2**11, "bf16": 2**8, "fp32": 2**11}
"""Magnitude up to which a dtype holds every integer; fp32 as TF32 and 3xTF32 round it."""


def largest_operand(k: int, dtype: str) -> int:
    """The largest magnitude v of integers in A and B with K v^2, and C and a bias beside, within `LARGEST_SUM`.

    Raises ValueError where K is so large that there is no such v.
    """
    v = math.isqrt((LARGEST_SUM - 2 * LARGEST_TERM) // max(k, 1))
    if v == 0:
        raise ValueError(f"K: got {k}; sums of products of integers are exact in fp32 up to {LARGEST_SUM} of them")
    return min(v, LARGEST_OPERAND[dtype])


def fill(target: torch.Tensor, largest: int, generator: torch.Generator, signed: bool = True) -> None:
    """Sets every element to an integer from -largest (0 when not signed) to largest.

    Signed sums stay near zero; those of one sign come near the largest sum that is exact.
    """
    low = -largest if signed else 0
    target.copy_(torch.randint(low, largest + 1, target.shape, generator=generator, device=target.device))


def difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """None when each element of `got` (fp32) is that of `want` (float64); else the first that is not."""
    differs = (got.double() != want).nonzero()  # true of a NaN, too
    if not len(differs):
        return None
    place = tuple(int(i) for i in differs[0])
    return (
        f"{len(differs)} of {got.numel()} sums of integers are not exact; the first at {place}: "
        f"got {float(got[place])!r}, expected {float(want[place])!r}"
    )


def case(m: int, n: int, k: int, dtype: str, *, seed: int, **options: Any) -> Case:
    """`Case.random` with integers as operands and D in fp32; odd seeds draw no negative ones."""
    made = Case.random(m, n, k, dtype, seed=seed, out_dtype=torch.float32, **options)
    generator = torch.Generator(device=made.a.device).manual_seed(seed)
    for operand in (made.a, made.b):
        fill(operand, largest_operand(k, dtype), generator, signed=seed % 2 == 0)
    return made


def run(problem: Case, **backend: Any) -> None:
    """Computes a `case` into a result full of NaN; raises AssertionError naming an element that is not exact."""
    want = problem.a.double() @ problem.b.double()
    out = torch.full(want.shape, float("nan"), dtype=torch.float32, device=problem.a.device)
    cutegemm.gemm(problem.a, problem.b, **problem.options, out=out, **backend)
    wrong = difference(out, want)
    assert wrong is None, f"{backend}: {wrong}"
