"""Clusters along K on Hopper: the CTAs of a cluster that sum parts of one tile add them up through shared memory.

In a cluster of CM x CN x CK the CK CTAs of a place (row, column) compute the same tile of D over different parts of K.
The sum is shared out: the CTA with K rank r owns the r-th of CK runs of every thread's accumulators, in units of one
vector of 4; runs differ by one where their number does not divide. With gate and up in halves a unit is two
vectors: one of gate, and the one of up for the same results.
Each sends the others theirs over distributed shared memory, adds what it receives to its own and stores that:

    CTA 0 | WGMMA over part 0 .... | drained | send run 1 -> | add what came | store run 0
    CTA 1 | WGMMA over part 1 ...... | drained | send run 0 -> | add what came | store run 1

What is received lies in the ring, which holds no operands any more: the CTA has one work only. There are two kinds of
mbarriers:

    ready       in the sender: all others' rings are drained.  One arrival of each of their consumer warps
    received    in the receiver, one a warpgroup: all bytes of its runs have come.  One arrival, which announces them;
                the stores count them down

Why the memory is free: a consumer warp arrives at `ready` behind its wait for its last WGMMA, and it had waited for
every stage that TMA filled. So all TMA writes (of this CTA or, with multicast, of its neighbours) have landed, their
completion made them visible to ordinary accesses, and all reads of WGMMA are done; nothing of the asynchronous proxy
is left that a fence would have to order. The arrival is that of the ring's own release: it hands over reads that are
done, no writes. Like every arrival at a neighbour's barrier that only frees a stage, it is a release at CTA scope. The
letter of the memory model asks for cluster scope where the waiting warp is in another CTA, but that is compiled to a
fence of the whole GPU's memory (MEMBAR.ALL.GPU) between the last WGMMA and the exchange, with nothing left for it to
wait for. The barriers themselves lie outside the ring.

Why the sum is right: st.async counts its bytes at the receiver's mbarrier by a release at cluster scope, and the
waiting warps acquire at that scope. No CTA writes with ordinary remote stores, which would need a fence of the whole
GPU's memory before the arrival.

Why nobody comes too late: a CTA has waited for all that others send it, data and arrivals, before it leaves.
Where it multicasts too, its producer also waits for the last arrivals at `empty` (`Ring.drain`).

The order of the terms, first the owner's, then the others by rank, depends on the place in the tile alone: the same
bits on every run.

    received    warpgroup, sender (by rank, the owner left out), vector of the run, 128 threads x 16 bytes
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.hopper.config import WARPGROUP, HopperConfig
from cutegemm.cute.hopper.fragment import FragmentStore
from cutegemm.cute.hopper.memory import SharedMemory
from cutegemm.cute.hopper.output import Output
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.work import Work
from cutegemm.cute.whole import Adder

VECTOR_BYTES = 16


class ClusterSum:
    """Adds up the parts of the CTAs along K of a cluster; `fragments` takes the sums. add: the sum of two vectors."""

    def __init__(self, config: HopperConfig, fragments: FragmentStore, add: Adder) -> None:
        self.parts = config.cluster_k
        self.plane = config.cluster[0] * config.cluster[1]
        self.consumers = config.consumers
        self.up, self.width = fragments.up, 2 if fragments.up else 1
        self.all_units = config.accumulators // (4 * self.width)
        self.units = config.owned_vectors(self.width) // self.width
        self.run_bytes = self.units * self.width * WARPGROUP * VECTOR_BYTES
        self.fragments, self.add = fragments, add

    def start(self, output: Output, memory: SharedMemory, position: Position, work: Work) -> None:
        """Binds to a launch's output, to the ring's memory, to the mbarriers and to this thread."""
        rank, group, thread = position.rank, position.group, position.own_thread
        self._bind(memory.meeting)
        self.place, self.own = rank % self.plane, rank // self.plane
        self.mailbox = memory.ring.toint() + (group * ((self.parts - 1) * self.run_bytes) + thread * VECTOR_BYTES)
        self.group, self.thread = group, thread
        self.first = self._first(self.own)
        self.count = self._first(self.own + 1) - self.first
        self.fragments.start(output, memory, position)

    def finish(self, accumulators, tile, work) -> None:
        """Adds up and stores this CTA's share of the tile."""
        sums = self.exchange(accumulators)
        self._store_all(sums, work.region(tile))

    def end(self) -> None:
        """Nothing is under way: `exchange` has waited for all that others send."""

    def _first(self, part):
        """The first unit of a run."""
        return part * self.all_units // self.parts

    def _run(self, part: int) -> range:
        return range(self._first(part), self._first(part + 1))

    def _owns(self, number: int):
        """Whether this CTA's run has unit `number`; only the last of a run may be missing."""
        return True if number < self.all_units // self.parts else self.count > number

    def _in_units(self, accumulators, count: int):
        """The first so many units, (4, unit) or, of gate and up, (4, unit, which of the two)."""
        shape: Any = (4, count)
        stride: Any = (1, 4)
        if self.width > 1:
            blocks = self.all_units // self.up
            shape, stride = (4, (self.up, blocks), 2), (1, (4, 8 * self.up), 4 * self.up)
        return cute.make_tensor(accumulators.iterator, cute.make_layout(shape, stride=stride))

    def _vectors(self, values, number: int) -> list:
        """The vectors of a unit."""
        return [values[None, number]] if self.width == 1 else [values[None, number, 0], values[None, number, 1]]

    def _bind(self, barriers) -> None:
        self.ready = cute.recast_ptr(barriers, dtype=Int64)
        self.received = self.ready + 1

    def initialize(self, memory: SharedMemory) -> None:
        """By one thread, before anyone uses the barriers."""
        self._bind(memory.meeting)
        cute.arch.mbarrier_init(self.ready, (self.parts - 1) * 4 * self.consumers)
        for group in range(self.consumers):
            cute.arch.mbarrier_init(self.received + group, 1)

    @cute.jit
    def exchange(self, accumulators):
        """The sums of this CTA's run, as `_in_units` has them. For a warpgroup whose last WGMMA is done."""
        values = self._in_units(accumulators, self.all_units)
        if self.thread == 0:
            announced = self.count * ((self.parts - 1) * self.width * WARPGROUP * VECTOR_BYTES)
            cute.arch.mbarrier_arrive_and_expect_tx(self.received + self.group, announced)
        lane = self.thread % 32
        if (lane < self.parts) & (lane != self.own):
            cute.arch.mbarrier_arrive(self.ready, self._cta(lane))
        self._wait(self.ready)
        places = [self._place_at(part) for part in range(self.parts)]
        for number in cutlass.range_constexpr(self.units):
            for part in cutlass.range_constexpr(self.parts):
                if cutlass.const_expr(number < len(self._run(part))):  # noqa: SIM102
                    if self.own != part:
                        self._send(values, self._run(part)[number], number, *places[part])
        # The CTA's own run moves to the first's place, where no register more is needed.
        sums = self._in_units(accumulators, self.units)
        for part in cutlass.range_constexpr(1, self.parts):
            if self.own == part:
                for number in cutlass.range_constexpr(len(self._run(part))):
                    self._move(values, self._run(part)[number], sums, number)
        self._wait(self.received + self.group)
        for number in cutlass.range_constexpr(self.units):
            if self._owns(number):
                for sender in cutlass.range_constexpr(self.parts - 1):
                    self._add(sums, number, sender)
        return sums

    def _move(self, values, number: int, sums, place: int) -> None:
        for vector, taken in zip(self._vectors(values, number), self._vectors(sums, place), strict=True):
            cute.autovec_copy(vector, taken)

    def _add(self, sums, number: int, sender: int) -> None:
        """Adds what a sender has sent for a unit of this CTA's run."""
        for i, vector in enumerate(self._vectors(sums, number)):
            vector.store(self.add(vector.load(), self._arrived(sender, number * self.width + i).load()))

    def _cta(self, part):
        """The CTA of the cluster at this one's place that sums `part`."""
        return part * self.plane + self.place

    def _place_at(self, part: int) -> tuple:
        """(address in the mailbox, mbarrier) where this CTA's run goes in the CTA that sums `part`."""
        sender = self.own - cutlass.min(cutlass.max(self.own - part, 0), 1)
        return (
            self._map(self.mailbox + sender * self.run_bytes, part),
            self._map((self.received + self.group).toint(), part),
        )

    def _map(self, address, part: int):
        return cute.arch.inline_ptx(
            "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
            write_only_types=[Int32],
            read_only_args=[address, self._cta(part)],
        )

    def _send(self, values, number: int, place: int, address, barrier) -> None:
        """Sends unit `number` to its owner, of whose run it is unit `place`."""
        for i, vector in enumerate(self._vectors(values, number)):
            offset = (place * self.width + i) * WARPGROUP * VECTOR_BYTES
            cute.arch.inline_ptx(
                "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                f"[{{$r0}}+{offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}}, [{{$r5}}];",
                read_only_args=[address, *(vector[q] for q in range(4)), barrier],
            )

    def _arrived(self, sender: int, number: int):
        """Vector `number` of the run that the `sender`-th of the other CTAs has sent."""
        found = cute.arch.inline_ptx(
            "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
            f"[{{$r0}}+{sender * self.run_bytes + number * WARPGROUP * VECTOR_BYTES}];",
            write_only_types=[Float32] * 4,
            read_only_args=[self.mailbox],
        )
        vector = cute.make_rmem_tensor(4, Float32)
        for q in range(4):
            vector[q] = found[q]
        return vector

    @cute.jit
    def _wait(self, barrier):
        """Waits for the barrier's only phase, as an acquire at cluster scope."""
        done = Int32(0)
        while done == 0:
            done = self._look(barrier)

    def _look(self, barrier):
        return cute.arch.inline_ptx(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [{$r0}], 0; "
            "selp.b32 {$w0}, 1, 0, p; }",
            write_only_types=[Int32],
            read_only_args=[barrier.toint()],
        )

    @cute.jit
    def _store_all(self, sums, region):
        """Finishes and stores the sums of this CTA's share of a warpgroup's region."""
        for number in cutlass.range_constexpr(self.units):
            place = number * WARPGROUP + self.thread
            self.store(sums[None, number] if self.width == 1 else sums[None, number, None], place, region)

    @cute.jit
    def store(self, sums, place, region):
        """Stores unit `place` of this CTA's run; in `SplitSum` it stands where `FragmentStore` does."""
        at = self.first * WARPGROUP + place
        if cutlass.const_expr(self.all_units % self.parts == 0):  # noqa: SIM114
            self.fragments.store(sums, at, region)
        elif place < self.count * WARPGROUP:
            self.fragments.store(sums, at, region)
