"""ld, st, ldu, cvta, isspacep, prefetch and friends: every state space and width, scalar and vector."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutegemm.emulator.errors import EmulationError, ExitTooEarly, MisalignedAccess, OutOfBounds
from cutegemm.emulator.memory import (
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_BASE,
    SHARED_WINDOW,
    WINDOW_MASK,
)
from cutegemm.emulator.ptx import TYPE_BYTES, Addr, Imm, Instr, Symbol, items_of
from cutegemm.emulator.translate import PTX_CODE, Gen, emits, numpy_name, runtime

SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 32: 5}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
SPACES = ("shared", "global", "local", "param", "const")


def space_of(i: Instr) -> str:
    """The state space named in the opcode, or '' for a generic address."""
    for p in i.parts[1:]:
        base = p.partition("::")[0]
        if base in SPACES:
            return base
    return ""


def address_code(space: str) -> str:
    return "u4" if space in ("shared", "local") else "u8"


def _shape(g: Gen, i: Instr, value) -> tuple[list, str, int]:
    """(registers, numpy code of an element, bytes of an element)."""
    t = i.parts[-1]
    if t not in PTX_CODE:
        raise g.unsupported(f"type .{t} is not implemented here")
    return items_of(value), PTX_CODE[t], TYPE_BYTES[t]


@emits("ld", "ldu")
def ld(g: Gen, i: Instr) -> None:
    items, code, size = _shape(g, i, i.operands[0])
    space = space_of(i)
    addr = i.operands[1]
    if space == "param" or (space == "" and isinstance(addr, Addr) and isinstance(addr.base, Symbol)
                            and g.space_of(addr.base.name) == "param"):  # fmt: skip
        if isinstance(addr.base, Symbol):
            known_param(g, items, code, size, addr)
            return
        space = "param"
    if space == "const":
        space = "global"
    if len(items) * size > 32:
        raise g.unsupported()
    a = g.let(g.address(addr, address_code(space)))
    g.program.env.note_access(space, size * len(items))
    t = g.let(f"load_{space or 'generic'}(X, {g.me}, {a}, {g.mask}, {size}, {len(items)})")
    plain = f"u{code[1]}"
    for k, item in enumerate(items):
        view = f"{t}[{k}]" if code == plain else f"{t}[{k}].view(np.{numpy_name(code)})"
        g.assign(item, view, code)


def known_param(g: Gen, items, code: str, size: int, addr: Any) -> None:
    """Kernel parameters are the same for all threads: read them when the block runs, as scalars."""
    p = g.program.params.get(addr.base.name)
    if p is None:
        raise g.unsupported(f"unknown parameter {addr.base.name}")
    at = p.offset + addr.base.offset + addr.offset
    for k, item in enumerate(items):
        here = at + k * size
        if here + size > g.program.kernel.param_bytes:
            raise g.unsupported("a read past the end of the parameters")
        g.assign(item, f"X.wave.env.param({here}, {code!r})", code)


@emits("st")
def st(g: Gen, i: Instr) -> None:
    addr, value = i.operands
    items, code, size = _shape(g, i, value)
    space = space_of(i)
    if space in ("param", "const"):
        raise g.unsupported(f"a store to .{space}")
    code = "u" + code[1] if code[0] != "f" or not any(hasattr(o, "kind") for o in items) else code
    a = g.let(g.address(addr, address_code(space)))
    g.program.env.note_access(space, size * len(items))
    values = ", ".join(g.src(o, code) for o in items)
    g.line(f"store_{space or 'generic'}(X, {g.me}, {a}, {g.mask}, {size}, ({values},))")


# -- addresses of lanes ----------------------------------------------------------------------------------------
def active(X, mask, *arrays):
    """(flat lane indices or None for all, the arrays flat over those lanes)."""
    flat = [np.broadcast_to(a, X.shape).reshape(-1) for a in arrays]
    if mask is None:
        return None, flat
    lanes = np.flatnonzero(np.broadcast_to(mask, X.shape))
    return lanes, [a[lanes] for a in flat]


def fail(X, I, kind, lanes, element: int, message: str):
    lane = int(element if lanes is None else lanes[element])
    raise kind(f"{message}\n  {X.where(lane)}\n  {I.where()}", line=I.line)


def align_check(X, I, addr, size, lanes, what: str) -> None:
    """``what`` names the access, as in 'shared read'."""
    wrong = addr & addr.dtype.type(size - 1)
    if wrong.any():
        n = int(np.argmax(wrong != 0))
        why = f"{what} of {size} bytes at {int(addr[n]):#x}, which is no multiple of {size}"
        fail(X, I, MisalignedAccess, lanes, n, why)


def shared_bytes(X, I, addr, lanes, size: int, what: str) -> np.ndarray:
    """uint32 shared::cluster addresses of lanes -> byte offsets into the wave's shared memory, int64, checked."""
    wave = X.wave
    ctas = X.cta_of_lane.reshape(-1)
    if lanes is not None:
        ctas = ctas[lanes]
    if size > 1:
        align_check(X, I, addr, size, lanes, f"shared {what}")
    offset = addr.astype(np.int64)
    if wave.cluster_size > 1:
        rank = offset >> RANK_SHIFT
        offset &= (1 << RANK_SHIFT) - 1
        bad = rank >= wave.cluster_size
        if bad.any():
            n = int(np.argmax(bad))
            why = f"shared {what} at {int(addr[n]):#x}: CTA rank {int(rank[n])} in a cluster of {wave.cluster_size}"
            fail(X, I, OutOfBounds, lanes, n, why)
        ctas = wave.first[ctas] + rank
        if wave.any_gone and wave.gone[ctas].any():
            n = int(np.argmax(wave.gone[ctas]))
            gone = wave.env.cta_name(wave, int(ctas[n]))
            fail(X, I, ExitTooEarly, lanes, n, f"shared {what}: CTA {gone} of its cluster has exited")
    offset -= SHARED_BASE
    if len(offset) and (int(offset.min()) < 0 or int(offset.max()) + size > wave.smem_bytes):
        bad = (offset < 0) | (offset + size > wave.smem_bytes)
        n = int(np.argmax(bad))
        fail(X, I, OutOfBounds, lanes, n,
             f"shared {what} of {size} bytes at {int(addr[n]):#x}: the CTA's shared memory is "
             f"[{SHARED_BASE:#x}, {SHARED_BASE + wave.smem_bytes:#x})")  # fmt: skip
    offset += ctas * wave.smem_row
    return offset


def _columns(X, lanes, got: np.ndarray, count: int) -> list[np.ndarray]:
    """Gathered elements (lanes, count) -> one array over the box per column."""
    if lanes is None:
        return [np.ascontiguousarray(got[:, k]).reshape(X.shape) for k in range(count)]
    out = []
    for k in range(count):
        full = np.zeros(X.lanes, got.dtype)
        full[lanes] = got[:, k]
        out.append(full.reshape(X.shape))
    return out


def _gather(views: dict, offset: np.ndarray, size: int, count: int) -> np.ndarray:
    total = size * count
    if total <= 16:
        got = views[total].take(offset >> SHIFT[total])
        return got.view(UNSIGNED[size]).reshape(-1, count)
    wide = views[16].take((offset >> 4)[:, None] + np.arange(total // 16))
    return wide.view(UNSIGNED[size]).reshape(-1, count)


def _scatter(views: dict, offset: np.ndarray, size: int, values: np.ndarray) -> None:
    """values: (lanes, count) unsigned."""
    total = size * values.shape[1]
    if total <= 16:
        views[total][offset >> SHIFT[total]] = np.ascontiguousarray(values).view(UNSIGNED[total]).reshape(-1)
        return
    views[16][(offset >> 4)[:, None] + np.arange(total // 16)] = np.ascontiguousarray(values).view(np.complex128)


def _rows(X, lanes, values, size: int) -> np.ndarray:
    dtype = UNSIGNED[size]
    n = X.lanes if lanes is None else len(lanes)
    out = np.empty((n, len(values)), dtype)
    for k, v in enumerate(values):
        v = np.broadcast_to(v, X.shape)
        flat = v.reshape(-1) if lanes is None else v.reshape(-1)[lanes]
        out[:, k] = flat if flat.dtype == dtype else np.ascontiguousarray(flat).view(f"u{flat.dtype.itemsize}")
    return out


# -- spaces ----------------------------------------------------------------------------------------------------
@runtime
def load_shared(X, I, addr, mask, size, count):
    lanes, (a,) = active(X, mask, addr)
    if not len(a):
        return [np.zeros(X.shape, UNSIGNED[size])] * count
    offset = _shared_access(X, I, a, lanes, size * count, "read")
    return _columns(X, lanes, _gather(X.wave.smem, offset, size, count), count)


@runtime
def store_shared(X, I, addr, mask, size, values):
    lanes, (a,) = active(X, mask, addr)
    if not len(a):
        return
    offset = _shared_access(X, I, a, lanes, size * len(values), "write")
    _scatter(X.wave.smem, offset, size, _rows(X, lanes, values, size))
    X.wave.env.progressed = True


def _shared_access(X, I, addr, lanes, size: int, what: str) -> np.ndarray:
    """`shared_bytes` of a "read" or a "write", which the checks and the profile are told of."""
    env, offset = X.wave.env, shared_bytes(X, I, addr, lanes, size, what)
    if env.hb is not None:
        (env.hb.read if what == "read" else env.hb.write)(X, I, offset, size, lanes)
    if env.profile is not None:
        env.profile.shared(X, I, offset, size, lanes, what)
    return offset


def global_parts(X, I, a, lanes, size: int, *, write: bool, align: bool = True):
    """[(interval, which)] for uint64 addresses, with the lane named on an error."""
    if align and size > 1:
        align_check(X, I, a, size, lanes, f"global {'write' if write else 'read'}")
    if X.wave.env.in_front is not None:
        X.wave.env.in_front.check(X, I, a, lanes, write)
    try:
        return X.wave.memory.lookup(a.view(np.int64), size, write=write)
    except EmulationError as error:
        element = getattr(error, "element", 0)
        fail(X, I, type(error), lanes, element, str(error))


@runtime
def load_global(X, I, addr, mask, size, count):
    lanes, (a,) = active(X, mask, addr)
    if not len(a):
        return [np.zeros(X.shape, UNSIGNED[size])] * count
    a = np.ascontiguousarray(a)
    total = size * count
    if X.wave.env.profile is not None:
        X.wave.env.profile.globally(X, I, a, total, lanes, "read")
    parts = global_parts(X, I, a, lanes, total, write=False)
    if len(parts) == 1:
        interval = parts[0][0]
        got = _gather(interval.views, a.view(np.int64) - interval.origin, size, count)
    else:
        got = np.empty((len(a), count), UNSIGNED[size])
        for interval, which in parts:
            got[which] = _gather(interval.views, a[which].view(np.int64) - interval.origin, size, count)
    return _columns(X, lanes, got, count)


@runtime
def store_global(X, I, addr, mask, size, values):
    lanes, (a,) = active(X, mask, addr)
    if not len(a):
        return
    a = np.ascontiguousarray(a)
    total = size * len(values)
    if X.wave.env.profile is not None:
        X.wave.env.profile.globally(X, I, a, total, lanes, "write")
    rows = _rows(X, lanes, values, size)
    for interval, which in global_parts(X, I, a, lanes, total, write=True):
        _scatter(interval.views, a[which].view(np.int64) - interval.origin, size, rows[which])
    X.wave.env.progressed = True


def _local_offset(X, I, a, lanes, size: int, what: str) -> np.ndarray:
    wave = X.wave
    if size > 1:
        align_check(X, I, a, size, lanes, f"local {what}")
    offset = a.astype(np.int64)
    bad = (offset < 0) | (offset + size > wave.program.local_bytes)
    if bad.any():
        n = int(np.argmax(bad))
        fail(X, I, OutOfBounds, lanes, n, f"local {what} of {size} bytes at {int(a[n]):#x}: the kernel has "
             f"{wave.program.local_bytes} bytes of local memory")  # fmt: skip
    thread = (X.warp_of_lane * 32 + X.lane_ids).reshape(-1)
    return offset + (thread if lanes is None else thread[lanes]) * wave.local_row


@runtime
def load_local(X, I, addr, mask, size, count):
    lanes, (a,) = active(X, mask, addr)
    if not len(a):
        return [np.zeros(X.shape, UNSIGNED[size])] * count
    offset = _local_offset(X, I, a, lanes, size * count, "read")
    return _columns(X, lanes, _gather(X.wave.local, offset, size, count), count)


@runtime
def store_local(X, I, addr, mask, size, values):
    lanes, (a,) = active(X, mask, addr)
    if len(a):
        offset = _local_offset(X, I, a, lanes, size * len(values), "write")
        _scatter(X.wave.local, offset, size, _rows(X, lanes, values, size))


@runtime
def load_param(X, I, addr, mask, size, count):
    lanes, (a,) = active(X, mask, addr)
    if not len(a):
        return [np.zeros(X.shape, UNSIGNED[size])] * count
    env = X.wave.env
    offset = (a & np.uint64(0xFFFFFFFF)).astype(np.int64)
    bad = offset + size * count > len(env.param_array)
    if bad.any():
        n = int(np.argmax(bad))
        why = f"param read at {int(offset[n])}: the kernel has {len(env.param_array)} bytes of parameters"
        fail(X, I, OutOfBounds, lanes, n, why)
    raw = env.param_array[offset[:, None] + np.arange(size * count)]
    return _columns(X, lanes, np.ascontiguousarray(raw).view(UNSIGNED[size]), count)


_WINDOWS = {SHARED_WINDOW: "shared", LOCAL_WINDOW: "local", PARAM_WINDOW: "param", CONST_WINDOW: "const"}


def by_window(X, addr, mask):
    """Split a generic address by space: yields (space, address in it, mask)."""
    addr = np.broadcast_to(addr, X.shape)
    top = addr & np.uint64(WINDOW_MASK)
    on = np.ones(X.shape, bool) if mask is None else np.broadcast_to(mask, X.shape)
    kinds = np.unique(top[on])
    for kind in kinds:
        space = _WINDOWS.get(int(kind), "global")
        inside = addr & ~np.uint64(WINDOW_MASK) if space != "global" else addr
        if space in ("shared", "local"):
            inside = inside.astype(np.uint32)
        yield space, inside, mask if len(kinds) == 1 else on & (top == kind)


@runtime
def load_generic(X, I, addr, mask, size, count):
    load = {"shared": load_shared, "local": load_local, "param": load_param}
    out = None
    for space, a, m in by_window(X, addr, mask):
        got = load.get(space, load_global)(X, I, a, m, size, count)
        if out is None:
            out = got
        else:
            for k in range(count):
                np.copyto(out[k], got[k], where=m)
    return out or [np.zeros(X.shape, UNSIGNED[size])] * count


@runtime
def store_generic(X, I, addr, mask, size, values):
    store = {"shared": store_shared, "global": store_global, "local": store_local}
    for space, a, m in by_window(X, addr, mask):
        if space not in store:
            lanes, _ = active(X, m, a)
            fail(X, I, OutOfBounds, lanes, 0, f"a store through a generic address into .{space} memory")
        store[space](X, I, a, m, size, values)


# -- addresses as values ---------------------------------------------------------------------------------------
_BASE = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "const": 0, "global": 0}


@emits("cvta")
def cvta(g: Gen, i: Instr) -> None:
    space = space_of(i)
    d, a = i.operands
    if i.parts[-1] == "u32":
        raise g.unsupported("32-bit generic addresses are not supported")
    if isinstance(a, Symbol) and not i.has("to"):
        space = g.space_of(a.name) if space == "" else space
    base = g.constant(_BASE[space], "u8")
    source = g.src(a, "u8")
    if i.has("to"):
        g.assign(d, f"({source} & {g.constant(~WINDOW_MASK & (1 << 64) - 1, 'u8')})" if _BASE[space] else source, "u8")
    else:
        g.assign(d, f"({source} | {base})" if _BASE[space] else source, "u8")


@emits("isspacep")
def isspacep(g: Gen, i: Instr) -> None:
    space = space_of(i)
    d, a = i.operands
    top = f"({g.src(a, 'u8')} & {g.constant(WINDOW_MASK, 'u8')})"
    if space == "shared" and not i.parts[-1].endswith("cluster"):
        g.assign(d, f"is_own_shared(X, {g.src(a, 'u8')})", "p")
        return
    g.assign(d, f"({top} == {g.constant(_BASE[space] if space in ('shared', 'local', 'param') else 0, 'u8')})", "p")


@runtime
def is_own_shared(X, a):
    inside = (a & np.uint64(WINDOW_MASK)) == np.uint64(SHARED_WINDOW)
    rank = (a & np.uint64(0xFFFFFFFF)) >> np.uint64(RANK_SHIFT)
    return inside & (rank == X.sreg("cluster_ctarank", "u8"))


@emits("mapa")
def mapa(g: Gen, i: Instr) -> None:
    """The address of the same place in the shared memory of another CTA of the cluster."""
    d, a, rank = i.operands
    code = "u8" if i.parts[-1] == "u64" else "u4"
    keep = g.constant(((1 << int(code[1]) * 8) - 1) & ~(0xFF << RANK_SHIFT), code)
    moved = f"({g.src(rank, 'u4')}.astype(np.{numpy_name(code)}) << {g.constant(RANK_SHIFT, code)})"
    g.assign(d, f"(({g.src(a, code)} & {keep}) | {moved})", code)


@emits("getctarank")
def getctarank(g: Gen, i: Instr) -> None:
    code = "u8" if i.parts[-1] == "u64" else "u4"
    g.assign(
        i.operands[0],
        f"(({g.src(i.operands[1], code)} >> {g.constant(RANK_SHIFT, code)}) "
        f"& {g.constant(0xFF, code)}).astype(np.uint32)",
        "u4",
    )


@emits("discard")
def discard(g: Gen, i: Instr) -> None:
    """Leaves a line of global memory with values that nobody may rely on: here, all bits set (NaN)."""
    size = i.operands[1]
    if space_of(i) not in ("", "global") or not isinstance(size, Imm) or size.value != 128:
        raise g.unsupported()
    a = g.let(g.address(i.operands[0], "u8"))
    ones = g.constant((1 << 64) - 1, "u8")
    g.line(f"discard_global(X, {g.me}, {a}, {g.mask}, ({ones},) * 16)")


@runtime
def discard_global(X, I, addr, mask, values):
    """A store of these values that no profile counts: on a GPU nothing moves."""
    env = X.wave.env
    profile, env.profile = env.profile, None
    try:
        store_global(X, I, addr, mask, 8, values)
    finally:
        env.profile = profile


@emits("prefetch", "prefetchu", "applypriority", "createpolicy", "cp.async.bulk.prefetch")
def no_effect(g: Gen, i: Instr) -> None:
    """Cache hints change no value. A created policy is any value."""
    if i.name == "createpolicy":
        g.assign(i.operands[0], g.constant(0, "u8"), "u8")
