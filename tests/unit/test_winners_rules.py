"""Rows that others wrote: what may decide, what is listed only, and that nothing in a row raises an exception."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutegemm import backend as backends
from cutegemm import winners
from cutegemm.choice import heuristics, plan
from cutegemm.hardware.arch import ARCHS
from cutegemm.problem import Problem
from cutegemm.problem import text as problem_text
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.text import parse
from cutegemm.tuner import run as sweep_run
from cutegemm.winners import Measurement, Winners, lookup, neighbours
from cutegemm.winners import table as winners_table
from cutegemm.winners.file import COLUMNS
from cutegemm.winners.fingerprint import fingerprint
from cutegemm.winners.rules import why_invalid, why_passed_over
from cutegemm.winners.table import dump, table_name
from tests.examples import examples
from tests.tuning_fakes import H200
from tuning import winners as command
from tuning.ladder_hopper import STEPS

PROBLEM = Problem.of(256, 256, 65536)
GOOD = "sm90/128x128x64/coop2/c1x1/s4/serp8/pdl"
ARRIVAL = "sm90/128x256x64/coop2/c1x1/s4/row/k16/arrival/pdl"
SOLO = "sm90/128x128x64/solo/c1x1/s1/row/once/slab/fat/zero"
ONLY_BY_NAME = [ARRIVAL, SOLO, *(GOOD.replace("/pdl", f"/{option}") for option in ("even", "fat", "zero", "onebuf"))]
SPOILT_CONFIGS = [
    "sm90/128x128x64/coop2/c1x1/s4/serp8/k0/pdl", "sm90/128x128x64/coop2/c0x0/s4/serp8/pdl",
    "sm90/128x128x64/coop2/c1x1x0/s4/serp8/pdl", "sm90/0x0x0/coop2/c1x1/s4/serp8/pdl",
    "sm90/128x128x64/coop2/c1x1/s0/serp8/pdl", f"sm90/{'9' * 30}x128x64/coop2/c1x1/s4/serp8/pdl",
    f"sm90/128x128x{'9' * 5000}/coop2/c1x1/s4/serp8/pdl", "sm90/128x128x64/coop2/c1x1/s4/serp8/k1/pdl",
    "sm90/128x128x64/coop2/c1x1/s4/serp8/pdl/swap", "sm90/of another version", "", "sm80/0x0x0/w0x0/s0/g0",
    "sm80/128x128x32/w64x64/s4", "simt/32x32x64/w32x32/s3/g8/x0", "simt/32x32x64/w0x0/s3/g8/x2",
]  # fmt: skip


def row(config: str, seconds: float | None = 1e-6, **changes) -> Measurement:
    known = {"backend": "cute", "problem": str(PROBLEM), "verdict": "ok", "gpu": "H200", "sm_count": 132}
    with contextlib.suppress(ValueError):  # of a family that has no kernels
        known["fingerprint"] = fingerprint(str(changes.get("backend", "cute")), config)
    return Measurement(**{"fingerprint": "none", **known, "config": config, "seconds": seconds, **changes})


@pytest.fixture
def store(tmp_path, monkeypatch) -> Winners:
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTEGEMM_WINNERS", raising=False)
    return Winners()


def ship(folder, monkeypatch, *rows: Measurement) -> None:
    folder.mkdir()
    monkeypatch.setattr(winners_table, "DATA", folder)
    (folder / table_name("H200")).write_text(dump(rows))


def chosen() -> plan.Choice:
    heuristics.forget()
    return plan.choose(PROBLEM, H200)


@pytest.mark.parametrize("config", ONLY_BY_NAME)
def test_what_only_a_call_may_name_is_chosen_by_nothing_else(store, config, tmp_path, monkeypatch, capsys):
    """Neither from the user's rows nor from a shipped table, here or nearby, nor does it get into a sweep."""
    cute = backends.get("cute")
    assert cute.check(cute.parse(config), PROBLEM, H200) is None
    assert cute.only_by_name(cute.parse(config))
    assert cute.only_by_name(cute.parse(GOOD)) is None
    untuned = str(chosen().config)
    near = Problem.of(256, 256, 32768)
    for place in ("own", "shipped"):
        made = [row(config), row(config, problem=str(near)), row(config, kind="quick")]
        if place == "own":
            store.record(*(replace(r, origin="imported") for r in made))
        else:
            store.prune(lambda rows: [True] * len(rows))
            ship(tmp_path / "data", monkeypatch, *made)
        assert lookup(PROBLEM, H200) is None
        assert neighbours.winners_of(PROBLEM.signature, H200, "cute") == []
        assert str(chosen().config) == untuned
        assert config not in [c.text for c in sweep_run.seeds(PROBLEM, H200, store, ["cute"])]
        assert not sweep_run._has_final(PROBLEM, H200, store)
    assert str(plan.choose(PROBLEM, H200, config=config).config) == config
    # A good row beside it wins, also a slower one of the shipped table: what never decides has finished no sweep.
    store.record(row(config))
    ship(tmp_path / "more data", monkeypatch, row(GOOD, 2e-6))
    assert lookup(PROBLEM, H200).config == GOOD
    choice = chosen()
    assert str(choice.config) == GOOD
    text = plan.describe(plan.Plan(PROBLEM, choice, H200, kernel=object()))
    assert re.search(rf"passed over +{re.escape(config)}, own, 1.0 us: ", text)
    assert command.main(["list", "--all"]) == 0
    listed = capsys.readouterr().out
    assert next(line for line in listed.splitlines() if f" {config} " in line).count("own; never chosen: ") == 1
    assert "1 never decide" in listed


def test_steps_of_the_ladder_are_only_chosen_by_name():
    """All but those that leave nothing of the kernel out."""
    cute = backends.get("cute")
    configs = [cute.parse(step.config) for step in STEPS if step.backend == "cute"]
    whole = [str(config) for config in configs if cute.only_by_name(config) is None]
    assert whole == [STEPS[place].config for place in (8, 11, 12)]


@pytest.mark.parametrize("arch", [arch for arch in ARCHS.values() if arch.name in ("H200", "A100", "sm_90")])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.product(keep=3)
def test_nothing_that_is_chosen_or_searched_automatically_is_only_for_calls_that_name_it(arch, dtype):
    problem = Problem.of(512, 512, 2048, dtype)
    cute = backends.get("cute")
    listed = [config for config, _ in cute.candidates(problem.signature, arch)]
    assert listed
    for config in (*listed, *cute.configs(problem, arch)):
        assert cute.only_by_name(config) is None


@pytest.mark.parametrize("config", SPOILT_CONFIGS)
def test_a_spoilt_configuration_is_skipped_and_named(store, config, tmp_path, capsys):
    spoilt = row(config)
    assert "config" in why_invalid(spoilt)
    store.record(spoilt, row(GOOD, 2e-6))
    assert lookup(PROBLEM, H200).config == GOOD
    assert str(chosen().config) == GOOD
    assert plan.choose(Problem.of(256, 256, 32768), H200).why.startswith("heuristic")
    file = tmp_path / "table.json"
    file.write_text(dump([row(GOOD, 3e-6), spoilt]))
    assert command.main(["import", str(file)]) == 1
    said = capsys.readouterr()
    assert said.out == "1 rows added, 0 known already, 1 skipped; 0 of the new are stale\n"
    assert said.err.startswith("skipped: row 2: config ")
    assert len(said.err) < 600
    assert command.main(["list", "--all"]) == 0


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("problem", "p", "expected '[Lx]MxNxK' and a signature"),
        ("problem", str(PROBLEM).replace("256x256", "0x256", 1), "M is 0"),
        ("problem", str(PROBLEM).replace("256x256", f"{2**31}x256", 1), f"M is {2**31}"),
        ("problem", str(PROBLEM).replace("256x256", f"{'9' * 30}x256", 1), "expected"),
        ("problem", str(PROBLEM).replace("ak16", "ak1"), "A is aligned to 1 bytes"),
        ("problem", str(PROBLEM).replace("ieee", "tf32"), "precision 'tf32' of bf16"),
        ("problem", str(PROBLEM).replace("256x", "0256x", 1), "it would be written"),
        ("problem", f"1x{PROBLEM}", "it would be written"), ("problem", str(PROBLEM).replace("bf16", "int4"), "dtype"),
        ("backend", "torch", "no such backend"), ("backend", "auto", "no such backend"),
        ("gpu", "", "gpu is ''"), ("gpu", "H\x1b[2J", "gpu is 'H\\x1b[2J'"), ("gpu", "A100", "cannot serve"),
        ("seconds", 1e-12, "seconds is 1e-12, accepted are 1e-09 to 1e+06"), ("seconds", 1e9, "seconds is 10000000"),
        ("reference_seconds", 1e-12, "reference_seconds is 1e-12"), ("sm_count", 10**6, "sm_count is 1000000"),
    ],
)  # fmt: skip
def test_what_makes_a_row_invalid_is_said(column, value, why):
    assert why_invalid(row(GOOD)) is why_passed_over(row(GOOD)) is None
    spoilt = row(GOOD, **{column: value}) if column != "seconds" else row(GOOD, value)
    assert why in why_invalid(spoilt)
    assert why in why_passed_over(spoilt)


def test_rows_of_gpus_that_the_table_lacks_are_valid_where_their_kind_can_run_them():
    assert why_invalid(row(GOOD, gpu="NVIDIA GH200 480GB")) is None
    assert why_invalid(row("sm80/128x128x32/w64x64/s4/g8", gpu="NVIDIA A10", sm_count=72)) is None
    assert why_invalid(row(GOOD.replace("128x128", "120x128"), gpu="NVIDIA GH200 480GB"))


DTYPES = st.sampled_from(["fp16", "bf16", "fp32"])
BIASES = st.one_of(st.just((None, "n")), st.tuples(DTYPES, st.sampled_from("mn")))
EPILOGUES = st.builds(
    lambda c, bias, activation: Epilogue(c, *bias, activation),
    st.one_of(st.none(), DTYPES), BIASES, st.sampled_from([None, "relu", "gelu", "gelu_tanh", "silu"]),
)  # fmt: skip


@given(
    st.tuples(*[st.integers(1, 3000)] * 3), st.integers(1, 5), st.sampled_from(["tn", "tt", "nn", "nt"]),
    st.sampled_from([("fp16", "ieee"), ("bf16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32"), ("fp32", "tf32x3")]),
    DTYPES, EPILOGUES,
)  # fmt: skip
def test_the_text_of_a_problem_is_read_back(sizes, batch, majors, types, out, epilogue):
    dtype, precision = types
    problem = Problem.of(
        *sizes, dtype, majors=majors, batch=batch, precision=precision, out_dtype=out, epilogue=epilogue
    )
    found = problem_text.parse(str(problem))
    assert str(found) == str(problem)
    assert (found.signature, found.flops) == (problem.signature, problem.flops)
    assert replace(found, a=problem.a, b=problem.b, c=problem.c, d=problem.d) == problem


@given(st.text(max_size=100))
def test_any_other_text_is_no_problem(text):
    with contextlib.suppress(ValueError):
        assert str(problem_text.parse(text)) == text


def spoiling(text: str) -> st.SearchStrategy[str]:
    """Texts that differ from this one in a few numbers, or in a few characters."""
    numbers = st.sampled_from(["0", "1", "2", "7", "64", "9" * 30, "9" * 5000, "-1", "\u0663", ""])
    places = [found.span() for found in re.finditer(r"\d+", text)]

    def changed(choice) -> str:
        (begin, end), number = choice
        return text[:begin] + number + text[end:]

    one = st.tuples(st.sampled_from(places), numbers).map(changed) if places else st.just(text)
    cut = st.tuples(st.integers(0, len(text)), st.integers(0, len(text)), st.text(max_size=3)).map(
        lambda cut: text[: min(cut[:2])] + cut[2] + text[max(cut[:2]) :]
    )
    return st.one_of(st.just(text), one, cut)


LEGACY = "warp_tile/bm128/bn128/bk16/wm64/wn64/wniter4/tm8/tn4"
CUTLASS = "cutlass2x/128x128x32/w64x64x32/s4/i16x8x16/id4/k2"
CONFIGS = [
    GOOD, ARRIVAL, "sm90/128x128x64/coop2/c2x1x2/s4/row/k2/swap/pdl", "sm80/128x128x32/w64x64/s4/g8",
    "simt/32x32x64/w32x32/s3/g8/x8", LEGACY, CUTLASS, "wmma_naive/warps4",
]  # fmt: skip
PROBLEMS = [
    str(PROBLEM), str(Problem.of(64, 64, 64, "fp32")), str(Problem.of(64, 72, 80, "fp32", precision="tf32", batch=3)),
    str(Problem.of(64, 64, 64, "fp16", epilogue=Epilogue("fp32", None, "n", "relu"))),
    *(
        str(Problem.of(64, 64, 64, constant="b", epilogue=Epilogue(custom=parse(f"def epilogue({given}: {made}"))))
        for given, made in (
            ("gate: halves[0], up: halves[1]) -> bf16", "return silu(gate) * up"),
            ("acc, x0: bf16[M, N], x1: int32) -> (bf16, fp32)", "t0 = acc / x0; return t0 * float(x1), row_sum(t0)"),
        )
    ),
]  # fmt: skip


@settings(max_examples=examples(1500))
@given(
    st.sampled_from(["cute", "legacy", "cutlass2x", "torch", ""]), st.sampled_from(CONFIGS).flatmap(spoiling),
    st.sampled_from(PROBLEMS).flatmap(spoiling), st.sampled_from(["H200", "A100", "NVIDIA A10", "", "H\n"]),
    st.one_of(st.just(132), st.integers(-(2**63), 2**63 - 1)), st.one_of(st.none(), st.just(1e-6), st.floats()),
)  # fmt: skip
def test_no_row_is_too_spoilt_to_be_judged(backend, config, problem, gpu, sm_count, seconds):
    """And one that may decide can be parsed, and serves the problem by the backend's own rule."""
    made = Measurement(gpu, sm_count, problem, backend, config, "f", seconds, "ok")
    invalid, passed_over = why_invalid(made), why_passed_over(made)
    assert passed_over is not None or invalid is None
    if passed_over is None and gpu in ("H200", "A100"):
        serves = backends.get(backend)
        arch = replace(ARCHS[gpu], sm_count=sm_count)
        assert serves.check(serves.parse(config), problem_text.parse(problem), arch) is None


VALUES = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=20), st.binary(max_size=20),
    st.sampled_from(["9" * 400, "k0", float("inf"), b"\xff\xfe"]),
)  # fmt: skip


def of_column(column: str) -> st.SearchStrategy[object]:
    """What may stand in a column of a row that is otherwise well made."""
    known = {"config": st.sampled_from([*CONFIGS, *SPOILT_CONFIGS]), "problem": spoiling(str(PROBLEM))}
    return st.one_of(known.get(column, VALUES), VALUES)


def with_sqlite(path, values: dict[str, object], is_text: bool) -> None:
    """Writes a row as another program might: whatever SQLite takes, bytes as text too."""
    texts = ", ".join("CAST(? AS TEXT)" if is_text and isinstance(v, bytes) else "?" for v in values.values())
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM measurement WHERE config <> ?", (GOOD,))
        with contextlib.suppress(sqlite3.IntegrityError, UnicodeEncodeError):  # NOT NULL; half of a surrogate pair
            connection.execute(f"INSERT INTO measurement ({', '.join(values)}) VALUES ({texts})", list(values.values()))


def good_row(path) -> dict[str, object]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        cursor = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM measurement WHERE config = ?", (GOOD,))
        return dict(zip(COLUMNS, cursor.fetchone(), strict=True))


@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_a_row_of_the_store_a_choice_goes_on(store, data, capsys):
    if store.path is None or not store.path.exists():
        store.record(row(GOOD, 2e-6))
    assert store.path is not None
    columns = data.draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=3, unique=True))
    values = {**good_row(store.path), "config": SOLO, "seconds": 1e-6}
    values.update({column: data.draw(of_column(column), label=column) for column in columns})
    with_sqlite(store.path, values, data.draw(st.booleans(), label="as text"))
    winners.reader._current = None
    heuristics.forget()
    found = lookup(PROBLEM, H200)
    assert found is not None
    assert (found.config, str(plan.choose(PROBLEM, H200).config)) == (found.config,) * 2
    assert why_passed_over(found) is None
    plan.choose(Problem.of(256, 256, 32768), H200)
    winners.passed_over(PROBLEM, H200)
    sweep_run.seeds(PROBLEM, H200, Winners(), ["cute", "legacy"])
    for arguments in (["list", "--all"], ["list"], ["prune", "--older", "1", "--dry-run"]):
        assert command.main(arguments) == 0
    assert command.main(["export", "--all", "-"]) == 0
    capsys.readouterr()
    assert Winners().path is not None


@pytest.mark.parametrize("days", ["-1", "nan", "1e9", "inf"])
def test_rows_older_than_no_number_of_days_are_not_deleted(store, days, capsys):
    store.record(row(GOOD, 2e-6, measured_at="2026-11-23T00:00:00+00:00"))
    assert command.main(["prune", "--older", days]) == 2
    assert f"--older: got {float(days):g}, expected" in capsys.readouterr().err
    assert len(store.rows()) == 1


def test_text_that_is_not_unicode_is_read(store):
    store.record(row(GOOD, 2e-6))
    values = {**good_row(store.path), "config": b"sm90/\xff\xfe", "seconds": 1e-6}
    with_sqlite(store.path, values, True)
    assert [r.config for r in store.rows()] == [GOOD, "sm90/\ufffd\ufffd"]
    assert str(chosen().config) == GOOD
    assert store.prune(lambda rows: ["\ufffd" in r.config for r in rows]) == (1, 2)


def test_a_value_of_another_type_makes_a_row_unreadable(store):
    store.record(row(GOOD, 2e-6))
    with_sqlite(store.path, {**good_row(store.path), "config": SOLO, "seconds": "fast", "gpu": b"H200"}, False)
    (spoilt,) = [r for r in store.rows() if r.config == SOLO]
    assert (spoilt.ok, spoilt.seconds, spoilt.gpu) == (False, None, "b'H200'")
    assert spoilt.verdict == "unreadable: gpu is b'H200'"


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10), st.just(10**400), st.just("\ud800")
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


THEN, LATER = "2026-11-20T00:00:00+00:00", "2026-11-21T00:00:00+00:00"


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_a_table_its_import_ends_with_a_status(store, data, tmp_path, capsys):
    table = json.loads(dump([row(GOOD, 1e-6, measured_at=THEN), row(GOOD, 2e-6, measured_at=LATER)]))
    place = data.draw(st.sampled_from(["cell", "row", "columns", "rows", "format", "all"]))
    value = data.draw(JSON)
    if place == "cell":
        column = data.draw(st.integers(0, len(table["columns"]) - 1))
        known = {"config": st.sampled_from(SPOILT_CONFIGS), "problem": spoiling(str(PROBLEM))}
        value = data.draw(st.one_of(known.get(table["columns"][column], JSON), JSON))
        table["rows"][0][column] = value
    elif place == "row":
        table["rows"][0] = value
    elif place == "all":
        table = value
    else:
        table[place] = value
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table))
    store.prune(lambda rows: [True] * len(rows))
    status = command.main(["import", str(file)])
    said = capsys.readouterr()
    assert status in ((0, 1) if place in ("cell", "row") else (0, 1, 2))
    assert ("skipped: row 1: " in said.err) is (status == 1)
    if place in ("cell", "row"):
        assert any(r.measured_at == LATER for r in store.rows()), "the good row is there"
    assert lookup(PROBLEM, H200) is None or str(chosen().config) == GOOD


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested too deeply"), ('{"format":' + "[" * 100_000, "nested too deeply"),
        ('{"format": 1' + "0" * 5000 + "}", "import: "), ("\ud800", "not JSON"), ("", "not JSON"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_refused(store, text, why, tmp_path, capsys):
    file = tmp_path / "table.json"
    file.write_text(text, errors="replace")
    assert command.main(["import", str(file)]) == 2
    said = capsys.readouterr()
    assert why in said.err
    assert said.err.count("\n") == 1
    assert len(said.err) < 400


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda names: [*names, "origin"], "columns: got 'origin', unknown or there twice; needed are gpu, "),
        (lambda names: [*names, names[0]], "columns: got 'gpu', unknown or there twice"),
        (lambda names: names[1:], "columns: gpu missing; needed are gpu, "),
    ],
)
def test_a_wrong_column_is_named(store, change, why, tmp_path, capsys):
    file = tmp_path / "table.json"
    names = ["gpu", "sm_count", "problem", "backend", "config", "fingerprint", "seconds", "verdict"]
    file.write_text(json.dumps({"format": winners_table.FORMAT, "columns": change(names), "rows": []}))
    assert command.main(["import", str(file)]) == 2
    assert why in capsys.readouterr().err
