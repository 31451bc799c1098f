"""Split-K on Hopper: the parts of a tile, summed by different CTAs, are added up in a fixed order.

A warpgroup leaves its accumulators of a split in the workspace and counts itself in. The sum is shared out again: a
part falls into as many slices as there are splits, and split number i adds up slice i, all parts in the order of the
splits, so that the result does not depend on who came when. For that it waits until all have come, but not for long:
CTAs need not be resident together. Who has waited too long abandons its slice, and the last to arrive adds up what was
abandoned before.

    workspace   state words (uint64), one for each warpgroup's share of a tile, padded to 16 bytes
                parts (fp32): share, split, then 4 accumulators of each of the 128 threads in turn

    state       bits 0-7    splits that have arrived
                bits 8-15   splits that will not touch the word again; the last sets it to 0 for the next launch
                bits 32-63  slices abandoned

Arriving is a release, seeing all arrived an acquire, both at GPU scope and by one thread; the warpgroup's barriers
before and behind carry the order to the other 127. Whether a slice was abandoned before or after the last arrival is
settled by the order of the operations on the word: an owner that finds all arrived keeps its slice.

With the option `arrival` (`ArrivalSum`) the L2 cache adds: a share has one part for all splits, which add to it as they
come and which is zero before the launch and after it. That writes as much and reads less, but fp32 sums depend on the
order of their terms: the result's last bits differ from run to run. Such additions take subnormal numbers as zero.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.epilogue import aligned
from cutegemm.cute.hopper_config import WARPGROUP, HopperConfig
from cutegemm.cute.kernels.hopper_epilogue import FIRST_NAMED_BARRIER

POLLS = 24
"""Looks at the state word, about 0.6 us each, before a slice is abandoned: more than CTAs of one wave lie apart."""
VECTORS_IN_FLIGHT = 32
"""16-byte loads a thread issues before it adds: the sum is bound by the latency of the L2 cache."""

MOST_UNROLLED = 8
"""Vectors a thread adds up without a loop: the code for one, epilogue and all, is long, and takes long to compile."""


class SplitSum:
    """See the module docstring. `vectors` x 4 accumulators a thread make up a part; `store` takes the sums.

    `kept` parts of a share lie in the workspace.
    """

    def __init__(self, splits: int, vectors: int, store) -> None:
        self.splits = splits
        self.kept = splits
        self.vectors = vectors
        self.store = store
        self.in_part = vectors * WARPGROUP
        self.in_slice = -(-self.in_part // splits)
        self.rounds = -(-self.in_slice // WARPGROUP)

    def start(self, workspace, shares, scratch, group, thread) -> None:
        """Binds to the workspace of `shares` shares, and to one int32 a warpgroup in shared memory at `scratch`."""
        self.words = cute.recast_ptr(workspace, dtype=Int64)
        word_bytes = (shares * 8 + 15) // 16 * 16
        self.parts = workspace + Int64(word_bytes // 4)
        self.answer = cute.make_tensor(cute.recast_ptr(scratch, dtype=Int32) + group, cute.make_layout(1))
        self.barrier = group + FIRST_NAMED_BARRIER
        self.thread = thread

    def _vector(self, part, place):
        """Four accumulators of one thread: vector `place` of part number `part`, 128 threads to an accumulator."""
        pointer = self.parts + (Int64(part) * (4 * self.in_part) + Int64(place * 4))
        return cute.make_tensor(aligned(pointer, 16), cute.make_layout(4))

    @cute.jit
    def settle(self, accumulators, share, split):
        """Leaves this split's accumulators in the workspace; returns the slices (bits) that this warpgroup adds up."""
        values = cute.make_tensor(accumulators.iterator, cute.make_layout((4, self.vectors)))
        for number in cutlass.range_constexpr(self.vectors):
            self._leave(values[None, number], share, split, number * WARPGROUP + self.thread)
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
        if self.thread == 0:
            self._answer(self._arrive(self.words + share, split))
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
        return self.answer[0]

    def _leave(self, values, share, split, place) -> None:
        """Brings four accumulators of this split into the workspace."""
        cute.autovec_copy(values, self._vector(share * self.kept + split, place))

    def _clear(self, share, place) -> None:
        """After vector `place` of all parts of a share has been read."""

    def _answer(self, slices) -> None:
        self.answer[0] = slices

    @cute.jit
    def _arrive(self, word, split):
        """One thread: counts this split in and returns its slices."""
        mine = Int32(1) << split
        state = self._add(word, Int64(1))
        if state & 255 == self.splits - 1:
            mine = mine | (state >> 32).to(Int32)
        else:
            polls = Int32(0)
            state = self._look(word)
            while (state & 255 != self.splits) & (polls < POLLS):
                state = self._look(word)
                polls = polls + 1
            if state & 255 != self.splits:
                state = self._add(word, mine.to(Int64) << 32)
                if state & 255 != self.splits:
                    mine = Int32(0)
        return mine

    @cute.jit
    def leave(self, share):
        """Counts this split out, after `settle`; returns what `clear` needs. Nobody waits for the answer before."""
        word = self.words + share
        state = Int64(0)
        if self.thread == 0:
            state = cute.arch.inline_ptx(
                "atom.relaxed.gpu.global.add.u64 {$w0}, [{$r0}], {$r1};",
                write_only_types=[Int64],
                read_only_args=[word.toint(), Int64(1 << 8)],
            )
        return state

    @cute.jit
    def clear(self, share, state):
        """The last to leave sets the state word to zero for the next launch."""
        word, thread, others = self.words + share, self.thread, Int64(self.splits - 1)
        if (thread == 0) & ((state >> 8) & 255 == others):
            cute.arch.inline_ptx("st.relaxed.gpu.global.u64 [{$r0}], {$r1};", read_only_args=[word.toint(), Int64(0)])

    def _add(self, word, value):
        return cute.arch.inline_ptx(
            "atom.acq_rel.gpu.global.add.u64 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Int64],
            read_only_args=[word.toint(), value],
        )

    def _look(self, word):
        return cute.arch.inline_ptx(
            "ld.acquire.gpu.global.u64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[word.toint()]
        )

    @cute.jit
    def add_up(self, share, number, row, column, matrix, m, n, operands):
        """Adds up slice `number` of a share, whose first accumulator is (row, column) of D, and stores it."""
        batch = max(VECTORS_IN_FLIGHT // self.kept, 1)
        if cutlass.const_expr(self.rounds <= min(batch, MOST_UNROLLED)):
            self._add_rounds(share, number, 0, self.rounds, row, column, matrix, m, n, operands)
        else:
            batch = min(max(batch // 2, 1), MOST_UNROLLED)
            for first in cutlass.range(0, self.rounds, batch, unroll=1):
                self._add_rounds(share, number, first, batch, row, column, matrix, m, n, operands)

    @cute.jit
    def _add_rounds(self, share, number, first, count: cutlass.Constexpr, row, column, matrix, m, n, operands):
        loaded = cute.make_rmem_tensor((4, self.kept, count), Float32)
        for i in cutlass.range_constexpr(count):
            # Beyond the slice's end, its last vector is loaded and not stored (`arrival` may have cleared it).
            last = cutlass.min((number + 1) * self.in_slice, Int32(self.in_part)) - 1
            place = cutlass.min(self._place(number, first + i), last)
            for part in cutlass.range_constexpr(self.kept):
                cute.autovec_copy(self._vector(share * self.kept + part, place), loaded[None, part, i])
        for i in cutlass.range_constexpr(count):
            total = cute.make_rmem_tensor(4, Float32)
            total.store(loaded[None, 0, i].load())
            for part in cutlass.range_constexpr(1, self.kept):
                total.store(total.load() + loaded[None, part, i].load())
            place = self._place(number, first + i)
            if (place < (number + 1) * self.in_slice) & (place < self.in_part):
                self._clear(share, place)
                self.store.store(total, place, row, column, matrix, m, n, operands)

    def _place(self, number, turn):
        """Which vector of the part this thread adds up in its `turn`-th round."""
        return number * self.in_slice + (turn * WARPGROUP + self.thread)


class ArrivalSum(SplitSum):
    """The same with one part a share, to which all splits add in the order of their arrival."""

    def __init__(self, splits: int, vectors: int, store) -> None:
        super().__init__(splits, vectors, store)
        self.kept = 1

    def _leave(self, values, share, split, place) -> None:
        # Relaxed: whoever reads the part has seen this split's arrival, a release after it.
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[self._vector(share, place).iterator.toint(), *(values[q] for q in range(4))],
        )

    def _clear(self, share, place) -> None:
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        cute.autovec_copy(zeros, self._vector(share, place))


def make_sum(config: HopperConfig, store) -> SplitSum:
    """The way of a configuration to add up its splits."""
    return (ArrivalSum if config.in_arrival_order else SplitSum)(config.splits, config.owned_vectors, store)
