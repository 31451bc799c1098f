"""Races between the lanes of one warp: what one lane writes and another uses needs a bar.warp.sync between.

The lanes of a warp run in step here, on hardware they need not. Per granule of shared memory, `LaneOrder` keeps which
lane wrote it last and which read it last; per warp, the time up to which every lane knows of the other lanes' accesses.
``bar.warp.sync`` moves that time on, and so does all that orders whole warps: CTA and cluster barriers, and a wait
on an mbarrier where the warp itself arrived. shfl, vote, ldmatrix, mma and other ``.sync`` instructions make lanes meet
but order no memory accesses (PTX ISA, memory consistency model), so they do not count. ldmatrix, stmatrix and wmma move
data between lanes: their accesses count as made by all lanes.

Kept is the last reader alone: a write is compared with the most recent read, not with all reads since the barrier.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutegemm.emulator.errors import DataRace

#: in the place of a lane number: several lanes
ALL_LANES = 32
#: no thread of the cluster: bulk copies
NOBODY = np.uint16(0xFFFF)
COLLECTIVE = frozenset(("ldmatrix", "stmatrix", "wmma"))
#: repeats a 16-bit number over the granules of an access
_REPEAT: dict[int, Any] = {1: np.uint16(1), 2: np.uint32(0x00010001), 4: np.uint64(0x0001000100010001)}


class LaneOrder:
    """The lanes' side of a `HappensBefore`. A thread is numbered 64 * (its warp in the cluster) + lane."""

    def __init__(self, hb: Any, granules: int) -> None:
        self.hb = hb
        wave = hb.wave
        self.wrote: np.ndarray = np.full(granules, NOBODY)
        self.read_by: np.ndarray = np.full(granules, NOBODY)
        views = ((1, np.uint16), (2, np.uint32), (4, np.uint64))
        self.wide: dict[int, np.ndarray] = {n: self.read_by.view(t) for n, t in views if hb.g * n <= 16}
        #: [C, W, 2]: up to when all lanes of a warp know each other's ordinary accesses, and each other's cp.async
        self.known: np.ndarray = np.zeros((wave.C, wave.W, 2), np.int32)
        self.oldest: np.ndarray = np.zeros((wave.C, wave.W), np.int32)
        #: [C, W, lane, other lane]: the same by pairs, made once some bar.warp.sync names fewer lanes
        self.pairs: np.ndarray | None = None
        #: lanes that have arrived at a bar.warp.sync whose other lanes stand elsewhere
        self.arrived: dict[tuple[int, int], np.ndarray] = {}

    # -- order ------------------------------------------------------------------------------------------------
    def learn(self, c: Any, w: Any, ordinary: Any, copies: Any) -> None:
        """All lanes of warps (c, w) know each other's accesses up to these times."""
        known = self.known
        known[c, w, 0] = np.maximum(known[c, w, 0], ordinary)
        known[c, w, 1] = np.maximum(known[c, w, 1], copies)
        self.oldest[c, w] = known[c, w].min(-1)

    def acquired(self, c: np.ndarray, w: np.ndarray, know: np.ndarray) -> None:
        """Warps (c, w) take over the clock ``know``, [AA] or one row a warp, which may hold their own release."""
        hb = self.hb
        own = hb.self_agent[c, w]
        copy = own + hb.offset.get("copy", 0)
        if know.ndim == 1:
            self.learn(c, w, know[own], know[copy])
        else:
            row: np.ndarray = np.arange(len(know))
            self.learn(c, w, know[row, own], know[row, copy])

    def warp_sync(self, X: Any, members: Any, on: np.ndarray | None) -> None:
        """bar.warp.sync by the lanes ``on`` (None: all), naming ``members``: a number, or one for each lane."""
        hb, wave = self.hb, self.hb.wave
        now = wave.now
        wave.now += 1
        every = isinstance(members, int) and members & 0xFFFFFFFF == 0xFFFFFFFF
        if on is None and every:
            copies = now
            if "copy" in hb.offset:
                agents = hb.self_agent[X.at] + hb.offset["copy"]
                copies = np.take_along_axis(hb.know[X.at], agents[..., None], -1)[..., 0]
            known = self.known[X.at]
            known[..., 0] = now
            np.maximum(known[..., 1], copies, out=known[..., 1])
            self.oldest[X.at] = known.min(-1)
            return
        active = np.ones(X.shape, bool) if on is None else on
        named = np.broadcast_to(np.uint32(members & 0xFFFFFFFF) if isinstance(members, int) else members, X.shape)
        for k, j in zip(*np.nonzero(active.any(-1)), strict=True):
            c, w = int(k) + X.c0, int(j) + X.w0
            live = wave.live[c, w]
            mask = int(named[k, j][active[k, j]][0])
            wanted = live & ((mask >> np.arange(32)) & 1).astype(bool)
            here = active[k, j] | self.arrived.pop((c, w), np.zeros(32, bool))
            if not (here | ~wanted).all():
                self.arrived[c, w] = here
                continue
            own = int(hb.self_agent[c, w])
            copies = hb.know[c, w, own + hb.offset["copy"]] if "copy" in hb.offset else now
            if (wanted == live).all():
                self.learn(c, w, now, copies)
            else:
                self._learn_pairs(c, w, np.flatnonzero(wanted), now)

    def _learn_pairs(self, c: int, w: int, lanes: np.ndarray, now: int) -> None:
        if self.pairs is None:
            self.pairs = np.zeros((*self.known.shape[:2], 32, 32), np.int32)
        table = self.pairs[c, w]
        joint = table[lanes].max(0)
        joint[lanes] = now
        table[lanes] = np.maximum(table[lanes], joint)

    # -- accesses ---------------------------------------------------------------------------------------------
    def threads(self, X: Any, I: Any, lanes: np.ndarray | None) -> np.ndarray:
        """The numbers of the threads that execute ``I``."""
        together = I.name in COLLECTIVE
        key = "threads together" if together else "threads"
        ids: np.ndarray | None = X._cache.get(key)
        if ids is None:
            wave = self.hb.wave
            warp = (wave.rank[:, None] * wave.W + np.arange(wave.W)).reshape(-1)
            lane = ALL_LANES if together else X.lane_ids.reshape(-1)
            ids = X._cache[key] = (warp[X.warp_of_lane.reshape(-1)] * 64 + lane).astype(np.uint16)
        return ids if lanes is None else ids[lanes]

    def note_read(self, X: Any, I: Any, g: np.ndarray, n: int, lanes: np.ndarray | None) -> None:
        ids = self.threads(X, I, lanes)
        self.read_by[g] = np.repeat(ids, n) if n > 1 else ids

    def note_aligned_read(self, X: Any, I: Any, unit: np.ndarray, n: int, lanes: np.ndarray | None) -> None:
        """`note_read` of ``n`` granules that lie together."""
        view = self.wide[n]
        if lanes is None:
            key = f"{n} {I.name in COLLECTIVE} readers"
            value = X._cache.get(key)
            if value is None:
                value = X._cache[key] = self.threads(X, I, None).astype(view.dtype) * _REPEAT[n]
        else:
            value = self.threads(X, I, lanes).astype(view.dtype) * _REPEAT[n]
        view[unit] = value

    def note_write(self, X: Any, I: Any, g: np.ndarray, n: int, lanes: np.ndarray | None) -> None:
        ids = self.threads(X, I, lanes)
        if n > 1:
            ids = np.repeat(ids, n)
        self.wrote[g] = ids
        several: np.ndarray = self.wrote.take(g) != ids  # another lane wrote there in the same instruction
        if several.any():
            self.wrote[g[several]] = (ids[several] & np.uint16(0xFFC0)) | np.uint16(ALL_LANES)

    def check_read(self, X: Any, I: Any, g: np.ndarray, n: int, warps: np.ndarray, lanes: np.ndarray | None) -> None:
        self._check(X, I, g, n, warps, lanes, self.wrote, self.hb.wrote_at, "a read of what", "wrote")

    def check_write(self, X: Any, I: Any, g: np.ndarray, n: int, warps: np.ndarray, lanes: np.ndarray | None) -> None:
        self._check(X, I, g, n, warps, lanes, self.wrote, self.hb.wrote_at, "a write over what", "wrote")
        self._check(X, I, g, n, warps, lanes, self.read_by, self.hb.read_last, "a write over what", "read")

    def _check(self, X, I, g, n, warps, lanes, threads, times, message: str, verb: str) -> None:
        when = times.take(g)
        recent = when > self.oldest.reshape(-1).take(warps)
        if not recent.any():
            return
        at = np.flatnonzero(recent)
        hb = self.hb
        me = self.threads(X, I, lanes)[at // n]
        by = threads[g[at]]
        several = (me & 63 == ALL_LANES) | (by & 63 == ALL_LANES)
        if verb == "wrote":
            copied = (hb.wrote_by[g[at]] % hb.A >= hb.W).astype(np.int64)
            # one instruction, once more: the same lanes write the same places
            several &= (by != me) | (hb.wrote_line[g[at]] != hb.line_of(I))
        else:
            copied = np.zeros(len(at), np.int64)
        known = self.known.reshape(-1, 2)[warps[at], copied]
        bad = (by >> 6 == me >> 6) & ((by != me) | several) & (when[at] > known)
        if self.pairs is not None:
            bad &= self._unknown_to_pair(warps[at], me & 63, by & 63, when[at])
        if not bad.any():
            return
        k = int(np.argmax(bad))
        e, lane = int(at[k]), int(by[k]) & 63
        who = "several lanes" if lane == ALL_LANES else f"lane {lane}"
        hb.fail(
            X, I, DataRace, g[e], lanes, e // n,
            f"{message} {who} of the same warp {verb}, with no bar.warp.sync between",
            by=int(hb.wrote_by[g[e]]) if verb == "wrote" else None,
        )  # fmt: skip

    def _unknown_to_pair(self, warps, me, by, when) -> np.ndarray:
        assert self.pairs is not None
        table = self.pairs.reshape(-1, 32, 32)
        out: np.ndarray = np.ones(len(me), bool)
        for k, (warp, mine, other) in enumerate(zip(warps, me, by, strict=True)):
            rows = table[warp] if mine == ALL_LANES else table[warp, mine : mine + 1]
            out[k] = (rows if other == ALL_LANES else rows[:, other]).min() < when[k]
        return out
