"""Problem, Signature and the canonical form that `request.describe` finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutegemm.problem import Problem, alignment, request
from cutegemm.problem.epilogue import Epilogue


def describe(a, b, c=None, **options):
    known = {"alpha": 1.0, "beta": 0.0, "bias": None, "activation": None, "out": None, "out_dtype": None}
    return request.describe(a, b, c, **{**known, "precision": None, **options})


@given(st.integers(0, 2**40), st.lists(st.integers(0, 10**6), max_size=4), st.sampled_from([2, 4]))
def test_alignment_divides_everything(base, counts, itemsize):
    base *= itemsize
    found = alignment(base, itemsize, *counts)
    assert found in (2, 4, 8, 16)
    assert base % found == 0
    assert all(count * itemsize % found == 0 for count in counts)
    bigger = 2 * found
    assert found == 16 or base % bigger or any(count * itemsize % bigger for count in counts)


@pytest.mark.parametrize(("majors", "want"), [("tn", "kk"), ("tt", "kn"), ("nn", "mk"), ("nt", "mn")])
def test_majors(majors, want):
    signature = Problem.of(64, 32, 16, "fp16", majors=majors).signature
    assert signature.a_major + signature.b_major == want


def test_problem_of_tensors_equals_problem_of_sizes():
    a, b = torch.randn(64, 48).half(), torch.randn(32, 48).half().t()
    assert describe(a, b).problem == Problem.of(64, 32, 48, "fp16", majors="tn")


def test_flops_and_bytes():
    problem = Problem.of(128, 64, 32, "bf16", epilogue=Epilogue(c_dtype="fp32"))
    assert problem.flops == 2 * 128 * 64 * 32
    assert problem.min_bytes == 2 * (128 * 32 + 32 * 64 + 128 * 64) + 4 * 128 * 64


def test_transposing_twice_is_the_identity():
    problem = Problem.of(64, 32, 16, "fp16", majors="tt", epilogue=Epilogue(c_dtype="fp16", bias_dtype="fp32"))
    assert problem.transposed() != problem
    assert problem.transposed().transposed() == problem
    assert problem.transposed().epilogue.bias_axis == "m"


def test_column_major_output_swaps_the_operands():
    a, b, out = torch.randn(8, 6), torch.randn(6, 4), torch.empty(4, 8).t()
    found = describe(a, b, out=out)
    assert found.swapped
    assert (found.problem.m, found.problem.n) == (4, 8)
    assert found.problem.d.row_major


def test_the_stride_of_a_single_row_is_free():
    a = torch.randn(1, 64).half()
    strange = a.as_strided((1, 64), (7, 1))
    assert describe(strange, torch.randn(64, 8).half()).problem.a == describe(a, torch.randn(64, 8).half()).problem.a


def test_operands_without_a_unit_stride_are_copied_and_named():
    found = describe(torch.randn(8, 12)[:, ::2], torch.randn(6, 4))
    assert [name for name, _ in found.copies] == ["a"]
    assert "unit stride" in found.copies[0][1]


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "batch"), [((3, 4, 5), (5, 6), 3), ((4, 5), (3, 5, 6), 3), ((1, 4, 5), (3, 5, 6), 3)]
)
def test_batches_broadcast(shape_a, shape_b, batch):
    found = describe(torch.randn(shape_a), torch.randn(shape_b))
    assert found.shape == (batch, 4, 6)
    assert found.problem.batch == batch
    assert (found.problem.a.stride_batch == 0) == (len(shape_a) == 2 or shape_a[0] == 1)


def test_alignment_class_counts_base_leading_batch_and_extent():
    base = torch.randn(2 * 64 * 64 + 8).half()
    b = torch.randn(32, 16).half()
    assert describe(base[: 64 * 32].view(64, 32), b).problem.a.align == 16
    assert describe(base[4 : 4 + 64 * 32].view(64, 32), b).problem.a.align == 8
    assert describe(base[: 64 * 34].view(64, 34)[:, :32], b).problem.a.align == 4
    assert describe(base[: 64 * 31].view(64, 31), b[:31]).problem.a.align == 2


def test_text_forms_are_stable():
    problem = Problem.of(64, 32, 16, "fp16", epilogue=Epilogue(bias_dtype="fp16", activation="gelu"))
    assert str(problem) == "64x32x16 fp16->fp16/ieee/ak16/bk16/c0/d16/gelu(alpha*acc+bias_n[fp16])"


@pytest.mark.parametrize("name", ["m", "n", "k", "batch"])
@pytest.mark.parametrize("value", [-3, -1, 2.0, "8", None])
def test_extents_are_checked(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: got {value!r}, expected a Python int that is not negative"):
        Problem.of(**{"m": 8, "n": 8, "k": 8, "batch": 1, name: value})
