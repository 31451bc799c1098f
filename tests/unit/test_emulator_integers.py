"""Integer and bit instructions in the emulator against references in Python integers."""

import pytest

from tests.unit.emulator_references import BY_NAME, INTEGERS, check, clip, signed, typed


def field_of(pos: int, length: int, bits: int) -> tuple[int, int]:
    """Beyond the 0..255 that PTX allows, ptxas's code wraps in the 32-bit forms and saturates in the 64-bit ones."""
    return (min(pos, 64), min(length, 64)) if bits == 64 else (pos & 255, length & 255)


def truncated(a: int, b: int) -> tuple[int, int]:
    q = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return q, a - q * b


@pytest.mark.parametrize("t", INTEGERS)
def test_integer_arithmetic(t):
    bits = int(t[1:])
    v = lambda x: typed(x, t)  # noqa: E731
    check(f"add.{t}", lambda a, b: a + b)
    check(f"sub.{t}", lambda a, b: a - b)
    check(f"mul.lo.{t}", lambda a, b: a * b)
    check(f"mul.hi.{t}", lambda a, b: (v(a) * v(b)) >> bits)
    check(f"mad.lo.{t}", lambda a, b, c: a * b + c)
    check(f"min.{t}", lambda a, b: min(v(a), v(b)))
    check(f"max.{t}", lambda a, b: max(v(a), v(b)))
    check(f"sad.{t}", lambda a, b, c: abs(v(a) - v(b)) + c)
    check(f"div.{t}", lambda a, b: truncated(v(a), v(b | 1))[0])
    check(f"rem.{t}", lambda a, b: truncated(v(a), v(b | 1))[1])


def test_wide_saturating_and_chained():
    for t in ("u16", "s16", "u32", "s32"):
        v = lambda x, t=t: typed(x, t)  # noqa: E731
        check(f"mul.wide.{t}", lambda a, b, v=v: v(a) * v(b))
        check(f"mad.wide.{t}", lambda a, b, c, v=v: v(a) * v(b) + c)
    for t in ("u32", "s32", "u64", "s64"):
        bits = int(t[1:])
        check(f"mad.hi.{t}", lambda a, b, c, t=t, bits=bits: ((typed(a, t) * typed(b, t)) >> bits) + c)
    s32 = lambda x: signed(x, 32)  # noqa: E731
    low, high = -(1 << 31), (1 << 31) - 1
    check("add.sat.s32", lambda a, b: clip(s32(a) + s32(b), low, high))
    check("sub.sat.s32", lambda a, b: clip(s32(a) - s32(b), low, high))
    check("mul24.lo.s32", lambda a, b: signed(a, 24) * signed(b, 24))
    check("mul24.hi.u32", lambda a, b: ((a & 0xFFFFFF) * (b & 0xFFFFFF)) >> 16)
    full = 1 << 32

    def chain(a, b, c):
        carry = (a + b) // full
        y = b + c + carry
        return a + b, (y % full) + y // full

    check("add.cc chain", chain)
    check("sub.cc chain", lambda a, b, c: (a - b, b - c - (a < b)))
    check("mad.cc chain", lambda a, b, c: (a * b + c, ((a * b) >> 32) + (a * b % full + c) // full))


def element(x: int, bits: int, k: int, t: str) -> int:
    """Element k of ``bits`` bits of a word, signed as type t is."""
    return typed(x >> (bits * k), t[0] + str(bits))


def test_dot_products():
    for ta in ("u32", "s32"):
        for tb in ("u32", "s32"):
            check(
                f"dp4a.{ta}.{tb}",
                lambda a, b, c, ta=ta, tb=tb: c + sum(element(a, 8, k, ta) * element(b, 8, k, tb) for k in range(4)),
            )
            for half in (0, 1):
                name = f"dp2a.{('lo', 'hi')[half]}.{ta}.{tb}"
                check(
                    name,
                    lambda a, b, c, ta=ta, tb=tb, h=half: (
                        c + sum(element(a, 16, k, ta) * element(b, 8, k + 2 * h, tb) for k in range(2))
                    ),
                )


def test_bit_operations():
    check("cnot.b32", lambda a: int(a == 0))
    check("popc.b64", lambda a: bin(a).count("1"))
    check("clz.b32", lambda a: 32 - a.bit_length())
    check("clz.b64", lambda a: 64 - a.bit_length())
    check("brev.b32", lambda a: int(f"{a:032b}"[::-1], 2))
    check("brev.b64", lambda a: int(f"{a:064b}"[::-1], 2))
    for t, bits in (("b16", 16), ("b32", 32), ("b64", 64)):
        check(f"shl.{t}", lambda a, b, bits=bits: a << (b & 127) if (b & 127) < bits else 0)
        check(f"shr.u{bits}", lambda a, b: a >> (b & 127))
        check(f"shr.s{bits}", lambda a, b, bits=bits: signed(a, bits) >> (b & 127))
    check("shl large", lambda a, b: a << b if b < 32 else 0)
    for mode in ("clamp", "wrap"):
        n = (lambda c: min(c, 32)) if mode == "clamp" else (lambda c: c & 31)
        check(f"shf.l.{mode}", lambda a, b, c, n=n: ((b << 32 | a) << n(c)) >> 32)
        check(f"shf.r.{mode}", lambda a, b, c, n=n: (b << 32 | a) >> n(c))
    for lut in (0xC0, 0x96, 0xE8, 0xCA, 0x1B, 0x00, 0xFF, 0x6A):

        def table(a, b, c, lut=lut):
            return sum(((lut >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | (c >> k & 1))) & 1) << k for k in range(32))

        check(f"lop3.{lut:#x}", table)
    for t in ("u32", "s32", "u64", "s64"):
        bits = int(t[1:])

        def find(a, t=t, bits=bits):
            x = typed(a, t)
            x = ~x if x < 0 else x
            return x.bit_length() - 1 if x else 0xFFFFFFFF

        check(f"bfind.{t}", find)

        def field(a, b, c, t=t, bits=bits):
            pos, length = field_of(b, c, bits)
            x = (a >> pos) & ((1 << length) - 1)
            if t[0] == "s" and length and (a >> min(pos + length - 1, bits - 1)) & 1:
                x |= ~((1 << min(length, bits)) - 1)
                if pos + length > bits:  # bits past the end are copies of the sign
                    x |= ~((1 << max(0, bits - pos)) - 1)
            return x

        check(f"bfe.{t}", field)
    for t, bits in (("b32", 32), ("b64", 64)):

        def insert(a, b, c, e, bits=bits):
            pos, length = field_of(c, e, bits)
            mask = ((1 << length) - 1) << pos if pos < bits else 0
            return (b & ~mask) | ((a << pos) & mask)

        check(f"bfi.{t}", insert)

    def permute(a, b, c):
        both, out = b << 32 | a, 0
        for k in range(4):
            sel = c >> (4 * k) & 15
            byte = both >> (8 * (sel & 7)) & 255
            out |= (byte if sel < 8 else 255 * (byte >> 7)) << (8 * k)
        return out

    check("prmt", permute)
    for sel in (0x5410, 0x7632, 0x0123, 0xBA98):
        check(f"prmt {sel:#x}", lambda a, b, sel=sel: permute(a, b, sel))
    byte = lambda a, b, n: (b << 32 | a) >> (8 * n) & 255  # noqa: E731
    modes = {
        ".f4e": lambda s, k: s + k,
        ".b4e": lambda s, k: (s - k) & 7,
        ".rc8": lambda s, k: s,
        ".ecl": lambda s, k: max(s, k),
        ".ecr": lambda s, k: min(s, k),
        ".rc16": lambda s, k: 2 * (s & 1) + (k & 1),
    }
    for mode, pick in modes.items():
        check(f"prmt{mode}", lambda a, b, c, pick=pick: sum(byte(a, b, pick(c & 3, k)) << (8 * k) for k in range(4)))


def test_integer_conversions_saturate():
    for name in BY_NAME:
        parts = name.split(".")
        if parts[0] != "cvt" or parts[-1] not in INTEGERS or parts[-2] not in (*INTEGERS, "u8", "s8") or "rn" in name:
            continue
        to, source = parts[-2:]
        if parts[1] not in ("sat", to):
            continue
        bits = int(to[1:])
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
        check(
            name,
            lambda a, to=to, source=source, low=low, high=high, sat=parts[1] == "sat": (
                clip(typed(a, source), low, high) if sat else typed(typed(a, source), to)
            ),
        )
