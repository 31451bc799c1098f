"""Measured configurations: one row a measurement; the fastest right one of a problem is its winner.

The rows lie in an SQLite file in the user's cache directory (`CUTEGEMM_CACHE_DIR` moves it; `file` says what
can befall it). Tables shipped with the package (`table`) stand behind it: a configuration that the user
measured counts with the user's row.

A row that is no measurement of a configuration valid today, or whose configuration only a call may name, never decides
either (`rules`): `explain` and `python -m tuning.winners list` say why.

A row made from other kernel sources, or by another compiler, than today's is stale (`fingerprint`): a user's
stale row never decides what `gemm` runs, it is only a candidate that the next sweep times again. A stale row of a
shipped table still names a configuration, and its `origin` says that it was measured with other kernels.

    row           a measurement; which of several is the winner
    rules         which measurements may decide
    table, file   the shipped tables; the user's SQLite file, which `store` reads and writes
    fingerprint   of kernel sources and compiler
    reader        the winner of a problem, remembered while the file stays as it is; `neighbours`, those of near shapes
"""

from __future__ import annotations

from cutegemm.winners.file import SCHEMA, WinnersWarning
from cutegemm.winners.reader import (
    deciding,
    lookup,
    lookup_both,
    noticed,
    own_rows,
    passed_over,
    state,
    switched_off,
)  # fmt: skip
from cutegemm.winners.row import KINDS, STALE_ORIGIN, Measurement, pick, standing
from cutegemm.winners.store import Winners, default_path

__all__ = [
    "KINDS", "SCHEMA", "STALE_ORIGIN", "Measurement", "Winners", "WinnersWarning", "deciding", "default_path", "lookup",
    "lookup_both", "noticed", "own_rows", "passed_over", "pick", "standing", "state", "switched_off",
]  # fmt: skip
