"""The public call: check, describe, choose, run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from cutegemm import backend as backends
from cutegemm import overlap, reference, request
from cutegemm import plan as planning
from cutegemm.arch import Arch
from cutegemm.errors import GemmError, UnsupportedError
from cutegemm.plan import Plan, PlanMemo
from cutegemm.problem import torch_dtype
from cutegemm.request import Request

_memo = PlanMemo()
_plan_lock = threading.Lock()
_FLT_MAX = request.FLT_MAX


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

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted.
        UnsupportedError: the backend or configuration asked for cannot serve the problem; the message says why.
        GemmError: a kernel could not be compiled, loaded or launched, or is not compiled yet during graph capture.
    """
    if not (
        alpha.__class__ is float and beta.__class__ is float
        and -_FLT_MAX <= alpha <= _FLT_MAX and -_FLT_MAX <= beta <= _FLT_MAX
    ):  # fmt: skip
        request.check_number("alpha", alpha)
        request.check_number("beta", beta)
        alpha, beta = float(alpha), float(beta)
    try:
        key = _key(a, b, c, beta, bias, activation, out, out_dtype, precision, backend, config)
        runner = _memo.get(key)
        if runner is not None and torch.is_grad_enabled() and _wants_grad(a, b, c, bias, out):
            runner = None
        if forward_ad._current_level >= 0:
            runner = None
    except (AttributeError, TypeError, RuntimeError):
        # Not a dense tensor, or something unhashable: the slow path names what is wrong.
        key, runner = None, None
    if runner is None:
        runner = _slow(key, a, b, c, {
            "alpha": alpha, "beta": beta, "bias": bias, "activation": activation, "out": out,
            "out_dtype": out_dtype, "precision": precision, "backend": backend, "config": config,
        })  # fmt: skip
    return runner(a, b, c, alpha, beta, bias, out)


def _key(a, b, c, beta, bias, activation, out, out_dtype, precision, backend, config):
    """All that a plan depends on; an unhashable or strange argument raises something."""
    return (
        a.shape, a.stride(), a.dtype, a.device, a.data_ptr() & 15, a.is_neg(),
        b.shape, b.stride(), b.dtype, b.device, b.data_ptr() & 15, b.is_neg(),
        beta == 0, None if c is None else (c.shape, c.stride(), c.dtype, c.device, c.data_ptr() & 15, c.is_neg()),
        None if bias is None else (
            bias.shape, bias.stride(), bias.dtype, bias.device, bias.data_ptr() & 3, bias.is_neg()
        ),
        None if out is None else (out.shape, out.stride(), out.dtype, out.device, out.data_ptr() & 15, out.is_neg()),
        activation, out_dtype, precision, backend, config,
        None if a.is_cuda else os.environ.get("CUTEGEMM_ARCH"),
    )  # fmt: skip


def _wants_grad(*tensors: torch.Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def prepare(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, **options: Any) -> None:
    """Compiles (or loads) the kernel that `gemm` would use for these arguments, and runs nothing.

    Arguments and errors are those of `gemm`. Call it before capturing a CUDA graph.
    """
    _check_names(options)
    known = {**_DEFAULTS, **options}
    _slow(_key(a, b, c, **{name: value for name, value in known.items() if name != "alpha"}), a, b, c, known)


def explain(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, **options: Any) -> None:
    """Prints what `gemm` would do with these arguments: problem, backend, configuration, why, waves, bound.

    Arguments and errors are those of `gemm`. Compiles the kernel when it was never used, and runs nothing.
    """
    print(planning.describe(_Call.of(a, b, c, options).plan()))


@dataclass(frozen=True)
class _Call:
    """The arguments of one call that decide its plan, checked."""

    request: Request
    backend: str
    config: Any

    @classmethod
    def of(cls, a: Any, b: Any, c: Any, options: dict[str, Any]) -> _Call:
        _check_names(options)
        known = {**_DEFAULTS, **options}
        backend, config = known.pop("backend"), known.pop("config")
        found = request.describe(a, b, c, **known)
        if known["out"] is not None:
            inputs = {"a": a, "b": b, "c": c if found.problem.epilogue.c_dtype else None, "bias": known["bias"]}
            overlap.check(known["out"], inputs)
        return cls(found, backend, config)

    def plan(self) -> Plan:
        """Chooses and compiles. Raises GemmError during graph capture: compiling would break the capture."""
        asked = self.request
        on_cpu = asked.device.type == "cpu"
        arch: Arch | None = None
        if not on_cpu:
            arch = Arch.of_device(asked.device.index)
        elif self.backend not in ("auto", "torch"):
            arch = planning.emulated_arch()
        choice = planning.choose(asked.problem, arch, self.backend, self.config)
        kernel = None
        if choice.backend != "torch":
            assert arch is not None
            if not on_cpu and torch.cuda.is_current_stream_capturing():
                raise GemmError(
                    f"this call's kernel ({choice.config}) is not loaded yet, and loading it would break the CUDA "
                    "graph capture under way; call cutegemm.prepare with the same arguments before capturing"
                )
            kernel = backends.get(choice.backend).build(asked.problem.signature, choice.config, arch)
        return Plan(asked.problem, choice, arch, kernel, asked.swapped, asked.copies, on_cpu and kernel is not None)

    def runner(self, plan: Plan) -> Runner:
        """What runs the plan on this call's tensors, and on any others of the same description."""
        asked = self.request
        if plan.kernel is None:
            return _torch_runner(asked)
        if asked.problem.m == 0 or asked.problem.n == 0 or asked.problem.batch == 0:
            return _empty_runner(asked)
        core = _emulated_core(plan, plan.kernel) if plan.emulated else _cuda_core(plan.kernel.bind(plan.problem), asked)
        return _staged(core, asked) if asked.copies or asked.into_temporary else _direct(core, asked)


_DEFAULTS: dict[str, Any] = {
    "alpha": 1.0, "beta": 0.0, "bias": None, "activation": None, "out": None,
    "out_dtype": None, "precision": None, "backend": "auto", "config": None,
}  # fmt: skip


def _check_names(options: dict[str, Any]) -> None:
    for name in options:
        if name not in _DEFAULTS:
            raise TypeError(f"{name}: no such argument, accepted are {', '.join(_DEFAULTS)}")


Runner = Callable[..., torch.Tensor]
"""run(a, b, c, alpha, beta, bias, out) -> D"""

Core = Callable[..., None]
"""core(a, b, c, alpha, beta, bias, d): computes into d, which lies as the plan says"""


def _slow(key: Any, a: Any, b: Any, c: Any, options: dict[str, Any]) -> Runner:
    """Plans a call that was not seen before and remembers what runs it."""
    call = _Call.of(a, b, c, options)
    with _plan_lock:
        runner = call.runner(call.plan())
    if options["out"] is not None:
        runner = _apart(
            runner, a, b, c if call.request.problem.epilogue.c_dtype else None, options["bias"], options["out"]
        )
    if key is not None:
        _memo.put(key, runner)
    return runner


def _apart(runner: Runner, a: Any, b: Any, c: Any, bias: Any, out: Any) -> Runner:
    """The runner behind a check that `out` overlaps no input.

    How far tensors reach follows from the call's description, so that a call compares addresses only.
    """
    reads_c = c is not None
    reach_a, reach_b, reach_c, reach_bias, size = (0 if t is None else overlap.reach(t) for t in (a, b, c, bias, out))

    def run(a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, out: Any) -> torch.Tensor:
        start = out.data_ptr()
        end = start + size
        if (
            (a.data_ptr() < end and start < a.data_ptr() + reach_a)
            or (b.data_ptr() < end and start < b.data_ptr() + reach_b)
            or (reads_c and c.data_ptr() < end and start < c.data_ptr() + reach_c)
            or (bias is not None and bias.data_ptr() < end and start < bias.data_ptr() + reach_bias)
        ):
            overlap.check(out, {"a": a, "b": b, "c": c if reads_c else None, "bias": bias})
        return runner(a, b, c, alpha, beta, bias, out)

    return run


def _cuda_core(launch: backends.BoundLaunch, asked: Request) -> Core:
    index = asked.device.index
    swapped = asked.swapped
    current_stream = torch._C._cuda_getCurrentRawStream
    current_device = torch._C._cuda_getDevice

    def core(a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, d: torch.Tensor) -> None:
        if swapped:
            a, b = b, a
        pointers = (
            a.data_ptr(),
            b.data_ptr(),
            0 if c is None else c.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            d.data_ptr(),
        )
        if current_device() == index:
            launch(*pointers, alpha, beta, current_stream(index))
        else:
            with torch.cuda.device(index):
                launch(*pointers, alpha, beta, current_stream(index))

    return core


def _emulated_core(plan: Plan, kernel: backends.Kernel) -> Core:
    from cutegemm.emulator.bridge import emulate

    problem = plan.problem

    def core(a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, d: torch.Tensor) -> None:
        if plan.swapped:
            a, b = b, a
        named = {"a": a, "b": b, "bias": bias, "d": d}
        if problem.epilogue.c_dtype is not None and c is not d:
            named["c"] = c
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        c_address, bias_address = (0 if t is None else t.data_ptr() for t in (c, bias))
        launches = kernel.capture(
            problem, a.data_ptr(), b.data_ptr(), c_address, bias_address, d.data_ptr(), alpha, beta
        )
        scratch = getattr(launches, "scratch", {})
        checks = getattr(launches, "checks", None)
        tensors.update(scratch)
        emulate(kernel.ptx, launches, tensors, outputs={"d", *scratch}, checks=checks, flops=problem.flops)

    return core


def _direct(core: Core, asked: Request) -> Runner:
    """The tensors are read and written where they lie."""
    shape, dtype, device = asked.shape, torch_dtype(asked.problem.out_dtype), asked.device

    def run(a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, out: Any) -> torch.Tensor:
        d = torch.empty(shape, dtype=dtype, device=device) if out is None else out
        core(a, b, c, alpha, beta, bias, d)
        return d

    return run


def _staged(core: Core, asked: Request) -> Runner:
    """Some operand, or the result, has no unit stride: contiguous copies stand in for them."""
    direct, copied = _direct(core, asked), asked.copied

    def run(a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, out: Any) -> torch.Tensor:
        if "a" in copied:
            a = a.contiguous()
        if "b" in copied:
            b = b.contiguous()
        if "bias" in copied:
            bias = bias.contiguous()
        if not asked.into_temporary:
            return direct(a, b, c, alpha, beta, bias, out)
        return out.copy_(direct(a, b, c, alpha, beta, bias, None))

    return run


def _empty_runner(asked: Request) -> Runner:
    def run(a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, out: Any) -> torch.Tensor:
        return (
            torch.empty(asked.shape, dtype=torch_dtype(asked.problem.out_dtype), device=a.device)
            if out is None
            else out
        )

    return run


def _torch_runner(asked: Request) -> Runner:
    """D by torch's own operators, in fp32 unless torch.matmul alone is the whole answer."""
    problem = asked.problem
    dtype, epilogue = torch_dtype(problem.out_dtype), problem.epilogue
    on_cuda = asked.device.type == "cuda"
    plain = epilogue == type(epilogue)() and problem.dtype == problem.out_dtype and on_cuda

    def run(a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, out: Any) -> torch.Tensor:
        if on_cuda and a.dtype == torch.float32 and _tf32_is_on():
            raise UnsupportedError(
                "backend 'torch': torch's TF32 switch for matmul is on, so it would not compute in IEEE fp32; "
                "switch it off or use backend 'cute'"
            )
        if plain and alpha == 1:
            d = torch.matmul(a, b)
        else:
            z = torch.matmul(a.float(), b.float()) * alpha
            if epilogue.c_dtype is not None:
                z = z + beta * c.float()
            if bias is not None:
                z = z + bias.float()
            d = reference.activate(z, epilogue.activation).to(dtype)
        return d if out is None else out.copy_(d)

    return run


def _tf32_is_on() -> bool:
    """Whether torch.matmul may use TF32. Once the newer switch was set, reading the older one raises."""
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if newer == "none":
        newer = getattr(torch.backends, "fp32_precision", "none")
    return newer == "tf32" if newer is not None else torch.backends.cuda.matmul.allow_tf32
