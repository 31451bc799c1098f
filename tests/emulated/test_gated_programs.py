"""Programs of gate and up in the kernels of every family, run in the emulator: D has half of the product's columns.

Integers give exact results, so that one column of the wrong half shows. SwiGLU of random operands stays within the
bound that follows from the reference's bounds of gate and up.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import cutegemm
from cutegemm import backend
from cutegemm.cute import FAMILIES
from cutegemm.hardware import arch
from cutegemm.problem import TABLE, Problem, reference
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.problem.program.graph import Program
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from cutegemm.problem.reference import Expected
from tests.emulated.gpus import gpu_of

pytest.importorskip("llvmlite")

BF16, FP32 = torch.bfloat16, torch.float32
DIFFERENCE = "return gate * 3.0 - up"
OPERANDS = ", x0: bf16[N], x1: bf16[M, N], x2: fp32[M, 1], x3: fp32"
EVERYTHING = "return where(column() >= row(), (gate + x0) * x2, up * x3 - x1)"


def program(gating: str, body: str = DIFFERENCE, operands: str = "") -> Program:
    return simplified(parse(f"def epilogue(gate: {gating}[0], up: {gating}[1]{operands}): {body}"))


def integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def tensors(m, f, k, dtype, majors, batch, seed) -> tuple[torch.Tensor, torch.Tensor]:
    """A (M, K) and B (K, 2 F) of small integers; `batch`: of A, and of B where it is a pair."""
    of_a, of_b = batch if isinstance(batch, tuple) else (batch, 0)
    a = integers(*(of_a,) * bool(of_a), m, k, dtype=dtype, seed=seed)
    b = integers(*(of_b,) * bool(of_b), k, 2 * f, dtype=dtype, seed=seed + 1)
    return (
        a if majors[0] == "t" else a.mT.contiguous().mT,
        b.mT.contiguous().mT if majors[1] == "n" else b,
    )


def check_exact(
    config: str | None,
    m: int,
    f: int,
    k: int = 72,
    *,
    gating: str = "halves",
    dtype: torch.dtype = BF16,
    out_dtype: torch.dtype = BF16,
    majors: str = "tn",
    batch: int | tuple[int, int] = 0,
    everything: bool = False,
    precision: str | None = None,
    seed: int,
) -> None:
    a, b = tensors(m, f, k, dtype, majors, batch, seed)
    own: tuple[Any, ...] = ()
    made = program(gating)
    if everything:
        made = program(gating, EVERYTHING, OPERANDS)
        shapes = (((f,), BF16), ((m, f), BF16), ((m, 1), FP32))
        own = (*(integers(*shape, dtype=kind, seed=seed + i) for i, (shape, kind) in enumerate(shapes, 2)), 2.0)
    d = cutegemm.gemm(
        a, b, epilogue=made, operands=own, config=config, backend="cute", out_dtype=out_dtype, precision=precision
    )
    product = torch.matmul(a.double(), b.double())
    (want,) = evaluate(made, product, own, dtype=torch.float64, out_dtype=out_dtype)
    assert d.dtype == out_dtype
    assert torch.equal(d, want)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        # The TMA store: ragged M and F, both majors of B, shares of B that are whole halves, and parts of one.
        ("sm90/128x64x64/coop2/c2x1/s3/row", {"m": 130, "f": 72, "everything": True}),
        ("sm90/64x64x64/coop1/c4x1/s3/row", {"m": 200, "f": 40, "majors": "tt"}),
        ("sm90/64x96x64/pp/c1x2/s3/hilbert", {"m": 136, "f": 136, "majors": "nt"}),
        ("sm90/64x32x128/coop1/c2x1/s2/row", {"m": 70, "f": 36, "k": 200, "out_dtype": FP32}),
        ("sm90/64x64x64/coop1/c1x1/s3/row/streamk", {"m": 70, "f": 72, "k": 200}),
        ("sm90/64x32x32/coop1/c2x1/s3/row", {"m": 100, "f": 36, "dtype": FP32, "out_dtype": FP32, "precision": "tf32"}),
        ("sm90/128x48x64/coop2/c1x1/s3/row", {"m": 5, "f": 40, "batch": (3, 3)}),
        # The slabs: an odd F, tiles of 8 columns of each half.
        ("sm90/64x16x64/coop1/c2x1/s3/row", {"m": 130, "f": 17}),
        ("sm90/64x32x64/pp/c1x1/s3/row", {"m": 70, "f": 71, "everything": True}),
        # Swapped operands: gate and up are blocks of 64 rows of a warpgroup.
        ("sm90/128x32x64/coop1/c1x1/s3/row/swap", {"m": 70, "f": 72, "everything": True}),
        ("sm90/256x16x64/coop2/c1x2/s3/row/swap", {"m": 20, "f": 200, "majors": "tt"}),
        ("sm90/128x144x64/coop1/c1x1/s3/row/swap", {"m": 140, "f": 72, "everything": True}),
        ("sm90/128x16x64/coop1/c1x1/s3/row/swap/streamk", {"m": 20, "f": 150, "k": 200}),
        ("sm90/256x16x64/pp/c2x1/s3/row/swap/slab", {"m": 20, "f": 301, "everything": True}),
        # Clusters along K, which share out vectors of gate and of up: runs that differ by one, two blocks of rows.
        ("sm90/128x16x64/coop1/c1x1x2/s3/row/swap", {"m": 20, "f": 72, "k": 200, "everything": True}),
        ("sm90/128x48x64/coop1/c1x1x4/s3/row/swap", {"m": 41, "f": 150, "k": 400}),
        ("sm90/256x16x64/coop2/c1x2x2/s3/row/swap", {"m": 20, "f": 200, "k": 264, "majors": "tt"}),
        ("sm90/64x64x64/coop1/c1x1x8/s3/row", {"m": 70, "f": 71, "k": 600, "out_dtype": FP32, "everything": True}),
        ("sm90/256x32x64/coop2/c2x1x2/s3/row", {"m": 300, "f": 40, "k": 200}),
        ("sm90/256x16x64/coop1/c1x1x2/s3/row/swap", {"m": 9, "f": 140, "k": 200, "everything": True}),
        # Neighbouring columns.
        ("sm90/64x64x64/coop1/c2x1/s3/row", {"gating": "pairs", "m": 70, "f": 71, "everything": True}),
        ("sm90/128x48x64/coop2/c1x1/s3/row", {"gating": "pairs", "m": 70, "f": 36, "majors": "tt", "batch": 2}),
    ],
)
@pytest.mark.product(keep=1)
def test_hopper_is_exact(config, options, seed, monkeypatch):
    """On 4 SMs: persistent CTAs compute several tiles, and stream-K cuts some."""
    gpu_of(4, monkeypatch)
    check_exact(config, **options, seed=seed)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("sm80/64x64x32/w32x32/s2/g8", {"m": 70, "f": 71, "everything": True}),
        ("sm80/64x32x32/w32x16/s2/g8", {"m": 72, "f": 72, "majors": "nt", "batch": 2}),
        ("sm80/64x32x32/w32x16/s2/g8", {"m": 40, "f": 33, "majors": "tt"}),
        ("sm80/64x64x32/w32x32/s2/g8", {"m": 40, "f": 33, "gating": "pairs", "everything": True}),
        ("simt/32x64x16/w16x32/s3/g8", {"m": 40, "f": 35, "everything": True}),
        ("simt/32x32x16/w16x32/s4/g8", {"m": 40, "f": 36, "majors": "tt"}),
        ("simt/32x32x64/w32x32/s3/g8/x4", {"m": 40, "f": 34}),
    ],
)
@pytest.mark.product(keep=1)
def test_the_other_families_are_exact(config, options, seed):
    simt = {"dtype": FP32, "out_dtype": FP32, "precision": "ieee"} if config.startswith("simt") else {}
    check_exact(config, **options, **simt, seed=seed)


@pytest.mark.parametrize(
    "options",
    [
        {"m": 1, "f": 1, "k": 40, "gating": "pairs"},
        {"m": 5, "f": 1, "k": 40},
        {"m": 16, "f": 4, "majors": "tt"},
        {"m": 70, "f": 40, "k": 0},
        # No kernel runs, but that for large results is compiled.
        pytest.param({"m": 40, "f": 0}, marks=pytest.mark.slow),
        {"m": 9, "f": 3, "k": 7},
        {"m": 5, "f": 20, "batch": (2, 0), "majors": "tt", "gating": "pairs"},
    ],
    ids=str,
)
@pytest.mark.product(keep=1)
def test_the_choice_serves_any_shape(options, seed):
    check_exact(None, **options, seed=seed)


@pytest.mark.parametrize("seed_of_case", range(4))
@pytest.mark.product(keep=1)
def test_what_the_validity_rule_accepts_computes_the_right_numbers(seed_of_case):
    draw = random.Random(seed_of_case)
    family = ("sm90", "sm90", "sm80", "simt")[seed_of_case % 4]
    simt = family == "simt"
    space = list(FAMILIES[family].config.space(4 if simt else 2))
    device = arch.get("sm_90a")
    while True:
        gating, majors = draw.choice(("halves", "halves", "pairs")), draw.choice(("tn", "tt", "nn", "nt"))
        f, out_dtype = draw.choice((8, 24, 33, 72)), draw.choice(("bf16", "fp32"))
        made = program(gating)
        made = replace(made, outputs=tuple(output._replace(dtype=out_dtype) for output in made.outputs))
        problem = Problem.of(
            64, 2 * f, 72, "fp32" if simt else "bf16", majors=majors, out_dtype=out_dtype,
            epilogue=Epilogue(custom=made),
        )  # fmt: skip
        config = draw.choice(space)
        small = config.bm * config.bn <= 64 * 128
        if small and backend.get("cute").check(config, problem, device) is None:
            break
    check_exact(
        str(config), 64, f, gating=gating, majors=majors, dtype=FP32 if simt else BF16, seed=seed_of_case,
        out_dtype={"bf16": BF16, "fp32": FP32}[out_dtype], precision="ieee" if simt else None,
    )  # fmt: skip


def swiglu_of(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, precision: str) -> Expected:
    """silu(gate) * up with its bound: each factor is off by its own, the product and the result are rounded."""
    f = b.shape[-1] // 2
    gate = reference.expected(a, b[..., :f], activation="silu", out_dtype=FP32, precision=precision)
    up = reference.expected(a, b[..., f:], out_dtype=FP32, precision=precision)
    value = gate.value * up.value
    error = gate.bound * up.value.abs() + gate.value.abs() * up.bound + gate.bound * up.bound
    error += 2.0**-24 * (value.abs() + error)
    out = TABLE[{BF16: "bf16", FP32: "fp32"}[out_dtype]]
    return Expected(value, error + out.roundoff * (value.abs() + error) + out.smallest, out_dtype)


@pytest.mark.parametrize(
    ("config", "dtype", "precision"),
    [
        ("sm90/128x64x64/coop2/c1x1/s3/row", BF16, "ieee"),
        ("sm90/128x16x64/coop1/c1x1/s3/row/swap", BF16, "ieee"),
        ("sm90/64x32x32/coop1/c1x1/s3/row", FP32, "tf32"),
        ("sm80/64x64x32/w32x32/s2/g8", BF16, "ieee"),
        ("simt/32x64x16/w16x32/s3/g8", FP32, "ieee"),
    ],
)
@pytest.mark.product(keep=1)
def test_swiglu_stays_within_its_bound(config, dtype, precision, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(40, 136, generator=generator).to(dtype)
    weight = torch.randn(2 * 40, 136, generator=generator).to(dtype)
    made = program("halves", "return silu(gate) * up")
    d = cutegemm.gemm(a, weight.T, epilogue=made, config=config, backend="cute", precision=precision)
    verdict = reference.check(d, swiglu_of(a, weight.T, dtype, precision))
    assert verdict, verdict.message


@pytest.mark.parametrize("config", ["sm90/64x32x64/coop1/c1x1/s3/row", "sm90/128x32x64/coop1/c1x1/s3/row/swap"])
@pytest.mark.product(keep=1)
def test_partners_are_neighbouring_columns_of_d(config, seed):
    a, b = tensors(70, 36, 72, BF16, "tn", 0, seed)
    for made in (program("halves", "return partner(gate) + up"), parse("def epilogue(acc): return partner(acc)")):
        d = cutegemm.gemm(a, b, epilogue=simplified(made), config=config, backend="cute", out_dtype=FP32)
        (want,) = evaluate(made, a.double() @ b.double(), ())
        assert torch.equal(d.double(), want)
