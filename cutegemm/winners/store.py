"""The user's measurements in an SQLite file; `file` says what can befall it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cutegemm.run.cache_dir import cache_dir
from cutegemm.winners.file import COLUMNS, WinnersFile, WinnersHeld, fetch, insert
from cutegemm.winners.row import Measurement, pick


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
        """Adds rows in one transaction, on disk when this returns.

        Those without a time stamp get the present, or the newest row's where the clock ran ahead. Imported ones stay
        without: they count as older than all others.
        """
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")

        def add(connection) -> None:
            newest = connection.execute(f"SELECT max(measured_at) FROM measurement WHERE {_IS_DATED}").fetchone()[0]
            stamp = max(now, newest or "")
            undated = (row.measured_at == "" and row.origin != "imported" for row in rows)
            stamped = (
                replace(row, measured_at=stamp) if each else row for row, each in zip(rows, undated, strict=True)
            )
            insert(connection, [astuple(row) for row in stamped])

        if rows:
            self._file.write(add)

    def rows(self, problem: str | None = None) -> list[Measurement]:
        """All rows, the first measured first, or those of one problem. An imported row may be older than one recorded
        before it."""
        return self._select("WHERE problem = ?", problem) if problem is not None else self._select("")

    def rows_ending(self, *endings: str, seconds: float | None = None) -> list[Measurement]:
        """The rows of every problem whose text ends in a space and one of these (a signature's text), as `rows`.

        seconds: as of `WinnersFile.read`, which raises WinnersHeld.
        """
        clause = " OR ".join(["substr(problem, -length(?)) = ?"] * len(endings))
        twice = [f" {ending}" for ending in endings for _ in range(2)]
        return self._select(f"WHERE {clause}", *twice, seconds=seconds) if endings else []

    def is_held(self) -> bool:
        """Whether another process holds the file just now, so that nobody can read it."""
        try:
            self._file.read(lambda connection: connection.execute("SELECT 1 FROM measurement LIMIT 1"), seconds=0.0)
        except WinnersHeld:
            return True
        return False

    def _select(self, where: str, *arguments: str, seconds: float | None = None) -> list[Measurement]:
        query = f"SELECT {', '.join(COLUMNS)} FROM measurement {where} {_IN_TIME}"
        found = self._file.read(lambda connection: fetch(connection, query, arguments), seconds)
        return [_read(row) for row in found]

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

    def prune(self, unwanted: Callable[[Sequence[Measurement]], Iterable[bool]]) -> tuple[int, int]:
        """Deletes those of all rows for which `unwanted`, called with all in the order of `rows`, has True.

        It is called while nobody else can write. Returns how many were deleted, and of how many.
        """

        def delete(connection) -> tuple[int, int]:
            found = fetch(connection, f"SELECT id, {', '.join(COLUMNS)} FROM measurement {_IN_TIME}")
            marks = unwanted([_read(row[1:]) for row in found])
            doomed = [(row[0],) for row, mark in zip(found, marks, strict=True) if mark]
            connection.executemany("DELETE FROM measurement WHERE id = ?", doomed)
            return len(doomed), len(found)

        return self._file.write(delete)

    def stamp(self) -> object:
        """Changes when the file does."""
        return self._file.stamp()


_IN_TIME, _IS_DATED = "ORDER BY measured_at, id", "measured_at GLOB '[0-9][0-9][0-9][0-9]-*'"
_TYPES = tuple(
    (float, type(None)) if "seconds" in name else (int,) if name == "sm_count" else (str,) for name in COLUMNS
)


def _read(values: Sequence[Any]) -> Measurement:
    """The row with these values of `COLUMNS`. SQLite keeps what another program wrote, whatever its type: a row with a
    value of another type than its column's is not "ok", and its verdict says so.
    """
    wrong = [place for place, value in enumerate(values) if type(value) not in _TYPES[place]]
    if not wrong:
        return Measurement(*values)
    whole = list(values)
    for place in wrong:
        whole[place] = None if float in _TYPES[place] else 0 if int in _TYPES[place] else repr(values[place])
    whole[COLUMNS.index("verdict")] = f"unreadable: {COLUMNS[wrong[0]]} is {values[wrong[0]]!r}"
    return Measurement(*whole)


def default_path() -> Path:
    """`CUTEGEMM_CACHE_DIR`/winners.sqlite3 when that variable is set, else in the user's cache directory."""
    return cache_dir() / "winners.sqlite3"
