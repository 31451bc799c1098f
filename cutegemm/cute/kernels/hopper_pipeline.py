"""The ring of operand tiles between the producer warp and the consumer warpgroups, and the turns of ping-pong.

Each stage has two mbarriers:

    full     completes when the bytes of A and B have arrived.  One arrival: the producer's, which announces the bytes;
             TMA itself counts them down.
    empty    completes when nobody reads the stage any more.  One arrival of each consumer warp, in every CTA that
             receives this stage's data: with multicast, a CTA writes into its neighbours' stages too.

PTX promises a warp that has waited for its WGMMA no more than that the warp's own part is done, so every warp arrives
for itself.

Both sides walk the stages in order and wait by parity. The parity that a barrier completes flips each time round the
ring; `phase` counts it. A consumer waits for `full` with phase 0 first. The producer waits for `empty` with phase 1
first: the parity before the first completion counts as complete, so that the first round finds every stage empty.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


@cute.jit
def advance(stage: Int32, phase: Int32, stages: cutlass.Constexpr):
    """The next stage of the ring and its phase."""
    stage = stage + 1
    if stage == stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase


@cute.jit
def skip(stage: Int32, phase: Int32, count: Int32, stages: cutlass.Constexpr):
    """The stage and phase `count` places further on."""
    place = stage + count
    rounds = place // stages
    return place - rounds * stages, phase ^ (rounds & 1)


@cute.jit
def source_matrix(matrix: Int32, batch_stride: Int64):
    """Which matrix of an operand belongs to matrix number `matrix` of D: with stride 0 one serves the whole batch."""
    source = matrix
    if batch_stride == 0:
        source = Int32(0)
    return source


class Ring:
    """The barriers of the ring, see the module docstring; `start` binds them to shared memory."""

    def __init__(
        self, stages: int, stage_bytes: int, warpgroups: int, cluster: tuple[int, int], every_thread: bool = False
    ) -> None:
        """`warpgroups`: consumers that read each stage of a CTA.

        every_thread: a lesson in what arrivals cost. Each consumer thread arrives at both barriers, at `full` before
        it waits there; one CTA a cluster only.
        """
        self.stages = stages
        self.stage_bytes = stage_bytes
        self.cluster = cluster
        self.empty_arrivals = 4 * warpgroups * (cluster[0] + cluster[1] - 1)
        self.full_arrivals = 1
        self.every_thread = every_thread
        if every_thread:
            self.empty_arrivals = 128 * warpgroups
            self.full_arrivals = 1 + 128 * warpgroups

    def start(self, memory, cluster_row, cluster_column, first=None) -> None:
        """Binds to 2 x stages mbarriers at `memory`, for the CTA at that place of its cluster.

        first: of the CTAs of a cluster that sum the same part of K, the one that comes first; None where all do.
        """
        self.full = cute.recast_ptr(memory, dtype=Int64)
        self.empty = self.full + self.stages
        self.cluster_row, self.cluster_column, self.first = cluster_row, cluster_column, first

    def initialize(self) -> None:
        """By one thread, before anyone uses the barriers."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, self.full_arrivals)
            cute.arch.mbarrier_init(self.empty + stage, self.empty_arrivals)

    def acquire(self, stage: Int32, phase: Int32):
        """Producer warp: waits until the stage is empty, announces its bytes; returns the barrier for TMA."""
        cute.arch.mbarrier_wait(self.empty + stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + stage, self.stage_bytes)
        return self.full + stage

    @cute.jit
    def drain(self, stage: Int32, phase: Int32):
        """Producer warp, after its last stage: waits until all consumers of the cluster have released every stage."""
        for _ in cutlass.range(self.stages, unroll=1):
            cute.arch.mbarrier_wait(self.empty + stage, phase)
            stage, phase = advance(stage, phase, self.stages)

    def wait(self, stage: Int32, phase: Int32) -> None:
        """Consumer: waits until the stage is full."""
        if self.every_thread:
            cute.arch.mbarrier_arrive(self.full + stage)
        cute.arch.mbarrier_wait(self.full + stage, phase)

    @cute.jit
    def release(self, stage: Int32, lane: Int32):
        """Consumer warp: it has read this stage. Lane i tells CTA i of the cluster, if that CTA sends to this one;
        with several parts of K in a cluster, CTA i of those with its own part.
        """
        rows, columns = self.cluster
        if cutlass.const_expr(self.every_thread):
            cute.arch.mbarrier_arrive(self.empty + stage)
        elif cutlass.const_expr(rows * columns == 1):
            if lane == 0:
                cute.arch.mbarrier_arrive(self.empty + stage)
        else:
            if lane < rows * columns:  # noqa: SIM102
                if (lane % rows == self.cluster_row) | (lane // rows == self.cluster_column):
                    peer = lane if cutlass.const_expr(self.first is None) else self.first + lane
                    cute.arch.mbarrier_arrive(self.empty + stage, peer)


class Turns:
    """Ping-pong: the two consumer warpgroups multiply in turn.

    Beside keeping the tensor cores for one tile at a time, the turns are what makes waiting by parity right: a
    warpgroup that skips the other's stages would otherwise look at a barrier two completions too early and take it for
    complete. Barrier g lets warpgroup g begin; its arrivals come from the other one's warps, when their last stage has
    arrived.
    """

    def start(self, memory) -> None:
        self.barriers = cute.recast_ptr(memory, dtype=Int64)

    def initialize(self) -> None:
        for group in range(2):
            cute.arch.mbarrier_init(self.barriers + group, 4)

    @cute.jit
    def wait(self, group: Int32, tiles_done: Int32):
        """Waits for this warpgroup's turn; `tiles_done` are those that it has computed. The very first needs none."""
        # The first warpgroup's barrier is one completion behind: its first turn is given.
        cute.arch.mbarrier_wait(self.barriers + group, (tiles_done ^ (1 - group)) & 1)

    @cute.jit
    def hand_over(self, group: Int32, lane: Int32):
        """Consumer warp: gives the turn to the other warpgroup."""
        if lane == 0:
            cute.arch.mbarrier_arrive(self.barriers + (1 - group))
