"""st.async in the emulator: what it writes, what its mbarrier counts, and what must order it."""

from __future__ import annotations

import numpy as np
import pytest

from cutegemm.emulator import errors as e
from tests.ptx_snippet_table import SNIPPETS
from tests.ptx_snippets import BLOCK, data, emulate
from tests.unit.emulator_kernels import kernel, launch

SEEDS = (None, 0, 1, 2, 3, 4)
START = (
    "setp.eq.u32 %p1, tid, 0; @%p1 mbarrier.init.shared.b64 [s], 1; @%p1 fence.mbarrier_init.release.cluster; "
    "barrier.cluster.arrive.relaxed; barrier.cluster.wait; "
    "mov.u32 %r7, %cluster_ctarank; mad.lo.u32 %r8, %r7, 1000, tid; xor.b32 %r9, %r7, 1; "
    "mul.lo.u32 %r2, tid, 16; add.u32 %r2, %r2, s; add.u32 %r2, %r2, 1024; "
    "mapa.shared::cluster.u32 %r3, %r2, %r9; mapa.shared::cluster.u32 %r4, s, %r9; "
)
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [s], {bytes}; "
WAIT = "mov.u32 %r1, 0; W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [s], %r1; @!%p2 bra W; "
END = (
    "barrier.cluster.arrive.relaxed; barrier.cluster.wait; "
    "mul.wide.u32 %d5, %r8, 16; add.s64 %d5, %d5, %d0; st.global.v4.u32 [%d5], {%r20, %r21, %r22, %r23}; "
)
SENDS = {
    "b32": "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r3], %r8, [%r4];",
    "v2.s32": "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.s32 [%r3], {%r8, %r9}, [%r4];",
    "u64": "cvt.u64.u32 %d6, %r8; st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%r3], %d6, [%r4];",
    "v4.f32": "mov.b32 %f1, %r8; mov.b32 %f2, %r9; "
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%r3], {%f1, %f2, %f1, %f2}, [%r4];",
    "v2.b64": "cvt.u64.u32 %d6, %r8; "
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%r3], {%d6, %d6}, [%r4];",
}
WORDS = {"b32": 1, "v2.s32": 2, "u64": 2, "v4.f32": 4, "v2.b64": 4}
SEND = SENDS["v4.f32"]


def exchanged(form: str, body: str | None = None, **options) -> np.ndarray:
    """What each of the 64 threads of two CTAs finds in its four words after the CTAs sent each other theirs."""
    words = WORDS[form]
    regs = ", ".join(f"%r{20 + k}" for k in range(words))
    found = f"ld.shared.v{words}.u32 {{{regs}}}, [%r2]; " if words > 1 else "ld.shared.u32 %r20, [%r2]; "
    text = START + EXPECT.format(bytes=64 * 4 * words) + SENDS[form] + WAIT + found + END if body is None else body
    # Threads of CTA 1 have numbers from 1000 on.
    out = np.zeros((1064, 4), np.uint32)
    launch(kernel(text), out, grid=2, cluster=2, **options)
    return np.concatenate([out[:64], out[1000:]])


@pytest.mark.parametrize("form", SENDS)
def test_words_reach_the_other_cta(form):
    thread = np.r_[np.arange(1000, 1064), np.arange(64)]
    rank = np.repeat((0, 1), 64)  # of the receiver: the sender's peer
    columns = {"b32": [thread], "v2.s32": [thread, rank], "u64": [thread, 0 * rank]}.get(form)
    if columns is None:
        columns = [thread, rank] * 2 if form == "v4.f32" else [thread, 0 * rank] * 2
    for seed in SEEDS:
        found = exchanged(form, seed=seed)[:, : WORDS[form]]
        assert (found == np.stack(columns, 1)).all(), seed


def pieces(expect: int = 1024, send: str = SEND, wait: str = WAIT, before: str = "", after: str = "") -> str:
    read = "ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r2]; "
    return START + before + EXPECT.format(bytes=expect) + send + wait + read + after + END


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_read_without_waiting(seed):
    with pytest.raises((e.AsyncReadTooEarly, e.UninitializedRead), match=r"an st\.async that completes|nothing has"):
        exchanged("v4.f32", pieces(wait="bar.sync 0; "), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_that_nobody_sends(seed):
    with pytest.raises(e.NoProgress, match="16 bytes outstanding"):
        exchanged("v4.f32", pieces(expect=1040), seed=seed)


def test_an_mbarrier_elsewhere_than_the_data():
    with pytest.raises(e.MbarrierMisuse, match="must lie in the shared memory of the store's destination"):
        exchanged("v4.f32", pieces(send=SEND.replace("[%r4]", "[s]")))


def test_an_mbarrier_that_is_none():
    with pytest.raises(e.MbarrierMisuse, match="not initialized"):
        exchanged("v4.f32", pieces(send=SEND.replace("[%r4]", "[%r4+8]")))


def test_addresses():
    with pytest.raises(e.MisalignedAccess, match="no multiple of 16"):
        exchanged("v4.f32", pieces(send=SEND.replace("[%r3]", "[%r3+4]")))
    with pytest.raises(e.OutOfBounds, match="asynchronous write"):
        exchanged("v4.f32", pieces(send=SEND.replace("[%r3]", "[%r3+4096]")))
    with pytest.raises(e.MisalignedAccess, match="two lanes"):
        exchanged("v4.f32", pieces(send="mapa.shared::cluster.u32 %r3, s, %r9; " + SEND.replace("[%r3]", "[%r3+512]")))


USE = "st.shared.v4.u32 [%r2], {%r8, %r8, %r8, %r8}; ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r2]; "


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_that_its_owner_still_uses(seed):
    """The receiver wrote and read the place before; only a barrier of the cluster tells the sender so."""
    together = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; "
    exchanged("v4.f32", pieces(before=USE + together), seed=seed)
    with pytest.raises(e.DataRace, match=r"earlier (read|write)"):
        exchanged("v4.f32", pieces(before=USE), seed=seed)


def test_tma_reads_it_behind_a_proxy_fence():
    """An asynchronous store is an ordinary write: the asynchronous proxy does not see it by itself."""
    copy = (
        "bar.sync 0; mul.lo.u32 %r10, %r7, 16000; cvt.u64.u32 %d7, %r10; add.s64 %d7, %d7, %d0; add.u32 %r11, s, 1024; "
        "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d7], [%r11], 1024; cp.async.bulk.commit_group; "
        "cp.async.bulk.wait_group 0; "
    )
    for seed in SEEDS:
        exchanged("v4.f32", pieces(after="fence.proxy.async.shared::cta; " + copy), seed=seed)
        with pytest.raises(e.MissingProxyFence):
            exchanged("v4.f32", pieces(after=copy), seed=seed)


def test_forms_that_do_not_exist():
    for form in ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b16", "st.async.relaxed.b32"):
        with pytest.raises(e.EmulationError, match=r"st\.async"):
            exchanged("b32", pieces(send=f"{form} [%r3], %r8, [%r4];"))


def test_a_launch_without_clusters():
    """An H200 stops with an illegal instruction."""
    out = np.zeros((64, 4), np.uint32)
    with pytest.raises(e.LaunchError, match=r"st\.async in a launch without clusters"):
        launch(kernel(pieces()), out)


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if s.name.startswith("st.async")], ids=lambda s: s.name)
def test_the_snippets_that_a_gpu_runs_too(snippet):
    given = data(snippet, 2, seed=3)
    a, b = (np.roll(given[:, k], BLOCK).astype(np.uint32) for k in range(2))  # what the other CTA's threads sent
    found = emulate(snippet, given)
    assert (found[:, 0].astype(np.uint32) == a - b).all()
    assert (found[:, 1].astype(np.uint32) == b - a).all()
