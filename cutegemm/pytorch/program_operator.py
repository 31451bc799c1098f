"""torch.ops.cutegemm.gemm_program and gemm_program_out: `gemm` with an epilogue program as operators of torch.

An operator carries the program as its text (`cutegemm.problem.program.text`); which operands are tensors, floats and
integers follows from it, so that the three lists go back to one (`joined`). Eager calls of plain tensors do not come
here (see programs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.utils.flop_counter import register_flop_formula

from cutegemm.problem import dtypes, program_request, torch_dtype
from cutegemm.problem.dtypes import dtype_name
from cutegemm.problem.program.graph import Output, Program
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from cutegemm.pytorch import (
    autograd,
    program_autograd,
    program_batches,
    registering,
    sharded,
    sharding,
    sharding_programs,
    transforms,
)
from cutegemm.pytorch.autocast import cast_operands
from cutegemm.pytorch.operator import check as check_product
from cutegemm.run import fused
from cutegemm.run.how import passed, schema, split


@lru_cache(maxsize=4096)
def program_of(text: str) -> Program:
    """The program that an operator carries. Raises ValueError for a text that is no program."""
    return simplified(parse(text))


def joined(program: Program, tensors: Sequence[Any], numbers: Sequence[Any], integers: Sequence[Any]) -> list[Any]:
    """The operands in the program's order. Raises ValueError where their numbers do not fit."""
    counts = [0, 0, 0]
    given = listed(tensors, numbers, integers)
    found = []
    for each in program.inputs:
        kind = 0 if not each.by_value else 2 if each.dtype == "int32" else 1
        if counts[kind] < len(given[kind]):
            found.append(given[kind][counts[kind]])
        counts[kind] += 1
    if counts != [len(each) for each in given]:
        wanted, got = ("{} tensors, {} floats and {} integers".format(*each) for each in (counts, map(len, given)))
        raise ValueError(f"operands: the program takes {wanted}, got {got}")
    return found


def listed(*lists: Sequence[Any] | None) -> tuple[Sequence[Any], ...]:
    """The lists of an operator's arguments: AOTInductor's runtime gives None for an empty one."""
    return tuple(each or () for each in lists)


def divided(operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The tensors, floats and integers among operands: what `joined` puts together."""
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    others = [each for each in operands if not isinstance(each, torch.Tensor)]
    integers = [each for each in others if isinstance(each, int | torch.SymInt)]
    return tensors, [each for each in others if not isinstance(each, int | torch.SymInt)], integers


def _compute(a, b, operands, numbers, integers, program, out_dtype=None, *options, tell=False) -> list[torch.Tensor]:
    known, (how, save) = program_of(program), split(options)
    program_autograd.check_save(save)
    given = joined(known, operands, numbers, integers)
    results = registering.many(fused.compute(a, b, known, given, None, out_dtype, how))
    if tell:
        fused.tell(program, known, a, b, known, given, out_dtype, how)
    return results


def _compute_out(a, b, operands, numbers, integers, program, *options) -> None:
    known, (how, out) = program_of(program), split(options)
    given = joined(known, operands, numbers, integers)
    fused.compute(a, b, known, given, tuple(out), None, how)


def shapes_of(a: Any, b: Any, operands: Sequence[Any], program: Program) -> list[tuple[Any, ...]]:
    """The shapes of the results. Raises what `gemm` would raise, as far as shapes and dtypes tell."""
    *leading, m, n = check_product(a, b, None, 0.0, None, None)
    if program.gating:
        torch._check_value(
            n % 2 == 0, lambda: f"b: got {n} columns; an epilogue of gate and up needs an even number of them"
        )
        n = n // 2
    whole = (*leading, m, n)
    for number, (given, operand) in enumerate(zip(program.inputs, operands, strict=True)):
        if given.by_value or given.scales:  # of scales `scaling` has checked the shape
            continue
        name = f"operands[{number}]"
        if operand.dtype != (torch.int32 if given.dtype == "int32" else torch_dtype(given.dtype)):
            raise TypeError(f"{name}: got dtype {operand.dtype}, and the program takes {given.dtype}")
        wanted = (*whole[:-1], given.columns(n))
        try:
            operand.reshape(operand.shape[max(operand.dim() - len(whole), 0) :]).expand(wanted)
        except RuntimeError:
            raise ValueError(
                f"{name}: got shape {tuple(operand.shape)}, expected {wanted} or one that broadcasts to it"
            ) from None
    return [program_request.result_shape(output, tuple(leading), m, n) for output in program.outputs]


def _default(out_dtype: torch.dtype | None, a: torch.Tensor) -> str:
    """The name of the dtype of results that nothing else decides."""
    return str(dtype_name(out_dtype)) if out_dtype else dtypes.TABLE[str(dtype_name(a.dtype))].output


def _fake(a, b, operands, numbers, integers, program, out_dtype=None, *options):
    split(options)[0].check()
    return fake(a, b, operands, numbers, integers, program, out_dtype)


def fake(a, b, operands, numbers, integers, program, out_dtype) -> list[torch.Tensor]:
    """The results of fake tensors."""
    known = program_of(program)
    shapes = shapes_of(a, b, joined(known, operands, numbers, integers), known)
    if out_dtype is not None and dtype_name(out_dtype) is None:
        raise TypeError(f"out_dtype: got {out_dtype}, accepted are {dtypes.ACCEPTED}")
    results = []
    for number, (output, shape) in enumerate(zip(known.outputs, shapes, strict=True)):
        name = program_request.output_dtype(number, output, None, out_dtype, _default(out_dtype, a))
        results.append(a.new_empty(shape, dtype=torch_dtype(name)))
    return results


def _fake_out(a, b, operands, numbers, integers, program, *options):
    known, (how, out) = program_of(program), split(options)
    how.check()
    shapes = shapes_of(a, b, joined(known, operands, numbers, integers), known)
    if len(out) != len(shapes):
        raise ValueError(f"out: got {len(out)} tensors, but the epilogue has {len(shapes)} results")
    for number, (output, target, shape) in enumerate(zip(known.outputs, out, shapes, strict=True)):
        name = program_request.target_name(number, len(shapes))
        if tuple(target.shape) != tuple(shape):
            raise ValueError(f"{name}: got shape {tuple(target.shape)}, expected {tuple(shape)}")
        wanted = program_request.output_dtype(number, output, target, None, "fp32")
        if dtype_name(target.dtype) != wanted:
            raise TypeError(f"{name}: got dtype {target.dtype}, expected {dtypes.TABLE[wanted].torch_name}")


_ARGUMENTS = "Tensor a, Tensor b, Tensor[] operands, float[] numbers, SymInt[] integers, str program"
registering.define(
    f"gemm_program({_ARGUMENTS}, ScalarType? out_dtype=None, " + schema("str save='outputs'") + ") -> Tensor[]",
    _compute, _fake,
)  # fmt: skip
registering.define(f"gemm_program_out({_ARGUMENTS}, {schema('Tensor(d!)[] out')}) -> ()", _compute_out, _fake_out)
registering.refuse_derivatives("gemm_program_out", program_autograd.refuse_tangents)

_redispatch = torch.ops.cutegemm.gemm_program.default.redispatch


def _recorded(keyset, a, b, operands, numbers, integers, program, out_dtype=None, *options):
    """gemm_program as a differentiable function: its forward pass calls the operator below autograd."""
    below = keyset & registering.BELOW_AUTOGRAD
    operands, numbers, integers = listed(operands, numbers, integers)
    tensors = (a, b, *operands)
    program_autograd.refuse_tangents(*tensors)
    if sharded.is_distributed(*tensors):
        return _sharded(a, b, operands, numbers, integers, program, out_dtype, *options)
    if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)):
        with torch._C._AutoDispatchBelowAutograd():
            return _redispatch(below, a, b, operands, numbers, integers, program, out_dtype, *options)

    if a.element_size() == 1:
        autograd.refuse_gradients({"a": a, "b": b, **{f"operands[{i}]": each for i, each in enumerate(operands)}})
    known, (how, save) = program_of(program), split(options, "outputs")
    run = registering.below_autograd(
        lambda a, b, epilogue, given, wanted: _redispatch(below, a, b, *divided(given), epilogue.text, wanted, *options)
    )
    settings = program_autograd.Settings(known, out_dtype, how.precision, how.backend, save, run)
    with enable_single_level_autograd_function():
        return list(program_autograd.record(a, b, joined(known, operands, numbers, integers), settings))


registering.LIBRARY.impl("gemm_program", _recorded, "Autograd", with_keyset=True)


def _sharded(a, b, operands, numbers, integers, program, out_dtype=None, *options):
    """gemm_program of DTensors: each rank computes its part, see sharding_programs.py."""
    known = program_of(program)
    split(options)[0].refuse_distributed()
    given = joined(known, operands, numbers, integers)
    tensors = {"a": a, "b": b}
    names = [f"operands[{number}]" for number, each in enumerate(known.inputs) if not each.by_value]
    everything = {**tensors, **dict(zip(names, operands, strict=True))}
    mesh = sharded.mesh_of("torch.ops.cutegemm.gemm_program", everything)
    like = [*map(sharded.shape_of, given)]
    shapes = shapes_of(a, b, like, known)
    (whole,) = shapes_of(a, b, like, replace(known, outputs=(Output(0),)))
    settings = sharding_programs.Settings.of(mesh, everything, known, out_dtype)
    local, read = sharding_programs.with_begins(known)

    def call(parts: list[Any], results: list[Any]) -> list[torch.Tensor]:
        begins = sharding_programs.begins_of(read, results[0].begins)
        found: list[torch.Tensor] = torch.ops.cutegemm.gemm_program(
            *parts[:2], parts[2:], numbers, [*integers, *begins], local.text, out_dtype, *options
        )
        return found

    rules = sharding_programs.of_product(known, tensors, operands, settings, whole)
    return sharded.compute(mesh, list(everything.values()), rules, call, shapes)


sharding.handle("gemm_program", _sharded)


registering.serve_natively("gemm_program", _compute, _recorded)


def _autocast(a, b, operands, numbers, integers, program, out_dtype=None, *options):
    """a and b as torch.mm would cast them; the operands of the program keep their dtypes, which it names."""
    how, save = split(options, "outputs")
    a, b, _, _, how = cast_operands(a, b, None, None, None, how)
    with torch._C._DisableAutocast():
        return torch.ops.cutegemm.gemm_program(
            a, b, *listed(operands, numbers, integers), program, out_dtype, *passed(how, save)
        )


registering.define_autocast("gemm_program", _autocast)


def _mapped(size, tensors, dims, numbers, integers, program, options):
    """The results of the mapped call, with the batch in front. options: what follows the program's text."""
    out_dtype, *others = options or (None,)
    how, save = split(tuple(others), "outputs")
    return program_batches.mapped(
        size, tensors, dims, program_of(program),
        lambda a, b, tensors, known: torch.ops.cutegemm.gemm_program(
            a, b, tensors, numbers, integers, known.text, out_dtype, *passed(how.for_copies(), save)
        ),
    )  # fmt: skip


def _vmapped(info, in_dims, a, b, operands, numbers, integers, program, *options):
    dims = in_dims[0], in_dims[1], *in_dims[2]
    results = _mapped(info.batch_size, (a, b, *operands), dims, numbers, integers, program, options)
    return results, [0] * len(results)


torch.library.register_vmap("cutegemm::gemm_program", _vmapped, lib=registering.LIBRARY)


def _batched(a, b, operands, numbers, integers, program, *options):
    """gemm_program of tensors of the older vmap, by which torch.autograd.grad takes a batch of gradients."""
    level, size, tensors, dims = transforms.unwrap((a, b, *operands))
    results = _mapped(size, tensors, dims, numbers, integers, program, options)
    return [torch._add_batch_dim(each, 0, level) for each in results]


registering.LIBRARY.impl("gemm_program", _batched, "Batched")
register_flop_formula([torch.ops.cutegemm.gemm_program, torch.ops.cutegemm.gemm_program_out])(registering.flops)
