"""The Hopper kernel in the emulator: schedules, clusters, majors, edges and epilogues, checked against the reference.

The pretended GPU has few SMs, so that a persistent CTA gets several tiles of a small problem. Each run draws its own
timing.
"""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.errors import UnsupportedError
from tests.problems import MAJORS, Case

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("few_sms")

SEEDS = range(3)


@pytest.mark.parametrize("timing", SEEDS)
@pytest.mark.parametrize("cluster", ["1x1", "2x1", "1x2", "2x2", "4x1", "1x4"])
@pytest.mark.parametrize("schedule", ["coop2", "pp"])
@pytest.mark.product(keep=2)
def test_schedules_and_clusters(schedule, cluster, timing, run):
    """Ragged on every side, several tiles a CTA, k tiles that do not divide the ring."""
    bm = 128 if schedule == "coop2" else 64
    run(f"{bm}x64x64/{schedule}/c{cluster}/s3/serp2", (392, 200, 264), timing=timing)


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("config", ["64x64x64/coop1/c4x1/s3/hilbert", "64x32x32/pp/c1x1/s4/g2"])
@pytest.mark.product(keep=1)
def test_majors(config, dtype, majors, run):
    run(config, (200, 136, 168), dtype, majors=majors)


@pytest.mark.parametrize(("option", "shape"), [("", (200, 168, 72)), ("/once", (136, 72, 72))])
@pytest.mark.parametrize("order", ["row", "col", "g2", "serp3", "hilbert"])
@pytest.mark.product(keep=1)
def test_orders(order, option, shape, run):
    run(f"64x16x64/coop1/c1x1/s3/{order}{option}", shape)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ("256x64x64/coop2/c1x1/s2/row", (264, 72, 200)),
        ("192x48x64/coop3/c1x1/s3/row", (392, 104, 136)),
        ("128x208x64/pp/c1x1/s4/row", (264, 424, 200)),
        ("128x256x64/coop2/c2x1/s4/row", (264, 264, 328)),
        ("64x96x128/coop1/c1x2/s2/row", (72, 200, 264)),
        ("64x16x32/coop1/c1x1/s16/row", (136, 40, 1032)),
    ],
)
@pytest.mark.parametrize("majors", ["tn", "nt"])
@pytest.mark.product(keep=1)
def test_tiles(config, shape, majors, run):
    """Blocks of rows a warpgroup, every width of a swizzle, ring depths."""
    run(config, shape, majors=majors)


@pytest.mark.parametrize("shape", [(1, 8, 8), (8, 1, 8), (1, 1, 8), (65, 8, 56), (7, 264, 24), (63, 65, 64)])
@pytest.mark.parametrize("config", ["64x64x64/coop1/c1x1/s4/row", "64x32x64/pp/c2x1/s2/row"])
@pytest.mark.product(keep=1)
def test_small_problems(config, shape, run):
    run(config, shape)


@pytest.mark.parametrize(
    "config", ["64x64x64/coop1/c1x1/s3/g2", "64x32x64/pp/c2x1/s3/g2", "64x32x64/coop1/c1x1/s3/g2/slab"]
)
@pytest.mark.parametrize("terms", [{}, {"c": True, "beta": -1.5, "bias": True}], ids=["none", "c-bias"])
@pytest.mark.product(keep=1)
def test_nothing_to_sum(config, terms, run):
    """K = 0: rows of a wider matrix, so that TMA can describe them; what lies in them is NaN and must not be read."""
    run(config, (136, 72, 0), pad=8, **terms)


@pytest.mark.parametrize("schedule", ["64x32x64/coop1/c1x1/s3/g2", "64x32x64/pp/c2x1/s3/g2"])
@pytest.mark.parametrize(
    "epilogue",
    [
        {"alpha": -0.5},
        {"activation": "silu"},
        {"c": True, "beta": -0.5, "alpha": 1.5},
        {"bias": True, "activation": "relu"},
        {"c": True, "beta": 2.0, "bias": True, "activation": "gelu"},
        {"out_dtype": torch.float32, "activation": "gelu_tanh", "bias": True},
    ],
    ids=["alpha", "silu", "c", "bias-relu", "c-bias-gelu", "fp32"],
)
@pytest.mark.product(keep=1)
def test_epilogues(schedule, epilogue, run):
    run(schedule, (136, 104, 72), **epilogue)


@pytest.mark.parametrize(
    "config",
    [
        "128x64x64/coop2/c2x1/s3/g2",
        "64x32x64/pp/c1x2/s3/g2",
        "256x48x64/coop2/c1x1/s2/g2",
        "64x64x64/coop1/c1x1/s3/g2/swap",
        "64x48x64/pp/c1x1/s3/g2/swap",
        "128x144x64/coop2/c1x1/s3/g2/swap",
        "64x64x64/coop1/c1x1/s3/g2/k3",
    ],
)
@pytest.mark.parametrize(
    ("out", "options"),
    [
        (None, {"c": True, "beta": -0.5, "alpha": 1.5}),
        (None, {"c": True, "beta": 2.0, "bias": True, "activation": "gelu", "batch": 2}),
        ("fp32", {"c": True, "beta": 1.0, "bias": True}),
        (None, {"c": "fp32", "beta": 1.0}),
        ("fp32", {"c": "fp32", "beta": 1.0, "bias": "fp32"}),
        (None, {"c": "column-major", "beta": -1.0}),
        (None, {"c": "row", "beta": -1.0}),
        # A column-major D is the transposed problem: its bias runs along the rows.
        ("column-major", {"c": True, "beta": 0.5, "bias": True, "activation": "relu"}),
    ],
    ids=["c", "c-bias-gelu", "fp32", "c32", "c32-bias32-fp32", "turned-c", "row-c", "turned"],
)
@pytest.mark.product(keep=1)
def test_c_and_bias_meet_the_accumulators(config, out, options, run, seed):
    """C through the staging buffers (16 bits), as fragments (fp32) or by the slab; a bias along either axis."""
    generator = torch.Generator().manual_seed(seed)
    given = {
        "fp32": torch.randn(264, 136, generator=generator),
        "column-major": torch.randn(136, 264, generator=generator).bfloat16().t(),
        "row": torch.randn(136, generator=generator).bfloat16(),
    }
    options = {**options, "c": given.get(options["c"], True)}
    if options.get("bias") == "fp32":
        options["bias"] = torch.randn(136, generator=generator)
    if out == "fp32":
        options["out_dtype"] = torch.float32
    elif out:
        options["out"] = torch.empty(136, 264, dtype=torch.bfloat16).t()
    run(config, (264, 136, 72), **options)


@pytest.mark.parametrize(
    ("config", "shape", "majors"),
    [
        ("64x144x64/coop1/c1x1/s3/serp8/swap/pdl", (134, 200, 136), "tn"),
        ("64x160x64/pp/c2x1/s3/serp8/swap/pdl", (160, 264, 72), "tt"),
        ("128x176x64/coop2/c1x2/s3/serp8/swap/pdl", (312, 136, 64), "nn"),
        ("128x208x64/pp/c2x1/s3/serp8/swap/pdl", (200, 520, 72), "nt"),
        ("192x144x64/coop3/c1x1/s3/serp8/k2/swap/pdl", (144, 384, 200), "tn"),
        ("256x160x64/coop2/c1x1/s3/serp8/swap/zig/pdl", (152, 264, 136), "tt"),
        ("64x224x64/coop1/c1x1/s4/serp8/k3/swap/pdl", (217, 72, 264), "tn"),
        ("128x144x64/coop2/c1x1x2/s3/row/swap/pdl", (144, 128, 136), "nn"),
    ],
)
@pytest.mark.product(keep=1)
def test_wide_swapped_tiles(config, shape, majors, run):
    """One tile holds 129 to 256 rows of D, of which those beyond M are not stored."""
    run(config, shape, majors=majors)


@pytest.mark.parametrize("timing", SEEDS)
@pytest.mark.parametrize(
    "config",
    [
        "64x64x32/coop1/c1x1/s3/g2",
        "128x64x32/coop2/c2x1/s3/serp2",
        "64x32x64/pp/c1x2/s3/hilbert",
        "64x16x64/coop1/c2x1/s3/g2/swap",
        "64x48x32/pp/c1x1/s3/g2/swap",
        "128x144x32/coop2/c2x1/s3/g2/swap",
        "192x48x32/coop3/c1x1/s3/g2/once",
        "128x64x32/coop2/c1x1/s3/g2/k3",
    ],
)
@pytest.mark.product(keep=1)
def test_tf32(config, timing, run):
    """Inputs are fp32 numbers that tf32 does not hold: TMA rounds them, the tensor cores alone would truncate."""
    run(config, (200, 136, 84), "fp32", timing=timing, precision="tf32")
    run(config, (72, 40, 4), "fp32", timing=timing, precision="tf32", batch=2, c=True, beta=0.5, bias=True)
    run(config, (72, 40, 36), "fp32", timing=timing, precision="tf32", out_dtype=torch.bfloat16)


def test_tf32_operands_are_rounded_not_truncated(monkeypatch):
    """One product of 1 + 2^-11 + 2^-23 with itself: tf32 neighbours are 2^-10 apart."""
    a = torch.zeros(64, 32)
    a[:, 0] = 1 + 2**-11 + 2**-23
    b = a[:64].clone().t()
    got = cutegemm.gemm(a, b, precision="tf32", backend="cute", config="sm90/64x64x32/coop1/c1x1/s3/row")
    assert torch.equal(got, torch.full((64, 64), (1 + 2**-10) ** 2))


def test_tf32_of_other_majors_is_refused_with_the_reason(run):
    for majors, name in (("nt", "A is M-major"), ("tt", "B is N-major"), ("nn", "A is M-major")):
        with pytest.raises(UnsupportedError, match=f"K-major only; {name}"):
            run("64x64x32/coop1/c1x1/s3/g2", (72, 72, 72), "fp32", precision="tf32", majors=majors)
    with pytest.raises(UnsupportedError, match=r"fp32 as tf32, .*; these operands are fp32"):
        run("64x64x32/coop1/c1x1/s3/g2", (72, 72, 72), "fp32")


def test_any_result_alignment(run):
    """D's rows start at any element: no TMA store."""
    for out in (torch.empty(136, 77, dtype=torch.bfloat16)[:, 2:75], torch.empty(136, 73, dtype=torch.float16)):
        run("64x32x64/coop1/c1x1/s3/g2", (136, 73, 72), majors="tn", out=out)


@pytest.mark.parametrize(
    "config",
    [
        "128x208x64/pp/c1x1/s3/g2/slab",
        "192x160x64/coop3/c1x1/s2/g2/slab",
        "256x48x64/coop2/c1x2/s2/g2/slab",
        "128x128x64/coop1/c1x1/s2/g2/swap/slab",
    ],
)
@pytest.mark.parametrize("result", ["with C", "at any element", "fp32"])
@pytest.mark.product(keep=1)
def test_strips_that_share_their_code(config, result, run):
    """More of them in a slab epilogue than are unrolled; results at any element, C in any strides."""
    if result == "with C":
        run(config, (264, 216, 72), c=True, beta=-0.5, bias=True, activation="gelu")
    elif result == "at any element":
        out = torch.empty(200, 233, dtype=torch.bfloat16)[:, 2:231]
        run(config, (200, 229, 72), majors="tn", out=out, c=torch.randn(229).bfloat16(), beta=1.0)
    else:
        run(config, (136, 264, 72), out_dtype=torch.float32, batch=2, activation="silu")


@pytest.mark.parametrize("schedule", ["64x64x64/coop1/c1x2/s3/g2", "64x32x64/pp/c1x1/s3/hilbert/slab"])
@pytest.mark.product(keep=1)
def test_batches(schedule, run, seed):
    run(schedule, (72, 136, 88), batch=5, pad=8)
    case = Case.random(72, 136, 88, "bf16", seed=seed, batch=3)
    Case(case.a, case.b[1]).run(backend="cute", config=f"sm90/{schedule}")
    Case(case.a[1:2].expand(3, -1, -1), case.b).run(backend="cute", config=f"sm90/{schedule}")


@pytest.mark.parametrize("store", ["", "/slab"])
@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ("64x16x64/coop1/c2x1/s3/g2/swap", (24, 328, 136)),
        ("128x64x64/coop2/c1x2/s3/hilbert/swap", (136, 264, 200)),
        ("64x48x64/pp/c1x1/s3/serp2/swap", (136, 200, 72)),
    ],
)
@pytest.mark.product(keep=1)
def test_swapped_operands(config, shape, majors, store, run):
    run(f"{config}{store}", shape, majors=majors)


@pytest.mark.parametrize("config", ["64x16x64/coop1/c1x1/s3/g2/swap", "64x32x64/pp/c1x1/s3/g2/swap"])
@pytest.mark.product(keep=1)
def test_swapped_operands_with_the_whole_epilogue(config, run):
    run(config, (40, 200, 136), batch=2, c=True, beta=-1.5)
    run(config, (7, 136, 72), c=True, beta=0.5, bias=True, activation="gelu", out_dtype=torch.float32)
    run(config, (1, 136, 72))


@pytest.mark.parametrize("timing", SEEDS)
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ("64x64x64/coop1/c1x1/s3/g2/k2", (136, 72, 328)),
        ("128x64x64/coop2/c2x1/s3/hilbert/k3", (200, 136, 1032)),
        ("64x16x64/coop1/c1x2/s3/g2/k4/swap", (24, 136, 520)),
        ("192x48x64/coop3/c1x1/s3/g2/k5/once", (200, 72, 200)),
        # Twice as many splits as CTAs: slices are abandoned, and with them what their owners kept in registers.
        ("64x64x64/coop1/c1x1/s3/g2/k8", (72, 72, 520)),
        # All the slice that a thread may keep; too many rounds for that.
        ("64x128x64/coop1/c1x1/s2/g2/k2/pdl", (72, 136, 200)),
        ("128x96x64/coop1/c1x1/s2/row/k2", (136, 104, 200)),
    ],
)
@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.product(keep=1)
def test_split_k(config, shape, with_c, timing, run):
    if with_c:
        run(config, (72, 40, 72), timing=timing, batch=2, c=True, beta=0.5)
    else:
        run(config, shape, timing=timing)


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize(
    "options", ["g2/skew", "row/once/skew", "row/swap/once/skew", "serp2/k3/skew", "g2/streamk/skew"]
)
@pytest.mark.product(keep=1)
def test_tiles_begin_at_different_k_tiles(options, majors, run):
    for k in (328, 40):
        run(f"64x16x64/coop1/c2x1/s3/{options}", (200, 136, k), majors=majors)


def test_more_splits_than_k_tiles(run):
    for k in (0, 8, 136):
        run("64x64x64/coop1/c1x1/s3/g2/k4", (136, 72, k), pad=8, bias=True, alpha=2.0)


def test_split_k_gives_the_same_bits_whoever_comes_last(seed, monkeypatch):
    case = Case.random(72, 72, 520, "bf16", seed=seed, majors="tn")
    results = []
    for timing in range(3):
        monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", str(seed // 2 + timing))
        config = "sm90/64x64x64/coop1/c1x1/s3/g2/k5"
        results.append(cutegemm.gemm(case.a, case.b, out_dtype=torch.float32, backend="cute", config=config))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_programmatic_dependent_launch(run):
    run("64x64x64/coop1/c2x1/s3/row/pdl", (200, 136, 168))


def test_operands_that_tma_cannot_take_are_packed_first(run):
    for options in ({"pad": 1}, {"offset": 4}, {"majors": "nt", "pad": 3}):
        run("64x64x64/coop1/c1x1/s3/g2", (72, 72, 72), **options)
