"""mbarrier objects: init, inval, arrive in all forms, expect_tx, complete_tx, test_wait, try_wait, pending_count.

State is kept apart from shared memory, per (CTA, slot): the bytes of the object itself are not modelled. try_wait
blocks until its phase is complete; with a seed it sometimes gives up early, as its time limit allows. The state
that arrive returns is the number of the phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cutegemm.emulator.errors import MbarrierMisuse
from cutegemm.emulator.happens_before import MBARRIERS
from cutegemm.emulator.memory import SHARED_BASE
from cutegemm.emulator.ops.loadstore import active, fail, shared_bytes
from cutegemm.emulator.ptx import Instr, Sink
from cutegemm.emulator.translate import Gen, emits, runtime, synchronizes

TX_LIMIT = (1 << 20) - 1


@dataclass
class Waiter:
    c: int
    w: int
    lanes: np.ndarray
    cta: int
    slot: int
    parity: int
    instr: Instr


class Mbarriers:
    """All mbarriers of a wave."""

    def __init__(self, wave: Any) -> None:
        self.wave = wave
        C = wave.C
        self.slot_of = np.full(wave.smem_row // 8 + 1, -1, np.int64)  # byte offset / 8 -> slot
        self.offsets: list[int] = []
        self.valid = np.zeros((C, MBARRIERS), bool)
        self.expected = np.zeros((C, MBARRIERS), np.int64)
        self.pending = np.zeros((C, MBARRIERS), np.int64)
        self.tx = np.zeros((C, MBARRIERS), np.int64)
        self.phase = np.zeros((C, MBARRIERS), np.int64)
        self.init_at = np.zeros((C, MBARRIERS), np.int64)
        self.init_by = np.zeros((C, MBARRIERS), np.int64)
        self.init_warp = np.zeros((C, MBARRIERS), np.int64)
        #: whether the asynchronous proxy sees the initialization
        self.fenced_for_tma = np.zeros((C, MBARRIERS), bool)
        self.waiters: list[Waiter] = []
        hb = wave.env.hb
        self.hb = hb
        if hb is not None:
            shape = (C, MBARRIERS, hb.AA)
            self.know, self.fenced = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            self.done_know, self.done_fenced = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            #: knowledge of initializations alone, passed on by fence.mbarrier_init and the cluster barrier
            self.init_know = np.zeros((C, wave.W, hb.AA), np.int32)

    # -- addresses --------------------------------------------------------------------------------------------
    def locate(self, X, I: Instr, addr, lanes, *, create: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(CTA position, slot) of each lane's address."""
        offset = shared_bytes(X, I, addr, lanes, 8, "mbarrier access")
        cta, inside = offset // self.wave.smem_row, offset % self.wave.smem_row
        slot = self.slot_of[inside >> 3]
        if create and (slot < 0).any():
            for byte in np.unique(inside[slot < 0]):
                if len(self.offsets) == MBARRIERS:
                    fail(X, I, MbarrierMisuse, lanes, 0, f"more than {MBARRIERS} mbarriers in a CTA")
                self.slot_of[int(byte) >> 3] = len(self.offsets)
                self.offsets.append(int(byte))
            slot = self.slot_of[inside >> 3]
        if not create:
            bad = (slot < 0) | ~self.valid[cta, slot]
            if bad.any():
                e = int(np.argmax(bad))
                fail(X, I, MbarrierMisuse, lanes, e, f"the mbarrier at {int(inside[e]) + SHARED_BASE:#x} of CTA "
                     f"{self.wave.env.cta_name(self.wave, int(cta[e]))} is not initialized")  # fmt: skip
            self.check_visible(X, I, cta, slot, lanes)
        return cta, slot

    def check_visible(self, X, I, cta, slot, lanes) -> None:
        """An mbarrier is used by warps that its initialization happens before."""
        hb = self.hb
        if hb is None or not hb.checks.races:
            return
        warp = X.warps_of(lanes)
        by, when = self.init_by[cta, slot], self.init_at[cta, slot]
        ok = (hb.know.reshape(-1, hb.AA)[warp, by] >= when) | (self.init_know.reshape(-1, hb.AA)[warp, by] >= when)
        if not ok.all():
            e = int(np.argmin(ok))
            fail(X, I, MbarrierMisuse, lanes, e, f"{self.name(int(cta[e]), int(slot[e]))} is "
                f"used by a warp that nothing orders after its "
                 "initialization (a barrier, or for other CTAs fence.mbarrier_init and a cluster barrier)")  # fmt: skip

    def name(self, cta: int, slot: int) -> str:
        at = self.offsets[slot] + SHARED_BASE
        return f"the mbarrier at {at:#x} of CTA {self.wave.env.cta_name(self.wave, cta)}"

    def fence(self, X, mask) -> None:
        """What the warps have initialized is seen by TMA from here on."""
        warps = X.warp_of_lane.reshape(X.shape)[..., 0]
        warps = warps if mask is None else warps[mask.any(-1)]
        self.fenced_for_tma |= np.isin(self.init_warp, warps)

    # -- counts -----------------------------------------------------------------------------------------------
    def apply(self, cta, slot, arrivals, expect, done, who) -> None:
        """Add arrivals, expected bytes and completed bytes to mbarriers (arrays of one element per event).

        ``who(e)`` raises MbarrierMisuse about event e.
        """
        keys = cta * MBARRIERS + slot
        if len(keys) == 1:
            unique = keys
            inverse: np.ndarray = np.zeros(1, np.int64)
        else:
            unique, inverse = np.unique(keys, return_inverse=True)
        n = len(unique)
        total = np.bincount(inverse, weights=arrivals, minlength=n).astype(np.int64)
        delta = np.bincount(inverse, weights=expect - done, minlength=n).astype(np.int64)
        pending, tx = self.pending.reshape(-1), self.tx.reshape(-1)
        tx[unique] += delta
        pending[unique] -= total
        if (pending[unique] < 0).any():
            k = int(np.argmax(pending[unique] < 0))
            key = int(unique[k])
            who(int(np.argmax(inverse == k)), f"{int(total[k])} arrivals at "
                f"{self.name(*divmod(key, MBARRIERS))}, which waits for "
                f"{int(pending[key] + total[k])} more in this phase")  # fmt: skip
        if (np.abs(tx[unique]) > TX_LIMIT).any():
            k = int(np.argmax(np.abs(tx[unique]) > TX_LIMIT))
            who(
                int(np.argmax(inverse == k)),
                f"the transaction count of {self.name(*divmod(int(unique[k]), MBARRIERS))} "
                f"leaves its range: {int(tx[unique[k]])} bytes",
            )
        full = unique[(pending[unique] == 0) & (tx[unique] == 0)]
        if len(full):
            c, s = full // MBARRIERS, full % MBARRIERS
            self.phase[c, s] += 1
            self.pending[c, s] = self.expected[c, s]
            if self.hb is not None:
                self.done_know[c, s] = self.know[c, s]
                self.done_fenced[c, s] = self.fenced[c, s]
            self.wave.env.events = True
        self.wave.env.progressed = True

    def release(self, warp: np.ndarray, cta: np.ndarray, slot: np.ndarray) -> None:
        """Warps pass what they know to mbarriers."""
        hb = self.hb
        if hb is None:
            return
        first = np.unique((warp * self.wave.C + cta) * MBARRIERS + slot, return_index=True)[1]
        c, w = warp[first] // self.wave.W, warp[first] % self.wave.W
        know, fenced = hb.released(c, w)
        self.join(cta[first], slot[first], know, fenced)

    def join(self, cta, slot, know, fenced) -> None:
        key = cta * MBARRIERS + slot
        order = np.argsort(key, kind="stable")
        key = key[order]
        starts = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
        for table, rows in ((self.know, know), (self.fenced, fenced)):
            most = np.maximum.reduceat(rows[order], starts, axis=0)
            flat = table.reshape(-1, table.shape[-1])
            at = key[starts]
            flat[at] = np.maximum(flat[at], most)

    def acquire(self, warp: np.ndarray, cta: np.ndarray, slot: np.ndarray) -> None:
        hb = self.hb
        if hb is None or not len(warp):
            return
        first = np.unique((warp * self.wave.C + cta) * MBARRIERS + slot, return_index=True)[1]
        warp, cta, slot = warp[first], cta[first], slot[first]
        if len(np.unique(warp)) == len(warp):
            hb.acquire(warp // self.wave.W, warp % self.wave.W, self.done_know[cta, slot], self.done_fenced[cta, slot])
        else:
            for k in range(len(warp)):
                at = slice(k, k + 1)
                c, w = warp[at] // self.wave.W, warp[at] % self.wave.W
                hb.acquire(c, w, self.done_know[cta[at], slot[at]], self.done_fenced[cta[at], slot[at]])

    # -- waiting ----------------------------------------------------------------------------------------------
    def ready(self, cta, slot, parity) -> np.ndarray:
        return (self.phase[cta, slot] & 1) != parity

    def wake(self) -> bool:
        """Let go the warps whose phase is complete; True when there were some."""
        if not self.waiters:
            return False
        cta = np.array([x.cta for x in self.waiters])
        slot = np.array([x.slot for x in self.waiters])
        parity = np.array([x.parity for x in self.waiters])
        ready = self.ready(cta, slot, parity)
        if not ready.any():
            return False
        gone = [x for x, r in zip(self.waiters, ready, strict=True) if r]
        self.waiters = [x for x, r in zip(self.waiters, ready, strict=True) if not r]
        for x in gone:
            self.wave.lane_wait[x.c, x.w] &= ~x.lanes
        pairs = np.unique(np.array([(x.c, x.w) for x in gone]), axis=0)
        self.wave.settle(pairs[:, 0], pairs[:, 1])
        return True

    def describe_wait(self, c: int, w: int) -> str:
        for x in self.waiters:
            if (x.c, x.w) == (c, w):
                got = self.expected[x.cta, x.slot] - self.pending[x.cta, x.slot]
                return (f"waits for parity {x.parity} of {self.name(x.cta, x.slot)} "
                    f"({got} of {self.expected[x.cta, x.slot]} arrivals, "
                        f"{self.tx[x.cta, x.slot]} bytes outstanding): {x.instr.where()}")  # fmt: skip
        return ""


@emits("mbarrier")
def mbarrier(g: Gen, i: Instr) -> None:
    g.program.env.uses.add("mbarrier")
    what = i.parts[1]
    ops = list(i.operands)
    if what == "init":
        g.line(f"mbar_init(X, {g.me}, {g.mask}, {g.address(ops[0], 'u4')}, {g.src(ops[1], 'u4')})")
    elif what == "inval":
        g.line(f"mbar_inval(X, {g.me}, {g.mask}, {g.address(ops[0], 'u4')})")
    elif what in ("arrive", "arrive_drop"):
        dst = ops.pop(0) if not hasattr(ops[0], "base") else Sink()
        addr = g.address(ops[0], "u4")
        amount = g.src(ops[1], "u4") if len(ops) > 1 else "np.uint32(1)"
        expect = "expect_tx" in i.parts
        count, tx = ("np.uint32(1)", amount) if expect else (amount, "np.uint32(0)")
        t = g.let(f"mbar_arrive(X, {g.me}, {g.mask}, {addr}, {count}, {tx}, {what == 'arrive_drop'})")
        if not isinstance(dst, Sink):
            g.assign(dst, t, "u8")
    elif what in ("expect_tx", "complete_tx"):
        g.line(f"mbar_tx(X, {g.me}, {g.mask}, {g.address(ops[0], 'u4')}, {g.src(ops[1], 'u4')}, {what == 'expect_tx'})")
    else:
        raise g.unsupported(f"mbarrier.{what} is not implemented")


def _who(X, I, lanes):
    return lambda e, message: fail(X, I, MbarrierMisuse, lanes, e, message)


@runtime
def mbar_init(X, I, mask, addr, count):
    lanes, (a, n) = active(X, mask, addr, count)
    if not len(a):
        return
    m: Mbarriers = X.wave.env.mbarriers
    cta, slot = m.locate(X, I, a, lanes, create=True)
    who, outside, again = _who(X, I, lanes), (n == 0) | (n > TX_LIMIT), m.valid[cta, slot]
    if outside.any():
        who(int(np.argmax(outside)), "an mbarrier count outside 1..2**20-1")
    if again.any():
        e = int(np.argmax(again))
        who(e, f"{m.name(int(cta[e]), int(slot[e]))} is initialized a second time without mbarrier.inval")
    m.valid[cta, slot] = True
    m.expected[cta, slot] = m.pending[cta, slot] = n
    m.tx[cta, slot] = 0
    m.phase[cta, slot] = 0
    m.init_warp[cta, slot] = X.warps_of(lanes)
    m.fenced_for_tma[cta, slot] = False
    X.wave.env.progressed = True
    if m.hb is not None:
        warp = X.warps_of(lanes)
        m.init_at[cta, slot] = X.wave.now
        m.init_by[cta, slot] = m.hb.self_agent.reshape(-1)[warp]


@runtime
def mbar_inval(X, I, mask, addr):
    lanes, (a,) = active(X, mask, addr)
    if not len(a):
        return
    m: Mbarriers = X.wave.env.mbarriers
    cta, slot = m.locate(X, I, a, lanes)
    waiting = [x for x in m.waiters if ((cta == x.cta) & (slot == x.slot)).any()]
    if waiting:
        _who(X, I, lanes)(0, f"{m.name(waiting[0].cta, waiting[0].slot)} is destroyed while warps wait for it")
    m.valid[cta, slot] = False


@runtime
def mbar_arrive(X, I, mask, addr, count, tx, drop):
    lanes, (a, n, t) = active(X, mask, addr, count, tx)
    state = np.zeros(X.shape, np.uint64)
    if not len(a):
        return state
    m: Mbarriers = X.wave.env.mbarriers
    cta, slot = m.locate(X, I, a, lanes)
    phase = m.phase[cta, slot]
    if lanes is None:
        state = phase.astype(np.uint64).reshape(X.shape)
    else:
        state.reshape(-1)[lanes] = phase
    if not I.has("relaxed"):
        m.release(X.warps_of(lanes), cta, slot)
    if drop:
        np.subtract.at(m.expected, (cta, slot), n.astype(np.int64))
    m.apply(cta, slot, n.astype(np.int64), t.astype(np.int64), 0, _who(X, I, lanes))
    return state


@runtime
def mbar_tx(X, I, mask, addr, tx, expect):
    lanes, (a, t) = active(X, mask, addr, tx)
    if not len(a):
        return
    m: Mbarriers = X.wave.env.mbarriers
    cta, slot = m.locate(X, I, a, lanes)
    zero: np.ndarray = np.zeros(len(a), np.int64)
    t = t.astype(np.int64)
    m.apply(cta, slot, zero, t if expect else zero, zero if expect else t, _who(X, I, lanes))


def copy_arrive(g: Gen, i: Instr) -> None:
    """cp.async.mbarrier.arrive[.noinc]: arrive once all earlier cp.async of the thread are complete."""
    g.program.env.uses.add("mbarrier")
    g.line(f"mbar_copy_arrive(X, {g.me}, {g.mask}, {g.address(i.operands[0], 'u4')}, {i.has('noinc')})")


@runtime
def mbar_copy_arrive(X, I, mask, addr, noinc):
    lanes, (a,) = active(X, mask, addr)
    if not len(a):
        return
    wave = X.wave
    m: Mbarriers = wave.env.mbarriers
    cta, slot = m.locate(X, I, a, lanes)
    copies = wave.env.copies
    on = np.ones(X.shape[:2], bool) if mask is None else mask.any(-1)
    if copies.pending:  # the copies complete, and the arrival with them, at this moment: a legal one
        copies.land(X.c0, X.c1, X.w0, X.w1, np.where(on, copies.committed[X.at] + 1, 0))
    warp = X.warps_of(lanes)
    if m.hb is not None:
        first = np.unique(warp)
        c, w = first // wave.W, first % wave.W
        know, fenced = m.hb.released(c, w)
        agent = m.hb.self_agent[c, w] + m.hb.offset["copy"]
        np.put_along_axis(know, agent[:, None], wave.now, -1)
        wave.now += 1
        where = np.searchsorted(first, warp)
        m.join(cta, slot, know[where], fenced[where])
    if not noinc:  # the pending count grows by the arrival it is about to make
        np.add.at(m.pending, (cta, slot), 1)
    zero: np.ndarray = np.zeros(len(a), np.int64)
    m.apply(cta, slot, zero + 1, zero, zero, _who(X, I, lanes))


@synchronizes("mbarrier.try_wait", "mbarrier.test_wait")
def wait(wave, X, I: Instr, mask, fall: int):
    """Returns the lanes that stay blocked here (try_wait) or none (test_wait)."""
    pred, addr_op, want = I.operands[:3]
    base = X.u8[addr_op.base.index].astype(np.uint32) if addr_op.base.cls == "64" else X.u4[addr_op.base.index]
    addr = base + np.uint32(addr_op.offset & 0xFFFFFFFF)
    if I.has("parity"):
        parity = X.u4[want.index] & np.uint32(1) if hasattr(want, "index") else np.uint32(want.value & 1)
    else:
        parity = (X.u8[want.index] & np.uint64(1)).astype(np.uint32)
    lanes, (a, par) = active(X, mask, addr, parity)
    env = wave.env
    m: Mbarriers = env.mbarriers
    cta, slot = m.locate(X, I, a, lanes)
    par = par.astype(np.int64)
    ready = m.ready(cta, slot, par)
    warp = X.warps_of(lanes)
    m.acquire(warp[ready], cta[ready], slot[ready])
    give_up = I.parts[1] == "test_wait" or (env.rng is not None and not ready.all() and env.rng.random() < 0.2)
    out = X.p[pred.index]
    if ready.all() or give_up:
        if lanes is None:
            out[...] = ready.reshape(X.shape)
        else:
            flat = out.copy().reshape(-1)
            flat[lanes] = ready
            out[...] = flat.reshape(X.shape)
        if ready.all():
            env.progressed = True
        return None, False
    all_lanes = np.arange(X.lanes) if lanes is None else lanes
    good, bad = all_lanes[ready], all_lanes[~ready]
    flat = out.copy().reshape(-1)
    flat[good] = True
    out[...] = flat.reshape(X.shape)
    waiting = np.zeros(X.lanes, bool)
    waiting[bad] = True
    waiting = waiting.reshape(X.shape)
    # one waiter per warp and condition
    key = ((warp[~ready] * wave.C + cta[~ready]) * MBARRIERS + slot[~ready]) * 2 + par[~ready]
    for k in np.unique(key):
        rest, p = divmod(int(k), 2)
        rest, s = divmod(rest, MBARRIERS)
        wid, c_target = divmod(rest, wave.C)
        c, w = divmod(wid, wave.W)
        of: np.ndarray = np.zeros(32, bool)
        of[bad[key == k] % 32] = True
        m.waiters.append(Waiter(c, w, of, c_target, s, p, I))
    return waiting, True
