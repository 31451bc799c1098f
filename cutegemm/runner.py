"""From a checked call to what runs it: chooses and compiles a plan, and binds it to tensors of one description."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cutegemm import backend as backends
from cutegemm import overlap, reference, request
from cutegemm import plan as planning
from cutegemm.arch import Arch
from cutegemm.errors import GemmError, UnsupportedError
from cutegemm.plan import Plan
from cutegemm.problem import torch_dtype
from cutegemm.request import Request

Runner = Callable[..., torch.Tensor]
"""run(a, b, c, alpha, beta, bias, out) -> D"""

Core = Callable[..., None]
"""core(a, b, c, alpha, beta, bias, d): computes into d, which lies as the plan says"""

DEFAULTS: dict[str, Any] = {
    "alpha": 1.0, "beta": 0.0, "bias": None, "activation": None, "out": None,
    "out_dtype": None, "precision": None, "backend": "auto", "config": None,
}  # fmt: skip
"""What `gemm` takes beside a, b and c."""


def complete(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the defaults of those not named. Raises TypeError for a name that `gemm` does not take."""
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(f"{name}: no such argument, accepted are {', '.join(DEFAULTS)}")
    return {**DEFAULTS, **options}


@dataclass(frozen=True)
class Call:
    """The arguments of one call that decide its plan, checked."""

    request: Request
    backend: str
    config: Any

    @classmethod
    def of(cls, a: Any, b: Any, c: Any, options: dict[str, Any]) -> Call:
        """The call `gemm(a, b, c, **options)`; `options` names every one of them."""
        known = dict(options)
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
        if arch is not None and not on_cpu and os.environ.get("CUTEGEMM_TUNE"):
            self._tune(arch)
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

    def _tune(self, arch: Arch) -> None:
        """Tunes a problem met for the first time, where nothing was asked for by name and nothing is captured."""
        from cutegemm.tune import on_demand, wanted

        free = self.backend == "auto" and self.config is None
        if wanted() and free and not torch.cuda.is_current_stream_capturing():
            on_demand(self.request.problem, arch, self.request.device.index)

    def runner(self, plan: Plan) -> Runner:
        """What runs the plan on this call's tensors, and on any others of the same description."""
        asked = self.request
        if plan.kernel is None:
            return _torch_runner(asked)
        if asked.problem.m == 0 or asked.problem.n == 0 or asked.problem.batch == 0:
            return _empty_runner(asked)
        core = _emulated_core(plan, plan.kernel) if plan.emulated else _cuda_core(plan.kernel.bind(plan.problem), asked)
        return _staged(core, asked) if asked.copies or asked.into_temporary else _direct(core, asked)


def apart(runner: Runner, a: Any, b: Any, c: Any, bias: Any, out: Any) -> Runner:
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
        # torch.matmul picks its way, and with it the rounding, by what requires grad.
        a, b = a.detach(), b.detach()
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
