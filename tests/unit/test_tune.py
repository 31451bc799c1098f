"""`cutegemm.tune` and CUTEGEMM_TUNE=1, on a fake timer: what is searched, when, and when never."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import cutegemm
from cutegemm import ops, winners
from cutegemm.choice import heuristics
from cutegemm.errors import GemmError, UnsupportedError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, program_request
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.text import parse
from cutegemm.problem.request import Request
from cutegemm.run import call, fused, runner
from cutegemm.tuner import on_demand
from cutegemm.tuner.problem_bench import Bench
from cutegemm.winners import Winners
from tests.fake_backend import uncompiled
from tests.tuning_fakes import H200, FakeCompiler, FakeTimer

PROBLEM = Problem.of(256, 256, 256, "bf16")


@functools.lru_cache(maxsize=8)
def ranked(problem: Problem, arch: Arch, backend: str) -> list[tuple[float, object]]:
    """As `heuristics.ranked`, of the candidates alone: to rank the whole space of a problem takes seconds."""
    found = heuristics.ascending(problem, arch, backend)
    return [(heuristics.estimate(problem, config, backend, arch), config) for config in found]


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(on_demand, "_met", set())
    monkeypatch.setattr(heuristics, "ranked", ranked)


def fakes(timer: FakeTimer | None = None) -> dict:
    return {"timer": timer or FakeTimer(lambda candidate: 1e-3 + 1e-6 * len(candidate.text)), "pool": FakeCompiler()}


@pytest.mark.parametrize(("given", "said"), [
    ({"backends": "cute"}, "backends: got 'cute', expected a sequence of some of 'cute', 'cutlass2x', 'legacy'"),
    ({"backends": ("cute", "auto")}, "backends: got 'auto', expected a sequence"),
    ({"backends": ()}, r"backends: got \(\), expected"),
    ({"backends": None}, "backends: got None, expected"),
    ({"budget": "60"}, "budget: got '60', expected a positive number of seconds"),
    ({"budget": float("nan")}, "budget: got nan, expected"),
    ({"jobs": -1}, "jobs: got -1, expected a positive number of processes, or None"),
    ({"jobs": 2.5}, "jobs: got 2.5, expected"),
])  # fmt: skip
def test_bad_arguments_of_a_search_are_named(given, said):
    timer = FakeTimer(lambda candidate: pytest.fail("nothing is timed"))
    with pytest.raises(ValueError, match=said):
        on_demand.search(PROBLEM, H200, 0, **given, **fakes(timer))


def test_a_backend_named_twice_is_searched_once():
    once, twice = (on_demand.search(PROBLEM, H200, 0, budget=600, backends=names, **fakes())
                   for names in (("cute",), ("cute", "cute")))  # fmt: skip
    assert twice.enumerated == once.enumerated


def test_the_winner_is_recorded_and_used():
    found = on_demand.search(PROBLEM, H200, 0, budget=600, **fakes())
    assert found.backend == "cute"
    assert found.ratio == pytest.approx(1e-3 / found.seconds)
    assert 0 < found.tried <= found.enumerated
    row = winners.lookup(PROBLEM, H200)
    assert (row.config, row.seconds) == (found.config, found.seconds)
    choice = cutegemm.choice.plan.choose(PROBLEM, H200)
    assert str(choice.config) == found.config
    assert "tuned winner, own" in choice.why


def test_what_cannot_be_tuned_is_said():
    with pytest.raises(UnsupportedError, match="empty"):
        on_demand.search(Problem.of(0, 64, 64), H200, 0, **fakes())
    with pytest.raises(ValueError, match="budget: got 0"):
        on_demand.search(PROBLEM, H200, 0, budget=0, **fakes())
    with pytest.raises(GemmError, match="out of memory"):
        on_demand.search(PROBLEM, H200, 0, **fakes(FakeTimer({}, open_fails="out of memory")))
    wrong = FakeTimer({})
    wrong.check = lambda candidate, timeout: SimpleNamespace(verdict="wrong: all", seconds=float("inf"))  # type: ignore
    with pytest.raises(GemmError, match=r"nothing right was measured .*wrong"):
        on_demand.search(PROBLEM, H200, 0, budget=600, **fakes(wrong))
    assert Winners().best("H200", 132, str(PROBLEM)) is None


def test_ctrl_c_goes_through_with_everything_kept():
    timer = FakeTimer({})

    def interrupt() -> None:
        if len(timer.checked) == 12:
            raise KeyboardInterrupt

    timer.after_check = interrupt
    with pytest.raises(KeyboardInterrupt):
        on_demand.search(PROBLEM, H200, 0, **fakes(timer))
    assert len(Winners().rows()) >= 6


def test_tune_checks_its_arguments():
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    with pytest.raises(ValueError, match="a: got a tensor on cpu; tune times kernels on a CUDA device"):
        cutegemm.tune(a, b)
    with pytest.raises(TypeError, match="backend: tune chooses it"):
        cutegemm.tune(a, b, backend="cute")
    with pytest.raises(TypeError, match="config: tune chooses it"):
        cutegemm.tune(a, b, config="sm90/x")
    with pytest.raises(TypeError, match="colour: no such argument"):
        cutegemm.tune(a, b, colour="red")
    with pytest.raises(ValueError, match="b: got shape"):
        cutegemm.tune(a, torch.randn(7, 8))


@pytest.fixture
def cuda(monkeypatch) -> SimpleNamespace:
    """Calls that look as if their tensors were on a GPU, up to the choice of a kernel."""
    state = SimpleNamespace(capturing=False, tuned=[])
    request = Request(PROBLEM, False, (256, 256), torch.device("cuda", 0), (), False)
    state.call = runner.Call(request, "auto", None)
    monkeypatch.setattr(Arch, "of_device", staticmethod(lambda index=None: H200))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    build = lambda signature, config, arch: SimpleNamespace(config=config)  # noqa: E731
    monkeypatch.setattr(runner.backends, "get", lambda name, get=runner.backends.get: uncompiled(get(name), build))
    real = on_demand.search

    def search(problem, arch, device, **more):
        state.tuned.append((problem, device, more.get("budget")))
        return real(problem, arch, device, **{**more, **fakes(), "progress": False})

    monkeypatch.setattr(on_demand, "search", search)
    return state


def test_gemm_never_tunes_unasked(cuda, monkeypatch):
    for value in (None, "", "0"):
        monkeypatch.delenv("CUTEGEMM_TUNE", raising=False)
        if value is not None:
            monkeypatch.setenv("CUTEGEMM_TUNE", value)
        cuda.call.plan()
    assert cuda.tuned == []
    monkeypatch.setenv("CUTEGEMM_TUNE", "yes")
    with pytest.raises(ValueError, match="CUTEGEMM_TUNE: got 'yes', accepted are 0 and 1"):
        cuda.call.plan()


def test_asked_it_tunes_a_problem_once(cuda, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_TUNE", "1")
    monkeypatch.setenv("CUTEGEMM_TUNE_BUDGET", "700")
    first = cuda.call.plan()
    assert cuda.tuned == [(PROBLEM, 0, 700.0)]
    assert "tuned winner, own" in first.choice.why
    cuda.call.plan()
    assert len(cuda.tuned) == 1
    # In a later process the winner is there.
    on_demand._met.clear()
    cuda.call.plan()
    assert len(cuda.tuned) == 1


def test_never_during_capture_nor_when_a_kernel_is_named(cuda, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_TUNE", "1")
    cuda.capturing = True
    with pytest.raises(GemmError, match="prepare"):
        cuda.call.plan()
    cuda.capturing = False
    runner.Call(cuda.call.request, "cute", None).plan()
    runner.Call(cuda.call.request, "auto", "sm80/64x64x32/w32x32/s5/g8").plan()
    assert cuda.tuned == []


@pytest.fixture
def on_gpu(cuda, monkeypatch):
    """Tensors of the CPU that a call with a program takes for tensors of a GPU."""
    describe = program_request.describe

    def described(*call):
        return describe(*call)._replace(device=torch.device("cuda", 0))

    monkeypatch.setattr(program_request, "describe", described)


@pytest.mark.parametrize("constant", [None, "b"])
def test_the_winner_of_a_program_is_what_the_call_takes(cuda, on_gpu, constant):
    a, b, residual = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((64, 128), (256, 128), (64, 256)))
    fused.memo.put("a call", "its old kernel")
    given = {"epilogue": lambda acc, r, s: ops.tanh(acc * s) + r, "operands": (residual, 0.5), "constant": constant}
    found = cutegemm.tune(a, b.t(), budget=600, **given)
    ((problem, *_),) = cuda.tuned
    assert problem.constant == (constant or "")
    assert "tanh(acc * x1) + x0" in str(problem.epilogue)
    assert fused.memo.get("a call") is None, "a repeated call looks at no file"
    alike, others = lambda acc, r, s: r + ops.tanh(s * acc), (residual, 2.5)
    asked = program_request.describe(a, b.t(), alike, others, None, None, None)
    choice = cutegemm.choice.plan.choose(replace(asked.problem, constant=constant or ""), H200)
    assert str(choice.config) == found.config
    assert choice.why.startswith(f"tuned winner{' with a constant B' if constant else ''}, own")
    with pytest.raises(TypeError, match="config: tune chooses it"):
        cutegemm.tune(a, b.t(), config="sm90/x", **given)


def test_a_program_of_gate_and_up_is_tuned(cuda, on_gpu):
    a, b = torch.zeros(16, 128, dtype=torch.bfloat16), torch.zeros(256, 128, dtype=torch.bfloat16).t()
    found = cutegemm.tune(a, b, epilogue=ops.swiglu, budget=600)
    row = next(row for row in Winners().rows() if (row.config, row.kind) == (found.config, "final"))
    assert "silu(gate) * up" in row.problem
    # Where gradients are recorded the kernel also stores the accumulators: another program.
    cutegemm.tune(a.requires_grad_(), b, epilogue=ops.swiglu, budget=600)
    assert [len(problem.outputs) > 0 for problem, *_ in cuda.tuned] == [False, True]


def test_scales_are_tuned_as_the_program_that_they_are(cuda, on_gpu):
    a, b = torch.zeros(64, 128).to(torch.float8_e4m3fn), torch.zeros(96, 128).to(torch.float8_e4m3fn).t()
    cutegemm.tune(a, b, scale_a=torch.ones(64, 1), scale_b=torch.ones(1, 96), budget=600)
    ((problem, *_),) = cuda.tuned
    assert str(problem.epilogue) == "def epilogue(acc, x0: fp32[M, 1], x1: fp32[N]) -> bf16: return acc * x0 * x1"


def test_a_function_of_the_fixed_terms_is_tuned_as_these(cuda, on_gpu):
    a = torch.zeros(64, 64, dtype=torch.bfloat16)
    cutegemm.tune(a, a.t(), epilogue=ops.silu, budget=600)
    assert cuda.tuned[0][0] == Problem.of(64, 64, 64, epilogue=Epilogue(activation="silu"))


def test_bad_programs_are_refused():
    a, b = torch.zeros(8, 8), torch.zeros(8, 8)
    with pytest.raises(ValueError, match="a: got a tensor on cpu; tune times"):
        cutegemm.tune(a, b, epilogue=ops.swiglu)
    with pytest.raises(cutegemm.EpilogueError):
        cutegemm.tune(a, b, epilogue=lambda acc: acc if acc > 0 else 0.0)
    with pytest.raises(ValueError, match="operands: it is given without an epilogue"):
        cutegemm.tune(a, b, operands=(1.0,))
    with pytest.raises(TypeError, match="operands: got float"):
        cutegemm.tune(a, b, epilogue=ops.tanh, operands=1.0)
    with pytest.raises(ValueError, match="epilogue: got one together with c"):
        cutegemm.tune(a, b, epilogue=ops.tanh, activation="silu")
    with pytest.raises(ValueError, match="save: got 'x'"):
        cutegemm.tune(a, b, epilogue=ops.tanh, save="x")


def test_a_program_that_cannot_be_checked_is_said():
    a = torch.zeros(64, 64, dtype=torch.bfloat16)
    problem = program_request.describe(a, a, lambda acc: ops.sqrt(acc - 100.0), (), None, None, None).problem
    with pytest.raises(ValueError, match="only 0% of result 0 can be checked") as why:
        Bench(problem, H200, device="cpu")
    with pytest.raises(GemmError, match=r"tune: .*only 0% of result 0"):
        on_demand.search(problem, H200, 0, **{**fakes(FakeTimer({}, open_fails=str(why.value))), "budget": 600})


def test_unasked_a_product_with_a_program_is_not_timed(cuda, monkeypatch):
    """Under CUTEGEMM_TUNE=1 a program takes the winner of the plain product; `tune` measures it."""
    monkeypatch.setenv("CUTEGEMM_TUNE", "1")
    program = Epilogue(custom=parse("def epilogue(acc) -> bf16: return -acc"))
    asked = cuda.call.request
    cuda.call._replace(request=asked._replace(problem=replace(PROBLEM, epilogue=program)))._tune(H200)
    assert cuda.tuned == []
    cuda.call._tune(H200)
    assert len(cuda.tuned) == 1
    promised = replace(PROBLEM, constant="b")
    cuda.call._replace(request=asked._replace(problem=promised))._tune(H200)
    assert cuda.tuned[-1][0] == promised, "what is promised is measured"


def test_a_promise_that_no_kernel_uses_is_not_tuned_apart(cuda, monkeypatch):
    """Calls with it and without run the same kernels then; each had a search and a winner of its own."""
    plain = Problem.of(64, 64, 64, "fp32", precision="tf32x3")
    without, promising = (
        cuda.call._replace(request=cuda.call.request._replace(problem=replace(plain, constant=constant)))
        for constant in ("", "b")
    )
    promising._tune(H200)
    without._tune(H200)
    on_demand._met.clear()
    promising._tune(H200)  # in a later process
    assert len(cuda.tuned) == 1
    monkeypatch.setattr(runner.Call, "of", classmethod(lambda cls, a, b, c, options: promising))
    cutegemm.tune(None, None, budget=600)
    assert {each.problem for each in Winners().rows()} == {str(plain)}
    (choice,) = {cutegemm.choice.plan.choose(each.request.problem, H200) for each in (without, promising)}
    assert "tuned winner, own" in choice.why


def test_a_search_that_finds_nothing_is_a_warning(cuda, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_TUNE", "1")

    def fail(*rest, **more):
        raise GemmError("nothing right was measured")

    monkeypatch.setattr(on_demand, "search", fail)
    with pytest.warns(RuntimeWarning, match="CUTEGEMM_TUNE: nothing right was measured"):
        plan = cuda.call.plan()
    assert plan.choice.backend == "cute"
    monkeypatch.setattr(on_demand, "_met", set())
    for text in ("long", "-1", "nan"):
        monkeypatch.setenv("CUTEGEMM_TUNE_BUDGET", text)
        for _ in range(2):  # not the first time alone
            with pytest.raises(ValueError, match=f"CUTEGEMM_TUNE_BUDGET: got '{text}'"):
                cuda.call.plan()


def test_tune_refuses_during_capture_and_forgets_old_plans(cuda, monkeypatch):
    monkeypatch.setattr(runner.Call, "of", classmethod(lambda cls, a, b, c, options: cuda.call))
    memo = call.memo
    memo.put("a call", "its old kernel")
    cuda.capturing = True
    with pytest.raises(GemmError, match="captured"):
        cutegemm.tune(None, None)
    assert memo.get("a call")
    cuda.capturing = False
    found = cutegemm.tune(None, None, budget=600)
    assert cuda.tuned == [(PROBLEM, 0, 600)]
    assert found.config == winners.lookup(PROBLEM, H200).config
    assert memo.get("a call") is None
