"""Which candidates a choice looks at: few, among them one close to the best of all."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm import backend
from cutegemm.choice import heuristics
from cutegemm.cute.ampere import candidates as ampere_candidates
from cutegemm.cute.hopper import candidates as hopper_candidates
from cutegemm.cute.hopper import shortlists
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from tests.choices import least_seconds, looked_at
from tests.examples import examples
from tuning import random_shapes

H200 = arch.get("H200")
SIGNATURE = Problem.of(64, 64, 64, "bf16").signature

pytestmark = pytest.mark.usefixtures("no_winners")


def lost(problem, where=H200):
    """By how much the choice is behind the best of all candidates and their splits.

    The cost model knows the small tiles of sm80 from tiny products alone. Elsewhere what it says does not count.
    """
    candidates = heuristics._candidates("cute", problem.signature, where, "off")
    rounded = [1 << (size - 1).bit_length() for size in (problem.m, problem.n, problem.k, problem.batch)]
    known = {"sm90", "sm80"} if ampere_candidates.worth_comparing(*rounded) else {"sm90"}
    entries = [entry for entry in candidates._whole if entry[1].family in known]
    best = least_seconds(problem, entries, candidates._splits.values())
    return candidates.cheapest(problem)[0] / best - 1


def part_of_the_gpu(sms):
    """A partition with so many SMs."""
    share = sms / H200.sm_count
    peaks = tuple((kind, rate * share) for kind, rate in H200.peaks)
    memory = H200.hbm_bytes_per_s * share
    return dataclasses.replace(H200, name=f"{sms} SMs", sm_count=sms, peaks=peaks, hbm_bytes_per_s=memory)


@pytest.mark.parametrize(("majors", "batch", "on_average"), [
    ("tn", 1, 0.003), ("tt", 1, 0.005), ("nn", 1, 0.005), ("nt", 1, 0.005), ("tn", 24, 0.01),
])  # fmt: skip
@pytest.mark.product(keep=2)
def test_random_shapes_lose_little(majors, batch, on_average):
    problems = (
        dataclasses.replace(problem, batch=batch)
        for problem in random_shapes.sizes(examples(120), 1, "bf16", majors, H200)
    )
    found = [lost(problem) for problem in problems]
    assert max(found) < 0.3
    assert statistics.fmean(found) < on_average


@pytest.mark.parametrize(("largest", "batches"), [(64, (128, 1024)), (256, (128, 1024)), (256, (8, 128))])
@pytest.mark.product(keep=1)
def test_batches_of_small_matrices_lose_little(largest, batches):
    """The CTAs of a cluster that are beyond a matrix cost nothing in a single one, but here."""
    source = random.Random(largest + batches[0])
    size = lambda: 8 * source.randint(1, largest // 8)  # noqa: E731
    found = [
        lost(Problem.of(size(), size(), size() * source.choice((1, 8)), "bf16", batch=source.randint(*batches)))
        for _ in range(examples(100))
    ]
    assert max(found) < 0.3
    assert statistics.fmean(found) < 0.01


@pytest.mark.parametrize("sms", [16, 60, 114])
@pytest.mark.product(keep=1)
def test_smaller_gpus_lose_little(sms):
    where = part_of_the_gpu(sms)
    found = [lost(problem, where) for problem in random_shapes.sizes(examples(100), sms, "bf16", "tn", H200)]
    assert max(found) < 0.3
    assert statistics.fmean(found) < 0.02


def test_which_candidates_are_looked_at():
    """Those of the cell: one list serves all sizes that round up to the same powers of two."""
    candidates = heuristics._candidates("cute", SIGNATURE, H200, "off")
    seen = set()
    for sizes in itertools.product((16, 40, 130, 1000, 8192, 10**6), repeat=3):
        entries, splits = looked_at(candidates, Problem.of(*sizes, "bf16"))
        named = shortlists.cell("tn", *sizes)
        rounded = [1 << (size - 1).bit_length() for size in sizes]
        small = ampere_candidates.beside(SIGNATURE) if ampere_candidates.worth_comparing(*rounded, 1) else ()
        every = list(dict.fromkeys(named + hopper_candidates.beside_cells(*rounded, 1)))
        assert [str(config) for _, config in entries] == [*(text for text, split in every if not split), *small]
        assert splits == [candidates._splits[text] for text, split in every if split]
        seen |= {text for text, _ in named}
        assert (entries, splits) == looked_at(candidates, Problem.of(*rounded, "bf16"))
    assert len(seen) > len(candidates._listed) / 2


@pytest.mark.parametrize(
    "problem",
    [Problem.of(64, 64, 64, "fp32"), Problem.of(64, 63, 64, "bf16", majors="tt")],
    ids=["fp32", "not aligned"],
)
def test_other_kernels_have_no_cells(problem, monkeypatch):
    everything = [(text, False) for text in hopper_candidates.listed(SIGNATURE)]
    monkeypatch.setattr(shortlists, "shortlist", lambda *about: everything)
    candidates = heuristics._candidates("cute", problem.signature, H200, "off")
    assert looked_at(candidates, problem) == (candidates._whole, list(candidates._splits.values()))


def test_programs_of_several_results_have_no_wide_swapped_tiles():
    """Of which 29 of 181 builds spilled, and none of the same tiles unswapped."""
    program = simplified(parse("def epilogue(acc) -> (bf16, bf16): return acc, acc * acc"))
    several = Problem.of(160, 4096, 4096, "bf16", epilogue=Epilogue(custom=program)).signature

    def wide(signature):
        named = hopper_candidates.shortlist(signature, H200, 256, 4096, 4096, 1)
        return [text for text, _ in named if (c := HopperConfig.parse(text)).swapped and c.bn > 128]

    assert wide(SIGNATURE)
    assert not wide(several)


def test_tf32_is_looked_up_as_16_bits_of_twice_the_k():
    """Its rows have as many bytes, and tensor cores take as long for them."""
    problem = Problem.of(300, 1000, 520, "fp32", precision="tf32")
    candidates = heuristics._candidates("cute", problem.signature, H200, "off")
    found = {str(config) for _, config in looked_at(candidates, problem)[0]}
    cell = shortlists.cell("tn", 512, 1024, 2048)
    expected = {shortlists.of_width(text, 4, wide=True) for text, split in cell if not split}
    assert (
        shortlists.of_width("sm90/128x160x64/coop2/c1x2/s5/serp8/pdl", 4) == "sm90/128x160x32/coop2/c1x2/s5/serp8/pdl"
    )
    shorter = {re.sub(r"/s\d+", "", text) for text in expected}  # some with fewer stages, for results in fp32
    assert {re.sub(r"/s\d+", "", text) for text in found} == shorter
    assert len(found & expected) > len(expected) / 2


EIGHTS = "sm90/64x72x64/coop1/c1x2/s6/serp8/swap/pdl"


@pytest.mark.parametrize(("given", "served"), [
    ({}, EIGHTS),
    ({"majors": "nn"}, "sm90/64x80x64/coop1/c1x2/s5/serp8/swap/pdl"),
    ({"dtype": "fp32", "precision": "tf32"}, "sm90/64x80x32/coop1/c1x2/s5/serp8/swap/pdl"),
    ({"batch": 3, "work": "ragged_m"}, "sm90/64x80x64/coop1/c1x2/s5/serp8/swap/pdl"),
    ({"out_dtype": "fp32"}, "sm90/64x80x64/coop1/c1x2/s5/serp8/swap/pdl"),
])  # fmt: skip
def test_tiles_of_eights_are_widened_where_they_serve_nothing(given, served):
    signature = Problem.of(256, 512, 512, **{"dtype": "bf16", **given}).signature
    assert hopper_candidates._served(EIGHTS, signature) == served
    odd = [text for text in hopper_candidates.listed(signature) if HopperConfig.parse(text).bn % 16]
    assert bool(odd) == (not given or "out_dtype" in given)  # an fp32 D is stored from sums of parts of K alone
    assert all(HopperConfig.parse(text).why_invalid(signature, H200) is None for text in odd)
    named = hopper_candidates.shortlist(signature, H200, 8, 1024, 1024, 1)
    assert {text for text, _ in named} <= set(hopper_candidates.listed(signature))
    assert all(hopper_candidates.splits(text, signature) for text, split in named if split)


def test_few_rows_have_tiles_of_eight():
    for majors, expected in (("tn", True), ("tt", True), ("nn", False), ("nt", False)):
        named = hopper_candidates.shortlist(
            Problem.of(8, 64, 64, "bf16", majors=majors).signature, H200, 8, 4096, 4096, 1
        )
        assert any(HopperConfig.parse(text).bn == 8 for text, _ in named) == expected


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 96), ("int8", 128)])
@pytest.mark.parametrize("work", ["ragged_m", "gathered_m", "masked"])
def test_groups_of_many_rows_have_no_wide_swapped_tiles(work, dtype, most):
    """But those that divide a group evenly."""
    signature = Problem.of(64, 64, 64, dtype, batch=8, work=work).signature
    for rows, expected in ((256, True), (512, False), (1024, False)):
        named = hopper_candidates.shortlist(signature, H200, rows, 4096, 8192, 8)
        configs = [HopperConfig.parse(text) for text, _ in named]
        swapped = [config.bn for config in configs if config.swapped and not config.fits]
        assert any(columns > most for columns in swapped) == expected
        assert any(columns > 64 for columns in swapped)
    dense = hopper_candidates.shortlist(SIGNATURE, H200, 1024, 4096, 8192, 1)
    assert any(HopperConfig.parse(text).swapped and HopperConfig.parse(text).bn > 96 for text, _ in dense)


@pytest.mark.parametrize(("work", "streamed"), [("ragged_m", True), ("scattered_m", True), ("gathered_m", False)])
def test_large_groups_are_streamed(work, streamed):
    """From 512 rows a group on cooperative tiles of 128 x 224 and more are compared with stream-K alone. Up to 512 rows
    there are also tiles that divide a group evenly.
    """
    signature = Problem.of(64, 64, 64, "bf16", batch=8, work=work).signature
    for rows in (128, 256, 512, 1024):
        named = hopper_candidates.shortlist(signature, H200, rows, 4096, 8192, 8)
        configs = [HopperConfig.parse(text) for text, _ in named]
        assert any(c.fits for c in configs) == (streamed and rows <= 512)
        large = {c.stream_k for c in configs if not (c.ping_pong or c.fits) and c.bm * c.bn >= 128 * 224}
        expected = {128: {False}, 256: {False, True}, 512: {True}, 1024: {True}} if streamed else {}
        assert large == expected.get(rows, {False})
        assert {text for text, _ in named} <= set(hopper_candidates.listed(signature))


@pytest.mark.parametrize(("m", "n", "k", "worth"), [
    (1024, 512, 512, True), (16, 32768, 256, True), (1024, 1024, 64, False), (64, 64, 1024, False),
])  # fmt: skip
def test_small_tiles_of_mma_sync_are_compared_for_small_products(m, n, k, worth):
    assert ampere_candidates.worth_comparing(m, n, k, 1) == worth
    named = hopper_candidates.shortlist(SIGNATURE, H200, m, n, k, 1)
    assert all(text.startswith("sm90/") for text, _ in named)
    problem = Problem.of(m, n, k, "bf16")
    looked = looked_at(heuristics._candidates("cute", SIGNATURE, H200, "off"), problem)[0]
    assert any(str(config).startswith("sm80/") for _, config in looked) == worth


def test_a_batch_is_looked_up_as_a_larger_matrix_too():
    candidates = heuristics._candidates("cute", SIGNATURE, H200, "off")
    one, many, tall, wide = (
        {str(config) for _, config in looked_at(candidates, Problem.of(*sizes, "bf16", batch=batch))[0]}
        for sizes, batch in (
            ((256, 256, 512), 1), ((256, 256, 512), 64), ((256 * 64, 256, 512), 1), ((256, 256 * 64, 512), 1)
        )
    )  # fmt: skip
    assert tall | wide <= many
    assert not tall | wide <= one


def test_a_smaller_gpu_is_looked_up_as_a_batch():
    about = 256, 256, 512
    for majors in shortlists.MAJORS:
        assert shortlists.shortlist(H200, majors, *about, 1) == shortlists.shortlist(
            part_of_the_gpu(114), majors, *about, 1
        )
        assert shortlists.shortlist(part_of_the_gpu(33), majors, *about, 2) == shortlists.shortlist(
            H200, majors, *about, 8
        )
        for names in (shortlists.shortlist(H200, majors, *about, batch) for batch in (1, 2, 1000)):
            assert len(set(names)) == len(names)


@pytest.mark.parametrize("majors", shortlists.MAJORS)
def test_each_majors_has_cells_of_its_own(majors, monkeypatch):
    problem = Problem.of(512, 512, 1024, "bf16", majors=majors)
    assert problem.signature.majors == majors
    only = [entry for entry in shortlists.cell(majors, 512, 512, 1024) if not entry[1]][:1]
    monkeypatch.setattr(shortlists, "cell", lambda asked, m, n, k: only if asked == majors else [])
    entries, splits = looked_at(heuristics.Candidates(backend.get("cute"), problem.signature, H200, []), problem)
    assert [str(config) for _, config in entries] == [only[0][0]]
    assert not splits


def test_the_table():
    texts = hopper_candidates.listed(SIGNATURE)
    assert texts[: len(shortlists.configurations())] == shortlists.configurations()
    assert len(set(texts)) == len(texts)
    assert all(backend.get("cute").parse(text).why_invalid(SIGNATURE, H200) is None for text in texts)
    everywhere = []
    wide = {majors: shortlists.cell(majors, 128, 4096, 4096) for majors in shortlists.MAJORS}
    assert wide["tn"] != wide["tt"], "rows of a row-major B are as wide as its tile"
    for majors in shortlists.MAJORS:
        found = {
            sizes: shortlists.cell(majors, *(1 << bits for bits in sizes))
            for sizes in itertools.product(shortlists.BITS, repeat=3)
        }
        assert all(len(set(named)) == len(named) for named in found.values())
        assert all(any(not split for _, split in named) for named in found.values())
        for sizes in ((1, 10**6, 0), (17, 32767, 513)):
            assert shortlists.cell(majors, *sizes) == found[shortlists.cell_of(*sizes)]
        assert sum(map(len, found.values())) < 25 * len(found), "a choice may take microseconds"
        everywhere += [entry for named in found.values() for entry in named]
    assert {text for text, _ in everywhere} == set(shortlists.configurations())
    beside = hopper_candidates.beside_cells(1024, 2048, 32768, 1)
    assert not hopper_candidates.beside_cells(1024, 2048, 32768, 64)
    split = {text for text, wanted in everywhere + beside if wanted}
    assert split == {text for text in texts if hopper_candidates.splits(text, SIGNATURE)}
    assert [shortlists.cell_of(*sizes) for sizes in ((0, 16, 17), (32, 33, 10**6))] == [(4, 4, 5), (5, 6, 15)]
    assert shortlists.TABLE.stat().st_size < 600_000


def close(found, least):
    """Whether a choice is the cheapest, but for what `CLOSE` lets pass."""
    return least <= found <= least / heuristics.CLOSE


@settings(max_examples=examples(60))
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 70000), st.sampled_from([1, 1, 3, 100]))
def test_bounds_lose_no_candidate(m, n, k, batch):
    """The choice is the cheapest of the candidates of the cell, splits worth trying included, or a tile made for the
    sizes that is clearly cheaper."""
    problem = Problem.of(8 * m, 8 * n, 8 * k, "bf16", batch=batch)
    candidates = heuristics._candidates("cute", problem.signature, H200, "off")
    made = candidates._sized(problem.m, problem.n, problem.k, problem.batch)
    seconds = least_seconds(problem, made, []) if made else float("inf")
    listed, found = least_seconds(problem, *looked_at(candidates, problem)), candidates.cheapest(problem)
    if found[1] in [dataclasses.replace(config, order=found[1].order) for _, config in made] and found[0] < listed:
        assert close(found[0], seconds)
        assert seconds < heuristics.SIZED_GAINS * listed / heuristics.CLOSE
    else:
        assert close(found[0], listed)
        assert seconds >= heuristics.SIZED_GAINS * listed * heuristics.CLOSE
