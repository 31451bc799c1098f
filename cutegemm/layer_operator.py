"""torch.ops.cutegemm.quantized_linear: a layer whose input is quantized on the way, as one operator.

It is what torch.compile sees of `nn.Fp8Linear`: as two operators, with the transposed weight and scale between them, a
layer costs a compiled graph more host time (docs/host.md). No gradients are recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cutegemm import native
from cutegemm.gemm import gemm
from cutegemm.linear import as_rows
from cutegemm.problem import quantization_request, request
from cutegemm.problem.epilogue import ACTIVATIONS
from cutegemm.problem.quantization import ACCEPTED_INPUTS, INPUTS
from cutegemm.pytorch import mlp, scaled, sharding
from cutegemm.pytorch.registering import LIBRARY, define, refuse_gradients, serve_natively
from cutegemm.quantize import quantize
from cutegemm.run import quantizing
from cutegemm.run.how import How, schema

NAME = "quantized_linear"
GATES = {gate.__name__: gate for gate in mlp.GATES.values()}
"""Activations of gate and up, halves of a layer's columns, which become half as many."""
native.gates = tuple(GATES)


def composed(
    x: Any, weight: Any, weight_scale: Any, input_scale: Any, bias: Any, scaling: str, activation: str | None, how: How,
    tell: bool = False,
) -> torch.Tensor:  # fmt: skip
    """act(x @ (weight * weight_scale)^T + bias) by `quantize` and `gemm`, x of any dimensions.

    activation: may also be one of `GATES`, of a weight [gate; up]; then there is no bias. tell: whether the C++ part
        asks how both are launched.
    """
    rows, dtype = as_rows(x), weight.dtype
    by = backend_of(how.backend)
    asked = None if input_scale is not None else scaling
    if tell:
        block = quantization_request.DEFAULT_BLOCK
        values, scale = quantizing.quantize(rows, dtype, asked, -1, block, input_scale, None, by, tell)
    else:
        values, scale = quantize(rows, dtype, asked, scale=input_scale, backend=by)
    b, of_b = weight.t(), weight_scale.t() if weight_scale.dim() else weight_scale
    gate = GATES.get(activation or "")
    terms = {"bias": bias, "activation": activation} if gate is None else {"epilogue": gate}
    d: torch.Tensor = gemm(values, b, scale_a=scale, scale_b=of_b, out_dtype=x.dtype, **terms, **how._asdict())
    if tell:
        scaled.tell(values, b, scale, of_b, bias, activation, x.dtype, how, gate)
    return d.view(*x.shape[:-1], d.shape[-1])


def backend_of(backend: str) -> str:
    """The backend that quantizes: one that takes no part in it leaves it to the best one there is."""
    return backend if backend in quantization_request.BACKENDS else "auto"


def check_terms(activation: Any, bias: Any) -> None:
    """Raises ValueError unless a layer can have this activation, beside this bias."""
    if activation is not None and not request.is_one_of(activation, (*ACTIVATIONS, *GATES)):
        accepted = ", ".join(map(repr, (*ACTIVATIONS, *GATES)))
        raise ValueError(f"activation: got {request.shown(activation)}, accepted are None, {accepted}")
    if activation in GATES and bias is not None:
        raise ValueError(
            f"bias: got one with activation {activation!r}, which gates products without a bias; pass bias=False"
        )


def check_call(x: Any, others: Mapping[str, Any], scaling: Any, how: How) -> None:
    """Raises TypeError or ValueError naming what no layer takes. others: the further tensors by name."""
    how.check()
    if how.constant == "a":
        raise ValueError("constant: got 'a', accepted are None and 'b': the call itself writes the operands a")
    if not request.is_one_of(scaling, quantization_request.SCALINGS):
        accepted = ", ".join(map(repr, quantization_request.SCALINGS))
        raise ValueError(f"scaling: got {request.shown(scaling)}, accepted are {accepted}")
    request.check_type("x", x)
    if x.dtype not in INPUTS:
        raise TypeError(f"x: got dtype {x.dtype}, accepted are {ACCEPTED_INPUTS}")
    for name, each in others.items():
        request.check_type(name, each)
        request.check_device(name, each, x.device, "x")


def _check(x: Any, weight: Any, weight_scale: Any, input_scale: Any, bias: Any, scaling: Any, how: How) -> None:
    optional = {"input_scale": input_scale, "bias": bias}
    given = {name: each for name, each in optional.items() if each is not None}
    check_call(x, {"weight": weight, "weight_scale": weight_scale} | given, scaling, how)
    _check_shapes(x, weight)


def _check_shapes(x: torch.Tensor, weight: torch.Tensor) -> None:
    torch._check_value(
        x.dim() > 0 and x.shape[-1] == weight.shape[-1],
        lambda: f"x: got shape {tuple(x.shape)}, expected (..., {weight.shape[-1]}), as the weight has it",
    )


def _compute(
    x, weight, weight_scale, input_scale=None, bias=None, scaling="rows", activation=None, *how, tell=False
) -> torch.Tensor:
    check_terms(activation, bias)
    _check(x, weight, weight_scale, input_scale, bias, scaling, How(*how))
    with torch.no_grad(), torch._C._DisableAutocast():
        return composed(x, weight, weight_scale, input_scale, bias, scaling, activation, How(*how), tell)


def _fake(x, weight, weight_scale, input_scale=None, bias=None, scaling="rows", activation=None, *how):
    check_terms(activation, bias)
    _check(x, weight, weight_scale, input_scale, bias, scaling, How(*how))
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if activation in GATES else 1)))


define(
    f"{NAME}(Tensor x, Tensor weight, Tensor weight_scale, Tensor? input_scale=None, Tensor? bias=None, "
    f"str scaling='rows', str? activation=None, {schema()}) -> Tensor",
    _compute, _fake,
)  # fmt: skip
serve_natively(NAME, _compute, refuse_gradients(NAME))
sharding.handle(NAME, _compute)  # of `quantize` and `gemm`, which have rules


def vmapped_over_input(name: str) -> Callable[..., tuple[torch.Tensor, int]]:
    """The torch.vmap rule of an operator that has an argument `scaling`. Only the first argument may be mapped."""
    operator = getattr(torch.ops.cutegemm, name).default
    names = [each.name for each in operator._schema.arguments[1:]]

    def vmapped(info: Any, in_dims: Any, x: Any, *others: Any, **named: Any) -> tuple[torch.Tensor, int]:
        if any(dim is not None for dim in in_dims[1:]):
            raise NotImplementedError(f"{name}: torch.vmap is supported over the input alone")
        given = dict(zip(names, others, strict=False)) | named
        samples = x.movedim(in_dims[0], 0)
        if samples.dim() == 1:
            raise ValueError("x: got shape () in torch.vmap, expected (..., in_features)")
        # With one scale for a tensor each sample has a scale of its own, so the samples are computed one by one.
        if given.get("scaling") == "tensor" and given.get("input_scale") is None and len(samples):
            return torch.stack([operator(each, **given) for each in samples]), 0
        return operator(samples, **given), 0

    return vmapped


torch.library.register_vmap(f"cutegemm::{NAME}", vmapped_over_input(NAME), lib=LIBRARY)


@register_flop_formula(torch.ops.cutegemm.quantized_linear)
def _flops(x_shape: Any, weight_shape: Any, *rest: Any, **options: Any) -> int:
    """2 M N K, for torch's FlopCounterMode."""
    return int(2 * math.prod(x_shape) * weight_shape[0])
