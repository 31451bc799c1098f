"""One measurement, and which of several measurements of a problem is the winner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

KINDS = ("final", "quick", "family")
"""How a row was measured. final: among the finalists of a sweep, in interleaved rounds. quick: in one heat of it.
family: in a search of one ladder rung, which says nothing about other backends; it never decides what `gemm` runs.
"""
STALE_ORIGIN = "shipped, measured with other kernel sources"
"""`Measurement.origin` of a winner from a shipped table that is stale."""


METHOD, SHORT = "captured", "captured, short rounds"
STEADY, BOTH = "captured, long blocks", "captured, short rounds and long blocks"
METHODS = ("", METHOD, SHORT, STEADY, BOTH)
"""How times are taken, the surer the later. METHOD: the captured call that a user gets, in rounds of a graph each.
SHORT: the same with a pause before each round, so that the card is at full clock. STEADY: in blocks that have a whole
swing of the clock at the power limit (`tuner.timing`). BOTH: in the last two ways, each time the geometric mean of the
two. Rows without a note are older: their graphs borrowed a workspace that was cleared already, and their candidates
took turns in one direction, A B C, B C A, ...
"""


@dataclass(frozen=True)
class Measurement:
    """One row.

    gpu, sm_count: model name and SM count of the GPU. problem: `str(Problem)`. backend: its name. config: its text.
    fingerprint: of kernel sources and compiler, see `fingerprint`. seconds: per launch, None when it was not
    timed. verdict: "ok", or what was wrong: "wrong: ...", "failed to compile: ...", "failed to run: ...".
    measured_at: UTC, ISO. kind: one of `KINDS`. reference_seconds: what torch (cuBLAS) took in the same rounds, or
    None. origin: "own", "imported", or "shipped" with a remark when it is stale. method: how the times were taken, one
    of `METHODS`. A time of method `BOTH` is the mean of the times in two states of the card, so no single run takes so
    long.
    """

    gpu: str
    sm_count: int
    problem: str
    backend: str
    config: str
    fingerprint: str
    seconds: float | None
    verdict: str
    measured_at: str = ""
    kind: str = "final"
    reference_seconds: float | None = None
    origin: str = "own"
    method: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict == "ok" and self.seconds is not None and self.seconds > 0

    @property
    def ratio(self) -> float | None:
        """Speed over that of torch in the same rounds; above 1 is faster."""
        return self.reference_seconds / self.seconds if self.reference_seconds and self.seconds else None


def sureness(kind: str, method: str) -> int:
    """How much a time says about who is fastest: finals by the place of their method in `METHODS`, all others 0."""
    return 0 if kind != "final" else 1 + (METHODS.index(method) if method in METHODS else 0)


class _Timed(Protocol):
    @property
    def kind(self) -> str: ...

    @property
    def method(self) -> str: ...


def supersedes(later: _Timed, before: _Timed) -> bool:
    """Whether of two right times of a configuration the later one counts: unless it says less."""
    return sureness(later.kind, later.method) >= sureness(before.kind, before.method)


def standing(rows: Iterable[Measurement]) -> list[Measurement]:
    """The right and timed row of each configuration that counts, from rows in the order they were measured.

    A configuration whose latest row is not "ok" has none: one found wrong later never wins. Else the latest of its
    surest final rows since it was last not ok counts, and without one its latest row.
    """
    counts: dict[tuple[str, str, str], Measurement | None] = {}
    for row in rows:
        key = (row.backend, row.config, row.fingerprint)
        before = counts.get(key)
        if not row.ok:
            counts[key] = None
        elif before is None or supersedes(row, before):
            counts[key] = row
    return [row for row in counts.values() if row is not None]


def pick(rows: Iterable[Measurement]) -> Measurement | None:
    """The winner among rows of one problem on one GPU, in the order they were measured.

    Finalists of a sweep come before what was timed only once, and those of a surer method before others, whose ratios
    do not compare with theirs. Two rows that also have torch's time are compared by their ratio to it, because clocks
    differ from day to day; otherwise by their seconds.
    """
    counted = standing(rows)
    surest = max((sureness(row.kind, row.method) for row in counted), default=0)
    counted = [row for row in counted if sureness(row.kind, row.method) == surest]
    if not counted:
        return None
    if all(row.ratio for row in counted):
        return max(counted, key=lambda row: row.ratio or 0.0)
    return min(counted, key=lambda row: row.seconds or 0.0)
