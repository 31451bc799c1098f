"""What a mixture takes: the checks of the arguments of `moe` and of the modules that compute one."""

from __future__ import annotations

from typing import Any

import torch

from cutegemm import backend as backends
from cutegemm import gating
from cutegemm.problem import request
from cutegemm.problem.grouped_request import MOST_GROUPS
from cutegemm.pytorch import autocast

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ACCEPTED = ", ".join(map(str, DTYPES))
_TURNED = "; of weights that lie the other way pass .mT"


def check(
    x: Any, experts: Any, weights: Any, w_gate_up: Any, w_down: Any, activation: Any, precision: Any, backend: Any
) -> None:
    """Raises TypeError or ValueError naming the argument, what was given and what is accepted."""
    tensors = {"x": x, "experts": experts, "weights": weights, "w_gate_up": w_gate_up, "w_down": w_down}
    check_types(tensors)
    if not autocast.is_on(x.device.type):
        for name in ("w_gate_up", "w_down"):
            if tensors[name].dtype != x.dtype:
                raise TypeError(f"{name}: got dtype {tensors[name].dtype}, expected that of x, {x.dtype}")
    gating.check_form(activation, False)
    check_precision(precision)
    backends.check_name(backend)
    check_shapes(x, experts, weights, w_gate_up, w_down)


def check_precision(precision: Any) -> None:
    """Raises ValueError for a precision that mixtures have not, with which every call would fail."""
    request.check_precision(precision)
    if precision not in (None, "ieee"):
        raise ValueError(f"precision: got {precision!r}; a mixture, whose rows are gathered, accepts None and 'ieee'")


def check_types(tensors: dict[str, Any]) -> None:
    """Raises TypeError or ValueError unless these are what a mixture takes, on the device of the first; by name, those
    that are not `experts` of a floating dtype.
    """
    first, x = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        request.check_type(name, tensor)
        if tensor.layout != torch.strided or tensor.is_nested:
            raise TypeError(f"{name}: got a nested tensor, or layout {tensor.layout}; expected a dense (strided) one")
        if name == first and x.device.type not in ("cuda", "cpu", "meta"):
            raise ValueError(f"{name}: it is on {x.device}, accepted are CUDA and CPU tensors")
        request.check_device(name, tensor, x.device, first)
        if not torch.compiler.is_dynamo_compiling() and tensor.is_neg():
            raise ValueError(f"{name}: it is a lazily negated view; call .resolve_neg()")
        if name != "experts" and tensor.dtype not in DTYPES:
            swapped = "; experts come before weights" if name == "weights" and not tensor.is_floating_point() else ""
            raise TypeError(f"{name}: got dtype {tensor.dtype}, accepted are {_ACCEPTED}{swapped}")
    experts = tensors["experts"]
    if experts.dtype != torch.int64 and experts.dtype != torch.int32:
        raise TypeError(f"experts: got dtype {experts.dtype}, accepted are torch.int64, torch.int32")


def check_chosen(first: str, x: Any, experts: Any, weights: Any) -> None:
    """Raises ValueError unless experts and weights have shapes that fit x, the argument `first`."""
    if experts.dim() != x.dim() or experts.shape[:-1] != x.shape[:-1] or experts.shape[-1] == 0:
        raise ValueError(
            f"experts: got shape {tuple(experts.shape)}, expected that of {first}, {tuple(x.shape)}, with top_k of 1 "
            "or more in place of its last extent"
        )
    if weights.shape != experts.shape:
        raise ValueError(f"weights: got shape {tuple(weights.shape)}, expected that of experts, {tuple(experts.shape)}")


def check_shapes(x: Any, experts: Any, weights: Any, w_gate_up: Any, w_down: Any) -> None:
    """Raises ValueError naming the argument whose shape does not fit the others'."""
    if x.dim() < 1:
        raise ValueError("x: got no dimension, expected (..., H)")
    dims, rows = w_gate_up.dim(), w_gate_up.shape[1:-1]
    stacked = (dims == 3 and rows[0] % 2 == 0) or (dims == 4 and rows[0] == 2)
    if not stacked or w_gate_up.shape[-1] != x.shape[-1]:
        turned = dims == 3 and w_gate_up.shape[1] == x.shape[-1]
        raise ValueError(
            f"w_gate_up: got shape {tuple(w_gate_up.shape)}, expected (E, 2 F, {x.shape[-1]}) with x of shape "
            f"{tuple(x.shape)}{_TURNED if turned else ''}"
        )
    count, hidden = w_gate_up.shape[0], rows[0] // 2 if dims == 3 else rows[1]
    if not 1 <= count <= MOST_GROUPS:
        raise ValueError(f"w_gate_up: got {count} experts, accepted are 1 to {MOST_GROUPS}")
    if w_down.dim() != 3 or w_down.shape[0] != count or w_down.shape[2] != hidden:
        turned = w_down.dim() == 3 and w_down.shape[1] == hidden
        raise ValueError(
            f"w_down: got shape {tuple(w_down.shape)}, expected ({count}, H_out, {hidden}) with w_gate_up of shape "
            f"{tuple(w_gate_up.shape)}{_TURNED if turned else ''}"
        )
    check_chosen("x", x, experts, weights)
