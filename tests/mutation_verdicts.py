"""The accounting of mutation tests: what noticed each mutation, and which survivors the table explains.

`judge` runs a case under each of several seeds (each another legal timing) and says what noticed: a wrong number, one
of the emulator's checks, or no progress.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cutegemm.emulator.errors import EmulationError
from cutegemm.emulator.mutate import Mutation


@dataclass(frozen=True)
class Case:
    """A kernel with problems to run it on.

    Attributes:
        name: what the table of survivors calls it. ptx: the PTX text of its kernels. runs: one callable a problem;
        given a PTX text and a seed it runs that text on fresh outputs and returns None when
            they are right, else a sentence. It lets the emulator's errors pass.
    """

    name: str
    ptx: str
    runs: tuple[Callable[[str, int], str | None], ...]


@dataclass(frozen=True)
class Outcome:
    """What became of one mutation: ``killer`` is ``wrong result``, the error's class name, or None for a survivor."""

    case: str
    mutation: Mutation
    killer: str | None
    seed: int | None = None
    said: str = ""
    reached: bool = True

    @property
    def killed(self) -> bool:
        return self.killer is not None


def judge(case: Case, mutation: Mutation, seeds: Iterable[int], reached: frozenset[int] | None = None) -> Outcome:
    """Runs the mutated kernel until something notices.

    reached: the PTX lines that the unchanged kernel executes on the case's problems; a mutation elsewhere is not run.
    """
    if reached is not None and mutation.line not in reached:
        return Outcome(case.name, mutation, None, said="no problem of the case reaches this line", reached=False)
    for seed in seeds:
        for run in case.runs:
            try:
                wrong = run(mutation.ptx, seed)
            except EmulationError as error:
                return Outcome(case.name, mutation, type(error).__name__, seed, str(error).split("\n", 1)[0])
            if wrong is not None:
                return Outcome(case.name, mutation, "wrong result", seed, wrong)
    return Outcome(case.name, mutation, None)


def check_unchanged(case: Case, seeds: Iterable[int]) -> None:
    """Raises RuntimeError when the unchanged kernel is wrong under some seed: mutations would tell nothing."""
    for seed in seeds:
        for number, run in enumerate(case.runs):
            wrong = run(case.ptx, seed)
            if wrong is not None:
                raise RuntimeError(
                    f"{case.name}, problem {number}, seed {seed}: the unchanged kernel is wrong: {wrong}"
                )


@dataclass(frozen=True)
class Survivor:
    """A row of the table of survivors: mutations that nothing notices, and why that is right.

    ``case``, ``site`` and ``change`` name them; a ``*`` in one stands for any text.
    ``verdict``: "equivalent" (no legal execution differs), "performance" (only speed or a hint), "model" (a real GPU
    could differ, the emulator's memory model does not) or "unreached".
    """

    case: str
    site: str
    change: str
    verdict: str
    reason: str

    def explains(self, outcome: Outcome) -> bool:
        """Whether this row is about that mutation."""
        got = (outcome.case, outcome.mutation.site, outcome.mutation.change)
        return all(
            _matches(pattern, text) for pattern, text in zip((self.case, self.site, self.change), got, strict=True)
        )


VERDICTS = ("equivalent", "performance", "model", "unreached")


def read_survivors(table: Mapping[str, Any]) -> list[Survivor]:
    """The rows of a parsed table file (``[[survivor]]`` entries). Raises ValueError for a row without a reason."""
    rows = []
    for row in table.get("survivor", []):
        survivor = Survivor(**row)
        if survivor.verdict not in VERDICTS or len(survivor.reason.split()) < 4:
            raise ValueError(f"survivor {survivor.site!r}: needs a verdict of {VERDICTS} and a reason in words")
        rows.append(survivor)
    return rows


def compare(outcomes: Iterable[Outcome], table: Iterable[Survivor], *, complete: bool = True) -> list[str]:
    """What is wrong between outcomes and the table: survivors without a row, and, when ``complete``, rows without a
    survivor. Empty when they agree.
    """
    table, outcomes = list(table), list(outcomes)
    left = [outcome for outcome in outcomes if not outcome.killed]
    problems = [
        f"unexplained survivor: {outcome.case}: {outcome.mutation} ({outcome.mutation.site})"
        for outcome in left
        if not any(row.explains(outcome) for row in table)
    ]
    for row in table:
        about = [outcome for outcome in outcomes if row.explains(outcome)]
        if (about or complete) and not any(row.explains(outcome) for outcome in left):
            problems.append(f"stale row: {row.case}: {row.site} -> {row.change}: nothing that survives")
    return problems


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) is not None
