"""Checks of `distributed_checks`: epilogue programs, products in groups, scaled products and quantization."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tests.distributed_checks import Setting, check, whole


def placed(setting: Setting, tensor: Any, placement: Any, grad: bool = True) -> Any:
    """A DTensor of a tensor that every rank has; numbers stay numbers."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(tensor, torch.Tensor):
        return tensor
    found = distribute_tensor(tensor.detach(), setting.mesh, [placement])
    return found.requires_grad_() if grad and tensor.is_floating_point() else found


def same(setting: Setting, call: Any, tensors: Sequence[Any], placements: Sequence[Any], grad: bool = True) -> Any:
    """call(*tensors), whole and with DTensors: equal results and gradients. Returns the results' placements."""
    ours = [placed(setting, each, own, grad) for each, own in zip(tensors, placements, strict=True)]
    plain = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in tensors]
    plain = [
        each.requires_grad_() if grad and isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in plain
    ]
    got, want = call(*ours), call(*plain)
    got, want = ((each,) if isinstance(each, torch.Tensor) else each for each in (got, want))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-5, atol=1e-5, msg=str(placements))
        assert mine.dtype == theirs.dtype
    if grad:
        for results in (got, want):
            sum((number + 1) * whole(each).float().sin().sum() for number, each in enumerate(results)).backward()
        for mine, theirs in zip(ours, plain, strict=True):
            if isinstance(mine, torch.Tensor) and theirs.grad is not None:
                torch.testing.assert_close(
                    mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-4, msg=str(placements)
                )
    return [each.placements[0] for each in got]


@check
def programs_of_every_placement(setting: Setting) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    import cutegemm
    from cutegemm import ops

    def reduced(acc: Any, c: Any) -> Any:
        return acc + c, ops.row_sum(acc * c), ops.column_sum(acc)

    a, b, c = (torch.randn(*shape, generator=setting.generator) for shape in ((6, 8), (8, 12), (6, 12)))
    a, b, c = (each.to(setting.device) for each in (a, b, c))
    column, row = c[:, :1].contiguous(), c[0].contiguous()
    cases: list[tuple[Any, list[Any]]] = [
        (lambda acc, row, c: ops.gelu(acc + row) * c, [row, c]),
        (lambda acc, column, s: acc * column * s, [column, 0.5]),
        (reduced, [c]),
        (lambda acc: ops.where(ops.column() <= ops.row(), acc, ops.random(3)), []),
        (lambda acc, c: ops.partner(acc) + c, [c]),
        (ops.swiglu_pairs, []),
        (ops.swiglu, []),
    ]
    every = (Replicate(), Shard(0), Shard(1))
    for number, (program, operands) in enumerate(cases):

        def call(a: Any, b: Any, *operands: Any, program: Any = program) -> Any:
            return cutegemm.gemm(a, b, epilogue=program, operands=operands)

        for of_a, of_b in itertools.product(every, repeat=2):
            others = [Replicate() if Replicate() in (of_a, of_b) else Shard(0) for _ in operands]
            got = same(setting, call, [a, b, *operands], [of_a, of_b, *others])
            if (of_a, of_b) == (Shard(0), Replicate()):
                assert got[0] == Shard(0)
                assert len(got) == 1 or got == [Shard(0), Shard(0), Partial()]
            if (of_a, of_b) == (Replicate(), Shard(1)):
                assert got[0] == (Replicate() if program is ops.swiglu else Shard(1))
            if (of_a, of_b) == (Shard(1), Shard(0)):
                assert (got[0] == Partial()) == (number == 1)
