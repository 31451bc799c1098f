"""The integers that exactness tests draw, and the configurations that those of the GPU run."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm import backend
from cutegemm.hardware import arch
from tests import exact
from tests.gpu import exact_cases
from tests.problems import DTYPES

H200 = arch.get("H200")


def test_what_the_bound_lets_pass_is_found(monkeypatch):
    """One product left out of 4096 lies within the error bound of any order of adding them, and is not exact."""
    problem = exact.case(8, 8, 4096, "fp16", seed=1)
    real = cutegemm.gemm

    def without_one(a, b, **options):
        a = a.clone()
        a[3, 7] = a[3, 7] - 1
        return real(a, b, **options)

    monkeypatch.setattr(cutegemm, "gemm", without_one)
    problem.run(backend="torch")
    with pytest.raises(AssertionError, match=r"of 64 sums of integers are not exact; the first at \(3, "):
        exact.run(problem, backend="torch")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("k", [0, 1, 8, 4096, 2**20, 2**24 - 257])
def test_the_limit(k, dtype):
    """The largest sum, and each operand, is exact; one more is not in some dtype or sum."""
    v = exact.largest_operand(k, dtype)
    tensor = torch.tensor([v, -v], dtype=DTYPES[dtype])
    assert tensor.tolist() == [v, -v]
    assert k * v * v + 2 * exact.LARGEST_TERM < 2**24
    assert v == exact.LARGEST_OPERAND[dtype] or k * (v + 1) ** 2 + 2 * exact.LARGEST_TERM >= 2**24


def test_no_integers_at_all():
    with pytest.raises(ValueError, match="K: got 16777216"):
        exact.largest_operand(2**24, "fp16")


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("majors", ["tn", "nt"])
def test_operands_are_integers_within_the_limit(seed, majors):
    made = exact.case(24, 16, 1000, "bf16", seed=seed, majors=majors)
    v = exact.largest_operand(1000, "bf16")
    for operand in (made.a, made.b):
        assert torch.equal(operand, operand.round())
        assert (float(operand.min()), float(operand.max())) == (-v if seed == 2 else 0, v)
    exact.run(made, backend="torch")


def test_an_element_that_nothing_wrote_is_found():
    got = torch.tensor([[1.0, float("nan")]])
    assert "1 of 2 sums of integers are not exact; the first at (0, 1)" in str(exact.difference(got, torch.ones(1, 2)))


def test_the_configurations_of_the_gpu_cover_every_way_of_splitting_and_repeat():
    drawn = [exact_cases.hopper(number, H200) for number in range(70)]
    assert drawn == [exact_cases.hopper(number, H200) for number in range(70)]
    configs = [backend.get("cute").parse(one.config) for one in drawn]
    ways = {(c.splits > 1, c.cluster_k > 1, "streamk" in c.options, "swap" in c.options) for c in configs}
    assert ways >= {(s, k, False, swap) for s in (True, False) for k in (True, False) for swap in (True, False)}
    assert ways >= {(False, False, True, swap) for swap in (True, False)}
    assert {one.dtype for one in drawn} == set(DTYPES)
    assert len({one.config for one in drawn}) > 50
    others = [exact_cases.warps(number, H200) for number in range(24)]
    assert {(one.config[:4], one.dtype) for one in others} == {("simt", "fp32"), *(("sm80", name) for name in DTYPES)}
    assert any("/x" in one.config for one in others)
