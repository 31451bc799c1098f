"""What a sweep shows: progress bars, the summary table, JSON."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from cutegemm.hardware.roofline import Roofline, roofline
from cutegemm.problem.work import TABLE as WORKS
from cutegemm.run.progress import Bars
from cutegemm.tuner.search import Outcome, Result

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch


def shape_text(outcome: Outcome) -> str:
    p = outcome.problem
    return f"{f'{p.batch}x' if p.batch != 1 else ''}{p.m}x{p.n}x{p.k}"


def tflops(outcome: Outcome, seconds: float) -> float:
    return outcome.problem.flops / seconds * 1e-12


def took_text(outcome: Outcome) -> str:
    """How long it took, and how much of that the budget does not count."""
    waited = f", {outcome.waited:.1f} s of them for the compile workers" if outcome.waited >= 0.1 else ""
    return f"{outcome.elapsed:.1f} s{waited}"


class Progress:
    """What a sweep shows while it runs: a bar for all shapes and one for each GPU. Thread-safe.

    Args:
        shapes: how many problems there are. limit: configurations to try at most for each.
        stream: where to write; stderr when None.
    """

    def __init__(self, shapes: int, limit: int, stream: TextIO | None = None) -> None:
        self._shapes, self._limit = shapes, limit
        self._bars = Bars(stream)
        self._lock = threading.Lock()
        self._finished = 0

    def update(self, lane: int, phase: str, outcome: Outcome) -> None:
        """Tells where the search on GPU number `lane` stands."""
        done = len(outcome.results)
        total = max(min(self._limit, outcome.enumerated), done, 1)
        text = f"{shape_text(outcome)} {phase} {done}/{total} of {outcome.enumerated}  {best_text(outcome)}"
        self._show_shapes()
        self._bars.show(lane, text, done, total)

    def finished(self, lane: int, outcome: Outcome, said: str | None = None) -> None:
        """Ends a shape; its result, or what is said in place of it, stays on the screen."""
        with self._lock:
            self._finished += 1
        self._bars.drop(lane)
        if said is None:
            verdict = best_text(outcome) or "nothing right was measured"
            ended = "" if outcome.ended == "done" else f" ({outcome.ended})"
            said = f"{verdict} in {took_text(outcome)}{ended}"
        self._bars.say(f"{shape_text(outcome)}: {said}")
        self._show_shapes()

    def close(self) -> None:
        """Takes the bars away."""
        self._bars.close()

    def _show_shapes(self) -> None:
        self._bars.show("shapes", f"{self._finished}/{self._shapes} shapes", self._finished, self._shapes)


def best_text(outcome: Outcome) -> str:
    """The best so far: TFLOP/s, ratio to torch, configuration. Empty when there is none."""
    best = outcome.winner
    if best is None or best.seconds is None:
        return ""
    ratio = f" {1 / best.score:.3f}x cuBLAS" if best.reference_seconds else ""
    return f"best {tflops(outcome, best.seconds):.1f} TFLOP/s{ratio} {best.candidate}"


def table(outcomes: Sequence[Outcome], arch: Arch) -> str:
    """The summary: a line a shape, and the mean ratio to cuBLAS."""
    from tabulate import tabulate

    rows = [_row(outcome, arch) for outcome in outcomes]
    headers = ["shape", "winner", "us", "TFLOP/s", "x cuBLAS", "of bound", "runner-up", "ok/wrong/failed", "s"]
    text = tabulate(rows, headers=headers, disable_numparse=True)
    ratios = [1 / o.winner.score for o in outcomes if o.winner is not None and o.winner.reference_seconds]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        text += f"\nratio to cuBLAS: {mean:.3f} (geometric mean), {min(ratios):.3f} to {max(ratios):.3f}"
    unfinished = [shape_text(o) for o in outcomes if not o.searched]
    if unfinished:
        text += f"\nnot finished: {', '.join(unfinished)}; all that was measured is kept, --resume goes on from there"
    return text


def bound_of(outcome: Outcome, arch: Arch) -> Roofline | None:
    """The bound that a time is compared with. None for groups of rows: weights of groups without rows are not read, and
    only the device knows how many these are.
    """
    return None if WORKS[outcome.problem.work].divided else roofline(outcome.problem, arch)


def _row(outcome: Outcome, arch: Arch) -> tuple[str, ...]:
    ranking = outcome.ranking
    counts = f"{outcome.count('ok')}/{outcome.count('wrong')}/{outcome.count('failed')} of {outcome.enumerated}"
    took = f"{outcome.elapsed:.1f}"
    if not ranking:
        why = textwrap.shorten(outcome.ended, 60, placeholder=" ...")
        return (shape_text(outcome), f"none ({why})", "", "", "", "", "", counts, took)
    best = ranking[0]
    assert best.seconds is not None
    bound = bound_of(outcome, arch)
    second = next((r for r in ranking[1:] if r.kind == best.kind), None)
    behind = f"{second.candidate} {100 * (second.score / best.score - 1):+.1f} %" if second else ""
    return (
        shape_text(outcome),
        str(best.candidate),
        f"{best.seconds * 1e6:.2f}",
        f"{tflops(outcome, best.seconds):.1f}",
        f"{1 / best.score:.3f}" if best.reference_seconds else "",
        "" if bound is None else f"{100 * bound.share(best.seconds):.1f} %",
        behind,
        counts,
        took,
    )


def as_json(outcomes: Sequence[Outcome], arch: Arch, header: dict[str, Any]) -> str:
    """Everything that was measured, as JSON."""

    def one(result: Result) -> dict[str, Any]:
        return {
            "backend": result.candidate.backend,
            "config": result.candidate.text,
            "estimate": result.candidate.estimate if math.isfinite(result.candidate.estimate) else None,
            "verdict": result.verdict,
            "kind": result.kind,
            "seconds": result.seconds,
            "torch_seconds": result.reference_seconds,
            "method": result.method,
        }

    shapes = [
        {
            "problem": str(o.problem),
            "m": o.problem.m,
            "n": o.problem.n,
            "k": o.problem.k,
            "batch": o.problem.batch,
            "flops": o.problem.flops,
            "bound_seconds": roofline(o.problem, arch).bound_s,
            "enumerated": o.enumerated,
            "ended": o.ended,
            "elapsed": o.elapsed,
            "waited": o.waited,
            "winner": one(o.winner) if o.winner else None,
            "results": [one(result) for result in (*o.ranking, *(r for r in o.results.values() if not r.ok))],
        }
        for o in outcomes
    ]
    return json.dumps({**header, "gpu": arch.name, "sm_count": arch.sm_count, "shapes": shapes}, indent=1) + "\n"
