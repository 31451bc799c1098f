"""Measured configurations: one row a measurement; the fastest right one of a problem is its winner.

The rows lie in an SQLite file in the user's cache directory (`CUTEGEMM_CACHE_DIR` moves it; `winners_file` says what
can befall it). Tables shipped with the package (`winners_table`) stand behind it: a configuration that the user
measured counts with the user's row.

A row made from other kernel sources, or by another compiler, than today's is stale (`winners_fingerprint`): a user's
stale row never decides what `gemm` runs, it is only a candidate that the next sweep times again. A stale row of a
shipped table still names a configuration, and its `origin` says that it was measured with other kernels.

`CUTEGEMM_WINNERS=off` makes `lookup` find nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from cutegemm.cache_dir import cache_dir
from cutegemm.winners_file import COLUMNS, SCHEMA, WinnersFile, WinnersWarning, insert

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.problem import Problem

__all__ = [
    "KINDS", "SCHEMA", "STALE_ORIGIN", "Measurement", "Winners", "WinnersWarning", "deciding", "default_path", "lookup",
    "pick", "standing", "switched_off",
]  # fmt: skip

KINDS = ("final", "quick", "family")
"""How a row was measured. final: among the finalists of a sweep, in interleaved rounds. quick: in one heat of it.
family: in a search of one ladder rung, which says nothing about other backends; it never decides what `gemm` runs.
"""
STALE_ORIGIN = "shipped, measured with other kernel sources"
"""`Measurement.origin` of a winner from a shipped table that is stale."""


@dataclass(frozen=True)
class Measurement:
    """One row.

    gpu, sm_count: model name and SM count of the GPU. problem: `str(Problem)`. backend: its name. config: its text.
    fingerprint: of kernel sources and compiler, see `winners_fingerprint`. seconds: per launch, None when it was not
    timed. verdict: "ok", or what was wrong: "wrong: ...", "failed to compile: ...", "failed to run: ...".
    measured_at: UTC, ISO. kind: one of `KINDS`. reference_seconds: what torch (cuBLAS) took in the same rounds, or
    None. origin: "own", "imported", or "shipped" with a remark when it is stale.
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

    @property
    def ok(self) -> bool:
        return self.verdict == "ok" and self.seconds is not None and self.seconds > 0

    @property
    def ratio(self) -> float | None:
        """Speed over that of torch in the same rounds; above 1 is faster."""
        return self.reference_seconds / self.seconds if self.reference_seconds and self.seconds else None


class Winners:
    """The user's store; see the module docstring. Safe for threads and processes.

    Args:
        path: the file; by default `default_path()`.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._file = WinnersFile(Path(path) if path is not None else default_path())

    @property
    def path(self) -> Path | None:
        """The file, or None when the rows live in memory only."""
        return None if self._file.in_memory else self._file.path

    def record(self, *rows: Measurement) -> None:
        """Adds rows in one transaction, on disk when this returns; those without a time stamp get the present."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        stamped = [row if row.measured_at else replace(row, measured_at=now) for row in rows]
        if stamped:
            self._file.write(lambda connection: insert(connection, [astuple(row) for row in stamped]))

    def rows(self, problem: str | None = None) -> list[Measurement]:
        """All rows, oldest first, or those of one problem."""
        return self._select("WHERE problem = ?", problem) if problem is not None else self._select("")

    def rows_ending(self, *endings: str) -> list[Measurement]:
        """The rows of every problem whose text ends in a space and one of these (a signature's text), oldest first."""
        clause = " OR ".join(["substr(problem, -length(?)) = ?"] * len(endings))
        twice = [f" {ending}" for ending in endings for _ in range(2)]
        return self._select(f"WHERE {clause}", *twice) if endings else []

    def _select(self, where: str, *arguments: str) -> list[Measurement]:
        query = f"SELECT {', '.join(COLUMNS)} FROM measurement {where} ORDER BY id"
        return [Measurement(*row) for row in self._file.read(lambda c: c.execute(query, arguments).fetchall())]

    def all(self) -> list[Measurement]:
        """All rows, oldest first."""
        return self.rows()

    def best(
        self, gpu: str, sm_count: int, problem: str, *, backend: str | None = None, fingerprint: str | None = None
    ) -> Measurement | None:
        """The winner among this store's rows; None when there is none. See `pick`.

        With `backend` or `fingerprint`, other rows do not count.
        """
        return pick(
            row
            for row in self.rows(problem)
            if (row.gpu, row.sm_count) == (gpu, sm_count)
            and backend in (None, row.backend)
            and fingerprint in (None, row.fingerprint)
        )

    def prune(self, unwanted: Callable[[Measurement], bool]) -> int:
        """Deletes the rows for which `unwanted(row)`; returns how many."""

        def delete(connection) -> int:
            found = connection.execute(f"SELECT id, {', '.join(COLUMNS)} FROM measurement").fetchall()
            doomed = [(row[0],) for row in found if unwanted(Measurement(*row[1:]))]
            connection.executemany("DELETE FROM measurement WHERE id = ?", doomed)
            return len(doomed)

        return self._file.write(delete)

    def stamp(self) -> object:
        """Changes when the file does."""
        return self._file.stamp()


def standing(rows: Iterable[Measurement]) -> list[Measurement]:
    """The right and timed row of each configuration that counts, from rows in the order they were made.

    A configuration whose latest row is not "ok" has none: one found wrong later never wins. Else its latest final row
    since it was last not ok counts, and without one its latest row.
    """
    counts: dict[tuple[str, str, str], Measurement | None] = {}
    for row in rows:
        key = (row.backend, row.config, row.fingerprint)
        before = counts.get(key)
        if not row.ok:
            counts[key] = None
        elif before is None or row.kind == "final" or before.kind != "final":
            counts[key] = row
    return [row for row in counts.values() if row is not None]


def pick(rows: Iterable[Measurement]) -> Measurement | None:
    """The winner among rows of one problem on one GPU, in the order they were made.

    Finalists of a sweep come before what was timed only once. Two rows with torch's time beside theirs are compared by
    their ratio to it, because clocks differ from day to day; otherwise by their seconds.
    """
    counted = standing(rows)
    finals = [row for row in counted if row.kind == "final"]
    counted = finals or counted
    if not counted:
        return None
    if all(row.ratio for row in counted):
        return max(counted, key=lambda row: row.ratio or 0.0)
    return min(counted, key=lambda row: row.seconds or 0.0)


def deciding(own: Iterable[Measurement], shipped: Iterable[Measurement]) -> list[Measurement]:
    """The rows that may decide what `gemm` runs, for `pick`: the user's fresh ones, and behind them the shipped ones of
    problems that no sweep of the user's has finished, and configurations that the user did not measure.
    """
    from cutegemm.winners_fingerprint import is_fresh

    fresh = [row for row in own if row.kind != "family" and is_fresh(row)]
    measured = {(row.problem, row.backend, row.config): row.ok for row in fresh}  # as its latest row says
    finals = [row for row in fresh if row.kind == "final" and row.ok]
    finished = {(r.problem, r.backend) for r in finals if measured[r.problem, r.backend, r.config]}
    rest = (row for row in shipped if (row.problem, row.backend) not in finished)
    rest = (row for row in rest if (row.problem, row.backend, row.config) not in measured)
    return [*(row for row in rest if row.kind != "family"), *fresh]


def switched_off() -> bool:
    """Whether `CUTEGEMM_WINNERS` says that nothing measured counts."""
    return os.environ.get("CUTEGEMM_WINNERS", "") == "off"


def lookup(problem: Problem, arch: Arch) -> Measurement | None:
    """The winner of a problem on a GPU: fresh rows of the user's store over those of the shipped table.

    Remembered within the process, and read again when the file changes: some microseconds a call.
    """
    if switched_off():
        return None
    return _reader().winner(arch.name, arch.sm_count, str(problem))


def lookup_other_16_bit(problem: Problem, arch: Arch) -> Measurement | None:
    """`lookup` of the same problem in bf16 for fp16 and in fp16 for bf16, which run alike; None for other types."""
    from cutegemm.neighbours import other_16_bit

    other = other_16_bit(str(problem))
    if switched_off() or other == str(problem):
        return None
    return _reader().winner(arch.name, arch.sm_count, other)


class _Reader:
    """The winners of one store and the shipped tables, remembered while the file stays as it is."""

    SETTLED_NS = 50_000_000
    """A file changed less than this ago may change again within the resolution of its time stamp."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._store = Winners(path)
        self._found: dict[tuple[str, int, str], Measurement | None] = {}
        self._stamp: object = None
        self._lock = threading.Lock()

    def winner(self, gpu: str, sm_count: int, problem: str) -> Measurement | None:
        stamp = self._store.stamp()
        key = (gpu, sm_count, problem)
        if stamp == self._stamp and key in self._found:
            return self._found[key]
        with self._lock:
            if stamp != self._stamp:
                self._found = {}
                unsettled = isinstance(stamp, tuple) and time.time_ns() - stamp[2] < self.SETTLED_NS
                self._stamp = object() if unsettled else stamp
            found = self._found[key] = self._search(gpu, sm_count, problem)
        return found

    def _search(self, gpu: str, sm_count: int, problem: str) -> Measurement | None:
        from cutegemm import winners_table
        from cutegemm.winners_fingerprint import is_fresh

        own = (row for row in self._store.rows(problem) if (row.gpu, row.sm_count) == (gpu, sm_count))
        best = pick(deciding(own, winners_table.shipped(gpu, sm_count).get(problem, ())))
        if best is not None and best.origin == "shipped" and not is_fresh(best):
            best = replace(best, origin=STALE_ORIGIN)
        return best


_current: _Reader | None = None


def _reader() -> _Reader:
    """The reader of the default store; made at first use, again when `CUTEGEMM_CACHE_DIR` changed."""
    global _current
    path = default_path()
    reader = _current
    if reader is None or reader.path != path:
        reader = _current = _Reader(path)
    return reader


def default_path() -> Path:
    """`CUTEGEMM_CACHE_DIR`/winners.sqlite3 when that variable is set, else in the user's cache directory."""
    return cache_dir() / "winners.sqlite3"
