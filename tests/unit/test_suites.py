"""Shapes by name and by text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutegemm.problem import Problem
from tuning import suites

SIZES = st.integers(1, suites.MAX_EXTENT)


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1))
def test_text_round_trip(shapes):
    assert suites.parse(",".join(map(suites.text, shapes))) == shapes


def test_one_number_is_a_square():
    assert suites.parse("512,16x28672x4096") == [(512, 512, 512), (16, 28672, 4096)]


@pytest.mark.parametrize("text", ["", "12x", "1x2", "0", "4x4x-1", "1x2x3x4", "a", "8,,8", str(2**31)])
def test_bad_text_is_refused(text):
    with pytest.raises(ValueError, match="expected MxNxK"):
        suites.parse(text)


def test_suites_hold_the_shapes_they_are_known_for():
    assert (8192, 8192, 8192) in suites.suite("square")
    assert {(m, 28672, 4096) for m in (16, 128, 1024, 4096)} <= set(suites.suite("llm"))
    assert {(256, 256, 65536), (8192, 8192, 512)} <= set(suites.suite("deep"))
    everything = suites.suite("square,llm,deep")
    assert len(everything) == len(set(everything)) == 30  # 4096 cubed is in two of them
    with pytest.raises(ValueError, match="accepted are square, llm, deep, gradients, misaligned"):
        suites.suite("square,huge")


def test_suites_that_say_how_operands_lie():
    assert suites.suite("gradients,misaligned") == []
    assert {each.majors for each in suites.laid("square,gradients")} == {"nt"}
    assert ((4096, 14336, 16384), "nt") in suites.laid("gradients")
    odd = [Problem.of(*shape, "bf16", majors=majors) for shape, majors in suites.laid("misaligned")]
    assert len(odd) == 10
    assert all(min(problem.a.align, problem.b.align) == 2 for problem in odd)


def test_starts():
    assert suites.starts("0,3,a1,b7") == [(0, 0), (3, 3), (1, 0), (0, 7)]
    assert {(number, number) for number in range(8)} | {(5, 0), (0, 5)} <= set(suites.starts("all"))
    for text in ("", "8", "c1", "a", "1,,2", "-1", "\u0663"):
        with pytest.raises(ValueError, match="accepted are all, and 0 to 7"):
            suites.starts(text)


def test_squares():
    assert suites.squares("64..256") == [(64,) * 3, (128,) * 3, (256,) * 3]
    for text in ("64", "64..", "256..64", "0..4", "a..b"):
        with pytest.raises(ValueError, match=r"FIRST\.\.LAST"):
            suites.squares(text)


def test_file(tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_text("# ours\n512\n\n16x28672x4096,8   # a decode step\n")
    assert suites.read(file) == [(512,) * 3, (16, 28672, 4096), (8,) * 3]
    file.write_text("512\n7x\n")
    with pytest.raises(ValueError, match="line 2"):
        suites.read(file)
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="no shapes"):
        suites.read(file)
    for path in (tmp_path, tmp_path / "missing"):  # a ValueError is what a command turns into its own error
        with pytest.raises(ValueError, match="cannot be read as text"):
            suites.read(path)
