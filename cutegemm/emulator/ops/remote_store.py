"""st.async: stores into the shared memory of a CTA of the cluster that count their bytes at an mbarrier there.

With a seed they land at a random moment, as bulk loads do, all lanes of an instruction together. They are ordinary
(generic) writes: what TMA or wgmma reads of them needs fence.proxy.async.
"""

from __future__ import annotations

import numpy as np

from cutegemm.emulator.errors import LaunchError, MbarrierMisuse, MisalignedAccess
from cutegemm.emulator.ops.loadstore import _rows, _scatter, active, fail, shared_bytes
from cutegemm.emulator.ops.mbarrier import MBARRIERS
from cutegemm.emulator.ops.tma import _issue
from cutegemm.emulator.ptx import TYPE_BYTES, Instr, items_of
from cutegemm.emulator.translate import PTX_CODE, Gen, emits, runtime

QUALIFIERS = ("weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4")
TYPES = ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")


@emits("st.async")
def st_async(g: Gen, i: Instr) -> None:
    *qualifiers, kind = i.parts[2:]
    for p in qualifiers:
        if p not in QUALIFIERS:
            raise g.unsupported(f"unknown qualifier .{p}")
    if kind not in TYPES or "mbarrier::complete_tx::bytes" not in qualifiers:
        raise g.unsupported("st.async stores words of 4 or 8 bytes and completes on an mbarrier")
    addr, value, bar = i.operands
    items = items_of(value)
    size = TYPE_BYTES[kind]
    g.program.env.uses.update(("mbarrier", "remote store"))
    g.program.env.note_access("shared", size * len(items))
    values = ", ".join(g.src(o, PTX_CODE[kind]) for o in items)
    g.line(f"remote_store(X, {g.me}, {g.mask}, {g.address(addr, 'u4')}, {g.address(bar, 'u4')}, {size}, ({values},))")


@runtime
def remote_store(X, I, mask, addr, bar, size, values):
    lanes, (a, b) = active(X, mask, addr, bar)
    if not len(a):
        return
    wave, total = X.wave, size * len(values)
    if wave.cluster_size == 1:
        why = "st.async in a launch without clusters, which an H200 takes for an illegal instruction"
        fail(X, I, LaunchError, lanes, 0, why)
    m, hb, profile = wave.env.mbarriers, wave.env.hb, wave.env.profile
    offset = shared_bytes(X, I, a, lanes, total, "asynchronous write")
    cta, slot = m.locate(X, I, b, lanes)
    apart = cta != offset // wave.smem_row
    if apart.any():
        why = "the mbarrier of an asynchronous store must lie in the shared memory of the store's destination"
        fail(X, I, MbarrierMisuse, lanes, int(np.argmax(apart)), why)
    if np.unique(offset).size != offset.size:
        fail(X, I, MisalignedAccess, lanes, 0, "two lanes of an asynchronous store write the same place")
    if profile is not None:
        profile.shared(X, I, offset, total, lanes, "remote write")
    rows = _rows(X, lanes, values, size)
    warp = X.warps_of(lanes)
    if hb is not None:
        for key in np.unique((warp * wave.C + cta) * MBARRIERS + slot):
            of, target = np.divmod(key, wave.C * MBARRIERS)
            to, at = divmod(int(target), MBARRIERS)
            here = offset[(warp == of) & (cta == to) & (slot == at)] - to * wave.smem_row
            granules, _ = hb._granules(here, total)
            c, w = divmod(int(of), wave.W)
            hb.proxy_write(I, c, w, to, granules, at, "remote store")
    started = wave.now
    wave.now += 1

    def land() -> None:
        _scatter(wave.smem, offset, size, rows)
        if hb is not None:
            agent = wave.rank[cta] * hb.A + hb.offset["remote store"] + slot
            np.maximum.at(m.know, (cta, slot, agent), started)
        nothing: np.ndarray = np.zeros(len(cta), np.int64)
        m.apply(cta, slot, nothing, nothing, nothing + total, lambda e, why: fail(X, I, MbarrierMisuse, lanes, e, why))

    _issue(X, [land])
