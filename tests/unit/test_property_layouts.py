"""Properties of how tensors lie: alignment classes, overlap, descriptions of problems, choices, on random strides."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutegemm import backend as backends
from cutegemm.choice import plan
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import DTYPES, ITEMSIZE, TABLE, Problem, alignment, overlap, request
from cutegemm.problem.dtypes import TERMS
from cutegemm.problem.epilogue import ACTIVATIONS, Epilogue
from tests.examples import examples

QUICK = settings(max_examples=examples(200), database=None)
MEMORY = torch.zeros(4096)


@st.composite
def views(draw, dims=(1, 2, 3)):
    """A view of `MEMORY` with any strides, in any torch order."""
    count = draw(st.sampled_from(dims))
    shape = [draw(st.integers(0, 5)) for _ in range(count)]
    strides = [draw(st.integers(0, 24)) for _ in range(count)]
    dtype = draw(st.sampled_from((torch.float32, torch.float16)))
    return MEMORY.view(dtype).as_strided(shape, strides, draw(st.integers(0, 64)))


def addresses(tensor: torch.Tensor) -> list[int]:
    """Of every byte of every element, one list entry each."""
    size = tensor.element_size()
    places = itertools.product(*map(range, tensor.shape))
    starts = (
        tensor.data_ptr() + size * sum(i * s for i, s in zip(place, tensor.stride(), strict=True)) for place in places
    )
    return [start + byte for start in starts for byte in range(size)]


@given(views())
@QUICK
def test_a_result_that_is_accepted_has_an_address_for_each_element(out):
    try:
        overlap.check_self(out)
    except ValueError:
        return
    every = addresses(out)
    assert len(every) == len(set(every))


@pytest.mark.parametrize("strides", list(itertools.product(range(6), repeat=2)))
def test_a_matrix_is_refused_where_two_elements_share_an_address_and_only_there(strides):
    for shape in itertools.product(range(1, 6), repeat=2):
        out = MEMORY.view(torch.float32).as_strided(shape, strides)
        every = addresses(out)
        if len(every) == len(set(every)):
            overlap.check_self(out)
        else:
            with pytest.raises(ValueError, match=r"write one address several times$"):
                overlap.check_self(out)


@given(views())
@QUICK
def test_reach_is_the_span_of_the_addresses(tensor):
    every = addresses(tensor)
    assert overlap.reach(tensor) == (max(every) - min(every) + 1 if every else 0)


@given(views(), views())
@settings(QUICK, max_examples=examples(500))
def test_tensors_that_are_accepted_side_by_side_share_no_address(out, tensor):
    shared = set(addresses(out)) & set(addresses(tensor))
    try:
        overlap.check(out, {"a": tensor})
    except ValueError:
        return
    assert not shared


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(0, 5), st.integers(0, 5))
@QUICK
def test_column_slices_of_one_buffer_are_always_taken(batch, rows, left, right, gap, pad):
    buffer = MEMORY[: batch * rows * (left + gap + right + pad)].view(batch, rows, -1)
    x, y = buffer[:, :, :left], buffer[:, :, left + gap : left + gap + right]
    overlap.check(x, {"a": y})
    overlap.check(y, {"a": x})
    overlap.check(x[0].t(), {"a": y[0].t()})


@given(st.integers(0, 4096), st.sampled_from((2, 4)), st.lists(st.integers(0, 100), max_size=4))
@QUICK
def test_alignment_divides_all_and_is_the_largest(elements, itemsize, counts):
    base = elements * itemsize
    found = alignment(base, itemsize, *counts)
    every = [base, *(count * itemsize for count in counts)]
    assert found in (2, 4, 8, 16)
    assert all(number % found == 0 for number in every)
    assert found == 16 or any(number % (2 * found) for number in every)


@given(views(dims=(2, 3)), st.data())
@settings(QUICK, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_what_a_description_promises_holds_for_the_tensors(a, data):
    """Runs of elements that a kernel may read at once are aligned as promised; strides say where elements are."""
    m, k = a.shape[-2:]
    b = torch.zeros(k, data.draw(st.integers(0, 4)), dtype=a.dtype)
    asked = request.describe(a, b, None, 1.0, 0.0, None, None, None, None, None)
    # A new D of one column is computed as one row.
    assert asked.swapped == (b.shape[-1] == 1 and m > 1)
    if "a" in asked.copied:
        assert 1 not in a.stride()[-2:]
        return
    problem = asked.problem.transposed() if asked.swapped else asked.problem
    matrix, size = problem.a, a.element_size()
    batch = a.shape[0] if a.dim() == 3 else 1
    inner = matrix.cols if matrix.row_major else matrix.rows
    assert inner * size % matrix.align == 0
    for l, i, j in itertools.product(range(batch), range(m), range(k)):
        place = (l, i, j) if a.dim() == 3 else (i, j)
        true = sum(index * stride for index, stride in zip(place, a.stride(), strict=True))
        told = l * matrix.stride_batch + i * matrix.stride_row + j * matrix.stride_col
        assert true == told
        if (j if matrix.row_major else i) == 0:
            assert (a.data_ptr() + true * size) % matrix.align == 0


@st.composite
def problems(draw):
    dtype = draw(st.sampled_from(DTYPES))
    sizes = st.one_of(st.integers(0, 300), st.integers(0, 20000), st.sampled_from((2**20, 2**31 - 1)))
    return Problem.of(
        draw(sizes),
        draw(sizes),
        draw(sizes),
        dtype,
        majors=draw(st.sampled_from(("tn", "tt", "nn", "nt"))),
        batch=draw(st.sampled_from((1, 2, 65536))),
        out_dtype=draw(st.sampled_from(DTYPES)),
        precision=draw(st.sampled_from(tuple(TABLE[dtype].units))),
        epilogue=Epilogue(
            draw(st.sampled_from((None, *TERMS))),
            draw(st.sampled_from((None, *TERMS))),
            "n",
            draw(st.sampled_from((None, *ACTIVATIONS))),
        ),
    )


@given(problems())
@QUICK
def test_transposing_twice_changes_nothing(problem):
    assert problem.transposed().transposed() == problem
    assert problem.transposed().flops == problem.flops
    assert problem.min_bytes >= problem.m * problem.n * problem.batch * ITEMSIZE[problem.out_dtype]


@pytest.mark.parametrize("name", ["A100", "A6000", "RTX 4090", "H200"])
@given(problems(), st.sampled_from(("auto", "cute", "cutlass2x", "legacy", "torch")))
@settings(QUICK, max_examples=examples(60), suppress_health_check=list(HealthCheck))
def test_what_is_chosen_can_serve_and_what_cannot_says_why(name, problem, backend):
    arch = arch_table.get(name)
    try:
        choice = plan.choose(problem, arch, backend)
    except UnsupportedError:
        assert backend != "auto" or problem.precision != "ieee"
        return
    if choice.backend == "torch":
        assert choice.config is None
        return
    assert backends.get(choice.backend).check(choice.config, problem, arch) is None
    again = backends.get(choice.backend).parse(str(choice.config))
    assert again == choice.config
