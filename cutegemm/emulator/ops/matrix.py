"""ldmatrix and stmatrix, and the fragment layouts that mma shares with them."""

from __future__ import annotations

import numpy as np

from cutegemm.emulator.ops.loadstore import shared_bytes
from cutegemm.emulator.ptx import Instr, Vec
from cutegemm.emulator.translate import Gen, emits, runtime


def _count(i: Instr) -> int:
    return next(int(p[1:]) for p in i.parts if p in ("x1", "x2", "x4"))


def _items(o) -> list:
    return list(o.items) if isinstance(o, Vec) else [o]


def _check_form(g: Gen, i: Instr) -> None:
    if not i.has("m8n8") or i.parts[-1] != "b16":
        raise g.unsupported("only .m8n8 of .b16 is implemented")
    if any(p.startswith("shared::cluster") for p in i.parts):
        raise g.unsupported()


@emits("ldmatrix")
def ldmatrix(g: Gen, i: Instr) -> None:
    _check_form(g, i)
    n = _count(i)
    items = _items(i.operands[0])
    if len(items) != n:
        raise g.unsupported(f"{len(items)} registers for .x{n}")
    g.program.env.note_access(g, i, "shared", 16)
    t = g.let(f"load_matrix(X, {g.me}, {g.address(i.operands[1], 'u4')}, {g.mask}, {n}, {i.has('trans')})")
    for k, item in enumerate(items):
        g.assign(item, f"{t}[{k}]", "u4")


def _row_lanes(X, addr, mask, n: int):
    """The row addresses: lanes 0 to 8n-1 of every participating warp, as (warp index in the box, flat lanes,
    addresses).
    """
    addr = np.broadcast_to(addr, X.shape).reshape(X.warps, 32)
    warps = None
    if mask is not None:
        on = np.broadcast_to(mask, X.shape).reshape(X.warps, 32)
        some = on.any(-1)
        if not on[some].all():
            w = int(np.argmax(some & ~on.all(-1)))
            return None, w, None
        warps = np.flatnonzero(some)
        addr = addr[warps]
    ids = np.arange(X.warps) if warps is None else warps
    lanes = (ids[:, None] * 32 + np.arange(8 * n)).reshape(-1)
    return warps, lanes, np.ascontiguousarray(addr[:, : 8 * n]).reshape(-1)


def _aligned(X, I, w: int):
    from cutegemm.emulator.errors import EmulationError

    raise EmulationError(
        f"{I.name} executed by some lanes of a warp only\n  {X.where(w * 32)}\n  {I.where()}", line=I.line
    )


@runtime
def load_matrix(X, I, addr, mask, n, trans):
    warps, lanes, a = _row_lanes(X, addr, mask, n)
    if a is None:
        _aligned(X, I, lanes)
    if not len(a):
        return [np.zeros(X.shape, np.uint32)] * n
    wave = X.wave
    offset = shared_bytes(X, I, a, lanes, 16, "read by ldmatrix")
    if wave.env.hb is not None:
        wave.env.hb.read(X, I, offset, 16, lanes)
    if wave.env.profile is not None:
        wave.env.profile.matrix(X, I, offset, lanes, "read")
    rows = wave.smem[16].take(offset >> 4)
    if trans:
        t = rows.view(np.uint16).reshape(-1, n, 8, 8).transpose(1, 0, 3, 2)  # [n, warp, column, row]
        words = np.ascontiguousarray(t).view(np.uint32)  # [n, warp, 8, 4]
    else:
        words = rows.view(np.uint32).reshape(-1, n, 8, 4).transpose(1, 0, 2, 3)
    return _to_box(X, warps, words, n)


def _to_box(X, warps, words, n: int) -> list:
    if warps is None:
        return [words[k].reshape(X.shape) for k in range(n)]
    out = []
    for k in range(n):
        full = np.zeros((X.warps, 32), np.uint32)
        full[warps] = words[k].reshape(-1, 32)
        out.append(full.reshape(X.shape))
    return out


@emits("stmatrix")
def stmatrix(g: Gen, i: Instr) -> None:
    _check_form(g, i)
    n = _count(i)
    items = _items(i.operands[1])
    if len(items) != n:
        raise g.unsupported(f"{len(items)} registers for .x{n}")
    g.program.env.note_access(g, i, "shared", 16)
    values = ", ".join(g.src(o, "u4") for o in items)
    g.line(f"store_matrix(X, {g.me}, {g.address(i.operands[0], 'u4')}, {g.mask}, ({values},), {i.has('trans')})")


@runtime
def store_matrix(X, I, addr, mask, values, trans):
    n = len(values)
    warps, lanes, a = _row_lanes(X, addr, mask, n)
    if a is None:
        _aligned(X, I, lanes)
    if not len(a):
        return
    wave = X.wave
    offset = shared_bytes(X, I, a, lanes, 16, "write by stmatrix")
    if wave.env.hb is not None:
        wave.env.hb.write(X, I, offset, 16, lanes)
    if wave.env.profile is not None:
        wave.env.profile.matrix(X, I, offset, lanes, "write")
    words = np.stack([np.broadcast_to(v, X.shape).reshape(X.warps, 32) for v in values], 1)  # [warp, n, 32]
    if warps is not None:
        words = words[warps]
    halves = words.reshape(-1, n, 8, 4).view(np.uint16)  # [warp, n, 8, 8]
    if trans:
        halves = halves.transpose(0, 1, 3, 2)
    wave.smem[16][offset >> 4] = np.ascontiguousarray(halves).view(np.complex128).reshape(-1)
    wave.env.progressed = True
