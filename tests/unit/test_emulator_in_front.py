"""griddepcontrol.wait in the emulator: an edge of order behind the kernel in front of a programmatic launch."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cutegemm.emulator import Checks, Launch, Memory, parse_module, run
from cutegemm.emulator.errors import BeforeTheWait
from cutegemm.emulator.in_front import InFront
from tests.unit.emulator_kernels import OWN_WORD, kernel

READ = "mul.wide.u32 %d5, tid, 4; add.s64 %d6, %d5, %d1; ld.global.u32 %r9, [%d6];"
WRITE = "mul.wide.u32 %d40, tid, 4; add.s64 %d40, %d40, %d0; st.global.u32 [%d40], %r9;"
ADD = "red.global.add.u32 [%d0], 1;"
COPY = f"{OWN_WORD} cp.async.ca.shared.global [%r1], [%d1], 4; cp.async.wait_all;"
WAIT = "griddepcontrol.wait;"


def launched(body: str, in_front: InFront | None = None, programmatic: bool = True, checks: Checks | None = None):
    """What the threads write: words of the second array, which holds 5 until the kernel in front ends."""
    out, given = np.zeros(64, np.uint32), np.full(64, 5, np.uint32)
    memory = Memory()
    for name, array in (("out", out), ("given", given)):
        memory.map(array, name=name)
    if in_front is not None:
        in_front.end = lambda: given.fill(7)
        in_front.constant = [(given.ctypes.data, given.ctypes.data + given.nbytes)] if in_front.constant else []
    params = struct.pack("<2Q", out.ctypes.data, given.ctypes.data)
    shape = Launch("k", (1, 1, 1), (64, 1, 1), params=params, programmatic=programmatic)
    run(parse_module(kernel(body, params=2)), shape, memory, checks=checks, in_front=in_front)
    return out


def test_behind_the_wait_everything_is_there():
    assert (launched(WAIT + READ + WRITE, InFront()) == 7).all()


@pytest.mark.parametrize(
    ("early", "message"),
    [
        (READ, "a read of 'given'"),
        ("mov.u32 %r9, 1; " + WRITE, "a write of 'out'"),
        (ADD, "a write of 'out'"),
        (COPY, "a read of 'given'"),
    ],
)
def test_what_comes_before_the_wait_is_reported(early, message):
    with pytest.raises(BeforeTheWait, match=rf"{message} before griddepcontrol\.wait"):
        launched(early + WAIT, InFront())
    launched(early + WAIT, programmatic=False)  # an ordinary launch begins when the one in front has ended
    launched(early + WAIT, InFront(), checks=Checks(races=False))


def test_a_constant_may_be_read_and_not_written():
    constant = InFront(constant=[(0, 1)])
    assert (launched(READ + WAIT + WRITE, constant) == 5).all(), "the promise was broken: these are the old values"
    with pytest.raises(BeforeTheWait, match="a write of 'given'"):
        launched("mov.u32 %r9, 1; st.global.u32 [%d1], %r9;" + WAIT, InFront(constant=[(0, 1)]))


def test_every_thread_waits_for_itself():
    body = f"setp.lt.u32 %p1, tid, 32; @%p1 {WAIT} @!%p1 bra LATE; {READ} {WRITE} LATE:"
    assert (launched(body, InFront())[:32] == 7).all()
    with pytest.raises(BeforeTheWait, match="warp 1 lane 0"):
        launched(f"setp.lt.u32 %p1, tid, 32; @%p1 {WAIT} {READ} {WRITE}", InFront())
