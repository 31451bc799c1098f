"""Checks of `distributed_checks`: SwiGLU and MoE in models that are sharded by torch's tools, and derivatives of these."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.distributed_checks import WORLD, Setting, check, whole


class Gated(torch.nn.Module):
    """A linear layer, a gated MLP and a mixture of experts with its router, each added to its input."""

    def __init__(self) -> None:
        from cutegemm.nn import Linear, MoE, SwiGLU

        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(16), Linear(16, 16)
        self.mlp, self.experts = SwiGLU(16, 24), MoE(16, 8, 4, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(self.norm(x))
        x = x + self.mlp(x)
        found: torch.Tensor = x + self.experts(x)
        return found


def gated(setting: Setting) -> torch.nn.Module:
    torch.manual_seed(5)
    return Gated().to(setting.device)


def one_step(model: torch.nn.Module, x: Any, share: float = 1.0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result, and the parameters after a step of SGD with momentum whose loss is `share` times the squares."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    result = model(x)
    (share * whole(result).square().sum()).backward()
    optimizer.step()
    return whole(result).detach(), [whole(each).detach() for each in model.parameters()]


def same_step(got: Any, want: Any) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    for number, (mine, theirs) in enumerate(zip(got[1], want[1], strict=True)):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, number=number: f"{number} {text}"
        )


@check
def gated_modules_tensor_parallel(setting: Setting) -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from cutegemm.parallel import GatedParallel

    x = torch.randn((2, 6, 16), generator=setting.generator).to(setting.device)
    plain = gated(setting)
    model = parallelize_module(copy.deepcopy(plain), setting.mesh, {"mlp": GatedParallel(), "experts": GatedParallel()})
    weights = model.mlp.gate_up_weight, model.experts.gate_up_proj, model.experts.down_proj
    assert [tuple(each.to_local().shape) for each in weights] == [(24, 16), (4, 8, 16), (4, 16, 4)]
    assert torch.equal(weights[0].full_tensor(), plain.mlp.gate_up_weight)
    assert model.experts.down_proj.placements == (Shard(2),)
    same_step(one_step(model, x), one_step(plain, x))
