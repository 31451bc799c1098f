"""`cutegemm.quantize` and `dequantize` of plain tensors: checks, memory for the results, then kernels or torch."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.autograd import forward_ad

from cutegemm import native
from cutegemm.choice.plan import Memo
from cutegemm.problem import quantization_request
from cutegemm.problem.quantization import new_values, original, scale_of, values_of
from cutegemm.run import runner
from cutegemm.run.call import PLAIN

_remembered = Memo(limit=4096)
_BOTH = {"v", "s"}
"""What a call with new results writes: values and scales."""


def quantize(
    x: torch.Tensor, dtype: torch.dtype, scaling: str | None, dim: int, block: Any, scale: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor] | None, backend: str, tell: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`cutegemm.quantize` of plain tensors, with no regard to tracing. With a given scale `out` has it too.

    tell: whether the C++ part, which computes such calls, asks how it is launched.
    """
    if tell:
        return _told(x, dtype, scaling, dim, block, scale, backend)
    key = _key(x, dtype, scaling, dim, block, backend) if scale is None and out is None else None
    known = _remembered.get(key)
    if known is not None and not (x.requires_grad and torch.is_grad_enabled()) and forward_ad._current_level < 0:
        plan, kernels, shape, turned = known
        values = new_values(tuple(x.shape), turned, dtype, x.device)
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)
        kernels.run(plan, x, values, scales, _BOTH)
        return values, scales
    quantization_request.check_backend(backend)
    quantization_request.check_plain(x=x, scale=scale)
    asked = quantization_request.describe(x, dtype, scaling, dim, block, scale)
    quantization_request.refuse_gradient("x", x)
    if scale is not None:
        quantization_request.refuse_gradient("scale", scale)
    if out is None:
        values = new_values(tuple(x.shape), asked.turned, dtype, x.device)
        scales = scale if scale is not None else torch.empty(asked.scales, dtype=torch.float32, device=x.device)
    else:
        values, scales = out
        inputs = {"x": x, "scale": scale}
        quantization_request.check_out("out[0]", values, tuple(x.shape), dtype, inputs, -2 if asked.turned else -1)
        if scale is None:
            inputs["out[0]"] = values
            quantization_request.check_out("out[1]", scales, asked.scales, torch.float32, inputs)
    x_k, v_k, s_k = (each.mT if asked.turned and each.dim() else each for each in (x, values, scales))
    if _by_kernels(backend, x) and x.numel():
        from cutegemm.run import quantize_kernels  # with the kernel families, when one is first needed

        plan = quantize_kernels.quantized(x_k, v_k, s_k, asked.format, asked.group)
        if key is not None:
            _remembered.put(key, (plan, quantize_kernels, asked.scales, asked.turned))
    else:
        with torch.no_grad():
            if asked.group is not None:
                s_k.copy_(scale_of(x_k, asked.format, asked.group))
            v_k.copy_(values_of(x_k, s_k, asked.format))
    _tell_autograd(out)
    return values, scales


def _told(
    x: torch.Tensor, dtype: torch.dtype, scaling: str | None, dim: int, block: Any, scale: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same of a call with new results along the last dimension, which the C++ part is told how to launch."""
    quantization_request.check_backend(backend)
    found = quantize(x, dtype, scaling, dim, block, scale, None, backend)
    native.tell("quantize", (x, dtype, scaling, scale, backend), launches(x, scaling, scale, backend, found))
    return found


def launches(
    x: torch.Tensor, scaling: str | None, scale: torch.Tensor | None, backend: str,
    found: tuple[torch.Tensor, torch.Tensor],
) -> tuple[Any, ...] | None:  # fmt: skip
    """How the C++ part launches the call that gave these results, along the last dimension and in blocks of 1 x 128;
    None: it needs Python.
    """
    if not (_by_kernels(backend, x) and x.numel() and x.device != runner._CPU):
        return None
    from cutegemm.run import quantize_kernels

    values, scales = found
    asked = quantization_request.describe(x, values.dtype, scaling, -1, quantization_request.DEFAULT_BLOCK, scale)
    plan = quantize_kernels.plan_of(x, values, scales, asked.format, asked.group)
    return quantize_kernels.told(plan, values, scales if scale is None else None)


native.of_quantize = (None, *quantization_request.SCALINGS), quantization_request.BACKENDS


def _key(x: Any, dtype: Any, scaling: Any, dim: Any, block: Any, backend: Any) -> Any:
    """All that the kernels of a call depend on that has new results; None where something about it is strange."""
    try:
        found = (
            x.shape, x.stride(), x.dtype, x.device, (p := x.data_ptr()) and p & 63 | 64, x.is_neg(), dtype, scaling,
            dim, None if block is None else tuple(block), backend,
            None if x.is_cuda else os.environ.get("CUTEGEMM_ARCH"),
        )  # fmt: skip
        hash(found)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return found if x.__class__ in PLAIN else None


def dequantize(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None, backend: str
) -> torch.Tensor:
    """`cutegemm.dequantize` of plain tensors, with no regard to tracing."""
    quantization_request.check_backend(backend)
    quantization_request.check_plain(values=values, scale=scale)
    format = quantization_request.describe_values(values, scale, dtype)
    quantization_request.refuse_gradient("scale", scale)
    turned = is_turned(values)
    if out is None:
        x = new_like(values, dtype)
    else:
        x = out
        inputs = {"values": values, "scale": scale}
        quantization_request.check_out("out", x, tuple(values.shape), dtype, inputs, -2 if turned else -1)
    if turned:
        values, scale, x_k = values.mT, scale.mT if scale.dim() else scale, x.mT
    else:
        x_k = x
    with torch.no_grad():
        if not (_by_kernels(backend, values) and values.numel()):
            x_k.copy_(original(values, scale, dtype))
        else:
            from cutegemm.run.quantize_kernels import Lies, restored

            restored(values if Lies.of(values).along_k else values.contiguous(), scale, x_k, format)
    _tell_autograd((out,) if out is not None else None)
    return x


def is_turned(values: torch.Tensor) -> bool:
    """Whether columns are contiguous, and rows are not."""
    return values.stride(-2) == 1 and values.stride(-1) != 1


def new_like(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a compact matrix of the major of `values`."""
    shape = values.mT.shape if is_turned(values) else values.shape
    found = torch.empty(shape, dtype=dtype, device=values.device)
    return found.mT if is_turned(values) else found


def _by_kernels(backend: str, tensor: torch.Tensor) -> bool:
    return backend == "cute" or (backend == "auto" and tensor.device != runner._CPU)


def _tell_autograd(out: tuple[torch.Tensor, ...] | None) -> None:
    if out is not None:
        torch.autograd.graph.increment_version(out)
