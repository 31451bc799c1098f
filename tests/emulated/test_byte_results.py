"""Results that plain stores bring to TMA, in the emulator: of one byte, and of gate and up in pairs.

They have the bits that slabs store, which share no code with them on the way to D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_M
from tests.emulated.gpus import gpu_of
from tests.groups import GroupCase
from tests.scaled import check, operand

pytest.importorskip("llvmlite")
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
STRAIGHT = (
    "128x128x128/coop2/c2x1/s3/g2/zig",
    "64x32x128/coop1/c1x1/s3/g2/pdl",
    "64x192x128/pp/c1x1/s3/g2",
    "128x96x128/coop2/c1x2/s3/g2/half",
    "64x64x128/coop1/c1x1/s3/g2/streamk",
)
TURNED = (
    "64x64x128/coop1/c2x1/s3/g2/swap",
    "128x48x128/coop2/c1x1/s3/g2/swap/zig",
    "64x128x128/pp/c1x1/s3/g2/swap",
    "128x16x128/coop2/c1x1/s3/g2/swap/once",
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    gpu_of(4, monkeypatch, "H200")


def by_both(config: str, call: Callable[..., Any]) -> Any:
    """What the call gives by TMA, which has the bits that it has by slabs."""
    results = [call(backend="cute", config=f"sm90/{config}{slab}") for slab in ("", "/slab")]
    for by_tma, by_slabs in zip(*(each if isinstance(each, tuple) else (each,) for each in results), strict=True):
        assert torch.equal(by_tma.contiguous().view(torch.uint8), by_slabs.contiguous().view(torch.uint8))
    return results[0]


@pytest.mark.parametrize("config", [*STRAIGHT, *TURNED])
@pytest.mark.parametrize("out", [E4M3, E5M2, INT8])
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.product(keep=1)
def test_results_of_scaled_products(config, out, kind, batch, seed):
    """M and N end inside of a tile."""
    config = config if kind == "e4m3" else config.removesuffix("/half")  # which is for promoted sums
    generator = torch.Generator().manual_seed(seed)
    a, b = (operand(rows, 208, kind, generator, batch=batch) for rows in (130, 144))
    scales = {"scale_a": torch.rand(130, 1, generator=generator), "scale_b": torch.rand(1, 144, generator=generator)}
    if batch:
        scales = {name: each.expand(batch, *each.shape) for name, each in scales.items()}
    d = by_both(config, lambda **options: cutegemm.gemm(a, b.mT, **scales, out_dtype=out, **options))
    assert d.float().abs().max() > 0


@pytest.mark.parametrize("config", [STRAIGHT[0], STRAIGHT[3], *TURNED[1:3]])
@pytest.mark.parametrize("out", [E4M3, INT8])
@pytest.mark.product(keep=1)
def test_results_are_those_of_the_reference(config, out, seed):
    """Sums of whole numbers, which are exact, so that only one rounding is left."""
    check(150, 176, 256, whole=True, recipes=(None, None), out_dtype=out, seed=seed, backend="cute",
          config=f"sm90/{config}")  # fmt: skip


@pytest.mark.parametrize("config", ["128x128x64/coop2/c2x1/s3/g2/zig", "128x80x64/coop2/c1x1/s3/g2/swap"])
@pytest.mark.parametrize("majors", ["tn", "nt"])
@pytest.mark.product(keep=1)
def test_several_results_of_16_bit_operands_with_their_terms(config, majors, seed):
    """Two results of one byte, a residual, a bias, the indices of elements, and the largest element of each row."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(150, 100) if majors[0] == "t" else (100, 150), (176, 100) if majors[1] == "n" else (100, 176)]
    a, b, residual, bias = (
        torch.randn(shape, generator=generator).bfloat16() for shape in (*shapes, (150, 176), (176,))
    )
    a, b = a if majors[0] == "t" else a.mT, b.mT if majors[1] == "n" else b

    def epilogue(acc, c, z, scale):
        x = ops.gelu(acc + z) + c
        return ops.cast(x * scale, E4M3), ops.cast(ops.where(ops.column() > 20, x, -x), E5M2), ops.row_max_abs(x)

    operands = (residual, bias, 3.0)
    by_both(config, lambda **options: cutegemm.gemm(a, b, epilogue=epilogue, operands=operands, **options))


@pytest.mark.parametrize("gating", ["swiglu", "swiglu_pairs"])
@pytest.mark.parametrize(
    "config",
    ["128x256x128/coop2/c1x2/s2/g2/zig/half", "64x64x128/coop1/c1x1/s3/g2", "256x48x128/coop2/c1x1/s3/g2/swap"],
)
@pytest.mark.parametrize("work", [RAGGED_M, GATHERED, MASKED])
@pytest.mark.product(keep=3)
def test_groups_of_gate_and_up(config, gating, work, seed):
    """Rows of other groups, and those beyond the last, stay as they were (`GroupCase.run`)."""
    if work == GATHERED and "c1x2" in config:
        pytest.skip("gathered rows are not taken with clusters that share them")
    case = GroupCase.random(
        work, [70, 0, 3, 55], 90, 512, 272, "e4m3", seed=seed, tail=3, recipes=("rows", "rows"), out_dtype=E4M3
    )  # fmt: skip
    case.epilogue = getattr(ops, gating)
    case.run(backend="cute", config=f"sm90/{config}")


PAIRS = (
    "64x64x128/coop1/c1x1/s3/g2",
    "128x192x128/coop2/c2x1/s3/g2/zig",
    "128x160x128/coop2/c1x1/s3/g2/streamk",
    "64x192x128/pp/c1x1/s3/g2",
    "256x64x128/coop2/c1x2/s3/g2/half",
)


@pytest.mark.parametrize("config", PAIRS)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32, E4M3])
@pytest.mark.parametrize("recipes", [("rows", "rows"), ("blocks", "blocks128"), (None, None)])
@pytest.mark.product(keep=1)
def test_gate_and_up_in_pairs(config, out, recipes, seed):
    """M and D's columns end inside of a tile."""
    whole = recipes == (None, None)
    check(130, 176, 272, whole=whole, recipes=recipes, gating="pairs", out_dtype=out, seed=seed, backend="cute",
          config=f"sm90/{config}")  # fmt: skip


@pytest.mark.parametrize("form", ["", "/swap", "/slab", "/k2"])
@pytest.mark.parametrize("out", [E4M3, E5M2])
@pytest.mark.product(keep=1)
def test_sums_of_integers_beside_other_results(form, out, seed):
    """The compiler would convert the bare sums to fp8 in one step, which no instruction does."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-3, 4, (rows, 64), generator=generator).to(INT8) for rows in (70, 72))
    options = {"epilogue": lambda acc: (acc, acc * 0.5, (ops.column() + ops.row()) * 1.0), "out_dtype": out}
    config = f"sm90/64x64x128/coop1/c1x1/s3/row{form}"
    found = cutegemm.gemm(a, b.t(), backend="cute", config=config, **options)
    want = cutegemm.gemm(a, b.t(), backend="torch", **options)
    assert all(torch.equal(mine.float(), theirs.float()) for mine, theirs in zip(found, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, INT8])
@pytest.mark.parametrize("form", ["", "/swap"])
@pytest.mark.product(keep=1)
def test_values_rounded_to_int8_and_then_to_fp8(dtype, form, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-3, 4, (rows, 64), generator=generator).to(dtype) for rows in (70, 72))
    options = {"epilogue": lambda acc: ops.cast(ops.cast(acc * 0.5, "int8"), "e4m3"), "out_dtype": E4M3}
    found = cutegemm.gemm(a, b.t(), backend="cute", config=f"sm90/64x64x128/coop1/c1x1/s3/row{form}", **options)
    want = cutegemm.gemm(a, b.t(), backend="torch", **options)
    assert torch.equal(found.float(), want.float())


TURNED_PAIRS = (
    "64x48x128/coop1/c1x1/s3/g2/swap",
    "256x64x128/coop2/c1x2/s3/g2/swap/zig",
    "128x16x128/pp/c1x1/s3/g2/swap",
    "192x80x128/coop3/c1x1/s2/g2/swap/streamk",
)


@pytest.mark.parametrize("config", TURNED_PAIRS)
@pytest.mark.parametrize("out", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("recipes", [("rows", "rows"), ("blocks", "blocks128"), ("blocks", "blocks"), (None, None)])
@pytest.mark.product(keep=1)
def test_gate_and_up_in_pairs_of_swapped_operands(config, out, recipes, seed):
    """As above; lanes exchange accumulators."""
    whole = recipes == (None, None)
    check(130, 176, 272, whole=whole, recipes=recipes, gating="pairs", out_dtype=out, seed=seed, backend="cute",
          config=f"sm90/{config}")  # fmt: skip


@pytest.mark.parametrize("work", [RAGGED_M, GATHERED, MASKED])
@pytest.mark.parametrize("majors", ["tn", "tt"])
@pytest.mark.parametrize("config", ["256x48x64/coop2/c1x1/s3/g2/swap/fit", "128x32x64/pp/c1x1/s3/g2/swap"])
@pytest.mark.product(keep=1)
def test_groups_in_pairs_of_swapped_operands(config, majors, work, seed):
    """16-bit operands, with a bias for each group and a number for each row; B also row-major."""
    if work == MASKED and "fit" in config:
        pytest.skip("tiles are not fitted to masked rows")
    case = GroupCase.random(work, [70, 0, 3, 55], 90, 352, 136, "bf16", seed=seed, tail=3, majors=majors)

    def epilogue(acc, of_gate, of_up, weight):
        gate, up = ops.pairs(acc)
        return ops.clamped_swiglu(gate + of_gate, up + of_up, 7.0, 1.702, 1.0) * weight

    generator = torch.Generator().manual_seed(seed)
    rows = (4, 90, 1) if work == MASKED else (len(case.a if case.index is None else case.index), 1)
    case.epilogue = epilogue
    case.operands = [torch.randn(shape, generator=generator).bfloat16() for shape in ((4, 1, 176), (4, 1, 176), rows)]
    case.run(backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize("config", [
    "128x256x64/coop2/c2x1/s3/g2/zig", "64x64x64/coop1/c1x1/s3/g2", "128x48x64/coop2/c1x1/s3/g2/swap"
])  # fmt: skip
@pytest.mark.parametrize("out", [torch.bfloat16, E4M3])
@pytest.mark.product(keep=1)
def test_pairs_with_operands_along_rows_and_columns(config, out, seed):
    """Whole numbers, so that every order of operations gives the same bits; also a comparison of indices."""
    generator = torch.Generator().manual_seed(seed)
    a, b, bias, row = (
        torch.randint(-2, 3, shape, generator=generator).bfloat16()
        for shape in ((130, 72), (352, 72), (176,), (130, 1))
    )

    def epilogue(acc, z, w, s):
        gate, up = ops.pairs(acc)
        return ops.where(ops.column() + ops.row() > 40, (gate * s + z) + w, up - w)

    operands = (bias, row, 2.0)

    def call(**given):
        return cutegemm.gemm(a, b.mT, epilogue=epilogue, operands=operands, out_dtype=out, **given)

    # No slab takes pairs of swapped operands.
    d = call(backend="cute", config=f"sm90/{config}") if "swap" in config else by_both(config, call)
    sums = a.double() @ b.double().mT
    after = torch.arange(176)[None] + torch.arange(130)[:, None] > 40
    want = torch.where(after, 2 * sums[:, ::2] + bias.double() + row.double(), sums[:, 1::2] - row.double())
    assert torch.equal(d.double(), want.clamp(-448, 448).to(torch.float32).to(out).double())
