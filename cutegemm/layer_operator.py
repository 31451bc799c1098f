"""torch.ops.cutegemm.quantized_linear: a layer whose input is quantized on the way, as one operator.

It is what torch.compile sees of `nn.Fp8Linear`. As two operators, with the transposed weight and scale between them, a
layer costs a compiled graph three times as long on the host. No gradients are recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cutegemm import native, ops
from cutegemm.gemm import gemm
from cutegemm.linear import as_rows
from cutegemm.problem import quantization_request, request
from cutegemm.problem.epilogue import ACTIVATIONS
from cutegemm.pytorch import scaled, sharding
from cutegemm.pytorch.registering import BELOW_AUTOGRAD, LIBRARY, define
from cutegemm.quantize import quantize
from cutegemm.run import quantizing
from cutegemm.run.how import How, schema

NAME = "quantized_linear"
GATES = {name: gate for gate in (ops.swiglu, ops.geglu, ops.geglu_tanh, ops.reglu) if (name := gate.__name__)}
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
    # Backends that take no part in quantization leave it to the best one there is.
    by = how.backend if how.backend in quantization_request.BACKENDS else "auto"
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


def check_terms(activation: Any, bias: Any) -> None:
    """Raises ValueError unless a layer can have this activation, beside this bias."""
    if activation is not None and not request.is_one_of(activation, (*ACTIVATIONS, *GATES)):
        accepted = ", ".join(map(repr, (*ACTIVATIONS, *GATES)))
        raise ValueError(f"activation: got {request.shown(activation)}, accepted are None, {accepted}")
    if activation in GATES and bias is not None:
        raise ValueError(f"bias: got one with activation {activation!r}, which gates products without a bias")


def _compute(
    x, weight, weight_scale, input_scale=None, bias=None, scaling="rows", activation=None, *how, tell=False
) -> torch.Tensor:
    check_terms(activation, bias)
    with torch.no_grad(), torch._C._DisableAutocast():
        return composed(x, weight, weight_scale, input_scale, bias, scaling, activation, How(*how), tell)


def _fake(x, weight, weight_scale, input_scale=None, bias=None, scaling="rows", activation=None, *how):
    How(*how).check()
    check_terms(activation, bias)
    torch._check_value(
        x.shape[-1] == weight.shape[-1],
        lambda: f"x: got shape {tuple(x.shape)}, expected (..., {weight.shape[-1]}), as the weight has it",
    )
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if activation in GATES else 1)))


def _recorded(keyset: Any, *arguments: Any, **named: Any) -> torch.Tensor:
    """The operator for autograd, which refuses what would need a gradient."""
    for argument, tensor in zip(_operator._schema.arguments, arguments, strict=False):
        if isinstance(tensor, torch.Tensor):
            quantization_request.refuse_gradient(argument.name, tensor)
            if type(tensor) is not torch.Tensor:
                sharding.needed()
    with torch._C._AutoDispatchBelowAutograd():
        result: torch.Tensor = _operator.redispatch(keyset & BELOW_AUTOGRAD, *arguments, **named)
    return result


def _natively(keys: Any, tell: bool, *arguments: Any) -> torch.Tensor:
    """The operator's call that the C++ extension leaves to Python."""
    if keys is not None:
        return _recorded(torch._C.DispatchKeySet.from_raw_repr(keys), *arguments)
    return _compute(*arguments, tell=tell)


define(
    f"{NAME}(Tensor x, Tensor weight, Tensor weight_scale, Tensor? input_scale=None, Tensor? bias=None, "
    f"str scaling='rows', str? activation=None, {schema()}) -> Tensor",
    _compute, _fake,
)  # fmt: skip
_operator = torch.ops.cutegemm.quantized_linear.default
LIBRARY.impl(NAME, _recorded, "Autograd", with_keyset=True)
native.in_python[NAME] = _natively
sharding.handle(NAME, _compute)  # of `quantize` and `gemm`, which have rules


def _vmapped(info: Any, in_dims: Any, x: Any, *others: Any, **named: Any) -> tuple[torch.Tensor, int]:
    if any(dim is not None for dim in in_dims[1:]):
        raise NotImplementedError("quantized_linear: torch.vmap is supported over the input alone")
    return torch.ops.cutegemm.quantized_linear(x.movedim(in_dims[0], 0), *others, **named), 0


torch.library.register_vmap(f"cutegemm::{NAME}", _vmapped, lib=LIBRARY)


@register_flop_formula(torch.ops.cutegemm.quantized_linear)
def _flops(x_shape: Any, weight_shape: Any, *rest: Any, **options: Any) -> int:
    """2 M N K, for torch's FlopCounterMode."""
    count = 2 * weight_shape[0]
    for extent in x_shape:
        count *= extent
    return int(count)
