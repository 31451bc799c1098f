"""The protocol of backends: what every one has, and torch as a backend like the others."""

from __future__ import annotations

import inspect

import pytest
import torch

import cutegemm
from cutegemm import backend as backends
from cutegemm.backend import Backend, OnTensors
from cutegemm.choice import heuristics, plan
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from tests.fake_backend import FakeBackend, uncompiled

H200 = arch_table.get("H200")
PROBLEM = Problem.of(64, 64, 64, "bf16")


@pytest.mark.parametrize("name", [name for name in backends.NAMES if name != "auto"])
def test_every_backend_is_one_by_its_class(name):
    found = backends.get(name)
    assert isinstance(found, Backend)
    assert backends.get(name) is found
    assert (found.name, isinstance(found, OnTensors)) == (name, name not in backends.WITH_KERNELS)
    assert found.supports(PROBLEM, H200) is None
    assert all(found.check(config, PROBLEM, H200) is None for config, _ in found.candidates(PROBLEM.signature, H200))


def test_the_protocol_explains_each_of_its_methods():
    methods = {name: member for name, member in vars(Backend).items() if inspect.isfunction(member)}
    assert [name for name, method in methods.items() if not method.__doc__] == []
    assert {"supports", "missing", "candidates", "shortlist", "only_by_name", "passed_over"} < set(methods)


def test_a_backend_that_lacks_a_function_cannot_be_made():
    with pytest.raises(TypeError, match="supports"):
        type("Half", (Backend,), {"name": "half", "compiler": "none"})()


def test_a_backend_without_candidates_is_asked_for_its_default(monkeypatch):
    heuristics.forget()
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend())
    monkeypatch.setattr(backends, "NAMES", (*backends.NAMES, "fake"))
    choice = plan.choose(PROBLEM, H200, "fake")
    assert choice == plan.Choice("fake", "fake", "heuristic")
    heuristics.forget()


def test_a_tool_that_is_missing_is_the_reason_for_the_last_resort(monkeypatch):
    class Without(FakeBackend):
        def missing(self) -> str | None:
            return "no compiler here"

    real = backends.get
    monkeypatch.setattr(backends, "get", lambda name: real(name) if name == backends.LAST_RESORT else Without())
    heuristics.forget()
    choice = plan.choose(PROBLEM, H200)
    heuristics.forget()
    assert choice.backend == "torch"
    assert "backend 'cute' cannot: no compiler here" in choice.why


@pytest.mark.parametrize(
    ("config", "shown"),
    [(3, "3"), ("x", "'x'"), (backends.get("cute").parse("sm80/64x64x32/w32x32/s5/g8"), "AmpereConfig")],
)
def test_torch_takes_no_configuration(config, shown):
    with pytest.raises(ValueError, match=f"config: got {shown}.*but backend 'torch' has no configurations"):
        plan.choose(PROBLEM, H200, "torch", config)


def test_torch_has_no_kernels():
    serves = backends.get("torch")
    assert list(serves.configs(PROBLEM, H200)) == list(serves.candidates(PROBLEM.signature, H200)) == []
    for ask in (
        lambda: serves.build(PROBLEM.signature, None, H200),
        lambda: serves.footprint(None, PROBLEM.signature, H200),
        lambda: serves.sources(""),
        lambda: serves.default(PROBLEM, H200),
    ):
        with pytest.raises(ValueError, match=r"backend: got 'torch', .*accepted are 'cute', 'cutlass2x', 'legacy'"):
            ask()
    with pytest.raises(ValueError, match="no configurations"):
        serves.parse("x")


def test_torch_says_which_backend_has_the_precision_asked_for():
    for precision, able in (("tf32", "'cute' or 'cutlass2x'"), ("bf16x6", "backend 'cute'")):
        problem = Problem.of(64, 64, 64, "fp32", precision=precision)
        with pytest.raises(UnsupportedError, match=f"TF32 switch; precision='{precision}' needs .*{able}"):
            plan.choose(problem, None, "torch")


def test_a_call_to_torch_is_what_its_backend_runs(monkeypatch):
    calls = []
    serves = backends.get("torch")
    monkeypatch.setattr(serves, "runner", lambda asked: lambda *of: calls.append(asked.problem) or of[0], raising=True)
    a = torch.ones(3, 5, dtype=torch.float64).float()
    assert cutegemm.gemm(a, a.t(), backend="torch", alpha=2.0, config=None) is a
    assert [(p.m, p.n, p.k) for p in calls] == [(3, 3, 5)]
    from cutegemm.run import call

    call.memo.clear()


def test_an_object_is_read_as_the_backend_writes_it():
    cute, legacy = backends.get("cute"), backends.get("legacy")
    config = cute.parse("sm80/64x64x32/w32x32/s5/g8")
    assert cute.read(config) is config
    assert cute.read(str(config)) == config
    for wrong in (3, None, legacy.default(PROBLEM, H200)):
        with pytest.raises(ValueError, match="expected a configuration of backend 'cute' or its text form"):
            cute.read(wrong)
    assert uncompiled(cute, lambda *of: "kernel").build(PROBLEM.signature, config, H200) == "kernel"
