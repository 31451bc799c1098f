"""The address spaces: host memory as the GPU's global memory, and the windows of a generic address.

Global addresses are the host addresses of the mapped arrays, so that parameters captured from a host launcher
can be used as they are. Every access must fall inside one mapped interval.
"""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutegemm.emulator.errors import OutOfBounds, ReadOnlyWrite

#: A generic 64-bit address: the upper bits name the space, below are the address in it. Global memory is the rest.
SHARED_WINDOW = 1 << 60
LOCAL_WINDOW = 1 << 61
PARAM_WINDOW = 3 << 60
CONST_WINDOW = 1 << 62
WINDOW_MASK = 7 << 60
#: CTA rank in its cluster, in the upper bits of a 32-bit shared::cluster address
RANK_SHIFT = 24
#: First byte of a CTA's shared memory; what lies below is the system's on sm_90, and catches null addresses
SHARED_BASE = 1024


@dataclass(frozen=True)
class Interval:
    """One mapped array: ``size`` bytes from ``start``."""

    name: str
    start: int
    size: int
    writable: bool
    keep: Any  # the array, so that it lives as long as the mapping
    origin: int  # start rounded down to 16: what the views count from
    views: dict  # bytes per element -> array over [origin, ...)

    @property
    def end(self) -> int:
        return self.start + self.size


def _views(start: int, size: int) -> tuple[int, dict]:
    origin = start & ~15
    length = (start + size - origin + 15) & ~15
    raw = np.frombuffer((ctypes.c_uint8 * length).from_address(origin), np.uint8)
    return origin, {
        1: raw, 2: raw.view(np.uint16), 4: raw.view(np.uint32), 8: raw.view(np.uint64),
        16: raw.view(np.complex128),
    }  # fmt: skip


def _byte_bounds(array: np.ndarray) -> tuple[int, int]:
    if not array.size:
        return 0, 0
    reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    low = array.ctypes.data + sum(r for r in reach if r < 0)
    return low, array.ctypes.data + sum(r for r in reach if r > 0) + array.itemsize


class Memory:
    """The global address space of a launch: the arrays it may touch.

    ``map`` registers an array; a kernel that touches anything else, or writes what is not writable, raises.
    """

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._starts: list[int] = []
        self._last: Interval | None = None

    def map(self, array_or_tensor: Any, *, name: str, writable: bool = True) -> int:
        """Register a numpy array or a torch CPU tensor (its whole storage) and return its first element's address.

        The array must be contiguous, or a strided view: the interval is from its lowest to its highest byte.
        Raises ValueError where the interval overlaps one that is mapped already under another name.
        """
        if isinstance(array_or_tensor, np.ndarray):
            low, high = _byte_bounds(array_or_tensor)
            address = array_or_tensor.ctypes.data
            writable = writable and array_or_tensor.flags.writeable
        elif hasattr(array_or_tensor, "untyped_storage"):
            if array_or_tensor.device.type != "cpu":
                raise ValueError(
                    f"{name}: only tensors in host memory can be mapped, got one on {array_or_tensor.device}"
                )
            storage = array_or_tensor.untyped_storage()
            low = storage.data_ptr()
            high = low + storage.nbytes()
            address = array_or_tensor.data_ptr()
        else:
            raise TypeError(f"{name}: expected a numpy array or a torch tensor, got {type(array_or_tensor).__name__}")
        if high > low:
            self.map_address(low, high - low, name=name, writable=writable, keep=array_or_tensor)
        return address

    def map_address(self, start: int, size: int, *, name: str, writable: bool = True, keep: Any = None) -> None:
        """Register ``size`` bytes at a host address. The caller keeps that memory alive (or passes its owner)."""
        at = bisect.bisect_right(self._starts, start)
        for other in self.intervals[max(0, at - 1) : at + 1]:
            if start < other.end and other.start < start + size:
                if other.start == start and other.size == size:
                    writable = writable or other.writable
                    name = other.name if other.name == name else f"{other.name}/{name}"
                    del self.intervals[at - 1], self._starts[at - 1]
                    at -= 1
                    break
                raise ValueError(f"{name}: [{start:#x}, {start + size:#x}) overlaps {other.name}, mapped already")
        origin, views = _views(start, size)
        self.intervals.insert(at, Interval(name, start, size, writable, keep, origin, views))
        self._starts.insert(at, start)
        self._last = None

    def find(self, address: int) -> Interval | None:
        last = self._last
        if last is not None and last.start <= address < last.end:
            return last
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0 and address < self.intervals[at].end:
            self._last = self.intervals[at]
            return self._last
        return None

    def describe(self, address: int) -> str:
        """Where an address lies, for a message."""
        at = bisect.bisect_right(self._starts, address) - 1
        near = []
        if at >= 0:
            i = self.intervals[at]
            near.append(f"{address - i.start} bytes from the start of {i.name!r}, which has {i.size}")
        if at + 1 < len(self.intervals):
            i = self.intervals[at + 1]
            near.append(f"{i.start - address} bytes before {i.name!r}")
        return "; ".join(near) or "nothing is mapped"

    def check(self, address: int, size: int, *, write: bool) -> Interval:
        """The interval that holds all of [address, address + size); raises OutOfBounds or ReadOnlyWrite."""
        found = self.find(address)
        if found is None or address + size > found.end:
            raise OutOfBounds(
                f"global {'write' if write else 'read'} of {size} bytes at {address:#x}: {self.describe(address)}"
            )
        if write and not found.writable:
            raise ReadOnlyWrite(f"global write of {size} bytes at {address:#x} into {found.name!r}, mapped read-only")
        return found

    def lookup(self, addresses: np.ndarray, size: int, *, write: bool) -> list[tuple[Interval, Any]]:
        """Split int64 addresses (each of ``size`` bytes) by interval: [(interval, which)], where ``which`` is
        slice(None) when all lie in one. Raises a bare OutOfBounds / ReadOnlyWrite whose ``element`` attribute is the
        index of the first offender."""
        low, high = int(addresses.min()), int(addresses.max())
        found = self.find(low)
        if found is not None and high + size <= found.end and (found.writable or not write):
            return [(found, slice(None))]
        starts = np.array(self._starts, np.int64)
        ends = np.array([i.end for i in self.intervals], np.int64)
        at = np.searchsorted(starts, addresses, side="right") - 1
        bad = (at < 0) | (addresses + size > ends[np.maximum(at, 0)]) if len(starts) else np.ones(len(addresses), bool)
        if bad.any():
            element = int(np.argmax(bad))
            address = int(addresses[element])
            what = "write" if write else "read"
            error = OutOfBounds(f"global {what} of {size} bytes at {address:#x}: {self.describe(address)}")
            error.element = element  # type: ignore[attr-defined]
            raise error
        out = []
        for i in np.unique(at):
            interval = self.intervals[i]
            which = np.nonzero(at == i)[0]
            if write and not interval.writable:
                address = int(addresses[which[0]])
                ro = ReadOnlyWrite(
                    f"global write of {size} bytes at {address:#x} into {interval.name!r}, mapped read-only"
                )
                ro.element = int(which[0])  # type: ignore[attr-defined]
                raise ro
            out.append((interval, which))
        return out
