"""Results do not depend on torch's default dtype."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from tests.unit.test_moe_modules import Experts


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def scaled(acc, factor):
    return acc * factor


@pytest.mark.parametrize("number", [0.1, 257.0, 1e5])
@pytest.mark.parametrize("backend", ["torch", "cute"])
def test_numbers_among_the_operands_are_fp32(number, backend, default):
    one = torch.ones(1, 1, dtype=torch.float32)
    exact = torch.tensor(number, dtype=torch.float32).item()
    found = cutegemm.gemm(one, one, epilogue=scaled, operands=(number,), backend=backend)
    assert found.item() == exact
    offsets = torch.ones(1, dtype=torch.int32)
    groups = cutegemm.grouped_gemm(one, one[None], offsets, epilogue=scaled, operands=(number,), backend="torch")
    assert groups.item() == exact


def test_so_are_they_in_gradients(default):
    a, one = torch.ones(1, 1, dtype=torch.float32, requires_grad=True), torch.ones(1, 1, dtype=torch.float32)
    cutegemm.gemm(a, one, epilogue=scaled, operands=(0.1,)).backward()
    assert a.grad.item() == torch.tensor(0.1, dtype=torch.float32).item()


def test_experts_in_fp32_are_replaced(default):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Experts(torch.nn.SiLU()).to(torch.float32))
    cutegemm.nn.replace_moe(model)
    assert isinstance(model[0], cutegemm.nn.MoE)
