"""The operands of wgmma: accumulator registers as matrices, shared-memory descriptors, and what an operation reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cutegemm.emulator import numerics
from cutegemm.emulator.errors import EmulationError, OutOfBounds
from cutegemm.emulator.memory import SHARED_BASE
from cutegemm.emulator.ops.mma import unpack
from cutegemm.emulator.ptx import Instr


@dataclass
class Accumulators:
    """One set of accumulator (or A fragment) registers that wgmma instructions name together."""

    index: int
    regs: tuple[int, ...]
    is_a: bool = False  # registers of an A operand: they may be read while in flight, not written
    n: int = 0
    half: bool = False  # fp16 accumulators, two to a register
    overlapping: bool = False


@dataclass
class Operation:
    """One wgmma.mma_async of several warps, not executed yet. ``c``, ``w``: warps; ``group``: their commit group."""

    acc: Accumulators
    spec: tuple  # n, k bytes, operand types, majors, negations
    c: np.ndarray
    w: np.ndarray
    group: np.ndarray
    a: Any  # descriptors [rows] or fragments [rows, 16, k]
    b: np.ndarray
    keep: np.ndarray  # scale-d per warp
    instr: Instr
    box: Any


# -- accumulators: registers <-> matrices ----------------------------------------------------------------------------
def gather(wave: Any, acc: Accumulators, c: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Registers of warps -> [warps, 16, n] fp32."""
    regs = _rows(wave, acc)[:, c, w]  # [registers, warps, 32]
    m = len(c)
    if acc.half:
        v = np.ascontiguousarray(regs).view(np.float16).reshape(-1, 2, m, 8, 4, 2).astype(np.float32)
        return v.transpose(2, 1, 3, 0, 4, 5).reshape(m, 16, -1)
    v = regs.view(np.float32).reshape(-1, 2, 2, m, 8, 4)  # [column block, row half, element, warp, row, group]
    return v.transpose(3, 1, 4, 0, 5, 2).reshape(m, 16, -1)


def scatter(wave: Any, acc: Accumulators, c: np.ndarray, w: np.ndarray, values: np.ndarray) -> None:
    m = len(c)
    if acc.half:
        v = values.reshape(m, 2, 8, -1, 4, 2).transpose(3, 1, 0, 2, 4, 5)
        words = np.ascontiguousarray(numerics.f16_bits(v)).view(np.uint32).reshape(-1, m, 32)
    else:
        v = values.reshape(m, 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4)
        words = np.ascontiguousarray(v).view(np.uint32).reshape(-1, m, 32)
    _store_rows(wave, acc, c, w, words)


def _contiguous(acc: Accumulators) -> bool:
    return all(b == a + 1 for a, b in zip(acc.regs, acc.regs[1:], strict=False))


def _rows(wave: Any, acc: Accumulators) -> np.ndarray:
    regs = wave.regs["32"]
    if _contiguous(acc):
        return regs[acc.regs[0] : acc.regs[-1] + 1]
    return regs[list(acc.regs)]


def _store_rows(wave: Any, acc: Accumulators, c: np.ndarray, w: np.ndarray, words: np.ndarray) -> None:
    regs = wave.regs["32"]
    if _contiguous(acc):
        regs[acc.regs[0] : acc.regs[-1] + 1][:, c, w] = words
    else:
        for n, r in enumerate(acc.regs):
            regs[r][c, w] = words[n]


# -- shared-memory operands --------------------------------------------------------------------------------------
def descriptor(value: int) -> tuple[int, int, int, int]:
    """(start address, leading byte offset, stride byte offset, swizzle bytes) of a wgmma descriptor."""
    if (value >> 49) & 7:
        raise ValueError("a base offset other than 0 is not supported")
    start = (value & 0x3FFF) << 4
    leading, stride = ((value >> 16) & 0x3FFF) << 4, ((value >> 32) & 0x3FFF) << 4
    return start, leading, stride, (0, 128, 64, 32)[value >> 62 & 3]


_tables: dict[tuple, np.ndarray] = {}


def chunks(value: int, rows: int, mn_major: bool, k16: int) -> np.ndarray:
    """16-byte chunk indices from the start of the CTA's shared memory.

    K-major: [rows, 2]: the 32 bytes of K of each row. MN-major: [k16, rows / 8]: the rows of each k, 8 to a chunk.
    """
    key = (value, rows, mn_major, k16)
    found = _tables.get(key)
    if found is not None:
        return found
    start, leading, stride, swizzle = descriptor(value)
    if mn_major:
        k, m = np.arange(k16)[:, None], np.arange(rows // 8)[None, :]
        if swizzle:
            per = swizzle // 16  # chunks of one swizzle row
            at = (m % per) * 16 + (m // per) * leading + (k % 8) * swizzle + (k // 8) * stride
        else:
            at = m * stride + (k % 8) * 16 + (k // 8) * leading
    else:
        r, half = np.arange(rows)[:, None], np.arange(2)[None, :]
        if swizzle:
            at = (r // 8) * stride + (r % 8) * swizzle + half * 16
        else:
            at = (r // 8) * stride + half * leading + (r % 8) * 16
    at = at + start
    if swizzle:
        at = at ^ (((at >> 7) & (swizzle // 16 - 1)) << 4)
    if len(_tables) > 4096:
        _tables.clear()
    found = _tables[key] = (at - SHARED_BASE) >> 4
    return found


def _chunk_rows(op: Operation, wave: Any, values: np.ndarray, rows: int, mn: bool):
    """Yield (positions, ctas, chunk table) for each distinct descriptor among ``values``, checked."""
    for value in np.unique(values):
        try:
            table = chunks(int(value), rows, mn, op.spec[1])
        except ValueError as error:
            raise EmulationError(f"a wgmma descriptor: {error}\n  {op.instr.where()}", line=op.instr.line) from error
        if int(table.min()) < 0 or (int(table.max()) + 1) * 16 > (wave.smem_bytes + 15) // 16 * 16:
            raise OutOfBounds(
                f"a wgmma operand of {rows} rows at shared address "
                f"{descriptor(int(value))[0]:#x} leaves the CTA's shared memory\n  "
                f"{wave.env.thread_name(wave, int(op.c[0]), int(op.w[0]), None)}\n "
                f" {op.instr.where()}",
                line=op.instr.line,
            )
        at = np.flatnonzero(values == value)
        yield at, table


def _values(wave: Any, ctas: np.ndarray, table: np.ndarray, kind: str) -> np.ndarray:
    """Operand chunks of several CTAs -> fp32 [ctas, rows, k] (K-major) or [ctas, k, rows] (MN-major)."""
    row = wave.smem_row >> 4
    raw = wave.smem[16].reshape(-1, row)[ctas[:, None], table.reshape(1, -1)]
    values = unpack(raw.view(np.uint32), kind)
    return values.reshape(len(ctas), table.shape[0], -1)


def _groups(op: Operation) -> tuple[np.ndarray, np.ndarray]:
    """(first warp row of each (CTA, warpgroup), group of each row). Rows are in (CTA, warp) order."""
    key = op.c * 64 + op.w // 4
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    group = np.cumsum(np.r_[False, key[1:] != key[:-1]])
    return first, group


def load_a(wave: Any, op: Operation) -> np.ndarray:
    """[warps, 16, k] fp32: the 16 rows of each warp."""
    if op.a.ndim > 1:
        return op.a
    k = op.spec[1]
    out = np.empty((len(op.c), 16, k), np.float32)
    mn = bool(op.spec[4])
    for at, table in _chunk_rows(op, wave, op.a, 64, mn):
        ctas, inverse = np.unique(op.c[at], return_inverse=True)
        values = _values(wave, ctas, table, op.spec[2])
        if mn:
            values = values.transpose(0, 2, 1)
        out[at] = values.reshape(len(ctas), 4, 16, k)[inverse, op.w[at] % 4]
    return out


def load_b(wave: Any, op: Operation) -> tuple[np.ndarray, np.ndarray]:
    """([groups, k, n] fp32, the group of each warp). Warpgroups of a CTA with the same descriptor share one."""
    n, k = op.spec[0], op.spec[1]
    mn = bool(op.spec[5])
    keys, which = np.unique(np.stack([op.c.astype(np.uint64), op.b]), axis=1, return_inverse=True)
    which = which.reshape(-1)
    ctas, values = keys[0].astype(np.int64), keys[1]
    out = np.empty((len(ctas), k, n), np.float32)
    for at, table in _chunk_rows(op, wave, values, n, mn):
        got = _values(wave, ctas[at], table, op.spec[3])
        out[at] = got if mn else got.transpose(0, 2, 1)
    return out, which


def note_reads(wave: Any, op: Operation) -> None:
    """Tell the happens-before clocks which shared memory an operation reads."""
    hb = wave.env.hb
    n = op.spec[0]
    sides = [(op.b, n, bool(op.spec[5]))]
    if op.a.ndim == 1:
        sides.append((op.a, 64, bool(op.spec[4])))
    first, _ = _groups(op)
    for values, rows, mn in sides:
        for at, table in _chunk_rows(op, wave, values[first], rows, mn):
            g = hb.of_chunks(table.reshape(-1))
            hb.proxy_read_groups(op.instr, op.c[first][at], op.w[first][at], g)
