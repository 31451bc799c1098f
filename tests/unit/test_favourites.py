"""What the cost model likes best, timed on a fake timer, and the text table that the command prints."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from cutegemm import backend as backends
from cutegemm.choice import heuristics
from cutegemm.problem import Problem
from tests.tuning_fakes import H200, FakeCompiler, FakeTimer
from tuning import calibrate, contest, favourites, random_shapes


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    heuristics.forget()


def test_the_models_favourites_are_timed_and_what_is_printed_is_a_table_for_the_fit():
    problems = [Problem.of(96, 1016, 272, "fp32"), Problem.of(4096, 4096, 512, "fp32", majors="nt")]
    also = backends.get("cute").parse("simt/64x64x16/w32x32/s3/g1")
    wanted = [favourites.favourites(problem, H200, 4, [also]) for problem in problems]
    for problem, candidates in zip(problems, wanted, strict=True):
        assert candidates[0].config == next(heuristics.ascending(problem, H200, "cute"))
        whole = [each.text.split("/k")[0] for each in candidates]
        assert len(set(whole)) == 5  # one of each candidate, with the splits of K that suit it
        assert whole[4] == str(also)
    first, second, *_ = wanted[0]
    wrong = next(each for each in wanted[1] if each.key not in {one.key for one in wanted[0]})
    timer = FakeTimer({first.key: 2e-6, second.key: 1e-6}, torch=4e-6, wrong={wrong.key: "wrong: all"})
    machine = contest.Machine(timer, FakeCompiler())
    text = "\n".join(favourites.table(problems, 4, [also], machine, 3))
    assert timer.opened == problems
    assert {rounds for _, rounds, _ in timer.timed} == {3}
    assert f"# {wrong.text}: wrong: all" in text
    assert text.index(second.text) < text.index(first.text)
    samples = calibrate.read_table(text)
    assert {sample.problem for sample in samples} == set(problems)
    assert [(sample.config, sample.seconds) for sample in samples[:2]] == [(second.text, 1e-6), (first.text, 2e-6)]
    assert len(samples) == 9  # all but one of five each


def test_shapes_of_other_kinds_are_drawn_with_aligned_rows_and_timed_as_such(monkeypatch, capsys):
    for dtype, precision in (("e4m3", "fast"), ("int8", "ieee"), ("fp32", "tf32")):
        for draw in random_shapes.KINDS.values():
            for problem in draw(12, 4, dtype, "tn", H200, precision):
                assert (problem.dtype, problem.precision) == (dtype, precision)
                assert problem.signature.align_a == problem.signature.align_b == 16
    timer = FakeTimer({}, torch=1e-6)
    monkeypatch.setattr(contest, "machine", lambda jobs: nullcontext(contest.Machine(timer, FakeCompiler())))
    for options, kinds in (
        (["--dtype", "e4m3", "--precision", "fast"], [("e4m3", "fast", "tn")]),
        (["--dtype", "fp32", "--precision", "tf32"], [("fp32", "tf32", "tn")]),
        (["--dtype", "fp32"], [("fp32", "ieee", majors) for majors in ("tn", "tt", "nn", "nt")]),
        (["--dtype", "e4m3", "--scaling", "blocks"], [("e4m3", "ieee", "tn")]),
        (["--dtype", "int8", "--scaling", "blocks"], [("int8", "ieee", "tn")]),
        (
            ["--dtype", "bf16", "--epilogue", "swiglu", "--majors", "tn,nn"],
            [("bf16", "ieee", "tn"), ("bf16", "ieee", "nn")],
        ),
        (["--dtype", "e4m3", "--epilogue", "swiglu"], [("e4m3", "ieee", "tn")]),
        (["--dtype", "e4m3", "--scaling", "blocks", "--epilogue", "swiglu"], [("e4m3", "ieee", "tn")]),
    ):
        timer.opened.clear()
        favourites.main([*options, "--count", "1", "--best", "1"])
        assert [(p.dtype, p.precision, p.signature.majors) for p in timer.opened] == kinds
        assert all(("--scaling" in options) == bool(p.epilogue.program.block_scales) for p in timer.opened)
        assert all(("--epilogue" in options) == (p.epilogue.gating == "halves") for p in timer.opened)
        samples = calibrate.read_table(capsys.readouterr().out)
        assert [sample.problem for sample in samples] == timer.opened
    for wrong, said in (
        (["--dtype", "bf16", "--precision", "fast"], "--precision: got fast with bf16, which has no such products"),
        (
            ["--dtype", "bf16", "--scaling", "blocks"],
            "--scaling: got blocks with bf16; scales are for e4m3, e5m2, int8",
        ),
        (
            ["--dtype", "e4m3", "--precision", "fast", "--scaling", "blocks"],
            "--scaling: got blocks with --precision fast",
        ),
    ):
        with pytest.raises(SystemExit):
            favourites.main(wrong)
        assert said in capsys.readouterr().err


def test_of_some_favourites_other_splits_of_k_are_timed_too():
    problem = Problem.of(256, 512, 8192, "fp32")
    plain = favourites.favourites(problem, H200, 6)
    found = favourites.favourites(problem, H200, 6, more=3)
    assert found[:6] == plain
    assert 6 < len(found) <= 9
    splits = {each.text.split("/k")[0]: each.config.splits for each in plain}
    for each in found[6:]:
        few, many = sorted((each.config.splits, splits[each.text.split("/k")[0]]))
        assert many >= favourites.OTHER_SPLITS * few


@pytest.mark.parametrize("sizes", [(136, 17312, 5488), (4232, 22344, 1960)])
def test_what_the_choice_takes_is_timed_where_it_is_asked_for(sizes):
    problem = Problem.of(*sizes, "bf16", majors="nt")
    text = str(heuristics.untuned(problem, H200, "cute")[1])
    plain = [each.text for each in favourites.favourites(problem, H200, 1)]
    assert text not in plain  # else this shape shows nothing: name another one
    assert [each.text for each in favourites.favourites(problem, H200, 1, chosen=True)] == [*plain, text]


def test_shapes_of_so_many_flop_are_drawn(capsys):
    for draw in random_shapes.KINDS.values():
        problems = draw(9, 5, "bf16", "nt", H200, "ieee", (1e10, 1e11))
        assert len({str(problem) for problem in problems}) == 9
        assert all(1e10 <= problem.flops <= 1e11 for problem in problems)
        with pytest.raises(ValueError, match=r"of 20000 shapes drawn 0 have 1e\+18 to 1e\+19 flop and serve"):
            draw(1, 5, "bf16", "nt", H200, "ieee", (1e18, 1e19))
    for wrong in ("1e10", "1e11..1e10", "a..b", "1..2..3", "nan..1"):
        with pytest.raises(SystemExit):
            favourites.main(["--flops", wrong])
        said = f"--flops: got {wrong!r}, accepted are two numbers of flop such as 1e10..1e11"
        assert said in capsys.readouterr().err


def test_of_each_tile_one_favourite_is_timed_and_heavy_products_in_blocks():
    problems = [Problem.of(m, 4096, 4096, "bf16") for m in (512, 4096)]
    tiles = lambda found: {tuple(each.text.split("/")[1:3]) for each in found}  # noqa: E731
    for problem in problems:
        found = favourites.favourites(problem, H200, 8, tiles=True)
        assert len(tiles(found)) == len(found) == 8
        assert found[0] == favourites.favourites(problem, H200, 1)[0]
        assert len(tiles(favourites.favourites(problem, H200, 8))) < 8
    timer = FakeTimer({each.key: 1e-6 for p in problems for each in favourites.favourites(p, H200, 2, tiles=True)})
    list(favourites.table(problems, 2, [], contest.Machine(timer, FakeCompiler()), 7, tiles=True))
    assert [(rounds, block) for _, rounds, block in timer.timed] == [(7, 0.0), (2, favourites.BLOCK_SECONDS)]


def test_favourites_are_of_families_that_a_choice_compares():
    """By the model alone small tiles of mma.sync would be liked at 8x28672x4096, where they take three times as long
    as cuBLAS (fsm90-4)."""
    for sizes, expected in (((8, 28672, 4096), {"sm90"}), ((64, 64, 64), {"sm80", "sm90"})):
        found = favourites.favourites(Problem.of(*sizes, "bf16", majors="nn"), H200, 60)
        assert {each.config.family for each in found} == expected


def test_a_shape_whose_favourites_cannot_be_timed_is_named():
    (problem,) = random_shapes.sizes(1, 3, "fp32", "tn", H200)
    machine = contest.Machine(FakeTimer({}, open_fails=f"{problem}: no memory"), FakeCompiler())
    (text,) = favourites.table([problem], 2, [], machine, 3)
    assert text == f"# {problem}: no memory"
    first = favourites.favourites(problem, H200, 1)[0]
    machine = contest.Machine(FakeTimer({}, breaks=[first.key]), FakeCompiler())
    (text,) = favourites.table([problem], 2, [], machine, 3)
    assert text == f"# {problem}: the process died"
    machine = contest.Machine(FakeTimer({}, wrong={first.key: "wrong: all"}), FakeCompiler())
    (text,) = favourites.table([problem], 1, [], machine, 3)
    assert text == f"# {problem}: nothing to time\n# {first.text}: wrong: all"
    transposed = Problem.of(128, 256, 64, "e4m3", majors="nt")  # which is copied first
    (text,) = favourites.table([transposed], 2, [], machine, 3)
    assert text == f"# {transposed}: no candidate serves it"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--majors", "tn,xx"], "got 'xx', accepted are tn, tt, nn, nt"),
        (["--also", "simt/64"], "config: got 'simt/64'"),
        (["--count", "0"], "got '0', expected a whole number"),
    ],
)
def test_what_favourites_does_not_take_is_named(given, said, capsys):
    with pytest.raises(SystemExit):
        favourites.main(given)
    assert said in capsys.readouterr().err
