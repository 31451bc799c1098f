"""Every check finds its bug, in a small broken kernel; the same kernel without the bug passes."""

import re

import numpy as np
import pytest

from cutegemm.emulator import Checks, EmulationError, Launch, Memory, parse_module, run
from cutegemm.emulator import errors as e
from tests.unit.emulator_kernels import OWN_WORD, STORE, kernel, launch, output

SEEDS = [None, 0, 1]


def finds(error, body: str, *, match: str = "", **options) -> EmulationError:
    """The kernel is reported, with the PTX line, whatever the seed."""
    text = kernel(body, params=options.pop("params", 1), shared=options.pop("shared", 4096))
    last = None
    for seed in SEEDS:
        with pytest.raises(error, match=match or None) as caught:
            launch(text, output(), seed=seed, **options)
        last = caught.value
        assert "PTX line" in str(last), str(last)
        if last.line is not None:
            assert f"PTX line {last.line}:" in str(last)
    assert last is not None
    return last


def passes(body: str, **options) -> np.ndarray:
    out = output()
    for seed in SEEDS:
        out[:] = 0
        launch(kernel(body), out, seed=seed, **options)
    return out


def test_global_out_of_bounds_names_the_array_and_the_thread():
    body = "mov.u32 %r9, tid; add.u32 tid, tid, 1;" + STORE
    error = finds(e.OutOfBounds, body, match="array 0")
    assert "thread (63,0,0)" in str(error)
    assert "st.global.u32" in str(error)
    assert "256 bytes from the start" in str(error)


def test_global_read_only():
    memory, out = Memory(), output()
    memory.map(out, name="weights", writable=False)
    import struct

    with pytest.raises(e.ReadOnlyWrite, match="weights"):
        run(
            parse_module(kernel("mov.u32 %r9, tid;" + STORE)),
            Launch("k", (1, 1, 1), (64, 1, 1), params=struct.pack("<Q", out.ctypes.data)),
            memory,
        )


def test_null_pointer():
    finds(e.OutOfBounds, "mov.u64 %d1, 0; ld.global.u32 %r9, [%d1];" + STORE, match="global read of 4 bytes at 0x0")


def test_shared_out_of_bounds():
    finds(e.OutOfBounds, f"{OWN_WORD} st.shared.u32 [%r1+4000], tid;", match="shared write of 4 bytes")
    finds(e.OutOfBounds, "mov.u32 %r1, 0; ld.shared.u32 %r9, [%r1];", match="shared read")


@pytest.mark.parametrize(
    "access",
    [
        "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1];",
        "ld.global.u64 %d3, [%d1];",
        "st.global.v2.u32 [%d1], {tid, tid};",
        "red.global.add.v4.f32 [%d1], {%f1, %f1, %f1, %f1};",
    ],
)
def test_misaligned(access):
    finds(e.MisalignedAccess, f"add.s64 %d1, %d0, 4; {access}", match="no multiple of")


def test_misaligned_shared():
    finds(
        e.MisalignedAccess,
        f"{OWN_WORD} st.shared.v4.u32 [%r1], {{tid, tid, tid, tid}};",
        match="shared write of 16 bytes",
    )


def test_read_before_written():
    finds(e.UninitializedRead, f"{OWN_WORD} ld.shared.u32 %r9, [%r1];" + STORE, match="nothing has written")
    passes(f"{OWN_WORD} ld.shared.u32 %r9, [%r1];" + STORE, checks=Checks(uninitialized=False))


EXCHANGE = (
    f"{OWN_WORD} st.shared.u32 [%r1], tid; {{barrier}} xor.b32 %r2, tid, "
    f"32; shl.b32 %r2, %r2, 2; add.u32 %r2, %r2, s; ld.shared.u32 %r9, [%r2];" + STORE
)


def test_missing_barrier_is_a_race():
    error = finds((e.DataRace, e.UninitializedRead), EXCHANGE.format(barrier=""))
    assert "ld.shared.u32" in str(error)
    assert (passes(EXCHANGE.format(barrier="bar.sync 0;")) == np.arange(64) ^ 32).all()


def test_exchange_inside_a_warp_needs_no_cta_barrier():
    body = (
        f"{OWN_WORD} st.shared.u32 [%r1], tid; bar.warp.sync -1; xor.b32 %r2, %r1, 4; ld.shared.u32 %r9, [%r2];" + STORE
    )
    assert (passes(body) == np.arange(64) ^ 1).all()


def test_race_of_a_write_after_a_read():
    body = EXCHANGE.format(barrier="bar.sync 0;") + "{second} st.shared.u32 [%r1], 7;"
    error = finds(e.DataRace, body.format(second=""), match="earlier read by warp")
    assert "warp" in str(error)
    passes(body.format(second="bar.sync 0;"))


def test_race_of_two_writes():
    finds(e.DataRace, "st.shared.u32 [s], tid;", match="same bytes")
    finds(
        e.DataRace,
        "setp.eq.u32 %p1, tid, 0; setp.eq.u32 %p2, tid, 32; @%p1 st.shared.u32 [s], 1; @%p2 st.shared.u32 [s], 2;",
        match="earlier write by warp 0",
    )
    passes(
        "setp.eq.u32 %p1, tid, 0; setp.eq.u32 %p2, tid, 32; @%p1 "
        "st.shared.u32 [s], 1; bar.sync 0; @%p2 st.shared.u32 [s], 2;"
    )


def test_neighbouring_half_words_are_no_race():
    body = (
        "and.b32 %r1, tid, 31; shl.b32 %r1, %r1, 2; shr.u32 %r2, tid, 5; shl.b32 %r2, %r2, 1; "
        "add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, s; cvt.u16.u32 %h1, tid; st.shared.u16 [%r1], %h1;"
    )
    passes(body)


def test_atomics_do_not_race_with_each_other():
    body = (
        "setp.eq.u32 %p1, tid, 0; @%p1 st.shared.u32 [s], 0; {barrier} "
        "red.shared.add.u32 [s], 1; bar.sync 0; ld.shared.u32 %r9, [s];" + STORE
    )
    assert (passes(body.format(barrier="bar.sync 0;")) == 64).all()
    finds((e.DataRace, e.UninitializedRead), body.format(barrier=""))


def test_named_barrier_orders_only_its_warps():
    # warp 1 only arrives: warp 0 may read what warp 1 wrote, not the other way round
    body = (
        f"{OWN_WORD} st.shared.u32 [%r1], tid; setp.eq.u32 %p1, warp, 1; "
        f"@%p1 bra ONE; bar.sync 3, 64; bra READ; ONE: bar.arrive 3, 64; "
        "bra {end}; READ: xor.b32 %r2, tid, 32; shl.b32 %r2, %r2, "
        "2; add.u32 %r2, %r2, s; ld.shared.u32 %r9, [%r2]; END: "
    )
    passes(body.format(end="END"))
    finds((e.DataRace, e.UninitializedRead), body.format(end="READ"))


def test_barrier_counts_must_agree():
    finds(
        e.BarrierMisuse,
        "setp.eq.u32 %p1, warp, 1; mov.u32 %r1, 64; @%p1 mov.u32 %r1, 96; bar.sync 1, %r1;",
        match="barrier 1",
    )
    finds(e.BarrierMisuse, "bar.sync 1, 40;", match="multiple of 32")


def test_no_progress_names_the_warps_and_the_barrier():
    error = finds(
        e.NoProgress, "setp.eq.u32 %p1, warp, 1; @%p1 bra END; bar.sync 2, 64; END: ", match="waits at barrier 2"
    )
    assert "32 of 64 threads" in str(error)
    assert "warp 0" in str(error)


def test_endless_loop_is_reported():
    from cutegemm.emulator import schedule

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "SPIN_LIMIT", 500)
        finds(
            e.NoProgress, "L: ld.global.u32 %r1, [%d0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra L;", match="without any store"
        )


def test_a_spin_lock_makes_progress():
    body = (
        "setp.eq.u32 %p1, warp, 0; @%p1 bra WAIT; st.global.u32 [%d0+252], 5; bra END; WAIT: "
        "ld.acquire.gpu.global.u32 %r9, [%d0+252]; setp.eq.u32 %p2, %r9, 0; @%p2 bra WAIT; " + STORE + " END: "
    )
    assert (passes(body)[:32] == 5).all()


# -- cp.async ----------------------------------------------------------------------------------------------------------
COPY = (
    f"{OWN_WORD} mul.wide.u32 %d1, tid, 4; add.s64 %d1, %d1, %d0; cp.async.ca.shared.global [%r1], [%d1], 4; "
    f"{{commit}} {{wait}} {{barrier}} xor.b32 %r2, tid, {{other}}; shl.b32 %r2, "
    f"%r2, 2; add.u32 %r2, %r2, s; ld.shared.u32 %r9, [%r2]; bar.sync 0; {STORE}"
)
GOOD = {"commit": "cp.async.commit_group;", "wait": "cp.async.wait_group 0;", "barrier": "bar.sync 0;", "other": 32}


def test_copy_with_all_its_waits():
    out = np.arange(100, 164, dtype=np.uint32)
    for seed in SEEDS:
        out[:] = np.arange(100, 164)
        launch(kernel(COPY.format(**GOOD)), out, seed=seed)
        assert (out == 100 + (np.arange(64) ^ 32)).all()


@pytest.mark.parametrize(
    ("broken", "other"),
    [
        ({"wait": ""}, 32),
        ({"wait": ""}, 0),
        ({"barrier": ""}, 32),
        ({"commit": ""}, 0),
        ({"wait": "cp.async.wait_group 1;"}, 0),
    ],
)
def test_copy_used_too_early(broken, other):
    finds(e.DataRace, COPY.format(**{**GOOD, **broken, "other": other}))


def test_late_copies_show_as_wrong_values_too():
    out = np.arange(1, 65, dtype=np.uint32)
    launch(kernel(COPY.format(**{**GOOD, "wait": "", "other": 0})), out, seed=0, checks=Checks.none())
    assert not (out == np.arange(1, 65)).any()


# -- mbarriers ---------------------------------------------------------------------------------------------------------
MBAR = (
    "setp.eq.u32 %p1, tid, 0; @%p1 mbarrier.init.shared.b64 [s], {count}; {after_init} "
    "shl.b32 %r1, tid, 2; add.u32 %r1, %r1, s; st.shared.u32 [%r1+16], tid; "
    "{arrive} {wait} xor.b32 %r2, tid, 32; shl.b32 %r2, %r2, "
    "2; add.u32 %r2, %r2, s; ld.shared.u32 %r9, [%r2+16];" + STORE
)
WAIT = "mov.u32 %r3, {parity}; W: mbarrier.try_wait.parity.shared.b64 %p2, [s], %r3; @!%p2 bra W;"
MGOOD = {
    "count": 64,
    "after_init": "bar.sync 0;",
    "arrive": "mbarrier.arrive.shared.b64 %d2, [s];",
    "wait": WAIT.format(parity=0),
}


def test_mbarrier_orders_an_exchange():
    assert (passes(MBAR.format(**MGOOD)) == np.arange(64) ^ 32).all()


@pytest.mark.parametrize(
    ("broken", "error", "match"),
    [
        ({"wait": ""}, (e.DataRace, e.UninitializedRead), ""),
        ({"wait": WAIT.format(parity=1)}, (e.DataRace, e.UninitializedRead, e.NoProgress), ""),
        ({"after_init": ""}, e.MbarrierMisuse, "not initialized|after its initialization"),
        ({"count": 32}, e.MbarrierMisuse, "arrivals at the mbarrier"),
        ({"count": 65}, e.NoProgress, r"waits for parity 0 of the mbarrier at .* \(64 of 65 arrivals"),
        ({"count": 0}, e.MbarrierMisuse, "count"),
        ({"arrive": "mbarrier.arrive.relaxed.cta.shared.b64 %d2, [s];"}, e.DataRace, ""),
    ],
)
def test_mbarrier_misuse(broken, error, match):
    finds(error, MBAR.format(**{**MGOOD, **broken}), match=match)


def test_mbarrier_initialized_twice():
    finds(
        e.MbarrierMisuse,
        "setp.eq.u32 %p1, tid, 0; @%p1 mbarrier.init.shared.b64 [s], 1; @%p1 mbarrier.init.shared.b64 [s], 1;",
        match="second time",
    )


def test_unknown_instruction_names_its_line():
    text = kernel("frobnicate.b32 %r1, %r2;")
    with pytest.raises(e.UnsupportedInstruction, match=r"PTX line \d+: frobnicate.b32") as caught:
        launch(text, output())
    assert caught.value.line == next(n for n, line in enumerate(text.splitlines(), 1) if "frobnicate" in line)


def test_trap_and_assertions():
    finds(e.KernelTrap, "setp.eq.u32 %p1, tid, 40; @!%p1 bra END; trap; END: ", match="trap")


def test_the_launch_must_fit():
    text = kernel("").replace("{\n", ".reqntid 64, 1, 1\n{\n", 1)
    with pytest.raises(e.LaunchError, match="reqntid"):
        launch(text, output(), threads=32)
    with pytest.raises(e.LaunchError, match="takes 8 bytes"):
        launch(kernel(""), threads=32)
    with pytest.raises(e.LaunchError, match="no entry named 'nope'"):
        parse_module(text).kernel("nope")


def test_checks_can_be_switched_off():
    assert re.search("races", repr(Checks.all()))
    launch(kernel(EXCHANGE.format(barrier="")), output(), checks=Checks.none())
