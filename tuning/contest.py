"""Candidates of a problem against each other, in turns: what `tuning.exhaustive` and `tuning.untuned` share."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegemm.problem import DTYPES
from cutegemm.tuner.budget import Budget
from cutegemm.tuner.compile_pool import CompilePool, Compiler, default_jobs
from cutegemm.tuner.space import Candidate
from cutegemm.tuner.spread import Seconds, Spread, middle, spread_of
from cutegemm.tuner.timer import GpuProcess, Timer, TimerBroken, TimerLost
from cutegemm.tuner.timing import BLOCK_SECONDS, PERIOD_SECONDS, SUSTAINED_FLOPS, pause
from tuning import cli

if TYPE_CHECKING:
    from cutegemm.problem import Problem
    from cutegemm.tuner.search import Outcome

Key = tuple[str, str]

ROUNDS, SUSTAINED_ROUNDS = 15, 2
COMPILE_SECONDS = 60.0
CHECK_SECONDS = 30.0


class NoGpu(RuntimeError):
    """Nothing can be timed here; the message says why."""


@dataclass(frozen=True)
class Machine:
    """The GPU's process and the compile workers."""

    timer: GpuProcess
    pool: CompilePool


@dataclass(frozen=True)
class Met:
    """seconds: a call of each candidate that was timed, by key. failed: why the others were not."""

    seconds: dict[Key, float]
    failed: dict[Key, str]

    def spread(self, ours: Candidate, theirs: Candidate) -> Spread | None:
        """Of the speed of ours over that of theirs, over the rounds in which both were timed."""
        return spread_of(self.seconds[ours.key], self.seconds[theirs.key])


@dataclass(frozen=True)
class Missed:
    """A problem (its text) that was to be compared and was not, and why."""

    problem: str
    why: str


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
    made.add_argument("--dtype", default="bf16", choices=DTYPES)
    made.add_argument("--majors", default="tn", choices=["tn", "tt", "nn", "nt"], help="tn: both K-major (default)")
    cli.add_backends(made)
    jobs = default_jobs()
    made.add_argument(
        "--jobs", type=int, default=jobs, help=f"compile processes (here {jobs}, as cores and memory allow)"
    )
    made.add_argument("--json", metavar="FILE", type=cli.output, help="also write the table to this file")


def run(
    name: str,
    options: argparse.Namespace,
    compare: Callable[[Machine, Path, threading.Event], tuple[Sequence[Any], Sequence[Missed]]],
    table: Callable[[Sequence[Any], Sequence[Missed]], str],
    **said: object,
) -> int:
    """The command `tuning.NAME`: compares on the first GPU, prints the table, writes `--json`; the exit status.

    Args:
        compare: given the machine, an empty folder and the event that Ctrl-C sets; returns the lines of the table
            (dataclasses with a `ratio`) and what was not compared.
        table: the text of both.
        said: what the JSON says besides.
    """
    begun, stop = time.monotonic(), threading.Event()
    try:
        with machine(options.jobs) as m, tempfile.TemporaryDirectory() as folder:
            lines, missed = compare(m, Path(folder), stop)
            state = m.timer.describe()
    except NoGpu as why:
        print(f"tuning.{name} times kernels on a GPU: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nbroken off", file=sys.stderr)
        return 130
    print(f"{table(lines, missed)}\n{state}; {time.monotonic() - begun:.0f} s in all")
    if options.json:
        rows = [{**asdict(line), "ratio": line.ratio} for line in lines]
        written = {"gpu": state, **said, "shapes": rows, "missed": [asdict(one) for one in missed]}
        cli.write(options.json, json.dumps(written, indent=1) + "\n")
    return 130 if stop.is_set() else 1 if missed else 0


def meet(
    timer: Timer,
    pool: CompilePool,
    problem: Problem,
    candidates: Sequence[Candidate],
    stopped: Callable[[], bool] = lambda: False,
) -> Met:
    """Times candidates of a problem that is open in the timer, afresh and in turns: in short rounds, products that meet
    the power limit in long blocks, and those that may run in either state in both, whose geometric mean counts. Each is
    checked before and after: who does not compile, is wrong or breaks the timer has no time, and is named with the
    reason.

    Args:
        stopped: asked often while kernels compile; those that are not compiled when it says so are left out.
    """
    wanted = list({candidate.key: candidate for candidate in candidates}.values())
    failed = compiled(pool.session(problem.signature, timer.arch), wanted, stopped)
    turns = [(SUSTAINED_ROUNDS, BLOCK_SECONDS) if problem.flops > SUSTAINED_FLOPS else (ROUNDS, 0.0)]
    if pause(problem.flops):
        turns.append((SUSTAINED_ROUNDS, PERIOD_SECONDS))
    times: list[Mapping[Key, float]] = []
    try:
        fit = right(timer, [c for c in wanted if c.key not in failed], failed)
        times = [timer.time(fit, rounds, block) for rounds, block in turns] if fit else []
        fit = right(timer, fit, failed)  # once more: a race may have spared the first run
    except (TimerLost, TimerBroken) as why:
        return Met({}, {**{c.key: f"could not be timed: {why}" for c in wanted}, **failed})
    return Met({candidate.key: _as_one([found[candidate.key] for found in times]) for candidate in fit}, failed)


def _as_one(times: Sequence[float]) -> float:
    """One time, or the middle of that of short rounds and that of long blocks, with the spread of the short rounds."""
    if len(times) == 1:
        return times[0]
    short, steady = times
    return Seconds([middle(each, steady) for each in short.samples]) if isinstance(short, Seconds) else middle(*times)


def compiled(
    compiler: Compiler, wanted: Sequence[Candidate], stopped: Callable[[], bool] = lambda: False
) -> dict[Key, str]:
    """Compiles what is not stored; of those that it could not, why. `stopped` ends it, as in `meet`."""
    missing = [candidate for candidate in wanted if not compiler.stored(candidate)]
    failed = {candidate.key: "was not compiled in time" for candidate in missing}
    for candidate in missing:
        compiler.submit(candidate)
    budget = Budget(COMPILE_SECONDS)
    try:
        while compiler.outstanding and not (budget.over or budget.hopeless or stopped()):
            for candidate, why in budget.collect(compiler, 0.25):
                if why is None:
                    del failed[candidate.key]
                else:
                    failed[candidate.key] = f"failed to compile: {why}"
    finally:
        compiler.cancel()
    return failed


def right(timer: Timer, candidates: Sequence[Candidate], failed: dict[Key, str]) -> list[Candidate]:
    """Those whose result is right; why the others' are not is added to `failed`."""
    for candidate in candidates:
        verdict = timer.check(candidate, CHECK_SECONDS).verdict
        if verdict != "ok":
            failed[candidate.key] = verdict
    return [candidate for candidate in candidates if candidate.key not in failed]


def spread_text(spread: Spread | None) -> str:
    """A cell of a table: the spread of a ratio, and whether it means parity."""
    return "" if spread is None else str(spread)


def missed_text(missed: Sequence[Missed]) -> str:
    """A line for each problem that was not compared, after a line break; empty when there is none."""
    return "".join(f"\nnot compared: {one.problem.split(' ')[0]}: {one.why}" for one in missed)


def left_out(problems: Iterable[Problem], lines: Sequence[Any], why: Mapping[str, str]) -> list[Missed]:
    """The problems without a line, in their order. why: by the text of a problem; those it lacks were not begun."""
    compared = {line.problem for line in lines}
    return [Missed(text, why.get(text) or "not begun") for text in map(str, problems) if text not in compared]


def unfit(outcome: Outcome, what: str) -> str:
    """Why a search's outcome must not be compared with anything, or nothing.

    One that was cut short by other than its budget would make whatever it is compared with look good.
    """
    if not outcome.searched:
        return f"{what}: {outcome.ended}"
    if outcome.winner is None:
        wrong = f"{outcome.count('wrong')} wrong, {outcome.count('failed')} failed"
        return f"{what} measured nothing right ({outcome.ended}; {wrong})"
    return ""
