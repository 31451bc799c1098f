"""The winner that decides what `gemm` runs: the user's rows over those of the shipped table.

What is read of the user's file is kept in memory, a signature's rows at a time. `state` says whether that may be out of
date: it looks at the environment and at the file's size and time stamp, so that it sees what other processes write.
`CUTEGEMM_WINNERS=off` makes `lookup` find nothing.
"""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cutegemm import locks
from cutegemm.problem.text import other_16_bit
from cutegemm.run.environment import is_off, variable
from cutegemm.winners import file, table
from cutegemm.winners.fingerprint import is_fresh
from cutegemm.winners.row import STALE_ORIGIN, Measurement, pick
from cutegemm.winners.rules import why_passed_over
from cutegemm.winners.store import Winners, default_path

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem


def deciding(own: Iterable[Measurement], shipped: Iterable[Measurement]) -> list[Measurement]:
    """The rows that may decide what `gemm` runs, for `pick`: the user's fresh ones, and behind them the shipped ones of
    problems that no sweep of the user's has finished, and configurations that the user did not measure.
    """
    fresh = [row for row in own if row.kind != "family" and is_fresh(row) and why_passed_over(row) is None]
    measured = {(row.problem, row.backend, row.config): row.ok for row in fresh}  # as its latest row says
    finals = [row for row in fresh if row.kind == "final" and row.ok]
    finished = {(r.problem, r.backend) for r in finals if measured[r.problem, r.backend, r.config]}
    rest = (row for row in shipped if (row.problem, row.backend) not in finished)
    rest = (row for row in rest if (row.problem, row.backend, row.config) not in measured)
    return [*(row for row in rest if row.kind != "family" and why_passed_over(row) is None), *fresh]


def switched_off() -> bool:
    """Whether `CUTEGEMM_WINNERS` says that nothing measured counts. Raises ValueError unless it is unset, on or off."""
    return is_off("CUTEGEMM_WINNERS")


def state() -> object:
    """A value that differs from the one before when `lookup` may answer otherwise: after the file changed (by whatever
    process), or `CUTEGEMM_WINNERS` or `CUTEGEMM_CACHE_DIR`. Some microseconds.
    """
    _reader()
    return _noticed


def noticed() -> object:
    """`state()` as it was when this module last looked: it costs nothing."""
    return _noticed


def lookup(problem: Problem, arch: Arch) -> Measurement | None:
    """The winner of a problem on a GPU: fresh rows of the user's store over those of the shipped table.

    Remembered within the process, and read again when the file changes: some microseconds a call.
    """
    reader = _reader()
    if reader is None:
        return None
    return reader.winner(arch.name, arch.sm_count, problem.sizes, str(problem.signature))


def lookup_both(problem: Problem, arch: Arch, known: object = None) -> tuple[Measurement | None, Measurement | None]:
    """`lookup` of a problem, and of the same in bf16 for fp16 and in fp16 for bf16, which run alike; the second is None
    for other types.

    Args:
        known: `state()`, from a caller who has just asked for it.
    """
    reader = _reader() if known is None or known != _noticed else _current if known != OFF else None
    if reader is None:
        return None, None
    sizes, signature = problem.sizes, str(problem.signature)
    other = _other_16_bit(signature)
    own = reader.winner(arch.name, arch.sm_count, sizes, signature)
    return own, reader.winner(arch.name, arch.sm_count, sizes, other) if other != signature else None


def own_rows(*signatures: str) -> list[Measurement]:
    """The rows of the default store whose problems have one of these signatures, oldest first within each problem;
    none with `CUTEGEMM_WINNERS=off`. Remembered as what `lookup` finds is.
    """
    reader = _reader()
    if reader is None:
        return []
    known = (reader.rows_of(signature) for signature in dict.fromkeys(signatures))
    return [row for by_problem in known for rows in by_problem.values() for row in rows]


@functools.lru_cache(maxsize=256)
def _other_16_bit(signature: str) -> str:
    return other_16_bit(signature)


def passed_over(problem: Problem, arch: Arch) -> list[tuple[Measurement, str]]:
    """(row, why it does not decide) of the right, timed and fresh rows of a problem that `lookup` passes over, because
    they are not valid or only a call may name their configuration; fastest first.
    """
    reader = _reader()
    if reader is None:
        return []
    text = str(problem)
    own = reader.rows_of(str(problem.signature)).get(text, ())
    rows = [*own, *table.shipped(arch.name, arch.sm_count).get(text, ())]
    here = [row for row in rows if (row.gpu, row.sm_count) == (arch.name, arch.sm_count)]
    right = [row for row in here if row.ok and row.kind != "family" and is_fresh(row)]
    found = [(row, why) for row in right if (why := why_passed_over(row)) is not None]
    return sorted(found, key=lambda pair: pair[0].seconds or 0.0)


class _Reader:
    """The winners of one store and the shipped tables, remembered while the file stays as it is."""

    SETTLED_NS = 50_000_000
    """A file changed less than this ago may change again within the resolution of its time stamp."""
    LOOK_NS = 500_000
    """The file is looked at so often at most: asking the system costs a new shape some microseconds of a hundred. What
    this process itself has written is seen at once."""
    HELD_SECONDS = 1.0
    """How long a call waits for a process that holds the file, once: writing takes milliseconds, unless that process
    was stopped meanwhile."""
    ASK_NS = 500_000_000
    """How often it is asked whether a file that was held is free."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._store = Winners(path)
        self._found: dict[tuple[str, int, str], dict[str, Measurement | None]] = {}
        self._rows: dict[str, dict[str, list[Measurement]]] = {}
        self._stamp: object = object()
        self._looked, self._writes = 0, -1
        self.version = 0
        """Names what is remembered now."""
        self._lock = locks.reentrant()
        self._held = False
        """Whether another process holds the file: then nothing is read, until it is free again."""
        self._asked = 0

    def refresh(self) -> None:
        """Forgets what was read when the file has changed since."""
        now, writes = time.monotonic_ns(), file.writes
        if now - self._looked < self.LOOK_NS and self._writes == writes:
            return
        stamp = self._store.stamp()
        freed = self._held and self._is_free(now)
        if freed or stamp != self._stamp:
            with self._lock:
                if freed or stamp != self._stamp:
                    self._held = self._held and not freed
                    self._found, self._rows = {}, {}
                    unsettled = isinstance(stamp, tuple) and time.time_ns() - stamp[2] < self.SETTLED_NS
                    self._stamp = object() if unsettled else stamp
                    self.version = next(_versions)
        # Only now: another thread must not take what is being forgotten for what the file holds.
        self._looked, self._writes = now, writes

    def _is_free(self, now: int) -> bool:
        """Whether a file that was held is free, as far as it was asked."""
        if now - self._asked < self.ASK_NS:
            return False
        self._asked = now
        return not self._store.is_held()

    def winner(self, gpu: str, sm_count: int, sizes: str, signature: str) -> Measurement | None:
        """The winner of the problem with these texts. Of most problems nothing is known, which two look-ups tell."""
        winners = self._found.get((gpu, sm_count, signature))
        if winners is None:
            winners = self._winners(gpu, sm_count, signature)
        found = winners.get(sizes)
        if found is _NOT_PICKED:
            with self._lock:
                found = winners[sizes] = self._search(gpu, sm_count, f"{sizes} {signature}")
        return found

    def _winners(self, gpu: str, sm_count: int, signature: str) -> dict[str, Measurement | None]:
        """The winners of a signature by sizes; those that nobody asked for yet are still to be picked."""
        with self._lock:
            problems = [*self.rows_of(signature), *table.shipped(gpu, sm_count)]
            sizes = (problem.removesuffix(f" {signature}") for problem in problems if problem.endswith(f" {signature}"))
            found = self._found[gpu, sm_count, signature] = dict.fromkeys(sizes, _NOT_PICKED)
        return found

    def rows_of(self, signature: str) -> dict[str, list[Measurement]]:
        """The user's rows by problem, of the problems with that signature: one query for all of them."""
        known = self._rows.get(signature)
        if known is None:
            with self._lock:
                known = {}
                for row in self._read(signature):
                    known.setdefault(row.problem, []).append(row)
                self._rows[signature] = known
        return known

    def _read(self, signature: str) -> list[Measurement]:
        """A signature's rows of the file; none while another process holds it, with one warning."""
        if self._held:
            return []
        try:
            return self._store.rows_ending(signature, seconds=self.HELD_SECONDS)
        except file.WinnersHeld:
            self._held, self._asked = True, time.monotonic_ns()
            warnings.warn(
                f"winners: another process has held {self.path} for {self.HELD_SECONDS:g} s (is it stopped?); the "
                "shipped table decides until the file is free",
                file.WinnersWarning,
                stacklevel=2,
            )
            return []

    def _search(self, gpu: str, sm_count: int, problem: str) -> Measurement | None:
        rows = self.rows_of(problem.split(" ", 1)[-1]).get(problem, ())
        shipped = table.shipped(gpu, sm_count).get(problem, ())
        own = (row for row in rows if (row.gpu, row.sm_count) == (gpu, sm_count))
        best = pick(deciding(own, shipped))
        if best is not None and best.origin == "shipped" and not is_fresh(best):
            best = replace(best, origin=STALE_ORIGIN)
        return best


_NOT_PICKED = Measurement("", 0, "", "", "", "", None, "")
_current: _Reader | None = None
_noticed: object = None
OFF = "off"
"""`state()` where nothing measured counts."""
_versions = itertools.count(1)
"""One count for all readers: no two of them, nor two states of one, have the same number."""


def _reader() -> _Reader | None:
    """The reader of the default store, up to date; None where nothing measured counts. Made at first use, again when
    `CUTEGEMM_CACHE_DIR` changed.
    """
    global _current, _noticed
    if switched_off():
        _noticed = OFF
        return None
    named = variable("CUTEGEMM_CACHE_DIR")
    path = _path_for(named) if not named or named[0] == "/" else default_path()
    reader = _current
    if reader is None or (reader.path is not path and reader.path != path):
        reader = _current = _Reader(path)
    reader.refresh()
    _noticed = reader.version
    return reader


@functools.lru_cache(maxsize=16)
def _path_for(named: str | None) -> Path:
    """`default_path()` while `CUTEGEMM_CACHE_DIR` is this text, which must not depend on the working directory."""
    return default_path()
