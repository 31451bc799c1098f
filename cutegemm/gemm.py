"""The public call: takes the short way to a remembered kernel, or finds out what kind of call it is.

The C++ extension is asked first: it serves the calls whose launches it knows (native/__init__.py). Python looks up a
call that was made before, with plain tensors and nothing for autograd or autocast to do, by its description, and
launches it; torch's dispatcher would cost as much again. Every other call goes through `_uncommon`:

    torch.compile, torch.jit.trace, a dispatch mode,
    a tensor subclass, vmap, torch.func, batched
    gradients                                           the operator torch.ops.cutegemm.gemm (pytorch/operator.py)
    autocast                                            operands cast as those of torch.mm, then again
    a tensor that requires grad or carries a tangent    the autograd function (pytorch/autograd.py)
    a description not seen before                       checks, plan, compilation (run/call.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from cutegemm import grouped, native
from cutegemm.choice import plan as planning
from cutegemm.choice.plan import Plan
from cutegemm.problem import overlap, program_request, request
from cutegemm.problem.program.graph import Program
from cutegemm.pytorch import autograd, programs, registering, scaled, transforms
from cutegemm.pytorch.autocast import cast_operands
from cutegemm.pytorch.dispatch import is_dispatched
from cutegemm.run import call, float32, runner
from cutegemm.run.how import How, passed

_key, _memo, _PLAIN = call.description, call.memo, call.PLAIN
_LEAST, _MOST = -request.FLT_MAX, request.FLT_MAX
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_autocast_on = torch._C._is_any_autocast_enabled
_is_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_grad_enabled = torch.is_grad_enabled
_has_transforms = torch._C._are_functorch_transforms_active
_record = autograd.record


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    backend: str = "auto",
    config: Any = None,
    constant: str | None = None,
    epilogue: Any = None,
    operands: Sequence[Any] = (),
    save: str | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    scaling: Any = None,
    accumulate: str | None = None,
) -> Any:
    """D = activation(alpha * a @ b + beta * c + bias), or epilogue(a @ b, *operands).

    Products are accumulated in fp32 (of int8 in int32, of float64 in fp64), and D is rounded once. With scales `a` and
    `b` stand for scale_a a and scale_b b.

    Args:
        a: (M, K) or (L, M, K), any strides that torch allows. Accepted dtypes are the rows of
            `cutegemm.problem.dtypes.PRODUCTS`. float64 is not mixed with others: c, bias and D are float64 too, and
            activation and epilogue are None.
        b: (K, N) or (L, K, N), dtype and device of `a`; e4m3 and e5m2 may be mixed. A batch of 1, or a 2-D operand,
            broadcasts.
        c: broadcastable to D; fp16, bf16 or fp32, and float64 with float64 operands. With beta == 0 it is never read: a
            NaN in it does not spread.
        alpha, beta: Python numbers that are infinite, NaN, or of at most fp32's largest magnitude. They are used in
            fp32, and in fp64 with float64 operands.
        bias: (N,); the dtypes of c.
        activation: None, "relu", "gelu" (erf), "gelu_tanh" or "silu".
        out: D is written here; (M, N) or (L, M, N). It may be `c` itself (not with scales) and must not overlap
            another input. Autograd is told of the write, and an inference tensor is refused outside inference mode, as
            by torch.mm.
        out_dtype: dtype of D, any accepted one. By default that of `out`, else that of a; bfloat16 for fp8 operands and
            for int8 operands with scales, int32 for the plain product of int8. All other products of int8 need an
            `out_dtype` (or `out`). D in fp8 or int8 saturates.
        precision: for float32: "ieee" (CUDA cores, as exact as torch.mm without TF32), "tf32" (tensor cores, operands
            rounded to 10 mantissa bits), or fp32's accuracy on tensor cores from parts of the operands: "bf16x6",
            "bf16x9" and "tf32x3" (also by backend "cutlass2x", where an infinity gives NaN). Their bounds, the ends of
            their range, and the GPUs on which they are faster than "ieee": docs/precision.md. None is "ieee", or what
            `set_float32_precision` says. For 16-bit operands None or "ieee"; for fp8 without scales also
            "fast", which is what `accumulate="fast"` is with them.
        backend: "auto" (default), "cute", "cutlass2x", "legacy" or "torch". A kernel backend named for CPU tensors
            runs its compiled kernels in the emulator, for the architecture of the environment variable CUTEGEMM_ARCH.
        config: a configuration of that backend or its text form, for example "sm80/128x128x32/w64x64/s4/g8"; by
            default the backend chooses.
        constant: "a" or "b" promises that no kernel that may still be running writes that operand: neither the kernel
            in front on this stream nor one on another. Hopper kernels then load its first tiles before the kernel in
            front has ended, unless elements have 8 bits and the other operand has more than 16 rows (columns, for "a");
            all other kernels make no use of it. Where the promise is broken, D may be computed from old or half-written
            values. None (default) promises nothing. The backward pass makes no use of it; an operand that must be
            copied or cast first is not constant, nor is any under vmap. It concerns a or b alone: operands of an
            epilogue and scales are read when the kernel in front has ended.
        epilogue: a function of the accumulators and of `operands`, written with Python operators and `cutegemm.ops`, or
            a `Program`; see docs/epilogues.md. alpha, beta, c, bias and activation are then not for the call: the
            function says them.
        operands: what the function takes after the accumulators: tensors that broadcast to D, of an accepted dtype of 2
            or 4 bytes or int32, and Python numbers, which may change from call to call without another kernel. Columns
            of a tensor may repeat along those of D, where the function says so (`ops.repeated`).
        save: with an epilogue, how the backward pass gets the accumulators where the gradients depend on them.
            "outputs" (None means this): the kernel also stores them, in a's dtype. "recompute": the backward pass
            makes the product again, which needs no memory in between; for fp16 accumulators that overflow, too.
        scale_a, scale_b: for fp8 and int8 operands, fp32 on their device, any strides: one number (), rows (M, 1) and
            columns (1, N), or blocks along K: (M, K / 128) or (M / 128, K / 128) of A with (K / 128, N / 128) or
            (K / 128, N) of B, rounded up; before that the batch, if each matrix has its own. The shape says which, for
            each operand by itself; see docs/fp8.md.
        scaling: "tensor", "rows", "blocks" or a pair of these for A and B: the scales must then have such a shape.
        accumulate: for fp8: "promoted" (None means this): sums of 128 products of the tensor cores, which add with 14
            bits or so, are added up in fp32; "fast": the tensor cores add up all of K.

    Returns:
        D: `out`, or a new row-major tensor; with an epilogue of several results a tuple of them, and `out`, if given,
        is a tuple too. K = 0 gives activation(beta * c + bias) where alpha is finite; an empty M, N or L an empty D.
        On CUDA the work is enqueued on the current stream of a's device.

    Gradients of a, b, c and bias are recorded as torch's operators record theirs, to any order; their products run on
    the same backend. For gelu, gelu_tanh and silu the backward pass computes alpha a b + beta c + bias once more, in
    D's dtype, rather than keep it. Under autocast a, b, c and bias are cast as those of torch.mm are, unless `out` is
    given. In forward mode (torch.func.jvp, dual tensors) D has a tangent, to any order too: one product on the same
    backend for the tangent of a, one for that of b, and for gelu, gelu_tanh and silu one more, as in the backward
    pass. torch.vmap, torch.func and batched gradients nest with both modes. torch.compile and FakeTensorMode see the
    operator torch.ops.cutegemm.gemm.

    With an epilogue the same holds, but for forward mode, which it refuses. Gradients of a, b and of every operand that
    is a floating-point tensor are recorded, to any order; a cast in the program passes a gradient on unrounded, and a
    maximum over a row or a column shares it among the elements that equal it. Autocast casts a and b and leaves the
    operands as they are: a program takes them in any dtype. torch.compile follows the function as a part of the code
    around it, wherever it is defined, and puts torch.ops.cutegemm.gemm_program with the program's text into its graph.

    The choice for a call is remembered by its arguments' description, and a repeated call reads neither files nor the
    environment (of CPU tensors `CUTEGEMM_ARCH` alone). Whether the winners store (whoever wrote to it) or one of
    `CUTEGEMM_WINNERS`, `CUTEGEMM_TUNE` and `CUTEGEMM_CACHE_DIR` has changed is looked at whenever a call is met that is
    not remembered, and by `explain`, `prepare` and `tune`: if so, all that is remembered is dropped and chosen anew.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted. A function
            that is no epilogue raises `cutegemm.EpilogueError`, a TypeError. Products of fp8 and int8 record no
            gradients: a tensor that requires grad is a bad argument of theirs.
        UnsupportedError: the backend or configuration asked for cannot serve the problem; the message says why.
        GemmError: a kernel could not be compiled, loaded or launched, or is not compiled yet during graph capture.
        NotImplementedError: a tensor carries a tangent, and `out` or `epilogue` is given (`out` under torch.func is a
            ValueError).
    """
    if scale_a is not None or scale_b is not None or scaling is not None or accumulate is not None:
        precision = scaled.precision_of(a, precision, accumulate)
        if scale_a is not None or scale_b is not None or scaling is not None:
            return scaled.compute(
                a, b, c, alpha, beta, bias, activation, out, out_dtype, How(precision, backend, config, constant),
                epilogue, operands, save, scale_a, scale_b, scaling,
            )  # fmt: skip
    if precision is None and float32.in_use:
        precision = float32.default(a, backend)
    if epilogue is not None:
        programs.refuse_terms(c, alpha, beta, bias, activation)
        return programs.compute(a, b, epilogue, operands, out, out_dtype, (precision, backend, config, constant), save)
    if operands.__class__ is not tuple or operands or save is not None:
        programs.refuse_alone({"operands": operands, "save": save})
    if _is_dynamo_compiling():
        request.check_number("alpha", alpha)
        request.check_number("beta", beta)
        how = precision, backend, config, constant
        return _by_operator(a, b, c, alpha, beta, bias, activation, out, out_dtype, how)
    if (serves := native.gemm) is not None:
        d = serves(a, b, c, alpha, beta, bias, activation, out, out_dtype, precision, backend, config, constant)
        if d is not None:
            return d
    if not (
        alpha.__class__ is float and beta.__class__ is float
        and _LEAST <= alpha <= _MOST and _LEAST <= beta <= _MOST
    ):  # fmt: skip
        request.check_number("alpha", alpha)
        request.check_number("beta", beta)
        alpha, beta = float(alpha), float(beta)
    how = precision, backend, config, constant
    key = run = None
    try:
        if a.__class__ in _PLAIN and b.__class__ in _PLAIN and not _dispatch_modes() and not _is_autocast_on():
            key = _key(a, b, c, beta, bias, activation, out, out_dtype, how)
            run = _memo.get(key)
        if run is not None and forward_ad._current_level >= 0:
            run = None
        records = _is_grad_enabled() and (
            a.requires_grad or b.requires_grad or (c is not None and c.requires_grad)
            or (bias is not None and bias.requires_grad) or (out is not None and out.requires_grad)
        )  # fmt: skip
    except (AttributeError, TypeError, RuntimeError):
        key = run = None  # not a dense tensor, or something unhashable: what it is is found out below
    if run is None or (records and out is not None):
        return _uncommon(key, a, b, c, alpha, beta, bias, activation, out, out_dtype, How(*how))
    if records:
        if a.element_size() == 1:
            autograd.refuse_gradients({"a": a, "b": b, "c": c, "bias": bias})
        if _has_transforms():
            return _by_operator(a, b, c, alpha, beta, bias, activation, None, out_dtype, how)
        settings = autograd.Settings(alpha, beta, activation, precision, backend)
        return _record(a, b, c, bias, settings, run)
    return run(a, b, c, alpha, beta, bias, out)


def _uncommon(described, a, b, c, alpha, beta, bias, activation, out, out_dtype, how):
    """A call that is new, or that is more than a multiplication of plain tensors.

    described: `call.description` of it, if `gemm` has made one.
    """
    if transforms.active(a, b, c, bias, out):
        transforms.refuse({"a": a, "b": b, "c": c, "bias": bias, "out": out}, out)
        return _by_operator(a, b, c, alpha, beta, bias, activation, out, out_dtype, how)
    if is_dispatched(a, b, c, bias, out) or _is_tracing():
        return _by_operator(a, b, c, alpha, beta, bias, activation, out, out_dtype, how)
    if _is_autocast_on():
        a, b, c, bias, how = cast_operands(a, b, c, bias, out, how)
        with torch._C._DisableAutocast():
            return gemm(a, b, c, **call.options_of(alpha, beta, bias, activation, out, out_dtype, how))
    if described is None:
        key = call.key_of(a, b, c, beta, bias, activation, out, out_dtype, how)
    else:
        key = call.key_of_described(described, c, bias, out)
    # What was remembered is not enough where `out` must be looked at.
    run = _memo.get(key) if out is None else None
    if run is None:
        run = call.plan_of(key, a, b, c, call.options_of(alpha, beta, bias, activation, out, out_dtype, how))
    records = _is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, c, bias))
    if records and a.element_size() == 1:
        autograd.refuse_gradients({"a": a, "b": b, "c": c, "bias": bias})
    if out is not None:
        if records:
            raise ValueError(autograd.NO_GRADIENT_INTO)
        if forward_ad._current_level >= 0:
            autograd.refuse_tangents(a, b, c, bias, out)
    elif records or forward_ad._current_level >= 0:
        if _has_transforms():
            return _by_operator(a, b, c, alpha, beta, bias, activation, out, out_dtype, how)
        settings = autograd.Settings(
            alpha, beta, activation, how.precision, how.backend, forward=forward_ad._current_level >= 0
        )
        return _record(a, b, c, bias, settings, run)
    return run(a, b, c, alpha, beta, bias, out)


def _by_operator(a, b, c, alpha, beta, bias, activation, out, out_dtype, how):
    """The call as torch's operator; see pytorch/operator.py. torch.compile puts this into its graph."""
    if not _is_dynamo_compiling():
        registering.check_arguments({"a": a, "b": b, "c": c, "bias": bias, "out": out}, out_dtype, How(*how))
        request.check_activation(activation)
    if out is None:
        return torch.ops.cutegemm.gemm(a, b, c, alpha, beta, bias, activation, out_dtype, *passed(how))
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"out: got dtype {out.dtype}, but out_dtype says {out_dtype}")
    overlap.check_identity(out, {"a": a, "b": b, "bias": bias})
    torch.ops.cutegemm.gemm_out(a, b, c, alpha, beta, bias, activation, *passed(how, out))
    return out


def completed(a: Any, b: Any, c: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The operands and every option of `gemm(a, b, c, **options)` without an epilogue, cast where autocast is on.

    Raises TypeError for a name that `gemm` does not take, ValueError for what an epilogue needs.
    """
    options = float32.completed(a, options)
    programs.refuse_alone(options)
    plain = {name: value for name, value in options.items() if name not in programs.OPTIONS}
    known = runner.complete(plain, (*programs.OPTIONS, *programs.SCALE_OPTIONS))
    if _is_autocast_on():
        a, b, c, bias, how = cast_operands(a, b, c, known["bias"], known["out"], How.of(known))
        known |= {"bias": bias, **how._asdict()}
    return a, b, c, known


def posed(a: Any, b: Any, c: Any, options: dict[str, Any]) -> runner.Call:
    """The checked call `gemm(a, b, c, **options)`, of which nothing is remembered."""
    a, b, c, options = scaled.unscaled(a, b, c, options)
    if options.get("epilogue") is not None:
        return programs.call_of(a, b, c, float32.completed(a, options))
    return runner.Call.of(*completed(a, b, c, options))


def _planned(a: Any, b: Any, c: Any, options: dict[str, Any], anew: bool) -> Plan:
    """The plan of the call `gemm(a, b, c, **options)`. anew: chosen now, even if one is remembered."""
    a, b, c, options = scaled.unscaled(a, b, c, options)
    options = float32.completed(a, options)
    if options.get("epilogue") is not None:
        return programs.plan_of(a, b, c, options)
    a, b, c, known = completed(a, b, c, options)
    if not anew:
        return call.remembered(a, b, c, known)
    return call.planned(call.key_of_options(a, b, c, known), runner.Call.of(a, b, c, known), a, b, c, known)[1]


def prepare(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, **options: Any) -> None:
    """Compiles (or loads) the kernel that `gemm` would use for these arguments, and runs nothing.

    Arguments and errors are those of `gemm`, but for tensors that require grad, which are taken where `gemm` refuses
    them (with `out`, and in fp8 and int8): the kernel is that of the call under torch.no_grad(). Call it before
    capturing a CUDA graph. The kernels of a backward pass are prepared by running it once. It chooses anew, and so does
    `gemm` afterwards for every call, when the winners store or the environment has changed (see `gemm`).
    """
    _planned(a, b, c, options, anew=True)


def explain(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, **options: Any) -> None:
    """Prints what `gemm` does with these arguments from now on: problem, backend, configuration, why, waves, bound.

    Arguments and errors are those of `prepare`. Compiles the kernel when it was never used, and runs nothing. It shows
    the plan that `gemm` remembers; when the winners store or the environment has changed (see `gemm`), it makes both
    choose anew. With `offsets=` or `counts=` arguments and errors are those of `grouped_gemm`, with the same exception,
    and it tells the same of that call.
    """
    if isinstance(c, torch.Tensor) and c.dim() == 1 and c.dtype in (torch.int32, torch.int64):
        raise TypeError(
            f"offsets: got a tensor of {c.dtype} by position, where c is, which has no integers; accepted are offsets "
            "and counts by name, as in explain(a, b, offsets=offsets)"
        )
    if "offsets" in options or "counts" in options:
        if c is not None:
            raise ValueError(
                "c: got a tensor with offsets or counts; grouped_gemm reads it as an operand of an epilogue"
            )
        print(planning.describe(grouped.plan_of(a, b, **options)))
        return
    plan = _planned(a, b, c, options, anew=False)
    print(planning.describe(plan))
    if plan.kernel is not None and not plan.emulated:
        native.want()
        print(f"host code: {native.status()}")


def trace_epilogue(function: Callable[..., Any], operands: Sequence[Any] = ()) -> Program:
    """The program of an epilogue with these operands: it prints as one line of Python, and `gemm` takes it as well.

    Args:
        function: of acc and the operands, as `gemm` takes it.
        operands: tensors and Python numbers. Of a tensor its dtype matters, and along which extents of D it varies.

    Raises:
        EpilogueError: a TypeError that names the line of the function, and what to write instead.
        TypeError, ValueError: something among the operands is neither; the message names it.
    """
    program_request.check_operands(operands)
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    return program_request.program_for(function, operands, device)


autograd.bind(gemm)
