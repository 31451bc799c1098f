"""cp.async (non-bulk): copies from global to shared memory in commit groups, and their waits.

With a seed the bytes land when the group is waited for, the latest legal moment, or when an mbarrier arrival of
cp.async.mbarrier
needs them; without one they land at issue. The happens-before clocks treat them as asynchronous either way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutegemm.emulator.errors import OutOfBounds
from cutegemm.emulator.ops.groups import RING, Groups
from cutegemm.emulator.ops.loadstore import SHIFT, active, align_check, fail, global_parts, shared_bytes
from cutegemm.emulator.ptx import Imm, Instr
from cutegemm.emulator.translate import Gen, emits, runtime


class Copies(Groups):
    """cp.async state of a wave: per warp the number of committed groups and their commit times, and pending copies."""

    def __init__(self, wave: Any) -> None:
        super().__init__(wave)
        self.pending: list[_Pending] = []

    def land(self, c0: int, c1: int, w0: int, w1: int, upto: np.ndarray) -> None:
        """Write the pending bytes of groups below ``upto`` [c, w] of the warps in the box."""
        left = []
        for p in self.pending:
            c, w = p.cta, p.warp
            inside = (c >= c0) & (c < c1) & (w >= w0) & (w < w1)
            if inside.any():
                due = inside.copy()
                due[inside] = p.group[inside] < upto[c[inside] - c0, w[inside] - w0]
                p.write(self.wave, due)
                if due.all():
                    continue
                p.drop(due)
            left.append(p)
        self.pending = left


class _Pending:
    """One cp.async instruction of many lanes, not landed yet."""

    def __init__(self, offset, size, source, copied, cta, warp, group) -> None:
        self.offset, self.size, self.source, self.copied = offset, size, source, copied
        self.cta, self.warp, self.group = cta, warp, group

    def write(self, wave: Any, due: np.ndarray) -> None:
        if due.all():
            land(wave, self.offset, self.size, self.source, self.copied)
        elif due.any():
            copied = None if self.copied is None else self.copied[due]
            land(wave, self.offset[due], self.size, _narrow(self.source, due), copied)

    def drop(self, gone: np.ndarray) -> None:
        keep = ~gone
        self.source = _narrow(self.source, keep)
        for name in ("offset", "cta", "warp", "group", "copied"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value[keep])


def _narrow(source: list, keep: np.ndarray) -> list:
    """The sources of the lanes in ``keep``, counted among those lanes."""
    rank = np.cumsum(keep) - 1
    out: list = []
    for interval, which, a in source:
        if isinstance(which, slice):
            out.append((interval, which, a[keep]))
        elif keep[which].any():
            out.append((interval, rank[which[keep[which]]], a[keep[which]]))
    return out


def land(wave: Any, offset: np.ndarray, size: int, source: list, copied: np.ndarray | None) -> None:
    """Copy ``size`` bytes per lane into shared memory; ``copied`` < size zero-fills the rest of a lane's bytes."""
    if not source:
        wave.smem[size][offset >> SHIFT[size]] = 0
        return
    if len(source) == 1 and isinstance(source[0][1], slice):
        interval, _, a = source[0]
        values = interval.views[size].take(a >> SHIFT[size])
    else:
        values = np.zeros(len(offset), wave.smem[size].dtype)
        for interval, which, a in source:
            values[which] = interval.views[size].take(a >> SHIFT[size])
    if copied is not None:
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1, size)
        raw[np.arange(size) >= copied[:, None]] = 0
        values = raw.view(wave.smem[size].dtype).reshape(-1)
    wave.smem[size][offset >> SHIFT[size]] = values


@emits("cp.async")
def cp_async(g: Gen, i: Instr) -> None:
    env = g.program.env
    env.uses.add("copy")
    part = i.parts[2]
    if part == "commit_group":
        g.line(f"X.wave.env.copies.commit(X, {g.mask})")
    elif part == "wait_group":
        g.line(f"copy_wait(X, {g.mask}, {i.operands[0].value})")
    elif part == "wait_all":
        g.line(f"copy_wait(X, {g.mask}, -1)")
    elif part == "mbarrier":
        from cutegemm.emulator.ops import mbarrier

        mbarrier.copy_arrive(g, i)
    elif part in ("ca", "cg"):
        if "ignore-src" in i.op:
            raise g.unsupported()
        ops = i.addressed
        size = ops[2].value if isinstance(ops[2], Imm) else 0
        if size not in ((4, 8, 16) if part == "ca" else (16,)):
            raise g.unsupported(f"cp.async.{part} of {size} bytes")
        dst, src = g.address(ops[0], "u4"), g.address(ops[1], "u8")
        env.note_access("shared", size)
        count = "None"
        if len(ops) > 3 and getattr(ops[3], "cls", "") == "p":  # ignore-src: where it holds, zeros are written
            count = f"np.where({g.src(ops[3], 'p')}, np.uint32(0), np.uint32({size}))"
        elif len(ops) > 3:
            count = g.src(ops[3], "u4")
        g.line(f"copy_async(X, {g.me}, {g.mask}, {dst}, {src}, {size}, {count})")
    else:
        raise g.unsupported()


@runtime
def copy_async(X, I, mask, dst, src, size, count):
    arrays = [dst, src] if count is None else [dst, src, count]
    lanes, flat = active(X, mask, *arrays)
    d, s = flat[0], np.ascontiguousarray(flat[1])
    if not len(d):
        return
    wave = X.wave
    env = wave.env
    offset = shared_bytes(X, I, d, lanes, size, "write by cp.async")
    if size > 1:
        align_check(X, I, s, size, lanes, "global read by cp.async")
    copied = flat[2] if count is not None else None
    if copied is not None:
        if (copied > size).any():
            n = int(np.argmax(copied > size))
            fail(X, I, OutOfBounds, lanes, n, f"cp.async of {size} bytes with a source size of {int(copied[n])}")
        if (copied == size).all():
            copied = None
    if copied is None:
        parts = global_parts(X, I, s, lanes, size, write=False, align=False)
        source = [(i, w, s[w].view(np.int64) - i.origin) for i, w in parts]
    else:
        used = np.flatnonzero(copied > 0)
        source = []
        if len(used):
            # only the bytes asked for must lie inside a tensor; the view itself is padded to 16 bytes
            low = s[used]
            full = copied[used] == size
            lanes_used = used if lanes is None else lanes[used]
            for exact in (True, False):
                pick = full if exact else ~full
                if pick.any():
                    n = size if exact else 1
                    for i, w in global_parts(
                        X, I, np.ascontiguousarray(low[pick]), lanes_used[pick], n, write=False, align=False
                    ):
                        which = used[pick][w]
                        source.append((i, which, s[which].view(np.int64) - i.origin))
            if len(used) == len(s) and len({id(i) for i, _, _ in source}) == 1:
                i = source[0][0]
                source = [(i, slice(None), s.view(np.int64) - i.origin)]
            else:
                source = _spread(source, len(s))
    if env.hb is not None:
        env.hb.write(X, I, offset, size, lanes, kind="copy")
    if env.profile is not None:
        env.profile.copy(X, I, s, offset, size, lanes, copied)
    env.progressed = True
    if env.rng is None:
        land(wave, offset, size, source, copied)
        return
    cta, warp = X.cta_of_lane.reshape(-1), X.warp_of_lane.reshape(-1) % wave.W
    if lanes is not None:
        cta, warp = cta[lanes], warp[lanes]
    copies = env.copies
    copies.pending.append(_Pending(offset, size, source, copied, cta, warp, copies.committed[cta, warp]))


def _spread(source: list, n: int) -> list:
    """Give every lane a source address in one tensor: lanes that copy nothing read any valid place and are zeroed."""
    intervals = {id(i): i for i, _, _ in source}
    if len(intervals) != 1:
        return source
    interval = source[0][0]
    address: np.ndarray = np.full(n, source[0][2][0], np.int64)
    for _, which, a in source:
        address[which] = a
    return [(interval, slice(None), address)]


@runtime
def copy_wait(X, mask, allowed):
    """Wait until at most ``allowed`` groups are pending; -1 waits for every cp.async, committed or not."""
    wave = X.wave
    copies = wave.env.copies
    committed = copies.committed[X.at]
    upto = committed - max(allowed, 0) if allowed >= 0 else committed + 1
    if mask is not None:
        upto = np.where(mask.any(-1), upto, 0)
    if copies.pending:
        copies.land(X.c0, X.c1, X.w0, X.w1, upto)
    hb = wave.env.hb
    wave.env.progressed = True
    if hb is None:
        return
    last = np.minimum(upto, committed) - 1
    c, w = np.ogrid[X.c0 : X.c1, X.w0 : X.w1]
    time = np.where(last >= 0, copies.time[c, w, np.maximum(last, 0) % RING], 0)
    if allowed < 0:
        time = np.where(upto > committed, wave.now, time)
        wave.now += 1
    c, w = np.broadcast_arrays(c, w)
    hb.async_done("copy", c.ravel(), w.ravel(), time.ravel().astype(np.int32))
