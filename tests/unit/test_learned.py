"""The learned correction of the cost model: trees in Python and in C, and how `tuning.learn` grows them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cutegemm import backend
from cutegemm.choice import compiled, cost_rates, heuristics, learned
from cutegemm.choice.cost_model import Model
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.quantized import quantizing
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from cutegemm.tuner import timing
from tests.unit.scaled import scaled_problem
from tuning import learn
from tuning.calibrate import Sample, read_table

ROOT = Path(learned.__file__).parents[2]
H200 = arch.get("H200")
CUTE = backend.get("cute")
COUNT = 100
"""Trees that suffice for so few times."""
TEXTS = ("simt/64x64x16/w32x64/s2/g8/r6", "simt/64x64x16/w32x32/s3/g8/r4", "simt/128x64x8/w32x64/s3/g8")
SIMPLE = learned.Trees(
    np.array([[0] * learned.DEPTH, [12, 0, 0, 0, 0, 0]]),
    np.array([[10.0] * learned.DEPTH, [2.0, 99, 99, 99, 99, 99]]),
    np.array([[0.1] + [0.0] * 62 + [-0.2], [0.01] * 32 + [0.05] * 32]),
)
"""The first asks six times whether log2 M is above 10, the second whether an SM holds more than two CTAs."""


def test_a_tree_has_one_question_a_level_and_a_leaf_for_each_answer():
    launches = np.zeros((3, len(learned.TRAITS)))
    launches[:, 0], launches[:, 12] = (10.0, 10.5, 11.0), (3, 2, 3)
    assert SIMPLE.log(launches).tolist() == pytest.approx([0.1 + 0.05, -0.2 + 0.01, -0.2 + 0.05])
    again = learned.decoded(learned.encoded(SIMPLE))
    assert again.log(launches).tolist() == pytest.approx(SIMPLE.log(launches).tolist())


def _taught(text: str, *sizes: int, **given) -> bool:
    signature = Problem.of(*sizes, **given).signature
    return learned.taught(CUTE.footprint(CUTE.parse(text), signature, H200), signature)


def test_what_was_learned_counts_for_plain_products():
    sixteen, ffma = "sm90/128x128x64/coop2/c1x1/s4/serp8/pdl", TEXTS[0]
    program = Epilogue(custom=simplified(parse("def epilogue(acc, x: bf16[M, N]) -> bf16: return acc + x")))
    assert _taught(sixteen, 512, 512, 512, dtype="bf16")
    assert _taught(sixteen, 512, 512, 512, dtype="bf16", batch=3)
    assert not _taught(sixteen, 512, 512, 512, dtype="bf16", epilogue=Epilogue("bf16"))
    assert not _taught(sixteen, 512, 512, 512, dtype="bf16", epilogue=program)
    assert not _taught(sixteen, 512, 512, 512, dtype="bf16", batch=3, work="ragged_m")
    for text, counts in (
        ("def epilogue(acc, x: fp32[M, 1]) -> bf16: return acc * x", True),
        ("def epilogue(acc, x: fp32[M, 1], y: bf16[N]) -> bf16: return 2.0 * (acc * x) * y", True),
        ("def epilogue(acc) -> bf16: return acc * acc", False),
        ("def epilogue(acc, x: fp32[M, 1]) -> bf16: return x * x", False),
        ("def epilogue(acc, x: fp32[M, 1]) -> bf16: return relu(acc * x)", False),
        ("def epilogue(acc, x: bf16[M, N]) -> bf16: return acc * x", False),
        ("def epilogue(acc, x: fp32[M, 1]) -> (bf16, fp32): return acc * x, acc", False),
        ("def epilogue(acc, x: fp32[M, 1]) -> fp32: return row_sum(acc * x)", False),
    ):
        given = Epilogue(custom=simplified(parse(text)))
        assert _taught(sixteen, 512, 512, 512, dtype="bf16", epilogue=given) == counts, text
    for recipe in ("tensor", "rows", "blocks"):
        signature = scaled_problem(recipe, 512, 512, 512).signature
        shape = CUTE.footprint(CUTE.parse("sm90/128x128x128/coop2/c1x1/s4/serp8/pdl"), signature, H200)
        assert learned.taught(shape, signature)
    assert not _taught("sm90/128x64x64/coop2/c1x1/s2/serp8/pdl", 512, 512, 512, dtype="fp32", precision="bf16x6")
    # On CUDA cores an epilogue adds as much to each tile.
    assert _taught(ffma, 512, 512, 512, dtype="fp32", epilogue=Epilogue("fp32"))
    gated = simplified(parse("def epilogue(gate: halves[0], up: halves[1]) -> fp32: return silu(gate) * up"))
    signature = Problem.of(512, 512, 512, "fp32", epilogue=Epilogue(custom=gated)).signature
    assert learned.place_of(CUTE.footprint(CUTE.parse(ffma), signature, H200), signature, H200) == learned.place("simt")


GATED = "gate: halves[0], up: halves[1]"


@pytest.mark.parametrize(
    ("head", "body", "counts"),
    [
        (f"({GATED}) -> bf16", "silu(gate) * up", True),
        (f"({GATED}, x: fp32[M, 1], y: bf16[N]) -> bf16", "silu(gate * x) * (up * x * y)", True),
        (f"({GATED})", "silu(gate) * up", True),
        (f"({GATED}, x: bf16[M, N]) -> bf16", "silu(gate) * up + x", False),
        (f"({GATED}) -> (bf16, bf16)", "silu(gate) * up, gate", False),
        ("(gate: pairs[0], up: pairs[1]) -> bf16", "silu(gate) * up", False),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_gate_and_up_have_trees_of_their_own(dtype, head, body, counts):
    """The third program quantizes its result."""
    text = f"sm90/128x256x{64 if dtype == 'bf16' else 128}/coop2/c1x1/s4/serp8/pdl"
    program = simplified(parse(f"def epilogue{head}: return {body}"))
    if "->" not in head:
        program = quantizing(program, "bf16", "e4m3")
    signature = Problem.of(512, 512, 512, dtype, epilogue=Epilogue(custom=program)).signature
    shape = CUTE.footprint(CUTE.parse(text), signature, H200)
    name = learned.name_of(shape, signature)
    assert name == ("sm90/gated" if dtype == "bf16" else "sm90/fp8/gated")
    assert learned.families()[name].after == "sm90"
    assert learned.place_of(shape, signature, H200) == (learned.place(name) if counts else 0)
    without = Problem.of(512, 512, 512, dtype).signature
    assert learned.name_of(CUTE.footprint(CUTE.parse(text), without, H200), without) == name.removesuffix("/gated")


def test_times_of_gate_and_up_teach_their_own_trees():
    config = "sm90/128x128x128/coop2/c1x1/s4/serp8/pdl"
    text = "".join(f"== 512x512x{64 * n} e4m3 {words}tn\n   1.0 10.0 90.0 {config}\n" for n, words in (
        (1, "ieee "), (2, "ieee swiglu "), (3, "blocks swiglu "), (4, "blocks ")))  # fmt: skip
    known = learn.times(read_table(text), H200)
    assert {name: [p.k for p in each.problems] for name, each in known.items()} == {
        "sm90/fp8": [64, 256], "sm90/fp8/gated": [128, 192],
    }  # fmt: skip


@pytest.mark.parametrize(("gpu", "n", "counts"), [("H200", 64, True), ("H100 SXM", 64, True), ("H200", 65, False)])
def test_trees_beside_another_family_count_where_it_is_compared(gpu, n, counts):
    """Rows of 130 bytes are no rows that `sm90` loads; there small tiles of `sm80` are compared with larger ones."""
    config, where = CUTE.parse("sm80/16x32x64/w16x16/s4/g8"), arch.get(gpu)
    signature = Problem.of(64, n, n, "bf16", majors="tt").signature
    shape = CUTE.footprint(config, signature, where)
    assert shape.family.name == "sm80/small"
    assert (learned.place_of(shape, signature, where) > 0) == counts
    assert learned.place_of(shape, signature, dataclasses.replace(where, capability=(10, 0))) == 0
    sm90 = CUTE.footprint(CUTE.parse("sm90/64x16x64/coop1/c1x1/s8/serp8/pdl"), signature, where)
    assert learned.place_of(sm90, signature, where) > 0


def test_what_may_not_teach_is_passed_over():
    config = "sm90/128x128x64/coop2/c1x1/s4/serp8/pdl"
    samples = [
        Sample(Problem.of(512, 512, 64 * number, "bf16", epilogue=Epilogue(c)), "cute", config, 1e-5)
        for number in range(1, 4)
        for c in (None, "bf16")
    ]
    known = learn.times(samples, H200)["sm90"]
    assert len(known.seconds) == 3
    assert known.shapes.tolist() == [0, 1, 2]


def test_a_correction_stays_within_its_ends(monkeypatch):
    for leaf, factor in ((-3.0, learned.LEAST), (0.1, math.exp(0.1)), (3.0, learned.MOST)):
        trees = learned.Trees(SIMPLE.traits, SIMPLE.limits, np.full((2, 64), leaf / 2))
        monkeypatch.setattr(learned, "families", partial(dict, other=SIMPLE, simt=trees))
        assert learned.place("simt") == 2
        assert learned.place("sm90") == 0
        assert learned.factor(2, [0.0] * len(learned.TRAITS)) == pytest.approx(factor)


def _model(text: str, problem: Problem, constants: cost_rates.Rates | None = None) -> Model:
    return Model(CUTE.footprint(CUTE.parse(text), problem.signature, H200), problem.signature, H200, constants)


@pytest.mark.parametrize("majors", ["tn", "tt", "nn", "nt"])
def test_an_estimate_is_the_model_times_what_was_learned(majors):
    problem = Problem.of(1000, 600, 4000, "fp32", majors=majors)
    for text in (*TEXTS, "simt/64x64x16/w32x64/s2/g8/r6/k5"):
        shape = CUTE.footprint(CUTE.parse(text), problem.signature, H200)
        plain = _model(text, problem, cost_rates.rates(shape.family)).terms(*problem.evened)
        found = _model(text, problem).terms(*problem.evened)
        assert plain.learned == 1.0
        assert learned.LEAST <= found.learned <= learned.MOST
        assert found.learned != 1.0
        assert found.seconds == plain.seconds * found.learned
        assert found[1:11] == plain[1:11]


def test_the_traits_are_those_that_are_named():
    problem = Problem.of(1000, 600, 4000, "fp32", majors="tt")
    text = "simt/64x64x16/w32x64/s2/g8/r6/k5"
    model = learn.Watched(CUTE.footprint(CUTE.parse(text), problem.signature, H200), problem.signature, H200)
    terms = model.terms(*problem.evened)
    found = dict(zip(learned.TRAITS, model.found, strict=True))
    works = 16 * 10 * 5
    expected = {
        "log2 M": math.log2(1000), "log2 N": math.log2(600), "log2 K": math.log2(4000), "A along K": 1, "B along K": 0,
        "BM": 64, "BN": 64, "BK": 16, "stages": 2, "threads": 64, "sums of a thread": 64,
        "bytes read in a k step": 2 * (2 * 32 + 64) * 16 * 4, "CTAs of an SM": 6, "log2 splits": math.log2(5),
        "log2 CTAs over SMs": math.log2(works / 132), "last round": works / 792 - 1, "log2 k steps": math.log2(50),
        "rows used": 1000 / 1024, "columns used": 600 / 640, "log2 us": math.log2(terms.seconds * 1e6),
        "tiles": terms.tiles / terms.seconds, "memory": terms.memory / terms.seconds,
        "fixed": terms.fixed / terms.seconds, "CTAs along M": 1, "CTAs along N": 1, "swapped": 0, "overlapped": 0,
        "group": 8, "A astride": 0.0, "B astride": 0.75, "busiest": max(terms.multiply, terms.shared) / terms.step,
        "l2": terms.l2 / terms.step, "port": terms.port / terms.step,
    }  # fmt: skip
    assert found == pytest.approx(expected)


def test_machine_code_has_the_trees_of_every_family(monkeypatch):
    """The second of two families: its trees begin behind those of the first."""
    monkeypatch.setattr(learned, "families", partial(dict, other=SIMPLE, simt=SIMPLE))
    _same_in_machine_code(lambda leaf: -0.2 + leaf)


def test_machine_code_adds_the_trees_of_the_family_named_first(monkeypatch):
    small = dataclasses.replace(SIMPLE, leaves=SIMPLE.leaves / 4)
    own = dataclasses.replace(SIMPLE, leaves=SIMPLE.leaves / 5, after="small")
    monkeypatch.setattr(learned, "families", partial(dict, other=SIMPLE, simt=own, small=small))
    _same_in_machine_code(lambda leaf: (-0.2 + leaf) * (1 / 4 + 1 / 5))


def test_machine_code_has_the_least_correction_of_each_family(monkeypatch):
    low = dataclasses.replace(SIMPLE, leaves=SIMPLE.leaves - 1.0, least=0.93)
    monkeypatch.setattr(learned, "families", partial(dict, other=SIMPLE, simt=low))
    assert (learned.least(0), learned.least(1), learned.least(2)) == (1.0, learned.LEAST, 0.93)
    _same_in_machine_code(lambda leaf: math.log(0.93))


def _same_in_machine_code(expected: Callable[[float], float]) -> None:
    """Of the leaf that the second tree of `SIMPLE` gives."""
    if compiled.library() is None:
        pytest.skip("no C compiler")
    compiled.library.cache_clear()
    try:
        problem = Problem.of(2000, 600, 4000, "fp32")
        models = [_model(text, problem) for text in TEXTS]
        for model in models:
            log = expected(0.05 if model._fold > 2 else 0.01)
            assert model.terms(*problem.evened).learned == pytest.approx(math.exp(log))
            assert compiled.Group([model]).cheapest(*problem.evened, 1.0)[0] == model.seconds(*problem.evened)
        assert len({model._fold > 2 for model in models}) == 2
    finally:
        compiled.library.cache_clear()


def _samples(count: int = 60) -> list[Sample]:
    """What the model expects, but that the second configuration takes a fifth longer where M is above 1024."""
    found = []
    for number in range(count):
        problem = Problem.of(512 + 16 * number, 2000, 3000, "fp32")
        for place, text in enumerate(TEXTS):
            model = _model(
                text, problem, cost_rates.rates(CUTE.footprint(CUTE.parse(text), problem.signature, H200).family)
            )
            longer = 1.2 if place == 1 and problem.m > 1024 else 1.0
            found.append(Sample(problem, "cute", text, model.seconds(*problem.evened) * longer))
    return found


def _unexplained(known: learn.Times, logs: np.ndarray) -> np.ndarray:
    return known.left - (logs - known.means(logs)[known.shapes])


def test_trees_learn_what_the_model_leaves_unexplained():
    known = learn.times(_samples(), H200)["simt"]
    trees = learn.grown(known, COUNT)
    assert np.abs(known.left).max() > 0.1
    assert np.abs(_unexplained(known, trees.log(known.traits))).max() < 0.03
    unseen = np.abs(_unexplained(known, learn.foretold(known, COUNT)))
    assert unseen.mean() < np.abs(known.left).mean() / 3
    assert (learn.grown(known, COUNT).leaves == trees.leaves).all(), "the same times, the same trees"


def _times(estimates, seconds, shapes, problems, weights=None) -> learn.Times:
    """Of launches whose traits are all 0."""
    count = len(estimates)
    weights = np.ones(count) if weights is None else np.array(weights)
    return learn.Times(
        np.zeros((count, len(learned.TRAITS))), *map(np.array, (estimates, seconds, shapes)), weights, problems
    )


FIRST, SECOND = (Problem.of(512, 512, k, "bf16") for k in (512, 1024))


def test_a_loss_is_what_the_choice_takes_longer_than_the_fastest():
    known = _times([1.0, 2.0, 3.0, 2.9], [1.5, 1.2, 3.0, 3.0], [0, 0, 1, 1], (FIRST, SECOND))
    assert learn.losses((known, np.zeros(4))).tolist() == pytest.approx([0.25, 0.0])
    assert learn.losses((known, np.log([3.0, 1.0, 1.0, 1.0]))).tolist() == pytest.approx([0.0, 0.0])


def test_a_choice_among_two_families_loses_to_the_fastest_of_both():
    known = _times([1.0, 2.0], [1.0, 2.0], [0, 1], (FIRST, SECOND))
    other = _times([0.9, 5.0, 1.0], [1.3, 1.0, 0.5], [0, 1, 1], (Problem.of(64, 64, 64, "bf16"), SECOND))
    assert learn.losses((known, np.zeros(2)), (other, np.zeros(3))).tolist() == pytest.approx([0.0, 0.0])
    assert learn.losses((known, np.zeros(2)), (other, np.log([1, 0.1, 3]))).tolist() == pytest.approx([0.0, 1.0])


def test_beside_another_family_offsets_are_of_its_times(monkeypatch):
    """The other family's launches took twice their estimates, of which its trees foretell a factor of e^0.1."""
    trees = learned.Trees(SIMPLE.traits[:1], SIMPLE.limits[:1], np.full((1, 64), 0.1))
    monkeypatch.setattr(learned, "families", partial(dict, sm90=trees))
    known = _times([1.0, 1.0, 1.0], [3.0, 1.0, 4.0], [0, 0, 1], (FIRST, SECOND), [1.0, 3.0, 1.0])
    other = _times([1.0, 2.0], [2.0, 4.0], [0, 0], (FIRST,))
    found = known.beside(other, "sm90")
    assert found.problems == (FIRST,)
    assert found.left.tolist() == pytest.approx([math.log(3 / 2) + 0.1, math.log(1 / 2) + 0.1])
    assert known.left.tolist() == pytest.approx([0.75 * math.log(3), -0.25 * math.log(3), 0.0])
    assert found.some(np.array([True, True])).left.tolist() == found.left.tolist()


def test_few_times_have_less_than_the_least_correction():
    known = _times([1.0] * 4, [1.0] * 4, [0] * 4, (FIRST,))
    for leaf, least in ((-0.05, 0.95), (-0.5, learned.LEAST)):
        trees = learned.Trees(SIMPLE.traits[:1], SIMPLE.limits[:1], np.full((1, 64), leaf))
        assert learn.least(trees, known) == least


def test_trees_after_those_of_another_family_learn_what_these_leave(monkeypatch):
    """The kin's tree explains all but a tenth, which is learned; both count where a choice asks."""
    samples = [
        dataclasses.replace(each, seconds=each.seconds * 1.1 ** (number % 3)) for number, each in enumerate(_samples())
    ]
    known = learn.times(samples, H200)["simt"]
    kin = learn.grown(learn.times(_samples(), H200)["simt"])
    monkeypatch.setattr(learned, "families", partial(dict, kin=kin))
    after = dataclasses.replace(known, after="kin")
    assert after.first.tolist() == kin.log(known.traits).tolist()
    trees = learn.grown(after, 40)
    assert trees.after == "kin"
    own = dataclasses.replace(trees, after="")
    assert trees.log(known.traits) == pytest.approx(kin.log(known.traits) + own.log(known.traits))
    assert np.abs(_unexplained(known, trees.log(known.traits))).max() < 0.03


def test_the_command_writes_trees_that_choices_use(tmp_path, monkeypatch, capsys):
    table = tmp_path / "times.txt"
    by_problem: dict[Problem, list[Sample]] = {}
    for sample in _samples():
        by_problem.setdefault(sample.problem, []).append(sample)
    table.write_text(
        "\n".join(
            f"== {p.m}x{p.n}x{p.k} fp32 ieee tn torch 90.0 us\n"
            + "\n".join(f"   1.000 {s.seconds * 1e6:9.3f}  10.0 {s.config}" for s in samples)
            for p, samples in by_problem.items()
        )
    )
    monkeypatch.setattr(learned, "TREES", tmp_path / "learned.json")
    assert learn.main([str(table), "--trees", "40", "--traits", "12", "--write"]) == 0
    printed = capsys.readouterr().out
    assert "with trees" in printed
    assert "written to" in printed
    learned.families.cache_clear()
    compiled.library.cache_clear()
    heuristics.forget()
    try:
        assert list(learned.families()) == ["simt"]
        assert learned.families()["simt"].traits.shape == (40, learned.DEPTH)
        assert learned.families()["simt"].traits.max() < 12
        assert _model(TEXTS[1], Problem.of(1400, 2000, 3000, "fp32")).terms(1400, 2000, 3000).learned > 1.1
    finally:
        monkeypatch.undo()
        learned.families.cache_clear()
        compiled.library.cache_clear()
        heuristics.forget()


@pytest.mark.parametrize("given", [["none.txt"], ["few.txt"], ["few.txt", "--family", "sm90"]])
def test_tables_without_enough_times_are_refused(given, tmp_path, capsys):
    (tmp_path / "few.txt").write_text(f"== 64x64x64 fp32 ieee tn torch 90.0 us\n   1.000 80.000  10.0 {TEXTS[0]}\n")
    with pytest.raises(SystemExit):
        learn.main([str(tmp_path / given[0]), *given[1:]])
    said = capsys.readouterr().err
    assert "No such file" in said or "times of 50 shapes or more" in said


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Runs the command with tables of a family each, and gives what it wrote; `TREES` is a copy."""
    monkeypatch.setattr(learned, "TREES", tmp_path / "learned.json")
    (tmp_path / "learned.json").write_text(Path(ROOT, "cutegemm/data/learned.json").read_text())
    learned.families.cache_clear()

    def run(*given: str) -> dict[str, dict[str, object]]:
        lines = []
        for number in range(60):
            m = 64 * (1 + number)
            lines.append(f"== {m}x512x256 bf16 ieee tn torch 9.0 us")
            # Half of the tiles of sm80 take as long as sm90 expects, the others three times as long.
            for text, longer in (
                ("sm90/64x64x64/coop1/c1x1/s8/serp8/pdl", 2.0), ("sm90/64x32x64/coop1/c1x1/s8/serp8/pdl", 2.0),
                ("sm80/32x32x64/w16x16/s4/g8", 2.4), ("sm80/16x32x64/w16x16/s4/g8", 2.4),
            ):  # fmt: skip
                problem = Problem.of(m, 512, 256, "bf16")
                shape = CUTE.footprint(CUTE.parse(text), problem.signature, H200)
                alone = _model(text, problem, cost_rates.rates(shape.family))
                lines.append(f"   1.000 {alone.seconds(*problem.evened) * 1e6 * longer:.5f} 10.0 {text}")
        (tmp_path / "times.txt").write_text("\n".join(lines))
        assert learn.main([str(tmp_path / "times.txt"), "--trees", "12", "--write", *given]) == 0
        learned.families.cache_clear()
        return json.loads((tmp_path / "learned.json").read_text())["families"]

    yield run
    monkeypatch.undo()
    learned.families.cache_clear()


def test_the_command_learns_what_another_familys_trees_leave(written, capsys):
    before = json.loads(learned.TREES.read_text())["families"]
    found = written("--after", "sm90")
    assert found["sm90"] == before["sm90"], "trees do not come after themselves"
    assert found["sm80/small"]["after"] == "sm90"
    assert learned.families()["sm80/small"].least == found["sm80/small"]["least"] >= learned.LEAST
    assert found["sm80/small"]["model"] == learn.model_of("sm80/small", "sm90")
    assert learned.families()["sm80/small"].after == "sm90"
    assert "trees of sm90" in capsys.readouterr().out


def test_the_command_learns_how_a_family_stands_to_another(written, capsys):
    """What sm80 takes beyond its estimate, over what sm90 takes beyond its own as corrected."""
    found = written("--family", "sm80/small", "--beside", "sm90")
    assert found["sm80/small"]["beside"] == "sm90"
    problem = Problem.of(640, 512, 256, "bf16")
    text = "sm80/32x32x64/w16x16/s4/g8"
    model = learn.Watched(CUTE.footprint(CUTE.parse(text), problem.signature, H200), problem.signature, H200)
    model.seconds(*problem.evened)
    factor = math.exp(float(learned.families()["sm80/small"].log(np.array([model.found]))[0]))
    sm90 = [_model(f"sm90/64x{n}x64/coop1/c1x1/s8/serp8/pdl", problem).terms(*problem.evened).learned for n in (64, 32)]
    assert factor == pytest.approx(2.4 / 2.0 * math.sqrt(sm90[0] * sm90[1]), rel=0.05)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("sm80")]
    assert [row[-4] for row in rows] == ["120", "120"]


@pytest.mark.parametrize("given", [["--after", "sm90/fp8"], ["--beside", "none"], ["--after", "sm90", "--traits", "5"]])
def test_trees_stand_on_those_that_stand_alone(given, written, capsys):
    with pytest.raises(SystemExit):
        written(*given)
    assert given[0] in capsys.readouterr().err


def test_the_package_has_trees_of_todays_model_and_of_tables_that_it_has():
    """Where this fails: `python -m tuning.learn`, with the command in the file."""
    stored = json.loads(learned.TREES.read_text())["families"]
    for family, row in stored.items():
        assert row["model"] == learn.model_of(family, row.get("after", ""), row.get("beside", ""))
        tables = [word for word in row["command"].split() if word.startswith("tuning/")]
        assert tables
        assert all((ROOT / table).is_file() for table in tables)


def test_an_explanation_names_the_factor():
    said = heuristics.explain(Problem.of(1000, 600, 4000, "fp32"), CUTE.parse(TEXTS[0]), "cute", H200)
    assert re.search(r"; times \d\.\d\d, learned from measured times$", said)
    other = Problem.of(1000, 600, 4000, "fp32", precision="tf32x3")
    config = CUTE.parse("sm90/128x64x32/coop2/c1x1/s2/serp8/pdl")
    assert "learned" not in heuristics.explain(other, config, "cute", H200)


@pytest.mark.parametrize(("text", "dtype", "counts"), [
    ("sm90/128x128x64/pp/c1x2/s6/serp8/swap/pdl", "bf16", False), (TEXTS[0], "fp32", True),
])  # fmt: skip
def test_heavy_products_on_tensor_cores_are_judged_by_the_model_alone(text, dtype, counts):
    """At the power limit, to which the times of trees do not bring the card. 2 * 2500 * 2000 * 10000 is 1e11."""
    light, heavy = (Problem.of(2500, 2000, k, dtype) for k in (10_000, 10_008))
    model = _model(text, light)
    assert model.terms(*light.evened).learned != 1.0
    assert (model.terms(*heavy.evened).learned != 1.0) == counts
    half = dataclasses.replace(heavy, k=heavy.k // 2, batch=2)
    assert (model.terms(*half.evened).learned != 1.0) == counts, "a batch counts as a whole"
    for problem in (light, heavy, half):
        if compiled.library() is not None:
            assert compiled.Group([model]).cheapest(*problem.evened, 1.0)[0] == model.seconds(*problem.evened)
    assert learned.MOST_FLOPS == timing.SUSTAINED_FLOPS == light.flops
    samples = [Sample(problem, "cute", text, 1e-3) for problem in (light, heavy)]
    (known,) = learn.times(samples, H200).values()
    assert len(known.seconds) == 1 + counts


def test_the_tile_order_does_not_change_how_many_ctas_an_sm_holds():
    for majors in ("tn", "tt"):
        signature = Problem.of(64, 64, 64, "fp32", majors=majors).signature
        for text in ("simt/32x64x16/w16x32/s3", "simt/128x64x8/w32x64/s3", "simt/16x32x64/w16x32/s4"):
            end = "/x8" if text.startswith("simt/16") else ""
            ctas = {CUTE.footprint(CUTE.parse(f"{text}/g{g}{end}"), signature, H200).ctas for g in (1, 4, 8)}
            assert len(ctas) == 1
