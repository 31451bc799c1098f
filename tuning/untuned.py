"""How good the choice is for shapes never tuned: `python -m tuning.untuned --count 12 --seed 0 --dtype bf16`.

Shapes are drawn at random (`tuning.random_shapes`). For each, the heuristic chooses as it would with an empty store and
without this shape in the shipped table (`heuristics.untuned`); a sweep of `--budget` tunes the shape, the heuristic's
choice among its candidates; then both are checked and timed afresh, in turns. What is measured is kept in a store of
its own, unless `--store` names one; the heuristic reads neither.

A shape is named with the reason, and not compared, when the sweep was cut short by other than its budget or timed
nothing beside the heuristic's choice, or when that choice is wrong: a weak sweep would flatter it. Where the choice
turns out faster than what the sweep found, the sweep erred, and the mean takes them as equal.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cutegemm.tuner.budget import MOST_HELP
from cutegemm.tuner.space import Candidate
from cutegemm.tuner.spread import Spread
from tuning import cli, contest, random_shapes

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem
    from cutegemm.tuner.compile_pool import CompilePool
    from cutegemm.tuner.search import Outcome
    from cutegemm.tuner.timer import Timer
    from cutegemm.winners import Winners


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
    spread: Spread | None = None

    @property
    def ratio(self) -> float:
        """Speed of the heuristic's choice over that of the tuned one."""
        return self.tuned_us / self.chosen_us


def compare(
    problems: Sequence[Problem],
    names: Sequence[str],
    timer: Timer,
    pool: CompilePool,
    store: Winners,
    budget: float,
    stop: threading.Event | None = None,
) -> tuple[list[Line], list[contest.Missed]]:
    """A line for each problem of which both choices were timed; the others, and why. Ctrl-C sets `stop` and ends it."""
    from cutegemm.choice import heuristics
    from cutegemm.tuner import run as sweep_run
    from cutegemm.tuner.report import Progress, took_text
    from cutegemm.tuner.search import Options

    stop = stop or threading.Event()
    options = Options(budget)
    lines: list[Line] = []
    missed: dict[str, str] = {}
    choices: dict[str, tuple[Candidate, str] | None] = {}

    def choice(problem: Problem, arch: Arch) -> tuple[Candidate, str] | None:
        text = str(problem)
        if text not in choices:
            found = heuristics.untuned(problem, arch)
            choices[text] = None if found is None else (Candidate(found[0], found[1]), found[2])
        return choices[text]

    def chosen(problem: Problem, arch: Arch) -> list[Candidate]:
        found = choice(problem, arch)
        return [found[0]] if found else []

    def judge(outcome: Outcome) -> Line | str:
        problem = outcome.problem
        unfit = contest.unfit(outcome, "the sweep")
        if unfit:
            return unfit
        found = choice(problem, timer.arch)
        if found is None:
            return "the heuristic has no choice"
        (ours, why), tuned = found, outcome.winner
        assert tuned is not None
        if all(result.candidate.key == ours.key for result in outcome.ranking):
            return f"the sweep timed nothing but the heuristic's choice ({outcome.ended})"
        met = contest.meet(timer, pool, problem, [ours, tuned.candidate], stop.is_set)
        for candidate, whose in ((ours, "the heuristic's choice"), (tuned.candidate, "the sweep's choice")):
            if candidate.key not in met.seconds:
                return f"{whose}, {candidate}: {met.failed[candidate.key]}"
        ours_us, tuned_us = met.seconds[ours.key] * 1e6, met.seconds[tuned.candidate.key] * 1e6
        spread = met.spread(ours, tuned.candidate)
        return Line(str(problem), str(ours), why, ours_us, str(tuned.candidate), tuned_us, len(outcome.results), spread)

    progress = Progress(len(problems), options.limit)

    def report(lane: int, phase: str, outcome: Outcome) -> None:
        if phase != "finished":
            progress.update(lane, phase, outcome)
            return
        found, text = judge(outcome), str(outcome.problem)
        if isinstance(found, Line):
            lines.append(found)
            said = f"{found.ratio:.3f} ({took_text(outcome)}, {outcome.ended})"
        else:
            missed[text] = found
            said = f"not compared: {found}"
        progress.finished(lane, outcome, said)

    try:
        sweep_run.run(problems, names, [timer], pool, store, options, report=report, first=chosen, stop=stop)
    finally:
        progress.close()
    return lines, contest.left_out(problems, lines, missed)


def mean(lines: Sequence[Line]) -> float:
    """Geometric mean of the ratios; one above 1 is the sweep's error, and counts as 1."""
    return statistics.geometric_mean([min(line.ratio, 1.0) for line in lines])


def table(lines: Sequence[Line], missed: Sequence[contest.Missed] = ()) -> str:
    """A line a shape, then the geometric mean and the minimum, then what was not compared."""
    from tabulate import tabulate

    rows = [
        (line.problem.split(" ")[0], line.chosen, f"{line.chosen_us:.2f}", line.tuned, f"{line.tuned_us:.2f}",
         str(line.tried), f"{line.ratio:.3f}", contest.spread_text(line.spread))
        for line in lines
    ]  # fmt: skip
    headers = ["shape", "heuristic's choice", "us", "tuned", "us", "tried", "heuristic/tuned", "spread"]
    text = tabulate(rows, headers=headers, disable_numparse=True)
    if lines:
        worst = min(lines, key=lambda line: line.ratio)
        text += (
            f"\nspeed of the heuristic's choice over the tuned: {mean(lines):.3f} (geometric mean of {len(lines)} of "
            f"{len(lines) + len(missed)} shapes), at least {worst.ratio:.3f} ({worst.problem.split(' ')[0]})"
        )
        faster = sum(line.ratio > 1 for line in lines)
        if faster:
            text += f"\nfaster than what the sweep found, and taken as equal in the mean: {faster}"
    return text + contest.missed_text(missed)


def main(arguments: list[str] | None = None) -> int:
    summary, _, more = (__doc__ or "").partition("\n\n")
    made = cli.parser("untuned", summary, more)
    made.add_argument("--count", type=int, default=12, help="shapes to draw (default 12)")
    made.add_argument("--seed", type=int, default=0)
    random_shapes.add_option(made)
    made.add_argument(
        "--budget", type=cli.seconds, default=10.0, help=f"the sweep's, for each shape (default 10s); {MOST_HELP}"
    )
    made.add_argument("--store", type=cli.store, help="keep what is measured in this winners file")
    contest.add_options(made)
    options = made.parse_args(arguments)
    if options.count < 1 or options.jobs < 1:
        made.error("--count and --jobs must be at least 1")

    def compared(m: contest.Machine, folder: Path, stop: threading.Event) -> tuple[list[Line], list[contest.Missed]]:
        from cutegemm.winners import Winners

        problems = random_shapes.drawn(options, options.count, options.seed, options.majors, m.timer.arch)
        store = Winners(options.store or folder / "winners.sqlite3")
        return compare(problems, options.backends, m.timer, m.pool, store, options.budget, stop)

    return contest.run("untuned", options, compared, table, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
