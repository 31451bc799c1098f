"""cvt in all the forms that GEMM kernels use, and cvt.pack."""

from __future__ import annotations

import numpy as np

from cutegemm.emulator import numerics
from cutegemm.emulator.ptx import Imm, Instr, Vec
from cutegemm.emulator.translate import PTX_CODE, Gen, emits, numpy_name, runtime

INTEGERS = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"}
PACKED = {"f16x2", "bf16x2", "e4m3x2", "e5m2x2"}
F4, F8, U2, U4 = np.float32, np.float64, np.uint16, np.uint32
#: rounding mode (rni is rn to an integer value) -> what rounds to integer values
TO_INTEGER = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}


@emits("cvt")
def cvt(g: Gen, i: Instr) -> None:
    to, source = i.parts[-2], i.parts[-1]
    mode = next((p for p in i.parts if p in ("rn", "rna", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi")), "")
    sat, ftz = i.has("sat"), i.has("ftz")
    if i.has("pack"):
        pack(g, i)
        return
    d, args = i.operands[0], i.operands[1:]
    if to in PACKED or source in PACKED:
        packed(g, i, to, source, mode)
        return
    if to in INTEGERS and source in INTEGERS:
        integer(g, d, args[0], to, source, sat)
        return
    value = as_float(g, args[0], source, ftz)
    if to in INTEGERS:
        code = PTX_CODE[to]
        g.assign(d, f"float_to_int({value}, np.{numpy_name(code)}, {mode or 'rzi'!r})", code)
        return
    flags = tuple(p for p in i.parts if p in ("relu", "satfinite", "sat", "ftz"))
    code = PTX_CODE[to]
    if source in INTEGERS:
        g.assign(d, f"int_to_float({value}, {to!r}, {mode or 'rn'!r})", "u2" if to in ("f16", "bf16") else code)
        return
    if to == "f32" and source in ("f16", "bf16") and not flags:
        g.assign(d, value, "f4")
    else:
        g.assign(d, f"float_to_float({value}, {to!r}, {mode!r}, {flags!r})", "u" + code[1])


def as_float(g: Gen, o, source: str, ftz: bool) -> str:
    """The source as an array: float32 for f16 and bf16, itself otherwise."""
    if source == "f16":
        return f"{g.src(o, 'f2')}.astype(np.float32)"
    if source == "bf16":
        return f"bf16_values({g.src(o, 'u2')})"
    if source == "f32":
        return f"flush({g.src(o, 'f4')})" if ftz else g.src(o, "f4")
    return g.src(o, PTX_CODE[source])


def integer(g: Gen, d, a, to: str, source: str, sat: bool) -> None:
    code, src = PTX_CODE[to], PTX_CODE[source]
    expr = g.src(a, src)
    if sat:
        low, high = np.iinfo(numpy_name(code)).min, np.iinfo(numpy_name(code)).max
        own = np.iinfo(numpy_name(src))
        expr = f"np.clip({expr}, {g.constant(max(low, own.min), src)}, {g.constant(min(high, own.max), src)})"
    if isinstance(a, Imm) or src != code:
        expr = f"{expr}.astype(np.{numpy_name(code)})"
    g.assign(d, expr, code)


@runtime
def float_to_int(x, dtype, mode):
    """Out-of-range values saturate; a NaN becomes 0, or, into 64 bits and from fp64 into 32, the upper bit alone."""
    x = np.asarray(x)
    wide = x.astype(F8) if x.dtype != F8 else x
    rounded = TO_INTEGER[mode[:2]](wide)
    info = np.iinfo(dtype)
    low, high = float(info.min), float(info.max)
    clipped = np.clip(rounded, low, high)
    if info.bits == 64:
        big = rounded >= high  # float(2**63 - 1) is 2**63
        out = np.where(big | (rounded != rounded), 0, clipped).astype(dtype)
        out = np.where(big, dtype(info.max), out)
        nan = dtype(info.min) if info.min else dtype(1 << 63)
        return np.where(rounded != rounded, nan, out)
    out = np.where(rounded != rounded, 0.0, clipped).astype(dtype)
    if info.bits == 32 and x.dtype == F8:
        out = np.where(rounded != rounded, dtype(info.min or 1 << 31), out)
    return out


@runtime
def int_to_float(x, to, mode):
    x = np.asarray(x)
    if to == "f64" and x.dtype.itemsize < 8:
        return x.astype(F8)
    if mode == "rn" and to in ("f32", "f64"):
        return x.astype(F4 if to == "f32" else F8)
    if x.dtype.itemsize == 8:  # split so that the pieces are exact in float64
        low = (x.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(F8)
        high = (x >> x.dtype.type(32)).astype(F8) * 4294967296.0
        s, e = numerics.two_sum(high, low)
    else:
        s, e = x.astype(F8), np.zeros(x.shape)
    if to == "f64":
        beyond, towards = {"rz": (e * s < 0, 0.0), "rm": (e < 0, -np.inf), "rp": (e > 0, np.inf)}[mode]
        return np.where(beyond, np.nextafter(s, towards), s)
    if to == "f32":
        return numerics.rounded(s, "f32", mode, e)
    return numerics.half_bits(s, to, mode, e)


@runtime
def float_to_float(x, to, mode, flags):
    """fp -> fp; ``mode`` may round to an integer value (rni, rzi, ...). Returns the bits, unsigned."""
    x = np.asarray(x)
    if mode.endswith("i"):
        x = TO_INTEGER[mode[:2]](x)
        mode = "rn"
    if "relu" in flags:
        x = np.where(x > 0, x, np.where(x != x, x, x.dtype.type(0)))
    if "sat" in flags:
        x = numerics.saturate(x)
    if "satfinite" in flags:
        top = numerics.FORMATS[to][2]
        x = np.clip(x, x.dtype.type(-top), x.dtype.type(top))
    if to == "f64":
        return x.astype(F8).view(np.uint64)
    if to == "tf32":
        return numerics.tf32_bits(x, mode or "rna")
    if to == "f32":
        out = x.astype(F4) if mode in ("", "rn") else numerics.rounded(x.astype(F8), "f32", mode)
        if "ftz" in flags:
            out = numerics.flush(out)
        if x.dtype != F4 and (x != x).any():
            return np.where(x != x, U4(0x7FFFFFFF), np.ascontiguousarray(out).view(U4))
        return np.ascontiguousarray(out).view(U4)
    return numerics.half_bits(x, to, mode or "rn")


def packed(g: Gen, i: Instr, to: str, source: str, mode: str) -> None:
    d, args = i.operands[0], i.operands[1:]
    flags = tuple(p for p in i.parts if p in ("relu", "satfinite"))
    if source == "f32":  # two floats; the first operand goes to the upper half
        if len(args) != 2:
            raise g.unsupported()
        hi, lo = (g.src(a, "f4") for a in args)
        code = "u2" if to.startswith("e") else "u4"
        g.assign(d, f"pack_two({hi}, {lo}, {to!r}, {mode or 'rn'!r}, {flags!r})", code)
    elif source in ("e4m3x2", "e5m2x2") and to == "f16x2":
        g.assign(d, f"unpack_fp8({g.src(args[0], 'u2')}, {source[:4]!r}, {flags!r})", "u4")
    elif source == "f16x2" and to in ("e4m3x2", "e5m2x2"):
        a = g.let(g.src(args[0], "u4"))
        half = "({} & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)"
        hi, lo = half.format(f"({a} >> np.uint32(16))"), half.format(a)
        g.assign(d, f"pack_two({hi}, {lo}, {to!r}, 'rn', {flags!r})", "u2")
    else:
        raise g.unsupported()


@runtime
def pack_two(hi, lo, to, mode, flags):
    hi, lo = np.broadcast_arrays(hi, lo)
    kind = to[:-2]
    if "relu" in flags:
        hi, lo = (np.where(v <= 0, F4(0), v) for v in (hi, lo))  # -0 becomes +0 too
    if kind in ("e4m3", "e5m2"):
        return (numerics.fp8_bits(hi, kind).astype(U2) << U2(8)) | numerics.fp8_bits(lo, kind)
    if "satfinite" in flags:
        top = F4(numerics.FORMATS[kind][2])
        hi, lo = np.clip(hi, -top, top), np.clip(lo, -top, top)
    out = np.empty((*hi.shape, 2), U2)
    out[..., 0] = numerics.half_bits(lo, kind, mode)
    out[..., 1] = numerics.half_bits(hi, kind, mode)
    return out.view(U4)[..., 0]


@runtime
def unpack_fp8(x, kind, flags):
    lo = numerics.fp8_values(x & U2(0xFF), kind)
    hi = numerics.fp8_values(x >> U2(8), kind)
    if "relu" in flags:
        hi, lo = (np.where(v <= 0, F4(0), v) for v in (hi, lo))
    return numerics.f16_bits(lo).astype(U4) | (numerics.f16_bits(hi).astype(U4) << U4(16))


def pack(g: Gen, i: Instr) -> None:
    """cvt.pack.sat.{u16,s16}.s32 d, a, b and cvt.pack.sat.{u8,s8}.s32.b32 d, a, b, c."""
    if isinstance(i.operands[0], Vec):
        raise g.unsupported()
    kind = next(p for p in i.parts[2:] if p in ("u16", "s16", "u8", "s8"))
    bits = int(kind[1:])
    info = np.iinfo(f"{'u' if kind[0] == 'u' else ''}int{bits}")
    d, a, b = i.operands[:3]
    low, high = g.constant(info.min, "i4"), g.constant(info.max, "i4")
    one = [
        f"(np.clip({g.src(o, 'i4')}, {low}, {high}).view(np.uint32) & {g.constant((1 << bits) - 1, 'u4')})"
        for o in (a, b)
    ]
    expr = f"({one[0]} << {g.constant(bits, 'u4')}) | {one[1]}"
    if bits == 8:
        expr = f"({expr}) | ({g.src(i.operands[3], 'u4')} << {g.constant(16, 'u4')})"
    g.assign(d, expr, "u4")
