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
    m, n, groups = a.shape[-2], b.shape[-1], len(sizes)
    shape = (m, n) if work in (RAGGED_M, RAGGED_N) else (groups, m, n)
    acc, error = (torch.zeros(shape, dtype=torch.float64, device=a.device) for _ in range(2))
    known = torch.zeros(shape, dtype=torch.bool, device=a.device)
    extent = {RAGGED_M: m, RAGGED_N: n, RAGGED_K: a.shape[-1], MASKED: m}[work]
    ends = (sizes.long().clamp(0, extent) if work == MASKED else ascending(sizes, extent)).tolist()
    for group, end in enumerate(ends):
        begin = 0 if work == MASKED or group == 0 else ends[group - 1]
        left, right, place = parts(work, a, b, group, begin, end)
        of_blocks = scales_of(work, program, operands, group, begin, end)
        acc[place], _, error[place] = reference.accumulators(left, right, precision, **of_blocks)
        known[place] = True
    if work in (RAGGED_M, RAGGED_N):
        axis: Any = "m" if work == RAGGED_M else "n"
        program, operands = spread(program, operands, groups_of(sizes, extent), groups, axis)
    if program.gating:
        known = known[..., : n // 2]
    return bounds(program, acc, error, operands), known


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
