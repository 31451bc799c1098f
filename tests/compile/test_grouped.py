"""Kernels of products in groups spill nothing: large tiles, the whole epilogue, gate and up, gathered rows, scales."""

from __future__ import annotations

import pytest

from cutegemm import backend, ops
from cutegemm.choice import plan
from cutegemm.cute import FAMILIES
from cutegemm.cute.hopper import candidates
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program import known
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from tests.sass import opcodes, overlaps, spilled

CUTE, HOPPER = backend.get("cute"), arch.get("sm_90a")
FULL = Epilogue(c_dtype="bf16", bias_dtype="bf16", activation="gelu")


def gated() -> Epilogue:
    program = known.lookup(ops.swiglu, ())
    outputs = tuple(output._replace(dtype="bf16") for output in program.outputs)
    return Epilogue(custom=type(program)(program.inputs, program.nodes, outputs, program.gating))


@pytest.mark.parametrize(
    ("config", "work", "majors", "epilogue"),
    [
        ("256x192x64/coop2/c2x1/s3/serp8/zig/pdl", "ragged_m", "tn", FULL),
        ("128x208x64/pp/c1x1/s4/g8/pdl", "ragged_m", "tt", None),
        ("256x64x64/coop2/c1x1/s4/g8/swap/pdl", "ragged_m", "tt", gated()),
        ("256x192x64/coop2/c1x2/s3/serp8/zig", "ragged_k", "nt", FULL),
        ("128x192x64/pp/c2x1/s4/serp8/zig/pdl", "ragged_k", "nt", None),
        ("128x256x64/coop2/c2x1/s4/g8", "gathered_m", "tn", gated()),
        ("256x192x64/coop2/c1x1/s3/g8", "scattered_m", "tn", FULL),
        ("256x192x64/coop2/c1x2/s3/serp8/zig/streamk/pdl", "ragged_m", "tn", None),
        ("256x128x64/coop2/c2x1/s4/serp8/swap/zig/streamk/pdl", "ragged_m", "tn", None),
        ("128x256x64/coop2/c2x1/s4/serp8/zig/streamk/pdl", "ragged_m", "tn", gated()),
        pytest.param(
            "256x176x64/coop2/c2x1/s4/serp8/swap/zig/streamk/fit/pdl", "ragged_m", "tn", None, marks=pytest.mark.slow
        ),
        pytest.param(
            "256x160x64/coop2/c1x2/s4/serp8/swap/zig/fit/pdl", "ragged_m", "tn", gated(), marks=pytest.mark.slow
        ),
        pytest.param(
            "256x144x64/coop2/c1x2/s4/serp8/swap/zig/fit/pdl", "scattered_m", "tn", FULL, marks=pytest.mark.slow
        ),
        pytest.param("128x96x64/pp/c1x1/s4/serp8/swap/fit/pdl", "ragged_m", "tn", gated(), marks=pytest.mark.slow),
        pytest.param(
            "128x96x64/coop1/c1x1/s4/serp8/swap/zig/streamk/fit/pdl",
            "gathered_m",
            "tn",
            gated(),
            marks=pytest.mark.slow,
        ),
        ("64x256x64/coop1/c2x1/s4/serp8/streamk/pdl", "gathered_m", "tn", gated()),
        ("128x256x64/coop2/c1x2/s4/hilbert/zig/streamk/pdl", "scattered_m", "tt", None),
    ],
)
@pytest.mark.product(keep=1)
def test_nothing_is_spilled(config, work, majors, epilogue):
    problem = Problem.of(4096, 4096, 4096, majors=majors, batch=8, work=work, epilogue=epilogue)
    chosen = CUTE.parse(f"sm90/{config}")
    assert CUTE.check(chosen, problem, HOPPER) is None
    kernel = CUTE.build(problem.signature, chosen, HOPPER)
    assert not spilled(kernel.cubin)
    assert overlaps(kernel.cubin)


@pytest.mark.parametrize("majors", ["tn", "tt"])
@pytest.mark.parametrize("work", ["ragged_m", "scattered_m"])
@pytest.mark.parametrize(
    "program",
    [
        "",
        "(acc, x0: bf16[M, 1]) -> bf16: return acc * x0",
        "(gate: halves[0], up: halves[1], x0: bf16[M, 1]) -> bf16: return silu(gate) * up * x0",
    ],
)
@pytest.mark.parametrize("rows", [64, 128, 256, 512])
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_no_candidate_that_fits_a_group_spills(rows, program, work, majors):
    epilogue = Epilogue(custom=simplified(parse(f"def epilogue{program}"))) if program else None
    problem = Problem.of(2048, 4096, 4096, majors=majors, batch=8, work=work, epilogue=epilogue)
    listed = candidates.shortlist(problem.signature, HOPPER, rows, 4096, 4096, 8)
    fitted = {text for text, _ in listed if "/fit" in text}
    assert (len(fitted) == 0) == ("gate" in program and majors == "tt")
    for text in fitted:
        chosen = CUTE.parse(text)
        if CUTE.check(chosen, problem, HOPPER) is None:
            kernel = CUTE.build(problem.signature, chosen, HOPPER)
            assert not spilled(kernel.cubin)
            assert overlaps(kernel.cubin)


@pytest.mark.parametrize("weight", ["bf16", "fp32"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.product(keep=1)
@pytest.mark.slow  # the compiler takes 17 s
def test_what_a_mixture_stores_in_training_spills_nothing(activation, weight):
    """The choice for groups of 1024 rows is wider than others of programs with several results."""
    text = (
        f"def epilogue(gate: halves[0], up: halves[1], x0: {weight}[M, 1]) -> (bf16, bf16, bf16): "
        f"return {activation}(gate) * up * x0, gate, up"
    )
    epilogue = Epilogue(custom=simplified(parse(text)), aligns=(16, 16))
    problem = Problem.of(8192, 28672, 4096, batch=8, work="ragged_m", epilogue=epilogue)
    chosen = plan.choose(problem, arch.get("H200"), "cute").config
    assert str(chosen) in candidates._WIDE
    kernel = CUTE.build(problem.signature, chosen, arch.get("H200"))
    assert not spilled(kernel.cubin)
    assert overlaps(kernel.cubin)


OF_GRADIENTS = (
    "def epilogue(acc, x0: fp32[M, 1], x1: bf16[M, N], x2: bf16[M, N]) -> (bf16, bf16, fp32): t0 = sigmoid(x1); "
    "t1 = t0 * x1; t2 = acc * x0; return (t1 * (1.0 - t0) + t0) * (t2 * x2), t1 * t2, row_sum(t1 * x2 * acc)"
)


@pytest.mark.parametrize("work", ["ragged_m", "masked"])
@pytest.mark.product(keep=1)
def test_matrix_operands_in_groups_travel_through_the_ring(work):
    """Of the choice for the gradients of gate and up, which `moe` has."""
    aligns = Epilogue(custom=simplified(parse(OF_GRADIENTS)), aligns=(16,) * 3)
    problem = Problem.of(8192, 14336, 4096, majors="tt", batch=8, work=work, epilogue=aligns)
    chosen = plan.choose(problem, arch.get("H200"), "cute").config
    assert len(chosen.through_ring(problem.signature).operands) == 2
    kernel = CUTE.build(problem.signature, chosen, arch.get("H200"))
    assert not spilled(kernel.cubin)
    assert overlaps(kernel.cubin)


KEPT_OUTSIDE = {"simt/64x64x16/w32x64/s2/g8/r6": 72, "simt/64x128x16/w32x64/s3/g8/r3": 56}
"""Bytes that a thread of these candidates spills in groups on an A100, the second with gathered rows (40 without). On
an H200 it is none of the first, 8 of the second."""


@pytest.mark.parametrize("work", ["ragged_m", "ragged_n", "ragged_k", "masked", "gathered_m", "scattered_m"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.product(keep=1)
def test_candidates_without_tma_find_their_group_in_few_registers(work, dtype, pytestconfig):
    """A CTA keeps the tile that it has found; as many bytes are spilled at most as by dense kernels with a program.
    `make test` takes every twelfth candidate, `make nightly` all of them.
    """
    every = 1 if pytestconfig.getoption("--exhaustive") else 12
    problem = Problem.of(4096, 4096, 4096, dtype, majors="nt" if work == "ragged_k" else "tn", batch=8, work=work)
    family = "sm80" if dtype == "bf16" else "simt"
    for chosen in (CUTE.parse(text) for text in FAMILIES[family].candidates(problem.signature)[::every]):
        if CUTE.check(chosen, problem, arch.get("A100")) is None:
            count = spilled(CUTE.build(problem.signature, chosen, arch.get("A100")).cubin)
            assert count <= KEPT_OUTSIDE.get(str(chosen), 32), chosen


def scaled(work: str, recipe: str) -> Epilogue:
    """The program of operands with these scales, as `grouped_gemm` makes it."""
    a, b = ("L, " if stacked else "" for stacked in (work in ("masked", "ragged_n"), work != "ragged_n"))
    across = 1 if work == "ragged_n" else 128
    if recipe == "blocks":
        text = f"(acc, x0: fp32[{a}A, 1, 128], x1: fp32[{b}B, {across}, 128]) -> bf16: return acc"
    else:
        columns = "L, 1, N" if b else "N"
        text = f"(acc, x0: fp32[{a}M, 1], x1: fp32[{columns}]) -> bf16: return acc * x0 * x1"
    return Epilogue(custom=simplified(parse(f"def epilogue{text}")))


@pytest.mark.parametrize(("sizes", "least"), [((8192, 4096, 7168), 64), ((128, 7168, 2048), 0)])
@pytest.mark.parametrize("work", ["ragged_m", "ragged_n", "masked", "gathered_m", "scattered_m"])
@pytest.mark.parametrize(("dtype", "recipe"), [("e4m3", "blocks"), ("e4m3", "rows"), ("int8", "rows"), ("int8", None)])
@pytest.mark.product(keep=3)
def test_what_the_heuristic_takes_for_scaled_groups_spills_nothing(work, dtype, recipe, sizes, least):
    m, n, k = sizes if work != "ragged_n" else (sizes[1], sizes[0], sizes[2])
    epilogue = None if recipe is None else scaled(work, recipe)
    out_dtype = "bf16" if recipe else None
    problem = Problem.of(m, n, k, dtype, batch=8, work=work, epilogue=epilogue, out_dtype=out_dtype)
    chosen = plan.choose(problem, arch.get("H200"), "cute")
    kernel = CUTE.build(problem.signature, chosen.config, arch.get("H200"))
    assert chosen.config.accumulators >= least
    assert not spilled(kernel.cubin)
    assert any(name.startswith("IGMMA" if dtype == "int8" else "QGMMA") for name in opcodes(kernel.cubin))


@pytest.mark.parametrize("config", ["simt/64x128x16/w32x64/s3/g8/r3", "simt/32x32x64/w32x32/s3/g8/x4"])
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_groups_on_cuda_cores_load_as_dense_products_do(config):
    """A vector never ends behind a row, so that no load is cut. What they load besides is where their group ends."""
    counts = []
    for work in ("dense", "ragged_m"):
        problem = Problem.of(4096, 4096, 4096, "fp32", batch=8, work=work)
        names = opcodes(CUTE.build(problem.signature, CUTE.parse(config), HOPPER).cubin)
        counts.append(
            [sum(count for name, count in names.items() if name.startswith(kind)) for kind in ("LDG", "LDGSTS")]
        )
    (dense, copied), (grouped, also_copied) = counts
    assert also_copied == copied
    assert dense <= grouped <= dense + 16


@pytest.mark.parametrize(
    ("config", "work"),
    [
        ("128x192x128/coop2/c2x1/s4/serp8/zig/pdl", "ragged_m"),
        ("128x192x128/coop2/c1x1/s3/g8/swap", "ragged_n"),
        ("64x112x128/coop1/c1x1/s4/g8", "masked"),
        ("128x192x128/coop2/c2x1/s4/g8", "gathered_m"),
        ("128x128x128/coop2/c1x1/s4/g8/twin", "gathered_m"),
        ("64x144x128/coop1/c1x1/s4/g8/twin", "gathered_m"),
        ("256x96x128/coop2/c1x2/s3/g8/zig", "masked"),
        ("128x64x128/pp/c1x1/s4/g8/pdl", "scattered_m"),
        ("192x128x128/coop3/c1x1/s3/g8", "ragged_m"),
    ],
)
@pytest.mark.product(keep=1)
def test_the_largest_tiles_of_blocks_in_groups_spill_nothing(config, work):
    problem = Problem.of(4096, 4096, 4096, "e4m3", batch=8, work=work, epilogue=scaled(work, "blocks"))
    chosen = CUTE.parse(f"sm90/{config}")
    assert CUTE.check(chosen, problem, HOPPER) is None
    assert not spilled(CUTE.build(problem.signature, chosen, HOPPER).cubin)


@pytest.mark.parametrize(
    ("config", "work", "gating"),
    [
        ("128x192x128/coop2/c1x2/s3/g8", "ragged_m", "halves"),
        ("128x192x128/coop2/c2x1/s4/serp8/zig/pdl", "gathered_m", "pairs"),
        ("128x192x128/coop2/c1x1/s3/g8/streamk", "scattered_m", "halves"),
        ("192x96x128/coop3/c1x1/s3/g8", "ragged_m", "pairs"),
        ("64x128x128/coop1/c1x1/s6/serp8/pdl/twin", "masked", "halves"),
    ],
)
@pytest.mark.product(keep=1)
def test_gate_and_up_behind_blocks_in_groups_spill_nothing(config, work, gating):
    given = scaled(work, "blocks").program.text.partition("(acc, ")[2].partition(")")[0]
    text = f"def epilogue(gate: {gating}[0], up: {gating}[1], {given}) -> bf16: return silu(gate) * up"
    problem = Problem.of(
        4096, 4096, 4096, "e4m3", batch=8, work=work, epilogue=Epilogue(custom=simplified(parse(text)))
    )
    chosen = CUTE.parse(f"sm90/{config}")
    assert CUTE.check(chosen, problem, HOPPER) is None
    assert not spilled(CUTE.build(problem.signature, chosen, HOPPER).cubin)


def test_more_accumulators_with_blocks_in_groups_are_refused():
    problem = Problem.of(4096, 4096, 4096, "e4m3", batch=8, work="ragged_m", epilogue=scaled("ragged_m", "blocks"))
    for config, most in (("128x208x128/coop2/c1x1/s3/g8", 96), ("128x144x128/coop2/c1x1/s3/g8/twin", 64)):
        assert f"more than {most} spill" in str(CUTE.check(CUTE.parse(f"sm90/{config}"), problem, HOPPER))
