"""fp16 and bf16 arithmetic, scalar and packed: add, sub, mul, fma, min, max, neg, abs and the approximate functions.

Operands are widened to fp32 (fp64 for fma), where sums of two and products are exact or rounded far below the
precision of the result, and rounded once: for fp16 and bf16 operands, fp64 holds every product and every sum that
matters
for a correctly rounded result.
"""

from __future__ import annotations

import numpy as np

from cutegemm.emulator import numerics
from cutegemm.emulator.ptx import Instr
from cutegemm.emulator.translate import Gen, runtime

U2, U4, F8 = np.uint16, np.uint32, np.float64


def arithmetic(g: Gen, i: Instr) -> None:
    if i.name not in ("add", "sub", "mul", "fma", "min", "max", "neg", "abs"):
        raise g.unsupported()
    run(g, i, i.name)


def run(g: Gen, i: Instr, name: str) -> None:
    t = i.parts[-1]
    code = "u4" if t.endswith("x2") else "u2"
    kind = "bf16" if t.startswith("bf16") else "f16"
    flags = tuple(p for p in i.parts if p in ("sat", "relu", "NaN", "xorsign", "ftz", "rz"))
    args = ", ".join(g.src(o, code) for o in i.operands[1:])
    g.assign(i.operands[0], f"half_op({name!r}, {kind!r}, {flags!r}, {args})", code)


def values(bits: np.ndarray, kind: str) -> np.ndarray:
    narrow = np.ascontiguousarray(bits).view(np.float16) if kind == "f16" else numerics.bf16_values(bits)
    return narrow.astype(F8)


@runtime
def half_of(bits, kind, place):
    """The numbers in the low (`place` 0) or the high halves of words."""
    return values(((bits >> U4(16 * place)) & U4(0xFFFF)).astype(U2), kind)


@runtime
def half_op(name, kind, flags, *args):
    if args[0].dtype == U4:
        low = half_op(name, kind, flags, *((a & U4(0xFFFF)).astype(U2) for a in args))
        high = half_op(name, kind, flags, *((a >> U4(16)).astype(U2) for a in args))
        return low.astype(U4) | (high.astype(U4) << U4(16))
    if name == "neg":
        return args[0] ^ U2(0x8000)
    if name == "abs":
        return args[0] & U2(0x7FFF)
    x = [values(np.asarray(a), kind) for a in args]
    residue = None
    if name in ("add", "sub"):
        out, residue = numerics.two_sum(x[0], x[1] if name == "add" else -x[1])
    elif name == "mul":
        out = x[0] * x[1]
    elif name == "fma":
        out, residue = numerics.two_sum(x[0] * x[1], x[2])
    elif name in ("min", "max"):
        a, b, c = (*x, None)[:3]
        out = numerics.select(a, b, c, "NaN" in flags, "xorsign" in flags, name == "min")
    else:
        out = getattr(np, name.removeprefix("np."))(x[0])
    if residue is not None:
        residue = np.where(np.isfinite(out), residue, 0.0)
    if "sat" in flags:
        out = numerics.saturate(out)
    if "relu" in flags:
        out = np.where(out <= 0, 0.0, out)
    return numerics.half_bits(out, kind, "rn", residue)
