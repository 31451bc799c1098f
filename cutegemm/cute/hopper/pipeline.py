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

from cutegemm.cute.hopper.config import WARPGROUP, HopperConfig
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.promotion import SCALE_THREADS, copies
from cutegemm.problem import ITEMSIZE, Signature
from cutegemm.problem.work import GATHERED


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


class Ring:
    """The barriers of the ring, see the module docstring; `start` binds them to shared memory."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self.stages = config.stages
        self.stage_bytes = config.stage_bytes(signature)
        self.cluster = config.cluster
        readers = 1 if config.ping_pong else config.consumers
        self.empty_arrivals = 4 * readers * (config.cluster[0] + config.cluster[1] - 1)
        self.full_arrivals = 1
        # A lesson in what arrivals cost, for one CTA a cluster: each consumer thread arrives at both barriers, at
        # `full` before it waits there.
        # Of gathered rows TMA brings the other operand alone, and the threads that copy arrive too.
        self.gathers = signature.work == GATHERED
        if self.gathers:
            tokens = config.bn if config.swapped else config.bm
            self.stage_bytes -= tokens * config.bk * ITEMSIZE[signature.dtype]
            self.full_arrivals += WARPGROUP
        elif copies(config, signature):
            self.full_arrivals += SCALE_THREADS
        self.every_thread = "fat" in config.options
        if self.every_thread:
            self.empty_arrivals = WARPGROUP * readers
            self.full_arrivals = 1 + WARPGROUP * readers

    def start(self, memory, position: Position) -> None:
        """Binds to 2 x stages mbarriers at `memory`, for the CTA at that position."""
        self.full = cute.recast_ptr(memory, dtype=Int64)
        self.empty = self.full + self.stages
        self.position = position

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

    def occupy(self, stage: Int32, phase: Int32) -> None:
        """Producer warp: waits until the stage is empty, and completes its full barrier, which nobody waits for."""
        cute.arch.mbarrier_wait(self.empty + stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full + stage)

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
        self._see_gathered()

    def _see_gathered(self) -> None:
        """Lets WGMMA read what threads have written into a full stage."""
        if self.gathers:
            cute.arch.fence_proxy("async.shared", space="cta")

    def is_full(self, stage: Int32, phase: Int32) -> cutlass.Boolean:
        """Consumer: whether the stage is full now; `wait_unless` must follow before the stage is read."""
        return cute.arch.mbarrier_test_wait(self.full + stage, phase)

    @cute.jit
    def wait_unless(self, full, stage: Int32, phase: Int32):
        """Consumer: as `wait`, after `is_full` of that stage, whose answer is `full`."""
        if full:
            self._see_gathered()
        else:
            self.wait(stage, phase)

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
                if (lane % rows == self.position.row) | (lane // rows == self.position.column):
                    k_first = self.position.k_first
                    peer = lane if cutlass.const_expr(k_first is None) else k_first + lane
                    cute.arch.mbarrier_arrive(self.empty + stage, peer)


class Turns:
    """Ping-pong: the two consumer warpgroups multiply in turn.

    The turns keep the tensor cores for one tile at a time. They also make waiting by parity right: a warpgroup skips
    the other's stages, and without turns it could look at a barrier two completions too early and take the stage as
    full. Barrier g lets warpgroup g begin. The warps of the other warpgroup arrive at it when the last stage of their
    tile is full.
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
