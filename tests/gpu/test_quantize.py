"""Quantization on the GPU: every bit as the definition in torch, streams, graphs, torch.compile, quantized layers."""

from __future__ import annotations

import copy

import pytest
import torch

import cutegemm
from cutegemm.errors import GemmError
from cutegemm.nn import compare, replace_linears
from cutegemm.problem import quantization
from cutegemm.problem.quantization import BLOCKS, NAMED, ROWS, TENSOR, Group
from cutegemm.run import quantize_kernels
from tests.quantization import draw, reference, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
GROUPS = [TENSOR, ROWS, *BLOCKS.values()]
SHAPES = [(1, 1), (7, 40), (16, 7168), (130, 300), (3, 65, 1000), (257, 4096), (2, 50_000), (4099, 136)]


def quantized(x: torch.Tensor, name: str, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    scaling = {TENSOR: "tensor", ROWS: "rows"}.get(group, "blocks")
    block = tuple(group) if scaling == "blocks" else (1, 128)
    return cutegemm.quantize(x, NAMED[name].dtype, scaling, block=block)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("name", list(NAMED))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits(dtype, name, group, turned, seed):
    for shape in SHAPES:
        x = draw((*shape[:-2], shape[-1], shape[-2]) if turned else shape, dtype, seed, "cuda")
        x = x.mT if turned else x
        want, scales = reference(x, NAMED[name], group)
        values, scale = quantized(x, name, group)
        assert same(scale, scales), shape
        assert same(values, want), shape
        assert same(cutegemm.quantize(x, values.dtype, scale=scale)[0], want), shape
        back = cutegemm.dequantize(values, scale, dtype)
        assert same(back, quantization.original(want, scales, dtype)), shape


def test_more_than_two_to_the_31_elements(large_gpu_memory, seed):
    x = torch.randn(70_000, 32_768, device="cuda", dtype=torch.bfloat16)
    values, scale = cutegemm.quantize(x, torch.float8_e4m3fn)
    for rows in (slice(0, 3), slice(-3, None)):
        want, scales = reference(x[rows], NAMED["e4m3"], ROWS)
        assert same(scale[rows], scales)
        assert same(values[rows], want)
    assert same(cutegemm.dequantize(values, scale)[-2:], quantization.original(want, scales, torch.bfloat16)[-2:])


def test_every_run_gives_the_same_bits_on_any_stream(seed):
    x = draw((2048, 3000), torch.bfloat16, seed, "cuda")
    want = quantized(x, "e4m3", TENSOR)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for stream in streams * 5:
        with torch.cuda.stream(stream):
            got = quantized(x, "e4m3", TENSOR)
        stream.synchronize()
        assert all(map(same, got, want))


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a_graph_replays_on_new_numbers(group, seed):
    x = draw((300, 1024), torch.bfloat16, seed, "cuda")
    cutegemm.dequantize(*quantized(x, "e4m3", group))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scale = quantized(x, "e4m3", group)
        back = cutegemm.dequantize(values, scale)
    x.copy_(draw((300, 1024), torch.bfloat16, seed + 1, "cuda"))
    graph.replay()
    torch.cuda.synchronize()
    want, scales = reference(x, NAMED["e4m3"], group)
    assert same(values, want)
    assert same(back, quantization.original(want, scales, torch.bfloat16))


def test_an_unknown_kernel_is_refused_during_capture(monkeypatch):
    x = torch.ones(64, 64, device="cuda")
    monkeypatch.setattr(quantize_kernels, "_kernels", quantize_kernels.planning.Memo(4))
    monkeypatch.setattr(quantize_kernels, "_plans", quantize_kernels.planning.Memo(4))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(GemmError, match=r"call cutegemm\.quantize once"), torch.cuda.graph(graph):
        cutegemm.quantize(x, torch.float8_e4m3fn)


def test_compiled(seed):
    x = draw((64, 512), torch.bfloat16, seed, "cuda")

    def there_and_back(x):
        values, scale = cutegemm.quantize(x * 2, torch.float8_e4m3fn, "blocks")
        return cutegemm.dequantize(values, scale) + 1

    torch._dynamo.reset()
    for mode in (None, "reduce-overhead"):
        step = torch.compile(there_and_back, fullgraph=True, mode=mode)
        for _ in range(3):
            assert same(step(x).clone(), there_and_back(x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensor_computes(seed):
    x = draw((64, 512), torch.bfloat16, seed, "cuda:1")
    values, scale = cutegemm.quantize(x, torch.int8)
    assert values.device == scale.device == x.device
    assert same(values, reference(x, NAMED["int8"], ROWS)[0])


@pytest.mark.parametrize("scaling", ["rows", "tensor", "blocks"])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_quantized_model(dtype, scaling, seed):
    torch.manual_seed(seed)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(1024, 4096), torch.nn.SiLU(), linear(4096, 1024)).to("cuda", torch.bfloat16)
    made = replace_linears(copy.deepcopy(model), dtype=dtype, scaling=scaling)
    x = torch.randn(2, 100, 1024, device="cuda", dtype=torch.bfloat16)
    report = compare(model, made, x)
    assert report.error < (0.1 if dtype == "fp8" else 0.05)
    with torch.no_grad():
        y = made(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = made(x)
        graph.replay()
        assert torch.equal(y, z)
        assert torch.equal(made.cpu().cuda()(x), y)
