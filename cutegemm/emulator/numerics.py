"""Number formats and exactly rounded arithmetic, on NumPy arrays.

Formats that NumPy lacks (bf16, tf32, e4m3, e5m2), conversions with every PTX rounding mode, and fused
multiply-add with a single rounding. All functions take and return arrays; bit patterns are unsigned integers.
"""

from __future__ import annotations

import numpy as np

U2, U4, U8 = np.uint16, np.uint32, np.uint64
F4, F8 = np.float32, np.float64

#: name -> (mantissa bits without the hidden one, smallest normal exponent, largest finite value)
FORMATS = {
    "f32": (23, -126, 3.4028234663852886e38),
    "tf32": (10, -126, 3.4011621342146535e38),
    "bf16": (7, -126, 3.3895313892515355e38),
    "f16": (10, -14, 65504.0),
    "e4m3": (3, -6, 448.0),
    "e5m2": (2, -14, 57344.0),
}


# -- fp16, bf16: bits <-> fp32 ---------------------------------------------------------------------------------
def f16_bits(x: np.ndarray) -> np.ndarray:
    """fp32 -> fp16 bits, round to nearest even; a NaN becomes 0x7fff, as PTX's cvt gives it."""
    return _with_nans(x, x.astype(np.float16).view(U2))


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 bits, round to nearest even; a NaN becomes 0x7fff."""
    bits = np.ascontiguousarray(x, F4).view(U4)
    return _with_nans(x, ((bits + ((bits >> 16) & U4(1)) + U4(0x7FFF)) >> 16).astype(U2))


def _with_nans(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """The bits of x, of a NaN 0x7fff."""
    nan = x != x
    return np.where(nan, U2(0x7FFF), bits) if nan.any() else bits


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(U4) << U4(16)).view(F4)


def _fp8_table(exp_bits: int, man_bits: int) -> np.ndarray:
    bias = (1 << (exp_bits - 1)) - 1
    out: np.ndarray = np.zeros(256, F4)
    for code in range(256):
        exponent, mantissa = (code >> man_bits) & ((1 << exp_bits) - 1), code & ((1 << man_bits) - 1)
        if exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - man_bits)
        else:
            value = (1 + mantissa / (1 << man_bits)) * 2.0 ** (exponent - bias)
        if exp_bits == 4 and code & 0x7F == 0x7F:
            value = np.nan
        if exp_bits == 5 and exponent == 31:
            value = np.inf if mantissa == 0 else np.nan
        out[code] = -value if code & 0x80 else value
    return out


E4M3_VALUES = _fp8_table(4, 3)
E5M2_VALUES = _fp8_table(5, 2)


def fp8_values(bits: np.ndarray, kind: str) -> np.ndarray:
    return (E4M3_VALUES if kind == "e4m3" else E5M2_VALUES)[bits]


def fp8_bits(x: np.ndarray, kind: str) -> np.ndarray:
    """fp32 -> fp8 bits (uint8), round to nearest even, satfinite: overflow gives the largest finite value of
    the sign, NaN gives 0x7f."""
    man, emin, top = FORMATS[kind]
    rounded = np.clip(round_to(x.astype(F8), man, emin, "rn"), -top, top)
    bias = 1 - emin
    mag = np.abs(rounded)
    _, exponent = np.frexp(mag)
    exponent = np.maximum(exponent - 1, emin)
    mantissa = np.ldexp(mag, man - exponent)  # an integer below 2 ** (man + 1)
    mantissa = np.nan_to_num(mantissa).astype(np.int64)
    code = np.where(mantissa >= 1 << man, ((exponent + bias) << man) + mantissa - (1 << man), mantissa)
    code = code.astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)
    return np.where(x != x, np.uint8(0x7F), code)


# -- rounding --------------------------------------------------------------------------------------------------
def round_to(x: np.ndarray, man: int, emin: int, mode: str, residue: np.ndarray | None = None) -> np.ndarray:
    """Round float64 ``x`` (+ an infinitesimal of the sign of ``residue``) to ``man`` mantissa bits with
    subnormals below 2 ** emin, in mode rn, rna, rz, rm or rp. No overflow handling: the result is a float64."""
    finite = np.isfinite(x)
    safe = np.where(finite, x, 0.0)
    fraction, exponent = np.frexp(safe)
    if residue is not None:  # a hair less than a power of two belongs to the binade below
        exponent = exponent - ((np.abs(fraction) == 0.5) & (np.sign(residue) * np.sign(safe) < 0))
    shift = (man - np.maximum(exponent - 1, emin)).astype(np.int32)
    scaled = np.ldexp(safe, shift)
    down = np.floor(scaled)
    rest = scaled - down  # exact, in [0, 1)
    tail = np.zeros_like(rest) if residue is None else np.sign(residue)
    # a value a hair below an integer
    below = (rest == 0) & (tail < 0)
    down = np.where(below, down - 1, down)
    inexact = (rest != 0) | (tail != 0)
    if mode == "rm":
        up = np.zeros_like(inexact)
    elif mode == "rp":
        up = inexact
    elif mode == "rz":
        up = inexact & (safe < 0)
    else:
        above = (rest > 0.5) | ((rest == 0.5) & (tail > 0)) | below
        tie = (rest == 0.5) & (tail == 0)
        if mode == "rna":
            up = above | (tie & (safe > 0))
        else:
            up = above | (tie & (np.mod(down, 2) != 0))
    result = np.ldexp(np.where(up, down + 1, down), -shift)
    result = np.copysign(result, np.where(result == 0, safe, result))
    return np.where(finite, result, x)


def rounded(x: np.ndarray, kind: str, mode: str, residue: np.ndarray | None = None) -> np.ndarray:
    """float64 (+ residue) -> values of a format, in fp32, with one rounding; overflow as IEEE 754 has it."""
    man, emin, top = FORMATS[kind]
    return overflow(round_to(x, man, emin, mode, residue), top, mode, x).astype(F4)


def overflow(rounded: np.ndarray, top: float, mode: str, x: np.ndarray) -> np.ndarray:
    """Apply the overflow rule of a format whose largest finite value is ``top``."""
    over = (np.abs(rounded) > top) & np.isfinite(x)
    if not over.any():
        return rounded
    huge = np.where(rounded > 0, np.inf, -np.inf)
    if mode == "rz":
        huge = np.copysign(top, rounded)
    elif mode == "rm":
        huge = np.where(rounded > 0, top, -np.inf)
    elif mode == "rp":
        huge = np.where(rounded > 0, np.inf, -top)
    return np.where(over, huge, rounded)


def tf32_bits(x: np.ndarray, mode: str) -> np.ndarray:
    """fp32 -> tf32 held in the upper 19 bits of 32 (mode rna or rn or rz); the low 13 bits are zero."""
    bits = np.ascontiguousarray(x, F4).view(U4)
    if mode == "rna":
        out = (bits + U4(0x1000)) & U4(0xFFFFE000)
    elif mode == "rz":
        out = bits & U4(0xFFFFE000)
    else:
        out = (bits + U4(0xFFF) + ((bits >> 13) & U4(1))) & U4(0xFFFFE000)
    special = (bits & U4(0x7F800000)) == U4(0x7F800000)
    nan = x != x
    return np.where(nan, U4(0x7FFFFFFF), np.where(special, bits, out))


def half_bits(x: np.ndarray, kind: str, mode: str, residue: np.ndarray | None = None) -> np.ndarray:
    """fp32 or float64 (+ residue) -> bits of f16 or bf16 with one rounding."""
    if mode != "rn" or x.dtype != F4:
        x = rounded(x.astype(F8), kind, mode, residue)
    return f16_bits(x) if kind == "f16" else bf16_bits(x)


# -- exact sums and products -----------------------------------------------------------------------------------
def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a + b as (rounded sum, error), Knuth."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_prod(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a * b as (rounded product, error), Dekker; no overflow for |x| < 2 ** 996."""
    p = a * b
    split = 134217729.0
    ah = a * split
    ah = ah - (ah - a)
    al = a - ah
    bh = b * split
    bh = bh - (bh - b)
    bl = b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


_HALF_MASK, _HALF = U8(0x1FFFFFFF), U8(0x10000000)


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in fp32 with one rounding, to nearest even.

    The product of two fp32 is exact in fp64; the fp64 sum is rounded once more on its way to fp32, which can only
    differ from the single rounding where the fp64 sum sits exactly halfway between two fp32 neighbours, or where
    the result is subnormal: those elements are redone with the error of the sum.
    """
    prod = np.multiply(a, b, dtype=F8)
    total = prod + c
    out = total.astype(F4)
    doubtful = (total.view(U8) & _HALF_MASK) == _HALF
    bits = out.view(U4) << U4(1)
    doubtful |= (bits - U4(1)) < U4(0x01000000)
    if doubtful.any():
        at = np.nonzero(doubtful)
        s, e = two_sum(prod[at], np.broadcast_to(c, out.shape)[at].astype(F8))
        e = np.where(np.isfinite(s), e, 0.0)
        out[at] = rounded(s, "f32", "rn", e)
    return out


def fma_f32_mode(a, b, c, mode: str) -> np.ndarray:
    """a * b + c in fp32 with one rounding in mode rn, rz, rm or rp."""
    if mode == "rn":
        return fma_f32(a, b, c)
    prod = np.multiply(a, b, dtype=F8)
    s, e = two_sum(prod, np.broadcast_to(c, prod.shape).astype(F8))
    e = np.where(np.isfinite(s), e, 0.0)
    out = rounded(s, "f32", mode, e)
    if mode == "rm":  # an exact zero from opposite signs is -0 when rounding down
        zero = (s == 0) & (e == 0) & ~((prod == 0) & (np.signbit(prod) == np.signbit(c)))
        out = np.where(zero, F4(-0.0), out)
    return out


def fma_f64(a, b, c) -> np.ndarray:
    """a * b + c in fp64 with one rounding to nearest: Boldo and Melquiond's algorithm (round to odd), 2008."""
    p, pe = two_prod(a, b)
    th, tl = two_sum(np.broadcast_to(c, p.shape).astype(F8), pe)
    vh, vl = two_sum(p, th)
    s, e = two_sum(tl, vl)
    odd = (e != 0) & ((s.view(np.int64) & 1) == 0)
    s = np.where(odd, np.nextafter(s, np.where(e > 0, np.inf, -np.inf)), s)
    exact = vh + s
    plain = a * b + c
    return np.where(np.isfinite(exact), exact, plain)


def flush(x: np.ndarray) -> np.ndarray:
    """.ftz: subnormal fp32 becomes a zero of the same sign."""
    small = (np.abs(x) < F4(1.17549435e-38)) & (x != 0)
    return np.where(small, np.copysign(F4(0), x), x) if small.any() else x


def saturate(x: np.ndarray) -> np.ndarray:
    """.sat: into 0..1; a NaN and -0 become +0."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    return np.where(x != x, zero, np.clip(x, zero, one) + zero)


def select(a, b, c, nan, xorsign, smaller):
    """min / max: the number where only one is a NaN (with .NaN: a NaN); -0 is smaller than +0."""
    a, b = np.broadcast_arrays(a, b)
    sign = np.signbit(a) ^ np.signbit(b)
    if xorsign:
        a, b = np.abs(a), np.abs(b)
    out = np.fmin(a, b) if smaller else np.fmax(a, b)
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        negative = (np.signbit(a) | np.signbit(b)) if smaller else (np.signbit(a) & np.signbit(b))
        out = np.where(zeros, np.where(negative, a.dtype.type(-0.0), a.dtype.type(0.0)), out)
    if xorsign:
        out = np.where(sign, -out, out)
    isnan = (a != a) | (b != b) if nan else (a != a) & (b != b)
    if isnan.any():
        canonical = (
            np.array(0x7FFFFFFF, np.uint32).view(np.float32)
            if a.dtype == np.float32
            else np.array(0x7FFFFFFFFFFFFFFF, np.uint64).view(np.float64)
        )
        out = np.where(isnan, canonical, out)
    if c is not None:
        return select(out, c, None, nan, xorsign, smaller)
    return out
