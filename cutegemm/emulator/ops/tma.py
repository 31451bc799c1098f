"""Bulk copies: cp.async.bulk and cp.async.bulk.tensor (1-D to 5-D, all swizzles, multicast), stores and reductions.

A load completes on an mbarrier; a store or reduction in a bulk group. With a seed, loads complete at a random
moment, as
late as the moment when nothing else can run, and stores read shared memory when their group is waited for. Elements
out of bounds are zero-filled by loads and skipped by stores; a load always counts the bytes of the whole box.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from cutegemm.emulator.errors import EmulationError, MbarrierMisuse, MisalignedAccess, MissingProxyFence
from cutegemm.emulator.ops.bulk import (
    Asker,
    box_window,
    check_map,
    chunk_table,
    coordinates,
    read_box,
    reduced,
    shared_target,
    tensor_map_at,
    write_box,
)
from cutegemm.emulator.ops.groups import warps_of
from cutegemm.emulator.ops.loadstore import active
from cutegemm.emulator.ptx import Instr
from cutegemm.emulator.translate import Gen, emits, runtime

REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


# -- emitters --------------------------------------------------------------------------------------------------
@emits("cp.async.bulk")
def bulk(g: Gen, i: Instr) -> None:
    uses = g.program.env.uses
    part = i.parts[3]
    if part == "commit_group":
        uses.add("bulk")
        g.line(f"X.wave.env.tma.commit(X, {g.mask})")
        return
    if part == "wait_group":
        uses.add("bulk")
        g.line(f"bulk_wait(X, {g.mask}, {i.operands[0].value})")
        return
    tensor = part == "tensor"
    if "im2col" in i.op or any(p.startswith("tile::") for p in i.parts):
        raise g.unsupported("only the tiled mode is implemented")
    spaces = [p for p in i.parts if p.partition("::")[0] in ("shared", "global")]
    g.program.env.note_access("shared", 16)
    if len(spaces) != 2:
        raise g.unsupported("destination and source spaces are expected")
    ops = i.addressed
    if spaces[1] == "global":  # a load
        uses.add("mbarrier")
        mcast = "None"
        if any("multicast" in p for p in i.parts):
            mcast = g.src(ops.pop(), "u2")
        if tensor:
            dst, src, bar = ops
            coords = ", ".join(g.src(o, "i4") for o in src.coords)
            g.line(
                f"tma_load(X, {g.me}, {g.mask}, {g.address(dst, 'u4')}, "
                f"{g.address(src, 'u8')}, ({coords},), {g.address(bar, 'u4')}, {mcast})"
            )
        else:
            dst, src, size, bar = ops
            g.line(
                f"bulk_load(X, {g.me}, {g.mask}, {g.address(dst, 'u4')}, "
                f"{g.address(src, 'u8')}, {g.src(size, 'u4')}, {g.address(bar, 'u4')}, {mcast})"
            )
    elif spaces[0] == "global":
        uses.add("bulk")
        store(g, ops, tensor, "None")
    else:  # shared memory of another CTA
        uses.add("mbarrier")
        dst, src, size, bar = ops
        g.line(
            f"bulk_remote(X, {g.me}, {g.mask}, {g.address(dst, 'u4')}, "
            f"{g.address(src, 'u4')}, {g.src(size, 'u4')}, {g.address(bar, 'u4')})"
        )


@emits("cp.reduce.async.bulk")
def reduce(g: Gen, i: Instr) -> None:
    op = next((p for p in i.parts if p in REDUCTIONS), None)
    spaces = [p for p in i.parts if p.partition("::")[0] in ("shared", "global")]
    if op is None or spaces[0] != "global":
        raise g.unsupported("only reductions into global memory are implemented")
    g.program.env.uses.add("bulk")
    g.program.env.note_access("shared", 16)
    t = i.parts[-1] if i.parts[-1] in ("f16", "bf16", "f32", "f64", "u32", "s32", "u64", "s64", "b32", "b64") else ""
    store(g, i.addressed, "tensor" in i.parts, f"({op!r}, {t!r})")


def store(g: Gen, ops, tensor: bool, reduction: str) -> None:
    if tensor:
        dst, src = ops
        coords = ", ".join(g.src(o, "i4") for o in dst.coords)
        g.line(
            f"tma_store(X, {g.me}, {g.mask}, {g.address(dst, 'u8')}, ({coords},), {g.address(src, 'u4')}, {reduction})"
        )
    else:
        dst, src, size = ops
        g.line(
            f"bulk_store(X, {g.me}, {g.mask}, {g.address(dst, 'u8')}, "
            f"{g.address(src, 'u4')}, {g.src(size, 'u4')}, {reduction})"
        )


# -- loads -----------------------------------------------------------------------------------------------------
@runtime
def tma_load(X, I, mask, dst, tmap, coords, bar, mcast):
    arrays = [dst, tmap, bar, *coords] + ([] if mcast is None else [mcast])
    lanes, flat = active(X, mask, *arrays)
    n = len(coords)
    actions: list[Callable[[], None]] = []
    for e in range(len(flat[0])):
        by = Asker(X, I, lanes, e)
        t = tensor_map_at(by, int(flat[1][e]))
        at = coordinates(flat[3 : 3 + n], e)
        check_map(by, t, at)
        to = None if mcast is None else int(flat[-1][e])
        ctas = _destinations(by, int(flat[0][e]), int(flat[2][e]), to, max(128, t.swizzle), t.box_bytes)
        fetch: Callable = functools.partial(read_box, by, t, at)
        if X.wave.env.in_front is not None and box_window(t, at)[1]:
            fetch = _ordered(by, t.address, fetch)
        actions.append(_land(by, ctas, t.box_bytes, t.swizzle, fetch))
    _issue(X, actions)


@runtime
def bulk_load(X, I, mask, dst, src, size, bar, mcast):
    arrays = [dst, src, size, bar] + ([] if mcast is None else [mcast])
    lanes, flat = active(X, mask, *arrays)
    actions: list[Callable[[], None]] = []
    for e in range(len(flat[0])):
        by = Asker(X, I, lanes, e)
        source, nbytes = int(flat[1][e]), int(flat[2][e])
        _check_bulk(by, source, nbytes)
        to = None if mcast is None else int(flat[-1][e])
        ctas = _destinations(by, int(flat[0][e]), int(flat[3][e]), to, 16, nbytes)
        fetch: Callable = functools.partial(_global_bytes, by, source, nbytes)
        if X.wave.env.in_front is not None:
            fetch = _ordered(by, source, fetch)
        actions.append(_land(by, ctas, nbytes, 0, fetch))
    _issue(X, actions)


def _ordered(by: Asker, address: int, fetch):
    """`fetch` of a load behind the kernel in front. One that is asked for before the wait may read at once."""
    in_front = by.wave.env.in_front
    in_front.check_bulk(by, address, False)
    if not in_front.is_early(by):
        return fetch
    data = fetch()
    return lambda: data


def _global_bytes(by: Asker, source: int, nbytes: int) -> np.ndarray:
    interval = by.memory(source, nbytes, write=False)
    at = source - interval.origin
    return interval.views[1][at : at + nbytes].copy()


def _check_bulk(by: Asker, address: int, nbytes: int) -> None:
    if address % 16 or nbytes % 16 or nbytes == 0:
        what = f"a bulk copy of {nbytes} bytes at {address:#x}"
        by.fail(MisalignedAccess, f"{what}: address and size must be multiples of 16")


@runtime
def bulk_remote(X, I, mask, dst, src, size, bar):
    """cp.async.bulk.shared::cluster.shared::cta: shared memory to the shared memory of another CTA of the cluster."""
    lanes, flat = active(X, mask, dst, src, size, bar)
    actions: list[Callable[[], None]] = []
    wave = X.wave
    for e in range(len(flat[0])):
        by = Asker(X, I, lanes, e)
        nbytes = int(flat[2][e])
        source_cta, source = shared_target(by, int(flat[1][e]), 16, nbytes)
        ctas = _destinations(by, int(flat[0][e]), int(flat[3][e]), None, 16, nbytes)
        hb = wave.env.hb
        if hb is not None:
            g = np.arange(source // hb.g, (source + nbytes) // hb.g)
            hb.proxy_read(X, I, by.c, slice(by.w, by.w + 1), source_cta, g, "warp", by.lane)
        base = source_cta * wave.smem_row + source
        data = wave.smem[1][base : base + nbytes]
        actions.append(_land(by, ctas, nbytes, 0, data.copy))
    _issue(X, actions)


def _destinations(by: Asker, dst: int, bar: int, mcast, align: int, nbytes: int) -> list[tuple[int, int, int]]:
    """(CTA position, byte offset, mbarrier slot) of every destination."""
    wave = by.wave
    m = wave.env.mbarriers
    cta, offset = shared_target(by, dst, align, nbytes)
    bar_cta, bar_offset = shared_target(by, bar, 8, 8)
    slot = int(m.slot_of[bar_offset >> 3])
    if mcast is None:
        pairs = [(cta, bar_cta)]
    else:
        if mcast == 0 or mcast >> wave.cluster_size:
            by.fail(EmulationError, f"multicast mask {mcast:#x} in a cluster of {wave.cluster_size} CTAs")
        first = int(wave.first[by.c])
        pairs = [(first + r, first + r) for r in range(wave.cluster_size) if mcast >> r & 1]
    out = []
    for to, barrier_cta in pairs:
        if slot < 0 or not m.valid[barrier_cta, slot]:
            cta_name = wave.env.cta_name(wave, barrier_cta)
            by.fail(MbarrierMisuse, f"a bulk copy on an mbarrier at {bar:#x} that is not initialized in CTA {cta_name}")
        if wave.env.hb is not None and not m.fenced_for_tma[barrier_cta, slot]:
            by.fail(
                MissingProxyFence,
                f"{m.name(barrier_cta, slot)} counts a bulk copy, but no fence.mbarrier_init or fence.proxy.async "
                "stands behind its initialization",
            )
        if to != barrier_cta:
            why = "the mbarrier of a bulk copy must lie in the shared memory of the copy's destination"
            by.fail(MbarrierMisuse, why)
        out.append((to, offset, slot))
    return out


def _land(by: Asker, ctas, nbytes: int, swizzle: int, fetch) -> Callable[[], None]:
    """Record a load in the happens-before clocks now; return what writes its bytes and completes it."""
    wave = by.wave
    hb = wave.env.hb
    table = chunk_table(ctas[0][1], nbytes, swizzle)
    if hb is not None:
        for cta, _, slot in ctas:
            hb.proxy_write(by.I, by.c, by.w, cta, hb.of_chunks(table), slot)
    started = wave.now
    wave.now += 1
    if wave.env.profile is not None:
        wave.env.profile.bulk("load", nbytes)  # once, however many CTAs of the cluster it lands in

    def complete() -> None:
        data = fetch().view(np.complex128)
        m = wave.env.mbarriers
        zero: np.ndarray = np.zeros(1, np.int64)
        for cta, _, slot in ctas:
            wave.smem[16][table + cta * (wave.smem_row >> 4)] = data
            if hb is not None:
                agent = wave.rank[cta] * hb.A + hb.offset["mbarrier"] + slot
                m.know[cta, slot, agent] = max(m.know[cta, slot, agent], started)
            who = lambda _, message: by.fail(MbarrierMisuse, message)  # noqa: E731
            m.apply(np.array([cta]), np.array([slot]), zero, zero, np.array([nbytes]), who)

    return complete


def _issue(X, actions) -> None:
    env = X.wave.env
    env.progressed = True
    if not actions:
        return
    if env.rng is None:
        for action in actions:
            action()
    else:
        env.tma.loads.append(actions)


# -- stores ----------------------------------------------------------------------------------------------------
def _store(by: Asker, cta: int, table: np.ndarray, nbytes: int, write) -> None:
    """Read shared memory (now, or with a seed when the group is waited for) and hand the bytes to ``write``."""
    wave = by.wave
    env = wave.env
    hb = env.hb
    if hb is not None:
        hb.proxy_read(by.X, by.I, by.c, slice(by.w, by.w + 1), cta, hb.of_chunks(table), "bulk", by.lane)
    if env.profile is not None:
        env.profile.bulk("store", nbytes)

    def action() -> None:
        write(wave.smem[16][table + cta * (wave.smem_row >> 4)].view(np.uint8))

    env.progressed = True
    if env.rng is None:
        action()
    else:
        env.tma.stores.append((by.c, by.w, int(env.tma.committed[by.c, by.w]), action, by.I))


def _distinct(X, lanes, flat, reduction):
    """The elements to carry out: lanes of a warp that make the very same store make it once (the result is the
    same).
    """
    n = len(flat[0])
    if n < 2 or reduction is not None:
        return range(n)
    keys = np.stack([X.warps_of(lanes), *(np.asarray(f).astype(np.int64) for f in flat)])
    return np.sort(np.unique(keys, axis=1, return_index=True)[1])


@runtime
def tma_store(X, I, mask, tmap, coords, src, reduction):
    lanes, flat = active(X, mask, src, tmap, *coords)
    for e in _distinct(X, lanes, flat, reduction):
        by = Asker(X, I, lanes, e)
        t = tensor_map_at(by, int(flat[1][e]))
        at = coordinates(flat[2:], e)
        check_map(by, t, at)
        if X.wave.env.in_front is not None:
            X.wave.env.in_front.check_bulk(by, t.address, True)
        cta, offset = shared_target(by, int(flat[0][e]), 128, t.box_bytes)
        table = chunk_table(offset, t.box_bytes, t.swizzle)
        _store(by, cta, table, t.box_bytes, functools.partial(write_box, by, t, at, reduction))


@runtime
def bulk_store(X, I, mask, dst, src, size, reduction):
    lanes, flat = active(X, mask, dst, src, size)
    for e in _distinct(X, lanes, flat, reduction):
        by = Asker(X, I, lanes, e)
        target, nbytes = int(flat[0][e]), int(flat[2][e])
        _check_bulk(by, target, nbytes)
        if X.wave.env.in_front is not None:
            X.wave.env.in_front.check_bulk(by, target, True)
        cta, offset = shared_target(by, int(flat[1][e]), 16, nbytes)

        def write(data, by=by, target=target, nbytes=nbytes):
            interval = by.memory(target, nbytes, write=True)
            view = interval.views[1][target - interval.origin :][:nbytes]
            view[:] = data if reduction is None else reduced(view.copy(), data.copy(), *reduction)

        _store(by, cta, chunk_table(offset, nbytes, 0), nbytes, write)


@runtime
def bulk_wait(X, mask, allowed):
    """wait_group and wait_group.read: the stores of all but the last ``allowed`` groups are done."""
    tma = X.wave.env.tma
    c, w = warps_of(X, mask)
    upto = tma.committed[c, w] - allowed
    if tma.stores:
        for k in range(len(c)):
            if upto[k] > 0:
                tma.wait_stores(int(c[k]), int(w[k]), int(upto[k]))
    tma.over("bulk", c, w, upto)
