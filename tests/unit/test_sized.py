"""Tiles that are made for the sizes of a product, and the order of tiles that are computed all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm import backend
from cutegemm.choice import heuristics
from cutegemm.cute.hopper import candidates, sized
from cutegemm.cute.hopper.work_count import works
from cutegemm.hardware import arch
from cutegemm.hardware.residency import resident_clusters
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from tests.examples import examples
from tests.unit.scaled import scaled_problem
from tuning import epilogues

CUTE, H200 = backend.get("cute"), arch.get("H200")
SIZE = st.integers(8, 600)

pytestmark = pytest.mark.usefixtures("no_winners")


def made(problem, gpu=H200):
    return list(CUTE.sized(problem.signature, gpu, problem.m, problem.n, problem.k, problem.batch))


@settings(max_examples=examples(80))
@given(SIZE, SIZE, st.sampled_from(["tn", "tt", "nn", "nt"]), st.sampled_from([1, 1, 3]), st.just("H200"))
def test_tiles_fill_the_sms_and_are_as_narrow_as_can_be(m, n, majors, batch, gpu):
    gpu = arch.get(gpu)
    problem = Problem.of(8 * m, 8 * n, 4096, "bf16", majors=majors, batch=batch)
    found = made(problem, gpu)
    assert not found or gpu is H200
    assert len(set(found)) == len(found)
    for config in found:
        assert CUTE.check(config, problem, H200) is None, config
        places = resident_clusters(H200, config.cluster_ctas)
        waves = -(-works(config, problem) // places)
        assert waves <= max(sized.WAVES)
        assert config.schedule != "pp" or waves > 1
        narrower = config.bn - (sized.HALF_STEP if config.swapped else sized.WHOLE_STEP)
        if narrower >= 8:
            assert works(replace(config, bn=narrower), problem) > waves * places, config


@pytest.mark.parametrize(("sizes", "tile"), [
    ((402, 4608, 4096), "128x136x64/coop2/c1x1/s6/serp8/swap/pdl"),
    ((512, 2560, 6912), "128x80x64/coop2/c2x1/s8/serp8/pdl"),
    ((1203, 3456, 2560), "192x176x64/coop3/c1x1/s4/serp8/swap/pdl"),
    ((293, 8192, 4608), "128x152x64/coop2/c1x2/s6/serp8/swap/pdl"),
    ((256, 2560, 2560), "64x80x64/coop1/c2x1/s12/serp8/pdl"),
])  # fmt: skip
def test_the_fastest_tiles_of_measured_shapes_are_compared(sizes, tile):
    """docs/learning.md#tiles-made-for-the-sizes"""
    problem = Problem.of(*sizes, "bf16")
    assert f"sm90/{tile}" in map(str, made(problem))


def test_wasteful_tiles_are_left_out():
    """Narrow ones load much for each multiplication, as those of 192x40 do in two waves, others compute much for
    nothing."""
    problem = Problem.of(402, 4608, 4096, "bf16")
    tiles = sized._tiles_of(problem.signature, H200)
    all_ = {tile: clocks for clocks, tile in tiles.filling(402, 4608, 1)}
    kept = {tile for tile in all_ if tiles.configuration(tile) in made(problem)}
    assert {(128, 136), (192, 88)} <= {tile[:2] for tile in kept}
    assert (192, 40) in {tile[:2] for tile in all_}
    assert (192, 40) not in {tile[:2] for tile in kept}
    least = min(all_.values())
    assert all(all_[tile] <= sized.MOST * least for tile in kept)
    assert any(clocks > sized.MOST * least for clocks in all_.values())


@pytest.mark.parametrize("problem", [
    Problem.of(64, 4096, 4096, "bf16"), Problem.of(4096, 64, 4096, "bf16"),
    Problem.of(512, 4096, 4096, "fp32", precision="tf32"), Problem.of(512, 4096, 4096, "fp32", precision="bf16x6"),
    Problem.of(512, 4096, 4096, "int8"), Problem.of(512, 4096, 4096, "e4m3", precision="fast"),
    Problem.of(512, 4096, 4096, "bf16", epilogue=Epilogue(c_dtype="bf16")),
    Problem.of(512, 4096, 4096, "bf16", batch=4, work="ragged_m"),
    scaled_problem("blocks", 512, 4096, 4096),
    *(epilogues.problem(one, 512, 4096, 4096, "bf16") for one in epilogues.named("swiglu,gelu_bias_residual")),
], ids=str)  # fmt: skip
def test_products_that_were_not_timed_with_such_tiles_have_none(problem):
    assert made(problem) == []


@pytest.mark.parametrize("problem", [
    Problem.of(402, 4608, 4096, "fp16", epilogue=Epilogue(bias_dtype="fp16", activation="gelu")),
    Problem.of(402, 4608, 4096, "e5m2"), scaled_problem("rows", 402, 4608, 4096),
], ids=str)  # fmt: skip
def test_products_that_run_the_same_kernels_have_some(problem):
    found = made(problem)
    assert found
    assert all(CUTE.check(config, problem, H200) is None for config in found)
    if problem.signature.promotion is not None:
        assert all(config.bn % 16 == 0 and config.bk == 128 and not config.ping_pong for config in found)


def test_the_tuner_and_the_choice_know_them_and_list_each_once():
    problem = Problem.of(402, 4608, 4096, "bf16")
    for configs in (CUTE.configs(problem, H200), heuristics.ascending(problem, H200, "cute")):
        texts = [str(config) for config in configs]
        assert len(set(texts)) == len(texts)
        assert {str(CUTE.in_one_wave(config, problem, H200)) for config in made(problem)} <= set(texts)


def test_no_path_to_a_choice_leaves_out_the_order_of_one_wave():
    """Where a kernel spills, the next of those in ascending order is taken."""
    problem = Problem.of(1024, 1024, 4096, "bf16")
    for config in heuristics.ascending(problem, H200, "cute"):
        assert CUTE.in_one_wave(config, problem, H200) == config
    assert str(heuristics.choose(problem, H200, "cute")[1]) in map(str, heuristics.ascending(problem, H200, "cute"))


@pytest.mark.parametrize("sizes", [(428, 5632, 11008), (448, 5120, 5376), (1024, 1024, 4096)])
def test_the_estimate_that_a_choice_names_is_about_that_of_what_it_takes(sizes):
    """It is that of the order before; the model counts rereading, of which there is none in one wave, for another."""
    problem = Problem.of(*sizes, "bf16")
    candidates = heuristics._candidates("cute", problem.signature, H200, "off")
    seconds, config, _ = candidates.cheapest(problem)
    assert heuristics.estimate(problem, config, "cute", H200) == pytest.approx(seconds, rel=0.07)


def test_the_tuner_tries_the_orders_that_a_choice_takes():
    problem = Problem.of(402, 4608, 4096, "bf16")
    listed = list(CUTE.configs(problem, H200))
    texts, taken = {*map(str, listed)}, [CUTE.in_one_wave(config, problem, H200) for config in listed]
    assert {*map(str, taken)} <= texts
    assert sum("/col/" in str(config) for config in taken) > 100


def test_a_choice_takes_one_where_the_model_likes_it_best():
    problem = Problem.of(1203, 3456, 2560, "bf16")
    _, config, why = heuristics.choose(problem, H200, "cute")
    assert replace(config, order="serp8") in made(problem)
    assert "nearby" not in why
    listed = heuristics._candidates("cute", problem.signature, H200, "off")._listed_best(1203, 3456, 2560, 1)[0]
    assert heuristics.estimate(problem, config, "cute", H200) < listed


def in_one_wave(text, problem):
    return CUTE.in_one_wave(CUTE.parse(f"sm90/{text}"), problem, H200).order


@pytest.mark.parametrize(("config", "order"), [
    ("64x128x64/coop1/c1x1/s8/serp8/pdl", "col"), ("64x128x64/coop1/c2x1/s8/serp8/pdl", "col"),
    ("64x128x64/coop1/c1x2/s8/serp8/pdl", "col"), ("64x128x64/coop1/c1x2/s8/serp8/swap/pdl", "col"),
    ("64x128x64/coop1/c2x1/s8/serp8/swap/pdl", "serp2"),
    ("64x256x64/coop1/c4x1/s4/serp8/swap/pdl", "serp2"), ("64x256x64/coop1/c1x4/s4/serp8/swap/pdl", "col"),
    ("64x256x64/coop1/c2x2/s4/serp8/swap/pdl", "col"), ("64x256x64/coop1/c4x1/s4/serp8/pdl", "col"),
    ("64x128x64/coop1/c1x1/s8/serp8/swap/pdl", "serp8"),
    ("64x128x64/coop1/c2x1/s8/serp16/pdl", "serp16"), ("64x128x64/coop1/c2x1/s8/row/k2/pdl", "row"),
    ("64x256x64/coop1/c2x1/s5/serp8/k2/pdl", "serp8"), ("64x128x64/coop1/c1x1/s8/serp8/streamk/pdl", "serp8"),
])  # fmt: skip
def test_tiles_that_are_computed_at_once_have_an_order_by_cluster(config, order):
    assert in_one_wave(config, Problem.of(1024, 1024, 4096, "bf16")) == order


def test_the_order_of_two_waves_and_of_groups_stays():
    config = "64x128x64/coop1/c2x1/s8/serp8/pdl"
    assert in_one_wave(config, Problem.of(1024, 1032, 4096, "bf16")) == "serp8"
    assert in_one_wave(config, Problem.of(512, 512, 512, "bf16", batch=4, work="ragged_m")) == "serp8"
    assert in_one_wave(config, Problem.of(512, 1024, 4096, "bf16", batch=2)) == "col"
    assert in_one_wave(config, Problem.of(512, 1024, 4096, "bf16", batch=3)) == "serp8"


def test_a_nearby_winner_keeps_the_order_in_which_it_was_measured():
    problem = Problem.of(1024, 1024, 4096, "bf16")
    text = "sm90/64x128x64/coop1/c1x2/s8/serp8/pdl"
    known = heuristics.Candidates(CUTE, problem.signature, H200, [((1024, 1024, 4096), text)])
    _, config, why = known.cheapest(problem)
    assert why
    assert str(config) == text
    other = heuristics.Candidates(CUTE, problem.signature, H200, [])
    assert other.cheapest(problem)[1].order == "col"


@pytest.mark.parametrize(("text", "won_at", "here", "order"), [
    ("64x128x64/coop1/c1x2/s8/col/pdl", (1024, 1024, 4096), (1024, 1056, 4096), "serp8"),  # 132 places, 144 tiles
    ("64x128x64/coop1/c2x1/s8/serp2/swap/pdl", (1024, 1024, 4096), (1056, 1024, 4096), "serp8"),
    ("64x128x64/coop1/c1x2/s8/col/pdl", (1024, 1056, 4096), (1100, 1056, 4096), "col"),
    ("64x128x64/coop1/c1x2/s8/serp8/pdl", (1024, 1056, 4096), (1024, 1024, 4096), "col"),
    ("64x128x64/coop1/c1x2/s8/serp8/pdl", (1024, 1024, 4096), (1000, 1024, 4096), "serp8"),
    ("64x128x64/coop1/c1x2/s8/serp16/pdl", (1024, 1024, 4096), (1024, 1056, 4096), "serp16"),
])  # fmt: skip
def test_a_nearby_winners_order_counts_where_the_waves_are_as_many(text, won_at, here, order):
    problem = Problem.of(*here, "bf16")
    assert CUTE.in_one_wave(CUTE.parse(f"sm90/{text}"), problem, H200, won_at).order == order


def test_a_winner_of_one_wave_is_chosen_in_bands_where_there_are_two():
    problem, won_at = Problem.of(1024, 8192, 4096, "bf16"), (1024, 4096, 4096)
    winner = "sm90/128x256x64/coop2/c1x2/s4/col/swap/pdl"
    _, config, why = heuristics.Candidates(CUTE, problem.signature, H200, [(won_at, winner)]).cheapest(problem)
    assert (str(config), why) == (winner.replace("col", "serp8"), "winner at 1024x4096x4096 nearby")


def test_other_backends_have_no_such_candidates():
    problem = Problem.of(402, 4608, 4096, "bf16")
    other = backend.get("cutlass2x")
    assert list(other.sized(problem.signature, H200, 402, 4608, 4096, 1)) == []
    config = next(iter(other.configs(problem, H200)))
    assert other.in_one_wave(config, problem, H200) is config


def test_rings_are_as_deep_as_fits():
    for config in made(Problem.of(402, 4608, 4096, "bf16")):
        signature = Problem.of(64, 64, 64, "bf16").signature
        deeper = replace(config, stages=config.stages + 1)
        assert config.stages == sized.MOST_STAGES or candidates.most_stages(deeper, signature) == config.stages
