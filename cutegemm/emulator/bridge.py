"""From torch CPU tensors to an emulated run: memory bounds, launches in order, an estimate first, progress on the way.

A backend hands over the PTX of a kernel, what its host code launched (captured by `capture.py` or `nvcc_capture.py`, or
packed by a kernel of NVRTC itself), and the tensors that those launches may touch:

    launches = kernel.capture(problem, Operands(a.data_ptr(), ...), Scalars())
    emulate(kernel.ptx, launches, {"a": a, "b": b, "d": d}, outputs={"d"}, flops=problem.flops)

Addresses in the launches are host addresses, so nothing is copied. Each tensor's bounds are those of the elements that
it can reach, not of the storage that it is a view of: a read one row past a view is found.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from cutegemm.emulator.launch import Launch, Memset
from cutegemm.run.progress import Bars

if TYPE_CHECKING:
    from cutegemm.emulator import Checks, Memory, Module, Report

log = logging.getLogger("cutegemm.emulator")

ANNOUNCE_SECONDS = 60.0
"""A run expected to take longer than this logs its estimate first."""

# Emulated flop/s by the instruction that does the multiplying: large tiles, all checks on, two cores at 2.x GHz.
# Small tiles are up to five times slower.
_RATES = (("wgmma.mma_async", 1e9), ("mma.sync", 8e8), ("wmma.mma", 4e8), ("fma.rn", 6e7))
_SLOWEST_RATE = 2e7


def emulate(
    ptx: str | Module,
    operations: Iterable[Launch | Memset],
    tensors: Mapping[str, torch.Tensor],
    *,
    outputs: Collection[str] | None = None,
    seed: int | None = None,
    checks: Checks | None = None,
    profile: bool = False,
    progress: bool | None = None,
    flops: float | None = None,
    in_front: Callable[[], None] | None = None,
) -> list[Report]:
    """Runs captured launches and clears in order on CPU tensors; returns one report a launch.

    Args:
        ptx: the PTX text of the kernels (parsed once a text) or a parsed module.
        operations: what the host code asked for, in order.
        tensors: everything that the launches may touch, by name; workspaces too. They are changed in place.
        outputs: names of those that may be written; all when None.
        seed: chooses the timing of asynchronous work and the order of warps; launch i runs with seed + i. When None,
            the environment variable CUTEGEMM_EMULATOR_SEED, or 0.
        checks: what to check; everything when None.
        profile: count instructions, bank conflicts and sectors, see the reports.
        progress: print progress to stderr; when None, for a run of more than a few seconds on a terminal.
        flops: what the launches compute in all, for the estimate; without it none is logged.
        in_front: what a kernel in front of the first launch still does, where that is programmatic: it is done when the
            first thread passes griddepcontrol.wait.

    Operands that `operations` (a `Captured`) names as constant may be read before that wait, and no others.

    Raises:
        EmulationError: the kernel did something wrong; names the PTX line and the thread.
        TypeError, ValueError: a tensor is not in CPU memory, or `outputs` names none of `tensors`.
    """
    from cutegemm.emulator import Checks, Memory, run
    from cutegemm.emulator.in_front import InFront

    if seed is None:
        seed = _environment_seed()
    module = _module(ptx) if isinstance(ptx, str) else ptx
    unknown = set(outputs or ()) - set(tensors)
    if unknown:
        raise ValueError(f"outputs: {', '.join(sorted(unknown))} not among the tensors {', '.join(tensors)}")
    memory = Memory()
    map_tensors(memory, tensors, set(tensors) if outputs is None else set(outputs))
    todo = list(operations)
    constant = [span(tensors[name]) for name in getattr(operations, "constant", ()) if tensors[name].numel()]
    seconds = estimate(module.text, flops) if flops is not None else 0.0
    if flops is not None and seconds > ANNOUNCE_SECONDS:
        log.warning("emulating %.3g Gflop will take about %s", flops / 1e9, _duration(seconds))
    reports: list[Report] = []
    launches = sum(isinstance(operation, Launch) for operation in todo)
    for operation in todo:
        if isinstance(operation, Memset):
            if operation.count:
                memory.check(operation.address, operation.count, write=True)
                ctypes.memset(operation.address, operation.value, operation.count)
            continue
        with Progress(f"launch {len(reports) + 1} of {launches}", progress, seconds / launches) as shown:
            report = run(
                module,
                operation,
                memory,
                seed=seed + len(reports),
                checks=checks if checks is not None else Checks.all(),
                profile=profile,
                progress=shown,
                in_front=InFront(constant, None if reports else in_front),
            )
        reports.append(report)
    return reports


def _environment_seed() -> int:
    name = "CUTEGEMM_EMULATOR_SEED"
    return seed_of(name, os.environ.get(name) or "0")


def seed_of(name: str, text: str) -> int:
    """The seed in the setting of that name. Raises ValueError for what is none."""
    if not (text.isascii() and text.isdecimal()) or int(text) >= 2**63:
        raise ValueError(f"{name}: got {text!r}, accepted is a number of at least 0 and below 2^63")
    return int(text)


def estimate(ptx: str, flops: float) -> float:
    """About how many seconds the emulator needs for ``flops`` operations of this kernel, small tiles apart."""
    return flops / max((rate for name, rate in _RATES if name in ptx), default=_SLOWEST_RATE)


def map_tensors(memory: Memory, tensors: Mapping[str, torch.Tensor], outputs: Collection[str]) -> None:
    """Maps the bytes that each tensor's elements span; tensors that overlap share one interval."""
    spans = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            what = f"a tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: got {what}; the emulator takes CPU tensors")
        if tensor.numel():
            spans.append((*span(tensor), name, name in outputs, tensor))
    spans.sort(key=lambda s: s[:2])
    while spans:
        low, high, name, writable, owner = spans.pop(0)
        names, owners = [name], [owner]
        while spans and spans[0][0] < high:
            _, top, name, also, owner = spans.pop(0)
            high, writable = max(high, top), writable or also
            names.append(name)
            owners.append(owner)
        memory.map_address(low, high - low, name="/".join(names), writable=writable, keep=owners)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a non-empty tensor's elements, and the address behind the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


@functools.lru_cache(maxsize=32)
def _module(ptx: str) -> Module:
    from cutegemm.emulator import parse_module

    return parse_module(ptx)


class Progress:
    """Shows on stderr how far a run is and how long it will still take, once it has taken a few seconds.

    Used as a context and called with (CTAs done, CTAs in all) after every wave of CTAs. A grid of one wave reports
    nothing before its end: a run that is expected to take long shows its time and the estimate from the beginning.

    Args:
        what: names the run.
        wanted: whether to show anything; None for where a bar can be drawn, on a terminal or in a notebook.
        expected: how long the run is expected to take [s].
    """

    QUIET_SECONDS = 3.0

    def __init__(self, what: str, wanted: bool | None, expected: float = 0.0) -> None:
        self.what, self.wanted, self.expected = what, wanted, expected
        self.started = time.monotonic()
        self.announced = expected > ANNOUNCE_SECONDS
        self._bars: Bars | None = None

    def __enter__(self) -> Progress:
        if self.expected > self.QUIET_SECONDS:
            self._show(f"about {_duration(self.expected)}", 0, None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.close()
            self._bars.say(f"{self.what}: ended after {_duration(time.monotonic() - self.started)}")

    def __call__(self, done: int, total: int) -> None:
        elapsed = time.monotonic() - self.started
        if elapsed < self.QUIET_SECONDS or not done or done == total:
            return
        left = elapsed * (total - done) / done
        if not self.announced and elapsed + left > ANNOUNCE_SECONDS:
            self.announced = True
            log.warning("%s: %d of %d CTAs emulated, about %s to go", self.what, done, total, _duration(left))
        self._show(f"{done}/{total} CTAs, {_duration(left)} to go", done, total)

    def _show(self, text: str, done: int, total: int | None) -> None:
        if self.wanted is False:
            return
        if self._bars is None:
            bars = Bars()
            self.wanted = self.wanted or bars.live
            if not self.wanted:
                return
            self._bars = bars
        self._bars.show("", f"{self.what}: {text}", done, total)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
