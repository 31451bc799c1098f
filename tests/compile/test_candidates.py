"""The configurations that the heuristic may choose compile, without spills and within their registers."""

from __future__ import annotations

from itertools import product

import pytest

from cutegemm import backend
from cutegemm.choice import heuristics
from cutegemm.choice.footprint import resident
from cutegemm.cute import FAMILIES
from cutegemm.cute.ampere import candidates as ampere_candidates
from cutegemm.cute.hopper import candidates as hopper_candidates
from cutegemm.cute.hopper import sized
from cutegemm.cute.hopper.config import SWAPPED_TILES
from cutegemm.cute.simt import registers as simt_registers
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from tests.problems import MAJORS
from tests.sass import registers, spilled
from tests.unit.scaled import of_blocks, scaled_problem

CUTE = backend.get("cute")
HOPPER = arch.get("sm_90a")
TF32 = Problem.of(64, 64, 64, "fp32", precision="tf32").signature
SIGNATURES = {
    "sm90": Problem.of(64, 64, 64, "bf16").signature,
    "sm90 tf32": TF32,
    "sm90 rows": scaled_problem("rows", 64, 64, 64).signature,
    "sm90 blocks": scaled_problem("blocks", 64, 64, 64).signature,
    "sm90 blocks of both": of_blocks("a1", "b1"),
    "sm90 blocks the other way": of_blocks("a128", "b1"),
    "sm90 batches of blocks": of_blocks("a1", "b128", 2),
    "sm80": Problem.of(64, 64, 64, "fp16").signature,
    "sm80 tf32": TF32,
    "simt": Problem.of(64, 64, 64, "fp32").signature,
    "vector": Problem.of(64, 64, 64, "fp32").signature,
    "vector narrow": Problem.of(66, 66, 66, "fp32").signature,
    "vector nt": Problem.of(64, 64, 64, "fp32", majors="nt").signature,
}
LISTED = [
    (kind, text) for kind, signature in SIGNATURES.items() for text in FAMILIES[kind.split()[0]].candidates(signature)
]


def _of_each_tile():
    """One of the listed configurations for each that share out registers alike: tile, warpgroups, role of operands; of
    promoted sums, which leave few registers, all. Those of `simt` have tests of their own."""
    found = {}
    for kind, text in LISTED:
        if kind == "simt":
            continue
        config = CUTE.parse(text)
        alike = (config.bm, config.bn, config.schedule, config.swapped, config.cluster_k > 1, config.options) \
            if config.family == "sm90" and SIGNATURES[kind].promotion is None else text  # fmt: skip
        found.setdefault((kind, alike), text)
    return [(kind, text) for (kind, _), text in found.items()]


@pytest.mark.parametrize(("kind", "text"), _of_each_tile())
@pytest.mark.product(keep=1)
def test_no_spills(kind, text):
    signature, config = SIGNATURES[kind], CUTE.parse(text)
    assert config.why_invalid(signature, HOPPER) is None
    kernel = CUTE.build(signature, config, HOPPER)
    assert not spilled(kernel.cubin)
    assert registers(kernel.cubin) * config.threads <= HOPPER.registers_per_sm


def _odd_eights():
    """Of each swapped tile what the rule of validity accepts of these."""
    rests = ("c1x1/s3/serp8", "c1x2/s3/serp8", "c1x1x4/s3/row", "c1x1/s3/row/k5")
    for (bm, bn), schedule, rest in product(SWAPPED_TILES, ("coop1", "coop2", "coop3", "pp"), rests):
        text = f"sm90/{bm}x{bn}x64/{schedule}/{rest}/swap/pdl"
        if CUTE.parse(text).why_invalid(SIGNATURES["sm90"], HOPPER) is None:
            yield text


@pytest.mark.parametrize("text", list(_odd_eights()))
@pytest.mark.product(keep=1)
def test_swapped_tiles_with_odd_eights_of_columns_do_not_spill(text):
    assert not spilled(CUTE.build(SIGNATURES["sm90"], CUTE.parse(text), HOPPER).cubin)


def _sized():
    """Of each width of tiles made for the sizes, in each schedule and order of operands, what is valid."""
    for kind in ("sm90", "sm90 rows"):
        tiles = sized._tiles_of(SIGNATURES[kind], HOPPER)
        step = sized.HALF_STEP if kind == "sm90" else sized.WHOLE_STEP
        for bm, bn, swapped in product(sized.SCHEDULES, range(sized.NARROWEST, sized.WIDEST + 1, step), (False, True)):
            for schedule in sized.SCHEDULES[bm]:
                config = tiles.configuration((bm, bn, schedule, (1, 1), swapped))
                if config is not None:
                    yield kind, str(config)


@pytest.mark.parametrize(("kind", "text"), list(_sized()))
@pytest.mark.product(keep=1)
def test_tiles_made_for_sizes_do_not_spill(kind, text):
    assert not spilled(CUTE.build(SIGNATURES[kind], CUTE.parse(text), HOPPER).cubin)


def _listed_registers():
    """Candidates whose registers are listed, in each order of operands, aligned or not, with and without splits."""
    for majors, size, splits in product(MAJORS, (64, 65), ("", "/k5")):
        signature = Problem.of(size, size, size, "fp32", majors=majors).signature
        for text in FAMILIES["simt"].candidates(signature):
            if simt_registers.known(CUTE.parse(text), signature) is not None:
                yield text + splits, majors, size


@pytest.mark.parametrize(("text", "majors", "size"), list(_listed_registers()))
@pytest.mark.product(keep=1)
def test_an_sm_holds_as_many_ctas_as_the_listed_registers_say(text, majors, size):
    signature, config = Problem.of(size, size, size, "fp32", majors=majors).signature, CUTE.parse(text)
    if config.why_invalid(signature, HOPPER) is not None:
        pytest.skip("not valid where rows are not aligned")
    taken = registers(CUTE.build(signature, config, HOPPER).cubin)
    ctas = resident(HOPPER, config.smem_bytes(signature), config.threads, taken)
    listed = CUTE.footprint(config, signature, HOPPER).ctas
    # Of two, some numbers of parts take far fewer registers than others: the table has the more.
    varies = ("simt/32x64x16/w16x32/s3/g8/k", "simt/32x64x32/w32x32/s2/g8/x2/k")
    assert ctas == listed or (text.startswith(varies) and ctas > listed), (taken, ctas, listed)


def _bounded():
    """Candidates of bounded registers with majors, a size that is a multiple of the alignment, and splits of K."""
    simt = FAMILIES["simt"]
    for majors, size in product(MAJORS, (64, 66, 65)):
        signature = Problem.of(size, size, size, "fp32", majors=majors).signature
        for text in simt.candidates(signature):
            if "/r" in text:
                splits = ("", "/k5", "/k40") if simt.splits(text, signature) else ("",)
                yield from ((text, majors, size, each) for each in splits)


@pytest.mark.parametrize(("text", "majors", "size", "splits"), list(_bounded()))
@pytest.mark.product(keep=1)
def test_bounded_registers_suffice(text, majors, size, splits):
    """In any order of operands, where copies are narrow, and where K is split. `simt.candidates` and `RESIDENT` say of
    three kernels that they may spill a little."""
    signature = Problem.of(size, size, size, "fp32", majors=majors).signature
    allowed = {
        ("simt/64x128x16/w32x32/s3/g8/r2", "tn", bool(splits)): 16,
        ("simt/64x128x16/w32x64/s3/g8/r3", "nn", False): 8,
        ("simt/32x64x16/w32x64/s2/g8/r12", "nn", True): 8,
    }.get((text, majors, bool(splits)), 0)
    assert spilled(CUTE.build(signature, CUTE.parse(text + splits), HOPPER).cubin) <= allowed


UNBOUNDED = [
    (text, majors)
    for majors in MAJORS
    for text in FAMILIES["simt"].candidates(Problem.of(64, 64, 64, "fp32", majors=majors).signature)
    if "/r" not in text
]


@pytest.mark.parametrize(("text", "majors"), UNBOUNDED)
@pytest.mark.product(keep=1)
def test_tiles_without_a_bound_spill_none_where_rows_are_aligned(text, majors):
    """But three: see `simt.candidates`."""
    signature = Problem.of(64, 64, 64, "fp32", majors=majors).signature
    allowed = {
        ("simt/256x128x16/w64x64/s3/g8", "nn"): 24,
        ("simt/64x128x8/w64x64/s3/g8", "tn"): 16,
        ("simt/128x128x8/w64x64/s4/g8", "nn"): 8,
    }.get((text, majors), 0)
    assert spilled(CUTE.build(signature, CUTE.parse(text), HOPPER).cubin) <= allowed


@pytest.mark.parametrize(
    ("shape", "dtype", "majors", "gpu"),
    [
        ((23245, 39, 5695), "fp32", "tn", "H200"),
        ((2737, 64, 7969), "bf16", "tn", "H200"),
        ((393, 1218, 666), "bf16", "tn", "H200"),
        ((2737, 64, 7969), "fp16", "tn", "A100"),
        ((513, 1023, 4097), "bf16", "nn", "A100"),
        ((300, 151, 8191), "fp16", "nn", "A100"),
    ],
)
@pytest.mark.product(keep=1)
def test_what_is_chosen_for_narrow_rows_spills_none(shape, dtype, majors, gpu):
    problem, gpu = Problem.of(*shape, dtype, majors=majors), arch.get(gpu)
    name, config, _ = heuristics.untuned(problem, gpu)
    assert name == "cute"
    assert not spilled(CUTE.build(problem.signature, config, gpu).cubin)


@pytest.mark.parametrize("gpu", ["H200", "A100"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("majors", ["tn", "nn", "nt", "tt"])
@pytest.mark.parametrize("shape", [(4097, 4097, 4097), (4098, 4098, 4098), (4100, 4100, 4100), (4097, 4096, 4096)])
@pytest.mark.product(keep=1)
def test_candidates_for_narrow_rows_keep_the_addresses_of_their_copies(shape, majors, precision, gpu, pytestconfig):
    """Up to ten registers may lie in local memory: the limits on copies keep out what spills more. `make test` takes
    every third candidate, `make nightly` all of them.
    """
    every = 1 if pytestconfig.getoption("--exhaustive") else 3
    problem = Problem.of(*shape, "bf16" if precision == "ieee" else "fp32", majors=majors, precision=precision)
    for text in ampere_candidates.listed(problem.signature)[::every]:
        config = CUTE.parse(text)
        if CUTE.check(config, problem, arch.get(gpu)) is None:
            assert spilled(CUTE.build(problem.signature, config, arch.get(gpu)).cubin) <= 40, text


def test_every_list_serves_narrow_and_small_operands():
    """Each family that takes a signature has a candidate for its worst alignment, but TMA's."""
    for kind, signature in SIGNATURES.items():
        if signature.dtype == "e4m3":  # packed into aligned rows first
            continue
        odd = Problem.of(7, 5, 3, signature.dtype, precision=signature.precision)
        found = CUTE.candidates(odd.signature, HOPPER)
        assert found, kind
        assert all(CUTE.check(config, odd, HOPPER) is None for config, _ in found)


def test_splits_belong_to_listed_configurations():
    for signature in (SIGNATURES["sm90"], TF32, Problem.of(64, 64, 64, "int8").signature):
        listed = hopper_candidates.listed(signature)
        named = hopper_candidates.shortlist(signature, HOPPER, 64, 64, 16384, 1)
        assert {text for text, _ in named} <= set(listed)
        split = [text for text, is_split in named if is_split]
        assert split
        assert all(hopper_candidates.splits(text, signature) for text in split)
