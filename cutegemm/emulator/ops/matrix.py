"""ldmatrix and stmatrix, and the fragment layouts that mma shares with them."""

from __future__ import annotations

import numpy as np

from cutegemm.emulator.errors import EmulationError
from cutegemm.emulator.ops.loadstore import fail, shared_bytes
from cutegemm.emulator.ptx import Instr, items_of
from cutegemm.emulator.translate import Gen, emits, runtime


def _registers(g: Gen, i: Instr, operand) -> list:
    """The registers of an instruction's matrices, one of each; the form of the instruction is checked."""
    if not i.has("m8n8") or i.parts[-1] != "b16":
        raise g.unsupported("only .m8n8 of .b16 is implemented")
    if any(p.startswith("shared::cluster") for p in i.parts):
        raise g.unsupported()
    n = next(int(p[1:]) for p in i.parts if p in ("x1", "x2", "x4"))
    items = items_of(operand)
    if len(items) != n:
        raise g.unsupported(f"{len(items)} registers for .x{n}")
    g.program.env.note_access("shared", 16)
    return items


@emits("ldmatrix")
def ldmatrix(g: Gen, i: Instr) -> None:
    items = _registers(g, i, i.operands[0])
    n = len(items)
    t = g.let(f"load_matrix(X, {g.me}, {g.address(i.operands[1], 'u4')}, {g.mask}, {n}, {i.has('trans')})")
    for k, item in enumerate(items):
        g.assign(item, f"{t}[{k}]", "u4")


def _rows(X, I, addr, mask, n: int, what: str):
    """(warps, byte offsets in shared memory of the rows that lanes 0 to 8n-1 of each name).

    warps: indices in the box, None for all of them. The checks and the profile are told of the access, a "read" or a
    "write".
    """
    addr = np.broadcast_to(addr, X.shape).reshape(X.warps, 32)
    warps = None
    if mask is not None:
        on = np.broadcast_to(mask, X.shape).reshape(X.warps, 32)
        some = on.any(-1)
        if not on[some].all():
            first = 32 * int(np.argmax(some & ~on.all(-1)))
            fail(X, I, EmulationError, None, first, f"{I.name} executed by some lanes of a warp only")
        warps = np.flatnonzero(some)
        addr = addr[warps]
        if not len(warps):
            return warps, warps
    ids = np.arange(X.warps) if warps is None else warps
    lanes = (ids[:, None] * 32 + np.arange(8 * n)).reshape(-1)
    addr = np.ascontiguousarray(addr[:, : 8 * n]).reshape(-1)
    env, offset = X.wave.env, shared_bytes(X, I, addr, lanes, 16, f"{what} by {I.name}")
    if env.hb is not None:
        (env.hb.read if what == "read" else env.hb.write)(X, I, offset, 16, lanes)
    if env.profile is not None:
        env.profile.matrix(I, offset, what)
    return warps, offset


@runtime
def load_matrix(X, I, addr, mask, n, trans):
    warps, offset = _rows(X, I, addr, mask, n, "read")
    if not len(offset):
        return [np.zeros(X.shape, np.uint32)] * n
    rows = X.wave.smem[16].take(offset >> 4)
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
    values = ", ".join(g.src(o, "u4") for o in _registers(g, i, i.operands[1]))
    g.line(f"store_matrix(X, {g.me}, {g.address(i.operands[0], 'u4')}, {g.mask}, ({values},), {i.has('trans')})")


@runtime
def store_matrix(X, I, addr, mask, values, trans):
    n = len(values)
    warps, offset = _rows(X, I, addr, mask, n, "write")
    if not len(offset):
        return
    words = np.stack([np.broadcast_to(v, X.shape).reshape(X.warps, 32) for v in values], 1)  # [warp, n, 32]
    if warps is not None:
        words = words[warps]
    halves = words.reshape(-1, n, 8, 4).view(np.uint16)  # [warp, n, 8, 8]
    if trans:
        halves = halves.transpose(0, 1, 3, 2)
    X.wave.smem[16][offset >> 4] = np.ascontiguousarray(halves).view(np.complex128).reshape(-1)
    X.wave.env.progressed = True
