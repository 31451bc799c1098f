"""torch.ops.cutegemm.moe: a mixture of experts as one operator, which is what torch.compile sees of `moe` where no
gradient is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cutegemm import gating
from cutegemm.mixing import Settings
from cutegemm.moe import unrecorded
from cutegemm.moe_arguments import check
from cutegemm.pytorch.program_autograd import refuse_tangents
from cutegemm.pytorch.registering import define, refuse_gradients, serve_natively

NAME = "moe"


def _compute(
    x, experts, weights, w_gate_up, w_down, activation="silu", precision=None, backend="auto", tell=False
) -> torch.Tensor:
    tensors, options = (x, experts, weights, w_gate_up, w_down), (activation, precision, backend)
    with torch.no_grad(), torch._C._DisableAutocast():
        check(*tensors, *options)
        settings = Settings(*gating.texts(gating.Form(activation), weights), False, precision, backend)
        return unrecorded(*tensors, None, None, settings, options if tell else None)


def _fake(x, experts, weights, w_gate_up, w_down, activation="silu", precision=None, backend="auto"):
    check(x, experts, weights, w_gate_up, w_down, activation, precision, backend)
    return x.new_empty((*x.shape[:-1], w_down.shape[1]))


define(
    f"{NAME}(Tensor x, Tensor experts, Tensor weights, Tensor w_gate_up, Tensor w_down, str activation='silu', "
    "str? precision=None, str backend='auto') -> Tensor",
    _compute, _fake,
)  # fmt: skip


def _refuse(name: str, tensor: torch.Tensor) -> None:
    refuse_tangents(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name}: it requires grad, and torch.ops.cutegemm.moe records none; call cutegemm.moe")


serve_natively(NAME, _compute, refuse_gradients(NAME, _refuse))


@register_flop_formula(torch.ops.cutegemm.moe)
def _flops(x_shape: Any, experts_shape: Any, weights_shape: Any, gate_up: Any, down: Any, *rest: Any, **options: Any):
    """Of both products, for torch's FlopCounterMode."""
    slots = 1
    for extent in experts_shape:
        slots *= extent
    return 2 * slots * (2 * down[2] * gate_up[-1] + down[1] * down[2])
