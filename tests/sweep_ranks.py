"""`python -m tests.sweep_ranks FOLDER COUNT`: one process of a shared sweep whose GPU and compiler are stand-ins.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which one, as torchrun does. It tunes COUNT problems, each for some
tenths of a second, into FOLDER/<rank>.sqlite3. What it searches stands in FOLDER/<rank>.log, a problem a line. The rank
in HANGS never ends its second search, and the others wait until it has begun it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from cutegemm.problem import Problem
from cutegemm.tuner import report, run, shared
from cutegemm.tuner.search import Options
from cutegemm.winners import Winners
from tests.tuning_fakes import H200, FakeCompiler, FakeTimer, candidate

SECONDS = 0.15
"""Of a search."""
TIMES = {"beat_s": 0.2, "lost_s": 1.5, "poll_s": 0.1}


def problems(count: int) -> list[Problem]:
    return [Problem.of(64, 64, 64 * (number + 1)) for number in range(count)]


class Timer(FakeTimer):
    """Takes its time for a problem, and writes down which."""

    def __init__(self, log: Path, hangs: bool) -> None:
        super().__init__({})
        self._log, self._hangs = log, hangs

    def open(self, problem: Problem) -> None:
        with self._log.open("a") as file:
            file.write(f"{problem}\n")
        super().open(problem)
        time.sleep(SECONDS)
        while self._hangs and len(self.opened) == 2:
            time.sleep(1.0)
        # Whichever comes up first, nobody finishes anything before the one that hangs does.
        waits_for = os.environ.get("HANGS", self._log.stem)
        while waits_for != self._log.stem and _lines(self._log.with_name(f"{waits_for}.log")) < 2:
            time.sleep(0.05)


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def main() -> int:
    folder, wanted = Path(sys.argv[1]), problems(int(sys.argv[2]))
    rank = os.environ["RANK"]
    store = Winners(folder / f"{rank}.sqlite3")
    timer = Timer(folder / f"{rank}.log", os.environ.get("HANGS") == rank)
    names = [candidate("sm90/64x64x64/coop1/c1x1/s4/row"), candidate("sm90/64x128x64/coop1/c1x1/s4/row")]
    with shared.Gathering(wanted, store, H200.name, H200.sm_count, **TIMES) as part:
        own = run.run(
            wanted, ["cute"], [timer], FakeCompiler(), store, Options(budget=5.0), ranker=lambda *_: [],
            first=lambda *_: names, seeded=False, claims=part.claims,
        )  # fmt: skip
        outcomes = part.outcomes(own)
    if rank == "0":
        print(report.table(outcomes, H200))
        print(f"gathered {sum(outcome.winner is not None for outcome in outcomes)} of {len(wanted)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
