"""From a checked call to what runs it: chooses and compiles a plan, and binds it to tensors of one description."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cutegemm import backend as backends
from cutegemm.choice import plan as planning
from cutegemm.choice import prepared, spills
from cutegemm.choice.plan import Plan
from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, Signature, overlap, packing, request, torch_dtype
from cutegemm.problem.preparation import Preparation
from cutegemm.problem.program_request import ProgramRequest
from cutegemm.problem.request import Request
from cutegemm.run import preparing
from cutegemm.run.arguments import BoundLaunch, Scalars
from cutegemm.run.environment import is_on, variable
from cutegemm.run.how import How

Runner = Callable[..., torch.Tensor]
"""run(a, b, c, alpha, beta, bias, out) -> D"""

Core = Callable[..., None]
"""core(a, b, c, alpha, beta, bias, d): computes into d, which lies as the plan says"""

_CPU = torch.device("cpu")
_NOTHING = contextlib.nullcontext()
_kernels = planning.Memo(limit=1024)
"""The kernels that calls have used: a new shape of a known one touches no file."""

DEFAULTS: dict[str, Any] = {
    "alpha": 1.0, "beta": 0.0, "bias": None, "activation": None, "out": None, "out_dtype": None, **How._field_defaults,
}  # fmt: skip
"""What `gemm` takes beside a, b and c."""
_described = operator.itemgetter("alpha", "beta", "bias", "activation", "out", "out_dtype", "precision")
"""Those of the options that `request.describe` takes, in its order."""


def complete(options: dict[str, Any], more: Sequence[str] = ()) -> dict[str, Any]:
    """The options with the defaults of those not named. Raises TypeError for a name that `gemm` does not take.

    more: what the caller takes besides.
    """
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(f"{name}: no such argument, accepted are {', '.join((*DEFAULTS, *more))}")
    return {**DEFAULTS, **options}


class Call(NamedTuple):
    """The arguments of one call that decide its plan, checked."""

    request: Request | ProgramRequest
    backend: str
    config: Any

    @classmethod
    def of(cls, a: Any, b: Any, c: Any, options: dict[str, Any]) -> Call:
        """The call `gemm(a, b, c, **options)`; `options` names every one of them."""
        found = request.describe(a, b, c, *_described(options))
        if options["out"] is not None:
            inputs = {"a": a, "b": b, "c": c if found.problem.epilogue.c_dtype else None, "bias": options["bias"]}
            overlap.check(options["out"], inputs)
        return cls.posed(found, How.of(options))

    @classmethod
    def posed(cls, found: Request | ProgramRequest, how: How) -> Call:
        """The call of a described request, with the options `how`."""
        return cls(how.posed(found), how.backend, how.config)

    def plan(self, state: planning.State | None = None) -> Plan:
        """Chooses and compiles. Raises GemmError during graph capture: compiling would break the capture.

        Args:
            state: `plan.state()`, from a caller who has just asked for it.
        """
        with current_device(self.request.device):
            return self._plan(state)

    def _plan(self, state: planning.State | None) -> Plan:
        asked, known = self.request, state and state.winners
        backends.check_name(self.backend)
        on_cpu = asked.device == _CPU
        arch: Arch | None = None
        if not on_cpu:
            arch = Arch.of_device(asked.device.index)
        elif self.backend in backends.WITH_KERNELS:
            arch = planning.emulated_arch()
        if arch is not None and not on_cpu and (state.tune if state else is_on("CUTEGEMM_TUNE")):
            self._tune(arch)
            known = None  # a winner may have been written
        problem, choice, preparations = prepared.choose(asked.problem, arch, self.backend, self.config, known)
        kernel = None
        preparers = []
        if choice.config is not None and not problem.is_empty:
            assert arch is not None
            if problem.epilogue.custom is None:
                kernel = self._kernel(choice, arch, self._promised(choice, problem.signature))
            else:
                choice, kernel = self._without_spills(problem, choice, arch)
            preparers = [(each, self._preparer(choice, arch, each)) for each in preparations]
        emulated = on_cpu and kernel is not None
        constant = asked.problem.constant
        return Plan(problem, choice, arch, kernel, asked.swapped, asked.copies, emulated, tuple(preparers), constant)

    def _promised(self, choice: planning.Choice, signature: Signature) -> Signature:
        """The signature with the promise of the call, where the kernel of a choice makes use of that."""
        promised = self.request.problem
        # An operand that is packed first is written by the kernel in front.
        as_asked = signature == promised.without_constant().signature
        uses = as_asked and promised.constant and backends.get(choice.backend).uses_constant(choice.config, promised)
        return promised.signature if uses else signature

    def _kernel(self, choice: planning.Choice, arch: Arch, signature: Signature) -> backends.Kernel:
        """The kernel of a choice for a signature."""
        backend = backends.get(choice.backend)
        key = backend, choice.config, signature, arch
        found: backends.Kernel = self._held(key, choice.config, lambda: backend.build(signature, choice.config, arch))
        return found

    def _without_spills(
        self, problem: Problem, choice: planning.Choice, arch: Arch
    ) -> tuple[planning.Choice, backends.Kernel]:
        """The choice for a problem with a program and its kernel, or a lighter one where that kernel spills registers.

        A kernel that spills because of the call's promise alone is replaced by the one without. Raises UnsupportedError
        where the configuration was asked for by name and spills either way.
        """
        backend = backends.get(choice.backend)
        as_asked = problem == self.request.problem.without_constant()

        def spilling(config: Any, signature: Signature) -> tuple[backends.Kernel, int]:
            kernel = self._kernel(choice._replace(config=config), arch, signature)
            key = "spilled", backend, config, signature, arch
            count: int = self._held(key, config, lambda: spills.spilled(problem, kernel, config, backend, arch))
            return kernel, count

        def build(config: Any) -> tuple[backends.Kernel, int]:
            plain = problem.signature
            promised = self._promised(choice._replace(config=config), plain)
            kernel, count = spilling(config, promised)
            if count and promised != plain:
                kernel, count = spilling(config, plain)
            if count and self.config is not None:
                raise spills.refusal(problem, config, count)
            return kernel, count

        return spills.settled(problem, choice, arch, build, lambda each: as_asked or backend.takes_prepared(each))

    def _preparer(self, choice: planning.Choice, arch: Arch, asked: Preparation) -> backends.Preparer:
        """The kernel of a preparation."""
        backend = backends.get(choice.backend)
        key = backend, asked.variant, arch
        found: backends.Preparer = self._held(key, asked.kind, lambda: backend.preparer(asked, arch))
        return found

    def _held(self, key: tuple[Any, ...], name: object, build: Callable[[], Any]) -> Any:
        """What this process has of that key, else what `build` gives: compiled or loaded by the backend."""
        device = self.request.device
        # A driver's handle of a loaded kernel may belong to one device, and its files lie in one cache directory.
        key = *key, device.index, variable("CUTEGEMM_CACHE_DIR")
        kernel = _kernels.get(key)
        if kernel is None:
            if device.type != "cpu" and torch.cuda.is_current_stream_capturing():
                raise GemmError(
                    f"this call's kernel ({name}) is not loaded yet, and loading it would break the CUDA "
                    "graph capture under way; call cutegemm.prepare with the same arguments before capturing"
                )
            kernel = build()
            _kernels.put(key, kernel)
        return kernel

    def _tune(self, arch: Arch) -> None:
        """Tunes a problem met for the first time, where nothing was asked for by name and nothing is captured. Products
        with a program are not: those take the winner of the plain product until `cutegemm.tune` measures them.
        """
        from cutegemm.tuner.on_demand import on_demand

        free = self.backend == "auto" and self.config is None and self.request.problem.epilogue.custom is None
        if free and not torch.cuda.is_current_stream_capturing():
            on_demand(self.request.problem, arch, self.request.device.index)

    def launch(self, plan: Plan) -> tuple[Any, ...] | None:
        """What `cutegemm.native.tell` takes: how the plan is launched, without Python where that can be."""
        asked: Any = self.request
        problem = asked.problem
        if plan.kernel is None or plan.emulated or problem.k == 0:
            return None
        if asked.copies or asked.into_temporary or plan.preparations:
            return None
        if problem.out_dtype == "int32":  # alpha must be looked at
            return None
        with current_device(asked.device):
            launcher = plan.kernel.launcher(plan.problem)
        if launcher is None:
            return None
        return *launcher, tuple(asked.shape), torch_dtype(problem.out_dtype), asked.swapped

    def runner(self, plan: Plan) -> Runner:
        """What runs the plan on this call's tensors, and on any others of the same description."""
        found = self._runner(plan)
        return _unscaled(found) if self.request.problem.out_dtype == "int32" else found

    def _runner(self, plan: Plan) -> Runner:
        asked: Any = self.request  # a Request: `fused` runs calls with a program
        if asked.problem.is_empty and not isinstance(backends.get(plan.choice.backend), backends.OnTensors):
            return _empty_runner(asked)
        if plan.kernel is None:
            backend = backends.get(plan.choice.backend)
            assert isinstance(backend, backends.OnTensors)
            return backend.runner(asked)
        made = _staged if asked.copies or asked.into_temporary else _direct
        if plan.emulated:
            return made(_emulated_core(plan), asked)
        with current_device(asked.device):
            return made(_cuda_core(preparing.bind(plan), asked), asked)


def _unscaled(runner: Runner) -> Runner:
    """The runner of D in int32, whose kernels do not multiply by alpha; see `request.describe`, which said so first."""

    def run(a: Any, b: Any, c: Any, alpha: float, *others: Any) -> torch.Tensor:
        if alpha != 1:
            raise ValueError(f"alpha: got {alpha!r} with D in torch.int32; accepted is 1, or another out_dtype")
        return runner(a, b, c, alpha, *others)

    return run


def writing(runner: Runner, a: Any, b: Any, c: Any, bias: Any, out: Any) -> Runner:
    """The runner of a call with `out`, which must overlap no input and about whose new values autograd must be told.

    Autograd is told before the kernel runs, because a kernel that fails may have written a part of `out`. How far
    tensors reach follows from the call's description, so that a call compares addresses only.
    """
    increment_version = torch._C._increment_version  # torch.autograd.graph.increment_version at two thirds of its cost
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
        if out.is_inference():
            request.check_inference(out)
        increment_version((out,))
        return runner(a, b, c, alpha, beta, bias, out)

    return run


def current_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context: a CUDA device is the current one. Kernels ask the driver about the current device when they are chosen
    and bound, and some load or set attributes for that device only.
    """
    if device == _CPU or torch._C._cuda_getDevice() == device.index:
        return _NOTHING
    return torch.cuda.device(device.index)


def _cuda_core(launch: BoundLaunch, asked: Request) -> Core:
    index = asked.device.index
    swapped = asked.swapped
    current_stream = torch._C._cuda_getCurrentRawStream
    current_device = torch._C._cuda_getDevice

    def core(a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, d: torch.Tensor) -> None:
        if swapped:
            a, b = b, a
        operands = (
            a.data_ptr(),
            b.data_ptr(),
            0 if c is None else c.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            d.data_ptr(),
        )
        if current_device() == index:
            launch(operands, (alpha, beta), current_stream(index))
        else:
            with torch.cuda.device(index):
                launch(operands, (alpha, beta), current_stream(index))

    return core


def _emulated_core(plan: Plan) -> Core:
    from cutegemm.emulator.bridge import emulate

    problem, kernel = plan.problem, plan.kernel
    assert kernel is not None

    def core(a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, d: torch.Tensor) -> None:
        if plan.swapped:
            a, b = b, a
        a, b = preparing.emulate(plan, a, b)
        named = {"a": a, "b": b, "bias": bias, "d": d}
        if problem.epilogue.c_dtype is not None and c is not d:
            named["c"] = c
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        addresses = (0 if t is None else t.data_ptr() for t in (a, b, c, bias, d))
        with torch.device("cpu"):  # a workspace is made there, whatever the default device
            launches = kernel.capture(problem, tuple(addresses), Scalars(alpha, beta))
        tensors.update(launches.scratch)
        outputs = {"d", *launches.scratch}
        emulate(kernel.ptx, launches, tensors, outputs=outputs, checks=launches.checks, flops=problem.flops)

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
            a = packing.copied("a", a)
        if "b" in copied:
            b = packing.copied("b", b)
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
