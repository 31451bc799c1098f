"""What `gemm` takes for the winner: own and shipped rows, fresh and stale ones; tables; the command line."""

from __future__ import annotations

import ast
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

import cutegemm
from cutegemm import backend, winners
from cutegemm.choice import plan
from cutegemm.cute import FAMILIES
from cutegemm.problem import Problem
from cutegemm.winners import Measurement, Winners, lookup, neighbours, pick
from cutegemm.winners import table as winners_table
from cutegemm.winners.fingerprint import fingerprint, is_fresh
from cutegemm.winners.table import dump, load, shipped, table_name
from tests.tuning_fakes import H200
from tests.waiting import wait_until
from tuning import winners as command

PROBLEM = Problem.of(512, 512, 512)
FAST, SLOW = "sm80/128x128x32/w64x64/s4/g8", "sm80/64x64x32/w32x32/s5/g8"


def row(config: str, seconds: float | None, **changes) -> Measurement:
    known = {"backend": "cute", "problem": str(PROBLEM), "verdict": "ok", "gpu": "H200", "sm_count": 132}
    known["fingerprint"] = fingerprint(changes.get("backend", "cute"), config)
    return Measurement(config=config, seconds=seconds, **{**known, **changes})


@pytest.fixture
def store(tmp_path, monkeypatch) -> Winners:
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTEGEMM_WINNERS", raising=False)
    return Winners()


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """The folder of the shipped tables, empty."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(winners_table, "DATA", folder)
    return folder


def ship(folder: Path, *rows: Measurement) -> None:
    (folder / table_name("H200")).write_text(dump(rows))


def test_lookup_finds_the_winner_and_notices_a_new_one(store, data):
    assert lookup(PROBLEM, H200) is None
    store.record(row(SLOW, 2e-6))
    assert lookup(PROBLEM, H200).config == SLOW
    store.record(row(FAST, 1e-6))
    assert lookup(PROBLEM, H200).config == FAST
    store.record(row(FAST, None, verdict="wrong: 1 element"))
    assert lookup(PROBLEM, H200).config == SLOW
    assert lookup(Problem.of(513, 512, 512), H200) is None
    assert lookup(PROBLEM, replace(H200, sm_count=114)) is None
    assert lookup(PROBLEM, replace(H200, name="A100")) is None


def test_a_thread_sees_its_own_row_while_another_is_about_to_look(store, data, monkeypatch):
    assert lookup(PROBLEM, H200) is None
    store.record(row(SLOW, 2e-6))
    stamp, found = Winners.stamp, []

    def delayed(self):
        monkeypatch.setattr(Winners, "stamp", stamp)
        found.append(lookup(PROBLEM, H200))  # what a second thread finds while the first one asks for the file's stamp
        return stamp(self)

    monkeypatch.setattr(Winners, "stamp", delayed)
    assert lookup(PROBLEM, H200).config == SLOW
    assert [each and each.config for each in found] == [SLOW]


def test_a_problem_without_a_winner_takes_that_of_the_other_16_bit_type(store, data):
    """Before what was measured at other shapes, of which one may seem better here by the model."""
    bf16, fp16 = (Problem.of(16, 6144, 4096, dtype) for dtype in ("bf16", "fp16"))
    theirs, near, own = (f"sm90/64x{bn}x128/coop1/c1x1/s5/serp8/swap/pdl" for bn in (32, 16, 48))
    store.record(
        row(theirs, 2e-5, problem=str(bf16)),
        row(near, 1e-5, problem=str(Problem.of(16, 4096, 4096, "bf16"))),
    )
    choice = plan.choose(fp16, H200)
    assert str(choice.config) == theirs
    assert "tuned winner of the other 16-bit type, own: 20.0 us" in choice.why
    assert lookup(fp16, H200) is None  # it has none: `tune` and a sweep with --resume measure
    store.record(row(own, 3e-5, problem=str(fp16)))
    choice = plan.choose(fp16, H200)
    assert str(choice.config) == own
    assert "tuned winner, own: 30.0 us" in choice.why
    store.record(row("sm90/of another version", 1e-6, problem=str(fp16), fingerprint=fingerprint("cute", own)))
    assert str(plan.choose(fp16, H200).config) == own  # a faster row means nothing here
    store.record(row(own, 1e-6, problem=str(Problem.of(512, 512, 512, "bf16"))))
    assert plan.choose(Problem.of(512, 512, 512, "fp32", precision="tf32"), H200).why.startswith("heuristic")


def test_lookup_takes_microseconds(store, data, monkeypatch):
    searched, search = [], winners.reader._Reader._search
    monkeypatch.setattr(winners.reader._Reader, "_search", lambda self, *of: searched.append(of) or search(self, *of))
    store.record(*(row(FAST, 1e-6, problem=str(Problem.of(n, 64, 64))) for n in range(1, 2000)), row(FAST, 1e-6))
    changed = store.path.stat().st_mtime_ns
    wait_until(lambda: time.time_ns() - changed > 2 * winners.reader._Reader.SETTLED_NS)
    best = float("inf")
    for _ in range(5):
        begun = time.thread_time()  # what others take of the processor does not count
        for _ in range(200):
            lookup(PROBLEM, H200)
        best = min(best, (time.thread_time() - begun) / 200)
    assert best < 2e-4  # about 1e-5
    assert len(searched) == 1


def test_switched_off(store, data, monkeypatch):
    store.record(row(FAST, 1e-6))
    monkeypatch.setenv("CUTEGEMM_WINNERS", "off")
    assert lookup(PROBLEM, H200) is None


def test_stale_and_family_rows_do_not_decide(store, data):
    store.record(row(FAST, 1e-6, fingerprint="other sources"), row(FAST, 1e-6, kind="family"))
    assert lookup(PROBLEM, H200) is None
    store.record(row(SLOW, 2e-6))
    assert lookup(PROBLEM, H200).config == SLOW


def test_own_rows_win_over_shipped_ones(store, data):
    ship(data, row(FAST, 1e-6, reference_seconds=1.5e-6))
    found = lookup(PROBLEM, H200)
    assert (found.config, found.origin) == (FAST, "shipped")
    # The user measured the shipped winner to be slow here, and another to be faster.
    store.record(row(FAST, 3e-6, reference_seconds=1.5e-6), row(SLOW, 2e-6, reference_seconds=1.5e-6))
    found = lookup(PROBLEM, H200)
    assert (found.config, found.origin) == (SLOW, "own")
    # A shipped configuration that the user found wrong never wins.
    store.record(row(FAST, None, verdict="wrong: 2 elements"), row(SLOW, None, verdict="wrong: 2 elements"))
    assert lookup(PROBLEM, H200) is None


def test_own_rows_win_over_shipped_ones_nearby_too(store, data):
    ship(data, row(FAST, 1e-6, fingerprint="other sources"))
    store.record(row(SLOW, 2e-6, kind="quick"))
    assert neighbours.winners_of(PROBLEM.signature, H200, "cute") == [((512, 512, 512), FAST)]
    store.record(row(FAST, 3e-6, kind="quick"))
    assert neighbours.winners_of(PROBLEM.signature, H200, "cute") == [((512, 512, 512), SLOW)]


def test_a_shipped_row_of_other_kernels_says_so(store, data):
    ship(data, row(FAST, 1e-6, fingerprint="other sources"))
    assert lookup(PROBLEM, H200).origin == "shipped, measured with other kernel sources"
    store.record(row(SLOW, 2e-6, kind="quick"))
    assert lookup(PROBLEM, H200).config == FAST  # seconds against seconds: the shipped one is faster


def test_a_finished_sweep_of_the_users_decides_alone(store, data):
    ship(data, row(FAST, 1e-6, reference_seconds=2e-6))
    store.record(row(SLOW, 2e-6, reference_seconds=2e-6, kind="quick"))
    assert lookup(PROBLEM, H200).config == FAST
    store.record(row(SLOW, 2e-6, reference_seconds=2e-6))
    assert (lookup(PROBLEM, H200).config, lookup(PROBLEM, H200).origin) == (SLOW, "own")


def test_a_finalist_found_wrong_finishes_nothing(store, data):
    ship(data, row(SLOW, 2e-6))
    store.record(row(FAST, 1e-6), row(FAST, None, verdict="wrong: 1 element"))
    assert lookup(PROBLEM, H200).config == SLOW


def test_rows_of_another_gpu_do_not_hide_shipped_ones(store, data):
    ship(data, row(FAST, 1e-6))
    for config in (SLOW, FAST):
        store.record(row(config, 5e-6, gpu="A100", sm_count=108))
        assert lookup(PROBLEM, H200).config == FAST
        assert neighbours.winners_of(PROBLEM.signature, H200, "cute") == [((512, 512, 512), FAST)]


def test_the_plan_uses_the_winner_and_explains_it(store, data):
    store.record(row(SLOW, 2e-6, reference_seconds=3e-6))
    choice = plan.choose(PROBLEM, H200)
    assert (choice.backend, str(choice.config)) == ("cute", SLOW)
    assert "tuned winner, own: 2.0 us" in choice.why
    store.record(row("sm80/of/another/version", 1e-6, reference_seconds=3e-6))
    choice = plan.choose(PROBLEM, H200)
    assert str(choice.config) == SLOW
    assert "tuned winner, own: 2.0 us" in choice.why


def test_a_table_comes_back_as_it_was():
    rows = [
        row(FAST, 1.25e-6, measured_at="2026-11-21T10:00:00+00:00", reference_seconds=1.5e-6),
        row(SLOW, None, verdict="wrong: 1 element", kind="quick", measured_at="then"),
    ]
    text = dump(rows)
    assert [replace(r, origin="own") for r in load(text)] == rows
    assert {r.origin for r in load(text)} == {"imported"}
    assert len(text.splitlines()) == len(rows) + 3
    assert load(dump([])) == []


def spoilt(**changes) -> str:
    data = json.loads(dump([row(FAST, 1e-6, measured_at="then")]))
    column, value = next(iter(changes.items()))
    if column in data["columns"]:
        data["rows"][0][data["columns"].index(column)] = value
    else:
        data[column] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"), ("[]", "format: got 'list'"), (spoilt(format=2), "format: got 2"),
        (spoilt(seconds=-1.0), "seconds is -1.0"), (spoilt(seconds="1"), "seconds is '1'"),
        (spoilt(seconds=float("nan")), "seconds is nan"), (spoilt(seconds=True), "seconds is True"),
        (spoilt(sm_count=0), "sm_count is 0"), (spoilt(config=None), "config is None"),
        (spoilt(kind="guess"), "kind is 'guess'"), (spoilt(columns=["gpu"]), "columns"),
        (spoilt(rows=[[1]]), "row 1: expected a list"), (spoilt(rows=3), "must be lists"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_table_is_named(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        load(text)


def test_shipped_tables_are_valid():
    assert table_name("H100 SXM") == "winners-h100-sxm.json"
    for path in winners_table.DATA.glob("winners-*.json"):
        for found in load(path.read_text()):
            assert table_name(found.gpu) == path.name
            assert found.ok
    assert shipped("no such GPU", 1) == {}


CHOICE = {"candidates.py", "shortlists.py", "footprint.py"}
"""Files of a family's folder that decide which of its kernels is taken, not what it does."""


def test_fingerprints_follow_the_sources_of_the_family():
    root = Path(cutegemm.__file__).parent / "cute"
    for name, family in FAMILIES.items():
        module = root.joinpath(*family.module.split(".")).with_suffix(".py")
        own = set(backend.get("cute").sources(f"{name}/x"))
        listed = {path.name for path in own}
        assert {module.name, "entry.py", "config.py", "launch_config.py"} <= listed
        assert not listed & CHOICE, "what decides which kernel is taken"
        assert CHOICE & {path.name for path in module.parent.iterdir()} >= {"candidates.py", "footprint.py"}
        # Whatever a kernel of the family imports from the package is among its sources.
        todo, seen = [module], set()
        while todo:
            path = todo.pop()
            if path in seen or path.name == "__init__.py":
                continue
            seen.add(path)
            assert path in own, f"{name} imports {path.name}"
            todo += imported(path)
    assert len({fingerprint("cute", f"{family}/x") for family in FAMILIES}) == len(FAMILIES)
    assert fingerprint("legacy", "naive") == fingerprint("legacy", "coalesced")
    assert "nvidia-cutlass-dsl=" in fingerprint("cute", "sm90/x")
    assert not is_fresh(row(FAST, 1.0, fingerprint="x"))
    assert not is_fresh(replace(row(FAST, 1.0), backend="torch"))
    assert not is_fresh(replace(row(FAST, 1.0), config="sm70/x"))
    with pytest.raises(ValueError, match="torch"):
        fingerprint("torch", "")


def imported(path: Path) -> list[Path]:
    """The files of this package's cute folder that a file imports at its top level."""
    root = Path(cutegemm.__file__).parent
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cutegemm.cute"):
            place = root.joinpath(*(node.module or "").split(".")[1:])
            found += [place.with_suffix(".py"), *(place / f"{name.name}.py" for name in node.names)]
    return [file for file in found if file.exists()]


def said(capsys, *arguments: str) -> str:
    assert command.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_list(store, data, capsys):
    ship(data, row(SLOW, 4e-6, problem=str(Problem.of(64, 64, 64)), fingerprint="other sources"))
    store.record(
        row(FAST, 1e-6, reference_seconds=2e-6),
        row(SLOW, 2e-6, reference_seconds=2e-6),
        row(FAST, 9e-6, fingerprint="older", problem=str(Problem.of(1, 1, 1))),
        row("sm80/wrong", None, verdict="wrong: " + "x" * 100),
    )
    text = said(capsys, "list")
    assert "3 rows" in text
    winner = next(line for line in text.splitlines() if line.split()[1:2] == ["512x512x512"])
    for figure in (FAST, "1.00", "268.4", "2.000", "own"):
        assert figure in winner
    assert "own, stale" in text
    assert "shipped, stale" in text
    assert "2 are stale" in text
    text = said(capsys, "list", "--all", "--shape", "512x512x512")
    assert text.count("512x512x512") == 3
    assert "wrong: xxx" in text
    assert command.main(["list", "--gpu", "A100"]) == 2
    assert "--gpu: got 'A100', there are rows of H200" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["list", "--shape", "512"])
    assert "--shape: got '512', expected MxNxK or LxMxNxK" in capsys.readouterr().err
    assert "2 rows" in said(capsys, "list", "--no-shipped")


def test_export_and_import(store, data, capsys, tmp_path):
    file = tmp_path / "table.json"
    assert command.main(["export", str(file)]) == 2
    assert "nothing to export" in capsys.readouterr().err
    store.record(
        row(FAST, 1e-6, reference_seconds=2e-6), row(SLOW, 2e-6), row(FAST, 1e-9, fingerprint="older"),
        row(FAST, 1e-6, gpu="A100", sm_count=108),
    )  # fmt: skip
    said(capsys, "export", "--gpu", "H200", str(file))
    assert [r.config for r in load(file.read_text())] == [FAST]
    said(capsys, "export", "--all", str(file))
    assert len(load(file.read_text())) == 4
    there = str(tmp_path / "there.sqlite3")
    assert (
        said(capsys, "import", "--store", there, str(file)) == "4 rows added, 0 known already; 1 of the new are stale\n"
    )
    assert said(capsys, "import", "--store", there, str(file)).startswith("0 rows added, 4 known")
    assert [replace(r, origin="own") for r in sorted(Winners(there).rows(), key=str)] == sorted(store.rows(), key=str)
    assert {r.origin for r in Winners(there).rows()} == {"imported"}
    table = json.loads(file.read_text())
    file.write_text(json.dumps({**table, "rows": table["rows"] * 2}))
    twice = str(tmp_path / "twice.sqlite3")
    assert said(capsys, "import", "--store", twice, str(file)).startswith("4 rows added, 4 known already; ")
    assert len(Winners(twice).rows()) == 4
    assert command.main(["import", "--gpu", "H-200", str(file)]) == 2
    assert "--gpu: got 'H-200', there are rows of A100, H200" in capsys.readouterr().err
    file.write_text("{}")
    assert command.main(["import", str(file)]) == 2
    assert "format" in capsys.readouterr().err
    assert command.main(["import", str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err


def test_prune(store, data, capsys):
    store.record(
        row(FAST, 1e-6, measured_at="2020-01-01T00:00:00+00:00"), row(FAST, 1.1e-6),
        row(SLOW, 1e-6, fingerprint="older"), row("sm80/wrong", None, verdict="wrong: all"),
        row(FAST, 1e-6, gpu="A100"),
    )  # fmt: skip
    assert command.main(["prune"]) == 2
    assert "--stale" in capsys.readouterr().err
    for days in ("1e12", "1e6", "nan"):
        assert command.main(["prune", "--older", days]) == 2
        assert f"--older: got {float(days):g}, expected a number of days" in capsys.readouterr().err
    assert said(capsys, "prune", "--stale", "--dry-run") == "1 of 5 rows would be deleted\n"
    assert len(store.rows()) == 5
    assert said(capsys, "prune", "--stale") == "1 of 5 rows deleted\n"
    assert said(capsys, "prune", "--wrong") == "1 of 4 rows deleted\n"
    assert said(capsys, "prune", "--older", "300", "--gpu", "A100") == "0 of 3 rows deleted\n"
    assert said(capsys, "prune", "--older", "300") == "1 of 3 rows deleted\n"
    store.record(row(FAST, 1.2e-6))
    assert said(capsys, "prune", "--superseded") == "1 of 3 rows deleted\n"
    assert [r.seconds for r in store.rows() if r.gpu == "H200"] == [1.2e-6]
    assert said(capsys, "prune", "--everything", "--gpu", "A100") == "1 of 2 rows deleted\n"


WRONG = "wrong: 12 elements"
OLD, NEW = "2026-11-20T00:00:00+00:00", "2026-11-29T00:00:00+00:00"


def test_an_imported_row_is_as_old_as_it_says(store, data, tmp_path, capsys):
    """A configuration that was found wrong later does not win, and what was measured later is not superseded."""
    old = row(FAST, 2e-6, measured_at=OLD)
    file = tmp_path / "old.json"
    file.write_text(dump([old]))
    store.record(row(FAST, None, measured_at=NEW, verdict=WRONG))
    assert said(capsys, "import", str(file)).startswith("1 rows added")
    assert pick(store.rows()) is None
    store.record(row(SLOW, 1e-6, measured_at=NEW))
    file.write_text(dump([row(SLOW, 2e-6, measured_at=OLD)]))
    said(capsys, "import", str(file))
    assert said(capsys, "prune", "--superseded") == "2 of 4 rows deleted\n"
    assert [(r.config, r.measured_at) for r in store.rows()] == [(FAST, NEW), (SLOW, NEW)]


@pytest.mark.parametrize("when", ["2099-12-01T00:00:00+00:00", "2026-11-29T11:00:00+12:00", ""])
def test_a_date_of_a_foreign_table_beats_no_later_verdict(when, store, data, tmp_path, capsys):
    """A clock that ran ahead, another time zone, no date: what was found wrong after the import stays so."""
    file = tmp_path / "foreign.json"
    file.write_text(dump([row(FAST, 2e-6, measured_at=when)]))
    assert said(capsys, "import", str(file)).startswith("1 rows added")
    store.record(row(FAST, None, verdict=WRONG))
    assert pick(store.rows()) is None


def test_a_row_of_no_date_is_refused(store, data, tmp_path, capsys):
    file = tmp_path / "foreign.json"
    file.write_text(dump([row(FAST, 2e-6, measured_at="yesterday")]))
    assert command.main(["import", str(file)]) == 1
    assert "row 1: measured_at: got 'yesterday', expected a date and time" in capsys.readouterr().err
    assert store.rows() == []


def test_an_export_says_that_standard_output_is_closed(store, data, monkeypatch, capsys):
    store.record(row(FAST, 2e-6))
    monkeypatch.setattr("sys.stdout", None)
    assert command.main(["export", "-"]) == 2
    assert "standard output: it is closed" in capsys.readouterr().err


def test_a_clock_that_ran_ahead_delays_no_verdict(store):
    store.record(row(FAST, 2e-6, measured_at="2099-12-01T00:00:00+00:00"))
    store.record(row(FAST, None, verdict=WRONG))
    assert pick(store.rows()) is None


def test_a_verdict_on_a_shipped_configuration_stays(store, data, capsys):
    """Without it the shipped row would count again."""
    (data / table_name("H200")).write_text(dump([row(FAST, 1e-6)]))
    store.record(row(FAST, None, verdict=WRONG), row(SLOW, None, verdict=WRONG))
    assert said(capsys, "prune", "--wrong") == "1 of 2 rows deleted\n"
    assert [r.config for r in store.rows()] == [FAST]


def test_a_configuration_found_wrong_goes_with_its_verdict(store, data, capsys):
    store.record(
        row(FAST, 1e-6, measured_at=OLD),
        row(SLOW, 3e-6, measured_at=OLD),
        row(FAST, None, measured_at=NEW, verdict=WRONG),
    )
    assert pick(store.rows()).config == SLOW
    assert said(capsys, "prune", "--wrong") == "2 of 3 rows deleted\n"
    assert pick(store.rows()).config == SLOW
    store.record(row(SLOW, None, measured_at=OLD, verdict=WRONG), row(SLOW, 2e-6, measured_at=NEW))
    said(capsys, "prune", "--wrong")
    assert [r.seconds for r in store.rows()] == [2e-6]  # it was right again later


def test_what_is_recorded_while_a_prune_waits_is_kept(store, data, monkeypatch, capsys):
    """Which rows are superseded is decided while nobody else can write."""
    store.record(row(FAST, 1e-6, measured_at=OLD), row(FAST, 1e-6, measured_at=NEW))
    prune = Winners.prune

    def later(self, unwanted):
        store.record(row(SLOW, 1e-6, problem=str(Problem.of(8, 8, 8))))
        return prune(self, unwanted)

    monkeypatch.setattr(Winners, "prune", later)
    assert said(capsys, "prune", "--superseded") == "1 of 3 rows deleted\n"
    assert [r.config for r in store.rows()] == [FAST, SLOW]


def test_rows_without_a_date_are_known_when_they_come_again(store, data, tmp_path, capsys):
    table = json.loads(dump([row(FAST, 1e-6), row(SLOW, 1e-6)]))
    place = table["columns"].index("measured_at")
    for values in (table["columns"], *table["rows"]):
        del values[place]
    file = tmp_path / "undated.json"
    file.write_text(json.dumps(table))
    assert said(capsys, "import", str(file)).startswith("2 rows added, 0 known already")
    assert said(capsys, "import", str(file)).startswith("0 rows added, 2 known already")
