"""Repeated calls of `grouped_gemm` by the C++ part: the arrays of a call stand in front of its operands there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from cutegemm import native
from cutegemm.problem.grouped_request import Sizes
from cutegemm.pytorch.programs import meant_by, number_of
from cutegemm.run import grouped
from cutegemm.run.environment import is_on
from cutegemm.run.how import How

Unknown = tuple[int, Hashable]
"""Of a call that the C++ part has not been told of: the number of its program, and what that means; `run.grouped.tell`
takes them."""


def ask(
    a: Any, b: Any, sizes: Sizes, epilogue: Any, operands: Any, out_dtype: Any, precision: Any, backend: Any
) -> tuple[Any, Unknown | None]:
    """(the results, None); (None, what to tell of when it has been computed); (None, None): Python computes it."""
    offsets, counts, rows, places, out_rows = sizes
    if (offsets is None) == (counts is None) or places is not None or out_rows is not None:
        return None, None
    array = offsets if counts is None else counts
    listed = operands.__class__ is tuple or operands.__class__ is list
    if not listed or native.program is None or is_on("CUTEGEMM_DEBUG"):  # which looks at the arrays
        return None, None
    meant = meant_by(epilogue)
    if meant is None:
        return None, None
    number = number_of((meant, counts is None, rows is None))
    given = (array, *operands) if rows is None else (array, rows, *operands)
    found = native.program(number, a, b, given, out_dtype, *How(precision, backend))
    return (None, (number, meant)) if found is NotImplemented else (found, None)


def compute(
    a: Any, b: Any, sizes: Sizes, epilogue: Any, operands: Sequence[Any], out_dtype: Any, precision: Any, backend: str,
    config: Any,
) -> Any:  # fmt: skip
    """`run.grouped.compute` of new results, by the C++ part where that can."""
    call, unknown = (a, b, sizes, epilogue, operands), None
    if config is None:
        found, unknown = ask(*call, out_dtype, precision, backend)
        if found is not None:
            return found
    found = grouped.compute(*call, None, out_dtype, precision, backend, config)
    if unknown is not None:
        number, meant = unknown
        grouped.tell(number, meant, *call, out_dtype, How(precision, backend))
    return found
