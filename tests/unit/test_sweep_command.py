"""`python -m tuning.sweep`: arguments, several GPUs, Ctrl-C, summaries, and what it does without a GPU."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cutegemm import backend as backends
from cutegemm.errors import GemmError
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.roofline import roofline
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.run import progress as bars
from cutegemm.tuner import report as sweep_report
from cutegemm.tuner import run as sweep_run
from cutegemm.tuner.search import Options, Outcome, Result
from cutegemm.tuner.space import Candidate, enumerate_all
from cutegemm.winners import Measurement, Winners
from cutegemm.winners.fingerprint import fingerprint
from tests.terminal import terminal
from tests.tuning_fakes import H200, PROBLEM, FakeCompiler, FakeTimer, candidate, space
from tests.waiting import PATIENCE, wait_until
from tuning import cli, plot, sweep, sweep_dry

ROOT = Path(__file__).parent.parent.parent


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
        (("--shapes", "64", "--precision", "tf32"), "fp32"),
        (("--suite", "large"), "'large'"),
        (("--shapes", "64", "--arch", "sm_70", "--compile-only"), "sm_70"),
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
    monkeypatch.setattr(sweep_run, "_today", lambda *rest: None)


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


def test_seeds_are_todays_choice_and_earlier_winners(tmp_path, monkeypatch):
    problem = Problem.of(256, 256, 256, "bf16")
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    store = Winners()
    fast, slow, gone = "sm80/64x64x32/w32x32/s5/g8", "sm80/64x32x32/w32x16/s5/g8", "sm80/63x1x1/w9x9/s5/g8"
    for config, ratio in ((slow, 0.5), (fast, 0.9), (gone, 2.0), ("nonsense", 3.0)):
        store.record(Measurement("H200", 132, str(problem), "cute", config, "old sources", 1e-5, "ok",
                                 reference_seconds=ratio * 1e-5))  # fmt: skip
    found = sweep_run.seeds(problem, H200, store, ["cute"])
    assert [seed.text for seed in found[1:]] == [fast, slow]
    assert backends.get("cute").check(found[0].config, problem, H200) is None
    assert sweep_run.seeds(problem, H200, store, ["legacy"]) == found[:1]
    # A fresh winner is what gemm takes today.
    store.record(Measurement("H200", 132, str(problem), "cute", slow, fingerprint("cute", slow), 1e-5, "ok"))
    assert sweep_run.seeds(problem, H200, store, ["cute"])[0].text == slow


def test_seeds_from_the_other_16_bit_type_and_from_near(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sweep_run.winners_table, "shipped", lambda *where: {})
    store = Winners(tmp_path / "elsewhere.sqlite3")
    texts = ["sm80/64x64x32/w32x32/s5/g8", "sm80/64x32x32/w32x16/s5/g8", "sm80/128x128x32/w64x64/s4/g8"]
    where = [(256, 256, 256, "bf16"), (256, 384, 256, "fp16"), (4096, 4096, 4096, "fp16")]
    for text, (m, n, k, dtype) in zip(texts, where, strict=True):
        problem = Problem.of(m, n, k, dtype)
        store.record(Measurement("H200", 132, str(problem), "cute", text, fingerprint("cute", text), 1e-5, "ok",
                                 reference_seconds=1e-5))  # fmt: skip
    found = sweep_run.seeds(Problem.of(256, 256, 256, "fp16"), H200, store, ["cute"])
    assert [seed.text for seed in found[1:]] == texts[:2]
    turned = Problem.of(256, 256, 256, "fp16", majors="nt")
    assert [seed.text for seed in sweep_run.seeds(turned, H200, store, ["cute"])[1:]] == texts[:1]
    assert sweep_run.seeds(Problem.of(256, 256, 256, "fp16", batch=2), H200, store, ["cute"])[1:] == []


def test_seeds_from_other_majors_whose_operands_are_aligned_otherwise(tmp_path, monkeypatch):
    """B of 256 x 100 is aligned to 16 bytes where K is contiguous, to 8 where N is."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sweep_run.winners_table, "shipped", lambda *where: {})
    fused = Epilogue("bf16", "fp32", "n", "relu")
    text = "sm80/64x64x32/w32x32/s5/g8"
    for epilogue in (Epilogue(), fused):
        tn, tt = (Problem.of(256, 100, 256, "bf16", majors=majors, epilogue=epilogue) for majors in ("tn", "tt"))
        assert (tn.signature.align_b, tt.signature.align_b) == (16, 8)
        for known, asked in ((tt, tn), (tn, tt)):
            store = Winners(tmp_path / f"{known}{epilogue}".replace("/", ""))
            store.record(Measurement("H200", 132, str(known), "cute", text, fingerprint("cute", text), 1e-5, "ok",
                                     reference_seconds=1e-5))  # fmt: skip
            assert [seed.text for seed in sweep_run.seeds(asked, H200, store, ["cute"])[1:]] == [text]
            other = Problem.of(256, 100, 256, "fp16", majors="nn")
            found = [seed.text for seed in sweep_run.seeds(other, H200, store, ["cute"])[1:]]
            assert found == ([text] if epilogue == Epilogue() else [])


def test_the_next_shape_is_compiled_ahead(tmp_path, monkeypatch):
    """While one shape is timed the next one's candidates are enumerated and compiled."""
    monkeypatch.setattr(sweep_run, "_today", lambda *rest: None)
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
    monkeypatch.setattr(sweep_run, "_today", lambda *rest: None)
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


@pytest.mark.parametrize(
    ("dtype", "precision"), [("bf16", "ieee"), ("fp16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32")]
)
@pytest.mark.product(keep=2)
def test_at_least_two_hundred_valid_configurations(dtype, precision):
    problem = Problem.of(4096, 4096, 4096, dtype, precision=precision)
    found = enumerate_all(problem, H200, ["cute"])
    assert len(found) >= 200
    assert len({c.key for c in found}) == len(found)
    assert [c.estimate for c in found] == sorted(c.estimate for c in found)
    backend = backends.get("cute")
    assert all(backend.check(c.config, problem, H200) is None for c in found[::50])


def test_configurations_of_two_backends():
    both = enumerate_all(Problem.of(512, 512, 512, "fp32", majors="tt"), H200, ["cute", "legacy"])
    assert {c.backend for c in both} == {"cute", "legacy"}


def test_the_summary(tmp_path):
    fast, second = candidate("sm90/fast"), candidate("sm90/second")
    done = Outcome(PROBLEM, 300, {
        fast.key: Result(fast, "ok", 4e-6, 5e-6, "final"),
        second.key: Result(second, "ok", 4.4e-6, 5e-6, "final"),
        ("cute", "bad"): Result(candidate("bad"), "wrong: 3 elements"),
        ("cute", "burst"): Result(candidate("burst"), "ok", 3e-6, 5e-6, "quick"),
    }, 5e-6, 12.34)  # fmt: skip
    empty = Outcome(Problem.of(64, 64, 64, batch=4), 10, ended="interrupted")
    text = sweep_report.table([done, empty], H200)
    line = next(line for line in text.splitlines() if line.startswith("1024x1024x1024"))
    assert "sm90/fast" in line
    for figure in ("4.00", "536.9", "1.250", "sm90/second +10.0 %", "3/1/0 of 300", "12.3"):
        assert figure in line
    assert "4x64x64x64" in text
    assert "none (interrupted)" in text
    assert "1.250 (geometric mean)" in text
    data = json.loads(sweep_report.as_json([done, empty], H200, {"made": "now"}))
    assert data["shapes"][0]["winner"]["config"] == "sm90/fast"
    assert [r["config"] for r in data["shapes"][0]["results"]] == ["sm90/fast", "sm90/second", "burst", "bad"]
    assert data["shapes"][1]["winner"] is None
    drawn = tmp_path / "plot.png"
    pytest.importorskip("matplotlib")
    plot.plot_sweep([done, empty], H200, drawn)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing"):
        plot.plot_sweep([empty], H200, drawn)


def test_the_plot_shows_a_shape_that_memory_limits(tmp_path, monkeypatch):
    """Its TFLOP/s are a sliver beside a square's; its share of the bound is not."""
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    def outcome(problem, share, slower):
        seconds = roofline(problem, H200).bound_s / share
        one = candidate("sm90/one")
        return Outcome(problem, 1, {one.key: Result(one, "ok", seconds, slower * seconds, "final")}, seconds, 1.0)

    found = [outcome(Problem.of(8192, 8192, 8192), 0.8, 1.25), outcome(Problem.of(8, 8192, 8192), 0.6, 2.0)]
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    plot.plot_sweep(found, H200, tmp_path / "plot.png")
    speed, shares = figures[0].axes
    tall, sliver = (speed.patches[place].get_height() for place in (0, 2))
    assert sliver < 0.05 * tall
    assert [round(bar.get_height(), 3) for bar in shares.patches] == [80.0, 64.0, 60.0, 30.0]
    assert [text.get_text() for text in shares.texts] == ["1.25x", "2.00x"]


def test_progress(monkeypatch):
    outcome = Outcome(PROBLEM, 300, {("cute", "x"): Result(candidate("sm90/x"), "ok", 4e-6, 5e-6)}, elapsed=3.0)
    screen = terminal(monkeypatch)
    progress = sweep_report.Progress(2, 160, screen)
    progress.update(0, "exploring", outcome)
    progress.update(1, "halving", outcome)
    wait_until(lambda: "halving" in screen.getvalue())
    assert "0/2 shapes" in screen.getvalue()
    assert "1024x1024x1024 exploring 1/160 of 300  best 536.9 TFLOP/s 1.250x cuBLAS sm90/x" in screen.getvalue()
    progress.finished(0, outcome)
    wait_until(lambda: "1/2 shapes" in screen.getvalue())
    assert "1024x1024x1024: best 536.9 TFLOP/s 1.250x cuBLAS sm90/x in 3.0 s\n" in screen.getvalue()
    progress.close()
    plain = io.StringIO()
    progress = sweep_report.Progress(2, 160, plain)
    progress.update(0, "exploring", outcome)
    progress.finished(0, Outcome(PROBLEM, 3, ended="budget", elapsed=1.0))
    progress.close()
    assert plain.getvalue() == "1024x1024x1024: nothing right was measured in 1.0 s (budget)\n"


def test_progress_in_a_log(monkeypatch):
    monkeypatch.setattr(bars, "QUIET_SECONDS", 0.01)
    outcome = Outcome(PROBLEM, 300, {("cute", "x"): Result(candidate("sm90/x"), "ok", 4e-6, 5e-6)}, elapsed=3.0)
    log = io.StringIO()
    progress = sweep_report.Progress(2, 160, log)
    progress.update(0, "exploring", outcome)
    progress.update(1, "halving", outcome)
    wait_until(lambda: "halving" in log.getvalue())
    progress.close()
    line = next(line for line in log.getvalue().splitlines() if "halving" in line)
    assert line.startswith("0/2 shapes (0 s) | 1024x1024x1024 exploring 1/160 of 300  best 536.9 TFLOP/s")
    assert line.count("sm90/x") == 2


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
    assert "0 valid configurations" in capsys.readouterr().out


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
        Problem.of(1, 1, 1),
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
