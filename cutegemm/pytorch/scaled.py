"""`gemm` with scaled operands: the call becomes one with an epilogue program, whose first factors are the scales.

Everything that works with an epilogue program therefore works with scales. Scales of blocks of K are operands of the
program too, but the kernel reads them while it sums (`problem.scaling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from cutegemm import native
from cutegemm.choice.plan import Memo
from cutegemm.problem import program_request, request, scaling
from cutegemm.problem import scales as scale_recipes
from cutegemm.problem.dtypes import PRODUCTS, TABLE, dtype_name, term_name, torch_dtype
from cutegemm.problem.program.build import Builder
from cutegemm.problem.program.graph import Input, Output, Program
from cutegemm.problem.program.simplify import simplified
from cutegemm.pytorch import autograd, compiled, program_operator, programs, sharded, transforms
from cutegemm.pytorch.dispatch import is_dispatched
from cutegemm.pytorch.program_autograd import refuse_tangents
from cutegemm.pytorch.registering import carried_scaling, check_arguments, few
from cutegemm.run import fused
from cutegemm.run.call import PLAIN
from cutegemm.run.how import How, passed

ACCUMULATIONS = ("promoted", "fast")
"""What `accumulate` may be."""
FAST_WITH_BLOCKS = (
    "accumulate: got 'fast' with scales of blocks of K, which are applied where sums are promoted; leave it away"
)
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_tracing = torch._C._is_tracing
_has_transforms = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled
_NUMBERS = (float, int)
_NONE = ()
"""What `operands` is where a call has none."""
_remembered = Memo(limit=4096)
"""(program, dtype of D) by what `_key` makes of a call."""
_NEVER_PROMOTED = frozenset(torch_dtype(name) for name, row in PRODUCTS.items() if "fast" not in row.units)


def precision_of(a: Any, precision: str | None, accumulate: Any) -> str | None:
    """The precision that says how sums are accumulated. Raises ValueError for what a's dtype does not have."""
    if accumulate is not None and not request.is_one_of(accumulate, ACCUMULATIONS):
        accepted = ", ".join(map(repr, ACCUMULATIONS))
        raise ValueError(f"accumulate: got {request.shown(accumulate)}, accepted are None, {accepted}")
    request.check_precision(precision)
    if accumulate != "fast":
        if accumulate and precision == "fast":
            raise ValueError("accumulate: got 'promoted' with precision 'fast'; leave precision away")
        return precision
    if isinstance(a, torch.Tensor) and a.dtype in _NEVER_PROMOTED:
        having = ", ".join(f"torch.{row.torch_name}" for row in TABLE.values() if "fast" in row.units)
        raise ValueError(f"accumulate: got 'fast' for {a.dtype}, whose sums are never promoted; it applies to {having}")
    if precision not in (None, "ieee", "fast"):
        raise ValueError(f"precision: got {precision!r} with accumulate='fast'; leave it away")
    return "fast"


def arguments(
    a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, activation: Any, out: Any, out_dtype: Any,
    epilogue: Any, operands: Sequence[Any], scale_a: Any, scale_b: Any, scales: Any,
) -> tuple[Program, tuple[Any, ...], Any]:  # fmt: skip
    """(program, operands, out_dtype) of the call with a program that computes a scaled one."""
    like = [a, b, scale_a, scale_b]
    if sharded.is_distributed(*like, c, bias):
        given = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "c": c, "bias": bias}
        sharded.mesh_of("cutegemm.gemm with scales", {name: each for name, each in given.items() if each is not None})
        like = [sharded.shape_of(each) for each in like]
    of_a, of_b = scale_recipes.recipes(like[0], like[1], like[2], like[3], scales)
    autograd.refuse_gradients({"scale_a": scale_a, "scale_b": scale_b})
    if epilogue is None:
        program, operands = _terms(c, alpha, beta, bias, activation, b.shape[-1])
        if c is not None and beta == 0:  # read by nobody, and yet an argument
            request.check_device("c", c, a.device, "a")
            leading = a.shape[:-2] or b.shape[:-2]
            request.check_c_shape(sharded.shape_of(c), (*leading, a.shape[-2], b.shape[-1]))
    else:
        programs.refuse_terms(c, alpha, beta, bias, activation)
        program = program_request.program_for(epilogue, operands, a.device)
    made = scaling.scaled(program, of_a and of_a.input, of_b and of_b.input)
    if out is None:
        made, out_dtype = with_default(a, made, out_dtype)
    return made, (*operands, *scaling.operands_of(program, scale_a, scale_b, of_a, of_b)), out_dtype


def with_default(a: Any, program: Program, out_dtype: Any) -> tuple[Program, Any]:
    """(program, out_dtype) that run with scales: results of int8 are bf16 where neither of these says more."""
    if out_dtype is not None or not TABLE[str(dtype_name(a.dtype))].is_integer:
        return program, out_dtype
    if program.outputs[0].dtype is None:
        return program, torch.bfloat16
    # An out_dtype would contradict the cast of the first result.
    rest = (each if each.dtype or each.reduce else each._replace(dtype="bf16") for each in program.outputs)
    return replace(program, outputs=tuple(rest)), None


def compute(
    a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, activation: Any, out: Any, out_dtype: Any, how: How,
    epilogue: Any, operands: Sequence[Any], save: Any, scale_a: Any, scale_b: Any, scales: Any,
) -> Any:  # fmt: skip
    """`gemm` with a scale or two; see there."""
    plain = alpha.__class__ is float and alpha == 1.0 and beta.__class__ is float and beta == 0.0 and operands is _NONE
    plain = plain and epilogue is None and c is None and out is None and save is None and scales is None
    if plain and not _is_dynamo_compiling() and native.scaled is not None:
        d = native.scaled(a, b, scale_a, scale_b, bias, activation, out_dtype, *how)
        if d is NotImplemented:
            d = compute_eager(
                a, b, c, alpha, beta, bias, activation, out, out_dtype, how, None, (), None, scale_a, scale_b, None
            )
            tell(a, b, scale_a, scale_b, bias, activation, out_dtype, how)
        if d is not None:
            return d
    tensors = a, b, c, bias, scale_a, scale_b
    program_request.check_operands(operands)
    if epilogue is None:
        programs.refuse_alone({"operands": operands, "save": save})
    tracing = _is_dynamo_compiling()
    transformed = not tracing and _has_transforms() and transforms.active(*tensors)
    # With `out` an eager call under a dispatch mode becomes gemm_program_out, with the scales among its operands.
    if tracing or transformed or ((epilogue is None or out is None) and (_is_tracing() or is_dispatched(*tensors))):
        if out is not None:
            raise ValueError(
                "out: got a tensor with scales under torch.compile, a dispatch mode, vmap or torch.func; leave it away"
            )
        autograd.refuse_gradients({"a": a, "b": b, "c": c, "bias": bias, "scale_a": scale_a, "scale_b": scale_b})
        if transformed:
            refuse_tangents(*tensors, *operands)
        if not tracing:
            terms = {"c": c, "bias": bias} if epilogue is None else {}
            check_arguments({"scale_a": scale_a, "scale_b": scale_b, **terms}, out_dtype, how)
            scale_recipes.asked(scales, scale_a, scale_b)
        scales = carried_scaling(scales)
        if epilogue is None:
            request.check_number("alpha", alpha)
            request.check_number("beta", beta)
            if not tracing:
                request.check_activation(activation)
            return torch.ops.cutegemm.scaled_gemm(
                a, b, scale_a, scale_b, c, alpha, beta, bias, activation, out_dtype, *passed(how, scales)
            )  # fmt: skip
        programs.refuse_terms(c, alpha, beta, bias, activation)
        programs.check_save(save)
        autograd.refuse_gradients({f"operands[{i}]": each for i, each in enumerate(operands)})
        if tracing:
            text, operands = compiled.as_arguments(epilogue, operands, a)
        else:
            text = program_request.program_for(epilogue, operands, a.device).text
        results = torch.ops.cutegemm.scaled_gemm_program(
            a, b, scale_a, scale_b, scales, *program_operator.divided(operands), text, out_dtype, *passed(how)
        )  # fmt: skip
        return few(results)
    return compute_eager(
        a, b, c, alpha, beta, bias, activation, out, out_dtype, how, epilogue, operands, save, scale_a, scale_b, scales
    )


def compute_eager(
    a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, activation: Any, out: Any, out_dtype: Any, how: How,
    epilogue: Any, operands: Sequence[Any], save: Any, scale_a: Any, scale_b: Any, scales: Any,
) -> Any:  # fmt: skip
    """The same, with no regard to tracing."""
    meant = None if epilogue is None else programs.meant_by(epilogue)
    plain = c is None and out is None and (epilogue is None or (meant is not None and len(operands) == 0))
    key = _key(a, b, alpha, beta, bias, activation, out_dtype, scale_a, scale_b, scales, meant) if plain else None
    found = None if key is None else _remembered.get(key)
    terms = tuple([each for each in (bias, scale_a, scale_b) if each is not None])
    if found is None:
        autograd.refuse_gradients(
            {"a": a, "b": b, "c": c, "bias": bias} | {f"operands[{i}]": x for i, x in enumerate(operands)}
        )
        program, given, out_dtype = arguments(
            a, b, c, alpha, beta, bias, activation, out, out_dtype, epilogue, operands, scale_a, scale_b, scales
        )
        # Scales of empty matrices are left out, and gate and up have halves of them.
        if key is not None and len(given) == len(terms) and all(x is y for x, y in zip(given, terms, strict=True)):
            _remembered.put(key, (program, out_dtype))
    else:
        (program, out_dtype), given = found, terms
    if how.precision == "fast" and program.block_scales:
        raise ValueError(FAST_WITH_BLOCKS)
    try:
        return programs.compute(a, b, program, given, out, out_dtype, how, save)
    except (TypeError, ValueError) as why:
        arguments_of = {"c": c, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}
        program_request.in_terms_of(why, _names(given, len(operands), arguments_of))
        raise


def tell(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, activation: Any, out_dtype: Any, how: How,
    epilogue: Any = None,
) -> None:  # fmt: skip
    """Tells the C++ part how a call was computed that it has asked for.

    epilogue: what a gated `activation` of a layer stands for; gate and up then have an operand each of B's scales.
    """
    with fused.planning():
        launch = launch_of(a, b, scale_a, scale_b, bias, activation, out_dtype, how, epilogue)
        if launch is not NotImplemented:
            native.tell("scaled", (a, b, scale_a, scale_b, bias, activation, out_dtype, *how), launch)


def launch_of(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, activation: Any, out_dtype: Any, how: How,
    epilogue: Any = None,
) -> Any:  # fmt: skip
    """How the C++ part launches a call: what `fused.launch_of` gives, of the tensors a, b, bias, scale_a and scale_b.
    NotImplemented where its plan is not remembered. The caller holds `fused.planning`.
    """
    terms = {"bias": bias, "activation": activation} if epilogue is None else {"bias": None, "activation": None}
    program, given, chosen = arguments(
        a, b, None, 1.0, 0.0, out=None, out_dtype=out_dtype, epilogue=epilogue, operands=(), scale_a=scale_a,
        scale_b=scale_b, scales=None, **terms,
    )  # fmt: skip
    named = [(i, each) for i, each in ((2, terms["bias"]), (3, scale_a), (4, scale_b)) if each is not None]
    if len(given) == len(named) + 1:
        named.append(named[-1])  # gate's and up's
    plan = fused.memo.plan(fused.key_of(a, b, program, given, None, chosen, how))
    if plan is None:
        return NotImplemented
    # Scales of empty matrices are left out; all others are the very tensors, or views of them.
    if len(given) != len(named) or not all(map(_share, given, (tensor for _, tensor in named))):
        return None
    places = {
        number: (place, operand.data_ptr() - tensor.data_ptr())
        for number, ((place, tensor), operand) in enumerate(zip(named, given, strict=True))
    }
    asked = program_request.describe(a, b, program, given, None, chosen, how.precision)
    return fused.launch_of(plan, asked, places, {}, 5)


def _share(operand: torch.Tensor, tensor: torch.Tensor) -> bool:
    return operand.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _key(
    a: Any, b: Any, alpha: Any, beta: Any, bias: Any, activation: Any, out_dtype: Any, scale_a: Any, scale_b: Any,
    scales: Any, meant: Any,
) -> Any:  # fmt: skip
    """All that the program of act(acc + bias), or of an epilogue that means `meant`, with scales depends on, but for
    what `programs.compute` asks each time: strides, layouts, addresses, autocast. None where there are other terms,
    where a tensor requires grad or is of a subclass, and where something cannot be hashed.
    """
    if alpha.__class__ not in _NUMBERS or beta.__class__ not in _NUMBERS or alpha != 1 or beta != 0:
        return None
    records = _is_grad_enabled()
    found = [activation, out_dtype, scales, meant]
    try:
        for tensor in (a, b, bias, scale_a, scale_b):
            if tensor is None:
                found.append(None)
            elif tensor.__class__ not in PLAIN or (records and tensor.requires_grad):
                return None
            else:
                found += (tensor.shape, tensor.dtype, tensor.device)
        key = tuple(found)
        hash(key)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return key


def _names(given: Sequence[Any], own: int, tensors: dict[str, Any]) -> list[str]:
    """The caller's names of the operands of a scaled product. The first `own` are `operands` of the call."""
    names = []
    for number, each in enumerate(given):
        argument = next((name for name, tensor in tensors.items() if tensor is each), "scale_b")
        names.append(f"operands[{number}]" if number < own else argument)
    return names


def unscaled(a: Any, b: Any, c: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The operands and options of the call without scales that computes `gemm(a, b, c, **options)`."""
    known = dict(options)
    scale_a, scale_b, scales, accumulate = (known.pop(name, None) for name in programs.SCALE_OPTIONS)
    if accumulate is not None:
        known["precision"] = precision_of(a, known.get("precision"), accumulate)
    if scale_a is None and scale_b is None and scales is None:
        return a, b, c, known
    if known.get("epilogue") is None:
        programs.refuse_alone(known)
    given = {"alpha": 1.0, "beta": 0.0, "bias": None, "activation": None, "epilogue": None, "operands": ()}
    terms = {name: known.pop(name, default) for name, default in given.items()}
    program, operands, out_dtype = arguments(
        a, b, c, out=known.get("out"), out_dtype=known.get("out_dtype"), scale_a=scale_a, scale_b=scale_b,
        scales=scales, **terms,
    )  # fmt: skip
    return a, b, None, {**known, "epilogue": program, "operands": operands, "out_dtype": out_dtype}


def _terms(
    c: Any, alpha: float, beta: float, bias: Any, activation: Any, columns: int
) -> tuple[Program, tuple[Any, ...]]:
    """The program act(alpha acc + beta C + bias), without the terms that are not there, and its operands."""
    request.check_number("alpha", alpha)
    request.check_number("beta", beta)
    request.check_activation(activation)
    request.check_beta(beta, c)
    reads_c = c is not None and beta != 0
    operands: list[Any] = [float(alpha)] if alpha != 1 else []
    if c is not None:
        _term("c", c)
    if reads_c:
        operands += [c, float(beta)]
    if bias is not None:
        operands.append(_term("bias", bias))
        if tuple(bias.shape) != (columns,):
            got = tuple(bias.shape)
            raise ValueError(f"bias: got shape {got}, expected {(columns,)}, one number a column of the result")
    inputs = program_request.inputs_of(operands, (c if c is not None else bias).device) if reads_c or bias is not None \
        else program_request.inputs_of(operands, torch.device("cpu"))  # fmt: skip
    return _program(inputs, alpha != 1, reads_c, bias is not None, activation), tuple(operands)


def _term(name: str, tensor: Any) -> torch.Tensor:
    request.check_tensor(name, sharded.shape_of(tensor))
    if term_name(tensor.dtype) is None:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, accepted are the floating-point types of 2 and 4 bytes")
    return tensor


@lru_cache(maxsize=256)
def _program(
    inputs: tuple[Input, ...], scales_acc: bool, reads_c: bool, has_bias: bool, activation: str | None
) -> Program:
    builder = Builder(inputs)
    places = iter(range(len(inputs)))

    def read() -> int:
        return builder.add("input", attribute=next(places))

    z = builder.add("acc")
    if scales_acc:
        z = builder.add("mul", z, read())
    if reads_c:
        z = builder.add("add", z, builder.add("mul", read(), read()))
    if has_bias:
        z = builder.add("add", z, read())
    if activation is not None:
        z = builder.add(activation, z)
    return simplified(builder.program([Output(z)]))
