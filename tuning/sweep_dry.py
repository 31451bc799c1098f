"""Sweeping without a GPU: compile what would be timed, or check its numbers in the emulator. Nothing is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cutegemm.errors import GemmError
from cutegemm.problem import Problem
from cutegemm.tuner.budget import Budget
from cutegemm.tuner.problem_bench import Bench
from cutegemm.tuner.space import Candidate, Frontier

if TYPE_CHECKING:
    from cutegemm.backend import Kernel
    from cutegemm.hardware.arch import Arch
    from cutegemm.run.arguments import Addresses, BoundLaunch, Numbers
    from cutegemm.tuner.compile_pool import Compiler

COMPILED, STORED = "compiled", "in the store"


@dataclass(frozen=True)
class Entry:
    """A candidate in the order in which it would be timed, and what became of it."""

    candidate: Candidate
    outcome: str


def compile_only(
    candidates: Iterable[Candidate],
    compiler: Compiler,
    limit: int,
    budget: float,
    *,
    report: Callable[[int, int], None] = lambda done, total: None,
    stopped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> list[Entry]:
    """Compiles the first `limit` candidates in the frontier's order into the kernel store, within `budget` seconds, as
    `cutegemm.tuner.budget` counts them.
    """
    spent = Budget(budget, clock)
    frontier = Frontier(candidates)
    order: list[Candidate] = []
    while len(order) < limit and (candidate := frontier.next()) is not None:
        order.append(candidate)
    outcomes: dict[tuple[str, str], str] = {}
    waiting = iter(order)
    exhausted = False
    try:
        while not (spent.over or spent.hopeless or stopped()):
            while not exhausted and compiler.room:
                candidate = next(waiting, None)
                if candidate is None:
                    exhausted = True
                elif compiler.stored(candidate):
                    outcomes[candidate.key] = STORED
                else:
                    compiler.submit(candidate)
                    break
            if exhausted and not compiler.outstanding:
                break
            for done, reason in spent.collect(compiler, 0.0 if compiler.room and not exhausted else 0.25):
                outcomes[done.key] = COMPILED if reason is None else f"failed to compile: {reason}"
            report(len(outcomes), len(order))
    finally:
        compiler.cancel()
    left = "not compiled: no compile worker came up" if spent.hopeless else "not compiled: out of time"
    return [Entry(candidate, outcomes.get(candidate.key, left)) for candidate in order]


def small_instance(problem: Problem, candidate: Candidate) -> Problem:
    """A small problem with the same signature: a few tiles of the candidate, ragged like the original.

    Extents keep their remainder modulo 16, so that alignment classes stay; the columns of a gated product modulo 32,
    because D has half as many.
    """
    bm, bn, bk = candidate.config.tile()

    def shrunk(extent: int, tile: int, unit: int = 16) -> int:
        few = -(-(tile + unit) // unit) * unit + extent % unit
        return min(extent, few)

    columns = shrunk(problem.n, bn, 32 if problem.epilogue.gating else 16)
    small = Problem.of(
        shrunk(problem.m, bm), columns, shrunk(problem.k, 3 * bk), problem.dtype, majors=problem.signature.majors,
        batch=min(problem.batch, 2), out_dtype=problem.out_dtype, precision=problem.precision,
        epilogue=problem.epilogue, constant=problem.constant,
    )  # fmt: skip
    if small.signature != problem.signature:
        raise ValueError(f"{problem} has no small instance of contiguous operands with the same signature")
    return small


def emulate(
    problem: Problem,
    candidates: Iterable[Candidate],
    arch: Arch,
    limit: int,
    budget: float,
    *,
    seed: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
    stopped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> list[Entry]:
    """Runs the first candidates' compiled kernels on small instances in the emulator, with every check it has."""
    deadline = clock() + budget
    frontier = Frontier(candidates)
    found: list[Entry] = []
    while len(found) < limit and clock() < deadline and not stopped():
        candidate = frontier.next()
        if candidate is None:
            break
        found.append(Entry(candidate, _emulated(problem, candidate, arch, seed)))
        report(len(found), limit)
    return found


class EmulatedBench(Bench):
    """The sweep's own check of a problem on the CPU, with kernels that the emulator runs."""

    def __init__(self, problem: Problem, arch: Arch, seed: int) -> None:
        super().__init__(problem, arch, seed, device="cpu", sets=1)

    def verdict(self, candidate: Candidate) -> str:
        """ "ok", or what is wrong. Raises EmulationError and GemmError."""
        return self._check(candidate.key)[0]

    def _launcher(self, kernel: Kernel, written: Sequence[torch.Tensor]) -> BoundLaunch:
        from cutegemm.emulator.bridge import emulate

        a, b = self._inputs[0]
        read = {"a": a, "b": b, "c": self._c, "bias": self._bias}
        read |= {f"operands[{i}]": each for i, each in enumerate(self._given[0]) if isinstance(each, torch.Tensor)}
        tensors = {name: each for name, each in read.items() if each is not None}
        outputs = {f"result {number}": each for number, each in enumerate(written)}

        def run(operands: Addresses, numbers: Numbers, stream: int) -> None:
            launches = kernel.capture(self.problem, operands, numbers)
            named = {**tensors, **outputs, **launches.scratch}
            emulate(
                kernel.ptx, launches, named, outputs={*outputs, *launches.scratch}, seed=self.seed,
                checks=launches.checks, progress=False,
            )  # fmt: skip

        return run


def _emulated(problem: Problem, candidate: Candidate, arch: Arch, seed: int) -> str:
    from cutegemm import backend as backends
    from cutegemm.emulator import EmulationError
    from cutegemm.emulator.workload import Workload

    small = small_instance(problem, candidate)
    at = f"{small.m}x{small.n}x{small.k}"
    backend = backends.get(candidate.backend)
    unfit = backend.check(candidate.config, small, arch)
    if unfit:
        return f"not run: at {at}: {unfit}"
    try:
        if small.epilogue.custom is not None:
            said = EmulatedBench(small, arch, seed).verdict(candidate)
            return f"right at {at}" if said == "ok" else f"wrong at {at}: {said.removeprefix('wrong: ')}"
        kernel = backend.build(small.signature, candidate.config, arch)
        verdict, _ = Workload.of(small, kernel, seed=seed).run(seed=seed, progress=False)
    except EmulationError as why:
        return f"wrong at {at}: {why}"
    except GemmError as why:
        return f"failed: {why}"
    return f"right at {at}, {verdict.message}" if verdict else f"wrong at {at}: {verdict.message}"
