"""What a sweep may try: every valid configuration; and what it tries next."""

from __future__ import annotations

import pytest

from cutegemm import backend as backends
from cutegemm.problem import Problem
from cutegemm.tuner.space import Frontier, enumerate_all
from tests.tuning_fakes import H200, candidate, space


@pytest.mark.parametrize(
    ("dtype", "precision"), [("bf16", "ieee"), ("fp16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32")]
)
@pytest.mark.product(keep=1)
def test_at_least_two_hundred_valid_configurations(dtype, precision):
    problem = Problem.of(4096, 4096, 4096, dtype, precision=precision)
    found = enumerate_all(problem, H200, ["cute"])
    assert len(found) >= 200
    assert len({c.key for c in found}) == len(found)
    assert [c.estimate for c in found] == sorted(c.estimate for c in found)
    backend = backends.get("cute")
    assert all(backend.check(c.config, problem, H200) is None for c in found[::50])


def test_configurations_of_two_backends():
    both = enumerate_all(Problem.of(512, 512, 512, "fp32", majors="tt"), H200, ["cute", "legacy"])
    assert {c.backend for c in both} == {"cute", "legacy"}


def test_the_frontier_gives_each_once():
    candidates = space(60)
    frontier = Frontier(candidates, [candidates[10]])
    assert frontier.next() == candidates[10]
    drawn = []
    while (found := frontier.next()) is not None:
        drawn.append(found)
        frontier.measured(1.0, found)
    assert len({c.key for c in drawn}) == len(drawn) == 59
    assert candidates[10] not in drawn
    assert drawn[0] == candidates[0]
    assert len(frontier) == 0


def test_the_frontier_can_be_told_otherwise():
    """What was judged again counts once, as it is judged now."""
    candidates = [*space(40), *(candidate(f"rung/{i}", 1.0, "legacy") for i in range(40))]
    frontier = Frontier(candidates)
    for c in candidates[40:46]:
        frontier.measured(0.5, c)
        frontier.measured(1.3, c)
    frontier.measured(1.0, candidates[0])
    for c in candidates[1:8]:
        frontier.measured(1.2, c)
    assert all(found is not None and found.backend == "cute" for found in (frontier.next() for _ in range(20)))


def test_the_frontier_learns_what_the_model_misjudges():
    """The model likes small tiles; the GPU likes one order and cluster that the model is indifferent to."""
    texts = [
        f"sm90/{m}x{n}x64/coop2/c{c}/s{s}/{order}"
        for m in (64, 128, 256)
        for n in (64, 96, 128, 192, 256)
        for c in ("1x1", "2x1", "1x2")
        for s in (2, 3, 4, 5)
        for order in ("g8", "serp8", "hilbert")
    ]

    def model(text: str) -> float:
        m, n, _ = (int(size) for size in text.split("/")[1].split("x"))
        return 1.0 + (m + n) / 1000

    def truth(text: str) -> float:
        return model(text) * (0.8 if "hilbert" in text else 1.0) * (0.85 if "c1x2" in text else 1.0)

    frontier = Frontier([candidate(text, model(text)) for text in texts])
    best = min(map(truth, texts))
    tried: list[float] = []
    while len(tried) < 60 and best not in tried:
        found = frontier.next()
        tried.append(truth(found.text))
        frontier.measured(7.0 * tried[-1], found)  # whatever the unit
    assert best in tried
    # Almost all that it tries then has what the GPU likes.
    later = []
    for _ in range(30):
        later.append(frontier.next())
        frontier.measured(7.0 * truth(later[-1].text), later[-1])
    assert sum("hilbert" in c.text and "c1x2" in c.text for c in later) >= 12
    frontier.drop(("cute", "unknown"))


def test_backends_share_the_compile_time():
    """Kernels that compile twelve times as long come a twelfth as often; hopeless ones last; beaten ones no more."""
    quick = [candidate(f"sm90/{i}", 1.0 + i / 100) for i in range(200)]
    dear = [candidate(f"cutlass2x/{i}", 0.9 + i / 100, "cutlass2x") for i in range(30)]
    hopeless = [candidate(f"rung/{i}", 3.0, "legacy") for i in range(10)]
    frontier = Frontier([*quick, *dear, *hopeless])
    first = [frontier.next() for _ in range(65)]
    assert [sum(c in own for c in first) for own in (quick, dear, hopeless)] == [60, 5, 0]
    for found in first:
        frontier.measured(1.0 if found in quick else 1.1, found)
    second = [frontier.next() for _ in range(26)]  # not beaten by enough
    assert sum(c in dear for c in second) == 2
    for found in second:
        frontier.measured(0.9 if found in quick else 1.1, found)
    third = [frontier.next() for _ in range(50)]
    assert all(c in quick for c in third)
    rest = [frontier.next() for _ in range(len(frontier))]
    assert len({c.key for c in (*first, *second, *third, *rest)}) == 240
    assert all(c in hopeless or c in dear for c in rest[-20:])
    assert frontier.next() is None


def test_what_comes_first_can_be_asked():
    candidates = [*space(30), candidate("cutlass2x/1", 1.0, "cutlass2x")]
    frontier = Frontier(candidates)
    asked = frontier.first(10)
    assert len(frontier) == 31
    assert [frontier.next() for _ in range(10)] == asked
    frontier.begin_with([candidates[20]])
    assert frontier.next() == candidates[20]
    assert candidates[20] not in frontier.first(100)


def test_configurations_that_differ_in_little_do_not_fill_the_first_places():
    alike = [candidate(f"sm90/128x256x64/coop2/c2x1/s{i}/hilbert", 1.0) for i in range(40)]
    other = [candidate(f"sm90/64x{16 * i}x64/coop1/c1x1/s4/hilbert", 1.2) for i in range(1, 10)]
    frontier = Frontier([*alike, *other])
    first = [frontier.next() for _ in range(20)]
    assert sum(c in other for c in first) >= 8
