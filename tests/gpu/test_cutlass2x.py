"""The CUTLASS 2.x backend on the GPU against the float64 reference; nvcc compiles some 100 kernels first, once."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.errors import GemmError, UnsupportedError
from cutegemm.hardware.arch import Arch
from tests import exact, needs
from tests.gpu import cutlass2x_cases
from tests.problems import Case

pytestmark = pytest.mark.gpu

GROUPS = ("published", "space", "majors", "alignment", "epilogue", "batch", "split")


@pytest.fixture(scope="module")
def groups():
    needs.cutlass2x()
    arch = Arch.of_device(0)
    found = cutlass2x_cases.specs(arch)
    cutlass2x_cases.build(found, arch)
    return found


@pytest.mark.parametrize("name", GROUPS)
def test_right(groups, name, seed):
    assert groups[name]
    for spec in groups[name]:
        try:
            spec.run(seed)
        except AssertionError as why:
            raise AssertionError(f"{spec}: {why}") from why


def test_integers_are_exact_at_a_large_k(groups, seed):
    assert groups["exact"]
    for spec in groups["exact"]:
        precision = spec.options["precision"]
        problem = exact.case(*spec.shape, spec.dtype, seed=seed, device="cuda", precision=precision)
        exact.run(problem, backend="cutlass2x", config=spec.config)


def test_infinities_and_nans_go_where_the_reference_puts_them(groups, seed):
    for dtype, precision in cutlass2x_cases.KINDS[:4]:
        config = f"cutlass2x/{cutlass2x_cases.SMALL[dtype, precision]}"
        case = Case.random(136, 264, 200, dtype, seed=seed, device="cuda", precision=precision)
        case.a[3, 5], case.a[10, 0], case.b[7, 9] = float("inf"), float("nan"), float("-inf")
        case.run(backend="cutlass2x", config=config)


def test_results_are_bitwise_repeatable(groups, seed):
    for schedule in ("id2", "id1/k3"):
        config = f"cutlass2x/64x64x32/w32x32x32/s3/i16x8x16/{schedule}"
        case = Case.random(136, 264, 1032, "fp16", seed=seed, device="cuda", c=True, beta=0.5)
        options = {"beta": 0.5, "backend": "cutlass2x", "config": config}
        first = cutegemm.gemm(case.a, case.b, case.options["c"], **options)
        for _ in range(5):
            assert torch.equal(first, cutegemm.gemm(case.a, case.b, case.options["c"], **options))


def test_graph_capture_and_side_streams_with_a_workspace(groups, seed):
    config = "cutlass2x/64x64x32/w32x32x32/s3/i16x8x16/id1/k3"
    case = Case.random(136, 264, 1032, "fp16", seed=seed, device="cuda", c=True, beta=0.5)
    c, out = case.options["c"], torch.empty(136, 264, device="cuda", dtype=torch.float16)
    options = {"beta": 0.5, "out": out, "backend": "cutlass2x", "config": config}
    cutegemm.prepare(case.a, case.b, c, **options)
    want = cutegemm.gemm(case.a, case.b, c, **options).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cutegemm.gemm(case.a, case.b, c, **options)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late = torch.empty_like(case.a)
        torch.cuda._sleep(20_000_000)
        late.copy_(case.a)
        got = cutegemm.gemm(late, case.b, c, **{**options, "out": None})
    side.synchronize()
    assert torch.equal(got, want)


def test_a_misaligned_bias_is_refused(groups, seed):
    case = Case.random(136, 264, 72, "fp16", seed=seed, device="cuda")
    bias = torch.zeros(265, device="cuda", dtype=torch.float16)[1:]
    config = f"cutlass2x/{cutlass2x_cases.SMALL['fp16', None]}"
    with pytest.raises(GemmError, match=r"bias: its address .*\(bias\.clone"):
        cutegemm.gemm(case.a, case.b, bias=bias, alpha=0.75, backend="cutlass2x", config=config)


def test_what_it_cannot_serve_is_refused():
    a = torch.randn(64, 64, device="cuda")
    with pytest.raises(UnsupportedError, match="'cute' reads both"):
        cutegemm.gemm(a, a, a, beta=1.0, bias=a[0], backend="cutlass2x")
    with pytest.raises(UnsupportedError, match="no activation 'gelu_tanh'"):
        cutegemm.gemm(a, a, activation="gelu_tanh", backend="cutlass2x")
