"""From a call of `grouped_gemm` to a Problem: what `program_request` is for `gemm` with an epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from cutegemm.problem import packing, program_request, request
from cutegemm.problem.dtypes import ACCEPTED, CUDA_CORES, ITEMSIZE, PRODUCTS, TABLE, output_name, product_dtype_name
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.extents import is_one
from cutegemm.problem.operand import Matrix
from cutegemm.problem.problem import MAX_EXTENT, Problem
from cutegemm.problem.program.graph import SCALE_K, Input, Output, Program
from cutegemm.problem.program.terms import is_product
from cutegemm.problem.program_request import ProgramRequest
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, ROWS, SCATTERED
from cutegemm.problem.work import TABLE as WORKS

MOST_GROUPS = 1024
MOST_ROWS = 1 << 30
"""Of an array that groups divide; see `cute.hopper.clip`."""
WHOLE_ALONE = "out_dtype: got torch.int32 with an epilogue or scales; it is for the plain product of int8"


class Sizes(NamedTuple):
    """What a call says of its groups and rows, see `cutegemm.grouped_gemm`."""

    offsets: Any
    counts: Any = None
    rows: Any = None
    places: Any = None
    out_rows: Any = None

    @property
    def groups(self) -> torch.Tensor:
        """The ends, or the counts."""
        found: torch.Tensor = self.offsets if self.counts is None else self.counts
        return found

    @property
    def indices(self) -> torch.Tensor | None:
        """The rows of A, or of D, that the rows of the product are."""
        found: torch.Tensor | None = self.rows if self.places is None else self.places
        return found

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """The device arrays of the work, in its order."""
        return (self.groups,) if self.indices is None else (self.groups, self.indices)


class Extents(NamedTuple):
    """The sizes of a call: `work`, a name of `problem.work.TABLE`; M, N and K, of which one may be ragged; the groups.

    results: rows of a result; M but where they are scattered.
    """

    work: str
    m: int
    n: int
    k: int
    groups: int
    results: int

    def shape(self, columns: int) -> tuple[int, ...]:
        """Of a result with so many columns."""
        single = self.work in (*ROWS, RAGGED_N)
        return (self.results, columns) if single else (self.groups, self.m, columns)

    def result_shape(self, output: Output, columns: int) -> tuple[int, ...]:
        """Of a result of a program, where matrices have so many columns."""
        *leading, rows, _ = self.shape(columns)
        return program_request.result_shape(output, tuple(leading), rows, columns)


def extents(a: Any, b: Any, given: Sizes) -> Extents:
    """The sizes that the shapes say; tensors may be fake.

    Raises TypeError or ValueError naming the argument, what was given and what is accepted.
    """
    for name, tensor in (("a", a), ("b", b)):
        request.check_type(name, tensor)
        if tensor.dim() not in (2, 3):
            raise ValueError(f"{name}: got {tensor.dim()} dimensions, accepted are 2 (rows of all groups) and 3")
    offsets, counts = given.offsets, given.counts
    if (offsets is None) == (counts is None):
        both = "both" if offsets is not None else "neither"
        raise ValueError(f"offsets, counts: got {both}; pass the groups' ends, or the counts of a masked product")
    dims = a.dim(), b.dim()
    if (dims == (3, 3)) != (counts is not None):
        which = "counts" if counts is not None else "offsets"
        raise ValueError(
            f"{which}: got them with a of {dims[0]} and b of {dims[1]} dimensions; counts belong to 3 and 3 "
            "dimensions, offsets to all others (gemm computes a batch without either)"
        )
    sizes, name = (offsets, "offsets") if counts is None else (counts, "counts")
    _check_array(name, sizes, "group")
    groups = sizes.shape[0]
    for which, tensor in (("a", a), ("b", b)):
        if tensor.dim() == 3 and tensor.shape[0] != groups:
            raise ValueError(f"{which}: got {tensor.shape[0]} matrices, and {name} has {groups} groups")
    torch._check_value(
        a.shape[-1] == b.shape[-2],
        lambda: (
            f"b: got shape {tuple(b.shape)}; with a of shape {tuple(a.shape)} its second to last extent must be "
            f"K = {a.shape[-1]}"
        ),
    )
    work = {(2, 3): RAGGED_M, (3, 2): RAGGED_N, (2, 2): RAGGED_K, (3, 3): MASKED}[dims]
    if given.rows is not None and given.places is not None:
        raise ValueError("rows, places: got both; gather rows of a, or scatter those of the result")
    m = a.shape[-2]
    for which, index, own in (("rows", given.rows, GATHERED), ("places", given.places, SCATTERED)):
        if index is None:
            continue
        if work != RAGGED_M:
            beside = "counts" if work == MASKED else f"groups of {'columns' if work == RAGGED_N else 'K'}"
            raise ValueError(f"{which}: got an index with {beside}; accepted are offsets of groups of rows")
        _check_array(which, index, "row")
        if own == SCATTERED and index.shape[0] != m:
            raise ValueError(f"{which}: got {index.shape[0]} numbers, and a has {m} rows")
        work, m = own, index.shape[0]
    if given.out_rows is not None:
        if work != SCATTERED:
            raise ValueError("out_rows: got it without places, whose results it counts")
        check_out_rows(given.out_rows)
    results = m if given.out_rows is None else given.out_rows
    return Extents(work, m, b.shape[-1], a.shape[-1], groups, results)


def _check_array(name: str, array: Any, of: str) -> None:
    if not isinstance(array, torch.Tensor):
        raise TypeError(f"{name}: got {type(array).__name__}, expected an int32 tensor of one number a {of}")
    if array.dtype != torch.int32:
        raise TypeError(f"{name}: got dtype {array.dtype}, accepted is torch.int32")
    if array.dim() != 1:
        raise ValueError(f"{name}: got {array.dim()} dimensions, expected 1: one number a {of}")


def check_dtypes(a: torch.Tensor, b: torch.Tensor) -> str:
    """The dtype of A. Raises TypeError where products in groups do not take the operands; they may be fake."""
    if product_dtype_name(a.dtype) not in TABLE:
        raise TypeError(f"a: got dtype {a.dtype}, accepted for products in groups are {ACCEPTED}")
    return request.operand_dtypes(a, b)[0]


def check_kinds(given: Sizes) -> None:
    """Raises TypeError or ValueError for arguments that say the sizes and are of no kind that can."""
    for name, each in zip(("offsets", "counts", "rows", "places"), given, strict=False):
        if each is not None:
            request.check_type(name, each)
    if given.out_rows is not None:
        check_out_rows(given.out_rows)


def check_out_rows(given: Any) -> None:
    """Raises TypeError or ValueError unless it is a number of rows."""
    if isinstance(given, bool) or not isinstance(given, int | torch.SymInt):
        raise TypeError(f"out_rows: got {type(given).__name__}, expected an int")
    if isinstance(given, int) and given < 0:
        raise ValueError(f"out_rows: got {given}, accepted are numbers of rows")


def default_dtype(dtype: str, program: Program, out_dtype: Any) -> str:
    """The name of the dtype of results for which neither the program nor `out` says one: `out_dtype`, else the default
    for an A of `dtype`.

    Raises TypeError where `out_dtype` is no accepted dtype, ValueError where it is int32 and the results are not the
    plain sums of int8.
    """
    if out_dtype is None:
        return TABLE[dtype].output
    name = None if not isinstance(out_dtype, torch.dtype) else request.comes_of(out_dtype, dtype)
    if name is None:
        raise TypeError(f"out_dtype: got {request.shown(out_dtype)}, {request.accepted(dtype)}")
    if name == "int32":
        request.check_whole("out_dtype", dtype, 1.0)
        if not is_product(program):
            raise ValueError(WHOLE_ALONE)
    return name


def result_dtype(number: int, output: Any, target: Any, out_dtype: Any, default: str, program: Program) -> str:
    """The name of the dtype of a result, of which `default` is that of `default_dtype`."""
    if default == "int32" and output.dtype is None and is_product(program):
        given = output_name(target.dtype) if isinstance(target, torch.Tensor) and out_dtype is None else None
        return given or default
    return program_request.output_dtype(number, output, target, out_dtype, default)


def check_program(program: Program, sizes: Extents) -> int:
    """The columns of D. Raises ValueError where the program cannot be computed in groups."""
    program_request.check_first(program)
    if program.quantizes and sizes.work == RAGGED_N:
        raise ValueError(
            "epilogue: ops.quantize takes blocks of 128 columns of a row, and with groups of columns a block may lie "
            "in two groups; accepted are groups of rows and of K"
        )
    across = {RAGGED_K: None, RAGGED_N: "row"}.get(sizes.work, "column")
    for output in program.outputs:
        if across and (output.reduce or "").startswith(across):
            own = "column" if across == "row" else "row"
            raise ValueError(
                f"epilogue: {output.reduce} with groups of {own}s, where a {across} of D belongs to many groups; "
                f"accepted are {own}_sum, {own}_max and {own}_max_abs"
            )
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
    if given.scales:
        _check_scales(number, given, shape, sizes)
        return
    columns = given.columns(columns)

    def said() -> str:
        wanted = sizes._replace(results=sizes.m).shape(columns)
        return f"operands[{number}]: got shape {shape}, expected {wanted} or one that broadcasts to it"

    for own, extent in zip(reversed(shape), (columns, sizes.m, sizes.groups), strict=False):
        if not is_one(own):
            torch._check_value(own == extent, said)
    axis = "m" if sizes.work in ROWS else "n" if sizes.work == RAGGED_N else None
    if axis and given.batched and getattr(given, axis):
        one = f"({sizes.groups}, 1, {columns})" if axis == "m" else f"({sizes.groups}, {sizes.m}, 1)"
        raise ValueError(
            f"operands[{number}]: got shape {shape}; accepted are ({sizes.m}, {columns}), {one}, and what broadcasts "
            "to one of them"
        )


def _check_scales(number: int, given: Input, shape: tuple[int, ...], sizes: Extents) -> None:
    """Raises ValueError unless an operand of that shape may scale blocks of K: a kernel reads all of them."""
    rows, of_k = sizes.m if given.scales[0] == "a" else sizes.n, -(-sizes.k // SCALE_K)
    ends = -(-rows // int(given.scales[1:])), of_k
    wanted = ends if given.scales[0] == "a" else ends[::-1]
    if sizes.work == RAGGED_K or shape[-2:] != wanted or shape[:-2] not in ((), (1,), (sizes.groups,)):
        what = "none with groups of K" if sizes.work == RAGGED_K else f"{wanted}, or so many for each group"
        raise ValueError(f"operands[{number}]: got scales of blocks of shape {shape}, accepted are {what}")


def describe(
    a: torch.Tensor,
    b: torch.Tensor,
    given: Sizes,
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
    sizes = extents(a, b, given)
    dtype, b_dtype = request.check_operands(a, b)
    check_dtypes(a, b)
    check_sizes(a, given)
    _check_limits(sizes)
    precision = "ieee" if precision is None else request.precision_of(precision, dtype)
    program = program_request.program_for(epilogue, operands, a.device)
    columns = check_program(program, sizes)
    for number, (own, operand) in enumerate(zip(program.inputs, operands, strict=True)):
        if isinstance(operand, torch.Tensor):
            request.check_tensor(f"operands[{number}]", operand)
        check_operand(number, own, operand, sizes, columns)
    default = default_dtype(dtype, program, out_dtype)
    outs = program_request.given_outputs(out, len(program.outputs))
    shapes = tuple(sizes.result_shape(output, columns) for output in program.outputs)
    resolved, targets = [], []
    for number, (output, target, shape) in enumerate(zip(program.outputs, outs, shapes, strict=True)):
        name = result_dtype(number, output, target, out_dtype, default, program)
        program_request.check_target(number, target, shape, name, a.device, len(outs))
        resolved.append(output._replace(dtype=name))
        targets.append(program_request.target_matrix(target, shape, name))
    program = replace(program, outputs=tuple(resolved))

    copies: list[tuple[str, str]] = []
    groups = sizes.groups
    gathers = sizes.work == GATHERED and packing.gathers_first(a.shape[0], sizes.m, groups, sizes.n, ITEMSIZE[dtype])
    if gathers:
        matrix_a = packing.ordered(a, sizes.m, copies)
        if ITEMSIZE[dtype] == 1:
            matrix_b = packing.columns(b, request.matrix_of(b, sizes.k, sizes.n), copies)
        else:
            matrix_b = request.operand_of("b", b, sizes.k, sizes.n, copies)
    elif ITEMSIZE[dtype] == 1:
        seen = request.matrix_of(a, a.shape[-2], sizes.k), request.matrix_of(b, sizes.k, sizes.n)
        matrix_a, matrix_b = packing.operands(a, b, *seen, copies)
    else:
        on_cores = PRODUCTS[dtype].units[precision] == CUDA_CORES
        matrix_a, matrix_b = (
            packing.divided(name, tensor, request.matrix_of(tensor, rows, cols), copies, sizes.work, on_cores)
            if sizes.work == RAGGED_K or name == WORKS[sizes.work].divided
            else request.operand_of(name, tensor, rows, cols, copies)
            for name, tensor, rows, cols in (("a", a, a.shape[-2], sizes.k), ("b", b, sizes.k, sizes.n))
        )
    matrices = tuple(
        _own(sizes, program_request.matrix_of(own, operand), own.dtype)
        for own, operand in zip(program.inputs, operands, strict=True)
        if not own.by_value
    )
    results = [
        _own(sizes, matrix, str(output.dtype))
        for (matrix, _), output in zip(targets, resolved, strict=True)
        if output.reduce is None
    ]
    problem = Problem(
        sizes.m, sizes.n, sizes.k, groups, dtype, str(resolved[0].dtype), precision, matrix_a, matrix_b, None,
        results[0], Epilogue(), RAGGED_M if gathers else sizes.work, b_dtype=b_dtype,
    )  # fmt: skip
    terms = program_request.readable_terms(program, operands, columns)
    if terms is not None and terms.bias is not None and operands[terms.bias].dim() == 3:
        terms = None
    problem = program_request.with_epilogue(problem, program, terms, matrices, results[1:])
    temporaries = program_request.temporaries_of(targets, resolved)
    return ProgramRequest(problem, a.device, tuple(copies), program, shapes, temporaries, terms, gathers)


def check_sizes(a: torch.Tensor, given: Sizes) -> None:
    """Raises TypeError or ValueError unless a kernel can read the arrays of a call, and their number is accepted."""
    names = "offsets" if given.counts is None else "counts", "rows" if given.places is None else "places"
    for name, array in zip(names, given.arrays, strict=False):
        if array.layout != torch.strided or array.is_nested:
            raise TypeError(f"{name}: got layout {array.layout}, expected a dense (strided) tensor")
        request.check_device(name, array, a.device)
        if array.shape[0] > 1 and array.stride(0) != 1:
            raise ValueError(f"{name}: got stride {array.stride(0)}, expected a contiguous tensor; call .contiguous()")
    groups = given.groups.shape[0]
    if not 1 <= groups <= MOST_GROUPS:
        raise ValueError(f"{names[0]}: got {groups} groups, accepted are 1 to {MOST_GROUPS}")


def _check_limits(sizes: Extents) -> None:
    named = {"M": sizes.m, "N": sizes.n, "K": sizes.k}
    ragged = {RAGGED_N: "N", RAGGED_K: "K"}.get(sizes.work, "M")
    for name, extent in named.items():
        most = MOST_ROWS if name == ragged else MAX_EXTENT
        if extent > most:
            raise ValueError(f"a, b: {name} is {extent}; at most {most}")


def _own(sizes: Extents, matrix: Matrix, dtype: str) -> Matrix:
    """A matrix like D. Where groups are its columns, a tile begins at any element, and no vector is aligned."""
    if sizes.work != RAGGED_N:
        return matrix
    return matrix._replace(align=min(matrix.align, {**ITEMSIZE, "int32": 4}[dtype]))
