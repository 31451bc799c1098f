"""`tuning.candidates`: what is picked covers every shape, what was proven is in it, and boxes hold what is near."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cutegemm import arch, heuristics
from cutegemm.cute import defaults
from cutegemm.cute.hopper_config import HopperConfig
from cutegemm.problem import Problem
from tuning import candidates, untuned
from tuning.calibrate import Sample

H200 = arch.get("H200")
SIGNATURE = Problem.of(64, 64, 64, "bf16").signature


@pytest.fixture(scope="module")
def some():
    """Every 20th configuration of the space."""
    return list(candidates.space(SIGNATURE, H200))[::20]


@pytest.fixture(scope="module")
def problems():
    return untuned.draw(60, 3, "bf16", "tn", H200)


def test_the_space_is_valid_and_without_repetition():
    found = list(candidates.space(SIGNATURE, H200))
    assert len({str(config) for config in found}) == len(found) > 1500
    assert all(config.problem(SIGNATURE, H200) is None for config in found)
    shapes = {(c.bm, c.bn, c.schedule) for c in found}
    assert {(128, 192, "pp"), (256, 208, "coop2"), (64, 16, "coop1")} <= shapes
    assert not list(candidates.space(SIGNATURE, arch.get("A100")))


def test_estimates_are_the_models(some, problems):
    costs = candidates.estimated(some, problems[:5], H200)
    assert (costs.columns.min(axis=1) == 0).all()
    assert costs.columns.max() <= np.log(candidates.FAR)
    for row, problem in enumerate(problems[:5]):
        sizes = problem.m, problem.n, problem.k, 1
        seconds = [heuristics.model(config, "cute", SIGNATURE, H200).seconds(*sizes) for config in some]
        near = np.exp(costs.whole[row]) < candidates.FAR * 0.99
        ratio = np.array(seconds)[near] / np.exp(costs.whole[row][near])
        assert ratio == pytest.approx(ratio[0])  # all in units of the same best


def test_greedy_picks_cover_and_never_lose(some, problems):
    costs = candidates.estimated(some, problems, H200)
    few, more = candidates.pick(costs, 4), candidates.pick(costs, 12)
    assert more[:4] == few
    assert len(set(more)) == len(more)
    lost = [costs.columns[:, chosen].min(axis=1).mean() for chosen in (few[:1], few, more)]
    assert lost == sorted(lost, reverse=True)
    everything = candidates.pick(costs, 10**6)
    assert costs.columns[:, everything].min(axis=1).max() < candidates.FAR
    assert candidates.pick(costs, 3, [7, 5])[:2] == [7, 5]


def test_boxes_hold_what_is_near(some, problems):
    costs = candidates.estimated(some, problems, H200)
    chosen = candidates.pick(costs, 12)
    spans = candidates.boxes(costs, chosen, problems)
    count, mean, most = candidates.judged(costs, chosen, spans, problems)
    assert mean == pytest.approx(np.expm1(costs.columns[:, chosen].min(axis=1)).mean())
    assert mean <= most
    assert 1 <= count <= len(chosen)
    rows = candidates.table(some, chosen, spans)
    assert {str(row[0]) for row in rows} <= {str(config) for config in some}
    assert sum(bool(box) for row in rows for box in row[1:]) == sum(map(bool, spans))


def test_what_won_twice_is_proven(some):
    def sample(m, config, seconds, **changes):
        return Sample(Problem.of(m, 512, 512, **{"dtype": "bf16", **changes}), "cute", str(config), seconds)

    fast, slow, once = (c for c in some[:60:20])
    samples = [sample(m, config, seconds) for m in (256, 512) for config, seconds in ((fast, 1e-5), (slow, 1.2e-5))]
    samples += [sample(1024, once, 1e-5)]
    samples += [sample(m, slow, 1e-6, dtype="fp16", majors="tt") for m in (64, 128)]
    assert candidates.proven(samples, some) == [some.index(fast)]
    short = HopperConfig.parse(str(fast).replace(f"/s{fast.stages}/", f"/s{fast.stages - 1}/"))
    samples += [sample(m, short, 1e-5) for m in (2048, 4096)]
    assert candidates.proven(samples, some) == [some.index(fast)]


def test_the_command(tmp_path, monkeypatch, capsys, some):
    monkeypatch.setattr(defaults, "TABLE", tmp_path / "candidates.json")
    monkeypatch.setattr(candidates, "space", lambda *where: iter(some))
    defaults._table.cache_clear()
    arguments = ["--shapes", "40", "--test", "10", "--count", "9", "--write"]
    try:
        assert candidates.main(arguments) == 0
        first = defaults.TABLE.read_text()
        assert candidates.main(arguments) == 0
        assert defaults.TABLE.read_text() == first  # the same each time
        data = json.loads(first)
        assert data["command"] == "python -m tuning.candidates --shapes 40 --test 10 --count 9 --write"
        assert [row[0] for row in data["rows"]] == list(defaults.hopper(SIGNATURE))
    finally:
        defaults._table.cache_clear()
    assert "slower than the best of all" in capsys.readouterr().out
    for wrong in (["--shapes", "0"], ["no such file"], ["--arch", "no such GPU"]):
        with pytest.raises(SystemExit):
            candidates.main(wrong)
