"""`python -m tuning.sweep`: arguments, one and several GPUs, failures, Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cutegemm import backend
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.tuner import report as sweep_report
from cutegemm.tuner import run as sweep_run
from cutegemm.tuner.search import Options
from cutegemm.tuner.space import Candidate
from cutegemm.winners import Winners
from tests.tuning_fakes import H200, FakeCompiler, FakeTimer, space
from tests.waiting import PATIENCE
from tuning import cli, sweep

ROOT = Path(__file__).parent.parent.parent
NAMED = (
    "sm90/128x64x64/coop2/c1x1/s4/serp8/pdl", "sm90/64x64x64/coop1/c1x1/s4/serp8", "simt/64x64x16/w32x32/s2/g8",
)  # fmt: skip


def options(*arguments: str) -> argparse.Namespace:
    return sweep.parser().parse_args(arguments)


def test_what_is_asked():
    found = sweep.problems(
        options("--shapes", "512x256x128,64,512x256x128", "--dtype", "bf16,fp16", "--majors", "tn,nt")
    )
    assert len(found) == 8
    assert found[0] == Problem.of(512, 256, 128, "bf16")
    assert Problem.of(64, 64, 64, "fp16", majors="nt") in found
    assert [p.m for p in sweep.problems(options("--square", "64..512"))] == [64, 128, 256, 512]
    assert len(sweep.problems(options("--suite", "square,deep"))) > 10
    own = sweep.problems(options("--suite", "gradients", "--shapes", "64", "--majors", "tn,tt"))
    assert [p.signature.majors for p in own[:3]] == ["tn", "tt", "nt"]
    assert own[2] == Problem.of(6144, 4096, 1024, majors="nt")
    (fused,) = sweep.problems(options("--shapes", "64", "--activation", "relu", "--bias", "fp32", "--c", "bf16"))
    assert fused.epilogue == Epilogue("bf16", "fp32", "n", "relu")
    experts = sweep.problems(options("--moe", "--out-dtype", "fp32"))
    assert {p.out_dtype for p in experts} == {"fp32"}
    for text, value in (("60s", 60), ("90", 90), ("2m", 120), ("0.5h", 1800)):
        assert cli.seconds(text) == value


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "name the shapes"),
        (("--shapes", "0x4x4"), "'0x4x4'"),
        (("--shapes", "64", "--dtype", "int4"), "'int4'"),
        (("--shapes", "64", "--majors", "tx"), "'tx'"),
        (("--shapes", "64", "--backends", "cute,cublas"), "'cublas', accepted are cute, cutlass2x, legacy"),
        (("--shapes", "64", "--budget", "soon"), "'soon'"),
        (("--shapes", "64", "--budget", "0"), "'0'"),
        (("--shapes", "64", "--candidates", "0"), "--candidates"),
        (("--shapes", "64", "--jobs", "0"), "--jobs"),
        (("--shapes", "64", "--batch", "0"), "--batch"),
        (("--shapes", "64", "--work", "ragged_m", "--batch", "1025"), "--batch: got 1025 with --work ragged_m"),
        (
            ("--shapes", "512x8192x64", "--work", "gathered_m", "--batch", "2"),
            "512x8192x64 in 2 groups, whose rows are",
        ),
        (("--shapes", "64", "--precision", "tf32"), "fp32"),
        (("--suite", "large"), "'large'"),
        (("--shapes", "64", "--arch", "sm_70", "--compile-only"), "sm_70"),
        (("--shapes", "64", "--dtype", "e4m3,fp16", "--scaling", "rows"), "--scaling: got rows with fp16"),
        (("--shapes", "64", "--compile-only", "--emulate"), "not allowed with"),
        (("--shapes", "64", "--compile-only", "--json", "x"), "--json: it is for what is timed"),
        (("--shapes", "64", "--compile-only", "--resume"), "--resume: it is for what is timed"),
        (("--shapes", "64", "--emulate", "--gpus", "all"), "--gpus: it is for what is timed"),
        (("--moe", "--suite", "llm"), "--moe: got it with --suite"),
        (("--moe", "--batch", "2"), "--moe: got it with --batch"),
        (("--moe", "--precision", "tf32"), "fp32"),
        (("--shapes", "64", "--config", "sm90/what"), "--config: got 'sm90/what'"),
        (("--shapes", "64", "--config", NAMED[0], "--backends", "legacy"), "--config: got it with --backends"),
        (("--shapes", "64", "--config", NAMED[0], "--resume"), "--config: got it with --resume"),
        (("--shapes", "64", "--work", "ragged_m", "--emulate"), "--emulate: got products in groups"),
        (("--moe", "--emulate"), "--emulate: got products in groups"),
    ],
)
def test_bad_arguments_are_named(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        sweep.main(list(arguments))
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_without_a_gpu_it_says_what_can_be_done(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sweep.os.path, "exists", lambda path: False)
    assert sweep.main(["--shapes", "64"]) == 2
    said = capsys.readouterr().err
    assert "--compile-only" in said
    assert "--emulate" in said


def test_indices_of_gpus():
    assert sweep._indices("all", 4) == [0, 1, 2, 3]
    assert sweep._indices("2,0", 4) == [2, 0]
    for bad in ("4", "x", "0,0", "-1"):
        with pytest.raises(ValueError, match="--gpus"):
            sweep._indices(bad, 4)


def fake_gpus(monkeypatch, timers: list[FakeTimer], candidates: list[Candidate], compiler=None) -> None:
    import torch

    remaining = iter(timers)

    class Entered:
        def __init__(self, index: int) -> None:
            self.timer = next(remaining)

        def __enter__(self) -> FakeTimer:
            return self.timer

        def __exit__(self, *error) -> None:
            self.timer.close()

    class Lanes(FakeCompiler):
        def session(self, signature, arch) -> FakeCompiler:
            """With jobs of its own, as the pool's: searches beside each other must not collect one another's."""
            return FakeCompiler()

    class Pool:
        def __init__(self, jobs) -> None: ...

        def __enter__(self):
            return compiler or Lanes()

        def __exit__(self, *error) -> None: ...

    from cutegemm.tuner import compile_pool as sweep_compile

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(timers))
    monkeypatch.setattr(sweep.os.path, "exists", lambda path: False)
    monkeypatch.setattr(sweep, "GpuProcess", Entered)
    monkeypatch.setattr(sweep_compile, "CompilePool", Pool)
    monkeypatch.setattr(sweep_run, "enumerate_all", lambda *rest: candidates)
    monkeypatch.setattr(sweep_run, "today", lambda *rest: [])


def test_a_sweep_from_end_to_end(monkeypatch, capsys, tmp_path):
    candidates = space(20)
    timer = FakeTimer({candidates[7].key: 0.5e-3}, wrong={candidates[0].key: "wrong: 1 element"})
    fake_gpus(monkeypatch, [timer], candidates)
    store, out = tmp_path / "w.sqlite3", tmp_path / "out.json"
    assert sweep.main(["--shapes", "512,1024x256x64", "--store", str(store), "--json", str(out)]) == 0
    said = capsys.readouterr()
    assert "1024x256x64" in said.out
    assert candidates[7].text in said.out
    assert "2.000 (geometric mean), 2.000 to 2.000" in said.out
    assert "19/1/0 of 20" in said.out
    assert str(store) in said.out
    assert "a fake GPU" in said.out
    data = json.loads(out.read_text())
    assert [shape["winner"]["config"] for shape in data["shapes"]] == [candidates[7].text] * 2
    assert len(data["shapes"][0]["results"]) == 20
    assert timer.closed
    assert Winners(store).best("H200", 132, str(Problem.of(512, 512, 512))).config == candidates[7].text


def test_configurations_that_are_named_are_tried_and_no_others(monkeypatch, capsys, tmp_path):
    real = sweep_run.enumerate_all
    today = Candidate("cute", backend.get("cute").parse("sm90/64x32x64/coop1/c1x1/s4/g8"))
    timer = FakeTimer({("cute", NAMED[1]): 0.5e-3, today.key: 0.9e-3})
    fake_gpus(monkeypatch, [timer], [])
    monkeypatch.setattr(sweep_run, "enumerate_all", real)
    monkeypatch.setattr(sweep_run, "today", lambda problem, arch: [today])
    asked = [part for text in NAMED for part in ("--config", text)]
    assert sweep.main(["--shapes", "512", *asked, "--store", str(tmp_path / "w.sqlite3")]) == 0
    said = capsys.readouterr().out
    assert f"{NAMED[2]} is left out: the CUDA-core kernel multiplies fp32" in said
    assert {key for keys, _, _ in timer.timed for key in keys} == {today.key, ("cute", NAMED[0]), ("cute", NAMED[1])}
    assert Winners(tmp_path / "w.sqlite3").best("H200", 132, str(Problem.of(512, 512, 512))).config == NAMED[1]
    assert sweep.main(["--shapes", "512", "--compile-only", "--arch", "H200", "--budget", "0.01", *asked]) in (0, 1)
    assert "2 valid configurations" in capsys.readouterr().out
    assert sweep.main(["--shapes", "512", "--compile-only", "--budget", "0.01", "--config", NAMED[2]]) == 1
    assert "none of those named is valid" in capsys.readouterr().out


def test_a_promise_that_no_kernel_uses_is_swept_as_none(monkeypatch, capsys, tmp_path):
    """Its rows would have a key of their own, and time the same kernels."""
    timer = FakeTimer({})
    fake_gpus(monkeypatch, [timer], space(3))
    asked = ["--shapes", "64", "--dtype", "bf16,fp32", "--constant", "b"]
    assert sweep.main([*asked, "--store", str(tmp_path / "w.sqlite3")]) == 0
    wanted = [Problem.of(64, 64, 64, constant="b"), Problem.of(64, 64, 64, "fp32")]
    assert timer.opened == wanted
    capsys.readouterr()
    assert sweep.main([*asked, "--compile-only", "--arch", "H200", "--budget", "0.01", "--show", "0"]) == 1
    said = capsys.readouterr().out
    assert [line.split(" on ")[0] for line in said.splitlines() if " on H200: " in line] == list(map(str, wanted))


def test_several_gpus_share_the_shapes(monkeypatch, capsys, tmp_path):
    timers = [FakeTimer({}), FakeTimer({}), FakeTimer({})]
    meet = threading.Barrier(3, timeout=PATIENCE)
    for timer in timers:

        def wait(timer=timer) -> None:
            if len(timer.checked) == 1:
                meet.wait()  # passes only when all three measure at the same time

        timer.after_check = wait
    fake_gpus(monkeypatch, timers, space(5))
    arguments = ["--square", "64..2048", "--gpus", "all", "--store", str(tmp_path / "w.sqlite3")]
    assert sweep.main(arguments) == 0
    problems = [problem.m for timer in timers for problem in timer.opened]
    assert sorted(problems) == [64, 128, 256, 512, 1024, 2048]
    assert all(timer.opened for timer in timers)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("64x")] == ["64x64x64"]


def test_a_shape_that_cannot_be_timed_does_not_stop_the_others(tmp_path):
    class Small(FakeTimer):
        def open(self, problem: Problem) -> None:
            self._open_fails = "out of memory" if problem.m > 100 else ""
            super().open(problem)

    problems = [Problem.of(512, 64, 64), Problem.of(64, 64, 64)]
    found = sweep_run.run(
        problems, ["cute"], [Small({})], FakeCompiler(), Winners(tmp_path / "w"), Options(),
        ranker=lambda problem, arch, name: [(1.0, c.config) for c in space(3)],
    )  # fmt: skip
    assert found[0].ended == "not timed: out of memory"
    assert found[1].winner is not None
    table = sweep_report.table(found, H200)
    assert "none (not timed: out of memory)" in table
    assert "not finished: 512x64x64" in table


def test_without_any_configuration_it_says_why(monkeypatch, capsys, tmp_path):
    fake_gpus(monkeypatch, [FakeTimer({})], [])
    shapes = ["--shapes", "512x512x1024", "--work", "ragged_k", "--batch", "8"]
    assert sweep.main([*shapes, "--store", str(tmp_path / "w.sqlite3")]) == 1
    assert "no valid configuration; cute: A is K-major: loads cannot begin at any k" in capsys.readouterr().out


def test_nothing_right_is_a_failure(monkeypatch, capsys, tmp_path):
    candidates = space(3)
    fake_gpus(monkeypatch, [FakeTimer({}, wrong={c.key: "wrong: all" for c in candidates})], candidates)
    assert sweep.main(["--shapes", "512", "--store", str(tmp_path / "w.sqlite3")]) == 1
    assert "0/3/0 of 3" in capsys.readouterr().out


_INTERRUPTED = """
import signal, sys, time
import torch
from tests.tuning_fakes import FakeTimer, FakeCompiler, space
from tests.unit.test_sweep_command import fake_gpus
from tuning import sweep
import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
timer = FakeTimer({})
timer.after_check = lambda: (print("checking", flush=True), time.sleep(0.02))
with pytest.MonkeyPatch.context() as patch:
    fake_gpus(patch, [timer], space(2000))
    sys.exit(sweep.main(["--shapes", "512,1024", "--candidates", "2000", "--store", sys.argv[1]]))
"""


def test_ctrl_c_prints_what_was_measured(tmp_path):
    store = tmp_path / "w.sqlite3"
    command = [sys.executable, "-c", _INTERRUPTED, str(store)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = ""
        while said.count("checking") < 12:
            said += (line := process.stdout.readline())
            assert line, said
        os.kill(process.pid, signal.SIGINT)
        said += process.stdout.read()
        assert process.wait(PATIENCE) == 130
    assert "Traceback" not in said
    assert "512x512x512" in said
    assert "x cuBLAS" in said
    assert "not finished: 512x512x512" in said
    assert "1 of 2 problems were not begun" in said
    assert str(store) in said
    assert len(Winners(store).rows()) >= 8


def test_the_next_shape_is_compiled_ahead(tmp_path, monkeypatch):
    """While one shape is timed the next one's candidates are enumerated and compiled."""
    monkeypatch.setattr(sweep_run, "today", lambda *rest: [])
    enumerated: list[int] = []
    both = threading.Event()

    def ranker(problem: Problem, arch, name):
        enumerated.append(problem.m)
        if len(enumerated) == 2:
            both.set()
        return [(1.0 + number, c.config) for number, c in enumerate(space(20))]

    timer, compiler = FakeTimer({}), FakeCompiler()
    timer.after_check = lambda: both.wait(PATIENCE)  # nothing of the first shape ends before the second is enumerated
    problems = [Problem.of(64 * number, 64, 64) for number in (1, 2, 3)]
    found = sweep_run.run(
        problems, ["cute"], [timer], compiler, Winners(tmp_path / "w"), Options(), ranker=ranker, ahead=5
    )
    assert [outcome.problem for outcome in found] == problems
    assert enumerated == [64, 128, 192]
    assert both.is_set()
    assert [key[1] for key in compiler.before] == [c.text for c in space(20)[:5]] * 3


def test_what_fails_while_it_is_prepared_or_told_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_run, "today", lambda *rest: [])
    given = (["cute"], [FakeTimer({})], FakeCompiler(), Winners(tmp_path / "w"), Options())

    def broken(problem, arch, name):
        raise ValueError("no such backend")

    with pytest.raises(ValueError, match="no such backend"):
        sweep_run.run([Problem.of(64, 64, 64)], *given, ranker=broken)

    def tell(lane, phase, outcome) -> None:
        if phase == "finished":
            raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="the terminal is gone"):
        sweep_run.run([Problem.of(64, 64, 64)], *given, ranker=lambda *rest: [(1.0, space(1)[0].config)], report=tell)
