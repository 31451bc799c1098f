"""State spaces, addresses, vectors, atomics, warp exchange, clusters, the parser and the profile."""

import gc
import struct
import weakref

import numpy as np
import pytest

from cutegemm.emulator import Checks, Launch, Memory, engine, parse_module, run
from cutegemm.emulator import errors as e
from cutegemm.emulator.ptx import Imm
from tests.ptx_snippet_table import SNIPPETS
from tests.ptx_snippets import data, emulate
from tests.unit.emulator_kernels import OWN_WORD, STORE, kernel, launch, output

BY_NAME = {s.name: s for s in SNIPPETS}
TID = np.arange(64, dtype=np.uint32)


def result(body: str, dtype=np.uint32, n: int = 64, **options) -> np.ndarray:
    out = np.zeros(n, dtype)
    launch(kernel(body), out, **options)
    return out


@pytest.mark.parametrize(
    ("width", "vector"), [(8, 1), (8, 4), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4), (64, 1), (64, 2)]
)
def test_vectors_of_every_width_through_every_space(width, vector):
    size = width * vector // 8
    regs = [f"%{'d' if width == 64 else 'r' if width == 32 else 'h'}{20 + k}" for k in range(vector)]
    v, value = (f".v{vector}", "{" + ", ".join(regs) + "}") if vector > 1 else ("", regs[0])
    source = np.random.default_rng(1).integers(0, 256, 64 * size).astype(np.uint8)
    out = np.zeros(64 * size, np.uint8)
    body = (
        f".local .align 16 .b8 stack[32]; mul.wide.u32 %d2, tid, {size}; add.s64 %d3, "
        f"%d0, %d2; add.s64 %d4, %d1, %d2; cvt.u32.u64 %r1, %d2; add.u32 %r1, %r1, s; "
        f"ld.global{v}.b{width} {value}, [%d3]; st.shared{v}.b{width} "
        f"[%r1], {value}; ld.shared{v}.b{width} {value}, [%r1]; "
        f"mov.u64 %d5, stack; cvta.local.u64 %d6, %d5; st.local{v}.b{width} "
        f"[stack+{16 - 16}], {value}; ld{v}.b{width} {value}, [%d6]; "
        f"cvt.u64.u32 %d7, %r1; cvta.shared.u64 %d8, %d7; st{v}.b{width} [%d8], "
        f"{value}; ld.shared{v}.b{width} {value}, [%r1]; st{v}.b{width} [%d4], {value};"
    )
    launch(kernel(body, params=2), source, out)
    assert (out == source).all()


def test_narrow_loads_extend_by_their_type():
    source = np.array([0x80, 0x7F, 0xFF, 1] * 16, np.uint8)
    for t, want in (("u8", source.astype(np.uint32)), ("s8", source.view(np.int8).astype(np.int32).view(np.uint32))):
        out = output()
        body = f"cvt.u64.u32 %d2, tid; add.s64 %d2, %d2, %d1; ld.global.{t} %r9, [%d2];" + STORE
        launch(kernel(body, params=2), out, source)
        assert (out == want).all()


def test_generic_addresses_know_their_space():
    body = (
        "cvt.u64.u32 %d2, s; cvta.shared.u64 %d3, %d2; isspacep.shared "
        "%p1, %d3; isspacep.global %p2, %d3; isspacep.global %p3, %d0; "
        "selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; selp.b32 "
        "%r3, 4, 0, %p3; or.b32 %r9, %r1, %r2; or.b32 %r9, %r9, %r3; "
        "cvta.to.shared.u64 %d4, %d3; setp.eq.u64 %p4, %d4, %d2; selp.b32 %r4, 8, 0, %p4; or.b32 %r9, %r9, %r4;"
    )
    assert (result(body + STORE) == 1 + 4 + 8).all()


def test_module_variables_and_initializers():
    text = kernel(
        "ld.const.u32 %r1, [table+4]; mov.u64 %d2, where; ld.u64 %d3, [%d2]; ld.u32 "
        "%r2, [%d3+8]; atom.global.add.u32 %r3, [count], 1; add.u32 %r9, %r1, %r2;" + STORE
    )
    text = text.replace(
        ".shared .align",
        ".const .align 4 .u32 table[3] = {5, 7, 9};\n.global .align 8 .u64 "
        "where[1] = {generic(table)};\n.global .u32 count;\n.shared .align",
        1,
    )
    for _ in range(2):  # variables start anew with every run
        out = output()
        launch(text, out)
        assert (out == 16).all()


def test_loads_of_parameters_by_address():
    text = kernel(
        "mov.b64 %d2, p0; cvta.param.u64 %d3, %d2; ld.u64 %d4, "
        "[%d3]; setp.eq.u64 %p1, %d4, %d0; selp.b32 %r9, 1, 0, %p1;" + STORE
    )
    out = output()
    launch(text, out)
    assert (out == 1).all()


def test_lanes_that_do_not_take_part_touch_nothing():
    out = output()
    launch(
        kernel(
            "setp.lt.u32 %p1, tid, 10; mul.wide.u32 %d40, tid, 400; add.s64 %d40, %d40, %d0; "
            "@%p1 st.global.u32 [%d0], 9; setp.eq.u32 %p2, tid, 0; @%p2 st.global.u32 [%d40], 3;"
        ),
        out,
    )
    assert out[0] == 3
    assert not out[1:].any()


@pytest.mark.parametrize(
    ("op", "want"), [("add.u32", 64 * 63 // 2), ("max.s32", 63), ("or.b32", 63), ("xor.b32", 0), ("min.u32", 0)]
)
def test_reductions_in_memory(op, want):
    for space, address in (("global", "%d0"), ("shared", "s")):
        out = output()
        end = "" if space == "global" else "bar.sync 0; ld.shared.u32 %r9, [s]; st.global.u32 [%d0], %r9;"
        start = "" if space == "global" else "setp.eq.u32 %p1, tid, 0; @%p1 st.shared.u32 [s], 0; bar.sync 0;"
        launch(kernel(f"{start} red.{space}.{op} [{address}], tid; {end}"), out)
        assert out[0] == want


def test_atomics_return_what_was_there():
    out, old = np.zeros(1, np.uint32), output()
    launch(kernel("atom.global.inc.u32 %r9, [%d1], 9; " + STORE, params=2), old, out)
    assert sorted(old) == sorted(n % 10 for n in range(64))
    lock = np.zeros(1, np.uint32)
    launch(kernel("atom.global.cas.b32 %r9, [%d1], 0, 7; " + STORE, params=2), old, lock)
    assert lock[0] == 7
    assert sorted(old)[:2] == [0, 7]
    half = np.zeros(2, np.float16)
    launch(kernel("mov.b32 %r1, 0x3C003800; red.global.add.noftz.f16x2 [%d0], %r1;"), half)
    assert half.tolist() == [32.0, 64.0]
    total = np.zeros(4, np.float32)
    launch(kernel("mov.f32 %f1, 0f3FC00000; red.global.add.v4.f32 [%d0], {%f1, %f1, %f1, %f1};"), total)
    assert (total == 96).all()
    total = np.zeros(4, np.float32)
    pair = "mov.f32 %f1, 0f3FC00000; mov.f32 %f2, 0f3F000000; "
    launch(kernel(f"{pair} red.relaxed.gpu.global.add.v2.f32 [%d0+8], {{%f1, %f2}};"), total)
    assert total.tolist() == [0, 0, 96, 32]


def test_f32_additions_in_global_memory_take_subnormal_numbers_for_zeros():
    """As the PTX ISA says of atom and red; 64 lanes one after the other, or a word each. Shared memory keeps them."""
    tiny, least, odd = np.float32(2.0**-127), np.float32(2.0**-126), np.float32(1.5 * 2.0**-126)
    add = "red.global.add.f32 [%d0], %f1;"
    for body, start, want in (
        (f"mov.f32 %f1, 0f00400000; {add}", 0.0, 0.0),
        (f"mov.f32 %f1, 0f00800000; {add}", tiny, 64 * least),
        (f"mov.f32 %f1, 0f80800000; {add}", odd, -63 * least),
        (f"setp.eq.u32 %p1, tid, 0; mov.f32 %f1, 0f80800000; @%p1 {add}", odd, 0.0),
    ):
        total = np.array([start], np.float32)
        launch(kernel(body), total)
        assert total[0] == want
    out = output(dtype=np.float32)
    launch(
        kernel(
            f"{OWN_WORD} mov.f32 %f1, 0f00400000; st.shared.f32 [%r1], %f1; red.shared.add.f32 [%r1], %f1; "
            f"ld.shared.b32 %r9, [%r1]; {STORE}"
        ),
        out,
    )
    assert (out == least).all()


def test_remote_shared_memory_of_a_cluster():
    body = (f"{OWN_WORD} mov.u32 %r2, %cluster_ctarank; mad.lo.u32 %r3, %r2, 1000, tid; "
        f"st.shared.u32 [%r1], %r3; barrier.cluster.arrive.release; barrier.cluster.wait.acquire; "
            "xor.b32 %r4, %r2, 1; mapa.shared::cluster.u32 %r5, %r1, %r4; "
                "ld.shared::cluster.u32 %r9, [%r5]; barrier.cluster.arrive; barrier.cluster.wait; "
            "mul.lo.u32 %r6, %r2, 256; cvt.u64.u32 %d5, %r6; add.s64 %d0, %d0, %d5;")  # fmt: skip
    for seed in (None, 0, 1):
        assert (result(body + STORE, n=128, grid=2, cluster=2, seed=seed) == np.r_[TID + 1000, TID]).all()
    with pytest.raises((e.DataRace, e.UninitializedRead)):
        result(
            body.replace("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", "") + STORE,
            n=128,
            grid=2,
            cluster=2,
        )
    with pytest.raises(e.DataRace):
        result(body.replace(".arrive.release", ".arrive.relaxed") + STORE, n=128, grid=2, cluster=2)
    with pytest.raises(e.OutOfBounds, match="rank 5"):
        result(body.replace("xor.b32 %r4, %r2, 1;", "mov.u32 %r4, 5;") + STORE, n=128, grid=2, cluster=2)


def test_special_registers():
    body = (
        "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r9, %r1, "
        "%r3, tid; mad.lo.u32 %r9, %r2, 10000, %r9; mul.wide.u32 %d5, %r1, 256; add.s64 %d0, %d0, %d5;"
    )
    assert (result(body + STORE, n=192, grid=3) == 30000 + np.arange(192)).all()
    for name, want in (
        ("lanemask_lt", (1 << (TID & 31)) - 1),
        ("lanemask_ge", ~np.uint32(0) << (TID & 31)),
        ("laneid", TID & 31),
        ("warpid", TID >> 5),
    ):
        assert (result(f"mov.u32 %r9, %{name};" + STORE) == want.astype(np.uint32)).all(), name


def test_divergent_loops_and_reconvergence():
    # every lane loops as often as its number says; then all vote together
    body = (
        "mov.u32 %r9, 0; and.b32 %r1, tid, 7; L: setp.eq.u32 %p1, %r1, 0; @%p1 bra E; add.u32 %r9, %r9, %r1; "
        "sub.u32 %r1, %r1, 1; bra L; E: activemask.b32 %r2; setp.eq.u32 %p2, %r2, -1; @%p2 add.u32 %r9, %r9, 1000;"
    )
    n = TID & 7
    for seed in (None, 3):
        assert (result(body + STORE, seed=seed) == n * (n + 1) // 2 + 1000).all()


def test_early_exit_leaves_the_barrier_to_the_others():
    body = f"setp.ge.u32 %p1, tid, 40; @%p1 ret; {OWN_WORD} st.shared.u32 [%r1], tid; bar.sync 0; mov.u32 %r9, 5;"
    assert (result(body + STORE)[:40] == 5).all()


def lanes_of(name: str):
    s = BY_NAME[name]
    inputs = data(s, 1, 3)
    return inputs.reshape(-1, 32, inputs.shape[1]).tolist(), emulate(s, inputs).reshape(-1, 32, len(s.outputs)).tolist()


def test_shuffles():
    pick = {
        "shfl.up": lambda l, b: (l - b, l - b >= 0),
        "shfl.down": lambda l, b: (l + b, l + b <= 31),
        "shfl.bfly": lambda l, b: (l ^ b, True),
        "shfl.idx": lambda l, b: (b, True),
    }
    for name, f in pick.items():
        for warp, got in zip(*lanes_of(name), strict=True):
            for lane in range(32):
                source, ok = f(lane, warp[lane][1] & 31)
                assert got[lane] == [warp[source if ok else lane][0], int(ok)], (name, lane)
    for warp, got in zip(*lanes_of("shfl.bfly of 8"), strict=True):
        assert [g[0] for g in got] == [warp[lane ^ 3][0] for lane in range(32)]
    for warp, got in zip(*lanes_of("shfl.up of 8"), strict=True):
        assert [g[0] for g in got] == [warp[lane - 3 if lane % 8 >= 3 else lane][0] for lane in range(32)]


def test_votes_and_reductions():
    signed = lambda x: x - (1 << 32) if x >> 31 else x  # noqa: E731
    for warp, got in zip(*lanes_of("vote"), strict=True):
        ballot = sum((signed(w[0]) > 0) << n for n, w in enumerate(warp))
        assert all(g == [ballot, int(ballot != 0)] for g in got)
    for warp, got in zip(*lanes_of("match.any"), strict=True):
        for lane in range(32):
            assert got[lane][0] == sum(((w[0] ^ warp[lane][0]) & 3 == 0) << n for n, w in enumerate(warp))
    for name, f in (("redux.add.u32", sum), ("redux.min.s32", lambda v: min(map(signed, v))), ("redux.max.u32", max)):
        for warp, got in zip(*lanes_of(name), strict=True):
            assert got[0][0] == f([w[0] for w in warp]) & 0xFFFFFFFF


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_and_stmatrix(n, trans):
    source = np.random.default_rng(2).integers(0, 1 << 16, (32, 8)).astype(np.uint16)  # 4 matrices of 8 rows
    regs = ", ".join(f"%r{20 + k}" for k in range(n))
    t = ".trans" if trans else ""
    keep = " ".join(f"st.global.u32 [%d5+{4 * k}], %r{20 + k};" for k in range(n))
    body = (
        f"mul.wide.u32 %d2, tid, 16; add.s64 %d3, %d0, %d2; shl.b32 %r1, tid, 4; "
        f"add.u32 %r1, %r1, s; ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%d3]; "
        f"st.shared.v4.u32 [%r1], {{%r2, %r3, %r4, %r5}}; bar.sync 0; "
        f"ldmatrix.sync.aligned.m8n8.x{n}{t}.shared.b16 {{{regs}}}, [%r1]; "
        f"add.s64 %d5, %d1, %d2; {keep} bar.sync 0; "
        f"stmatrix.sync.aligned.m8n8.x{n}{t}.shared.b16 [%r1], {{{regs}}}; "
        "bar.sync 0; ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1]; st.global.v4.u32 [%d3], {%r2, %r3, %r4, %r5};"
    )
    out, again = np.zeros((32, 4), np.uint32), source.copy()
    launch(kernel(body, params=2), again, out, threads=32)
    for k in range(n):
        m = source[8 * k : 8 * k + 8]
        m = m.T if trans else m
        assert (out[:, k].copy().view(np.uint16).reshape(8, 8) == m).all()
    assert (again == source).all()  # stmatrix undoes ldmatrix


# -- parser ------------------------------------------------------------------------------------------------------------
def test_parser_reads_scopes_labels_and_literals():
    text = kernel(
        '.pragma "nounroll"; { .reg .b32 t; .reg .pred q; mov.b32 t, -1; '
        "A: setp.ne.b32 q, t, -1; @q bra A; mov.b32 %r1, t; } "
        "{ .reg .b32 t; mov.b32 t, 0x10; A: setp.eq.b32 %p1, t, 99; @%p1 "
        "bra A; add.s32 %r1, %r1, t; } // comment ; { \n /* more ; } */ "
        "mov.f32 %f1, 0f40000000; mov.f64 %d2, 0d3FF0000000000000; mov.b32 %r2, 017; mov.b32 %r3, 0b11; "
        "cvt.rzi.s32.f32 %r4, %f1; add.s32 %r9, %r1, %r4; add.s32 %r9, %r9, %r2; add.s32 %r9, %r9, %r3;" + STORE
    )
    module = parse_module(text)
    names = module.kernel("k").register_names
    assert {"t#1", "t#2", "q#1"} <= set(names)
    assert names["t#1"].index != names["t#2"].index
    out = output()
    launch(text, out)
    assert (out == -1 + 16 + 2 + 15 + 3).all()
    assert Imm(0x40000000, "f32") in [o for i in module.kernel("k").instrs for o in i.operands]


def test_parameter_layout_follows_alignment():
    text = (
        ".version 8.4\n.target sm_80\n.address_size 64\n.visible .entry f(.param .u8 a, .param .align 64 .b8 "
        "map[128], .param .u32 b, .param .u64 .ptr .global .align 16 c) .maxntid 128, 1, 1 .minnctapersm 2 { ret; }"
    )
    module = parse_module(text)
    assert [(p.offset, p.size) for p in module.kernel("f").params] == [(0, 1), (64, 128), (192, 4), (200, 8)]
    assert module.entries == ["f"]
    assert module.kernel("f").reqntid is None
    assert module.kernel("f").maxntid == (128, 1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no .entry"), (kernel("mov.b32 %nope, [;"), "PTX line"), (kernel("@%p99 ret;"), "guard predicate")],
)
def test_parser_names_the_line(text, message):
    with pytest.raises(e.PtxError, match=message):
        parse_module(text)


# -- profile and memory -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("stride", "conflicts"), [(1, 0), (2, 2), (8, 14), (32, 62), (33, 0)])
def test_bank_conflicts_are_counted(stride, conflicts):
    body = (
        f"mul.lo.u32 %r1, lane, {4 * stride}; mad.lo.u32 %r1, warp, "
        f"4352, %r1; add.u32 %r1, %r1, s; st.shared.u32 [%r1], tid;"
    )
    report = launch(kernel(body, shared=16384), output(), profile=True)
    assert report.bank_conflicts == conflicts
    assert report.bytes["shared write"] == 256


def test_sectors_against_ideal():
    for scale, sectors in ((4, 8), (8, 16), (32, 64)):
        out = np.zeros(64 * scale // 4, np.uint32)
        report = launch(
            kernel(f"mul.wide.u32 %d2, tid, {scale}; add.s64 %d2, %d2, %d0; st.global.u32 [%d2], tid;"),
            out,
            profile=True,
        )
        assert report.sectors[0] in (sectors, sectors + 2)  # the array may start inside a sector
        assert report.sectors[1] == 8
        assert report.instructions["memory"] == 2 * 2  # ld.param and st, two warps


def test_memory_refuses_overlaps_and_follows_views():
    memory, array = Memory(), np.zeros((8, 8), np.float32)
    assert memory.map(array[::2, ::-1], name="a") == array[::2, ::-1].ctypes.data
    assert memory.find(array.ctypes.data) is not None
    with pytest.raises(ValueError, match="overlaps"):
        memory.map(array, name="b")
    with pytest.raises(TypeError, match="numpy array or a torch tensor"):
        memory.map([1, 2], name="c")
    assert memory.find(array.ctypes.data + array.nbytes) is None


def test_a_grid_larger_than_a_wave_and_its_progress():
    seen = []
    out = np.zeros(40, np.uint32)
    memory = Memory()
    memory.map(out, name="out")
    text = kernel(
        "mov.u32 %r1, %ctaid.x; mul.wide.u32 %d2, %r1, 4; add.s64 %d2, %d2, %d0; red.global.add.u32 [%d2], 1;"
    )
    shape = Launch("k", (40, 1, 1), (64, 1, 1), params=struct.pack("<Q", out.ctypes.data))
    run(
        parse_module(text),
        shape,
        memory,
        wave_ctas=16,
        progress=lambda done, total: seen.append((done, total)),
        checks=Checks.all(),
    )
    assert (out == 64).all()
    assert seen == [(16, 40), (32, 40), (40, 40)]


def test_a_wave_is_let_go_before_the_next_one(monkeypatch):
    """By reference counts alone: the race detector's part of a wave may take gigabytes."""
    waves: list[weakref.ref] = []
    start = engine.Env.start

    def spy(env, wave):
        assert [found() for found in waves] == [None] * len(waves)
        start(env, wave)
        waves.extend((weakref.ref(wave), weakref.ref(env.hb)))

    monkeypatch.setattr(engine.Env, "start", spy)
    out = np.zeros(64, np.uint32)
    memory = Memory()
    memory.map(out, name="out")
    shape = Launch("k", (6, 1, 1), (64, 1, 1), params=struct.pack("<Q", out.ctypes.data))
    enabled = gc.isenabled()
    gc.disable()
    try:
        run(parse_module(kernel(OWN_WORD)), shape, memory, wave_ctas=2)
    finally:
        if enabled:
            gc.enable()
    assert len(waves) == 6
    assert [found() for found in waves] == [None] * 6


def test_what_is_discarded_is_nobodys():
    """A line's values after discard.L2 are indeterminate: in the emulator NaN. Its neighbours keep theirs."""
    values = np.arange(128, dtype=np.float32)
    one = "setp.eq.u32 %p1, tid, 5;"
    launch(kernel(f"{one} @%p1 discard.global.L2 [%d0+128], 128;"), aligned := lines(values))
    assert np.isnan(aligned[32:64]).all()
    assert (aligned[:32] == values[:32]).all()
    assert (aligned[64:] == values[64:]).all()
    launch(kernel(f"{one} @%p1 discard.L2 [%d0], 128;"), aligned)
    assert np.isnan(aligned[:64]).all()


@pytest.mark.parametrize(("body", "error"), [("[%d0+64], 128", e.MisalignedAccess), ("[%d0+512], 128", e.OutOfBounds)])
def test_only_whole_lines_of_allocated_memory_are_discarded(body, error):
    with pytest.raises(error):
        launch(kernel(f"discard.global.L2 {body};"), lines(np.zeros(128, np.float32)))


def lines(values: np.ndarray) -> np.ndarray:
    """A copy that begins on a line of 128 bytes."""
    room = np.empty(values.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 128
    copy = room[start : start + values.nbytes].view(values.dtype)
    copy[:] = values
    return copy
