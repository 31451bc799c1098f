"""Instructions among the lanes of a warp: shfl, vote, match, activemask, elect, redux."""

from __future__ import annotations

import numpy as np

from cutegemm.emulator.ptx import Instr, Pair, Sink
from cutegemm.emulator.translate import Gen, emits, runtime

U4 = np.uint32


def _assign(g: Gen, d, t: str) -> None:
    """Assigns `t`, a value and a predicate, to the destination: a register, or a pair `value|predicate`."""
    value, predicate = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    g.assign(value, f"{t}[0]", "u4")
    if predicate is not None:
        g.assign(predicate, f"{t}[1]", "p")


@emits("shfl")
def shfl(g: Gen, i: Instr) -> None:
    mode = next(p for p in i.parts if p in ("up", "down", "bfly", "idx"))
    d, a, b, c = i.operands[:4]
    t = g.let(f"shuffle(X, {g.src(a, 'u4')}, {g.src(b, 'u4')}, {g.src(c, 'u4')}, {mode!r}, {g.mask})")
    _assign(g, d, t)


@runtime
def shuffle(X, a, b, c, mode, mask):
    """Returns (values, in-range predicate). Lanes out of range, or whose source is not active, get their own value."""
    lane: np.ndarray = np.arange(32, dtype=np.int64)
    if b.ndim == 0 and c.ndim == 0 and mode == "idx" and (int(c) >> 8) & 31 == 0 and int(c) & 31 == 31 and mask is None:
        a = np.broadcast_to(a, X.shape)
        return np.repeat(a[:, :, int(b) & 31 : (int(b) & 31) + 1], 32, 2), True
    a, b, c = (np.broadcast_to(v, X.shape) for v in (a, b, c))
    b = (b & U4(31)).astype(np.int64)
    clamp, segment = (c & U4(31)).astype(np.int64), ((c >> U4(8)) & U4(31)).astype(np.int64)
    top = (lane & segment) | (clamp & ~segment)
    low = lane & segment
    if mode == "up":
        j = lane - b
        ok = j >= top
    elif mode == "down":
        j = lane + b
        ok = j <= top
    elif mode == "bfly":
        j = lane ^ b
        ok = j <= top
    else:
        j = low | (b & ~segment)
        ok = j <= top
    j = np.where(ok, j, lane)
    if mask is not None:
        on = np.broadcast_to(mask, X.shape)
        j = np.where(np.take_along_axis(on, j, 2), j, lane)
    return np.take_along_axis(a, j, 2), ok


def _active(X, mask, members=None) -> np.ndarray:
    """The lanes that execute an instruction, of those that it names."""
    on = X.wave.live[X.at] if mask is None else np.broadcast_to(mask, X.shape)
    if members is None:
        return on
    return on & ((np.broadcast_to(members, X.shape) >> np.arange(32, dtype=U4)) & U4(1)).astype(bool)


_BIT = (U4(1) << np.arange(32, dtype=U4)).astype(U4)


def ballot(on: np.ndarray) -> np.ndarray:
    """bool [C, W, 32] -> the 32-bit mask of each warp, shape [C, W, 1]."""
    return (on * _BIT).sum(-1, dtype=np.uint32, keepdims=True)


@emits("vote")
def vote(g: Gen, i: Instr) -> None:
    mode = next(p for p in i.parts if p in ("all", "any", "uni", "ballot"))
    d, p = i.operands[:2]
    members = g.src(i.operands[2], "u4") if len(i.operands) > 2 else "np.uint32(0xFFFFFFFF)"
    t = g.let(f"vote_of(X, {g.src(p, 'p')}, {members}, {mode!r}, {g.mask})")
    g.assign(d, t, "u4" if mode == "ballot" else "p")


@runtime
def vote_of(X, p, members, mode, mask):
    on = _active(X, mask, members)
    p = np.broadcast_to(p, X.shape)
    if mode == "ballot":
        return np.broadcast_to(ballot(p & on), X.shape)
    every, some = (p | ~on).all(-1, keepdims=True), (p & on).any(-1, keepdims=True)
    return np.broadcast_to({"all": every, "any": some, "uni": every | ~some}[mode], X.shape)


@emits("activemask")
def activemask(g: Gen, i: Instr) -> None:
    g.assign(i.operands[0], f"active_lanes(X, {g.mask})", "u4")


@runtime
def active_lanes(X, mask):
    return np.broadcast_to(ballot(_active(X, mask)), X.shape)


@emits("elect")
def elect(g: Gen, i: Instr) -> None:
    """elect.sync d|p, members: the lowest active member leads (hardware may take any)."""
    d, members = i.operands
    assert isinstance(d, Pair)
    t = g.let(f"leader(X, {g.src(members, 'u4')}, {g.mask})")
    if not isinstance(d.first, Sink):
        g.assign(d.first, f"{t}[0]", "u4")
    g.assign(d.second, f"{t}[1]", "p")


@runtime
def leader(X, members, mask):
    on = _active(X, mask, members)
    first = on.argmax(-1)[..., None]
    return np.broadcast_to(first, X.shape), (np.arange(32) == first) & on


@emits("match")
def match(g: Gen, i: Instr) -> None:
    d, a, members = i.operands
    code = "u8" if i.parts[-1] == "b64" else "u4"
    t = g.let(f"matching(X, {g.src(a, code)}, {g.src(members, 'u4')}, {i.has('all')}, {g.mask})")
    _assign(g, d, t)


@runtime
def matching(X, a, members, every, mask):
    a = np.broadcast_to(a, X.shape)
    on = _active(X, mask, members)
    same = (a[..., :, None] == a[..., None, :]) & on[..., None, :]
    masks = (same * _BIT).sum(-1, dtype=np.uint32)
    if not every:
        return masks, True
    whole = ballot(on)
    agree = ((masks == whole) | ~on).all(-1, keepdims=True)
    return np.broadcast_to(np.where(agree, whole, U4(0)), X.shape), np.broadcast_to(agree, X.shape)


@emits("redux")
def redux(g: Gen, i: Instr) -> None:
    op = next(p for p in i.parts if p in ("add", "min", "max", "and", "or", "xor"))
    code = {"s32": "i4", "u32": "u4", "b32": "u4"}.get(i.parts[-1])
    if code is None:
        raise g.unsupported()
    d, a, members = i.operands
    g.assign(d, f"reduce_warp(X, {g.src(a, code)}, {g.src(members, 'u4')}, {op!r}, {g.mask})", code)


@runtime
def reduce_warp(X, a, members, op, mask):
    a = np.broadcast_to(a, X.shape)
    on = _active(X, mask, members)
    info = np.iinfo(a.dtype)
    ufunc, neutral = {
        "add": (np.add, 0), "min": (np.minimum, info.max), "max": (np.maximum, info.min), "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0), "and": (np.bitwise_and, -1 if info.min else info.max),
    }[op]  # fmt: skip
    filled = np.where(on, a, a.dtype.type(neutral))
    return np.broadcast_to(ufunc.reduce(filled, -1, dtype=a.dtype, keepdims=True), X.shape)
