"""PyTorch around the kernels on the GPU: compile, graphs, streams, devices, threads, autocast, vmap, a transformer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional

import cutegemm
from cutegemm.errors import GemmError
from cutegemm.hardware import residency
from cutegemm.problem import reference
from cutegemm.run import runner
from tests import transformer

# torch's compilers and Hugging Face warn of things that are not ours.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def draw(seed, *shapes, dtype=torch.bfloat16, device="cuda"):
    generator = torch.Generator(device=device).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def check(got, a, b, **options):
    verdict = reference.check(got.detach(), reference.expected(a.detach(), b.detach(), **options))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_opcheck(activation, seed):
    a, b, bias = (t.requires_grad_() for t in draw(seed, (40, 64), (64, 24), (24,), dtype=torch.float32))
    opcheck(torch.ops.cutegemm.gemm.default, (a, b, None, 0.5, 0.0, bias, activation))


def test_compiled_by_inductor(seed):
    x, weight, bias = draw(seed, (4, 100, 128), (96, 128), (96,))
    weight.requires_grad_()
    torch._dynamo.reset()
    step = torch.compile(lambda x, w, bias: cutegemm.linear(x * 1, w, bias, "gelu") * 2, fullgraph=True)
    got, want = step(x, weight, bias), cutegemm.linear(x, weight, bias, "gelu") * 2
    assert torch.equal(got, want)
    grad = torch.randn_like(got)
    (one,), (other,) = (torch.autograd.grad(y, weight, grad) for y in (got, want))
    # The same kernels, but inductor may round the elementwise part once less.
    torch.testing.assert_close(one, other, rtol=2.0**-6, atol=2.0**-6 * float(other.float().abs().mean()))


def test_compiled_into_a_cuda_graph(seed):
    x, weight = draw(seed, (64, 128), (96, 128))
    torch._dynamo.reset()
    step = torch.compile(lambda x, w: cutegemm.linear(x, w, None, "silu"), fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            got = step(x, weight).clone()
            assert torch.equal(got, cutegemm.linear(x, weight, None, "silu"))
            x = x.flip(0).contiguous()


def test_capture_of_what_was_not_prepared(seed):
    runner._kernels.clear()  # a kernel that another test has loaded would serve
    residency._asked.cache_clear()  # the choice asks the driver about clusters, which must not end the capture
    x, weight, bias = draw(seed, (88, 136), (72, 136), (72,))
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(GemmError, match=r"would break the CUDA graph capture.*cutegemm\.prepare")
    with refused, torch.cuda.graph(graph):
        cutegemm.linear(x, weight, bias, "gelu_tanh")
    cutegemm.prepare(x, weight.t(), bias=bias, activation="gelu_tanh")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cutegemm.linear(x, weight, bias, "gelu_tanh")
    for _ in range(3):
        x.copy_(x.roll(1, 0))
        graph.replay()
        check(got, x, weight.t(), bias=bias, activation="gelu_tanh")


def test_a_whole_training_step_in_a_graph(seed):
    torch.manual_seed(seed)
    model = cutegemm.nn.Linear(64, 48, device="cuda", activation="gelu")
    x = torch.randn(40, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).square().sum().backward()
    for p in model.parameters():
        p.grad.zero_()
    graph.replay()
    for p, gradient in zip(model.parameters(), want, strict=True):
        assert torch.equal(p.grad, gradient)


def test_streams_and_threads(seed):
    problems = [draw(seed + i, (200 + 8 * i, 128), (128, 96)) for i in range(8)]
    torch.cuda.synchronize()

    def work(problem):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            got = [cutegemm.gemm(*problem) for _ in range(20)]
        stream.synchronize()
        return got

    with ThreadPoolExecutor(8) as pool:
        for problem, results in zip(problems, pool.map(work, problems), strict=True):
            check(results[0], *problem)
            assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_several_devices_from_one_current_device(seed):
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        a, b = draw(seed, (200, 128), (128, 96), device=device)
        got = cutegemm.gemm(a, b)
        assert got.device == a.device
        assert torch.cuda.current_device() == 0
        check(got, a, b)
        weight = b.t().contiguous().requires_grad_()
        cutegemm.linear(a, weight).sum().backward()
        assert weight.grad.device == a.device
    a, _ = draw(seed, (8, 8), (8, 8), device="cuda:0")
    with pytest.raises(ValueError, match=r"b: it is on cuda:1, expected the device of a, cuda:0"):
        cutegemm.gemm(a, a.to("cuda:1"))


def test_inference_mode_and_autocast(seed):
    a, b = draw(seed, (100, 128), (128, 96), dtype=torch.float32)
    with torch.inference_mode():
        check(cutegemm.gemm(a, b), a, b)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype=dtype):
            got = cutegemm.gemm(a, b)
            assert got.dtype == torch.mm(a, b).dtype == dtype
            check(got, a.to(dtype), b.to(dtype))
            weight = b.t().contiguous().requires_grad_()
            y = cutegemm.linear(a, weight)
        y.float().sum().backward()
        assert (y.dtype, weight.grad.dtype) == (dtype, torch.float32)


def test_vmap_and_torch_func(seed):
    a, b = draw(seed, (3, 40, 64), (64, 24), dtype=torch.float32)
    got = torch.vmap(lambda x: cutegemm.gemm(x, b))(a)
    check(got, a, b)
    found = torch.func.vmap(torch.func.grad(lambda x: cutegemm.gemm(x, b, activation="silu").sum()))(a)
    x = a.double().requires_grad_()
    functional.silu(x @ b.double()).sum().backward()
    torch.testing.assert_close(found.double(), x.grad, rtol=1e-4, atol=1e-4)


SIZE = transformer.Size(layers=4, width=256, hidden=688, vocabulary=1024, batch=8, length=128)
KINDS = [
    pytest.param(True, id="plain"),
    pytest.param(
        False,
        id="hugging-face",
        marks=pytest.mark.skipif(not transformer.HUGGING_FACE, reason="transformers is not installed"),
    ),
]


@pytest.mark.parametrize("plain", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_of_a_transformer(plain, dtype, seed):
    theirs, ours = transformer.compare_logits(SIZE, dtype, "cuda", seed, plain=plain)
    print(f"root-mean-square error of the logits: torch {theirs:.3e}, ours {ours:.3e}")
    assert ours <= 1.25 * theirs, f"root-mean-square error {ours:.3e}, torch's {theirs:.3e}"


@pytest.mark.parametrize("plain", KINDS)
@pytest.mark.parametrize("autocast", [True, False], ids=["bf16 autocast", "fp32"])
def test_training_a_transformer(plain, autocast, seed):
    print(transformer.check_curves(*transformer.compare_curves(SIZE, 20, "cuda", seed, autocast=autocast, plain=plain)))
