"""mma.sync and wmma.

Floating-point sums have the bits of the hardware that the PTX targets, see `tensor_cores`; integers are exact.
"""

from __future__ import annotations

import numpy as np

from cutegemm.emulator import numerics, tensor_cores
from cutegemm.emulator.ops import mma_f64
from cutegemm.emulator.ops.loadstore import address_code, space_of
from cutegemm.emulator.ptx import Instr, Vec
from cutegemm.emulator.translate import RUNTIME, Gen, emits, runtime

#: operand type -> elements in a 32-bit register
PER_WORD = {"f16": 2, "bf16": 2, "tf32": 1, "e4m3": 4, "e5m2": 4, "s8": 4, "u8": 4}
RUNTIME["fp8_values"] = numerics.fp8_values
RUNTIME["AS_HALVES"] = tensor_cores.AS_HALVES


def unpack(words: np.ndarray, kind: str) -> np.ndarray:
    """uint32 words -> fp32 values with one more axis: the elements of a word, lowest first."""
    words = np.ascontiguousarray(words)
    if kind == "f16":
        return words.view(np.float16).reshape(*words.shape, 2).astype(np.float32)
    if kind == "bf16":
        out = np.empty((*words.shape, 2), np.uint32)
        np.left_shift(words, np.uint32(16), out=out[..., 0])
        np.bitwise_and(words, np.uint32(0xFFFF0000), out=out[..., 1])
        return out.view(np.float32)
    if kind == "tf32":  # the hardware ignores the low 13 bits
        return (words & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    if kind in ("e4m3", "e5m2"):
        return numerics.fp8_values(words.view(np.uint8).reshape(*words.shape, 4), kind)
    if kind == "s8":
        return words.view(np.int8).reshape(*words.shape, 4).astype(np.float32)
    return words.view(np.uint8).reshape(*words.shape, 4).astype(np.float32)


@emits("mma")
def mma(g: Gen, i: Instr) -> None:
    """mma.sync.aligned.m16n8k*: A of 16 x k (row), B of k x 8 (col); fp64 in `mma_f64`."""
    if "f64" in i.parts:
        mma_f64.emit(g, i)
        return
    shape = next((p for p in i.parts if p.startswith("m") and "n8k" in p), None)
    if shape is None or not shape.startswith("m16n8k") or "sp" in i.parts or not (i.has("row") and i.has("col")):
        raise g.unsupported("only dense m16n8k* with row.col operands is implemented")
    k = int(shape[6:])
    dt, at, bt, ct = i.parts[-4:]
    if at not in PER_WORD or bt not in PER_WORD or dt != ct or dt not in ("f32", "f16", "s32"):
        raise g.unsupported(f"types {dt}.{at}.{bt}.{ct}")
    d, a, b, c = (o.items if isinstance(o, Vec) else (o,) for o in i.operands)
    a_words, b_words = 16 * k // PER_WORD[at] // 32, 8 * k // PER_WORD[bt] // 32
    cd = 2 if dt == "f16" else 4
    if (len(a), len(b), len(c), len(d)) != (a_words, b_words, cd, cd):
        raise g.unsupported("the number of registers does not fit the shape")
    fa = fragment(g, "A", a, at)
    fb = fragment(g, "B", b, bt)
    if dt == "s32":
        t = g.let(f"mma_product({fa}, {fb}, X.shape)")
        for n, (o, s) in enumerate(zip(d, c, strict=True)):
            product = f"{t}[{n >> 1}][..., {n & 1}]"
            if i.has("satfinite"):
                g.assign(o, f"saturating_sum({product}, {g.src(s, 'i4')})", "i4")
            else:
                g.ufunc("add", o, "i4", product, g.src(s, "i4"))
        return
    if dt == "f32" and k == 32 and tensor_cores.multiplied_as_halves(at, g.program.env.module.target):
        rule = g.keep(rule_of(g, "mma", "f16"))
        halves = f"{fa}[:, :, AS_HALVES], {fb}[:, AS_HALVES]"
        t = g.let(f"mma_sums({halves}, (np.uint32(0),) * 4, X.shape, {rule}, 'f16', 'f16')")
        for n, (o, s) in enumerate(zip(d, c, strict=True)):
            g.ufunc("add", o, "f4", f"{t}[{n}].view(np.float32)", g.src(s, "f4"))
        return
    cs = ", ".join(g.src(o, "u4") for o in c)
    rule = g.keep(rule_of(g, "mma", at))
    t = g.let(f"mma_sums({fa}, {fb}, ({cs},), X.shape, {rule}, {at!r}, {bt!r})")
    for n, o in enumerate(d):
        g.assign(o, f"{t}[{n}]", "u4")


def rule_of(g: Gen, instruction: str, kind: str) -> tensor_cores.Rule:
    """How the hardware that the module targets adds the products of an instruction."""
    return tensor_cores.RULES[instruction, kind, tensor_cores.architecture(g.program.env.module.target)]


def fragment(g: Gen, which: str, regs, kind: str) -> str:
    """The name of an operand as fp32 matrices (warps, 16, k) or (warps, k, 8), kept while its registers stay."""
    words = ", ".join(g.src(o, "u4") for o in regs)
    key = (which, kind, tuple((getattr(o, "cls", None), getattr(o, "index", None)) for o in regs))
    if any(not hasattr(o, "cls") for o in regs):
        return g.let(f"fragment_{which.lower()}(X.shape, ({words},), {kind!r})")
    return g.kept(key, regs, lambda: g.let(f"fragment_{which.lower()}(X.shape, ({words},), {kind!r})"))


@runtime
def fragment_a(shape, words, kind):
    """Registers of A -> (warps, 16, k): lane = 4 * row + column group; registers alternate rows +0 and +8."""
    n = shape[0] * shape[1]
    stack = np.stack(words).reshape(-1, 2, n, 8, 4)  # [column half, row half, warp, row, group]
    values = unpack(stack, kind)  # one more: element
    return values.transpose(2, 1, 3, 0, 4, 5).reshape(n, 16, -1)


@runtime
def fragment_b(shape, words, kind):
    """Registers of B -> (warps, k, 8): lane = 4 * column + row group."""
    n = shape[0] * shape[1]
    stack = np.stack(words).reshape(-1, n, 8, 4)
    values = unpack(stack, kind)  # [part, warp, column, group, element]
    return values.transpose(1, 0, 3, 4, 2).reshape(n, -1, 8)


@runtime
def mma_product(a, b, shape):
    """(warps, 16, k) @ (warps, k, 8) -> two int32 arrays (C, W, 32, 2): rows 0-7 and rows 8-15 as lanes hold them."""
    d = np.matmul(a, b).astype(np.int32).reshape(-1, 2, 8, 4, 2)
    return d[:, 0].reshape(*shape, 2), d[:, 1].reshape(*shape, 2)


@runtime
def saturating_sum(x, y):
    """x + y in int32, the nearest one where it does not fit."""
    return np.clip(x.astype(np.int64) + y, -(2**31), 2**31 - 1).astype(np.int32)


@runtime
def mma_sums(a, b, c, shape, rule, kind, kind_b):
    """Accumulators (registers of 32 bits: four fp32, or two of fp16 pairs) after the products of one instruction."""
    half = len(c) == 2
    words = np.stack([np.broadcast_to(x, shape) for x in c], -1)  # [C, W, 32, registers]
    values = words.view(np.float16).astype(np.float32) if half else words.view(np.float32)
    old = values.reshape(-1, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)  # lane: row, column pair
    sums = tensor_cores.add_products(a, b, old, rule, kind, half, kind_b)
    lanes = sums.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(*shape, 4)
    bits = np.ascontiguousarray(numerics.f16_bits(lanes) if half else lanes).view(np.uint32)
    return [bits[..., n] for n in range(len(c))]


# -- wmma ------------------------------------------------------------------------------------------------------
# The register layout of a wmma fragment is the compiler's own affair: any layout will do that load, mma and store
# agree on.
# Here: element e of lane l is element l * count + e of the tile in row-major order (each operand in its own
# shape), and with 16-bit
# elements of A and B two go into a register. A and B hold each element once; hardware replicates some.


WMMA_SHAPES = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16), "m16n16k8": (16, 16, 8)}


def _wmma_shape(g: Gen, i: Instr) -> tuple[int, int, int]:
    shape = next((p for p in i.parts if p[0] == "m" and "n" in p and "k" in p and p[1].isdigit()), None)
    if shape not in WMMA_SHAPES:
        raise g.unsupported(f"shape {shape}")
    return WMMA_SHAPES[shape]


@emits("wmma")
def wmma(g: Gen, i: Instr) -> None:
    what = i.parts[1]
    m, n, k = _wmma_shape(g, i)
    if what in ("load", "store"):
        registers, address = i.operands[:2] if what == "load" else i.operands[1::-1]
        t = i.parts[-1]
        rows, cols = {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}[i.parts[2]]
        major = "row" if i.has("row") else "col"
        default = cols if major == "row" else rows
        stride = g.src(i.operands[2], "u4") if len(i.operands) > 2 else default
        space = space_of(i)
        g.program.env.note_access(space, _size(t))
        addr = g.let(g.address(address, address_code(space)))
        given = f"X, {g.me}, {addr}, {g.mask}, {stride}, {rows}, {cols}, {major!r}, {t!r}, {space!r}"
        if what == "load":
            name = g.let(f"wmma_load({given}, {len(registers.items)})")
            for e, o in enumerate(registers.items):
                g.assign(o, f"{name}[{e}]", "u4")
        else:
            values = ", ".join(g.src(o, "u4") for o in registers.items)
            g.line(f"wmma_store({given}, ({values},))")
    elif what == "mma":
        d, a, b, c = (o.items for o in i.operands)
        tail = [p for p in i.parts[2:] if p in ("f16", "bf16", "f32", "tf32", "s8", "u8", "s32")]
        if len(tail) == 2:  # fp16 operands are not spelled: .dtype.ctype
            dt, ct, at = tail[0], tail[1], "f16"
        else:
            dt, at, _, ct = tail
        if dt not in ("f32", "f16") or at not in ("f16", "bf16", "tf32"):
            raise g.unsupported(f"types {'.'.join(tail)}")
        names = [f"({', '.join(g.src(o, 'u4') for o in regs)},)" for regs in (a, b, c)]
        name = g.let(
            f"wmma_multiply({names[0]}, {names[1]}, {names[2]}, {m}, {n}, {k}, {at!r}, {dt!r}, {ct!r}, {len(d)}, "
            f"{g.keep(rule_of(g, 'mma', at))})"
        )
        for e, o in enumerate(d):
            g.assign(o, f"{name}[{e}]", "u4")
    else:
        raise g.unsupported()


def _elements(X, rows: int, cols: int, count: int):
    """(row, column) of element e of each lane: index lane * count + e in row-major order."""
    return X.cached(
        f"wmma{rows}x{cols}x{count}", lambda: divmod((np.arange(32)[:, None] * count + np.arange(count)), cols)
    )


def _addresses(X, addr, stride, row, col, major, size):
    base = np.broadcast_to(addr, X.shape)[..., :1]
    lead, minor = (row, col) if major == "row" else (col, row)
    if not isinstance(stride, int):
        stride = np.broadcast_to(stride, X.shape)[..., :1].astype(base.dtype)
    else:
        stride = base.dtype.type(stride)
    kind = base.dtype.type
    return [
        base + (lead[:, e].astype(kind) * stride + minor[:, e].astype(kind)) * kind(size) for e in range(row.shape[1])
    ]


def _size(t: str) -> int:
    return 2 if t in ("f16", "bf16") else 4


@runtime
def wmma_load(X, I, addr, mask, stride, rows, cols, major, t, space, registers):
    size = _size(t)
    count = rows * cols // 32
    row, col = _elements(X, rows, cols, count)
    load = RUNTIME[f"load_{space or 'generic'}"]
    got = [load(X, I, a, mask, size, 1)[0] for a in _addresses(X, addr, stride, row, col, major, size)]
    if size == 4:
        words = got
    else:
        words = [got[e].astype(np.uint32) | (got[e + 1].astype(np.uint32) << np.uint32(16)) for e in range(0, count, 2)]
    return words + words * (registers // len(words) - 1)  # the rest of the registers hold copies, unused


@runtime
def wmma_store(X, I, addr, mask, stride, rows, cols, major, t, space, values):
    size = _size(t)
    count = rows * cols // 32
    row, col = _elements(X, rows, cols, count)
    store = RUNTIME[f"store_{space or 'generic'}"]
    for e, a in enumerate(_addresses(X, addr, stride, row, col, major, size)):
        if size == 4:
            store(X, I, a, mask, 4, (values[e],))
        else:
            store(X, I, a, mask, 2, ((values[e // 2] >> np.uint32(16 * (e % 2))).astype(np.uint16),))


def _matrix(words, rows: int, cols: int, t: str) -> np.ndarray:
    """Registers -> fp32 matrices (..., rows, cols)."""
    used = rows * cols // 32 // PER_WORD.get(t, 1)
    stack = np.stack(words[:used], -1)  # [C, W, 32, words]
    values = stack.view(np.float32)[..., None] if t == "f32" else unpack(stack, t)
    return values.reshape(*stack.shape[:2], rows, cols)


@runtime
def wmma_multiply(a, b, c, m, n, k, t, dt, ct, registers, rule):
    left, right, old = _matrix(a, m, k, t), _matrix(b, k, n, t), _matrix(c, m, n, ct)
    d = tensor_cores.add_products(
        left.reshape(-1, m, k), right.reshape(-1, k, n), old.reshape(-1, m, n), rule, t, dt == "f16"
    )
    lanes = d.reshape(*old.shape[:2], 32, -1)
    bits = np.ascontiguousarray(lanes if dt == "f32" else numerics.f16_bits(lanes)).view(np.uint32)
    return [bits[..., e] for e in range(registers)]
