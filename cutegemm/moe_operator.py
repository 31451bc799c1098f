"""torch.ops.cutegemm.moe: a mixture of experts as one operator, which is what torch.compile sees of `moe` where no
gradient is recorded, and of `nn.Fp8MoE`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cutegemm import gating, quantized_mixing
from cutegemm.mixing import Settings
from cutegemm.moe import unrecorded
from cutegemm.moe_arguments import check, check_chosen, check_types
from cutegemm.problem import request
from cutegemm.problem.quantization import FORMATS
from cutegemm.pytorch import grouped_operator
from cutegemm.pytorch.program_autograd import refuse_tangents
from cutegemm.pytorch.registering import LIBRARY, define, refuse_gradients, serve_natively
from cutegemm.quantized_mixing import Experts

NAME = "moe"


@lru_cache(maxsize=256)
def _settings(computed: str, precision: str | None, backend: str) -> Settings | quantized_mixing.Settings:
    """What a text was made of. Raises ValueError for one that neither has made."""
    try:
        first, second, interleaved, *rest = json.loads(computed)
        if not rest:
            return Settings(first, second, interleaved, precision, backend)
        name, *kinds = rest
        of_x, of_gate_up, of_down = kinds
        dtype = next(dtype for dtype in FORMATS if str(dtype) == name)
        return quantized_mixing.Settings(
            first, second, interleaved, dtype, (of_x, of_gate_up, of_down), precision, backend
        )
    except (ValueError, StopIteration):
        raise ValueError(f"computed: got {computed[:80]!r}, expected what mixing.Settings.text gives") from None


def _compute(
    x, experts, weights, w_gate_up, w_down, activation="silu", precision=None, backend="auto", b_gate_up=None,
    b_down=None, s_gate_up=None, s_down=None, computed=None, tell=False,
) -> torch.Tensor:  # fmt: skip
    tensors, biases = (x, experts, weights, w_gate_up, w_down), {"b_gate_up": b_gate_up, "b_down": b_down}
    own = Experts(w_gate_up, w_down, b_gate_up, b_down, s_gate_up, s_down)
    told = (activation if computed is None else computed, precision, backend) if tell else None
    with torch.no_grad(), torch._C._DisableAutocast():
        settings = None if computed is None else _settings(computed, precision, backend)
        if isinstance(settings, quantized_mixing.Settings):
            check_types({"x": x, "experts": experts, "weights": weights})
            gating.check_biases(w_gate_up, w_down, biases)
            check_chosen("x", x, experts, weights)
            for name in ("s_gate_up", "s_down"):
                request.check_type(name, getattr(own, name))
            return quantized_mixing.unrecorded(x, experts, weights, own, settings, told)
        if s_gate_up is not None or s_down is not None:
            raise ValueError(
                "s_gate_up, s_down: got scales, expected None: `computed` names no dtype of quantized values"
            )
        check(*tensors, activation, precision, backend)
        gating.check_biases(w_gate_up, w_down, biases)
        if settings is None:
            programs = gating.texts(gating.Form(activation), weights, b_gate_up, b_down)
            settings = Settings(*programs, False, precision, backend)
        return unrecorded(x, experts, weights, w_gate_up, w_down, b_gate_up, b_down, settings, told)


def _fake(
    x, experts, weights, w_gate_up, w_down, activation="silu", precision=None, backend="auto", b_gate_up=None,
    b_down=None, s_gate_up=None, s_down=None, computed=None,
):  # fmt: skip
    if s_gate_up is None:
        check(x, experts, weights, w_gate_up, w_down, activation, precision, backend)
    return x.new_empty((*x.shape[:-1], w_down.shape[1]))


define(
    f"{NAME}(Tensor x, Tensor experts, Tensor weights, Tensor w_gate_up, Tensor w_down, str activation='silu', "
    "str? precision=None, str backend='auto', Tensor? b_gate_up=None, Tensor? b_down=None, Tensor? s_gate_up=None, "
    "Tensor? s_down=None, str? computed=None) -> Tensor",
    _compute, _fake,
)  # fmt: skip
torch.library.register_vmap(f"cutegemm::{NAME}", grouped_operator.vmapped, lib=LIBRARY)


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
