"""A variable of ours with a value that is not accepted: the call that reads it names it, the value and what is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cutegemm
from cutegemm import native
from cutegemm.emulator import bridge
from cutegemm.hardware.arch import get
from cutegemm.problem import Problem
from cutegemm.run import call as calls
from cutegemm.tuner import on_demand

A, B = torch.ones(3, 5), torch.ones(5, 7)
OFFSETS = torch.tensor([3], dtype=torch.int32)


def switched_on(monkeypatch) -> None:
    monkeypatch.setattr(native, "_state", native._State())
    monkeypatch.setattr(native, "_make", lambda: None)
    native.want()


READ = {
    "CUTEGEMM_TUNE": (lambda m: cutegemm.gemm(A, B), "accepted are 0 and 1"),
    "CUTEGEMM_WINNERS": (lambda m: cutegemm.gemm(A, B), "accepted are on and off"),
    "CUTEGEMM_DEBUG": (lambda m: cutegemm.grouped_gemm(A, B[None], OFFSETS), "accepted are 0 and 1"),
    "CUTEGEMM_NATIVE": (switched_on, "accepted are 0 and 1"),
    "CUTEGEMM_ARCH": (lambda m: cutegemm.gemm(A, B, backend="cute"), "known: .*sm_90"),
    "CUTEGEMM_EMULATOR_SEED": (lambda m: bridge._environment_seed(), "accepted is a number of at least 0"),
    "CUTEGEMM_TUNE_BUDGET": (
        lambda m: on_demand.on_demand(Problem.of(64, 64, 64, "fp16"), get("H200"), 0),
        "accepted is a positive number of seconds",
    ),
}
"""What reads a variable, and what its error says is accepted."""


@pytest.fixture(autouse=True)
def nothing_remembered():
    calls.memo.clear()
    yield
    calls.memo.clear()


@pytest.mark.parametrize("name", READ)
def test_a_value_that_is_not_accepted_is_an_error_of_every_call(name, monkeypatch):
    read, accepted = READ[name]
    monkeypatch.setenv(name, "foo")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name}: got 'foo'.*{accepted}"):
            read(monkeypatch)


@pytest.mark.parametrize("name", ["CUTEGEMM_TUNE", "CUTEGEMM_WINNERS", "CUTEGEMM_DEBUG", "CUTEGEMM_NATIVE"])
def test_values_that_are_accepted(name, monkeypatch):
    read, _ = READ[name]
    for value in ("", "on", "off") if name == "CUTEGEMM_WINNERS" else ("", "0", "1"):
        monkeypatch.setenv(name, value)
        read(monkeypatch)


def test_a_new_call_on_a_gpu_that_the_extension_refuses_is_not_remembered(monkeypatch):
    """Else the second call would run without a word of the wrong variable."""
    monkeypatch.setenv("CUTEGEMM_NATIVE", "foo")
    monkeypatch.setattr(native, "_state", native._State())
    plan = SimpleNamespace(kernel=object())
    on_gpu = SimpleNamespace(
        request=SimpleNamespace(device=torch.device("cuda", 0)), plan=lambda state: plan, runner=lambda plan: print
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="CUTEGEMM_NATIVE: got 'foo'"):
            calls.planned("the key of a call", on_gpu, A, B, None, {"out": None})
        assert calls.memo.get("the key of a call") is None


def test_the_seed_of_tests_is_refused_by_name(tmp_path):
    root = Path(cutegemm.__file__).parent.parent
    (tmp_path / "test_it.py").write_text("def test_it(seed):\n    pass\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "test_it.py"], cwd=tmp_path,
        env={**os.environ, "CUTEGEMM_TEST_SEED": "foo", "PYTHONPATH": str(root)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "CUTEGEMM_TEST_SEED: got 'foo', accepted is a number of at least 0" in ran.stdout
