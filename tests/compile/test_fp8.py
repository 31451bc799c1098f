"""Kernels for fp8 and int8 compile to their WGMMA and spill nothing, up to the limits of the rule of validity."""

from __future__ import annotations

import re

import pytest

from cutegemm import backend
from cutegemm.cute.hopper import promotion
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from tests.sass import instructions, opcodes, registers, spilled

CUTE = backend.get("cute")
HOPPER = arch.get("sm_90a")
FULL = Epilogue(c_dtype="bf16", bias_dtype="bf16", activation="gelu")


def blocks(down: int = 1, across: int = 128) -> Epilogue:
    scales = f"x0: fp32[A, {down}, 128], x1: fp32[B, {across}, 128]"
    text = f"def epilogue(acc, {scales}, x2: bf16[N]) -> bf16: return gelu(acc + x2)"
    return Epilogue(custom=simplified(parse(text)))


def gated(gating: str = "halves", across: int = 128, out_dtype: str = "bf16") -> Epilogue:
    given = f"gate: {gating}[0], up: {gating}[1], x0: fp32[A, 1, 128], x1: fp32[B, {across}, 128]"
    return Epilogue(custom=simplified(parse(f"def epilogue({given}) -> {out_dtype}: return silu(gate) * up")))


def pairs(out_dtype: str = "bf16") -> Epilogue:
    """Without scales of blocks, which swapped operands do not take."""
    text = f"def epilogue(gate: pairs[0], up: pairs[1], x0: fp32[M, 1]) -> {out_dtype}: return silu(gate * x0) * up"
    return Epilogue(custom=simplified(parse(text)))


def build(config: str, dtype: str = "e4m3", **given):
    problem = Problem.of(4096, 4096, 4096, dtype, **given)
    chosen = CUTE.parse(f"sm90/{config}")
    assert CUTE.check(chosen, problem, HOPPER) is None
    return CUTE.build(problem.signature, chosen, HOPPER)


@pytest.mark.parametrize(
    ("config", "given"),
    [
        # The largest tiles that the rule allows.
        ("128x224x128/coop2/c2x1/s3/serp8/zig/pdl", {"epilogue": FULL}),
        ("192x128x128/coop3/c2x1/s3/g8/streamk/slab", {"epilogue": FULL, "b_dtype": "e5m2"}),
        ("128x192x128/coop2/c2x1/s4/g8/k4", {}),
        ("128x192x128/coop2/c1x1x2/s4/g8", {"epilogue": FULL, "dtype": "e5m2"}),
        ("64x224x128/pp/c1x2/s3/g8", {"out_dtype": "fp32"}),
        ("64x160x128/coop1/c1x1/s4/g8", {"epilogue": blocks()}),
        ("64x224x128/coop1/c1x1/s4/g8", {"epilogue": blocks(across=1)}),
        ("128x208x128/coop2/c2x1/s4/g8/zig/pdl", {"epilogue": blocks()}),
        ("256x96x128/coop2/c1x2/s3/g8/zig/pdl", {"epilogue": blocks()}),
        ("192x128x128/coop3/c1x1/s3/g8", {"epilogue": blocks(across=1)}),
        ("128x128x128/coop2/c1x2/s5/g8/swap", {"epilogue": blocks()}),
        ("64x128x128/pp/c1x1/s5/serp8/pdl", {"epilogue": blocks(across=1)}),
        ("128x64x128/pp/c1x1/s5/serp8/pdl", {"epilogue": blocks()}),
        # Twins.
        ("128x128x128/coop2/c2x1/s4/serp8/zig/pdl/twin", {"epilogue": FULL}),
        ("64x144x128/coop1/c1x1/s4/g8/twin", {"epilogue": blocks()}),
        ("192x80x128/coop3/c1x1/s4/g8/twin", {"epilogue": blocks()}),
        # Halves.
        ("128x256x128/coop2/c2x1/s4/serp8/zig/pdl/half", {"epilogue": FULL}),
        ("256x128x128/coop2/c1x2/s4/serp8/zig/pdl/half", {"epilogue": blocks()}),
        ("128x256x128/coop2/c2x1/s4/serp8/zig/streamk/pdl/half", {"epilogue": blocks(), "b_dtype": "e5m2"}),
        ("128x224x128/coop2/c1x1/s3/serp8/streamk/slab/half", {"epilogue": blocks()}),
        ("256x128x128/coop2/c1x1/s3/g8/k4/half", {"dtype": "int8", "epilogue": blocks()}),
        ("128x256x128/coop2/c1x1/s3/g8/k3/half", {"out_dtype": "fp32"}),
        # Without promotion.
        ("128x256x128/coop2/c2x1/s4/serp8/zig/pdl", {"precision": "fast", "epilogue": FULL}),
        ("128x256x128/coop2/c2x1/s3/g8/streamk", {"dtype": "int8"}),
        ("128x192x128/pp/c2x1/s4/g8", {"dtype": "int8", "out_dtype": "int8", "epilogue": FULL}),
    ],
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_no_spills(config, given):
    kernel = build(config, **given)
    names, signature = opcodes(kernel.cubin), kernel.signature
    assert not spilled(kernel.cubin)
    assert registers(kernel.cubin) * kernel.config.threads <= HOPPER.registers_per_sm
    assert any(name.startswith("IGMMA" if signature.dtype == "int8" else "QGMMA") for name in names)
    left, right = ("s8" if name == "int8" else name for name in signature.dtypes)
    sums = "satfinite.s32" if signature.dtype == "int8" else "f32"
    half = "half" in config.split("/")
    of_columns = half and kernel.config.group_rows == 64
    columns = kernel.config.bn // 2 if of_columns else kernel.config.bn
    assert f"m64n{columns}k32.{sums}.{left}.{right}" in kernel.ptx
    # The sums of an interval overwrite those of the one before: one loop, no second copy of the WGMMA; of twins one for
    # each, behind one before the loop and in front of one for an odd k tile. Halves of columns are two of each.
    issued = len(re.findall(r"wgmma\.mma_async\.", kernel.ptx))
    steps = kernel.config.bk // 32 * (kernel.config.group_rows // 64)
    assert issued == steps * (4 if "twin" in config else 1 + of_columns if signature.promotion else 2)


@pytest.mark.parametrize(
    ("config", "given", "stores"),
    [
        ("256x128x128/coop2/c1x2/s4/serp8/zig/pdl/half", {"out_dtype": "e4m3"}, {"STS.U16": 64}),
        ("128x256x128/coop2/c2x1/s4/serp8/zig/pdl/half", {"epilogue": blocks(), "out_dtype": "e5m2"}, {"STS.U16": 64}),
        ("64x64x128/coop1/c1x1/s8/serp8/swap/pdl", {"out_dtype": "e4m3", "epilogue": FULL}, {"STS.U8": 32}),
        ("128x192x128/pp/c2x1/s4/g8", {"dtype": "int8", "out_dtype": "int8"}, {"STS.U16": 96}),
        ("128x192x128/coop2/c2x1/s4/serp8/zig/pdl", {"epilogue": gated("pairs")}, {"STS.U16": 48}),
        ("128x192x128/coop2/c2x1/s4/serp8/zig/pdl", {"epilogue": gated("pairs", out_dtype="e4m3"), "out_dtype": "e4m3"},
         {"STS.U8": 48}),
        ("128x64x128/coop2/c1x1/s4/serp8/swap/pdl", {"epilogue": pairs()}, {"STS.U16": 16}),
        ("128x64x128/pp/c1x1/s4/serp8/swap/pdl", {"epilogue": pairs("e5m2"), "out_dtype": "e5m2"}, {"STS.U8": 32}),
    ],
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_results_that_plain_stores_bring_to_tma(config, given, stores):
    """A store for each two neighbours, or for each result where a thread has no neighbours of it."""
    kernel = build(config, **given)
    names = opcodes(kernel.cubin)
    assert kernel.config.uses_tma_store(kernel.signature)
    assert not spilled(kernel.cubin)
    assert any(name.startswith("UTMASTG") for name in names)
    assert {name: count for name, count in names.items() if name.startswith(("STS.U", "STSM"))} == stores


@pytest.mark.slow
def test_halves_wait_for_little_between_their_products():
    """Where a warpgroup waits between two WGMMA, the tensor cores do. The next stage's barrier is asked, without
    waiting, before the additions, and the next tile's first scales are loaded before the epilogue.
    """
    code = [line.split() for line in instructions(build("256x128x128/coop2/c1x2/s4/serp8/zig/pdl/half",
                                                        epilogue=blocks()).cubin)]  # fmt: skip
    names = [next(word for word in line if not word.startswith("@")) for line in code]
    asked = [i for i, line in enumerate(code) if line[0] == "SYNCS.PHASECHK.TRANS64"]
    after = [names[i : i + 80] for i in asked]
    assert any(each[: each.index("BRA")].count("FFMA") >= 16 for each in after if "BRA" in each)
    last = max(i for i, name in enumerate(names) if name.startswith("QGMMA"))
    stored = next(i for i in range(last, len(names)) if names[i].startswith(("STSM", "STS")))
    assert any(name.startswith("LDG") for name in names[last:stored])


@pytest.mark.parametrize(
    ("config", "epilogue", "reason"),
    [
        ("128x240x128/coop2/c1x1/s3/g8", None, "120 accumulators a thread and as many partial sums"),
        ("128x128x256/coop2/c1x1/s2/g8", None, "need a k tile that divides 128"),
        ("64x64x128/solo/c1x1/s2/g8", None, "adds up all of K in the tensor cores"),
        ("128x128x64/coop2/c1x1/s4/g8", blocks(), "need a k tile of 128"),
        ("128x224x128/coop2/c1x1/s3/g8", blocks(), "more than 104 spill"),
        ("128x160x128/coop2/c1x1/s3/g8/twin", None, "more than 64 spill"),
        ("64x64x64/coop1/c1x1/s3/g8/twin", None, "twin is for sums promoted after every k tile"),
        ("128x224x128/coop2/c1x1/s3/g8", blocks(across=1), "more than 96 spill"),
        ("256x144x128/coop2/c1x1/s3/g8/half", None, "more than 128 spill"),
        ("128x128x64/coop2/c1x1/s3/g8/half", None, "half is for sums promoted after every k tile"),
        ("128x144x128/coop2/c1x1/s3/g8/half", None, "need a multiple of 32"),
        ("128x128x128/coop1/c1x1/s3/g8/half", None, "half is for promoted sums of a tile that two warpgroups share"),
        ("128x128x128/coop2/c1x1/s3/g8/half", blocks(across=1), "half has scales of 1 x 128 of A and of 128 x 128"),
        ("128x128x128/coop2/c1x1/s3/g8/half", blocks(128, 1), "half has scales of 1 x 128 of A and of 128 x 128"),
        ("128x208x128/coop2/c1x1/s3/g8", gated(), "more than 96 spill"),
        ("128x64x128/coop2/c1x1/s3/g8/k2", gated(), "gate and up are finished together"),
        ("128x64x128/coop2/c1x1x2/s3/g8", gated("pairs"), "these lie in pairs"),
    ],
)
def test_what_the_rule_refuses(config, epilogue, reason):
    problem = Problem.of(4096, 4096, 4096, "e4m3", epilogue=epilogue)
    assert reason in str(CUTE.check(CUTE.parse(f"sm90/{config}"), problem, HOPPER))


@pytest.mark.parametrize("f", [2048, 2049])
@pytest.mark.parametrize(
    ("config", "gating", "across"),
    [
        # What the heuristic takes, and the largest tiles that the rule allows.
        ("128x192x128/coop2/c2x1/s4/serp8/zig/pdl", "halves", 128),
        ("128x128x128/coop2/c1x1/s5/serp8/pdl/twin", "halves", 128),
        ("64x64x128/coop1/c1x1/s8/serp8/pdl/twin", "halves", 128),
        ("256x96x128/coop2/c1x2/s3/g8/zig/pdl", "halves", 128),
        ("192x128x128/coop3/c1x1/s3/g8", "halves", 128),
        ("64x208x128/coop1/c1x1/s4/g8", "halves", 128),
        ("256x96x128/coop2/c1x1/s3/g8/swap", "halves", 128),
        ("256x64x128/coop2/c1x1/s3/g8/swap/twin", "halves", 128),
        ("64x128x128/pp/c1x1/s5/serp8/pdl", "halves", 128),
        ("128x192x128/coop2/c2x1/s4/serp8/zig/pdl", "halves", 1),
        ("256x16x128/coop2/c1x2/s3/row/swap", "halves", 1),
        ("128x16x128/coop1/c1x1/s5/row/swap/pdl/twin", "halves", 128),
        ("128x64x128/coop1/c1x1/s6/serp8/swap/pdl/twin", "halves", 128),
        ("128x192x128/coop2/c2x1/s4/serp8/zig/pdl", "pairs", 128),
        ("128x128x128/coop2/c1x1/s5/serp8/pdl/twin", "pairs", 128),
        ("128x64x128/coop2/c1x1/s7/serp8/pdl/twin", "pairs", 1),
    ],
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_gate_and_up_behind_scales_of_blocks_spill_nothing(config, gating, across, f):
    """An odd F has a scale for each column, and results that no TMA stores."""
    problem = Problem.of(4096, 2 * f, 4096, "e4m3", epilogue=gated(gating, across))
    chosen = CUTE.parse(f"sm90/{config}")
    assert CUTE.check(chosen, problem, HOPPER) is None
    assert not spilled(CUTE.build(problem.signature, chosen, HOPPER).cubin)


@pytest.mark.parametrize(
    ("f", "tile", "counts"),
    [
        (2048, "128x128", (128, 2)),  # 64 columns of gate lie in one block of 128 wherever they begin, and 64 of up
        (2112, "128x128", (128, 2)),
        (2080, "128x128", (128, 4)),  # up's may begin 32 columns before the end of a block
        (2048, "128x192", (128, 6)),
        (2056, "128x192", (128, 24)),
        (2052, "128x192", (128, 48)),
        (2050, "128x192", (128, 96)),
        (2049, "128x192", (128, 192)),
        (2048, "128x64/swap", (2, 64)),
        (2112, "256x64/swap", (4, 64)),
        (2080, "128x64/swap", (16, 64)),  # within the 64 rows of a WGMMA
        (2050, "128x64/swap", (64, 64)),
    ],
)
def test_numbers_of_a_stage_for_scales_of_gate_and_up(f, tile, counts):
    """One for so many columns of gate, or of up, as lie in one block wherever the tile does; or rows, if swapped."""
    tile, _, swap = tile.partition("/")
    config = CUTE.parse(f"sm90/{tile}x128/coop1/c1x1/s3/g8{'/swap' if swap else ''}")
    problem = Problem.of(64, 2 * f, 256, "e4m3", epilogue=gated())
    assert promotion.scale_counts(config, problem.signature) == counts
    each = Problem.of(64, 2 * f, 256, "e4m3", epilogue=gated(across=1), out_dtype="bf16")
    whole = config.bm if swap else config.bn
    assert promotion.scale_counts(config, each.signature) == ((whole, config.bn) if swap else (config.bm, whole))


@pytest.mark.parametrize(
    "config",
    [
        "256x112x128/coop2/c2x1/s4/serp8/zig/pdl",
        "128x224x128/coop2/c2x1/s3/serp8/streamk",
        "128x256x128/coop2/c1x2/s4/serp8/zig/pdl",
        "128x256x128/coop2/c1x2/s4/serp16/zig/streamk/pdl",
        "128x256x128/coop2/c1x1/s4/serp8/zig/pdl",
    ],
)
@pytest.mark.parametrize("work", ["ragged_m", "ragged_n", "gathered_m", "scattered_m", "masked"])
@pytest.mark.parametrize(
    "epilogue", [None, blocks(), gated("pairs"), gated()], ids=["plain", "blocks", "pairs", "halves"]
)
@pytest.mark.product(keep=1)
def test_halves_in_groups_spill_nothing(config, work, epilogue):
    if work == "ragged_n" and epilogue is not None and epilogue.gating:
        return  # groups of columns have no gate and up
    if epilogue is None and "128x256" not in config:
        return  # without scales, and without pdl, that tile of stream-K spills 16 bytes
    problem = Problem.of(
        4096, 4096, 4096, "e4m3", epilogue=epilogue or Epilogue(), work=work, batch=4, out_dtype="bf16"
    )
    chosen = CUTE.parse(f"sm90/{config}/half")
    refused = CUTE.check(chosen, problem, HOPPER)
    if work == "gathered_m" and ("c1x2" in config or "streamk" in config):
        assert "gathers" in str(refused)
    elif work in ("ragged_n", "scattered_m") and "256x128" in config:
        assert "more than 112 spill" in str(refused)
    else:
        assert refused is None
        assert not spilled(CUTE.build(problem.signature, chosen, HOPPER).cubin)


@pytest.mark.parametrize("config", ["256x128x128/coop2/c1x2/s4/serp8/zig/pdl", "128x256x128/coop2/c2x1/s3/serp8/pdl"])
@pytest.mark.product(keep=1)
def test_halves_with_neighbouring_gate_and_up_spill_nothing(config):
    assert not spilled(build(f"{config}/half", epilogue=gated("pairs")).cubin)


def test_halves_wait_once_each_and_add_every_sum_once():
    """ptxas makes no WGMMA of a half wait for another, and copies no partial sums before it adds them."""
    text = "def epilogue(acc, x0: fp32[A, 1, 128], x1: fp32[B, 128, 128]) -> bf16: return acc"
    given = {"epilogue": Epilogue(custom=simplified(parse(text)))}
    found = opcodes(build("256x128x128/coop2/c1x2/s4/serp8/zig/pdl/half", **given).cubin)
    for name, count in (("QGMMA", 8), ("WARPGROUP.DEPBAR", 2), ("FFMA", 128), ("FMUL", 4), ("SHFL.IDX", 4), ("MOV", 0)):
        assert sum(n for opcode, n in found.items() if opcode.startswith(name)) == count, name


def test_no_stage_has_scales_with_half():
    """So that four stages fit beside two staging buffers, and the ring's barriers wait for TMA alone."""
    plain, half = (CUTE.parse(f"sm90/128x128x128/coop2/c1x1/s4/g8{more}") for more in ("", "/half"))
    signature = Problem.of(4096, 4096, 4096, "e4m3", epilogue=blocks()).signature
    assert promotion.shared_bytes(plain, signature) == 4 * (128 + 4) * 4
    assert promotion.shared_bytes(half, signature) == promotion.copies(half, signature) == 0
    assert promotion.copies(plain, signature) > 0


def test_int8_is_not_added_by_the_cache():
    problem = Problem.of(4096, 4096, 4096, "int8")
    why = CUTE.check(CUTE.parse("sm90/128x128x128/coop2/c1x1/s4/g8/k4/arrival"), problem, HOPPER)
    assert "sums of int8 products are int32" in why


def test_old_signatures_have_no_promotion():
    for dtype, precision in (("bf16", "ieee"), ("fp32", "tf32"), ("e4m3", "fast"), ("int8", "ieee")):
        signature = Problem.of(64, 64, 64, dtype, precision=precision).signature
        config = CUTE.parse("sm90/128x128x64/coop2/c1x1/s4/g8")
        assert promotion.interval(config, signature) == 0
        assert promotion.registers(config, signature) == config.registers
