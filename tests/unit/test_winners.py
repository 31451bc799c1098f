"""The winners store: the fastest right row wins, and nothing about the disk or other processes breaks it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cutegemm.winners import Measurement, Winners, WinnersWarning, default_path, pick, standing
from cutegemm.winners import file as winners_file
from cutegemm.winners.row import BOTH, METHOD, METHODS, SHORT, sureness
from tests.waiting import PATIENCE, processes


def row(config="c", seconds: float | None = 1.0, verdict="ok", **changes) -> Measurement:
    known = {"gpu": "H200", "sm_count": 132, "problem": "p", "backend": "legacy", "fingerprint": "f"}
    return Measurement(**{**known, **changes}, config=config, seconds=seconds, verdict=verdict)


@pytest.fixture
def store(tmp_path) -> Winners:
    return Winners(tmp_path / "deep" / "winners.sqlite3")


def test_the_fastest_right_row_wins(store):
    assert store.best("H200", 132, "p") is None
    store.record(row("slow", 2.0), row("fast", 1.0), row("wrong", 0.1, "7 elements outside"), row("untimed", None))
    best = store.best("H200", 132, "p")
    assert best is not None
    assert (best.config, best.seconds, best.verdict) == ("fast", 1.0, "ok")
    assert best.measured_at.endswith("+00:00")
    assert len(store.rows()) == len(store.rows("p")) == 4
    assert store.rows("q") == []


def test_only_the_same_gpu_problem_backend_and_sources_count(store):
    store.record(
        row("other gpu", 0.1, gpu="A100"),
        row("other count", 0.1, sm_count=114),
        row("other problem", 0.1, problem="q"),
        row("other backend", 0.2, backend="cute"),
        row("other sources", 0.3, fingerprint="g"),
        row("mine", 1.0),
    )
    best = store.best("H200", 132, "p", backend="legacy", fingerprint="f")
    assert best is not None
    assert best.config == "mine"
    everywhere = store.best("H200", 132, "p")
    assert everywhere is not None
    assert everywhere.config == "other backend"


def test_rows_of_a_signature(store):
    for problem in ("1x2x3 bf16/x", "4x5x6 bf16/x", "4x5x6 abf16/x", "4x5x6 fp16/x", "4x5x6 bf16/x_y"):
        store.record(row(problem, problem=problem))
    assert [r.problem for r in store.rows_ending("bf16/x")] == ["1x2x3 bf16/x", "4x5x6 bf16/x"]
    assert [r.problem for r in store.rows_ending("fp16/x", "bf16/x_y")] == ["4x5x6 fp16/x", "4x5x6 bf16/x_y"]
    assert store.rows_ending() == store.rows_ending("%") == []


def test_the_latest_measurement_of_a_configuration_counts(store):
    store.record(row("a", 1.0), row("b", 2.0), row("a", 3.0))
    assert store.best("H200", 132, "p").config == "b"
    store.record(row("b", 2.0, "found wrong later"))
    assert store.best("H200", 132, "p").config == "a"


def test_finalists_come_before_what_was_timed_once():
    finals = [row("a", 2.0), row("b", 3.0)]
    assert pick([*finals, row("burst", 1.0, kind="quick")]).config == "a"
    assert pick([row("burst", 1.0, kind="quick"), row("x", 4.0, "wrong: 3 elements")]).config == "burst"
    # A quick row made later does not replace a final one, a wrong one does.
    later = [row("a", 9.0, kind="quick")]
    assert {r.config: r.seconds for r in standing([*finals, *later])} == {"a": 2.0, "b": 3.0}
    again = [*finals, row("a", None, "wrong: 1 element"), row("a", 1.0, kind="quick")]
    assert pick(again).config == "b"


def test_finals_of_a_surer_method_come_before_others():
    """Also if these have better ratios: in short rounds the card was in another state."""
    flattered = row("a", 1.0, reference_seconds=1.2, method=SHORT)
    sure = row("b", 1.0, reference_seconds=1.0, method=BOTH)
    for rows in ([flattered, sure], [sure, flattered]):
        assert pick(rows).config == "b"
    later = row("b", 1.0, reference_seconds=1.3, method=METHOD)
    assert standing([sure, later]) == [sure]
    assert pick([flattered, later]).config == "a"
    assert [sureness("final", method) for method in METHODS] == [1, 2, 3, 4, 5]
    assert sureness("quick", BOTH) == 0
    assert sureness("final", "of another version") == 1


def test_rows_of_other_days_are_compared_by_their_ratio_to_torch():
    cold = row("cold day", 1.0, reference_seconds=1.05)
    warm = row("warm day", 1.1, reference_seconds=1.21)
    assert pick([cold, warm]).config == "warm day"
    assert pick([cold, replace(warm, reference_seconds=None)]).config == "cold day"
    assert (cold.ratio, replace(cold, seconds=None).ratio) == (1.05, None)
    assert pick([]) is None


def test_rows_survive_a_new_store(store):
    store.record(row(reference_seconds=0.5, kind="quick", origin="imported"))
    assert Winners(store.path).rows() == store.rows()
    store.record()
    assert len(store.rows()) == 1


def everything(rows):
    return [True] * len(rows)


def test_prune(store):
    store.record(row("a"), row("b"), row("c", None, "wrong: 2 elements"))
    assert store.prune(lambda rows: [r.config in ("a", "c") for r in rows]) == (2, 3)
    assert [r.config for r in store.rows()] == ["b"]


def test_a_file_of_the_first_schema_is_brought_up_to_date(store):
    store.path.parent.mkdir()
    connection = sqlite3.connect(store.path)
    columns = "gpu, sm_count, problem, backend, config, fingerprint, seconds, verdict, measured_at"
    connection.execute(f"CREATE TABLE measurement (id INTEGER PRIMARY KEY, {columns})")
    connection.execute("INSERT INTO measurement VALUES (1, 'H200', 132, 'p', 'legacy', 'old', 'f', 1.5, 'ok', 'then')")
    connection.execute("PRAGMA user_version = 1")
    connection.commit()
    connection.close()
    assert store.rows() == [row("old", 1.5, measured_at="then", kind="family")]
    store.record(row("new", 1.0))
    assert store.best("H200", 132, "p").config == "new"


def test_damaged_file_is_set_aside(store):
    store.path.parent.mkdir()
    store.path.write_bytes(b"this is no database, but long enough to look at" * 30)
    with pytest.warns(WinnersWarning, match="cannot be read"):
        store.record(row())
    assert store.best("H200", 132, "p") is not None
    assert [p.name for p in store.path.parent.glob("*.damaged-*")]


@pytest.mark.parametrize("script", ["DROP TABLE measurement", "ALTER TABLE measurement RENAME COLUMN gpu TO card"])
def test_a_file_of_another_shape_is_not_used(store, script):
    """Its number of the schema is ours: somebody else has changed it. gemm raised SQLite's "no such column"."""
    store.record(row())
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        connection.execute(script)
    for each in (store, Winners(store.path)):
        with pytest.warns(WinnersWarning, match="cannot be used .*no such"):
            assert each.rows() == []
        each.record(row())
        assert len(each.rows()) == 1


def test_another_programs_database_is_left_as_it_is(store):
    store.path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        connection.execute("CREATE TABLE bookmarks (place)")
        connection.commit()
    path, before = store.path, store.path.read_bytes()
    with pytest.warns(WinnersWarning, match="cannot be used .*a database of another program"):
        store.record(row())
    assert len(store.rows()) == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (b"tablemeasurementmeasurement", b"tablemeas\xb7rementmeasurement", ["before"]),
        (b"CREATE TABLE", b"CRE\xb7TE TABLE", []),
    ],
)
def test_a_damaged_schema_whose_bytes_are_no_text_is_set_aside(store, before, after, kept):
    store.record(row("before"))
    assert before in store.path.read_bytes()
    store.path.write_bytes(store.path.read_bytes().replace(before, after))
    with pytest.warns(WinnersWarning, match="cannot be read"):
        assert [each.config for each in Winners(store.path).rows()] == kept
    store.record(row("after"))
    assert [each.config for each in Winners(store.path).rows()] == [*kept, "after"]
    assert len(list(store.path.parent.glob("*.damaged-*"))) == 1


def with_a_damaged_index(store) -> None:
    """Makes the file of a row whose problem the index has wrong: SQLite's quick check finds nothing."""
    store.record(row(problem="wanted"))
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'by_problem'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    content = bytearray(store.path.read_bytes())
    at = content.index(b"wanted", (page - 1) * size)
    content[at] = ord("x")
    store.path.write_bytes(content)


def test_rows_are_kept_where_the_index_is_damaged(store):
    with_a_damaged_index(store)
    with pytest.warns(WinnersWarning, match="the 1 rows that could be read"):
        assert store.prune(everything) == (1, 1)
    assert store.rows() == []


def test_an_index_is_made_again_where_the_file_cannot_be_written(store, monkeypatch):
    with_a_damaged_index(store)

    def refuse(*given):
        raise OSError("read-only")

    monkeypatch.setattr(winners_file.WinnersFile, "_write", refuse)
    with pytest.warns(WinnersWarning, match="cannot be used"):
        store.record(row())
    assert [each.problem for each in store.rows("wanted")] == ["wanted"]
    assert store.prune(everything) == (2, 2)


def test_what_can_be_read_of_a_damaged_file_is_kept(store):
    store.record(*(row(f"config {i}" + "x" * 200, 1.0 + i) for i in range(400)))
    size = store.path.stat().st_size
    with open(store.path, "r+b") as file:
        file.seek(size - 8192)
        file.write(os.urandom(8192))
    with pytest.warns(WinnersWarning, match="rows that could be read"):
        found = store.rows()
    assert 100 < len(found) < 400
    assert found[0].config.startswith("config 0")
    store.record(row("after"))
    assert len(store.rows()) == len(found) + 1
    assert len(list(store.path.parent.glob("*.damaged-*"))) == 1


def test_the_rows_of_a_file_that_was_cut_are_kept(store):
    """SQLite refuses a file that is shorter than its header says."""
    store.record(*(row(f"c{number}", float(number + 1), verdict="ok" + "." * 200) for number in range(300)))
    whole = store.path.read_bytes()
    page = int.from_bytes(whole[16:18], "big")
    assert len(whole) > 8 * page
    store.path.write_bytes(whole[: len(whole) // 2 // page * page])
    with pytest.warns(WinnersWarning, match="rows that could be read"):
        kept = Winners(store.path).rows()
    assert 50 < len(kept) < 300
    assert {each.config for each in kept} <= {f"c{number}" for number in range(300)}


def test_processes_that_meet_a_damaged_file_keep_what_each_writes(tmp_path):
    path = tmp_path / "winners.sqlite3"
    path.write_bytes(b"\0garbage" * 1000)
    threads = [threading.Thread(target=_write_quietly, args=(path, f"t{i}")) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len({r.config for r in Winners(path).rows()}) == 6 * 5
    assert len(list(tmp_path.glob("*.damaged-*"))) == 1


def test_who_saw_the_damage_late_leaves_the_new_file_alone(tmp_path):
    path = tmp_path / "winners.sqlite3"
    path.write_bytes(b"\0garbage" * 1000)
    late = winners_file.WinnersFile(path)
    with pytest.warns(WinnersWarning, match="cannot be read"):
        Winners(path).record(row("kept"))
    late._set_aside(sqlite3.DatabaseError("seen before the other process put it right"))
    assert [r.config for r in Winners(path).rows()] == ["kept"]
    assert len(list(tmp_path.glob("*.damaged-*"))) == 1


def _write_quietly(path: Path, name: str) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = Winners(path)
        for i in range(5):
            store.record(row(f"{name}-{i}", 1.0 + i))


def test_file_of_a_later_version_is_left_alone(store):
    path = store.path
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    with pytest.warns(WinnersWarning, match="newer"):
        store.record(row())
    assert path.read_bytes() == before
    assert store.path.name == f"winners-schema{winners_file.SCHEMA}.sqlite3"
    with pytest.warns(WinnersWarning, match="left alone"):
        assert Winners(path).rows() == store.rows()


def test_without_a_writable_disk_rows_live_in_memory(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = Winners(blocked / "winners.sqlite3")
    with pytest.warns(WinnersWarning, match="for this process only"):
        store.record(row("a", 2.0))
    store.record(row("b", 1.0))
    assert store.best("H200", 132, "p").config == "b"
    assert store.path is None


def test_read_only_folder_keeps_its_rows_readable(store, monkeypatch):
    store.record(row("before"))
    path = store.path
    # What a read-only file system answers, whoever asks.
    real = winners_file.os.open

    def refuse(name, flags, *rest, **more):
        if str(name).endswith(".lock"):
            raise OSError(30, "Read-only file system", str(name))
        return real(name, flags, *rest, **more)

    monkeypatch.setattr(winners_file.os, "open", refuse)
    again = Winners(path)
    assert [r.config for r in again.rows()] == ["before"]
    with pytest.warns(WinnersWarning, match="Read-only file system"):
        again.record(row("after"))
    assert [r.config for r in again.rows()] == ["before", "after"]
    assert [r.config for r in Winners(path).rows()] == ["before"]


_FULL = """
import resource, signal, sys
from cutegemm.winners import Measurement, Winners

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
store = Winners(sys.argv[1])
store.record(*(
    Measurement("H200", 132, "p", "legacy", f"late {i}" + "x" * 500, "f", 1.0, "ok") for i in range(2000)
))
print(len(store.rows()), store.path)
"""


def test_full_disk(store):
    """A limit on the size of a file stands for the full disk: the write fails in the middle of a transaction."""
    store.record(*(row(f"config {i}", 1.0) for i in range(200)))
    room = store.path.stat().st_size + 4096
    command = [sys.executable, "-W", "always::UserWarning", "-c", _FULL, str(store.path), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2200 None\n"
    assert "for this process only" in done.stderr
    assert len(store.rows()) == 200
    store.record(row("room again"))
    assert len(Winners(store.path).rows()) == 201


def test_reading_creates_nothing(store):
    assert store.rows() == []
    assert not store.path.exists()
    assert not store.path.parent.exists()


def test_a_lock_that_is_never_released_does_not_hang(store, monkeypatch):
    import fcntl

    store.record(row("a"))
    monkeypatch.setattr(winners_file, "LOCK_SECONDS", 0.2)
    with open(f"{store.path}.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert len(store.rows()) == 1
        with pytest.warns(WinnersWarning, match="held for more than"):
            store.record(row("b"))
    assert len(store.rows()) == 2


def test_default_place(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    assert default_path() == tmp_path / "winners.sqlite3"
    monkeypatch.delenv("CUTEGEMM_CACHE_DIR")
    assert default_path().name == "winners.sqlite3"


def _write(path: Path, name: str) -> None:
    store = Winners(path)
    for i in range(20):
        store.record(row(f"{name}-{i}", 1.0 + i))


def test_many_processes_and_threads_lose_no_row(tmp_path):
    path = tmp_path / "winners.sqlite3"
    others = [processes().Process(target=_write, args=(path, f"p{i}")) for i in range(2)]
    threads = [threading.Thread(target=_write, args=(path, f"t{i}")) for i in range(3)]
    for worker in (*others, *threads):
        worker.start()
    for worker in (*others, *threads):
        worker.join(PATIENCE)
    assert all(process.exitcode == 0 for process in others)
    assert len({r.config for r in Winners(path).rows()}) == 5 * 20


def test_files_that_are_no_table_or_store_are_named(tmp_path, capsys):
    from tuning import winners as command

    bad, bytes_ = tmp_path / "bad.json", tmp_path / "bytes.json"
    bad.write_text("{bad")
    bytes_.write_bytes(b"\xff\xfe")
    for file, said in ((bad, f"{bad}: not JSON"), (bytes_, f"{bytes_}: 'utf-8' codec")):
        assert command.main(["import", "--store", str(tmp_path / "store.sqlite3"), str(file)]) != 0
        assert said in capsys.readouterr().err
    assert command.main(["export", "--store", str(tmp_path / "none.sqlite3"), str(tmp_path / "out.json")]) != 0
    assert "--store: there is no file" in capsys.readouterr().err
