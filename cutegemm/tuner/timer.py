"""Who checks and times candidates: the interface, and the process that owns a GPU seen from outside.

`python -m cutegemm.tuner.gpu_process INDEX` is that process; see there for how it checks and times. A candidate that
hangs or ruins the CUDA context costs that process, which is replaced, and is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cutegemm.tuner.child import Child, ChildDied, ChildError

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem
    from cutegemm.tuner.space import Candidate

TORCH = ("torch", "")
"""The key of torch's own product among the times."""

START_SECONDS = 180.0
OPEN_SECONDS = 180.0


class TimerLost(RuntimeError):
    """The timer broke while it was timing these candidates together and has been replaced; any may be the culprit."""


class TimerBroken(RuntimeError):
    """The timer cannot serve this problem at all; the message says why."""


@dataclass(frozen=True)
class Check:
    """verdict: "ok", "wrong: ..." or "failed to run: ...". seconds: of the one launch, about; inf when it failed."""

    verdict: str
    seconds: float = float("inf")


class Timer(Protocol):
    """Checks and times the candidates of one problem at a time."""

    @property
    def arch(self) -> Arch: ...

    def open(self, problem: Problem) -> None:
        """Makes inputs and reference. Raises TimerBroken."""

    def check(self, candidate: Candidate, timeout: float) -> Check:
        """Runs the candidate once on a poisoned output and compares; a hang ends after `timeout` seconds."""

    def time(
        self, candidates: Sequence[Candidate], rounds: int, block_seconds: float
    ) -> Mapping[tuple[str, str], float]:
        """Seconds a call of each candidate by key, and of torch under `TORCH`: medians over rounds of one block each
        in turn, after a warm-up. block_seconds: 0 for one graph replay a block. A `spread.Seconds` also has the
        times of its rounds. Raises TimerLost."""

    def close(self) -> None: ...


class GpuProcess:
    """A `Timer` whose work is done by a process of its own on one GPU.

    Args:
        index: of the GPU, as torch counts them in this environment.
        module: what the process runs.

    Raises TimerBroken when the process cannot use the GPU (at first use).
    """

    def __init__(self, index: int = 0, module: str = "cutegemm.tuner.gpu_process") -> None:
        self._index, self._module = index, module
        self._problem: Problem | None = None
        self._arch: Arch | None = None
        self._child: Child | None = Child(module, str(index))
        self.state = ""

    @property
    def arch(self) -> Arch:
        if self._arch is None:
            self._greet()
        assert self._arch is not None
        return self._arch

    def open(self, problem: Problem) -> None:
        self._problem = None
        try:
            self._running().call("open", problem, timeout=OPEN_SECONDS)
        except (ChildDied, ChildError) as why:
            self.close()
            raise TimerBroken(f"{problem}: {why}") from why
        self._problem = problem

    def check(self, candidate: Candidate, timeout: float) -> Check:
        try:
            return Check(*self._running().call("check", *candidate.key, timeout=timeout))
        except ChildError as why:
            return Check(f"failed to run: {why}")
        except ChildDied as why:
            self._recover()
            return Check(f"failed to run: {why}")

    def time(
        self, candidates: Sequence[Candidate], rounds: int, block_seconds: float
    ) -> Mapping[tuple[str, str], float]:
        timeout = 30 + (rounds + 2) * (len(candidates) + 1) * (block_seconds + 0.1)
        keys = [candidate.key for candidate in candidates]
        try:
            return self._running().call("time", keys, rounds, block_seconds, timeout=timeout)
        except (ChildDied, ChildError) as why:
            self._recover()
            raise TimerLost(str(why)) from why

    def describe(self) -> str:
        """GPU, driver, clocks and power in a line."""
        said = ""
        for _ in range(2):
            try:
                return self._running().call("state", timeout=30)
            except ChildError as why:
                return str(why)
            except ChildDied as why:
                # One that replaced another in a thread of a sweep ends with that thread, perhaps only now.
                said = str(why)
        return said

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def __enter__(self) -> GpuProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _running(self) -> Child:
        if self._child is not None and not self._child.alive:
            self._recover()  # it ended between two calls
        if self._child is None:
            self._child = Child(self._module, str(self._index))
        if self._arch is None:
            self._greet()
        return self._child

    def _greet(self) -> None:
        child = self._child or Child(self._module, str(self._index))
        self._child = child
        try:
            self._arch = child.call("arch", timeout=START_SECONDS)
        except (ChildDied, ChildError) as why:
            self.close()
            raise TimerBroken(f"GPU {self._index} cannot be used: {why}") from why

    def _recover(self) -> None:
        """A new process with the same problem open."""
        problem = self._problem
        self.close()
        if problem is not None:
            self.open(problem)
