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
from cutegemm.layer_operator import GATES, backend_of, vmapped_over_input
from cutegemm.linear import as_rows
from cutegemm.problem import request
from cutegemm.problem.quantization import BLOCK, FORMATS
from cutegemm.pytorch import scaled, sharding
from cutegemm.pytorch.registering import LIBRARY, define, refuse_gradients, serve_natively
from cutegemm.quantize import quantize
from cutegemm.run import fused, quantizing
from cutegemm.run.how import How, schema

NAME = "quantized_mlp"
FUSED_ROWS = 96
"""Rows from which on the first product quantizes the hidden layer: the fastest tiles of fewer rows have operands
swapped, and quantize nothing (docs/fp8.md#a-hidden-layer-that-its-product-quantizes)."""
FUSED_TILE, FUSED_SHARE = 128, 0.55
"""Rows, and columns of the hidden layer, of a tile that quantizes, and the share of the SMs that such tiles fill at
least: smaller results have smaller tiles, which are faster."""


def composed(
    x: Any, gate_up: Any, gate_up_scale: Any, down: Any, down_scale: Any, scaling: str, activation: str, *options: Any,
    tell: bool = False,
) -> torch.Tensor:  # fmt: skip
    """act(x gate^T) * (x up^T) times down^T by `quantize` and `gemm`, x of any dimensions.

    scaling: of x and of the hidden layer. activation: one of `GATES`. options: those of a `How`. tell: whether the C++
    part asks how all is launched.
    """
    how = How(*options)
    rows, by = as_rows(x), backend_of(how.backend)
    first, second = _factor(gate_up, gate_up_scale), _factor(down, down_scale)
    # Other hidden features leave tiles without whole blocks of columns of gate and up.
    fits = scaling == "blocks" and gate_up.shape[1] % 16 == 0 and down.shape[1] % BLOCK == 0
    fuses = fits and len(rows) >= FUSED_ROWS and _quantizes(x.device, how.backend, len(rows), down.shape[1])
    epilogue = _quantizing(activation, x.dtype, down.dtype) if fuses else GATES[activation]
    dtype = None if fuses else x.dtype
    given = quantize(rows, gate_up.dtype, scaling, backend=by)
    found = _product(given, first, how, epilogue=epilogue, out_dtype=dtype)
    hidden = found if fuses else quantize(found, down.dtype, scaling, backend=by)
    d = _product(hidden, second, how, out_dtype=x.dtype)
    if tell:
        with fused.planning():
            steps = (
                quantizing.launches(rows, scaling, None, by, given),
                _launch(given, first, dtype, how, epilogue),
                None if fuses else quantizing.launches(found, scaling, None, by, hidden),
                _launch(hidden, second, x.dtype, how),
            )
            asked = x, gate_up, gate_up_scale, down, down_scale, scaling, activation, *how
            if NotImplemented not in steps:
                needed = steps[:2] + steps[3 if fuses else 2 :]
                native.install_quantized_mlp(asked, None if None in needed else steps)
    return d.view(*x.shape[:-1], d.shape[-1])


def _factor(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The second operand of a product, and its scales."""
    return weight.t(), scale.t() if scale.dim() else scale


def _product(given: tuple[Any, Any], factor: tuple[Any, Any], how: How, **options: Any) -> Any:
    (a, of_a), (b, of_b) = given, factor
    return gemm(a, b, scale_a=of_a, scale_b=of_b, **how._asdict(), **options)


def _launch(given: tuple[Any, Any], factor: tuple[Any, Any], dtype: Any, how: How, epilogue: Any = None) -> Any:
    (a, of_a), (b, of_b) = given, factor
    return scaled.launch_of(a, b, of_a, of_b, None, None, dtype, how, epilogue)


def _epilogue(activation: str, to: torch.dtype, dtype: torch.dtype) -> Callable[[Any], Any]:
    """The epilogue that gates, rounds to a dtype and quantizes. It captures no tensor: then it is traced once."""
    gate = GATES[activation]
    return lambda acc: ops.quantize(ops.cast(gate(acc), to), dtype)


_quantizing = lru_cache(maxsize=64)(_epilogue)


def _quantizes(device: torch.device, backend: str, rows: int, hidden: int) -> bool:
    """Whether kernels for this device quantize such results; on the CPU with backend="cute", in the emulator."""
    if device.type != "cuda":
        return backend == "cute"
    arch = Arch.of_device(device.index)
    tiles = -(-rows // FUSED_TILE) * -(-hidden // FUSED_TILE)
    return backend in ("auto", "cute") and arch.capability == (9, 0) and tiles >= FUSED_SHARE * arch.sm_count


def _check(x: Any, gate_up: Any, down: Any, activation: str) -> None:
    """Raises TypeError or ValueError naming the argument; `quantize` and `gemm` check scales and options."""
    if not request.is_one_of(activation, GATES):
        accepted = ", ".join(map(repr, GATES))
        raise ValueError(f"activation: got {request.shown(activation)}, accepted are {accepted}")
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.dtype not in FORMATS or weight.dim() != 2:
            raise ValueError(
                f"{name}: got {weight.dtype} of shape {tuple(weight.shape)}, expected a matrix of fp8 or int8"
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
    _check(x, gate_up, down, activation)
    with torch.no_grad(), torch._C._DisableAutocast():
        return composed(x, gate_up, gate_up_scale, down, down_scale, scaling, activation, *how, tell=tell)


def _fake(x, gate_up, gate_up_scale, down, down_scale, scaling="rows", activation="swiglu", *how):
    How(*how).check()
    _check(x, gate_up, down, activation)
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
