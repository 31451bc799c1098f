"""How tensor cores add: exact products, aligned to the largest exponent, cut off, summed, cut off again.

One step of a tensor core adds `group` products and the accumulator. Each product of two significands (in [1, 4), not
normalized) has the sum of the operands' exponents; the accumulator has its own. All addends are aligned to the largest
of these exponents E and lose, towards zero, what lies below 2^(E - fraction). Their sum is exact, and is cut off
towards zero to the precision of the accumulator (fp16 accumulators: rounded to nearest even). An instruction whose K is
longer than a group takes several steps. Subnormal operands keep the smallest normal exponent of their format, zeros
take no part in the largest exponent, which is at least -133, and a sum beyond fp32 is an infinity.

Sources. The model and the numbers of `RULES`: Xie et al., "MMA-Sim: Bit-accurate reference model of tensor cores and
matrix cores", arXiv 2511.10909, and its code (github.com/microsoft/MMA-Sim), which its authors compared bit by bit
with GPUs. Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores", arXiv 2512.07004, describe the same
structure; Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021, were the
first to measure the truncation and the extra bits. The least E, -133, was found on an H200: 92,160 sums of 40 products
between 2^-150 and 2^-130, in bf16 and tf32, by wgmma and mma.sync, agree with it to the bit; some differ with -132 and
with -134. Not certain: the sign of a sum that is zero (here +), and the payload of NaN.
`tests/gpu/test_tensor_cores.py` compares the bits with a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cutegemm.emulator import numerics
from cutegemm.emulator.ptx import target_number

F4, F8 = np.float32, np.float64


@dataclass(frozen=True)
class Rule:
    """One step of a tensor core.

    group: products of a step, with `k` of them in an instruction the smaller of both. fraction: bits kept below the
    binary point of an addend aligned to the largest exponent. significand: bits of the sum, the leading one included.
    """

    group: int
    fraction: int
    significand: int = 24


FLOATS = ("f16", "bf16", "tf32", "e4m3", "e5m2")
#: bytes of an element in the operand registers
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
#: (instruction, architecture) -> (bytes of K in a step, fraction bits): all operands but fp8 of wgmma and of Ada.
STEPS = {("mma", "ampere"): (16, 24), ("mma", "hopper"): (32, 25), ("wgmma", "hopper"): (32, 25)}
#: fp8 operands of wgmma, and of Ada's mma.sync, keep 13 fraction bits, of the sum too.
FP8 = Rule(32, 13, 14)
#: The order of K in which an fp8 mma.sync multiplies on Hopper: ptxas makes fp16 of the operands, and two HMMA that
#: begin from zero, one of the low two of every four elements (the bytes of a register), then one of the high two. FADD
#: adds their sum to the accumulator. Read from the machine code of ptxas 13; an H200 gives these bits. MMA-Sim has one
#: step of 32 there, which few sums tell apart.
AS_HALVES = [k for high in (0, 2) for k in range(32) if k % 4 // 2 * 2 == high]


def _rules() -> dict[tuple[str, str, str], Rule]:
    rules = {}
    for (instruction, architecture), (width, fraction) in STEPS.items():
        for kind in FLOATS:
            eight = kind in ("e4m3", "e5m2")
            if eight and architecture == "ampere":  # Ada's: Ampere has no such instruction
                rules[instruction, kind, architecture] = Rule(16, FP8.fraction, FP8.significand)
            elif eight and instruction == "wgmma":
                rules[instruction, kind, architecture] = FP8
            else:
                rules[instruction, kind, architecture] = Rule(width // BYTES[kind], fraction)
    return rules


RULES = _rules()
"""(instruction, operand type, architecture) -> its step. Newer architectures count as the newest one here."""

#: exponent of a zero: below those of all products
_NONE = -1000
#: least and largest exponent of nonzero addends for which fp32 arithmetic does; others take fp64
_LOW, _HIGH = -90, 98
#: the least exponent to which addends are aligned
_ALIGNED = -133
#: elements of one block of results: its temporaries stay in a core's cache
_BLOCK = 16384


def architecture(target: str) -> str:
    """The column of `RULES` for a PTX target such as sm_80 or sm_90a."""
    return "hopper" if target_number(target) >= 90 else "ampere"


def multiplied_as_halves(kind: str, target: str) -> bool:
    """Whether the machine code for that PTX target makes fp16 of an mma.sync's operands, see `AS_HALVES`."""
    return kind in ("e4m3", "e5m2") and target_number(target) // 10 == 9


def add_products(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, rule: Rule, kind: str, half: bool = False, kind_b: str | None = None
) -> np.ndarray:
    """a @ b + c as tensor cores compute it, step by step along K.

    Args:
        a, b: fp32 values of the operand type, (batch, rows, k) and (batch, k, columns).
        c: accumulators in fp32, (batch, rows, columns).
        rule: how a step adds. kind: the operand type, a key of `numerics.FORMATS`; kind_b: b's, where it is another.
        half: the accumulators are fp16: each step's sum is rounded to nearest even.

    Returns:
        fp32, (batch, rows, columns).
    """
    if _exact(a, b, c, 1 << (11 if half else rule.significand)):
        return np.matmul(a, b) + c
    batch, rows, columns = c.shape
    ea, eb = _exponents(a, kind), _exponents(b, kind_b or kind)
    out = np.empty(c.shape, F4)
    if columns <= 16 and batch > 1:  # small matrices: the batch lies innermost
        part = max(_BLOCK // (rows * columns), 1)
        for at in range(0, batch, part):
            box = slice(at, at + part)
            a_k, ea_k = (np.ascontiguousarray(x[box].transpose(2, 1, 0))[:, :, None] for x in (a, ea))
            b_k, eb_k = (np.ascontiguousarray(x[box].transpose(1, 2, 0))[:, None] for x in (b, eb))
            sums = _steps(a_k, b_k, ea_k, eb_k, np.ascontiguousarray(c[box].transpose(1, 2, 0)), rule, half)
            out[box] = sums.transpose(2, 0, 1)
        return out
    part = max(_BLOCK // columns, 8)
    for n in range(batch):
        for at in range(0, rows, part):
            block = n, slice(at, at + part)
            a_k, ea_k = (np.ascontiguousarray(x[block].T)[:, :, None] for x in (a, ea))
            out[block] = _steps(a_k, b[n][:, None], ea_k, eb[n][:, None], c[block], rule, half)
    return out


def _exact(a: np.ndarray, b: np.ndarray, c: np.ndarray, limit: int) -> bool:
    """Whether all are integers whose sums stay below the limit in magnitude: then nothing is cut off."""
    for x in (a, b, c):  # a look at a few spares most others the whole test
        few = x.reshape(-1)[:64] if x.flags.c_contiguous else x[0, 0]
        if not (few == np.rint(few)).all():
            return False
    top = [float(np.abs(x).max(initial=0.0)) for x in (a, b, c)]
    if not a.shape[-1] * top[0] * top[1] + top[2] < limit:  # also for NaN
        return False
    return all(bool((x == np.rint(x)).all()) for x in (a, b, c))


def _exponents(x: np.ndarray, kind: str) -> np.ndarray:
    """Exponents of the significands in int16; `_NONE` for zeros. Infinities and NaN count as 128."""
    bits = np.ascontiguousarray(x, F4).view(np.int32)
    out = ((bits >> 23) & 0xFF).astype(np.int16)
    out -= 127
    np.maximum(out, numerics.FORMATS[kind][1], out=out)
    out[x == 0] = _NONE
    return out


def _steps(a, b, ea, eb, c, rule: Rule, half: bool) -> np.ndarray:
    """The steps of one block. a[k] * b[k] is as large as c, and so are the sums of the exponents."""
    for k in range(0, len(a), rule.group):
        box = slice(k, k + rule.group)
        c = _step(a[box], b[box], ea[box], eb[box], c, rule, half)
    return c


def _step(a, b, ea, eb, c, rule: Rule, half: bool) -> np.ndarray:
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()):
        return _special(a, b, ea, eb, c, rule, half)
    ec = _exponents(c, "f32")
    low = min(_least(ec), _least(ea) + _least(eb))
    high = max(int(ec.max()), int(ea.max()) + int(eb.max()))
    narrow = low >= _LOW and high <= _HIGH
    largest = np.maximum(ec, np.int16(_LOW if narrow else _ALIGNED))
    other = np.empty_like(largest)
    for x, y in zip(ea, eb, strict=True):
        np.maximum(largest, np.add(x, y, out=other), out=largest)
    real, whole = (F4, np.int32) if narrow else (F8, np.int64)
    if narrow:
        scale = (((rule.fraction + 127) - largest.astype(np.int32)) << 23).view(F4)
    else:
        scale = np.ldexp(1.0, rule.fraction - largest.astype(np.int32))
    product, integer = np.empty(c.shape, real), np.empty(c.shape, whole)
    partial, total = np.zeros(c.shape, whole), np.zeros(c.shape, F8)
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        np.multiply(x, y, out=product, dtype=real)
        np.multiply(product, scale, out=product)
        np.copyto(integer, product, casting="unsafe")  # towards zero
        np.add(partial, integer, out=partial)
        if n % 8 == 7:  # an addend is below 2^27: eight of them fit into 31 bits
            total += partial
            partial[...] = 0
    total += partial
    np.multiply(c, scale, out=product, dtype=real)
    np.copyto(integer, product, casting="unsafe")
    total += integer
    total *= np.ldexp(1.0, largest.astype(np.int32) - rule.fraction)
    if half:
        return numerics.rounded(total, "f16", "rn")
    if narrow:  # no sum other than 0 is subnormal or beyond fp32: the fraction's last bits are cut off
        return (total.view(np.uint64) & ~np.uint64((1 << (53 - rule.significand)) - 1)).view(F8).astype(F4)
    return _overflowing(numerics.round_to(total, rule.significand - 1, -126, "rz"))


def _least(exponents: np.ndarray) -> int:
    """The least exponent of a number other than zero; 0 where there is none."""
    return int(np.min(exponents, initial=0, where=exponents != _NONE))


def _overflowing(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(F4)


def _special(a, b, ea, eb, c, rule: Rule, half: bool) -> np.ndarray:
    """A step with infinities or NaN among its addends: IEEE 754's rules where they matter."""
    clean = [np.where(np.isfinite(x), x, F4(0)) for x in (a, b, c)]
    finite_ea, finite_eb = (np.where(np.isfinite(x), e, np.int16(_NONE)) for x, e in ((a, ea), (b, eb)))
    finite = _step(clean[0], clean[1], finite_ea, finite_eb, clean[2], rule, half)
    with np.errstate(invalid="ignore"):
        plain = c.astype(F8)
        for x, y in zip(a, b, strict=True):
            plain = plain + np.multiply(x, y, dtype=F8)
    plain = np.where(np.isnan(plain), np.array(0x7FFFFFFF, np.uint32).view(F4), _overflowing(plain))
    strange = _strange(a, b, c)
    return np.where(strange, plain, finite)


def _strange(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Where an infinity or a NaN takes part."""
    out = ~np.isfinite(c)
    for x, y in zip(a, b, strict=True):
        out |= ~np.isfinite(x) | ~np.isfinite(y)
    return out
