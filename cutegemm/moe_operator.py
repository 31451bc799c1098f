"""torch.ops.cutegemm.moe: a mixture of experts as one operator, which is what torch.compile sees of `moe` where no
gradient is recorded, and of `nn.Fp8MoE`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cutegemm import backend as backends
from cutegemm import gating, quantized_mixing
from cutegemm.mixing import Settings
from cutegemm.moe import unrecorded
from cutegemm.moe_arguments import check, check_shapes, check_types
from cutegemm.problem import request
from cutegemm.problem.quantization import ACCEPTED, FORMATS
from cutegemm.problem.quantization_request import SCALINGS
from cutegemm.pytorch import grouped_operator
from cutegemm.pytorch.program_autograd import refuse_tangents
from cutegemm.pytorch.program_operator import program_of
from cutegemm.pytorch.registering import LIBRARY, define, refuse_gradients, serve_natively
from cutegemm.quantized_mixing import Computed, Experts

NAME = "moe"


@lru_cache(maxsize=256)
def _settings(computed: str, precision: str | None, backend: str) -> Settings | Computed:
    """The settings that a text describes (`Settings.text`, `Computed.text`). Raises ValueError for others."""
    try:
        read = json.loads(computed)
        first, second, interleaved, *rest = read if isinstance(read, list) else list[Any]()
        if [type(each) for each in (first, second, interleaved)] != [str, str, bool]:
            raise ValueError
        if not rest:
            return Settings(first, second, interleaved, precision, backend)
        name, of_x, of_gate_up, of_down = rest
        dtype = next(dtype for dtype in FORMATS if str(dtype) == name)
        kinds = of_x, of_gate_up, of_down
        if any(each not in SCALINGS for each in kinds):
            raise ValueError
        return Computed(first, second, interleaved, dtype, kinds, precision, backend)
    except (RecursionError, StopIteration, ValueError):
        raise ValueError(f"computed: got {computed[:80]!r}, expected what mixing.Settings.text gives") from None


def _asked(
    x: Any, experts: Any, weights: Any, own: Experts, activation: str, precision: str | None, backend: str,
    computed: str | None,
) -> Settings | Computed:  # fmt: skip
    """What a call computes. Beside `computed` the activation is not looked at.

    Raises TypeError or ValueError naming the argument that does not fit, but for shapes of scales, which the products
    check.
    """
    biases = {"b_gate_up": own.b_gate_up, "b_down": own.b_down}
    scales = {"s_gate_up": own.s_gate_up, "s_down": own.s_down}
    settings = None if computed is None else _settings(computed, precision, backend)
    if isinstance(settings, Computed):
        check_types({"x": x, "experts": experts, "weights": weights})
        request.check_precision(precision)
        backends.check_name(backend)
        for name, each in (("w_gate_up", own.gate_up), ("w_down", own.down)):
            request.check_type(name, each)
            if each.dtype not in FORMATS:
                raise TypeError(f"{name}: got dtype {each.dtype}, accepted beside scales are {ACCEPTED}")
        check_shapes(x, experts, weights, own.gate_up, own.down)
        if len({each == torch.int8 for each in (own.gate_up.dtype, own.down.dtype, settings.dtype)}) > 1:
            given = f"{own.gate_up.dtype} and {own.down.dtype}, with values of {settings.dtype}"
            raise TypeError(f"w_gate_up, w_down: got {given}; accepted are all of fp8, or all of int8")
        for name, scale in scales.items():
            request.check_type(name, scale)
            if scale.dtype != torch.float32 or scale.dim() not in (0, 3):
                got = f"{scale.dtype} of shape {tuple(scale.shape)}"
                raise ValueError(f"{name}: got {got}, expected torch.float32 of no or three dimensions")
    else:
        for name, scale in scales.items():
            if scale is not None:
                raise ValueError(f"{name}: got a tensor, expected None: `computed` names no dtype of quantized values")
        name = activation if settings is None else "silu"
        check(x, experts, weights, own.gate_up, own.down, name, precision, backend)
    gating.check_biases(own.gate_up, own.down, biases)
    if settings is None:
        programs = gating.texts(gating.Form(activation), weights, own.b_gate_up, own.b_down)
        return Settings(*programs, False, precision, backend)
    for (name, bias), text, inputs in zip(biases.items(), (settings.first, settings.second), (3, 2), strict=True):
        if (taken := len(program_of(text).inputs)) not in (inputs - 2, inputs):
            raise ValueError(f"computed: got a program of {taken} operands, expected {inputs - 2} or {inputs}: {text}")
        if (bias is not None) != (taken == inputs):
            given, expected = ("a tensor", "None") if bias is not None else ("None", "a tensor")
            raise ValueError(f"{name}: got {given}, expected {expected} with this `computed`")
    return settings


def _compute(
    x, experts, weights, w_gate_up, w_down, activation="silu", precision=None, backend="auto", b_gate_up=None,
    b_down=None, s_gate_up=None, s_down=None, computed=None, tell=False,
) -> torch.Tensor:  # fmt: skip
    own = Experts(w_gate_up, w_down, b_gate_up, b_down, s_gate_up, s_down)
    told = (activation if computed is None else computed, precision, backend) if tell else None
    with torch.no_grad(), torch._C._DisableAutocast():
        settings = _asked(x, experts, weights, own, activation, precision, backend, computed)
        if isinstance(settings, Computed):
            return quantized_mixing.unrecorded(x, experts, weights, own, settings, told)
        return unrecorded(x, experts, weights, w_gate_up, w_down, b_gate_up, b_down, settings, told)


def _fake(
    x, experts, weights, w_gate_up, w_down, activation="silu", precision=None, backend="auto", b_gate_up=None,
    b_down=None, s_gate_up=None, s_down=None, computed=None,
):  # fmt: skip
    own = Experts(w_gate_up, w_down, b_gate_up, b_down, s_gate_up, s_down)
    _asked(x, experts, weights, own, activation, precision, backend, computed)
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
        raise RuntimeError(
            f"{name}: it requires grad, and torch.ops.cutegemm.moe records none; run it "
            "under torch.no_grad(), or call cutegemm.moe, which takes no quantized weights"
        )


serve_natively(NAME, _compute, refuse_gradients(NAME, _refuse))


@register_flop_formula(torch.ops.cutegemm.moe)
def _flops(x_shape: Any, experts_shape: Any, weights_shape: Any, gate_up: Any, down: Any, *rest: Any, **options: Any):
    """Of both products, for torch's FlopCounterMode."""
    slots = 1
    for extent in experts_shape:
        slots *= extent
    return 2 * slots * (2 * down[2] * gate_up[-1] + down[1] * down[2])
