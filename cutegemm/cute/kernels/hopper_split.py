"""Split-K on Hopper: the parts of a tile, summed by different CTAs, are added up in a fixed order.

Each warpgroup writes its accumulators to its part of the workspace and counts itself in. The one that finds all others
counted reads every part, in the order of the splits, and stores the tile: the sum does not depend on who came last.
It leaves the counter at 0 for the next launch.

    workspace   counters (int32), one for each warpgroup's share of a tile, padded to 16 bytes
                parts (fp32): share, split, then 4 accumulators of each of the 128 threads in turn

The count is an acquire-release operation at GPU scope by one thread; the warpgroup's barriers before and behind it
carry its order to the other 127.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.epilogue import aligned
from cutegemm.cute.hopper_config import WARPGROUP
from cutegemm.cute.kernels.hopper_epilogue import FIRST_NAMED_BARRIER


class SplitSum:
    """See the module docstring."""

    def __init__(self, splits: int, accumulators: int) -> None:
        self.splits = splits
        self.count = accumulators

    def start(self, workspace, shares, scratch, group, thread) -> None:
        """Binds to the workspace of `shares` shares, and to one int32 a warpgroup in shared memory at `scratch`."""
        self.counters = cute.recast_ptr(workspace, dtype=Int32)
        counter_bytes = (shares * 4 + 15) // 16 * 16
        self.parts = workspace + Int64(counter_bytes // 4)
        self.answer = cute.make_tensor(cute.recast_ptr(scratch, dtype=Int32) + group, cute.make_layout(1))
        self.barrier = group + FIRST_NAMED_BARRIER
        self.thread = thread

    def _vector(self, part, number: int):
        """Four accumulators of this thread, the `number`-th vector, in part number `part`."""
        place = self.parts + (Int64(part) * (self.count * WARPGROUP) + Int64((number * WARPGROUP + self.thread) * 4))
        return cute.make_tensor(aligned(place, 16), cute.make_layout(4))

    @cute.jit
    def count_in(self, accumulators, share, split):
        """Leaves this split's accumulators in the workspace; true for the last split of the share to arrive."""
        values = cute.make_tensor(accumulators.iterator, cute.make_layout((4, self.count // 4)))
        for number in cutlass.range_constexpr(self.count // 4):
            cute.autovec_copy(values[None, number], self._vector(share * self.splits + split, number))
        cute.arch.fence_acq_rel_gpu()
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
        if self.thread == 0:
            self._ask(share)
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
        return self.answer[0] == self.splits - 1

    @cute.jit
    def add_up(self, accumulators, share):
        """The sum of all parts, in the order of the splits, into the accumulators."""
        cute.arch.fence_acq_rel_gpu()
        values = cute.make_tensor(accumulators.iterator, cute.make_layout((4, self.count // 4)))
        for number in cutlass.range_constexpr(self.count // 4):
            total = cute.make_rmem_tensor(4, Float32)
            total.fill(0.0)
            for split in cutlass.range_constexpr(self.splits):
                part = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(self._vector(share * self.splits + split, number), part)
                total.store(total.load() + part.load())
            cute.autovec_copy(total, values[None, number])
        if self.thread == 0:
            self._reset(share)

    def _ask(self, share) -> None:
        """Counts this split in, and tells the warpgroup how many were before."""
        before = cute.arch.inline_ptx(
            "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], 1;",
            write_only_types=[Int32],
            read_only_args=[(self.counters + share).toint()],
        )
        self.answer[0] = before

    def _reset(self, share) -> None:
        cute.make_tensor(self.counters + share, cute.make_layout(1))[0] = Int32(0)
