"""Stream-K on Hopper: puts the two parts of a tile together that `work.Stretches` has cut along K.

The two parts of a cut tile belong to neighbouring clusters. Whoever of the two is done first leaves its part in the
workspace; the other adds it to its own and stores the tile. Neither waits, and a sum of two does not depend on its
order.

    workspace   state words (uint64), one for each warpgroup's share of a cut: how many parts lie in the workspace
                parts (fp32): share, part 0 or 1, then 4 accumulators of each of the 128 threads in turn
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.hopper.config import WARPGROUP, HopperConfig
from cutegemm.cute.hopper.memory import SharedMemory
from cutegemm.cute.hopper.output import Output
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.work import Work
from cutegemm.cute.hopper.workspace import Workspace
from cutegemm.cute.source import aligned
from cutegemm.cute.whole import Adder


class StreamSum:
    """Puts the two parts of a cut tile together; `store` takes whole sums. add: the sum of two vectors.

    batch: 16-byte loads in flight a thread while parts are added. The accumulators leave few registers. room: vectors
    that a thread has room for in a part of the workspace.
    """

    batch = 4

    def __init__(self, config: HopperConfig, store: Any, add: Adder) -> None:
        self.vectors = self.room = config.accumulators // 4
        self.cluster_ctas, self.consumers = config.cluster_ctas, config.consumers
        self.store, self.add = store, add

    def initialize(self, memory: SharedMemory) -> None:
        """Needs no barriers."""

    def start(self, output: Output, memory: SharedMemory, position: Position, work: Work) -> None:
        """Binds to a workspace with a share for each warpgroup of each cluster: as many cuts as there can be."""
        shares = output.args.clusters * (self.cluster_ctas * self.consumers)
        self.position, self.k_tiles = position, work.division.k_tiles
        self.workspace = Workspace(output, memory, position, shares)
        self.thread = position.own_thread
        self.store.start(output, memory, position)

    @cute.jit
    def finish(self, accumulators, tile, work):
        """Stores the tile if all of its k tiles were this cluster's, or if the other part is there already."""
        complete = Int32(1)
        if tile.k_tiles != self.k_tiles:
            # A cut lies behind cluster c's last work, before its first one behind cluster c - 1's.
            part = Int32(0)
            if tile.first_k != 0:
                part = Int32(1)
            cut = (self.position.cluster - part) * self.cluster_ctas + self.position.rank
            complete = self._join(accumulators, cut * self.consumers + self.position.group, part)
        if complete != 0:
            self._store(accumulators, tile, work)

    def _store(self, accumulators, tile, work) -> None:
        self.store.store(accumulators, work.region(tile))

    def end(self) -> None:
        self.store.finish()

    @cute.jit
    def _join(self, accumulators, share, part):
        """Whether the accumulators now hold the sum of both parts; else this `part` (0 or 1) lies in the workspace."""
        values = cute.make_tensor(accumulators.iterator, cute.make_layout((4, self.vectors)))
        word = self.workspace.words + share
        there = self._told(word, 0)
        if there == 0:
            cute.autovec_copy(values, self._vectors(2 * share + part, 0, self.vectors))
            there = self._told(word, 1)
        if there != 0:
            self._add_part(accumulators, 2 * share + 1 - part)
            if self.thread == 0:
                cute.make_tensor(word, cute.make_layout(1))[0] = Int64(0)
        return there

    def _add_part(self, accumulators, part) -> None:
        """Adds part number `part` of the workspace to the accumulators."""
        for first in range(0, self.vectors, self.batch):
            count = min(self.batch, self.vectors - first)
            other = cute.make_rmem_tensor((4, count), Float32)
            cute.autovec_copy(self._vectors(part, first, count), other)
            own = cute.make_tensor(accumulators.iterator + 4 * first, cute.make_layout((4, count)))
            own.store(self.add(own.load(), other.load()))

    def _vectors(self, part, first: int, count: int):
        """(4, count): this thread's accumulators of a part, from vector `first` on."""
        size = self.room * 4 * WARPGROUP
        pointer = self.workspace.parts + (Int64(part) * size + Int64((first * WARPGROUP + self.thread) * 4))
        return cute.make_tensor(aligned(pointer, 16), cute.make_layout((4, count), stride=(1, 4 * WARPGROUP)))

    @cute.jit
    def _told(self, word, more: cutlass.Constexpr):
        """How many parts lay in the workspace before `more` were counted in, for all threads of the warpgroup."""
        self.workspace.meet()
        if self.thread == 0:
            self._ask(word, more)
        self.workspace.meet()
        return self.workspace.answer[0]

    def _ask(self, word, more: int) -> None:
        if more:
            text, inputs = "atom.acq_rel.gpu.global.add.u64 {$w0}, [{$r0}], {$r1};", [word.toint(), Int64(more)]
        else:
            text, inputs = "ld.acquire.gpu.global.u64 {$w0}, [{$r0}];", [word.toint()]
        found = cute.arch.inline_ptx(text, write_only_types=[Int64], read_only_args=inputs)
        self.workspace.tell(found.to(Int32))
