"""The cost model's formula as machine code: the same numbers as in Python, and Python where there is no compiler."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm.choice import compiled, cost_model, heuristics
from cutegemm.choice.compiled import Group, library, source
from cutegemm.choice.cost_model import Model
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from tests.examples import examples

GPUS = tuple(arch.get(name) for name in ("H200", "H100 PCIe", "A100"))
KINDS = ({"dtype": "bf16"}, {"dtype": "fp32"}, {"dtype": "fp32", "precision": "tf32"}, {"out_dtype": "fp32"})
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
    some = source.sample(all_ := models(gpu, kind, majors), min(len(all_), 12))
    for alone in some[:3]:
        assert Group([alone]).cheapest([], m, n, k, batch, close) == (alone.seconds(m, n, k, batch), 0)
    for first in (len(some), 7, 0):
        expected = cost_model.cheapest(some, m, n, k, batch, close)
        assert Group(some[:first]).cheapest(some[first:], m, n, k, batch, close) == expected


def test_no_candidate_is_no_choice():
    assert Group([]).cheapest([], 64, 64, 64, 1, 1.0) == (float("inf"), None)


def test_where_there_is_no_compiler_python_computes(monkeypatch):
    some, sizes = models(GPUS[0], KINDS[0], "tn")[:20], (4096, 4104, 72, 1)
    found = Group(some[:15]).cheapest(some[15:], *sizes, 0.99)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    assert library.__wrapped__() is None
    monkeypatch.setattr(compiled, "library", lambda: None)
    monkeypatch.setattr(compiled, "_pointers", None)
    assert Group(some[:15]).cheapest(some[15:], *sizes, 0.99) == found


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
