"""Processes that tune and compile, and what their deaths cost: no row, no file, no hang."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from cutegemm.run import kernel_store
from cutegemm.tuner import compile_pool as sweep_compile
from cutegemm.tuner.child import Child, ChildDied, ChildError
from cutegemm.tuner.compile_pool import CompilePool, CompileSession, is_stored
from cutegemm.winners import Winners
from tests.tuning_fakes import LIGHT, candidate
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parent.parent.parent
NOTHING: Any = None
"""Stands for a signature or problem in a child that does not look at it, and so needs no import."""


@pytest.mark.slow
def test_sixteen_processes_tune_into_one_store_and_ten_are_killed(tmp_path, seed):
    chance = random.Random(seed)
    store, logs, searches = tmp_path / "winners.sqlite3", tmp_path / "logs", 3
    logs.mkdir()
    victims = chance.sample(range(16), 10)  # which go on until then
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tests.tuning_many"]
    arguments = [str(store), str(logs), "16", str(searches), ",".join(map(str, victims))]
    with subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        processes = {}
        for _ in range(16):
            number, process = parent.stdout.readline().split()
            processes[int(number)] = int(process)
        try:
            for victim in victims[:-1]:
                time.sleep(chance.uniform(0.0, 0.25))
                os.kill(processes[victim], signal.SIGKILL)
            wait_until(lambda: _said(logs, victims[-1]))  # one at least is killed at work
            os.kill(processes[victims[-1]], signal.SIGKILL)
            assert parent.wait(PATIENCE) == 0
        finally:
            parent.kill()  # and what is left of its children
    assert sqlite3.connect(store).execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert not list(tmp_path.glob("*damaged*"))
    rows = Winners(store).rows()
    kept: dict[str, int] = {}
    for row in rows:
        text = f"{row.problem}|{row.config}|{row.kind}"
        kept[text] = kept.get(text, 0) + 1
    acknowledged: dict[str, int] = {}
    for number in range(16):
        for line in _said(logs, number):
            acknowledged[line] = acknowledged.get(line, 0) + 1
    finals = {row.problem for row in rows if row.kind == "final"}
    for number in set(range(16)) - set(victims):
        assert {f"{Problem.of(128 + number, 64, 64 + turn)}" for turn in range(0, searches, 2)} <= finals
    lost = {text: count for text, count in acknowledged.items() if kept.get(text, 0) < count}
    assert not lost
    # A row that was committed when its process died before writing it down is no loss, and there is one heat at most.
    assert len(rows) - sum(acknowledged.values()) <= 10 * 12


def _said(logs: Path, number: int) -> list[str]:
    """What this process was told to be in the store."""
    with contextlib.suppress(FileNotFoundError):
        return (logs / str(number)).read_text().splitlines()
    return []


_ECHO = (
    LIGHT
    + """
import os, signal, sys, time
from cutegemm.tuner.child import Fatal, serve

def handle(what, *rest):
    print("noise on standard output")
    if what == "echo":
        return rest
    if what == "pid":
        return os.getpid()
    if what == "raise":
        raise ValueError("no such thing")
    if what == "fatal":
        raise Fatal("the context is gone")
    if what == "segfault":
        print("famous last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "sleep":
        time.sleep(600)

serve(handle)
"""
)


@pytest.fixture
def echo(tmp_path, monkeypatch) -> str:
    """The name of a module that echoes."""
    (tmp_path / "echo_child.py").write_text(_ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "echo_child"


def test_a_child_answers_refuses_and_dies(echo):
    child = Child(echo)
    assert child.call("echo", 1, {"x": (2, 3)}, timeout=PATIENCE) == (1, {"x": (2, 3)})
    with pytest.raises(ChildError, match="no such thing"):
        child.call("raise", timeout=PATIENCE)
    assert child.call("echo", timeout=PATIENCE) == ()
    with pytest.raises(ChildDied, match="the context is gone"):
        child.call("fatal", timeout=PATIENCE)
    child.close()
    child = Child(echo)
    with pytest.raises(ChildDied, match=r"(?s)SIGSEGV; its last words: .*famous last words"):
        child.call("segfault", timeout=PATIENCE)
    with pytest.raises(ChildDied):
        child.call("echo", timeout=PATIENCE)
    child.close()
    child = Child(echo)
    process = child.call("pid", timeout=PATIENCE)
    begun = time.monotonic()
    with pytest.raises(ChildDied, match="no answer within 0 s"):
        child.call("sleep", timeout=0.2)
    assert time.monotonic() - begun < PATIENCE  # it sleeps for twice as long
    assert not _alive(process)
    child.close()


def test_a_child_ends_with_its_parent(echo):
    code = LIGHT + (
        "from cutegemm.tuner.child import Child; c = Child(sys.argv[1]); print(c.call('pid', timeout=300), "
        "flush=True); c.call('sleep', timeout=600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, echo], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        parent.kill()
        parent.wait(PATIENCE)
    wait_until(lambda: not _alive(process))


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


_WORKER = (
    LIGHT
    + """
import os, signal, time
from pathlib import Path
from cutegemm.tuner.child import serve

def await_file(name):
    while name and not Path(name).exists():
        time.sleep(0.01)

def handle(what, backend, *rest):
    assert os.environ["OMP_NUM_THREADS"] == "1"
    if what == "start":
        await_file(os.environ.get("STARTS_WITH"))
        deaths = os.environ.get("DIES_AT_START")  # a folder of as many files as starts shall still fail
        while deaths and (left := os.listdir(deaths)):
            try:
                os.unlink(os.path.join(deaths, left[0]))
            except FileNotFoundError:  # another worker's death
                continue
            raise SystemExit("the compiler cannot be loaded")
        return None
    signature, config, arch = rest
    if config == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if config == "refused":
        raise RuntimeError("ptxas said no")
    if config == "endless":
        time.sleep(600)
    if config.startswith("gated"):
        await_file(os.path.join(os.environ["GATES"], config))

serve(handle)
"""
)


@pytest.fixture
def worker(tmp_path, monkeypatch) -> str:
    """A module of workers to which "gated ..." is compiled once the file of that name is in `tmp_path`."""
    (tmp_path / "worker_child.py").write_text(_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GATES", str(tmp_path))
    return "worker_child"


def collected(session: CompileSession) -> dict[str, str | None]:
    """What becomes of all that was submitted."""
    done: dict[str, str | None] = {}
    deadline = time.monotonic() + PATIENCE
    while session.outstanding and time.monotonic() < deadline:
        done.update({c.text: reason for c, reason in session.collect(1.0)})
    assert not session.outstanding
    return done


def test_a_pool_survives_its_workers(worker, monkeypatch):
    with CompilePool(2, worker) as pool:
        session, other = pool.session(NOTHING, None), pool.session(NOTHING, None)
        assert session.room == 4
        texts = ["a", "crash", "b", "refused", "c", "d"]
        for text in texts:
            session.submit(candidate(text))
        other.submit(candidate("elsewhere"))
        assert session.room == 0
        done = collected(session)
        assert set(done) == set(texts)
        assert [done[text] for text in "abcd"] == [None] * 4
        assert "SIGKILL" in (done["crash"] or "")
        assert done["refused"] == "ptxas said no"
        assert [c.text for c, _ in other.collect(PATIENCE)] == ["elsewhere"]
        assert session.collect(0.0) == []
        with monkeypatch.context() as impatient:
            impatient.setattr(sweep_compile, "COMPILE_SECONDS", 0.5)
            session.submit(candidate("endless"))
            assert "no answer within 0 s" in (collected(session)["endless"] or "")
        session.submit(candidate("e"))
        assert collected(session) == {"e": None}
    with pytest.raises(RuntimeError, match="closed"):
        session.submit(candidate("late"))


def test_what_is_compiled_ahead_waits_for_all_else(worker, tmp_path, monkeypatch):
    """One worker: what a search asks for comes first, each kernel is compiled once, and whoever asked is told."""
    monkeypatch.setattr(sweep_compile, "is_stored", lambda *rest: False)
    with CompilePool(1, worker) as pool:
        search, next_one = pool.session(NOTHING, None), pool.session(NOTHING, None)
        search.submit(candidate("gated 1"))
        next_one.ahead(map(candidate, ["gated 2", "gated 3", "gated 4"]))
        search.submit(candidate("gated 5"))
        next_one.submit(candidate("gated 3"))  # in earnest now
        search.submit(candidate("gated 3"))
        for number, asked in ((1, [search]), (5, [search]), (3, [search, next_one])):
            (tmp_path / f"gated {number}").touch()
            told = [[c.text for c, _ in session.collect(PATIENCE)] for session in asked]
            assert told == [[f"gated {number}"]] * len(asked)
        assert (search.outstanding, next_one.outstanding) == (0, 0)
        wait_until(lambda: [job.candidate.text for job in pool._later] == ["gated 4"])  # and 2 is begun
        next_one.cancel()
        assert not pool._later
        assert len(pool._known) == 1
        search.submit(candidate("gated 6"))
        for number in (2, 6):
            (tmp_path / f"gated {number}").touch()
        assert [c.text for c, _ in search.collect(PATIENCE)] == ["gated 6"]


def test_a_worker_stands_when_its_compiler_is_loaded(worker, tmp_path, monkeypatch):
    loaded = tmp_path / "loaded"
    monkeypatch.setenv("STARTS_WITH", str(loaded))
    with CompilePool(1, worker) as pool:
        session = pool.session(NOTHING, None)
        assert not session.standing
        session.submit(candidate("gated"))
        assert session.collect(0.2) == []
        assert not session.standing
        loaded.touch()
        wait_until(lambda: session.standing)
        assert session.collect(0.0) == []  # it stands before the kernel is compiled
        assert session.outstanding == 1
        (tmp_path / "gated").touch()
        assert [reason for _, reason in session.collect(PATIENCE)] == [None]
        assert session.standing
        assert not session.broken


def _deaths(folder: Path, count: int) -> str:
    """What `DIES_AT_START` names: workers that start at once never see fewer deaths left than there are."""
    folder.mkdir()
    for number in range(count):
        (folder / str(number)).touch()
    return str(folder)


def test_a_worker_that_dies_at_its_start_is_tried_again(worker, monkeypatch, tmp_path):
    monkeypatch.setenv("DIES_AT_START", _deaths(tmp_path / "deaths", 1))
    with CompilePool(1, worker) as pool:
        session = pool.session(NOTHING, None)
        session.submit(candidate("a"))
        assert [reason for _, reason in session.collect(PATIENCE)] == [None]
        assert not session.broken


def test_workers_that_never_start_break_the_pool_and_all_are_told(worker, monkeypatch, tmp_path):
    """Dead or hanging: whoever waits gets an answer, and so does whoever asks later."""
    monkeypatch.setenv("DIES_AT_START", _deaths(tmp_path / "deaths", 100))
    monkeypatch.setattr(sweep_compile, "is_stored", lambda *rest: False)
    with CompilePool(2, worker) as pool:
        session, other = pool.session(NOTHING, None), pool.session(NOTHING, None)
        for text in "abcd":
            session.submit(candidate(text))
        other.ahead([candidate("e")])
        found = collected(session)
        assert set(found) == set("abcd")
        assert set(found.values()) == {session.broken}
        assert session.broken.startswith("no compile worker comes up: ")
        assert "the compiler cannot be loaded" in session.broken
        assert not session.standing
        assert not pool._known
        other.submit(candidate("late"))
        other.ahead([candidate("later")])
        assert [(c.text, reason) for c, reason in other.collect(PATIENCE)] == [("late", other.broken)]
    monkeypatch.setenv("DIES_AT_START", "")
    monkeypatch.setenv("STARTS_WITH", str(tmp_path / "never"))
    monkeypatch.setattr(sweep_compile, "START_SECONDS", 0.7)
    with CompilePool(1, worker) as pool:
        session = pool.session(NOTHING, None)
        session.submit(candidate("a"))
        assert "no answer within" in str(session.collect(PATIENCE)[0][1])
        assert "no answer within" in session.broken


def test_closing_a_pool_whose_workers_start_does_not_wait(worker, tmp_path, monkeypatch):
    monkeypatch.setenv("STARTS_WITH", str(tmp_path / "never"))
    monkeypatch.setattr(sweep_compile, "START_SECONDS", 3 * PATIENCE)
    pool = CompilePool(2, worker)
    session = pool.session(NOTHING, None)
    for text in "abc":
        session.submit(candidate(text))
    wait_until(lambda: len(pool._children) == 2)
    pool.close()
    assert not pool._children
    assert not any(thread.is_alive() for thread in pool._threads)
    assert not session.broken


def test_closing_a_pool_does_not_wait_for_its_work(worker):
    pool = CompilePool(1, worker)
    session = pool.session(NOTHING, None)
    session.submit(candidate("endless"))
    session.submit(candidate("never begun"))
    wait_until(lambda: len(pool._waiting) == 1 and pool.standing)
    session.cancel()
    assert session.outstanding == 1
    pool.close()
    assert not pool._children
    assert not any(thread.is_alive() for thread in pool._threads)


def test_real_kernels_compile_in_a_worker(store_root):
    arch = arch_table.get("sm_80")
    problem = Problem.of(64, 64, 64, "fp16")
    from cutegemm import backend as backends
    from cutegemm.tuner.space import Candidate

    config = backends.get("cute").parse("sm80/32x32x32/w16x16/s2/g1")
    made = Candidate("cute", config)
    assert not is_stored(made, problem.signature, arch)
    with CompilePool(1) as pool:
        session = pool.session(problem.signature, arch)
        session.submit(made)
        assert session.collect(2 * PATIENCE) == [(made, None)]
        assert session.stored(made)
    with pytest.raises(kernel_store.NotStored), kernel_store.lookups_only():
        backends.get("cute").build(problem.signature, backends.get("cute").parse("sm80/64x32x32/w32x16/s2/g1"), arch)


def test_a_real_worker_that_stands_has_imported_what_it_compiles_with():
    code = """
import sys
from cutegemm.tuner import compile_pool
for backend in ("legacy", "cute"):
    before = set(sys.modules)
    assert compile_pool._handle("start", backend) is None
    print(*(set(sys.modules) - before))
"""
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert made.returncode == 0, made.stderr
    legacy, cute = map(str.split, made.stdout.splitlines())
    assert "legacy_cuda.backend" in legacy
    assert {"cutlass.cute", "cutegemm.cute"} <= set(cute)


def test_results_go_to_the_search_that_asked(worker):
    with CompilePool(1, worker) as pool:
        sessions = [pool.session(NOTHING, None) for _ in range(3)]
        for number, session in enumerate(sessions):
            session.submit(candidate(f"number {number}"))
        for number, session in enumerate(sessions):
            assert [c.text for c, _ in session.collect(PATIENCE)] == [f"number {number}"]
    assert isinstance(sessions[0]._done, queue.SimpleQueue)
