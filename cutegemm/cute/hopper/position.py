"""Where a thread of the Hopper kernel stands: in its CTA, the CTA in its cluster, the cluster in the grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from cutegemm.cute.hopper.config import WARPGROUP, HopperConfig

FIRST_NAMED_BARRIER = 1
"""Named barrier of consumer warpgroup 0; 0 is the CTA's own."""


@dataclass(frozen=True)
class Position:
    """Device integers, the same for all threads of a warp but `thread`.

    The CTAs of a cluster are numbered by `rank` = row + CM * (column + CN * k_rank).

    thread: of the CTA, from 0.
    group, warp: warpgroup and warp of the CTA.
    cluster: of the grid.
    rank: of the CTA in its cluster.
    row, column: of the CTA in its cluster, along the rows and columns of the accumulators.
    k_rank: of the CTA along K, and `k_first`, the rank of the first CTA that sums the same part of K as this one. Both
        are None in a cluster that does not extend along K.
    """

    thread: Any
    group: Any
    warp: Any
    cluster: Any
    rank: Any
    row: Any
    column: Any
    k_rank: Any = None
    k_first: Any = None

    @classmethod
    def here(cls, config: HopperConfig) -> Position:
        """The position of the thread that runs this."""
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        warp = cute.arch.make_warp_uniform(thread // 32)
        block = cute.arch.block_idx()[0]
        cm, cn = config.cluster
        rank = block % config.cluster_ctas
        row, column = rank % cm, rank // cm
        k_rank, k_first = None, None
        if config.cluster_k > 1:
            column, k_rank = column % cn, rank // (cm * cn)
            k_first = k_rank * (cm * cn)
        return cls(thread, group, warp, block // config.cluster_ctas, rank, row, column, k_rank, k_first)

    @property
    def own_thread(self) -> Any:
        """The thread's number in its warpgroup."""
        return self.thread % WARPGROUP

    @property
    def group_barrier(self) -> Any:
        """The number of the named barrier of this thread's warpgroup."""
        return self.group + FIRST_NAMED_BARRIER

    @property
    def lane(self) -> Any:
        """The thread's number in its warp."""
        return self.thread % 32
