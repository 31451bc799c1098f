"""How good the choice is for shapes never tuned: `python -m tuning.untuned --count 12 --seed 0 --dtype bf16`.

Shapes are drawn at random: sizes log-uniform, multiples of 8, the roofline bound under a millisecond. For each, the
heuristic chooses as it would with an empty store and without this shape in the shipped table (`heuristics.untuned`);
a sweep of `--budget` tunes the shape; then both are timed in turns. What is measured is kept in a store of its own,
unless `--store` names one, so that no draw informs the next.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuning import contest, sweep
from tuning.sweep_candidates import Candidate

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.problem import Problem
    from cutegemm.winners import Winners
    from tuning.sweep_compile import CompilePool
    from tuning.sweep_search import Outcome
    from tuning.sweep_timer import Timer

SMALLEST, LARGEST, STEP = 16, 32768, 8
MOST_SECONDS = 0.7e-3
"""Of the roofline bound."""
MOST_BYTES = 2e9


@dataclass(frozen=True)
class Line:
    """A shape's result: texts and microseconds of what the heuristic chose and what the sweep found, timed in turns."""

    problem: str
    chosen: str
    why: str
    chosen_us: float
    tuned: str
    tuned_us: float
    tried: int

    @property
    def ratio(self) -> float:
        """Speed of the heuristic's choice over that of the tuned one."""
        return self.tuned_us / self.chosen_us


def draw(count: int, seed: int, dtype: str, majors: str, arch: Arch) -> list[Problem]:
    """Different random problems; see the module docstring."""
    from cutegemm.problem import Problem
    from cutegemm.roofline import roofline

    source = random.Random(seed)
    found: dict[str, Problem] = {}
    low, high = math.log(SMALLEST), math.log(LARGEST)
    while len(found) < count:
        m, n, k = (STEP * round(math.exp(source.uniform(low, high)) / STEP) for _ in range(3))
        problem = Problem.of(m, n, k, dtype, majors=majors)
        if problem.min_bytes <= MOST_BYTES and roofline(problem, arch).bound_s <= MOST_SECONDS:
            found[str(problem)] = problem
    return list(found.values())


def compare(
    problems: Sequence[Problem],
    names: Sequence[str],
    timer: Timer,
    pool: CompilePool,
    store: Winners,
    budget: float,
) -> list[Line]:
    """A line for each problem of which both choices were timed."""
    from cutegemm import heuristics
    from tuning import sweep_run
    from tuning.sweep_search import Options

    lines: list[Line] = []
    choices: dict[str, tuple[Candidate, str]] = {}

    def chosen(problem: Problem, arch: Arch) -> list[Candidate]:
        if str(problem) not in choices:
            found = heuristics.untuned(problem, arch)
            if found is None:
                return []
            choices[str(problem)] = (Candidate(found[0], found[1]), found[2])
        return [choices[str(problem)][0]]

    def finished(lane: int, phase: str, outcome: Outcome) -> None:
        if phase != "finished":
            return
        problem = outcome.problem
        if outcome.winner is None or not chosen(problem, timer.arch):
            print(f"{problem}: nothing to compare ({outcome.ended})", file=sys.stderr, flush=True)
            return
        ours, why = choices[str(problem)]
        tuned = outcome.winner.candidate
        met = contest.meet(timer, pool, problem, ours, tuned)
        if met is None:
            print(f"{problem}: could not be timed again", file=sys.stderr, flush=True)
            return
        line = Line(
            str(problem), str(ours), why, met[0] * 1e6, str(tuned), met[1] * 1e6, len(outcome.results),
        )  # fmt: skip
        lines.append(line)
        print(f"{problem.m}x{problem.n}x{problem.k}: {line.ratio:.3f} ({outcome.elapsed:.1f} s, {outcome.ended})",
              file=sys.stderr, flush=True)  # fmt: skip

    sweep_run.run(problems, names, [timer], pool, store, Options(budget), report=finished, first=chosen)
    return lines


def table(lines: Sequence[Line]) -> str:
    """A line a shape, then the geometric mean and the minimum."""
    from tabulate import tabulate

    rows = [
        (line.problem.split(" ")[0], line.chosen, f"{line.chosen_us:.2f}", line.tuned, f"{line.tuned_us:.2f}",
         str(line.tried), f"{line.ratio:.3f}")
        for line in lines
    ]  # fmt: skip
    headers = ["shape", "heuristic's choice", "us", "tuned", "us", "tried", "heuristic/tuned"]
    text = tabulate(rows, headers=headers, disable_numparse=True)
    if lines:
        ratios = [line.ratio for line in lines]
        worst = min(lines, key=lambda line: line.ratio)
        text += (
            f"\nspeed of the heuristic's choice over the tuned: {statistics.geometric_mean(ratios):.3f} (geometric "
            f"mean of {len(ratios)} shapes), at least {worst.ratio:.3f} ({worst.problem.split(' ')[0]})"
        )
    return text


def main(arguments: list[str] | None = None) -> int:
    assert __doc__ is not None
    summary, _, more = __doc__.partition("\n\n")
    made = argparse.ArgumentParser(prog="python -m tuning.untuned", description=summary, epilog=more)
    made.add_argument("--count", type=int, default=12, help="shapes to draw (default 12)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--dtype", default="bf16", choices=["fp16", "bf16", "fp32"])
    made.add_argument("--backends", default="cute", help=f"that the sweep looks in, of {', '.join(sweep.BACKENDS)}")
    made.add_argument("--budget", type=sweep.seconds, default=10.0, help="the sweep's, for each shape (default 10s)")
    made.add_argument("--store", help="keep what is measured in this winners file")
    contest.add_options(made)
    options = made.parse_args(arguments)
    names = options.backends.split(",")
    if options.count < 1 or not set(names) <= set(sweep.BACKENDS) or options.jobs < 1:
        made.error(f"--count and --jobs must be at least 1, --backends of {', '.join(sweep.BACKENDS)}")
    from cutegemm.winners import Winners

    begun = time.monotonic()
    try:
        with contest.machine(options.jobs) as m, tempfile.TemporaryDirectory() as folder:
            problems = draw(options.count, options.seed, options.dtype, options.majors, m.timer.arch)
            store = Winners(options.store or Path(folder, "winners.sqlite3"))
            lines = compare(problems, names, m.timer, m.pool, store, options.budget)
            state = m.timer.describe()
    except contest.NoGpu as why:
        print(f"tuning.untuned times kernels on a GPU: {why}", file=sys.stderr)
        return 2
    print(f"{table(lines)}\n{state}; {time.monotonic() - begun:.0f} s in all")
    if options.json:
        rows = [{**asdict(line), "ratio": line.ratio} for line in lines]
        Path(options.json).write_text(json.dumps({"gpu": state, "seed": options.seed, "shapes": rows}, indent=1) + "\n")
    return 0 if len(lines) == len(problems) else 1


if __name__ == "__main__":
    sys.exit(main())
