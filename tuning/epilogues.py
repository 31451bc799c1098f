"""The epilogue programs that command lines know by name, and the problems that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from cutegemm import ops
from cutegemm.problem import Problem
from cutegemm.problem.dtypes import PRODUCTS
from cutegemm.problem.epilogue import ACTIVATIONS, Epilogue
from cutegemm.problem.program.graph import Input, Program
from cutegemm.problem.program.terms import terms_of
from cutegemm.problem.program_request import traced, with_epilogue


class Named(NamedTuple):
    """An epilogue function and its operands behind the accumulators.

    operands: "n" for a vector along the columns of D, "m" for one along its rows, "mn" for a matrix, "m128" for one of
    128 columns that repeat, all of these in the dtype of D; "int" for a Python int.
    """

    function: Callable[..., Any]
    operands: tuple[str, ...] = ()


def gelu_bias_residual(acc: Any, bias: Any, residual: Any) -> Any:
    return ops.gelu(acc + bias) + residual


def residual_squares(acc: Any, residual: Any) -> Any:
    """The sum with the residual, and the sums of its squares over each row."""
    y = acc + residual
    return y, ops.row_sum(y * y)


def rope_heads(acc: Any, cos: Any, sin: Any, values: Any) -> Any:
    """The rotation of a QKV product with heads of 128 columns, whose V, from column `values` on, stays as it is."""
    return ops.where(ops.column() < values, ops.rope(acc, cos, sin, head=128), acc)


TABLE: Mapping[str, Named] = MappingProxyType(
    {
        **{
            name: Named(getattr(ops, name))
            for gated in ("swiglu", "geglu", "geglu_tanh", "reglu") for name in (gated, f"{gated}_pairs")
        },
        **{name: Named(getattr(ops, name)) for name in ACTIVATIONS},
        "causal": Named(ops.causal),
        "gelu_bias_residual": Named(gelu_bias_residual, ("n", "mn")),
        "residual_squares": Named(residual_squares, ("mn",)),
        "rope": Named(ops.rope, ("mn", "mn")),
        "rope_heads": Named(rope_heads, ("m128", "m128", "int")),
    }
)  # fmt: skip
"""The programs by name. Activations alone are those of the fixed epilogue, as `gemm` recognizes them."""


def named(text: str) -> list[Named]:
    """The programs of a comma-separated list. Raises ValueError naming what is accepted."""
    names = text.split(",")
    for name in names:
        if name not in TABLE:
            raise ValueError(f"--epilogue: got {name!r}, accepted are {', '.join(TABLE)}")
    return [TABLE[name] for name in dict.fromkeys(names)]


def without_operands(name: str, out_dtype: str) -> Program:
    """The program of that name into results of that dtype. Raises ValueError for one that has operands."""
    (found,) = named(name)
    if found.operands:
        free = ", ".join(each for each, row in TABLE.items() if not row.operands)
        raise ValueError(f"--epilogue: got {name} with --scaling blocks; accepted are those without operands: {free}")
    return _resolved(traced(found.function, ()), out_dtype)


def _resolved(program: Program, out_dtype: str) -> Program:
    """The program with a dtype for each result: that of D where none is said, fp32 for what is reduced."""
    outputs = (each._replace(dtype=each.dtype or ("fp32" if each.reduce else out_dtype)) for each in program.outputs)
    return replace(program, outputs=tuple(outputs))


def problem(
    program: Named, m: int, n: int, k: int, dtype: str, *, out_dtype: str | None = None, batch: int = 1, **options: Any
) -> Problem:
    """The problem of a dense product with a program, of contiguous tensors, as `gemm` poses it.

    Args:
        n: columns of the product; with a program of gate and up D has half as many. options: further ones of
            `Problem.of`.

    Raises ValueError where something does not go together.
    """
    own = out_dtype or PRODUCTS[dtype].output if dtype in PRODUCTS else "bf16"
    if own == "int32":
        raise ValueError(
            f"--out-dtype: got {out_dtype or 'none'} with --epilogue and --dtype {dtype}; accepted are floating-point "
            "dtypes, such as bf16"
        )
    inputs = tuple(_input(f"x{i}", along, own, m, n, batch) for i, along in enumerate(program.operands))
    found = traced(program.function, inputs)
    if found.uses("partner") and n % 2:
        raise ValueError(f"--epilogue: got a program of pairs of columns with N = {n}, expected an even number")
    found = _resolved(found, own)
    posed = Problem.of(m, n, k, dtype, out_dtype=own, batch=batch, epilogue=Epilogue(custom=found), **options)
    terms = terms_of(found, ACTIVATIONS)
    return posed if terms is None else with_epilogue(posed.without_program(), found, terms, posed.operands, ())


def _input(name: str, along: str, dtype: str, m: int, n: int, batch: int) -> Input:
    """An operand of `Named.operands` as `gemm` describes it."""
    if along == "int":
        return Input(name, "int32", by_value=True)
    of_columns = along == "m128" or ("n" in along and n > 1)
    return Input(name, dtype, "m" in along and m > 1, of_columns, batch > 1 and along in ("mn", "m128"))
