"""torch.ops.cutegemm.grouped_gemm and grouped_gemm_out: `grouped_gemm` as operators of torch.

They carry the epilogue as its program's text, as `gemm_program` does. Numbers of rows may be symbolic: the sizes of
groups are the values of a tensor, so that one graph serves every division into groups, and every number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.utils.flop_counter import register_flop_formula

from cutegemm.problem import grouped_request, program_request, torch_dtype
from cutegemm.problem.dtypes import dtype_name
from cutegemm.problem.grouped_request import Sizes
from cutegemm.pytorch import (
    autograd,
    grouped_autograd,
    grouped_native,
    registering,
    sharded,
    sharding,
    sharding_programs,
)
from cutegemm.pytorch.autocast import cast_operands
from cutegemm.pytorch.dispatch import is_beyond_autograd
from cutegemm.pytorch.program_autograd import check_save, refuse_tangents
from cutegemm.pytorch.program_operator import divided, joined, listed, program_of
from cutegemm.run import grouped
from cutegemm.run.how import How, carried


def _compute(
    a, b, offsets, counts, rows, places, out_rows, operands, numbers, integers, program, out_dtype=None,
    precision=None, backend="auto", config=None, save="outputs", zeros=False, tell=False,
):  # fmt: skip
    known, sizes = program_of(program), Sizes(offsets, counts, rows, places, out_rows)
    check_save(save)
    given, out = joined(known, operands, numbers, integers), grouped.ZEROS if zeros else None
    results = grouped.compute(a, b, sizes, known, given, out, out_dtype, precision, backend, config)
    if tell:
        text = program + ("\noffsets" if counts is None else "\ncounts") + ("" if rows is None else " rows")
        grouped.tell(text, known, a, b, sizes, known, given, out_dtype, How(precision, backend))
    return registering.many(results)


def _compute_out(
    a, b, offsets, counts, rows, places, out_rows, operands, numbers, integers, program, precision, backend, config, out
) -> None:  # fmt: skip
    known, sizes = program_of(program), Sizes(offsets, counts, rows, places, out_rows)
    given = joined(known, operands, numbers, integers)
    grouped.compute(a, b, sizes, known, given, tuple(out), None, precision, backend, config)


def check_arguments(sizes: Sizes, tensors: Mapping[str, Any], out_dtype: Any, options: Mapping[str, Any]) -> None:
    """`registering.check_arguments` of a product in groups. options: with its precision, backend and config."""
    grouped_request.check_kinds(sizes)
    how = How(options["precision"], options["backend"], options["config"])
    registering.check_arguments(tensors, out_dtype, how)


def shapes_of(a: Any, b: Any, sizes: Sizes, operands: Any, program: Any) -> list[tuple[Any, ...]]:
    """The shapes of the results. Raises what `grouped_gemm` would raise, as far as shapes and dtypes tell."""
    extents = grouped_request.extents(a, b, sizes)
    grouped_request.check_dtypes(a, b)
    columns = grouped_request.check_program(program, extents)
    for number, (given, operand) in enumerate(zip(program.inputs, operands, strict=True)):
        grouped_request.check_operand(number, given, operand, extents, columns)
    return [extents.result_shape(output, columns) for output in program.outputs]


def dtypes_of(a: Any, program: Any, out_dtype: Any) -> list[str]:
    """The names of the results' dtypes. Raises TypeError or ValueError as `grouped_gemm` does."""
    default = grouped_request.default_dtype(str(dtype_name(a.dtype)), program, out_dtype)
    return [
        grouped_request.result_dtype(number, output, None, out_dtype, default, program)
        for number, output in enumerate(program.outputs)
    ]


def _fake(
    a, b, offsets, counts, rows, places, out_rows, operands, numbers, integers, program, out_dtype=None,
    precision=None, backend="auto", config=None, save="outputs", zeros=False,
):  # fmt: skip
    known = program_of(program)
    given = joined(known, operands, numbers, integers)
    shapes = shapes_of(a, b, Sizes(offsets, counts, rows, places, out_rows), given, known)
    names = dtypes_of(a, known, out_dtype)
    return [a.new_empty(shape, dtype=torch_dtype(name)) for shape, name in zip(shapes, names, strict=True)]


def _fake_out(
    a, b, offsets, counts, rows, places, out_rows, operands, numbers, integers, program, precision, backend, config, out
) -> None:  # fmt: skip
    known = program_of(program)
    given = joined(known, operands, numbers, integers)
    shapes = shapes_of(a, b, Sizes(offsets, counts, rows, places, out_rows), given, known)
    if len(out) != len(known.outputs):
        raise ValueError(f"out: got {len(out)} tensors, but the epilogue has {len(known.outputs)} results")
    for number, (each, shape) in enumerate(zip(out, shapes, strict=True)):
        if tuple(each.shape) != tuple(shape):
            name = program_request.target_name(number, len(out))
            raise ValueError(f"{name}: got shape {tuple(each.shape)}, expected {tuple(shape)}")


_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor? offsets, Tensor? counts, Tensor? rows, Tensor? places, SymInt? out_rows, "
    "Tensor[] operands, float[] numbers, SymInt[] integers, str program"
)
registering.define(
    f"grouped_gemm({_ARGUMENTS}, ScalarType? out_dtype=None, str? precision=None, str backend='auto', "
    "str? config=None, str save='outputs', bool zeros=False) -> Tensor[]",
    _compute, _fake,
)  # fmt: skip
registering.define(
    f"grouped_gemm_out({_ARGUMENTS}, str? precision, str backend, str? config, Tensor(d!)[] out) -> ()",
    _compute_out, _fake_out,
)  # fmt: skip
registering.refuse_derivatives("grouped_gemm_out", refuse_tangents, "grouped_gemm")

_redispatch = torch.ops.cutegemm.grouped_gemm.default.redispatch


def _recorded(
    keyset, a, b, offsets, counts, rows, places, out_rows, operands, numbers, integers, program, out_dtype=None,
    precision=None, backend="auto", config=None, save="outputs", zeros=False,
):  # fmt: skip
    """grouped_gemm as a differentiable function: its forward pass calls the operator below autograd."""
    below = keyset & registering.BELOW_AUTOGRAD
    operands, numbers, integers = listed(operands, numbers, integers)
    tensors = (a, b, *operands)
    refuse_tangents(*tensors)
    if sharded.is_distributed(*tensors):
        return _sharded(
            a, b, offsets, counts, rows, places, out_rows, operands, numbers, integers, program, out_dtype, precision,
            backend, config, save, zeros,
        )  # fmt: skip
    if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)):
        with torch._C._AutoDispatchBelowAutograd():
            return _redispatch(
                below, a, b, offsets, counts, rows, places, out_rows, operands, numbers, integers, program, out_dtype,
                precision, backend, config, save, zeros,
            )  # fmt: skip

    if a.element_size() == 1:
        named = {"a": a, "b": b, **{f"operands[{i}]": each for i, each in enumerate(operands)}}
        autograd.refuse_gradients(named, "grouped_gemm")

    run = registering.below_autograd(
        lambda a, b, arrays, epilogue, given, wanted: _redispatch(
            below, a, b, *arrays, *divided(given), epilogue.text, wanted, precision, backend, config, save, zeros
        )
    )
    known = program_of(program)
    settings = grouped_autograd.Settings(known, out_dtype, precision, backend, save, run)
    with enable_single_level_autograd_function():
        sizes = Sizes(offsets, counts, rows, places, out_rows)
        return list(grouped_autograd.record(a, b, sizes, joined(known, operands, numbers, integers), settings))


registering.LIBRARY.impl("grouped_gemm", _recorded, "Autograd", with_keyset=True)
registering.serve_natively("grouped_gemm", _compute, _recorded)


def _sharded(
    a, b, offsets, counts, rows, places, out_rows, operands, numbers, integers, program, out_dtype=None,
    precision=None, backend="auto", config=None, save="outputs", zeros=False,
):  # fmt: skip
    """grouped_gemm of DTensors: each rank computes its part, see sharding_programs.py."""
    known = program_of(program)
    given = joined(known, operands, numbers, integers)
    sizes = Sizes(offsets, counts, rows, places, out_rows)
    arrays = {"offsets": offsets, "counts": counts, "rows": rows, "places": places}
    tensors = {"a": a, "b": b, **{name: each for name, each in arrays.items() if each is not None}}
    names = [f"operands[{number}]" for number, each in enumerate(known.inputs) if not each.by_value]
    everything = {**tensors, **dict(zip(names, operands, strict=True))}
    mesh = sharded.mesh_of("torch.ops.cutegemm.grouped_gemm", everything)
    shapes = shapes_of(a, b, sizes, given, known)
    extents = grouped_request.extents(a, b, sizes)
    settings = sharding_programs.Settings.of(mesh, everything, known, out_dtype)
    local, read = sharding_programs.with_begins(known)

    def call(parts: list[Any], results: list[Any]) -> list[torch.Tensor]:
        own = dict(zip(everything, parts, strict=True))
        begins = sharding_programs.begins_of(read, results[0].begins)
        found: list[torch.Tensor] = torch.ops.cutegemm.grouped_gemm(
            own["a"], own["b"], *(own.get(name) for name in arrays), out_rows, parts[len(tensors) :], numbers,
            [*integers, *begins], local.text, out_dtype, precision, backend, config, save, zeros,
        )  # fmt: skip
        return found

    rules = sharding_programs.of_groups(known, tensors, operands, settings, extents, shapes[0][-1])
    return sharded.compute(mesh, list(everything.values()), rules, call, shapes)


sharding.handle("grouped_gemm", _sharded)


def _autocast(
    a, b, offsets, counts, rows, places, out_rows, operands, numbers, integers, program, out_dtype=None,
    precision=None, backend="auto", config=None, save="outputs", zeros=False,
):  # fmt: skip
    """a and b as torch.mm would cast them; the operands of the program keep their dtypes, which it names."""
    a, b, _, _, (precision, *_) = cast_operands(a, b, None, None, None, How(precision))
    with torch._C._DisableAutocast():
        return torch.ops.cutegemm.grouped_gemm(
            a, b, offsets, counts, rows, places, out_rows, *listed(operands, numbers, integers), program, out_dtype,
            precision, backend, config, save, zeros,
        )  # fmt: skip


registering.define_autocast("grouped_gemm", _autocast)


def vmapped(*given: Any, **options: Any) -> None:
    raise NotImplementedError(
        "grouped_gemm, moe: torch.vmap (which jacrev, hessian and batches of gradients use) is not supported; moe "
        "takes any number of leading dimensions of x, experts and weights, and grouped_gemm the groups of all elements "
        "in one call"
    )


for _name in ("grouped_gemm", "grouped_gemm_out"):
    torch.library.register_vmap(f"cutegemm::{_name}", vmapped, lib=registering.LIBRARY)
    registering.LIBRARY.impl(_name, vmapped, "Batched")  # autograd's older vmap


def flops(a_shape, b_shape, offsets, counts, rows, *rest, out_shape=None, **options) -> int:
    """2 M N K of all groups, for torch's FlopCounterMode; of a masked product as if every row counted."""
    single = len(a_shape) == 2 or len(b_shape) == 2
    m = a_shape[-2] if rows is None else rows[0]
    return 2 * m * a_shape[-1] * b_shape[-1] * (1 if single else a_shape[0])


register_flop_formula([torch.ops.cutegemm.grouped_gemm, torch.ops.cutegemm.grouped_gemm_out])(flops)


def record(
    a: Any, b: Any, sizes: Sizes, epilogue: Any, operands: Any, out_dtype: Any, save: str | None, *, precision: Any,
    backend: str, config: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """`grouped_gemm` of plain tensors, with its gradients recorded, where nothing but autograd looks at the call."""

    def run(a: Any, b: Any, sizes: Sizes, program: Any, given: Any, wanted: Any) -> Any:
        return grouped_native.compute(a, b, sizes, program, given, wanted, precision, backend, config)

    known = program_request.program_for(epilogue, operands, a.device)
    settings = grouped_autograd.Settings(known, out_dtype, precision, backend, save or "outputs", run)
    return list(grouped_autograd.record(a, b, sizes, operands, settings))


def call(
    a: Any, b: Any, sizes: Sizes, text: str, operands: Any, *, out_dtype: Any = None, precision: Any = None,
    backend: str = "auto", config: Any = None, save: str | None = None, zeros: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """`grouped_gemm` by the operator, or without it where nothing would see it: the results of the program of that
    text.
    """
    tensors, numbers, integers = divided(operands)
    seen = torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()
    if not seen and not is_beyond_autograd(a, b, *tensors, *sizes[:4]):
        known = program_of(text)
        given, how = (a, b, sizes, known, operands), (out_dtype, precision, backend, config)
        if zeros and not a.dim() == b.dim() == 2:  # all of groups of K is written
            return registering.many(grouped.compute(*given, grouped.ZEROS, *how))
        return registering.many(grouped_native.compute(*given, *how))
    found: list[torch.Tensor] = torch.ops.cutegemm.grouped_gemm(
        a, b, *sizes, tensors, numbers, integers, text, out_dtype, precision, backend,
        carried(config), save or "outputs", zeros,
    )  # fmt: skip
    return found


grouped_autograd.bind(call)
