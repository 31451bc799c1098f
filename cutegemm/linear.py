"""`linear`: torch.nn.functional.linear by these kernels, with the activation fused."""

from __future__ import annotations

from typing import Any

import torch

from cutegemm import native
from cutegemm.gemm import gemm
from cutegemm.problem import request
from cutegemm.pytorch import sharded
from cutegemm.pytorch.native_gradients import mergeable
from cutegemm.run import float32

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    precision: str | None = None,
    backend: str = "auto",
    constant_weight: bool = False,
) -> torch.Tensor:
    """activation(x @ weight^T + bias), as torch.nn.functional.linear, rounded once.

    Args:
        x: (..., K), any dtype that `gemm` accepts; any number of leading dimensions, also none, of any extents, also 0.
        weight: (N, K), or (K,) for a result without its last dimension; dtype and device of x.
        bias: (N,) or (), of any dtype that `gemm` accepts.
        activation: as in `gemm`.
        constant_weight: promises that no running kernel writes the weight, as `gemm(..., constant="b")` does.
        precision, backend: as in `gemm`. float32 is IEEE by default, whatever torch's TF32 switch says; see
            `set_float32_precision`.

    Returns:
        (..., N), contiguous, of x's dtype (under autocast, of autocast's); bf16 of fp8 x, int32 of int8 x.

    Leading dimensions are merged without a copy where x's strides allow it; three dimensions never need one.
    Gradients of x, weight and bias, autocast and torch.compile: as `gemm`.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted.
        UnsupportedError, GemmError: as `gemm`.
    """
    if precision is None and float32.in_use:
        precision = float32.default(x, backend)
    if constant_weight is not False and constant_weight is not True:
        raise TypeError(f"constant_weight: got {type(constant_weight).__name__}, accepted are True and False")
    constant = "b" if constant_weight else None
    if not _is_dynamo_compiling() and (serves := native.linear) is not None:
        d = serves(x, weight, bias, activation, precision, backend, None, constant)
        if d is not None:
            return d
    try:
        if weight.dim() == 2 and (bias is None or bias.dim() == 1):
            if x.dim() == 2 or (x.dim() == 3 and not _merges(x)):
                return gemm(
                    x, weight.t(), bias=bias, activation=activation, precision=precision, backend=backend,
                    constant=constant,
                )  # fmt: skip
            if x.dim() > 0:
                rows = as_rows(x)
                d = gemm(
                    rows, weight.t(), bias=bias, activation=activation, precision=precision, backend=backend,
                    constant=constant,
                )  # fmt: skip
                return d.view(*x.shape[:-1], weight.shape[0])
        return _unusual(x, weight, bias, activation, precision, backend, constant_weight)
    except (TypeError, ValueError, AttributeError, RuntimeError) as why:
        if not torch.compiler.is_dynamo_compiling():
            _check(x, weight, bias, why)
        raise


def _merges(x: torch.Tensor) -> bool:
    """Whether the two leading dimensions of x (L, M, K) become one without a copy, and for a DTensor without gathering
    a sharded M.
    """
    merges = mergeable(x)
    if not merges or _is_dynamo_compiling() or not sharded.is_distributed(x):
        return merges
    return x.shape[1] == 1 or not (any(each.is_shard(1) for each in x.placements) or sharded.uneven_dims(x, range(2)))


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., K) as (rows, K)."""
    if not _is_dynamo_compiling():
        x = sharded.merging(x, range(x.dim() - 1))
    return x.reshape(_leading_extent(x), x.shape[-1])


def _leading_extent(x: torch.Tensor) -> int:
    """The product of the leading extents: -1 cannot be inferred of an empty tensor."""
    count = 1
    for extent in x.shape[:-1]:
        count *= extent
    return count


def _unusual(
    x: Any, weight: Any, bias: Any, activation: Any, precision: Any, backend: Any, constant_weight: bool
) -> torch.Tensor:
    """A weight of one row, or a bias of one number."""
    if bias is not None and bias.dim() == 0:
        bias = bias.expand(weight.shape[0] if weight.dim() == 2 else 1)
    elif weight.dim() == 1 and bias is not None:
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, expected () with a weight of one dimension")
    elif bias is not None and bias.dim() != 1:
        raise ValueError(f"bias: got {bias.dim()} dimensions, accepted are 1, (N,), and 0")
    if weight.dim() not in (1, 2):
        raise ValueError(f"weight: got {weight.dim()} dimensions, accepted are 2, (N, K), and 1, (K,)")
    if x.dim() == 0:
        raise ValueError("x: got no dimension, expected (..., K)")
    options: dict[str, Any] = {"precision": precision, "backend": backend, "constant_weight": constant_weight}
    if weight.dim() == 1:
        return linear(x, weight.unsqueeze(0), bias, activation, **options).squeeze(-1)
    return linear(x, weight, bias, activation, **options)


def _check(x: Any, weight: Any, bias: Any, why: Exception) -> None:
    """Raises what is wrong in the terms of `linear`, for what `gemm` would name otherwise."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) and not (name == "bias" and tensor is None):
            raise request.no_tensor(name, tensor) from None
        if isinstance(tensor, torch.Tensor) and tensor.is_nested:
            raise TypeError(f"{name}: got a nested tensor, expected a dense one; call .to_padded_tensor()") from None
    sharded.refuse_mixed("cutegemm.linear", x=x, weight=weight, bias=bias)
    text = str(why)
    if weight.dim() == 2 and x.dim() > 0 and weight.shape[1] != x.shape[-1] and text.startswith("b: got shape"):
        raise ValueError(
            f"weight: got shape {tuple(weight.shape)}; with x of shape {tuple(x.shape)} its last extent must be "
            f"K = {x.shape[-1]}"
        ) from None
    for theirs, ours in (("a: ", "x: "), ("b: ", "weight: ")):
        if text.startswith(theirs):
            raise type(why)(
                ours + text[len(theirs) :].replace("that of a,", "that of x,").replace("device of a,", "device of x,")
            ) from None
