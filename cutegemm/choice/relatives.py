"""Problems whose measured winner may serve another that nobody measured, the nearest first.

The plain product speaks for one with terms or with a program that combines no columns; with gate and up in pairs the
same program with both in halves does. In groups `group_kin` has more. Last come the types in which products of a kind
are measured: all fp8 operands run as e4m3 do, and D's type decides little where its store is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cutegemm.choice.group_kin import into, kin
from cutegemm.problem import ITEMSIZE, Problem
from cutegemm.problem.dtypes import TYPES
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.work import DENSE

OF_PLAIN = "tuned winner of the plain product"
"""Why a program runs a configuration that was measured without it."""


def relatives(problem: Problem) -> Iterator[tuple[Problem, str, str]]:
    """(problem, whose winner that is, whose it is in the other 16-bit type): the problem itself, then others."""
    promised = f" with a constant {problem.constant.upper()}" if problem.constant else ""
    yield problem, f"tuned winner{promised}", f"tuned winner{promised} of the other 16-bit type"
    if problem.epilogue != Epilogue() and problem.epilogue.gating is None:
        name = f"{OF_PLAIN}{promised}"
        yield problem.without_terms(), name, f"{name} in the other 16-bit type"
    if problem.epilogue.gating == "pairs" and problem.work == DENSE:
        name = "tuned winner of the program with gate and up in halves"
        halves = replace(problem.epilogue, custom=replace(problem.epilogue.program, gating="halves"))
        yield replace(problem, epilogue=halves), name, f"{name} in the other 16-bit type"
    for relative, name in kin(problem):
        yield relative, f"tuned winner of {name}", f"tuned winner of {name} in the other 16-bit type"
    usual = in_measured_types(problem)
    if usual is not problem:
        types = f" for {usual.dtype} -> {usual.out_dtype}"
        for relative, whose, other in relatives(usual):
            yield relative, whose + types, other + types


def in_measured_types(problem: Problem) -> Problem:
    """The problem with operands and D of the types in which such products are measured; itself where it has them."""
    dtype = "e4m3" if TYPES[problem.dtype].family == "fp8" else problem.dtype
    result, program = TYPES[dtype].output, problem.epilogue.custom
    if ITEMSIZE[result] > 2 or (dtype, result) == (problem.dtype, problem.out_dtype):
        return problem
    epilogue = problem.epilogue if program is None else replace(problem.epilogue, custom=into(program, result))
    return replace(problem, dtype=dtype, b_dtype=None, out_dtype=result, epilogue=epilogue)
