"""Clusters along K of the Hopper kernel in the emulator: parts of a tile that meet in distributed shared memory."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.hardware import arch as arch_table
from tests.problems import Case

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("few_sms")
SMS = 8


@pytest.mark.parametrize("split", ["", "/k3"])
@pytest.mark.parametrize(
    "cluster", ["1x1x2", "2x1x2", "1x2x2", "1x1x4", "2x1x4", "1x2x4", "2x2x2", "4x1x2", "1x4x2", "1x1x8"]
)
@pytest.mark.parametrize("timing", range(2))
@pytest.mark.product(keep=1)
def test_clusters(cluster, split, timing, run):
    """Ragged on every side, parts of different lengths, rings that go round."""
    run(f"64x32x64/coop1/c{cluster}/s2/serp2{split}", (136, 72, 712), timing=timing)


@pytest.mark.parametrize(
    "config",
    [
        "128x64x64/coop2/c2x1x2/s2/g2/pdl",
        "192x48x64/coop3/c1x2x2/s3/row/k2",
        "256x48x64/coop2/c1x1x4/s2/col/k2",
        "128x256x64/coop2/c1x1x4/s2/row",
        "64x112x64/coop1/c1x1x4/s3/row",
        "64x16x64/coop1/c1x1x4/s3/hilbert/k2",
        "64x16x32/coop1/c2x1x2/s8/row/swap",
        "64x48x64/coop1/c1x2x4/s3/row/k3/swap/arrival/pdl",
        "64x64x64/coop1/c1x1x8/s8/row/k2/pdl",
        "128x128x64/coop2/c1x1x8/s4/row/swap/pdl",
        "64x48x64/coop1/c1x1x8/s3/row/k2/arrival",
    ],
)
@pytest.mark.parametrize("majors", ["tn", "tt"])
@pytest.mark.product(keep=1)
def test_tiles(config, majors, run):
    """Blocks of rows, runs of accumulators that differ by one or are empty, a ring that is just large enough."""
    run(config, (136, 264, 456), majors=majors)


@pytest.mark.parametrize("k", [0, 8, 72, 200])
@pytest.mark.parametrize("config", ["64x64x64/coop1/c2x1x2/s3/g2", "64x32x64/coop1/c1x1x4/s3/g2/k2"])
@pytest.mark.product(keep=1)
def test_more_parts_than_k_tiles(config, k, run):
    run(config, (136, 72, k), pad=8, bias=True, alpha=2.0)


@pytest.mark.parametrize("shape", [(1, 8, 8), (8, 1, 8), (1, 1, 8), (65, 8, 56), (7, 264, 24)])
@pytest.mark.product(keep=1)
def test_small_problems(shape, run):
    run("64x64x64/coop1/c1x2x2/s4/row", shape)


@pytest.mark.parametrize(
    "config",
    [
        "64x64x64/coop1/c1x1x2/s3/g2",
        "128x48x64/coop2/c2x1x2/s3/g2/k2",
        "64x48x64/coop1/c1x2x2/s3/g2/swap",
        "64x16x64/coop1/c1x1x4/s3/g2/k2/swap",
    ],
)
@pytest.mark.parametrize("case", ["whole", "fp32", "turned", "ragged"])
@pytest.mark.product(keep=1)
def test_epilogues(config, case, run, seed):
    """C in any strides, a bias along either axis, every way to store D."""
    shape = (136, 104, 200)
    if case == "whole":
        run(config, shape, "fp16", c=True, beta=2.0, alpha=1.5, bias=True, activation="gelu", batch=2)
    elif case == "fp32":
        turned_c = torch.randn(104, 136, generator=torch.Generator().manual_seed(seed)).bfloat16().t()
        run(config, shape, c=turned_c, beta=-1.0, out_dtype=torch.float32)
    elif case == "turned":
        run(config, shape, bias=True, activation="silu", out=torch.empty(104, 136, dtype=torch.bfloat16).t())
    else:
        run(config, (136, 73, 72), out=torch.empty(136, 77, dtype=torch.bfloat16)[:, 2:75], majors="tn")


@pytest.mark.parametrize(
    "config",
    [
        "64x64x32/coop1/c1x1x2/s3/g2",
        "128x64x32/coop2/c2x1x2/s3/g2/k2",
        "64x16x64/coop1/c1x1x4/s3/g2/swap",
    ],
)
@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.product(keep=1)
def test_tf32(config, terms, run):
    if terms:
        run(config, (72, 40, 36), "fp32", precision="tf32", batch=2, c=True, beta=0.5, bias=True)
    else:
        run(config, (200, 136, 148), "fp32", precision="tf32")


@pytest.mark.parametrize("split", ["", "/k2"])
@pytest.mark.product(keep=1)
def test_the_same_bits_whatever_the_timing(split, seed, monkeypatch):
    case = Case.random(72, 136, 1032, "bf16", seed=seed, majors="tn")
    results = []
    for timing in range(4):
        monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", str(seed // 2 + timing))
        config = f"sm90/64x64x64/coop1/c1x1x4/s3/g2{split}"
        results.append(cutegemm.gemm(case.a, case.b, out_dtype=torch.float32, backend="cute", config=config))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_the_exchange_has_no_bank_conflicts():
    """Each CTA sends half of its tile and reads as much; every access takes the fewest passes there can be."""
    from cutegemm import backend
    from cutegemm.emulator.workload import Workload

    case = Case.random(64, 64, 200, "bf16", seed=1)
    kernel = backend.get("cute").build(
        case.problem().signature,
        backend.get("cute").parse("sm90/64x64x64/coop1/c1x1x2/s3/g2"),
        arch_table.get("sm_90a"),
    )
    _, (report,) = Workload.of(case.problem(), kernel, seed=1).run(seed=0, profile=True)
    assert report.bytes["shared remote write"] == report.bytes["shared read"] == 64 * 64 * 4
    assert all(row.shared_wavefronts == row.shared_ideal for row in report.lines.values())
