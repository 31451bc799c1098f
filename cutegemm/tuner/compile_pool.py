"""Compiling candidates ahead in processes of their own: `python -m cutegemm.tuner.compile_pool` is one of them.

A worker compiles one configuration after the other into the kernel store; compiling opens no CUDA context.
Importing the compiler takes seconds, so workers stay alive; they start when there is something to compile, and stand
from when they have imported what their first kernel needs. Their number is bounded by the cores and by the memory at
hand. When none comes up the pool is broken: it compiles no more, and says why.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cutegemm.tuner.child import Child, ChildDied, ChildError, serve

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature
    from cutegemm.tuner.space import Candidate

WORKER_BYTES = 1_500_000_000
"""Memory that a worker takes at most, and the compiler that it starts."""
COMPILE_SECONDS = 180.0
START_SECONDS = 120.0
"""In which a worker must stand."""
STARTS = 2
"""Tries to start a worker that dies at it."""
_IMPORTED = {"cute": ("cutlass.cute", "tvm_ffi")}
"""What compiling for a backend imports besides, that takes seconds."""
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""The GPU is not hidden: the CuTe DSL asks the driver about it, which takes tens of seconds where it finds none."""

_CGROUP = Path("/sys/fs/cgroup")

Done = tuple["Candidate", "str | None"]
"""A candidate, and None when its kernel is in the store, else why not."""


class Compiler(Protocol):
    """What a search asks: `CompilePool.session`, or a stand-in of a test."""

    def stored(self, candidate: Candidate) -> bool: ...

    def submit(self, candidate: Candidate) -> None: ...

    def ahead(self, candidates: Iterable[Candidate]) -> None: ...

    def collect(self, timeout: float) -> list[Done]: ...

    @property
    def room(self) -> int: ...

    @property
    def outstanding(self) -> int: ...

    @property
    def standing(self) -> bool:
        """Whether a worker is up that compiles or could."""

    @property
    def broken(self) -> str:
        """Why nothing can be compiled any more; empty while something can, or may once the workers stand."""

    def cancel(self) -> None: ...


@dataclass
class _Job:
    """A kernel to be compiled, and the queues of those who want to know when it is."""

    candidate: Candidate
    signature: Signature
    arch: Arch
    wanted: list[queue.SimpleQueue]

    @property
    def key(self) -> Hashable:
        return self.candidate.key, self.signature, self.arch


class CompilePool:
    """Worker processes that several searches share. What is compiled ahead of its search waits for all else.

    Args:
        jobs: workers at most; by default what `default_jobs` says.
        module: what a worker runs.
    """

    def __init__(self, jobs: int | None = None, module: str = "cutegemm.tuner.compile_pool") -> None:
        self.jobs = max(1, jobs or default_jobs())
        self._module = module
        self._waiting: deque[_Job] = deque()
        self._later: deque[_Job] = deque()
        self._known: dict[Hashable, _Job] = {}  # waiting, for later, or begun
        self._condition = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._children: set[Child] = set()
        self._standing: set[Child] = set()
        self._gave_up = 0  # threads whose worker would not start
        self.broken = ""
        self._idle = 0
        self._closed = False

    def session(self, signature: Signature, arch: Arch) -> CompileSession:
        """The pool as one search sees it."""
        return CompileSession(self, signature, arch)

    @property
    def standing(self) -> bool:
        """Whether a worker has come up and is there still."""
        return bool(self._standing)

    def close(self) -> None:
        """Ends every worker at once; what they were compiling is lost, what they compiled is stored."""
        with self._condition:
            self._closed = True
            self._waiting.clear()
            self._later.clear()
            children = list(self._children)
            self._condition.notify_all()
        for child in children:
            child.kill()
        for thread in self._threads:
            thread.join(15)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, job: _Job, later: bool = False) -> None:
        with self._condition:
            if self._closed:
                raise RuntimeError("the compile pool is closed")
            if self.broken:
                _answer([job], self.broken)
                return
            known = self._known.get(job.key)
            if known is not None:
                known.wanted += job.wanted
                if later or known not in self._later:
                    return
                self._later.remove(known)
                job = known
            self._known[job.key] = job
            (self._later if later else self._waiting).append(job)
            if self._idle < len(self._waiting) + len(self._later) and len(self._threads) < self.jobs:
                thread = threading.Thread(target=self._work, name=f"compile-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._condition.notify()

    def _cancel(self, done: queue.SimpleQueue) -> int:
        """Nobody waits at `done` any more: how many jobs it was waited for that were not begun."""
        dropped = 0
        with self._condition:
            for jobs in (self._waiting, self._later):
                for job in list(jobs):
                    if done in job.wanted:
                        job.wanted.remove(done)
                        dropped += 1
                    if not job.wanted:
                        jobs.remove(job)
                        del self._known[job.key]
        return dropped

    def _work(self) -> None:
        child: Child | None = None
        try:
            while (job := self._take()) is not None:
                if child is None:
                    child, why_not = self._started(job.candidate.backend)
                    if child is None:
                        self._give_up(job, why_not)
                        return
                candidate = job.candidate
                message = (candidate.backend, job.signature, candidate.text, job.arch)
                reason: str | None
                try:
                    reason = child.call("compile", *message, timeout=COMPILE_SECONDS)
                except ChildError as why:
                    reason = str(why)
                except ChildDied as why:
                    reason = f"the compiler's process: {why}"
                    self._discard(child)
                    child = None
                with self._condition:
                    del self._known[job.key]
                _answer([job], reason)
        finally:
            self._discard(child)

    def _started(self, backend: str) -> tuple[Child | None, str]:
        """A worker that stands; or None, and why."""
        why_not = ""
        deadline = time.monotonic() + START_SECONDS
        for _ in range(STARTS):
            if self._closed or time.monotonic() >= deadline:
                break
            child: Child | None = None
            try:
                child = Child(self._module, environment=WORKER_ENVIRONMENT)
                with self._condition:
                    self._children.add(child)
                    if self._closed:
                        child.kill()
                child.call("start", backend, timeout=max(deadline - time.monotonic(), 0.1))
            except (ChildDied, ChildError, OSError) as why:
                why_not = str(why)
                self._discard(child)
                continue
            with self._condition:
                self._standing.add(child)
            return child, ""
        return None, why_not

    def _give_up(self, job: _Job, why_not: str) -> None:
        """Leaves a job, and all to come, to the other threads; the last to give up answers whoever waits."""
        with self._condition:
            if self._closed:
                return
            self._gave_up += 1
            if self._gave_up < len(self._threads):
                self._waiting.appendleft(job)
                self._condition.notify()
                return
            self.broken = f"no compile worker comes up: {why_not}"
            _answer([job, *self._waiting, *self._later], self.broken)
            self._waiting.clear()
            self._later.clear()
            self._known.clear()

    def _take(self) -> _Job | None:
        with self._condition:
            self._idle += 1
            try:
                while not (self._waiting or self._later or self._closed):
                    self._condition.wait()
                return None if self._closed else (self._waiting or self._later).popleft()
            finally:
                self._idle -= 1

    def _discard(self, child: Child | None) -> None:
        if child is not None:
            with self._condition:
                self._children.discard(child)
                self._standing.discard(child)
            child.close()


class CompileSession:
    """A search's share of a pool: what it submitted and gets back."""

    def __init__(self, pool: CompilePool, signature: Signature, arch: Arch) -> None:
        self._pool, self._signature, self._arch = pool, signature, arch
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._ahead: queue.SimpleQueue[Done] = queue.SimpleQueue()  # nobody reads it
        self.outstanding = 0
        """Submitted and not collected yet."""

    def stored(self, candidate: Candidate) -> bool:
        """Whether the kernel is compiled already. May say no where finding out is as dear as asking a worker."""
        return is_stored(candidate, self._signature, self._arch)

    def submit(self, candidate: Candidate) -> None:
        self.outstanding += 1
        self._pool._submit(_Job(candidate, self._signature, self._arch, [self._done]))

    def ahead(self, candidates: Iterable[Candidate]) -> None:
        """Has those that are not stored compiled when no worker has anything else to do; nobody is told."""
        for candidate in candidates:
            if not self.stored(candidate):
                self._pool._submit(_Job(candidate, self._signature, self._arch, [self._ahead]), later=True)

    @property
    def standing(self) -> bool:
        """Whether a worker has come up and is there still."""
        return self._pool.standing

    @property
    def broken(self) -> str:
        """Why nothing can be compiled any more; empty while something can."""
        return self._pool.broken

    @property
    def room(self) -> int:
        """How many more keep every worker busy, and no more: a later choice is a better informed one."""
        return max(0, self._pool.jobs + 2 - self.outstanding)

    def collect(self, timeout: float) -> list[Done]:
        """What is done by now; waits for the first up to `timeout` seconds."""
        found: list[Done] = []
        if self.outstanding == 0:
            return found
        with contextlib.suppress(queue.Empty):
            found.append(self._done.get(timeout=max(timeout, 0.0)) if timeout > 0 else self._done.get_nowait())
            while True:
                found.append(self._done.get_nowait())
        self.outstanding -= len(found)
        return found

    def cancel(self) -> None:
        """Takes back what no worker has begun."""
        self.outstanding -= self._pool._cancel(self._done)
        self._pool._cancel(self._ahead)


def _answer(jobs: Iterable[_Job], reason: str | None) -> None:
    for job in jobs:
        for done in job.wanted:
            done.put((job.candidate, reason))


def is_stored(candidate: Candidate, signature: Signature, arch: Arch) -> bool:
    """Whether the kernel store has the kernel; for backend "cutlass2x", whose files hold several, always False."""
    from cutegemm import backend as backends
    from cutegemm.run import kernel_store

    if candidate.backend == "cutlass2x":
        return False
    try:
        with kernel_store.lookups_only():
            return bool(backends.get(candidate.backend).build(signature, candidate.config, arch).cubin)
    except (kernel_store.NotStored, RuntimeError, ValueError, OSError):
        return False


def default_jobs() -> int:
    """A worker a core but one, as many as the memory holds, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores - 1, available_bytes() // WORKER_BYTES))


def available_bytes() -> int:
    """Memory that can be had without swapping, within the control group's limit; 4 GB where that is unknown.

    Pages of files that nobody uses are counted as the group's, and can be had.
    """
    available = 4_000_000_000
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    with contextlib.suppress(OSError, ValueError, StopIteration):
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        used -= int(next(line for line in lines if line.startswith("inactive_file ")).split()[1])
        available = min(available, max(limit - used, 0))
    return available


def _handle(what: str, backend: str, *rest: Any) -> str | None:
    """A worker's answer: to "start", when it has imported what the backend needs; to "compile", None or why not."""
    if what == "start":
        with contextlib.suppress(Exception):  # compiling will say it, of a kernel
            from cutegemm import backend as backends

            backends.get(backend)
            for module in _IMPORTED.get(backend, ()):
                importlib.import_module(module)
        return None
    return _compile(backend, *rest)


def _compile(backend: str, signature: Any, config: str, arch: Any) -> str | None:
    """Compiles one kernel into the store; None, or why not."""
    from cutegemm import backend as backends

    chosen = backends.get(backend)
    chosen.build(signature, chosen.parse(config), arch).cubin  # noqa: B018  (compiles, where that is put off)
    return None


if __name__ == "__main__":
    serve(_handle)
