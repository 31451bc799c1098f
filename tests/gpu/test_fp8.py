"""Products of fp8 and int8 on a GPU: every recipe, by the kernels that the heuristic chooses and by named ones."""

from __future__ import annotations

import random

import pytest
import torch

import cutegemm
from tests.scaled import RECIPES, check

pytestmark = pytest.mark.gpu
KINDS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("int8", "int8"))
CONFIGS = (
    "sm90/128x192x128/coop2/c2x1/s4/serp8/zig/pdl", "sm90/192x128x128/coop3/c1x2/s4/serp8/pdl",
    "sm90/128x128x128/coop2/c1x1/s5/serp8/k4/pdl", "sm90/64x128x128/pp/c1x1/s5/serp8/pdl",
    "sm90/64x32x128/coop1/c1x1/s8/serp8/k3/swap/pdl", "sm90/128x64x128/coop2/c1x1x2/s6/row/swap/pdl",
    "sm90/128x128x128/coop2/c2x1/s5/serp8/streamk/pdl",
)  # fmt: skip
HALVES = (
    "sm90/256x128x128/coop2/c1x2/s4/serp8/zig/pdl/half", "sm90/128x256x128/coop2/c2x1/s4/serp8/zig/pdl/half",
    "sm90/128x256x128/coop2/c2x1/s4/serp8/zig/streamk/pdl/half", "sm90/128x224x128/coop2/c1x1/s3/g8/k3/pdl/half",
)  # fmt: skip


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels for operands of one byte are Hopper's")


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (16, 7168, 2048), (300, 1001, 777), (1, 512, 130), (128, 24, 1)])
def test_what_the_heuristic_chooses(kinds, shape, seed):
    draw = random.Random(seed)
    for _ in range(4):
        recipes = draw.choice(RECIPES), draw.choice(RECIPES)
        accumulate = draw.choice((None, "promoted", "fast")) if kinds[0] != "int8" else None
        if accumulate == "fast" and any(each and each.startswith("blocks") for each in recipes):
            accumulate = None
        options = draw.choice(({}, {"bias": True, "activation": "silu"}, {"alpha": -0.5}))
        if kinds[0] == "int8" and recipes == (None, None):
            options = {}
        check(
            *shape, a=kinds[0], b=kinds[1], recipes=recipes, seed=draw.randrange(2**31), device="cuda",
            batch=draw.choice((None, None, 3)) if shape[0] < 1000 else None, accumulate=accumulate, options=options,
        )  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("recipes", [("rows", "tensor"), ("blocks", "blocks128"), ("blocks", "blocks")])
def test_named_configurations(config, recipes, seed):
    for shape in ((517, 776, 4100), (130, 264, 384)):
        check(*shape, recipes=recipes, seed=seed, device="cuda", backend="cute", config=config)


@pytest.mark.parametrize("config", HALVES)
@pytest.mark.parametrize(
    "recipes", [("rows", "tensor"), ("blocks", "blocks128"), (None, "blocks128"), ("blocks", "rows")]
)
def test_sums_promoted_by_halves(config, recipes, seed):
    given = {"recipes": recipes, "seed": seed, "device": "cuda", "backend": "cute", "config": config}
    for shape in ((517, 776, 4100), (130, 264, 384), (3000, 5000, 2100)):
        for kinds in KINDS[:3]:
            check(*shape, a=kinds[0], b=kinds[1], **given)
    if recipes == ("blocks", "blocks128"):
        check(517, 776, 4100, a="int8", **given)


@pytest.mark.parametrize("config", HALVES)
def test_integers_promoted_by_halves_are_exact(config, seed):
    given = {"seed": seed, "device": "cuda", "backend": "cute", "config": config}
    check(3000, 2064, 4100, recipes=(None, None), whole=True, out_dtype=torch.float32, **given)


@pytest.mark.parametrize("gating", ["halves", "pairs"])
@pytest.mark.parametrize("recipes", [("blocks", "blocks128"), ("blocks", "blocks"), (None, "blocks128")])
@pytest.mark.parametrize(
    "shape", [(4096, 2048, 4096), (16, 1536, 2048), (1, 768, 512), (300, 1001, 777), (70, 204, 130)]
)
@pytest.mark.parametrize("whole", [True, False])
def test_gate_and_up_behind_scales_of_blocks(gating, recipes, shape, whole, seed):
    """By what the heuristic chooses; `whole` to the bit."""
    check(*shape, whole=whole, recipes=recipes, gating=gating, seed=seed, device="cuda", backend="cute")


@pytest.mark.parametrize(
    "config",
    [
        "sm90/128x192x128/coop2/c2x1/s4/serp8/zig/pdl", "sm90/128x128x128/coop2/c1x1/s5/serp8/pdl",
        "sm90/64x128x128/coop1/c1x1/s6/serp8/pdl/twin", "sm90/192x128x128/coop3/c1x2/s4/serp8/pdl",
        "sm90/128x64x128/coop1/c1x1/s6/serp8/swap/pdl/twin", "sm90/256x32x128/coop2/c1x2/s4/serp8/swap/pdl",
        "sm90/128x128x128/coop2/c2x1/s5/serp8/streamk/pdl", "sm90/128x16x128/coop1/c1x1x8/s5/row/swap/pdl/twin",
        "sm90/128x64x128/coop1/c1x1x4/s4/row/swap/pdl/twin", "sm90/64x128x128/coop1/c2x2x2/s9/row/pdl/twin",
    ],
)  # fmt: skip
@pytest.mark.parametrize("f", [776, 1024, 1002, 333])
def test_named_configurations_of_gate_and_up(config, f, seed):
    for whole in (True, False):
        check(
            517, f, 2100, whole=whole, recipes=("blocks", "blocks128"), gating="halves", seed=seed, device="cuda",
            backend="cute", config=config,
        )  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_integers_are_exact(config, seed):
    given = {"seed": seed, "device": "cuda", "backend": "cute", "config": config}
    check(517, 776, 4100, recipes=(None, None), whole=True, out_dtype=torch.float32, **given)
    check(517, 776, 4100, a="int8", recipes=(None, None), **given)


def test_a_captured_product_has_the_bits_of_an_eager_one(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(256, 1024, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(512, 1024, generator=generator, device="cuda").to(torch.float8_e4m3fn).t()
    scales = {
        "scale_a": torch.rand(256, 8, generator=generator, device="cuda"),
        "scale_b": torch.rand(8, 4, generator=generator, device="cuda"),
    }
    out = torch.empty(256, 512, device="cuda", dtype=torch.bfloat16)
    eager = cutegemm.gemm(a, b, **scales)
    cutegemm.prepare(a, b, out=out, **scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cutegemm.gemm(a, b, out=out, **scales)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, eager)


@pytest.mark.parametrize("out", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize(
    "config",
    [
        *HALVES[:3], "sm90/128x192x128/pp/c2x1/s4/serp8/pdl", "sm90/128x64x128/coop2/c1x2/s6/serp8/swap/pdl",
        "sm90/64x16x128/coop1/c2x1/s8/serp8/swap/pdl", "sm90/256x112x128/coop2/c1x1/s4/serp8/swap/zig/pdl",
    ],
)  # fmt: skip
def test_results_of_one_byte_have_the_bits_that_slabs_store(config, out, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    fast = None if "half" in config else "fast"
    for m, n, k in ((517, 784, 4100), (130, 272, 384), (3000, 5008, 2112)):
        a, b = (torch.randn(rows, k, generator=generator, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
        scales = (torch.rand(shape, generator=generator, device="cuda") for shape in ((m, 1), (1, n)))
        given = dict(zip(("scale_a", "scale_b"), scales, strict=True), out_dtype=out, accumulate=fast, backend="cute")
        by_tma, by_slabs = (cutegemm.gemm(a, b.t(), config=f"{config}{slab}", **given) for slab in ("", "/slab"))
        assert torch.equal(by_tma.view(torch.uint8), by_slabs.view(torch.uint8))
    check(517, 784, 4096, whole=True, recipes=(None, None), out_dtype=out, accumulate=fast, seed=seed, device="cuda",
          backend="cute", config=config)  # fmt: skip
    for f in (776, 1024) if "swap" not in config else ():
        check(517, f, 2100, recipes=("rows", "rows"), gating="pairs", seed=seed, device="cuda", backend="cute",
              accumulate=fast, config=config)  # fmt: skip
