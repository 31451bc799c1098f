"""What is asked, described without tensors: element types, operands, epilogue, and the checks of a call.

dtypes      the table of element types
operand     how a matrix lies in memory
work        which products a launch computes, and which tiles they have
epilogue    what happens to the accumulators
problem     one multiplication, and the signature that a compiled kernel depends on; `text` reads its text form
request     from a call's arguments to a problem: all checks and their messages; `overlap` checks `out`
reference   the float64 result, and the error bound that every check in the project uses
"""

from __future__ import annotations

from cutegemm.problem.dtypes import DTYPES, ITEMSIZE, KINDS, PRECISIONS, TABLE, Kind, dtype_name, torch_dtype
from cutegemm.problem.operand import Matrix, alignment, compact, reads_by_rows
from cutegemm.problem.problem import MAX_EXTENT, Problem, Signature

__all__ = [
    "DTYPES", "ITEMSIZE", "KINDS", "MAX_EXTENT", "PRECISIONS", "TABLE", "Kind", "Matrix", "Problem", "Signature",
    "alignment", "compact", "dtype_name", "reads_by_rows", "torch_dtype",
]  # fmt: skip
