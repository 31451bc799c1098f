"""mma, wgmma, ldmatrix, bulk tensor copies and swizzles against numpy."""

import struct

import numpy as np
import pytest

from cutegemm.emulator import Checks
from cutegemm.emulator import errors as e
from cutegemm.emulator.numerics import bf16_bits, bf16_values, fp8_bits, fp8_values, tf32_bits
from cutegemm.emulator.tensor_map import decode
from tests.ptx_snippet_table import SNIPPETS
from tests.ptx_snippets import BLOCK, emulate
from tests.unit.emulator_kernels import kernel, launch

RNG = np.random.default_rng(11)
SEEDS = [None, 0, 1]


def operand(shape, t: str) -> tuple[np.ndarray, np.ndarray]:
    """(bits as stored, values) of random operands of a type."""
    x = RNG.standard_normal(shape).astype(np.float32)
    if t == "f16":
        return x.astype(np.float16).view(np.uint16), x.astype(np.float16).astype(np.float64)
    if t == "bf16":
        bits = bf16_bits(x)
        return bits, bf16_values(bits).astype(np.float64)
    if t == "tf32":
        bits = tf32_bits(x, "rna")
        return bits, bits.view(np.float32).astype(np.float64)
    bits = fp8_bits(x, t)
    return bits, fp8_values(bits, t).astype(np.float64)


MMA = [("f16", 16), ("f16", 8), ("bf16", 16), ("bf16", 8), ("tf32", 8), ("tf32", 4), ("e4m3", 32), ("e5m2", 32)]


@pytest.mark.parametrize(("t", "k"), MMA)
def test_mma_layouts_as_ptx_defines_them(t, k):
    """Fragments are built here from PTX's formulas: row = lane / 4, k = (lane % 4) * elements + ..."""
    (ab, av), (bb, bv) = operand((16, k), t), operand((8, k), t)
    per = 4 // ab.itemsize  # elements of a register
    a_regs, b_regs = 16 * k // per // 32, 8 * k // per // 32
    lanes = np.zeros((32, a_regs + b_regs), np.uint32)
    raw_a, raw_b = np.ascontiguousarray(ab).view(np.uint32), np.ascontiguousarray(bb).view(np.uint32)
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for r in range(a_regs):
            lanes[lane, r] = raw_a[group + 8 * (r % 2), thread + 4 * (r // 2)]
        for r in range(b_regs):
            lanes[lane, a_regs + r] = raw_b[group, thread + 4 * r]
    out = np.zeros((32, 4), np.float32)
    n = a_regs + b_regs
    loads = " ".join(f"ld.global.u32 %r{10 + r}, [%d2+{4 * r}];" for r in range(n))
    a = ", ".join(f"%r{10 + r}" for r in range(a_regs))
    b = ", ".join(f"%r{10 + a_regs + r}" for r in range(b_regs))
    body = (
        f"mul.wide.u32 %d2, tid, {4 * n}; add.s64 %d2, %d2, %d0; "
        f"{loads} mul.wide.u32 %d3, tid, 16; add.s64 %d3, %d3, %d1; "
        "mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000; mov.f32 %f3, 0f40400000; mov.f32 %f4, 0f40800000; "
        f"mma.sync.aligned.m16n8k{k}.row.col.f32.{t}.{t}.f32 "
        f"{{%f1, %f2, %f3, %f4}}, {{{a}}}, {{{b}}}, {{%f1, %f2, %f3, %f4}}; "
        "st.global.v4.f32 [%d3], {%f1, %f2, %f3, %f4};"
    )
    launch(kernel(body, params=2), lanes, out, threads=32)
    want = av @ bv.T
    for lane in range(32):
        for r in range(4):
            row, col = lane // 4 + 8 * (r // 2), (lane % 4) * 2 + r % 2
            assert abs(out[lane, r] - (want[row, col] + 1 + r)) <= 1e-5 * (np.abs(av[row]) @ np.abs(bv[col]) + 4)


# -- tensor maps and bulk copies -----------------------------------------------------------------------------------
KINDS = {1: 0, 2: 6, 4: 7}


def tensor_map(array: np.ndarray, box: tuple[int, ...], swizzle: int) -> bytes:
    """The descriptor of a C-contiguous array; box innermost first."""
    rank = array.ndim
    word = 2 | (rank - 1) << 4 | KINDS[array.itemsize] << 7 | {0: 0, 32: 1, 64: 2, 128: 3}[swizzle] << 13
    dims, strides = array.shape[::-1], array.strides[::-1]
    raw = bytearray(128)
    struct.pack_into("<QI", raw, 0, array.ctypes.data, word)
    for n in range(1, rank):
        struct.pack_into("<I", raw, 8 + 4 * n, strides[n] // 16)
    for n in range(rank):
        struct.pack_into("<I", raw, 32 + 4 * n, dims[n] - 1)
        raw[55 + n] = box[n] - 1
    return bytes(raw)


def test_tensor_map_is_decoded():
    array = np.zeros((6, 5, 64), np.float16)
    t = decode(tensor_map(array, (32, 4, 2), 64)[:64])
    assert (t.rank, t.dims, t.strides, t.box, t.swizzle, t.element) == (
        3,
        (64, 5, 6),
        (128, 640),
        (32, 4, 2),
        64,
        "f16",
    )
    assert t.address == array.ctypes.data
    assert t.box_bytes == 32 * 4 * 2 * 2


def swizzled(box: np.ndarray, swizzle: int) -> np.ndarray:
    """A box's bytes as they lie in shared memory from a 1024-byte boundary."""
    flat = np.ascontiguousarray(box).view(np.uint8).reshape(-1)
    out = np.empty_like(flat)
    at = np.arange(len(flat))
    if swizzle:
        at = at ^ ((at >> 7) & (swizzle // 16 - 1)) << 4
    out[at] = flat
    return out


def map_kernel(body: str, params: int) -> str:
    """``kernel`` with a tensor map as its last parameter, its generic address in %d9."""
    text = kernel("mov.b64 %d9, map; cvta.param.u64 %d9, %d9;" + body, params=params, shared=32768)
    return text.replace(f".param .u64 p{params - 1})", f".param .u64 p{params - 1}, .param .align 64 .b8 map[128])")


def padded(arrays: int, raw: bytes) -> bytes:
    return bytes(-8 * arrays % 64) + raw


INIT = (
    "setp.eq.u32 %p1, tid, 0; @%p1 mbarrier.init.shared.b64 [s], 1; @%p1 fence.mbarrier_init.release.cluster; "
    "bar.sync 0; mov.u32 %r1, 0; add.u32 %r2, s, 1024;"
)
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [s], %r1; @!%p2 bra W;"


def load(rank: int, nbytes: int, wait: str = WAIT, expect: int = 0) -> str:
    coords = ", ".join(f"%r{20 + n}" for n in range(rank))
    fetch = " ".join(f"ld.global.s32 %r{20 + n}, [%d1+{4 * n}];" for n in range(rank))
    return (f"{INIT} {fetch} @!%p1 bra S; mbarrier.arrive.expect_tx.shared.b64 _, [s], {expect or nbytes}; "
            f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                f"[%r2], [%d9, {{{coords}}}], [s]; "
            f"S: {wait} ")  # fmt: skip


DUMP = ("mov.u32 %r3, tid; L: setp.ge.u32 %p3, %r3, {words}; @%p3 bra X; shl.b32 %r4, %r3, 2; add.u32 "
    "%r5, %r2, %r4; ld.shared.u32 %r6, [%r5]; cvt.u64.u32 %d5, %r4; add.s64 %d5, %d5, %d0; "
        "st.global.u32 [%d5], %r6; add.u32 %r3, %r3, 64; bra L; X: ")  # fmt: skip
CASES = [
    ((300,), (64,), 0, (0,)), ((300,), (64,), 0, (272,)), ((40, 64), (64, 16), 128, (0, 8)), ((40, 72), (32, 16),
    64, (48, 32)),
    ((40, 72), (16, 16), 32, (-8, -3)), ((7, 9, 64), (64, 4, 2), 128, (0, 7, 6)), ((3, 4, 5, 32), (32, 2, 2, 2), 0,
    (16, 1, 3, 2)),
    ((2, 3, 4, 5, 32), (32, 2, 2, 2, 1), 64, (0, 4, 0, 2, 1)), ((8, 8), (8, 8), 0, (112, 100)),
]  # fmt: skip


def box_of(array: np.ndarray, box, coords) -> np.ndarray:
    """The box at ``coords`` (innermost first), zero outside the array."""
    out = np.zeros(box[::-1], array.dtype)
    for at in np.ndindex(*out.shape):
        source = tuple(a + c for a, c in zip(at, coords[::-1], strict=True))
        if all(0 <= i < n for i, n in zip(source, array.shape, strict=True)):
            out[at] = array[source]
    return out


@pytest.mark.parametrize(("shape", "box", "swizzle", "coords"), CASES)
def test_bulk_tensor_load(shape, box, swizzle, coords):
    array = RNG.integers(1, 1 << 16, shape).astype(np.uint16)
    want = box_of(array, box, coords)
    where = np.array(coords, np.int32)
    for seed in SEEDS:
        out = np.zeros(want.nbytes // 4, np.uint32)
        # the tensor is pointer 2, so that it is mapped
        text = map_kernel(load(array.ndim, want.nbytes) + DUMP.format(words=len(out)), 3)
        launch(text, out, where, array, extra=padded(3, tensor_map(array, box, swizzle)), seed=seed)
        assert (out.view(np.uint8) == swizzled(want, swizzle)).all(), seed


@pytest.mark.parametrize("first", [4, -1, 69])
def test_a_box_begins_at_16_bytes_of_its_rows(first):
    array, where = RNG.integers(1, 99, (40, 64)).astype(np.uint16), np.array([first, 3], np.int32)
    extra = padded(3, tensor_map(array, (64, 16), 128))
    for body in (load(2, 2048) + DUMP.format(words=512), FILL.format(words=512, fence=FENCE) + store(2)):
        with pytest.raises(e.MisalignedAccess, match=f"begins at element {first} of 2 bytes in its rows, no multiple"):
            launch(map_kernel(body, 3), np.zeros(512, np.uint32), where, array, extra=extra)


def test_bulk_load_without_its_wait_or_with_wrong_bytes():
    array, where, out = RNG.integers(1, 99, (40, 64)).astype(np.uint16), np.zeros(2, np.int32), np.zeros(512, np.uint32)
    extra = padded(3, tensor_map(array, (64, 16), 128))
    for seed in SEEDS:
        with pytest.raises(e.AsyncReadTooEarly, match="bulk load"):
            launch(
                map_kernel(load(2, 2048, wait="bar.sync 0;") + DUMP.format(words=512), 3),
                out,
                where,
                array,
                extra=extra,
                seed=seed,
            )
        with pytest.raises(e.NoProgress, match="bytes outstanding"):
            launch(map_kernel(load(2, 2048, expect=4096), 3), out, where, array, extra=extra, seed=seed)
        unfenced = map_kernel(load(2, 2048).replace("@%p1 fence.mbarrier_init.release.cluster;", ""), 3)
        with pytest.raises(e.MissingProxyFence, match=r"no fence\.mbarrier_init"):
            launch(unfenced, out, where, array, extra=extra, seed=seed)


FILL = ("add.u32 %r2, s, 1024; mov.u32 %r3, tid; L: setp.ge.u32 %p3, %r3, {words}; @%p3 bra X; "
    "shl.b32 %r4, %r3, 2; add.u32 %r5, %r2, %r4; cvt.u64.u32 %d5, %r4; add.s64 %d5, %d5, %d0; "
        "ld.global.u32 %r6, [%d5]; st.shared.u32 [%r5], %r6; add.u32 %r3, %r3, 64; bra L; X: "
        "{fence} bar.sync 0; setp.ne.u32 %p1, tid, 0; @%p1 bra E; ")  # fmt: skip
FENCE = "fence.proxy.async.shared::cta;"


def store(rank: int, op: str = "cp.async.bulk.tensor", tail: str = "tile.bulk_group") -> str:
    coords = ", ".join(f"%r{20 + n}" for n in range(rank))
    fetch = " ".join(f"ld.global.s32 %r{20 + n}, [%d1+{4 * n}];" for n in range(rank))
    return (f"{fetch} {op}.{rank}d.global.shared::cta.{tail} [%d9, {{{coords}}}], [%r2]; cp.async.bulk.commit_group; "
            "cp.async.bulk.wait_group 0; E: ")  # fmt: skip


@pytest.mark.parametrize(("shape", "box", "swizzle", "coords"), CASES)
@pytest.mark.parametrize("reduce", [False, True])
def test_bulk_tensor_store_and_reduce(shape, box, swizzle, coords, reduce):
    data = RNG.standard_normal(box[::-1]).astype(np.float16)
    where = np.array(coords, np.int32)
    source = swizzled(data, swizzle).view(np.uint32).copy()
    for seed in SEEDS:
        array = RNG.standard_normal(shape).astype(np.float16)
        want = array.copy()
        for at in np.ndindex(*data.shape):
            target = tuple(a + c for a, c in zip(at, coords[::-1], strict=True))
            if all(0 <= i < n for i, n in zip(target, shape, strict=True)):
                want[target] = want[target] + data[at] if reduce else data[at]
        op = (
            ("cp.reduce.async.bulk.tensor", "add.tile.bulk_group")
            if reduce
            else ("cp.async.bulk.tensor", "tile.bulk_group")
        )
        body = FILL.format(words=len(source), fence=FENCE) + store(len(box), *op)
        launch(map_kernel(body, 3), source, where, array, extra=padded(3, tensor_map(array, box, swizzle)), seed=seed)
        assert (array == want).all()


def test_bulk_store_needs_the_proxy_fence():
    array, where, source = np.zeros((40, 64), np.float16), np.zeros(2, np.int32), np.zeros(512, np.uint32)
    extra = padded(3, tensor_map(array, (64, 16), 128))
    for seed in SEEDS:
        with pytest.raises(e.MissingProxyFence, match=r"fence\.proxy\.async"):
            launch(
                map_kernel(FILL.format(words=512, fence="") + store(2), 3), source, where, array, extra=extra, seed=seed
            )
        launch(
            map_kernel(FILL.format(words=512, fence="") + store(2), 3),
            source,
            where,
            array,
            extra=extra,
            seed=seed,
            checks=Checks(proxy_fences=False),
        )


def test_multicast_reaches_every_cta_and_its_mbarrier():
    array = RNG.integers(1, 1 << 16, (16, 64)).astype(np.uint16)
    body = (
        "setp.eq.u32 %p1, tid, 0; @%p1 mbarrier.init.shared.b64 [s], 1; @%p1 fence.mbarrier_init.release.cluster; "
        "barrier.cluster.arrive.relaxed; barrier.cluster.wait; add.u32 "
        "%r2, s, 1024; mov.u32 %r1, 0; mov.u32 %r20, 0; mov.u32 %r21, 0; "
        "mov.u32 %r7, %cluster_ctarank; mov.u16 %h1, 3; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [s], 2048; "
        "setp.eq.and.u32 %p4, %r7, 1, %p1; @!%p4 bra S; "
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r2], [%d9, {%r20, %r21}], [s], %h1; "
        f"S: {WAIT} mul.lo.u32 %r8, %r7, 2048; cvt.u64.u32 %d6, %r8; add.s64 %d0, %d0, %d6; {DUMP.format(words=512)}"
    )
    for seed in SEEDS:
        out = np.zeros((2, 512), np.uint32)
        launch(
            map_kernel(body, 2),
            out,
            array,
            extra=padded(2, tensor_map(array, (64, 16), 128)),
            grid=2,
            cluster=2,
            seed=seed,
        )
        assert (out.view(np.uint8) == swizzled(array, 128)).all()


# -- wgmma -----------------------------------------------------------------------------------------------------------
def operand_layout(values: np.ndarray, swizzle: int, mn_major: bool) -> tuple[np.ndarray, int]:
    """Bytes of an operand [rows, k] in shared memory from a 1024-byte boundary, and its descriptor without the
    address.
    """
    rows, k = values.shape
    size = values.itemsize
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    out = np.zeros(1 << 15, np.uint8)
    span = swizzle or 16
    if mn_major:  # rows are contiguous: blocks of `span` bytes of rows by 8 of k
        per = span // size
        leading, stride = (8 * span * (k // 8), 8 * span) if swizzle else (8 * 16 * (rows // 8), 8 * 16)
        address = lambda r, c: (  # noqa: E731
            (r // per) * leading + (c // 8) * stride + (c % 8) * span + (r % per) * size if swizzle
            else (r // per) * stride + (c // 8) * leading + (c % 8) * span + (r % per) * size
        )  # fmt: skip
    else:
        chunk = 16 // size
        leading, stride = (16, 8 * span) if swizzle else (128, 256)
        address = lambda r, c: (  # noqa: E731
            (r // 8) * stride + (r % 8) * span + c * size if swizzle
            else (r // 8) * stride + (c // chunk) * leading + (r % 8) * 16 + (c % chunk) * size
        )  # fmt: skip
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(rows, k, size)
    for r in range(rows):
        for c in range(k):
            at = address(r, c)
            if swizzle:
                at ^= ((at >> 7) & (swizzle // 16 - 1)) << 4
            out[at : at + size] = raw[r, c]
    return out, (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62


def wgmma_kernel(n: int, k: int, t: str, a_desc: int, b_desc: int, majors: str, *, fence="wgmma.fence.sync.aligned;",
                 proxy=FENCE, wait="wgmma.wait_group.sync.aligned 0;", signs="1, 1") -> str:  # fmt: skip
    regs = ", ".join(f"%r{100 + i}" for i in range(n // 2))
    zero = " ".join(f"mov.b32 %r{100 + i}, 0f3F800000;" for i in range(n // 2))
    stores = " ".join(f"st.global.u32 [%d5+{4 * i}], %r{100 + i};" for i in range(n // 2))
    copy = "".join(
        f"mov.u32 %r3, tid; L{x}: shl.b32 %r4, %r3, 2; add.u32 %r5, s, %r4; "
        f"cvt.u64.u32 %d5, %r4; add.s64 %d5, %d5, %d{x}; ld.global.u32 %r6, [%d5]; "
        f"st.shared.u32 [%r5+{at}], %r6; add.u32 %r3, %r3, 128; setp.lt.u32 %p3, %r3, 8192; @%p3 bra L{x}; "
        for x, at in ((0, 0), (1, 32768))
    )
    body = (
        f"{copy} {proxy} bar.sync 0; {zero} shr.u32 %r7, s, 4; cvt.u64.u32 %d10, %r7; "
        f"add.s64 %d11, %d10, {32768 >> 4}; mov.b64 %d12, {a_desc}; or.b64 %d10, %d10, %d12; "
        f"mov.b64 %d12, {b_desc}; or.b64 %d11, %d11, %d12; setp.ne.u32 %p5, 1, 0; {fence} "
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{t}.{t} {{{regs}}}, %d10, "
        f"%d11, %p5, {signs}{majors}; wgmma.commit_group.sync.aligned; {wait} "
        f"mul.wide.u32 %d5, tid, {2 * n}; add.s64 %d5, %d5, %d2; {stores}"
    )
    return kernel(body, params=3, shared=65536)


def wgmma_result(out: np.ndarray, n: int) -> np.ndarray:
    """Accumulators [128 threads, n / 2] -> [64, n]."""
    got = np.zeros((64, n))
    for thread in range(128):
        for i in range(n // 2):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
            got[row, i // 4 * 8 + thread % 4 * 2 + i % 2] = out[thread, i]
    return got


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(
    ("t", "n", "mn_a", "mn_b"),
    [
        ("f16", 64, 0, 0),
        ("bf16", 8, 0, 0),
        ("f16", 128, 1, 1),
        ("bf16", 192, 0, 1),
        ("tf32", 40, 0, 0),
        ("e4m3", 256, 0, 0),
        ("e5m2", 16, 0, 0),
    ],
)
def test_wgmma_operand_layouts(swizzle, t, n, mn_a, mn_b):
    if mn_b and n % (swizzle // 2 or 8):
        pytest.skip("an MN-major operand is whole swizzle rows wide")
    k = {"f16": 16, "bf16": 16, "tf32": 8}.get(t, 32)
    (ab, av), (bb, bv) = operand((64, k), t), operand((n, k), t)
    a, a_desc = operand_layout(ab, swizzle, bool(mn_a))
    b, b_desc = operand_layout(bb, swizzle, bool(mn_b))
    majors = f", {mn_a}, {mn_b}" if t in ("f16", "bf16") else ""
    for seed in (None, 0):
        out = np.zeros((128, n // 2), np.float32)
        launch(wgmma_kernel(n, k, t, a_desc, b_desc, majors), a, b, out, threads=128, seed=seed)
        off = {"e4m3": 1e-2, "e5m2": 1e-2}.get(t, 1e-4)  # 14 bits of a sum of 8 bits' products, see tensor_cores
        assert np.abs(wgmma_result(out, n) - (av @ bv.T + 1)).max() <= off


def test_wgmma_negates_operands():
    (ab, av), (bb, bv) = operand((64, 16), "f16"), operand((8, 16), "f16")
    (a, a_desc), (b, b_desc) = operand_layout(ab, 128, False), operand_layout(bb, 128, False)
    out = np.zeros((128, 4), np.float32)
    launch(wgmma_kernel(8, 16, "f16", a_desc, b_desc, ", 0, 0", signs="-1, 1"), a, b, out, threads=128)
    assert np.abs(wgmma_result(out, 8) - (1 - av @ bv.T)).max() <= 1e-4


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({"fence": ""}, e.AccumulatorInFlight),
        ({"wait": ""}, e.AccumulatorInFlight),
        ({"wait": "wgmma.wait_group.sync.aligned 1;"}, e.AccumulatorInFlight),
        ({"proxy": ""}, e.MissingProxyFence),
    ],
)
def test_wgmma_misuse(broken, error):
    (a, a_desc), (b, b_desc) = (operand_layout(operand((n, 16), "f16")[0], 128, False) for n in (64, 8))
    for seed in SEEDS:
        with pytest.raises(error):
            launch(
                wgmma_kernel(8, 16, "f16", a_desc, b_desc, ", 0, 0", **broken),
                a,
                b,
                np.zeros((128, 4), np.float32),
                threads=128,
                seed=seed,
            )


@pytest.mark.parametrize("more", ["", ".satfinite"])
def test_mma_of_int8_is_exact_and_saturates_when_asked(more):
    """Row 0 and column 0 of the fragments; accumulators at both ends of int32."""
    snippet = next(s for s in SNIPPETS if s.name == f"mma.k32.s8{more}")
    a, b = RNG.integers(0, 2**32, (2, BLOCK), dtype=np.uint64)
    c = np.where(np.arange(BLOCK) % 2, 2**31 - 1, 2**31).astype(np.uint64)
    found = emulate(snippet, np.stack([a, b, c], 1))[:, 0].astype(np.uint32).view(np.int32)
    words = [x.astype(np.uint32).view(np.int8).reshape(BLOCK, 4).astype(np.int64) for x in (a, b, a ^ 0x5A5A5A5A)]
    for lane in range(0, BLOCK, 4):  # lanes of one warp: row lane / 4, columns 2 * (lane % 4) and the next
        warp, row = lane // 32 * 32, lane % 32 // 4
        for member in range(4):
            column = warp + 8 * member  # lane 4 * (2 * member) holds the first of its columns
            left, right = slice(warp + 4 * row, warp + 4 * row + 4), slice(column, column + 4)
            total = (words[0][left] * words[1][right]).sum() + (words[2][left] * words[0][right]).sum()
            total += int(c[lane + member].astype(np.uint32).view(np.int32))
            want = np.clip(total, -(2**31), 2**31 - 1) if more else (total + 2**31) % 2**32 - 2**31
            assert found[lane + member] == want
