"""Integer arithmetic: add, sub, mul, mad, div, rem, min, max, abs, neg, sad, dot products, carry chains."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cutegemm.emulator.ops import floating, half
from cutegemm.emulator.ptx import Instr
from cutegemm.emulator.translate import PTX_CODE, Gen, emits, numpy_name, runtime

WIDER = {"u2": "u4", "i2": "i4", "u4": "u8", "i4": "i8"}


def type_of(i: Instr) -> str:
    return i.parts[-1]


def emits_integer(*names: str) -> Callable[[Callable[[Gen, Instr, str], None]], Callable[[Gen, Instr], None]]:
    """`emits` of a function that is given the numpy code too; the floating-point families take their own types."""

    def register(function: Callable[[Gen, Instr, str], None]) -> Callable[[Gen, Instr], None]:
        @emits(*names)
        def emit(g: Gen, i: Instr) -> None:
            t = type_of(i)
            code = PTX_CODE.get(t)
            if t in ("f32", "f64"):
                floating.arithmetic(g, i)
            elif t in ("f16", "f16x2", "bf16", "bf16x2"):
                half.arithmetic(g, i)
            elif code is None or code[0] not in "ui":
                raise g.unsupported(f"type .{t} does not fit {i.name}")
            else:
                function(g, i, code)

        return emit

    return register


@emits_integer("add", "sub")
def add_sub(g: Gen, i: Instr, code: str) -> None:
    d, a, b = i.operands
    if i.has("cc"):
        carry_chain(g, i, code, use=False)
    elif i.has("sat"):
        g.assign(d, f"sat_s32({g.src(a, 'i4')}, {g.src(b, 'i4')}, {i.name == 'sub'})", "i4")
    elif type_of(i) in ("u16x2", "s16x2"):
        raise g.unsupported()
    else:
        g.ufunc("add" if i.name == "add" else "subtract", d, code, g.src(a, code), g.src(b, code))


@emits("addc", "subc")
def add_with_carry(g: Gen, i: Instr) -> None:
    carry_chain(g, i, PTX_CODE[type_of(i)], use=True)


def carry_chain(g: Gen, i: Instr, code: str, use: bool) -> None:
    """add.cc / addc / sub.cc / subc: the carry lives per thread in the wave."""
    d, a, b = i.operands
    code = "u" + code[1]
    sub = i.name.startswith("sub")
    t = g.let(f"with_carry(X, {g.src(a, code)}, {g.src(b, code)}, {sub}, {use}, {i.has('cc')}, {g.mask})")
    g.assign(d, t, code)


@runtime
def with_carry(X, a, b, subtract, use, set_, mask):
    wave = X.wave
    if wave.carry is None:
        wave.carry = np.zeros((wave.C, wave.W, 32), bool)
    carry = wave.carry[X.at]
    a, b = np.broadcast_to(a, X.shape), np.broadcast_to(b, X.shape)
    c = carry.astype(a.dtype) if use else a.dtype.type(0)
    if subtract:
        r = a - b
        r2 = r - c
        out = (a < b) | (r2 > r)
    else:
        r = a + b
        r2 = r + c
        out = (r < a) | (r2 < r)
    if set_:
        np.copyto(carry, out, where=True if mask is None else mask)
    return r2


@runtime
def sat_s32(a, b, subtract):
    wide = a.astype(np.int64)
    wide = wide - b if subtract else wide + b
    return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def _product(g: Gen, i: Instr, code: str, a, b) -> tuple[str, str]:
    """An expression for a * b in the mode of the instruction (lo, hi, wide), and its code."""
    if i.has("wide"):
        wide = WIDER[code]
        return f"np.multiply({g.src(a, code)}, {g.src(b, code)}, dtype=np.{numpy_name(wide)})", wide
    if i.has("hi"):
        if code[1] == "8":
            return f"mul_hi64({g.src(a, code)}, {g.src(b, code)})", code
        bits = 8 * int(code[1])
        wide = WIDER[code]
        t = f"np.multiply({g.src(a, code)}, {g.src(b, code)}, dtype=np.{numpy_name(wide)})"
        return f"({t} >> {g.constant(bits, wide)}).astype(np.{numpy_name(code)})", code
    return f"np.multiply({g.src(a, code)}, {g.src(b, code)})", code


@emits_integer("mul")
def mul(g: Gen, i: Instr, code: str) -> None:
    d, a, b = i.operands
    if not (i.has("wide") or i.has("hi")):
        g.ufunc("multiply", d, code, g.src(a, code), g.src(b, code))
        return
    expr, out = _product(g, i, code, a, b)
    g.assign(d, expr, out)


@emits_integer("mad")
def mad(g: Gen, i: Instr, code: str) -> None:
    d, a, b, c = i.operands
    if i.has("cc"):
        multiply_chain(g, i, code, use=False)
        return
    expr, out = _product(g, i, code, a, b)
    if i.has("sat"):
        g.assign(d, f"sat_s32({expr}, {g.src(c, 'i4')}, False)", "i4")
    else:
        g.ufunc("add", d, out, expr, g.src(c, out))


@emits("madc")
def madc(g: Gen, i: Instr) -> None:
    multiply_chain(g, i, PTX_CODE[type_of(i)], use=True)


def multiply_chain(g: Gen, i: Instr, code: str, use: bool) -> None:
    """mad.cc and madc: the product and the sum with its carry."""
    d, a, b, c = i.operands
    expr, out = _product(g, i, "u" + code[1] if i.has("lo") else code, a, b)
    t = g.let(f"({expr}).view(np.{numpy_name('u' + out[1])})")
    r = g.let(f"with_carry(X, {t}, {g.src(c, 'u' + out[1])}, False, {use}, {i.has('cc')}, {g.mask})")
    g.assign(d, r, "u" + out[1])


@emits("mul24", "mad24")
def mul24(g: Gen, i: Instr) -> None:
    code = PTX_CODE[type_of(i)]
    wide = WIDER[code]
    up, down = g.constant(40, wide), g.constant(16 if i.has("hi") else 0, wide)
    a, b = (f"(({g.src(o, code)}.astype(np.{numpy_name(wide)}) << {up}) >> {up})" for o in i.operands[1:3])
    expr = f"(({a} * {b}) >> {down}).astype(np.{numpy_name(code)})"
    if i.name == "mad24":
        expr = f"({expr} + {g.src(i.operands[3], code)})"
    g.assign(i.operands[0], expr, code)


@runtime
def mul_hi64(a, b):
    a, b = np.asarray(a), np.asarray(b)
    signed = a.dtype.kind == "i"
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    m, s = np.uint64(0xFFFFFFFF), np.uint64(32)
    al, ah, bl, bh = ua & m, ua >> s, ub & m, ub >> s
    mid = ah * bl + ((al * bl) >> s)
    mid2 = al * bh + (mid & m)
    high = ah * bh + (mid >> s) + (mid2 >> s)
    if not signed:
        return high
    high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    return high.view(np.int64)


@emits_integer("div", "rem")
def div_rem(g: Gen, i: Instr, code: str) -> None:
    d, a, b = i.operands
    g.assign(d, f"int_{i.name}({g.src(a, code)}, {g.src(b, code)})", code)


def _magnitudes(a, b):
    a, b = np.broadcast_arrays(a, b)
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    ua, ub = a.view(unsigned) if a.flags.c_contiguous else a.astype(unsigned), b.astype(unsigned)
    if a.dtype.kind == "i":
        ua = np.where(a < 0, (~ua) + unsigned.type(1), ua)
        ub = np.where(b < 0, (~ub) + unsigned.type(1), ub)
    return a, b, ua, ub


@runtime
def int_div(a, b):
    """Division truncating towards zero; by zero, all bits set (what the hardware's routine leaves)."""
    a, b, ua, ub = _magnitudes(a, b)
    q = np.where(ub == 0, ~np.zeros_like(ua), ua // np.maximum(ub, 1))
    if a.dtype.kind == "i":
        q = np.where(((a < 0) != (b < 0)) & (ub != 0), (~q) + ua.dtype.type(1), q)
    return q.astype(a.dtype)


@runtime
def int_rem(a, b):
    a, b, ua, ub = _magnitudes(a, b)
    r = np.where(ub == 0, ua, ua % np.maximum(ub, 1))
    if a.dtype.kind == "i":
        r = np.where((a < 0) & (ub != 0), (~r) + ua.dtype.type(1), r)
        r = np.where((ub == 0) & (a < 0), a.view(r.dtype) if a.flags.c_contiguous else a.astype(r.dtype), r)
    return r.astype(a.dtype)


@emits_integer("min", "max")
def min_max(g: Gen, i: Instr, code: str) -> None:
    d, a, b = i.operands[:3]
    name = "minimum" if i.name == "min" else "maximum"
    if i.has("relu"):
        t = g.let(f"np.{name}({g.src(a, code)}, {g.src(b, code)})")
        g.ufunc("maximum", d, code, t, g.constant(0, code))
    else:
        g.ufunc(name, d, code, g.src(a, code), g.src(b, code))


@emits_integer("abs", "neg")
def absolute_or_negative(g: Gen, i: Instr, code: str) -> None:
    g.ufunc("absolute" if i.name == "abs" else "negative", i.operands[0], code, g.src(i.operands[1], code))


@emits("sad")
def sad(g: Gen, i: Instr) -> None:
    code = PTX_CODE[type_of(i)]
    d, a, b, c = i.operands
    x, y = g.let(g.src(a, code)), g.let(g.src(b, code))
    g.ufunc("add", d, code, f"np.where({x} < {y}, {y} - {x}, {x} - {y})", g.src(c, code))


@emits("dp4a", "dp2a")
def dot_product(g: Gen, i: Instr) -> None:
    d, a, b, c = i.operands
    ta, tb = i.parts[-2], i.parts[-1]
    out = "i4" if "s32" in (ta, tb) else "u4"
    part = "None" if i.name == "dp4a" else str(int(i.has("hi")))
    g.assign(
        d, f"packed_dot({g.src(a, 'u4')}, {g.src(b, 'u4')}, {g.src(c, out)}, {ta == 's32'}, {tb == 's32'}, {part})", out
    )


@runtime
def packed_dot(a, b, c, signed_a, signed_b, half_of_b):
    """dp4a (half_of_b None): four 8-bit products; dp2a: two 16-bit of a times two 8-bit of b, low or high half."""
    total = c.astype(np.int64)
    b8 = np.dtype(np.int8 if signed_b else np.uint8)
    if half_of_b is None:
        pairs = [((a >> np.uint32(8 * k)).astype(np.uint8), (b >> np.uint32(8 * k)).astype(np.uint8)) for k in range(4)]
        wide = np.dtype(np.int8 if signed_a else np.uint8)
    else:
        shift = 16 * half_of_b
        pairs = [
            ((a >> np.uint32(16 * k)).astype(np.uint16), (b >> np.uint32(8 * k + shift)).astype(np.uint8))
            for k in range(2)
        ]
        wide = np.dtype(np.int16 if signed_a else np.uint16)
    for x, y in pairs:
        total = total + x.view(wide).astype(np.int64) * y.view(b8).astype(np.int64)
    return total.astype(np.uint32).view(c.dtype)
