"""Races in shared memory, found by happens-before rather than by luck.

**Agents** access shared memory: each warp, and per warp the asynchronous units that act on its behalf
(cp.async, bulk stores, wgmma), one per mbarrier for the bulk loads that complete on it, and one for its st.async.
Time is one counter of the wave.
Per *granule* of shared memory (the smallest access of the kernel, 1 to 16 bytes) the detector keeps when and
by which agent it was last written, and when each agent last read it. Each warp w has a clock ``know[w][agent]``: up to
what time the agent's accesses are known to have happened before what w does next. Barriers, mbarriers and waits for
asynchronous groups pass that knowledge on. An access conflicts where an earlier one is not known; this
finds a missing barrier whatever order the warps happened to run in.

``fenced`` is the same knowledge, counting only what a fence.proxy.async has made visible to the asynchronous
proxy (TMA and wgmma). How both are passed on is told in `knowledge`; races between the lanes of one warp are the
business of `lane_order`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutegemm.emulator.errors import DataRace, MissingProxyFence, UninitializedRead
from cutegemm.emulator.knowledge import FOREVER, Knowledge
from cutegemm.emulator.lane_order import NOBODY, LaneOrder
from cutegemm.emulator.race_findings import Findings

#: mbarriers per CTA whose bulk loads are told apart
MBARRIERS = 64


class HappensBefore(Knowledge, Findings):
    def __init__(self, wave: Any, env: Any) -> None:
        self.wave, self.env = wave, env
        self.checks = env.checks
        W, C = wave.W, wave.C
        self.W = W
        self.g = env.translation.granule
        self.row = wave.smem_row // self.g  # granules per CTA
        granules = C * self.row
        uses = env.translation.uses
        # agents of a CTA: W warps, then W of each asynchronous kind in use, then the mbarriers, twice with st.async
        self.offset = {"warp": 0}
        at = W
        for kind in ("copy", "bulk", "wgmma"):
            if kind in uses:
                self.offset[kind] = at
                at += W
        self.readers = at
        self.offset["mbarrier"] = at
        if "mbarrier" in uses:
            at += MBARRIERS
        if "remote store" in uses:
            self.offset["remote store"] = at
            at += MBARRIERS
        self.A = at
        self.AA = self.A * wave.cluster_size
        self.wrote_at = np.zeros(granules, np.int32)
        self.wrote_by = np.zeros(granules, np.int16)
        self.wrote_line = np.zeros(granules, np.int32)
        self.atomic_write = np.zeros(granules, bool)
        self.read_last = np.zeros(granules, np.int32)
        self.read_at = np.zeros((self.readers * wave.cluster_size, granules), np.int32)
        #: the arrays that reads use, seen as units of 1, 2 and 4 granules
        self.wide = {
            n: (self.wrote_at.view(t), self.read_last.view(t), self.read_at.reshape(-1).view(t))
            for n, t in ((1, np.int32), (2, np.int64), (4, np.complex128))
            if self.g * n <= 16
        }
        self.writers = np.zeros(self.AA, bool)  # agents that have written at all
        self.known_writes: np.ndarray | None = None  # [C, W]: up to when each warp knows every agent's writes
        self.row_used: np.ndarray = np.zeros(len(self.read_at), bool)  # rows of agents that have read at all
        self.know = np.zeros((C, W, self.AA), np.int32)
        self.fenced = np.zeros((C, W, self.AA), np.int32)
        #: accesses up to this time are known whoever made them: set by a barrier of all warps
        self.floor = np.zeros((C, W), np.int32)
        if "mbarrier" in uses:  # bulk loads write through the asynchronous proxy: no fence needed
            for r in range(wave.cluster_size):
                first = r * self.A + self.offset["mbarrier"]
                self.fenced[:, :, first : first + MBARRIERS] = FOREVER
        ranks = wave.rank[:, None] * self.A
        self.self_agent = ranks + np.arange(W)[None, :]  # [C, W]
        c, w = np.ogrid[:C, :W]
        self.know[c, w, self.self_agent] = FOREVER
        self.bar_clock: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        clusters = C // wave.cluster_size
        self.cluster_next = np.zeros((clusters, 2, self.AA), np.int32)
        self.cluster_done = np.zeros((clusters, 2, self.AA), np.int32)
        self.init_fenced = np.zeros((C, W), np.int32)
        self.cluster_init_next = np.zeros((clusters, self.AA), np.int32)
        self.cluster_init_done = np.zeros((clusters, self.AA), np.int32)
        self.lanes = LaneOrder(self, granules) if self.checks.lanes else None
        self.lines: list[Any] = [None]
        self.line_index: dict[int, int] = {}

    # -- accesses ---------------------------------------------------------------------------------------------
    def line_of(self, instr: Any) -> int:
        found = self.line_index.get(id(instr))
        if found is None:
            found = self.line_index[id(instr)] = len(self.lines)
            self.lines.append(instr)
        return found

    def _granules(self, offset: np.ndarray, size: int) -> tuple[np.ndarray, int]:
        """Byte offsets -> granule indices, ``n`` per access (flattened access by access)."""
        g: np.ndarray = offset // self.g
        n = max(1, size // self.g)
        if n > 1:
            g = (g[:, None] + np.arange(n)).reshape(-1)
        return g, n

    def of_chunks(self, chunks: np.ndarray) -> np.ndarray:
        """The granules of chunks of 16 bytes, chunk by chunk."""
        return self._granules(chunks * 16, 16)[0]

    def _warps(self, X: Any, lanes: np.ndarray | None, n: int) -> np.ndarray:
        warps = X.warps_of(lanes)
        return np.repeat(warps, n) if n > 1 else warps

    def read(self, X: Any, I: Any, offset: np.ndarray, size: int, lanes: np.ndarray | None) -> None:
        """Ordinary reads of ``size`` bytes by lanes."""
        views = self.wide.get(size // self.g)
        if views is not None:
            self.read_aligned(X, I, offset, size, lanes, *views)
            return
        g, n = self._granules(offset, size)
        warps = self._warps(X, lanes, n)
        self.check_read(X, I, g, n, warps, lanes)
        if self.lanes is not None:
            self.lanes.note_read(X, I, g, n, lanes)
        now = self.wave.now
        self.read_last[g] = now
        agent = self.reader_row(self.self_agent.reshape(-1).take(warps))
        self.read_at.reshape(-1)[agent * self.read_at.shape[1] + g] = now
        self.row_used[agent] = True

    def read_aligned(self, X, I, offset, size, lanes, wrote_at, read_last, read_at) -> None:
        """`read` of 1, 2 or 4 granules that lie together, handled as one unit.

        Where the latest of the writes read is older than what all the warps know of every writer, it is in order.
        """
        unit = offset // size
        when = wrote_at.take(unit).view(np.int32)
        latest = int(when.max())
        order = self.lanes
        if int(when.min()) == 0 or latest > self.oldest_known(X) or (
            order is not None and latest > int(order.oldest[X.at].min())
        ):  # fmt: skip
            g, n = self._granules(offset, size)
            self.check_read(X, I, g, n, self._warps(X, lanes, n), lanes)
        if order is not None:
            order.note_aligned_read(X, I, unit, size // self.g, lanes)
        stamp = np.full(size // self.g, self.wave.now, np.int32).view(read_last.dtype)[0]
        read_last[unit] = stamp
        key = "reader rows" if lanes is None else ""
        first = X._cache.get(key) if key else None
        if first is None:
            warps = self._warps(X, lanes, 1)
            rows = self.reader_row(self.self_agent.reshape(-1).take(warps))
            self.row_used[rows] = True
            first = rows * self.read_at.shape[1]
            if key:
                X._cache[key] = first
        read_at[first // (size // self.g) + unit] = stamp

    def oldest_known(self, X: Any) -> int:
        """The time up to which every warp of a box knows every agent's writes."""
        if self.known_writes is None:
            known = self.know[:, :, self.writers]
            self.known_writes = known.min(-1) if known.shape[-1] else np.zeros(known.shape[:2], np.int32)
        return int(self.known_writes[X.at].min())

    def check_read(self, X, I, g, n, warps, lanes) -> None:
        when = self.wrote_at.take(g)
        by = self.wrote_by.take(g)
        ok = self.know.reshape(-1).take(warps * self.AA + by) >= when
        if not ok.all() or not when.all():
            self.report_read(X, I, g, n, when, by, ok, lanes)
        if self.lanes is not None:
            self.lanes.check_read(X, I, g, n, warps, lanes)

    def reader_row(self, agent: np.ndarray) -> np.ndarray:
        """The row of ``read_at`` of an agent number."""
        return agent // self.A * self.readers + agent % self.A

    def write(
        self, X: Any, I: Any, offset: np.ndarray, size: int, lanes: np.ndarray | None, kind: str = "warp"
    ) -> None:
        """Ordinary writes (kind warp), or those of cp.async (kind copy), by lanes."""
        g, n = self._granules(offset, size)
        warps = self._warps(X, lanes, n)
        self.check_write(X, I, g, n, warps, lanes)
        agent = (self.self_agent.reshape(-1).take(warps) + self.offset[kind]).astype(np.int16)
        self.wrote(g, agent, I)
        self.atomic_write[g] = False
        if self.lanes is not None:
            self.lanes.note_write(X, I, g, n, lanes)
        clash = self.wrote_by.take(g) != agent
        if clash.any() and self.checks.races:
            e = int(np.argmax(clash))
            other = int(self.wrote_by[g[e]])
            self.fail(X, I, DataRace, g[e], lanes, e // n, f"a write that {self.agent_name(int(g[e]), other)} "
                f"makes to the same bytes "
                      "at the same time", by=None)  # fmt: skip

    def atomic(self, X: Any, I: Any, offset: np.ndarray, size: int, lanes: np.ndarray | None) -> None:
        """Atomic accesses: among themselves they never conflict, against ordinary accesses they count as writes."""
        g, n = self._granules(offset, size)
        warps = self._warps(X, lanes, n)
        plain = ~self.atomic_write[g]
        if plain.any():
            self.report_read_if_needed(X, I, g[plain], warps[plain], lanes, plain, n)
        self.wrote(g, self.self_agent.reshape(-1).take(warps).astype(np.int16), I)
        self.atomic_write[g] = True
        if self.lanes is not None:
            self.lanes.note_write(X, I, g, n, lanes)

    def report_read_if_needed(self, X, I, g, warps, lanes, chosen, per) -> None:
        """Check ``g`` (the accesses ``chosen`` of an instruction) as reads and as writes."""
        element = np.flatnonzero(chosen) // per
        lanes = element if lanes is None else lanes[element]
        when, by = self.wrote_at.take(g), self.wrote_by.take(g)
        ok = self.know.reshape(-1).take(warps * self.AA + by) >= when
        if not ok.all() or not when.all():
            self.report_read(X, I, g, 1, when, by, ok, lanes)
        self.check_write(X, I, g, 1, warps, lanes)

    def wrote(self, g: np.ndarray, agent: Any, I: Any) -> None:
        self.wrote_at[g] = self.wave.now
        self.wrote_by[g] = agent
        self.wrote_line[g] = self.line_of(I)
        if not self.writers[agent].all():
            self.writers[agent] = True
            self.known_writes = None

    def check_write(self, X: Any, I: Any, g: np.ndarray, n: int, warps: np.ndarray, lanes: np.ndarray | None) -> None:
        if self.lanes is not None:
            self.lanes.check_write(X, I, g, n, warps, lanes)
        if not self.checks.races:
            return
        when, by = self.wrote_at.take(g), self.wrote_by.take(g)
        ok = self.know.reshape(-1).take(warps * self.AA + by) >= when
        if not ok.all():
            e = int(np.argmin(ok))
            what = "a write that nothing orders after an earlier write"
            self.fail(X, I, DataRace, g[e], lanes, e // n, what, by=int(by[e]))
        late = self.read_last.take(g) > self.floor.reshape(-1).take(warps)
        if late.any():
            at = np.flatnonzero(late)
            used, rows = self.rows
            for piece in (at[k : k + 4096] for k in range(0, len(at), 4096)):  # so that the table below stays small
                reads = self.read_at[used[:, None], g[piece]]
                known = self.know.reshape(-1, self.AA)[warps[piece]][:, rows].T
                bad = reads > known
                if bad.any():
                    r, e = (int(v[0]) for v in np.nonzero(bad))
                    e = int(piece[e])
                    what = "a write that nothing orders after an earlier read"
                    self.fail(X, I, DataRace, g[e], lanes, e // n, what, by=int(rows[r]), was_read=True)

    @property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of ``read_at`` in use, and the agent number of each."""
        r = np.flatnonzero(self.row_used)
        return r, r // self.readers * self.A + r % self.readers

    # -- the asynchronous proxy: whole ranges --------------------------------------------------------------------
    def proxy_read(self, X: Any, I: Any, c: int, warps: slice, cta: int, g: np.ndarray, kind: str, lane: int) -> None:
        """TMA on behalf of warps [c, warps] reads granules ``g`` (offsets inside CTA position ``cta``).

        lane: the flat lane index in the box of the thread that asks for it.
        """
        g = g + cta * self.row
        if self.lanes is not None:
            self.lanes.check_read(X, I, g, len(g), np.full(len(g), c * self.W + warps.start), np.array([lane]))
        when, by = self.wrote_at[g], self.wrote_by[g]
        if self.checks.uninitialized:
            what = "a read by the asynchronous proxy of shared memory that nothing has written"
            self.require(I, when != 0, UninitializedRead, c, warps.start, g, what)
        if self.checks.races:
            what = "a read by the asynchronous proxy that nothing orders after the write"
            self.require(I, self.know[c, warps].max(0)[by] >= when, self.too_early, c, warps.start, g, what, by)
        if self.checks.proxy_fences:
            what = "a read by the asynchronous proxy of what ordinary stores wrote, without fence.proxy.async between"
            self.require(I, self.fenced[c, warps].max(0)[by] >= when, MissingProxyFence, c, warps.start, g, what, by)
        agent = self.self_agent[c, warps.start] + self.offset[kind]
        self.read_last[g] = self.wave.now
        if self.lanes is not None:
            self.lanes.read_by[g] = NOBODY
        row = int(self.reader_row(agent))
        self.read_at[row, g] = self.wave.now
        self.row_used[row] = True

    def proxy_read_groups(self, I: Any, c: np.ndarray, w: np.ndarray, g: np.ndarray) -> None:
        """wgmma of warpgroups, named by a warp (c, w) of each, reads granules ``g`` of their own CTAs.

        The other warps of a group wait for its operands too, so one warp's knowledge stands for the group's.
        """
        where = (c * self.row)[:, None] + g
        when, by = self.wrote_at[where], self.wrote_by[where]
        warp, row = (c[:, None], w[:, None]), ((c * self.W + w) * self.AA)[:, None] + by
        if self.checks.uninitialized:
            what = "a wgmma operand in shared memory that nothing has written"
            self.require(I, when != 0, UninitializedRead, *warp, where, what)
        if self.checks.races:
            what = "a wgmma operand read that nothing orders after the write"
            self.require(I, self.know.reshape(-1).take(row) >= when, self.too_early, *warp, where, what, by)
        if self.checks.proxy_fences:
            what = "a wgmma operand that ordinary stores wrote, without fence.proxy.async between"
            self.require(I, self.fenced.reshape(-1).take(row) >= when, MissingProxyFence, *warp, where, what, by)
        agent = self.reader_row(self.self_agent[c, w - w % 4] + self.offset["wgmma"])
        self.read_last[where] = self.wave.now
        if self.lanes is not None:
            self.lanes.read_by[where] = NOBODY
        self.read_at[agent[:, None], where] = self.wave.now
        self.row_used[agent] = True

    def proxy_write(self, I: Any, c: int, w: int, cta: int, g: np.ndarray, slot: int, kind: str = "mbarrier") -> None:
        """A bulk load that warp (c, w) starts, or its st.async (kind remote store), writes granules ``g`` of CTA
        ``cta`` and completes on its mbarrier ``slot``.
        """
        g = g + cta * self.row
        know = self.know[c, w]
        what = "a bulk copy" if kind == "mbarrier" else "an asynchronous store"
        what = f"{what} into shared memory that nothing orders after an earlier"
        if self.checks.races:
            by = self.wrote_by[g]
            self.require(I, know[by] >= self.wrote_at[g], DataRace, c, w, g, f"{what} write", by)
            used, rows = self.rows
            if len(used):
                ok = self.read_at[used[:, None], g] <= know[rows][:, None]
                self.require(I, ok, DataRace, c, w, g, f"{what} read", rows[:, None], was_read=True)
        self.wrote(g, np.int16(self.wave.rank[cta] * self.A + self.offset[kind] + slot), I)
        self.atomic_write[g] = False
        if self.lanes is not None:
            self.lanes.wrote[g] = NOBODY
