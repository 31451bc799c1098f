"""setmaxnreg in the emulator: the register pool of a CTA, and the rules for the warps of a warpgroup."""

from __future__ import annotations

import numpy as np
import pytest

from cutegemm.emulator import errors as e
from cutegemm.emulator import parse_module
from cutegemm.emulator.ops.register_pool import registers_at_launch
from tests.unit.emulator_kernels import STORE, kernel, launch, output

SEEDS = (None, 0, 1, 2, 5)
DEC, INC = "setmaxnreg.dec.sync.aligned.u32", "setmaxnreg.inc.sync.aligned.u32"
THREADS = 384
"""A producer warpgroup (the first) and two consumers; 168 registers a thread at the launch."""


def text(producer: str, consumer: str, directives: str = f".reqntid {THREADS} .minnctapersm 1") -> str:
    """A kernel whose first warpgroup runs `producer`, the others `consumer`; all threads store their number."""
    body = f"""
setp.lt.u32 %p1, tid, 128;
@%p1 bra PRODUCER;
{consumer}
bra STORE;
PRODUCER: {producer}
STORE: mov.u32 %r9, tid; {STORE}"""
    return kernel(body).replace("{\n", f"{directives}\n{{\n", 1)


def run(ptx: str, seed: int | None = 0) -> None:
    out = output(THREADS)
    launch(ptx, out, threads=THREADS, seed=seed)
    assert (out == np.arange(THREADS)).all()


def finds(error: type[e.EmulationError], ptx: str) -> str:
    """What every timing reports."""
    for seed in SEEDS:
        with pytest.raises(error) as caught:
            run(ptx, seed)
        assert "PTX line" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("given", "taken"), [(40, 232), (24, 240), (160, 168), (168, 168), (24, 168)])
def test_what_the_pool_holds_is_dealt_out(given, taken):
    for seed in SEEDS:
        run(text(f"{DEC} {given};", f"{INC} {taken};"), seed)


def test_a_warpgroup_that_takes_first_waits_for_the_one_that_gives():
    """The producer gives its registers back late: after 200 rounds of a loop."""
    loop = "mov.u32 %r20, 200; AGAIN: sub.u32 %r20, %r20, 1; setp.ne.u32 %p2, %r20, 0; @%p2 bra AGAIN;"
    for seed in SEEDS:
        run(text(f"{loop} {DEC} 40;", f"{INC} 232;"), seed)


def test_registers_go_back_and_forth():
    """The consumers return what they took, and the producer takes it."""
    meet = "bar.sync 1, 128;"
    consumer = f"{INC} 168; bar.sync 2, 256; {DEC} 24;"
    for seed in SEEDS:
        run(text(f"{DEC} 40; {meet} {INC} 256;", consumer), seed)


@pytest.mark.parametrize(
    ("producer", "consumer", "has", "needs"),
    [
        (f"{DEC} 40;", f"{INC} 248;", "1024", "2560"),  # 40 + 2 * 248 is more than 3 * 168
        ("", f"{INC} 232;", "0", "2048"),  # nobody gives anything back
        (f"{DEC} 48;", f"{INC} 232;", "1024", "2048"),
    ],
    ids=["too much asked", "nothing given", "too little given"],
)
def test_more_than_the_pool_ever_holds_is_no_progress(producer, consumer, has, needs):
    said = finds(e.NoProgress, text(producer, consumer))
    assert f"waits for {needs} registers" in said
    assert f"instead of 168; the pool of its CTA has {has} (" in said
    assert "(the kernel starts with 168 a thread)" in said
    assert consumer.rstrip(";") in said


def test_registers_of_warps_that_have_exited_do_not_come_back():
    said = finds(e.NoProgress, text("ret;", f"{INC} 232;"))
    assert "the pool of its CTA has 0" in said


def test_only_some_warps_of_a_warpgroup():
    some = f"setp.ge.u32 %p3, tid, 160; @%p3 {INC} 232;"
    said = finds(e.RegisterMisuse, text(f"{DEC} 40;", some))
    assert "warp 4 exited without the setmaxnreg that warp 5 of its warpgroup executed" in said


def test_different_counts_in_a_warpgroup():
    split = f"setp.ge.u32 %p3, tid, 160; @%p3 bra MORE; {INC} 200; bra MET; MORE: {INC} 208; MET:"
    assert "execute different setmaxnreg" in finds(e.RegisterMisuse, text(f"{DEC} 40;", split))


def test_the_warps_of_a_warpgroup_meet_between_two():
    """A warp that runs ahead to its second setmaxnreg; a barrier between the two makes it right."""
    ahead = f"{INC} 176; {{}} {INC} 232;"
    found = []
    for seed in range(40):
        try:
            run(text(f"{DEC} 40;", ahead.format("")), seed)
        except e.RegisterMisuse as error:
            found.append(str(error))
    assert found, "no timing let a warp run ahead"
    assert all("has to synchronize between them" in said for said in found)
    for seed in range(40):
        run(text(f"{DEC} 40;", ahead.format("bar.sync 3, 256;")), seed)


def test_some_lanes_of_a_warp():
    lanes = f"setp.lt.u32 %p3, lane, 16; @%p3 {INC} 232;"
    said = finds(e.RegisterMisuse, text(f"{DEC} 40;", lanes))
    assert "lanes of a warp exited without the setmaxnreg that the others execute" in said
    others_wait = f"{lanes} @!%p3 bar.sync 4, 512;"
    assert "waits for the other 16 lanes of its warp" in finds(e.NoProgress, text(f"{DEC} 40;", others_wait))


def test_lanes_that_come_one_after_the_other():
    """A warp whose lanes took two ways executes it when all have come."""
    lanes = f"setp.lt.u32 %p3, lane, 16; @%p3 bra SAME; mov.u32 %r20, 1; mov.u32 %r21, 2; SAME: {INC} 232;"
    for seed in range(20):
        run(text(f"{DEC} 40;", lanes), seed)


@pytest.mark.parametrize("count", [16, 100, 264, 0])
def test_a_count_that_no_assembler_takes(count):
    """Found even where it is not reached."""
    said = finds(e.RegisterMisuse, text("", f"bra OVER; {INC} {count}; OVER:"))
    assert f"a multiple of 8 from 24 to 256, got {count}" in said


@pytest.mark.parametrize(("instruction", "than"), [(f"{DEC} 176;", "more than its 168"), (f"{INC} 160;", "fewer than")])
def test_the_wrong_direction(instruction, than):
    assert than in finds(e.RegisterMisuse, text(instruction, ""))


def test_without_a_limit_it_has_no_effect():
    run(text("", f"{INC} 256;", directives=""))


@pytest.mark.parametrize(
    ("directives", "registers"),
    [
        (".reqntid 384", 168),
        (".reqntid 128, 3, 1 .minnctapersm 1", 168),
        (".maxntid 512", 128),
        (".maxntid 384 .minnctapersm 2", 80),
        (".reqntid 256", 256),
        (".reqntid 128", 256),
        (".reqntid 384 .maxnreg 100", 104),
        (".maxnreg 200", 200),
        ("", None),
    ],
)
def test_registers_at_launch(directives, registers):
    assert registers_at_launch(parse_module(text("", "", directives)).kernel("k")) == registers
