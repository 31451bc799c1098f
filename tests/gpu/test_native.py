"""The C++ part of the host code on CUDA tensors: the same results as by Python, on streams, in graphs and compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutegemm
from cutegemm import native
from cutegemm.pytorch import native_gradients, programs
from cutegemm.run import call, fused, quantizing, routing
from tests import needs
from tests.mixtures import drawn, drawn_biases

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def extension():
    needs.hopper()
    assert native.wait(), native.status()
    return native._state.module


def tensors(*shapes: tuple[int, ...], grad: bool = False) -> list[torch.Tensor]:
    return [torch.randint(-2, 3, shape, device="cuda").bfloat16().requires_grad_(grad) for shape in shapes]


def residual(acc: Any, c: Any, scale: Any) -> Any:
    return cutegemm.ops.silu(acc * scale) + c


def two(acc: Any, bias: Any) -> Any:
    return acc + bias, cutegemm.ops.cast(acc, torch.float32)


@pytest.fixture
def roads() -> dict[str, Callable[[], Any]]:
    a, w, bias, c = tensors((64, 512), (128, 512), (128,), (64, 128))
    deep, other, many = tensors((64, 16384), (64, 16384), (2, 32, 512))
    out = torch.empty_like(c)
    module = cutegemm.nn.Linear(512, 128, device="cuda", dtype=torch.bfloat16)

    def trained() -> list[torch.Tensor]:
        x = many.clone().requires_grad_()
        module.zero_grad()
        module(x).backward(torch.ones(2, 32, 128, device="cuda", dtype=torch.bfloat16))
        return [x.grad, module.weight.grad, module.bias.grad]

    def cast() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return cutegemm.linear(a.float(), w.float(), bias.float())

    fp8 = torch.float8_e4m3fn
    quantized = cutegemm.nn.Fp8Linear.from_linear(module)
    blocks = cutegemm.nn.Fp8Linear.from_linear(module, scaling="blocks")
    values, rows = cutegemm.quantize(a, fp8)
    weight, columns = quantized.weight.t(), quantized.weight_scale.t()
    mlp = cutegemm.nn.SwiGLU(512, 256, 128, device="cuda", dtype=torch.bfloat16)
    text = cutegemm.trace_epilogue(residual, (c, 2.0)).text
    gated = cutegemm.nn.Fp8SwiGLU(512, 256, 128, device="cuda")
    halved = torch.full((), 0.5, device="cuda")
    tokens, experts, shares, *weights = drawn((64,), 2, 8, 256, 144, 272, torch.bfloat16, 1, "cuda")
    biases = [each.detach() for each in drawn_biases(*weights, torch.bfloat16, 1)]
    form: dict[str, Any] = {"interleaved": True, "activation": cutegemm.gating.ClampedSwiglu(7.0, 1.702, 1.0)}
    form |= {"b_gate_up": biases[0], "b_down": biases[1]}
    in_fp8, others_in_fp8, in_int8 = (
        cutegemm.nn.Fp8MoE.from_weights(*(each.detach() / 16 for each in weights), dtype, scaling=scaling, **more)
        for dtype, scaling, more in (("fp8", "rows", {}), ("fp8", "blocks", form), ("int8", "tensor", {}))
    )

    def mixture(layer: Callable[..., torch.Tensor], *more: torch.Tensor, **named: Any) -> Callable[[], torch.Tensor]:
        return torch.no_grad()(lambda: layer(tokens, experts, shares, *more, **named))

    return {
        "quantize": lambda: cutegemm.quantize(a, fp8),
        "quantize, one scale": lambda: cutegemm.quantize(many, fp8, "tensor"),
        "quantize, a given scale": lambda: cutegemm.quantize(a, fp8, scale=halved),
        "scales": lambda: cutegemm.gemm(values, weight, scale_a=rows, scale_b=columns, bias=bias, activation="silu"),
        "fp8 layer": lambda: quantized(many),
        "fp8 layer, blocks": lambda: blocks(a),
        "fp8 MLP": lambda: gated(many),
        "epilogue": lambda: cutegemm.gemm(a, w.t(), epilogue=residual, operands=(c, 2.0)),
        "two results": lambda: cutegemm.gemm(a, w.t(), epilogue=two, operands=(bias,)),
        "operator with an epilogue": lambda: torch.ops.cutegemm.gemm_program(a, w.t(), [c], [2.0], [], text),
        "MLP": lambda: torch.no_grad()(mlp)(many),
        "operators of fp8": lambda: torch.ops.cutegemm.scaled_gemm(
            torch.ops.cutegemm.quantize(a, fp8)[0], weight, rows, columns
        ),
        "gemm": lambda: cutegemm.gemm(a, w.t(), c, beta=1.0, bias=bias, activation="gelu"),
        "out": lambda: cutegemm.gemm(a, w.t(), out=out),
        "linear": lambda: cutegemm.linear(many, w, bias),
        "K split": lambda: cutegemm.gemm(deep, other.t()),
        "operator": lambda: torch.ops.cutegemm.gemm(a, w.t()),
        "training": trained,
        "autocast": cast,
        "experts": mixture(cutegemm.moe, *weights),
        "experts as of gpt-oss": mixture(cutegemm.moe, *weights, **form),
        "experts in fp8": mixture(in_fp8),
        "experts as of gpt-oss in fp8": mixture(others_in_fp8),
        "experts in int8": mixture(in_int8),
    }


def flat(result: Any) -> list[torch.Tensor]:
    return [each.float().clone() for each in (result if isinstance(result, (list, tuple)) else [result])]


def test_both_ways_give_the_same_bits(roads, extension):
    for name, road in roads.items():
        native.serve(None)
        extension.leave_operators()
        try:
            expected = flat(road())
        finally:
            extension.serve_operators()
            native.serve(extension)
        call.memo.clear()
        for _ in range(3):
            found = flat(road())
        assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True)), name
        assert extension.known() >= 1


def test_a_known_call_does_not_come_to_python(roads, monkeypatch):
    """On the current stream, whichever that is; a workspace belongs to a stream."""
    names = (
        "gemm",
        "out",
        "K split",
        "operator",
        "quantize",
        "scales",
        "fp8 layer",
        "fp8 MLP",
        "operators of fp8",
        "epilogue",
        "two results",
        "operator with an epilogue",
        "MLP",
        "experts",
        "experts as of gpt-oss",
        "experts in fp8",
        "experts as of gpt-oss in fp8",
        "experts in int8",
    )
    expected = {name: flat(roads[name]()) for name in names}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for name in names:
            roads[name]()
        with monkeypatch.context() as patch:
            patch.setattr(call, "description", None)
            patch.setattr(sys.modules["cutegemm.gemm"], "_key", None)  # the name means the function elsewhere
            patch.setattr(fused, "description", None)
            patch.setattr(quantizing, "quantize", None)
            patch.setattr(programs, "_computed", None)
            patch.setattr(routing, "route", None)
            results = {name: flat(roads[name]()) for name in names}
    side.synchronize()
    for name in names:
        assert all(torch.equal(x, y) for x, y in zip(expected[name], results[name], strict=True)), name


def test_graphs(roads):
    names = ("gemm", "linear", "K split", "scales", "fp8 layer", "fp8 layer, blocks", "fp8 MLP", "epilogue", "MLP")
    names += tuple(name for name in roads if name.startswith("experts"))
    for name in names:
        roads[name]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [roads[name]() for name in names]
    for result in results:
        result.fill_(float("nan"))
    graph.replay()
    for name, result in zip(names, results, strict=True):
        assert torch.equal(result, roads[name]())


def test_known_gradients_need_no_python(roads, monkeypatch):
    """In the thread of torch's engine too, whose state is another in older versions of torch."""
    for _ in range(3):
        roads["training"]()

    def refuse(*arguments):
        raise AssertionError("these gradients were left to Python")

    monkeypatch.setattr(native_gradients, "gradients", refuse)
    roads["training"]()


def test_torch_compile(roads):
    a, w = tensors((64, 512), (128, 512))
    compiled = torch.compile(lambda x: cutegemm.linear(x, w).relu())
    for _ in range(3):
        assert torch.equal(compiled(a), cutegemm.linear(a, w).relu())


def test_a_compiled_layer_of_8_bits(roads):
    layer = cutegemm.nn.Fp8Linear(512, 128, device="cuda", bias_dtype=torch.bfloat16)
    (a,) = tensors((64, 512))
    with torch.no_grad():
        compiled = torch.compile(lambda x: layer(x).relu())
        for _ in range(3):
            assert torch.equal(compiled(a), layer(a).relu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    a, w = (each.to("cuda:1") for each in tensors((64, 512), (128, 512)))
    for _ in range(3):
        found = cutegemm.linear(a, w)
    assert found.device == a.device
    assert torch.equal(found, (a.float() @ w.float().t()).bfloat16())
