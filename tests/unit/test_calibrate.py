"""Fitting the cost model: tables are read, known constants are found again, the fit is the same each time."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cutegemm import backend
from cutegemm.choice import cost_rates
from cutegemm.choice.cost_model import Model
from cutegemm.cute.ampere.footprint import SM80
from cutegemm.cute.simt.footprint import SIMT
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.winners import Measurement, Winners
from cutegemm.winners.row import BOTH
from cutegemm.winners.table import dump
from tuning import calibrate

H200 = arch.get("H200")
TIMES = Path(calibrate.__file__).parent / "times"
TABLE = """compiled 96 in 15s
== 512x512x512 bf16 tn torch 3.65 us 73.5 TF |  SM 1980 MHz, memory 3201 MHz, 137.70 of 700.00 W, 37 C
   1.291      2.83   94.9 sm90/64x32x128/coop1/c1x1/s6/serp8/pdl
   1.024      3.57   75.2 sm90/64x64x64/coop1/c1x1/s8/serp8
== 1024x1024x1024 fp32 tf32 nt torch 13.0 us 160 TF | SM 1980 MHz
   0.500     26.00   80.0 sm80/128x128x32/w64x32/s4/g8
[86s]
"""
CONFIGS = (
    "sm80/128x256x64/w64x64/s3/g8", "sm80/128x128x32/w64x64/s4/g8", "sm80/128x64x32/w64x32/s4/g8",
    "sm80/64x64x64/w32x32/s4/g8", "sm80/32x32x64/w16x16/s4/g8",
)  # fmt: skip
SHAPES = ((256, 256, 256), (1024, 1024, 1024), (4096, 4096, 4096), (16, 4096, 4096), (512, 512, 8192))
TRUTH = dataclasses.replace(SM80.first, math=0.5, launch=4.0, step=60.0)


def synthetic() -> list[calibrate.Sample]:
    """The times of a GPU that obeys the model with `TRUTH`."""
    samples = []
    for shape in SHAPES:
        problem = Problem.of(*shape, "fp16")
        for text in CONFIGS:
            config = backend.get("cute").parse(text)
            cost = Model(backend.get("cute").footprint(config, problem.signature, H200), problem.signature, H200, TRUTH)
            samples.append(calibrate.Sample(problem, "cute", text, cost.seconds(*shape)))
    return samples


def test_a_text_table():
    samples = calibrate.read_table(TABLE)
    assert [s.config for s in samples] == [
        "sm90/64x32x128/coop1/c1x1/s6/serp8/pdl", "sm90/64x64x64/coop1/c1x1/s8/serp8", "sm80/128x128x32/w64x32/s4/g8",
    ]  # fmt: skip
    assert samples[0].problem == Problem.of(512, 512, 512, "bf16")
    assert samples[0].seconds == pytest.approx(2.83e-6)
    assert samples[2].problem == Problem.of(1024, 1024, 1024, "fp32", majors="nt", precision="tf32")
    (unsaid,) = calibrate.read_table(TABLE[TABLE.index("== 1024") :].replace(" tf32 ", " "))
    assert unsaid == samples[2]
    with pytest.raises(ValueError, match="no measured lines"):
        calibrate.read_table("nothing here")


def test_gate_and_up_in_a_text_table():
    row = "   1.0 10.0 90.0 sm90/128x128x128/coop2/c1x1/s4/serp8/pdl\n"
    plain, blocks = calibrate.read_table(
        f"== 9x256x384 e4m3 ieee swiglu tn\n{row}== 9x256x384 e4m3 blocks swiglu tn\n{row}"
    )
    for sample, count in ((plain, 0), (blocks, 2)):
        program = sample.problem.epilogue.program
        assert (sample.problem.m, sample.problem.n, sample.problem.k) == (9, 256, 384)
        assert program.gating == "halves"
        assert len(program.block_scales) == count
        assert sample.problem.out_dtype == "bf16"


@pytest.mark.parametrize("majors", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_problem_from_its_text(majors, batch):
    for dtype, precision in (("bf16", "ieee"), ("fp32", "tf32")):
        problem = Problem.of(48, 40, 1001, dtype, majors=majors, batch=batch, precision=precision)
        assert calibrate.parse_problem(str(problem)) == problem
    with pytest.raises(ValueError, match="contiguous"):
        calibrate.parse_problem("48x40 bf16")


def test_rows_with_k_split_can_be_left_out(tmp_path):
    head = "== 512x512x512 bf16 tn torch 3.65 us\n"
    kept = ("sm90/64x32x128/coop1/c1x1/s6/serp8/pdl", "sm90/64x32x128/coop1/c1x1x2/s6/row")
    split = ("sm90/64x32x128/coop1/c1x1/s6/row/k4/pdl", "sm90/64x32x128/coop1/c1x1/s6/row/k16")
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    for file in (old, new):
        file.write_text(head + "".join(f"   1.0      2.83   94.9 {text}\n" for text in kept + split))
    found = calibrate.read_all([new], [old], H200)
    assert [s.config for s in found] == [*kept, *split, *kept]


def test_winners_tables_and_other_files(tmp_path):
    problem = Problem.of(64, 64, 64, "fp16")
    base = Measurement("H200", 132, str(problem), "cute", CONFIGS[1], "f", 5e-6, "ok", "2026-01-01T00:00:00+00:00")
    wrong = dataclasses.replace(base, verdict="wrong: all of it")
    file = tmp_path / "winners.json"
    file.write_text(dump([base, wrong, dataclasses.replace(base, seconds=None, verdict="failed to compile: no")]))
    assert calibrate.read(file, H200) == [calibrate.Sample(problem, "cute", CONFIGS[1], 5e-6)]
    file.write_text("{}")
    with pytest.raises(ValueError, match="neither a table of winners nor"):
        calibrate.read(file, H200)


def measured(problem, config, seconds, reference=None, kind="final", verdict="ok"):
    return Measurement("H200", 132, str(problem), "cute", config, "f", seconds, verdict, "2026-01-01T00:00:00+00:00",
                       kind, reference)  # fmt: skip


def test_a_winners_store_counts_in_units_of_torch(tmp_path):
    problem, other = Problem.of(1024, 1024, 1024, "fp16"), Problem.of(512, 512, 512, "fp16")
    store = Winners(tmp_path / "store.sqlite3")
    store.record(
        measured(problem, CONFIGS[0], 8e-6, 10e-6),
        measured(problem, CONFIGS[1], 9e-6, 10.5e-6),  # all of it was slower by 5 %
        measured(other, CONFIGS[0], 3e-6, 30e-6),  # torch's time for another problem says nothing here
        measured(problem, CONFIGS[2], 9e-6, 12e-6),  # disturbed
        measured(problem, CONFIGS[3], 5e-6),  # measured without torch: as it is
        measured(problem, CONFIGS[4], 1e-6, 10e-6, verdict="wrong: not the numbers"),
        measured(problem, CONFIGS[4], 7e-6, 10e-6),
        Measurement("H200", 132, "1x2x3 of another version", "cute", CONFIGS[0], "f", 1e-6, "ok"),
    )
    samples = calibrate.read(store.path, H200)
    here = {s.config: s.seconds for s in samples if s.problem == problem}
    usual = 10.25e-6  # torch's median
    assert here == pytest.approx(
        {
            CONFIGS[0]: 8e-6 * usual / 10e-6,
            CONFIGS[1]: 9e-6 * usual / 10.5e-6,
            CONFIGS[3]: 5e-6,
            CONFIGS[4]: 7e-6 * usual / 10e-6,
        }
    )
    assert [(s.config, s.seconds) for s in samples if s.problem != problem] == [(CONFIGS[0], 3e-6)]
    assert not any(s.burst for s in samples)


def test_quick_rows_of_long_products_are_bursts():
    """Judged beside quick rows alone: torch too is faster in a burst than when the card is at its power limit."""
    short, long = Problem.of(512, 512, 512, "fp16"), Problem.of(8192, 8192, 8192, "fp16")
    rows = [
        measured(problem, config, seconds, reference, kind)
        for problem in (short, long)
        for config, seconds, reference, kind in (
            (CONFIGS[0], 2e-3, 2e-3, "final"), (CONFIGS[1], 2.1e-3, 2e-3, "final"),
            (CONFIGS[0], 1.5e-3, 1.6e-3, "quick"), (CONFIGS[1], 1.6e-3, 1.6e-3, "quick"),
            (CONFIGS[2], 1.6e-3, 2e-3, "quick"),  # disturbed
        )
    ]  # fmt: skip
    samples = calibrate.from_measurements(rows, H200)
    assert [(s.problem, s.config, s.burst) for s in samples] == [
        (short, CONFIGS[0], False), (short, CONFIGS[1], False), (short, CONFIGS[0], False), (short, CONFIGS[1], False),
        (long, CONFIGS[0], False), (long, CONFIGS[1], False), (long, CONFIGS[0], True), (long, CONFIGS[1], True),
    ]  # fmt: skip
    assert [s.seconds for s in samples] == [2e-3, 2.1e-3, 1.5e-3, 1.6e-3] * 2
    assert not calibrate.from_measurements([replace(row, method=BOTH) for row in rows], H200), "means of two states"
    fit = calibrate.by_family(samples, H200)["sm80"]
    assert {key: len(rows) for key, rows in fit.shapes.items()} == {
        (short, False): 4, (long, False): 2, (long, True): 2,
    }  # fmt: skip


def test_a_thinned_fit_keeps_the_fastest_and_some_of_all():
    problem = Problem.of(64, 64, 64, "fp16")
    fit = calibrate.by_family([calibrate.Sample(problem, "cute", CONFIGS[i % 5], (200 - i) * 1e-6) for i in range(200)],
                              arch.get("A100"))["sm80"]  # fmt: skip
    (kept,) = ([seconds for _, seconds in rows] for rows in fit.thinned().shapes.values())
    assert len(kept) == calibrate.MOST
    assert kept == sorted(set(kept))
    assert kept[: calibrate.MOST // 2] == pytest.approx([i * 1e-6 for i in range(1, calibrate.MOST // 2 + 1)])
    assert kept[-1] > 185e-6


def swept(shape, rows, bound):
    results = [{"backend": "cute", "config": c, "verdict": v, "seconds": s, "torch_seconds": t} for c, s, t, v in rows]
    return {"problem": str(Problem.of(*shape, "fp16")), "bound_seconds": bound, "results": results}


def test_a_sweep_counts_in_units_of_torch(tmp_path):
    rows = [
        (CONFIGS[0], 8e-6, 10e-6, "ok"),
        (CONFIGS[1], 9e-6, 10.5e-6, "ok"),  # all of it was slower by 5 %
        (CONFIGS[2], 9e-6, 12e-6, "ok"),  # disturbed
        (CONFIGS[3], None, None, "wrong: not the numbers"),
        (CONFIGS[4], 7e-6, 10e-6, "ok"),
    ]
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps({"shapes": [swept(SHAPES[1], rows, 5e-6), swept(SHAPES[2], rows[:1], 150e-6)]}))
    *short, long = calibrate.read(file, H200)
    assert [(s.config, s.burst) for s in short] == [(CONFIGS[i], False) for i in (0, 1, 4)]
    assert short[1].seconds == pytest.approx(9e-6 * 10.25 / 10.5)
    assert (long.problem, long.burst) == (Problem.of(*SHAPES[2], "fp16"), True)
    assert calibrate.read_sweep(swept(SHAPES[0], rows[3:4], 1e-6)) == []
    shape = swept(SHAPES[1], rows, 5e-6)
    shape["results"][0]["method"] = BOTH
    assert [s.config for s in calibrate.read_sweep(shape)] == [CONFIGS[1], CONFIGS[4]]


def test_bursts_tell_nothing_of_power():
    fit = calibrate.by_family([dataclasses.replace(sample, burst=True) for sample in synthetic()], H200)["sm80"]
    hungry = dataclasses.replace(TRUTH, flop_pj=TRUTH.flop_pj * 3)
    pull = fit.loss(hungry) - fit.loss(TRUTH)
    steady = calibrate.by_family(synthetic(), H200)["sm80"]
    assert steady.loss(hungry) - steady.loss(TRUTH) > 10 * abs(pull)


@pytest.mark.slow
def test_known_constants_are_found_again():
    fit = calibrate.by_family(synthetic(), H200)["sm80"]
    found = fit.search()
    assert fit.loss(found) < fit.loss(SM80.first) / 5
    assert fit.search() == found
    assert fit.loss(fit.search(found)) <= fit.loss(found)  # --refine begins there
    for _, count, mean_error, largest, lost, _ in fit.report(found):
        assert count == len(CONFIGS)
        assert mean_error < 0.05
        assert largest < 0.15
        assert lost < 0.02
    assert found.launch == pytest.approx(TRUTH.launch, rel=0.25)
    assert found.math == pytest.approx(TRUTH.math, rel=0.25)


@pytest.mark.slow
def test_no_constant_leaves_its_reach():
    """The times are a tenth of the model's: rates would go further up than they may."""
    faster = [dataclasses.replace(sample, seconds=sample.seconds / 10) for sample in synthetic()]
    fit = calibrate.by_family(faster, H200)["sm80"]
    found, reach = fit.search(), calibrate.REACH * 1.001
    shares = [
        getattr(found, field.name) / getattr(SM80.first, field.name)
        for field in dataclasses.fields(found)
        if getattr(SM80.first, field.name)
    ]
    assert all(1 / reach <= share <= reach for share in shares)
    assert max(shares) > 2
    beyond = dataclasses.replace(SM80.first, launch=SM80.first.launch * 100)
    assert fit.search(beyond).launch <= SM80.first.launch * reach


def test_without_scipy_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "scipy", None)
    table = tmp_path / "table.txt"
    table.write_text(TABLE)
    assert calibrate.main([str(table), "--family", "sm90", "--least", "1"]) == 2
    assert "pip install 'cutegemm[tuning]'" in capsys.readouterr().err


def test_configurations_not_valid_today_are_passed_over():
    problem = Problem.of(64, 64, 64, "fp16")
    samples = [
        calibrate.Sample(problem, "cute", text, 1e-6) for text in ("sm80/not/one", "sm80/256x256x64/w64x64/s8/g8")
    ]
    assert calibrate.by_family(samples, H200) == {}


def test_command(tmp_path, monkeypatch, capsys):
    constants = tmp_path / "data" / "cost_model.json"
    monkeypatch.setattr(calibrate, "CONSTANTS", constants)
    table = tmp_path / "table.txt"
    blocks = {}
    for sample in synthetic():
        blocks.setdefault(sample.problem, []).append(f"   1.000 {sample.seconds * 1e6:.3f} 1.0 {sample.config}")
    heads = {p: f"== {p.m}x{p.n}x{p.k} fp16 tn torch 1.0 us" for p in blocks}
    table.write_text("\n".join("\n".join([heads[p], *rows]) for p, rows in blocks.items()))
    monkeypatch.setattr(calibrate.Fit, "search", lambda self, start: TRUTH)
    assert calibrate.main([str(table), "--write", "--arch", "A100"]) == 0
    assert "25 times of 5 shapes" in capsys.readouterr().out
    stored = json.loads(constants.read_text())["families"]["sm80"]
    assert stored["math"] == TRUTH.math
    assert stored["gpu"] == "A100"
    assert stored["backend"] == "cute"
    assert stored["command"] == "python -m tuning.calibrate table.txt --write --arch A100"
    monkeypatch.setattr(cost_rates, "CONSTANTS", constants)
    cost_rates.forget()
    try:
        assert cost_rates.rates(SM80) == TRUTH
        assert cost_rates.fitted(SM80)
        assert not cost_rates.fitted(SIMT)
        assert cost_rates.fitted_any("cute")
        assert not cost_rates.fitted_any("legacy")
    finally:
        cost_rates.forget()
    assert calibrate.main([str(table), "--least", "26", "--arch", "A100"]) == 0
    assert "too few to fit" in capsys.readouterr().out
    monkeypatch.chdir(TIMES)
    for kept in ("fsimt37.txt", str(TIMES / "fsimt37.txt")):  # the repository's files can be found again
        assert calibrate.main([str(table), kept, "--family", "sm80", "--write"]) == 0
        written = json.loads(constants.read_text())["families"]["sm80"]["command"]
        assert " table.txt tuning/times/fsimt37.txt " in written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file"], "no-such-file"),
        (["--arch", "H900", "x"], "not in the table"),
        (["{table}", "--family", "simt"], "no measured times on H200 of the family 'simt'; pass TABLEs that hold some"),
        (["{table}", "--arch", "A6000"], "no measured times on A6000 of any kernel family; pass TABLEs"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, tmp_path, capsys):
    table = tmp_path / "table.txt"
    table.write_text(TABLE)
    with pytest.raises(SystemExit):
        calibrate.main([a.format(table=table) for a in arguments])
    assert message in capsys.readouterr().err


def test_rows_of_another_gpu_say_nothing(tmp_path):
    problem = Problem.of(512, 512, 512, "bf16")
    config = "sm90/64x32x128/coop1/c1x1/s7/serp8/swap/pdl"
    store = Winners(tmp_path / "winners.sqlite3")
    rows = [
        Measurement(gpu, count, str(problem), "cute", config, "f", seconds, "ok", reference_seconds=torch)
        for gpu, count, seconds, torch in (("H200", 132, 3e-6, 4e-6), ("A100", 108, 9e-6, 10e-6), ("Z9", 7, 1e-6, 9e-6))
    ]
    store.record(*rows)
    assert store.path is not None
    assert [sample.seconds for sample in calibrate.read(store.path, H200)] == [3e-6]


def test_files_that_are_no_tables(tmp_path):
    with pytest.raises(FileNotFoundError):
        calibrate.read(tmp_path / "missing.sqlite3", H200)
    damaged = tmp_path / "damaged.sqlite3"
    damaged.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"damaged\.sqlite3: not an SQLite file"):
        calibrate.read(damaged, H200)
    assert damaged.read_bytes() == b"nothing of the kind"
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.txt: neither a table"):
        calibrate.read(binary, H200)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json: "):
        calibrate.read(broken, H200)
    rows = (
        "3",
        "[3]",
        '{"a": 1}',
        '[{"config": "sm90/x", "us": 3}]',
        '[{"problem": "x", "backend": "y", "config": "z", "us": "3"}]',
    )
    for text in ('{"shapes": [{}]}', '{"shapes": 3}', *(f'{{"results": {each}}}' for each in rows)):
        broken.write_text(text)
        with pytest.raises(ValueError, match=r"broken\.json: "):
            calibrate.read(broken, H200)


@pytest.mark.parametrize("table", sorted(TIMES.glob("*.txt")), ids=lambda table: table.stem)
@pytest.mark.product(keep=8)
def test_the_kept_times_can_be_fitted_again(table):
    """Every line is read, and valid today."""
    samples = calibrate.read(table, H200)
    lines = [line for line in table.read_text().splitlines() if line.startswith("   ")]
    fits = calibrate.by_family(samples, H200)
    assert set(fits) <= {"simt", "vector", "sm80/small", "sm90", "sm90/fp8", "sm90/int8", "sm90/tf32"}
    assert len(samples) == len(lines) == sum(len(rows) for fit in fits.values() for rows in fit.shapes.values())


def test_what_families_but_sm90_were_fitted_to_is_in_the_repository():
    named = json.loads((Path(cost_rates.__file__).parents[1] / "data" / "cost_model.json").read_text())["families"]
    words = {
        word
        for family in ("simt", "vector", "sm80/small")
        for word in named[family]["command"].split()
        if "/times/" in word
    }
    assert len(words) == 5
    assert words <= {f"tuning/times/{table.name}" for table in TIMES.glob("*.txt")}
