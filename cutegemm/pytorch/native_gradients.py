"""Gradients of calls that the C++ extension has recorded, where it leaves their computation to Python.

It does so for derivatives of derivatives, for calls with an activation, with C or with a batch, under modes, and for
products in the backward pass that it meets for the first time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cutegemm import native
from cutegemm.problem.extents import are_equal, is_one
from cutegemm.pytorch.autograd import Settings, gradients


class _Saved(NamedTuple):
    """Stands for the context of a recorded call, as far as `autograd.gradients` reads it."""

    settings: Settings
    saved_tensors: tuple[Any, ...]
    c_like: tuple[tuple[int, ...], torch.dtype] | None
    bias_dtype: torch.dtype | None


def gradients_of_saved(
    grad: torch.Tensor, needs: tuple[bool, bool, bool, bool], a: Any, b: Any, c: Any, bias: Any,
    c_shape: tuple[int, ...] | None, c_dtype: torch.dtype | None, bias_dtype: torch.dtype | None, is_linear: bool,
    alpha: float, beta: float, activation: str | None, precision: str | None, backend: str,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """(dA, dB, dC, dbias), None where not needed.

    Args:
        grad: of D. needs: whether a, b, c and bias need theirs.
        a, b, c, bias: as saved; None where the gradients do not depend on it. is_linear: b is the weight (N, K) of
            `linear`, and a, of any dimensions, its x.
        c_shape, c_dtype, bias_dtype: of the operands of the call; None where it has none.
    """
    shape = a.shape
    if is_linear:
        b = b.t()
        if a.dim() != 2 and not (a.dim() == 3 and not mergeable(a)):
            a, grad = a.reshape(-1, a.shape[-1]), grad.reshape(-1, grad.shape[-1])
    settings = Settings(alpha, beta, activation, precision, backend)
    c_like = None if c_shape is None or c_dtype is None else (c_shape, c_dtype)
    da, db, dc, dbias = gradients(_Saved(settings, (a, b, c, bias, None), c_like, bias_dtype), grad, needs)
    if is_linear:
        da = None if da is None else da.reshape(shape)
        db = None if db is None else db.t()
    return da, db, dc, dbias


def mergeable(x: torch.Tensor) -> bool:
    """Whether the two leading dimensions of three are one in memory."""
    return are_equal(x.stride(0), x.shape[1] * x.stride(1)) or is_one(x.shape[0]) or is_one(x.shape[1])


native.in_python["gradients"] = gradients_of_saved
