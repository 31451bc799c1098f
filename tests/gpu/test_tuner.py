"""A real, short sweep: what it measures is right and kept, and `gemm` uses it."""

from __future__ import annotations

import json
import time

import pytest
import torch

import cutegemm
from cutegemm import ops, winners
from cutegemm.choice import plan
from cutegemm.gemm import posed
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem
from cutegemm.tuner import timing
from cutegemm.tuner.compile_pool import CompilePool
from cutegemm.tuner.problem_bench import Bench
from cutegemm.tuner.space import Candidate
from cutegemm.tuner.timer import TORCH, GpuProcess
from cutegemm.winners.fingerprint import is_fresh
from tests.problems import Case
from tuning import exhaustive, random_shapes, sweep, untuned

pytestmark = pytest.mark.gpu


@pytest.fixture
def store(tmp_path, monkeypatch) -> winners.Winners:
    """An empty winners store; kernels are compiled into, and taken from, the tests' own kernel store."""
    from cutegemm.run import kernel_store

    for module in (winners.reader, winners.store):
        monkeypatch.setattr(module, "default_path", lambda: tmp_path / "winners.sqlite3")
    monkeypatch.setattr(winners.reader, "_path_for", lambda named: tmp_path / "winners.sqlite3")
    assert kernel_store.default_store().root.name == "kernels"
    return winners.Winners()


def test_a_sweep_is_kept_and_used(store, tmp_path, seed, capsys):
    shape, out = (512, 512, 512), tmp_path / "sweep.json"
    begun = time.monotonic()
    arguments = ["--shapes", "512", "--dtype", "bf16", "--budget", "8s", "--store", str(store.path)]
    assert sweep.main([*arguments, "--json", str(out)]) == 0
    took = time.monotonic() - begun
    said = capsys.readouterr().out
    assert "512x512x512" in said
    print(f"{said}\n{took:.1f} s in all")
    (data,) = json.loads(out.read_text())["shapes"]
    assert data["elapsed"] < 20
    assert data["enumerated"] >= 200
    assert data["winner"]["kind"] == "final"
    verdicts = {r["verdict"] for r in data["results"]}
    assert verdicts == {"ok"}, verdicts
    arch, problem = Arch.of_device(), Problem.of(*shape, "bf16")
    row = winners.lookup(problem, arch)
    assert row is not None
    assert (row.backend, row.config) == (data["winner"]["backend"], data["winner"]["config"])
    assert is_fresh(row)
    assert row.ratio is not None
    choice = plan.choose(problem, arch)
    assert str(choice.config) == row.config
    assert "tuned winner, own" in choice.why
    Case.random(*shape, "bf16", majors="tn", seed=seed, device="cuda").run()
    rows = len(store.rows())
    assert sweep.main([*arguments, "--resume"]) == 0
    assert "(resumed)" in capsys.readouterr().err
    assert len(store.rows()) == rows


def test_tune_from_a_program(store, seed):
    torch.manual_seed(seed)
    a = torch.randn(384, 256, device="cuda", dtype=torch.float16)
    b = torch.randn(256, 320, device="cuda", dtype=torch.float16)
    before = cutegemm.gemm(a, b)
    found = cutegemm.tune(a, b, budget=6)
    assert found.ratio is not None
    assert found.ratio > 0.2
    row = next(r for r in store.rows() if (r.config, r.kind) == (found.config, "final"))
    assert row.seconds == found.seconds
    torch.testing.assert_close(cutegemm.gemm(a, b), before, atol=0.02, rtol=0.02)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(cutegemm.GemmError, match="captured"), torch.cuda.graph(graph):
        cutegemm.tune(a, b)


def test_graphs_that_nobody_uses_break_no_capture():
    """The garbage collector destroys an unused graph in a reference cycle. CUDA breaks every capture under way then."""
    x = torch.zeros(64, device="cuda")
    unused = [timing.Lane([lambda: x.add_(1)], 1e-5)]

    def call():
        if unused and torch.cuda.is_current_stream_capturing():
            cycle = [unused.pop()]
            cycle.append(cycle)
            del cycle
            _ = [[] for _ in range(50_000)]  # more than `conftest` allows before a collection
        x.add_(1)

    lane = timing.Lane([call], 1e-5)
    assert not unused
    x.zero_()
    assert lane.block() > 0
    assert float(x[0]) == lane.calls


def statistics(acc, rows, scale, residual):
    h = acc * rows * scale + residual
    return h, ops.cast(ops.silu(h), torch.float32), ops.row_sum(h * h), ops.column_max(h)


@pytest.mark.parametrize("constant", [None, "b"])
def test_tune_with_a_program(store, seed, constant):
    """Several results, reductions, a number and operands of two shapes; and gate and up."""
    torch.manual_seed(seed)
    a, b, residual = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((384, 256), (320, 256), (384, 320))
    )
    rows = torch.rand(384, 1, device="cuda")
    many = {"epilogue": statistics, "operands": (rows, 0.125, residual), "constant": constant}
    for given in (many, {"epilogue": ops.swiglu, "constant": constant}):
        before = cutegemm.gemm(a, b.t(), **given)
        found = cutegemm.tune(a, b.t(), budget=6, **given)
        assert found.ratio is not None
        assert found.ratio > 0.1
        problem = plan.measured(posed(a, b.t(), None, given).request.problem, Arch.of_device())
        choice = plan.choose(problem, Arch.of_device())
        assert (str(choice.config), "tuned winner" in choice.why) == (found.config, True)
        assert "plain product" not in choice.why
        kinds = {row.kind for row in store.rows(str(problem)) if row.ok}
        assert kinds == {"quick", "final"}
        torch.testing.assert_close(cutegemm.gemm(a, b.t(), **given), before, atol=0.05, rtol=0.05)


def test_a_sweep_of_a_program(store, capsys):
    arguments = ["--shapes", "16x1024x512", "--epilogue", "swiglu", "--budget", "8s", "--store", str(store.path)]
    assert sweep.main(arguments) == 0
    (problem,) = sweep.problems(sweep.parser().parse_args(arguments))
    rows = store.rows(str(problem))
    assert sum(row.ok for row in rows) > 4
    assert not any(row.verdict.startswith("wrong") for row in rows)
    assert plan.choose(problem, Arch.of_device()).why.startswith("tuned winner, own")


def test_the_bench_times_as_the_benchmark_does(seed):
    """A candidate timed twice differs by noise only; an output spoilt behind the kernel's back is found."""
    problem, arch = Problem.of(1024, 1024, 1024, "fp16"), Arch.of_device()
    bench = Bench(problem, arch, seed)
    key = ("cute", str(cutegemm.choice.plan.backends.get("cute").default(problem, arch)))
    assert bench.check(*key)[0] == "ok"
    first, second = (bench.time([key], 7, 0.0) for _ in range(2))
    assert first[key] == pytest.approx(second[key], rel=0.5)
    assert 1e-6 < first[TORCH] < 1e-3
    calls = bench._calls[key]
    real = calls[0]

    def spoil() -> None:
        real()
        bench._d[0, 5, 7] += 1000.0

    calls[0] = spoil
    assert bench.check(*key)[0].startswith("wrong: 1 of")


@pytest.fixture(scope="module")
def gpu():
    with GpuProcess(torch.cuda.current_device()) as timer:
        yield timer


def test_the_gpu_process_checks_and_times(gpu):
    problem = Problem.of(512, 512, 512, "bf16")  # as that of the sweep above: its kernels are compiled
    arch = gpu.arch
    assert arch == Arch.of_device()
    gpu.open(problem)
    candidate = Candidate("cute", cutegemm.choice.plan.backends.get("cute").default(problem, arch))
    assert gpu.check(candidate, 60.0).verdict == "ok"
    nonsense = Candidate("cute", "sm80/7x7x7/w7x7/s2/g1")
    assert gpu.check(nonsense, 60.0).verdict.startswith("failed to run")
    times = gpu.time([candidate], 5, 0.0)
    assert set(times) == {TORCH, candidate.key}
    assert all(1e-6 < seconds < 1e-2 for seconds in times.values())


def test_sweep_and_heuristic_are_judged(gpu, store, tmp_path):
    """Small runs of `tuning.exhaustive` and `tuning.untuned`: both find what they compare."""
    aside = winners.Winners(tmp_path / "aside.sqlite3")
    problems = random_shapes.sizes(2, 3, "bf16", "tn", gpu.arch)
    with CompilePool() as pool:
        (line,), missed = exhaustive.compare(
            [Problem.of(512, 512, 512, "bf16")], ["cute"], gpu, pool, store, aside, limit=12, budget=4.0, most=30.0
        )
        lines, left = untuned.compare(problems, ["cute"], gpu, pool, store, 4.0)
    print(exhaustive.table([line]), untuned.table(lines), sep="\n")
    assert missed == left == []
    assert line.whole
    assert line.wrong == line.failed == 0
    assert 0 < line.ratio <= 1
    assert [found.problem for found in lines] == list(map(str, problems))
    assert all(0 < found.ratio < 2 for found in lines)
