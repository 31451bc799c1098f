"""Locks are free in a forked child, and an interrupt reaches the caller whole."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest
import torch

import cutegemm
from cutegemm import locks
from cutegemm.cute import compile as compiler
from cutegemm.emulator import recorder
from cutegemm.winners import file
from cutegemm.winners.file import WinnersFile


def in_child(check) -> int:
    """The exit status of a forked child: 0 where the check returns true."""
    child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("make", [locks.lock, locks.reentrant])
def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have(make):
    lock, held, ended = make(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            ended.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert in_child(lambda: lock.acquire(timeout=10)) == 0
        assert not lock.acquire(blocking=False), "here the thread holds it still"
    finally:
        ended.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_during_a_write_does_not_hold_the_winners_file(tmp_path):
    path, (parent, child) = tmp_path / "winners.sqlite3", os.pipe()
    with file._locked(path):
        forked = os.fork()
        if forked == 0:
            os.close(child)
            os.read(parent, 1)  # until the test has ended
            os._exit(0)
    try:
        with open(f"{path}.lock") as beside:
            fcntl.flock(beside, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(child)
        os.waitpid(forked, 0)
    assert WinnersFile(path).stamp() is None


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_host_code_runs_is_raised(interrupt, monkeypatch):
    """ctypes would print it, and go on with whatever number the callback seems to have returned."""
    a = torch.ones(16, 16)
    how = {"backend": "cute", "config": "simt/16x32x64/w16x32/s4/g1/x4"}
    expected, own = cutegemm.gemm(a, a, **how), recorder.check_launch

    def interrupted(*_) -> None:
        raise interrupt

    monkeypatch.setattr(recorder, "check_launch", interrupted)
    for _ in range(3):
        with pytest.raises(interrupt):
            cutegemm.gemm(a, a, **how)
    monkeypatch.setattr(recorder, "check_launch", own)
    assert torch.equal(cutegemm.gemm(a, a, **how), expected)


def test_an_interrupt_comes_before_what_the_recording_raises():
    def interrupted() -> None:
        raise KeyboardInterrupt

    def run() -> None:
        with recorder.recording(recorder.HostModule(".version 8.0\n.target sm_80\n.address_size 64\n")):
            assert recorder.guarded(interrupted)() == recorder.UNKNOWN
            raise RuntimeError("host code failed")

    with pytest.raises(KeyboardInterrupt) as raised:
        run()
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_at_the_end_of_the_interpreter_the_main_thread_compiles(monkeypatch):
    def refused(_) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(compiler, "_compile", lambda *_: "artefacts")
    assert compiler.compile_operator(None, "sm_80") == "artefacts"


def test_kernels_are_compiled_outside_the_main_thread(monkeypatch):
    """Where Python raises no KeyboardInterrupt: within the DSL it can end the process."""
    found = []
    monkeypatch.setattr(compiler, "_compile", lambda *_: found.append(threading.current_thread()) or "artefacts")
    assert compiler.compile_operator(None, "sm_80") == "artefacts"
    assert found[0] is not threading.main_thread()
    other = threading.Thread(target=lambda: compiler.compile_operator(None, "sm_80"))
    other.start()
    other.join()
    assert found[1] is other


def test_what_the_compiler_raises_is_raised(monkeypatch):
    def failing(*_) -> None:
        raise cutegemm.GemmError("no such thing")

    monkeypatch.setattr(compiler, "_compile", failing)
    with pytest.raises(cutegemm.GemmError, match="no such thing"):
        compiler.compile_operator(None, "sm_80")
