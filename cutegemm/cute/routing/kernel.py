"""The kernel that sorts slots by expert; see `config.py` for its passes.

Lanes of a warp that hold slots of one expert find each other by a ballot for each bit of the expert's number: how many
of them are in front is a lane's place among them, and the first of them counts for all. (`match.any` takes as long as
there are different experts: three times as much for 128.) A counter of a warp and an expert is first the number of
their slots, then the place of the first one.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutegemm.cute import types
from cutegemm.cute.routing.config import POINTERS, WARP, Signature, Tile
from cutegemm.cute.source import element
from cutegemm.cute.standalone_operator import StandaloneOperator

NUMBERS: tuple[tuple[str, Any], ...] = (
    *((name, Int32) for name in ("slots", "top_k", "groups", "ctas")),
    *((f"{name}_{axis}", Int64) for name in "ew" for axis in ("token", "choice")),
    ("early", Int32),
)
"""The entry's numbers behind the stream; groups: how many experts there are. Strides are in elements, those of the
experts' numbers (e) and of the weights (w)."""


class Route(StandaloneOperator):
    """Host entry and kernel; `config` is the tile."""

    POINTERS, NUMBERS = POINTERS, NUMBERS

    def __init__(self, config: Tile, signature: Signature) -> None:
        self.config, self.signature = config, signature
        self.index: Any = Int32 if signature.index == "int32" else Int64
        self.weight: Any = types.NUMERIC[signature.weight]

    def pointee(self, name: str) -> tuple[Any, int]:
        kinds = {"experts": self.index, "weights": self.weight, "sorted": self.weight}
        kind = kinds.get(name, Int32)
        return kind, kind.width // 8

    @cute.kernel
    def kernel(self, args):
        self.args, config = args, self.config
        self.thread, self.part = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        self.warp, self.lane = self.thread // WARP, self.thread % WARP
        self.expert, self.group = self.thread % config.experts, self.thread // config.experts
        counters, sums = config.warps * config.experts, config.warps
        memory = cutlass.memory.SmemAllocator().allocate_array(Int32, config.smem_bytes() // 4)
        self.counters = cute.make_tensor(memory, cute.make_layout(counters))
        self.sums = cute.make_tensor(memory + counters, cute.make_layout(sums))
        self.partial = cute.make_tensor(memory + (counters + sums), cute.make_layout(2 * config.threads))
        self._clear()
        self.await_front()
        slots = [self._slot(step) for step in range(config.deep)]
        found = [self._found(slot) for slot in slots]
        weights = [self._weight(slot, known) for slot, (_, known) in zip(slots, found, strict=True)]
        cute.arch.sync_threads()
        in_warp = [self._place_in_warp(step, expert) for step, (expert, _) in enumerate(found)]
        cute.arch.sync_threads()
        own = self._running_counts()
        if self.signature.does == "count":
            self._put_counts(own)
        else:
            self._find_places(own)
            cute.arch.sync_threads()
            for slot, (expert, _), place, weight in zip(slots, found, in_warp, weights, strict=True):
                self._put_slot(slot, expert, place, weight)

    def _put(self, pointer, at, value) -> None:
        cute.make_tensor(pointer + at, cute.make_layout(1))[0] = value

    @cute.jit
    def _clear(self):
        counters = self.counters
        for place in cutlass.range(self.thread, self.config.warps * self.config.experts, self.config.threads):
            counters[place] = Int32(0)

    # -- slots
    def _slot(self, step: int) -> Any:
        own = WARP * self.config.deep
        return self.part * self.config.slots + (self.warp * own + step * WARP + self.lane)

    def _at(self, pointer, slot, along_tokens, along_choices) -> Any:
        """The element of a slot; of one beyond the end that of the last."""
        slot = cutlass.min(slot, self.args.slots - 1)
        token = slot // self.args.top_k
        return element(pointer, Int64(token) * along_tokens + Int64(slot - token * self.args.top_k) * along_choices)

    @cute.jit
    def _found(self, slot):
        """(the expert of a slot, within bounds, or -1 beyond the last slot; whether it was within bounds)."""
        given = self._at(self.args.experts, slot, self.args.e_token, self.args.e_choice)
        within = cutlass.min(cutlass.max(given, self.index(0)), self.index(self.args.groups - 1))
        expert = Int32(within)
        if slot >= self.args.slots:
            expert = Int32(-1)
        return expert, given == within

    @cute.jit
    def _weight(self, slot, known):
        """The weight of a slot, 0 where its expert was out of bounds."""
        weight = self.weight(0.0)
        if cutlass.const_expr(self.signature.does != "count"):
            weight = self._at(self.args.weights, slot, self.args.w_token, self.args.w_choice)
            if not known:
                weight = self.weight(0.0)
        return weight

    @cute.jit
    def _place_in_warp(self, step: cutlass.Constexpr, expert):
        """Counts a slot of each lane; the place of this lane's among those that its warp has of the expert."""
        counters = self.counters
        inside = expert >= 0
        alike = cute.arch.vote_ballot_sync(inside)
        for bit in cutlass.range_constexpr(self.config.experts.bit_length() - 1):
            own = (expert >> bit) & 1
            alike = alike & (cute.arch.vote_ballot_sync(own != 0) ^ (own - 1))
        in_front = cute.arch.popc(alike & ((Int32(1) << self.lane) - 1))
        counter = self.warp * self.config.experts + cutlass.max(expert, 0)
        if cutlass.const_expr(step > 0):
            cute.arch.sync_warp()
        before = counters[counter]
        cute.arch.sync_warp()
        if inside & (in_front == 0):
            counters[counter] = before + cute.arch.popc(alike)
        return before + in_front

    @cute.jit
    def _put_slot(self, slot, expert, in_warp, weight):
        """Writes a slot, its token and its weight to its place, and the place to the slot."""
        if expert >= 0:
            place = self.counters[self.warp * self.config.experts + expert] + in_warp
            self._put(self.args.places, place, slot)
            self._put(self.args.rows, place, slot // self.args.top_k)
            self._put(self.args.sorted, place, weight)
            self._put(self.args.row_of, slot, place)

    # -- experts
    @cute.jit
    def _running_counts(self):
        """Makes of each count what the warps in front have counted; gives what all have, of this thread's expert."""
        counters = self.counters
        total = Int32(0)
        if self.thread < self.config.experts:
            for warp in cutlass.range_constexpr(self.config.warps):
                place = warp * self.config.experts + self.thread
                here = counters[place]
                counters[place] = total
                total = total + here
        return total

    @cute.jit
    def _put_counts(self, own):
        if self.thread < self.args.groups:
            self._put(self.args.counts, Int64(self.part) * self.args.groups + self.thread, own)

    @cute.jit
    def _find_places(self, own):
        """Makes of each count the place of the first slot of that warp and expert; writes the ends."""
        counters = self.counters
        total, in_front = own, Int32(0)
        if cutlass.const_expr(self.signature.does == "place"):
            total, in_front = self._counts_of_all()
        end = self._sum_of_experts(total)
        if (self.part == 0) & (self.thread < self.args.groups):
            self._put(self.args.ends, self.thread, end)
        first = end - total + in_front
        if self.thread < self.config.experts:
            for warp in cutlass.range_constexpr(self.config.warps):
                place = warp * self.config.experts + self.thread
                counters[place] = counters[place] + first

    @cute.jit
    def _counts_of_all(self):
        """(the slots of this thread's expert in all CTAs, in those in front of this one); the threads of an expert
        share the CTAs.
        """
        partial, threads = self.partial, self.config.threads
        groups = threads // self.config.experts
        total, in_front = Int32(0), Int32(0)
        if self.expert < self.args.groups:
            for part in cutlass.range(self.group, self.args.ctas, groups, unroll=4):
                count = element(self.args.counts, Int64(part) * self.args.groups + self.expert)
                total = total + count
                if part < self.part:
                    in_front = in_front + count
        partial[self.thread], partial[threads + self.thread] = total, in_front
        cute.arch.sync_threads()
        total, in_front = Int32(0), Int32(0)
        for group in cutlass.range_constexpr(groups):
            place = group * self.config.experts + self.expert
            total, in_front = total + partial[place], in_front + partial[threads + place]
        return total, in_front

    @cute.jit
    def _sum_of_experts(self, number):
        """The sum of the numbers of this thread's expert and all in front of it."""
        sums = self.sums
        for power in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(number, 1 << power)
            if self.lane >= 1 << power:
                number = number + other
        if self.lane == WARP - 1:
            sums[self.warp] = number
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(self.config.experts // WARP - 1):
            if warp < self.warp:
                number = number + sums[warp]
        return number
