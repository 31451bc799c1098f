"""Promotions with one factor keep it (`hopper.reuse`), in the machine code that is launched too, and change no more."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from cutegemm.cute.compile import _finished
from cutegemm.cute.hopper import reuse
from cutegemm.cute.hopper.promotion import shares_factors
from cutegemm.hardware.cubin import code
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from tests.compile.test_fp8 import CUTE, blocks, build
from tests.sass import instructions

CONFIGS = ("128x256x128/coop2/c2x1/s4/serp8/zig/pdl/half", "256x128x128/coop2/c1x2/s4/serp8/zig/streamk/pdl/half")
FFMA = re.compile(r"FFMA R(\d+), -?R\d+(?:\.reuse)?, R(\d+)(\.reuse)?, ")


def kept(cubin: bytes) -> tuple[int, int]:
    """Of the FFMA in front of an FFMA with the same second source: how many there are, and how many keep it."""
    found = [
        (now[3] is not None)
        for now, then in pairwise(map(FFMA.match, instructions(cubin)))
        if now and then and now[2] == then[2] != now[1]
    ]
    return len(found), sum(found)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.product(keep=1)
def test_most_multiplications_of_a_promotion_keep_their_factor(config):
    kernel = build(config, epilogue=blocks())
    all_of_them, keep = kept(kernel.cubin)
    assert all_of_them > 100
    assert keep > 0.8 * all_of_them
    assert reuse.keep_factors(kernel.cubin) == kernel.cubin
    assert kernel.object_path.read_bytes().count(kernel.cubin) == 1, "this is launched"


def test_nothing_but_what_is_kept_and_who_yields_changes(monkeypatch, store_root):
    monkeypatch.setattr("cutegemm.cute.hopper.kernel.shares_factors", lambda *_: False)
    plain = build(CONFIGS[0], epilogue=blocks()).cubin
    better = reuse.keep_factors(plain)
    assert kept(plain)[1] < 0.6 * kept(plain)[0] < kept(better)[1]
    assert [text.replace(".reuse", "") for text in instructions(plain)] == [
        text.replace(".reuse", "") for text in instructions(better)
    ]
    allowed = (reuse.STAY | reuse.KEEP_SECOND) << 64
    ((begin, size),) = code(plain)
    end = begin + size
    assert len(plain) == len(better)
    assert (plain[:begin], plain[end:]) == (better[:begin], better[end:])
    differs = [
        int.from_bytes(plain[i : i + reuse.SIZE], "little") ^ int.from_bytes(better[i : i + reuse.SIZE], "little")
        for i in range(begin, begin + size, reuse.SIZE)
    ]
    assert any(differs)
    assert not any(each & ~allowed for each in differs)


@pytest.mark.parametrize(
    ("config", "epilogue", "shares"),
    [(CONFIGS[0], blocks(), True), (CONFIGS[0], Epilogue(), False), ("128x192x128/coop2/c2x1/s4/g8", blocks(), False)],
)
def test_it_is_for_halves_with_scales_of_blocks(config, epilogue, shares):
    problem = Problem.of(4096, 4096, 4096, "e4m3", epilogue=epilogue)
    assert shares_factors(CUTE.parse(f"sm90/{config}"), problem.signature) == shares


def word(destination: int, first: int, second: int, third: int, *, waits: int = 0, predicate: int = 7) -> tuple:
    low = reuse.FFMA | predicate << 12 | destination << 16 | first << 24 | second << 32
    return low, third | 1 << 41 | waits << 52


@pytest.mark.parametrize(
    ("now", "then", "keeps"),
    [
        (word(4, 5, 9, 4), word(6, 7, 9, 6), True),
        (word(4, 5, 9, 4), word(6, 7, 8, 6), False),
        (word(9, 5, 9, 4), word(6, 7, 9, 6), False),  # it is overwritten
        (word(4, 5, 255, 4), word(6, 7, 255, 6), False),  # RZ is no register
        (word(4, 5, 9, 4), word(6, 7, 9, 6, waits=2), False),
        (word(4, 5, 9, 4, predicate=0), word(6, 7, 9, 6), False),
        (word(4, 5, 9, 4), (0x221 | 7 << 12 | 9 << 32, 0), False),
    ],
)
def test_a_factor_is_kept_for_a_neighbour_that_reads_it(now, then, keeps):
    assert reuse._keeps(now, then) == keeps


def test_an_object_that_has_the_machine_code_in_another_form_is_left_alone(tmp_path: Path):
    class Operator:
        @staticmethod
        def finish(cubin: bytes) -> bytes:
            return cubin[::-1]

    exported = tmp_path / "kernel.o"
    for content, wanted in ((b"-abc-", b"-cba-"), (b"-packed-", b"-packed-"), (b"abc abc", b"abc abc")):
        exported.write_bytes(content)
        assert _finished(Operator(), b"abc", exported) == (b"cba" if wanted != content else b"abc")
        assert exported.read_bytes() == wanted
    assert _finished(object(), b"abc", exported) == b"abc"
