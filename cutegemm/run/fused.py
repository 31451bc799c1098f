"""A call with an epilogue program: what `call` and `runner` are for the fixed epilogue.

A call is known by the descriptions of its tensors and by its program; a repeated one is looked up and launched.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cutegemm import backend as backends
from cutegemm import locks, native
from cutegemm.choice.plan import Plan, PlanMemo
from cutegemm.problem import overlap, packing, program_request, torch_dtype
from cutegemm.problem.program.graph import ROW_BLOCKS, Output, Program
from cutegemm.problem.program.known import meaning
from cutegemm.problem.program_request import ProgramRequest, Results
from cutegemm.problem.request import FLT_MAX
from cutegemm.run import call, preparing
from cutegemm.run.arguments import Addresses, Numbers, Scalars
from cutegemm.run.how import How
from cutegemm.run.reductions import Reductions
from cutegemm.run.runner import Call, current_device

Outs = tuple[torch.Tensor, ...]
Core = Callable[[torch.Tensor, torch.Tensor, Sequence[Any], Outs], None]
"""core(a, b, operands, outs): computes into outs, which lie as the problem says."""
Runner = Callable[[torch.Tensor, torch.Tensor, Sequence[Any], Any], Results]
"""run(a, b, operands, out) -> the results, as the caller gets them"""

memo = PlanMemo()
_lock = locks.lock()
_FLT_MAX, _INF = FLT_MAX, math.inf


def compute(
    a: torch.Tensor, b: torch.Tensor, epilogue: Any, operands: Sequence[Any], out: Any, out_dtype: Any, how: Any
) -> Results:
    """`gemm` with an epilogue, of plain tensors and with no regard to autograd, autocast or tracing."""
    key = key_of(a, b, epilogue, operands, out, out_dtype, how)
    run = None if key is None else memo.get(key)
    if run is None:
        run = planned(key, a, b, epilogue, operands, out, out_dtype, How(*how))[0]
    return run(a, b, operands, out)


def description(a, b, epilogue, operands, out, out_dtype, how):
    """All that a plan depends on; an unhashable or strange argument raises something.

    A function is known by what it means (`known.meaning`), None where that is not known. A number that fp32 or
    int32 cannot hold is strange: planning refuses it.
    """
    return (
        a.shape, a.stride(), a.dtype, a.device, (p := a.data_ptr()) and p & 15 | 16, a.is_neg(),
        b.shape, b.stride(), b.dtype, b.device, (p := b.data_ptr()) and p & 15 | 16, b.is_neg(),
        epilogue if epilogue.__class__ is Program else meaning(epilogue),
        *[
            kind
            if ((kind := x.__class__) is float and not _FLT_MAX < abs(x) < _INF)
            or (kind is int and -0x80000000 <= x < 0x80000000)
            else (
                x.shape, x.stride(), x.dtype, x.device, (p := x.data_ptr()) and p & 15 | 16, x.is_neg()
            )
            for x in operands
        ],
        None if out is None else tuple(map(_described, (out,) if isinstance(out, torch.Tensor) else out)),
        out.__class__, out_dtype, how,
        None if a.is_cuda else os.environ.get("CUTEGEMM_ARCH"),
    )  # fmt: skip


MEANING = 12
"""Where in a description the epilogue is."""


def key_of(a, b, epilogue, operands, out, out_dtype, how) -> Any:
    """The key of a call; None when something about it is strange.

    A function whose meaning is not remembered is known by its program.
    """
    try:
        found = description(a, b, epilogue, operands, out, out_dtype, how)
        if found[MEANING] is None:
            program = program_request.program_for(epilogue, operands, a.device)
            found = (*found[:MEANING], meaning(epilogue) or program, *found[MEANING + 1 :])
        hash(found)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return None
    return found


def as_meant(key: Any, epilogue: Any, operands: Sequence[Any], device: torch.device) -> tuple[Any, Any]:
    """(key, program) to plan for this key of `key_of`: the program that an epilogue meant when the key was made.

    A function may mean something else by now, which must not run under this key. Where its program is gone, this is
    (None, epilogue): plan what it means now, and remember nothing.
    """
    if key is None or key[MEANING].__class__ is Program:
        return key, epilogue if key is None else key[MEANING]
    programs, inputs = key[MEANING].programs, program_request.inputs_of(operands, device)
    if inputs not in programs:
        program_request.traced(epilogue, inputs)
    program = programs.get(inputs)
    return (None, epilogue) if program is None else (key, program)


def _described(out: Any) -> Any:
    """All of a tensor to write that a plan depends on."""
    return out.shape, out.stride(), out.dtype, out.device, (p := out.data_ptr()) and p & 15 | 16, out.is_neg()


def planned(
    key: Any, a: Any, b: Any, epilogue: Any, operands: Any, out: Any, out_dtype: Any, how: How
) -> tuple[Runner, Plan]:
    """Checks and plans a call; its runner and plan are remembered."""
    key, epilogue = as_meant(key, epilogue, operands, a.device)
    asked = program_request.describe(a, b, epilogue, operands, out, out_dtype, how.precision)
    return remembered(memo, key, asked, how, _runner)


def remembered(
    memo: PlanMemo,
    key: Any,
    asked: ProgramRequest,
    how: How,
    runner_of: Callable[[Plan, ProgramRequest], Callable[..., Results]],
) -> tuple[Callable[..., Results], Plan]:
    """Plans a checked call; its runner and plan are put into the memo, unless the key is None."""
    with _lock:
        state = call.keep_up(memo)
        plan = Call.posed(asked, how).plan(state)
        run = runner_of(plan, asked)
        if key is not None:
            memo.put(key, run, plan)
    return run, plan


def planning() -> contextlib.AbstractContextManager[Any]:
    """Context: no plan is made meanwhile, and none forgotten for another."""
    return _lock


def launch_of(
    plan: Plan, asked: ProgramRequest, places: dict[int, tuple[int, int]], numbers: dict[int, int], count: int,
    arrays: Sequence[tuple[int, int]] = (),
) -> tuple[Any, ...] | None:  # fmt: skip
    """What `native.tell` takes of a call without `out`: the fields of a `Launcher`, (tensor, offset in
    bytes) for each address, (number given, constant) for each number, (shape, dtype) for each result. None: it needs
    Python.

    Args:
        places: (tensor, offset) of each operand that is a tensor. Tensors 0 and 1 are a and b.
        numbers: which of the numbers given each other operand is. count: tensors given, behind which results stand.
        arrays: (tensor, offset) of each array of a product in groups.
    """
    if plan.kernel is None or plan.emulated or plan.copies or plan.preparations or asked.temporaries:
        return None
    if any(0 in shape for shape in asked.shapes) or not all(map(_is_written, asked.program.outputs)):
        return None
    with current_device(asked.device):
        launcher = plan.kernel.launcher(plan.problem)
    if launcher is None:
        return None
    nowhere, first, *more = (-1, 0), *((count + i, 0) for i in range(len(asked.shapes)))
    # Empty operands have address 0, which a TMA descriptor must not hold although nothing is read.
    a, b = ((0, 0), (1, 0)) if plan.problem.k else (first, first)
    terms = asked.terms
    addresses: tuple[tuple[int, int], ...]
    if terms is not None:
        c, bias = (nowhere if each is None else places[each] for each in (terms.c, terms.bias))
        addresses = a, b, c, bias, first
        scalars = [(numbers[each], 0.0) if each.__class__ is int else (-1, float(each)) for each in terms[:2]]
        assert terms._fields[:2] == Scalars._fields
    else:
        addresses = a, b, nowhere, nowhere, first, *places.values(), *more
        scalars = [*((-1, each) for each in _UNUSED), *((each, 0.0) for each in numbers.values())]
    dtypes = (torch_dtype(str(output.dtype)) for output in asked.program.outputs)
    addresses = *addresses[:5], *arrays, *addresses[5:]
    return *launcher, addresses, tuple(scalars), tuple(zip(map(tuple, asked.shapes), dtypes, strict=True))


def _is_written(output: Output) -> bool:
    """Whether kernels write a new result as the caller gets it, not pieces of it."""
    return output.reduce is None or (output.reduce, output.dtype) == (ROW_BLOCKS, "fp32")


def kinds_of(operands: Sequence[Any], by_operator: bool) -> tuple[list[int], list[int]]:
    """The places of the tensors among operands, and of the numbers; by_operator: of these the floats first."""
    tensors = [i for i, each in enumerate(operands) if isinstance(each, torch.Tensor)]
    others = [i for i in range(len(operands)) if i not in tensors]
    if by_operator:
        others.sort(key=lambda i: operands[i].__class__ is int)
    return tensors, others


def given_places(
    tensors: Sequence[int], others: Sequence[int], first: int
) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
    """(places, numbers) as `launch_of` takes them, where the operands `tensors` are the tensors from the number `first`
    on, and the operands `others` are numbers, given in this order.
    """
    return {each: (first + i, 0) for i, each in enumerate(tensors)}, dict(
        sorted((each, i) for i, each in enumerate(others))
    )


def tell(
    number: int | str, meant: Any, a: Any, b: Any, epilogue: Any, operands: Sequence[Any], out_dtype: Any, how: How
) -> None:
    """Tells the C++ part how a call without `out` was computed that it has asked for, as `native.program` or, by the
    text of the program, as the operator. meant: the meaning of the epilogue, or the program, that `number` stands for.
    """
    by_operator = isinstance(number, str)
    tensors, others = kinds_of(operands, by_operator)
    given = [operands[i] for i in (*tensors, *others)] if by_operator else operands
    places, numbers = given_places(tensors, others, 2)
    key, program = as_meant(key_of(a, b, epilogue, operands, None, out_dtype, how), epilogue, operands, a.device)
    if key is None or key[MEANING] != meant:
        return
    with planning():
        plan = memo.plan(key)
        if plan is not None:
            asked = program_request.describe(a, b, program, operands, None, out_dtype, how.precision)
            launch = launch_of(plan, asked, places, numbers, 2 + len(tensors))
            native.tell("program", (number, a, b, tuple(given), out_dtype, *how), launch)


def _runner(plan: Plan, asked: ProgramRequest) -> Runner:
    chosen = backends.get(plan.choice.backend)
    empty = any(0 in shape for shape in asked.shapes) or asked.problem.n == 0
    core: Core
    if isinstance(chosen, backends.OnTensors) or empty:
        core = backends.last_resort().program_core(asked)
    else:
        assert plan.kernel is not None
        core = (_emulated_core if plan.emulated else _cuda_core)(plan, asked)
    dtypes = [torch_dtype(str(output.dtype)) for output in asked.program.outputs]
    copied, temporaries = asked.copied, asked.temporaries

    def run(a: Any, b: Any, operands: Sequence[Any], out: Any) -> Results:
        given = (None,) * len(dtypes) if out is None else (out,) if isinstance(out, torch.Tensor) else out
        if out is not None:
            check_writable(given, a, b, operands)
        if "a" in copied:
            a = packing.copied("a", a)
        if "b" in copied:
            b = packing.copied("b", b)
        outs = tuple(
            torch.empty(shape, dtype=dtype, device=asked.device) if own is None or number in temporaries else own
            for number, (own, shape, dtype) in enumerate(zip(given, asked.shapes, dtypes, strict=True))
        )
        core(a, b, operands, outs)
        for number in temporaries:
            given[number].copy_(outs[number])  # type: ignore[union-attr]
        results = tuple(made if own is None else own for own, made in zip(given, outs, strict=True))
        return results[0] if len(asked.shapes) == 1 else results

    return run


def check_writable(
    given: Sequence[Any], a: Any, b: Any, operands: Sequence[Any], more: dict[str, torch.Tensor] | None = None
) -> None:
    """Raises ValueError where a result overlaps an input or another result; tells autograd of the writes.

    more: further inputs, by name.
    """
    from cutegemm.problem.request import check_inference

    inputs = {"a": a, "b": b, **(more or {})}
    inputs |= {f"operands[{i}]": each for i, each in enumerate(operands) if isinstance(each, torch.Tensor)}
    for number, out in enumerate(given):
        if out is None:
            continue
        others = {f"out[{i}]": other for i, other in enumerate(given) if other is not None and i < number}
        overlap.check(out, {**inputs, **others}, program_request.target_name(number, len(given)))
        check_inference(out)
    torch._C._increment_version(tuple(out for out in given if out is not None))


def arguments_of(
    asked: ProgramRequest, a: torch.Tensor, b: torch.Tensor, operands: Sequence[Any], results: Sequence[torch.Tensor]
) -> tuple[Addresses, Numbers]:
    """What a launch takes: the addresses and the numbers, in the order of `run.arguments`."""
    terms = asked.terms
    if terms is not None:
        c, bias = (0 if each is None else operands[each].data_ptr() for each in (terms.c, terms.bias))
        alpha, beta = (operands[each] if each.__class__ is int else each for each in (terms.alpha, terms.beta))
        return (a.data_ptr(), b.data_ptr(), c, bias, results[0].data_ptr()), (alpha, beta)
    tensors = [operand.data_ptr() for operand in operands if isinstance(operand, torch.Tensor)]
    numbers = [operand for operand in operands if not isinstance(operand, torch.Tensor)]
    first, *more = (each.data_ptr() for each in results)
    return (a.data_ptr(), b.data_ptr(), 0, 0, first, *tensors, *more), (*_UNUSED, *numbers)


_UNUSED = tuple(Scalars())
"""alpha and beta, which a program does not read."""


def _cuda_core(plan: Plan, asked: ProgramRequest) -> Core:
    assert plan.kernel is not None
    index = asked.device.index
    with current_device(asked.device):
        launch = preparing.bind(plan)
    current_stream, ours = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    reductions = Reductions(plan.problem, plan.choice.config)

    def core(a: Any, b: Any, operands: Sequence[Any], outs: Outs) -> None:
        written = reductions.partials(outs) if reductions.rows else outs
        addresses, numbers = arguments_of(asked, a, b, operands, written)
        if ours() == index:
            launch(addresses, numbers, current_stream(index))
        else:
            with torch.cuda.device(index):
                launch(addresses, numbers, current_stream(index))
        reductions.finish(written, outs)

    return core


def _emulated_core(plan: Plan, asked: ProgramRequest) -> Core:
    reductions = Reductions(plan.problem, plan.choice.config)

    def core(a: Any, b: Any, operands: Sequence[Any], outs: Outs) -> None:
        a, b = preparing.emulate(plan, a, b)
        results = reductions.partials(outs)
        for number, *_ in reductions.rows:
            results[number].fill_(torch.nan)  # a piece that nobody writes shows
        emulate(plan, {"a": a, "b": b}, operands, results, arguments_of(asked, a, b, operands, results))
        reductions.finish(results, outs)

    return core


def emulate(
    plan: Plan, inputs: dict[str, torch.Tensor], operands: Sequence[Any], results: Sequence[torch.Tensor], given: Any
) -> None:
    """Runs the kernel of a plan in the emulator, with the addresses and numbers `given` to its launch.

    inputs: the tensors that it reads besides the operands, by name. results: D and the other ones.
    """
    from cutegemm.emulator import bridge

    assert plan.kernel is not None
    with torch.device("cpu"):  # a workspace is made there, whatever the default device
        launches = plan.kernel.capture(plan.problem, *given)
    written = {f"out[{number}]" if number else "d": each for number, each in enumerate(results)} | launches.scratch
    named = {f"operands[{i}]": each for i, each in enumerate(operands) if isinstance(each, torch.Tensor)}
    bridge.emulate(
        plan.kernel.ptx, launches, {**inputs, **named, **written}, outputs=set(written), checks=launches.checks,
        flops=plan.problem.flops,
    )  # fmt: skip


def plan_of(a: Any, b: Any, epilogue: Any, operands: Any, out: Any, out_dtype: Any, how: How) -> Plan:
    """The plan behind such a call: the one that is remembered while nothing that it depends on has changed."""
    key = key_of(a, b, epilogue, operands, out, out_dtype, how)
    call.keep_up(memo)
    plan = None if key is None else memo.plan(key)
    return plan or planned(key, a, b, epilogue, operands, out, out_dtype, how)[1]
