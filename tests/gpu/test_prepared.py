"""Packed operands on the GPU: right results, graphs, streams, and the memory of the copies."""

from __future__ import annotations

import threading

import pytest
import torch

import cutegemm
from cutegemm.errors import GemmError
from tests.problems import MAJORS, Case, matrix

pytestmark = pytest.mark.gpu

CONFIG = "sm90/128x128x64/pp/c1x1/s4/serp8/pdl"


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("packs operands for WGMMA, which needs compute capability 9.0")


def odd(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-2, 3, (rows, cols), device="cuda", generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_offset(majors, offset, dtype, seed):
    case = Case.random(257, 259, 515, dtype, seed=seed, device="cuda", majors=majors, offset=offset, pad=offset)
    case.run(backend="cute", config=CONFIG)


def test_an_odd_vocabulary_is_packed_by_itself(seed, capsys):
    case = Case.random(2048, 50257, 1024, "bf16", seed=seed, device="cuda", majors="tt")
    case.run()
    cutegemm.explain(case.a, case.b)
    assert "prepared first: b" in capsys.readouterr().out


def test_batches(seed):
    Case.random(129, 131, 133, "bf16", seed=seed, device="cuda", majors="nt", batch=5).run(
        backend="cute", config=CONFIG
    )


def test_a_captured_call_packs_what_is_there_at_replay():
    a, b = odd(256, 513), odd(513, 255)
    out = torch.empty(256, 255, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    cutegemm.prepare(a, b, out=out, config=CONFIG)
    with torch.cuda.graph(graph):
        cutegemm.gemm(a, b, out=out, config=CONFIG)
        cutegemm.gemm(a, b, out=out, config=CONFIG)
    other = [torch.randn(1 << 20, device="cuda") for _ in range(8)]  # takes memory that the graph must not use
    for seed in range(3):
        a.copy_(odd(256, 513, seed))
        b.copy_(odd(513, 255, seed + 10))
        graph.replay()
        assert torch.equal(out, (a.double() @ b.double()).to(torch.bfloat16))
    assert all(torch.isfinite(each).all() for each in other)


def test_capturing_without_a_loaded_kernel_is_refused(monkeypatch):
    from cutegemm.run import call, runner

    monkeypatch.setattr(runner._kernels, "get", lambda key: None)
    call.memo.clear()
    a, b = odd(64, 67), odd(67, 65)
    with pytest.raises(GemmError, match=r"cutegemm\.prepare"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cutegemm.gemm(a, b, config=CONFIG)
    call.memo.clear()


def test_streams_and_threads_do_not_share_a_copy():
    """Many calls at once on several streams, each with memory of its own."""
    operands = [(odd(512, 1027, seed), odd(1027, 509, seed + 50)) for seed in range(8)]
    want = [(a.double() @ b.double()).to(torch.bfloat16) for a, b in operands]
    failures: list[str] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(50):
                a, b = operands[(number + turn) % 8]
                got = cutegemm.gemm(a, b, config=CONFIG)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(got, want[(number + turn) % 8]):
                    failures.append(f"thread {number}, turn {turn}")

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures


def test_the_memory_goes_back(seed):
    a, b = odd(512, 4097, seed), odd(4097, 511, seed)
    cutegemm.gemm(a, b, config=CONFIG)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cutegemm.gemm(a, b, config=CONFIG)
    assert torch.cuda.memory_allocated() == before


def test_gradients_of_odd_layers(seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    a = matrix(1024, 4096, torch.bfloat16, generator).requires_grad_()
    b = matrix(4096, 5027, torch.bfloat16, generator).requires_grad_()
    grad = matrix(1024, 5027, torch.bfloat16, generator)
    cutegemm.gemm(a, b).backward(grad)
    for got, want in ((a.grad, grad.double() @ b.double().t()), (b.grad, a.double().t() @ grad.double())):
        scale = want.detach().abs().max()
        assert (got.double() - want.detach()).abs().max() <= 2**-7 * scale
