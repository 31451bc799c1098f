"""How far the sweep's choice is from the best there is: `python -m tuning.exhaustive --shapes 1024,4096 --limit 200`.

Each shape is swept as `python -m tuning.sweep` does it. Then `--limit` configurations are checked and timed, every one:
half of them are those that the cost model likes best, in the order in which a sweep that learns nothing would try them;
the others are drawn from all that were enumerated, whatever the model thinks of them. The best of these and of the
sweep's four best is found by the sweep's own halving, and meets the sweep's winner once more, in turns. What is timed
so stays out of the winners store: no later sweep is taught by it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuning import contest, suites, sweep
from tuning.sweep_candidates import Candidate, Frontier, enumerate_all

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.problem import Problem
    from cutegemm.winners import Winners
    from tuning.sweep_compile import CompilePool
    from tuning.sweep_search import Outcome
    from tuning.sweep_timer import Timer

SHAPES = "1024,4096,16x28672x4096,128x4096x14336,1024x6144x4096"


@dataclass(frozen=True)
class Line:
    """A shape's result. swept, best: text of the sweep's winner and of the fastest of all; ..._us: timed in turns.

    tried: by the sweep. timed, wrong, failed: of the `--limit` configurations and the sweep's four best. whole:
    whether all of them were.
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
) -> list[Line]:
    """Sweeps into `store`, then times everything into `aside`; a line for each problem of which both were found.

    Ctrl-C ends both: the lines of the problems finished by then are returned.
    """
    from tuning import sweep_run
    from tuning.sweep_search import Options

    stop = threading.Event()
    # All sweeps come first: what is measured exhaustively must not guide them.
    swept = sweep_run.run(
        problems, names, [timer], pool, store, Options(budget, resume=resume), report=_tell("sweep"), stop=stop
    )
    winners = {str(o.problem): o for o in swept if o.winner is not None}
    lines: list[Line] = []

    def first(problem: Problem, arch: Arch) -> list[Candidate]:
        ranking = winners[str(problem)].ranking
        return [result.candidate for result in ranking[:4]]

    def finished(lane: int, phase: str, outcome: Outcome) -> None:
        _tell("all")(lane, phase, outcome)
        if phase != "finished" or outcome.winner is None or stop.is_set():
            return
        problem, sweeps = outcome.problem, winners[str(outcome.problem)]
        assert sweeps.winner is not None
        ours, best = sweeps.winner.candidate, outcome.winner.candidate
        met = contest.meet(timer, pool, problem, ours, best)
        if met is None:
            return
        if met[0] < met[1]:
            best, met = ours, (met[0], met[0])
        lines.append(
            Line(
                str(problem), sweeps.enumerated, len(sweeps.results), str(ours), met[0] * 1e6, str(best),
                met[1] * 1e6, outcome.count("ok"), outcome.count("wrong"), outcome.count("failed"),
                outcome.ended == "done",
            )
        )  # fmt: skip

    everything = Options(most, limit=10**9, patience=10**9, known_patience=10**9)
    sweep_run.run(
        [o.problem for o in swept if str(o.problem) in winners], names, [timer], pool, aside, everything,
        report=finished, ranker=lambda problem, arch, name: some_of(problem, arch, name, limit), first=first,
        ahead=limit, stop=stop,
    )  # fmt: skip
    return lines


def _tell(what: str) -> Any:
    def tell(lane: int, phase: str, outcome: Outcome) -> None:
        if phase == "finished":
            best = outcome.winner
            text = f"{best.seconds * 1e6:.2f} us {best.candidate}" if best is not None and best.seconds else "nothing"
            counts = f"{outcome.count('ok')} ok, {outcome.count('wrong')} wrong, {outcome.count('failed')} failed"
            p = outcome.problem
            print(f"{p.m}x{p.n}x{p.k} {what}: {text}; {counts}; {outcome.elapsed:.1f} s ({outcome.ended})",
                  file=sys.stderr, flush=True)  # fmt: skip

    return tell


def table(lines: Sequence[Line]) -> str:
    """A line a shape, then the worst of them."""
    from tabulate import tabulate

    def row(line: Line) -> tuple[str, ...]:
        counts = f"{line.timed}/{line.wrong}/{line.failed}{'' if line.whole else ' (cut short)'}"
        tried = f"{line.tried} of {line.enumerated}"
        sweeps, best = (line.swept, f"{line.swept_us:.2f}", tried), (line.best, f"{line.best_us:.2f}", counts)
        return (line.problem.split(" ")[0], *sweeps, *best, f"{line.ratio:.4f}")

    headers = ["shape", "sweep's choice", "us", "tried", "best of all", "us", "ok/wrong/failed", "ratio"]
    text = tabulate(map(row, lines), headers=headers, disable_numparse=True)
    if lines:
        worst = min(lines, key=lambda line: line.ratio)
        text += f"\nthe sweep's choice reaches at least {worst.ratio:.4f} of the best ({worst.problem.split(' ')[0]})"
    return text


def main(arguments: list[str] | None = None) -> int:
    assert __doc__ is not None
    summary, _, more = __doc__.partition("\n\n")
    made = argparse.ArgumentParser(prog="python -m tuning.exhaustive", description=summary, epilog=more)
    made.add_argument("--shapes", default=SHAPES, help=f"MxNxK or one number, comma-separated (default {SHAPES})")
    made.add_argument("--dtype", default="bf16", choices=["fp16", "bf16", "fp32"])
    made.add_argument("--backends", default="cute", help=f"comma-separated: {', '.join(sweep.BACKENDS)} (default cute)")
    made.add_argument("--limit", type=int, default=200, help="configurations to time of each backend (default 200)")
    made.add_argument("--budget", type=sweep.seconds, default=60.0, help="the sweep's, for each shape (default 60s)")
    made.add_argument("--most", type=sweep.seconds, default=300.0, help="for timing all of a shape's (default 5m)")
    made.add_argument("--resume", action="store_true", help="take the winner of an earlier sweep instead of sweeping")
    made.add_argument("--store", help="the winners file; by default the user's, which gemm reads")
    contest.add_options(made)
    options = made.parse_args(arguments)
    names = options.backends.split(",")
    begun = time.monotonic()
    try:
        if options.limit < 2 or not set(names) <= set(sweep.BACKENDS) or options.jobs < 1:
            raise ValueError(f"--limit must be at least 2, --jobs 1, --backends of {', '.join(sweep.BACKENDS)}")
        shapes = suites.parse(options.shapes)
    except ValueError as why:
        made.error(str(why))
    from cutegemm.problem import Problem
    from cutegemm.winners import Winners

    problems = [Problem.of(*shape, options.dtype, majors=options.majors) for shape in dict.fromkeys(shapes)]
    try:
        with contest.machine(options.jobs) as m, tempfile.TemporaryDirectory() as folder:
            lines = compare(
                problems, names, m.timer, m.pool, Winners(options.store), Winners(Path(folder, "winners.sqlite3")),
                limit=options.limit, budget=options.budget, most=options.most, resume=options.resume,
            )  # fmt: skip
            state = m.timer.describe()
    except contest.NoGpu as why:
        print(f"tuning.exhaustive times kernels on a GPU: {why}", file=sys.stderr)
        return 2
    print(f"{table(lines)}\n{state}; {time.monotonic() - begun:.0f} s in all")
    if options.json:
        rows = [{**asdict(line), "ratio": line.ratio} for line in lines]
        Path(options.json).write_text(json.dumps({"gpu": state, "shapes": rows}, indent=1) + "\n")
    return 0 if len(lines) == len(problems) else 1


if __name__ == "__main__":
    sys.exit(main())
