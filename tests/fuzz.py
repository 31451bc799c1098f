"""Random problems through the real kernels, each checked against the float64 reference.

    python -m tests.fuzz --count 10000 --seed 1                 on the GPU
    python -m tests.fuzz --count 200 --seed 1 --device cpu      in the emulator
    python -m tests.fuzz --seed 1 --only 4711                   one problem of that run again, alone

Over the whole space that `gemm` takes: see `fuzz_draw`. Each result is checked elementwise, bytes around it and all
inputs must be untouched, and every fourth problem runs twice, for the same bits. Problems share kernels (`--kernels`),
which are compiled first in parallel processes (`fuzz_kernels`). A problem that fails is printed as a program that
repeats it. Problems run in processes of their own: one that crashes, hangs or breaks the CUDA context costs one
restart.

Exit status: 0 when all problems were right, 1 when one was wrong or a kernel did not compile, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

import torch

from cutegemm.choice import plan
from cutegemm.hardware.arch import Arch
from tests import forked, fuzz_kernels
from tests.fuzz_draw import CPU, CUDA, Pair, draw
from tests.fuzz_kernels import SHARES, Slot
from tests.fuzz_spec import Spec
from tests.options import whole

HANG_S = 120.0
"""A problem that gave no answer for this long counts as hanging."""

START_S = 600.0
"""How long a process may take until its first problem: it imports torch and makes a CUDA context."""

MOST_RESTARTS = 20

MOST_SHOWN = 5
"""Failures printed in full; of further ones a line. `--report` has all."""


@dataclass
class Run:
    """What one invocation runs. `options`: those of the command that decide the slots and problems."""

    seed: int
    device: str
    slots: list[Slot]
    arch: Arch
    options: str = ""

    def problem(self, number: int) -> tuple[Spec, Pair, str]:
        rng = random.Random(f"{self.seed}:{number}")
        limits = CUDA if self.device == "cuda" else CPU
        while True:
            slot = rng.choice(self.slots)
            found = draw(slot.template, rng, limits, self.arch, slot.pairs)
            if found is not None:
                return *found, slot.kind


@dataclass
class Tally:
    """What came out so far."""

    right: int = 0
    left_out: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    report: TextIO | None = None

    def fail(self, headline: str, text: str, kernel: str | None = None) -> None:
        """Counts a failure and tells it."""
        self.failures.append(headline)
        if kernel is not None:
            self.kernels[kernel] += 1
        shown = len(self.failures) <= MOST_SHOWN
        print(f"\n{headline}\n{text}" if shown else headline, flush=True)
        if self.report is not None:
            print(f"{headline}\n{text}\n", file=self.report, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=whole, default=10000, help="problems (default %(default)s)")
    parser.add_argument("--seed", type=whole, help="decides everything; by default a fresh one, printed")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu: in the emulator (default without a GPU)")
    parser.add_argument("--only", type=whole, metavar="N", help="problem N of the run alone")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop after this long, compiling included")
    parser.add_argument("--kernels", type=int, help="about so many kernels (default 120, in the emulator 24)")
    parser.add_argument("--kinds", help=f"of kernels (default {','.join(SHARES)})")
    parser.add_argument("--workers", type=int, help="processes that run problems (default 4 on a GPU, else 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="writes every failure in full")
    parser.add_argument("--jobs", type=int, help="processes that compile (default: cores, 14 at most)")
    args = parser.parse_args(argv)
    kinds = tuple(args.kinds.split(",")) if args.kinds else tuple(SHARES)
    if set(kinds) - set(SHARES):
        parser.error(f"--kinds: got {args.kinds!r}, accepted are {','.join(SHARES)}")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    forked.check_device(parser, device)
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(3), "little")
    begun = time.monotonic()
    arch = Arch.of_device() if device == "cuda" else plan.emulated_arch()
    kernels = args.kernels or (120 if device == "cuda" else 24)
    usable = tuple(kind for kind in kinds if _usable(kind, arch))
    slots = fuzz_kernels.choose(seed, kernels, CUDA if device == "cuda" else CPU, arch, usable)
    if not slots:
        parser.error(f"--kinds: nothing of {','.join(kinds)} can run here")
    named = [f"--{name} {value}" for name, value in (("kernels", args.kernels), ("kinds", args.kinds)) if value]
    run = Run(seed, device, slots, arch, " ".join((f"--seed {seed} --device {device}", *named)))
    print(f"seed {seed}, {arch.name} {'' if device == 'cuda' else '(emulated)'}, {len(slots)} templates", flush=True)
    if args.only is not None:
        return _one(run, args.only)

    jobs = args.jobs or min(os.cpu_count() or 1, 14)
    limit = args.time_limit * 0.6 if args.time_limit else None
    broken = fuzz_kernels.compile_all(slots, arch, jobs, limit)
    compiled = time.monotonic() - begun
    tally = Tally(report=args.report.open("w") if args.report else None)
    for pair, why in broken.items():
        if why != fuzz_kernels.LATE:
            tally.fail(f"NOT COMPILED {pair}", f"  {why}")
    count = len({pair for slot in slots for pair in slot.pairs})
    print(f"{count - len(broken)} kernels ready after {compiled:.0f} s", flush=True)
    deadline = begun + args.time_limit if args.time_limit else None
    workers = args.workers or (4 if device == "cuda" else 1)
    finished = _drive(run, args.count, workers, frozenset(broken), deadline, tally)
    seconds = time.monotonic() - begun
    uncompiled = sum(why != fuzz_kernels.LATE for why in broken.values())
    wrong = len(tally.failures) - uncompiled
    ran = tally.right + wrong
    print(f"\n{ran} of {args.count} problems in {seconds:.0f} s ({compiled:.0f} s of it compiling), seed {seed}")
    if tally.left_out:
        print(f"left out: {tally.left_out} problems of kernels that were not compiled")
    if not finished:
        print("stopped by the time limit")
    print("  " + ", ".join(f"{kind} {number}" for kind, number in sorted(tally.kinds.items())))
    for kernel, number in tally.kernels.most_common():
        print(f"  wrong {number} times: {kernel}")
    print(f"  right: {tally.right}; wrong: {wrong}; largest error {tally.worst:.3f} of the bound")
    return 1 if tally.failures else 0


def _usable(kind: str, arch: Arch) -> bool:
    """Whether kernels of a kind can be compiled here; says so when not."""
    why = None
    if kind == "sm90" and arch.capability != (9, 0):
        why = f"{arch.name} is no Hopper GPU"
    if kind == "cutlass2x":
        from cutegemm.cutlass2x import toolkit
        from cutegemm.errors import GemmError

        try:
            toolkit.find()
        except GemmError as error:
            why = str(error)
    if why:
        print(f"left out: {kind} ({why})")
    return why is None


def _one(run: Run, number: int) -> int:
    spec, pair, kind = run.problem(number)
    print(f"problem {number} ({kind}): {pair}\n\n{spec.snippet()}")
    print(f"right; largest error {spec.check():.3f} of the bound")
    return 0


def _drive(run: Run, count: int, workers: int, broken: frozenset[Pair], deadline: float | None, tally: Tally) -> bool:
    """Problems 0 to count - 1 in `workers` processes, number by number in turn. False when the deadline came first."""
    crew = {index: _Worker(run, index, range(index, count, workers), broken) for index in range(workers)}
    restarts, shown = 0, time.monotonic()
    try:
        while crew:
            wait([worker.pipe for worker in crew.values()], timeout=1.0)
            now = time.monotonic()
            for index, worker in list(crew.items()):
                state = worker.collect(tally, now)
                if state == "done":
                    worker.stop()
                    del crew[index]
                elif state == "lost":
                    worker.stop()
                    restarts += 1
                    rest = worker.rest()
                    del crew[index]
                    if rest and restarts <= MOST_RESTARTS:
                        crew[index] = _Worker(run, index, rest, broken)
                    elif rest:
                        tally.fail(f"GIVEN UP after {restarts} restarts", f"  {len(rest)} problems did not run")
            if deadline is not None and now > deadline:
                return False
            if now - shown > 10:
                shown = now
                print(f"{tally.right} right, {len(tally.failures)} wrong", file=sys.stderr, flush=True)
    finally:
        for worker in crew.values():
            worker.stop()
    return True


class _Worker:
    """A process that runs problems and tells each one's outcome."""

    def __init__(self, run: Run, index: int, numbers: range, broken: frozenset[Pair]) -> None:
        context = forked.context()
        self.pipe, theirs = context.Pipe(duplex=False)
        self._numbers, self._current, self._run = numbers, None, run
        self._since = time.monotonic()
        self._process = context.Process(target=_work, args=(theirs, run, numbers, broken), daemon=True)
        self._process.start()
        theirs.close()

    def collect(self, tally: Tally, now: float) -> str:
        """Takes in what the process told; "done", "lost" (it crashed, hangs, or broke its CUDA context) or "going"."""
        try:
            while self.pipe.poll():
                what, *more = self.pipe.recv()
                self._since = now
                if what == "begin":
                    self._current = more[0]
                elif what == "right":
                    kind, ratio = more
                    tally.right += 1
                    tally.kinds[kind] += 1
                    tally.worst = max(tally.worst, ratio)
                elif what == "left out":
                    tally.left_out += 1
                elif what == "wrong":
                    self._report(tally, more[0])
                    if more[1]:
                        return "lost"
                elif what == "done":
                    return "done"
        except (EOFError, OSError):
            self._process.join(10)
            self._report(tally, f"the process died (exit code {self._process.exitcode})")
            return "lost"
        limit = START_S if self._current is None else HANG_S
        if now - self._since > limit:
            self._report(tally, f"no answer for {limit:.0f} s")
            return "lost"
        return "going"

    def rest(self) -> range:
        """The numbers behind the current one; all when there was none yet."""
        if self._current is None:
            return self._numbers
        place = self._numbers.index(self._current)
        return self._numbers[place + 1 :]

    def stop(self) -> None:
        self._process.kill()
        self._process.join(30)
        self.pipe.close()

    def _report(self, tally: Tally, why: str) -> None:
        run = self._run
        if self._current is None:
            tally.fail("WRONG before the first problem", f"  {why}")
            return
        spec, pair, _ = run.problem(self._current)
        again = f"python -m tests.fuzz {run.options} --only {self._current}"
        tally.fail(f"WRONG {self._current}: {pair}", f"  {why}\n  again: {again}; or\n\n{spec.snippet()}", str(pair))


def _work(pipe: Connection, run: Run, numbers: range, broken: frozenset[Pair]) -> None:
    torch.set_num_threads(1)
    for number in numbers:
        pipe.send(("begin", number))
        try:
            spec, pair, kind = run.problem(number)
            if pair in broken:
                pipe.send(("left out",))
            else:
                pipe.send(("right", kind, spec.check(repeat=number % 4 == 0)))
        except Exception as why:
            pipe.send(("wrong", _told(why), _context_is_broken(run.device)))
    pipe.send(("done",))


def _told(why: Exception) -> str:
    if isinstance(why, AssertionError):
        return str(why)
    return "".join(traceback.format_exception(why)[-3:]).strip()


def _context_is_broken(device: str) -> Any:
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
