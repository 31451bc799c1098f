"""Which kernel serves a problem: asked for > tuned winner > heuristic; and the plan that runs it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

from cutegemm import backend as backends
from cutegemm import locks, native
from cutegemm.backend import Backend, Kernel, Preparer
from cutegemm.choice.relatives import OF_PLAIN, relatives
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import Arch
from cutegemm.hardware.roofline import parts_of, quantization, roofline
from cutegemm.problem import Problem
from cutegemm.problem.preparation import Preparation
from cutegemm.problem.work import DENSE
from cutegemm.problem.work import TABLE as WORKS
from cutegemm.run.environment import is_on

DEFAULT_EMULATED_ARCH = "sm_90a"
ASKED_FOR = "asked for"
"""Why a configuration or a backend that a call names runs."""
PROGRAM_GAINS = 0.98
"""With a program another configuration replaces the winner of the plain product where the model estimates that it takes
less than this share of the winner's time."""


class Choice(NamedTuple):
    """The backend and configuration for a problem, and the reason. `config` is None for a backend without kernels."""

    backend: str
    config: Any
    why: str


class Plan(NamedTuple):
    """A problem bound to a kernel.

    Attributes:
        problem: in the canonical form the kernel sees; `swapped` says that it is the transposed one.
        choice, arch: what was chosen, and for which GPU. kernel: None for torch, and in a plan that is only described.
        copies: for each operand that torch must make contiguous first, its name and why.
        preparations: what kernels of ours make of operands before that, in this order, each with its kernel (None in a
            plan that is only described). `problem` is the one with prepared operands. See `choice.prepared`.
        constant: "a" or "b" for an operand of `problem` that is promised to be constant, else "".
    """

    problem: Problem
    choice: Choice
    arch: Arch | None
    kernel: Kernel | None
    swapped: bool = False
    copies: tuple[tuple[str, str], ...] = ()
    emulated: bool = False
    preparations: tuple[tuple[Preparation, Preparer | None], ...] = ()
    constant: str = ""


def emulated_arch() -> Arch:
    """The architecture that CPU tensors are computed for: `CUTEGEMM_ARCH`, by default sm_90a."""
    name = os.environ.get("CUTEGEMM_ARCH") or DEFAULT_EMULATED_ARCH
    try:
        return _arch_named(name)
    except (KeyError, ValueError) as why:
        raise ValueError(f"CUTEGEMM_ARCH: got {name!r}: {why}") from None


_arch_named = functools.lru_cache(maxsize=16)(arch_table.get)


def choose(
    problem: Problem, arch: Arch | None, backend: str = "auto", config: str | Any | None = None, known: object = None
) -> Choice:
    """Picks backend and configuration.

    Args:
        problem: what is asked, in canonical form.
        arch: the GPU, or None when there is none: then only torch can be chosen automatically.
        backend: one of `cutegemm.backend.NAMES`.
        config: a configuration of that backend or its text; with "auto" its text tells the backend.
        known: `winners.state()`, from a caller who has just asked for it.

    Raises:
        UnsupportedError: the backend asked for cannot serve the problem; the message says why.
        ValueError: no such backend or configuration.
    """
    backends.check_name(backend)
    if backend == "auto" and config is not None:
        backend = backends.named_by(str(config))
        if arch is None:
            raise ValueError(
                f"config: got {str(config)!r} with backend='auto', which computes CPU tensors by torch; "
                f"name backend={backend!r} to run this configuration in the emulator"
            )
    if backend != "auto":
        asked = backends.get(backend)
        if isinstance(asked, backends.OnTensors):
            if config is not None:
                asked.read(config)  # which refuses it
            return _on_tensors(asked, problem, ASKED_FOR)
        if arch is None:
            raise UnsupportedError(f"backend {backend!r} needs a GPU or an emulated architecture")
        return _choose_in(asked, problem, arch, config, known)
    if arch is None:
        return _last_resort(problem, "the tensors are on the CPU; name a backend to run its kernel in the emulator")
    found = _best_known(problem, arch, None, known)
    if found is not None:
        return Choice(*found)
    reasons = (
        f"backend {name!r} cannot: {backends.get(name).unavailable(problem, arch) or 'no configuration has this size'}"
        for name in backends.WITH_KERNELS
    )
    return _last_resort(problem, "no kernel of ours serves it: " + "; ".join(reasons))


def measured(problem: Problem, arch: Arch) -> Problem:
    """The problem that a tuner measures. A constant operand is left out where no candidate makes use of it, so that
    calls with the promise and without share a winner.
    """
    if not problem.constant:
        return problem
    used = any(
        serves.uses_constant(serves.for_constant(config, problem, arch), problem)
        for serves in map(backends.get, backends.WITH_KERNELS)
        for config, _ in serves.candidates(problem.signature, arch)
    )
    return problem if used else problem.without_constant()


def _best_known(problem: Problem, arch: Arch, backend: str | None, known: object) -> tuple[str, Any, str] | None:
    """(backend, configuration, why) of the tuned winner, else of the heuristic's choice; None when neither has one.
    Where nothing was measured with the problem's constant operand, the choice is the one without that promise, with
    what makes use of it.

    The winner of the plain product may be a poor choice with a program. Where the model says so, the model's own choice
    is taken. But where the model prefers its own choice for the plain product too, the measurement has shown that the
    model errs there. Then only the time that the program adds to either configuration is compared.
    """
    tuned = _tuned(problem, arch, backend, known)
    if tuned is None and problem.constant:
        plain = _best_known(problem.without_constant(), arch, backend, known)
        return None if plain is None else _for_constant(problem, arch, plain)
    if tuned is not None and not tuned[2].startswith(OF_PLAIN):
        return tuned
    found = _heuristics().choose(problem, arch, backend, _reader().noticed())
    if found is not None and problem.constant:
        found = _for_constant(problem, arch, found)
    if tuned is None or found is None:
        return tuned or found
    measured, other = _by_the_model(problem, arch, tuned, found)
    if other >= PROGRAM_GAINS * measured:
        return tuned
    measured_alone, other_alone = _by_the_model(problem.without_terms(), arch, tuned, found)
    return found if other * max(1.0, measured_alone / other_alone) < PROGRAM_GAINS * measured else tuned


def _for_constant(problem: Problem, arch: Arch, found: tuple[str, Any, str]) -> tuple[str, Any, str]:
    """A choice made without the promise, changed so that its kernel makes use of the problem's constant operand."""
    name, config, why = found
    changed = backends.get(name).for_constant(config, problem, arch)
    return name, changed, why if changed == config else f"{why}, of {config}, which runs without the promise"


def _by_the_model(problem: Problem, arch: Arch, *choices: tuple[str, Any, str]) -> list[float]:
    """Seconds of each choice, without what was learned of plain products alone."""
    found = [_heuristics().terms(problem, config, name, arch) for name, config, _ in choices]
    return [terms.seconds / terms.learned for terms in found]


# Imported at first use, because importing cutegemm is cheap; remembered, because an import statement takes a
# microsecond of a new shape's time.
@functools.cache
def _heuristics() -> ModuleType:
    from cutegemm.choice import heuristics

    return heuristics


@functools.cache
def _reader() -> ModuleType:
    from cutegemm.winners import reader

    return reader


def _tuned(problem: Problem, arch: Arch, backend: str | None, known: object) -> tuple[str, Any, str] | None:
    """(backend, configuration, why) of the winner measured for this very problem or else for the nearest relative that
    has one, if it can serve the problem today; of the same in the other 16-bit type where it has none that can.
    """
    for relative, *names in relatives(problem):
        rows = _reader().lookup_both(relative, arch, known)
        if rows != (None, None):
            return _served(problem, arch, backend, relative, list(zip(names, rows, strict=True)))
    return None


def _served(
    problem: Problem, arch: Arch, backend: str | None, relative: Problem, rows: Sequence[tuple[str, Any]]
) -> tuple[str, Any, str] | None:
    """(backend, configuration, why) of the first of named rows that can serve the problem as it serves a relative."""
    for name, row in rows:
        if row is None or row.seconds is None or backend not in (None, row.backend):
            continue
        serves = backends.get(row.backend)
        try:
            config = serves.parse(row.config)
        except ValueError:  # written by a version with other configurations
            continue
        if serves.missing() or serves.check(config, problem, arch):
            continue
        # The model knows what a program costs where slabs store D, but not what C or another type of D costs there.
        by_model = problem.epilogue.custom is not None and relative.out_dtype == problem.out_dtype
        if not by_model and not serves.stores_alike(config, problem, relative):
            continue
        ratio = f", {row.ratio:.2f} of cuBLAS's speed" if row.ratio else ""
        return row.backend, config, f"{name}, {row.origin}: {row.seconds * 1e6:.1f} us{ratio}"
    return None


def _last_resort(problem: Problem, why: str) -> Choice:
    return _on_tensors(backends.last_resort(), problem, why)


def _on_tensors(backend: backends.OnTensors, problem: Problem, why: str) -> Choice:
    unsupported = backend.supports(problem)
    if unsupported:
        raise UnsupportedError(unsupported)
    return Choice(backend.name, None, why)


def _choose_in(backend: Backend[Any], problem: Problem, arch: Arch, config: Any, known: object) -> Choice:
    name = backend.name
    if config is None:
        found = _best_known(problem, arch, name, known)
        if found:  # its configuration was checked, and what `supports` refuses none can serve
            return Choice(*found)
    unsupported = backend.supports(problem, arch)
    if unsupported:
        raise UnsupportedError(f"backend {name!r} cannot serve {problem}: {unsupported}")
    if config is None:
        return Choice(name, backend.default(problem, arch), "heuristic")
    parsed = backend.read(config)
    invalid = backend.check(parsed, problem, arch)
    if invalid:
        raise UnsupportedError(f"config {parsed} cannot serve {problem}: {invalid}")
    return Choice(name, parsed, ASKED_FOR)


def describe(plan: Plan) -> str:
    """The text that `cutegemm.explain` prints."""
    p, choice = plan.problem, plan.choice
    size = f"{p.batch} x " if p.batch != 1 else ""
    rows = [
        ("problem", f"{size}M={p.m} N={p.n} K={p.k}, {p.dtype} -> {p.out_dtype}, precision {p.precision}"),
        ("operands", f"A {_layout(p.a)}, B {_layout(p.b)}, D {_layout(p.d)}"),
        *([("groups", p.work.replace("_", " "))] if p.work != DENSE else []),
        ("epilogue", str(p.epilogue)),
        ("backend", f"{choice.backend} ({choice.why}{_remark(plan)})"),
    ]
    if plan.swapped:
        rows.append(("computed as", "D^T = B^T A^T, because D is column-major; the sizes above are those of D^T"))
    rows += [(f"copied first: {name}", why) for name, why in plan.copies]
    names = {"a": "b", "b": "a"} if plan.swapped else {"a": "a", "b": "b"}
    rows += [(f"prepared first: {names[each.operand]}", each.text) for each, _ in plan.preparations]
    if plan.constant:
        used = plan.kernel is not None and plan.kernel.signature.constant
        what = "its first tiles are loaded while the kernel in front still runs"
        if not used:
            what = "this kernel makes no use of the promise"
        rows.append(("constant", f"{plan.constant.upper()}: {what}"))
    if p.is_empty:
        rows.append(("runs", "nothing: D has no elements"))
    elif choice.config is not None and plan.arch is not None:
        from cutegemm import winners
        from cutegemm.choice import heuristics

        bm, bn, _ = choice.config.tile()
        m, n, _, batch = p.evened
        parts = parts_of(choice.config)
        grid = quantization(m, n, bm, bn, plan.arch.sm_count, batch * parts)
        tiles = f"{grid.tiles // parts} x {parts} parts of K" if parts > 1 else str(grid.tiles)
        bound = roofline(p, plan.arch)
        where = "in the emulator, as on" if plan.emulated else "on"
        read = "if no group is empty" if WORKS[p.work].divided else "at least"
        needs = f"{p.flops:.3g} flop, {p.min_bytes:.3g} bytes {read}"
        rows += [
            ("configuration", str(choice.config)),
            ("estimate", heuristics.explain(p, choice.config, choice.backend, plan.arch)),
            ("runs", f"{where} {plan.arch.name} ({plan.arch.sm_count} SMs)"),
            *((("GPU", plan.arch.remark),) if plan.arch.remark else ()),
            ("tiles", f"{tiles} = {grid.waves:.2f} waves; {grid.tile_share:.1%} of their area is in D"),
            ("bound", f"{bound.bound_s * 1e6:.2f} us by {bound.limit} ({needs})"),
        ]
        for row, why in winners.passed_over(p, plan.arch)[:3]:
            if row.config != str(choice.config):
                rows.append(("passed over", f"{row.config}, {row.origin}, {(row.seconds or 0.0) * 1e6:.1f} us: {why}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _remark(plan: Plan) -> str:
    """A word on faster kernels that cannot serve the problem, where nobody asked for the configuration."""
    if plan.choice.config is None or plan.arch is None or plan.choice.why == ASKED_FOR:
        return ""
    passed_over = backends.get(plan.choice.backend).passed_over(plan.problem, plan.arch)
    return f"; {passed_over}" if passed_over else ""


def _layout(matrix: Any) -> str:
    order = "row-major" if matrix.row_major else "column-major"
    return f"{matrix.rows}x{matrix.cols} {order} ld {matrix.leading} align {matrix.align}"


class Memo:
    """A bounded mapping whose readers take no lock: `get` is a dictionary's own.

    When it is full, a new entry takes the place of some of the oldest, a 64th of all at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[Any, Any] = {}
        self._lock = locks.lock()
        self.get: Callable[[Any], Any] = self._entries.get

    def put(self, key: Any, value: Any) -> None:
        with self._lock:
            entries = self._entries
            if len(entries) >= self._limit and key not in entries:
                for old in list(islice(entries, max(1, self._limit // 64))):
                    del entries[old]
            entries[key] = value

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


class PlanMemo:
    """Call description -> what runs it, for repeated calls, and the plan behind it, for `explain`.

    All that is remembered was planned in one `state()`: what is measured, and whether `gemm` tunes. `keep_up` compares
    it with the present one, and forgets everything when they differ.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._runners, self._plans = Memo(limit), Memo(limit)
        self._state: object = None
        self.get = self._runners.get
        self.plan = self._plans.get

    def put(self, key: Any, runner: Any, plan: Plan | None = None) -> None:
        self._plans.put(key, plan)
        self._runners.put(key, runner)

    def clear(self) -> None:
        self._runners.clear()
        self._plans.clear()
        native.forget()  # last: until then others may still tell it of these plans

    def keep_up(self) -> State:
        """Forgets all plans when the state has changed since they were made. Returns the present state."""
        now = state()
        if now != self._state:
            self.clear()
            self._state = now
        return now


class State(NamedTuple):
    """What a choice depends on besides the call: `winners.state()`, and whether `CUTEGEMM_TUNE` asks `gemm` to tune."""

    winners: object
    tune: bool


def state() -> State:
    """What a choice depends on besides the call: a value that differs from an earlier one when something has changed.

    It covers the winners store (whoever writes to it) and the environment variables `CUTEGEMM_WINNERS`,
    `CUTEGEMM_CACHE_DIR` and `CUTEGEMM_TUNE`. Raises ValueError where one of them has a value that is not accepted.
    """
    return State(_reader().state(), is_on("CUTEGEMM_TUNE"))
