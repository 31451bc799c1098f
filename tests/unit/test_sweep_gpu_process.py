"""The process that owns a GPU while a sweep runs, and what its death costs: one candidate, no row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cutegemm.tuner.child import Child
from cutegemm.tuner.timer import GpuProcess, TimerBroken, TimerLost
from tests.tuning_fakes import LIGHT, PROBLEM, candidate
from tests.waiting import PATIENCE

_GPU = (
    LIGHT
    + """
import os, signal, sys, time
from pathlib import Path
from cutegemm.tuner.child import Fatal, serve

log = Path(os.environ["GPU_LOG"])
is_open = False

def handle(what, *rest):
    global is_open
    with open(log, "a") as file:
        print(what, *(rest if what == "check" else ()), file=file)
    if what == "arch":
        if os.environ.get("GPU_MISSING"):
            raise RuntimeError("torch sees no CUDA device")
        return "H200"
    if what == "state":
        return "a GPU"
    if what == "open":
        if rest[0].m == 7:
            raise RuntimeError("CUDA out of memory")
        is_open = True
        return 0.1
    if not is_open:
        raise RuntimeError("no problem is open")
    if what == "check":
        if rest[1] == "hangs":
            time.sleep(600)
        if rest[1] == "faults":
            raise Fatal("an illegal memory access was encountered")
        return ("ok", 1e-3)
    if what == "time":
        if any(key[1] == "races" for key in rest[0]):
            os.kill(os.getpid(), signal.SIGSEGV)
        return {("torch", ""): 2e-3, **{key: 1e-3 for key in rest[0]}}

serve(handle)
"""
)


@pytest.fixture
def gpu(tmp_path, monkeypatch) -> str:
    (tmp_path / "gpu_child.py").write_text(_GPU)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GPU_LOG", str(tmp_path / "log"))
    return "gpu_child"


def test_the_gpu_process_is_replaced_and_the_culprit_named(gpu, tmp_path):
    some: Any = SimpleNamespace(m=64)
    large: Any = SimpleNamespace(m=7)
    with GpuProcess(0, gpu) as timer:
        assert timer.arch == "H200"
        assert timer.describe() == "a GPU"
        timer.open(some)
        assert timer.check(candidate("right"), PATIENCE).verdict == "ok"
        verdict = timer.check(candidate("hangs"), 0.3).verdict
        assert verdict == "failed to run: no answer within 0 s"
        assert "illegal memory access" in timer.check(candidate("faults"), PATIENCE).verdict
        assert timer.check(candidate("right"), PATIENCE).verdict == "ok"
        with pytest.raises(TimerLost, match="SIGSEGV"):
            timer.time([candidate("right"), candidate("races")], 2, 0.0)
        times = timer.time([candidate("right")], 2, 0.0)
        assert times["torch", ""] == 2e-3
        with pytest.raises(TimerBroken, match="out of memory"):
            timer.open(large)
        timer.open(some)
    said = (tmp_path / "log").read_text().split("\n")
    assert said.count("open") == 1 + 3 + 1 + 1


def test_a_gpu_process_that_ended_is_begun_again(gpu):
    with GpuProcess(0, gpu) as timer:
        assert timer.arch == "H200"
        assert timer._child is not None
        timer._child.kill()
        assert timer.describe() == "a GPU"
        some: Any = SimpleNamespace(m=64)
        for _ in range(2):
            timer.open(some)
            timer._child.kill()
            assert timer.check(candidate("right"), PATIENCE).verdict == "ok"
            timer._child.kill()
            assert timer.time([candidate("right")], 2, 0.0)["torch", ""] == 2e-3


def test_a_gpu_process_that_ends_with_the_thread_that_began_it_is_begun_again(gpu, monkeypatch):
    """Its end may come while the question is under way."""
    with GpuProcess(0, gpu) as timer:
        timer.open(SimpleNamespace(m=64))  # type: ignore[arg-type]
        ends = iter([True, False])
        call = Child.call

        def ask(child, *message, timeout):
            if message == ("state",) and next(ends):
                child.kill()
            return call(child, *message, timeout=timeout)

        monkeypatch.setattr(Child, "call", ask)
        assert timer.describe() == "a GPU"


def test_without_a_gpu_the_process_says_so(gpu, monkeypatch):
    monkeypatch.setenv("GPU_MISSING", "1")
    with GpuProcess(0, gpu) as timer, pytest.raises(TimerBroken, match="torch sees no CUDA device"):
        _ = timer.arch


def test_the_real_gpu_process_without_a_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with GpuProcess(0) as timer, pytest.raises(TimerBroken, match="torch sees no CUDA device"):
        timer.open(PROBLEM)
