"""Groups of asynchronous operations that a warp commits and waits for: those of cp.async, of bulk stores, of wgmma."""

from __future__ import annotations

from typing import Any

import numpy as np

#: commit times kept per warp
RING = 64


class Groups:
    """Per warp of a wave the number of groups that it has committed, and when."""

    def __init__(self, wave: Any) -> None:
        self.wave = wave
        self.committed = np.zeros((wave.C, wave.W), np.int64)
        self.time = np.zeros((wave.C, wave.W, RING), np.int64)

    def commit(self, X: Any, mask: Any) -> None:
        """A group ends for the warps of a box that have an active lane."""
        c, w = warps_of(X, mask)
        self.time[c, w, self.committed[c, w] % RING] = self.wave.now
        self.committed[c, w] += 1
        self.wave.now += 1
        self.wave.env.progressed = True

    def over(self, kind: str, c: np.ndarray, w: np.ndarray, upto: np.ndarray) -> None:
        """Warps have waited for their groups below ``upto``."""
        hb = self.wave.env.hb
        if hb is not None:
            time = np.where(upto > 0, self.time[c, w, np.maximum(upto - 1, 0) % RING], 0)
            hb.async_done(kind, c, w, time.astype(np.int32))
        self.wave.env.progressed = True


def warps_of(X: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """CTA positions and warps of a box that have an active lane."""
    on = np.ones(X.shape[:2], bool) if mask is None else mask.any(-1)
    c, w = np.nonzero(on)
    return c + X.c0, w + X.w0
