"""Split-K without TMA and the kernels for thin results on the GPU: shapes, the same bits, graphs, streams, speed."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from tests import exact
from tests.problems import MAJORS, Case

pytestmark = pytest.mark.gpu

SPLIT = {
    "simt/128x128x16/w64x32/s3/g8/k4": ("fp32", None), "simt/64x64x8/w32x32/s4/g8/k32": ("fp32", None),
    "simt/32x32x32/w32x32/s3/g8/x4/k16": ("fp32", None), "sm80/64x64x32/w32x32/s5/g8/k7": ("bf16", None),
    "sm80/64x64x32/w32x32/s3/g8/k5": ("fp32", "tf32"),
}  # fmt: skip
SHAPES = ((1, 1, 1), (129, 257, 65), (64, 64, 16384), (257, 300, 1003), (512, 384, 8), (72, 40, 0))
THIN = (
    (1, 4096, 4096),
    (1, 130, 70001),
    (3, 1001, 517),
    (8, 4096, 1024),
    (4096, 8, 1024),
    (1000, 3, 301),
    (2000, 1, 999),
)


@pytest.mark.parametrize("config", SPLIT)
@pytest.mark.parametrize("majors", MAJORS)
def test_split_k(config, majors, seed):
    dtype, precision = SPLIT[config]
    for number, shape in enumerate(SHAPES):
        options = {"bias": True, "c": True, "beta": 0.5, "batch": 2} if number % 2 else {}
        case = Case.random(*shape, dtype, majors=majors, seed=seed, device="cuda", precision=precision, **options)
        case.run(backend="cute", config=config)


@pytest.mark.parametrize("config", SPLIT)
def test_the_same_bits_every_time_and_words_left_zero(config, seed):
    dtype, precision = SPLIT[config]
    case = Case.random(300, 200, 4000, dtype, seed=seed, device="cuda", precision=precision)
    options = {"backend": "cute", "config": config, "precision": precision}
    first = cutegemm.gemm(case.a, case.b, **options)
    assert all(torch.equal(first, cutegemm.gemm(case.a, case.b, **options)) for _ in range(200))
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(first)
    with torch.cuda.graph(graph):
        cutegemm.gemm(case.a, case.b, out=out, **options)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(first, out)


@pytest.mark.parametrize("majors", MAJORS)
def test_thin_results(majors, seed):
    for number, shape in enumerate(THIN):
        options = {"bias": True, "activation": "silu", "batch": 3} if number % 3 == 1 else {}
        Case.random(*shape, "fp32", majors=majors, seed=seed, device="cuda", **options).run(backend="cute")
        exact.run(exact.case(*shape, "fp32", majors=majors, seed=seed, device="cuda"), backend="cute")


@pytest.mark.parametrize("majors", ["tn", "tt"])
def test_one_row_reads_the_matrix_at_the_memorys_speed(majors):
    """0.85 of the data sheet's bandwidth, by the best of some captured rounds over more matrices than the L2 holds."""
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the bandwidth is that of an H200")
    n, k, count = 16384, 4096, 4
    xs = [torch.randn(1, k, device="cuda") for _ in range(count)]
    stored = [torch.randn((n, k) if majors == "tn" else (k, n), device="cuda") for _ in range(count)]
    matrices = [each.t() if majors == "tn" else each for each in stored]
    out = torch.empty(1, n, device="cuda")
    for x, matrix in zip(xs, matrices, strict=True):
        cutegemm.gemm(x, matrix, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, matrix in zip(xs, matrices, strict=True):
            cutegemm.gemm(x, matrix, out=out)
    best = float("inf")
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e-3 / count)
    assert 4 * n * k / best >= 0.85 * 4.8e12, f"{4e-12 * n * k / best:.2f} TB/s"
