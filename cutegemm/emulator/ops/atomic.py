"""atom and red, on global and shared memory: lanes take effect one after the other, in lane order of the wave.

add, min, max, and, or, xor, exch, cas, inc and dec for 32 and 64-bit integers; add for f32, f64, f16, bf16, f16x2,
bf16x2. As the PTX ISA has it, an f32 add on global memory takes subnormal numbers for zeros of their sign, in its
operands and its result; on shared memory it does not.
Vector forms of red are taken element by element; their address is a multiple of the whole vector.
"""

from __future__ import annotations

import numpy as np

from cutegemm.emulator.errors import DataRace
from cutegemm.emulator.numerics import flush
from cutegemm.emulator.ops.half import half_op
from cutegemm.emulator.ops.loadstore import (
    SHIFT,
    active,
    address_code,
    align_check,
    by_window,
    global_parts,
    shared_bytes,
    space_of,
)
from cutegemm.emulator.ptx import TYPE_BYTES, Instr, Sink, Vec, items_of
from cutegemm.emulator.translate import PTX_CODE, Gen, emits, runtime

OPS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


@emits("atom", "red")
def atom(g: Gen, i: Instr) -> None:
    if "async" in i.parts:
        raise g.unsupported("red.async is not implemented")
    op = next((p for p in i.parts if p in OPS), None)
    t = i.parts[-1]
    if op is None or t not in PTX_CODE:
        raise g.unsupported()
    space = space_of(i)
    ops = i.addressed
    dst = ops.pop(0) if i.name == "atom" else Sink()
    if isinstance(dst, Vec):
        raise g.unsupported("a vector atom with results")
    size = TYPE_BYTES[t]
    code = PTX_CODE[t]
    code = "u2" if t in ("f16", "bf16") else code
    addr = g.let(g.address(ops[0], address_code(space)))
    g.program.env.note_access(space, size)
    values = items_of(ops[1])
    if len(values) > 1:
        g.line(f"vector_align(X, {g.me}, {addr}, {g.mask}, {size * len(values)})")
    other = g.src(ops[2], code) if len(ops) > 2 else "None"
    for k, value in enumerate(values):
        at = addr if k == 0 else f"({addr} + {g.constant(k * size, address_code(space))})"
        name = g.let(f"atomic(X, {g.me}, {space!r}, {at}, {g.mask}, {op!r}, {t!r}, {g.src(value, code)}, {other})")
        if not isinstance(dst, Sink):
            g.assign(dst, name, code)


@runtime
def vector_align(X, I, addr, mask, size):
    lanes, (a,) = active(X, mask, addr)
    align_check(X, I, a, size, lanes, "atomic access")


@runtime
def atomic(X, I, space, addr, mask, op, t, value, other):
    dtype = {"f16": np.dtype(np.uint16), "bf16": np.dtype(np.uint16)}.get(t) or np.asarray(value).dtype
    out = np.zeros(X.shape, dtype)
    if space == "":
        for where, a, m in by_window(X, addr, mask):
            if where not in ("shared", "global"):
                lanes, _ = active(X, m, a)
                raise DataRace(f"an atomic operation on .{where} memory\n  {I.where()}", line=I.line)
            got = atomic(X, I, where, a, m, op, t, value, other)
            np.copyto(out, got, where=True if m is None else m)
        return out
    arrays = [addr, value] if other is None else [addr, value, other]
    lanes, flat = active(X, mask, *arrays)
    a, v = flat[0], np.ascontiguousarray(flat[1])
    if not len(a):
        return out
    o = flat[2] if other is not None else None
    size = dtype.itemsize
    env = X.wave.env
    env.progressed = True
    old: np.ndarray = np.empty(len(a), dtype)
    if space == "shared":
        offset = shared_bytes(X, I, a, lanes, size, "atomic access")
        if env.hb is not None:
            env.hb.atomic(X, I, offset, size, lanes)
        memory = X.wave.smem[size].view(dtype)
        old[:] = apply(memory, offset >> SHIFT[size], op, t, v, o, I.name == "atom")
    else:
        a = np.ascontiguousarray(a)
        if env.profile is not None:
            env.profile.globally(X, I, a, size, lanes, "atomic")
        for interval, which in global_parts(X, I, a, lanes, size, write=True):
            memory = interval.views[size].view(dtype)
            index = (a[which].view(np.int64) - interval.origin) >> SHIFT[size]
            there = "f32 flushed" if t == "f32" and op == "add" else t
            old[which] = apply(memory, index, op, there, v[which], None if o is None else o[which], I.name == "atom")
    if lanes is None:
        return old.reshape(X.shape)
    out.reshape(-1)[lanes] = old
    return out


def apply(memory, index, op, t, v, other, want_old) -> np.ndarray:
    """Apply an operation lane by lane; lanes with the same index see each other's results."""
    if len(index) == len(np.unique(index)):
        old = memory[index].copy()
        memory[index] = step(op, t, old, v, other)
        return old
    if not want_old and t not in ("f32 flushed", "f16", "bf16", "f16x2", "bf16x2"):
        ufunc = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                 "xor": np.bitwise_xor}.get(op)  # fmt: skip
        if ufunc is not None:
            ufunc.at(memory, index, v)
            return np.zeros(len(index), v.dtype)
    old = np.empty(len(index), v.dtype)
    # rounds: the k-th lane of each address in round k
    order = np.argsort(index, kind="stable")
    sorted_index = index[order]
    first = np.r_[True, sorted_index[1:] != sorted_index[:-1]]
    start = np.flatnonzero(first)
    nth = np.arange(len(index)) - np.repeat(start, np.diff(np.r_[start, len(index)]))
    for k in range(int(nth.max()) + 1):
        lanes = order[nth == k]
        now = memory[index[lanes]].copy()
        old[lanes] = now
        memory[index[lanes]] = step(op, t, now, v[lanes], None if other is None else other[lanes])
    return old


def step(op, t, old, v, other):
    if op == "add":
        if t in ("f16", "bf16", "f16x2", "bf16x2"):
            return half_op("add", t.removesuffix("x2"), (), old, v)
        if t == "f32 flushed":
            return flush(flush(old) + flush(v))
        return old + v
    if op == "min":
        return np.fmin(old, v) if t in ("f32", "f64") else np.minimum(old, v)
    if op == "max":
        return np.fmax(old, v) if t in ("f32", "f64") else np.maximum(old, v)
    if op == "exch":
        return v
    if op == "cas":  # compare with v, store other
        return np.where(old == v, other, old)
    if op == "inc":
        return np.where(old >= v, old.dtype.type(0), old + old.dtype.type(1))
    if op == "dec":
        return np.where((old == 0) | (old > v), v, old - old.dtype.type(1))
    return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](old, v)
