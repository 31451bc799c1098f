"""Programs of ragged products on torch tensors: every row (or column) of D gets what its group has of each operand.

A kernel reads an operand that is one matrix a group at the group's number, and so the index `matrix`. Here both become
an operand that varies along D's ragged extent, so that `evaluate` and `bounds` compute all groups as one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from cutegemm.problem.program.graph import Input, Node, Program


def ascending(ends: torch.Tensor, extent: int) -> torch.Tensor:
    """The ends as kernels take them, in int64: within [0, extent], none before that of the group before it."""
    return ends.long().clamp(0, extent).cummax(0).values if ends.numel() else ends.long()


def groups_of(ends: torch.Tensor, extent: int) -> torch.Tensor:
    """The group of each place, int64: as many as there are groups for a place behind the last one's end."""
    places = torch.arange(extent, device=ends.device)
    return torch.searchsorted(ascending(ends, extent), places, right=True)


def spread(
    program: Program, operands: Sequence[Any], groups: torch.Tensor, count: int, axis: Literal["m", "n"]
) -> tuple[Program, list[Any]]:
    """The program and operands of one matrix with the same elements.

    Args:
        groups: the group of each row (axis "m") or column ("n"), as `groups_of` has them. count: of groups.
    """
    known = groups.clamp(max=count - 1)
    inputs, given = [], []
    for own, value in zip(program.inputs, operands, strict=True):
        if own.by_value or own.scales or not own.batched:
            inputs.append(own)
            given.append(value)
            continue
        value = value[(None,) * (3 - value.dim())]
        taken = value.expand(count, *value.shape[1:]).index_select(0, known)
        given.append(taken[:, 0] if axis == "m" else taken[:, :, 0].t())
        inputs.append(own._replace(batched=False, m=own.m or axis == "m", n=own.n or axis == "n"))
    nodes = list(program.nodes)
    if any(node.op == "matrix" for node in nodes):
        number = len(inputs)
        inputs.append(Input(f"x{number}", "int32", m=axis == "m", n=axis == "n"))
        given.append(known.int()[:, None] if axis == "m" else known.int()[None])
        nodes = [Node("input", (), number) if node.op == "matrix" else node for node in nodes]
    return replace(program, inputs=tuple(inputs), nodes=tuple(nodes)), given
