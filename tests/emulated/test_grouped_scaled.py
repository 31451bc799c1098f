"""Scaled fp8 and int8 in groups by the Hopper kernel in the emulator: every recipe, sizes of every kind."""

from __future__ import annotations

import random

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.errors import UnsupportedError
from cutegemm.problem import packing
from cutegemm.problem.work import DENSE, GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, SCATTERED
from cutegemm.run import combining
from tests.groups import SKEWS, GroupCase, sizes_of

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("few_sms", "fresh_timing")
SMS = 3


CASES = [
    (RAGGED_M, "64x16x128/coop1/c1x1/s3/g2/swap/twin", ("e4m3", "e4m3"), ("blocks", "blocks128")),
    (RAGGED_M, "64x144x128/coop1/c2x1/s3/g2/swap", ("e4m3", "e4m3"), ("blocks", "blocks128")),
    (RAGGED_M, "128x64x128/coop2/c2x1/s3/serp2/zig/pdl", ("e4m3", "e5m2"), ("blocks", "blocks128")),
    (RAGGED_M, "64x32x128/pp/c1x1/s3/g2/slab", ("int8", "int8"), ("blocks", "blocks")),
    (RAGGED_M, "128x64x128/coop2/c1x1/s3/g2", ("e5m2", "e4m3"), ("rows", "flat")),
    (RAGGED_M, "64x16x64/coop1/c1x1/s3/g2/swap", ("int8", "int8"), ("flat", "groups")),
    (RAGGED_N, "64x64x128/coop1/c1x1/s3/serp2/twin", ("e4m3", "e4m3"), ("blocks", "blocks")),
    (RAGGED_N, "128x32x128/coop2/c1x1/s3/hilbert/swap", ("e4m3", "e4m3"), ("blocks128", "blocks")),
    (RAGGED_N, "64x32x128/coop1/c1x2/s3/g2", ("int8", "int8"), ("groups", "flat")),
    (MASKED, "128x32x128/coop2/c1x2/s3/g2", ("e4m3", "e4m3"), ("blocks128", "blocks128")),
    (MASKED, "64x16x128/coop1/c2x1/s3/g2/swap/once", ("e4m3", "e4m3"), ("blocks", "blocks")),
    (MASKED, "64x64x64/pp/c1x1/s3/g2", ("int8", "int8"), ("flat", "rows")),
    (GATHERED, "128x64x128/coop2/c2x1/s3/g2", ("e4m3", "e4m3"), ("blocks", "blocks128")),
    (GATHERED, "64x32x128/coop1/c1x1/s3/g2/swap/twin", ("e5m2", "e4m3"), ("blocks", "blocks")),
    (GATHERED, "64x64x128/pp/c1x1/s2/serp2/pdl", ("int8", "int8"), ("rows", "tensor")),
    (RAGGED_M, "256x64x128/coop2/c1x2/s3/serp2/zig/pdl/half", ("e4m3", "e5m2"), ("blocks", "blocks128")),
    (RAGGED_M, "128x96x128/coop2/c2x1/s3/g2/streamk/half", ("int8", "int8"), ("blocks", "blocks128")),
    (MASKED, "128x160x128/coop2/c1x1/s3/g2/half", ("e4m3", "e4m3"), ("blocks", "blocks128")),
    (RAGGED_M, "128x256x128/coop2/c1x2/s3/serp2/zig/pdl/half", ("e4m3", "e4m3"), ("blocks", "blocks128")),
    (GATHERED, "128x64x128/coop2/c2x1/s3/g2/zig/half", ("e4m3", "e4m3"), ("blocks", "blocks128")),
    (SCATTERED, "256x32x128/coop2/c1x1/s3/g2/half", ("e5m2", "e4m3"), ("rows", "flat")),
    (SCATTERED, "64x16x128/pp/c1x1/s3/g2/swap", ("e4m3", "e4m3"), ("blocks", "blocks128")),
    (SCATTERED, "128x64x128/coop2/c1x1/s3/g2", ("int8", "int8"), ("groups", "flat")),
]


@pytest.mark.parametrize(("work", "config", "kinds", "recipes"), CASES)
@pytest.mark.parametrize("sizes", [(70, 0, 1, 56), "drawn"], ids=str)
@pytest.mark.product(keep=1)
def test_every_recipe_on_groups_of_any_sizes(work, config, kinds, recipes, sizes, seed):
    """K is no multiple of 128, groups end anywhere, one is empty, one has one row."""
    rng = random.Random(seed)
    if sizes == "drawn":
        sizes = sizes_of(rng.choice(SKEWS), rng.choice((1, 3, 6)), 150, rng)
    case = GroupCase.random(
        work, list(sizes), 150, 152, 272, kinds[0], b_dtype=kinds[1], recipes=recipes, seed=seed, tail=3
    )  # fmt: skip
    case.run(backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize("work", [RAGGED_M, RAGGED_N, MASKED, GATHERED, SCATTERED])
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.parametrize("config", ["128x64x128/coop2/c1x1/s3/g2", "64x16x128/coop1/c1x1/s3/g2/swap"])
@pytest.mark.product(keep=1)
def test_integers_are_exact(work, kind, config, seed):
    """int8 gives int32; small integers of fp8 have exact sums in fp32."""
    options = {} if kind == "int8" else {"out_dtype": torch.float32}
    case = GroupCase.random(work, [9, 0, 70, 1], 80, 40, 300, kind, integers=True, seed=seed, tail=5, **options)
    case.run(exact=True, backend="cute", config=f"sm90/{config}")
    assert case.call().dtype == (torch.int32 if kind == "int8" else torch.float32)


@pytest.mark.parametrize("config", ["128x64x128/coop2/c1x1/s3/g2", "128x32x128/coop1/c1x1/s3/g2/swap"])
@pytest.mark.parametrize("work", [RAGGED_M, GATHERED])
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.parametrize("scales", ["of rows", "of groups and of all"])
@pytest.mark.product(keep=1)
def test_gate_and_up_of_stacked_weights_with_scales(work, config, kind, scales, seed):
    generator = torch.Generator().manual_seed(seed)
    case = GroupCase.random(
        work, [70, 0, 3, 55], 0, 160, 144, kind, seed=seed, recipes=("rows", "rows"), out_dtype=torch.bfloat16
    )  # fmt: skip
    case.epilogue, case.operands = lambda acc, row: ops.swiglu(acc) * row, (torch.randn(128, 1, generator=generator),)
    if scales != "of rows":
        case.scales = {"scale_a": torch.rand(4, generator=generator), "scale_b": torch.rand((), generator=generator)}
    case.run(backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize("n", [160, 144, 272])
@pytest.mark.parametrize(
    ("config", "gating"),
    [
        ("128x64x128/coop2/c1x1/s3/g2", "swiglu"),
        ("128x64x128/coop2/c1x1/s3/g2", "swiglu_pairs"),
        ("128x32x128/coop1/c1x1/s3/g2/swap", "swiglu"),
        ("64x64x128/coop1/c1x1/s3/g2/twin", "swiglu"),
        ("64x64x128/coop1/c1x1/s3/g2/twin", "swiglu_pairs"),
        ("64x128x128/coop1/c2x1/s3/g2/streamk", "swiglu"),
        ("64x128x128/coop1/c2x1/s3/g2/streamk", "swiglu_pairs"),
        ("128x32x128/coop2/c2x1/s3/g2/swap/twin", "swiglu_pairs"),
    ],
)
@pytest.mark.parametrize("work", [RAGGED_M, GATHERED, MASKED, SCATTERED])
@pytest.mark.product(keep=1)
def test_gate_and_up_of_stacked_weights_behind_scales_of_blocks(work, config, gating, n, seed):
    """Up's columns begin at 80, 72 and 136, in the middle of a block of 128."""
    if "c2x1" in config and "swap" in config and work in (SCATTERED, GATHERED):
        pytest.skip("clusters share no gathered rows, and pairs of swapped operands need TMA's stores")
    recipes = ("blocks", "blocks128")
    case = GroupCase.random(work, [70, 0, 3, 55], 0, n, 272, "e4m3", seed=seed, recipes=recipes)
    case.epilogue = getattr(ops, gating)
    case.run(backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize("n", [256, 768])
@pytest.mark.parametrize(
    "config",
    [
        "128x256x128/coop2/c1x2/s2/serp2/zig/pdl/half",
        "128x192x128/coop2/c2x1/s2/g2/half",
        "128x64x128/coop2/c1x1/s3/g2/streamk/half",
        "256x128x128/coop2/c1x2/s2/g2/half",
    ],
)
@pytest.mark.parametrize("work", [DENSE, RAGGED_M, GATHERED, MASKED, SCATTERED])
@pytest.mark.product(keep=2)
def test_halves_of_a_tile_take_gate_and_up_of_whole_blocks(work, config, n, seed):
    """128 divides F: gate's columns and up's lie alike in blocks."""
    if work == DENSE:
        check_dense(n, f"sm90/{config}", seed)
        return
    case = GroupCase.random(work, [150, 0, 3, 55], 0, n, 400, "e4m3", seed=seed, recipes=("blocks", "blocks128"))
    case.epilogue = ops.swiglu
    large = "256" in config
    if (work == GATHERED and ("c1x2" in config or "streamk" in config)) or (work == SCATTERED and large):
        with pytest.raises(UnsupportedError, match=r"gathers|more than 112 spill"):
            case.run(backend="cute", config=f"sm90/{config}")
        return
    case.run(backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize(
    ("config", "f"),
    [
        ("128x128x128/coop2/c2x1/s2/g2", 64),
        ("128x128x128/coop2/c2x1/s2/g2", 96),
        ("128x128x128/coop2/c2x1/s2/g2", 68),
        ("64x128x128/coop1/c1x1/s3/g2/twin", 80),
        ("64x128x128/coop1/c1x1/s3/g2/twin", 65),
        ("64x96x128/coop1/c1x1/s3/g2", 72),
        ("64x96x128/coop1/c1x1/s3/g2", 66),
        ("128x32x128/coop1/c1x1/s3/g2/swap", 64),
        ("128x32x128/coop1/c1x1/s3/g2/swap", 96),
        ("256x64x128/coop2/c1x2/s2/g2/swap", 192),
        ("256x64x128/coop2/c1x2/s2/g2/swap", 66),
    ],
)
@pytest.mark.product(keep=2)
def test_columns_of_up_begin_anywhere_in_a_block_of_scales(config, f, seed):
    """At 64, 32, 16 and 8 columns of a block, and where fragments of accumulators change blocks."""
    check_dense(2 * f, f"sm90/{config}", seed)


def check_dense(n: int, config: str, seed: int) -> None:
    """SwiGLU of 150 x n x 400 in fp8 with scales of blocks: sums of integers, which are exact."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-2, 3, (rows, 400), generator=generator).to(torch.float8_e4m3fn) for rows in (150, n))
    scale_a, scale_b = (torch.randint(-4, 1, (rows, 4), generator=generator).exp2() for rows in (150, -(-n // 128)))
    of_a, of_b = scale_a.repeat_interleave(128, 1)[:, :400], scale_b.repeat_interleave(128, 0)[:n]
    of_b = of_b.repeat_interleave(128, 1)[:, :400]
    gate, up = ((a.double() * of_a) @ (b.double() * of_b).t()).chunk(2, -1)
    got = cutegemm.gemm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), epilogue=ops.swiglu, out_dtype=torch.float32, config=config,
        backend="cute",
    )  # fmt: skip
    torch.testing.assert_close(got.double(), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipes", [("blocks", "blocks128"), ("rows", "rows"), ("tensor", "tensor")])
@pytest.mark.product(keep=1)
def test_rows_that_are_copied_in_front_bring_their_scales(recipes, seed, monkeypatch):
    monkeypatch.setattr(packing, "GATHERED_ROWS", 2)
    monkeypatch.setattr(packing, "GATHERED_COLUMNS", 16)
    case = GroupCase.random(GATHERED, [20, 0, 30], 0, 72, 143, "e4m3", seed=seed, recipes=recipes)
    launched, in_order = [], combining.in_order
    monkeypatch.setattr(combining, "in_order", lambda *given: launched.append(given) or in_order(*given))
    case.run(backend="cute")
    assert launched


def test_halves_of_a_tile_refuse_gate_and_up_that_share_a_block(seed):
    case = GroupCase.random(RAGGED_M, [70], 0, 160, 272, "e4m3", seed=seed, recipes=("blocks", "blocks128"))
    case.epilogue = ops.swiglu
    with pytest.raises(UnsupportedError, match="16 is the largest power of two that divides the columns of gate"):
        case.run(backend="cute", config="sm90/128x64x128/coop2/c1x1/s3/g2/half")


@pytest.mark.parametrize("recipes", [("blocks", "blocks128"), ("rows", "rows")])
@pytest.mark.product(keep=1)
def test_sizes_that_nobody_should_pass_read_and_write_nothing_outside(recipes, seed):
    """Descending, negative, too large: the emulator finds accesses outside of the tensors, of scales too."""
    rng = random.Random(seed)
    case = GroupCase.random(RAGGED_M, [24, 24, 24], 72, 72, 272, "int8", seed=seed, recipes=recipes)
    wild = (-(2**31), -1, 0, 5, 40, 72, 73, 2**30 + 7, 2**31 - 1)
    for _ in range(2):
        case.sizes = torch.tensor([rng.choice(wild) for _ in range(3)], dtype=torch.int32)
        case.run(backend="cute", config="sm90/64x64x128/coop1/c1x1/s3/g2")


@pytest.mark.slow
def test_scales_in_any_strides_and_what_the_heuristic_takes(seed):
    """Column-major scales, as cuBLAS wants them, and one of all groups."""
    case = GroupCase.random(RAGGED_M, [70, 0, 3, 50], 0, 136, 272, "e4m3", seed=seed, recipes=("blocks", "blocks128"))
    case.scales["scale_a"] = case.scales["scale_a"].t().contiguous().t()
    case.run(backend="cute")
    case.scales["scale_b"] = case.scales["scale_b"][:1].clone()
    case.run(backend="cute")
    case.scales["scale_a"], case.options["accumulate"] = case.scales["scale_a"][:, :1].clone(), "fast"
    case.scales["scale_b"] = torch.rand(4, 136)
    case.run(backend="cute")


@pytest.mark.parametrize("recipes", [("rows", "rows"), ("blocks", "blocks128")])
@pytest.mark.product(keep=1)
def test_a_gathered_row_brings_its_scale(recipes, seed):
    """Rows that are asked for twice, or that are none, with scales of rows and of blocks."""
    case = GroupCase.random(GATHERED, [20, 0, 30], 0, 72, 144, "e4m3", seed=seed, recipes=recipes)
    config = "sm90/64x64x128/coop1/c1x1/s3/g2"
    got = case.call(backend="cute", config=config)
    index = case.index.clamp(min=0).long()
    scales = {**case.scales, "scale_a": case.scales["scale_a"][index]}
    want = cutegemm.grouped_gemm(case.a[index], case.b, case.sizes, **scales, backend="cute", config=config)
    assert torch.equal(got, torch.where(case.index[:, None] >= 0, want, 0))


@pytest.mark.parametrize("config", ["64x64x128/coop1/c1x1/s3/g2", "64x16x64/coop1/c1x1/s3/g2/swap"])
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.product(keep=1)
def test_what_lies_behind_a_gathered_row_is_not_read(kind, config, seed):
    """Rows of 136 bytes are copied in pieces of 16, the last of which ends within a gap of NaN (of 127)."""
    case = GroupCase.random(GATHERED, [20, 0, 30], 0, 72, 136, kind, seed=seed)
    gapped = torch.full((len(case.a), 144), 0x7F, dtype=torch.uint8).view(case.a.dtype)
    gapped[:, :136] = case.a
    case.a = gapped[:, :136]
    if kind == "int8":
        case.b = torch.full((3, 72, 144), 127, dtype=torch.int8)[..., :136].mT
    case.run(exact=kind == "int8", backend="cute", config=f"sm90/{config}")


def test_what_no_kernel_serves_is_refused_with_the_reason():
    case = GroupCase.random(RAGGED_K, [70, 0, 3, 47], 72, 72, 0, "e4m3", recipes=("rows", "rows"))
    with pytest.raises(UnsupportedError, match=r"tensor cores read e4m3 along K, .* at no multiple of 16 bytes"):
        case.run(backend="cute")
    case.run()  # by torch
