"""On the GPU, for a kernel of every family: overlap, infinities and NaN, the same bits every time, devices named."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.problem import reference
from tests import needs
from tests.gpu.test_large import KINDS
from tests.problems import DTYPES, Case, matrix

pytestmark = pytest.mark.gpu

MORE = {
    "sm90 split-K": ("cute", "sm90/128x128x64/coop2/c2x1/s5/hilbert/k4", "bf16", None),
    "cutlass2x split-K": ("cutlass2x", "cutlass2x/64x64x32/w32x32x32/s4/i16x8x16/id1/k4", "fp16", None),
    "cutlass2x stream-K": ("cutlass2x", "cutlass2x/64x64x32/w32x32x32/s4/i16x8x16/streamk", "fp16", None),
    "auto": ("auto", None, "bf16", None),
}


@pytest.fixture(params=[*KINDS, *MORE])
def kernel(request: pytest.FixtureRequest):
    """(dtype, options of gemm) of a kernel."""
    backend, config, dtype, precision = {**KINDS, **MORE}[request.param]
    needs.kernel(backend, config)
    return DTYPES[dtype], {"backend": backend, "config": config, "precision": precision}


def expect(got, a, b, options, **numeric):
    want = reference.expected(a, b, **numeric, out_dtype=got.dtype, precision=options["precision"] or "ieee")
    verdict = reference.check(got, want)
    assert verdict.ok, verdict.message


def operands(dtype, m, n, k, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return matrix(m, k, dtype, generator), matrix(k, n, dtype, generator), generator


def test_overlap(kernel, seed):
    dtype, options = kernel
    a, b, generator = operands(dtype, 200, 72, 64, seed)
    buffer = torch.randn(200, 512, device="cuda", generator=generator).to(dtype)
    left, right = buffer[:, :64], buffer[:, 128:200]
    left_before, around = left.clone(), buffer[:, 200:].clone()
    expect(cutegemm.gemm(left, b, out=right, **options).contiguous(), left_before, b, options)
    assert torch.equal(left, left_before)
    assert torch.equal(buffer[:, 200:], around)
    with pytest.raises(ValueError, match="out: it overlaps a"):
        cutegemm.gemm(left, b, out=buffer[:, 32:104], **options)
    with pytest.raises(ValueError, match="out: it overlaps b"):
        cutegemm.gemm(a, buffer[:64, :72], out=buffer[:, :72], **options)
    c = torch.randn(200, 72, device="cuda", generator=generator).to(dtype)
    before = c.clone()
    assert cutegemm.gemm(a, b, c, beta=0.5, out=c, **options) is c
    expect(c, a, b, options, c=before, beta=0.5)


@pytest.mark.parametrize("k", [64, 72, 8])
def test_infinities_and_nans(kernel, k, seed):
    dtype, options = kernel
    a, b, _ = operands(dtype, 136, 144, k, seed)
    a[3, k - 1], a[100, 0], b[k - 2, 9], b[0, 143] = (float(x) for x in ("inf", "nan", "-inf", "inf"))
    got = cutegemm.gemm(a, b, **options)
    expect(got, a, b, options)
    assert got[100].isnan().all()
    assert got[3].isinf().sum() > 100
    for row in (0, 50, 135):
        assert torch.isfinite(got[row, :9]).all()


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_infinities_through_activations(activation, seed):
    for dtype in DTYPES.values():
        a, b, _ = operands(dtype, 40, 48, 32, seed)
        a[3, 31], a[7, 1], b[30, 9] = float("inf"), float("nan"), float("-inf")
        got = cutegemm.gemm(a, b, activation=activation, backend="cute")
        expect(got, a, b, {"precision": None}, activation=activation)


def test_the_same_bits_every_time(kernel, seed):
    """Also while other work shares the GPU, which changes the order in which CTAs run."""
    dtype, options = kernel
    a, b, generator = operands(dtype, 520, 392, 4104, seed)
    first = cutegemm.gemm(a, b, **options)
    expect(first, a, b, options)
    noise = torch.randn(2048, 2048, device="cuda", generator=generator)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    results = []
    for _ in range(20):
        with torch.cuda.stream(side):
            torch.mm(noise, noise)
        results.append(cutegemm.gemm(a, b, **options))
    torch.cuda.synchronize()
    assert all(torch.equal(first, other) for other in results)


@pytest.mark.parametrize("name", ["b", "c", "bias", "out"])
def test_tensors_on_another_device_are_named(name, seed):
    case = Case.random(16, 24, 8, "fp16", seed=seed, device="cuda")
    shapes = {"b": (8, 24), "c": (16, 24), "bias": (24,), "out": (16, 24)}
    arguments = {"a": case.a, "b": case.b, name: torch.ones(shapes[name], dtype=torch.float16)}
    beta = 1.0 if name == "c" else 0.0
    c = arguments.pop("c", None)
    with pytest.raises(ValueError, match=rf"^{name}: it is on cpu, expected the device of a, cuda:0"):
        cutegemm.gemm(arguments.pop("a"), arguments.pop("b"), c, beta=beta, **arguments)
    with pytest.raises(ValueError, match=r"^b: it is on cuda:0, expected the device of a, cpu"):
        cutegemm.gemm(case.a.cpu(), case.b)
