"""Bit operations, shifts, moves and comparisons: and, or, xor, not, shl, shr, shf, lop3, bfe, bfi, prmt, popc, clz,
brev, bfind, fns, szext, bmsk, mov, selp, slct, setp, set."""

from __future__ import annotations

import numpy as np

from cutegemm.emulator.ops.integer import type_of
from cutegemm.emulator.ptx import Imm, Instr, Negated, Pair, Reg, Vec
from cutegemm.emulator.translate import PTX_CODE, Gen, emits, runtime

U4 = np.uint32


@emits("and", "or", "xor")
def logic(g: Gen, i: Instr) -> None:
    code = PTX_CODE[type_of(i)]
    d, a, b = i.operands
    name = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}[i.name]
    g.ufunc(name, d, code, g.src(a, code), g.src(b, code))


@emits("not")
def bit_not(g: Gen, i: Instr) -> None:
    code = PTX_CODE[type_of(i)]
    g.ufunc("invert", i.operands[0], code, g.src(i.operands[1], code))


@emits("cnot")
def cnot(g: Gen, i: Instr) -> None:
    code = PTX_CODE[type_of(i)]
    g.assign(i.operands[0], f"({g.src(i.operands[1], code)} == 0)", code)


@emits("shl", "shr")
def shift(g: Gen, i: Instr) -> None:
    """Amounts of the width or more give 0, or the sign in an arithmetic right shift."""
    code = PTX_CODE[type_of(i)]
    d, a, amount = i.operands
    bits = 8 * int(code[1])
    name = "left_shift" if i.name == "shl" else "right_shift"
    if i.name == "shl":
        code = "u" + code[1]
    if isinstance(amount, Imm):
        n = amount.value & 0xFFFFFFFF
        if n >= bits:
            if code[0] == "u":
                g.assign(d, g.constant(0, code), code)
                return
            n = bits - 1
        g.ufunc(name, d, code, g.src(a, code), g.constant(n, code))
        return
    g.assign(d, f"shift_clamped(np.{name}, {g.src(a, code)}, {g.src(amount, 'u4')})", code)


@runtime
def shift_clamped(op, a, amount):
    bits = a.dtype.itemsize * 8
    over = amount >= bits
    kept = np.minimum(amount, U4(bits - 1)).astype(a.dtype)
    out = op(a, kept)
    if a.dtype.kind == "u":
        out = np.where(over, a.dtype.type(0), out)
    return out


@emits("shf")
def funnel_shift(g: Gen, i: Instr) -> None:
    d, a, b, c = i.operands
    args = ", ".join(g.src(o, "u4") for o in (a, b, c))
    g.assign(d, f"funnel({args}, {i.has('l')}, {i.has('wrap')})", "u4")


@runtime
def funnel(a, b, c, left, wrap):
    n = (c & U4(31) if wrap else np.minimum(c, U4(32))).astype(np.uint64)
    both = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | a
    if left:
        return ((both << n) >> np.uint64(32)).astype(U4)
    return (both >> n).astype(U4)


@emits("lop3")
def lop3(g: Gen, i: Instr) -> None:
    if i.has("BoolOp") or len(i.operands) != 5 or isinstance(i.operands[0], Pair):
        raise g.unsupported()
    d, a, b, c, table = i.operands
    a, b, c = (g.src(o, "u4") for o in (a, b, c))
    lut = table.value & 0xFF
    terms = []
    for k in range(8):
        if lut >> k & 1:
            terms.append("&".join(x if k >> s & 1 else f"~{x}" for x, s in ((a, 2), (b, 1), (c, 0))))
    simple = {
        0xC0: f"{a}&{b}",
        0xFC: f"{a}|{b}",
        0x3C: f"{a}^{b}",
        0x96: f"{a}^{b}^{c}",
        0x80: f"{a}&{b}&{c}",
        0xFE: f"{a}|{b}|{c}",
        0xF8: f"{a}|({b}&{c})",
        0xEA: f"({a}&{b})|{c}",
        0x6A: f"({a}&{b})^{c}",
    }.get(lut)
    expr = simple or "|".join(f"({t})" for t in terms) or g.constant(0, "u4")
    g.assign(d, expr, "u4")


@emits("bfe")
def bfe(g: Gen, i: Instr) -> None:
    code = PTX_CODE[type_of(i)]
    d, a, pos, length = i.operands
    g.assign(d, f"extract_field({g.src(a, code)}, {g.src(pos, 'u4')}, {g.src(length, 'u4')})", code)


def field_of(pos, length, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The position and length of a bit field as the hardware takes them, int64.

    PTX restricts both to 0..255. Beyond, the 32-bit forms use the low 8 bits, while the 64-bit forms, which ptxas
    expands into shifts that saturate (read off its code for sm_75 to sm_100), treat whatever is 64 or more alike.
    """
    if bits == 64:
        return np.minimum(pos, U4(64)).astype(np.int64), np.minimum(length, U4(64)).astype(np.int64)
    return np.asarray(pos & U4(255)).astype(np.int64), np.asarray(length & U4(255)).astype(np.int64)


@runtime
def extract_field(a, pos, length):
    a = np.asarray(a)
    bits = a.dtype.itemsize * 8
    pos, length = field_of(pos, length, bits)
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    ua = a.astype(unsigned)
    shifted = np.where(pos >= bits, unsigned.type(0), ua >> np.minimum(pos, bits - 1).astype(unsigned))
    keep = np.minimum(length, np.maximum(bits - pos, 0))  # bits past the end are copies of the sign
    ones = ~unsigned.type(0)
    mask = np.where(
        keep >= bits, ones, (unsigned.type(1) << np.minimum(keep, bits - 1).astype(unsigned)) - unsigned.type(1)
    )
    out = shifted & mask
    if a.dtype.kind == "i":
        last = np.minimum(pos + length - 1, bits - 1)
        sign = ((ua >> np.maximum(last, 0).astype(unsigned)) & unsigned.type(1)).astype(bool) & (length > 0)
        out = np.where(sign, out | ~mask, out)
        out = out.astype(a.dtype)
    return out


@emits("bfi")
def bfi(g: Gen, i: Instr) -> None:
    code = PTX_CODE[type_of(i)]
    d, a, b, pos, length = i.operands
    g.assign(d, f"insert_field({g.src(a, code)}, {g.src(b, code)}, {g.src(pos, 'u4')}, {g.src(length, 'u4')})", code)


@runtime
def insert_field(a, b, pos, length):
    a = np.asarray(a)
    bits = a.dtype.itemsize * 8
    t = a.dtype.type
    pos, length = field_of(pos, length, bits)
    mask = np.where(length >= bits, ~t(0), (t(1) << np.minimum(length, bits - 1).astype(a.dtype)) - t(1))
    at = np.minimum(pos, bits - 1).astype(a.dtype)
    mask = np.where(pos >= bits, t(0), mask << at)
    return (b & ~mask) | ((a << at) & mask)


@emits("prmt")
def prmt(g: Gen, i: Instr) -> None:
    d, a, b, c = i.operands
    mode = i.parts[2] if len(i.parts) > 2 else ""
    if not mode and isinstance(c, Imm):
        picks = [(c.value >> (4 * k)) & 0xF for k in range(4)]
        if all(p < 8 for p in picks):  # a constant selector: shifts and masks
            x, y = g.let(g.src(a, "u4")), g.let(g.src(b, "u4"))
            terms = []
            for k, p in enumerate(picks):
                source, move = (x, y)[p // 4], 8 * (p % 4 - k)
                byte = f"({source} {'>>' if move > 0 else '<<'} {g.constant(abs(move), 'u4')})" if move else source
                terms.append(f"({byte} & {g.constant(0xFF << (8 * k), 'u4')})")
            g.assign(d, " | ".join(terms), "u4")
            return
    g.assign(d, f"permute_bytes({g.src(a, 'u4')}, {g.src(b, 'u4')}, {g.src(c, 'u4')}, {mode!r})", "u4")


@runtime
def permute_bytes(a, b, c, mode):
    a, b, c = np.broadcast_arrays(a, b, c)
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    byte = lambda n: (both >> (np.uint64(8) * n.astype(np.uint64))) & np.uint64(0xFF)  # noqa: E731
    s = c & U4(3)
    out = np.zeros(a.shape, np.uint64)
    for k in range(4):
        n = U4(k)
        if mode == "":
            sel = (c >> U4(4 * k)) & U4(15)
            v = byte(sel & U4(7))
            v = np.where(sel & U4(8), np.where(v & np.uint64(0x80), np.uint64(0xFF), np.uint64(0)), v)
        elif mode == "f4e":
            v = byte(s + n)
        elif mode == "b4e":
            v = byte((s - n) & U4(7))
        elif mode == "rc8":
            v = byte(s)
        elif mode == "ecl":
            v = byte(np.maximum(s, n))
        elif mode == "ecr":
            v = byte(np.minimum(s, n))
        elif mode == "rc16":
            v = byte((s & U4(1)) * U4(2) + U4(k % 2))
        else:
            raise ValueError(f"prmt mode .{mode}")
        out |= v << np.uint64(8 * k)
    return out.astype(U4)


@emits("popc", "clz")
def count(g: Gen, i: Instr) -> None:
    function = {"popc": "count_ones", "clz": "leading_zeros"}[i.name]
    g.assign(i.operands[0], f"{function}({g.src(i.operands[1], 'u' + PTX_CODE[type_of(i)][1])})", "u4")


@runtime
def count_ones(x):
    x = np.asarray(x)
    total = np.zeros(x.shape, U4)
    for k in range(0, x.dtype.itemsize * 8, 8):
        total += _ONES[((x >> x.dtype.type(k)) & x.dtype.type(255)).astype(np.uint8)]
    return total


_ONES = np.array([bin(n).count("1") for n in range(256)], U4)


@runtime
def leading_zeros(x):
    x = np.asarray(x)
    bits = x.dtype.itemsize * 8
    n = np.full(x.shape, bits, U4)
    rest = x.copy()
    step = bits // 2
    while step:
        high = rest >> x.dtype.type(step)
        some = high != 0
        n = np.where(some, n - U4(step), n)
        rest = np.where(some, high, rest)
        step //= 2
    return (n - (rest != 0)).astype(U4)


@emits("brev")
def brev(g: Gen, i: Instr) -> None:
    code = "u" + PTX_CODE[type_of(i)][1]
    g.assign(i.operands[0], f"reverse_bits({g.src(i.operands[1], code)})", code)


_REVERSED = np.array([int(f"{n:08b}"[::-1], 2) for n in range(256)], np.uint8)


@runtime
def reverse_bits(x):
    x = np.ascontiguousarray(x)
    raw = x.view(np.uint8).reshape(*x.shape, x.dtype.itemsize)
    return np.ascontiguousarray(_REVERSED[raw[..., ::-1]]).view(x.dtype).reshape(x.shape)


@emits("bfind")
def bfind(g: Gen, i: Instr) -> None:
    code = PTX_CODE[type_of(i)]
    g.assign(i.operands[0], f"find_leading({g.src(i.operands[1], code)}, {i.has('shiftamt')})", "u4")


@runtime
def find_leading(x, shiftamt):
    x = np.asarray(x)
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    ux = x.astype(unsigned)
    if x.dtype.kind == "i":
        ux = np.where(x < 0, ~ux, ux)
    zeros = leading_zeros(ux)
    found = zeros if shiftamt else U4(x.dtype.itemsize * 8 - 1) - zeros
    return np.where(ux == 0, U4(0xFFFFFFFF), found)


@emits("szext")
def szext(g: Gen, i: Instr) -> None:
    code = PTX_CODE[type_of(i)]
    n = (
        f"({g.src(i.operands[2], 'u4')} & {g.constant(31, 'u4')})"
        if i.has("wrap")
        else f"np.minimum({g.src(i.operands[2], 'u4')}, {g.constant(32, 'u4')})"
    )
    g.assign(i.operands[0], f"extract_field({g.src(i.operands[1], code)}, np.uint32(0), {n})", code)


@emits("bmsk")
def bmsk(g: Gen, i: Instr) -> None:
    a, b = g.src(i.operands[1], "u4"), g.src(i.operands[2], "u4")
    if i.has("wrap"):
        a, b = f"({a} & {g.constant(31, 'u4')})", f"({b} & {g.constant(31, 'u4')})"
    ones = g.constant(0xFFFFFFFF, "u4")
    zero = g.constant(0, "u4")
    g.assign(
        i.operands[0],
        f"insert_field({ones}, {zero}, np.minimum({a}, "
        f"{g.constant(32, 'u4')}), np.minimum({b}, {g.constant(32, 'u4')}))",
        "u4",
    )


# -- moves -----------------------------------------------------------------------------------------------------
@emits("mov")
def mov(g: Gen, i: Instr) -> None:
    code = PTX_CODE[type_of(i)]
    d, a = i.operands
    if isinstance(d, Vec) or isinstance(a, Vec):
        pack(g, d, a, code)
        return
    if code[0] == "f" and isinstance(d, Reg):  # moves carry bits, not values
        code = code if isinstance(a, Imm) else "u" + code[1]
    g.assign(d, g.src(a, code), code)


def pack(g: Gen, d, a, code: str) -> None:
    """mov.b64 {lo, hi}, x and mov.b64 x, {lo, hi}, for any split into equal parts."""
    size = int(code[1])
    if isinstance(d, Vec):
        part = size // len(d.items)
        if isinstance(a, Vec):
            for x, y in zip(d.items, [g.let(g.src(y, f"u{part}") + ".copy()") for y in a.items], strict=True):
                g.assign(x, y, f"u{part}")
            return
        source = g.let(f"{g.src(a, f'u{size}')}" + (".copy()" if isinstance(a, Reg) else ""))
        for k, item in enumerate(d.items):
            moved = f"({source} >> {g.constant(8 * part * k, f'u{size}')})" if k else source
            g.assign(item, f"{moved}.astype(np.uint{8 * part})", f"u{part}")
        return
    part = size // len(a.items)
    terms = []
    for k, item in enumerate(a.items):
        wide = g.src(item, f"u{part}")
        if part != size:
            wide = f"{wide}.astype(np.uint{8 * size})"
        terms.append(f"({wide} << {g.constant(8 * part * k, f'u{size}')})" if k else wide)
    g.assign(d, " | ".join(terms), f"u{size}")


@emits("selp")
def selp(g: Gen, i: Instr) -> None:
    code = PTX_CODE[type_of(i)]
    code = code if isinstance(i.operands[1], Imm) and isinstance(i.operands[2], Imm) else "u" + code[1]
    d, a, b, p = i.operands
    if any(isinstance(o, Imm) and o.kind != "int" for o in (a, b)):
        code = PTX_CODE[type_of(i)]
    g.assign(d, f"np.where({g.src(p, 'p')}, {g.src(a, code)}, {g.src(b, code)})", code)


@emits("slct")
def slct(g: Gen, i: Instr) -> None:
    code = PTX_CODE[i.parts[-2]]
    d, a, b, c = i.operands
    g.assign(d, f"np.where({g.src(c, PTX_CODE[i.parts[-1]])} >= 0, {g.src(a, code)}, {g.src(b, code)})", code)


# -- comparisons -----------------------------------------------------------------------------------------------
COMPARE = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
UNORDERED = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}


def comparison(g: Gen, i: Instr, op: str, t: str, a, b) -> str:
    code = PTX_CODE[t]
    if t in ("bf16", "bf16x2", "f16x2"):
        if t != "bf16":
            raise g.unsupported()
        x, y = (g.let(f"bf16_values({g.src(o, 'u2')})") for o in (a, b))
    else:
        x, y = g.src(a, code), g.src(b, code)
    floating = code[0] == "f" or t == "bf16"
    if floating and i.has("ftz"):
        x, y = g.let(f"flush({x})"), g.let(f"flush({y})")
    return compared(op, x, y, floating)


def compared(op: str, x: str, y: str, floating: bool) -> str:
    """The test of two arrays."""
    if op in ("num", "nan"):
        test = f"(({x} == {x}) & ({y} == {y}))"
        return test if op == "num" else f"(~{test})"
    if op == "ne" and floating:  # ne is ordered: false where either is NaN
        return f"(({x} < {y}) | ({x} > {y}))"
    if op == "equ":
        return f"(~(({x} < {y}) | ({x} > {y})))"
    if op == "neu":
        return f"({x} != {y})"
    if op in UNORDERED:  # true where the opposite comparison is false, so also for a NaN
        return f"(~({x} {UNORDERED[op]} {y}))"
    return f"({x} {COMPARE[op]} {y})"


_UFUNC = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}


@emits("setp")
def setp(g: Gen, i: Instr) -> None:
    parts = [p for p in i.parts[1:] if p != "ftz"]
    op, t = parts[0], parts[-1]
    boolean = parts[1] if len(parts) == 3 else None
    d, a, b = i.operands[:3]
    if boolean is None and isinstance(d, Reg) and t not in ("bf16", "f16", "f32", "f64") and op in COMPARE:
        code = PTX_CODE[t]
        g.ufunc(_UFUNC[COMPARE[op]], d, "p", g.src(a, code), g.src(b, code))
        return
    packed = t in ("f16x2", "bf16x2") and isinstance(d, Pair) and not i.has("ftz")
    if packed:  # of the low halves, then of the high ones
        sides = [[g.let(f"half_of({g.src(o, 'u4')}, {t[:-2]!r}, {place})") for o in (a, b)] for place in range(2)]
        test, other = (g.let(compared(op, x, y, True)) for x, y in sides)
    else:
        test = g.let(comparison(g, i, op, t, a, b))
        other = f"~{test}"
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    sign = {"and": "&", "or": "|", "xor": "^"}.get(boolean or "", "")
    c = (
        g.let(f"{g.src(i.operands[3], 'p')}" + ("" if isinstance(i.operands[3], Negated) else ".copy()"))
        if boolean
        else ""
    )
    g.assign(first, f"{test} {sign} {c}" if boolean else test, "p")
    if second is not None:
        g.assign(second, f"({other}) {sign} {c}" if boolean else other, "p")


@emits("set")
def set_(g: Gen, i: Instr) -> None:
    parts = [p for p in i.parts[1:] if p != "ftz"]
    op, dtype, t = parts[0], parts[-2], parts[-1]
    boolean = parts[1] if len(parts) == 4 else None
    test = g.let(comparison(g, i, op, t, *i.operands[1:3]))
    if boolean:
        sign = {"and": "&", "or": "|", "xor": "^"}[boolean]
        test = g.let(f"{test} {sign} {g.src(i.operands[3], 'p')}")
    if dtype == "f32":
        g.assign(i.operands[0], f"{test}.astype(np.float32)", "f4")
    else:
        g.assign(i.operands[0], f"np.where({test}, np.uint32(0xFFFFFFFF), np.uint32(0))", "u4")
