"""What sizes of a problem a launch takes, whatever the family of its kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutegemm.problem import Problem

MAX_CTAS = 2**31 - 1
"""Of a grid."""
MOST_K_OF_INT8 = 131071
"""The largest K for which every sum of int8 fits into int32: -128 times -128, 131072 times, is 2^31."""


def why_refused(config: Any, problem: Problem) -> str | None:
    """None when a configuration that is valid for the problem's signature takes its sizes, else why not."""
    if _sums_may_wrap(problem):
        return (
            f"sums of int8 along K = {problem.k} may not fit into int32, in which kernels add them up; accepted is K "
            f"up to {MOST_K_OF_INT8}, or scales of blocks"
        )
    bm, bn, _ = config.tile()
    ctas = problem.tiles(bm, bn) * config.splits
    return None if ctas <= MAX_CTAS else f"{ctas} CTAs; a grid has at most {MAX_CTAS}"


def _sums_may_wrap(problem: Problem) -> bool:
    """Whether sums of int8 may leave int32, where D is not these sums and blocks are not added up in fp32."""
    program = problem.epilogue.custom
    promoted = program is not None and program.block_scales
    return problem.dtype == "int8" and problem.out_dtype != "int32" and not promoted and problem.k > MOST_K_OF_INT8
