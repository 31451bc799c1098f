"""The winners store: the fastest right row wins, and nothing about the disk or other processes breaks it."""

from __future__ import annotations

import multiprocessing
import sqlite3
import threading
from pathlib import Path

import pytest

from cutegemm.winners import Measurement, Winners, WinnersWarning, default_path


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


def test_the_latest_measurement_of_a_configuration_counts(store):
    store.record(row("a", 1.0), row("b", 2.0), row("a", 3.0))
    assert store.best("H200", 132, "p").config == "b"
    store.record(row("b", 2.0, "found wrong later"))
    assert store.best("H200", 132, "p").config == "a"


def test_rows_survive_a_new_store(store):
    store.record(row())
    assert Winners(store.path).rows() == store.rows()
    store.record()
    assert len(store.rows()) == 1


def test_damaged_file_is_set_aside(store):
    store.path.parent.mkdir()
    store.path.write_bytes(b"this is no database, but long enough to look at" * 30)
    with pytest.warns(WinnersWarning, match="cannot be read"):
        store.record(row())
    assert store.best("H200", 132, "p") is not None
    assert [p.name for p in store.path.parent.glob("*.damaged-*")]


def test_file_of_a_later_version_is_left_alone(store):
    store.path.parent.mkdir()
    connection = sqlite3.connect(store.path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.warns(WinnersWarning, match="newer"):
        store.record(row())
    kept = next(store.path.parent.glob("*.damaged-*"))
    assert sqlite3.connect(kept).execute("PRAGMA user_version").fetchone() == (99,)


def test_without_a_writable_disk_rows_live_in_memory(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = Winners(blocked / "winners.sqlite3")
    with pytest.warns(WinnersWarning, match="for this process only"):
        store.record(row("a", 2.0))
    store.record(row("b", 1.0))
    assert store.best("H200", 132, "p").config == "b"
    assert store.path is None


def test_reading_creates_nothing(store):
    assert store.rows() == []
    assert not store.path.exists()


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
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write, args=(path, f"p{i}")) for i in range(3)]
    threads = [threading.Thread(target=_write, args=(path, f"t{i}")) for i in range(3)]
    for worker in (*processes, *threads):
        worker.start()
    for worker in (*processes, *threads):
        worker.join(60)
    assert all(process.exitcode == 0 for process in processes)
    assert len({r.config for r in Winners(path).rows()}) == 6 * 20
