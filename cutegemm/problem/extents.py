"""Extents that nobody knows while torch.compile traces: those of `x[mask]`, say, which the data decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def are_equal(one: Any, other: Any) -> bool:
    """Whether two sizes or strides are equal; where the data decide it the answer is no, since a graph cannot ask."""
    if isinstance(one, int) and isinstance(other, int) and not torch.compiler.is_dynamo_compiling():
        return one == other
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # which imports sympy

    return guard_or_false(one == other)


def is_one(extent: Any) -> bool:
    """Whether an extent is 1, where that is known. So one that the data decide counts as rows, columns or matrices of
    its own, and what is to be broadcast must have an extent of 1.
    """
    return are_equal(extent, 1)


def have_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are equal, where that is known."""
    return len(one) == len(other) and all(map(are_equal, one, other))
