"""The workspace of a launch on the device: where warpgroups of several CTAs meet whose sums make up one share of D.

    state words   uint64, one a share, zero before a launch and after it; padded to whole lines of the L2 cache
    parts         fp32: what warpgroups leave for each other

One thread of a warpgroup speaks to the state word; the others hear its answer through shared memory, between two
barriers of the warpgroup. `cutegemm.cute.workspace` keeps the memory.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from cutegemm.cute.hopper.config import WARPGROUP
from cutegemm.cute.hopper.memory import SharedMemory
from cutegemm.cute.hopper.output import Output
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.launch_config import word_bytes


class Workspace:
    """words, parts: pointers. answer: one int32 in shared memory, the warpgroup's. shares: how many there are."""

    def __init__(self, output: Output, memory: SharedMemory, position: Position, shares) -> None:
        self.words = cute.recast_ptr(output.args.workspace, dtype=Int64)
        self.parts = output.args.workspace + Int64(word_bytes(shares) // 4)
        answers = cute.recast_ptr(memory.answers, dtype=Int32)
        self.answer = cute.make_tensor(answers + position.group, cute.make_layout(1))
        self._barrier = position.group_barrier

    def meet(self) -> None:
        """Waits for all threads of the warpgroup."""
        cute.arch.barrier(barrier_id=self._barrier, number_of_threads=WARPGROUP)

    def tell(self, value) -> None:
        """One thread: the answer for all."""
        self.answer[0] = value
