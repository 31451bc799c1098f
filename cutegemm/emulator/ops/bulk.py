"""What bulk copies are made of: pending copies, shared-memory targets, boxes of tensors, reductions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from cutegemm.emulator import numerics
from cutegemm.emulator.errors import EmulationError, ExitTooEarly, MisalignedAccess, OutOfBounds
from cutegemm.emulator.memory import PARAM_WINDOW, RANK_SHIFT, SHARED_BASE, WINDOW_MASK
from cutegemm.emulator.ops.atomic import step
from cutegemm.emulator.ops.groups import Groups
from cutegemm.emulator.ops.half import half_op
from cutegemm.emulator.tensor_map import TensorMap, decode


class BulkCopies(Groups):
    """Pending bulk loads, and per warp the bulk groups of stores."""

    def __init__(self, wave: Any) -> None:
        super().__init__(wave)
        self.loads: list[list[Callable[[], None]]] = []  # one list per executed instruction
        #: CTA, warp, group, action, instruction
        self.stores: list[tuple[int, int, int, Callable[[], None], Any]] = []

    def complete_some(self, everything: bool) -> bool:
        """Complete one pending load instruction (all its CTAs), or all. False when none is pending."""
        if not self.loads:
            return False
        rng = self.wave.env.rng
        picked = (
            list(range(len(self.loads))) if everything else [rng.randrange(len(self.loads)) if rng is not None else 0]
        )
        for k in reversed(picked):
            for action in self.loads.pop(k):
                action()
        return True

    def finish(self) -> None:
        for store in self.stores:
            store[3]()
        self.stores = []
        while self.complete_some(True):
            pass

    def check_exit(self, gone: np.ndarray) -> None:
        """Raises ExitTooEarly for a bulk store of an exited CTA that nothing waited for: it may still be reading."""
        for c, w, _, _, instr in self.stores:
            if gone[c]:
                raise ExitTooEarly(
                    "the CTA exits while this bulk store may still read its shared memory: "
                    "cp.async.bulk.wait_group(.read) is missing\n"
                    f"  {self.wave.env.thread_name(self.wave, c, w, None)}\n  {instr.where()}",
                    line=instr.line,
                )

    def wait_stores(self, c: int, w: int, upto: int) -> None:
        left = []
        for item in self.stores:
            if item[0] == c and item[1] == w and item[2] < upto:
                item[3]()
            else:
                left.append(item)
        self.stores = left


# -- boxes and addresses ---------------------------------------------------------------------------
class Asker:
    """The thread that asks for a bulk copy: element ``e`` of the lanes of a box that execute the instruction."""

    def __init__(self, X, I, lanes, e: int) -> None:
        self.X, self.I, self.wave = X, I, X.wave
        self.lane = int(e if lanes is None else lanes[e])
        self.c, self.w = divmod(int(X.warp_of_lane.reshape(-1)[self.lane]), X.wave.W)  # CTA position, warp

    def fail(self, kind: type[EmulationError], message: str) -> NoReturn:
        raise kind(f"{message}\n  {self.X.where(self.lane)}\n  {self.I.where()}", line=self.I.line)

    def memory(self, address: int, size: int, *, write: bool, what: str = "") -> Any:
        """The mapped tensor in which these bytes of global memory lie."""
        try:
            return self.wave.memory.check(address, size, write=write)
        except EmulationError as error:
            self.fail(type(error), f"{what}{error}")


def shared_target(by: Asker, address: int, align: int, size: int) -> tuple[int, int]:
    """A shared::cluster address -> (CTA position, byte offset in its shared memory), checked."""
    wave = by.wave
    rank, offset = address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1)
    if wave.cluster_size == 1:
        rank = 0
    if rank >= wave.cluster_size or not SHARED_BASE <= offset <= SHARED_BASE + wave.smem_bytes - size:
        by.fail(
            OutOfBounds,
            f"{size} bytes at shared address {address:#x}: the CTA's shared memory is "
            f"[{SHARED_BASE:#x}, {SHARED_BASE + wave.smem_bytes:#x}), its cluster has {wave.cluster_size} CTAs",
        )
    if offset % align:
        by.fail(MisalignedAccess, f"shared address {address:#x} is no multiple of {align}")
    target = int(wave.first[by.c]) + rank
    if wave.any_gone and wave.gone[target]:
        by.fail(ExitTooEarly, f"CTA {wave.env.cta_name(wave, target)} of its cluster has exited")
    return target, offset - SHARED_BASE


def tensor_map_at(by: Asker, address: int) -> TensorMap:
    env = by.wave.env
    if address & WINDOW_MASK == PARAM_WINDOW or address < len(env.params):
        at = address & 0xFFFFFFFF
        raw = bytes(env.params[at : at + 64])
    else:
        interval = by.wave.memory.check(address, 128, write=False)
        at = address - interval.origin
        raw = interval.views[1][at : at + 64].tobytes()
    if address % 64:
        by.fail(MisalignedAccess, f"a tensor map at {address:#x}, which is no multiple of 64")
    if len(raw) < 64:
        by.fail(OutOfBounds, "a tensor map past the end of the parameters")
    try:
        return decode(raw)
    except EmulationError as error:
        by.fail(EmulationError, str(error))


@functools.lru_cache(maxsize=1024)
def chunk_table(start: int, size: int, swizzle: int) -> np.ndarray:
    """16-byte chunk indices (from the start of the CTA's shared memory) of a box stored from byte ``start``,
    in order.
    """
    at: np.ndarray = np.arange(start + SHARED_BASE, start + SHARED_BASE + size, 16, dtype=np.int64)
    if swizzle:
        at ^= ((at >> 7) & (swizzle // 16 - 1)) << 4
    return (at - SHARED_BASE) >> 4


def box_window(t: TensorMap, coords) -> tuple[list[tuple[int, int]], bool]:
    """Per dimension, innermost first, the part [low, high) of the box that lies inside the tensor; and whether
    any does.
    """
    spans = [(max(0, -x), min(b, d - x)) for x, b, d in zip(coords, t.box, t.dims, strict=True)]
    return spans, all(low < high for low, high in spans)


def tensor_view(by: Asker, t: TensorMap, coords, spans, write: bool) -> np.ndarray:
    """The bytes of the tensor under the box, as an array (outermost dimension, ..., innermost bytes)."""
    es = t.element_bytes
    strides = (es, *t.strides)
    starts = [x + low for x, (low, _) in zip(coords, spans, strict=True)]
    counts = [high - low for low, high in spans]
    # Addresses have 64 bits: a map may rely on what a sum leaves of more (`cute.hopper.clip`).
    first = (t.address + sum(s * st for s, st in zip(starts, strides, strict=True))) % (1 << 64)
    last = first + sum((n - 1) * st for n, st in zip(counts, strides, strict=True)) + es
    lost = "the tensor of this tensor map does not lie inside one mapped tensor: "
    interval = by.memory(first, last - first, write=write, what=lost)
    shape = (*reversed(counts[1:]), counts[0] * es)
    steps = (*reversed(strides[1:]), 1)
    return np.lib.stride_tricks.as_strided(interval.views[1][first - interval.origin :], shape, steps)


def read_box(by: Asker, t: TensorMap, coords) -> np.ndarray:
    """The box as bytes, zero where it leaves the tensor."""
    spans, some = box_window(t, coords)
    es = t.element_bytes
    shape = (*reversed(t.box[1:]), t.box[0] * es)
    whole = all(low == 0 and high == b for (low, high), b in zip(spans, t.box, strict=True))
    if whole:
        found = np.ascontiguousarray(tensor_view(by, t, coords, spans, False)).reshape(-1)
        return _rounded(t, found)
    out: np.ndarray = np.zeros(shape, np.uint8)
    if some:
        inner = spans[0]
        at = (*(slice(low, high) for low, high in reversed(spans[1:])), slice(inner[0] * es, inner[1] * es))
        out[at] = tensor_view(by, t, coords, spans, False)
    return _rounded(t, out.reshape(-1))


def _rounded(t: TensorMap, data: np.ndarray) -> np.ndarray:
    """What a load of that element type leaves in shared memory."""
    return numerics.tf32_bits(data.view(np.float32), "rn").view(np.uint8) if t.to_tf32 else data


def coordinates(values, k: int) -> tuple[int, ...]:
    return tuple(int(v[k]) for v in values)


def check_map(by: Asker, t: TensorMap, coords) -> None:
    inner = t.box[0] * t.element_bytes
    if len(coords) != t.rank:
        by.fail(EmulationError, f"{len(coords)} coordinates for a tensor map of rank {t.rank}")
    if t.swizzle and inner > t.swizzle:
        by.fail(EmulationError, f"a box of {inner} inner bytes with a {t.swizzle} B swizzle")
    if inner % 16:
        by.fail(EmulationError, f"a box of {inner} inner bytes, which is no multiple of 16")
    if coords[0] * t.element_bytes % 16:
        # An H200 reports an illegal instruction; so do others (triton-lang/triton, issue 7385 and pull request 9112).
        what = f"a box that begins at element {coords[0]} of {t.element_bytes} bytes in its rows"
        by.fail(MisalignedAccess, f"{what}, no multiple of 16 bytes")


def write_box(by: Asker, t: TensorMap, coords, reduction, data: np.ndarray) -> None:
    spans, some = box_window(t, coords)
    if not some:
        return
    es = t.element_bytes
    box = data.reshape(*reversed(t.box[1:]), t.box[0] * es)
    at = (*(slice(low, high) for low, high in reversed(spans[1:])), slice(spans[0][0] * es, spans[0][1] * es))
    view = tensor_view(by, t, coords, spans, True)
    if reduction is None:
        view[...] = box[at]
    else:
        old = np.ascontiguousarray(view)
        view[...] = reduced(old, np.ascontiguousarray(box[at]), reduction[0], reduction[1] or t.element)


_WIDE = {"f32": np.float32, "f64": np.float64, "s32": np.int32, "s64": np.int64, "u64": np.uint64, "b64": np.uint64}


def reduced(old: np.ndarray, new: np.ndarray, op: str, t: str) -> np.ndarray:
    half = t in ("f16", "bf16")
    dtype = np.uint16 if half else _WIDE.get(t, np.uint32)
    a: np.ndarray = old.view(dtype)
    b: np.ndarray = new.view(dtype)
    out = half_op(op, t, (), a, b) if half else step(op, t, a, b, None)
    return np.ascontiguousarray(out).view(np.uint8).reshape(old.shape)
