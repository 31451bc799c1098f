"""Extents that nobody knows while torch.compile traces: those of `x[mask]`, say, which the data decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def are_equal(one: Any, other: Any) -> bool:
    """Whether two sizes or strides are equal; where the data decide it the answer is no, since a graph cannot ask."""
    symbolic = isinstance(one, torch.SymInt) or isinstance(other, torch.SymInt)
    if not symbolic and not torch.compiler.is_dynamo_compiling():
        return bool(one == other)  # of tensors, which sizes are to torch.jit.trace
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # which imports sympy

    return guard_or_false(one == other)


def is_one(extent: Any) -> bool:
    """Whether an extent is 1. One that the data decide counts as larger than 1: where it turns out to be 1, it is not
    broadcast.
    """
    return are_equal(extent, 1)


def varying(shape: Sequence[Any]) -> tuple[bool, bool, bool]:
    """Whether an operand of that shape has matrices, rows and columns of its own: extents that are not 1."""
    count, m, n = (1, 1, 1, *shape)[-3:]
    return not is_one(count), not is_one(m), not is_one(n)


def have_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are equal, where that is known."""
    return len(one) == len(other) and all(map(are_equal, one, other))
