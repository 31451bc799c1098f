"""The kernel in front of a programmatic launch: it may still run until a thread has passed ``griddepcontrol.wait``.

A launch with programmatic stream serialization may begin before the kernel in front of it has ended. What that kernel
writes can be read only behind the wait, and what it reads must not be written before. So the wait is an edge of order
between the two kernels, and every access to global memory by a thread that has not waited is reported, unless it reads
what is promised to be constant. Bulk copies belong to the thread that asks for them.

The model is stricter than CUDA in one point: a barrier behind another thread's wait does not count. The kernel in front
ends at the latest moment that is legal, when no thread can go on without; copies that were asked for before take what
lay there then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cutegemm.emulator.errors import BeforeTheWait
from cutegemm.emulator.ptx import target_number


def may_be_early(target: str) -> bool:
    """Whether GPUs of the PTX's target start programmatic launches early: those from compute capability 9.0 on."""
    return target_number(target) >= 90


@dataclass
class InFront:
    """The kernel in front of one launch.

    constant: (first address, address behind the last) of memory that no running kernel writes.
    end: does what that kernel has left to do; it is called once, before the first thread goes on behind the wait.
    """

    constant: Iterable[tuple[int, int]] = ()
    end: Callable[[], None] | None = None
    ended: bool = field(default=False, init=False)

    def start(self, wave: Any) -> None:
        """For the threads of a wave, of which none has waited."""
        own = ((array.ctypes.data, array.ctypes.data + array.nbytes)
               for array in wave.env.translation.variable_arrays.values())  # fmt: skip
        self._spans = [*self.constant, *own]
        self._wave = wave
        self._waited = ~wave.live
        self._waiting = np.zeros_like(self._waited)
        self._all = bool(self._waited.all())

    def wait(self, X: Any, mask: Any) -> np.ndarray | None:
        """griddepcontrol.wait by the lanes of a box: those that must wait, None for none."""
        lanes = np.ones(X.shape, bool) if mask is None else np.broadcast_to(mask, X.shape).copy()
        if not self.ended:
            self._waiting[X.at] |= lanes
            return lanes
        self._waited[X.at] |= lanes
        self._all = bool(self._waited.all())
        return None

    def finish(self) -> bool:
        """No thread can go on: the kernel in front ends now, and who waits for it goes on. False where nobody does."""
        if self.ended:
            return False
        self.ended = True
        if self.end is not None:
            self.end()
        self._waited |= self._waiting
        self._all = bool(self._waited.all())
        self._wave.lane_wait[self._waiting] = False
        warps = np.nonzero(self._waiting.any(-1))
        self._wave.settle(*warps)
        return bool(len(warps[0]))

    def too_early(self, X: Any, lanes: Any) -> np.ndarray | None:
        """Which of the lanes have not waited; None when all have."""
        if self._all:
            return None
        flat = self._waited[X.at].reshape(-1)
        early = ~(flat if lanes is None else flat[lanes])
        return early if early.any() else None

    def is_early(self, by: Any) -> bool:
        """Whether a thread that asks for a bulk copy (`ops.bulk.Asker`) has not waited."""
        return not self._all and not self._waited[by.X.at].reshape(-1)[by.lane]

    def is_constant(self, address: int) -> bool:
        return any(low <= address < high for low, high in self._spans)

    def check(self, X: Any, I: Any, addresses: np.ndarray, lanes: Any, write: bool) -> None:
        """Accesses of lanes to global memory. Raises BeforeTheWait."""
        early = self.too_early(X, lanes)
        if early is None or not self._wave.env.checks.races:
            return
        for element in np.flatnonzero(early):
            address = int(addresses[element])
            if write or not self.is_constant(address):
                lane = int(element if lanes is None else lanes[element])
                self._report(X, I, address, lane, write)

    def check_bulk(self, by: Any, address: int, write: bool) -> None:
        """A bulk copy that a thread asks for. Raises BeforeTheWait."""
        if self._wave.env.checks.races and self.is_early(by) and (write or not self.is_constant(address)):
            self._report(by.X, by.I, address, by.lane, write)

    def _report(self, X: Any, I: Any, address: int, lane: int, write: bool) -> None:
        found = self._wave.memory.find(address)
        what = f"{found.name!r}" if found is not None else f"{address:#x}"
        doing = "a write of" if write else "a read of"
        raise BeforeTheWait(
            f"{doing} {what} before griddepcontrol.wait: the kernel in front may still "
            f"{'use' if write else 'write'} it\n  {X.where(lane)}\n  {I.where()}",
            line=I.line,
        )
