"""A call of `grouped_gemm` with plain tensors: what `fused` is for `gemm` with an epilogue.

The sizes of the groups stay on the device: a call is known by its tensors' descriptions and its program.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cutegemm import backend as backends
from cutegemm.choice.plan import Plan, PlanMemo
from cutegemm.problem import grouped_request, torch_dtype
from cutegemm.problem.program_request import ProgramRequest, Results
from cutegemm.problem.work import TABLE as WORKS
from cutegemm.run import call, fused
from cutegemm.run.runner import Call, current_device
from cutegemm.torch_grouped import Core
from cutegemm.torch_grouped import core as torch_core

Runner = Callable[..., Results]
"""run(a, b, sizes, operands, out) -> the results, as the caller gets them"""

memo = PlanMemo()
_lock = threading.Lock()


def compute(
    a: Any, b: Any, offsets: Any, counts: Any, epilogue: Any, operands: Sequence[Any], out: Any, out_dtype: Any,
    precision: Any, backend: str, config: Any,
) -> Results:  # fmt: skip
    """`grouped_gemm` with no regard to autograd, autocast or tracing."""
    key = key_of(a, b, offsets, counts, epilogue, operands, out, out_dtype, precision, backend, config)
    run = None if key is None else memo.get(key)
    if run is None:
        run = planned(key, a, b, offsets, counts, epilogue, operands, out, out_dtype, precision, backend, config)[0]
    return run(a, b, offsets if counts is None else counts, operands, out)


def key_of(a, b, offsets, counts, epilogue, operands, out, out_dtype, precision, backend, config) -> Any:
    """The key of a call; None when something about it is strange."""
    try:
        sizes = offsets if counts is None else counts
        found = (
            fused.key_of(a, b, epilogue, operands, out, out_dtype, precision, backend, config),
            sizes.shape, sizes.stride(), sizes.dtype, sizes.device, offsets is None, counts is None,
            bool(os.environ.get("CUTEGEMM_DEBUG")),
        )  # fmt: skip
        hash(found)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return None if found[0] is None else found


def planned(
    key: Any, a: Any, b: Any, offsets: Any, counts: Any, epilogue: Any, operands: Any, out: Any, out_dtype: Any,
    precision: Any, backend: str, config: Any,
) -> tuple[Runner, Plan]:  # fmt: skip
    """Checks and plans a call; its runner and plan are remembered."""
    asked = grouped_request.describe(a, b, offsets, counts, epilogue, operands, out, out_dtype, precision)
    with _lock:
        call.keep_up()
        plan = Call(asked, backend, config).plan(memo.keep_up() if not call.is_capturing() else None)
        run = _runner(plan, asked)
        if key is not None:
            memo.put(key, run, plan)
    return run, plan


def _runner(plan: Plan, asked: ProgramRequest) -> Runner:
    chosen, problem = backends.get(plan.choice.backend), asked.problem
    core: Core
    if any(0 in shape for shape in asked.shapes):
        core = _nothing
    elif isinstance(chosen, backends.OnTensors):
        core = torch_core(asked)
    else:
        assert plan.kernel is not None
        core = (_emulated_core if plan.emulated else _cuda_core)(plan, asked)
    dtypes = [torch_dtype(str(output.dtype)) for output in asked.program.outputs]
    copied, temporaries = asked.copied, asked.temporaries
    checks = bool(os.environ.get("CUTEGEMM_DEBUG"))
    extent = {"m": problem.m, "n": problem.n, "k": problem.k}.get(WORKS[problem.work].ragged or "m")

    def run(a: Any, b: Any, sizes: torch.Tensor, operands: Sequence[Any], out: Any) -> Results:
        if checks:
            check_sizes(sizes, int(extent or 0), WORKS[problem.work].masked)
        if "a" in copied:
            a = a.contiguous()
        if "b" in copied:
            b = b.contiguous()
        given = (None,) * len(dtypes) if out is None else (out,) if isinstance(out, torch.Tensor) else out
        if out is not None:
            fused._check_writable(given, a, b, (*operands, sizes))
        outs = tuple(
            torch.empty(shape, dtype=dtype, device=asked.device) if own is None
            else torch.empty(shape, dtype=dtype, device=asked.device).copy_(own) if number in temporaries
            else own
            for number, (own, shape, dtype) in enumerate(zip(given, asked.shapes, dtypes, strict=True))
        )  # fmt: skip
        core(a, b, operands, outs, sizes)
        for number in temporaries:
            given[number].copy_(outs[number])  # type: ignore[union-attr]
        results = tuple(made if own is None else own for own, made in zip(given, outs, strict=True))
        return results[0] if len(asked.shapes) == 1 else results

    return run


def check_sizes(sizes: torch.Tensor, extent: int, counts: bool) -> None:
    """Raises ValueError naming the first group whose size is wrong; the host waits for the GPU. With CUTEGEMM_DEBUG.

    A call under graph capture is not checked: its sizes are not known yet.
    """
    if sizes.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    before, name = 0, "counts" if counts else "offsets"
    for group, each in enumerate(sizes.tolist()):
        if not 0 <= each <= extent:
            raise ValueError(f"{name}: group {group} has {each}, accepted are 0 to {extent}")
        if not counts and each < before:
            raise ValueError(f"{name}: group {group} ends at {each}, before group {group - 1}, which ends at {before}")
        before = each


def _nothing(a: Any, b: Any, operands: Sequence[Any], outs: Any, sizes: torch.Tensor) -> None:
    """D has no elements."""


def _addresses(asked: ProgramRequest, a: Any, b: Any, operands: Sequence[Any], outs: Any, sizes: Any) -> Any:
    """What a launch takes: the addresses and the numbers, with the device array behind D."""
    addresses, numbers = fused.arguments_of(asked, a, b, operands, outs)
    return (*addresses[:5], sizes.data_ptr(), *addresses[5:]), numbers


def _cuda_core(plan: Plan, asked: ProgramRequest) -> Core:
    assert plan.kernel is not None
    index = asked.device.index
    with current_device(asked.device):
        launch = plan.kernel.bind(plan.problem)
    current_stream, ours = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

    def core(a: Any, b: Any, operands: Sequence[Any], outs: Any, sizes: torch.Tensor) -> None:
        addresses, numbers = _addresses(asked, a, b, operands, outs, sizes)
        if ours() == index:
            launch(addresses, numbers, current_stream(index))
        else:
            with torch.cuda.device(index):
                launch(addresses, numbers, current_stream(index))

    return core


def _emulated_core(plan: Plan, asked: ProgramRequest) -> Core:
    from cutegemm.emulator.bridge import emulate

    problem, kernel = plan.problem, plan.kernel
    assert kernel is not None
    (array,) = WORKS[problem.work].arrays

    def core(a: Any, b: Any, operands: Sequence[Any], outs: Any, sizes: torch.Tensor) -> None:
        named = {"a": a, "b": b, "d": outs[0], array.name: sizes}
        named |= {f"operands[{i}]": each for i, each in enumerate(operands) if isinstance(each, torch.Tensor)}
        named |= {f"out[{number}]": each for number, each in enumerate(outs) if number}
        launches = kernel.capture(problem, *_addresses(asked, a, b, operands, outs, sizes))
        written = {name for name in named if name == "d" or name.startswith("out[")}
        emulate(kernel.ptx, launches, named, outputs=written, checks=launches.checks, flops=problem.flops)

    return core
