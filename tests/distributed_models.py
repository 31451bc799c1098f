"""Checks of `distributed_checks`: SwiGLU and MoE in models that torch shards, and second derivatives."""

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
    """The result, and the parameters after a step of SGD with momentum whose loss is `share` times the squares.

    On GPUs torch's optimizers would take all parameters at once, and refuse DTensors beside others.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=False)
    result = model(x)
    (share * whole(result).square().sum()).backward()
    optimizer.step()
    return whole(result).detach(), [whole(each).detach() for each in model.parameters()]


def same_step(got: Any, want: Any) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    for number, (mine, theirs) in enumerate(zip(got[1], want[1], strict=True)):
        torch.testing.assert_close(
            mine.reshape(theirs.shape), theirs, rtol=1e-4, atol=1e-5, msg=lambda text, number=number: f"{number} {text}"
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
    assert [tuple(each.to_local().shape) for each in weights] == [(2, 12, 16), (4, 2, 4, 16), (4, 16, 4)]
    assert torch.equal(weights[0].full_tensor().flatten(0, 1), plain.mlp.gate_up_weight)
    assert model.experts.down_proj.placements == (Shard(2),)
    same_step(one_step(model, x), one_step(plain, x))


@check
def gated_modules_sequence_parallel(setting: Setting) -> None:
    """Each rank has half of the sequence between the modules, and all layers are sharded."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    from cutegemm.parallel import GatedParallel

    x = torch.randn((2, 6, 16), generator=setting.generator).to(setting.device)
    plain = gated(setting)
    along = {"input_layouts": Shard(1), "output_layouts": Shard(1), "use_local_output": False}
    plan = {
        "norm": SequenceParallel(), "linear": ColwiseParallel(**along), "mlp": GatedParallel(**along),
        "experts": GatedParallel(**along),
    }  # fmt: skip
    model = parallelize_module(copy.deepcopy(plain), setting.mesh, plan)
    same_step(one_step(model, distribute_tensor(x, setting.mesh, [Shard(1)])), one_step(plain, x))


@check
def gated_modules_fully_sharded(setting: Setting) -> None:
    """FSDP2: each process has half of the batch; gradients are means over the processes."""
    from torch.distributed.fsdp import fully_shard

    x = torch.randn((4, 6, 16), generator=setting.generator).to(setting.device)
    plain = gated(setting)
    model = copy.deepcopy(plain)
    for layer in (model.linear, model.mlp, model.experts, model):
        fully_shard(layer, mesh=setting.mesh)
    own = x[2 * setting.rank : 2 * setting.rank + 2]
    got, want = one_step(model, own), one_step(plain, x, share=1 / WORLD)
    same_step((got[0], got[1]), (want[0].chunk(WORLD)[setting.rank], want[1]))


@check
def gated_modules_fully_sharded_and_tensor_parallel(setting: Setting) -> None:
    """A mesh of two dimensions, one for each, either of which has both ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from cutegemm.parallel import GatedParallel

    x = torch.randn((2, 6, 16), generator=setting.generator).to(setting.device)
    plain = gated(setting)
    want = one_step(copy.deepcopy(plain), x)
    for sizes in ((1, WORLD), (WORLD, 1)):
        mesh = init_device_mesh(setting.device, sizes, mesh_dim_names=("data", "tensor"))
        plan = {"mlp": GatedParallel(), "experts": GatedParallel()}
        model = parallelize_module(copy.deepcopy(plain), mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        same_step(one_step(model, x), want)


@check
def second_derivatives(setting: Setting) -> None:
    """Of a gated product, a linear layer behind it, a product in groups and a mixture, all sharded."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    import cutegemm
    from cutegemm import ops

    def normal(*shape: int) -> torch.Tensor:
        return 0.5 * torch.randn(*shape, generator=setting.generator).to(setting.device)

    x, up, down, row = normal(6, 8), normal(8, 16), normal(8, 4), normal(8)
    w, gate_up, last = normal(3, 4, 6), normal(3, 2, 4, 6), normal(3, 4, 4)
    offsets = torch.tensor([1, 4, 6], dtype=torch.int32, device=setting.device)
    chosen = torch.tensor([[0, 1], [2, 1], [0, 2], [1, 0], [2, 0], [0, 1]], device=setting.device)
    shares = normal(6, 2)

    def value(x, up, row, down, w, gate_up, last, shares, offsets, chosen):
        h = cutegemm.gemm(x, up, epilogue=lambda acc, row: ops.swiglu(acc) * row, operands=(row,))
        y = cutegemm.grouped_gemm(cutegemm.gemm(h, down), w, offsets, epilogue=lambda acc: acc * acc)
        return cutegemm.moe(y, chosen, shares, gate_up, last).sum()

    everywhere = Replicate()
    placements = [
        everywhere, _StridedShard(1, split_factor=2), Shard(0), Shard(0), Shard(2), Shard(2),
        Shard(2), everywhere, everywhere, everywhere,
    ]  # fmt: skip
    plain = [x, up, row, down, w, gate_up, last, shares, offsets, chosen]
    found = []
    for is_ours in (True, False):
        given = [
            distribute_tensor(each, setting.mesh, [own]) if is_ours else each.clone()
            for each, own in zip(plain, placements, strict=True)
        ]
        inputs = [each.requires_grad_() for each in given if each.is_floating_point()]
        first = torch.autograd.grad(value(*given), inputs, create_graph=True)
        total = sum(whole(each).sum() for each in first)
        second = torch.autograd.grad(total, inputs)
        found.append([whole(each).detach() for each in (*first, *second)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
