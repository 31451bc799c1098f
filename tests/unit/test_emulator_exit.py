"""A CTA must not exit while something still uses its shared memory."""

import numpy as np
import pytest

from cutegemm.emulator import Launch, Memory, parse_module, run
from cutegemm.emulator.errors import ExitTooEarly

STORE = """
.version 8.0
.target sm_90
.visible .entry k(.param .u64 out) {{
    .shared .align 128 .b8 tile[128];
    .reg .b64 %rd<2>;
    .reg .b32 %r<4>;
    .reg .pred %p;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mov.u32 %r3, tile;
    add.u32 %r2, %r2, %r3;
    st.shared.u32 [%r2], %r1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p, %r1, 0;
    @%p bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 128;
    cp.async.bulk.commit_group;
    {wait}
DONE:
    ret;
}}
"""


@pytest.mark.parametrize("wait", ["cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;"])
def test_a_bulk_store_that_was_waited_for(wait):
    out = np.zeros(32, np.uint32)
    memory = Memory()
    address = memory.map(out, name="out")
    launch = Launch("k", (1, 1, 1), (32, 1, 1), params=address.to_bytes(8, "little"))
    for seed in range(5):
        run(parse_module(STORE.format(wait=wait)), launch, memory, seed=seed)
        assert (out == np.arange(32)).all()


@pytest.mark.parametrize("wait", ["", "cp.async.bulk.wait_group.read 1;"])
def test_a_bulk_store_that_nothing_waits_for(wait):
    memory = Memory()
    address = memory.map(np.zeros(32, np.uint32), name="out")
    launch = Launch("k", (1, 1, 1), (32, 1, 1), params=address.to_bytes(8, "little"))
    with pytest.raises(ExitTooEarly, match=r"wait_group.*is missing[\s\S]*cp.async.bulk.global") as found:
        run(parse_module(STORE.format(wait=wait)), launch, memory, seed=0)
    assert found.value.line == 19


REMOTE = """
.version 8.0
.target sm_90
.visible .entry k() .reqntid 32 .reqnctapercluster 2 {{
    .shared .align 16 .b8 tile[128];
    .reg .b32 %r<6>;
    .reg .pred %p;
    mov.u32 %r1, %cluster_ctarank;
    setp.ne.u32 %p, %r1, 0;
    @%p bra DONE;
    mov.u32 %r2, tile;
    mov.u32 %r5, %tid.x;
    shl.b32 %r5, %r5, 2;
    add.u32 %r2, %r2, %r5;
    mov.u32 %r3, 1;
    mapa.shared::cluster.u32 %r4, %r2, %r3;
    st.shared::cluster.u32 [%r4], %r1;
DONE:
    {end}
    ret;
}}
"""
CLUSTER_BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def test_a_cluster_that_leaves_together():
    for seed in range(10):
        launch = Launch("k", (2, 1, 1), (32, 1, 1), (2, 1, 1))
        run(parse_module(REMOTE.format(end=CLUSTER_BARRIER)), launch, Memory(), seed=seed)


def test_a_cta_that_leaves_while_its_cluster_writes_into_it():
    module, launch = parse_module(REMOTE.format(end="")), Launch("k", (2, 1, 1), (32, 1, 1), (2, 1, 1))

    def under_many_orders():
        for seed in range(40):
            run(module, launch, Memory(), seed=seed)

    with pytest.raises(ExitTooEarly, match=r"CTA \(1,0,0\) of its cluster has exited") as found:
        under_many_orders()
    assert found.value.line == 17
