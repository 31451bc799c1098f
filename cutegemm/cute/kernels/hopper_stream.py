"""Stream-K on Hopper: the tiles that do not fill a wave are cut along K, so that every cluster has the same to do.

Whole waves of tiles come first, a tile a cluster. The last whole wave and what is left beyond it, between C and 2 C
tiles for C clusters, are laid end to end along K and cut into C equal stretches:

    4 clusters, 6 tiles        | cluster 0 . . . | cluster 1 . . . | cluster 2 . . . | cluster 3 . . . |
                               | tile 0    | tile 1    | tile 2    | tile 3    | tile 4    | tile 5    |

A stretch is longer than a tile, so that a tile is cut at most once, and its two parts belong to neighbours. Whoever of
the two is done first leaves its part in the workspace; the other adds it to its own and stores the tile. Neither waits,
and a sum of two does not depend on its order.

    workspace   state words (uint64), one for each warpgroup's share of a cut: how many parts lie in the workspace
                parts (fp32): share, part 0 or 1, then 4 accumulators of each of the 128 threads in turn

With no tile left over, or fewer tiles than clusters, nothing is cut. The idea is that of M. Osama et al., "Stream-K:
Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU" (2023).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.epilogue import aligned
from cutegemm.cute.hopper_config import WARPGROUP, whole_tiles, word_bytes
from cutegemm.cute.kernels.hopper_epilogue import FIRST_NAMED_BARRIER
from cutegemm.cute.tile_order import device_min

BATCH = 4
"""16-byte loads in flight a thread while parts are added: registers beside the accumulators are few."""


class Stretches:
    """The items of one cluster in turn: (tile, first k tile, number of k tiles)."""

    def start(self, tiles, clusters, cluster, k_tiles):
        """For cluster number `cluster`; `k_tiles` is at least 1. Returns the number of items."""
        self.clusters, self.cluster, self.k_tiles = clusters, cluster, k_tiles
        self.whole, self.before, self.low, self.high, items = self._cut(tiles, clusters, cluster, k_tiles)
        return items

    @cute.jit
    def _cut(self, tiles, clusters, cluster, k_tiles):
        whole = whole_tiles(tiles, clusters, device_min)
        before = (whole - cluster + clusters - 1) // clusters
        # total // clusters k tiles each, the first total % clusters one more: no product that could overflow.
        total = (tiles - whole) * k_tiles
        each, more = total // clusters, total % clusters
        low = cluster * each + cutlass.min(cluster, more)
        high = low + each
        if cluster < more:
            high = high + 1
        items = before
        if high > low:
            items = before + (high - 1) // k_tiles - low // k_tiles + 1
        return whole, before, low, high, items

    @cute.jit
    def item(self, number):
        """The `number`-th item."""
        tile, first, count = self.cluster + number * self.clusters, Int32(0), self.k_tiles
        if number >= self.before:
            place = self.low // self.k_tiles + (number - self.before)
            begin = cutlass.max(self.low, place * self.k_tiles)
            end = cutlass.min(self.high, (place + 1) * self.k_tiles)
            tile, first, count = self.whole + place, begin - place * self.k_tiles, end - begin
        return tile, first, count


class PartJoin:
    """Puts the two parts of a cut tile together. `vectors` x 4 accumulators a thread make up a part."""

    def __init__(self, vectors: int) -> None:
        self.vectors = vectors

    def start(self, workspace, shares, scratch, group, thread) -> None:
        """Binds to the workspace of `shares` shares, and to one int32 a warpgroup in shared memory at `scratch`."""
        self.words = cute.recast_ptr(workspace, dtype=Int64)
        self.parts = workspace + Int64(word_bytes(shares) // 4)
        self.answer = cute.make_tensor(cute.recast_ptr(scratch, dtype=Int32) + group, cute.make_layout(1))
        self.barrier = group + FIRST_NAMED_BARRIER
        self.thread = thread

    @cute.jit
    def join(self, accumulators, share, part):
        """Whether the accumulators now hold the sum of both parts; else this `part` (0 or 1) lies in the workspace."""
        values = cute.make_tensor(accumulators.iterator, cute.make_layout((4, self.vectors)))
        word = self.words + share
        there = self._told(word, 0)
        if there == 0:
            cute.autovec_copy(values, self._vectors(2 * share + part, 0, self.vectors))
            there = self._told(word, 1)
        if there != 0:
            for first in cutlass.range_constexpr(0, self.vectors, BATCH):
                count = min(BATCH, self.vectors - first)
                other = cute.make_rmem_tensor((4, count), Float32)
                cute.autovec_copy(self._vectors(2 * share + 1 - part, first, count), other)
                own = cute.make_tensor(accumulators.iterator + 4 * first, cute.make_layout((4, count)))
                own.store(own.load() + other.load())
            if self.thread == 0:
                cute.make_tensor(word, cute.make_layout(1))[0] = Int64(0)
        return there

    def _vectors(self, part, first: int, count: int):
        """(4, count): this thread's accumulators of a part, from vector `first` on."""
        size = self.vectors * 4 * WARPGROUP
        pointer = self.parts + (Int64(part) * size + Int64((first * WARPGROUP + self.thread) * 4))
        return cute.make_tensor(aligned(pointer, 16), cute.make_layout((4, count), stride=(1, 4 * WARPGROUP)))

    @cute.jit
    def _told(self, word, more: cutlass.Constexpr):
        """How many parts lay in the workspace before `more` were counted in, for all threads of the warpgroup."""
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
        if self.thread == 0:
            self._ask(word, more)
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
        return self.answer[0]

    def _ask(self, word, more: int) -> None:
        if more:
            text, inputs = "atom.acq_rel.gpu.global.add.u64 {$w0}, [{$r0}], {$r1};", [word.toint(), Int64(more)]
        else:
            text, inputs = "ld.acquire.gpu.global.u64 {$w0}, [{$r0}];", [word.toint()]
        found = cute.arch.inline_ptx(text, write_only_types=[Int64], read_only_args=inputs)
        self.answer[0] = found.to(Int32)
