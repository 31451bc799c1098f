"""Which kernel serves a problem: asked for > tuned winner > heuristic; and the plan that runs it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cutegemm import arch as arch_table
from cutegemm import backend as backends
from cutegemm.arch import Arch
from cutegemm.backend import Kernel
from cutegemm.errors import UnsupportedError
from cutegemm.problem import Problem
from cutegemm.roofline import quantization, roofline

DEFAULT_EMULATED_ARCH = "sm_90a"


@dataclass(frozen=True)
class Choice:
    """The backend and configuration for a problem, and the reason. `config` is None for torch."""

    backend: str
    config: Any
    why: str


@dataclass(frozen=True)
class Plan:
    """A problem bound to a kernel.

    Attributes:
        problem: in the canonical form the kernel sees; `swapped` says that it is the transposed one.
        choice, arch: what was chosen, and for which GPU. kernel: None for torch.
        copies: for each operand that must be copied first, its name and why.
    """

    problem: Problem
    choice: Choice
    arch: Arch | None
    kernel: Kernel | None
    swapped: bool = False
    copies: tuple[tuple[str, str], ...] = ()
    emulated: bool = False


def emulated_arch() -> Arch:
    """The architecture that CPU tensors are computed for: `CUTEGEMM_ARCH`, by default sm_90a."""
    name = os.environ.get("CUTEGEMM_ARCH", DEFAULT_EMULATED_ARCH)
    try:
        return arch_table.get(name)
    except (KeyError, ValueError) as why:
        raise ValueError(f"CUTEGEMM_ARCH: got {name!r}: {why}") from None


def choose(problem: Problem, arch: Arch | None, backend: str = "auto", config: str | Any | None = None) -> Choice:
    """Picks backend and configuration.

    Args:
        problem: what is asked, in canonical form.
        arch: the GPU, or None when there is none: then only torch can be chosen automatically.
        backend: one of `cutegemm.backend.NAMES`.
        config: a configuration of that backend or its text; with "auto" the text's backend is found from it.

    Raises:
        UnsupportedError: the backend asked for cannot serve the problem; the message says why.
        ValueError: no such backend or configuration.
    """
    if not isinstance(backend, str) or backend not in backends.NAMES:
        raise ValueError(f"backend: got {backend!r}, accepted are {', '.join(map(repr, backends.NAMES))}")
    if backend == "torch":
        if config is not None:
            raise ValueError(f"config: got {config!r}, but backend 'torch' has no configurations")
        return _torch(problem, "asked for")
    if backend == "auto" and isinstance(config, str):
        backend = _backend_of(config)
    if backend != "auto":
        if arch is None:
            raise UnsupportedError(f"backend {backend!r} needs a GPU or an emulated architecture")
        return _choose_in(backend, problem, arch, config)
    if arch is None:
        if config is not None:
            raise ValueError(f"config: got {config!r} with backend='auto' and no GPU; name the backend too")
        return _torch(problem, "the tensors are on the CPU; name a backend to run its kernel in the emulator")
    if config is not None:
        return _choose_in(backends.AUTO_ORDER[0], problem, arch, config)
    from cutegemm import heuristics  # as winners, imported when a kernel is first chosen: importing cutegemm is cheap

    found = _tuned(problem, arch, None) or heuristics.choose(problem, arch)
    if found is not None:
        return _with_remark(Choice(*found), problem, arch)
    reasons = (
        f"backend {name!r} cannot: {heuristics.unavailable(backends.get(name), problem, arch)}"
        for name in backends.AUTO_ORDER
    )
    return _torch(problem, "no kernel of ours serves it: " + "; ".join(reasons))


def _tuned(problem: Problem, arch: Arch, backend: str | None) -> tuple[str, Any, str] | None:
    """(backend, configuration, why) of the winner measured for this very problem, if it can serve it today; of the
    same in the other 16-bit type where it has none that can.
    """
    from cutegemm import heuristics, winners

    for whose, lookup in (
        ("tuned winner", winners.lookup),
        ("tuned winner of the other 16-bit type", winners.lookup_other_16_bit),
    ):
        row = lookup(problem, arch)
        if row is None or row.seconds is None or backend not in (None, row.backend):
            continue
        serves = backends.get(row.backend)
        try:
            config = serves.parse(row.config)
        except ValueError:  # written by a version with other configurations
            continue
        if heuristics.missing(serves) or serves.check(config, problem, arch):
            continue
        ratio = f", {row.ratio:.2f} of cuBLAS's speed" if row.ratio else ""
        return row.backend, config, f"{whose}, {row.origin}: {row.seconds * 1e6:.1f} us{ratio}"
    return None


def _with_remark(choice: Choice, problem: Problem, arch: Arch) -> Choice:
    """The choice, with a word on the faster kernels that cannot serve the problem."""
    passed_over = getattr(backends.get(choice.backend), "passed_over", lambda problem, arch: None)(problem, arch)
    return replace(choice, why=f"{choice.why}; {passed_over}") if passed_over else choice


def _torch(problem: Problem, why: str) -> Choice:
    if problem.precision != "ieee":
        able = "'cute' or 'cutlass2x'" if problem.precision == "tf32" else "'cutlass2x'"
        raise UnsupportedError(
            f"backend 'torch' follows torch's own TF32 switch; precision={problem.precision!r} needs backend {able}"
        )
    return Choice("torch", None, why)


def _backend_of(config: str) -> str:
    """The backend whose `parse` takes this text. Raises ValueError with what each accepts."""
    refusals = []
    for name in backends.NAMES:
        if name in ("auto", "torch"):
            continue
        try:
            backends.get(name).parse(config)
        except ValueError as why:
            refusals.append(str(why))
        else:
            return name
    raise ValueError("; or ".join(refusals))


def _choose_in(name: str, problem: Problem, arch: Arch, config: Any) -> Choice:
    backend = backends.get(name)
    unsupported = backend.supports(problem, arch)
    if unsupported:
        raise UnsupportedError(f"backend {name!r} cannot serve {problem}: {unsupported}")
    if config is None:
        from cutegemm import heuristics

        found = _tuned(problem, arch, name) or heuristics.choose(problem, arch, name)
        choice = Choice(*found) if found else Choice(name, backend.default(problem, arch), "heuristic")
        return _with_remark(choice, problem, arch)
    parsed = backend.parse(config) if isinstance(config, str) else config
    if not hasattr(parsed, "tile") or _reread(backend, parsed) != parsed:
        raise ValueError(f"config: got {config!r}, expected a configuration of backend {name!r} or its text form")
    invalid = backend.check(parsed, problem, arch)
    if invalid:
        raise UnsupportedError(f"config {parsed} cannot serve {problem}: {invalid}")
    return Choice(name, parsed, "asked for")


def _reread(backend: Any, config: Any) -> Any:
    """The configuration that this one's text form means to the backend; None when it means nothing there."""
    try:
        return backend.parse(str(config))
    except ValueError:
        return None


def describe(plan: Plan) -> str:
    """The text that `cutegemm.explain` prints."""
    p, choice = plan.problem, plan.choice
    size = f"{p.batch} x " if p.batch != 1 else ""
    rows = [
        ("problem", f"{size}M={p.m} N={p.n} K={p.k}, {p.dtype} -> {p.out_dtype}, precision {p.precision}"),
        ("operands", f"A {_layout(p.a)}, B {_layout(p.b)}, D {_layout(p.d)}"),
        ("epilogue", str(p.epilogue)),
        ("backend", f"{choice.backend} ({choice.why})"),
    ]
    if plan.swapped:
        rows.append(("computed as", "D^T = B^T A^T, because D is column-major; the sizes above are those of D^T"))
    rows += [(f"copied first: {name}", why) for name, why in plan.copies]
    if plan.kernel is not None and plan.arch is not None:
        from cutegemm import heuristics

        bm, bn, _ = choice.config.tile()
        grid = quantization(p.m, p.n, bm, bn, plan.arch.sm_count, p.batch)
        bound = roofline(p, plan.arch)
        where = "in the emulator, as on" if plan.emulated else "on"
        needs = f"{p.flops:.3g} flop, {p.min_bytes:.3g} bytes at least"
        rows += [
            ("configuration", str(choice.config)),
            ("estimate", heuristics.explain(p, choice.config, choice.backend, plan.arch)),
            ("runs", f"{where} {plan.arch.name} ({plan.arch.sm_count} SMs)"),
            ("tiles", f"{grid.tiles} = {grid.waves:.2f} waves; {grid.tile_share:.1%} of their area is in D"),
            ("bound", f"{bound.bound_s * 1e6:.2f} us by {bound.limit} ({needs})"),
        ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _layout(matrix: Any) -> str:
    order = "row-major" if matrix.row_major else "column-major"
    return f"{matrix.rows}x{matrix.cols} {order} ld {matrix.leading} align {matrix.align}"


class PlanMemo:
    """Call description -> what runs it, for repeated calls. Bounded; a reader never waits."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._entries: dict[Any, Any] = {}
        self._lock = threading.Lock()
        self.get: Callable[[Any], Any] = self._entries.get

    def put(self, key: Any, value: Any) -> None:
        with self._lock:
            if len(self._entries) >= self._limit:
                self._entries.clear()
            self._entries[key] = value

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
