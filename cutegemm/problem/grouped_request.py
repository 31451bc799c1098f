"""From a call of `grouped_gemm` to a Problem: what `program_request` is for `gemm` with an epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from cutegemm.problem import program_request, request
from cutegemm.problem.dtypes import ITEMSIZE, TABLE
from cutegemm.problem.epilogue import ACTIVATIONS, Epilogue
from cutegemm.problem.operand import Matrix
from cutegemm.problem.problem import MAX_EXTENT, Problem
from cutegemm.problem.program.graph import Input, Program
from cutegemm.problem.program.terms import Terms, terms_of
from cutegemm.problem.program_request import ProgramRequest
from cutegemm.problem.work import MASKED, RAGGED_K, RAGGED_M, RAGGED_N

MOST_GROUPS = 1024
MOST_ROWS = 1 << 30
"""Of an array that groups divide; see `cute.hopper.clip`."""


class Extents(NamedTuple):
    """The sizes of a call: `work`, a name of `problem.work.TABLE`; M, N and K, of which one may be ragged; the groups.

    shape: of D before columns are folded by gate and up. varies: which of (group, row, column) each result has.
    """

    work: str
    m: int
    n: int
    k: int
    groups: int

    def shape(self, columns: int) -> tuple[int, ...]:
        """Of a result with so many columns."""
        return (self.m, columns) if self.work in (RAGGED_M, RAGGED_N) else (self.groups, self.m, columns)


def extents(a: Any, b: Any, offsets: Any, counts: Any) -> Extents:
    """The sizes that the shapes say; tensors may be fake.

    Raises TypeError or ValueError naming the argument, what was given and what is accepted.
    """
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
        if tensor.dim() not in (2, 3):
            raise ValueError(f"{name}: got {tensor.dim()} dimensions, accepted are 2 (rows of all groups) and 3")
    if (offsets is None) == (counts is None):
        both = "both" if offsets is not None else "neither"
        raise ValueError(f"offsets, counts: got {both}; pass the groups' ends, or the counts of a masked product")
    dims = a.dim(), b.dim()
    if (dims == (3, 3)) != (counts is not None):
        given = "counts" if counts is not None else "offsets"
        raise ValueError(
            f"{given}: got them with a of {dims[0]} and b of {dims[1]} dimensions; counts belong to 3 and 3 "
            "dimensions, offsets to all others (gemm computes a batch without either)"
        )
    sizes, name = (offsets, "offsets") if counts is None else (counts, "counts")
    if not isinstance(sizes, torch.Tensor):
        raise TypeError(f"{name}: got {type(sizes).__name__}, expected an int32 tensor of one number a group")
    if sizes.dtype != torch.int32:
        raise TypeError(f"{name}: got dtype {sizes.dtype}, accepted is torch.int32")
    if sizes.dim() != 1:
        raise ValueError(f"{name}: got {sizes.dim()} dimensions, expected 1: one number a group")
    groups = sizes.shape[0]
    for which, tensor in (("a", a), ("b", b)):
        if tensor.dim() == 3 and tensor.shape[0] != groups:
            raise ValueError(f"{which}: got {tensor.shape[0]} matrices, and {name} has {groups} groups")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"b: got shape {tuple(b.shape)}; with a of shape {tuple(a.shape)} its second to last extent must be "
            f"K = {a.shape[-1]}"
        )
    work = {(2, 3): RAGGED_M, (3, 2): RAGGED_N, (2, 2): RAGGED_K, (3, 3): MASKED}[dims]
    return Extents(work, a.shape[-2], b.shape[-1], a.shape[-1], groups)


def check_program(program: Program, sizes: Extents) -> int:
    """The columns of D. Raises ValueError where the program cannot be computed in groups."""
    if any(output.reduce is not None for output in program.outputs):
        raise ValueError("epilogue: results of groups are not reduced; return matrices, and reduce these")
    columns = sizes.n
    if program.gating or program.uses("partner"):
        if sizes.work == RAGGED_N:
            raise ValueError("epilogue: with groups of columns, columns do not belong together by two")
        if columns % 2:
            raise ValueError(f"b: got {columns} columns; this epilogue needs an even number of them")
    if program.gating and sizes.work == RAGGED_K:
        raise ValueError("epilogue: gate and up are columns of weights, and a ragged K has none; compute them apart")
    return columns // 2 if program.gating else columns


def check_operand(number: int, given: Input, operand: Any, sizes: Extents, columns: int) -> None:
    """Raises ValueError unless a tensor operand broadcasts to D, or is one matrix a group that varies along the extent
    that is not divided.
    """
    if given.by_value:
        return
    shape = tuple(operand.shape)
    for own, extent in zip(reversed(shape), (columns, sizes.m, sizes.groups), strict=False):
        if own not in (1, extent):
            wanted = sizes.shape(columns)
            raise ValueError(f"operands[{number}]: got shape {shape}, expected {wanted} or one that broadcasts to it")
    axis = {RAGGED_M: "m", RAGGED_N: "n"}.get(sizes.work)
    if axis and given.batched and getattr(given, axis):
        one = f"({sizes.groups}, 1, {columns})" if axis == "m" else f"({sizes.groups}, {sizes.m}, 1)"
        raise ValueError(
            f"operands[{number}]: got shape {shape}; accepted are {sizes.shape(columns)}, {one}, and what broadcasts "
            "to one of them"
        )


def describe(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None,
    counts: torch.Tensor | None,
    epilogue: Any,
    operands: Sequence[Any],
    out: Any,
    out_dtype: torch.dtype | None,
    precision: str | None,
) -> ProgramRequest:
    """Checks the arguments of `cutegemm.grouped_gemm` (see there) and describes the call.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is accepted.
    """
    sizes = extents(a, b, offsets, counts)
    dtype = request._check_operands(a, b)
    _check_sizes(a, offsets, counts)
    _check_limits(sizes)
    precision = "ieee" if precision is None else request._check_precision(precision, dtype)
    program = program_request.traced(epilogue, program_request.inputs_of(operands, a.device))
    columns = check_program(program, sizes)
    for number, (given, operand) in enumerate(zip(program.inputs, operands, strict=True)):
        if isinstance(operand, torch.Tensor):
            request.check_tensor(f"operands[{number}]", operand)
        check_operand(number, given, operand, sizes, columns)
    shape = sizes.shape(columns)
    default = request._check_out(a, None, out_dtype, (), TABLE[dtype].output)
    outs = program_request._given_outputs(out, len(program.outputs))
    resolved, targets = [], []
    for number, (output, target) in enumerate(zip(program.outputs, outs, strict=True)):
        name = program_request._dtype(number, output, target, out_dtype, default)
        program_request._check_output(number, target, shape, name, a.device, len(outs))
        resolved.append(output._replace(dtype=name))
        targets.append(program_request._result(target, shape, name))
    program = replace(program, outputs=tuple(resolved))

    copies: list[tuple[str, str]] = []
    groups = sizes.groups
    matrix_a = request._operand("a", a, sizes.m, sizes.k, groups, copies)
    matrix_b = request._operand("b", b, sizes.k, sizes.n, groups, copies)
    given_tensors = [
        (given, _own(sizes, program_request._strides(given, operand), given.dtype))
        for given, operand in zip(program.inputs, operands, strict=True)
        if not given.by_value
    ]
    matrices = tuple(matrix for _, matrix in given_tensors)
    results = [
        _own(sizes, matrix, str(output.dtype)) for (matrix, _), output in zip(targets, resolved, strict=True)
    ]  # fmt: skip
    problem = Problem(
        sizes.m, sizes.n, sizes.k, groups, dtype, str(resolved[0].dtype), precision, matrix_a, matrix_b, None,
        results[0], Epilogue(), sizes.work,
    )  # fmt: skip
    terms = _terms(program, operands, columns)
    if terms is not None:
        places = [i for i, given in enumerate(program.inputs) if not given.by_value]
        c = None if terms.c is None else matrices[places.index(terms.c)]
        bias = None if terms.bias is None else program.inputs[terms.bias].dtype
        known = Epilogue(None if terms.c is None else program.inputs[terms.c].dtype, bias, "n", terms.activation)
        problem = replace(problem, c=c, epilogue=known)
    else:
        aligns = [matrix.align if matrix.row_major else 0 for given, matrix in given_tensors if given.varies == "mn"]
        aligns += [matrix.align for matrix in results[1:]]
        custom = Epilogue(custom=program, aligns=tuple(aligns))
        problem = replace(problem, epilogue=custom, operands=matrices, outputs=tuple(results[1:]))
    temporaries = frozenset(number for number, (_, apart) in enumerate(targets) if apart)
    shapes = (shape,) * len(resolved)
    return ProgramRequest(problem, a.device, tuple(copies), program, shapes, temporaries, terms)


def _check_sizes(a: torch.Tensor, offsets: Any, counts: Any) -> None:
    sizes, name = (offsets, "offsets") if counts is None else (counts, "counts")
    if sizes.layout != torch.strided or sizes.is_nested:
        raise TypeError(f"{name}: got layout {sizes.layout}, expected a dense (strided) tensor")
    if sizes.device != a.device:
        raise ValueError(f"{name}: it is on {sizes.device}, expected the device of a, {a.device}")
    if not 1 <= sizes.shape[0] <= MOST_GROUPS:
        raise ValueError(f"{name}: got {sizes.shape[0]} groups, accepted are 1 to {MOST_GROUPS}")
    if sizes.shape[0] > 1 and sizes.stride(0) != 1:
        raise ValueError(f"{name}: got stride {sizes.stride(0)}, expected a contiguous tensor; call .contiguous()")


def _check_limits(sizes: Extents) -> None:
    named = {"M": sizes.m, "N": sizes.n, "K": sizes.k}
    ragged = {RAGGED_M: "M", RAGGED_N: "N", RAGGED_K: "K", MASKED: "M"}[sizes.work]
    for name, extent in named.items():
        most = MOST_ROWS if name == ragged else MAX_EXTENT
        if extent > most:
            raise ValueError(f"a, b: {name} is {extent}; at most {most}")


def _own(sizes: Extents, matrix: Matrix, dtype: str) -> Matrix:
    """A matrix like D. Where groups are its columns, a tile begins at any element, and no vector is aligned."""
    if sizes.work != RAGGED_N:
        return matrix
    return matrix._replace(align=min(matrix.align, {**ITEMSIZE, "int32": 4}[dtype]))


def _terms(program: Program, operands: Sequence[Any], columns: int) -> Terms | None:
    """The terms that the program is made of, where kernels that know these can read the operands."""
    terms = terms_of(program, ACTIVATIONS)
    if terms is not None and terms.bias is not None:
        bias = operands[terms.bias]
        if bias.dim() == 0 or bias.shape[-1] != columns or bias.stride(-1) != 1 or bias.dim() == 3:
            return None
    return terms
