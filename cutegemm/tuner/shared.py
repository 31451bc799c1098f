"""One sweep by many processes: torchrun starts them on one or several hosts, and its store says who does what.

Every process has the same list of problems. Whoever is free claims the next in the store
(`torch.distributed.TCPStore`), searches it on its own GPU and puts its measurements there. Each process counts up a
number in the store every few seconds; one whose number stands still is taken for dead, and what it had claimed and not
finished is claimed anew. Rank 0 adds all measurements to its winners store at the end; each process also has its own in
the store of its host.

    claim/<problem>    who searches it: "<rank>:<one start of the process>", empty where it was given back
    here/<rank>        which start of the process it is
    beat/<who>         a number that grows while the process lives
    tries/<problem>    processes whose GPU would not do it
    done/<problem>     the outcome and the rows of the winners store, as JSON
    bye/<rank>         set by a process that asks the store nothing more

No clocks are compared: a process measures by its own how long a number has stood still.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from cutegemm import backend as backends
from cutegemm.problem import Problem
from cutegemm.tuner.search import Outcome, Result
from cutegemm.tuner.space import Candidate
from cutegemm.winners import Measurement, Winners
from cutegemm.winners import table as winners_table
from cutegemm.winners.fingerprint import is_fresh
from cutegemm.winners.row import supersedes

BEAT_S = 2.0
"""Seconds between two signs of life of a process."""
LOST_S = 30.0
"""Seconds without a sign after which a process is taken for dead. One that was only slow searches in vain."""
POLL_S = 0.5
"""Seconds between two looks at what others do, for a process that waits."""
CONNECT_S = 120.0
"""Seconds that processes wait for the store: hosts do not start at the same time."""
TRIES = 2
"""Processes whose GPU may fail at a problem before it counts as not to be timed."""


class StoreLost(RuntimeError):
    """The store of the sweep does not answer: the process that has it is gone."""


def of_environment(name: str, default: int) -> int:
    """A whole number that torchrun has put into the environment. Raises ValueError, naming it, for anything else."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"{name}: got {text!r} in the environment, expected a whole number, as torchrun sets it")
    return int(text)


def is_shared() -> bool:
    """Whether this process is one of several that torchrun, or another launcher with its variables, has started."""
    return "RANK" in os.environ and of_environment("WORLD_SIZE", 1) > 1


def connect(problems: Sequence[Problem], **options: Any) -> SharedClaims:
    """The claims of this process, by the environment that torchrun makes: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    torchrun's agent keeps the store; without one rank 0 does. Raises StoreLost where it does not answer, and ValueError
    for a variable that is no number.
    """
    from torch.distributed import PrefixStore, TCPStore

    rank, world = of_environment("RANK", 0), of_environment("WORLD_SIZE", 1)
    host, port = os.environ.get("MASTER_ADDR", "localhost"), of_environment("MASTER_PORT", 29500)
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        base = TCPStore(host, port, None, serves, timedelta(seconds=CONNECT_S), False)
    except (RuntimeError, ValueError) as why:
        raise StoreLost(f"the store at {host}:{port} (MASTER_ADDR, MASTER_PORT) does not answer: {why}") from why
    # Processes that were given different problems must not take one number for two.
    digest = hashlib.sha256("\n".join(map(str, problems)).encode()).hexdigest()[:16]
    return SharedClaims(PrefixStore(f"cutegemm/sweep/{digest}", base), rank, world, len(problems), **options)


class SharedClaims:
    """A `cutegemm.tuner.run.Claims` in a store that all processes see. Safe for threads.

    Args:
        store: a torch.distributed.Store. rank, world: of this process, and of how many. count: problems.
        beat_s, lost_s, poll_s: see `BEAT_S`, `LOST_S`, `POLL_S`.
        message: of an outcome, for those who gather it.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        count: int,
        *,
        message: Callable[[Outcome], str] = lambda outcome: "",
        beat_s: float = BEAT_S,
        lost_s: float = LOST_S,
        poll_s: float = POLL_S,
    ) -> None:
        self.rank, self.world, self._count = rank, world, count
        self.me = f"{rank}:{uuid.uuid4().hex[:12]}"
        self._store, self._message = store, message
        self._beat_s, self._lost_s, self._poll_s = beat_s, lost_s, poll_s
        self._lock = threading.RLock()
        self._mine: set[int] = set()
        self._refused: set[int] = set()
        self._done: set[int] = set()
        self._seen: dict[str, tuple[int, float]] = {}
        self._ended = threading.Event()
        self._begun = time.monotonic()
        self._ask(lambda: self._store.add(f"beat/{self.me}", 1))
        self._ask(lambda: self._store.set(f"here/{rank}", self.me))
        threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    def take(self, stopped: Callable[[], bool] = lambda: False) -> int | None:
        """The number of a problem that is now this process's, None when all are done or others will not give theirs up.

        It waits while others search the last problems: they may die. Raises StoreLost.
        """
        while not stopped():
            with self._lock:
                number, waits = self._look()
            if number is not None or not waits:
                return number
            time.sleep(self._poll_s)
        return None

    def _look(self) -> tuple[int | None, bool]:
        """(a problem claimed now, whether others search some)."""
        waits = False
        for number in range(self._count):
            if number in self._done or number in self._mine:
                continue
            owner = "" if number in self._refused else self._swap(number, "", self.me)
            if owner == self.me:
                self._mine.add(number)
                return number, False
            if self._is_done(number):
                continue
            if number in self._refused:
                owner = self._read(f"claim/{number}")
                waits = waits or (owner not in ("", self.me) and not self._is_lost(owner))
            elif self._is_lost(owner) and self._swap(number, owner, self.me) == self.me:
                self._mine.add(number)
                return number, False
            else:
                waits = True
        return None, waits

    def upcoming(self, number: int) -> int | None:
        """A problem that this process may be given next; others may be quicker."""
        with self._lock:
            taken = self._done | self._mine | self._refused
            return next((other for other in range(number + 1, self._count) if other not in taken), None)

    def finished(self, number: int, outcome: Outcome) -> None:
        """Tells the others that a problem is done, and its outcome."""
        text = self._message(outcome)
        with self._lock:
            self._ask(lambda: self._store.set(f"done/{number}", text))
            self._done.add(number)
            self._mine.discard(number)

    def failed(self, number: int, outcome: Outcome) -> bool:
        """Gives a problem back that this process's GPU would not do; when too many would not, it is done. Returns
        whether this GPU shall try another: not after a second failure, which would cost every problem.
        """
        with self._lock:
            if self._ask(lambda: self._store.add(f"tries/{number}", 1)) >= min(TRIES, self.world):
                self.finished(number, outcome)
            else:
                self._swap(number, self.me, "")
                self._mine.discard(number)
            self._refused.add(number)
            return len(self._refused) < 2

    def gather(self, stopped: Callable[[], bool] = lambda: False) -> dict[int, str]:
        """The messages of the outcomes, by the problem's number, when all are done or nobody is left to do the rest."""
        found: dict[int, str] = {}
        while True:
            with self._lock:
                left = [number for number in range(self._count) if not self._is_done(number)]
                alive = self._others()
            if not left or not alive or stopped():
                break
            time.sleep(self._poll_s)
        for number in range(self._count):
            with self._lock:
                if self._is_done(number):
                    found[number] = self._read(f"done/{number}")
        return found

    def leave(self, wait: bool = False) -> None:
        """This process asks the store nothing more. wait: until all others have said so or are dead, because the store
        may be this process's.
        """
        with suppress(StoreLost):
            with self._lock:
                self._ask(lambda: self._store.set(f"bye/{self.rank}", self.me))
            while wait and self._others():
                time.sleep(self._poll_s)
        self._ended.set()

    def _others(self) -> list[str]:
        """The other processes that live and have not left; for a while also those that have not come yet."""
        found = []
        for rank in range(self.world):
            who, left = self._read(f"here/{rank}"), self._read(f"bye/{rank}")
            if not who and time.monotonic() - self._begun < self._lost_s:
                found.append(f"{rank}:")
            elif who and who not in (self.me, left) and not self._is_lost(who):
                found.append(who)
        return found

    def _read(self, key: str) -> str:
        """A value of the store, empty where there is none."""
        if not self._ask(lambda: self._store.check([key])):
            return ""
        found: bytes = self._ask(lambda: self._store.get(key))
        return found.decode()

    def _is_done(self, number: int) -> bool:
        if number not in self._done and self._ask(lambda: self._store.check([f"done/{number}"])):
            self._done.add(number)
        return number in self._done

    def _is_lost(self, owner: str) -> bool:
        """Whether a process has given no sign for so long, by this process's clock."""
        if owner == self.me:
            return False
        beats, now = self._ask(lambda: self._store.add(f"beat/{owner}", 0)), time.monotonic()
        known = self._seen.get(owner)
        if known is None or known[0] != beats:
            self._seen[owner] = beats, now
            return False
        return now - known[1] > self._lost_s

    def _swap(self, number: int, expected: str, wanted: str) -> str:
        """Writes who has a problem where it is `expected`, empty for nobody; returns who has it then."""
        found: bytes = self._ask(lambda: self._store.compare_set(f"claim/{number}", expected, wanted))
        return found.decode()

    def _live(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                self._ask(lambda: self._store.add(f"beat/{self.me}", 1))
            except StoreLost:
                return  # whoever asks for a problem next says so

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as why:
            raise StoreLost(f"the store of the sweep does not answer: {why}") from why


class Gathering:
    """The part of a process in a shared sweep, from its first claim to the gathered outcomes; a context.

    Raises StoreLost where the store does not answer.
    """

    def __init__(self, problems: Sequence[Problem], store: Winners, gpu: str, sm_count: int, **options: Any) -> None:
        self._problems, self._store = problems, store
        self.claims = connect(
            problems, message=lambda outcome: message_of(outcome, store, gpu, sm_count), **options
        )  # fmt: skip

    def outcomes(self, own: Sequence[Outcome], stopped: Callable[[], bool] = lambda: False) -> list[Outcome]:
        """On rank 0 those of all processes, whose rows then are in its store; elsewhere the process's own."""
        if self.claims.rank != 0:
            return list(own)
        return gathered(self.claims.gather(stopped), self._problems, own, self._store)

    def __enter__(self) -> Gathering:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.claims.leave(wait=self.claims.rank == 0 and kind is None)


def message_of(outcome: Outcome, store: Winners, gpu: str, sm_count: int) -> str:
    """An outcome for the other processes: what the search says, and what is known of the problem on this GPU."""
    rows = [
        row for row in store.rows(str(outcome.problem)) if (row.gpu, row.sm_count) == (gpu, sm_count) and is_fresh(row)
    ]
    said = {name: getattr(outcome, name) for name in ("enumerated", "elapsed", "waited", "ended")}
    return json.dumps({"problem": str(outcome.problem), **said, "rows": winners_table.dump(rows)})


def gathered(
    messages: dict[int, str], problems: Sequence[Problem], own: Sequence[Outcome], store: Winners
) -> list[Outcome]:
    """The outcomes of all processes, in the order of the problems; adds the rows of others to this process's store.

    Raises ValueError for a message that `message_of` did not make.
    """
    mine = {str(outcome.problem): outcome for outcome in own if outcome.searched}
    found = []
    for number, problem in enumerate(problems):
        text = messages.get(number)
        if str(problem) in mine:
            found.append(mine[str(problem)])
        elif text is not None:
            said = json.loads(text)
            if said["problem"] != str(problem):
                raise ValueError(f"problem {number}: another process calls it {said['problem']}, this one {problem}")
            rows = winners_table.load(said["rows"])
            known = {replace(row, origin="") for row in store.rows(str(problem))}
            store.record(*(row for row in rows if replace(row, origin="") not in known))
            found.append(_outcome(problem, said, rows))
    return found


def _outcome(problem: Problem, said: dict[str, Any], rows: Sequence[Measurement]) -> Outcome:
    results: dict[tuple[str, str], Result] = {}
    for row in rows:
        try:
            candidate = Candidate(row.backend, backends.get(row.backend).parse(row.config))
        except ValueError:  # of a host with another version
            continue
        before = results.get(candidate.key)
        if before is None or supersedes(row, before):
            results[candidate.key] = Result(
                candidate, row.verdict, row.seconds, row.reference_seconds, row.kind, row.method
            )
    reference = next((row.reference_seconds for row in reversed(rows) if row.reference_seconds), None)
    return Outcome(
        problem, int(said["enumerated"]), results, reference, float(said["elapsed"]), float(said["waited"]),
        str(said["ended"]),
    )  # fmt: skip
