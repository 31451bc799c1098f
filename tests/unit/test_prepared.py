"""Whether operands are packed before a product: by estimate, shown by `explain`, and never where it cannot help."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cutegemm
from cutegemm.choice import heuristics, plan, prepared
from cutegemm.choice.plan import Plan
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch
from cutegemm.problem import ITEMSIZE, Problem, request
from cutegemm.problem.work import DENSE, GATHERED, RAGGED_K
from cutegemm.problem.work import TABLE as WORKS
from cutegemm.run import call, runner
from cutegemm.winners import reader
from tests.unit.test_gated_programs import swiglu

H200 = arch.get("H200")
MEMORY = torch.zeros(1 << 14, dtype=torch.bfloat16)


def described(a: torch.Tensor, b: torch.Tensor) -> Problem:
    return request.describe(a, b, None, 1.0, 0.0, None, None, None, None, None).problem


@pytest.mark.parametrize(
    ("sizes", "majors", "packed"),
    [
        ((4096, 50257, 4096), "tt", ["b"]), ((4095, 4096, 4096), "nn", ["a"]), ((2047, 2049, 2051), "tn", ["a", "b"]),
        ((2047, 2049, 2051), "nt", ["a", "b"]),
    ],
)  # fmt: skip
def test_large_odd_problems_are_packed(sizes, majors, packed):
    problem = Problem.of(*sizes, majors=majors)
    found = prepared.choose(problem, H200)
    assert [each.operand for each in found.preparations] == packed
    assert str(found.choice.config).startswith("sm90/")
    assert (found.problem.m, found.problem.n, found.problem.k) == sizes
    assert (found.problem.a.align, found.problem.b.align, found.problem.d) == (16, 16, problem.d)
    for each in found.preparations:
        size = ITEMSIZE["bf16"]
        assert each.target.leading * size % 128 == 0
        assert each.source.rows * each.source.cols * size == each.bytes_read < each.nbytes <= 1.125 * each.bytes_read
    # What the reason says is the sum of the parts.
    there = heuristics.estimate(found.problem, found.choice.config, "cute", H200)
    there += sum(prepared._seconds(each, H200) for each in found.preparations)
    direct = plan.choose(problem, H200)
    here = heuristics.estimate(problem, direct.config, direct.backend, H200)
    assert f"{there * 1e6:.1f} us in all, against {here * 1e6:.1f} us by {direct.config}" in found.choice.why
    assert there < prepared.GAIN * here


@pytest.mark.parametrize(
    ("sizes", "majors", "dtype"),
    [
        ((1, 50258, 4096), "tt", "bf16"),  # the copy would cost more than the product
        ((65, 67, 63), "tt", "bf16"),  # a launch more would
        ((4096, 4096, 4096), "tn", "bf16"),  # nothing to pack
        ((1023, 1025, 1027), "tt", "fp32"),  # CUDA cores read any element
        ((1023, 0, 1027), "tt", "bf16"),
        ((1023, 1025, 0), "tt", "bf16"),
    ],
)
def test_what_is_not_packed(sizes, majors, dtype):
    problem = Problem.of(*sizes, dtype, majors=majors)
    found = prepared.choose(problem, H200)
    assert found == (problem, plan.choose(problem, H200), ())


def test_other_gpus_and_backends_are_left_alone():
    problem = Problem.of(4096, 50257, 4096, majors="tt")
    for where in ("A100", "RTX 4090"):
        assert not prepared.choose(problem, arch.get(where)).preparations
    assert not prepared.choose(problem, H200, "cutlass2x").preparations
    assert prepared.choose(problem, H200, "cute").preparations
    assert prepared.choose(problem, None).choice.backend == "torch"


def test_a_configuration_asked_for_gets_what_it_needs():
    problem = Problem.of(64, 65, 64, majors="tt")
    found = prepared.choose(problem, H200, config="sm90/64x64x64/coop1/c1x1/s3/row")
    assert [each.operand for each in found.preparations] == ["b"]
    direct = prepared.choose(problem, H200, config="sm80/64x64x64/w32x32/s3/g8")
    assert not direct.preparations
    gated = replace(problem, precision="tf32", dtype="fp32", out_dtype="fp32")  # row-major B: WGMMA takes none
    with pytest.raises(UnsupportedError, match=r"TMA cannot load|K-major only"):
        prepared.choose(gated, H200, config="sm90/64x64x32/coop1/c1x1/s3/row")


@pytest.mark.parametrize("constant", ["", "b"])
def test_a_measured_winner_counts_as_measured(constant, monkeypatch):
    """One that is faster than packing stays: its time, not the model's, is compared."""
    problem = Problem.of(4096, 50257, 4096, majors="tt", constant=constant)
    direct = plan.choose(problem, H200)
    for seconds, packs in ((1e-5, False), (1.0, True)):
        row = SimpleNamespace(
            seconds=seconds, config=str(direct.config), backend="cute", ratio=None, origin="measured here"
        )
        monkeypatch.setattr(reader, "lookup_both", lambda p, *_, row=row: (row if p == problem else None, None))
        found = prepared.choose(problem, H200)
        assert bool(found.preparations) == packs
        assert found.problem.constant == "", "kernels are bound to the problem without the promise"


@given(
    rows=st.integers(1, 40), inner=st.integers(1, 70), leading=st.integers(0, 9), offset=st.integers(0, 9),
    row_major=st.booleans(), batch=st.integers(1, 3), gap=st.integers(0, 9),
)  # fmt: skip
def test_what_prepared_operands_promise(rows, inner, leading, offset, row_major, batch, gap):
    """Every address at which a row of a prepared operand begins is a multiple of 16 bytes, and only what needs it is
    copied.
    """
    leading += inner
    step = rows * leading + gap
    shape, strides = (rows, inner), (leading, 1)
    if not row_major:
        shape, strides = shape[::-1], strides[::-1]
    a = MEMORY.as_strided((batch, *shape), (step, *strides), offset)
    b = torch.zeros((a.shape[2], 64), dtype=torch.bfloat16)
    posed = prepared.backends.get("cute").prepared(described(a, b), H200)
    if posed is None:
        assert described(a, b).a.align == 16
        return
    problem, preparations = posed
    copied = {each.operand: each for each in preparations}
    matrix, size = problem.a, 2
    begin = 0 if "a" in copied else a.data_ptr()
    lines, extent = (matrix.rows, matrix.cols) if matrix.row_major else (matrix.cols, matrix.rows)
    begins = {
        begin + (each * matrix.stride_batch + line * matrix.leading) * size
        for each in range(batch) for line in range(lines)
    }  # fmt: skip
    assert all(at % 16 == 0 for at in begins)
    assert matrix.leading * size % 16 == 0
    assert matrix.stride_batch * size % 16 == 0
    assert matrix.leading >= extent
    if "a" in copied:
        last = ((batch - 1) * matrix.stride_batch + (lines - 1) * matrix.leading + extent) * size
        assert last <= copied["a"].nbytes


def test_explain_names_the_callers_operand(capsys):
    problem = Problem.of(4096, 50257, 4096, majors="tt")
    posed, choice, preparations = prepared.choose(problem, H200)
    for swapped, name in ((False, "b"), (True, "a")):
        text = plan.describe(
            Plan(posed, choice, H200, None, swapped, preparations=tuple((p, None) for p in preparations))
        )
        assert f"prepared first: {name}  pack into rows of 100608 bytes, 4.12e+08 bytes of memory" in text


def test_the_memo_keeps_layouts_apart(monkeypatch):
    """Aligned and odd tensors of one shape have different plans, and each is remembered."""
    pytest.importorskip("llvmlite")
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    options = {"backend": "cute", "config": "sm90/64x64x64/coop1/c1x1/s3/row"}
    a = torch.randint(-2, 3, (8, 64)).bfloat16()
    memory = torch.randint(-2, 3, (64, 80)).bfloat16()
    for b, count in ((memory[:, :40], 0), (memory[:, 1:41], 1), (memory[:, :41], 0)):
        for _ in range(2):
            assert torch.equal(cutegemm.gemm(a, b, **options).float(), a.float() @ b.float())
        known = call.remembered(a, b, None, runner.complete(options))
        assert len(known.preparations) == count


def test_halves_of_an_odd_b_are_not_packed():
    """The halves of a gated product's row-major B lie N/2 apart: packed rows would not align the second half."""
    odd = Problem.of(4096, 2 * 11001, 4096, majors="tt", epilogue=swiglu("halves", "bf16"))
    found = prepared.choose(odd, H200)
    assert not found.preparations
    assert found.problem == odd
    even = Problem.of(4095, 2 * 11008, 4096, majors="nt", epilogue=swiglu("halves", "bf16"))
    assert [each.operand for each in prepared.choose(even, H200).preparations] == ["a"]


def test_host_code_in_cpp_leaves_packed_operands_to_python():
    """It launches one kernel on the operands as they lie."""
    a, b = MEMORY[: 64 * 64].view(64, 64), MEMORY[: 64 * 65].view(64, 65)
    asked = runner.Call.of(a, b, None, runner.complete({}))
    posed, choice, preparations = prepared.choose(described(a, b), H200, config="sm90/64x64x64/coop1/c1x1/s3/row")
    kernel = SimpleNamespace(launcher=lambda problem: ("address", "arguments"))
    plain = Plan(posed, choice, H200, kernel)
    assert asked.launch(plain)[0] == "address"
    assert preparations
    assert asked.launch(plain._replace(preparations=tuple((each, None) for each in preparations))) is None


@pytest.mark.parametrize("work", [name for name in WORKS if name != DENSE])
def test_operands_of_groups_are_packed(work):
    odd = Problem.of(4095, 4097, 4099, batch=4, work=work, majors="nt" if work == RAGGED_K else "tn")
    found = prepared.choose(odd, H200)
    assert [each.operand for each in found.preparations] == ["a", "b"]
    assert [each.matrices for each in found.preparations] == [WORKS[work].matrices(name, 4) for name in "ab"]
    assert found.choice.config.family == "sm90"
    aligned = replace(odd, a=odd.a._replace(stride_row=4104, begins=16)) if odd.a.row_major else None
    if aligned is not None:  # rows that begin aligned are taken as they lie, unless they are gathered
        named = [each.operand for each in prepared.choose(aligned, H200).preparations]
        assert named == (["a", "b"] if work == GATHERED else ["b"])
