"""The kernels that the fuzzer runs its problems through: chosen by seed, compiled in parallel before the first one."""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from cutegemm import backend as backends
from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE
from cutegemm.problem.dtypes import TERMS
from cutegemm.problem.epilogue import ACTIVATIONS
from tests import forked
from tests.fuzz_draw import Limits, Pair, Template, draw

SHARES = {"sm90": 30, "sm80": 30, "simt": 14, "cutlass2x": 16, "legacy": 24, "default": 12, "auto": 16, "torch": 4}
"""Templates of each kind among about 150. "default": a backend is named and no configuration; "auto": neither."""

LATE = "not compiled in time"

PER_UNIT = 4
"""CUTLASS kernels a nvcc process compiles together."""


@dataclass(frozen=True)
class Slot:
    """A template and the kernels that may serve it."""

    kind: str
    template: Template
    pairs: frozenset[Pair]


class Deck:
    """Deals values in random order, each once before any again: an even cover."""

    def __init__(self, rng: random.Random, values: Sequence[Any]) -> None:
        self._rng, self._values, self._left = rng, tuple(values), list[Any]()

    def deal(self) -> Any:
        if not self._left:
            self._left = self._rng.sample(self._values, len(self._values))
        return self._left.pop()


def choose(seed: int, count: int, limits: Limits, arch: Arch, kinds: Sequence[str] = tuple(SHARES)) -> list[Slot]:
    """About `count` slots of the kinds, in proportion to their shares; the same for the same arguments."""
    total = sum(SHARES[kind] for kind in kinds)
    return [slot for kind in kinds for slot in _of_kind(kind, seed, -(-SHARES[kind] * count // total), limits, arch)]


def _of_kind(kind: str, seed: int, count: int, limits: Limits, arch: Arch) -> list[Slot]:
    rng = random.Random(f"{seed}/{kind}")
    make = _templates(kind, rng, arch)
    slots: list[Slot] = []
    for _ in range(count * 40):
        if len(slots) == count:
            break
        template = make()
        found = [draw(template, rng, limits, arch) for _ in range(1 if template.config else 6)]
        pairs = frozenset(pair for spec in found if spec is not None for pair in (spec[1],))
        if pairs and None not in found:
            slots.append(Slot(kind, template, frozenset(sorted(pairs, key=str)[:2])))
    return slots


def _templates(kind: str, rng: random.Random, arch: Arch) -> Callable[[], Template]:
    """Gives one template after another; those that no kernel serves are dropped by the caller."""
    deck = {
        "kinds": Deck(rng, _operand_kinds(kind)),
        "out": Deck(rng, TERMS),
        "majors": Deck(rng, ("tn", "tt", "nn", "nt")),
        "order": Deck(rng, ("row", "row", "col")),
        "c": Deck(rng, ("no", "no", "aligned", "aligned", "any")),
        "c_dtype": Deck(rng, TERMS),
        "bias": Deck(rng, (None, None, *TERMS)),
        "activation": Deck(rng, (None, None, None, *ACTIVATIONS)),
        "align": Deck(rng, (16, 8, 4, 2)),
        "even": Deck(rng, (True, False)),
    }
    configs = _configs(kind, rng, arch)
    named = Deck(rng, ("cute", "cutlass2x", "legacy"))

    def align(dtype: str, least: int = 2) -> int:
        return max(deck["align"].deal(), ITEMSIZE[dtype], least)

    def make() -> Template:
        dtype, precision = deck["kinds"].deal()
        out_dtype, c_dtype, c, bias = (deck[name].deal() for name in ("out", "c_dtype", "c", "bias"))
        activation, order = deck["activation"].deal(), deck["order"].deal()
        backend = {"sm90": "cute", "sm80": "cute", "simt": "cute", "default": named.deal()}.get(kind, kind)
        if backend == "legacy":
            bias = activation = None
        if backend == "cutlass2x":
            c, c_dtype = ("aligned" if c == "any" else c), out_dtype
            bias = out_dtype if bias and c == "no" and order == "row" else None
        least = 16 if kind == "sm90" or deck["even"].deal() else 2
        aligns = (align(dtype, least), align(dtype, least), align(out_dtype))
        return Template(
            backend, configs(), dtype, precision, out_dtype, deck["majors"].deal(), order, aligns,
            c, c_dtype, align(c_dtype), bias, activation,
        )  # fmt: skip

    return make


def _operand_kinds(kind: str) -> list[tuple[str, str | None]]:
    sixteen = [("fp16", None), ("bf16", None)]
    single = ("fp32", None)
    parts = [("fp32", "bf16x6"), ("fp32", "tf32x3"), ("fp32", "bf16x9")]
    if kind == "sm90":
        return [*sixteen, *parts]
    if kind == "simt":
        return [single, ("fp32", "ieee")]
    if kind == "sm80":
        return [*sixteen, ("fp32", "tf32"), *parts]
    if kind == "cutlass2x":
        return [*sixteen, single, ("fp32", "tf32"), ("fp32", "tf32x3")]
    if kind in ("legacy", "torch"):
        return [*sixteen, single, single]
    return [*sixteen, single, ("fp32", "tf32")]


def _configs(kind: str, rng: random.Random, arch: Arch) -> Callable[[], str | None]:
    """Texts of configurations of a kind: the defaults, and random ones of the space that the tuner searches."""
    if kind in ("default", "auto", "torch"):
        return lambda: None
    if kind in ("sm90", "sm80", "simt"):
        return _cute_configs(kind, rng)
    if kind == "legacy":
        return _legacy_configs(rng)
    from cutegemm.cutlass2x import config as cutlass2x
    from cutegemm.problem import Problem

    spaces = [
        list(cutlass2x.space(Problem.of(8, 8, 8, dtype, precision=precision or "ieee").signature))
        for dtype, precision in (("fp16", None), ("fp32", None), ("fp32", "tf32"))
    ]
    return lambda: str(rng.choice(rng.choice(spaces)))


def _cute_configs(kind: str, rng: random.Random) -> Callable[[], str]:
    from cutegemm.cute import FAMILIES
    from cutegemm.cute.hopper.options import NAMES
    from cutegemm.problem import Problem

    family = FAMILIES[kind]
    dtype = "fp32" if kind == "simt" else "fp16"
    defaults = Deck(rng, family.candidates(Problem.of(8, 8, 8, dtype).signature))
    space = list(family.config.space())
    if kind in ("sm90", "sm80"):  # the candidates for parts of operands, which few others serve
        more = (family.candidates(Problem.of(8, 8, 8, "fp32", precision=p).signature) for p in ("bf16x6", "tf32x3"))
        space += [family.config.parse(text) for texts in more for text in texts] * (len(space) // 100)

    def config() -> str:
        if rng.random() < 0.3:
            return str(defaults.deal())
        found = rng.choice(space)
        if kind == "sm90":
            changes: dict[str, Any] = {"order": rng.choice(("row", "col", "g4", "serp2", "hilbert"))}
            if rng.random() < 0.3:
                changes["splits"] = rng.choice((2, 3, 4, 8))
            changes["options"] = tuple(option for option in NAMES if rng.random() < 0.25)
            if rng.random() < 0.3:
                changes["bk"] = 32
            found = dataclasses.replace(found, **changes)
        elif rng.random() < 0.25:
            found = dataclasses.replace(found, splits=rng.choice((2, 3, 5, 8, 32)))
        return str(found)

    return config


def _legacy_configs(rng: random.Random) -> Callable[[], str]:
    from cutegemm.problem import Problem
    from legacy_cuda import space
    from legacy_cuda.rungs import RUNGS

    rungs = Deck(rng, tuple(RUNGS))
    tuned = [str(config) for config in space.configs(Problem.of(64, 64, 64, "fp32").signature, _any_arch())]
    return lambda: str(rungs.deal()) if rng.random() < 0.6 else rng.choice(tuned)


def _any_arch() -> Arch:
    from cutegemm.hardware import arch

    return arch.get("sm_80")


def compile_all(slots: Sequence[Slot], arch: Arch, workers: int, limit_s: float | None = None) -> dict[Pair, str]:
    """Compiles every kernel into the kernel store in `workers` processes; returns those that failed, with why.

    With `limit_s`, kernels that are not begun after that many seconds are given up (`LATE`).
    """
    pairs = sorted({pair for slot in slots for pair in slot.pairs if pair.backend != "torch"}, key=str)
    rank = {"cutlass2x": 0, "cute": 1, "legacy": 2}
    units: list[list[Pair]] = [[pair] for pair in pairs if pair.backend != "cutlass2x"]
    cutlass = [pair for pair in pairs if pair.backend == "cutlass2x"]
    units += [cutlass[i : i + PER_UNIT] for i in range(0, len(cutlass), PER_UNIT)]
    units.sort(key=lambda unit: (rank[unit[0].backend], "sm90" not in unit[0].config))
    begun, failures, done = time.monotonic(), dict[Pair, str](), 0
    with ProcessPoolExecutor(min(workers, max(len(units), 1)), mp_context=forked.context()) as pool:
        jobs: dict[Future[dict[Pair, str]], list[Pair]] = {pool.submit(_compile, u, arch): u for u in units}
        for job in as_completed(jobs):
            unit = jobs[job]
            if job.cancelled():
                failures.update(dict.fromkeys(unit, LATE))
                continue
            try:
                failures.update(job.result())
            except Exception as why:  # the compiler took its process with it
                failures.update(dict.fromkeys(unit, f"{type(why).__name__}: {why}"))
            done += len(unit)
            if limit_s is not None and time.monotonic() - begun > limit_s:
                for other in jobs:
                    other.cancel()
            if done % 20 < len(unit):
                seconds = time.monotonic() - begun
                print(f"compiled {done} of {len(pairs)} kernels in {seconds:.0f} s", file=sys.stderr, flush=True)
    return failures


def _compile(unit: list[Pair], arch: Arch) -> dict[Pair, str]:
    """Compiles kernels of one backend; runs in a process of its own. Returns what failed."""
    if len(unit) > 1:
        from cutegemm.cutlass2x import BACKEND, build_many

        try:
            build_many([(pair.signature, BACKEND.parse(pair.config)) for pair in unit], arch, jobs=1)
            return {}
        except GemmError:
            pass  # one by one, to know which
    failures = {}
    for pair in unit:
        backend = backends.get(pair.backend)
        try:
            kernel: Any = backend.build(pair.signature, backend.parse(pair.config), arch)
            _ = kernel.ptx
        except Exception as why:
            failures[pair] = f"{type(why).__name__}: {why}"
    return failures
