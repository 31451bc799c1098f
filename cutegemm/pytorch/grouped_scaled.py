"""`grouped_gemm` with scaled operands: the call becomes one whose epilogue's first factors are the scales.

This module does for `grouped_gemm` what `scaled` and `scaled_operator` do for `gemm`, with the same programs
(`problem.scaling`). Scales of tensors, groups and rows are operands of the epilogue; scales of blocks of K are read by
the kernel while it sums. torch.compile and dispatch modes see torch.ops.cutegemm.scaled_grouped_gemm. No gradients are
recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from cutegemm.problem import grouped_request, grouped_scales, program_request, scales, scaling, torch_dtype
from cutegemm.problem.dtypes import TABLE, dtype_name
from cutegemm.problem.grouped_request import Sizes
from cutegemm.problem.grouped_scales import Scaled
from cutegemm.problem.program.graph import Program
from cutegemm.problem.work import GATHERED
from cutegemm.pytorch import combining, grouped_operator, scaled
from cutegemm.pytorch.program_autograd import refuse_tangents
from cutegemm.pytorch.program_operator import divided, joined, program_of
from cutegemm.pytorch.registering import LIBRARY, carried_scaling, define, few, many, scaling_of
from cutegemm.run import grouped
from cutegemm.run.how import carried


class Scaling(NamedTuple):
    """The arguments of a call that say how its operands are scaled; see `grouped_gemm`."""

    scale_a: Any = None
    scale_b: Any = None
    recipe: Any = None

    def __bool__(self) -> bool:
        return any(each is not None for each in self)


def compute(
    a: Any, b: Any, sizes: Sizes, epilogue: Any, operands: Sequence[Any], given: Scaling, out: Any, out_dtype: Any,
    precision: Any, backend: str, config: Any,
) -> Any:  # fmt: skip
    """`grouped_gemm` of plain tensors with a scale or two; see there."""
    program, operands, out_dtype = arguments(a, b, sizes, epilogue, operands, given, out, out_dtype, precision, backend)
    return grouped.compute(a, b, sizes, program, operands, out, out_dtype, precision, backend, config)


def arguments(
    a: Any, b: Any, sizes: Sizes, epilogue: Any, operands: Sequence[Any], given: Scaling, out: Any, out_dtype: Any,
    precision: Any, backend: str = "torch",
) -> tuple[Program, tuple[Any, ...], Any]:  # fmt: skip
    """(program, operands, out_dtype) of the call without scales that computes one with them. backend: what may copy
    the scales of gathered rows.

    Raises TypeError or ValueError naming the argument, what was given and what is accepted.
    """
    extents = grouped_request.extents(a, b, sizes)
    grouped_request.check_dtypes(a, b)
    program = program_request.program_for(epilogue, operands, a.device)
    of_a, of_b = grouped_scales.recipes(a, b, extents, *given)
    if extents.work == GATHERED and of_a is not None:
        grouped_request.check_sizes(a, sizes)
        of_a = _following(of_a, sizes.rows, backend)
    recipes = [None if each is None else each.recipe for each in (of_a, of_b)]
    made = scaling.scaled(program, *(each and each.input for each in recipes))
    if precision == "fast" and made.block_scales:
        raise ValueError(scaled.FAST_WITH_BLOCKS)
    scales = [None if each is None else each.scale for each in (of_a, of_b)]
    if out is None:
        made, out_dtype = _with_default(a, made, out_dtype)
    return made, (*operands, *scaling.operands_of(program, *scales, *recipes)), out_dtype


def _following(of_a: Scaled, rows: torch.Tensor, backend: str) -> Scaled:
    """The scales of A's rows in the order of the rows that are gathered; 0 for an entry that names none."""
    if of_a.recipe is None or not (of_a.recipe.input.scales or of_a.recipe.input.m):
        return of_a
    return of_a._replace(scale=combining.gathered(of_a.scale, rows, backend))


def _with_default(a: Any, program: Program, out_dtype: Any) -> tuple[Program, Any]:
    """As `scaled.with_default`. Raises ValueError for int32, also where nothing is multiplied."""
    if out_dtype == torch.int32 and TABLE[str(dtype_name(a.dtype))].is_integer:
        raise ValueError(grouped_request.WHOLE_ALONE)
    return scaled.with_default(a, program, out_dtype)


# -- the operator ------------------------------------------------------------------------------------------------------
def by_operator(
    a: Any, b: Any, sizes: Sizes, text: str, operands: Any, given: Scaling, out: Any, out_dtype: Any,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """The call as torch's operator. torch.compile puts this into its graph."""
    if out is not None:
        raise ValueError(
            "out: got a tensor with scales under torch.compile, a dispatch mode or torch.func; leave it away"
        )
    refuse_tangents(a, b, *operands, given.scale_a, given.scale_b)
    if not torch.compiler.is_dynamo_compiling():
        named = {"scale_a": given.scale_a, "scale_b": given.scale_b}
        grouped_operator.check_arguments(sizes, named, out_dtype, options)
        scales.asked(given.recipe, given.scale_a, given.scale_b)
    results = torch.ops.cutegemm.scaled_grouped_gemm(
        a, b, *sizes, given.scale_a, given.scale_b, carried_scaling(given.recipe), *divided(operands), text, out_dtype,
        options["precision"], options["backend"], carried(options["config"]),
    )  # fmt: skip
    return few(results)


def _compute(
    a, b, offsets, counts, rows, places, out_rows, scale_a, scale_b, scaling, operands, numbers, integers, program,
    out_dtype=None, precision=None, backend="auto", config=None,
):  # fmt: skip
    known, sizes = program_of(program), Sizes(offsets, counts, rows, places, out_rows)
    given = Scaling(scale_a, scale_b, scaling_of(scaling))
    with torch.no_grad():
        results = compute(
            a, b, sizes, known, joined(known, operands, numbers, integers), given, None, out_dtype, precision, backend,
            config,
        )  # fmt: skip
    return many(results)


def _fake(
    a, b, offsets, counts, rows, places, out_rows, scale_a, scale_b, scaling, operands, numbers, integers, program,
    out_dtype=None, precision=None, backend="auto", config=None,
):  # fmt: skip
    known, sizes = program_of(program), Sizes(offsets, counts, rows, places, out_rows)
    given = joined(known, operands, numbers, integers)
    shapes = grouped_operator.shapes_of(a, b, sizes, given, known)
    names = grouped_operator.dtypes_of(a, *_with_default(a, known, out_dtype))
    return [a.new_empty(shape, dtype=torch_dtype(name)) for shape, name in zip(shapes, names, strict=True)]


define(
    "scaled_grouped_gemm(Tensor a, Tensor b, Tensor? offsets, Tensor? counts, Tensor? rows, Tensor? places, "
    "SymInt? out_rows, Tensor? scale_a, Tensor? scale_b, str[]? scaling, Tensor[] operands, float[] numbers, "
    "SymInt[] integers, str program, ScalarType? out_dtype=None, str? precision=None, str backend='auto', "
    "str? config=None) -> Tensor[]",
    _compute, _fake,
)  # fmt: skip
torch.library.register_vmap("cutegemm::scaled_grouped_gemm", grouped_operator.vmapped, lib=LIBRARY)
register_flop_formula(torch.ops.cutegemm.scaled_grouped_gemm)(grouped_operator.flops)
