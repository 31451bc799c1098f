"""The Hopper kernel compiles without a GPU to the instructions it is made of; its configurations are checked."""

from __future__ import annotations

import re

import pytest

from cutegemm import backend
from cutegemm.cute.hopper.config import K_CLUSTERS, SPLITS, HopperConfig
from cutegemm.cute.hopper.options import OPTIONS
from cutegemm.emulator import parse_module
from cutegemm.emulator.ops.register_pool import registers_at_launch
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from tests.problems import Case
from tests.sass import opcodes, overlaps, registers, spilled
from tuning.ladder_hopper import STEPS

CUTE = backend.get("cute")
HOPPER = arch.get("sm_90a")
FULL = Epilogue(c_dtype="bf16", bias_dtype="bf16", activation="gelu")


def build(config: str, majors: str = "tn", epilogue: Epilogue | None = None, dtype: str = "bf16", **options: str):
    problem = Problem.of(4096, 4096, 4096, dtype, majors=majors, epilogue=epilogue, **options)
    chosen = CUTE.parse(config)
    assert CUTE.check(chosen, problem, HOPPER) is None
    return CUTE.build(problem.signature, chosen, HOPPER)


@pytest.mark.parametrize(
    ("config", "majors"),
    [
        ("sm90/128x256x64/coop2/c2x1/s4/hilbert", "tn"),
        ("sm90/256x128x64/coop2/c1x2/s4/serp8", "nt"),
        ("sm90/256x192x64/coop2/c2x1/s3/g8", "tn"),
        ("sm90/128x192x64/pp/c2x1/s4/g8/pdl", "tt"),
        ("sm90/128x208x64/pp/c1x1/s4/g8", "tn"),
        ("sm90/64x256x64/pp/c2x2/s4/col", "nn"),
        ("sm90/192x128x64/coop3/c1x1/s4/g8", "tn"),
        ("sm90/64x64x128/coop1/c4x1/s4/row/once", "tn"),
        ("sm90/128x16x64/coop2/c1x1/s6/g8/swap/pdl", "tn"),
        ("sm90/128x256x64/coop2/c2x1/s4/hilbert/k4", "tn"),
        ("sm90/128x256x64/coop2/c2x1x4/s4/row/pdl", "tn"),
        ("sm90/256x128x64/coop2/c1x1x2/s3/row", "tn"),
        ("sm90/128x128x64/coop2/c2x1x2/s6/row/k15/pdl", "nt"),
        ("sm90/64x144x64/coop1/c1x1x4/s8/row/swap", "tn"),
    ],
)
@pytest.mark.parametrize("epilogue", [None, FULL], ids=["plain", "full"])
@pytest.mark.product(keep=1)
def test_instructions(config, majors, epilogue):
    check_instructions(build(config, majors, epilogue))


@pytest.mark.parametrize(
    "config",
    [
        "128x256x64/coop2/c2x1/s4/g8",
        "256x192x64/coop2/c2x1/s3/g8",
        "128x192x64/pp/c2x1/s4/g8",
        "192x128x64/coop3/c1x1/s4/g8",
    ],
)
@pytest.mark.product(keep=1)
def test_the_emulator_starts_with_the_registers_that_ptxas_allocates(config):
    """setmaxnreg deals out what the machine code has at the launch, and the emulator derives that from the PTX."""
    kernel = build(f"sm90/{config}")
    (entry,) = parse_module(kernel.ptx).kernels.values()
    launched = registers_at_launch(entry)
    assert launched == registers(kernel.cubin)
    given, taken = kernel.config.registers
    assert given + kernel.config.consumers * taken <= (1 + kernel.config.consumers) * launched


def check_instructions(kernel) -> None:
    """The machine code is made of what the configuration and the signature ask for, and spills nothing."""
    names = opcodes(kernel.cubin)
    chosen, signature = kernel.config, kernel.signature
    wide = signature.dtype == "fp32"

    def some(prefix: str, part: str = "") -> bool:
        return any(name.startswith(prefix) and part in name for name in names)

    assert some("HGMMA")
    assert overlaps(kernel.cubin)
    assert f"m64n{chosen.bn}k8.f32.tf32.tf32" in kernel.ptx if wide else f"m64n{chosen.bn}k16" in kernel.ptx
    assert not some("HMMA")
    assert some("UTMALDG")
    assert some("UTMALDG", "MULTICAST") == (chosen.cluster != (1, 1))
    assert some("STAS.128") == (chosen.cluster_k > 1)
    # CTAs that only meet in shared memory never wait for their writes to be seen by the whole GPU.
    assert not some("MEMBAR", ".GPU") or chosen.splits > 1 or chosen.stream_k
    assert some("UTMASTG") == chosen.uses_tma_store(signature)
    assert some("STSM") == (chosen.uses_tma_store(signature) and signature.out_dtype != "fp32")
    staged = chosen.staged_matrix(signature) is not None or chosen.through_ring(signature) is not None
    assert some("LDSM") == (chosen.uses_tma_store(signature) and signature.out_dtype != "fp32" and staged)
    assert some("USETMAXREG") == (chosen.registers is not None)
    assert not spilled(kernel.cubin)
    assert ("griddepcontrol.wait" in kernel.ptx) == ("pdl" in chosen.options)


@pytest.mark.parametrize(
    ("config", "by_tma"),
    [
        ("sm90/256x192x64/coop2/c1x1/s3/serp8", True),
        ("sm90/128x208x64/pp/c1x1/s4/serp8", False),
        ("sm90/128x160x64/pp/c2x1/s4/serp8", True),
        ("sm90/64x256x64/coop1/c1x1/s4/serp8", True),
        ("sm90/128x64x128/coop2/c1x1/s4/serp8/swap", True),
    ],
)
@pytest.mark.parametrize("bias_axis", ["n", "m"])
@pytest.mark.product(keep=1)
def test_c_and_bias_take_the_tma_store(config, by_tma, bias_axis):
    """Up to 192 accumulators with C; the slab beyond."""
    epilogue = Epilogue("bf16", "fp32", bias_axis, "silu")
    kernel = build(config, epilogue=epilogue)
    assert kernel.config.uses_tma_store(kernel.signature) == by_tma
    check_instructions(kernel)


@pytest.mark.parametrize(
    "config",
    [
        "sm90/128x256x32/coop2/c2x1/s4/hilbert/pdl",
        "sm90/128x192x32/pp/c1x2/s4/serp8",
        "sm90/64x64x64/coop1/c1x1/s6/serp8",
        "sm90/64x16x64/coop1/c1x1/s8/serp8/swap",
        "sm90/128x128x32/coop2/c1x1/s5/serp8/k4",
        "sm90/128x128x32/coop2/c1x1x4/s6/serp8",
    ],
)
@pytest.mark.product(keep=1)
def test_tf32(config):
    kernel = build(config, dtype="fp32", precision="tf32")
    check_instructions(kernel)
    by_tma = not any(part in config for part in ("swap", "k4", "c1x1x4"))
    assert kernel.config.uses_tma_store(kernel.signature) == by_tma


@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("config", "align_d"),
    [
        ("sm90/256x208x64/coop2/c1x1/s3/serp8/slab/pdl", 16),
        ("sm90/128x208x64/pp/c1x1/s4/serp8/slab/pdl", 16),
        ("sm90/256x192x64/coop2/c1x1/s3/serp8/slab/pdl", 16),
        ("sm90/256x208x64/coop2/c1x1/s3/serp8/pdl", 2),
        ("sm90/128x128x64/coop1/c1x1/s3/serp8/swap/slab", 16),
    ],
)
@pytest.mark.product(keep=1)
def test_strips_of_the_slab_epilogue_share_their_code(config, align_d, out_dtype):
    """With C, a bias and GELU, the kernels with most accumulators: no spills, and code that stays short."""
    problem = Problem.of(4096, 4096 if align_d == 16 else 4093, 4096, "bf16", epilogue=FULL, out_dtype=out_dtype)
    kernel = CUTE.build(problem.signature, CUTE.parse(config), HOPPER)
    check_instructions(kernel)
    assert len(kernel.ptx) < 120_000


@pytest.mark.parametrize(
    ("config", "stores", "loads"),
    [
        # 16 vectors a thread, of which a split keeps 2; 8 parts of 2 vectors each; it keeps 1.
        ("sm90/128x128x64/coop2/c1x2/s7/row/k8/swap/pdl", 16 + 2, 8 * 2),
        ("sm90/128x128x64/coop2/c1x2/s7/row/k16/swap/pdl", 16 + 1, 16),
        ("sm90/128x128x64/coop2/c1x2/s7/row/k2/pdl", 16 + 8, 2 * 8),
        # The number of splits does not divide them: nothing is kept, and all lies in the workspace.
        ("sm90/128x128x64/coop2/c2x2/s7/row/k30/pdl", 16, 30),
        ("sm90/128x128x64/coop2/c2x2x2/s7/row/k14/pdl", 8, 14),
        # Little to add up stays in the L2.
        ("sm90/64x16x128/coop1/c1x2x2/s5/row/k15/swap/pdl", 1, 15),
    ],
)
@pytest.mark.product(keep=1)
def test_split_k_keeps_its_own_slice_and_discards_what_it_has_read(config, stores, loads):
    kernel = build(config)
    check_instructions(kernel)
    names = opcodes(kernel.cubin)
    assert sum(count for name, count in names.items() if name.startswith("STG.E.128")) == stores
    assert sum(count for name, count in names.items() if name.startswith("LDG.E.128")) == loads
    assert ("CCTL.E.RML2" in names) == ("discard.global.L2" in kernel.ptx) == ("64x16" not in config)


@pytest.mark.parametrize(
    "config",
    ["sm90/128x128x64/coop2/c2x1/s5/row/k32/arrival/pdl", "sm90/192x96x64/coop3/c1x1/s4/row/k2/arrival"],
)
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_split_k_in_the_order_of_arrival(config):
    """The L2 cache adds whole vectors; one part a share, which must be zero as the state words must."""
    kernel = build(config, epilogue=FULL)
    check_instructions(kernel)
    vectors = kernel.config.accumulators // 4
    assert opcodes(kernel.cubin)["REDG.E.ADD.F32"] == kernel.ptx.count("red.relaxed.gpu.global.add.v4.f32") == vectors
    problem = Problem.of(4096, 4096, 4096, "bf16")
    in_order = CUTE.parse(config.replace("/arrival", ""))
    words, parts = in_order.workspace_bytes(problem, HOPPER)
    assert kernel.config.workspace_bytes(problem, HOPPER) == (words + parts // in_order.splits, 0)
    assert not any(name.startswith("REDG") for name in opcodes(build(str(in_order), epilogue=FULL).cubin))


def test_nothing_chooses_the_order_of_arrival():
    assert not any(config.in_arrival_order for config in HopperConfig.space())
    problem = Problem.of(256, 256, 65536, "bf16")
    assert not any(config.in_arrival_order for config in HopperConfig.split_space(problem, HOPPER))
    for config, splits in CUTE.candidates(problem.signature, HOPPER):
        assert not (isinstance(config, HopperConfig) and config.in_arrival_order), splits
    assert not CUTE.default(problem, HOPPER).in_arrival_order


def test_wide_results_and_their_c():
    kernel = build("sm90/128x256x64/coop2/c2x1/s4/serp8", epilogue=FULL, out_dtype="fp32")
    assert kernel.config.uses_tma_store(kernel.signature)
    check_instructions(kernel)


@pytest.mark.parametrize("step", [step for step in STEPS if step.backend == "cute"], ids=lambda step: step.idea)
@pytest.mark.product(keep=1)
def test_the_ladder(step):
    """Every step compiles to what it teaches; none is in the tuner's space."""
    kernel = build(step.config)
    check_instructions(kernel)
    lessons = set(kernel.config.options) & {option.name for option in OPTIONS if option.lesson}
    assert not lessons & {option for config in HopperConfig.space() for option in config.options}
    assert kernel.config.threads == (128 if kernel.config.solo else 128 * (kernel.config.consumers + 1))


@pytest.mark.parametrize(
    "text",
    [
        "sm90/128x256x64/coop2/c2x1/s4/hilbert",
        "sm90/128x192x64/pp/c1x2/s4/g8/pdl",
        "sm90/64x64x64/coop1/c1x1/s8/serp3/once/slab",
        "sm90/64x16x64/coop1/c1x1/s8/row/swap/pdl",
        "sm90/128x128x64/coop2/c1x1/s5/hilbert/k8/pdl",
        "sm90/128x128x64/coop2/c2x1x4/s5/hilbert",
        "sm90/128x16x64/coop2/c1x2x2/s5/row/k15/swap/pdl",
        "sm90/64x16x128/coop1/c1x1/s4/row/swap/once/skew/pdl",
        "sm90/64x16x64/coop1/c1x1/s5/row/k32/swap/arrival/pdl",
    ],
)
def test_the_text_form_is_read_back(text):
    assert str(HopperConfig.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "sm90/128x256x64/coop4/c2x1/s4/hilbert",
        "sm90/128x256x64/coop2/c2x1/s4/zigzag",
        "sm90/128x256/coop2/c2x1/s4/row",
        "sm90/128x256x64/coop2/c2x1/s4/row/twice",
        "sm90/128x256x64/coop2/c2x1/s4/row/once/once",
        "sm90/128x256x64/coop2/c2x1x/s4/row",
        "sm90/128x256x64/coop2/c2x1x2x2/s4/row",
    ],
)
def test_text_that_is_no_configuration(text):
    with pytest.raises(ValueError, match="accepted"):
        CUTE.parse(text)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("sm90/96x128x64/coop1/c1x1/s4/row", "bm is 96"),
        ("sm90/64x128x64/coop2/c1x1/s4/row", "bm is 64"),
        ("sm90/128x264x64/coop2/c1x1/s4/row", "bn is 264"),
        ("sm90/128x40x64/coop2/c1x1/s4/row", "bn is 40"),
        ("sm90/128x128x48/coop2/c1x1/s4/row", "bk is 48"),
        ("sm90/128x128x64/coop2/c3x1/s4/row", "cluster is"),
        ("sm90/64x16x64/coop1/c4x1/s4/row", "whole 8 rows"),
        ("sm90/128x256x64/pp/c1x1/s4/row", "256 accumulators"),
        ("sm90/128x256x64/coop2/c1x1/s5/row", "B of shared memory"),
        ("sm90/128x128x64/coop2/c1x1/s1/row", "stages is 1"),
        ("sm90/128x128x64/coop2/c1x1/s4/row/k33", "33 splits"),
        ("sm90/128x128x64/pp/c1x1/s4/row/k2", "1 in ping-pong"),
        ("sm90/128x128x64/coop2/c1x1/s4/row/arrival", "accepted with 2 to 32"),
        ("sm90/128x128x64/coop2/c1x1/s4/row/streamk/arrival", "accepted with 2 to 32"),
        ("sm90/128x128x64/coop2/c1x1/s4/row/zig/skew", "one of them"),
        ("sm90/64x64x64/solo/c1x1/s1/row/skew", "none in solo"),
        ("sm90/128x128x64/coop2/c1x1/s4/row/once/zig", "accepted without once"),
        ("sm90/128x128x64/coop2/c1x1x2/s4/row/zig", "accepted without once and clusters along K"),
        ("sm90/64x64x64/solo/c2x1/s1/row", "lessons for clusters of one CTA"),
        ("sm90/64x64x64/coop1/c1x1/s4/row/k2/fat", "lessons for clusters of one CTA"),
        ("sm90/64x64x64/solo/c1x1x2/s1/row", "lessons for clusters of one CTA"),
        ("sm90/128x128x64/coop2/c2x1x3/s4/row", "6 CTAs, 3 along K; accepted are up to 8, and 1, 2, 4, 8 along K"),
        ("sm90/128x128x64/coop2/c2x2x4/s4/row", "16 CTAs, 4 along K"),
        ("sm90/128x128x64/coop2/c1x1x0/s4/row", "has a 0; every number of a configuration is at least 1"),
        ("sm90/128x128x64/pp/c1x1x2/s4/row", "cooperative schedule"),
        ("sm90/256x192x64/coop2/c1x1x2/s3/row", "more than 128 spill"),
        ("sm90/128x128x64/coop2/c1x1x2/s4/row/streamk", "no streamk"),
        ("sm90/256x128x32/coop2/c1x1x4/s3/row", "98304 B of a tile's sums .* ring of 73728 B"),
    ],
)
def test_invalid_configurations(config, reason):
    problem = Problem.of(4096, 4096, 4096, "bf16")
    why = CUTE.check(CUTE.parse(config), problem, HOPPER)
    assert why is not None
    assert re.search(reason, why)


def test_what_the_kernel_does_not_take():
    config = CUTE.parse("sm90/128x128x64/coop2/c1x1/s4/row")
    assert "capability 9.0" in CUTE.check(config, Problem.of(256, 256, 256, "bf16"), arch.get("A100"))
    assert "fp32 as tf32, fp32 as tf32x3" in CUTE.check(config, Problem.of(256, 256, 256, "fp32"), HOPPER)
    for majors, name in (("nt", "A is M-major"), ("tt", "B is N-major")):
        problem = Problem.of(256, 256, 256, "fp32", majors=majors, precision="tf32")
        assert f"K-major only; {name}" in CUTE.check(config, problem, HOPPER)
        assert f"not sm90, because WGMMA takes tf32 operands K-major only; {name}" in CUTE.passed_over(problem, HOPPER)
        assert CUTE.default(problem, HOPPER).family == "sm80"
    k_major = Problem.of(256, 256, 256, "fp32", precision="tf32")
    assert CUTE.default(k_major, HOPPER).family == "sm90"
    assert CUTE.passed_over(k_major, HOPPER) is None
    assert "TMA cannot load A" in CUTE.check(config, Problem.of(256, 256, 100, "bf16"), HOPPER)
    assert "TMA cannot load B" in CUTE.check(config, Problem.of(256, 100, 256, "bf16", majors="tt"), HOPPER)


def test_the_space_holds_valid_configurations_of_every_kind():
    problem = Problem.of(4096, 4096, 4096, "bf16")
    valid = [c for c in HopperConfig.space() if CUTE.check(c, problem, HOPPER) is None]
    assert len(valid) > 1000
    splits = [c for c in HopperConfig.split_space(problem, HOPPER) if CUTE.check(c, problem, HOPPER) is None]
    assert {c.splits for c in splits} == set(SPLITS)  # the tiles fill the GPU: no number does that better
    few = Problem.of(256, 256, 65536, "bf16")
    wanted = "sm90/64x128x64/coop1/c2x1/s9/row/k16/pdl", "sm90/128x128x64/coop2/c2x1x2/s7/row/k15/pdl"
    assert {str(c) for c in HopperConfig.split_space(few, HOPPER)} >= set(wanted)
    assert {c.schedule for c in valid} == {"coop1", "coop2", "coop3", "pp"}
    assert {c.bn for c in valid} >= {16, 32, 64, 128, 160, 192, 208, 224, 256}
    assert {(*c.cluster, c.cluster_k) for c in valid} >= {(1, 1, 1), (2, 1, 1), *K_CLUSTERS}
    assert all(HopperConfig.parse(str(c)) == c for c in valid[::97])


def test_a_cluster_along_k_computes_one_tile_and_leaves_less_in_the_workspace():
    problem = Problem.of(256, 256, 65536, "bf16")
    alone, paired = (CUTE.parse(f"sm90/128x128x64/coop2/c2x1{k}/s6/row/k15") for k in ("", "x2"))
    assert CUTE.parse("sm90/128x128x64/coop2/c2x1x1/s6/row/k15") == alone
    assert (alone.cluster_ctas, paired.cluster_ctas, paired.parts) == (2, 4, 30)
    assert alone.persistent
    assert not paired.persistent
    assert alone.works(problem) == paired.works(problem) == 30
    assert paired.launch_arguments(problem, HOPPER) == {"clusters": 30}
    # A pair's CTAs leave half of a tile each: the words double, the parts do not.
    many = Problem.of(1024, 1024, 65536, "bf16")
    words, parts = alone.workspace_bytes(many, HOPPER)
    assert paired.workspace_bytes(many, HOPPER) == (2 * words, parts)
    # Few words take a line of the L2 cache all the same, so that parts begin on one.
    assert alone.workspace_bytes(problem, HOPPER)[0] == paired.workspace_bytes(problem, HOPPER)[0] == 128
    whole = CUTE.parse("sm90/128x128x64/coop2/c2x1x2/s6/row")
    assert whole.launch_arguments(problem, HOPPER) == {"clusters": 2}
    assert whole.workspace_bytes(problem, HOPPER) == (0, 0)


@pytest.mark.parametrize(("dtype", "precision", "step"), [("bf16", None, 8), ("fp16", None, 8), ("fp32", "tf32", 4)])
def test_contiguous_extents_are_multiples_of_16_bytes(dtype, precision, step):
    """K is contiguous here. TMA refuses a ragged one even where rows begin at multiples of 16 bytes."""
    chosen = CUTE.parse("sm90/64x64x32/coop1/c1x1/s3/row")

    def refused(k: int, pad: int) -> str | None:
        problem = Case.random(64, 64, k, dtype, seed=1, pad=pad, precision=precision).problem()
        assert problem.a.stride_row % step == 0
        return CUTE.check(chosen, problem, HOPPER)

    assert refused(13 * step, 0) is None
    assert refused(13 * step, step) is None
    assert "16" in refused(13 * step - 1, 1)
    assert "16" in refused(13 * step - 2, 2)


@pytest.mark.parametrize(
    ("config", "majors"),
    [
        ("sm90/128x256x64/coop2/c2x1/s4/hilbert", "tn"),
        ("sm90/128x192x64/pp/c2x1/s4/g8/pdl", "tt"),
        ("sm90/256x96x64/pp/c1x2/s4/row/swap", "tn"),
        ("sm90/128x208x64/pp/c1x1/s4/g8", "tn"),  # 104 columns of D: the slabs
    ],
)
@pytest.mark.product(keep=1)
def test_gate_and_up_are_loaded_and_stored_by_tma(config, majors):
    text = "def epilogue(gate: halves[0], up: halves[1]) -> bf16: return silu(gate) * up"
    kernel = build(config, majors, Epilogue(custom=simplified(parse(text))))
    check_instructions(kernel)
    assert kernel.config.uses_tma_store(kernel.signature) == ("208" not in config)
    # One load an operand and stage: the halves of B are a dimension of its box. Row-major, halves of 96 columns are
    # three boxes each.
    loads = kernel.ptx.count("cp.async.bulk.tensor.") - kernel.ptx.count(".global.shared::cta")
    assert loads == (2 if majors == "tn" else 7)
