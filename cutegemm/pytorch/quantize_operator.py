"""torch.ops.cutegemm.quantize, quantize_given, dequantize and their `_out` forms, which torch.compile and opcheck know.

An operator may not return one of its inputs, so a given scale has an operator of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from cutegemm.problem import quantization_request
from cutegemm.problem.quantization import new_values
from cutegemm.pytorch import sharding_quantize  # noqa: F401  how DTensors are quantized
from cutegemm.pytorch.registering import define, refuse_gradients, serve_natively
from cutegemm.run import quantizing

_SCHEMAS = {
    "quantize": "Tensor x, ScalarType dtype, str scaling='rows', int dim=-1, int[] block=[1, 128], str backend='auto'"
    ") -> (Tensor, Tensor",
    "quantize_out": "Tensor x, str scaling, int dim, int[] block, str backend, Tensor(a!) values, Tensor(b!) scales"
    ") -> (",
    "quantize_given": "Tensor x, Tensor scale, ScalarType dtype, int dim=-1, str backend='auto') -> (Tensor",
    "quantize_given_out": "Tensor x, Tensor scale, int dim, str backend, Tensor(a!) values) -> (",
    "dequantize": "Tensor values, Tensor scale, ScalarType dtype, str backend='auto') -> (Tensor",
    "dequantize_out": "Tensor values, Tensor scale, str backend, Tensor(a!) out) -> (",
}


_SERVED = "quantize", "quantize_given"
"""Those that the C++ part serves."""


def _quantize(x, dtype, scaling="rows", dim=-1, block=(1, 128), backend="auto", tell=False):
    return quantizing.quantize(x, dtype, scaling, dim, tuple(block), None, None, backend, tell)


def _quantize_out(x, scaling, dim, block, backend, values, scales) -> None:
    quantizing.quantize(x, values.dtype, scaling, dim, tuple(block), None, (values, scales), backend)


def _quantize_given(x, scale, dtype, dim=-1, backend="auto", tell=False):
    return quantizing.quantize(x, dtype, None, dim, None, scale, None, backend, tell)[0]


def _quantize_given_out(x, scale, dim, backend, values) -> None:
    quantizing.quantize(x, values.dtype, None, dim, None, scale, (values, scale), backend)


def _dequantize(values, scale, dtype, backend="auto"):
    return quantizing.dequantize(values, scale, dtype, None, backend)


def _dequantize_out(values, scale, backend, out) -> None:
    quantizing.dequantize(values, scale, out.dtype, out, backend)


def _fake_quantize(x, dtype, scaling="rows", dim=-1, block=(1, 128), backend="auto"):
    asked = quantization_request.describe(x, dtype, scaling, dim, tuple(block), None)
    scales = torch.empty(asked.scales, dtype=torch.float32, device=x.device)
    return new_values(tuple(x.shape), asked.turned, dtype, x.device), scales


def _fake_quantize_out(x, scaling, dim, block, backend, values, scales) -> None:
    asked = quantization_request.describe(x, values.dtype, scaling, dim, tuple(block), None)
    _check_shape("out", values, tuple(x.shape))
    _check_shape("out[1]", scales, asked.scales)


def _fake_quantize_given(x, scale, dtype, dim=-1, backend="auto"):
    asked = quantization_request.describe(x, dtype, None, dim, None, scale)
    return new_values(tuple(x.shape), asked.turned, dtype, x.device)


def _fake_quantize_given_out(x, scale, dim, backend, values) -> None:
    quantization_request.describe(x, values.dtype, None, dim, None, scale)
    _check_shape("out", values, tuple(x.shape))


def _fake_dequantize(values, scale, dtype, backend="auto"):
    quantization_request.describe_values(values, scale, dtype)
    return quantizing.new_like(values, dtype)


def _fake_dequantize_out(values, scale, backend, out) -> None:
    quantization_request.describe_values(values, scale, out.dtype)
    _check_shape("out", out, tuple(values.shape))


def _check_shape(name: str, tensor: Any, shape: tuple[Any, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {shape}")


def _define(name: str) -> None:
    kernel, fake = globals()[f"_{name}"], globals()[f"_fake_{name}"]
    define(f"{name}({_SCHEMAS[name]})", kernel, fake)
    recorded = refuse_gradients(name)
    if name in _SERVED:
        serve_natively(name, kernel, recorded)


for _name in _SCHEMAS:
    _define(_name)
