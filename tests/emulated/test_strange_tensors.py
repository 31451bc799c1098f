"""Tensors that lie strangely in memory: strided and expanded biases, slices of one buffer, lazily negated views."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.problem import reference
from tests.problems import Case

pytest.importorskip("llvmlite")
BACKENDS = ("torch", "cute", "legacy")


def operands(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(17, 19, generator=generator), torch.randn(19, 23, generator=generator), generator


@pytest.mark.parametrize("kind", ["every second", "expanded", "offset"])
@pytest.mark.parametrize("backend", ["torch", "cute"])
def test_bias_of_any_stride(kind, backend, seed):
    a, b, generator = operands(seed)
    bias = {
        "every second": torch.randn(46, generator=generator)[::2],
        "expanded": torch.randn(1, generator=generator).expand(23),
        "offset": torch.randn(24, generator=generator)[1:],
    }[kind]
    Case(a, b, {"bias": bias}).run(backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_misaligned_tensors_are_named(backend, seed):
    a, b, _ = operands(seed)
    memory = bytearray(4 * 23 * 19 + 1)
    with pytest.raises(ValueError, match=r"bias: it lies at address"):
        cutegemm.gemm(a, b, bias=torch.frombuffer(memory, dtype=torch.float32, offset=1, count=23), backend=backend)
    odd = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=19 * 23).view(19, 23)
    with pytest.raises(ValueError, match=r"b: it lies at address"):
        cutegemm.gemm(a, odd, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazily_negated_views_are_refused_even_after_a_plain_call(backend, seed):
    a, b, _ = operands(seed)
    cutegemm.gemm(a, b, backend=backend)
    with pytest.raises(ValueError, match=r"b: it is a lazily negated .*resolve_neg"):
        cutegemm.gemm(a, torch._neg_view(b), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_column_slices_of_one_buffer_do_not_overlap(backend, seed):
    _, _, generator = operands(seed)
    buffer = torch.randn(17, 64, generator=generator)
    left, right = buffer[:, :19], buffer[:, 32:55]
    b = torch.randn(19, 23, generator=generator)
    want = reference.expected(left, b)
    verdict = reference.check(cutegemm.gemm(left, b, out=right, backend=backend), want)
    assert verdict.ok, verdict.message
    with pytest.raises(ValueError, match="overlaps a"):
        cutegemm.gemm(left, b, out=buffer[:, 18:41], backend=backend)


def test_results_that_overlap_themselves_are_refused(seed):
    a, b, _ = operands(seed)
    with pytest.raises(ValueError, match="several times"):
        cutegemm.gemm(a, b, out=torch.as_strided(torch.zeros(200), (17, 23), (5, 1)))
    with pytest.raises(ValueError, match="several times"):
        cutegemm.gemm(
            torch.ones(3, 5, 4), torch.ones(4, 6), out=torch.as_strided(torch.zeros(300), (3, 5, 6), (2, 6, 1))
        )


def test_a_remembered_call_is_checked_like_the_first(seed, monkeypatch):
    a, b, _ = operands(seed)
    cutegemm.gemm(a, b, backend="cute")
    with pytest.raises(ValueError, match=r"beta: got 1\.0 without c"):
        cutegemm.gemm(a, b, beta=1.0, backend="cute")
    for huge in (1e39, 10**400):
        with pytest.raises(ValueError, match=r"alpha: got .* which fp32 cannot hold"):
            cutegemm.gemm(a, b, alpha=huge, backend="cute")
    out = torch.empty(17, 23)
    cutegemm.gemm(a, b, out=out, backend="cute")
    with pytest.raises(ValueError, match="overlaps a"):
        cutegemm.gemm(out.as_strided((17, 19), (19, 1)), b, out=out, backend="cute")
    monkeypatch.setenv("CUTEGEMM_ARCH", "nonsense")
    with pytest.raises(ValueError, match="CUTEGEMM_ARCH: got 'nonsense'"):
        cutegemm.gemm(a, b, backend="cute")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_the_tangent_of_a_remembered_call_is_not_dropped(seed):
    from torch.autograd import forward_ad

    a, b, _ = operands(seed)
    cutegemm.gemm(a, b, backend="cute")
    tangent = torch.ones_like(a)
    with forward_ad.dual_level():
        d = cutegemm.gemm(forward_ad.make_dual(a, tangent), b, backend="cute")
        assert torch.equal(forward_ad.unpack_dual(d).tangent, cutegemm.gemm(tangent, b, backend="cute"))


def test_configurations_of_another_kind_are_named(seed):

    a, b, _ = operands(seed)
    for config in (5, ["x"], {}, b"simt"):
        with pytest.raises(ValueError, match="config: got"):
            cutegemm.gemm(a, b, backend="cute", config=config)


def test_explain_refuses_what_gemm_refuses():
    from cutegemm.errors import UnsupportedError

    a = torch.ones(4, 4)
    with pytest.raises(UnsupportedError, match="needs backend 'cute'"):
        cutegemm.explain(a, a, precision="tf32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strides", [(66, 0), (0, 0), (5, 3)])
@pytest.mark.product(keep=1)
def test_an_empty_operand_may_have_any_strides(dtype, strides):
    """K = 0: kernels still work out addresses, and 16-byte copies by a stride of 66 numbers were misaligned."""
    memory = torch.zeros(400, dtype=dtype)
    a, b = memory.as_strided((132, 0), (1, 139)), memory.as_strided((0, 64), strides)
    config = "simt/64x128x16/w64x32/s5/g8" if dtype == torch.float32 else "sm80/64x64x64/w32x32/s4/g8"
    for out in (torch.ones(132, 64, dtype=dtype), torch.ones(64, 132, dtype=dtype).t()):
        cutegemm.gemm(a, b, out=out, backend="cute", config=config)
        assert not out.any()
