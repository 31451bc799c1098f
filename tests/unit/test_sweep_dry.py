"""A sweep without a GPU: it compiles the configurations, or runs them in the emulator, and times nothing."""

from __future__ import annotations

import pytest

from cutegemm import backend as backends
from cutegemm.errors import GemmError
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.tuner.space import Candidate, enumerate_all
from tests.tuning_fakes import FakeCompiler, space
from tuning import sweep, sweep_dry


def test_compile_only_lists_and_says_that_nothing_was_timed(store_root, capsys):
    arguments = ["--shapes", "256", "--dtype", "fp32", "--backends", "legacy", "--compile-only", "--arch", "sm_80"]
    assert sweep.main([*arguments, "--candidates", "3", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("compiled") == 3
    assert "3 of 3 are in the kernel store" in said
    assert "Nothing was timed" in said
    assert sweep.main([*arguments, "--candidates", "3", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.count("in the store") == 3
    assert not (store_root.parent / "winners.sqlite3").exists()


@pytest.mark.parametrize("way", ["--compile-only", "--emulate"])
def test_without_any_configuration_a_dry_run_fails(way, store_root, capsys):
    arguments = ["--shapes", "64", "--dtype", "fp64", "--backends", "legacy", way, "--arch", "sm_80"]
    assert sweep.main(arguments) == 1
    said = capsys.readouterr().out
    assert "0 valid configurations" in said
    assert "legacy: " in said, "the reason"


def test_compile_only_keeps_its_budget_and_tells_failures():
    candidates = space(6)
    compiler = FakeCompiler(fails={candidates[0].key: "ptxas said no"})
    entries = sweep_dry.compile_only(candidates, compiler, 5, 30.0)
    outcomes = {entry.candidate.key: entry.outcome for entry in entries}
    assert len(entries) == 5
    assert outcomes[candidates[0].key] == "failed to compile: ptxas said no"
    assert sum(outcome == "compiled" for outcome in outcomes.values()) == 4
    entries = sweep_dry.compile_only(candidates, FakeCompiler(), 5, 0.0)
    assert {entry.outcome for entry in entries} == {"not compiled: out of time"}


@pytest.mark.parametrize(
    "problem",
    [
        Problem.of(4096, 4096, 4096, "bf16"), Problem.of(4095, 4099, 4097, "fp16", majors="nt"),
        Problem.of(300, 20, 5000, "fp32", majors="nn", batch=3, epilogue=Epilogue("fp32", None, "n", "relu")),
        Problem.of(1, 1, 1), Problem.of(16, 4096, 4096, constant="b"), Problem.of(4096, 1, 4096, constant="a"),
    ],
    ids=str,
)  # fmt: skip
def test_small_instances_have_the_same_signature(problem):
    config = backends.get("cute").default(problem, arch_table.get("sm_80"))
    small = sweep_dry.small_instance(problem, Candidate("cute", config))
    assert small.signature == problem.signature
    bm, bn, bk = config.tile()
    assert small.m <= bm + 64
    assert small.n <= bn + 64
    assert small.k <= 3 * bk + 64
    assert small.m > bm or small.m == problem.m


def test_emulate_finds_right_and_wrong(capsys, monkeypatch):
    arguments = ["--shapes", "300x520x264", "--dtype", "fp32", "--backends", "legacy", "--emulate", "--arch", "sm_80"]
    assert sweep.main([*arguments, "--candidates", "1"]) == 0
    said = capsys.readouterr().out
    assert "right at" in said
    assert "1 of 1 are right in the emulator" in said
    assert "Nothing was timed" in said
    problem = Problem.of(300, 520, 264, "fp32")
    found = enumerate_all(problem, arch_table.get("sm_80"), ["legacy"])[:1]
    from cutegemm.emulator.workload import Workload
    from cutegemm.problem.reference import Verdict

    monkeypatch.setattr(Workload, "run", lambda self, **rest: (Verdict(False, 2.0, "9 elements outside"), []))
    (entry,) = sweep_dry.emulate(problem, found, arch_table.get("sm_80"), 1, 60.0)
    assert entry.outcome.endswith("9 elements outside")
    assert entry.outcome.startswith("wrong")

    def refuse(*rest, **more):
        raise GemmError("the compiler refused")

    monkeypatch.setattr(Workload, "of", refuse)
    (entry,) = sweep_dry.emulate(problem, found, arch_table.get("sm_80"), 1, 60.0)
    assert entry.outcome == "failed: the compiler refused"


def test_nothing_compiled_is_no_success(store_root, capsys):
    """There was no time for any."""
    arguments = ["--shapes", "256", "--dtype", "fp32", "--backends", "legacy", "--compile-only", "--budget", "0.001s"]
    assert sweep.main([*arguments, "--arch", "sm_80", "--candidates", "3"]) == 1
    assert "0 of 3 are in the kernel store" in capsys.readouterr().out
