"""What the race detector says: which access, by whom, against which earlier one."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutegemm.emulator.errors import AsyncReadTooEarly, DataRace, EmulationError, UninitializedRead
from cutegemm.emulator.memory import SHARED_BASE


class Findings:
    """The messages of `HappensBefore`, which has the clocks these methods read."""

    wave: Any
    env: Any
    checks: Any
    W: int
    A: int
    g: int
    row: int
    offset: dict[str, int]
    lines: list[Any]
    wrote_line: np.ndarray

    def too_early(self, by: int) -> type[EmulationError]:
        kind = by % self.A
        return AsyncReadTooEarly if kind >= self.W else DataRace

    def agent_name(self, granule: int, agent: int) -> str:
        """'warp 3 of CTA (0,0,0)', 'cp.async of warp 3 ...': ``granule`` tells the cluster."""
        first = self.wave.first[granule // self.row]
        cta = self.env.cta_name(self.wave, int(first) + agent // self.A)
        local = agent % self.A
        if local < self.W:
            return f"warp {local} of CTA {cta}"
        for kind, what in (("copy", "a cp.async of"), ("bulk", "a bulk store of"), ("wgmma", "a wgmma of")):
            at = self.offset.get(kind)
            if at is not None and at <= local < at + self.W:
                return f"{what} warp {local - at} of CTA {cta}"
        at = self.offset.get("remote store")
        if at is not None and local >= at:
            return f"an st.async that completes on mbarrier {local - at} of CTA {cta}"
        return f"a bulk load that completes on mbarrier {local - self.offset['mbarrier']} of CTA {cta}"

    def report_read(self, X, I, g, n, when, by, ok, lanes) -> None:
        if self.checks.uninitialized and not when.all():
            e = int(np.argmin(when != 0))
            what = "a read of shared memory that nothing has written"
            self.fail(X, I, UninitializedRead, g[e], lanes, e // n, what, by=None)
        if self.checks.races and not ok.all():
            e = int(np.argmin(ok))
            what = "a read that nothing orders after the write"
            self.fail(X, I, self.too_early(int(by[e])), g[e], lanes, e // n, what, by=int(by[e]))

    def fail(
        self, X, I, kind, granule, lanes, element: int, message: str, by: int | None, was_read: bool = False
    ) -> None:
        lane = int(element if lanes is None else lanes[element])
        raise self.finding(I, kind, int(granule), X.where(lane), message, by, was_read)

    def require(self, I, ok: np.ndarray, kind, c, w, granule, message: str, by=None, was_read: bool = False) -> None:
        """Raises about the first access that is not ``ok``, by warp (c, w) at ``granule``, against agent ``by``.

        These are numbers, or arrays that broadcast to ``ok``. kind: an error, or what gives one for an agent.
        """
        if ok.all():
            return
        first = np.unravel_index(int(np.argmin(ok)), ok.shape)
        c, w, granule = (int(np.broadcast_to(each, ok.shape)[first]) for each in (c, w, granule))
        by = None if by is None else int(np.broadcast_to(by, ok.shape)[first])
        kind = kind if isinstance(kind, type) else kind(by)
        raise self.finding(I, kind, granule, self.env.thread_name(self.wave, c, w, None), message, by, was_read)

    def finding(self, I, kind, granule: int, who: str, message: str, by: int | None, was_read: bool) -> EmulationError:
        address = granule % self.row * self.g + SHARED_BASE
        where = self.env.cta_name(self.wave, granule // self.row)
        text = f"{message}\n  shared memory {address:#x} of CTA {where}, used by {who}\n  {I.where()}"
        if by is not None:
            earlier = self.lines[int(self.wrote_line[granule])]
            if was_read:
                text += f"\n  earlier read by {self.agent_name(granule, by)}"
            elif earlier is not None:
                text += f"\n  earlier write by {self.agent_name(granule, by)}: {earlier.where()}"
        return kind(text, line=I.line)
