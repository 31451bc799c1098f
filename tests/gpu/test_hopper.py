"""The Hopper kernel on a Hopper GPU against the float64 reference: schedules, clusters, majors, epilogues, batches."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.problem import Problem, reference
from tests.problems import MAJORS, Case
from tuning.ladder_hopper import STEPS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


CONFIGS = [
    "sm90/128x256x64/coop2/c2x1/s4/hilbert",
    "sm90/128x256x64/coop2/c1x2/s4/serp8/pdl",
    "sm90/256x128x64/coop2/c2x2/s4/g8",
    "sm90/128x192x64/pp/c2x1/s4/hilbert",
    "sm90/128x208x64/pp/c1x1/s4/col",
    "sm90/64x256x64/pp/c1x2/s4/g8",
    "sm90/192x128x64/coop3/c1x1/s4/row",
    "sm90/128x128x64/coop2/c4x1/s5/hilbert/once",
    "sm90/64x64x128/coop1/c1x4/s4/serp2",
    "sm90/64x16x64/coop1/c1x1/s8/g8",
    "sm90/64x16x64/coop1/c1x2/s8/g8/swap",
    "sm90/128x64x64/coop2/c2x1/s6/hilbert/swap/pdl",
    "sm90/128x128x64/coop2/c2x1/s5/hilbert/k4",
    "sm90/128x128x64/coop2/c2x1x2/s6/serp8/pdl",
    "sm90/64x144x64/coop1/c1x2x4/s8/serp8",
    "sm90/64x16x64/coop1/c1x1x4/s8/row/k2/swap/pdl",
    "sm90/128x256x64/coop2/c2x1x4/s4/row/k3/pdl",
]
SHAPES = [(1, 8, 8), (127, 264, 136), (257, 520, 1032), (1000, 1608, 328), (2056, 2304, 64)]


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("config", CONFIGS)
def test_configurations_on_ragged_shapes(config, majors, seed):
    for m, n, k in SHAPES:
        # M-major operands need M to be a multiple of 8 for TMA.
        rows = m if majors[0] == "t" else -(-m // 8) * 8
        Case.random(rows, n, k, "bf16", majors=majors, seed=seed, device="cuda").run(backend="cute", config=config)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3], CONFIGS[11], "sm90/64x64x64/coop1/c1x1/s8/serp8"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_epilogues(config, dtype, seed):
    common = {"seed": seed, "device": "cuda"}
    shape = (392, 520, 264)
    Case.random(*shape, dtype, alpha=-0.5, activation="silu", **common).run(backend="cute", config=config)
    options = {"c": True, "bias": True, "alpha": 0.75, "beta": -1.5, "activation": "gelu", "out_dtype": torch.float32}
    Case.random(*shape, dtype, **common, **options).run(backend="cute", config=config)
    Case.random(*shape, dtype, **common, bias=True, activation="relu").run(backend="cute", config=config)


@pytest.mark.parametrize(
    "config",
    [
        "sm90/128x256x64/coop2/c2x1/s4/serp8/pdl",
        "sm90/128x192x64/pp/c2x1/s4/serp8/pdl",
        "sm90/256x128x64/coop2/c1x2/s4/serp8",
        "sm90/64x256x64/coop1/c1x1/s4/serp8",
        "sm90/128x64x128/coop2/c1x1/s4/serp8/swap/pdl",
        "sm90/64x32x128/pp/c1x1/s5/serp8/swap",
    ],
)
def test_c_and_bias_by_the_tma_epilogue(config, seed):
    """16-bit and fp32 C, C that a bias-like row broadcasts, a bias along either axis, 16-bit and fp32 results."""
    common = {"seed": seed, "device": "cuda"}
    shape = (1000, 1608, 328)
    for dtype in ("fp16", "bf16"):
        Case.random(*shape, dtype, **common, bias=True).run(backend="cute", config=config)
        Case.random(*shape, dtype, **common, c=True, alpha=0.5, beta=-2.0).run(backend="cute", config=config)
        Case.random(*shape, dtype, **common, c=True, beta=1.0, bias=True, activation="gelu", batch=2).run(
            backend="cute", config=config
        )
    row = torch.randn(1608, device="cuda").bfloat16()
    Case.random(*shape, "bf16", **common, c=row, beta=1.0).run(backend="cute", config=config)
    wide = torch.randn(1000, 1608, device="cuda")
    for out_dtype in (torch.bfloat16, torch.float32):
        Case.random(*shape, "bf16", **common, c=wide, beta=1.0, bias=True, out_dtype=out_dtype).run(
            backend="cute", config=config
        )
    turned = torch.empty(1608, 1000, device="cuda", dtype=torch.bfloat16).t()
    Case.random(*shape, "bf16", **common, c=True, beta=1.0, bias=True, out=turned).run(backend="cute", config=config)
    in_place = torch.randn(1000, 1608, device="cuda").bfloat16()
    want = Case.random(*shape, "bf16", **common, c=in_place.clone(), beta=0.5)
    want.run(backend="cute", config=config)
    expected = cutegemm.gemm(want.a, want.b, want.options["c"], beta=0.5, backend="cute", config=config)
    cutegemm.gemm(want.a, want.b, in_place, beta=0.5, out=in_place, backend="cute", config=config)
    assert torch.equal(in_place, expected)


@pytest.mark.parametrize(
    "config",
    [
        "sm90/256x208x64/coop2/c1x1/s3/serp8/slab/pdl",
        "sm90/128x208x64/pp/c1x1/s4/serp8/slab",
        "sm90/192x160x64/coop3/c1x1/s3/serp8/slab",
        "sm90/256x128x64/coop2/c1x1/s3/serp8/swap/slab/pdl",
    ],
)
def test_the_slab_epilogue(config, seed):
    """Strips that share their code: results and C at any element, in any strides; several tiles a CTA."""
    common = {"seed": seed, "device": "cuda"}
    shape = (1000, 1608, 328)
    Case.random(*shape, "bf16", **common, c=True, beta=-0.5, bias=True, activation="gelu").run(
        backend="cute", config=config
    )
    Case.random(*shape, "fp16", **common, out_dtype=torch.float32, batch=2).run(backend="cute", config=config)
    out = torch.empty(1000, 1611, device="cuda", dtype=torch.bfloat16)[:, 1:1608]
    wide = torch.randn(1607, 1000, device="cuda").t()
    Case.random(1000, 1607, 328, "bf16", **common, out=out, c=wide, beta=1.0).run(backend="cute", config=config)
    Case.random(4104, 3849, 72, "bf16", **common).run(backend="cute", config=config)


TF32 = [
    "sm90/128x256x32/coop2/c2x1/s4/hilbert/pdl",
    "sm90/256x128x32/coop2/c1x2/s4/serp8",
    "sm90/128x192x32/pp/c2x1/s4/serp8/pdl",
    "sm90/192x128x32/coop3/c1x1/s4/row",
    "sm90/64x64x64/coop1/c2x2/s4/serp8",
    "sm90/64x16x64/coop1/c1x1/s8/serp8/swap",
    "sm90/128x128x32/coop2/c1x1/s5/serp8/k4",
]


@pytest.mark.parametrize("config", TF32)
def test_tf32(config, seed):
    common = {"seed": seed, "device": "cuda", "precision": "tf32"}
    for shape in ((1, 8, 4), (127, 264, 136), (257, 520, 1028), (1000, 1604, 332)):
        Case.random(*shape, "fp32", **common).run(backend="cute", config=config)
    epilogue = {"c": True, "beta": -1.5, "bias": True, "activation": "gelu"}
    Case.random(392, 520, 264, "fp32", **common, **epilogue, batch=2).run(backend="cute", config=config)
    Case.random(392, 520, 264, "fp32", **common, out_dtype=torch.bfloat16).run(backend="cute", config=config)


def test_tma_rounds_fp32_to_tf32():
    """To the nearest of two neighbours 2^-10 apart, where the tensor cores alone would truncate."""
    a = torch.zeros(64, 32, device="cuda")
    a[:, 0] = 1 + 2**-11 + 2**-23
    got = cutegemm.gemm(a, a.clone().t(), precision="tf32", backend="cute", config="sm90/64x64x32/coop1/c1x1/s3/serp8")
    assert torch.equal(got, torch.full_like(got, (1 + 2**-10) ** 2))


@pytest.mark.parametrize("step", [step for step in STEPS if step.backend == "cute"], ids=lambda step: step.idea)
def test_the_steps_of_the_ladder(step, seed):
    for shape in ((1, 8, 8), (257, 520, 1032), (1000, 1608, 328)):
        Case.random(*shape, "bf16", seed=seed, device="cuda").run(backend="cute", config=step.config)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]])
def test_batches_broadcasts_and_no_k(config, seed):
    case = Case.random(264, 392, 200, "bf16", batch=5, pad=8, seed=seed, device="cuda")
    case.run(backend="cute", config=config)
    Case(case.a, case.b[2]).run(backend="cute", config=config)
    Case(case.a[1:2].expand(5, -1, -1), case.b).run(backend="cute", config=config)
    Case.random(264, 392, 0, "bf16", pad=8, seed=seed, device="cuda").run(backend="cute", config=config)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], CONFIGS[3]])
def test_large_and_repeatable(config, seed):
    """Every SM gets several tiles; the same bits each time, also back to back (programmatic dependent launch)."""
    case = Case.random(4104, 3848, 1032, "bf16", seed=seed, device="cuda")
    case.run(backend="cute", config=config)
    results = [cutegemm.gemm(case.a, case.b, backend="cute", config=config) for _ in range(5)]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_split_k_is_repeatable_on_any_stream(seed):
    """The last CTA to finish differs from run to run, the bits do not; two streams have a workspace each."""
    case = Case.random(256, 264, 16392, "bf16", seed=seed, device="cuda", out_dtype=torch.float32)
    config = "sm90/128x128x64/coop2/c1x1/s5/row/k16"
    case.run(backend="cute", config=config)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for number in range(30):
        with torch.cuda.stream(streams[number % 3]):
            results.append(cutegemm.gemm(case.a, case.b, out_dtype=torch.float32, backend="cute", config=config))
    torch.cuda.synchronize()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    "config",
    [
        "sm90/128x128x64/coop2/c2x1/s5/row/k16/arrival/pdl",
        "sm90/64x64x64/coop1/c1x2/s8/row/k32/arrival",
        "sm90/64x16x64/coop1/c1x1/s8/row/k5/swap/arrival/pdl",
        "sm90/192x96x64/coop3/c1x1/s4/g8/k2/once/arrival",
    ],
)
def test_split_k_in_the_order_of_arrival(config, seed):
    """Launch after launch, shape after shape, and beside one that adds in order: each finds zeros and leaves them."""
    common = {"seed": seed, "device": "cuda"}
    epilogue = {"c": True, "beta": -1.5, "bias": True, "activation": "gelu", "batch": 2}
    in_order = config.replace("/arrival", "")
    for shape in SHAPES:
        Case.random(*shape, "bf16", **common, out_dtype=torch.float32).run(backend="cute", config=config)
        Case.random(*shape, "fp16", **common, **epilogue).run(backend="cute", config=config)
        Case.random(*shape, "bf16", **common).run(backend="cute", config=in_order)
    case = Case.random(256, 264, 16392, "bf16", **common, out_dtype=torch.float32)
    for _ in range(20):
        case.run(backend="cute", config=config)

    def product() -> torch.Tensor:
        return cutegemm.gemm(case.a, case.b, out_dtype=torch.float32, backend="cute", config=config)

    product()  # a graph records loaded kernels only
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [product() for _ in range(3)]
    want = reference.expected(case.a, case.b, out_dtype=torch.float32)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            verdict = reference.check(out, want)
            assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    "config",
    [
        "sm90/128x128x64/coop2/c2x1x2/s6/row/pdl",
        "sm90/128x256x64/coop2/c1x1x4/s4/row",
        "sm90/64x64x64/coop1/c2x2x2/s8/row/pdl",
        "sm90/192x96x64/coop3/c1x1x2/s5/row/k5/pdl",
        "sm90/64x16x64/coop1/c1x1x4/s8/row/swap/pdl",
        "sm90/128x128x64/coop2/c2x1x2/s6/row/k15/pdl",
    ],
)
def test_clusters_along_k(config, seed):
    """Epilogues, batches, too little K to go round; the same bits each time, launch upon launch and in a graph."""
    common = {"seed": seed, "device": "cuda"}
    epilogue = {"c": True, "beta": -1.5, "alpha": 0.75, "bias": True, "activation": "gelu", "batch": 3}
    for shape in SHAPES:
        Case.random(*shape, "fp16", **common, **epilogue).run(backend="cute", config=config)
        Case.random(*shape, "bf16", **common, out_dtype=torch.float32).run(backend="cute", config=config)
    for k in (0, 8, 72):
        Case.random(264, 392, k, "bf16", pad=8, **common, bias=True).run(backend="cute", config=config)
    case = Case.random(256, 264, 16392, "bf16", **common, out_dtype=torch.float32)
    case.run(backend="cute", config=config)

    def product() -> torch.Tensor:
        return cutegemm.gemm(case.a, case.b, out_dtype=torch.float32, backend="cute", config=config)

    results = [product() for _ in range(50)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = [product() for _ in range(5)]
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(results[0], other) for other in (*results, *recorded))


def test_a_chain_of_dependent_launches_reads_finished_results(seed):
    """Each product reads the result of the one before it, launched while that one still runs."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    b = torch.randn(1024, 1024, device="cuda", generator=generator).bfloat16() / 32
    x = torch.randn(2048, 1024, device="cuda", generator=generator).bfloat16()
    y = x.clone()
    for _ in range(12):
        x = cutegemm.gemm(x, b, backend="cute", config="sm90/128x128x64/coop2/c2x1/s5/serp8/pdl")
        y = cutegemm.gemm(y, b, backend="cute", config="sm90/128x128x64/coop2/c2x1/s5/serp8")
    assert torch.isfinite(x).all()
    assert torch.equal(x, y)


def test_what_tma_cannot_load_is_left_to_ampere(seed):
    from cutegemm.choice import plan
    from cutegemm.hardware import arch

    here = arch.Arch.of_device()
    assert str(plan.choose(Problem.of(512, 512, 500, "bf16"), here, "cute").config).startswith("sm80/")
    for shape in ((512, 512, 512), (512, 512, 500), (100, 1000, 64), (8, 8, 8)):
        Case.random(*shape, "bf16", seed=seed, device="cuda").run(backend="cute")
