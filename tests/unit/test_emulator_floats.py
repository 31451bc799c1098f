"""Floating point in the emulator against references in exact fractions, and the corners that hardware decides."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx_snippets import emulate
from tests.unit.emulator_references import BY_NAME, check, clip, rounded, run, same, typed, value


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma", "div", "sqrt", "rcp"])
def test_fp32_rounds_once(op, mode):
    name = f"{op}.{mode}.f32"
    exact = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "fma": lambda a, b, c: a * b + c,
        "div": lambda a, b: a / b,
        "rcp": lambda a: 1 / a,
    }
    checked = 0
    for row, (got,) in zip(*run(name), strict=True):
        xs = [value(v, "f32") for v in row]
        if not all(math.isfinite(x) for x in xs):
            continue
        if op == "sqrt":
            if xs[0] < 0:
                continue
            x = Fraction(xs[0])
            n = math.isqrt(int(x * Fraction(2) ** 400))  # within 2**-200: never a tie unless exact
            root = Fraction(n, 2**200) + (Fraction(1, 2**200) / 2 if n * n != x * 2**400 else 0)
            want = rounded(root, "f32", mode)
        else:
            if op in ("div", "rcp") and xs[-1] == 0:
                continue
            want = rounded(exact[op](*map(Fraction, xs)), "f32", mode)
        assert same(got, want, "f32"), f"{name}{xs}: got {value(got, 'f32')!r}, want {want!r}"
        checked += 1
    assert checked > 100


INF, MINUS_INF, NAN64 = 0x7F800000, 0xFF800000, 0x7FFFFFFFFFFFFFFF


@pytest.mark.parametrize(
    ("name", "inputs", "want"),
    [
        *((f"div.{mode}.f32", (a, INF), 0) for mode in ("rn", "rz", "rm", "rp") for a in (0x1, 0x2, 0x1F, 0x7F7FFFFF)),
        *((f"div.{mode}.f32", (1, MINUS_INF), 0x80000000) for mode in ("rn", "rz", "rm", "rp")),
        *((f"rcp.{mode}.f32", (INF,), 0) for mode in ("rn", "rz", "rm", "rp")),
        *((f"rcp.{mode}.f32", (MINUS_INF,), 0x80000000) for mode in ("rn", "rz", "rm", "rp")),
        *(("testp.normal", (zero,), 1) for zero in (0, 0x80000000)),
        *(("testp.subnormal", (zero,), 0) for zero in (0, 0x80000000)),
        *(
            (f"cvt.{mode}.{to}.f64", (nan,), 0x80000000)
            for mode in ("rni", "rzi", "rmi", "rpi")
            for to in ("s32", "u32")
            for nan in (NAN64, (1 << 64) - 1)
        ),
        ("cvt.rzi.s32.f32", (0x7FC00000,), 0),
        *(
            (f"cvt.{mode}.relu.{kind}.f32", (0x80000000, 0x3F800000), one)
            for mode in ("rn", "rz")
            for kind, one in (("f16x2", 0x3C00), ("bf16x2", 0x3F80))
        ),
        ("bfe.u64", (0xFFFF, 256, 8), 0),
        ("bfe.u64", (0xFFFF, 4, 256), 0xFFF),
        ("bfe.s64", (1 << 63, 300, 4), (1 << 64) - 1),
        ("bfe.s64", (0xF0, 4, 0), 0),
        ("bfi.b64", (0xFF, 0x5500, 4, 256), 0xFF0),
        ("bfi.b64", (0xFF, 0x5500, 256, 8), 0x5500),
        ("bfe.u32", (0xFFFF, 256, 8), 0xFF),
    ],
)
def test_corners_as_hardware_has_them(name, inputs, want):
    """Bits that the snippets gave on an H200 where PTX leaves room for another reading; those of bfe and bfi, beyond
    the documented range of 0..255, are what the code of ptxas for sm_75 to sm_100 works out to."""
    row = np.tile(np.array(inputs, np.uint64), (256, 1))
    (got,) = set(emulate(BY_NAME[name], row)[:, 0].tolist())
    assert got == want, f"{name} {[hex(v) for v in inputs]}: {got:#x}, want {want:#x}"


def test_fma_where_fp64_would_round_twice():
    # 1 + 2**-24 + tiny: the fp64 sum is exactly halfway, the residue decides
    from cutegemm.emulator.numerics import fma_f32

    def f32(x):
        return np.array([x], np.float32)

    a, b = 1 + 2.0**-12, 1 - 2.0**-12  # product 1 - 2**-24
    cases = [(2.0**-30, 2.0**-30, 1 + 2.0**-23), (a, b, 2.0**-24 * 3), (3.0, 2.0**-150, 2.0**-126), (1e-30, 1e-15, 0.0)]
    rng = np.random.default_rng(0)
    tail = np.ldexp(rng.integers(1, 1 << 23, 400).astype(np.float64), -80)
    cases += [
        (1.0, float(np.float32(t)), 1 + 2.0**-23 * int(k)) for t, k in zip(tail, rng.integers(0, 99, 400), strict=True)
    ]
    # products that end half a unit below c, plus or minus a sliver
    for k in range(200):
        x = np.float32(1 + k * 2.0**-23)
        cases.append((float(x), 2.0**-24, float(np.float32(1 + 2.0**-22 * k))))
    for x, y, z in cases:
        x, y, z = (float(np.float32(v)) for v in (x, y, z))
        with np.errstate(all="ignore"):
            got = float(fma_f32(f32(x), f32(y), f32(z))[0])
        assert got == rounded(Fraction(x) * Fraction(y) + Fraction(z), "f32", "rn"), (x, y, z)


@pytest.mark.parametrize("t", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma.rn"])
def test_half_arithmetic_rounds_once(op, t):
    exact = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "fma.rn": lambda a, b, c: a * b + c,
    }[op]
    for suffix in ("", "x2"):
        checked = 0
        for row, (got,) in zip(*run(f"{op}.{t}{suffix}"), strict=True):
            for shift in (0, 16) if suffix else (0,):
                xs = [value(v >> shift & 0xFFFF, t) for v in row]
                if not all(math.isfinite(x) for x in xs):
                    continue
                want = rounded(exact(*map(Fraction, xs)), t, "rn")
                assert same(got >> shift & 0xFFFF, want, t), (op, t, xs)
                checked += 1
        assert checked > 100


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_narrowing_conversions(t, mode):
    for row, (got,) in zip(*run(f"cvt.{mode}.{t}.f32"), strict=True):
        x = value(row[0], "f32")
        want = x if not math.isfinite(x) else rounded(Fraction(x), t, mode)
        assert same(got, want, t), (x, value(got, t), want)
    for row, (got,) in zip(*run(f"cvt.{mode}.{t}x2.f32"), strict=True):
        for x, half in ((row[0], got >> 16), (row[1], got & 0xFFFF)):  # the first operand is the upper half
            x = value(x, "f32")
            assert same(half, x if not math.isfinite(x) else rounded(Fraction(x), t, mode), t)


def fp8(code: int, kind: str) -> float:
    man, bias = (3, 7) if kind == "e4m3" else (2, 15)
    exponent, mantissa = (code & 0x7F) >> man, code & ((1 << man) - 1)
    if kind == "e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if kind == "e5m2" and exponent == 31:
        return math.nan if mantissa else math.copysign(math.inf, -1 if code & 0x80 else 1)
    x = mantissa * 2.0 ** (1 - bias - man) if exponent == 0 else (1 + mantissa / 2**man) * 2.0 ** (exponent - bias)
    return -x if code & 0x80 else x


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fp8_conversions(kind):
    finite = sorted({fp8(c, kind) for c in range(256) if math.isfinite(fp8(c, kind))})
    top = finite[-1]
    for name in (f"cvt.{kind}x2.f32", f"cvt.{kind}x2.f32 small"):
        for row, (got,) in zip(*run(name), strict=True):
            for bits, code in ((row[0], got >> 8), (row[1], got & 0xFF)):
                x = value(bits, "f32")
                if math.isnan(x):
                    assert code & 0x7F == 0x7F
                    continue
                x = clip(x, -top, top)
                y = fp8(code, kind)
                distances = [abs(f - x) for f in finite]
                best = min(distances)
                assert abs(y - x) == best, (x, y)
                if distances.count(best) > 1 and x == np.float32(x) and abs(x) > 1e-8:
                    assert code & 1 == 0, (x, y)  # ties go to even
    for row, (got,) in zip(*run(f"cvt.f16x2.{kind}x2"), strict=True):
        for shift in (0, 8):
            assert same(got >> (2 * shift) & 0xFFFF, fp8(row[0] >> shift & 0xFF, kind), "f16")


def test_float_to_integer_saturates_and_nan_is_zero():
    to_int = {"rni": lambda x: round(x), "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for mode, f in to_int.items():
        for t in ("s32", "u32", "s64", "u64", "s16", "u16"):
            bits = int(t[1:])
            low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if t[0] == "s" else (0, (1 << bits) - 1)
            for row, (got,) in zip(*run(f"cvt.{mode}.{t}.f32"), strict=True):
                x = value(row[0], "f32")
                if math.isnan(x):
                    want = 0 if bits < 64 else 1 << 63
                else:
                    want = clip(f(Fraction(x)), low, high) if math.isfinite(x) else (high if x > 0 else low)
                assert got == want & ((1 << bits) - 1), (mode, t, x, got)


def test_integer_to_float_rounds_once():
    for mode in ("rn", "rz", "rm", "rp"):
        for t in ("s32", "u32", "s64", "u64"):
            check(
                f"cvt.{mode}.f32.{t}",
                lambda a, t=t, mode=mode: struct.unpack(
                    "<I", struct.pack("<f", rounded(Fraction(typed(a, t)), "f32", mode))
                )[0],
            )
        for t in ("s64", "u64"):
            check(
                f"cvt.{mode}.f64.{t}",
                lambda a, t=t, mode=mode: struct.unpack(
                    "<Q", struct.pack("<d", rounded(Fraction(typed(a, t)), "f64", mode))
                )[0],
            )


def test_tf32_rounds_half_away():
    for row, (got,) in zip(*run("cvt.rna.tf32.f32"), strict=True):
        x = value(row[0], "f32")
        if not math.isfinite(x):
            continue
        want = (row[0] + 0x1000) & 0xFFFFE000
        assert got == want


def test_min_max_of_nan_and_zero():
    canonical = 0x7FFFFFFF
    for op, pick in (("min", min), ("max", max)):
        for (a, b), (got,) in zip(*run(f"{op}.f32"), strict=True):
            x, y = value(a, "f32"), value(b, "f32")
            if math.isnan(x) and math.isnan(y):
                assert got == canonical
            elif math.isnan(x) or math.isnan(y):
                assert got == (b if math.isnan(x) else a)
            elif x == y == 0:
                assert got == ((a | b) if op == "min" else (a & b))
            else:
                assert value(got, "f32") == pick(x, y)


def test_comparisons_with_nan():
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        for unordered in ("", "u"):
            for (a, b), (got,) in zip(*run(f"setp.{op}{unordered}.f32"), strict=True):
                x, y = value(a, "f32"), value(b, "f32")
                if math.isnan(x) or math.isnan(y):
                    want = unordered == "u"
                else:
                    want = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[op]
                assert got == want, (op, unordered, x, y)


@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_packed_comparisons_are_of_the_low_and_the_high_halves(t):
    """The compiler packs comparisons of 16-bit operands that it loads one by one."""
    for op, holds in (
        ("eq", lambda x, y: x == y), ("ne", lambda x, y: x != y), ("lt", lambda x, y: x < y),
        ("le", lambda x, y: x <= y), ("gt", lambda x, y: x > y), ("ge", lambda x, y: x >= y),
    ):  # fmt: skip
        for unordered in (False, True):
            for row, got in zip(*run(f"setp.{op}{'u' * unordered}.{t}x2"), strict=True):
                for shift, found in zip((0, 16), got, strict=True):
                    x, y = (value(v >> shift & 0xFFFF, t) for v in row)
                    want = unordered if math.isnan(x) or math.isnan(y) else holds(x, y)
                    assert found == want, (op, unordered, x, y)
    for (a, b, c), got in zip(*run(f"setp.lt.or.{t}x2"), strict=True):
        for shift, found in zip((0, 16), got, strict=True):
            x, y = (value(v >> shift & 0xFFFF, t) for v in (a, b))
            assert found == (x < y or 0 < c < 2**31)


def test_approximate_functions_keep_their_bounds():
    for name, f in (
        ("ex2.approx.f32", lambda x: 2.0**x),
        ("lg2.approx.f32", math.log2),
        ("sqrt.approx.f32", math.sqrt),
        ("rcp.approx.f32", lambda x: 1 / x),
        ("rsqrt.approx.f32", lambda x: x**-0.5),
        ("tanh.approx.f32", math.tanh),
        ("sin.approx.f32", math.sin),
        ("cos.approx.f32", math.cos),
    ):
        for row, (got,) in zip(*run(name), strict=True):
            x = value(row[0] & 0x7FFFFFFF, "f32")
            if x > 0:
                want = f(x)
                assert abs(value(got, "f32") - want) <= 2.0**-23 * max(abs(want), 1e-30), (name, x)


def test_compiled_fma_runs_have_the_same_bits(monkeypatch):
    """The machine code for runs of fma, against the NumPy substitute, on full and on partial boxes of warps."""
    from cutegemm.emulator import fast_fma
    from tests.unit.emulator_kernels import kernel, launch

    pytest.importorskip("llvmlite")
    if fast_fma.compiled() is None:
        pytest.skip("this CPU has no fused multiply-add")
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 32, (192, 3), np.uint64).astype(np.uint32)
    bits[::2] = (rng.standard_normal((96, 3)) * 1e-20).astype(np.float32).view(np.uint32)
    fmas = "fma.rn.f32 %f4, %f1, %f2, %f3; fma.rn.f32 %f5, %f4, %f1, %f2; fma.rn.f32 %f4, %f5, %f4, %f1;"
    text = kernel(
        "mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 96, tid; mul.wide.u32 %d2, %r3, 12; add.s64 %d3, %d0, %d2; "
        "mul.wide.u32 %d4, %r3, 4; add.s64 %d5, %d1, %d4; ld.global.f32 %f1, [%d3]; ld.global.f32 %f2, [%d3+4]; "
        f"ld.global.f32 %f3, [%d3+8]; {fmas} setp.eq.u32 %p1, warp, 1; @%p1 bra E; {fmas} E: st.global.f32 [%d5], %f4;",
        params=2,
    )
    results = []
    for _ in range(2):
        out = np.zeros(192, np.float32)
        launch(text, bits, out, threads=96, grid=2)
        results.append(out)
        monkeypatch.setattr(fast_fma, "compiled", lambda: None)
    a, b = results
    assert ((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all()
    assert np.isfinite(a).sum() > 90
