"""The float64 result of products in groups and its bound: `reference`, group by group.

The error of accumulation is that of each group's own K (`reference.accumulators`); the epilogue's is that of its
program (`program.bound`), whose operands are spread over the groups first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cutegemm.problem import reference
from cutegemm.problem.program.bound import Bounds, bounds
from cutegemm.problem.program.graph import Program
from cutegemm.problem.program.spread import ascending, groups_of, spread
from cutegemm.problem.work import MASKED, RAGGED_K, RAGGED_M, RAGGED_N


def expected(
    work: str,
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: torch.Tensor,
    program: Program,
    operands: Sequence[Any] = (),
    precision: str = "ieee",
) -> tuple[tuple[Bounds, ...], torch.Tensor]:
    """(what each result may be, which elements of D belong to a group) of `grouped_gemm` with this program.

    Args:
        work: a name of `problem.work.TABLE`. a, b, operands: as `grouped_gemm` takes them, on the CPU or a GPU.
        sizes: the groups' ends, or the counts of a masked product.
    """
    shape, groups = layout(work, a, b, sizes)
    acc, error = (torch.zeros(shape, dtype=torch.float64, device=a.device) for _ in range(2))
    known = torch.zeros(shape, dtype=torch.bool, device=a.device)
    for group, (begin, end) in enumerate(groups):
        left, right, place = parts(work, a, b, group, begin, end)
        of_blocks = scales_of(work, program, operands, group, begin, end)
        acc[place], _, error[place] = reference.accumulators(left, right, precision, **of_blocks)
        known[place] = True
    program, operands = as_one(work, program, operands, sizes, shape)
    if program.gating:
        known = known[..., : shape[-1] // 2]
    return bounds(program, acc, error, operands), known


def layout(
    work: str, a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """(shape of the accumulators, where each group begins and ends); the host waits for the groups' sizes."""
    m, n = a.shape[-2], b.shape[-1]
    extent = {RAGGED_M: m, RAGGED_N: n, RAGGED_K: a.shape[-1], MASKED: m}[work]
    if work == MASKED:
        return (len(sizes), m, n), [(0, each) for each in sizes.long().clamp(0, extent).tolist()]
    ends = ascending(sizes, extent).tolist()
    shape = (len(sizes), m, n) if work == RAGGED_K else (m, n)
    return shape, list(zip([0, *ends[:-1]], ends, strict=True))


def as_one(
    work: str, program: Program, operands: Sequence[Any], sizes: torch.Tensor, shape: Sequence[int]
) -> tuple[Program, Sequence[Any]]:
    """The program and its operands for accumulators of that shape, with which one evaluation computes all groups."""
    if work not in (RAGGED_M, RAGGED_N):
        return program, operands
    groups = groups_of(sizes, shape[0 if work == RAGGED_M else 1])
    return spread(program, operands, groups, len(sizes), "m" if work == RAGGED_M else "n")


def parts(work: str, a: torch.Tensor, b: torch.Tensor, group: int, begin: int, end: int) -> tuple[Any, Any, Any]:
    """(A, B, place in D) of one group's product; also of what lies along A and B."""
    whole = slice(None)
    if work == RAGGED_M:
        return a[begin:end], b[group], (slice(begin, end), whole)
    if work == RAGGED_N:
        return a[group], b[:, begin:end], (whole, slice(begin, end))
    if work == RAGGED_K:
        return a[:, begin:end], b[begin:end], (group, whole, whole)
    return a[group, :end], b[group], (group, slice(0, end), whole)


def scales_of(
    work: str, program: Program, operands: Sequence[Any], group: int, begin: int, end: int
) -> dict[str, torch.Tensor]:
    """The scales of blocks of K of one group's A and B, by the names of `reference.accumulators`' arguments."""
    found = {}
    for given, scale in zip(program.inputs, operands, strict=True):
        if given.scales:
            own = scale[group if given.batched else 0] if scale.dim() == 3 else scale
            if given.scales[0] == "a" and work in (RAGGED_M, MASKED):
                shared = int(given.scales[1:])  # 1 but in masked products, whose groups begin at 0
                own = own[begin : -(-end // shared)]
            elif given.scales[0] == "b" and work == RAGGED_N:
                own = own[:, begin:end]
            found[f"scale_{given.scales[0]}"] = own
    return found
