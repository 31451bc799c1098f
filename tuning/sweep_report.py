"""What a sweep shows: a progress line, the summary table, JSON, a plot."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cutegemm.roofline import roofline
from tuning.sweep_search import Outcome, Result

if TYPE_CHECKING:
    from cutegemm.arch import Arch

QUIET_SECONDS = 15.0
"""Between two lines where there is no terminal."""


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
    """One line for all GPUs: which shape, how far, the best so far. Thread-safe.

    On a terminal the line is redrawn; elsewhere a line is printed every `QUIET_SECONDS`.
    """

    def __init__(self, shapes: int, limit: int, stream: TextIO | None = None) -> None:
        self._shapes, self._limit = shapes, limit
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._lock = threading.Lock()
        self._states: dict[int, str] = {}
        self._finished = 0
        self._shown = time.monotonic()

    def update(self, lane: int, phase: str, outcome: Outcome) -> None:
        """Tells where the search on GPU number `lane` stands."""
        with self._lock:
            self._states[lane] = f"{shape_text(outcome)} {phase} {self._far(outcome)}{best_text(outcome)}"
            self._draw()

    def finished(self, lane: int, outcome: Outcome, said: str | None = None) -> None:
        """Ends a shape; its result, or what is said in place of it, stays on the screen."""
        with self._lock:
            self._finished += 1
            self._states.pop(lane, None)
            self._clear()
            if said is None:
                verdict = best_text(outcome) or "nothing right was measured"
                ended = "" if outcome.ended == "done" else f" ({outcome.ended})"
                said = f"{verdict.strip()} in {took_text(outcome)}{ended}"
            self._stream.write(f"{shape_text(outcome)}: {said}\n")
            self._stream.flush()

    def say(self, text: str) -> None:
        """A line of its own."""
        with self._lock:
            self._clear()
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        with self._lock:
            self._clear()

    def _far(self, outcome: Outcome) -> str:
        done = len(outcome.results)
        total = max(min(self._limit, outcome.enumerated), done, 1)
        filled = round(12 * done / total)
        return f"[{'#' * filled}{'.' * (12 - filled)}] {done}/{total} of {outcome.enumerated}  "

    def _draw(self) -> None:
        now = time.monotonic()
        line = f"{self._finished}/{self._shapes} shapes  " + " | ".join(v for _, v in sorted(self._states.items()))
        if self._live:
            width = shutil.get_terminal_size((100, 24)).columns
            self._stream.write("\r\x1b[K" + line[: width - 1])
            self._stream.flush()
        elif now - self._shown >= QUIET_SECONDS:
            self._shown = now
            self._stream.write(line + "\n")
            self._stream.flush()

    def _clear(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")


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


def _row(outcome: Outcome, arch: Arch) -> tuple[str, ...]:
    ranking = outcome.ranking
    counts = f"{outcome.count('ok')}/{outcome.count('wrong')}/{outcome.count('failed')} of {outcome.enumerated}"
    took = f"{outcome.elapsed:.1f}"
    if not ranking:
        why = textwrap.shorten(outcome.ended, 60, placeholder=" ...")
        return (shape_text(outcome), f"none ({why})", "", "", "", "", "", counts, took)
    best = ranking[0]
    assert best.seconds is not None
    bound = roofline(outcome.problem, arch)
    second = next((r for r in ranking[1:] if r.kind == best.kind), None)
    behind = f"{second.candidate} {100 * (second.score / best.score - 1):+.1f} %" if second else ""
    return (
        shape_text(outcome),
        str(best.candidate),
        f"{best.seconds * 1e6:.2f}",
        f"{tflops(outcome, best.seconds):.1f}",
        f"{1 / best.score:.3f}" if best.reference_seconds else "",
        f"{100 * bound.share(best.seconds):.1f} %",
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


def plot(outcomes: Sequence[Outcome], arch: Arch, path: str | Path) -> None:
    """Bars a shape: the winner's TFLOP/s and cuBLAS's, and the roofline bound as a line.

    Raises RuntimeError saying what to install when matplotlib is missing; ValueError when there is nothing to draw.
    """
    from tuning.plot import load_pyplot

    drawn = [o for o in outcomes if o.winner is not None]
    if not drawn:
        raise ValueError("nothing was measured, so there is nothing to draw")
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.7 * len(drawn) + 2), 4.5))
    for place, outcome in enumerate(drawn):
        best = outcome.winner
        assert best is not None
        assert best.seconds is not None
        label = place == 0
        axes.bar(place - 0.2, tflops(outcome, best.seconds), 0.4, color="C0", label="winner" if label else None)
        if best.reference_seconds:
            theirs = tflops(outcome, best.reference_seconds)
            axes.bar(place + 0.2, theirs, 0.4, color="C7", label="cuBLAS" if label else None)
            axes.text(place, max(theirs, tflops(outcome, best.seconds)), f"{1 / best.score:.2f}x", ha="center")
        bound = tflops(outcome, roofline(outcome.problem, arch).bound_s)
        axes.plot([place - 0.45, place + 0.45], [bound] * 2, color="black", label="bound" if label else None)
    axes.set_xticks(range(len(drawn)), [shape_text(o) for o in drawn], rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{arch.name}, {drawn[0].problem.dtype}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(os.fspath(path), dpi=130)
    pyplot.close(figure)
