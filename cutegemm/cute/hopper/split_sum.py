"""Split-K on Hopper: the parts of a tile, summed by different CTAs, are added up in a fixed order.

A warpgroup leaves its accumulators of a split in the workspace and counts itself in. The sum is shared out again: a
part falls into as many slices as there are splits, and split number i adds up slice i, all parts in the order of the
splits, so that the result does not depend on the order of arrival. The owner of a slice waits until all splits have
arrived, but not for long: CTAs need not be resident together. An owner that has waited too long abandons its slice, and
the last split to arrive adds up all slices that were abandoned before.

    workspace   state words (uint64), one for each warpgroup's share of a tile, padded to whole lines
                parts (fp32): share, split, then 4 accumulators of each of the 128 threads in turn

`cute.state_word` describes the word. One thread speaks to it; the warpgroup's barriers before and behind carry the
order to the other 127.

Parts are read once. What has been added up is discarded from the L2 cache (`discard.global.L2`), which would otherwise
write it to memory when other data displaces it: slices are whole lines of the cache. Where the number of splits divides
a thread's vectors of 4 accumulators, a slice is some of every thread's; if they are few enough to be added up without a
loop, those of a split's own slice stay in registers and never reach the workspace.

With the option `arrival` (`ArrivalSum`) the L2 cache adds: a share has one part for all splits, which add to it as they
come and which is zero before the launch and after it. That writes as much and reads less, but fp32 sums depend on the
order of their terms: the result's last bits differ from run to run. Such additions take subnormal numbers as zero.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.hopper.cluster_sum import ClusterSum
from cutegemm.cute.hopper.config import WARPGROUP, HopperConfig
from cutegemm.cute.hopper.fragment import FragmentStore
from cutegemm.cute.hopper.memory import SharedMemory
from cutegemm.cute.hopper.output import Output
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.work import Work
from cutegemm.cute.hopper.workspace import Workspace
from cutegemm.cute.source import aligned
from cutegemm.cute.state_word import abandon, arrive, clear, leave
from cutegemm.cute.whole import Adder
from cutegemm.hardware.arch import LINE

VECTORS_IN_FLIGHT = 32
"""16-byte loads a thread issues before it adds: the sum is bound by the latency of the L2 cache."""
IN_LINE = LINE // 16
"""Vectors in a line of the L2 cache."""

LEAST_DISCARDED = 16 * 1024
"""Bytes of a warpgroup's part from which on what is read is discarded: of smaller ones, a warpgroup an SM leaves 2 MB
at most, and discarding costs a launch 0.06 us (64x64x16384 on an H200)."""
MOST_UNROLLED = 8
"""Vectors a thread adds up without a loop: the code for one, epilogue and all, is long, and takes long to compile."""


class SplitSum:
    """Adds up the parts of a tile's splits of K. `vectors` x 4 accumulators a thread make up a part.

    owner: gives the vectors that this CTA owns of a warpgroup's accumulators, and stores them when they are summed.
    add: the sum of two vectors. stored: parts of a share in the workspace, one for each split by default.
    """

    def __init__(
        self, config: HopperConfig, owner: FragmentStore | ClusterSum, add: Adder, stored: int | None = None
    ) -> None:
        splits, vectors = config.splits, config.owned_vectors()
        self.splits = splits
        self.stored = splits if stored is None else stored
        self.vectors, self.add = vectors, add
        self.cluster_ctas, self.consumers = config.cluster_ctas, config.consumers
        self.owner = owner
        self.in_part = vectors * WARPGROUP
        self.in_slice = -(-self.in_part // (splits * IN_LINE)) * IN_LINE
        self.rounds = -(-self.in_slice // WARPGROUP)
        self.discards = self.in_part * 16 >= LEAST_DISCARDED
        self.at_once = max(VECTORS_IN_FLIGHT // self.stored, 1)
        self.unrolled = self.rounds <= min(self.at_once, MOST_UNROLLED)
        # Vectors of its own slice that a thread keeps in registers.
        self.kept = vectors // splits if self.unrolled and vectors % splits == 0 and self.stored == splits else 0

    def initialize(self, memory: SharedMemory) -> None:
        self.owner.initialize(memory)

    def start(self, output: Output, memory: SharedMemory, position: Position, work: Work) -> None:
        """Binds to a workspace with a share for each warpgroup of each tile."""
        self.owner.start(output, memory, position, work)
        shares = work.end // self.splits * (self.cluster_ctas * self.consumers)
        self.position, self.thread = position, position.own_thread
        self.workspace = Workspace(output, memory, position, shares)

    @cute.jit
    def finish(self, accumulators, tile, work):
        """Leaves this split's part of the tile, then adds up and stores the slices that fall to this warpgroup."""
        sums = self.owner.exchange(accumulators)
        cta_tile = tile.cluster_tile * self.cluster_ctas + self.position.rank
        share = cta_tile * self.consumers + self.position.group
        slices = self._settle(sums, share, tile.work % self.splits)
        state = leave(self.workspace.words + share, self.thread)
        for number in cutlass.range(self.splits, unroll=1):
            if (slices >> number) & 1 == 1:
                self._add_up(share, number, tile, work)
        clear(self.workspace.words + share, self.thread, state, self.splits)

    def end(self) -> None:
        """Nothing is under way in shared memory: sums go from registers to D."""

    def _vector(self, part, place):
        """Four accumulators of one thread: vector `place` of part number `part`, 128 threads to an accumulator."""
        pointer = self.workspace.parts + (Int64(part) * (4 * self.in_part) + Int64(place * 4))
        return cute.make_tensor(aligned(pointer, 16), cute.make_layout(4))

    @cute.jit
    def _settle(self, accumulators, share, split):
        """Leaves this split's accumulators in the workspace; returns the slices (bits) that this warpgroup adds up."""
        values = cute.make_tensor(accumulators.iterator, cute.make_layout((4, self.vectors)))
        self.split, self.own = split, cute.make_rmem_tensor((4, max(self.kept, 1)), Float32)
        self.own.fill(0.0)
        if cutlass.const_expr(self.kept == 0):
            self._leave_all(values, 0, self.vectors, share)
        else:
            for number in cutlass.range_constexpr(self.splits):
                if split == number:
                    for i in cutlass.range_constexpr(self.kept):
                        cute.autovec_copy(values[None, number * self.kept + i], self.own[None, i])
                else:
                    self._leave_all(values, number * self.kept, self.kept, share)
        slices = self._ask(share, False)
        if slices == 0:
            for i in cutlass.range_constexpr(self.kept):
                self._leave(self.own[None, i], share, self._place(split, i))
            slices = self._ask(share, True)
        return slices

    @cute.jit
    def _ask(self, share, late: cutlass.Constexpr):
        """Bit mask of the slices that this warpgroup adds up; 0 while parts are missing, and for good when `late`."""
        self.workspace.meet()
        if self.thread == 0:
            word, mine = self.workspace.words + share, Int32(1) << self.split
            ask = abandon if cutlass.const_expr(late) else arrive
            self.workspace.tell(ask(word, mine, self.splits))
        self.workspace.meet()
        return self.workspace.answer[0]

    def _leave_all(self, values, first: int, count: int, share) -> None:
        for number in range(first, first + count):
            self._leave(values[None, number], share, number * WARPGROUP + self.thread)

    def _leave(self, values, share, place) -> None:
        """Brings four accumulators of this split into the workspace."""
        cute.autovec_copy(values, self._vector(share * self.stored + self.split, place))

    @cute.jit
    def _add_up(self, share, number, tile, work):
        """Adds up slice `number` of a share and stores it."""
        region = work.region(tile)
        if cutlass.const_expr(self.unrolled):
            self._add_rounds(share, number, 0, self.rounds, region)
        else:
            batch = min(max(self.at_once // 2, 1), MOST_UNROLLED)
            for first in cutlass.range(0, self.rounds, batch, unroll=1):
                self._add_rounds(share, number, first, batch, region)

    @cute.jit
    def _add_rounds(self, share, number, first, count: cutlass.Constexpr, region):
        end = cutlass.min((number + 1) * self.in_slice, Int32(self.in_part))
        loaded = cute.make_rmem_tensor((4, self.stored, count), Float32)
        for i in cutlass.range_constexpr(count):
            place = self._place(number, first + i)
            for part in cutlass.range_constexpr(self.stored):
                self._load(loaded[None, part, i], share, part, number, place, end, i if self.kept else 0)
        for i in cutlass.range_constexpr(count):
            total = cute.make_rmem_tensor(4, Float32)
            total.store(loaded[None, 0, i].load())
            for part in cutlass.range_constexpr(1, self.stored):
                total.store(self.add(total.load(), loaded[None, part, i].load()))
            place = self._place(number, first + i)
            if place < end:
                self.owner.store(total, place, region)
        self._finish(share, number, first, count, end)

    def _load(self, target, share, part: int, number, place, end, i: int) -> None:
        """Vector `place` of a part where it lies in the workspace, else this thread's `i`-th own."""
        found = cute.arch.inline_ptx(
            "{ .reg .pred p; .reg .f32 a, b, c, d; setp.ne.s32 p, {$r0}, 0; "
            "mov.f32 a, {$r2}; mov.f32 b, {$r3}; mov.f32 c, {$r4}; mov.f32 d, {$r5}; "
            "@p ld.global.v4.f32 {a, b, c, d}, [{$r1}]; "
            "mov.f32 {$w0}, a; mov.f32 {$w1}, b; mov.f32 {$w2}, c; mov.f32 {$w3}, d; }",
            write_only_types=[Float32] * 4,
            read_only_args=[
                Int32(self._lies(part, number, place, end)),
                self._vector(share * self.stored + part, place).iterator.toint(),
                *(self.own[q, i] for q in range(4)),
            ],
        )
        for q in range(4):
            target[q] = found[q]

    def _lies(self, part, number, place, end):
        """Whether vector `place` of slice `number`, which goes to `end`, lies in the workspace for this part."""
        lies = place < end
        return lies & ((number != self.split) | (part != self.split)) if self.kept else lies

    @cute.jit
    def _finish(self, share, number, first, count: cutlass.Constexpr, end):
        """Discards from the L2 cache the lines of the workspace that the warp has read, one line a lane."""
        if cutlass.const_expr(self.discards):
            cute.arch.sync_warp()
            self._discard(share, number, first, count, end)

    @cute.jit
    def _discard(self, share, number, first, count: cutlass.Constexpr, end):
        lane = self.thread % 32
        in_warp = 32 // IN_LINE
        at_once = 32 // in_warp
        for i in cutlass.range_constexpr(count):
            place = self._place(number, first + i) - lane + lane % in_warp * IN_LINE
            for some in cutlass.range_constexpr(0, self.stored, at_once):
                part = some + lane // in_warp
                if (part < self.stored) & self._lies(part, number, place, end):
                    cute.arch.inline_ptx(
                        "discard.global.L2 [{$r0}], 128;",
                        read_only_args=[self._vector(share * self.stored + part, place).iterator.toint()],
                    )

    def _place(self, number, turn):
        """Which vector of the part this thread adds up in its `turn`-th round."""
        return number * self.in_slice + (turn * WARPGROUP + self.thread)


class ArrivalSum(SplitSum):
    """The same with one part a share, to which all splits add in the order of their arrival."""

    def __init__(self, config: HopperConfig, owner: FragmentStore | ClusterSum, add: Adder) -> None:
        super().__init__(config, owner, add, stored=1)

    def _leave(self, values, share, place) -> None:
        # Relaxed: whoever reads the part has seen this split's arrival, a release after it.
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[self._vector(share, place).iterator.toint(), *(values[q] for q in range(4))],
        )

    @cute.jit
    def _finish(self, share, number, first, count: cutlass.Constexpr, end):
        """Zeros for the next launch."""
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(count):
            place = self._place(number, first + i)
            if place < end:
                cute.autovec_copy(zeros, self._vector(share, place))
