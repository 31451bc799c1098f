"""From a call with an epilogue program to a Problem: what `request` is for the fixed epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from cutegemm.problem import dtypes, overlap, request
from cutegemm.problem.dtypes import dtype_name
from cutegemm.problem.epilogue import ACTIVATIONS, Epilogue
from cutegemm.problem.extents import varying
from cutegemm.problem.operand import Matrix, alignment
from cutegemm.problem.problem import Problem, program_aligns, result_matrix
from cutegemm.problem.program.graph import Input, Output, Program
from cutegemm.problem.program.known import lookup
from cutegemm.problem.program.terms import Terms, terms_of
from cutegemm.problem.program.writing import annotation

Results = torch.Tensor | tuple[torch.Tensor, ...]


class ProgramRequest(NamedTuple):
    """A checked call with a program.

    Attributes:
        problem: as asked: D is never computed as its transpose. device: of every tensor.
        copies: operands ("a", "b") that must be made contiguous first, with the reason.
        program: of the problem; every output has a dtype.
        shapes: of all results. temporaries: the numbers of those that are computed apart and copied into `out`.
        terms: the problem's epilogue has the terms of a plain `gemm`, which are these operands; None for a program.
        gathers: whether A's copy consists of the rows that an index names. The problem then has its rows in order.
    """

    problem: Problem
    device: torch.device
    copies: tuple[tuple[str, str], ...]
    program: Program
    shapes: tuple[tuple[int, ...], ...]
    temporaries: frozenset[int]
    terms: Terms | None
    gathers: bool = False

    @property
    def swapped(self) -> bool:
        return False

    @property
    def copied(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.copies)


def refuse_products(a: Any) -> None:
    """Raises TypeError for operands whose sums no program is computed on."""
    if isinstance(a, torch.Tensor) and (name := dtypes.product_dtype_name(a.dtype)) in dtypes.ALONE:
        raise TypeError(
            f"a: got dtype {a.dtype} with an epilogue program ({name} sums); programs compute in fp32, and their "
            f"operands' dtypes are {dtypes.ACCEPTED}"
        )


def describe(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Any,
    operands: Sequence[Any],
    out: Any,
    out_dtype: torch.dtype | None,
    precision: str | None,
) -> ProgramRequest:
    """Checks the arguments of a call of `cutegemm.gemm` with an epilogue (see there) and describes it.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is accepted.
    """
    refuse_products(a)
    if out_dtype is torch.int32:
        raise ValueError("out_dtype: got torch.int32 with an epilogue or scales; it is for the plain product of int8")
    asked = request.describe(a, b, None, 1.0, 0.0, None, None, None, out_dtype, precision)
    plain = asked.problem.transposed() if asked.swapped else asked.problem
    program = program_for(epilogue, operands, a.device)
    for number, operand in enumerate(operands):
        if isinstance(operand, torch.Tensor):
            request.check_tensor(f"operands[{number}]", operand)
    inputs = program.inputs
    batch, m, n = plain.batch, plain.m, plain.n
    columns = n
    if program.gating:
        if n % 2:
            raise ValueError(f"b: got {n} columns; an epilogue of gate and up needs an even number of them")
        columns = n // 2
    if program.uses("partner") and columns % 2:
        raise ValueError(f"epilogue: partner exchanges neighbouring columns, and its result has {columns} of them")
    leading = (batch,) if a.dim() == 3 or b.dim() == 3 else ()
    for number, (given, operand) in enumerate(zip(inputs, operands, strict=True)):
        _check_shape(number, given, operand, (batch, m, columns))
    outs = given_outputs(out, len(program.outputs))
    resolved, shapes = [], []
    for number, (output, target) in enumerate(zip(program.outputs, outs, strict=True)):
        shape = result_shape(output, leading, m, columns)
        dtype = output_dtype(number, output, target, out_dtype, plain.out_dtype)
        check_target(number, target, shape, dtype, a.device, len(outs))
        shapes.append(shape)
        resolved.append(output._replace(dtype=dtype))
    check_first(program)
    program = replace(program, outputs=tuple(resolved))
    targets = [
        target_matrix(target, shape, str(output.dtype))
        for target, shape, output in zip(outs, shapes, resolved, strict=True)
    ]
    matrices = tuple(
        matrix_of(given, operand) for given, operand in zip(inputs, operands, strict=True) if not given.by_value
    )
    more = [matrix for (matrix, _), output in zip(targets[1:], resolved[1:], strict=True) if output.reduce is None]
    terms = readable_terms(program, operands, n)
    plain = replace(plain, out_dtype=str(resolved[0].dtype), d=targets[0][0])
    problem = with_epilogue(plain, program, terms, matrices, more)
    temporaries = temporaries_of(targets, resolved)
    return ProgramRequest(problem, a.device, asked.copies, program, tuple(shapes), temporaries, terms)


def check_first(program: Program) -> None:
    """Raises ValueError where the first result is no matrix."""
    if program.outputs[0].reduce is not None:
        raise ValueError("epilogue: its first result is a reduction; return a matrix first, the reductions after it")


def temporaries_of(targets: Sequence[tuple[Matrix, bool]], outputs: Sequence[Output]) -> frozenset[int]:
    """The results that a kernel writes apart from the tensors given. targets: of each, `target_matrix`."""
    pairs = zip(targets, outputs, strict=True)
    return frozenset(i for i, ((_, apart), output) in enumerate(pairs) if apart and output.reduce is None)


def with_epilogue(
    problem: Problem, program: Program, terms: Terms | None, matrices: tuple[Matrix, ...], more: Sequence[Matrix]
) -> Problem:
    """The problem with the program as its epilogue, or with the terms that it is made of.

    matrices: how the tensor operands lie. more: the matrices among the results behind D.
    """
    tensors = {number: own for number, own in enumerate(program.inputs) if not own.by_value}
    if terms is None:
        custom = Epilogue(custom=program, aligns=program_aligns(program, matrices, more))
        return replace(problem, epilogue=custom, operands=matrices, outputs=tuple(more))
    c, bias = (None if each is None else tensors[each].dtype for each in (terms.c, terms.bias))
    of_c = None if terms.c is None else matrices[list(tensors).index(terms.c)]
    return replace(problem, c=of_c, epilogue=Epilogue(c, bias, "n", terms.activation))


def readable_terms(program: Program, operands: Sequence[Any], n: int) -> Terms | None:
    """The terms that the program is made of, where kernels that know these can read the operands. n: columns of D."""
    terms = terms_of(program, ACTIVATIONS)
    if terms is None:
        return None
    if terms.bias is not None:
        bias = operands[terms.bias]  # whose extent may be 1 although the program reads one number a column
        if bias.dim() == 0 or bias.shape[-1] != n or bias.stride(-1) != 1:
            return None
    return terms


def result_shape(output: Output, leading: tuple[Any, ...], m: Any, columns: Any) -> tuple[Any, ...]:
    """The shape of a result. leading: (L,) where a or b is a batch, else (). columns: of D."""
    return (*leading, *output.extents(m, columns))


def program_for(epilogue: Any, operands: Any, device: torch.device) -> Program:
    """The program of an epilogue with these operands: `traced` of what `inputs_of` describes."""
    return traced(epilogue, inputs_of(operands, device))


def traced(epilogue: Any, inputs: tuple[Input, ...]) -> Program:
    """The program that a caller means: one, or a function of acc and the operands, which is traced."""
    if isinstance(epilogue, Program):
        if len(epilogue.inputs) != len(inputs):
            raise ValueError(f"operands: got {len(inputs)}, but the program takes {len(epilogue.inputs)}: {epilogue}")
        for number, (given, own) in enumerate(zip(inputs, epilogue.inputs, strict=True)):
            alike = given.dtype == own.dtype and given.by_value == own.by_value
            if alike and own.scales and given.batched <= own.batched:
                continue
            if not alike or given.m > own.m or given.n > own.n or given.batched > own.batched:
                needs, got = (annotation(each) for each in (own, given))
                raise ValueError(f"operands[{number}]: got {got}, but the program takes {needs}: {epilogue}")
        numbered = tuple(own._replace(name=f"x{number}") for number, own in enumerate(epilogue.inputs))
        return epilogue if numbered == epilogue.inputs else replace(epilogue, inputs=numbered)
    if not callable(epilogue):
        shown = request.shown(epilogue)
        raise TypeError(f"epilogue: got {shown}, expected a function of acc and the operands, or a Program")
    return lookup(epilogue, inputs)


def check_operands(operands: Any) -> None:
    """Raises TypeError unless the operands of a call are a tuple or a list."""
    if not isinstance(operands, (tuple, list)):
        raise TypeError(f"operands: got {type(operands).__name__}, expected a tuple of tensors and Python numbers")


def inputs_of(operands: Any, device: torch.device) -> tuple[Input, ...]:
    """The operands of a call as the inputs of a program; tensors may be fake or mapped.

    Raises TypeError or ValueError naming an operand that no program takes.
    """
    check_operands(operands)
    return tuple(_input(number, operand, device) for number, operand in enumerate(operands))


def _input(number: int, operand: Any, device: torch.device) -> Input:
    name = f"x{number}"
    if isinstance(operand, torch.Tensor):
        request.check_device(f"operands[{number}]", operand, device)
        if operand.is_nested:  # its shape cannot be asked for
            request.check_tensor(f"operands[{number}]", operand)
        if operand.dim() > 3:
            raise ValueError(f"operands[{number}]: got {operand.dim()} dimensions, accepted are 0 to 3")
        dtype = "int32" if operand.dtype == torch.int32 else dtypes.term_name(operand.dtype)
        if dtype is None:
            raise TypeError(
                f"operands[{number}]: got dtype {operand.dtype}, accepted are {dtypes.ACCEPTED_TERMS}, torch.int32"
            )
        batched, m, n = varying(operand.shape)
        return Input(name, dtype, m=m, n=n, batched=batched)
    if isinstance(operand, torch.SymInt):  # a size while torch.export traces; the call itself checks its range
        return Input(name, "int32", by_value=True)
    if isinstance(operand, bool) or not isinstance(operand, int | float):
        said = f"operands[{number}]: got {type(operand).__name__}"
        if isinstance(operand, torch.SymFloat):
            raise TypeError(f"{said}, {request.OPEN}. {request.OPEN_SIZES}")
        raise TypeError(f"{said}, expected a torch.Tensor or a Python number")
    if isinstance(operand, int):
        if not -(2**31) <= operand < 2**31:
            raise ValueError(
                f"operands[{number}]: got {request.shown(operand)}, which int32 cannot hold; pass a float or a tensor"
            )
        return Input(name, "int32", by_value=True)
    request.check_number(f"operands[{number}]", operand)
    return Input(name, "fp32", by_value=True)


def _check_shape(number: int, given: Input, operand: Any, extents: tuple[int, int, int]) -> None:
    """Raises ValueError unless a tensor operand broadcasts to D."""
    if given.by_value or given.scales:  # of scales `scaling` has checked the shape
        return
    extents = (*extents[:2], given.columns(extents[2]))
    for own, extent in zip(reversed(operand.shape), reversed(extents), strict=False):
        if own not in (extent, 1):
            shape, wanted = tuple(operand.shape), extents[1:] if extents[0] == 1 else extents
            raise ValueError(f"operands[{number}]: got shape {shape}, expected {wanted} or one that broadcasts to it")


def matrix_of(given: Input, operand: torch.Tensor) -> Matrix:
    """How an operand lies; the stride of an extent of 1 is 0, as is that of one along which the program reads none."""
    shape = (1, 1, 1, *operand.shape)[-3:]
    strides = (0, 0, 0, *operand.stride())[-3:]
    varies = (given.batched, *((True, True) if given.scales else (given.m, given.n)))
    batch, row, col = (
        stride if varied and extent > 1 else 0 for stride, varied, extent in zip(strides, varies, shape, strict=True)
    )
    align = alignment(operand.data_ptr(), operand.element_size(), shape[2], row, batch)
    return Matrix(shape[1], shape[2], row, col, batch, align)


def in_terms_of(why: Exception, names: Sequence[str]) -> None:
    """Replaces `operands[i]` in the message of an error by names[i], the argument of the call that is this operand."""
    text = str(why)
    for number, name in enumerate(names):
        text = text.replace(f"operands[{number}]", name)
    why.args = (text,)


def given_outputs(out: Any, count: int) -> tuple[Any, ...]:
    if out is None:
        return (None,) * count
    if count == 1 and isinstance(out, torch.Tensor):
        return (out,)
    if not isinstance(out, (tuple, list)) or len(out) != count:
        got = f"{len(out)} tensors" if isinstance(out, (tuple, list)) else type(out).__name__
        raise ValueError(f"out: got {got}, but the epilogue has {count} results; pass a tuple of as many, or None")
    return tuple(out)


def target_name(number: int, count: int) -> str:
    return "out" if count == 1 else f"out[{number}]"


def output_dtype(number: int, output: Any, target: Any, out_dtype: Any, default: str) -> str:
    """The dtype of a result: what the program casts it to, else that of `out`, else `out_dtype`; fp32 if reduced."""
    own = output.dtype or ("fp32" if output.reduce else None)
    if own is not None and number == 0 and out_dtype is not None and dtype_name(out_dtype) != own:
        raise TypeError(f"out_dtype: got {out_dtype}, but the epilogue casts its first result to {own}")
    if own is not None:
        return own
    given = dtype_name(target.dtype) if isinstance(target, torch.Tensor) and out_dtype is None else None
    if (given or default) == "int32":
        raise ValueError(
            "out_dtype: got None for int8 operands and an epilogue, whose results are no int32; pass one of "
            f"{dtypes.ACCEPTED}"
        )
    return given or default


def check_target(number: int, target: Any, shape: tuple[int, ...], dtype: str, device: Any, count: int) -> None:
    name = target_name(number, count)
    if target is None:
        return
    request.check_tensor(name, target)
    overlap.check_self(target, name)
    if tuple(target.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(target.shape)}, expected {shape}")
    request.check_device(name, target, device)
    if dtypes.output_name(target.dtype) != dtype:
        raise TypeError(f"{name}: got dtype {target.dtype}, expected {dtypes.OUTPUTS[dtype].torch_name}")


def target_matrix(target: torch.Tensor | None, shape: tuple[int, ...], dtype: str) -> tuple[Matrix, bool]:
    """How a result lies where the kernel writes it, and whether that is apart from the tensor given."""
    batch, rows, cols = (1, 1, 1, *shape)[-3:]
    if target is not None:
        stride_batch, row, col = (0, 0, 0, *target.stride())[-3:]
        if cols <= 1:
            col = 1
        if rows <= 1:
            row = max(cols, 1)
        if col == 1 and row >= cols:
            stride_batch = stride_batch if batch > 1 else 0
            align = alignment(target.data_ptr(), target.element_size(), cols, row, stride_batch)
            return Matrix(rows, cols, row, 1, stride_batch, align), False
    return result_matrix(rows, cols, batch, dtype), target is not None
