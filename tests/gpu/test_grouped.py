"""Products in groups on a Hopper GPU: every work and many configurations, graphs whose offsets change, gradients."""

from __future__ import annotations

import random

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.problem import reference
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, ROWS, SCATTERED
from tests.groups import RECIPES, SKEWS, WORKS, GroupCase, sizes_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


STREAM = "sm90/64x16x64/coop1/c1x1/s6/row/swap/streamk/pdl"
CONFIGS = [
    "sm90/128x256x64/coop2/c2x1/s4/serp8/zig/pdl",
    "sm90/256x128x64/coop2/c1x1/s4/g8/pdl",
    "sm90/128x128x64/pp/c1x1/s5/serp8/pdl",
    "sm90/64x64x64/coop1/c1x1/s8/hilbert",
    "sm90/128x32x64/coop2/c1x1/s6/col/swap/pdl",
    "sm90/64x16x64/pp/c1x2/s6/row/swap/pdl",
    "sm90/192x128x64/coop3/c1x1/s3/g8/slab",
    "sm90/128x256x64/coop2/c2x1/s4/serp8/zig/streamk/pdl",
    STREAM,
    "sm90/256x176x64/coop2/c2x1/s3/serp8/swap/zig/fit/pdl",
    "sm90/256x144x64/coop2/c1x2/s4/serp8/swap/zig/streamk/fit/pdl",
    "sm90/128x96x64/pp/c1x1/s4/hilbert/swap/fit/pdl",
    "sm80/128x128x32/w64x64/s4/g8",
    "sm80/32x64x64/w16x32/s4/g8",
]
CORES = ["simt/128x128x8/w64x64/s3/g8", "simt/64x64x16/w32x64/s2/g8/r6", "simt/32x32x64/w32x32/s3/g8/x8"]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("work", WORKS)
def test_configurations_on_groups_of_any_sizes(work, config, seed):
    if "/streamk" in config and (work == RAGGED_K or (work == GATHERED and "coop1" not in config)):
        pytest.skip(
            "stream-K takes tiles of one K, and gathered rows in coop1 alone; refused by the configuration's rule"
        )
    if "/fit" in config and work not in ROWS:
        pytest.skip("fit divides rows of groups that lie one behind the other; refused by the configuration's rule")
    if work == GATHERED:
        config = config.replace("c1x2", "c1x1").replace("c2x1", "c1x1" if "swap" in config else "c2x1")
        if "coop3" in config:
            pytest.skip("three consumers leave the producer too few registers; refused by the configuration's rule")
    rng = random.Random(seed)
    for skew in SKEWS:
        for groups in (1, 8, 130, 1024):
            sizes = sizes_of(skew, groups, 3000, rng)
            # Ragged K has a result for each group, and its reference holds some twenty of them in float64.
            m, (n, k) = 264 if work == RAGGED_K else 3000, (520, 264) if groups < 1024 else (136, 72)
            case = GroupCase.random(
                work, sizes if work != MASKED else sizes[:16], m, n, k, seed=seed, device="cuda",
                tail=-sum(sizes) % 8 + 8,
            )  # fmt: skip
            case.run(backend="cute", config=config)
    case = GroupCase.random(work, [500, 0, 1, 123], 624, 520, 1032, seed=seed, device="cuda", integers=True)
    case.run(exact=True, backend="cute", config=config)


@pytest.mark.parametrize("config", [*CORES, "sm80/128x64x32/w64x32/s3/g8"])
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("majors", ["tn", "nt"])
def test_float32_of_any_alignment(work, config, majors, seed):
    rng = random.Random(seed)
    tail, precision = 0 if work == MASKED else 5, "tf32" if config.startswith("sm80") else "ieee"
    for skew in SKEWS:
        for groups in (1, 33):
            sizes = sizes_of(skew, groups, 1500, rng)
            case = GroupCase.random(
                work, sizes, 1500 if work == MASKED else 133, 275, 143, "fp32", seed=seed, device="cuda", tail=tail,
                majors=majors, precision=precision,
            )  # fmt: skip
            case.run(backend="cute", config=config)


@pytest.mark.parametrize("config", [None, *CONFIGS, "sm90/128x64x64/coop2/c1x1/s4/g8/slab"])
@pytest.mark.parametrize("work", WORKS)
def test_reduced_results(work, config, seed):
    """Of rows, of groups of columns of columns; numbers that belong to no group stay."""
    if config and "sm90" in config:
        if work == RAGGED_K and "streamk" in config:
            pytest.skip("stream-K takes tiles of one K; refused by the configuration's rule")
        if work == GATHERED and ("coop1" not in config or "c1x2" in config):
            pytest.skip("gathered rows take fewer of these; refused by the configuration's rule")
        if "/fit" in config and work not in ROWS:
            pytest.skip("fit divides rows of groups; refused by the configuration's rule")
        if work == RAGGED_N:  # whose results go through slabs, which take registers
            config = config.replace("128x256", "128x192")
    rng = random.Random(seed)
    for skew in SKEWS:
        sizes = sizes_of(skew, 33, 1500, rng)
        case = GroupCase.random(
            work, sizes, 1500 if work == MASKED else 264, 520, 264, seed=seed, device="cuda", tail=-sum(sizes) % 8 + 8
        )  # fmt: skip
        case.epilogue = lambda acc: (acc, ops.row_sum(acc + 1.0), ops.row_max_abs(acc))
        if work == RAGGED_N:
            case.epilogue = lambda acc: (acc, ops.column_sum(acc + 1.0), ops.column_max_abs(acc))
        case.run(backend="cute", config=config)


@pytest.mark.parametrize("majors", ["tt", "nn", "nt", "tn"])
@pytest.mark.parametrize("work", WORKS)
def test_operands_of_odd_extents(work, majors, seed):
    """No row but the first begins at 16 bytes; backend "auto" takes mma.sync, in a graph too."""
    case = GroupCase.random(work, [500, 0, 1, 124], 624, 521, 263, seed=seed, device="cuda", majors=majors)
    case.run()
    graph, want = torch.cuda.CUDAGraph(), torch.full_like(case.call(), 77)
    out = want.clone()
    case.call(out=want)
    with torch.cuda.graph(graph):
        case.call(out=out)
    out.fill_(77)
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize("majors", ["tt", "nn", "nt"])
@pytest.mark.parametrize("work", [RAGGED_M, RAGGED_N, GATHERED, SCATTERED])
def test_other_majors(work, majors, seed):
    """Groups that begin anywhere within contiguous rows, where TMA cannot, and on operands that begin there."""
    rng = random.Random(seed)
    for skew in SKEWS:
        sizes = sizes_of(skew, 33, 1000, rng)
        for config in (None, "sm90/64x16x64/coop1/c1x1/s6/row/swap/pdl", "sm90/128x96x32/coop2/c1x1/s4/hilbert/slab"):
            case = GroupCase.random(
                work, sizes, 1000, 264, 136, seed=seed, device="cuda", tail=-sum(sizes) % 8 + 8, majors=majors
            )  # fmt: skip
            case.run(backend="cute", config=config)


def test_backend_torch_takes_as_many_groups(seed):
    """1024, one more than torch's grouped_mm."""
    GroupCase.random(RAGGED_M, [2] * 1024, 0, 64, 64, seed=seed, device="cuda").run(backend="torch")


@pytest.mark.parametrize(
    ("work", "config"), [(RAGGED_M, None), (RAGGED_K, None), (MASKED, None), (RAGGED_M, STREAM), (MASKED, STREAM)]
)
def test_a_thousand_replays_with_other_offsets(work, config, seed):
    """A captured graph holds no size: every replay computes the division that stands in the tensor then. Stream-K of so
    many small tiles cuts others in each, in one workspace.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)
    case = GroupCase.random(work, [96] * 8, 768, 264, 136, seed=seed, device="cuda", integers=True)
    case.a.nan_to_num_(1)
    out = case.call(backend="cute", config=config).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.call(backend="cute", config=config, out=out)
    for _ in range(1000):
        drawn = torch.randint(-40, 850, (8,), generator=generator, device="cuda").int()
        case.sizes.copy_(drawn if work == MASKED else drawn.sort().values)
        out.fill_(77)
        graph.replay()
        want = torch.full_like(out, 77)
        case.call(backend="torch", out=want)
        assert torch.equal(out, want)


@pytest.mark.parametrize("ends", [[5, 3, 2000, 7], [-4, 600, -1, 2**31 - 1], [-(2**31), 0, 0, -7]])
def test_offsets_that_nobody_should_pass_write_nothing_outside(ends, seed):
    """For compute-sanitizer too: memcheck finds an access outside of the tensors."""
    case = GroupCase.random(RAGGED_M, [150] * 4, 0, 264, 136, seed=seed, device="cuda")
    case.sizes = torch.tensor(ends, dtype=torch.int32, device="cuda")
    for config in CONFIGS:
        guarded = torch.full((800, 264), 55.0, device="cuda").bfloat16()
        case.run(backend="cute", config=config, out=(guarded[100:700],))
        assert bool((guarded[:100] == 55).all() & (guarded[700:] == 55).all())


@pytest.mark.parametrize("config", [None, *CONFIGS[:3]])
def test_gate_and_up_with_operands(config, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for work in (RAGGED_M, GATHERED, SCATTERED):
        case = GroupCase.random(work, [700, 0, 3, 321], 0, 1040, 264, seed=seed, device="cuda")
        case.epilogue = lambda acc, row, group: ops.swiglu(acc) * row + group
        case.operands = (
            torch.randn(1024, 1, generator=generator, device="cuda"),
            torch.randn(4, 1, 520, generator=generator, device="cuda").bfloat16(),
        )
        case.run(backend="cute", config=config)


def test_other_than_rows_by_default(seed):
    for work in (RAGGED_N, RAGGED_K, MASKED):
        GroupCase.random(work, [700, 0, 3, 321], 1024, 520, 264, seed=seed, device="cuda").run()


def test_gradients_are_those_of_torch_and_the_same_each_time(seed):
    torch.manual_seed(seed)
    ends = torch.tensor([300, 300, 305, 1000], dtype=torch.int32, device="cuda")
    a = torch.randint(-2, 3, (1000, 264), device="cuda").bfloat16().requires_grad_()
    b = torch.randint(-2, 3, (4, 264, 136), device="cuda").bfloat16().requires_grad_()
    upstream = torch.randint(-1, 2, (1000, 136), device="cuda").bfloat16()
    found = [
        torch.autograd.grad(cutegemm.grouped_gemm(a, b, ends, backend=backend), (a, b), upstream)
        for backend in ("cute", "cute", "torch")
    ]
    for first, second, theirs in zip(*found, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, theirs)


SCALED = [
    "sm90/128x192x128/coop2/c2x1/s4/serp8/zig/pdl",
    "sm90/128x128x128/coop2/c1x1/s5/serp8/pdl/twin",
    "sm90/64x64x128/coop1/c1x1/s8/serp8/swap/pdl/twin",
    "sm90/64x16x128/coop1/c2x1/s8/row/swap/pdl",
    "sm90/64x128x128/pp/c1x1/s5/serp8/slab",
    None,
]
KINDS = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("int8", "int8")]


@pytest.mark.parametrize("config", SCALED)
@pytest.mark.parametrize("work", [work for work in WORKS if work != RAGGED_K])
def test_every_recipe_on_groups_of_any_sizes(work, config, seed):
    """K is no multiple of 128, groups end anywhere."""
    if work == GATHERED and config is not None:
        config = config.replace("c2x1", "c1x1") if "swap" in config else config
    promoted = config is not None and "twin" in config  # a second set of accumulators, which sums of int8 do not need
    rng = random.Random(seed)
    for skew in SKEWS:
        sizes = sizes_of(skew, rng.choice((1, 8, 130)), 3000, rng)
        kinds = rng.choice(KINDS[:2] if promoted else KINDS)
        for recipes in (("blocks", "blocks128"), (rng.choice(RECIPES), rng.choice(RECIPES))):
            if work == RAGGED_N:
                recipes = recipes[::-1]
            case = GroupCase.random(
                work, sizes if work != MASKED else sizes[:16], 3000, 520, 1096, kinds[0], b_dtype=kinds[1], seed=seed,
                recipes=recipes, device="cuda", tail=5,
            )  # fmt: skip
            case.run(backend="cute", config=config)
    for kind, options in (("int8", {}), ("e4m3", {"out_dtype": torch.float32})):
        if promoted and kind == "int8":
            continue
        case = GroupCase.random(
            work, [500, 0, 1, 123], 624, 520, 1032, kind, seed=seed, device="cuda", integers=True, **options
        )  # fmt: skip
        case.run(exact=True, backend="cute", config=config)


@pytest.mark.parametrize(
    "config",
    [
        "128x224x128/coop2/c2x1/s4/serp8/zig/pdl/half",
        "256x96x128/coop2/c2x1/s3/serp8/zig/streamk/pdl/half",
        "128x256x128/coop2/c1x2/s4/serp8/zig/pdl/half",
        "128x256x128/coop2/c1x2/s4/serp16/zig/streamk/pdl/half",
    ],
)
@pytest.mark.parametrize("work", [RAGGED_M, MASKED, GATHERED, SCATTERED])
def test_sums_promoted_by_halves(work, config, seed):
    if work == GATHERED:  # which takes no stream-K beside two warpgroups, and no clusters that share rows
        config = config.replace("/streamk", "").replace("c1x2", "c1x1")
    if work == SCATTERED:
        config = config.replace("128x256", "128x224")  # more spill
    rng = random.Random(seed)
    for skew in SKEWS:
        sizes = sizes_of(skew, rng.choice((1, 8, 16)), 3000, rng)
        kinds, recipes = rng.choice(KINDS[:2]), ("blocks", "blocks128")
        case = GroupCase.random(
            work, sizes, 3000, 520, 1096, kinds[0], b_dtype=kinds[1], seed=seed, recipes=recipes, device="cuda", tail=5
        )  # fmt: skip
        case.run(backend="cute", config=f"sm90/{config}")
        # Gate and up of 256 and 384 columns, which 128 divides, in blocks.
        gated = GroupCase.random(
            work, sizes, 3000, rng.choice((512, 768)), 1096, kinds[0], b_dtype=kinds[1], seed=seed, recipes=recipes,
            device="cuda", tail=5,
        )  # fmt: skip
        gated.epilogue = ops.swiglu
        gated.run(backend="cute", config=f"sm90/{config}")


def test_gate_and_up_of_scaled_experts(seed):
    for kind, recipe in (("e4m3", "rows"), ("int8", "flat"), ("e4m3", "groups")):
        for work in (RAGGED_M, GATHERED, SCATTERED, MASKED):
            case = GroupCase.random(
                work, [700, 0, 3, 321], 1024, 1040, 264, kind, seed=seed, device="cuda", recipes=(recipe, recipe),
                out_dtype=torch.bfloat16,
            )  # fmt: skip
            case.epilogue = ops.swiglu
            case.run(backend="cute")


@pytest.mark.parametrize("recipes", [("blocks", "blocks128"), ("rows", "rows")])
def test_a_captured_scaled_product_follows_its_offsets(recipes, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    case = GroupCase.random(RAGGED_M, [96] * 8, 0, 264, 272, "e4m3", seed=seed, device="cuda", recipes=recipes)
    out = case.call(backend="cute").clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.call(backend="cute", out=out)
    for _ in range(100):
        case.sizes.copy_(torch.randint(-40, 850, (8,), generator=generator, device="cuda").int().sort().values)
        out.fill_(77)
        graph.replay()
        want = torch.full_like(out, 77)
        case.call(backend="cute", out=want)
        assert torch.equal(out, want)


def test_scales_of_rows_are_those_of_torch(seed):
    """The call of torch._scaled_grouped_mm with the same arguments; both results are within the bound of fast sums."""
    sizes = [96, 0, 33, 200]
    case = GroupCase.random(RAGGED_M, sizes, 0, 256, 512, "e4m3", seed=seed, device="cuda", recipes=("flat", "flat"))
    rows, columns = (case.scales[name].contiguous() for name in ("scale_a", "scale_b"))
    theirs = torch._scaled_grouped_mm(case.a, case.b, rows, columns, offs=case.sizes, out_dtype=torch.bfloat16)
    ours = cutegemm.grouped_gemm(case.a, case.b, case.sizes, scale_a=rows, scale_b=columns)
    begin = 0
    for group, count in enumerate(sizes):
        own = slice(begin, begin + count)
        begin += count
        if count:
            want = reference.expected(
                case.a[own], case.b[group], scale_a=rows[own, None], scale_b=columns[group, None], precision="fast",
                out_dtype=torch.bfloat16,
            )  # fmt: skip
            for got in (ours, theirs):
                verdict = reference.check(got[own], want)
                assert verdict, verdict.message
