"""On the CPU fp32 is IEEE also where torch was told to round it (`torch.set_float32_matmul_precision`)."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

import cutegemm
from cutegemm import ops, torch_backend


@contextlib.contextmanager
def told(level: str):
    torch.set_float32_matmul_precision(level)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


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


@pytest.mark.parametrize(
    ("matmul", "mkldnn", "everywhere", "rounds"),
    [
        ("none", "none", "none", False), ("bf16", "none", "none", True), ("none", "bf16", "none", True),
        ("none", "none", "tf32", True), ("ieee", "bf16", "bf16", False), ("none", "ieee", "bf16", False),
    ],
)  # fmt: skip
def test_the_narrowest_switch_decides(monkeypatch, matmul, mkldnn, everywhere, rounds):
    of_matmul = SimpleNamespace(fp32_precision=matmul)
    of_mkldnn = SimpleNamespace(fp32_precision=mkldnn, matmul=of_matmul)
    monkeypatch.setattr(torch, "backends", SimpleNamespace(fp32_precision=everywhere, mkldnn=of_mkldnn))
    assert torch_backend._cpu_rounds() == rounds


def test_what_torch_offers_sets_it():
    for level, rounds in (("medium", True), ("high", True), ("highest", False)):
        with told(level):
            assert torch_backend._cpu_rounds() == rounds
