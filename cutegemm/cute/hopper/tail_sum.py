"""Stream-K in groups on Hopper: adds up the parts of a tile that `work.Tail` has cut along K.

The parts of a cut tile belong to clusters that work on them at the same time. Each warpgroup leaves its part in the
workspace and counts itself in. The last one to arrive adds up all parts in the order of their numbers, so that a result
does not depend on who that is, and stores the tile. Nobody waits.

    workspace   state words (uint64), one for each warpgroup's share of a cut tile: how many parts lie in the workspace
                parts (fp32): one for each warpgroup of each cluster, 4 accumulators of each of its 128 threads in turn
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutegemm.cute.hopper.stream_sum import StreamSum


class TailSum(StreamSum):
    """Adds up the parts of a tile behind the whole waves; `store` takes whole sums."""

    batch = 8

    @cute.jit
    def finish(self, accumulators, tile, work):
        """Stores the tile if all of its k tiles were this cluster's, or if all other parts are there already."""
        complete = Int32(1)
        if tile.k_tiles != self.k_tiles:
            division = work.division
            rest, parts = division.rest()
            part = self.position.cluster // rest
            in_cluster = self.cluster_ctas * self.consumers
            own = (self.position.cluster * self.cluster_ctas + self.position.rank) * self.consumers
            stride = rest * in_cluster
            share = own + self.position.group - part * stride
            complete = self._add_up(accumulators, share, part, parts, stride)
        if complete != 0:
            self._store(accumulators, tile, work)

    @cute.jit
    def _add_up(self, accumulators, share, part, parts, stride):
        """Leaves this part of a share in the workspace. Returns 1 if it was the last one, and the accumulators now hold
        the sum of all `parts`; else 0. A share's parts lie `stride` apart.
        """
        values = cute.make_tensor(accumulators.iterator, cute.make_layout((4, self.vectors)))
        word = self.workspace.words + share
        cute.autovec_copy(values, self._vectors(share + part * stride, 0, self.vectors))
        last = Int32(0)
        if self._told(word, 1) == parts - 1:
            last = Int32(1)
            cute.autovec_copy(self._vectors(share, 0, self.vectors), values)
            for number in cutlass.range(1, parts, unroll=1):
                self._add_part(accumulators, share + number * stride)
            if self.thread == 0:
                cute.make_tensor(word, cute.make_layout(1))[0] = Int64(0)
        return last
