"""A workload hands on what its backend says of the launches: workspaces, and which checks make sense."""

import types

import pytest
import torch

from cutegemm.emulator import Checks, workload
from cutegemm.emulator.launch import Captured
from cutegemm.emulator.workload import Workload
from cutegemm.problem import Problem


@pytest.fixture
def emulated(monkeypatch):
    seen: list = []

    def emulate(ptx, launches, tensors, **options):
        seen.append((ptx, launches, tensors, options))
        return []

    monkeypatch.setattr(workload, "emulate", emulate)
    return seen


def kernel(launches):
    return types.SimpleNamespace(ptx="text", capture=lambda *arguments: launches)


def test_workspaces_and_checks_of_a_backend_reach_the_emulator(emulated):
    launches = Captured(["a launch"], {"workspace": torch.zeros(16)}, Checks(uninitialized=False))
    work = Workload.of(Problem.of(4, 4, 4, "fp32"), kernel(launches))
    verdict, _ = work.run(seed=3)
    assert not verdict.ok  # nothing computed anything
    ptx, operations, tensors, options = emulated[0]
    assert (ptx, operations, options["seed"]) == ("text", ["a launch"], 3)
    assert set(tensors) == {"a", "b", "d", "workspace"}
    assert options["outputs"] == {"d", "workspace"}
    assert options["checks"] == Checks(uninitialized=False)
    work.run(checks=Checks.none())
    assert emulated[1][3]["checks"] == Checks.none()


def test_without_a_word_from_the_backend_everything_is_checked(emulated):
    work = Workload.of(Problem.of(4, 4, 4, "fp32"), kernel(Captured(["a launch"])))
    work.run()
    assert set(emulated[0][2]) == {"a", "b", "d"}
    assert emulated[0][3]["outputs"] == {"d"}
    assert emulated[0][3]["checks"] is None


def test_a_kernel_finds_its_workspaces_as_its_own_launch_left_them_not_as_another_text_did(monkeypatch):
    """A mutant that breaks off leaves state words, and the unchanged kernel after it would be wrong."""
    found = []

    def emulate(ptx, launches, tensors, **options):
        found.append((ptx, tensors["workspace"].tolist()))
        tensors["workspace"] += 1

    monkeypatch.setattr(workload, "emulate", emulate)
    work = Workload.of(
        Problem.of(4, 4, 4, "fp32"), kernel(Captured(["a launch"], {"workspace": torch.zeros(1, dtype=torch.int32)}))
    )
    for ptx in (None, None, "mutant", "mutant", "another", None):
        work.run(ptx=ptx)
    assert found == [
        ("text", [0]), ("text", [1]), ("mutant", [0]), ("mutant", [1]), ("another", [0]), ("text", [0]),
    ]  # fmt: skip
