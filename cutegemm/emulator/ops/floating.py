"""fp32 and fp64 arithmetic: add, sub, mul, fma, mad, div, rcp, sqrt, rsqrt, min, max, and the approximate functions.

Rounding: .rn, .rz, .rm and .rp are exact. ``.approx`` functions return the correctly rounded fp64 result rounded
to fp32,
which lies within every error bound that PTX states for them (the hardware's own last bits differ).
A NaN result has NumPy's payload, not the 0x7fffffff of the hardware, except for min and max.
"""

from __future__ import annotations

import numpy as np

from cutegemm.emulator import numerics
from cutegemm.emulator.ops import half
from cutegemm.emulator.ptx import Instr, Reg
from cutegemm.emulator.translate import RUNTIME, Gen, emits, runtime

RUNTIME.update(flush=numerics.flush, fma_f64=numerics.fma_f64, fma_f32_mode=numerics.fma_f32_mode,
               bf16_values=numerics.bf16_values, saturate=numerics.saturate, select=numerics.select)  # fmt: skip
F4, F8, U4 = np.float32, np.float64, np.uint32


def rounding(i: Instr) -> str:
    return next((p for p in i.parts if p in ("rn", "rz", "rm", "rp")), "rn")


def operands(g: Gen, i: Instr, code: str) -> list[str]:
    out = [g.src(o, code) for o in i.operands[1:]]
    if i.has("ftz") and code == "f4":
        out = [f"flush({o})" for o in out]
    return out


def finish(g: Gen, i: Instr, expr: str, code: str) -> None:
    """Write a floating-point result, with .ftz and .sat applied."""
    if i.has("ftz") and code == "f4":
        expr = f"flush({expr})"
    if i.has("sat"):
        expr = f"saturate({expr})"
    g.assign(i.operands[0], expr, code)


def arithmetic(g: Gen, i: Instr) -> None:
    """The instructions that share their name with an integer one."""
    code = "f4" if i.parts[-1] == "f32" else "f8"
    mode = rounding(i)
    plain = not (i.has("ftz") or i.has("sat"))
    if i.name == "mad":
        fma(g, i)
        return
    if i.name == "div":
        divide(g, i, code)
        return
    args = operands(g, i, code)
    if i.name in ("neg", "abs"):
        if plain:
            g.ufunc("negative" if i.name == "neg" else "absolute", i.operands[0], code, *args)
        else:
            finish(g, i, f"{'-' if i.name == 'neg' else 'abs'}({args[0]})", code)
        return
    if i.name in ("min", "max"):
        a, b, c = (*args, "None")[:3]
        finish(g, i, f"select({a}, {b}, {c}, {i.has('NaN')}, {i.has('xorsign')}, {i.name == 'min'})", code)
        return
    name = {"add": "add", "sub": "subtract", "mul": "multiply"}.get(i.name)
    if name is None:
        raise g.unsupported()
    if mode != "rn":
        if code == "f8":
            raise g.unsupported("directed rounding of fp64 is not implemented")
        finish(g, i, f"directed_{name}({', '.join(args)}, {mode!r})", code)
    elif plain:
        g.ufunc(name, i.operands[0], code, *args)
    else:
        finish(g, i, f"np.{name}({', '.join(args)})", code)


@runtime
def directed_add(a, b, mode):
    s, e = numerics.two_sum(np.asarray(a, F8), np.asarray(b, F8))
    e = np.where(np.isfinite(s), e, 0.0)
    out = numerics.rounded(s, "f32", mode, e)
    if mode == "rm":  # x + (-x) is -0 when rounding down, unless both are +0
        cancels = (s == 0) & (e == 0) & ~((np.asarray(a) == 0) & (np.asarray(b) == 0) & ~np.signbit(a) & ~np.signbit(b))
        out = np.where(cancels, F4(-0.0), out)
    return out


@runtime
def directed_subtract(a, b, mode):
    return directed_add(a, -np.asarray(b), mode)


@runtime
def directed_multiply(a, b, mode):
    return numerics.rounded(np.multiply(a, b, dtype=F8), "f32", mode)


@emits("fma")
def fma(g: Gen, i: Instr) -> None:
    t = i.parts[-1]
    if t in ("f16", "f16x2", "bf16", "bf16x2"):
        half.arithmetic(g, i)
        return
    code = "f4" if t == "f32" else "f8"
    args = operands(g, i, code)
    mode = rounding(i)
    if code == "f8":
        if mode != "rn":
            raise g.unsupported("directed rounding of fp64 is not implemented")
        finish(g, i, f"fma_f64({', '.join(args)})", code)
    elif mode == "rn" and not (i.has("ftz") or i.has("sat")):
        d = i.operands[0]
        g.written(d)
        if not g.mask and all(isinstance(o, Reg) for o in i.operands):
            g.fma_run.append(tuple(o.index for o in i.operands))
            return
        if g.fma_run:
            g.end_fma_run()
        where = f", {g.mask}" if g.mask else ""
        g.line(f"fused_multiply_add({', '.join(args)}, {g.reg(d.index, 'f4')}{where})")
    else:
        finish(g, i, f"fma_f32_mode({', '.join(args)}, {mode!r})", code)


@runtime
def fused_multiply_add(a, b, c, out, mask=None):
    result = numerics.fma_f32(a, b, c)
    if mask is None:
        out[...] = result
    else:
        np.copyto(out, result, where=mask)


def divide(g: Gen, i: Instr, code: str) -> None:
    mode = rounding(i)
    args = operands(g, i, code)
    if code == "f4" and mode != "rn":
        finish(g, i, f"directed_divide({', '.join(args)}, {mode!r})", code)
    elif mode != "rn":
        raise g.unsupported("directed rounding of fp64 is not implemented")
    else:
        finish(g, i, f"np.divide({', '.join(args)})", code)


@runtime
def directed_divide(a, b, mode):
    """fp32 a / b in a directed mode: the fp64 quotient and the sign of its exact remainder."""
    a, b = np.asarray(a, F8), np.asarray(b, F8)
    q = a / b
    p, e = numerics.two_prod(q, b)
    rest = (a - p) - e
    return numerics.rounded(q, "f32", mode, np.where(np.isfinite(q) & np.isfinite(b), rest * np.sign(b), 0.0))


def _unary(g: Gen, i: Instr, expr: str) -> None:
    code = "f4" if i.parts[-1] == "f32" else "f8"
    args = operands(g, i, code)
    finish(g, i, expr.format(a=args[0], code=code), code)


@emits("rcp")
def rcp(g: Gen, i: Instr) -> None:
    code = "f4" if i.parts[-1] == "f32" else "f8"
    one = g.constant(1.0, code)
    if rounding(i) != "rn":
        _unary(g, i, "directed_divide(" + one + ", {a}, '" + rounding(i) + "')")
    else:
        _unary(g, i, "np.divide(" + one + ", {a})")


@emits("sqrt")
def sqrt(g: Gen, i: Instr) -> None:
    if rounding(i) != "rn":
        _unary(g, i, "directed_sqrt({a}, '" + rounding(i) + "')")
    else:
        _unary(g, i, "np.sqrt({a})")


@runtime
def directed_sqrt(a, mode):
    a = np.asarray(a, F8)
    r = np.sqrt(a)
    p, e = numerics.two_prod(r, r)
    return numerics.rounded(r, "f32", mode, np.where(np.isfinite(r), (a - p) - e, 0.0))


@emits("rsqrt")
def rsqrt(g: Gen, i: Instr) -> None:
    _unary(g, i, "via_f64(lambda x: 1.0 / np.sqrt(x), {a})")


_APPROXIMATE = {"ex2": "np.exp2", "lg2": "np.log2", "sin": "np.sin", "cos": "np.cos", "tanh": "np.tanh"}


@emits(*_APPROXIMATE)
def approximate(g: Gen, i: Instr) -> None:
    function = _APPROXIMATE[i.name]
    if i.parts[-1] in ("f16", "f16x2", "bf16", "bf16x2"):
        half.run(g, i, function)
    else:
        _unary(g, i, f"via_f64({function}, {{a}})")


@runtime
def via_f64(f, x):
    return f(np.asarray(x, F8)).astype(np.asarray(x).dtype)


@emits("copysign")
def copysign(g: Gen, i: Instr) -> None:
    code = "f4" if i.parts[-1] == "f32" else "f8"
    d, a, b = i.operands  # the sign of a on the magnitude of b
    g.assign(d, f"np.copysign({g.src(b, code)}, {g.src(a, code)})", code)


@emits("testp")
def testp(g: Gen, i: Instr) -> None:
    code = "f4" if i.parts[-1] == "f32" else "f8"
    g.assign(i.operands[0], f"float_class({g.src(i.operands[1], code)}, {i.parts[1]!r})", "p")


@runtime
def float_class(x, kind):
    tiny = np.finfo(x.dtype).tiny
    finite = np.isfinite(x)
    return {
        "finite": lambda: finite,
        "infinite": lambda: np.isinf(x),
        "number": lambda: x == x,
        "notanumber": lambda: x != x,
        "normal": lambda: finite & ((np.abs(x) >= tiny) | (x == 0)),  # zeros count as normal
        "subnormal": lambda: finite & (np.abs(x) < tiny) & (x != 0),
    }[kind]()
