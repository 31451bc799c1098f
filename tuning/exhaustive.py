"""How far the sweep's choice is from the best there is: `python -m tuning.exhaustive --shapes 1024,4096 --limit 200`.

Each shape is swept as `python -m tuning.sweep` does it: with earlier winners, the shipped one of the very shape among
them, as seeds. `--untaught` sweeps as if the shape were new: into an empty store, with the heuristic's choice for a
shape never tuned as the only seed. Then `--limit` configurations are checked and timed, every one: half of them are
those that the cost model likes best, in the order in which a sweep that learns nothing would try them; the others are
drawn from all that were enumerated, whatever the model thinks of them.

The sweep's own halving finds the four best of these, of what `gemm` knows and of the sweep's four best. They meet the
sweep's winner, all checked and timed afresh in turns, and the fastest there is the best of all: the least of several
times beside one time of the sweep's choice, so that noise speaks against the sweep. What is timed so stays out of the
winners store: no later sweep is taught by it. A shape that was not compared is named with the reason.
"""

from __future__ import annotations

import itertools
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegemm.tuner.budget import MOST_HELP
from cutegemm.tuner.space import Candidate, Frontier, enumerate_all
from cutegemm.tuner.spread import Spread
from tuning import cli, contest, suites

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem
    from cutegemm.tuner.compile_pool import CompilePool
    from cutegemm.tuner.report import Progress
    from cutegemm.tuner.search import Outcome
    from cutegemm.tuner.timer import Timer
    from cutegemm.winners import Winners

MEETING = 4
"""Of the sweep's best that are timed again among all, and of all's best that meet the sweep's choice."""
SHAPES = "1024,4096,16x28672x4096,128x4096x14336,1024x6144x4096"


@dataclass(frozen=True)
class Line:
    """A shape's result. swept, best: text of the sweep's winner and of the fastest of all; ..._us: timed in turns.

    tried: by the sweep. timed, wrong, failed: of the `--limit` configurations and the sweep's four best. whole:
    whether all of them were; if not, the best may be among those that were not.
    """

    problem: str
    enumerated: int
    tried: int
    swept: str
    swept_us: float
    best: str
    best_us: float
    timed: int
    wrong: int
    failed: int
    whole: bool
    spread: Spread | None = None

    @property
    def ratio(self) -> float:
        """Speed of the sweep's choice over that of the best."""
        return self.best_us / self.swept_us


def some_of(problem: Problem, arch: Arch, backend: str, limit: int) -> list[tuple[float, Any]]:
    """(estimate, configuration) of `limit` valid configurations of a backend; see the module docstring."""
    candidates = enumerate_all(problem, arch, [backend])
    if len(candidates) <= limit:
        return [(candidate.estimate, candidate.config) for candidate in candidates]
    chosen = {candidate.key: candidate for candidate in Frontier(candidates).first(limit - limit // 2)}
    # Drawn by a number made of the text, so that the shapes of a signature share kernels.
    drawn = sorted(candidates, key=lambda candidate: zlib.crc32(candidate.text.encode()))
    rest = (candidate for candidate in drawn if candidate.key not in chosen)
    chosen |= {candidate.key: candidate for candidate in itertools.islice(rest, limit - len(chosen))}
    return sorted(((c.estimate, c.config) for c in chosen.values()), key=lambda pair: pair[0])


def compare(
    problems: Sequence[Problem],
    names: Sequence[str],
    timer: Timer,
    pool: CompilePool,
    store: Winners,
    aside: Winners,
    *,
    limit: int,
    budget: float,
    most: float,
    resume: bool = False,
    untaught: bool = False,
    stop: threading.Event | None = None,
) -> tuple[list[Line], list[contest.Missed]]:
    """Sweeps into `store`, then times everything into `aside`; a line for each problem of which both were found, and
    the others with the reason.

    Ctrl-C sets `stop` and ends both: the lines of the problems finished by then are returned.
    """
    from cutegemm.tuner import run as sweep_run
    from cutegemm.tuner.report import Progress
    from cutegemm.tuner.search import Options

    stop = stop or threading.Event()
    # All sweeps come first: what is measured exhaustively must not guide them.
    progress = Progress(len(problems), Options.limit)
    try:
        swept = sweep_run.run(
            problems, names, [timer], pool, store, Options(budget, resume=resume), report=_tell("sweep", progress),
            first=_untuned if untaught else sweep_run.nothing, seeded=not untaught, stop=stop,
        )  # fmt: skip
    finally:
        progress.close()
    missed = {str(outcome.problem): contest.unfit(outcome, "the sweep") for outcome in swept}
    winners = {str(outcome.problem): outcome for outcome in swept if not missed[str(outcome.problem)]}
    lines: list[Line] = []

    def first(problem: Problem, arch: Arch) -> list[Candidate]:
        ranking = winners[str(problem)].ranking
        return [result.candidate for result in ranking[:MEETING]]

    def judge(outcome: Outcome) -> Line | str:
        problem, sweeps = outcome.problem, winners[str(outcome.problem)]
        # Cut short by its budget it has a line that says so.
        unfit = contest.unfit(outcome, "timing all")
        if unfit:
            return unfit
        assert sweeps.winner is not None
        ours = sweeps.winner.candidate
        rivals = [result.candidate for result in outcome.ranking if result.kind == "final"][:MEETING]
        if not rivals:
            return f"timing all reached no final ({outcome.ended})"
        met = contest.meet(timer, pool, problem, [ours, *rivals], stop.is_set)
        if ours.key not in met.seconds:
            return f"the sweep's choice, {ours}: {met.failed[ours.key]}"
        best = min((c for c in (ours, *rivals) if c.key in met.seconds), key=lambda c: met.seconds[c.key])
        return Line(
            str(problem), sweeps.enumerated, len(sweeps.results), str(ours), met.seconds[ours.key] * 1e6, str(best),
            met.seconds[best.key] * 1e6, outcome.count("ok"), outcome.count("wrong"), outcome.count("failed"),
            outcome.ended == "done", met.spread(ours, best),
        )  # fmt: skip

    def report(lane: int, phase: str, outcome: Outcome) -> None:
        _tell("all", progress)(lane, phase, outcome)
        if phase == "finished":
            found = judge(outcome)
            if isinstance(found, Line):
                lines.append(found)
            else:
                missed[str(outcome.problem)] = found

    everything = Options(most, limit=10**9, patience=None)
    left = [problem for problem in problems if str(problem) in winners]
    progress = Progress(len(left), limit)
    try:
        sweep_run.run(
            left, names, [timer], pool, aside, everything, report=report,
            ranker=lambda problem, arch, name: some_of(problem, arch, name, limit), first=first, ahead=limit, stop=stop,
        )  # fmt: skip
    finally:
        progress.close()
    return lines, contest.left_out(problems, lines, missed)


def _untuned(problem: Problem, arch: Arch) -> list[Candidate]:
    from cutegemm.choice import heuristics

    found = heuristics.untuned(problem, arch)
    return [] if found is None else [Candidate(found[0], found[1])]


def _tell(what: str, progress: Progress) -> Callable[[int, str, Outcome], None]:
    from cutegemm.tuner.report import took_text

    def tell(lane: int, phase: str, outcome: Outcome) -> None:
        if phase != "finished":
            progress.update(lane, f"{what}: {phase}", outcome)
            return
        best = outcome.winner
        text = f"{best.seconds * 1e6:.2f} us {best.candidate}" if best is not None and best.seconds else "nothing"
        counts = f"{outcome.count('ok')} ok, {outcome.count('wrong')} wrong, {outcome.count('failed')} failed"
        progress.finished(lane, outcome, f"{what}: {text}; {counts}; {took_text(outcome)} ({outcome.ended})")

    return tell


def table(lines: Sequence[Line], missed: Sequence[contest.Missed] = ()) -> str:
    """A line a shape, then the worst of them, then what was not compared."""
    from tabulate import tabulate

    def row(line: Line) -> tuple[str, ...]:
        counts = f"{line.timed}/{line.wrong}/{line.failed}{'' if line.whole else ' (cut short)'}"
        tried = f"{line.tried} of {line.enumerated}"
        sweeps, best = (line.swept, f"{line.swept_us:.2f}", tried), (line.best, f"{line.best_us:.2f}", counts)
        return (line.problem.split(" ")[0], *sweeps, *best, f"{line.ratio:.4f}", contest.spread_text(line.spread))

    headers = ["shape", "sweep's choice", "us", "tried", "best of all", "us", "ok/wrong/failed", "ratio", "spread"]
    text = tabulate(map(row, lines), headers=headers, disable_numparse=True)
    if lines:
        worst = min(lines, key=lambda line: line.ratio)
        text += (
            f"\nthe sweep's choice reaches at least {worst.ratio:.4f} of the best ({worst.problem.split(' ')[0]}), "
            f"over {len(lines)} of {len(lines) + len(missed)} shapes"
        )
        short = sum(not line.whole for line in lines)
        if short:
            text += f"\ncut short, so that their best may have been missed: {short}"
    return text + contest.missed_text(missed)


def main(arguments: list[str] | None = None) -> int:
    summary, _, more = (__doc__ or "").partition("\n\n")
    made = cli.parser("exhaustive", summary, more)
    made.add_argument("--shapes", default=SHAPES, help=f"MxNxK or one number, comma-separated (default {SHAPES})")
    made.add_argument("--limit", type=int, default=200, help="configurations to time of each backend (default 200)")
    made.add_argument(
        "--budget", type=cli.seconds, default=60.0, help=f"the sweep's, for each shape (default 60s); {MOST_HELP}"
    )
    made.add_argument("--most", type=cli.seconds, default=300.0, help="for timing all of a shape's (default 5m)")
    made.add_argument("--resume", action="store_true", help="take the winner of an earlier sweep instead of sweeping")
    made.add_argument(
        "--untaught", action="store_true", help="sweep as if the shape were new: no seeds but the heuristic's choice"
    )
    made.add_argument("--store", type=cli.store, help="the winners file; by default the user's, which gemm reads")
    contest.add_options(made)
    options = made.parse_args(arguments)
    try:
        if options.limit < 2 or options.jobs < 1:
            raise ValueError("--limit must be at least 2, --jobs 1")
        if options.untaught and (options.resume or options.store):
            raise ValueError("--untaught sweeps into an empty store: neither --resume nor --store goes with it")
        shapes = suites.parse(options.shapes)
    except ValueError as why:
        made.error(str(why))

    def compared(m: contest.Machine, folder: Path, stop: threading.Event) -> tuple[list[Line], list[contest.Missed]]:
        from cutegemm.problem import Problem
        from cutegemm.winners import Winners

        problems = [Problem.of(*shape, options.dtype, majors=options.majors) for shape in dict.fromkeys(shapes)]
        store = Winners(folder / "swept.sqlite3" if options.untaught else options.store)
        return compare(
            problems, options.backends, m.timer, m.pool, store, Winners(folder / "winners.sqlite3"),
            limit=options.limit, budget=options.budget, most=options.most, resume=options.resume,
            untaught=options.untaught, stop=stop,
        )  # fmt: skip

    return contest.run("exhaustive", options, compared, table, untaught=options.untaught)


if __name__ == "__main__":
    sys.exit(main())
