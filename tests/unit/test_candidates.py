"""`tuning.candidates`: what is picked covers every shape, what was proven is in it, and cells have what is near."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from cutegemm.choice import heuristics
from cutegemm.cute.hopper import candidates as hopper_candidates
from cutegemm.cute.hopper import shortlists
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from tuning import candidates, random_shapes
from tuning.calibrate import Sample

H200 = arch.get("H200")
SIGNATURE = Problem.of(64, 64, 64, "bf16").signature


@pytest.fixture(scope="module")
def some():
    """Every 20th configuration of the space."""
    return list(candidates.space(SIGNATURE, H200))[::20]


@pytest.fixture(scope="module")
def shapes():
    return [(problem.m, problem.n, problem.k) for problem in random_shapes.sizes(60, 3, "bf16", "tn", H200)]


def test_the_space_is_valid_and_without_repetition():
    found = list(candidates.space(SIGNATURE, H200))
    assert len({str(config) for config in found}) == len(found) > 1500
    assert all(config.why_invalid(SIGNATURE, H200) is None for config in found)
    shapes = {(c.bm, c.bn, c.schedule) for c in found}
    assert {(128, 192, "pp"), (256, 208, "coop2"), (64, 16, "coop1")} <= shapes
    assert not list(candidates.space(SIGNATURE, arch.get("A100")))


def test_estimates_are_the_models(some, shapes):
    costs = candidates.Estimator(some, SIGNATURE, H200).costs(shapes[:5])
    assert (costs.columns.min(axis=1) == 0).all()
    assert costs.columns.max() <= np.log(candidates.FAR)
    for row, sizes in enumerate(shapes[:5]):
        seconds = [heuristics.model(config, "cute", SIGNATURE, H200).seconds(*sizes) for config in some]
        near = np.exp(costs.whole[row]) < candidates.FAR * 0.99
        ratio = np.array(seconds)[near] / np.exp(costs.whole[row][near])
        assert ratio == pytest.approx(ratio[0])  # all in units of the same best


def test_estimates_of_some_columns(some, shapes):
    every = candidates.Estimator(some, SIGNATURE, H200).costs(shapes)
    columns = [3, 5, 7, len(some) + 5, len(some) + 6]
    costs = candidates.Estimator(some, SIGNATURE, H200, columns).costs(shapes, 1.2)
    others = np.setdiff1d(np.arange(2 * len(some)), columns)
    assert costs.columns[:, others] == pytest.approx(np.log(1.2))
    of_every = every.columns[:, columns]
    relative = of_every - of_every.min(axis=1, keepdims=True)
    within = (relative < np.log(1.2)) & (of_every < np.log(candidates.FAR))
    assert within.any(axis=1).sum() > 20
    assert costs.columns[:, columns][within] == pytest.approx(relative[within])


def test_what_is_not_valid_for_other_majors_is_not_estimated(shapes):
    """A tile of eights takes an A along K alone."""
    texts = "sm90/64x16x128/coop1/c1x1/s8/serp8/swap/pdl", "sm90/64x8x128/coop1/c1x1/s8/serp8/swap/pdl"
    both = [HopperConfig.parse(text) for text in texts]
    signature = Problem.of(64, 64, 64, "bf16", majors="nn").signature
    assert both[1].why_invalid(SIGNATURE, H200) is None
    assert both[1].why_invalid(signature, H200) is not None
    assert np.isfinite(candidates.Estimator(both, SIGNATURE, H200).costs(shapes, 1e9).whole).all()
    costs = candidates.Estimator(both, signature, H200).costs(shapes)
    assert costs.columns[:, [1, 3]] == pytest.approx(np.log(candidates.FAR))
    assert (costs.columns[:, [0, 2]].min(axis=1) == 0).all()


def test_an_estimator_may_leave_out_what_was_learned(some, shapes):
    taught, alone = (candidates.Estimator(some, SIGNATURE, H200, taught=each).costs(shapes) for each in (True, False))
    assert not np.array_equal(taught.columns, alone.columns)
    sizes = shapes[0]
    terms = [heuristics.model(config, "cute", SIGNATURE, H200).terms(*sizes) for config in some]
    plain = np.log([each.seconds / each.learned for each in terms])
    near = alone.whole[0] < np.log(candidates.FAR) * 0.99
    offset = plain[near] - alone.whole[0][near]
    assert offset == pytest.approx(offset[0])


def test_greedy_picks_cover_and_never_lose(some, shapes):
    costs = candidates.Estimator(some, SIGNATURE, H200).costs(shapes)
    few, more = candidates.pick(costs, 4), candidates.pick(costs, 12)
    assert more[:4] == few
    assert len(set(more)) == len(more)
    lost = [costs.columns[:, chosen].min(axis=1).mean() for chosen in (few[:1], few, more)]
    assert lost == sorted(lost, reverse=True)
    everything = candidates.pick(costs, 10**6)
    assert costs.columns[:, everything].min(axis=1).max() < candidates.FAR
    assert candidates.pick(costs, 3, [7, 5])[:2] == [7, 5]


@pytest.mark.parametrize("cell", [(4, 4, 4), (5, 12, 15), (15, 8, 10)])
def test_shapes_of_a_cell_are_drawn_in_it(cell):
    found = candidates.drawn(cell, 200)
    assert {shortlists.cell_of(*shape) for shape in found} == {cell}
    assert found[:20] == candidates.drawn(cell, 20)
    assert all(size % random_shapes.STEP == 0 for shape in found for size in shape)
    for place, bits in enumerate(cell):
        sizes = [shape[place] for shape in found]
        assert sum(size == 1 << bits for size in sizes) >= 0.2 * len(sizes)
        assert min(sizes) < 1.2 * (1 << bits - 1) + random_shapes.STEP
        assert (min(sizes) == random_shapes.STEP) == (bits == shortlists.LEAST_BITS)
        assert (max(sizes) > 1 << bits) == (bits == shortlists.MOST_BITS)


def test_few_columns_cover_what_is_near():
    near, far = 0.5 * np.log1p(candidates.NEAR), 2 * candidates.NEAR
    columns = np.array([[0, far, near, 9], [9, 0, near, 9], [far, 0, 9, 9], [9, 9, 9, 0]])
    assert candidates.cover(columns) == [1, 0, 3]  # of two that cover as many, the better
    assert candidates.cover(np.array([[near, 0.0], [0.0, 0.0]])) == [1]
    assert candidates.cover(np.array([[0.0, 0.0]])) == [0]


def test_cells_have_what_is_near(some, monkeypatch):
    monkeypatch.setattr(shortlists, "BITS", range(7, 9))
    chosen = [column for start in (0, len(some)) for column in range(start, start + len(some), 7)]
    named = candidates.covered(some, chosen, SIGNATURE, H200, 6)
    assert list(named) == list(itertools.product((7, 8), repeat=3)) == list(candidates.all_cells())
    few = [(7, 8, 7), (8, 7, 8)]
    assert candidates.covered(some, chosen, SIGNATURE, H200, 6, few) == {cell: named[cell] for cell in few}
    for cell, columns in named.items():
        assert set(columns) <= set(chosen)
        assert min(columns) < len(some), "a cell of splits alone"
        shapes = candidates.drawn(cell, 6)
        for taught in (False, True):
            costs = candidates.Estimator(some, SIGNATURE, H200, chosen, taught).costs(shapes)
            lost = costs.columns[:, columns].min(axis=1) - costs.columns[:, chosen].min(axis=1)
            assert lost.max() <= np.log1p(candidates.NEAR) + 1e-12
        count, mean, most = candidates.judged(costs, named, shapes)
        assert count == len(columns)
        assert 0 <= mean <= most <= candidates.NEAR + 1e-12


def test_what_won_twice_is_proven(some):
    def sample(m, config, seconds, **changes):
        return Sample(Problem.of(m, 512, 512, **{"dtype": "bf16", **changes}), "cute", str(config), seconds)

    fast, slow, once = (c for c in some[:60:20])
    samples = [sample(m, config, seconds) for m in (256, 512) for config, seconds in ((fast, 1e-5), (slow, 1.2e-5))]
    samples += [sample(1024, once, 1e-5)]
    samples += [sample(m, slow, 1e-6, dtype="fp16", majors="tt") for m in (64, 128)]
    samples += [sample(m, slow, 1e-6, dtype="fp32", precision="bf16x6") for m in (64, 128)]
    assert candidates.proven(samples, some, SIGNATURE, H200) == [some.index(fast)]
    short = HopperConfig.parse(str(fast).replace(f"/s{fast.stages}/", f"/s{fast.stages - 1}/"))
    samples += [sample(m, short, 1e-5) for m in (2048, 4096)]
    assert candidates.proven(samples, some, SIGNATURE, H200) == [some.index(fast)]


def test_processes_find_the_same(some, monkeypatch):
    """A process imports anew: it is told which cells to cover."""
    monkeypatch.setattr(shortlists, "BITS", range(7, 9))
    chosen = {"tn": range(0, len(some), 7), "nt": range(0, len(some), 5)}
    one, two = (candidates.covered_by_majors(some, chosen, H200, 3, jobs) for jobs in (1, 2))
    assert one == two
    assert list(one) == ["tn", "nt"]
    assert list(one["nt"]) == list(candidates.all_cells())


def test_the_command(tmp_path, monkeypatch, capsys, some):
    monkeypatch.setattr(shortlists, "TABLE", tmp_path / "candidates.json")
    monkeypatch.setattr(candidates, "space", lambda *where: iter(some))
    caches = (
        shortlists._table, shortlists._cells, hopper_candidates._with_shortlists, hopper_candidates._split
    )  # fmt: skip
    for each in caches:
        each.cache_clear()
    monkeypatch.setattr(shortlists, "BITS", range(shortlists.LEAST_BITS, shortlists.LEAST_BITS + 3))
    monkeypatch.setattr(shortlists, "MOST_BITS", shortlists.LEAST_BITS + 2)
    arguments = ["--shapes", "40", "--test", "10", "--count", "9", "--per-cell", "4", "--jobs", "1", "--write"]
    try:
        assert candidates.main(arguments) == 0
        first = shortlists.TABLE.read_text()
        assert candidates.main(arguments) == 0
        assert shortlists.TABLE.read_text() == first  # the same each time
        data = json.loads(first)
        assert data["command"] == "python -m tuning.candidates " + " ".join(arguments)
        assert tuple(data["configurations"]) == shortlists.configurations()
        assert set(shortlists.configurations()) < set(hopper_candidates.listed(SIGNATURE))
        assert 1 <= len(data["configurations"]) <= 9 + 3
        assert list(data["cells"]) == list(shortlists.MAJORS)
        split = set()
        for majors, rows in data["cells"].items():
            assert list(rows)[:2] == ["16x16", "16x32"]
            for (m, n), k in itertools.product(itertools.product((16, 32, 64), repeat=2), (16, 32, 64)):
                row = rows[f"{m}x{n}"][k.bit_length() - 5]
                named = [(data["configurations"][entry // 2], bool(entry % 2)) for entry in row]
                assert shortlists.cell(majors, m, n, k) == named != []
                split |= {entry // 2 for entry in row if entry % 2}
        assert data["split"] == sorted(split)
    finally:
        for each in caches:
            each.cache_clear()
    assert "slower than the best of all" in capsys.readouterr().out
    for wrong in (["--shapes", "0"], ["--per-cell", "0"], ["--jobs", "0"], ["no such file"], ["--arch", "no such GPU"]):
        with pytest.raises(SystemExit):
            candidates.main(wrong)


@pytest.mark.parametrize("majors", shortlists.MAJORS)
def test_large_results_of_short_sums_are_written_row_by_row(majors):
    """16384x14336x64, as of LoRA's second product, on an H200: 133 us row by row, 149 in bands of eight rows."""

    def order(m, n, k):
        found = heuristics.untuned(Problem.of(m, n, k, "bf16", majors=majors), H200)
        assert found is not None
        return found[1].order

    assert order(16384, 14336, 64) == "row"
    assert order(7120, 14104, 128) == "row"
    assert order(8192, 8192, 8192) != "row"  # where walking in bands saves loads


def test_small_results_of_long_sums_are_summed_in_parts_of_large_tiles():
    found = heuristics.untuned(Problem.of(592, 2048, 18048, "bf16"), H200)
    assert found is not None
    assert found[1].splits > 1
    assert found[1].bm * found[1].bn >= 128 * 160
