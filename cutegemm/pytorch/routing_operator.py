"""torch.ops.cutegemm.route: slots of a mixture sorted by expert, as one operator of a compiled graph."""

from __future__ import annotations

import torch

from cutegemm.pytorch.registering import define
from cutegemm.run import routing


def _compute(experts, weights, count, backend="auto") -> tuple[torch.Tensor, ...]:
    return tuple(routing.route(experts, weights, count, backend))


def _fake(experts, weights, count, backend="auto"):
    def integers(extent):
        return experts.new_empty((extent,), dtype=torch.int32)

    slots = experts.shape[0] * experts.shape[1]
    return integers(count), integers(slots), integers(slots), weights.new_empty((slots, 1))


define(
    "route(Tensor experts, Tensor weights, int count, str backend='auto') -> (Tensor, Tensor, Tensor, Tensor)",
    _compute, _fake,
)  # fmt: skip
route = torch.ops.cutegemm.route.default
