"""On the CPU fp32 is IEEE also where torch was told to round it (`torch.set_float32_matmul_precision`)."""

from __future__ import annotations

import contextlib

import pytest
import torch

import cutegemm
from cutegemm import ops, torch_backend


@contextlib.contextmanager
def told(level: str):
    before = torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    torch.set_float32_matmul_precision(level)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision = before


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).float()


@pytest.mark.parametrize("level", ["medium", "high"])
def test_products_and_gradients_keep_their_bits(level):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(40, 40, generator=generator) for _ in range(2))
    left = a.clone().requires_grad_()
    with told(level):
        assert torch.equal(cutegemm.gemm(a, b), exact(a, b))
        assert torch.equal(cutegemm.gemm(a, b, precision="ieee"), exact(a, b))
        assert torch.equal(cutegemm.linear(a, b), exact(a, b.t()))
        assert torch.equal(cutegemm.gemm(a, b, epilogue=ops.relu), exact(a, b).relu())
        ends = torch.tensor([7, 40], dtype=torch.int32)
        grouped = cutegemm.grouped_gemm(a, torch.stack([b, b.t()]), ends)
        assert torch.equal(grouped, torch.cat([exact(a[:7], b), exact(a[7:], b.t())]))
        half = cutegemm.gemm(a.half(), b.half(), out_dtype=torch.float32)
        assert torch.equal(half, exact(a.half(), b.half()))
        cutegemm.gemm(left, b).backward(a)
    assert torch.equal(left.grad, exact(a, b.t()))


def test_each_of_torchs_switches_counts():
    with told("medium"):
        assert torch_backend.cpu_rounds()
    with told("high"):
        assert torch_backend.cpu_rounds()
    with told("highest"):
        assert not torch_backend.cpu_rounds()
        matmul, mkldnn = torch.backends.mkldnn.matmul, torch.backends.mkldnn
        for place in (matmul, mkldnn, torch.backends):
            matmul.fp32_precision = "none"
            assert not torch_backend.cpu_rounds()
            place.fp32_precision = "tf32"
            try:
                assert torch_backend.cpu_rounds()
            finally:
                place.fp32_precision = "none"
