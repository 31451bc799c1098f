"""Problems whose measured winner may serve a product in groups that nobody measured.

A winner is keyed by totals: the number of groups and the ragged extent (the tokens, say), which changes with every call
of a model. So the winner of the nearest power of two counts, as long as its configuration is valid. Gathered, scattered
and masked products, and those with a program, take the winners of plain groups of rows; products with scales of blocks
of K take those with such scales. Products of gate and up, whose tiles are others, take those of groups with SwiGLU,
with or without such scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cutegemm import ops
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.graph import Program
from cutegemm.problem.program.known import lookup
from cutegemm.problem.scaling import in_groups, scaled
from cutegemm.problem.work import DENSE, GATHERED, MASKED, RAGGED_M, SCATTERED
from cutegemm.problem.work import TABLE as WORKS


def kin(problem: Problem) -> Iterator[tuple[Problem, str]]:
    """(problem, how it relates to the one asked for), nearest first; none of a dense one."""
    if problem.work == DENSE:
        return
    name = "the plain product in groups"
    gating = problem.epilogue.gating
    if gating is not None:
        found, name = with_swiglu(problem), "the product with SwiGLU in groups"
        if found.work == GATHERED:  # whose rows are loaded otherwise: not all configurations of groups of rows serve it
            yield from _near(found, problem, name)
    else:
        found = problem.without_terms() if problem.epilogue.custom is not None else problem
    if found.work in (GATHERED, SCATTERED, MASKED):
        m = found.m * found.batch if found.work == MASKED else found.m
        found = replace(found, work=RAGGED_M, m=m)
    if gating is None and (program := found.epilogue.custom) is not None:
        found = replace(found, epilogue=Epilogue(custom=in_groups(program, found.work))).without_terms()
    yield from _near(found, problem, name)


def _near(found: Problem, problem: Problem, name: str) -> Iterator[tuple[Problem, str]]:
    """`found` itself, where it is not the problem asked for, and with the nearest power of two rows."""
    if str(found) != str(problem):
        yield found, name
    axis = WORKS[found.work].ragged or "m"
    extent = getattr(found, axis)
    rounded = _nearest_power(extent)
    if rounded != extent:
        sizes: dict[str, Any] = {axis: rounded}
        yield replace(found, **sizes), f"{name} at {axis.upper()} = {rounded}"


def with_swiglu(problem: Problem) -> Problem:
    """The problem with that program in place of its own, of D's dtype, behind the same scales of blocks of K."""
    program, product = into(lookup(ops.swiglu, ()), problem.out_dtype), problem.without_terms()
    scales = product.epilogue.program.block_scales
    return replace(product, epilogue=Epilogue(custom=scaled(program, scales.get("a"), scales.get("b"))))


def into(program: Program, dtype: str) -> Program:
    """The program with D in that dtype."""
    first, *more = program.outputs
    return replace(program, outputs=(first._replace(dtype=dtype), *more))


def _nearest_power(extent: int) -> int:
    """Of two, by ratio."""
    below = 1 << max(extent.bit_length() - 1, 0)
    return below if extent * extent <= 2 * below * below else 2 * below
