"""What gemm remembers of a call, and what it does with one that it does not remember: check, plan, compile.

A call is known by its description (`key_of`): shapes, strides, types, alignments and options, not values. Its runner
and its plan are remembered together, so that `explain` shows what `gemm` runs.
"""

from __future__ import annotations

import operator
import os
from typing import Any

import torch

from cutegemm import locks, native
from cutegemm.choice.plan import Plan, PlanMemo, State
from cutegemm.problem import request
from cutegemm.problem.epilogue import ACTIVATIONS
from cutegemm.run import runner
from cutegemm.run.how import ACCEPTED, How, settled
from cutegemm.run.runner import Call, Runner

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""The classes of tensors that no dispatcher needs to see."""

memo = PlanMemo()
_lock = locks.lock()
_FLT_MAX = request.FLT_MAX
_described = operator.itemgetter("beta", "bias", "activation", "out", "out_dtype")
"""Those of the options that a description has besides `How`, in its order."""


def description(a, b, c, beta, bias, activation, out, out_dtype, how):
    """All that a plan depends on; an unhashable or strange argument raises something. how: a tuple as a `How`.

    Of an address its alignment, and 0 where there is none: a tensor without memory is not taken for an aligned one.
    """
    return (
        a.shape, a.stride(), a.dtype, a.device, (p := a.data_ptr()) and p & 15 | 16, a.is_neg(),
        b.shape, b.stride(), b.dtype, b.device, (p := b.data_ptr()) and p & 15 | 16, b.is_neg(),
        beta == 0,
        None if c is None else (
            c.__class__, c.shape, c.stride(), c.dtype, c.device, (p := c.data_ptr()) and p & 15 | 16, c.is_neg()
        ),
        None if bias is None else (
            bias.__class__, bias.shape, bias.stride(), bias.dtype, bias.device, (p := bias.data_ptr()) and p & 3 | 16,
            bias.is_neg(),
        ),
        None if out is None else (
            out.__class__, out.shape, out.stride(), out.dtype, out.device, (p := out.data_ptr()) and p & 15 | 16,
            out.is_neg(),
        ),
        activation, out_dtype, how,
        None if a.is_cuda else os.environ.get("CUTEGEMM_ARCH"),
    )  # fmt: skip


def compute(a, b, c, alpha, beta, bias, activation, out, out_dtype, how) -> torch.Tensor:
    """`gemm` of plain tensors, with no regard to autograd, autocast or tracing; alpha and beta are floats."""
    if not (-_FLT_MAX <= alpha <= _FLT_MAX and -_FLT_MAX <= beta <= _FLT_MAX):
        request.check_number("alpha", alpha)
        request.check_number("beta", beta)
    key = key_of(a, b, c, beta, bias, activation, out, out_dtype, how)
    run = memo.get(key)
    if run is None:
        run = plan_of(key, a, b, c, options_of(alpha, beta, bias, activation, out, out_dtype, how))
    return run(a, b, c, alpha, beta, bias, out)


def options_of(alpha, beta, bias, activation, out, out_dtype, how) -> dict[str, Any]:
    """The options of a call, every one by its name."""
    terms = {"alpha": alpha, "beta": beta, "bias": bias, "activation": activation, "out": out, "out_dtype": out_dtype}
    terms.update(zip(How._fields, how, strict=True))
    return terms


def key_of(a, b, c, beta, bias, activation, out, out_dtype, how) -> Any:
    """The key of a call, or None when something about it is strange.

    A call with a subclass of Tensor as c, bias or out gets a key that `gemm` itself never looks for: torch's dispatcher
    must see the subclass every time.
    """
    try:
        found = description(a, b, c, beta, bias, activation, out, out_dtype, how)
        hash(found)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return key_of_described(found, c, bias, out)


def key_of_described(found: Any, c: Any, bias: Any, out: Any) -> Any:
    """`key_of` the call with this hashable description."""
    plain = (
        (c is None or c.__class__ in PLAIN)
        and (bias is None or bias.__class__ in PLAIN)
        and (out is None or out.__class__ in PLAIN)
    )
    return found if plain else ("subclass", found)


def key_of_options(a: Any, b: Any, c: Any, options: dict[str, Any]) -> Any:
    """`key_of` a call with these options."""
    beta, bias, activation, out, out_dtype = _described(options)
    return key_of(a, b, c, beta, bias, activation, out, out_dtype, How.of(options))


def plan_of(key: Any, a: Any, b: Any, c: Any, options: dict[str, Any]) -> Runner:
    """Checks and plans a call that was not seen before, and remembers what runs it."""
    return planned(key, Call.of(a, b, c, options), a, b, c, options)[0]


def planned(key: Any, call: Call, a: Any, b: Any, c: Any, options: dict[str, Any]) -> tuple[Runner, Plan]:
    """What runs a checked call, and the plan behind it; both are remembered.

    Here, off the short way, it is noticed that what choices depend on has changed: then no older plan is kept.
    """
    with _lock:
        plan = call.plan(keep_up())
        launch = call.launch(plan) if key is not None and native.is_ready() else None
        if launch is not None and options["out"] is None:
            run = _when_needed(key, call, plan)
        else:
            run = call.runner(plan)
            if options["out"] is not None:
                reads_c = call.request.problem.epilogue.c_dtype is not None
                run = runner.writing(run, a, b, c if reads_c else None, options["bias"], options["out"])
        if key is not None:
            _tell(call, plan, launch, a, b, c, options)
            memo.put(key, run, plan)
    return run, plan


def _when_needed(key: Any, call: Call, plan: Plan) -> Runner:
    """A runner that is bound at its first call: the C++ part launches the plan, and mostly nobody else does."""

    def run(*operands: Any) -> torch.Tensor:
        bound = call.runner(plan)
        with _lock:
            if memo.plan(key) is plan:
                memo.put(key, bound, plan)
        return bound(*operands)

    return run


def _tell(
    call: Call, plan: Plan, launch: tuple[Any, ...] | None, a: Any, b: Any, c: Any, options: dict[str, Any]
) -> None:
    """Tells the C++ part how a plan that is remembered is launched; the first plan of a GPU has that part made."""
    if native.is_ready():
        alpha, beta = float(options["alpha"]), float(options["beta"])
        native.tell("gemm", (a, b, c, alpha, beta, *_described(options)[1:], *How.of(options)), launch)
    elif plan.kernel is not None and call.request.device.type == "cuda":
        native.want()


def _plan_natively(_, a, b, c, alpha, beta, bias, activation, out, out_dtype, *how) -> None:
    """Plans a call that the C++ part has not met, if nobody has, and tells it what to launch."""
    options = options_of(alpha, beta, bias, activation, out, out_dtype, how)
    key = key_of(a, b, c, beta, bias, activation, out, out_dtype, how)
    call = Call.of(a, b, c, options)
    with _lock:
        plan = None if key is None else memo.plan(key)
        if plan is not None:
            _tell(call, plan, call.launch(plan), a, b, c, options)
    if plan is None:
        planned(key, call, a, b, c, options)


def _compute_natively(_, a, b, c, alpha, beta, bias, activation, out, out_dtype, *how) -> torch.Tensor:
    return compute(a, b, c, alpha, beta, bias, activation, out, out_dtype, settled(a, how))


native.names = (None, *ACTIVATIONS), *(ACCEPTED[name] for name in How._fields)
native.in_python |= {"plan": _plan_natively, "compute": _compute_natively}


def keep_up(own: PlanMemo | None = None) -> State | None:
    """Forgets what was planned in another state, here and in a memo of the caller's own. Returns the present state,
    None while a CUDA graph is captured: a plan that is needed then cannot always be made again, and stays.
    """
    if is_capturing():
        return None
    found = memo.keep_up()
    if own is not None:
        own.keep_up()
    return found


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def remembered(a: Any, b: Any, c: Any, options: dict[str, Any]) -> Plan:
    """The plan behind `gemm(a, b, c, **options)`: the one that is remembered while nothing that it depends on has
    changed, else a new one.
    """
    key, call = key_of_options(a, b, c, options), Call.of(a, b, c, options)
    with _lock:
        keep_up()
        plan = None if key is None else memo.plan(key)
    return plan or planned(key, call, a, b, c, options)[1]
