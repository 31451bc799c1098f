"""Operands of fp8 and int8 with scales of every recipe, and the check that their tests end with."""

from __future__ import annotations

from typing import Any

import torch

import cutegemm
from cutegemm.problem import reference, torch_dtype
from cutegemm.problem.dtypes import TABLE

RECIPES = ("tensor", "rows", "blocks", "blocks128", None)


def operand(
    rows: int, k: int, dtype: str, generator: torch.Generator, *, batch: int | None = None, whole: bool = False
) -> torch.Tensor:
    """(rows, K) with a batch before it: numbers of all magnitudes of the type, or small integers."""
    shape = (rows, k) if batch is None else (batch, rows, k)
    device = generator.device
    if TABLE[dtype].is_integer:
        return torch.randint(-127, 128, shape, generator=generator, device=device).to(torch.int8)
    if whole:
        return torch.randint(-3, 4, shape, generator=generator, device=device).float().to(torch_dtype(dtype))
    values = torch.randn(shape, generator=generator, device=device)
    values = values * torch.exp2(torch.randint(-6, 5, shape, generator=generator, device=device).float())
    return values.to(torch_dtype(dtype))


def scale(recipe: str | None, rows: int, k: int, generator: torch.Generator, *, batch: int | None = None) -> Any:
    """A scale of an operand (rows, K); None without a recipe."""
    if recipe is None:
        return None
    if recipe == "tensor":
        return torch.rand((), generator=generator, device=generator.device) + 0.5
    divisor = {"rows": 1, "blocks": 1, "blocks128": 128}[recipe]
    shape = (-(-rows // divisor), 1 if recipe == "rows" else -(-k // 128))
    shape = shape if batch is None else (batch, *shape)
    return torch.rand(shape, generator=generator, device=generator.device) + 0.5


def check(
    m: int, n: int, k: int, *, a: str = "e4m3", b: str | None = None, recipes: tuple[str | None, str | None], seed: int,
    device: str = "cpu", batch: int | None = None, whole: bool = False, out_dtype: torch.dtype | None = None,
    accumulate: str | None = None, options: dict[str, Any] | None = None, **backend: Any,
) -> reference.Verdict:  # fmt: skip
    """Computes one product and checks it against the reference; raises AssertionError with the worst element."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = operand(m, k, a, generator, batch=batch, whole=whole)
    y = operand(n, k, b or a, generator, batch=batch, whole=whole).mT
    scale_a, scale_b = (
        scale(recipe, rows, k, generator, batch=batch) for recipe, rows in zip(recipes, (m, n), strict=True)
    )
    scale_b = scale_b if scale_b is None or scale_b.dim() == 0 else scale_b.mT
    terms = dict(options or {})
    if terms.get("bias"):
        terms["bias"] = torch.randn(n, generator=generator, device=device)
    want = reference.expected(
        x, y, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype,
        precision="fast" if accumulate == "fast" else "ieee", **terms,
    )  # fmt: skip
    got = cutegemm.gemm(
        x, y, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, accumulate=accumulate, **terms, **backend
    )
    verdict = reference.check(got, want)
    assert verdict.ok, verdict.message
    if whole and recipes == (None, None) and got.dtype == torch.float32 and not terms:
        assert torch.equal(got.double(), want.value)
    return verdict
