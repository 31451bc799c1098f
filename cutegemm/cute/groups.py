"""Which group a work belongs to: each warp finds it in an array of the groups' ends in the GPU's memory.

Works are numbered group by group. A warp looks at 32 groups at a time, a group a lane: it loads their ends, makes them
ascend (below), and sums up how many works they have. The works of a role come in ascending order, so that the 32 groups
in its registers are nearly always those of its next work too: one ballot then finds the group, three shuffles tell the
lanes about it. The number of all works is summed once, when a CTA begins. A warp that has a single work needs no such
sum: `find_alone` finds its group.

Ends that descend, and ends outside of the array, are no reason to touch anything else: an end counts as at least that
of the group before it, and as at most the array's extent. Counts of rows (masked works) count as 0 to all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

LANES = 32
# What a warp keeps in registers: numbers of its own lane, and numbers that all lanes have.
_BEGIN, _END, _WORKS, _FIRST_GROUP, _WORKS_BEFORE, _LAST_END = range(6)


class Groups:
    """The groups of a launch; `start` binds it. `read` must come before `find`, but not before `find_alone`.

    `ends`: an int32 a group. `extent`: of the array that they divide, or of each product where they are counts.
    `works`: of (begin, end) of a group, its number of works. `lean`: a lane does not keep where its group begins, for
    kernels that have no register left for it.
    """

    def __init__(self, counts: bool, lean: bool = False) -> None:
        self.counts, self.lean = counts, lean

    def start(self, ends, groups, extent, works: Callable[[Any, Any], Any]) -> None:
        self.ends, self.groups, self.extent, self.works = ends, groups, extent, works
        self.lane = cute.arch.lane_idx()
        self.state = cute.make_rmem_tensor(6, Int32)

    @cute.jit
    def read(self):
        """The number of all works; afterwards the first 32 groups are in registers."""
        begin, end = self._load(Int32(0), Int32(0))
        own = self._count(Int32(0), begin, end)
        self._keep(Int32(0), Int32(0), begin, end, own)
        last = cute.arch.shuffle_sync(end, LANES - 1)
        for base in cutlass.range(LANES, self.groups, LANES, unroll=1):
            begin, end = self._load(base, last)
            own = own + self._count(base, begin, end)
            last = cute.arch.shuffle_sync(end, LANES - 1)
        return cute.arch.warp_redux_sync(own, "add")

    @cute.jit
    def find(self, number):
        """(group, where it begins, where it ends, its first work) of work `number`. The work must exist, and must not
        come before that of the last call.
        """
        if cutlass.const_expr(self.lean):
            found = self._find_lean(number)
        else:
            found = self._find(number)
        return found

    @cute.jit
    def _find(self, number):
        state = self.state
        base, before = state[_FIRST_GROUP], state[_WORKS_BEFORE]
        begin, end, upto = state[_BEGIN], state[_END], state[_WORKS]
        total = cute.arch.shuffle_sync(upto, LANES - 1)
        while total <= number:
            base, before, _last, begin, end, _own, upto, total = self._following(base, end, total)
        state[_FIRST_GROUP], state[_WORKS_BEFORE] = base, before
        state[_BEGIN], state[_END], state[_WORKS] = begin, end, upto
        place = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= number))
        first = cute.arch.shuffle_sync(upto - self.works(begin, end), place)
        found_begin = cute.arch.shuffle_sync(begin, place)
        found_end = cute.arch.shuffle_sync(end, place)
        return base + place, found_begin, found_end, first

    @cute.jit
    def _find_lean(self, number):
        """The same; where a group begins, and its first work, are asked of the lane before it."""
        state = self.state
        base, before, last = state[_FIRST_GROUP], state[_WORKS_BEFORE], state[_LAST_END]
        end, upto = state[_END], state[_WORKS]
        total = cute.arch.shuffle_sync(upto, LANES - 1)
        while total <= number:
            base, before, last, _begin, end, _own, upto, total = self._following(base, end, total)
        state[_FIRST_GROUP], state[_WORKS_BEFORE], state[_LAST_END] = base, before, last
        state[_END], state[_WORKS] = end, upto
        place = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= number))
        left = cutlass.max(place - 1, Int32(0))
        first = cute.arch.shuffle_sync(upto, left)
        found_begin = cute.arch.shuffle_sync(end, left)
        found_end = cute.arch.shuffle_sync(end, place)
        if place == 0:
            first, found_begin = before, last
        if cutlass.const_expr(self.counts):
            found_begin = Int32(0)
        return base + place, found_begin, found_end, first

    @cute.jit
    def find_alone(self, number):
        """(group, where it begins, where it ends, its first work, whether there is one) of work `number`, for a warp
        that asks once. Without a work the other numbers mean nothing.
        """
        base = Int32(0)
        begin, end = self._load(base, Int32(0))
        own = self._count(base, begin, end)
        upto = self._upto(own)
        total = cute.arch.shuffle_sync(upto, LANES - 1)
        while (total <= number) & (base + LANES < self.groups):
            base, _before, _last, begin, end, own, upto, total = self._following(base, end, total)
        exists = total > number
        place = cutlass.min(cute.arch.popc(cute.arch.vote_ballot_sync(upto <= number)), Int32(LANES - 1))
        first = cute.arch.shuffle_sync(upto - own, place)
        return (
            base + place, cute.arch.shuffle_sync(begin, place), cute.arch.shuffle_sync(end, place), first, exists
        )  # fmt: skip

    @cute.jit
    def _following(self, base, end, total):
        """Goes on from the 32 groups that begin with number `base`, and have works up to `total`, to the next 32.

        Returns the first of the new groups; the works of all groups before it; where the last of these ends; then of
        this lane's group where it begins, where it ends, how many works it has, and how many it has with all before it;
        and the works up to the last of the 32.
        """
        last = cute.arch.shuffle_sync(end, LANES - 1)
        begin, end = self._load(base + LANES, last)
        own = self._count(base + LANES, begin, end)
        upto = self._upto(own) + total
        return base + LANES, total, last, begin, end, own, upto, cute.arch.shuffle_sync(upto, LANES - 1)

    @cute.jit
    def _count(self, base, begin, end):
        """The works of this lane's group, of the groups from `base` on; none behind the last group."""
        works = Int32(0)
        if base + self.lane < self.groups:
            works = self.works(begin, end)
        return works

    def _keep(self, base, before, begin, end, works) -> None:
        state = self.state
        state[_FIRST_GROUP], state[_WORKS_BEFORE] = base, before
        state[_BEGIN], state[_END], state[_WORKS] = begin, end, before + self._upto(works)
        state[_LAST_END] = Int32(0)

    @cute.jit
    def _load(self, base, last):
        """Where the group of this lane begins and ends, of the groups from `base` on; `last`: the end before them."""
        end = Int32(0)
        if base + self.lane < self.groups:
            end = cute.make_tensor(self.ends + (base + self.lane), cute.make_layout(1))[0]
        end = cutlass.min(cutlass.max(end, Int32(0)), self.extent)
        begin = Int32(0)
        if cutlass.const_expr(not self.counts):
            end = cutlass.max(end, last)
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(end, 1 << step)
                end = cutlass.max(end, other)
            begin = cute.arch.shuffle_sync_up(end, 1)
            if self.lane == 0:
                begin = last
        return begin, end

    @cute.jit
    def _upto(self, works):
        """The sum over the lanes up to this one."""
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(works, 1 << step)
            if self.lane >= 1 << step:
                works = works + other
        return works
