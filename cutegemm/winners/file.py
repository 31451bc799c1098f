"""The SQLite file under the winners store, and what can befall it.

Every read and every write is one short connection; a write is one transaction under an advisory lock next to the file,
so that many processes queue instead of meeting in SQLite's busy loop, and so that nobody writes while a damaged file
is moved away. A process killed at any moment leaves a whole file: SQLite rolls its journal back at the next opening.

    damaged file      moved aside under a name that says so, its readable rows kept in a new file, with a warning
    later version's   left alone; this version keeps a file of its own next to it
    no writable disk  (read-only, full, locked for a minute) this process goes on in memory, with what could be read
    held by another   (a process stopped while it writes) a reader that waits no minute is told so, and may try again
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from cutegemm import locks

SCHEMA = 3
COLUMNS = (
    "gpu", "sm_count", "problem", "backend", "config", "fingerprint", "seconds", "verdict", "measured_at", "kind",
    "reference_seconds", "origin", "method",
)  # fmt: skip
_FIRST_SCHEMA, _SECOND_SCHEMA = COLUMNS[:9], COLUMNS[:12]
_SINCE: tuple[Any, ...] = ("family", None, "own", "")
"""What rows of the first schema have in the columns that came later."""
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
    measured_at TEXT NOT NULL,
    kind TEXT NOT NULL DEFAULT 'final',
    reference_seconds REAL,
    origin TEXT NOT NULL DEFAULT 'own',
    method TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS by_problem ON measurement (problem, gpu, sm_count);
"""
_FROM_2 = """
ALTER TABLE measurement ADD COLUMN method TEXT NOT NULL DEFAULT '';
"""
_FROM_1 = """
ALTER TABLE measurement ADD COLUMN kind TEXT NOT NULL DEFAULT 'family';
ALTER TABLE measurement ADD COLUMN reference_seconds REAL;
ALTER TABLE measurement ADD COLUMN origin TEXT NOT NULL DEFAULT 'own';
DROP INDEX IF EXISTS by_problem;
CREATE INDEX by_problem ON measurement (problem, gpu, sm_count);
"""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_DAMAGED = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What a damaged file raises; the latter where SQLite's message quotes bytes of a damaged schema."""
LOCK_SECONDS = 60.0

writes = 0
"""How often this process has written any such file."""

T = TypeVar("T")
Action = Callable[[sqlite3.Connection], T]


class WinnersWarning(UserWarning):
    """The winners store does not work as it should (read-only or full disk, a damaged file)."""


class WinnersHeld(Exception):
    """Another process has held the file for longer than a reader waits."""


class _Newer(Exception):
    """The file was written by a later version of the library."""


class WinnersFile:
    """The SQLite file of the winners store. Safe for threads, processes and forks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: sqlite3.Connection | None = None
        self._lock = locks.reentrant()

    @property
    def in_memory(self) -> bool:
        return self._memory is not None

    def read(self, action: Action[T], seconds: float | None = None) -> T:
        """`action(connection)` on a connection that must not write. Creates no file.

        seconds: how long to wait for a process that holds the file. Raises WinnersHeld after that; by default the wait
            is LOCK_SECONDS, after which this process goes on in memory.
        """
        return self._run(action, write=False, seconds=seconds)

    def write(self, action: Action[T]) -> T:
        """`action(connection)` in one transaction, on disk when this returns (or in memory, after a warning)."""
        global writes
        try:
            return self._run(action, write=True)
        finally:
            writes += 1

    def stamp(self) -> tuple[int, int, int] | None:
        """Changes when the file does; None without a file."""
        try:
            info = os.stat(str(self.path))
        except OSError:
            return None
        return info.st_ino, info.st_size, info.st_mtime_ns

    def _run(self, action: Action[T], write: bool, seconds: float | None = None) -> T:
        with self._lock:
            for _ in range(3):
                if self._memory is not None:
                    return _transaction(self._memory, action) if write else action(self._memory)
                try:
                    return self._write(action) if write else self._read(action, seconds)
                except _Newer as why:
                    self._step_aside(str(why))
                except (OSError, sqlite3.OperationalError) as why:  # read-only, full, locked for a minute
                    if seconds is not None and (isinstance(why, TimeoutError) or "is locked" in str(why)):
                        raise WinnersHeld(str(why)) from why
                    self._fall_back(why)
                except _DAMAGED as why:
                    if isinstance(why, (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError)):
                        raise
                    self._set_aside(why)
            self._fall_back(RuntimeError("it was damaged again and again"))
            assert self._memory is not None
            return _transaction(self._memory, action)

    def _read(self, action: Action[T], seconds: float | None) -> T:
        if not self.path.exists():
            with contextlib.closing(_prepared(sqlite3.connect(":memory:", isolation_level=None))) as empty:
                return action(empty)
        with contextlib.closing(_connect(self.path, seconds)) as connection:
            if _version(connection) == SCHEMA:
                return action(connection)
        self._write(lambda connection: None, seconds)  # an older file, or one that another process is just creating
        with contextlib.closing(_connect(self.path, seconds)) as connection:
            return action(connection)

    def _write(self, action: Action[T], seconds: float | None = None) -> T:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self.path, seconds), contextlib.closing(_connect(self.path, seconds)) as connection:
            return _transaction(_prepared(connection), action)

    def _step_aside(self, why: str) -> None:
        own = self.path.with_name(f"{self.path.stem}-schema{SCHEMA}{self.path.suffix}")
        _warn(f"winners: {self.path} is left alone ({why}); {own.name} is used instead")
        self.path = own

    def _set_aside(self, why: Exception) -> None:
        """Moves a damaged file away and makes a new one of the rows that can still be read."""
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%f")
        aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}-{os.getpid()}")
        try:
            with _locked(self.path):
                if _is_whole(self.path):
                    return  # another process was faster
                self.path.rename(aside)
                with contextlib.suppress(FileNotFoundError):
                    journal = Path(f"{self.path}-journal")
                    journal.rename(f"{aside}-journal")
                rows = _salvage(aside)
                fresh = self.path.with_name(f".{self.path.name}.new-{os.getpid()}")
                fresh.unlink(missing_ok=True)
                with contextlib.closing(_connect(fresh)) as connection:
                    _transaction(_prepared(connection), lambda c: insert(c, rows))
                fresh.replace(self.path)
        except (OSError, sqlite3.Error) as also:
            self._fall_back(also)
            return
        _warn(
            f"winners: {self.path} cannot be read ({why}); it is kept as {aside.name}, and a new file begun with the "
            f"{len(rows)} rows that could be read"
        )

    def _fall_back(self, why: Exception) -> None:
        _warn(f"winners: {self.path} cannot be used ({why}); measurements are kept for this process only")
        memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        with contextlib.suppress(sqlite3.Error, UnicodeDecodeError, OSError):
            with contextlib.closing(
                sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=1)
            ) as source:
                if _version(source) <= SCHEMA:
                    source.backup(memory)
            memory.execute("REINDEX")
            if memory.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("damaged")
            _prepared(memory).execute(f"SELECT {', '.join(COLUMNS)} FROM measurement LIMIT 0")  # is it one of ours?
            self._memory = memory
        if self._memory is None:
            memory.close()
            self._memory = _prepared(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))


def insert(connection: sqlite3.Connection, rows: list[tuple]) -> None:
    """Adds rows whose values are in the order of `COLUMNS`."""
    marks = ", ".join("?" * len(COLUMNS))
    connection.executemany(f"INSERT INTO measurement ({', '.join(COLUMNS)}) VALUES ({marks})", rows)


def fetch(connection: sqlite3.Connection, query: str, arguments: Sequence[str] = ()) -> list[tuple]:
    """The rows that a query finds. Texts of another program that are not UTF-8 come with marks in place of what they
    cannot say.
    """
    try:
        return connection.execute(query, arguments).fetchall()
    except sqlite3.OperationalError as why:
        if "decode to UTF-8" not in str(why):
            raise
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    try:
        return connection.execute(query, arguments).fetchall()
    finally:
        connection.text_factory = str


def _connect(path: Path, seconds: float | None = None) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=LOCK_SECONDS if seconds is None else seconds, isolation_level=None)


def _transaction(connection: sqlite3.Connection, action: Action[T]) -> T:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = action(connection)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    return result


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA:
        raise _Newer(f"its schema {version} is newer than {SCHEMA}")
    return version


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The connection with this version's table in it; raises sqlite3.DatabaseError for what is no such file, and of
    its kinds sqlite3.OperationalError for another program's database, which is left as it is."""
    version = _version(connection)
    if version == 0 and connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise sqlite3.OperationalError("it is a database of another program")
    if version < SCHEMA:
        script = {1: _FROM_1 + _FROM_2, 2: _FROM_2}.get(version, _CREATE)
        connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {SCHEMA}; COMMIT;")
    return connection


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return True
    try:
        with contextlib.closing(_connect(path)) as connection:
            _version(connection)
            # quick_check does not compare the index with the rows.
            return connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    except _DAMAGED:
        return False


def _salvage(path: Path) -> list[tuple]:
    """The rows of a damaged file, as far as they can be read."""
    rows: list[tuple] = []
    for columns in (COLUMNS, _SECOND_SCHEMA, _FIRST_SCHEMA):
        with contextlib.suppress(sqlite3.Error, UnicodeDecodeError), contextlib.closing(_connect(path)) as connection:
            connection.execute("PRAGMA writable_schema = ON")  # else a file is refused that is shorter than it says
            found = connection.execute(f"SELECT {', '.join(columns)} FROM measurement NOT INDEXED")
            for row in found:
                rows.append((*row, *_SINCE[len(columns) - len(_FIRST_SCHEMA) :]))
        if rows:
            break
    return [row for row in rows if all(value is not None for value in (*row[:6], row[7], row[8]))]


@contextlib.contextmanager
def _locked(path: Path, seconds: float | None = None) -> Iterator[None]:
    """Holds `<path>.lock`; the kernel releases it when the process dies. TimeoutError (an OSError) after `seconds`, by
    default a minute.
    """
    seconds = LOCK_SECONDS if seconds is None else seconds
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path}.lock is held for more than {seconds:.0f} s") from None
                time.sleep(random.uniform(0.001, 0.01))
            except OSError as why:
                if why.errno not in _NO_LOCKS:
                    raise
                break  # a file system without locks: SQLite's own must do
        yield
    finally:
        with contextlib.suppress(OSError):  # else a child that was forked meanwhile keeps the lock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _warn(text: str) -> None:
    warnings.warn(text, WinnersWarning, stacklevel=6)
