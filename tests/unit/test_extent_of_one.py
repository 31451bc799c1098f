"""How a matrix of one row or one column is read: along its elements where they are neighbours."""

from __future__ import annotations

import pytest
import torch

from cutegemm.choice import plan
from cutegemm.hardware import arch
from cutegemm.problem import Problem, request

MEMORY = torch.zeros(1 << 16, dtype=torch.bfloat16)


def strided(rows, cols, row, col, offset=0):
    return MEMORY.as_strided((rows, cols), (row, col), offset)


def described(a, b, c=None, out=None) -> request.Request:
    return request.describe(a, b, c, 1.0, 0.0 if c is None else 1.0, None, None, out, None, None)


@pytest.mark.parametrize(
    ("strides", "major", "align"),
    [
        ((1, 1), "k", 16), ((1, 64), "k", 16), ((1, 7), "k", 16), ((0, 0), "n", 2), ((0, 1), "n", 2),
        ((8, 1), "n", 2), ((3, 5), "n", 2),
    ],
)  # fmt: skip
def test_b_of_one_column(strides, major, align):
    found = described(strided(1, 64, 64, 1), strided(64, 1, *strides)).problem.signature
    assert (found.b_major, found.align_b) == (major, align)


@pytest.mark.parametrize(
    ("strides", "major", "align"), [((1, 1), "m", 16), ((1, 9), "m", 16), ((8, 1), "k", 2), ((9, 5), "k", 2)]
)
def test_a_of_one_column(strides, major, align):
    found = described(strided(64, 1, *strides), strided(1, 40, 40, 1)).problem.signature
    assert (found.a_major, found.align_a) == (major, align)


@pytest.mark.parametrize(
    ("strides", "major", "align"), [((1, 1), "k", 16), ((3, 1), "k", 16), ((1, 8), "m", 2), ((64, 2), "m", 2)]
)
def test_a_of_one_row(strides, major, align):
    found = described(strided(1, 64, *strides), strided(64, 40, 40, 1)).problem.signature
    assert (found.a_major, found.align_a) == (major, align)


def test_offsets_and_odd_extents_still_count():
    row = strided(1, 64, 64, 1)
    assert described(row, strided(64, 1, 1, 1, offset=4)).problem.signature.align_b == 8
    assert described(strided(1, 60, 60, 1), strided(60, 1, 1, 1)).problem.signature.align_b == 8
    assert described(strided(1, 61, 61, 1), strided(61, 1, 1, 1)).problem.signature.align_b == 2
    batch = MEMORY.as_strided((3, 64, 1), (68, 1, 1))
    assert described(strided(1, 64, 64, 1), batch).problem.signature.align_b == 8
    assert described(strided(1, 64, 64, 1), MEMORY.as_strided((1, 64, 1), (3, 1, 1))).problem.signature.align_b == 16


def test_the_leading_stride_of_one_row_is_what_tma_takes():
    """TMA asks for multiples of 16 bytes, of an extent of 1 too."""
    for a, b in (
        (strided(1, 64, 3, 1), strided(64, 1, 1, 3)),
        (strided(64, 1, 1, 3), strided(1, 64, 5, 1)),
    ):
        problem = described(a, b).problem
        for matrix in (problem.a, problem.b, problem.d):
            if matrix.align == 16:
                assert matrix.leading * 2 % 16 == 0


def test_a_result_of_one_column_is_computed_as_one_row():
    a, b = strided(48, 64, 64, 1), strided(64, 1, 1, 1)
    asked = described(a, b, c=strided(48, 1, 1, 1))
    assert asked.swapped
    found = asked.problem
    assert (found.m, found.n, found.k) == (1, 48, 64)
    assert (found.signature.align_d, found.signature.align_c) == (16, 16)
    assert described(a, b, out=torch.empty(48, 1, dtype=torch.bfloat16)).problem.signature.align_d == 16
    apart = described(a, b, out=torch.empty(48, 3, dtype=torch.bfloat16)[:, :1])
    assert not apart.swapped
    assert apart.problem.d.leading == 3


@pytest.mark.parametrize("majors", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize("sizes", [(48, 1, 64), (1, 48, 64), (48, 40, 1), (1, 1, 1), (5, 1, 1), (0, 1, 8), (8, 1, 0)])
def test_a_problem_named_by_its_sizes_is_the_one_that_gemm_meets(sizes, majors):
    """So that a sweep of it measures what `gemm` looks up."""
    m, n, k = sizes
    a = torch.empty(m, k).bfloat16() if majors[0] == "t" else torch.empty(k, m).bfloat16().t()
    b = torch.empty(k, n).bfloat16() if majors[1] == "t" else torch.empty(n, k).bfloat16().t()
    met, named = described(a, b).problem, Problem.of(m, n, k, "bf16", majors=majors)
    if min(sizes):
        assert met.signature == named.signature
    assert (met.m, met.n, met.k) == (named.m, named.n, named.k)


def test_a_contiguous_column_goes_to_the_tma_kernels(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_WINNERS", "off")
    asked = described(torch.empty(4096, 4096).bfloat16(), torch.empty(4096, 1).bfloat16())
    assert str(plan.choose(asked.problem, arch.get("H200")).config).startswith("sm90/")
