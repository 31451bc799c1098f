"""Lanes of one warp that use each other's shared memory: a race without a bar.warp.sync or a wider barrier between."""

import numpy as np
import pytest

from cutegemm.emulator import Checks
from cutegemm.emulator import errors as e
from tests.unit.emulator_kernels import OWN_WORD, STORE, kernel, launch, output

#: the neighbouring lane's word, in %r2
NEIGHBOUR = "xor.b32 %r2, lane, 1; xor.b32 %r3, tid, 1; shl.b32 %r2, %r3, 2; add.u32 %r2, %r2, s;"
WRITE, READ = "st.shared.u32 [%r1], tid;", "ld.shared.u32 %r9, [%r2];"


def race(body: str, match: str, **options) -> str:
    """The kernel is reported under every seed, with the PTX line and both lanes."""
    said = ""
    for seed in (None, 0, 1):
        with pytest.raises(e.DataRace, match=match) as caught:
            launch(kernel(OWN_WORD + NEIGHBOUR + body), output(), seed=seed, **options)
        said = str(caught.value)
        assert f"PTX line {caught.value.line}:" in said
        assert "warp" in said
        assert "lane" in said
    return said


def clean(body: str, **options) -> np.ndarray:
    out = output()
    for seed in (None, 0, 1):
        launch(kernel(OWN_WORD + NEIGHBOUR + body), out, seed=seed, **options)
    return out


def test_read_of_another_lanes_write():
    said = race(WRITE + READ + STORE, match="a read of what lane 1 of the same warp wrote, with no bar.warp.sync")
    assert "thread (0,0,0), warp 0 lane 0" in said
    for part in ("ld.shared.u32", "earlier write by warp 0", "st.shared.u32"):
        assert part in said
    assert (clean(WRITE + "bar.warp.sync -1;" + READ + STORE) == np.arange(64) ^ 1).all()


@pytest.mark.parametrize("barrier", ["bar.warp.sync 0xffffffff;", "bar.sync 0;", "barrier.sync 1, 64;"])
def test_barriers_that_order_lanes(barrier):
    assert (clean(WRITE + barrier + READ + STORE) == np.arange(64) ^ 1).all()


@pytest.mark.parametrize(
    "meeting",
    [
        "shfl.sync.bfly.b32 %r8, tid, 1, 31, -1;",
        "vote.sync.any.pred %p1, %p2, -1;",
        "membar.cta;",
        "bar.arrive 1, 96;",
    ],
)
def test_instructions_that_order_no_memory_between_lanes(meeting):
    race(WRITE + meeting + READ + STORE, match="a read of what lane 1")


def test_own_words_need_nothing():
    assert (clean(WRITE + "ld.shared.u32 %r9, [%r1];" + STORE + "st.shared.u32 [%r1], 7;") == np.arange(64)).all()


def test_write_over_what_another_lane_read():
    loop = WRITE + "bar.warp.sync -1;" + READ + "{again} st.shared.u32 [%r1], 7;" + STORE
    race(loop.format(again=""), match="a write over what lane 1 of the same warp read")
    assert (clean(loop.format(again="bar.warp.sync -1;")) == np.arange(64) ^ 1).all()


def test_write_over_what_another_lane_wrote():
    twice = "mov.u32 %r9, 1;" + WRITE + "{between} st.shared.u32 [%r2], 7;" + STORE
    race(twice.format(between=""), match="a write over what lane 1 of the same warp wrote")
    clean(twice.format(between="bar.warp.sync -1;"))


def test_broadcast_by_one_lane():
    body = "setp.eq.u32 %p1, lane, 0; shl.b32 %r4, warp, 2; add.u32 %r4, %r4, s; @%p1 st.shared.u32 [%r4], warp;"
    body += "{barrier} ld.shared.u32 %r9, [%r4];" + STORE
    said = race(body.format(barrier=""), match="a read of what lane 0")
    assert "lane 1" in said
    assert (clean(body.format(barrier="bar.warp.sync -1;")) == np.arange(64) // 32).all()


def test_a_barrier_of_some_lanes_orders_those_alone():
    body = WRITE + "bar.warp.sync {members};" + READ + STORE
    # every lane executes one of the two barriers, each naming the half it belongs to
    halves = "setp.lt.u32 %p1, lane, 16; @%p1 bra L; bar.warp.sync 0xffff0000; bra E; L: bar.warp.sync 0x0000ffff; E: "
    assert (clean(WRITE + halves + READ + STORE) == np.arange(64) ^ 1).all()
    far = "xor.b32 %r3, tid, 16; shl.b32 %r2, %r3, 2; add.u32 %r2, %r2, s;"
    race(WRITE + far + halves + READ + STORE, match="a read of what lane 16")
    race(body.format(members="0x0000000f"), match="a read of what lane")


def test_a_barrier_reached_by_halves_counts_once_all_are_there():
    halves = "setp.lt.u32 %p1, lane, 16; @%p1 bra L; bar.warp.sync -1; bra E; L: bar.warp.sync -1; E: "
    assert (clean(WRITE + halves + "bar.warp.sync -1;" + READ + STORE) == np.arange(64) ^ 1).all()
    one = "setp.lt.u32 %p1, lane, 16; @%p1 bar.warp.sync -1; "
    race(WRITE + one + READ + STORE, match="a read of what lane")


COPY = "cp.async.ca.shared.global [%r1], [%d5], 4; cp.async.commit_group; "
SOURCE = "mul.wide.u32 %d5, tid, 4; add.s64 %d5, %d5, %d0; "


def test_copies_are_ordered_from_their_wait_on():
    waited = SOURCE + COPY + "cp.async.wait_group 0;"
    race(waited + READ + STORE, match="a read of what lane 1")
    clean(waited + "bar.warp.sync -1;" + READ + STORE)
    clean(waited + "ld.shared.u32 %r9, [%r1];" + STORE)
    early = SOURCE + COPY + "bar.warp.sync -1; cp.async.wait_group 0;" + READ + STORE
    race(early, match="a read of what lane 1")


MATRIX = "shl.b32 %r5, tid, 4; add.u32 %r5, %r5, s;" + "".join(f"st.shared.u32 [%r5+{4 * k}], tid;" for k in range(4))


def test_ldmatrix_reads_for_all_lanes():
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r9, %r10, %r11, %r12}, [%r5];"
    race(MATRIX + load + STORE, match="a read of what lane")
    read = MATRIX + "bar.warp.sync -1;" + load
    race(read + "st.shared.u32 [%r5], 7;", match="several lanes of the same warp read")
    clean(read + "bar.warp.sync -1; st.shared.u32 [%r5], 7;")


def test_atomics_of_lanes_need_no_order_among_themselves():
    start = "shl.b32 %r4, warp, 2; add.u32 %r4, %r4, s; setp.eq.u32 %p1, lane, 0; @%p1 st.shared.u32 [%r4], 0;"
    count = "bar.warp.sync -1; red.shared.add.u32 [%r4], 1; {barrier} ld.shared.u32 %r9, [%r4];" + STORE
    assert (clean(start + count.format(barrier="bar.warp.sync -1;")) == 32).all()
    race(start + count.format(barrier=""), match="a read of what several lanes of the same warp wrote")


def test_an_mbarrier_that_the_warp_arrives_at_orders_its_lanes():
    body = (
        "setp.eq.u32 %p1, tid, 0; @%p1 mbarrier.init.shared.b64 [s+2048], 64; bar.sync 0;"
        + WRITE
        + "mbarrier.arrive.shared.b64 %d7, [s+2048];"
        "{wait}" + READ + STORE
    )
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p2, [s+2048], 0; @!%p2 bra W; "
    assert (clean(body.format(wait=wait)) == np.arange(64) ^ 1).all()
    race(body.format(wait=""), match="a read of what lane 1")


def test_a_bulk_store_by_one_lane_of_what_all_lanes_wrote():
    body = (
        WRITE + "fence.proxy.async.shared::cta; {barrier} setp.eq.u32 %p1, lane, 0; shl.b32 %r4, warp, 7; "
        "mul.wide.u32 %d6, warp, 128; add.s64 %d6, %d6, %d0; add.u32 %r4, %r4, s; "
        "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d6], [%r4], 128; "
        "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"
    )
    said = race(body.format(barrier=""), match="a read of what lane 1 of the same warp wrote")
    assert "cp.async.bulk.global" in said
    assert (clean(body.format(barrier="bar.warp.sync -1;")) == np.arange(64)).all()


def test_the_check_can_be_switched_off():
    assert (clean(WRITE + READ + STORE, checks=Checks(lanes=False)) == np.arange(64) ^ 1).all()
    alone = Checks(races=False, uninitialized=False, proxy_fences=False, accumulators=False)
    race(WRITE + READ + STORE, match="a read of what lane 1", checks=alone)
