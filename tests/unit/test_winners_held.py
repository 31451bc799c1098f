"""A process that is stopped while it holds the winners store's file: `gemm` goes on, and nothing is lost."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from contextlib import closing

import pytest

from cutegemm.problem import Problem
from cutegemm.winners import Measurement, Winners, lookup, own_rows, passed_over, reader, state
from cutegemm.winners import file as winners_file
from cutegemm.winners import table as winners_table
from cutegemm.winners.fingerprint import fingerprint
from tests.tuning_fakes import H200
from tests.waiting import PATIENCE

PROBLEM, OTHER = Problem.of(512, 512, 512), Problem.of(256, 512, 512, "bf16")
FAST, SLOW = "sm80/128x128x32/w64x64/s4/g8", "sm80/64x64x32/w32x32/s5/g8"

_STOPPED = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
connection.execute("UPDATE measurement SET seconds = seconds / 2")
os.kill(os.getpid(), signal.SIGSTOP)
connection.execute("COMMIT")
"""


def row(config: str, seconds: float) -> Measurement:
    known = {"problem": str(PROBLEM), "verdict": "ok", "gpu": "H200", "sm_count": 132}
    return Measurement(config=config, seconds=seconds, backend="cute", fingerprint=fingerprint("cute", config), **known)


@pytest.fixture
def store(tmp_path, monkeypatch) -> Winners:
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTEGEMM_WINNERS", raising=False)
    monkeypatch.setattr(winners_table, "shipped", lambda *where: {})
    found = Winners()
    found.record(row(SLOW, 4e-6))
    return found


@pytest.fixture
def stopped(store):
    process = subprocess.Popen([sys.executable, "-c", _STOPPED, str(store.path)])
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    yield process
    process.kill()
    process.wait(PATIENCE)


def test_gemm_goes_on_beside_a_stopped_process_and_takes_its_rows_later(store, stopped, monkeypatch):
    monkeypatch.setattr(reader._Reader, "ASK_NS", 0)
    monkeypatch.setattr(reader._Reader, "LOOK_NS", 0)
    writer = threading.Thread(target=Winners().record, args=(row(FAST, 1e-6),))
    writer.start()  # as a sweep: it waits
    began = time.monotonic()
    with pytest.warns(
        winners_file.WinnersWarning, match=r"another process has held .* the shipped table decides"
    ) as told:
        assert lookup(PROBLEM, H200) is None
    assert time.monotonic() - began < PATIENCE / 10
    assert len(told) == 1
    before = state()
    monkeypatch.setattr(reader._Reader, "HELD_SECONDS", PATIENCE)  # nobody may wait another time
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        began = time.monotonic()
        assert lookup(PROBLEM, H200) is None
        assert lookup(OTHER, H200) is None
        assert own_rows(str(OTHER.signature)) == passed_over(PROBLEM, H200) == []
        assert state() == before
        assert time.monotonic() - began < PATIENCE / 10
        assert writer.is_alive()
        os.kill(stopped.pid, signal.SIGCONT)
        writer.join(PATIENCE)
        assert state() != before
        assert lookup(PROBLEM, H200).config == FAST
    assert [(each.config, each.seconds) for each in store.rows()] == [(SLOW, 2e-6), (FAST, 1e-6)]


def test_a_file_that_was_held_is_asked_for_now_and_then(store, monkeypatch):
    """And without a change: the process that held it may have written nothing."""
    monkeypatch.setattr(reader._Reader, "HELD_SECONDS", 0.0)
    monkeypatch.setattr(reader._Reader, "LOOK_NS", 0)
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.warns(winners_file.WinnersWarning, match="another process has held"):
            assert lookup(PROBLEM, H200) is None
        other.execute("ROLLBACK")
    monkeypatch.setattr(reader._Reader, "ASK_NS", 2**62)
    assert lookup(PROBLEM, H200) is None
    monkeypatch.setattr(reader._Reader, "ASK_NS", 0)
    assert lookup(PROBLEM, H200).config == SLOW


def test_others_than_gemm_wait_and_go_on_in_memory(store, monkeypatch):
    monkeypatch.setattr(winners_file, "LOCK_SECONDS", 0.1)
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.warns(winners_file.WinnersWarning, match="for this process only"):
            assert Winners().rows() == []
        other.execute("ROLLBACK")
    assert len(Winners().rows()) == 1
