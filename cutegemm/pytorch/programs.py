"""`gemm` with an epilogue: the short way to a remembered kernel, or what kind of call it is, as gemm.py does without.

torch.compile                                       the function becomes a program's text (compiled.py), and the
                                                    call the operator torch.ops.cutegemm.gemm_program
torch.jit.trace, a dispatch mode, a tensor
subclass, vmap, torch.func, batched gradients       that operator (program_operator.py)
autocast                                            a and b cast as those of torch.mm; operands stay as they are
a tensor that requires grad                         the autograd function (program_autograd.py)
a description not seen before                       checks, plan, compilation (run/fused.py)
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from cutegemm import native
from cutegemm.choice.plan import Memo, Plan
from cutegemm.problem import overlap, program_request, request
from cutegemm.problem.program.graph import Program
from cutegemm.problem.program.known import meaning
from cutegemm.pytorch import autograd, compiled, program_autograd, transforms
from cutegemm.pytorch.autocast import cast_operands
from cutegemm.pytorch.dispatch import is_dispatched
from cutegemm.pytorch.program_autograd import check_save
from cutegemm.pytorch.program_operator import divided
from cutegemm.pytorch.registering import check_arguments, few
from cutegemm.run import call, fused, runner
from cutegemm.run.how import How, passed

OPTIONS = ("epilogue", "operands", "save")
"""What `gemm` takes for an epilogue program only."""
SCALE_OPTIONS = ("scale_a", "scale_b", "scaling", "accumulate")
"""What `gemm` takes for operands of fp8 and int8 only."""

_recorded = Memo(4096)
"""Call description and `save` -> program, of calls that recorded gradients."""
_numbers, _next_number = Memo(4096), itertools.count(1)
"""Numbers of what epilogues mean. No number is given twice: of two threads that ask at once one number is lost."""
_PLAIN = call.PLAIN
_memo, _key = fused.memo, fused.description
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_autocast_on = torch._C._is_any_autocast_enabled
_is_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_grad_enabled = torch.is_grad_enabled
_has_transforms = torch._C._are_functorch_transforms_active


def refuse_terms(c: Any, alpha: Any, beta: Any, bias: Any, activation: Any) -> None:
    """Raises ValueError for terms of the fixed epilogue next to a program, TypeError for what is no number."""
    plain = c is None and bias is None and activation is None
    if plain and alpha.__class__ is float and alpha == 1.0 and beta.__class__ is float and beta == 0.0:
        return  # nearly every call
    request.check_number("alpha", alpha)
    request.check_number("beta", beta)
    if not plain or alpha != 1 or beta != 0:
        raise ValueError(
            "epilogue: got one together with c, alpha, beta, bias or activation; write these in the function, and "
            "pass tensors as operands"
        )


def refuse_alone(options: dict[str, Any]) -> None:
    """Raises ValueError for what goes with an epilogue only."""
    for name in ("operands", "save"):
        value = options.get(name)
        if value is not None and not (name == "operands" and isinstance(value, (tuple, list)) and len(value) == 0):
            raise ValueError(
                f"{name}: it is given without an epilogue, which it is for; pass epilogue=, or leave {name} away"
            )


def plan_of(a: Any, b: Any, c: Any, options: dict[str, Any]) -> Plan:
    """The plan of `gemm(a, b, c, **options)` with an epilogue; see there for what it raises."""
    return fused.plan_of(*_completed(a, b, c, options))


def call_of(a: Any, b: Any, c: Any, options: dict[str, Any]) -> runner.Call:
    """The checked call `gemm(a, b, c, **options)` with an epilogue; see there for what it raises."""
    a, b, epilogue, operands, out, out_dtype, how = _completed(a, b, c, options)
    asked = program_request.describe(a, b, epilogue, operands, out, out_dtype, how.precision)
    return runner.Call.posed(asked, how)


def _completed(a: Any, b: Any, c: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """What `fused` takes of `gemm(a, b, c, **options)` with an epilogue, cast where autocast is on.

    Where gradients are recorded the epilogue is the program with what the backward pass needs as further results.
    """
    given = dict(options)
    epilogue, operands, save = given.pop("epilogue"), given.pop("operands", ()), given.pop("save", None)
    check_save(save)
    program_request.check_operands(operands)
    known = runner.complete(given, (*OPTIONS, *SCALE_OPTIONS))
    refuse_terms(c, known["alpha"], known["beta"], known["bias"], known["activation"])
    how = How.of(known)
    if _is_autocast_on():
        a, b, _, _, how = cast_operands(a, b, None, None, known["out"], how)
    for name, tensor in (("a", a), ("b", b)):
        request.check_type(name, tensor)
    if known["out"] is None:
        epilogue = program_autograd.recorded_epilogue(a, b, epilogue, operands, save)
    return a, b, epilogue, operands, known["out"], known["out_dtype"], how


def compute(
    a: torch.Tensor, b: torch.Tensor, epilogue: Any, operands: Sequence[Any], out: Any, out_dtype: Any, how: Any,
    save: str | None,
) -> Any:  # fmt: skip
    """`gemm` with an epilogue; see there."""
    check_save(save)
    if _is_dynamo_compiling():
        text, operands = compiled.as_arguments(epilogue, operands, a)
        return _by_operator(a, b, text, operands, out, out_dtype, how, save)
    program_request.refuse_products(a)
    if out is None and (serves := native.program) is not None and (meant := meant_by(epilogue)) is not None:
        found = serves(number := number_of(meant), a, b, operands, out_dtype, *how)
        if found is NotImplemented:
            found = _computed(a, b, epilogue, operands, out, out_dtype, how, save)
            fused.tell(number, meant, a, b, epilogue, operands, out_dtype, How(*how))
        if found is not None:
            return found
    return _computed(a, b, epilogue, operands, out, out_dtype, how, save)


def meant_by(epilogue: Any) -> Hashable | None:
    """What an epilogue means now; None where that has not been worked out before."""
    return epilogue if epilogue.__class__ is Program else meaning(epilogue)


def number_of(meant: Hashable) -> int:
    """The number by which the C++ part knows a meaning, or a tuple of it and what else a call differs in."""
    number: int | None = _numbers.get(meant)
    if number is None:
        number = next(_next_number)
        _numbers.put(meant, number)
    return number


def _computed(a, b, epilogue, operands, out, out_dtype, how, save):
    """A call by Python, with no regard to torch.compile."""
    run = program = None
    try:
        if a.__class__ in _PLAIN and b.__class__ in _PLAIN and not _dispatch_modes():
            key = _key(a, b, epilogue, operands, out, out_dtype, how)
            plain, records = True, a.requires_grad or b.requires_grad
            for operand in operands:
                kind = operand.__class__
                if kind is not float and kind is not int:
                    if kind not in _PLAIN:
                        plain = False
                    elif operand.requires_grad:
                        records = True
            if out is not None:
                for each in (out,) if isinstance(out, torch.Tensor) else out:
                    if each.__class__ not in _PLAIN or each.requires_grad:
                        plain = False
            if plain and not _is_autocast_on() and forward_ad._current_level < 0:
                if not records or not _is_grad_enabled():
                    run = _memo.get(key)
                elif out is None and not _has_transforms():
                    program = _recorded.get((key, save))
    except (AttributeError, TypeError, RuntimeError):
        pass  # not a dense tensor, or something unhashable: what it is is found out below
    if run is not None:
        return run(a, b, operands, out)
    if program is not None:
        return _record(a, b, program, operands, out_dtype, how, save)
    return _uncommon(a, b, epilogue, operands, out, out_dtype, How(*how), save)


def _record(a, b, program, operands, out_dtype, how, save):
    precision, backend, *_ = how
    settings = program_autograd.Settings(program, out_dtype, precision, backend, save, partial(_run, how))
    results = program_autograd.record(a, b, operands, settings)
    return results if len(results) > 1 else results[0]


def _run(how, a, b, program, operands, out_dtype):
    """A call below autograd."""
    return compute(a, b, program, operands, None, out_dtype, how, None)


def _uncommon(a, b, epilogue, operands, out, out_dtype, how, save):
    """A call that is new, or that is more than a multiplication of plain tensors."""
    program_request.check_operands(operands)
    outs = () if out is None else (out,) if isinstance(out, torch.Tensor) else out
    if not isinstance(outs, (tuple, list)):
        raise TypeError(f"out: got {request.shown(out)}, expected a tensor, or a tuple of one for each result")
    tensors = {"a": a, "b": b}
    tensors |= {f"operands[{i}]": each for i, each in enumerate(operands) if isinstance(each, torch.Tensor)}
    targets = {("out" if len(outs) == 1 else f"out[{i}]"): each for i, each in enumerate(outs)}
    everything = (*tensors.values(), *outs)
    under_transform = transforms.active(*everything)
    if under_transform:
        transforms.refuse({**tensors, **targets}, out)
    if under_transform or is_dispatched(*everything) or _is_tracing():
        text = _program(a, b, epilogue, operands).text
        return _by_operator(a, b, text, operands, out, out_dtype, how, save)
    if _is_autocast_on():
        a, b, _, _, how = cast_operands(a, b, None, None, out, how)
        with torch._C._DisableAutocast():
            return compute(a, b, epilogue, operands, out, out_dtype, how, save)
    program_autograd.refuse_tangents(*everything)
    if _is_grad_enabled():
        for name, target in targets.items():
            request.check_tensor(name, target)
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors.values()):
            if out is not None:
                raise ValueError(autograd.NO_GRADIENT_INTO)
            if a.element_size() == 1:
                autograd.refuse_gradients(tensors)
            if _has_transforms():
                text = _program(a, b, epilogue, operands).text
                return _by_operator(a, b, text, operands, out, out_dtype, how, save)
            key = fused.key_of(a, b, epilogue, operands, out, out_dtype, how)
            key, epilogue = fused.as_meant(key, epilogue, operands, a.device)
            program = _program(a, b, epilogue, operands)
            if key is not None:
                _recorded.put((key, save), program)
            return _record(a, b, program, operands, out_dtype, how, save)
    return fused.compute(a, b, epilogue, operands, out, out_dtype, how)


def _program(a: Any, b: Any, epilogue: Any, operands: Sequence[Any]) -> Program:
    """The program of a call whose tensors may be fake, mapped or of a subclass."""
    for name, tensor in (("a", a), ("b", b)):
        request.check_type(name, tensor)
    return program_request.program_for(epilogue, operands, a.device)


def _by_operator(a, b, text, operands, out, out_dtype, how, save):
    """The call as torch's operator; see program_operator.py. torch.compile puts this into its graph."""
    if not _is_dynamo_compiling():
        check_arguments({}, out_dtype, How(*how))
    given = divided(operands)
    if out is None:
        return few(torch.ops.cutegemm.gemm_program(a, b, *given, text, out_dtype, *passed(how, save or "outputs")))
    outs = results_given(a, b, operands, out, out_dtype)
    torch.ops.cutegemm.gemm_program_out(a, b, *given, text, *passed(how, outs))
    return few(outs)


def results_given(a: Any, b: Any, operands: Any, out: Any, out_dtype: Any) -> list[torch.Tensor]:
    """The tensors of `out` as a list. Raises where the first has another dtype, or where one is an operand itself."""
    outs = [out] if isinstance(out, torch.Tensor) else list(out)
    if out_dtype is not None and out_dtype != outs[0].dtype:
        raise TypeError(f"out: got dtype {outs[0].dtype}, but out_dtype says {out_dtype}")
    named = {"a": a, "b": b}
    for number, operand in enumerate(operands):
        if isinstance(operand, torch.Tensor):
            named[f"operands[{number}]"] = operand
    for each in outs:
        overlap.check_identity(each, named)
    return outs
