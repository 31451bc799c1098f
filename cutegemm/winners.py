"""Measured configurations on disk: one SQLite row a measurement; the fastest right one is the winner.

The file lies in the user's cache directory (or `CUTEGEMM_CACHE_DIR`). Many processes may write at once: every call is
one transaction with a busy time-out. A file that is damaged or from a later version is set aside; without a writable
disk the rows live in memory for this process, and a warning says so. Rows made from other kernel sources than today's
are never winners.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import warnings
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from datetime import datetime, timezone
from pathlib import Path

SCHEMA = 1
_COLUMNS = "gpu, sm_count, problem, backend, config, fingerprint, seconds, verdict, measured_at"
_CREATE = """
CREATE TABLE IF NOT EXISTS measurement (
    id INTEGER PRIMARY KEY,
    gpu TEXT NOT NULL,
    sm_count INTEGER NOT NULL,
    problem TEXT NOT NULL,
    backend TEXT NOT NULL,
    config TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    seconds REAL,
    verdict TEXT NOT NULL,
    measured_at TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_problem ON measurement (gpu, sm_count, problem, backend);
"""


class WinnersWarning(UserWarning):
    """The winners store does not work as it should (read-only disk, a damaged file)."""


@dataclass(frozen=True)
class Measurement:
    """One row.

    gpu, sm_count: model name and SM count of the GPU. problem: `str(Problem)`. backend: its name. config: its text.
    fingerprint: digest of the kernel sources. seconds: per launch, None when it was not timed. verdict: "ok", or what
    was wrong. measured_at: UTC, ISO.
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


class Winners:
    """See the module docstring. Safe for threads and processes.

    Args:
        path: the file; by default `CUTEGEMM_CACHE_DIR`/winners.sqlite3, else in the user's cache directory.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._path = Path(path) if path is not None else default_path()
        self._memory: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    @property
    def path(self) -> Path | None:
        """The file, or None when the rows live in memory only."""
        return None if self._memory is not None else self._path

    def record(self, *rows: Measurement) -> None:
        """Adds rows in one transaction; those without a time stamp get the present."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        values = [(*astuple(row)[:-1], row.measured_at or now) for row in rows]
        marks = ", ".join("?" * len(values[0])) if values else ""
        if values:
            with self._connection(write=True) as connection:
                connection.executemany(f"INSERT INTO measurement ({_COLUMNS}) VALUES ({marks})", values)

    def rows(self, problem: str | None = None) -> list[Measurement]:
        """All rows, oldest first, or those of one problem."""
        where, arguments = ("WHERE problem = ?", (problem,)) if problem is not None else ("", ())
        with self._connection(write=False) as connection:
            found = connection.execute(f"SELECT {_COLUMNS} FROM measurement {where} ORDER BY id", arguments).fetchall()
        return [Measurement(*row) for row in found]

    def best(
        self, gpu: str, sm_count: int, problem: str, *, backend: str | None = None, fingerprint: str | None = None
    ) -> Measurement | None:
        """The fastest configuration whose latest measurement was right; None when there is none.

        A configuration measured again counts with its latest row, so one found wrong later never wins. With
        `fingerprint`, rows from other sources do not count.
        """
        conditions, arguments = ["gpu = ?", "sm_count = ?", "problem = ?"], [gpu, sm_count, problem]
        for column, value in (("backend", backend), ("fingerprint", fingerprint)):
            if value is not None:
                conditions.append(f"{column} = ?")
                arguments.append(value)
        where = " AND ".join(conditions)
        query = f"""
            SELECT {_COLUMNS} FROM measurement WHERE id IN
                (SELECT MAX(id) FROM measurement WHERE {where} GROUP BY backend, config, fingerprint)
            AND verdict = 'ok' AND seconds > 0 ORDER BY seconds LIMIT 1"""
        with self._connection(write=False) as connection:
            row = connection.execute(query, arguments).fetchone()
        return Measurement(*row) if row else None

    @contextlib.contextmanager
    def _connection(self, write: bool) -> Iterator[sqlite3.Connection]:
        with self._lock:
            connection = self._memory or self._open(write)
            try:
                with connection:
                    yield connection
            finally:
                if connection is not self._memory:
                    connection.close()

    def _open(self, write: bool) -> sqlite3.Connection:
        if not write and not self._path.exists():
            return _ready(sqlite3.connect(":memory:"))
        for attempt in range(2):
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                return _ready(sqlite3.connect(self._path, timeout=60))
            except sqlite3.OperationalError as why:  # locked for a minute, read-only, full
                return self._fall_back(why)
            except sqlite3.DatabaseError as why:
                if attempt:
                    return self._fall_back(why)
                self._set_aside(why)
            except OSError as why:
                return self._fall_back(why)
        raise AssertionError("unreachable")

    def _set_aside(self, why: Exception) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged-{os.getpid()}")
        _warn(f"winners: {self._path} cannot be read ({why}); it is kept as {aside.name} and a new one begun")
        with contextlib.suppress(OSError):
            self._path.rename(aside)

    def _fall_back(self, why: Exception) -> sqlite3.Connection:
        _warn(f"winners: {self._path} cannot be used ({why}); measurements are kept for this process only")
        self._memory = _ready(sqlite3.connect(":memory:", check_same_thread=False))
        return self._memory


def default_path() -> Path:
    """`CUTEGEMM_CACHE_DIR`/winners.sqlite3 when that variable is set, else in the user's cache directory."""
    base = os.environ.get("CUTEGEMM_CACHE_DIR")
    if base:
        return Path(base) / "winners.sqlite3"
    import platformdirs

    return Path(platformdirs.user_cache_dir("cutegemm", appauthor=False)) / "winners.sqlite3"


def _ready(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The connection with the table in it. Raises sqlite3.DatabaseError for a file that is none of ours."""
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA:
            raise sqlite3.DatabaseError(f"schema {version} is newer than {SCHEMA}")
        if version < SCHEMA:
            with connection:
                connection.executescript(f"BEGIN IMMEDIATE; {_CREATE} PRAGMA user_version = {SCHEMA}; COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


def _warn(text: str) -> None:
    warnings.warn(text, WinnersWarning, stacklevel=4)
