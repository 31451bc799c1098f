"""Calls with scales that are met again: what is remembered of them, and what is asked each time all the same."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import cutegemm
from cutegemm.pytorch import scaled

FP8 = torch.float8_e4m3fn


def given(seed=1):
    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=draw).to(FP8) for shape in ((8, 32), (48, 32)))
    return (
        a,
        b.t(),
        torch.rand(8, 1, generator=draw),
        torch.rand(1, 48, generator=draw),
        torch.randn(48, generator=draw),
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_call_met_again_makes_no_program(with_bias, activation):
    scaled._remembered.clear()
    for seed in (1, 2):
        a, b, scale_a, scale_b, bias = given(seed)
        bias = bias if with_bias else None
        with mock.patch.object(scaled, "arguments", wraps=scaled.arguments) as made:
            got = cutegemm.gemm(
                a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, activation=activation, backend="torch"
            )
        assert made.call_count == (seed == 1)
        want = a.double() @ b.double() * scale_a * scale_b
        want = want if bias is None else want + bias
        want = want if activation is None else want.relu()
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


def test_which_operand_a_scale_belongs_to_is_remembered_apart():
    a, b, scale_a, _, _ = given()
    one = torch.tensor(2.0)
    first = cutegemm.gemm(a, b, scale_a=one, backend="torch", out_dtype=torch.float32)
    second = cutegemm.gemm(a, b, scale_b=one * 2, backend="torch", out_dtype=torch.float32)
    both = cutegemm.gemm(a, b, scale_a=scale_a, backend="torch", out_dtype=torch.float32)
    assert torch.equal(second, first * 2)
    torch.testing.assert_close(both, first / 2 * scale_a)


def test_a_call_met_again_is_checked():
    a, b, scale_a, scale_b, bias = given()
    call = {"scale_a": scale_a, "scale_b": scale_b, "bias": bias, "backend": "torch"}
    for _ in range(2):
        cutegemm.gemm(a, b, **call)
    for name in ("scale_a", "scale_b", "bias"):
        with pytest.raises(ValueError, match=rf"^{name}: it requires grad"):
            cutegemm.gemm(a, b, **{**call, name: call[name].clone().requires_grad_()})
        with torch.no_grad():
            cutegemm.gemm(a, b, **{**call, name: call[name].clone().requires_grad_()})
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: "):
            cutegemm.gemm(a, b, **{**call, name: call[name].to_sparse()})
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: "):
            cutegemm.gemm(a, b, **{**call, name: call[name].to("meta")})
    with pytest.raises(TypeError, match=r"^scale_a: got dtype torch\.float64"):
        cutegemm.gemm(a, b, **{**call, "scale_a": scale_a.double()})
    with pytest.raises(ValueError, match=r"^scale_a: got shape \(7, 1\)"):
        cutegemm.gemm(a, b, **{**call, "scale_a": scale_a[:7]})
    for number in (True, torch.ones(2), torch.tensor(1.0), torch.tensor(1.0, device="meta")):
        with pytest.raises(TypeError, match=r"^alpha: got "):
            cutegemm.gemm(a, b, alpha=number, **call)
        with pytest.raises(TypeError, match=r"^beta: got "):
            cutegemm.gemm(a, b, beta=number, **call)


def test_fast_sums_are_refused_of_blocks_met_before():
    a, b = torch.randn(8, 256).to(FP8), torch.randn(256, 256).to(FP8)
    call = {"scale_b": torch.ones(2, 2), "backend": "torch"}
    cutegemm.gemm(a, b, **call)
    with pytest.raises(ValueError, match=r"^accumulate: got 'fast' with scales of blocks"):
        cutegemm.gemm(a, b, accumulate="fast", **call)
