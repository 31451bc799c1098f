"""A call of `grouped_gemm` with plain tensors: what `fused` is for `gemm` with an epilogue.

The sizes of the groups stay on the device: a call is known by its tensors' descriptions and its program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cutegemm import backend as backends
from cutegemm import native
from cutegemm.choice.plan import Plan, PlanMemo
from cutegemm.problem import grouped_request, packing, torch_dtype
from cutegemm.problem.grouped_request import Sizes
from cutegemm.problem.program.graph import Program
from cutegemm.problem.program_request import ProgramRequest, Results
from cutegemm.problem.work import GATHERED, RAGGED_K, RAGGED_M, SCATTERED, Work
from cutegemm.problem.work import TABLE as WORKS
from cutegemm.run import call, fused, preparing
from cutegemm.run.environment import is_on
from cutegemm.run.how import How
from cutegemm.run.reductions import Reductions
from cutegemm.run.runner import current_device
from cutegemm.torch_grouped import Arrays, Core, written_alone
from cutegemm.torch_grouped import core as torch_core

Runner = Callable[..., Results]
"""run(a, b, arrays, operands, out) -> the results, as the caller gets them"""

ZEROS = "zeros"

memo = PlanMemo()


def compute(
    a: Any, b: Any, sizes: Sizes, epilogue: Any, operands: Sequence[Any], out: Any, out_dtype: Any,
    precision: Any, backend: str, config: Any,
) -> Results:  # fmt: skip
    """`grouped_gemm` with no regard to autograd, autocast or tracing. out: `ZEROS` for new results, 0 in no group."""
    written = None if out is ZEROS else out
    key = key_of(a, b, sizes, epilogue, operands, written, out_dtype, precision, backend, config)
    run = None if key is None else memo.get(key)
    if run is None:
        run = planned(key, a, b, sizes, epilogue, operands, written, out_dtype, precision, backend, config)[0]
    return run(a, b, sizes.arrays, operands, out)


def key_of(a, b, sizes, epilogue, operands, out, out_dtype, precision, backend, config) -> Any:
    """The key of a call; None when something about it is strange."""
    try:
        found = (
            fused.key_of(a, b, epilogue, operands, out, out_dtype, (precision, backend, config)),
            *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in sizes[:4]],
            sizes.out_rows, sizes.out_rows.__class__, is_on("CUTEGEMM_DEBUG"),
        )  # fmt: skip
        hash(found)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return None if found[0] is None else found


def planned(
    key: Any, a: Any, b: Any, sizes: Sizes, epilogue: Any, operands: Any, out: Any, out_dtype: Any, precision: Any,
    backend: str, config: Any,
) -> tuple[Runner, Plan]:  # fmt: skip
    """Checks and plans a call; its runner and plan are remembered."""
    own, epilogue = fused.as_meant(None if key is None else key[0], epilogue, operands, a.device)
    key = None if own is None else key
    asked = grouped_request.describe(a, b, sizes, epilogue, operands, out, out_dtype, precision)
    return fused.remembered(memo, key, asked, How(precision, backend, config), _runner)


def _runner(plan: Plan, asked: ProgramRequest) -> Runner:
    chosen, problem = backends.get(plan.choice.backend), asked.problem
    core: Core
    if problem.m == 0 or any(0 in shape for shape in asked.shapes):
        core = _of_nothing(asked)
    elif isinstance(chosen, backends.OnTensors):
        core = torch_core(asked)
    else:
        assert plan.kernel is not None
        core = (_emulated_core if plan.emulated else _cuda_core)(plan, asked)
    dtypes = [torch_dtype(str(output.dtype)) for output in asked.program.outputs]
    copied, temporaries = asked.copied, asked.temporaries
    checks = is_on("CUTEGEMM_DEBUG")
    work = WORKS[GATHERED if asked.gathers else problem.work]
    taken = len(WORKS[problem.work].arrays)
    names = ["counts" if work.masked else "offsets", "rows" if work.indexed == "a" else "places"]
    extent = {"m": problem.m, "n": problem.n, "k": problem.k}[work.ragged or "m"]
    limit = problem.d.rows if work.indexed == "d" else 0
    reduces = [output.reduce for output in asked.program.outputs]
    in_order, clears_rows = packing.in_order, False
    if plan.kernel is not None:
        from cutegemm.run.combining import clear_behind, in_order  # they come with the kernel families

        clears_rows = problem.work in (RAGGED_M, GATHERED)

    def run(a: Any, b: Any, arrays: Arrays, operands: Sequence[Any], out: Any) -> Results:
        if checks:
            check_arrays(arrays, extent, work, a.shape[0] if work.indexed == "a" else limit)
        new = out is None or out is ZEROS
        given = (None,) * len(dtypes) if new else (out,) if isinstance(out, torch.Tensor) else out
        if not new:
            fused.check_writable(given, a, b, operands, dict(zip(names, arrays, strict=False)))
        if asked.gathers:
            a = in_order(a, arrays[1])
        elif "a" in copied:
            a = packing.copied("a", a, problem.work)
        if "b" in copied:
            b = packing.copied("b", b, problem.work)
        outs = tuple(
            torch.empty(shape, dtype=dtype, device=asked.device) if own is None
            else torch.empty(shape, dtype=dtype, device=asked.device).copy_(own) if number in temporaries
            else own
            for number, (own, shape, dtype) in enumerate(zip(given, asked.shapes, dtypes, strict=True))
        )  # fmt: skip
        if out is ZEROS and problem.work != RAGGED_K:  # of which every element is a group's, an empty one's too
            for made, reduce in zip(outs, reduces, strict=True):
                if not (clears_rows and reduce is None and clear_behind(made, arrays[0])):
                    made.zero_()
        core(a, b, operands, outs, arrays[:taken], not new or out is ZEROS)
        for number in temporaries:
            given[number].copy_(outs[number])  # type: ignore[union-attr]
        results = tuple(made if own is None else own for own, made in zip(given, outs, strict=True))
        return results[0] if len(asked.shapes) == 1 else results

    return run


def launch_of(
    a: Any, b: Any, sizes: Sizes, program: Program, operands: Sequence[torch.Tensor], precision: Any, backend: str,
    arrays: Sequence[tuple[int, int]], places: Sequence[tuple[int, int]], count: int,
    out_dtype: torch.dtype | None = None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """What `fused.launch_of` gives of the call with these arguments, which was computed; None where it needs Python.

    Args:
        arrays, places: (tensor, offset) of each of its arrays and operands, among the tensors that the C++ part has.
        count: of these.
    """
    plan = memo.plan(key_of(a, b, sizes, program, operands, None, out_dtype, precision, backend, None))
    if plan is None:
        return None
    asked = grouped_request.describe(a, b, sizes, program, operands, None, out_dtype, precision)
    return None if asked.gathers else fused.launch_of(plan, asked, dict(enumerate(places)), {}, count, arrays)


def _launch(
    plan: Plan, asked: ProgramRequest, operands: Sequence[Any], arrays: Sequence[tuple[int, int]], first: int,
    by_operator: bool,
) -> tuple[Any, ...] | None:  # fmt: skip
    """As `launch_of`, of a plan; first: the number of the first operand, behind the last of which results stand.
    by_operator: as of `fused.kinds_of`.
    """
    if asked.gathers:
        return None
    tensors, others = fused.kinds_of(operands, by_operator)
    places, numbers = fused.given_places(tensors, others, first)
    return fused.launch_of(plan, asked, places, numbers, first + len(tensors), arrays)


def tell(
    number: int | str, meant: Any, a: Any, b: Any, sizes: Sizes, epilogue: Any, operands: Sequence[Any], out_dtype: Any,
    how: How,
) -> None:  # fmt: skip
    """As `fused.tell`, of a product in groups, whose arrays stand in front of its operands."""
    key = key_of(a, b, sizes, epilogue, operands, None, out_dtype, how.precision, how.backend, how.config)
    own, program = fused.as_meant(None if key is None else key[0], epilogue, operands, a.device)
    if own is None or own[fused.MEANING] != meant:
        return
    arrays = sizes.arrays
    first = 2 + len(arrays)
    with fused.planning():
        plan = memo.plan(key)
        if plan is not None:
            asked = grouped_request.describe(a, b, sizes, program, operands, None, out_dtype, how.precision)
            by_operator = isinstance(number, str)
            launch = _launch(plan, asked, operands, [(place, 0) for place in range(2, first)], first, by_operator)
            given = [operands[i] for kind in fused.kinds_of(operands, True) for i in kind] if by_operator else operands
            native.tell("program", (number, a, b, (*arrays, *given), out_dtype, *how), launch)


def check_arrays(arrays: Arrays, extent: int, work: Work, limit: int) -> None:
    """Raises ValueError naming the first group whose size is wrong, or the first row whose index names none of `limit`
    rows; the host waits for the GPU. With CUTEGEMM_DEBUG.

    A call under graph capture is not checked: its sizes are not known yet.
    """
    if arrays[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return
    before, name = 0, "counts" if work.masked else "offsets"
    for group, each in enumerate(arrays[0].tolist()):
        if not 0 <= each <= extent:
            raise ValueError(f"{name}: group {group} has {each}, accepted are 0 to {extent}")
        if not work.masked and each < before:
            raise ValueError(f"{name}: group {group} ends at {each}, before group {group - 1}, which ends at {before}")
        before = each
    if work.indexed:
        index = arrays[1]
        wrong = ((index < -1) | (index >= limit)).nonzero()
        if len(wrong):
            row = int(wrong[0])
            which = "rows" if work.indexed == "a" else "places"
            raise ValueError(
                f"{which}: row {row} has {int(index[row])}, accepted are 0 to {limit - 1}, and -1 for none"
            )
    if work.indexed == "d":
        places, taken = arrays[1][:before].tolist(), dict[int, int]()
        for row, place in enumerate(places):
            if place >= 0 and taken.setdefault(place, row) != row:
                raise ValueError(f"places: rows {taken[place]} and {row} both have {place}; each row of D has one")


def _of_nothing(asked: ProgramRequest) -> Core:
    """For a D without elements, or one where no row of A goes: sums of nothing are 0, maxima minus infinity."""
    problem = asked.problem
    reductions = {number: 0.0 if kind.endswith("sum") else -math.inf for number, kind in problem.epilogue.reductions}

    def core(a: Any, b: Any, operands: Sequence[Any], outs: Any, arrays: Arrays, kept: bool) -> None:
        for number, value in reductions.items():
            out = outs[number]
            shape = (problem.m, 1) if problem.work == SCATTERED else out.shape
            written_alone(problem.work, arrays, out, out.new_full(shape, value))

    return core


def _addresses(asked: ProgramRequest, a: Any, b: Any, operands: Sequence[Any], outs: Any, arrays: Arrays) -> Any:
    """What a launch takes: the addresses and the numbers, with the device arrays behind D."""
    addresses, numbers = fused.arguments_of(asked, a, b, operands, outs)
    return (*addresses[:5], *[array.data_ptr() for array in arrays], *addresses[5:]), numbers


def _cuda_core(plan: Plan, asked: ProgramRequest) -> Core:
    assert plan.kernel is not None
    index = asked.device.index
    with current_device(asked.device):
        launch = preparing.bind(plan)
    current_stream, ours = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    reductions = Reductions(plan.problem, plan.choice.config)

    def core(a: Any, b: Any, operands: Sequence[Any], outs: Any, arrays: Arrays, kept: bool) -> None:
        written = reductions.partials(outs) if reductions.rows else outs
        if kept:
            reductions.keep(written, outs)
        addresses, numbers = _addresses(asked, a, b, operands, written, arrays)
        if ours() == index:
            launch(addresses, numbers, current_stream(index))
        else:
            with torch.cuda.device(index):
                launch(addresses, numbers, current_stream(index))
        reductions.finish(written, outs)

    return core


def _emulated_core(plan: Plan, asked: ProgramRequest) -> Core:
    names = [array.name for array in WORKS[plan.problem.work].arrays]
    reductions = Reductions(plan.problem, plan.choice.config)

    def with_padding(name: str, operand: torch.Tensor) -> torch.Tensor:
        """All of a packed copy: kernels may load what pads its last row."""
        return torch.empty(0, dtype=torch.uint8).set_(operand.untyped_storage()) if name in asked.copied else operand

    def core(a: Any, b: Any, operands: Sequence[Any], outs: Any, arrays: Arrays, kept: bool) -> None:
        a, b = preparing.emulate(plan, a, b)
        inputs = {"a": with_padding("a", a), "b": with_padding("b", b), **dict(zip(names, arrays, strict=True))}
        results = reductions.partials(outs)
        for number, *_ in reductions.rows:
            if results[number] is not outs[number]:
                results[number].fill_(torch.nan)  # a piece that nobody writes shows
        if kept:
            reductions.keep(results, outs)
        fused.emulate(plan, inputs, operands, results, _addresses(asked, a, b, operands, results, arrays))
        reductions.finish(results, outs)

    return core


def plan_of(
    a: Any, b: Any, sizes: Sizes, epilogue: Any, operands: Any, out: Any, out_dtype: Any, precision: Any, backend: str,
    config: Any,
) -> Plan:  # fmt: skip
    """The plan behind such a call: the one that is remembered while nothing that it depends on has changed."""
    key = key_of(a, b, sizes, epilogue, operands, out, out_dtype, precision, backend, config)
    call.keep_up(memo)
    plan = None if key is None else memo.plan(key)
    return plan or planned(key, a, b, sizes, epilogue, operands, out, out_dtype, precision, backend, config)[1]
