"""Operands of fp8 and int8 with scales of every recipe, and the check that their tests end with."""

from __future__ import annotations

from typing import Any

import torch

import cutegemm
from cutegemm.problem import reference, torch_dtype
from cutegemm.problem.dtypes import TABLE
from cutegemm.problem.program import bound
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse

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


def scale(
    recipe: str | None, rows: int, k: int, generator: torch.Generator, *, batch: int | None = None, whole: bool = False
) -> Any:
    """A scale of an operand (rows, K): any numbers, or powers of two. None without a recipe."""
    if recipe is None:
        return None
    shape: tuple[int, ...] = ()
    if recipe != "tensor":
        divisor = {"rows": 1, "blocks": 1, "blocks128": 128}[recipe]
        shape = (-(-rows // divisor), 1 if recipe == "rows" else -(-k // 128))
        shape = shape if batch is None else (batch, *shape)
    if whole:
        return torch.randint(-2, 3, shape, generator=generator, device=generator.device).float().exp2()
    return torch.rand(shape, generator=generator, device=generator.device) + 0.5


def _laid(x: torch.Tensor, by_rows: bool, gap: int) -> torch.Tensor:
    """The same numbers, row-major or column-major, with a gap behind each row (column) that holds other bits."""
    bits = (x if by_rows else x.mT).contiguous().view(torch.uint8)
    lying = torch.nn.functional.pad(bits, (0, gap), value=0x7F)[..., : bits.shape[-1]].view(x.dtype)
    return lying if by_rows else lying.mT


def check(
    m: int, n: int, k: int, *, a: str = "e4m3", b: str | None = None, recipes: tuple[str | None, str | None], seed: int,
    device: str = "cpu", batch: int | None = None, whole: bool = False, out_dtype: torch.dtype | None = None,
    accumulate: str | None = None, options: dict[str, Any] | None = None, majors: str = "tn",
    gaps: tuple[int, int] = (0, 0), gating: str | None = None, **backend: Any,
) -> reference.Verdict:  # fmt: skip
    """Computes one product and checks it against the reference; raises AssertionError with the worst element.

    whole: of small integers and scales that are powers of two, whose sums are exact. majors: as `Problem.of` has them.
    gaps: elements behind each row of A and of B as they lie in memory. gating: of a program of gate and up; D has n
    columns and B 2 n, and there are no `options`.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    x = operand(m, k, a, generator, batch=batch, whole=whole)
    columns = 2 * n if gating else n
    y = operand(columns, k, b or a, generator, batch=batch, whole=whole).mT
    x, y = _laid(x, majors[0] == "t", gaps[0]), _laid(y, majors[1] == "t", gaps[1])
    scale_a, scale_b = (
        scale(recipe, rows, k, generator, batch=batch, whole=whole)
        for recipe, rows in zip(recipes, (m, columns), strict=True)
    )
    scale_b = scale_b if scale_b is None or scale_b.dim() == 0 else scale_b.mT
    if gating:
        given = {"accumulate": accumulate, "out_dtype": out_dtype or torch.bfloat16, **backend}
        return _check_gated(x, y, scale_a, scale_b, gating, whole, given)
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


def _check_gated(
    x: torch.Tensor, y: torch.Tensor, scale_a: Any, scale_b: Any, gating: str, whole: bool, given: dict[str, Any]
) -> reference.Verdict:
    """The check of a program of gate and up: to the bit where the sums are exact."""
    body = "gate * 3.0 - up" if whole else "silu(gate) * up"
    program = simplified(parse(f"def epilogue(gate: {gating}[0], up: {gating}[1]): return {body}"))
    precision = "fast" if given["accumulate"] == "fast" else "ieee"
    sums = reference.expected(x, y, scale_a=scale_a, scale_b=scale_b, precision=precision, out_dtype=torch.float32)
    got = cutegemm.gemm(x, y, scale_a=scale_a, scale_b=scale_b, epilogue=program, **given)
    assert got.shape == (*x.shape[:-1], y.shape[-1] // 2)
    assert got.dtype == given["out_dtype"]
    if whole:
        (exact,) = evaluate(program, sums.value, (), out_dtype=got.dtype)
        assert torch.equal(got, exact), f"{int((got != exact).sum())} of {got.numel()} elements differ"
    verdict = bound.check(got, bound.bounds(program, sums.value, sums.bound, ())[0])
    assert verdict.ok, verdict.message
    return verdict
