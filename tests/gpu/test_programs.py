"""Epilogue programs on a GPU: random ones, the benchmark's, gradients, graphs, and the gated MLP."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm import ops
from tests import fuzz_programs
from tuning import fused

pytestmark = pytest.mark.gpu
RINGED = ("gelu(acc + bias) + residual", "rope", "rope, heads of 128", "residual, row sums of squares")
"""The cases of the benchmark whose matrix operands travel through the ring."""


@pytest.mark.parametrize("number", range(1, 201))
def test_random_programs(number):
    outcome = fuzz_programs.run(number, "cuda")
    assert outcome.kind in ("right", "refused"), outcome


@pytest.mark.parametrize("case", fused.cases(scale=2), ids=lambda case: f"{case.name} {case.m}x{case.n}x{case.k}")
def test_the_cases_of_the_benchmark(case):
    assert fused.checked(case, fused.draw(case, "cuda", 0)) == ""


@pytest.mark.parametrize(
    "case", [case for case in fused.cases(scale=2) if case.name in RINGED], ids=lambda case: case.name
)
@pytest.mark.parametrize(
    "config",
    [
        "128x256x64/coop2/c2x1/s4/hilbert/pdl",
        "256x192x64/coop2/c1x2/s3/serp8/pdl",
        "192x128x64/coop3/c1x1/s4/serp8",
        "128x192x64/pp/c2x1/s4/serp8/pdl",
        "128x128x64/pp/c1x2/s5/serp8/zig/pdl",
        "64x128x64/pp/c2x2/s6/serp8/once/pdl",
        "64x32x64/pp/c1x1/s8/row",
    ],
)
def test_operands_through_the_ring(config, case):
    """Every element of ten runs has the same bits, and lies within its bound."""
    given = fused.draw(case, "cuda", 0)
    options = {"backend": "cute", "config": f"sm90/{config}"}
    if case.name == "rope, heads of 128" and config.startswith("128x128x64/pp"):
        with pytest.raises(cutegemm.UnsupportedError, match="spills"):
            fused.fused(case, given, **options)
        return
    assert fused.checked(case, given, **options) == ""
    first = fused.fused(case, given, **options)
    for _ in range(10):
        again = fused.fused(case, given, **options)
        pairs = zip(first, again, strict=True) if isinstance(first, tuple) else [(first, again)]
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    "config",
    [
        "128x64x64/coop2/c1x1/s3/row", "128x192x64/coop2/c1x2/s4/serp8/zig/pdl", "64x144x64/coop1/c2x1/s4/row",
        "128x160x64/pp/c1x2/s5/serp8/pdl", "128x128x64/coop2/c2x2/s4/serp8/once", "192x96x64/coop3/c1x1/s3/row",
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(1000, 1160, 520), (64, 16, 8), (4096, 2880, 640)])
def test_16_bit_operands_of_a_result_in_fp32(config, shape, seed):
    """They come through the ring. Small integers: every element is exact."""
    m, n, k = shape
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def integers(*extents):
        return torch.randint(-3, 4, extents, device="cuda", generator=generator).bfloat16()

    a, b, x, y = integers(m, k), integers(n, k).t(), integers(m, n), integers(m, n).half()
    found = cutegemm.gemm(
        a, b, epilogue=lambda acc, x, y: (acc * x - y, ops.row_sum(acc)), operands=(x, y), out_dtype=torch.float32,
        backend="cute", config=f"sm90/{config}",
    )  # fmt: skip
    acc = a.float() @ b.float()
    assert torch.equal(found[0], acc * x - y)
    assert torch.equal(found[1], acc.sum(1, keepdim=True))


@pytest.mark.parametrize(
    "config",
    [
        "128x16x64/coop1/c1x1x2/s6/row/swap/pdl", "128x16x128/coop1/c1x1x8/s6/row/swap/pdl",
        "128x48x64/coop1/c1x1x4/s4/row/swap/pdl", "128x16x64/coop1/c2x1x2/s6/row/swap/pdl",
        "256x16x64/coop2/c1x2x2/s4/row/swap/pdl", "64x64x64/coop1/c1x1x4/s6/row/pdl",
        "256x32x64/coop2/c2x1x2/s4/row/pdl", "64x160x128/coop1/c1x1x4/s4/row/pdl",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("m", "f", "k"), [(1, 72, 640), (41, 150, 1000), (130, 301, 2056), (16, 1792, 4096)])
def test_gate_and_up_in_clusters_along_k(config, m, f, k, seed):
    """Small integers: every element is exact, beside a bias and a matrix operand."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def integers(*extents):
        return torch.randint(-3, 4, extents, device="cuda", generator=generator).bfloat16()

    a, b, bias, x = integers(m, k), integers(2 * f, k).t(), integers(f), integers(m, f)

    def difference(acc, bias, x):
        gate, up = ops.halves(acc)
        return (gate + bias) * 2.0 - up + x

    found = cutegemm.gemm(
        a, b, epilogue=difference, operands=(bias, x), out_dtype=torch.float32, backend="cute", config=f"sm90/{config}"
    )
    gate, up = (a.double() @ b.double()).split(f, 1)
    assert torch.equal(found, ((gate + bias) * 2.0 - up + x).float())


@pytest.mark.parametrize("epilogue", [ops.swiglu, ops.geglu, ops.swiglu_pairs, lambda acc: (ops.silu(acc), acc)])
def test_gradients_are_those_of_torch(epilogue):
    x = torch.randn(96, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(128, 192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = []
    for backend in ("cute", "torch"):
        got = cutegemm.gemm(x, w, epilogue=epilogue, backend=backend)
        loss = sum(each.float().square().mean() for each in (got if isinstance(got, tuple) else (got,)))
        found.append(torch.autograd.grad(loss, (x, w)))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, atol=0.02 * float(other.abs().max()), rtol=0.05)


def test_a_captured_call_reads_what_its_tensors_hold_at_replay():
    x, w = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((64, 128), (128, 256)))
    residual = torch.zeros(64, 256, device="cuda", dtype=torch.bfloat16)

    def call():
        return cutegemm.gemm(x, w, epilogue=lambda acc, r: (acc + r, ops.row_sum(acc * acc)), operands=(residual,))

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    residual.normal_()
    x.normal_()
    graph.replay()
    for own, other in zip(captured, call(), strict=True):
        assert torch.equal(own, other)


def test_a_gated_mlp_trains_as_torch_does():
    mlp = cutegemm.nn.SwiGLU(128, 192, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = mlp(x)
    y.float().square().mean().backward()
    assert all(each.grad is not None and bool(each.grad.isfinite().all()) for each in (x, *mlp.parameters()))
