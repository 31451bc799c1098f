"""Products of fp8 and int8 with scales, by the Hopper kernel in the emulator, whose sums have the hardware's bits."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm import ops
from tests import scaled
from tests.emulated.gpus import gpu_of
from tests.scaled import check

M, N, K = 136, 150, 328
WHOLE, ROWS, BLOCKS = (None, None), ("rows", "rows"), ("blocks", "blocks128")
BIAS, FAST = {"bias": True}, {"accumulate": "fast"}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")


@pytest.mark.parametrize(
    ("config", "given"),
    [
        ("128x128x128/coop2/c2x1/s3/g8", {"recipes": WHOLE, "whole": True, "out_dtype": torch.float32}),
        ("64x64x64/pp/c1x1/s3/g8/zig", {"recipes": WHOLE, "whole": True, "b": "e5m2", "out_dtype": torch.float32}),
        ("64x32x128/coop1/c1x1/s3/g8/k2/swap", {"recipes": ROWS, "a": "e5m2", "b": "e4m3"}),
        ("64x64x128/coop1/c1x2/s3/g8", {"recipes": ("tensor", "rows"), "options": {**BIAS, "activation": "silu"}}),
        ("128x96x128/coop2/c1x1/s3/g8/zig", {"recipes": BLOCKS, "out_dtype": torch.float32}),
        ("64x64x128/pp/c1x1/s3/g8/skew", {"recipes": ("blocks", "blocks"), "options": {"alpha": -2.0}}),
        ("64x32x128/coop1/c1x1x2/s3/g8/swap", {"recipes": BLOCKS}),
        ("64x48x128/coop1/c1x1/s3/g8/k3/swap", {"recipes": ("blocks128", "blocks"), "out_dtype": torch.float16}),
        ("64x64x128/coop1/c1x1/s3/g8/streamk", {"recipes": ("rows", "blocks128")}),
        ("64x64x128/coop1/c1x1/s3/g8", {"recipes": BLOCKS, "a": "int8"}),
        ("64x32x128/coop1/c2x1/s3/g8/pdl/twin", {"recipes": BLOCKS}),
        ("64x64x128/pp/c2x1/s3/g8/zig/twin", {"recipes": ROWS, "a": "e5m2"}),
        ("128x128x128/coop2/c2x1/s3/g8/zig/twin", {"recipes": WHOLE, "whole": True, "out_dtype": torch.float32}),
        ("128x32x128/coop2/c1x1x2/s3/g8/swap/twin", {"recipes": ("blocks128", "blocks")}),
        ("128x208x128/coop2/c1x2/s3/g8/zig", {"recipes": BLOCKS}),
        ("256x96x128/coop2/c1x1/s3/g8/swap", {"recipes": BLOCKS}),
        ("128x144x128/coop2/c1x1/s3/g8/swap", {"recipes": ("blocks128", "blocks")}),
        ("64x160x128/coop1/c2x1/s3/g8/k2/swap", {"recipes": BLOCKS, "options": BIAS}),
        ("64x128x64/coop1/c1x1/s3/g8", {"recipes": WHOLE, "whole": True, "out_dtype": torch.float32, **FAST}),
        ("64x64x128/coop1/c1x1/s3/g8/swap", {"recipes": ROWS, "out_dtype": torch.float8_e4m3fn, **FAST}),
    ],
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_scaled_products(config, given, seed):
    check(M, N, K, seed=seed, backend="cute", config=f"sm90/{config}", **given)


@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
@pytest.mark.product(keep=1)
def test_a_ring_that_is_no_multiple_of_the_swizzle(dtype, seed):
    """Three stages of 3584 bytes: TMA read the staging buffers behind them as its swizzle has the next 512 bytes."""
    config = "sm90/64x48x32/coop1/c1x1/s3/row/swap"
    check(16, 136, 96, a=dtype, b=dtype, recipes=ROWS, seed=seed, backend="cute", config=config)


@pytest.mark.parametrize(
    ("config", "given"),
    [
        # Halves of rows, then of columns; N of 150 and 470 end inside of a tile's second half and block of scales.
        ("256x128x128/coop2/c1x2/s3/serp8/zig/pdl/half", {"recipes": BLOCKS, "b": "e5m2"}),
        ("256x128x128/coop2/c2x1/s4/serp8/zig/half", {"recipes": ROWS, "options": {**BIAS, "activation": "gelu"}}),
        ("256x96x128/coop2/c1x1/s3/g8/streamk/half", {"recipes": BLOCKS, "n": 500, "k": 1544}),
        ("128x256x128/coop2/c2x1/s4/serp8/zig/streamk/pdl/half", {"recipes": BLOCKS, "n": 470, "k": 1290}),
        ("128x224x128/coop2/c1x2/s3/g8/zig/half", {"recipes": BLOCKS, "n": 470, "options": {"alpha": -2.0, **BIAS}}),
        ("128x160x128/coop2/c1x1/s4/serp8/zig/half", {"recipes": BLOCKS, "n": 330, "batch": 2}),
        ("128x64x128/coop2/c1x1/s2/g8/k3/half", {"recipes": BLOCKS, "k": 2050, "out_dtype": torch.float32}),
        ("128x32x128/coop2/c1x1/s3/g8/k2/arrival/half", {"recipes": BLOCKS, "k": 2050, "out_dtype": torch.float16}),
        # One of the operands alone, one matrix of a batch, int8.
        ("128x128x128/coop2/c1x1/s3/g8/half", {"recipes": ("blocks", "rows"), "k": 700, "batch": 2}),
        ("256x64x128/coop2/c1x1/s3/g8/once/half", {"recipes": (None, "blocks128"), "k": 640}),
        ("128x192x128/coop2/c1x1/s3/g8/slab/half", {"recipes": BLOCKS, "a": "int8", "n": 260}),
        ("256x64x128/coop2/c1x1/s3/g8/half", {"recipes": BLOCKS, "out_dtype": torch.float8_e4m3fn}),
        # One k tile, exactly four, five, and a bit of a fifth.
        *((f"128x64x128/coop2/c1x1/s3/g8{zig}/half", {"recipes": BLOCKS, "k": k}) for zig, k in (
            ("", 16), ("", 512), ("/zig", 640), ("/zig", 513),
        )),
        ("128x64x128/coop2/c1x1/s3/g8/half", {"recipes": WHOLE, "out_dtype": torch.float32}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.product(keep=1)
def test_sums_that_are_promoted_by_halves(config, given, whole, seed, monkeypatch):
    """Three SMs, so that a CTA has several tiles and walks K both ways. A whole product is exact."""
    gpu_of(3, monkeypatch, "H200")
    sizes = {"m": 300, "n": given.get("n", N), "k": given.get("k", K)}
    check(**{"whole": whole, **given, **sizes}, seed=seed, backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize("config", ["128x96x128/coop2/c1x1/s3/g8/zig", "256x64x128/coop2/c2x1/s3/serp8/streamk/pdl"])
@pytest.mark.parametrize("recipes", [BLOCKS, ROWS])
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_halves_give_the_bits_of_whole_tiles(config, recipes, seed, monkeypatch):
    """Whatever the strides of the scales: they are multiplied, and partial sums added, in the same order."""
    gpu_of(4, monkeypatch, "H200")
    generator = torch.Generator().manual_seed(seed)
    a, b = (scaled.operand(rows, 650, "e4m3", generator) for rows in (300, 150))
    scale_a, scale_b = (
        scaled.scale(recipe, rows, 650, generator)
        for recipe, rows in zip(recipes, (300, 150), strict=True)
    )  # fmt: skip
    apart = torch.full((2 * scale_a.shape[1], 3 * 300), torch.nan).mT[::3, ::2].copy_(scale_a)
    given = {"scale_a": apart, "scale_b": scale_b.mT, "out_dtype": torch.float32, "backend": "cute"}
    halves, whole = (cutegemm.gemm(a, b.mT, config=f"sm90/{config}{more}", **given) for more in ("/half", ""))
    assert torch.equal(halves, whole)
    assert halves.isfinite().all()


@pytest.mark.parametrize("config", ["256x64x128/coop2/c1x1/s3/g8/half", "128x96x128/coop2/c2x1/s3/g8/zig/streamk/half"])
@pytest.mark.parametrize(("gating", "recipes"), [("pairs", BLOCKS), ("pairs", ROWS), ("halves", ROWS)])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.product(keep=1)
def test_gate_and_up_of_sums_promoted_by_halves(config, gating, recipes, whole, seed):
    check(M, 204, 700, whole=whole, recipes=recipes, gating=gating, seed=seed, backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize(
    ("config", "f", "given"),
    [
        # Up begins at a block of 128 columns, and in the middle of one: at a multiple of 8, 4, 2 and 1 columns.
        ("64x64x128/coop1/c1x1/s3/g8", 256, {}),
        ("128x192x128/coop2/c2x1/s3/serp8/zig/pdl", 424, {"b": "e5m2"}),
        ("64x64x128/coop1/c1x2/s3/g8", 204, {"batch": 3}),
        ("64x192x128/pp/c1x1/s3/g8/skew", 202, {"m": 70, "k": 130, "recipes": (None, "blocks128")}),
        ("64x80x128/coop1/c1x1/s3/g8/streamk", 201, {"out_dtype": torch.float16}),
        ("64x32x128/coop1/c2x1/s3/g8/pdl/twin", 204, {"out_dtype": torch.float32, "recipes": ("rows", "blocks128")}),
        ("64x16x128/coop1/c2x1/s3/g8", 144, {"out_dtype": torch.float8_e4m3fn}),
        ("128x112x128/coop2/c1x1/s3/g8/twin", 135, {"a": "int8"}),
        # A scale for each column.
        ("64x96x128/coop1/c1x1/s3/g8", 152, {"recipes": ("blocks128", "blocks")}),
        ("64x48x128/pp/c1x1/s3/g8/zig", 75, {"recipes": ("tensor", "blocks")}),
        # A alone.
        ("64x64x128/coop1/c1x1/s3/g8", 100, {"recipes": ("blocks", "rows")}),
        # Swapped operands.
        ("128x16x128/coop1/c1x1/s3/g8/swap", 256, {"m": 16}),
        ("256x32x128/coop2/c1x2/s3/g8/swap/twin", 200, {"m": 70}),
        ("128x32x128/coop1/c2x1/s3/g8/swap", 204, {"m": 30, "out_dtype": torch.float32}),
        ("256x16x128/pp/c1x1/s3/g8/swap", 201, {"m": 5}),
        ("256x16x128/coop2/c1x2/s3/g8/swap", 136, {"m": 20, "recipes": (None, "blocks")}),
        # Clusters along K.
        ("128x16x128/coop1/c1x1x2/s3/row/swap/twin", 204, {"m": 16}),
        ("128x32x128/coop1/c1x1x4/s3/row/swap", 136, {"m": 20, "k": 700, "recipes": (None, "blocks")}),
        ("64x64x128/coop1/c1x1x2/s3/row/twin", 202, {"out_dtype": torch.float8_e4m3fn}),
        # Neighbouring columns.
        ("64x64x128/coop1/c1x1/s3/g8", 201, {"gating": "pairs"}),
        ("128x96x128/coop2/c2x1/s3/g8/zig", 144, {"gating": "pairs", "recipes": ("blocks", "blocks")}),
        ("64x32x128/coop1/c1x1/s3/g8/streamk/twin", 136, {"gating": "pairs", "batch": 2}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.product(keep=1)
def test_gate_and_up_behind_scales_of_blocks(config, f, given, whole, seed):
    given = {"m": M, "k": K, "recipes": BLOCKS, "gating": "halves", **given}
    check(given.pop("m"), f, given.pop("k"), whole=whole, seed=seed, backend="cute", config=f"sm90/{config}", **given)


@pytest.mark.parametrize("m", [1, 40, 300])
@pytest.mark.parametrize("gating", ["halves", "pairs"])
@pytest.mark.product(keep=1)
def test_the_choice_serves_gate_and_up_behind_scales_of_blocks(m, gating, seed):
    check(m, 200, K, whole=True, recipes=BLOCKS, gating=gating, seed=seed, backend="cute")


@pytest.mark.parametrize("recipes", [ROWS, BLOCKS, ("tensor", "tensor")])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.product(keep=1)
def test_the_choice_serves_few_rows_of_gate_and_up(recipes, whole, seed):
    """In swapped tiles, of which the last hold parts of gate and up alone."""
    check(3, 200, K, whole=whole, recipes=recipes, gating="halves", seed=seed, backend="cute")


@pytest.mark.parametrize("recipes", [ROWS, BLOCKS])
@pytest.mark.product(keep=1)
def test_the_choice_serves_gate_and_up_with_results_of_one_byte(recipes, seed):
    """Among its candidates are tiles of 8 columns of D."""
    check(16, 64, 200, recipes=recipes, gating="halves", out_dtype=torch.float8_e4m3fn, seed=seed, backend="cute")


@pytest.mark.parametrize("recipes", [ROWS, BLOCKS])
@pytest.mark.product(keep=1)
def test_a_matrix_operand_beside_scales(recipes, seed, monkeypatch):
    """Several tiles a CTA, so that stages are filled again behind an epilogue."""
    gpu_of(2, monkeypatch, "H200")
    terms = {"c": torch.ones(200, 264, dtype=torch.bfloat16), "beta": 2.0}
    given = {"recipes": recipes, "out_dtype": torch.bfloat16, "options": terms, "seed": seed}
    check(200, 264, K, backend="cute", config="sm90/128x64x128/coop2/c1x1/s3/g8", **given)


@pytest.mark.parametrize(
    "config",
    [
        "128x64x128/coop2/c2x1/s3/g8", "64x64x128/coop1/c1x1/s3/g8/k3", "64x32x128/coop1/c1x1x2/s3/g8/swap",
        "64x64x128/coop1/c1x1/s3/g8/streamk", "64x64x64/pp/c1x1/s3/g8/slab",
    ],
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_sums_of_int8_are_exact(config, seed):
    check(M, N, K, a="int8", recipes=WHOLE, seed=seed, backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize(
    ("arch", "config"),
    [("H200", "sm90/64x16x128/coop1/c1x1/s3/row"), ("sm_89", "sm80/16x16x128/w16x16/s2/g1")],
)
def test_each_type_keeps_its_smallest_exponent(arch, config, monkeypatch):
    """18 2^-16 - 7 2^-16: cut off where 2^-16 of e5m2 is aligned as e4m3's least numbers are."""
    monkeypatch.setenv("CUTEGEMM_ARCH", arch)
    a = torch.zeros(16, 32).index_put((torch.tensor([3, 3]), torch.tensor([0, 1])), torch.tensor([-18.0, -(2.0**-9)]))
    b = torch.zeros(16, 32).index_put(
        (torch.tensor([5, 5]), torch.tensor([0, 1])), torch.tensor([-(2.0**-16), 0.0546875])
    )
    d = cutegemm.gemm(
        a.to(torch.float8_e4m3fn), b.to(torch.float8_e5m2).mT, out_dtype=torch.float32, backend="cute", config=config
    )
    assert d[3, 5] == 11 * 2.0**-16


def test_odd_operands_are_packed(seed):
    """Rows of 35 bytes, and a B that is not K-major; the plan says it."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(3, 20, 35, generator=generator).to(torch.float8_e4m3fn)
    b = torch.randn(35, 24, generator=generator).to(torch.float8_e5m2)
    given = {"backend": "cute", "config": "sm90/64x32x64/coop1/c1x1/s2/row", "out_dtype": torch.float32}
    exact = a.double() @ b.double()
    got = cutegemm.gemm(a, b, **given)
    assert ((got.double() - exact).abs() <= 34 * 2 * 2.0**-13 * (a.double().abs() @ b.double().abs())).all()
    batches = a.expand(3, 20, 35)[:, :, :32].contiguous()
    assert torch.equal(
        cutegemm.gemm(batches, b[:32], **given), cutegemm.gemm(batches, b[:32].t().contiguous().t(), **given)
    )


def test_one_program_quantizes_its_result(seed):
    """D in e4m3 and a copy in int8, by given scales: to nearest, saturating."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-3, 4, (70, 64), generator=generator).float().to(torch.float8_e4m3fn)
    b = torch.randint(-3, 4, (40, 64), generator=generator).float().to(torch.float8_e4m3fn).t()
    low, eight = cutegemm.gemm(
        a, b, scale_a=torch.tensor(3.0), backend="cute", config="sm90/64x64x64/coop1/c1x1/s2/row",
        epilogue=lambda acc, s: (ops.cast(acc * s, torch.float8_e4m3fn), ops.cast(acc * 0.5, torch.int8)),
        operands=(1.75,),
    )  # fmt: skip
    z = 3 * (a.double() @ b.double())
    assert torch.equal(low.float(), (z * 1.75).clamp(-448, 448).float().to(torch.float8_e4m3fn).float())
    assert torch.equal(eight.double(), (z * 0.5).round().clamp(-128, 127))
    assert (z * 0.5).abs().max() > 127
