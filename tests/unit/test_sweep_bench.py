"""The bench's inputs and verdicts, on the CPU with kernels written in torch: what is right, what is found wrong."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from cutegemm import backend as backends
from cutegemm.choice import spills
from cutegemm.errors import GemmError
from cutegemm.problem import Matrix, Problem, reference, scales, scaling, torch_dtype
from cutegemm.problem.epilogue import Epilogue
from cutegemm.tuner.poison import GUARD
from cutegemm.tuner.problem_bench import Bench
from tests.fake_backend import FakeBackend
from tests.tuning_fakes import H200

ODD = Matrix(5, 24, 40, 1, 5 * 40, 16)


def bench_of(problem: Problem, monkeypatch, seed: int, spoil=lambda bench: None) -> Bench:
    """A bench whose only kernel multiplies in float64 with torch, then calls `spoil`."""
    bench = Bench(problem, SimpleNamespace(**{**vars(H200), "l2_bytes": 1000}), seed, device="cpu")

    def run(operands, scalars, stream) -> None:
        (a, b, c, _, d), (alpha, beta) = operands, scalars
        by_address = {x.data_ptr(): (x, y) for x, y in bench._inputs}
        x, y = by_address[a]
        assert (b, d, alpha, stream) == (y.data_ptr(), bench._d.data_ptr(), 1.0, 0)
        z = torch.matmul(x.double(), y.double())
        if bench._c is not None:
            assert c == bench._c.data_ptr()
            z = z + beta * bench._c.double()
        if bench._bias is not None:
            z = z + (bench._bias if problem.epilogue.bias_axis == "n" else bench._bias[:, None]).double()
        z = reference.activate(z, problem.epilogue.activation)
        bench._d.copy_(z.to(torch_dtype(problem.out_dtype)))
        spoil(bench)

    kernel = SimpleNamespace(bind=lambda of: run if of == problem else None)
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend(kernel))
    return bench


PROBLEMS = [
    Problem.of(17, 24, 33, "bf16"),
    Problem.of(8, 16, 24, "fp16", majors="nt", batch=3, out_dtype="fp32"),
    Problem.of(9, 7, 5, "fp32", epilogue=Epilogue("fp32", "fp32", "n", "gelu")),
    Problem.of(9, 7, 5, "fp32", epilogue=Epilogue(None, "fp16", "m", "relu")),
    # Padded rows of A, and one B for all of the batch.
    Problem(
        5, 16, 24, 2, "bf16", "bf16", "ieee", ODD, Matrix(24, 16, 1, 24, 0, 16), None, Matrix(5, 16, 16, 1, 80, 16),
        Epilogue(),
    ),
    Problem.of(16, 24, 32, "e4m3", out_dtype="e4m3"),
    Problem.of(16, 24, 32, "bf16", out_dtype="e5m2"),
]  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_right_kernel_is_right(problem, monkeypatch, seed):
    bench = bench_of(problem, monkeypatch, seed)
    verdict, seconds = bench.check("cute", "right")
    assert verdict == "ok"
    assert 0 < seconds < 10
    assert len(bench._inputs) == -(-3 * 1000 // problem.min_bytes)
    assert len({x.data_ptr() for x, _ in bench._inputs}) == len(bench._inputs)
    for x, y in bench._inputs:
        assert torch.equal(x.float(), bench._inputs[0][0].float())
        assert torch.equal(y.float(), bench._inputs[0][1].float())
        assert x.stride() == (problem.a.stride_batch, problem.a.stride_row, problem.a.stride_col)
        assert float(x.float().std()) > 0.5


def test_a_bench_goes_with_the_last_reference_to_it(monkeypatch, seed):
    """Its CUDA graphs are destroyed then, and not by the garbage collector while another graph is captured."""
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend(SimpleNamespace(bind=lambda of: print)))
    bench = Bench(PROBLEMS[0], H200, seed, device="cpu", sets=2)
    bench._bound(("cute", "any"))
    seen = weakref.ref(bench)
    gc.disable()
    try:
        del bench
        assert seen() is None
    finally:
        gc.enable()


def one_off(bench: Bench) -> None:
    bench._d[0, 3, 2] += 1.0


def one_missing(bench: Bench) -> None:
    bench._d[0, 3, 2] = float("nan")


def one_infinite(bench: Bench) -> None:
    bench._d[0, 0, 0] = float("inf")


def before(bench: Bench) -> None:
    bench._memory[0].whole[GUARD - 1] = 0.0


def behind(bench: Bench) -> None:
    bench._memory[0].whole[-GUARD] = 0.0


def failing(bench: Bench) -> None:
    raise GemmError("launch failed")


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (one_off, "wrong: 1 of"), (one_missing, "wrong: 1 of"), (one_infinite, "wrong: 1 of"),
        (before, "wrong: it wrote outside D"), (behind, "wrong: it wrote outside D"),
        (failing, "failed to run: launch failed"),
    ],
)  # fmt: skip
def test_a_wrong_kernel_is_found_wrong(spoil, what, monkeypatch, seed):
    bench = bench_of(PROBLEMS[0], monkeypatch, seed, spoil)
    verdict, seconds = bench.check("cute", "spoilt")
    assert verdict.startswith(what)
    if what.startswith("wrong"):
        assert f"seed {seed}" in verdict
    else:
        assert seconds == float("inf")


def test_what_an_earlier_kernel_left_is_not_mistaken_for_a_result(monkeypatch, seed):
    bench = bench_of(PROBLEMS[0], monkeypatch, seed)
    assert bench.check("cute", "right")[0] == "ok"
    lazy = SimpleNamespace(bind=lambda of: lambda *arguments: None)
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend(lazy))
    assert bench.check("cute", "lazy")[0].startswith("wrong:")


@pytest.mark.parametrize("dtype", ["int8", "fp64"])
def test_integers_and_fp64_are_checked_as_the_others(dtype, monkeypatch, seed):
    """Integers have no NaN to poison results with; int8 operands use their range, those in fp64 all of its digits."""
    problem = Problem.of(17, 24, 40, dtype)
    assert bench_of(problem, monkeypatch, seed).check("cute", "right")[0] == "ok"
    for spoil in (before, behind):
        assert "outside D" in bench_of(problem, monkeypatch, seed, spoil).check("cute", "spoilt")[0]
    bench = bench_of(problem, monkeypatch, seed)
    lazy = SimpleNamespace(bind=lambda of: lambda *arguments: None)
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend(lazy))
    assert bench.check("cute", "lazy")[0].startswith("wrong:")
    a, _ = bench._inputs[0]
    assert (a != a.float()).any() if dtype == "fp64" else a.double().std() > 20


def test_scales_of_blocks_reach_the_kernel_and_the_reference(monkeypatch, seed):
    """The launch has their addresses behind those of the operands; without them the result is wrong."""
    epilogue = Epilogue(custom=scaling.of_blocks("e4m3", "bf16"))
    problem = Problem.of(150, 140, 300, "e4m3", out_dtype="bf16", epilogue=epilogue)
    bench = Bench(problem, SimpleNamespace(**{**vars(H200), "l2_bytes": 1000}), seed, device="cpu")
    reads = True

    def run(operands, scalars, stream) -> None:
        a, b, _, _, d, scale_a, scale_b = operands
        x, y = bench._inputs[0]
        assert (a, b, d) == (x.data_ptr(), y.data_ptr(), bench._d.data_ptr())
        given = list(bench._scales.values())
        assert [scale_a, scale_b] == [each.data_ptr() for each in given]
        assert [tuple(each.shape) for each in given] == [(1, 150, 3), (1, 3, 2)]
        wide = [scales.unscaled(z, scale if reads else None, rows).double() for z, scale, rows in (
            (x, given[0], True), (y, given[1], False)
        )]  # fmt: skip
        bench._d.copy_(torch.matmul(*wide))

    kernel = SimpleNamespace(bind=lambda of: run if of == problem else None, cubin=b"")
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend(kernel))
    monkeypatch.setattr(spills, "spilled", lambda *_: 0)
    assert bench.check("cute", "right")[0] == "ok"
    reads = False
    assert bench.check("cute", "without")[0].startswith("wrong: ")


@pytest.mark.parametrize("dtype", ["e4m3", "int8", "bf16"])
def test_torch_multiplies_what_is_measured(dtype, seed):
    """Also where its operator for bytes refuses them."""
    for call in Bench(Problem.of(32, 48, 64, dtype), H200, seed, device="cpu")._torch()[:2]:
        call()
