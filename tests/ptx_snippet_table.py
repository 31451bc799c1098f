"""The table of PTX snippets: integers, bits, comparisons, floating point, conversions, what a warp does together."""

from __future__ import annotations

from tests.ptx_snippets import Snippet


def _table() -> list[Snippet]:
    s: list[Snippet] = []

    def add(name, ins, outs, body, kind="bits", arch="sm_80", scale=0.0):
        s.append(Snippet(name, ins, outs, body, kind, arch, scale))

    # integer arithmetic
    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        for op in ("add", "sub", "min", "max", "mul.lo", "mul.hi"):
            add(f"{op}.{t}", f"{t} {t}", t, f"{op}.{t} x, a, b;")
        add(f"mad.lo.{t}", f"{t} {t} {t}", t, f"mad.lo.{t} x, a, b, c;")
        wide_or = {"6": "b16", "2": "b32", "4": "b64"}[t[-1]]
        for op in ("div", "rem"):
            add(f"{op}.{t}", f"{t} {t}", t, f"or.{wide_or} b, b, 1; {op}.{t} x, a, b;")
        add(f"sad.{t}", f"{t} {t} {t}", t, f"sad.{t} x, a, b, c;")
    for t in ("u32", "s32", "u64", "s64"):
        add(f"mad.hi.{t}", f"{t} {t} {t}", t, f"mad.hi.{t} x, a, b, c;")
    for t, w in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
        add(f"mul.wide.{t}", f"{t} {t}", w, f"mul.wide.{t} x, a, b;")
        add(f"mad.wide.{t}", f"{t} {t} {w}", w, f"mad.wide.{t} x, a, b, c;")
    for t in ("s16", "s32", "s64"):
        add(f"abs.{t}", t, t, f"abs.{t} x, a;")
        add(f"neg.{t}", t, t, f"neg.{t} x, a;")
    add("add.sat.s32", "s32 s32", "s32", "add.sat.s32 x, a, b;")
    add("sub.sat.s32", "s32 s32", "s32", "sub.sat.s32 x, a, b;")
    for op in ("mul24.lo.u32", "mul24.hi.u32", "mul24.lo.s32", "mul24.hi.s32"):
        add(op, "b32 b32", "b32", f"{op} x, a, b;")
    add("mad24.lo.s32", "s32 s32 s32", "s32", "mad24.lo.s32 x, a, b, c;")
    add("add.cc chain", "u32 u32 u32", "u32 u32", "add.cc.u32 x, a, b; addc.cc.u32 y, b, c; addc.u32 y, y, 0;")
    add("sub.cc chain", "u32 u32 u32", "u32 u32", "sub.cc.u32 x, a, b; subc.u32 y, b, c;")
    add("mad.cc chain", "u32 u32 u32", "u32 u32", "mad.lo.cc.u32 x, a, b, c; madc.hi.u32 y, a, b, 0;")
    for ta in ("u32", "s32"):
        for tb in ("u32", "s32"):
            add(f"dp4a.{ta}.{tb}", "b32 b32 b32", "b32", f"dp4a.{ta}.{tb} x, a, b, c;")
            add(f"dp2a.lo.{ta}.{tb}", "b32 b32 b32", "b32", f"dp2a.lo.{ta}.{tb} x, a, b, c;")
            add(f"dp2a.hi.{ta}.{tb}", "b32 b32 b32", "b32", f"dp2a.hi.{ta}.{tb} x, a, b, c;")
    # bits
    for t in ("b16", "b32", "b64"):
        for op in ("and", "or", "xor"):
            add(f"{op}.{t}", f"{t} {t}", t, f"{op}.{t} x, a, b;")
        add(f"not.{t}", t, t, f"not.{t} x, a;")
        add(f"cnot.{t}", t, t, f"cnot.{t} x, a;")
        add(f"shl.{t}", f"{t} b32", t, f"and.b32 b, b, 127; shl.{t} x, a, b;")
        for k in ("u", "s"):
            add(f"shr.{k}{t[1:]}", f"{t} b32", t, f"and.b32 b, b, 127; shr.{k}{t[1:]} x, a, b;")
    add("shl large", "b32 b32", "b32", "shl.b32 x, a, b;")
    for side in ("l", "r"):
        for mode in ("clamp", "wrap"):
            add(f"shf.{side}.{mode}", "b32 b32 b32", "b32", f"shf.{side}.{mode}.b32 x, a, b, c;")
    for lut in (0xC0, 0xFC, 0x96, 0xE8, 0xCA, 0x1B, 0xFE, 0x6A, 0x00, 0xFF, 0xF8, 0xEA):
        add(f"lop3.{lut:#x}", "b32 b32 b32", "b32", f"lop3.b32 x, a, b, c, {lut};")
    for t in ("u32", "s32", "u64", "s64"):
        add(f"bfe.{t}", f"{t} b32 b32", t, f"bfe.{t} x, a, b, c;")
        add(f"bfind.{t}", t, "b32", f"bfind.{t} x, a;")
        add(f"bfind.shiftamt.{t}", t, "b32", f"bfind.shiftamt.{t} x, a;")
    for t in ("b32", "b64"):
        add(f"bfi.{t}", f"{t} {t} b32 b32", t, f"bfi.{t} x, a, b, c, e;")
        add(f"popc.{t}", t, "b32", f"popc.{t} x, a;")
        add(f"clz.{t}", t, "b32", f"clz.{t} x, a;")
        add(f"brev.{t}", t, t, f"brev.{t} x, a;")
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        add(f"prmt{mode}", "b32 b32 b32", "b32", f"prmt.b32{mode} x, a, b, c;")
    for sel in (0x5410, 0x7632, 0x0123, 0xBA98):
        add(f"prmt {sel:#x}", "b32 b32", "b32", f"prmt.b32 x, a, b, {sel};")
    for mode in ("clamp", "wrap"):
        add(f"szext.{mode}.s32", "s32 b32", "s32", f"szext.{mode}.s32 x, a, b;")
        add(f"szext.{mode}.u32", "u32 b32", "u32", f"szext.{mode}.u32 x, a, b;")
        add(f"bmsk.{mode}", "b32 b32", "b32", f"bmsk.{mode}.b32 x, a, b;")
    add("mov pack", "b32 b32", "b64 b32", "mov.b64 x, {a, b}; mov.b64 {%r1, y}, x;")
    add("mov pack 16", "b16 b16", "b32 b16", "mov.b32 x, {a, b}; mov.b32 {%h1, y}, x;")
    # comparisons
    for t in ("s32", "u32", "s64", "u64", "s16", "u16"):
        for op in ("eq", "ne", "lt", "le", "gt", "ge"):
            add(f"setp.{op}.{t}", f"{t} {t}", "b32", f"setp.{op}.{t} p, a, b; selp.b32 x, 1, 0, p;")
    for op in ("lo", "ls", "hi", "hs"):
        add(f"setp.{op}.u32", "u32 u32", "b32", f"setp.{op}.u32 p, a, b; selp.b32 x, 1, 0, p;")
    for t in ("f32", "f64", "f16", "bf16"):
        for op in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
            add(f"setp.{op}.{t}", f"{t} {t}", "b32", f"setp.{op}.{t} p, a, b; selp.b32 x, 1, 0, p;", "bits", "sm_90")
    for t in ("f16x2", "bf16x2"):
        for op in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu"):
            both = f"setp.{op}.{t} p|q, a, b; selp.b32 x, 1, 0, p; selp.b32 y, 1, 0, q;"
            add(f"setp.{op}.{t}", f"{t} {t}", "b32 b32", both, "bits", "sm_90")
        add(
            f"setp.lt.or.{t}", f"{t} {t} s32", "b32 b32",
            f"setp.gt.s32 r, c, 0; setp.lt.or.{t} p|q, a, b, r; selp.b32 x, 1, 0, p; selp.b32 y, 1, 0, q;",
            "bits", "sm_90",
        )  # fmt: skip
    for op in ("and", "or", "xor"):
        add(
            f"setp.lt.{op}",
            "s32 s32 s32",
            "b32 b32",
            f"setp.gt.s32 q, c, 0; setp.lt.{op}.s32 p|r, a, b, q; selp.b32 x, 1, 0, p; selp.b32 y, 1, 0, r;",
        )
    add("set.lt.u32.f32", "f32 f32", "b32", "set.lt.u32.f32 x, a, b;")
    add("set.ge.f32.s32", "s32 s32", "f32", "set.ge.f32.s32 x, a, b;")
    add("slct.s32.f32", "s32 s32 f32", "s32", "slct.s32.f32 x, a, b, c;")
    add("slct.b64.s32", "b64 b64 s32", "b64", "slct.b64.s32 x, a, b, c;")
    # floating point
    for mode in ("rn", "rz", "rm", "rp"):
        for op, n in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
            add(f"{op}.{mode}.f32", "f32 " * n, "f32", f"{op}.{mode}.f32 x, {', '.join('abc'[:n])};", "float")
        for op in ("div",):
            add(f"{op}.{mode}.f32", "f32 f32", "f32", f"{op}.{mode}.f32 x, a, b;", "float")
        for op in ("sqrt", "rcp"):
            add(f"{op}.{mode}.f32", "f32", "f32", f"{op}.{mode}.f32 x, a;", "float")
    for op, n in (("add", 2), ("mul", 2), ("fma", 3)):
        add(f"{op}.rn.ftz.f32", "f32 " * n, "f32", f"{op}.rn.ftz.f32 x, {', '.join('abc'[:n])};", "float")
        add(f"{op}.rn.sat.f32", "f32 " * n, "f32", f"{op}.rn.sat.f32 x, {', '.join('abc'[:n])};", "float")
        add(f"{op}.rn.f64", "f64 " * n, "f64", f"{op}.rn.f64 x, {', '.join('abc'[:n])};", "float", scale=1.0)
    for t in ("f32", "f64"):
        for op in ("min", "max"):
            add(f"{op}.{t}", f"{t} {t}", t, f"{op}.{t} x, a, b;", "bits" if t == "f32" else "float")
        add(f"copysign.{t}", f"{t} {t}", t, f"copysign.{t} x, a, b;", "float")
    for op in ("min.NaN", "max.NaN", "min.xorsign.abs", "max.xorsign.abs"):
        add(f"{op}.f32", "f32 f32", "f32", f"{op}.f32 x, a, b;", "float", "sm_90")
    for kind in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        add(f"testp.{kind}", "f32", "b32", f"testp.{kind}.f32 p, a; selp.b32 x, 1, 0, p;")
    for op in ("abs", "neg"):
        add(f"{op}.f32", "f32", "f32", f"{op}.f32 x, a;", "float")
    for t in ("f16", "f16x2", "bf16", "bf16x2"):
        for op, n in (("add", 2), ("sub", 2), ("mul", 2), ("fma.rn", 3)):
            rn = ".rn" if op != "fma.rn" else ""
            add(f"{op}.{t}", f"{t} " * n, t, f"{op}{rn}.{t} x, {', '.join('abc'[:n])};", "float", "sm_90")
        for op in ("min", "max", "min.NaN", "max.NaN"):
            add(f"{op}.{t}", f"{t} {t}", t, f"{op}.{t} x, a, b;", "float")
        for op in ("neg", "abs"):
            add(f"{op}.{t}", t, t, f"{op}.{t} x, a;", "float")
    add("fma.rn.relu.f16x2", "f16x2 f16x2 f16x2", "f16x2", "fma.rn.relu.f16x2 x, a, b, c;", "float")
    for op, tol in (
        ("ex2.approx.f32", 5e-7),
        ("lg2.approx.f32", 5e-7),
        ("rcp.approx.f32", 5e-7),
        ("sqrt.approx.f32", 5e-7),
        ("rsqrt.approx.f32", 5e-7),
        ("sin.approx.f32", 2e-6),
        ("cos.approx.f32", 2e-6),
        ("tanh.approx.f32", 6e-4),
    ):
        add(op, "f32", "f32", f"and.b32 a, a, 0x7fffffff; {op} x, a;", tol, scale=1.0)
    add("div.approx.f32", "f32 f32", "f32", "div.approx.f32 x, a, b;", 5e-7, scale=1.0)
    add("div.full.f32", "f32 f32", "f32", "div.full.f32 x, a, b;", 5e-7, scale=1.0)
    return s + _conversions() + _warp_level()


def _conversions() -> list[Snippet]:
    s: list[Snippet] = []

    def add(name, ins, outs, body, kind="bits", arch="sm_90", scale=0.0):
        s.append(Snippet(name, ins, outs, body, kind, arch, scale))

    for source in ("u16", "s16", "u32", "s32", "u64", "s64"):
        for to in ("u16", "s16", "u32", "s32", "u64", "s64"):
            if source != to:
                add(f"cvt.{to}.{source}", source, to, f"cvt.{to}.{source} x, a;")
                holds = int(to[1:]) >= int(source[1:]) + (to[0] != source[0]) and (to[0] == "s" or source[0] == "u")
                if not holds:  # where every value fits, PTX has no .sat
                    add(f"cvt.sat.{to}.{source}", source, to, f"cvt.sat.{to}.{source} x, a;")
    for to in ("u8", "s8"):
        add(f"cvt.{to}.s32", "s32", "s32", f"cvt.{to}.s32 x, a;")
        add(f"cvt.sat.{to}.s32", "s32", "s32", f"cvt.sat.{to}.s32 x, a;")
    for mode in ("rni", "rzi", "rmi", "rpi"):
        for to in ("s32", "u32", "s64", "u64", "s16", "u16"):
            add(f"cvt.{mode}.{to}.f32", "f32", to, f"cvt.{mode}.{to}.f32 x, a;")
        for to in ("s32", "u32", "s64", "u64"):
            add(f"cvt.{mode}.{to}.f64", "f64", to, f"cvt.{mode}.{to}.f64 x, a;")
        add(f"cvt.{mode}.s32.f16", "f16", "s32", f"cvt.{mode}.s32.f16 x, a;")
        add(f"cvt.{mode}.f32.f32", "f32", "f32", f"cvt.{mode}.f32.f32 x, a;", "float")
    for mode in ("rn", "rz", "rm", "rp"):
        for source in ("s32", "u32", "s64", "u64"):
            add(f"cvt.{mode}.f32.{source}", source, "f32", f"cvt.{mode}.f32.{source} x, a;")
        for source in ("s64", "u64"):
            add(f"cvt.{mode}.f64.{source}", source, "f64", f"cvt.{mode}.f64.{source} x, a;")
        add(f"cvt.{mode}.f16.s32", "s32", "f16", f"cvt.{mode}.f16.s32 x, a;")
        add(f"cvt.{mode}.f32.f64", "f64", "f32", f"cvt.{mode}.f32.f64 x, a;", "float")
    for mode in ("rn", "rz"):
        add(f"cvt.{mode}.f16.f32", "f32", "f16", f"cvt.{mode}.f16.f32 x, a;", "float")
        add(f"cvt.{mode}.bf16.f32", "f32", "bf16", f"cvt.{mode}.bf16.f32 x, a;", "float")
        for t in ("f16x2", "bf16x2"):
            add(f"cvt.{mode}.{t}.f32", "f32 f32", t, f"cvt.{mode}.{t}.f32 x, a, b;", "float")
            add(f"cvt.{mode}.relu.{t}.f32", "f32 f32", t, f"cvt.{mode}.relu.{t}.f32 x, a, b;", "float")
    add("cvt.f32.f16", "f16", "f32", "cvt.f32.f16 x, a;", "float")
    add("cvt.f32.bf16", "bf16", "f32", "cvt.f32.bf16 x, a;", "float")
    add("cvt.f64.f32", "f32", "f64", "cvt.f64.f32 x, a;", "float")
    add("cvt.rn.f16.f64", "f64", "f16", "cvt.rn.f16.f64 x, a;", "float")
    add("cvt.sat.f32.f32", "f32", "f32", "cvt.sat.f32.f32 x, a;", "float")
    add("cvt.ftz.f32.f32", "f32", "f32", "cvt.ftz.f32.f32 x, a;", "float")
    add(
        "cvt.rna.tf32.f32",
        "f32",
        "b32",
        "and.b32 %r1, a, 0x7f800000; setp.eq.b32 "
        "p, %r1, 0x7f800000; @p mov.b32 a, 0; "
        "cvt.rna.tf32.f32 x, a; and.b32 x, x, 0xffffe000;",
    )
    for kind in ("e4m3x2", "e5m2x2"):
        add(f"cvt.{kind}.f32", "f32 f32", "e8x2", f"cvt.rn.satfinite.{kind}.f32 x, a, b;")
        add(f"cvt.{kind}.f32 small", "f32 f32", "e8x2", f"cvt.rn.satfinite.{kind}.f32 x, a, b;", scale=0.01)
        add(f"cvt.{kind}.f16x2", "f16x2", "e8x2", f"cvt.rn.satfinite.{kind}.f16x2 x, a;")
        add(f"cvt.f16x2.{kind}", "b16", "f16x2", f"cvt.rn.f16x2.{kind} x, a;", "float")
    add("cvt.pack.sat.s16.s32", "s32 s32", "b32", "cvt.pack.sat.s16.s32 x, a, b;")
    add("cvt.pack.sat.u8.s32.b32", "s32 s32 b32", "b32", "cvt.pack.sat.u8.s32.b32 x, a, b, c;")
    add("cvt.pack.sat.s8.s32.b32", "s32 s32 b32", "b32", "cvt.pack.sat.s8.s32.b32 x, a, b, c;")
    return s


def _warp_level() -> list[Snippet]:
    s: list[Snippet] = []

    def add(name, ins, outs, body, kind="bits", arch="sm_90", scale=0.0, cluster=1):
        s.append(Snippet(name, ins, outs, body, kind, arch, scale, cluster))

    for mode in ("up", "down", "bfly", "idx"):
        clamp = {"up": 0, "down": 31, "bfly": 31, "idx": 31}[mode]
        add(
            f"shfl.{mode}",
            "b32 b32",
            "b32 b32",
            f"and.b32 b, b, 31; shfl.sync.{mode}.b32 x|p, a, b, {clamp}, -1; selp.b32 y, 1, 0, p;",
        )
        part = {"up": 0x1800, "down": 0x181F - 0x18, "bfly": 0x1807, "idx": 0x1807}[mode]
        add(f"shfl.{mode} of 8", "b32", "b32 b32", f"shfl.sync.{mode}.b32 x|p, a, 3, {part}, -1; selp.b32 y, 1, 0, p;")
    add(
        "vote",
        "s32",
        "b32 b32",
        "setp.gt.s32 p, a, 0; vote.sync.ballot.b32 x, p, -1; vote.sync.any.pred q, p, -1; selp.b32 y, 1, 0, q;",
    )
    add(
        "vote.all",
        "s32",
        "b32 b32",
        "setp.gt.s32 p, a, -100; vote.sync.all.pred q, p, -1; selp.b32 "
        "x, 1, 0, q; vote.sync.uni.pred q, p, -1; selp.b32 y, 1, 0, q;",
    )
    add("match.any", "b32", "b32", "and.b32 a, a, 3; match.any.sync.b32 x, a, -1;")
    add("match.all", "b32", "b32 b32", "shr.u32 a, %me, 6; match.all.sync.b32 x|p, a, -1; selp.b32 y, 1, 0, p;")
    for op in ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32"):
        add(f"redux.{op}", "b32", "b32", f"redux.sync.{op} x, a, -1;")
    add("activemask", "s32", "b32", "mov.b32 x, 0; setp.gt.u32 p, %ln, 15; @p bra L; activemask.b32 x; L: ")
    add(
        "divergence",
        "s32",
        "s32",
        "mov.s32 x, 0; and.b32 a, a, 15; L1: setp.le.s32 p, a, 0; @p bra "
        "L2; add.s32 x, x, a; sub.s32 a, a, 1; bra L1; L2: add.s32 x, x, 7;",
    )
    shared = (
        "mov.u32 %r1, smem; mov.u32 %r2, %tid.x; shl.b32 %r3, %r2, 4; add.u32 %r3, "
        "%r3, %r1; st.shared.v2.b32 [%r3], {a, b}; st.shared.v2.b32 [%r3+8], {b, a}; "
    )
    for n in (1, 2, 4):
        for trans in ("", ".trans"):
            regs = ", ".join(f"%r{10 + k}" for k in range(n))
            total = " ".join(f"xor.b32 x, x, %r{10 + k}; mul.lo.u32 x, x, 31;" for k in range(n))
            add(
                f"ldmatrix.x{n}{trans}",
                "b32 b32",
                "b32",
                f"{shared}bar.sync 0; xor.b32 %r4, %r3, 16; "
                f"ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {{{regs}}}, [%r4]; mov.b32 x, 0; {total}",
            )
            add(f"stmatrix.x{n}{trans}", "b32 b32", "b32 b32", f"{shared}bar.sync 0; "
                f"stmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 [%r3], {{{', '.join('abab'[:n])}}}; bar.sync 0; "
                "ld.shared.b32 x, [%r3]; ld.shared.b32 y, [%r3+12];")  # fmt: skip
    add("shared atomics", "b32 b32", "b32 b32", "mov.u32 %r1, smem; mov.u32 %r2, %tid.x; "
        "shl.b32 %r3, %r2, 2; add.u32 %r3, %r3, %r1; "
        "st.shared.b32 [%r3], a; bar.sync 0; atom.shared.add.u32 x, [%r3], b; "
            "atom.shared.cas.b32 y, [%r3], a, b; atom.shared.exch.b32 x, [%r3], x; "
        "red.shared.max.s32 [%r3], 5; atom.shared.inc.u32 y, [%r3], 77;")  # fmt: skip
    for vector, sent in (("v4.f32", "{%f1, %f2, %f2, %f1}"), ("v2.b64", "{%d1, %d2}")):
        # Each thread sends to its like in the other CTA. On the H200, st.async is an illegal instruction in a launch
        # without clusters.
        both = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; "
        add(f"st.async.{vector}", "b32 b32", "b32 b32", "mov.u32 %r1, smem; mov.u32 %r2, %tid.x; "
            "setp.eq.u32 p, %r2, 0; @p mbarrier.init.shared.b64 [%r1], 1; @p fence.mbarrier_init.release.cluster; "
            f"@p mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 4096; {both}"
            "mov.u32 %r3, %cluster_ctarank; xor.b32 %r3, %r3, 1; "
            "mad.lo.u32 %r4, %r2, 16, %r1; add.u32 %r4, %r4, 1024; mapa.shared::cluster.u32 %r5, %r4, %r3; "
            "mapa.shared::cluster.u32 %r6, %r1, %r3; mov.b32 %f1, a; mov.b32 %f2, b; mov.b64 %d1, {a, b}; "
            "mov.b64 %d2, {b, a}; "
            f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{vector} [%r5], {sent}, [%r6]; "
            "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 q, [%r1], 0; @!q bra W; "
            f"ld.shared.v4.b32 {{%r7, %r8, %r9, %r10}}, [%r4]; sub.u32 x, %r7, %r9; sub.u32 y, %r8, %r10; {both}",
            "bits", "sm_90", cluster=2)  # fmt: skip
    # Sums of edge values in global memory, where f32 additions take subnormal numbers for zeros; the words between
    # the outputs are made zero again.
    both = "ld.global.f32 x, [%out]; ld.global.f32 y, [%out+8]; st.global.v4.b32 [%out], {0, 0, 0, 0};"
    start = "mov.b32 %f1, a; mov.b32 %f2, b; st.global.v4.f32 [%out], {%f1, %f1, %f2, %f2}; "
    for vector, adds in {
        "f32": "red.relaxed.gpu.global.add.f32 [%out], %f2; red.relaxed.gpu.global.add.f32 [%out+8], %f2;",
        "v2.f32": "red.relaxed.gpu.global.add.v2.f32 [%out], {%f2, %f1}; "
        "red.relaxed.gpu.global.add.v2.f32 [%out+8], {%f2, %f1};",
        "v4.f32": "red.relaxed.gpu.global.add.v4.f32 [%out], {%f2, %f1, %f2, %f1};",
    }.items():
        add(f"red.global.add.{vector}", "f32 f32", "f32 f32", f"{start}{adds} {both}", "float", "sm_90")
    add(
        "bar.red",
        "s32",
        "b32 b32",
        "setp.gt.s32 p, a, 0; barrier.cta.red.popc.aligned.u32 x, 0, p; "
        "barrier.cta.red.or.aligned.pred q, 0, p; selp.b32 y, 1, 0, q;",
    )
    a4, b2, f4 = "{%r1, %r2, %r3, %r4}", "{%r5, %r6}", "{%f1, %f2, %f3, %f4}"
    load = (
        "mov.b32 %r1, a; mov.b32 %r2, b; xor.b32 %r3, a, "
        "0x80008000; mov.b32 %r4, b; mov.b32 %r5, b; mov.b32 %r6, a; "
        "mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f00000000; mov.f32 %f3, 0fBF800000; mov.f32 %f4, 0f40000000; "
    )
    both = "mov.b32 x, %f1; mov.b32 y, %f4; "
    for t in ("f16", "bf16"):
        add(
            f"mma.k16.{t}",
            f"{t}x2 {t}x2",
            "f32 f32",
            f"{load}mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {f4}, {a4}, {b2}, {f4}; {both}",
            "float",
            "sm_90",
            scale=1.0,
        )
    add(
        "mma.k8.f16",
        "f16x2 f16x2",
        "f32 f32",
        f"{load}mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {f4}, {{%r1, %r2}}, {{%r5}}, {f4}; {both}",
        "float",
        "sm_90",
        scale=1.0,
    )
    add("mma.k16.f16.f16", "f16x2 f16x2", "f16x2 f16x2", f"{load}mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
        f"{{%r7, %r8}}, {a4}, {b2}, {{%r1, %r2}}; "
        "mov.b32 x, %r7; mov.b32 y, %r8;", "bits", "sm_90", scale=1.0)  # fmt: skip
    tf = load.replace("0x80008000", "0x80000000")
    add(
        "mma.k8.tf32",
        "tf32 tf32",
        "f32 f32",
        f"{tf}mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {f4}, {a4}, {b2}, {f4}; {both}",
        "float",
        "sm_90",
        scale=1.0,
    )
    add(
        "mma.k4.tf32",
        "tf32 tf32",
        "f32 f32",
        f"{tf}mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {f4}, {{%r1, %r2}}, {{%r5}}, {f4}; {both}",
        "float",
        "sm_90",
        scale=1.0,
    )
    for t in ("e4m3", "e5m2"):
        # each float pair becomes four fp8 values of both signs
        pack = (
            f"cvt.rn.satfinite.{t}x2.f32 %h1, a, b; cvt.rn.satfinite.{t}x2.f32 "
            f"%h2, b, a; mov.b32 %r1, {{%h1, %h2}}; mov.b32 %r2, {{%h2, %h1}}; "
        )
        body = pack + load.split(";", 2)[2].replace(", a", ", %r1").replace(", b", ", %r2")
        add(
            f"mma.k32.{t}",
            "f32 f32",
            "f32 f32",
            f"{body}mma.sync.aligned.m16n8k32.row.col.f32.{t}.{t}.f32 {f4}, {a4}, {b2}, {f4}; {both}",
            "float",
            "sm_90",
            scale=1.0,
        )
    bytes8 = "mov.b32 %r1, a; mov.b32 %r2, b; xor.b32 %r3, a, 0x5a5a5a5a; mov.b32 %r4, c; "
    for more in ("", ".satfinite"):
        instruction = f"mma.sync.aligned.m16n8k32.row.col{more}.s32.s8.s8.s32"
        add(f"mma.k32.s8{more}", "b32 b32 s32", "b32 b32", f"{bytes8}{instruction} {{%r7, %r8, %r9, %r10}}, "
            "{%r1, %r2, %r3, %r4}, {%r2, %r1}, {c, a, b, c}; mov.b32 x, %r7; mov.b32 y, %r10;")  # fmt: skip
    return s


SNIPPETS = _table()
