"""What torch's default dtype is makes no difference."""

from __future__ import annotations

import pytest
import torch

import cutegemm


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


class Experts(torch.nn.Module):
    """Stacked experts as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.num_experts = 4
        shapes = {"gate_up_proj": (4, 16, 16), "down_proj": (4, 16, 8)}
        for name, shape in shapes.items():
            values = torch.randn(shape, dtype=torch.float32, generator=generator) / 4
            setattr(self, name, torch.nn.Parameter(values))
        self.act_fn = torch.nn.SiLU()

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = torch.nn.functional.linear(x[tokens], self.gate_up_proj[expert]).chunk(2, -1)
            found = torch.nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out.index_add_(0, tokens, found * weights[tokens, places, None])
        return out


def test_experts_in_fp32_are_replaced(default):
    model = torch.nn.Sequential(Experts())
    cutegemm.nn.replace_moe(model)
    assert isinstance(model[0], cutegemm.nn.MoE)
