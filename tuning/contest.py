"""Two candidates of a problem against each other: what `tuning.exhaustive` and `tuning.untuned` share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuning.sweep_candidates import Candidate
from tuning.sweep_compile import CompilePool, Compiler, default_jobs
from tuning.sweep_timer import GpuProcess, Timer, TimerBroken, TimerLost
from tuning.timing import BLOCK_SECONDS, SUSTAINED_FLOPS

if TYPE_CHECKING:
    from cutegemm.problem import Problem

ROUNDS, SUSTAINED_ROUNDS = 15, 3
COMPILE_SECONDS = 60.0
CHECK_SECONDS = 30.0


class NoGpu(RuntimeError):
    """Nothing can be timed here; the message says why."""


@dataclass(frozen=True)
class Machine:
    """The GPU's process and the compile workers."""

    timer: GpuProcess
    pool: CompilePool


@contextmanager
def machine(jobs: int) -> Iterator[Machine]:
    """The first GPU and `jobs` compile workers. Raises NoGpu."""
    with GpuProcess(0) as timer, CompilePool(jobs) as pool:
        try:
            print(f"{timer.arch.name}: {timer.describe()}", flush=True)
        except TimerBroken as why:
            raise NoGpu(str(why)) from why
        yield Machine(timer, pool)


def add_options(made: argparse.ArgumentParser) -> None:
    """The options that both commands have."""
    made.add_argument("--majors", default="tn", choices=["tn", "tt", "nn", "nt"], help="tn: both K-major (default)")
    jobs = default_jobs()
    made.add_argument(
        "--jobs", type=int, default=jobs, help=f"compile processes (here {jobs}, as cores and memory allow)"
    )
    made.add_argument("--json", metavar="FILE", help="also write the table to this file")


def meet(
    timer: Timer, pool: CompilePool, problem: Problem, one: Candidate, other: Candidate
) -> tuple[float, float] | None:
    """Seconds a call of the two, timed in turns; None where one of them has no time. As `seconds_of`."""
    found = seconds_of(timer, pool.session(problem.signature, timer.arch), problem, [one, other])
    return (found[one.key], found[other.key]) if one.key in found and other.key in found else None


def seconds_of(
    timer: Timer, compiler: Compiler, problem: Problem, candidates: Sequence[Candidate]
) -> dict[tuple[str, str], float]:
    """Seconds a call of each candidate, by key, of a problem that is open in the timer.

    They are timed in turns, in more rounds than a sweep's; products that meet the power limit in sustained blocks. One
    that does not compile, is wrong or breaks the timer has no time.
    """
    wanted = list({candidate.key: candidate for candidate in candidates}.values())
    for candidate in wanted:
        if not compiler.stored(candidate):
            compiler.submit(candidate)
    failed: set[tuple[str, str]] = set()
    while compiler.outstanding:
        done = compiler.collect(COMPILE_SECONDS)
        failed |= {candidate.key for candidate, why in done if why is not None}
        if not done:
            break
    sustained = problem.flops > SUSTAINED_FLOPS
    rounds, block = (SUSTAINED_ROUNDS, BLOCK_SECONDS) if sustained else (ROUNDS, 0.0)
    try:
        right = [c for c in wanted if c.key not in failed and timer.check(c, CHECK_SECONDS).verdict == "ok"]
        times = timer.time(right, rounds, block) if right else {}
    except (TimerLost, TimerBroken) as why:
        print(f"{problem}: {why}", file=sys.stderr)
        return {}
    return {candidate.key: times[candidate.key] for candidate in right}
