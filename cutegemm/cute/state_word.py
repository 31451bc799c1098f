"""The word at which CTAs meet that sum parts of one share of D: who adds up what, and when the word is free again.

The sum over K of a share is itself shared out: it falls into as many slices as there are splits, at most 32, and split
number i adds up slice i, all parts in the order of the splits, so that the result does not depend on the order of
arrival. Splits beyond the last slice own none, and wait for nobody. The
owner of a slice waits until all splits have arrived, but not for long: CTAs need not be resident together. An owner
that has waited too long abandons its slice, and the last split to arrive adds up all slices abandoned before.

    uint64      bits 0-7    splits that have arrived
                bits 8-15   splits that will not touch the word again; the last sets it to 0 for the next launch
                bits 32-63  slices abandoned

Arriving is a release, seeing all arrived an acquire, both at GPU scope and by one thread, which barriers before and
behind must join to the others. Whether a slice was abandoned before or after the last arrival is settled by the order
of the operations on the word: an owner that finds all arrived keeps its slice.

`arrive` and `abandon` are for one thread. `word` is a pointer (Int64) in global memory, `mine` the bit of the caller's
slice, and the answer the bit mask of the slices that the caller adds up. The numbers of a workspace are here as well.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

MOST_SLICES = 32
"""Bits of the word for slices that were abandoned."""
POLLS = 24
"""Looks at the state word, about 0.6 us each, before a slice is abandoned: more than CTAs of one wave lie apart."""


@cute.jit
def arrive(word, mine, splits: cutlass.Constexpr):
    """Counts a split in and waits for the others; its slices, 0 when it has waited too long."""
    state = _add(word, Int64(1))
    if state & 255 == splits - 1:
        mine = mine | (state >> 32).to(Int32)
    else:
        polls = Int32(0)
        if cutlass.const_expr(splits > MOST_SLICES):
            polls = Int32(POLLS) if mine == 0 else polls
        state = _look(word)
        while (state & 255 != splits) & (polls < POLLS):
            state = _look(word)
            polls = polls + 1
        if state & 255 != splits:
            mine = Int32(0)
    return mine


@cute.jit
def abandon(word, mine, splits: cutlass.Constexpr):
    """Leaves a slice to the last split to arrive, unless all have arrived by now."""
    state = _add(word, mine.to(Int64) << 32)
    if state & 255 != splits:
        mine = Int32(0)
    return mine


@cute.jit
def leave(word, thread):
    """Thread 0 counts its split out; returns what `clear` needs. Nobody waits for the answer before."""
    state = Int64(0)
    if thread == 0:
        state = cute.arch.inline_ptx(
            "atom.relaxed.gpu.global.add.u64 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Int64],
            read_only_args=[word.toint(), Int64(1 << 8)],
        )
    return state


@cute.jit
def clear(word, thread, state, splits: cutlass.Constexpr):
    """The last split to leave sets the word to zero for the next launch."""
    others = Int64(splits - 1)
    if (thread == 0) & ((state >> 8) & 255 == others):
        cute.arch.inline_ptx("st.relaxed.gpu.global.u64 [{$r0}], {$r1};", read_only_args=[word.toint(), Int64(0)])


def _add(word, value):
    return cute.arch.inline_ptx(
        "atom.acq_rel.gpu.global.add.u64 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int64],
        read_only_args=[word.toint(), value],
    )


def _look(word):
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.u64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[word.toint()]
    )
