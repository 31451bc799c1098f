"""What warps know of each other's accesses, and how barriers pass it on: one half of `happens_before`."""

from __future__ import annotations

from typing import Any

import numpy as np

FOREVER = np.int32(0x7FFFFFFF)


class Knowledge:
    """The clocks of `HappensBefore`, which sets them up; an agent is a place in their last axis."""

    wave: Any
    env: Any
    W: int
    offset: dict[str, int]
    lanes: Any
    know: np.ndarray
    fenced: np.ndarray
    self_agent: Any
    known_writes: Any
    floor: np.ndarray
    bar_clock: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]
    cluster_next: np.ndarray
    cluster_done: np.ndarray
    init_fenced: np.ndarray
    cluster_init_next: np.ndarray
    cluster_init_done: np.ndarray

    def released(self, c: Any, w: Any) -> tuple[np.ndarray, np.ndarray]:
        """What warps (c, w) pass on: their knowledge, and their own accesses up to now."""
        know = self.know[c, w].copy()
        np.put_along_axis(know, self.self_agent[c, w][..., None], self.wave.now, -1)
        self.wave.now += 1
        return know, self.fenced[c, w]

    def acquire(self, c: Any, w: Any, know: np.ndarray, fenced: np.ndarray) -> None:
        self.know[c, w] = np.maximum(self.know[c, w], know)
        self.fenced[c, w] = np.maximum(self.fenced[c, w], fenced)
        self.known_writes = None
        self.know[c, w, self.self_agent[c, w]] = FOREVER
        if self.lanes is not None:
            self.lanes.acquired(c, w, know)

    def async_done(self, kind: str, c: np.ndarray, w: np.ndarray, time: np.ndarray) -> None:
        """The asynchronous operations that warps (c, w) started up to ``time`` are complete, and the warps know it."""
        first = w - w % 4 if kind == "wgmma" else w  # a warpgroup's reads are booked on its first warp
        agent = self.self_agent[c, first] + self.offset[kind]
        self.know[c, w, agent] = np.maximum(self.know[c, w, agent], time)
        self.known_writes = None

    def proxy_fence(self, X: Any, mask: np.ndarray | None) -> None:
        """fence.proxy.async: what these warps know of is from now on visible to the asynchronous proxy."""
        know, _ = self.released(*X.at)
        if mask is not None:
            know[~mask.any(-1)] = 0
        view = self.fenced[X.at]
        np.maximum(view, know, out=view)

    # -- CTA barriers -----------------------------------------------------------------------------------------
    def barrier_arrive(self, X: Any, warps: np.ndarray, ids: np.ndarray) -> None:
        for ident in np.unique(ids[warps]):
            here = warps & (ids == ident)
            know, fenced = self.released(*X.at)
            for c in np.flatnonzero(here.any(1)):
                key = (X.c0 + int(c), int(ident))
                k, f = know[c][here[c]].max(0), fenced[c][here[c]].max(0)
                old = self.bar_clock.get(key)
                self.bar_clock[key] = (k, f) if old is None else (np.maximum(old[0], k), np.maximum(old[1], f))

    def barrier_complete(self, cta: int, ident: int, warps: np.ndarray) -> None:
        clock = self.bar_clock.pop((cta, ident), None)
        if clock is None or not warps.any():
            return
        know, fenced = clock
        w = np.flatnonzero(warps)
        self.acquire(np.full(len(w), cta), w, know, fenced)
        if len(w) == self.W and self.wave.cluster_size == 1 and "bulk" not in self.offset \
                and "wgmma" not in self.offset:  # fmt: skip
            self.floor[cta, w] = self.wave.now - 1

    # -- the cluster barrier ----------------------------------------------------------------------------------
    def cluster_arrive(self, X: Any, warps: np.ndarray, release: bool) -> None:
        if not release:
            self.cluster_arrive_relaxed(X, warps)
            return
        know, fenced = self.released(*X.at)
        for c in range(X.c0, X.c1):
            here = warps[c - X.c0]
            if here.any():
                slot = self.cluster_next[c // self.wave.cluster_size]
                np.maximum(slot[0], know[c - X.c0][here].max(0), out=slot[0])
                np.maximum(slot[1], fenced[c - X.c0][here].max(0), out=slot[1])

    def init_fence(self, X: Any, mask: np.ndarray | None) -> None:
        """fence.mbarrier_init: the warp's mbarrier initializations go with its next cluster arrival, even a
        relaxed one.
        """
        on = True if mask is None else mask.any(-1)
        np.copyto(self.init_fenced[X.at], self.wave.now, where=on)
        self.wave.now += 1

    def cluster_arrive_relaxed(self, X: Any, warps: np.ndarray) -> None:
        for c, w in zip(*np.nonzero(warps), strict=True):
            c, w = int(c) + X.c0, int(w) + X.w0
            slot = self.cluster_init_next[c // self.wave.cluster_size]
            agent = self.self_agent[c, w]
            slot[agent] = max(slot[agent], self.init_fenced[c, w])

    def cluster_complete(self, done: np.ndarray) -> None:
        clusters = done[:: self.wave.cluster_size]
        self.cluster_done[clusters] = self.cluster_next[clusters]
        self.cluster_init_done[clusters] = self.cluster_init_next[clusters]

    def cluster_wait(self, X: Any, warps: np.ndarray) -> None:
        c, w = np.nonzero(warps)
        if len(c):
            c, w = c + X.c0, w + X.w0
            clock = self.cluster_done[c // self.wave.cluster_size]
            self.acquire(c, w, clock[:, 0], clock[:, 1])
            if "mbarrier" in self.env.translation.uses:
                init = self.env.mbarriers.init_know
                init[c, w] = np.maximum(init[c, w], self.cluster_init_done[c // self.wave.cluster_size])
