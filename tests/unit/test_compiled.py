"""The cost model's formula as machine code: the same numbers as in Python, and Python where there is no compiler."""

from __future__ import annotations

import math
import random
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm import backend
from cutegemm.choice import compare, compiled, cost_model, heuristics
from cutegemm.choice.compiled import Group, library, source
from cutegemm.choice.cost_model import Model
from cutegemm.cute.simt.config import SimtConfig
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from tests.examples import examples

GPUS = tuple(arch.get(name) for name in ("H200", "H100 PCIe", "A100"))
KINDS = ({"dtype": "bf16"}, {"dtype": "fp32"}, {"dtype": "fp32", "precision": "tf32"}, {"out_dtype": "fp32"},
         {"work": "ragged_m"})  # fmt: skip
SIZES = st.one_of(st.sampled_from([0, 1, 2, 64, 65, 128, 129, 4096, 4104, 28672]), st.integers(0, 10**5))


def models(gpu: arch.Arch, kind: dict[str, str], majors: str) -> list[Model]:
    """Every candidate of a signature, some with K split, by stream-K, or with CTAs that share an SM."""
    problem = Problem.of(64, 64, 64, majors=majors, **kind)
    entries = heuristics._candidates("cute", problem.signature, gpu, "off")
    splits = (pair for one in entries._splits.values() for pair in one.worth_trying(64, 64, 65536, 1))
    more = ["sm90/128x256x64/coop2/c2x1/s4/serp8/streamk", "sm90/64x64x64/coop1/c1x1/s4/row/once"]
    named = [entries.backend.parse(text) for text in more if (gpu.capability, problem.a.align) == ((9, 0), 16)]
    return [
        *(cost for cost, _ in [*entries._whole, *splits]),
        *(heuristics.model(config, "cute", problem.signature, gpu) for config in named if kind == KINDS[0]),
    ]


@settings(max_examples=examples(150))
@given(
    SIZES, SIZES, SIZES, st.sampled_from([0, 1, 3, 300]), st.sampled_from(GPUS), st.sampled_from(KINDS),
    st.sampled_from(["tn", "tt", "nn", "nt"]), st.sampled_from([0.5, 0.99, 1.0]), st.randoms(use_true_random=False),
)  # fmt: skip
def test_machine_code_and_python_find_the_same_to_the_last_bit(m, n, k, batch, gpu, kind, majors, close, source):
    assert library() is not None, "this test needs a C compiler"
    some = source.sample(all_ := models(gpu, kind, majors), min(len(all_), 40))  # more than `compare.TOGETHER`
    for alone in some[:3]:
        assert Group([alone]).cheapest(m, n, k, batch, close) == (alone.seconds(m, n, k, batch), 0, 0)
    assert Group(some).cheapest(m, n, k, batch, close) == (*compare.cheapest(some, m, n, k, batch, close), 0)
    least = min((one.seconds(m, n, k, batch) for one in some), default=0.0)
    for beaten in (0.9 * least, 1.1 * least):
        found = Group(some).cheapest(m, n, k, batch, close, beaten)
        assert found == (*compare.cheapest(some, m, n, k, batch, close, beaten), 0)
        assert (found[0] == beaten) == (found[1] is None)
        assert close < 1 or not some or (found[1] is None) == (beaten <= least)
    # With K split, from a few candidates without.
    signature = Problem.of(64, 64, 64, majors=majors, **kind).signature
    candidates = heuristics._candidates("cute", signature, gpu, "off")
    splits = source.sample(listed := list(candidates._splits.values()), min(len(listed), 12))
    for first, last in ((3, len(splits)), (0, len(splits)), (len(some), source.randint(0, len(splits)))):
        group = Group(some[:first], [one.whole for one in splits[:last]], [one.numbers for one in splits[:last]])
        pairs = [pair for one in splits[:last] for pair in one.worth_trying(m, n, k, batch)]
        both = [*some[:first], *(model for model, _ in pairs)]
        seconds, expected = compare.cheapest(both, m, n, k, batch, close)
        found, place, number = group.cheapest(m, n, k, batch, close)
        assert found == seconds
        if expected is None or expected < first:
            assert (place, number) == (expected, 0)
        else:
            assert splits[place - first].made(number)[1] == pairs[expected - first][1]


@settings(max_examples=examples(60))
@given(SIZES, SIZES, SIZES, st.sampled_from(KINDS), st.sampled_from([1.02, 1.6, float("inf")]), st.integers(0, 99))
def test_estimates_of_all_are_those_of_each(m, n, k, kind, far, seed):
    """What is within `far` of the best is exact, of candidates with K split by the best of their splits."""
    signature = Problem.of(64, 64, 64, **kind).signature
    candidates, source = heuristics._candidates("cute", signature, GPUS[0], "off"), random.Random(seed)
    some = source.sample(candidates._whole, 10)
    splits = source.sample(listed := list(candidates._splits.values()), min(len(listed), 10))
    group = Group([cost for cost, _ in some], [one.whole for one in splits], [one.numbers for one in splits])
    expected = [cost.seconds(m, n, k, 1) for cost, _ in some]
    for one in splits:
        expected.append(min((cost.seconds(m, n, k, 1) for cost, _ in one.worth_trying(m, n, k, 1)), default=math.inf))
    found = group.estimates(m, n, k, 1, far)
    for one, other in zip(found, expected, strict=True):
        assert one == other or min(one, other) >= far * min(expected)
    group._library = None
    assert group.estimates(m, n, k, 1, far) == expected


@pytest.mark.parametrize("kind", [*KINDS, {"dtype": "int8"}])
def test_the_library_has_room_for_all_candidates(kind):
    candidates = heuristics._candidates("cute", Problem.of(64, 64, 64, **kind).signature, GPUS[0], "off")
    assert len(candidates._whole) + cost_model.TURNS * len(candidates._splits) <= compiled.MOST


def test_no_candidate_is_no_choice():
    assert Group([]).cheapest(64, 64, 64, 1, 1.0) == (float("inf"), None, 0)


@pytest.mark.parametrize("kind", KINDS[:-1])  # groups have no K split in a fixed number of parts
def test_a_model_divided_is_that_of_the_footprint_with_splits(kind):
    signature = Problem.of(64, 64, 64, **kind).signature
    for one in heuristics._candidates("cute", signature, GPUS[0], "off")._splits.values():
        for number in (one.numbers[0], one.numbers[-1]):
            model, config = one.made(number)
            assert config.splits == number
            shape = backend.get("cute").footprint(config, signature, GPUS[0])
            assert list(model.numbers) == list(Model(shape, signature, GPUS[0]).numbers)


@pytest.mark.parametrize("sizes", [(4096, 4104, 72), (256, 256, 65536), (624, 3576, 3768), (0, 8, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_where_there_is_no_compiler_python_chooses_the_same(kind, sizes, monkeypatch):
    problem = Problem.of(*sizes, **kind)
    found = heuristics.untuned(problem, GPUS[0])
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    assert library.__wrapped__() is None
    monkeypatch.setattr(compiled, "library", lambda: None)
    monkeypatch.setattr(compiled, "_pointers", None)
    assert heuristics.untuned(problem, GPUS[0]) == found


def test_of_candidates_with_k_split_a_choice_makes_the_one_that_it_takes(monkeypatch):
    """Some hundred are compared; to make each in Python, and to ask each what it wants, took most of a choice."""
    problem = Problem.of(624, 3576, 3768, "fp32")
    fresh = heuristics.Candidates(backend.get("cute"), problem.signature, GPUS[0], [])
    monkeypatch.setattr(heuristics.SplitCandidates, "worth_trying", None)
    taken = fresh.cheapest(problem)[1]
    assert [config for one in fresh._splits.values() for _, config in one._made.values()] == [taken]


def test_splits_that_a_candidate_cannot_have_are_passed_over(monkeypatch):
    """The library does not know of them."""
    problem = Problem.of(624, 3576, 3768, "fp32")
    found = heuristics.untuned(problem, GPUS[0])[1]
    assert found.splits > 1
    valid = SimtConfig.why_invalid
    monkeypatch.setattr(
        SimtConfig, "why_invalid", lambda self, *of: "no" if self.splits == found.splits else valid(self, *of)
    )
    other = heuristics.untuned(problem, GPUS[0])[1]
    assert other.splits != found.splits
    assert other.splits > 1


@pytest.mark.parametrize("compiler", ["false", "/nonexistent/cc"])
def test_a_compiler_that_fails_is_as_good_as_none(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled.shutil, "which", lambda name: compiler)
    assert library.__wrapped__() is None


def test_the_library_is_made_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    assert library.__wrapped__() is not None
    monkeypatch.setattr(subprocess, "run", None)
    assert library.__wrapped__() is not None


def test_what_the_translation_does_not_know_is_refused(monkeypatch):
    def loops(n):
        while n > 1:
            n = n / 2
        return n

    def exchanges(a, b):
        a, b = b, a
        return a - b

    for function in (loops, exchanges, lambda: None):
        monkeypatch.setattr(compiled, "TRANSLATED", (function,))
        with pytest.raises((NotImplementedError, AssertionError, SyntaxError)):
            source()
