"""The cost model and the choice by it: sane, deterministic, always valid, and informed by winners nearby."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm import backend, cute, winners
from cutegemm.choice import compiled, cost_model, cost_rates, heuristics, plan
from cutegemm.choice.cost_model import Model
from cutegemm.choice.cost_rates import CostFamily
from cutegemm.cute.ampere import footprint as ampere_footprint
from cutegemm.cute.ampere.candidates import worth_comparing
from cutegemm.cute.ampere.footprint import SM80, SM80_TF32
from cutegemm.cute.hopper import footprint as hopper_footprint
from cutegemm.cute.hopper.footprint import SM90, SM90_TF32
from cutegemm.cute.simt import footprint as simt_footprint
from cutegemm.cute.simt.footprint import SIMT
from cutegemm.cute.vector import footprint as vector_footprint
from cutegemm.cutlass2x import footprint as cutlass2x_footprint
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.winners import Measurement, neighbours
from cutegemm.winners import table as winners_table
from cutegemm.winners.fingerprint import fingerprint
from legacy_cuda import footprint as legacy_footprint
from tests.examples import examples
from tuning import host_cost, suites

H200 = arch.get("H200")
ARCHS = [arch.get(name) for name in ("H200", "A100", "RTX 4090")]
SIZES = st.one_of(st.integers(0, 300), st.sampled_from([1, 16, 128, 1000, 4096, 28672, 65536]), st.integers(1, 10**6))
FULL = Epilogue(c_dtype="fp32", bias_dtype="fp32", activation="gelu")

pytestmark = pytest.mark.usefixtures("no_winners")


@pytest.fixture
def hopper(monkeypatch):
    """The Hopper family chosen automatically, whatever the package says today."""
    family = dataclasses.replace(cute.FAMILIES["sm90"], automatic=True)
    monkeypatch.setitem(cute.FAMILIES, "sm90", family)
    heuristics.forget()


def config(problem, where=H200, name=None):
    found = heuristics.choose(problem, where, name)
    assert found is not None
    return found[1]


@settings(max_examples=examples(150))
@given(
    SIZES, SIZES, SIZES, st.sampled_from([1, 1, 1, 7]), st.sampled_from(["fp16", "fp32"]), st.booleans(),
    st.sampled_from(ARCHS), st.booleans(),
)  # fmt: skip
def test_a_choice_is_valid_and_finite(m, n, k, batch, dtype, tf32, where, full):
    precision = "tf32" if tf32 and dtype == "fp32" else "ieee"
    problem = Problem.of(m, n, k, dtype, batch=batch, precision=precision, epilogue=FULL if full else None)
    found = heuristics.choose(problem, where)
    assert found is not None
    name, chosen, why = found
    assert backend.get(name).check(chosen, problem, where) is None
    assert why.startswith("heuristic: ")
    seconds = heuristics.estimate(problem, chosen, name, where)
    assert 0 < seconds < float("inf")
    assert heuristics.choose(problem, where) == found


OLD = dataclasses.replace(arch.get("A100"), name="old", capability=(7, 5))
EPILOGUES = [None, FULL, Epilogue(activation="gelu_tanh"), Epilogue(bias_dtype="fp16", bias_axis="m"), Epilogue("bf16")]


@settings(max_examples=examples(150))
@given(
    SIZES, SIZES, SIZES, st.sampled_from([1, 7]), st.sampled_from(["fp16", "bf16", "fp32"]),
    st.sampled_from(["ieee", "tf32", "tf32x3"]), st.sampled_from(["tn", "nt"]), st.sampled_from(EPILOGUES),
    st.sampled_from([*ARCHS, OLD]), st.sampled_from(backend.WITH_KERNELS),
)  # fmt: skip
def test_what_a_backend_refuses_no_configuration_can_serve(
    m, n, k, batch, dtype, precision, majors, epilogue, where, name
):
    """A choice asks `check` alone."""
    precision = precision if dtype == "fp32" else "ieee"
    problem = Problem.of(m, n, k, dtype, batch=batch, precision=precision, majors=majors, epilogue=epilogue)
    refused = backend.get(name).supports(problem, where)
    listed = [config for config, _ in backend.get(name).candidates(problem.signature, where)]
    able = [config for config in listed if backend.get(name).check(config, problem, where) is None]
    assert bool(able) == (refused is None)


@pytest.mark.usefixtures("hopper")
@settings(max_examples=examples(80))
@given(SIZES, SIZES, SIZES, st.booleans())
def test_a_hopper_choice_is_valid(m, n, k, full):
    problem = Problem.of(m, n, k, "bf16", epilogue=FULL if full else None)
    name, chosen, _ = heuristics.choose(problem, H200)
    assert backend.get(name).check(chosen, problem, H200) is None
    aligned = min(problem.signature.align_a, problem.signature.align_b) == 16
    # Those of sm80 stand beside sm90's where they can win.
    assert (chosen.family == "sm90") == aligned or (aligned and worth_comparing(m, n, k, 1))


@pytest.mark.usefixtures("hopper")
def test_the_flag_is_all_that_makes_a_family_automatic():
    problem = Problem.of(1024, 1024, 1024, "bf16")
    families = {c.family for c in backend.get("cute").configs(problem, H200)}
    assert families == {"sm90", "sm80"}
    assert backend.get("cute").passed_over(problem, H200) is None
    assert config(problem).family == "sm90"
    odd = Problem.of(1024, 1024, 1001, "bf16")
    assert config(odd).family == "sm80"
    assert "TMA cannot load" in plan.describe(plan.Plan(odd, plan.choose(odd, H200), H200, None))


def test_ranked_is_the_whole_space_in_order():
    problem = Problem.of(512, 512, 512, "fp32")  # of all dtypes the second smallest space
    everything = heuristics.ranked(problem, H200)
    assert len(everything) == len(list(backend.get("cute").configs(problem, H200)))
    seconds = [s for s, _ in everything]
    assert seconds == sorted(seconds)
    assert heuristics.ranked(problem, H200, count=5) == everything[:5]
    for s, c in everything[::97]:
        assert s == heuristics.estimate(problem, c, "cute", H200) == heuristics.estimate(problem, str(c), "cute", H200)


@pytest.mark.parametrize("name", ["cutlass2x", "legacy"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_backends_are_estimated_too(name, dtype):
    problem = Problem.of(1000, 500, 300, dtype)
    found = heuristics.ranked(problem, H200, name, count=20)
    assert len(found) == 20
    assert all(0 < s < 1 for s, _ in found)
    chosen = config(problem, H200, name)
    assert backend.get(name).check(chosen, problem, H200) is None
    with pytest.raises(ValueError, match="accepted are"):
        heuristics.estimate(problem, chosen, "torch", H200)


def test_no_estimate_beats_the_roofline_by_much():
    """The model may err, but not below what the data sheet allows: it counts bytes and flops itself."""
    from cutegemm.hardware.roofline import roofline

    for shape in suites.suite("square,llm,deep"):
        for dtype in ("bf16", "fp32"):
            problem = Problem.of(*shape, dtype)
            seconds = heuristics.estimate(problem, config(problem), "cute", H200)
            assert roofline(problem, H200).share(seconds) < 1.15, (shape, dtype, seconds)


def test_more_work_never_costs_less():
    signature = Problem.of(64, 64, 64, "fp16").signature
    chosen = backend.get("cute").parse("sm80/128x128x32/w64x64/s4/g8")
    cost = heuristics.model(chosen, "cute", signature, H200)
    for m, n, k in itertools.product((1, 129, 1000, 8192), repeat=3):
        # More tiles may keep more SMs busy and so the memory: that may win back little.
        here = 0.98 * cost.seconds(m, n, k)
        assert cost.seconds(2 * m, n, k) >= here
        assert cost.seconds(m, 2 * n, k) >= here
        assert cost.seconds(m, n, 2 * k) > here
        assert cost.seconds(m, n, k, 2) >= here


def model(text, rates=None, problem=None):
    problem = problem or Problem.of(64, 64, 64, "bf16")
    chosen = backend.get("cute").parse(text)
    shape = backend.get("cute").footprint(chosen, problem.signature, H200)
    return Model(shape, problem.signature, H200, rates or shape.family.first)


@settings(max_examples=examples(200))
@given(SIZES, SIZES, SIZES, st.sampled_from([1, 5]), st.sampled_from(["bf16", "fp32"]), st.integers(0, 10**6))
def test_the_quick_bound_is_a_bound(m, n, k, batch, dtype, pick):
    problem = Problem.of(m, n, k, dtype, batch=batch)
    listed = [*cute.FAMILIES["sm90" if dtype == "bf16" else "simt"].candidates(problem.signature)]
    listed += [
        "sm90/128x128x64/coop2/c1x1/s5/row/k32",
        "sm90/64x64x64/coop1/c2x2/s8/row/once",
        "sm90/128x128x64/coop2/c2x1x2/s6/row/k15",
        "sm90/128x256x64/coop2/c2x1/s4/serp8/streamk",
    ] * (dtype == "bf16")
    chosen = backend.get("cute").parse(listed[pick % len(listed)])
    cost = heuristics.model(chosen, "cute", problem.signature, H200)
    assert cost.at_least(m, n, k, batch) <= cost.seconds(m, n, k, batch) * (1 + 1e-9)


def test_wave_quantization_is_counted():
    cost = model("sm90/128x256x64/coop2/c1x1/s4/serp8")
    full = cost.terms(128 * 132, 256, 4096, 1)
    one_more = cost.terms(128 * 133, 256, 4096, 1)
    third = cost.terms(128 * 265, 256, 4096, 1)
    assert (full.rounds, one_more.rounds, third.rounds) == (1, 2, 3)
    assert one_more.tiles - full.tiles == pytest.approx(third.tiles - one_more.tiles)
    assert one_more.tiles == pytest.approx(2 * full.tiles, rel=0.02)  # the last stores drain once
    pairs = model("sm90/128x256x64/coop2/c2x1/s4/serp8")
    assert pairs.terms(128 * 133, 256, 4096, 1).rounds == 2


def test_splits_shorten_the_sum_and_cost_a_meeting():
    whole, split = model("sm90/128x128x64/coop2/c1x1/s5/row"), model("sm90/128x128x64/coop2/c1x1/s5/row/k32")
    assert split.terms(256, 256, 65536, 1).steps * 32 == whole.terms(256, 256, 65536, 1).steps == 1024
    assert split.seconds(256, 256, 65536) < whole.seconds(256, 256, 65536) / 4
    assert split.seconds(8192, 8192, 512) > whole.seconds(8192, 8192, 512)


def test_stream_k_fills_the_last_round():
    whole, balanced = model("sm90/128x256x64/coop2/c1x1/s4/row"), model("sm90/128x256x64/coop2/c1x1/s4/row/streamk")
    uneven = (128 * 140, 256, 65536)
    assert balanced.seconds(*uneven) < 0.75 * whole.seconds(*uneven)
    even = (128 * 132 * 2, 256, 4096)
    assert balanced.seconds(*even) == whole.seconds(*even)


def test_clusters_along_k_shorten_the_sum_and_keep_its_parts_on_chip():
    whole, split, paired = (
        model(f"sm90/128x128x64/coop2/{rest}") for rest in ("c1x1/s5/row", "c1x1/s5/row/k4", "c1x1x4/s5/row")
    )
    sizes = (1024, 1024, 8192, 1)
    assert whole.terms(*sizes).steps == 4 * split.terms(*sizes).steps == 4 * paired.terms(*sizes).steps
    assert paired.terms(*sizes).rounds > 1  # 64 clusters of four
    assert paired.terms(*sizes).memory < split.terms(*sizes).memory
    assert paired.at_least(*sizes) <= paired.seconds(*sizes)
    assert paired.seconds(512, 512, 8192) < whole.seconds(512, 512, 8192)


def test_rows_beyond_the_matrix_are_slower_than_rows_of_it():
    narrow, wide = model("sm90/64x32x128/coop1/c1x1/s8/row/swap"), model("sm90/64x96x128/coop1/c1x1/s5/row/swap")
    assert wide.seconds(16, 28672, 4096) > 1.5 * narrow.seconds(16, 28672, 4096)
    assert wide.seconds(96, 28672, 4096) < narrow.seconds(96, 28672, 4096)
    free = model("sm90/64x96x128/coop1/c1x1/s5/row/swap", dataclasses.replace(SM90.first, outside=0.0))
    assert free.seconds(16, 28672, 4096) < wide.seconds(16, 28672, 4096)


def test_nothing_hides_the_last_sums():
    """In a kernel bound by memory, where multiplications cost nothing more, the parts of K still must meet."""
    rates = SM90.first
    text, sizes = "sm90/64x16x128/coop1/c1x1/s8/row/k2/swap", (16, 4096, 4096)
    slower = dataclasses.replace(rates, split=rates.split + 1)
    assert model(text, slower).seconds(*sizes) == pytest.approx(model(text, rates).seconds(*sizes) + 1e-6)


def test_no_more_clusters_count_than_the_gpu_holds():
    fours, eights = model("sm90/128x128x64/coop2/c2x2/s6/row"), model("sm90/128x128x64/coop2/c2x2x2/s7/row")
    assert [fours.terms(256 * tiles, 256, 512, 1).rounds for tiles in (30, 31)] == [1, 2]
    assert [eights.terms(256 * tiles, 256, 512, 1).rounds for tiles in (15, 16)] == [1, 2]


def test_the_time_of_a_choice_is_told(capsys):
    """What it depends on is the number of candidates: tests/unit/test_cells.py."""
    compiled.library.cache_clear()  # a test before may have had no compiler, or a full disk
    assert host_cost.main(["--choice", "40", "--rounds", "5"]) == 0
    median, count, _, most = (float(x) for x in re.findall(r"\d+(?:\.\d+)?", capsys.readouterr().out))
    assert 1 < median < 1000
    assert count == 40
    assert median <= most
    for wrong in ("--choice", "--rounds"):
        with pytest.raises(SystemExit):
            host_cost.main(["--choice", "1", wrong, "0"])


def test_splits_that_fill_the_gpu_are_tried():
    problem = Problem.of(256, 256, 65536, "bf16")
    candidates = heuristics._candidates("cute", problem.signature, H200, "off")
    tried = [c for one in candidates._splits.values() for _, c in one.worth_trying(256, 256, 65536, 1)]
    assert len(tried) > len(candidates._splits)
    for config in tried:
        places = cost_model.clusters(H200, config.cluster_ctas) * config.splits // config.works(problem)
        assert config.splits in (min(places, 32), min(-(-places // 2), 32)), config
    assert any(candidates.cheapest(problem)[1] == config for config in tried)


def test_swapped_operands_turn_tile_and_cluster():
    signature = Problem.of(64, 64, 64, "bf16").signature
    chosen = backend.get("cute").parse("sm90/128x16x64/coop2/c2x1/s6/row/swap")
    shape = backend.get("cute").footprint(chosen, signature, H200)
    assert (shape.bm, shape.bn, shape.cluster) == (16, 128, (1, 2))


def test_narrow_operands_cost_more():
    text = "sm80/128x128x32/w64x64/s4/g8"
    wide, narrow = (Problem.of(1024, 1024, k, "fp16") for k in (1024, 1026))
    assert backend.get("cute").footprint(backend.get("cute").parse(text), narrow.signature, H200).copies == 4
    assert heuristics.estimate(narrow, text, "cute", H200) > heuristics.estimate(wide, text, "cute", H200)


@pytest.mark.usefixtures("hopper")
def test_shapes_get_what_suits_them():
    assert config(Problem.of(8192, 8192, 8192)).tile()[0] >= 128
    assert config(Problem.of(256, 256, 256)).tile()[0] * config(Problem.of(256, 256, 256)).tile()[1] <= 64 * 64
    assert config(Problem.of(16, 28672, 4096)).swapped
    assert config(Problem.of(256, 256, 65536)).splits > 1
    assert config(Problem.of(8192, 8192, 512)).ping_pong


def families():
    """What the backends declare."""
    modules = ampere_footprint, hopper_footprint, simt_footprint, vector_footprint, legacy_footprint
    declared = [value for module in modules for value in vars(module).values()]
    found = [family for family in declared if isinstance(family, CostFamily)]
    return [*found, *dict.fromkeys(cutlass2x_footprint.FAMILIES.values())]


def test_constants_of_every_family_are_complete():
    by_name = {family.name: family for family in families()}
    assert len(by_name) == len(families()) == 16
    for name, stored in cost_rates._stored().items():
        assert stored["backend"] == by_name[name].backend
        assert cost_rates.fitted(by_name[name])
        found = dataclasses.asdict(cost_rates.rates(by_name[name]))
        assert all(found[key] == value for key, value in stored.items() if key in found)
        assert ("derived" in stored) != stored["command"].startswith("python -m tuning.calibrate "), name
        assert stored.keys() - {"backend", "gpu", "command", "derived"} <= dataclasses.asdict(SIMT.first).keys()
    for family in by_name.values():
        assert cost_rates.rates(family).math > 0
        assert all(value >= 0 for value in dataclasses.asdict(family.first).values())


def test_a_family_without_a_fit_takes_that_of_the_one_like_it():
    assert cost_rates.fitted(SM90)
    assert not cost_rates.fitted(SM90_TF32)
    fit = cost_rates.rates(SM90)
    assert cost_rates.rates(SM90_TF32) == dataclasses.replace(fit, flop_pj=SM90_TF32.first.flop_pj) != fit
    assert not cost_rates.fitted(SM80)
    assert cost_rates.rates(SM80_TF32) == SM80_TF32.first


def test_explain_adds_up():
    problem = Problem.of(1024, 1024, 1024, "fp16")
    chosen = config(problem)
    text = heuristics.explain(problem, chosen, "cute", H200)
    assert f"{heuristics.estimate(problem, chosen, 'cute', H200) * 1e6:.1f} us by the cost model" in text
    assert "round" in text


# -- winners


def row(problem, text, seconds, name="cute", **changes):
    values = {"gpu": "H200", "sm_count": 132, "problem": str(problem), "backend": name, "config": text,
              "fingerprint": fingerprint(name, text), "seconds": seconds, "verdict": "ok"}  # fmt: skip
    return Measurement(**{**values, **changes})


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A user's store of this test's own, and no shipped table."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUTEGEMM_WINNERS", "on")
    monkeypatch.setattr(winners_table, "shipped", lambda *where: {})
    heuristics.forget()
    return winners.Winners()


ODD = "sm90/128x128x64/coop1/c1x2/s5/hilbert"
PROBLEM = Problem.of(1024, 1024, 1024, "fp16")


def test_a_winner_comes_before_the_heuristic(store):
    assert plan.choose(PROBLEM, H200).why.startswith("heuristic")
    store.record(row(PROBLEM, ODD, 9e-6, reference_seconds=9.9e-6))
    for name in ("auto", "cute"):
        choice = plan.choose(PROBLEM, H200, name)
        assert str(choice.config) == ODD
        assert choice.why.startswith("tuned winner, own: 9.0 us, 1.10 of cuBLAS's speed")
    asked = plan.choose(PROBLEM, H200, "cute", "sm80/128x128x32/w64x64/s4/g8")
    assert asked.why == "asked for"
    assert plan.choose(PROBLEM, H200, "legacy").backend == "legacy"
    assert plan.choose(Problem.of(1024, 1024, 1024, "bf16", majors="tt"), H200).why.startswith("heuristic")


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "of other sources"},
        {"verdict": "wrong: not the numbers"},
        {"gpu": "A100"},
        {"text": "sm80/of/another/version"},
        {"text": "sm80/256x256x64/w64x64/s8/g8"},  # more shared memory than there is
    ],
)
def test_a_winner_that_cannot_be_trusted_is_passed_over(store, changes):
    text = changes.pop("text", ODD)
    store.record(row(PROBLEM, text, 1e-6, **changes))
    assert plan.choose(PROBLEM, H200).why.startswith("heuristic")


def test_winners_nearby_inform_the_choice(store):
    store.record(row(PROBLEM, ODD, 1e-6), row(PROBLEM, "sm80/128x128x32/w64x64/s4/g8", 2e-6))
    heuristics.forget()
    assert neighbours.winners_of(PROBLEM.signature, H200, "cute") == [((1024, 1024, 1024), ODD)]
    near = plan.choose(Problem.of(1024, 1024, 1088, "fp16"), H200)
    assert str(near.config) == ODD
    assert "winner at 1024x1024x1024 nearby" in near.why
    far = plan.choose(Problem.of(8192, 8192, 8192, "fp16"), H200)
    assert str(far.config) != ODD
    assert str(plan.choose(Problem.of(1024, 1024, 1088, "bf16"), H200).config) == ODD
    other = plan.choose(Problem.of(1024, 1024, 1088, "fp16", majors="tt"), H200)
    assert "nearby" not in other.why


def test_untuned_knows_neither_the_users_rows_nor_the_shape_itself(store, monkeypatch):
    near, other = Problem.of(1024, 1024, 1088, "fp16"), Problem.of(1024, 1024, 1024, "bf16")
    shipped = {str(PROBLEM): (row(PROBLEM, ODD, 1e-6, origin="shipped"),)}
    plain = heuristics.choose(PROBLEM, H200)
    monkeypatch.setattr(winners_table, "shipped", lambda gpu, count: shipped)
    heuristics.forget()
    assert str(heuristics.choose(PROBLEM, H200)[1]) == ODD
    assert heuristics.untuned(PROBLEM, H200) == plain
    assert str(heuristics.untuned(near, H200)[1]) == ODD
    assert str(heuristics.untuned(other, H200)[1]) != ODD
    monkeypatch.setattr(winners_table, "shipped", lambda gpu, count: {})
    store.record(row(PROBLEM, ODD, 1e-6))
    heuristics.forget()
    assert str(heuristics.choose(near, H200)[1]) == ODD
    assert str(heuristics.untuned(near, H200)[1]) != ODD


def test_a_winner_nearby_that_cannot_serve_is_passed_over(store):
    store.record(row(PROBLEM, "sm80/256x256x64/w64x64/s8/g8", 1e-6))
    heuristics.forget()
    problem = Problem.of(1024, 1024, 1088, "fp16")
    choice = plan.choose(problem, H200)
    assert backend.get("cute").check(choice.config, problem, H200) is None


# -- between backends


def test_another_backend_serves_what_the_first_cannot(monkeypatch):
    problem = Problem.of(256, 256, 256, "fp32", precision="tf32x3")
    cute, cutlass = backend.get("cute"), backend.get("cutlass2x")
    monkeypatch.setattr(type(cutlass), "missing", lambda self: None)
    a100 = arch.get("A100")
    assert plan.choose(problem, a100).backend == plan.choose(problem, H200).backend == "cute"
    monkeypatch.setattr(type(cute), "candidates", lambda self, signature, arch: [])
    monkeypatch.setattr(type(cute), "supports", lambda self, problem, arch: "it has no candidates today")
    heuristics.forget()
    assert plan.choose(problem, a100).backend == "cutlass2x"
    monkeypatch.setattr(type(cutlass), "missing", lambda self: "there is no nvcc")
    with pytest.raises(UnsupportedError, match="cutlass2x"):
        plan.choose(problem, a100)
    heuristics.forget()


def test_another_backend_must_be_calibrated_and_clearly_faster(monkeypatch, tmp_path):
    problem = Problem.of(4096, 4096, 4096, "fp32")
    fast = {"backend": "legacy", "math": 30.0, "smem": 9999.0, "port": 9999.0, "l2": 9999.0, "step": 0.1}
    monkeypatch.setattr(cost_rates, "CONSTANTS", tmp_path / "cost_model.json")

    def fit(**families):
        cost_rates.CONSTANTS.write_text(json.dumps({"families": families}))
        cost_rates.forget()
        heuristics.forget()

    fit(legacy=fast)
    assert heuristics.choose(problem, H200)[0] == "cute"  # simt is not calibrated
    fit(legacy=fast, simt={"backend": "cute"}, vector={"backend": "cute"})
    try:
        assert heuristics.choose(problem, H200)[0] == "legacy"
        assert heuristics.choose(problem, H200, "cute")[0] == "cute"
    finally:
        monkeypatch.undo()
        cost_rates.forget()
        heuristics.forget()


def test_a_second_choice_of_a_signature_works_out_no_footprint(monkeypatch):
    """Which took half as long as the choice itself. Tiles made for other sizes have new ones."""
    pairs = [[Problem.of(m, n, k, "bf16") for n, k in others] for m, others in (
        (60, ((600, 520), (1000, 520))), (1000, ((600, 520), (600, 968))),
    )]  # fmt: skip
    for first, _ in pairs:
        assert heuristics.choose(first, H200, state="off")
    monkeypatch.setattr(type(backend.get("cute")), "footprint", None)
    for _, second in pairs:
        assert heuristics.choose(second, H200, state="off")
