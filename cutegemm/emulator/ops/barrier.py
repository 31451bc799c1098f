"""CTA barriers (bar, barrier, with and without counts, arrive, red), warp barriers and the cluster barrier."""

from __future__ import annotations

import numpy as np

from cutegemm.emulator.errors import BarrierMisuse
from cutegemm.emulator.ptx import Imm, Instr, Negated, Reg
from cutegemm.emulator.translate import synchronizes


class CtaBarriers:
    """The 16 named barriers of each CTA of a wave, and the cluster barrier."""

    def __init__(self, wave) -> None:
        C, W = wave.C, wave.W
        self.wave = wave
        self.arrived = np.zeros((C, 16), np.int64)  # threads, in whole warps
        self.expected = np.zeros((C, 16), np.int64)  # 0: no arrival in this round yet
        self.counted = np.zeros((C, 16), bool)  # the round was started with an explicit count
        self.waits = np.full((C, W), -1, np.int64)  # barrier id that a warp waits at
        self.lanes = np.zeros((C, W, 32), bool)  # lanes of it that have arrived
        self.line: dict[tuple[int, int], Instr] = {}  # (CTA, warp) -> the instruction it waits at
        self.reduce = np.zeros((C, W, 32), bool)  # predicate each lane brought to a bar.red
        self.red_out: dict[tuple[int, int], Instr] = {}
        clusters = C // wave.cluster_size
        self.cluster_phase = np.zeros(clusters, np.int64)
        self.cluster_arrived = np.zeros((C, W), bool)
        self.warp_phase = np.zeros((C, W), np.int64)  # cluster barrier rounds a warp has arrived at
        self.cluster_waiting: list[tuple[int, int, np.ndarray, Instr]] = []


def _values(X, operand, default: int) -> np.ndarray | int:
    """A barrier operand per warp, or one number for all."""
    if operand is None:
        return default
    if isinstance(operand, Imm):
        return operand.value
    row = X.u4[operand.index]
    first = row[:, :, :1]
    if (row != first).any():
        return -1
    flat = first[:, :, 0].astype(np.int64)
    return int(flat.flat[0]) if (flat == flat.flat[0]).all() else flat


def _describe(I: Instr, message: str, X, c: int, w: int) -> BarrierMisuse:
    return BarrierMisuse(f"{message}\n  {X.wave.env.thread_name(X.wave, c, w, None)}\n  {I.where()}", line=I.line)


@synchronizes("bar", "barrier")
def bar(wave, X, I: Instr, mask, fall: int):
    """bar.sync / bar.arrive / bar.red and the barrier.* spellings. Arrivals count whole warps."""
    if "warp" in I.parts:  # lanes of a warp run in step here: nothing to wait for
        hb = wave.env.hb
        if hb is not None and hb.lanes is not None:
            members = I.operands[0]
            hb.lanes.warp_sync(X, members.value if isinstance(members, Imm) else X.u4[members.index], mask)
        return None, False
    if "cluster" in I.parts:
        return cluster_barrier(wave, X, I, mask)
    arrive, red = "arrive" in I.parts, "red" in I.parts
    ops = I.operands
    if red:
        pred = ops[-1]
        ident, count = ops[1], ops[2] if len(ops) > 3 else None
    else:
        ident, count = ops[0] if ops else None, ops[1] if len(ops) > 1 else None
    ids = _values(X, ident, 0)
    counts = _values(X, count, -2)
    wave.env.progressed = True
    b: CtaBarriers = wave.env.barriers
    on = np.ones(X.shape, bool) if mask is None else mask
    if red:
        p = ~X.p[pred.reg.index] if isinstance(pred, Negated) else X.p[pred.index]
        np.copyto(b.reduce[X.at], p, where=on)
    warps = on.any(-1)
    if mask is not None:
        # a warp arrives when its last live lane does
        seen = b.lanes[X.at]
        seen |= on
        whole = (seen | ~wave.live[X.at]).all(-1) & warps
        seen[whole] = False
    else:
        whole = warps
    wait = on & (not arrive)
    finished: list[tuple[int, int]] = []
    id_grid = np.broadcast_to(ids, warps.shape)
    count_grid = np.broadcast_to(counts, warps.shape)
    if (id_grid[warps] < 0).any() or (id_grid[warps] > 15).any() or (count_grid[warps] == -1).any():
        c, w = (int(v[0]) for v in np.nonzero(warps))
        raise _describe(
            I, "the lanes of a warp name different barriers or counts, or an id outside 0..15", X, X.c0 + c, X.w0 + w
        )
    if not arrive:
        np.copyto(b.waits[X.at], id_grid, where=warps)
        b.line.update(((X.c0 + int(c), X.w0 + int(w)), I) for c, w in zip(*np.nonzero(warps), strict=True))
    if wave.env.hb is not None:
        wave.env.hb.barrier_arrive(X, whole, id_grid)
    if red:
        for c, w in zip(*np.nonzero(warps), strict=True):
            b.red_out[X.c0 + int(c), X.w0 + int(w)] = I
    for ident in np.unique(id_grid[whole]).tolist():
        here = whole & (id_grid == ident)
        for k in np.flatnonzero(here.any(1)):
            cta = X.c0 + int(k)
            counts_here = count_grid[k][here[k]]
            given = int(counts_here[0])
            if (counts_here != given).any():
                raise _describe(
                    I, f"barrier {ident}: warps ask for {sorted(set(counts_here.tolist()))} threads", X, cta, X.w0
                )
            explicit = given >= 0
            if explicit and (given % 32 or given == 0):
                raise _describe(
                    I, f"barrier {ident} with a count of {given}, which is no positive multiple of 32", X, cta, X.w0
                )
            want = given if explicit else 32 * int(wave.live[cta].any(-1).sum())
            if b.expected[cta, ident] and explicit and b.counted[cta, ident] and b.expected[cta, ident] != want:
                before = f"{b.expected[cta, ident]} by the warps that came before"
                raise _describe(I, f"barrier {ident}: {want} threads asked for here, {before}", X, cta, X.w0)
            b.expected[cta, ident], b.counted[cta, ident] = want, explicit
            b.arrived[cta, ident] += 32 * int(here[k].sum())
            if b.arrived[cta, ident] > want:
                found = f"{b.arrived[cta, ident]} threads arrived where {want} are expected"
                raise _describe(I, f"barrier {ident}: {found}", X, cta, X.w0)
            if b.arrived[cta, ident] == want:
                finished.append((cta, ident))
    if finished:
        wait = complete(wave, b, finished, X, wait)
    return (wait, False) if wait.any() else (None, False)


def complete(wave, b: CtaBarriers, finished, X=None, wait=None):
    """Release the warps of finished barriers; returns what is left of ``wait``, the lanes of X about to wait."""
    for cta, ident in finished:
        b.arrived[cta, ident] = b.expected[cta, ident] = 0
        warps = b.waits[cta] == ident
        if wave.env.hb is not None:
            wave.env.hb.barrier_complete(cta, ident, warps)
        red = [w for w in np.flatnonzero(warps) if (cta, int(w)) in b.red_out]
        if red:
            reduce_result(wave, b, cta, [int(w) for w in red])
        b.waits[cta][warps] = -1
        others = warps.copy()
        if X is not None and X.c0 <= cta < X.c1:
            inside = warps[X.w0 : X.w1]
            wait[cta - X.c0][inside] = False
        if (wave.lane_wait[cta] & others[:, None]).any():
            wave.lane_wait[cta][others] = False
            w = np.flatnonzero(others)
            keep = wave.split[cta][w]
            w = w[keep]
            if len(w):
                wave.settle(np.full(len(w), cta), w)
    return wait


def reduce_result(wave, b: CtaBarriers, cta: int, warps: list[int]) -> None:
    """Write the result of bar.red into the destination of each waiting lane."""
    live = wave.live[cta][warps]
    brought = b.reduce[cta][warps]
    for w in warps:
        I = b.red_out.pop((cta, w))
        d = I.operands[0]
        assert isinstance(d, Reg)
        if "popc" in I.parts:
            wave.regs["32"][d.index, cta, w] = int((brought & live).sum())
        elif "and" in I.parts:
            wave.regs["p"][d.index, cta, w] = bool((brought | ~live).all())
        else:
            wave.regs["p"][d.index, cta, w] = bool((brought & live).any())


def after_exit(wave) -> None:
    """Warps that exit no longer count in barriers without an explicit count."""
    b: CtaBarriers = wave.env.barriers
    finished = []
    for cta, ident in zip(*np.nonzero((b.arrived > 0) & ~b.counted), strict=True):
        want = 32 * int(wave.live[cta].any(-1).sum())
        b.expected[cta, ident] = want
        if b.arrived[cta, ident] >= want > 0:
            finished.append((int(cta), int(ident)))
    if finished:
        complete(wave, b, finished)
    if wave.cluster_size > 1:
        cluster_check(wave, b)


# -- the cluster barrier ---------------------------------------------------------------------------------------
def cluster_barrier(wave, X, I: Instr, mask):
    b: CtaBarriers = wave.env.barriers
    on = np.ones(X.shape, bool) if mask is None else mask
    wave.env.progressed = True
    if "arrive" in I.parts:
        warps = on.any(-1)
        again = b.cluster_arrived[X.at] & warps
        if again.any():
            c, w = (int(v[0]) for v in np.nonzero(again))
            raise _describe(I, "a second barrier.cluster.arrive without a wait between", X, X.c0 + c, X.w0 + w)
        b.cluster_arrived[X.at] |= warps
        b.warp_phase[X.at] += warps
        if wave.env.hb is not None:
            wave.env.hb.cluster_arrive(X, warps, release="relaxed" not in I.parts)
        cluster_check(wave, b)
        return None, False
    phase: np.ndarray = np.repeat(b.cluster_phase, wave.cluster_size)[X.c0 : X.c1, None]
    ready = phase >= b.warp_phase[X.at]
    if wave.env.hb is not None:
        wave.env.hb.cluster_wait(X, ready & on.any(-1))
    wait = on & ~ready[:, :, None]
    if not wait.any():
        return None, False
    for c, w in zip(*np.nonzero(wait.any(-1)), strict=True):
        b.cluster_waiting.append((X.c0 + int(c), X.w0 + int(w), wait[c, w].copy(), I))
    return wait, True


def cluster_check(wave, b: CtaBarriers) -> None:
    """Complete the clusters all of whose live warps have arrived, and wake their waiters."""
    n = wave.cluster_size
    alive = wave.live.any(-1)
    full = (b.cluster_arrived | ~alive).reshape(-1, n * wave.W).all(-1) & (
        b.cluster_arrived.reshape(-1, n * wave.W).any(-1)
    )
    if not full.any():
        return
    b.cluster_phase += full
    done: np.ndarray = np.repeat(full, n)
    b.cluster_arrived[done] = False
    if wave.env.hb is not None:
        wave.env.hb.cluster_complete(done)
    left = []
    for c, w, lanes, I in b.cluster_waiting:
        if done[c]:
            wave.lane_wait[c, w][lanes] = False
            wave.settle(np.array([c]), np.array([w]))
        else:
            left.append((c, w, lanes, I))
    b.cluster_waiting = left
