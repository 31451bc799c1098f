"""`python -m tests.tuning_many STORE LOGS COUNT SEARCHES ENDLESS`: forks COUNT processes that tune into one store.

Each writes to LOGS/<number> what the store has acknowledged, a row a line; `<number> <process id>` is printed for each.
Those of the comma-separated numbers ENDLESS go on after their SEARCHES until they are killed. The program ends when all
have ended; its status is the number of those that failed by themselves.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from cutegemm.problem import Problem
from cutegemm.tuner.child import _die_with_parent
from cutegemm.tuner.search import Options, Search
from cutegemm.winners import Measurement, Winners
from tests.tuning_fakes import FakeCompiler, FakeTimer, space


class LoggedWinners(Winners):
    """Writes down every row that `record` has returned for."""

    def __init__(self, path: str, log: int) -> None:
        super().__init__(path)
        self._log = log

    def record(self, *rows: Measurement) -> None:
        super().record(*rows)
        os.write(self._log, "".join(f"{row.problem}|{row.config}|{row.kind}\n" for row in rows).encode())


def tune(store: str, log: Path, number: int, searches: Iterable[int]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    winners = LoggedWinners(store, descriptor)
    for turn in searches:
        # Every second problem is tuned by all, the others by this process alone.
        problem = Problem.of(64 if turn % 2 else 128 + number, 64, 64 + turn)
        candidates = space(12)
        timer = FakeTimer({candidates[(number + turn) % 12].key: 0.5e-3})
        Search(problem, candidates, timer, FakeCompiler(), winners, Options(heat=2)).run()


def main() -> int:
    store, logs, count, searches = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    endless = set(map(int, sys.argv[5].split(",")))
    children = []
    _die_with_parent()
    for number in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _die_with_parent()
                tune(store, logs / str(number), number, itertools.count() if number in endless else range(searches))
                status = 0
            finally:
                os._exit(status)
        children.append(child)
        print(number, child, flush=True)
    failed = 0
    for child in children:
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        failed += status != 0 and not killed
    return failed


if __name__ == "__main__":
    sys.exit(main())
