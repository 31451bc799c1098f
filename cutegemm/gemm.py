"""The public call: takes the short way to a remembered kernel, or finds out what kind of call it is.

A call that was made before, with plain tensors and nothing for autograd or autocast to do, is looked up by its
description and launched; torch's dispatcher would cost as much again. Every other call goes through `_uncommon`:

    torch.compile, a dispatch mode, a tensor subclass   the operator torch.ops.cutegemm.gemm (torch_op.py)
    vmap, torch.func                                    the function they know how to transform (transforms.py)
    autocast                                            operands cast as those of torch.mm, then again
    a tensor that requires grad                         the autograd function (autograd.py)
    a description not seen before                       checks, plan, compilation (request.py, plan.py, runner.py)
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch.autograd import forward_ad

from cutegemm import autograd, request, runner, transforms
from cutegemm import plan as planning
from cutegemm.plan import PlanMemo
from cutegemm.runner import Call, Runner

_memo = PlanMemo()
_plan_lock = threading.Lock()
_FLT_MAX = request.FLT_MAX
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_autocast_on = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_grad_enabled = torch.is_grad_enabled
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


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
) -> torch.Tensor:
    """D = activation(alpha * a @ b + beta * c + bias), accumulated in fp32 and rounded once.

    Args:
        a: (M, K) or (L, M, K), float16, bfloat16 or float32, any strides that torch allows.
        b: (K, N) or (L, K, N), dtype and device of `a`. A batch of 1, or a 2-D operand, broadcasts.
        c: broadcastable to D; any of the three dtypes. With beta == 0 it is never read: a NaN in it does not spread.
        alpha, beta: Python numbers, used in fp32.
        bias: (N,), any of the three dtypes.
        activation: None, "relu", "gelu" (erf), "gelu_tanh" or "silu".
        out: D is written here; (M, N) or (L, M, N). It may be `c` itself and must not overlap another input.
        out_dtype: dtype of D: float16, bfloat16 or float32; by default that of `out`, else of `a`.
        precision: for float32: "ieee" (default; CUDA cores, as exact as torch.mm without TF32), "tf32" (tensor cores,
            operands rounded to 10 mantissa bits) or "tf32x3" (tensor cores, each operand split into two TF32 numbers,
            three products: nearly fp32's accuracy for finite operands; an infinity gives NaN; backend "cutlass2x").
            For 16-bit operands None or "ieee".
        backend: "auto" (default), "cute", "cutlass2x", "legacy" or "torch". A kernel backend named for CPU tensors
            runs its compiled kernels in the emulator, for the architecture of the environment variable CUTEGEMM_ARCH.
        config: a configuration of that backend or its text form, for example "sm80/128x128x32/w64x64/s4/g8"; by
            default the backend chooses.

    Returns:
        D: `out`, or a new row-major tensor. K = 0 gives activation(beta * c + bias); an empty M, N or L an empty D.
        On CUDA the work is enqueued on the current stream of a's device.

    Gradients of a, b, c and bias are recorded as torch's operators record theirs, to any order; their products run on
    the same backend. For gelu, gelu_tanh and silu the backward pass computes alpha a b + beta c + bias once more, in
    D's dtype, rather than keep it. Under autocast a, b, c and bias are cast as those of torch.mm are, unless `out` is
    given. torch.compile and FakeTensorMode see the operator torch.ops.cutegemm.gemm; torch.vmap and torch.func's
    reverse mode work, forward mode is refused.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted.
        UnsupportedError: the backend or configuration asked for cannot serve the problem; the message says why.
        GemmError: a kernel could not be compiled, loaded or launched, or is not compiled yet during graph capture.
    """
    if _is_dynamo_compiling():
        return _by_operator(
            a, b, c, alpha=alpha, beta=beta, bias=bias, activation=activation, out=out, out_dtype=out_dtype,
            precision=precision, backend=backend, config=config,
        )  # fmt: skip
    if not (
        alpha.__class__ is float and beta.__class__ is float
        and -_FLT_MAX <= alpha <= _FLT_MAX and -_FLT_MAX <= beta <= _FLT_MAX
    ):  # fmt: skip
        request.check_number("alpha", alpha)
        request.check_number("beta", beta)
        alpha, beta = float(alpha), float(beta)
    key, run = None, None
    try:
        if a.__class__ in _PLAIN and b.__class__ in _PLAIN and not _dispatch_modes():
            key = _key(a, b, c, beta, bias, activation, out, out_dtype, precision, backend, config)
            run = _memo.get(key)
        if run is not None and (_is_autocast_on() or forward_ad._current_level >= 0):
            run = None
        records = _is_grad_enabled() and (
            a.requires_grad or b.requires_grad or (c is not None and c.requires_grad)
            or (bias is not None and bias.requires_grad) or (out is not None and out.requires_grad)
        )  # fmt: skip
    except (AttributeError, TypeError, RuntimeError):
        key, run = None, None  # not a dense tensor, or something unhashable: what it is is found out below
    if run is None or (records and out is not None):
        return _uncommon(key, a, b, c, alpha, beta, bias, activation, out, out_dtype, precision, backend, config)
    if records:
        settings = autograd.Settings(alpha, beta, activation, precision, backend)
        return autograd.GemmFunction.apply(a, b, c, bias, settings, run)
    return run(a, b, c, alpha, beta, bias, out)


def _key(a, b, c, beta, bias, activation, out, out_dtype, precision, backend, config):
    """All that a plan depends on; an unhashable or strange argument raises something.

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
        activation, out_dtype, precision, backend, config,
        None if a.is_cuda else os.environ.get("CUTEGEMM_ARCH"),
    )  # fmt: skip


def _uncommon(key, a, b, c, alpha, beta, bias, activation, out, out_dtype, precision, backend, config):
    """A call that is new, or that is more than a multiplication of plain tensors."""
    options = {
        "alpha": alpha, "beta": beta, "bias": bias, "activation": activation, "out": out,
        "out_dtype": out_dtype, "precision": precision, "backend": backend, "config": config,
    }  # fmt: skip
    if transforms.active(a, b, c, bias, out):
        return transforms.apply(a, b, c, options)
    if _is_dispatched(a, b, c, bias, out):
        return _by_operator(a, b, c, **options)
    if _is_autocast_on():
        a, b, c, options = _cast(a, b, c, options)
        with torch._C._DisableAutocast():
            return gemm(a, b, c, **options)
    if key is None:
        key = _key_of(a, b, c, options)
    # What was remembered is not enough where `out`, or a forward-mode tangent, must be looked at.
    run = _memo.get(key) if out is None and forward_ad._current_level < 0 else None
    if run is None:
        run = _plan(key, a, b, c, options)
    if not (_is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, c, bias))):
        return run(a, b, c, alpha, beta, bias, out)
    if out is not None:
        raise ValueError(
            "out: an operand requires grad, and no gradient is recorded of what is written into a tensor; "
            "call gemm under torch.no_grad(), or leave out away"
        )
    settings = autograd.Settings(alpha, beta, activation, precision, backend)
    return autograd.GemmFunction.apply(a, b, c, bias, settings, run)


def compute(a, b, c, **options: Any) -> torch.Tensor:
    """`gemm` of plain tensors, with no regard to autograd, autocast or tracing. Takes every option of `gemm`."""
    key = _key_of(a, b, c, options)
    run = _memo.get(key) or _plan(key, a, b, c, options)
    return run(a, b, c, options["alpha"], options["beta"], options["bias"], options["out"])


def _key_of(a: Any, b: Any, c: Any, options: dict[str, Any]) -> Any:
    """The key of a call, or None when something about it is strange."""
    try:
        key = _key(a, b, c, **{name: value for name, value in options.items() if name != "alpha"})
        hash(key)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return key


def _plan(key: Any, a: Any, b: Any, c: Any, options: dict[str, Any]) -> Runner:
    """Checks and plans a call that was not seen before, and remembers what runs it."""
    call = Call.of(a, b, c, options)
    with _plan_lock:
        run = call.runner(call.plan())
    if options["out"] is not None:
        reads_c = call.request.problem.epilogue.c_dtype is not None
        run = runner.apart(run, a, b, c if reads_c else None, options["bias"], options["out"])
    if key is not None:
        _memo.put(key, run)
    return run


def _is_dispatched(*tensors: Any) -> bool:
    """Whether the call is for torch's dispatcher: a mode sees it, or a subclass of Tensor that handles operators."""
    if _dispatch_modes():
        return True
    found = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if any(tensor.is_nested for tensor in found):  # handles operators, but not ours: the checks refuse it by name
        return False
    if any(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for tensor in found):
        return True
    return torch.overrides.has_torch_function(found)


def _by_operator(a, b, c, *, alpha, beta, bias, activation, out, out_dtype, precision, backend, config):
    """The call as torch's operator; see torch_op.py. torch.compile puts this into its graph."""
    if config is not None and not isinstance(config, str):
        config = str(config)
    if out is None:
        return torch.ops.cutegemm.gemm(a, b, c, alpha, beta, bias, activation, out_dtype, precision, backend, config)
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"out: got dtype {out.dtype}, but out_dtype says {out_dtype}")
    torch.ops.cutegemm.gemm_out(a, b, c, alpha, beta, bias, activation, precision, backend, config, out)
    return out


def _cast(a: Any, b: Any, c: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The call as autocast makes it: operands in its dtype, where torch.mm would cast them; none with `out`."""
    if options["out"] is not None or not isinstance(a, torch.Tensor) or not torch.is_autocast_enabled(a.device.type):
        return a, b, c, options
    kind, dtype = a.device.type, torch.get_autocast_dtype(a.device.type)

    def cast(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != kind or not tensor.is_floating_point():
            return tensor
        return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)

    options = {**options, "bias": cast(options["bias"])}
    if a.dtype == torch.float32 and dtype != torch.float32:
        options["precision"] = None
    return cast(a), cast(b), cast(c), options


def completed(a: Any, b: Any, c: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The operands and every option of `gemm(a, b, c, **options)`, cast where autocast is on.

    Raises TypeError for a name that `gemm` does not take.
    """
    known = runner.complete(options)
    return _cast(a, b, c, known) if _is_autocast_on() else (a, b, c, known)


def prepare(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, **options: Any) -> None:
    """Compiles (or loads) the kernel that `gemm` would use for these arguments, and runs nothing.

    Arguments and errors are those of `gemm`. Call it before capturing a CUDA graph. The kernels of a backward pass
    are prepared by running it once.
    """
    a, b, c, known = completed(a, b, c, options)
    _plan(_key_of(a, b, c, known), a, b, c, known)


def explain(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, **options: Any) -> None:
    """Prints what `gemm` would do with these arguments: problem, backend, configuration, why, waves, bound.

    Arguments and errors are those of `gemm`. Compiles the kernel when it was never used, and runs nothing.
    """
    a, b, c, known = completed(a, b, c, options)
    print(planning.describe(Call.of(a, b, c, known).plan()))
