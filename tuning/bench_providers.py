"""Who is timed by `tuning.bench`: cutegemm as it chooses, its backends one by one, torch, and what is installed beside.

A provider prepares a call per input set; it raises `NotServed` with the reason when it cannot serve a problem.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import cutegemm
from cutegemm.choice import prepared
from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, Signature, request
from cutegemm.tuner.timing import Call, quick_seconds
from tuning import bench_scaled
from tuning.bench_basis import Inputs, NotServed, Prepared, Provider, tell


class Torch(Provider):
    """torch.mm, which is cuBLAS on a GPU. TF32 follows the problem's precision. Of fp8 `torch._scaled_mm` with one
    scale a matrix and as the problem accumulates, of int8 `torch._int_mm`.
    """

    name = "torch"

    def prepare(self, problem: Problem, arch: Arch, inputs: Inputs, out: torch.Tensor) -> Prepared:
        def call(a: torch.Tensor, b: torch.Tensor) -> Call:
            if a.element_size() == 1:
                return bench_scaled.torch_call(problem, "tensor", problem.precision == "fast", a, b, out)
            if out.dtype != a.dtype:
                raise NotServed(f"torch.mm stores a product of {problem.dtype} as such, not as {problem.out_dtype}")
            return partial(torch.mm, a, b, out=out)

        try:
            return Prepared([call(a, b) for a, b in inputs])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as why:
            raise NotServed(f"torch: {why}") from why


class Cutegemm(Provider):
    """`cutegemm.gemm`.

    Args:
        backend: "auto", or the one to time. config: a configuration's text, else the plan chooses.
    """

    def __init__(self, backend: str = "auto", config: str | None = None) -> None:
        self.name = config or ("cutegemm" if backend == "auto" else backend)
        self._backend, self._config = backend, config

    def kernels(self, problem: Problem, arch: Arch) -> list[tuple[Signature, str, Any]]:
        try:
            found = prepared.choose(problem, arch, self._backend, self._config)
        except (GemmError, ValueError):
            return []
        choice = found.choice
        return [] if choice.config is None else [(found.problem.signature, choice.backend, choice.config)]

    def prepare(self, problem: Problem, arch: Arch, inputs: Inputs, out: torch.Tensor) -> Prepared:
        precision = problem.precision
        options: dict[str, Any] = {"out": out, "precision": precision}
        try:
            asked = request.describe(*inputs[0], None, 1.0, 0.0, None, None, out, None, precision)
            found = prepared.choose(asked.problem, arch, self._backend, self._config)
            choice = found.choice
            options |= {"backend": choice.backend, "config": choice.config}
            for a, b in inputs:
                cutegemm.prepare(a, b, **options)
        except (GemmError, ValueError) as why:
            raise NotServed(str(why)) from why

        before = [f"copy {name}" for name, _ in asked.copies]
        before += [f"{each.kind} {each.operand}" for each in found.preparations]
        calls: list[Call] = [partial(cutegemm.gemm, a, b, **options) for a, b in inputs]
        return Prepared(calls, str(choice.config or ""), choice.backend, ", ".join(before))


class Triton(Provider):
    """The kernel of `tuning.bench_triton`, autotuned."""

    name = "triton"

    def prepare(self, problem: Problem, arch: Arch, inputs: Inputs, out: torch.Tensor) -> Prepared:
        from tuning import bench_triton

        precision = _one_of(problem, {"ieee": "ieee", "tf32": "tf32", "tf32x3": "tf32x3"})
        a, b = inputs[0]
        tell(self.name, problem, "Triton compiles and times its configurations")
        try:
            bench_triton.matmul(a, b, out, precision)
        except Exception as why:  # whatever its compiler raises
            raise NotServed(f"triton: {type(why).__name__}: {why}") from why

        return Prepared([partial(bench_triton.matmul, a, b, out, precision) for a, b in inputs], bench_triton.chosen())


class Quack(Provider):
    """quack's `gemm`, autotuned by its own tuner at the first call of a shape."""

    name = "quack"

    def prepare(self, problem: Problem, arch: Arch, inputs: Inputs, out: torch.Tensor) -> Prepared:
        if problem.dtype not in ("fp16", "bf16"):
            raise NotServed(f"quack multiplies fp16 and bf16 here, not {problem.dtype}")
        tell(self.name, problem, "its own tuner compiles and times its configurations")
        try:
            from quack.gemm_interface import gemm

            a, b = inputs[0]
            gemm(a, b, out=out, tuned=True)
        except Exception as why:
            raise NotServed(f"quack: {type(why).__name__}: {why}") from why

        return Prepared([partial(gemm, a, b, out=out, tuned=True) for a, b in inputs])


class Operators(Provider):
    """nvidia-cutlass-operators: the fastest of its operators for the problem, by a short timing of each."""

    name = "operators"

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, str], Any] = {}

    def prepare(self, problem: Problem, arch: Arch, inputs: Inputs, out: torch.Tensor) -> Prepared:
        _one_of(problem, {"ieee": "ieee"})
        tell(self.name, problem, "each of its operators is compiled and timed")
        try:
            import cutlass.operators as operators

            given = [operators.GemmArguments(a, b, out, accumulator_type=torch.float32) for a, b in inputs]
            found = operators.get_operators(given[0], target_sm=arch.target.removeprefix("sm_"))
        except Exception as why:
            raise NotServed(f"nvidia-cutlass-operators: {type(why).__name__}: {why}") from why
        best: tuple[float, str, list[Call]] | None = None
        reasons = []
        for operator in found:
            name = str(getattr(operator.metadata, "operator_name", operator.metadata))
            try:
                key = (name, str(problem.signature))
                artefact = self._compiled.get(key) or operator.compile(given[0])
                self._compiled[key] = artefact
                calls = [_operator_call(operator, arguments, artefact) for arguments in given]
                taken = quick_seconds(calls, 4)
            except Exception as why:
                reasons.append(f"{name}: {why}")
                continue
            if best is None or taken < best[0]:
                best = (taken, name, calls)
        if best is None:
            raise NotServed(f"nvidia-cutlass-operators: none of {len(found)} ran: {'; '.join(reasons)[:300]}")
        return Prepared(best[2], best[1])


def _operator_call(operator: Any, arguments: Any, artefact: Any) -> Call:
    def call() -> None:
        stream = torch.cuda.current_stream()
        operator.run(arguments, compiled_artifact=artefact, stream=stream, assume_supported_args=True)

    return call


def _one_of(problem: Problem, known: dict[str, str]) -> str:
    if problem.precision not in known:
        raise NotServed(f"precision {problem.precision!r} is not served")
    return known[problem.precision]


_MAKERS: dict[str, tuple[Callable[[], Provider], str, str]] = {
    # name: (provider, module that must be importable, its package)
    "cutegemm": (Cutegemm, "cutegemm", "cutegemm"),
    "cute": (lambda: Cutegemm("cute"), "cutegemm", "cutegemm"),
    "cutlass2x": (lambda: Cutegemm("cutlass2x"), "cutlass_library", "nvidia-cutlass"),
    "legacy": (lambda: Cutegemm("legacy"), "legacy_cuda", "cutegemm"),
    "torch": (Torch, "torch", "torch"),
    "triton": (Triton, "triton", "triton"),
    "quack": (Quack, "quack", "quack-kernels"),
    **bench_scaled.MAKERS,
    "operators": (Operators, "cutlass.operators", "nvidia-cutlass-operators"),
}
NAMES = tuple(_MAKERS)


def make(names: Sequence[str], first: str = "torch") -> list[Provider]:
    """The providers of those names, `first` before them and always; "all" stands for every one that is installed.

    Raises ValueError for a name that is not known, or not installed and asked for by name.
    """
    wanted = list(dict.fromkeys([first, *names]))
    if "all" in wanted:
        wanted = [name for name in dict.fromkeys([first, *NAMES]) if name == first or installed(name)]
    for name in wanted:
        if name not in _MAKERS:
            argument, accepted = ("providers", ("all", *NAMES)) if name in names else ("against", NAMES)
            raise ValueError(f"{argument}: got {name!r}, accepted are {', '.join(accepted)}")
        if not installed(name):
            how = bench_scaled.HOW_TO_INSTALL.get(name, "")
            raise ValueError(f"providers: {name!r} needs {_MAKERS[name][2]}, which is not installed{how}")
    return [_MAKERS[name][0]() for name in wanted]


def installed(name: str) -> bool:
    """Whether the provider's package can be imported; nothing is. A folder without a module is no package."""
    try:
        found = importlib.util.find_spec(_MAKERS[name][1])
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None


def versions(providers: Sequence[Provider]) -> str:
    """`torch 2.13.0, nvidia-cutlass-dsl 4.8.1, ...` of what the providers run on."""
    packages = ["torch", "nvidia-cutlass-dsl"]
    packages += [_MAKERS[p.name][2] for p in providers if p.name in _MAKERS]
    found = []
    for package in dict.fromkeys(packages):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
