"""Rules of operands that are split into parts (`problem.parts`): what a stage of the ring and a workspace hold of them.

Before the products, a kernel of its own splits both operands (`splitter`) into the launch's workspace, behind what sums
over K need of it. Each part is a K-major matrix with rows of whole 16 bytes, whatever the operand's major and
alignment, so that TMA and cp.async load parts as they load other operands:

    | state words | partial sums | parts of A: part 0 of all matrices, part 1, ... | parts of B |

A matrix that serves a whole batch is split once. Here is no DSL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutegemm.hardware.arch import LINE
from cutegemm.problem import ITEMSIZE
from cutegemm.problem.work import DENSE

if TYPE_CHECKING:
    from cutegemm.problem import Problem, Signature


def staged_itemsize(signature: Signature) -> int:
    """Bytes that a stage holds of an element of an operand: all of its parts."""
    parts = signature.parts
    return ITEMSIZE[signature.dtype] if parts is None else parts.itemsize


def workspace_bytes(problem: Problem) -> int:
    """Bytes of both operands' parts; 0 for operands that are not split."""
    parts = problem.signature.parts
    if parts is None:
        return 0
    row = parts.leading(problem.k) * parts.itemsize
    sides = ((problem.m, problem.a), (problem.n, problem.b))
    return sum(
        in_lines(rows * (1 if matrix.stride_batch == 0 else problem.batch) * row) * LINE for rows, matrix in sides
    )


def why_invalid(signature: Signature) -> str | None:
    """None, or why operands of that signature cannot be split."""
    if signature.parts is None or signature.work == DENSE:
        return None
    return f"operands are split into parts of dense matrices only; the groups of {signature.work} lie on the device"


def in_lines(count: int) -> int:
    """So many bytes in lines of the L2 cache, rounded up."""
    return -(-count // LINE)
