"""Results that are quantized with scales of blocks, on a GPU: bit by bit those of two calls with the same kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cutegemm
from cutegemm import mlp_operator, native, nn, ops, quantized_mixing
from tests.quantized_results import E4M3, E5M2, compared, identity, swiglu, swiglu_pairs

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "config", "body", "dtype"),
    [
        ((1000, 304, 200), "128x128x64/coop2/c1x1/s4/serp8/pdl", identity, E4M3),
        ((1030, 528, 200), "128x256x64/coop2/c1x2/s4/serp8/zig/pdl", identity, E5M2),
        ((333, 400, 64), "256x128x64/coop2/c2x1/s4/serp8/pdl", identity, torch.int8),
        ((1000, 1024, 520), "128x256x64/coop2/c1x1/s4/serp8/pdl", swiglu, E4M3),
        ((777, 416, 520), "64x256x64/pp/c2x1/s4/serp8/pdl", swiglu, E4M3),
        ((777, 352, 520), "128x256x64/coop2/c1x2/s4/serp8/zig/pdl", swiglu_pairs, E4M3),
        ((2100, 1024, 4096), "128x256x64/coop2/c1x1/s4/serp8/streamk/pdl", identity, E4M3),
    ],
)  # fmt: skip
def test_a_product(shape, config, body, dtype):
    torch.manual_seed(sum(shape))
    m, n, k = shape
    a, b = torch.randn(m, k, device="cuda", dtype=BF16), torch.randn(n, k, device="cuda", dtype=BF16).T
    for _ in range(5):
        compared(
            lambda epilogue: cutegemm.gemm(a, b, epilogue=epilogue, config=f"sm90/{config}", backend="cute"),
            body,
            dtype,
        )


@pytest.mark.parametrize("columns", [256, 300, 301])
def test_whatever_the_choice_takes(columns):
    """Rows that 16 bytes do not divide are quantized by torch's operations."""
    torch.manual_seed(columns)
    a, b = torch.randn(200, 64, device="cuda", dtype=BF16), torch.randn(columns, 64, device="cuda", dtype=BF16).T
    got = cutegemm.gemm(a, b, epilogue=lambda acc: ops.quantize(ops.cast(acc, BF16), E4M3))
    values, scales = cutegemm.quantize(a @ b, E4M3, "blocks")
    assert got[0].shape == (200, columns)
    torch.testing.assert_close(got[1], scales, rtol=0.01, atol=0)
    torch.testing.assert_close(
        cutegemm.dequantize(*got).float(), cutegemm.dequantize(values, scales).float(), rtol=0.13, atol=0.1
    )


def _layer(form: bool) -> Any:
    experts, width, hidden, more = 8, 512, 384, {}
    if form:
        of_gate = cutegemm.gating.ClampedSwiglu(7.0, 1.702, 1.0)
        biases = (torch.randn(experts, each, device="cuda", dtype=BF16) for each in (2 * hidden, width))
        more = {"interleaved": True, "activation": of_gate, **dict(zip(("b_gate_up", "b_down"), biases, strict=True))}
    weights = (
        torch.randn(experts, *each, device="cuda", dtype=BF16).mul_(0.05)
        for each in ((2 * hidden, width), (width, hidden))
    )
    router = nn.MoE(width, 8, experts, top_k=2, device="cuda", dtype=BF16).router
    return nn.Fp8MoE.from_weights(*weights, scaling="blocks", router=router, **more)


@pytest.mark.parametrize("form", [False, True])
def test_a_mixture_whose_hidden_layer_its_product_quantizes(monkeypatch, form):
    """Again by C++, compiled, and in a graph with other tokens; two calls differ by the rounding of few numbers."""
    torch.manual_seed(9)
    layer, x = _layer(form), torch.randn(700, 512, device="cuda", dtype=BF16)
    by_itself: list[Any] = []
    real = quantized_mixing.quantize
    monkeypatch.setattr(quantized_mixing, "quantize", lambda *given: by_itself.append(given) or real(*given))
    with torch.no_grad():
        y = layer(x)
        assert by_itself == []
        assert torch.equal(layer(x), y)
        compiled = torch.compile(layer, fullgraph=True)(x)  # whose router rounds otherwise
        assert float((compiled - y).float().norm() / y.float().norm()) < 0.01
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(x)
        for seed in range(20):
            x.copy_(torch.randn(700, 512, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.equal(captured, layer(x))
        monkeypatch.setattr(quantized_mixing, "FUSED_ROWS", 1 << 40)
        monkeypatch.setattr("cutegemm.native.mixture", None)
        apart, fused = layer(x).float(), captured.float()
        assert len(by_itself) == 1
    assert float((apart - fused).norm() / apart.norm()) < 1e-3


def test_a_gated_mlp(monkeypatch):
    asked, real = [], mlp_operator._quantizing
    monkeypatch.setattr(mlp_operator, "FUSED_SHARE", 0)
    monkeypatch.setattr(mlp_operator, "_quantizing", lambda *given: asked.append(given) or real(*given))
    torch.manual_seed(10)
    weights = [
        torch.randn(*shape, device="cuda", dtype=BF16).mul_(0.05) for shape in ((384, 512), (384, 512), (512, 384))
    ]
    layer = nn.Fp8SwiGLU.from_weights(*weights, scaling="blocks")
    x = torch.randn(3, 200, 512, device="cuda", dtype=BF16)
    assert native.wait()
    with torch.no_grad():
        fused, apart = layer(x), layer.down(layer.gate_up(x))
        for run in (layer, torch.compile(layer, fullgraph=True)):
            for _ in range(3):
                torch.testing.assert_close(run(x), fused, rtol=0, atol=0)
        assert asked == [("swiglu", BF16, torch.float8_e4m3fn)]  # all later calls were launched by C++
    assert float((fused - apart).float().norm() / apart.float().norm()) < 1e-3
