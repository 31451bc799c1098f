"""Split-K on Hopper: the parts of a tile, summed by different CTAs, are added up in a fixed order.

A warpgroup leaves its accumulators of a split in the workspace and counts itself in. The sum is shared out again: the
tile falls into slices, and split number i adds up slice i, all parts in the order of the splits, so that the result
does not depend on who came when. For that it waits until all have come, but not for long: CTAs need not be resident
together. Who has waited too long abandons its slice, and the last to arrive adds up what was abandoned before.

    workspace   state words (uint32), one for each warpgroup's share of a tile, padded to 16 bytes
                parts (fp32): share, split, then 4 accumulators of each of the 128 threads in turn

    state       bits 0-7   splits that have arrived
                bits 8-15  splits that will not touch the word again; the last of them sets it to 0 for the next launch
                bits 16-31 slices abandoned

Arriving is a release, seeing all arrived an acquire, both at GPU scope and by one thread; the warpgroup's barriers
before and behind carry the order to the other 127. Whether a slice was abandoned before or after the last arrival is
settled by the order of the operations on the word: an owner that finds all arrived keeps its slice.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.epilogue import aligned
from cutegemm.cute.hopper_config import WARPGROUP
from cutegemm.cute.kernels.hopper_epilogue import FIRST_NAMED_BARRIER

MOST_SLICES = 16
POLLS = 24
"""Looks at the state word, about 0.6 us each, before a slice is abandoned: more than CTAs of one wave lie apart."""
VECTORS_IN_FLIGHT = 24
"""16-byte loads a thread issues before it adds: the sum is bound by the latency of the L2 cache."""


class SplitSum:
    """See the module docstring. `units` strips of 4 x `vectors` accumulators a thread make up a share."""

    def __init__(self, splits: int, units: int, vectors: int) -> None:
        self.splits = splits
        self.units = units
        self.vectors = vectors
        self.slices = min(splits, units, MOST_SLICES)

    def start(self, workspace, shares, scratch, group, thread) -> None:
        """Binds to the workspace of `shares` shares, and to one int32 a warpgroup in shared memory at `scratch`."""
        self.words = cute.recast_ptr(workspace, dtype=Int32)
        word_bytes = (shares * 4 + 15) // 16 * 16
        self.parts = workspace + Int64(word_bytes // 4)
        self.answer = cute.make_tensor(cute.recast_ptr(scratch, dtype=Int32) + group, cute.make_layout(1))
        self.barrier = group + FIRST_NAMED_BARRIER
        self.thread = thread

    def _vector(self, part, number):
        """Four accumulators of this thread, the `number`-th vector, in part number `part`."""
        size = self.units * self.vectors * 4 * WARPGROUP
        place = self.parts + (Int64(part) * size + Int64((number * WARPGROUP + self.thread) * 4))
        return cute.make_tensor(aligned(place, 16), cute.make_layout(4))

    @cute.jit
    def settle(self, accumulators, share, split):
        """Leaves this split's accumulators in the workspace; returns the slices (bits) that this warpgroup adds up."""
        count = self.units * self.vectors
        values = cute.make_tensor(accumulators.iterator, cute.make_layout((4, count)))
        for number in cutlass.range_constexpr(count):
            cute.autovec_copy(values[None, number], self._vector(share * self.splits + split, number))
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
        if self.thread == 0:
            self._answer(self._arrive(self.words + share, split))
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
        return self.answer[0]

    def _answer(self, slices) -> None:
        self.answer[0] = slices

    @cute.jit
    def _arrive(self, word, split):
        """One thread: counts this split in and returns its slices."""
        arrived, left, abandoned = 1, 1 << 8, Int32(1) << (16 + split)
        mine = Int32(0)
        state = self._add(word, Int32(arrived))
        if state & 255 == self.splits - 1:
            mine = (state >> 16) & 0xFFFF
            if split < self.slices:
                mine = mine | (Int32(1) << split)
            state = self._add(word, Int32(left))
        elif split >= self.slices:
            state = self._add(word, Int32(left))
        else:
            polls = Int32(0)
            state = self._look(word)
            while (state & 255 != self.splits) & (polls < POLLS):
                state = self._look(word)
                polls = polls + 1
            complete = state & 255 == self.splits
            state = self._add(word, Int32(left) if complete else Int32(left) + abandoned)
            if state & 255 == self.splits:
                mine = Int32(1) << split
        if (state >> 8) & 255 == self.splits - 1:
            cute.make_tensor(word, cute.make_layout(1))[0] = Int32(0)
        return mine

    def _add(self, word, value):
        return cute.arch.inline_ptx(
            "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Int32],
            read_only_args=[word.toint(), value],
        )

    def _look(self, word):
        return cute.arch.inline_ptx(
            "ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[word.toint()]
        )

    @cute.jit
    def add_up(self, share, unit):
        """The sum of strip `unit` of all parts, in the order of the splits: 4 x `vectors` values of this thread."""
        total = cute.make_rmem_tensor((4, self.vectors), Float32)
        batch = max(VECTORS_IN_FLIGHT // self.vectors, 1)
        for first in cutlass.range_constexpr(0, self.splits, batch):
            count = min(batch, self.splits - first)
            loaded = cute.make_rmem_tensor((4, self.vectors, count), Float32)
            for i in cutlass.range_constexpr(count):
                for v in cutlass.range_constexpr(self.vectors):
                    vector = self._vector(share * self.splits + (first + i), unit * self.vectors + v)
                    cute.autovec_copy(vector, loaded[None, v, i])
            for i in cutlass.range_constexpr(count):
                part = loaded[None, None, i].load()
                total.store(part if first + i == 0 else total.load() + part)
        return total
