"""The public calls `quantize` and `dequantize`: matrices to 8 bits and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cutegemm import native
from cutegemm.problem import overlap, quantization_request, request
from cutegemm.pytorch import transforms
from cutegemm.pytorch.dispatch import is_dispatched
from cutegemm.run import quantizing

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_tracing = torch._C._is_tracing
_has_transforms = torch._C._are_functorch_transforms_active
_BLOCK = quantization_request.DEFAULT_BLOCK


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: str | None = None,
    *,
    dim: int = -1,
    block: Sequence[int] = quantization_request.DEFAULT_BLOCK,
    scale: torch.Tensor | None = None,
    out: Any = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales) such that x is about values * scales, in 8 bits.

        scale = max(amax / largest, 2^-126)       amax: the largest |x| of the elements that share a scale
        value = round(x * (1 / scale))            to nearest even, saturating

    `largest` is 448 for e4m3, 57344 for e5m2, 127 for int8. Division, reciprocal and product are each rounded once, in
    fp32: CPU, GPU and emulator give the same bits, and the same call with these scales as `scale` gives these values.

    Args:
        x: (M, K) or (L, M, K), fp16, bf16 or fp32, any strides that torch allows.
        dtype: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8.
        scaling: "rows" (the default): a scale for each row of K elements; "tensor": one; "blocks": see `block`.
        dim: the dimension of K: -1, or -2 for a second operand (K, N), whose scales are then for columns.
        block: extents of a block, the latter along K: (1, 128) for activations, (128, 128) for weights. Only
            scaling="blocks" takes the latter.
        scale: given scales, fp32, positive, of x's dimensions or (): of each extent 1, that of x, or one for every 128
            elements. x is then read once, whatever the scaling. A scale that is 0, negative or NaN is not refused.
        out: (values, scales) to write into; with `scale`, the values alone. Values must be contiguous along K.
        backend: "auto", "cute" (on CPU tensors in the emulator) or "torch".

    Returns:
        values: x's shape, contiguous along K as tensor cores read it. Where 16 does not divide K, rows are padded in
            memory to a multiple of 16 bytes, as TMA needs it: then the tensor is a view of a larger one.
        scales: fp32: () for "tensor"; (M, 1) for "rows"; (M, ceil(K / 128)) or (ceil(M / 128), ceil(K / 128)) for
            "blocks"; with dim=-2 (1, N), (ceil(K / 128), N) or (ceil(K / 128), ceil(N / 128)); a batch in front. With
            `scale`, that tensor.

    An infinity counts as the largest finite fp32 number in amax, and saturates. NaN: in fp8 it is left out of amax, and
    stays NaN; int8 has none: the values of its group are all 0 and their scale NaN, so that it shows in every product
    (with a given `scale` its value alone is 0, and nothing shows). A group of zeros has the scale 2^-126. An empty K
    gives that scale too.

    On a GPU it is one launch that reads x once where a group fits into a CTA's registers: rows of up to 32768 elements
    in 16 bits (16384 in fp32) that are contiguous, and all blocks. Otherwise, for tensor scaling and for long or
    strided rows, it is two launches, which read x twice, of which the L2 cache holds a part. Bytes of one launch for
    16-bit x: 2 read and 1 written an element, and the scales; a copy of x moves 4. docs/quantization.md has times.

    No gradient is recorded: x or scale that requires grad is refused under autograd. torch.compile sees the operators
    torch.ops.cutegemm.quantize and quantize_given. torch.vmap quantizes one element after the other. Call once before
    capturing a CUDA graph.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted.
        UnsupportedError: fp8 on a GPU of compute capability below 8.9, any kernel below 8.0.
        GemmError: a kernel could not be compiled, loaded or launched, or is not compiled yet during graph capture.
        RuntimeError: x or scale requires grad.
        NotImplementedError: x or scale carries a tangent of forward mode.
    """
    tell = False
    if (
        out is None
        and dim.__class__ is int
        and dim == -1
        and block is _BLOCK
        and not _is_dynamo_compiling()
        and native.quantize is not None
    ):
        found = native.quantize(x, dtype, scaling, scale, backend)
        if found is not None and not (tell := found is NotImplemented):
            return found
    pair = _pair(out, scale)
    if _is_dynamo_compiling() or _is_tracing() or is_dispatched(x, scale, *(pair or ())):
        return _quantize_by_operator(x, dtype, scaling, dim, block, scale, pair, backend)
    if _has_transforms() and transforms.active(x, scale, *(pair or ())):
        transforms.refuse({"x": x, "scale": scale}, pair)
        return _quantize_by_operator(x, dtype, scaling, dim, block, scale, pair, backend)
    return quantizing.quantize(x, dtype, scaling, dim, block, scale, pair, backend, tell)


def _pair(out: Any, scale: Any) -> tuple[Any, Any] | None:
    if out is None:
        return None
    if scale is not None:
        if isinstance(out, torch.Tensor):
            return out, scale
        raise TypeError(f"out: got {type(out).__name__}, expected the tensor for the values alone, as scale is given")
    if isinstance(out, tuple) and len(out) == 2:
        return out
    raise TypeError(f"out: got {type(out).__name__}, expected a tuple of two tensors, (values, scales)")


def _quantize_by_operator(
    x: Any, dtype: Any, scaling: Any, dim: int, block: Any, scale: Any, out: Any, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The call as torch's operators; see pytorch/quantize_operator.py. torch.compile puts these into its graph."""
    operators = torch.ops.cutegemm
    if scale is not None:
        quantization_request.refuse_beside_scale(scaling, block)
        if out is None:
            return operators.quantize_given(x, scale, dtype, dim, backend), scale
        overlap.check_identity(out[0], {"x": x, "scale": scale})
        operators.quantize_given_out(x, scale, dim, backend, out[0])
        return out[0], scale
    scaling = "rows" if scaling is None else scaling
    if out is None:
        values, scales = operators.quantize(x, dtype, scaling, dim, list(block), backend)
        return values, scales
    overlap.check_identity(out[0], {"x": x})
    operators.quantize_out(x, scaling, dim, list(block), backend, *out)
    return out[0], out[1]


def dequantize(
    values: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """values * scale, multiplied in fp32 and rounded once.

    Args:
        values: (M, K) or (L, M, K), torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8, any strides (without a unit
            stride they are copied first).
        scale: as `quantize` returns it: fp32, () or of values' dimensions, each of extent 1, that of the values, or one
            for every 128 elements; any strides.
        dtype: of the result: fp16, bf16 or fp32.
        out: the result is written here, in its own dtype, whatever `dtype` says; contiguous along the dimension along
            which the values are.
        backend: as in `quantize`.

    Returns:
        The values' shape, compact, of the major of `values`.

    Raises:
        As `quantize`.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: got {request.shown(dtype)}, expected a torch.dtype")
    if isinstance(out, torch.Tensor) and out.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"out: got dtype {out.dtype}, accepted are torch.float16, torch.bfloat16, torch.float32")
    if _is_dynamo_compiling() or _is_tracing() or is_dispatched(values, scale, out):
        if out is None:
            return torch.ops.cutegemm.dequantize(values, scale, dtype, backend)
        overlap.check_identity(out, {"values": values, "scale": scale})
        torch.ops.cutegemm.dequantize_out(values, scale, backend, out)
        return out
    if _has_transforms() and transforms.active(values, scale, out):
        transforms.refuse({"values": values, "scale": scale}, out)
        return torch.ops.cutegemm.dequantize(values, scale, dtype, backend)
    return quantizing.dequantize(values, scale, dtype if out is None else _dtype_of(out, dtype), out, backend)


def _dtype_of(out: Any, dtype: Any) -> Any:
    return out.dtype if isinstance(out, torch.Tensor) else dtype
