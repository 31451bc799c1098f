"""torch.ops.cutegemm.quantized_mlp: a gated MLP of 8 bits as one operator, which is what torch.compile sees of
`nn.Fp8SwiGLU`. No gradients are recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cutegemm import native, ops
from cutegemm.gemm import gemm
from cutegemm.hardware.arch import Arch
from cutegemm.layer_operator import GATES, backend_of, check_call, vmapped_over_input
from cutegemm.linear import as_rows
from cutegemm.problem import request
from cutegemm.problem.quantization import ACCEPTED, BLOCK, FORMATS
from cutegemm.pytorch import scaled, sharding
from cutegemm.pytorch.registering import LIBRARY, define, refuse_gradients, serve_natively
from cutegemm.quantize import quantize
from cutegemm.run import fused, quantizing
from cutegemm.run.how import How, schema

NAME = "quantized_mlp"
FUSED_ROWS = 96
"""Rows from which on the first product may quantize the hidden layer. The fastest tiles of fewer rows have operands
swapped, which no tile that quantizes has: on an H200 one product took 1.03 and 1.14 of the time of two steps at 64 rows
of two shapes, and 0.91 to 0.93 at 96 and 128 (docs/fp8.md#a-hidden-layer-that-its-product-quantizes)."""
FUSED_TILE = 128
"""Extent of a tile that quantizes, in rows and in columns of the hidden layer."""
FUSED_SHARE = 0.54
"""The first product quantizes if its tiles number at least this share of the SMs. Below that, smaller tiles and a
`quantize` are faster: on an H200, with 132 SMs, 44 to 66 tiles took 1.14 to 1.25 of the time, and 72 to 896 tiles 0.79
to 0.98 (as above)."""


def composed(
    x: Any, gate_up: Any, gate_up_scale: Any, down: Any, down_scale: Any, scaling: str, activation: str, *options: Any,
    tell: bool = False,
) -> torch.Tensor:  # fmt: skip
    """act(x gate^T) * (x up^T) times down^T by `quantize` and `gemm`, x of any dimensions.

    scaling: of x and of the hidden layer. activation: one of `GATES`. options: those of a `How`. tell: whether the C++
    part asked for this call, and is to be told its launches.
    """
    how = How(*options)
    _check(x, gate_up, gate_up_scale, down, down_scale, scaling, activation, how)
    rows, by = as_rows(x), backend_of(how.backend)
    first, second = _factor(gate_up, gate_up_scale), _factor(down, down_scale)
    fuses = _fuses(rows, gate_up, down, scaling, how.backend)
    epilogue = _quantizing(activation, x.dtype, down.dtype) if fuses else GATES[activation]
    dtype = None if fuses else x.dtype
    given = quantize(rows, gate_up.dtype, scaling, backend=by)
    found = _product(given, first, how, epilogue=epilogue, out_dtype=dtype)
    hidden = found if fuses else quantize(found, down.dtype, scaling, backend=by)
    d = _product(hidden, second, how, out_dtype=x.dtype)
    if tell:
        with fused.planning():
            # How x is quantized, the first product, how its result is quantized (None: by that product) and the second.
            of_x = quantizing.launches(rows, scaling, None, by, given)
            of_hidden = None if fuses else quantizing.launches(found, scaling, None, by, hidden)
            products = _launch(given, first, dtype, how, epilogue), _launch(hidden, second, x.dtype, how)
            if NotImplemented not in products:
                known = None not in (of_x, *products) and (fuses or of_hidden is not None)
                steps = (of_x, products[0], of_hidden, products[1]) if known else None
                asked = x, gate_up, gate_up_scale, down, down_scale, scaling, activation, *how
                native.tell("quantized_mlp", asked, steps)
    return d.view(*x.shape[:-1], d.shape[-1])


def _fuses(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, scaling: str, backend: str) -> bool:
    """Whether the first product quantizes the hidden layer.

    For TMA, x and its weight are padded where 16 does not divide in_features. Where 128 does not divide the hidden
    features, the last tile has no whole block of columns of gate and up.
    """
    count, hidden = len(rows), down.shape[1]
    if scaling != "blocks" or count < FUSED_ROWS or gate_up.shape[1] % 16 or hidden % BLOCK:
        return False
    return _serves(rows.device, backend, -(-count // FUSED_TILE) * -(-hidden // FUSED_TILE))


def _serves(device: torch.device, backend: str, tiles: int) -> bool:
    """Whether kernels for this device quantize, and so many tiles are enough for its SMs; on the CPU only with
    backend="cute", in the emulator.
    """
    if device.type != "cuda":
        return backend == "cute"
    arch = Arch.of_device(device.index)
    return backend in ("auto", "cute") and arch.capability == (9, 0) and tiles >= FUSED_SHARE * arch.sm_count


def _factor(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The second operand of a product, and its scales."""
    return weight.t(), scale.t() if scale.dim() else scale


def _product(given: tuple[Any, Any], factor: tuple[Any, Any], how: How, **options: Any) -> Any:
    (a, of_a), (b, of_b) = given, factor
    return gemm(a, b, scale_a=of_a, scale_b=of_b, **how._asdict(), **options)


def _launch(given: tuple[Any, Any], factor: tuple[Any, Any], dtype: Any, how: How, epilogue: Any = None) -> Any:
    (a, of_a), (b, of_b) = given, factor
    return scaled.launch_of(a, b, of_a, of_b, None, None, dtype, how, epilogue)


@lru_cache(maxsize=64)
def _quantizing(activation: str, to: torch.dtype, dtype: torch.dtype) -> Callable[[Any], Any]:
    """The epilogue that gates, rounds to a dtype and quantizes. It captures no tensor, so it is traced only once."""
    gate = GATES[activation]
    return lambda acc: ops.quantize(ops.cast(gate(acc), to), dtype)


def _check(
    x: Any, gate_up: Any, gate_up_scale: Any, down: Any, down_scale: Any, scaling: str, activation: str, how: How
) -> None:
    """Raises TypeError or ValueError naming the argument."""
    tensors = {"gate_up": gate_up, "gate_up_scale": gate_up_scale, "down": down, "down_scale": down_scale}
    check_call(x, tensors, scaling, how)
    if not request.is_one_of(activation, GATES):
        accepted = ", ".join(map(repr, GATES))
        raise ValueError(f"activation: got {request.shown(activation)}, accepted are {accepted}")
    for name, weight, scale in (("gate_up", gate_up, gate_up_scale), ("down", down, down_scale)):
        if weight.dtype not in FORMATS:
            raise TypeError(f"{name}: got dtype {weight.dtype}, accepted are {ACCEPTED}")
        if weight.dim() != 2:
            raise ValueError(f"{name}: got shape {tuple(weight.shape)}, expected a matrix")
        rows, blocks = weight.shape[0], -(-weight.shape[1] // BLOCK)
        accepted_shapes = (), (rows, 1), (-(-rows // BLOCK), blocks), (rows, blocks)
        if scale.dtype != torch.float32 or tuple(scale.shape) not in accepted_shapes:
            raise ValueError(
                f"{name}_scale: got {scale.dtype} of shape {tuple(scale.shape)}, accepted are torch.float32 of the "
                f"shapes {', '.join(map(str, dict.fromkeys(accepted_shapes)))}"
            )
    torch._check_value(
        gate_up.shape[0] == 2 * down.shape[1],
        lambda: (
            f"down: got shape {tuple(down.shape)} beside gate_up of {tuple(gate_up.shape)}, expected half as many "
            "columns as gate_up has rows"
        ),
    )
    torch._check_value(
        x.dim() > 0 and x.shape[-1] == gate_up.shape[1],
        lambda: f"x: got shape {tuple(x.shape)}, expected (..., {gate_up.shape[1]}), as gate_up has it",
    )


def _compute(
    x, gate_up, gate_up_scale, down, down_scale, scaling="rows", activation="swiglu", *how, tell=False
) -> torch.Tensor:
    with torch.no_grad(), torch._C._DisableAutocast():
        return composed(x, gate_up, gate_up_scale, down, down_scale, scaling, activation, *how, tell=tell)


def _fake(x, gate_up, gate_up_scale, down, down_scale, scaling="rows", activation="swiglu", *how):
    _check(x, gate_up, gate_up_scale, down, down_scale, scaling, activation, How(*how))
    return x.new_empty((*x.shape[:-1], down.shape[0]))


define(
    f"{NAME}(Tensor x, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale, str scaling='rows', "
    f"str activation='swiglu', {schema()}) -> Tensor",
    _compute, _fake,
)  # fmt: skip
serve_natively(NAME, _compute, refuse_gradients(NAME))
sharding.handle(NAME, _compute)  # of `quantize` and `gemm`, which have rules
torch.library.register_vmap(f"cutegemm::{NAME}", vmapped_over_input(NAME), lib=LIBRARY)


@register_flop_formula(torch.ops.cutegemm.quantized_mlp)
def _flops(x_shape: Any, gate_up: Any, of_gate_up: Any, down: Any, *rest: Any, **options: Any) -> int:
    """Of both products, for torch's FlopCounterMode."""
    return int(2 * math.prod(x_shape[:-1]) * (math.prod(gate_up) + math.prod(down)))
