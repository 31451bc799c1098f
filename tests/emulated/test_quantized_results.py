"""Results that are quantized with scales of blocks, in the emulator: bit by bit those of two calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cutegemm
from cutegemm import mlp_operator, nn, ops, quantized_mixing
from tests.quantized_results import E4M3, E5M2, compared, identity, scaled, swiglu, swiglu_pairs

PLAIN, GATED = "sm90/128x128x64/coop2/c1x1/s3/serp8/pdl", "sm90/128x256x64/coop2/c1x1/s3/serp8/pdl"


@pytest.mark.parametrize(
    ("shape", "config", "body", "dtype"),
    [
        ((100, 384, 192), PLAIN, identity, E4M3),
        ((130, 304, 100), PLAIN, identity, E5M2),
        ((70, 304, 64), PLAIN, identity, torch.int8),
        ((70, 16, 64), PLAIN, identity, E4M3),
        ((70, 272, 64), "sm90/128x256x64/coop2/c1x2/s3/serp8/zig/pdl", identity, E4M3),
        ((150, 256, 64), "sm90/256x128x64/coop2/c2x1/s3/serp8/pdl", identity, E4M3),
        ((100, 512, 192), GATED, swiglu, E4M3),
        ((100, 416, 192), GATED, swiglu, E4M3),
        ((100, 512, 192), "sm90/64x256x64/pp/c1x1/s3/serp8/pdl", swiglu, E4M3),
        ((100, 512, 192), GATED, swiglu_pairs, E4M3),
        ((70, 352, 192), "sm90/64x256x64/pp/c2x1/s3/serp8/pdl", swiglu_pairs, E4M3),
        ((300, 256, 512), "sm90/128x128x64/coop2/c1x1/s3/serp8/streamk/pdl", identity, E4M3),
    ],
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_a_product(shape, config, body, dtype):
    torch.manual_seed(sum(shape))
    m, n, k = shape
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16().T
    compared(lambda epilogue: cutegemm.gemm(a, b, epilogue=epilogue, config=config, backend="cute"), body, dtype)


@pytest.mark.slow
def test_operands_a_batch_and_numbers_that_are_none():
    torch.manual_seed(1)
    a, b = torch.randn(2, 70, 64).half(), torch.randn(2, 304, 64).half().mT
    row, column = torch.randn(2, 70, 1), torch.randn(304)
    row[0, 3], row[1, 5], row[1, 6] = float("nan"), float("inf"), 0.0
    column[200] = float("inf")
    for dtype in (E4M3, torch.int8):
        compared(
            lambda epilogue: cutegemm.gemm(
                a, b, epilogue=epilogue, operands=(row, column), config=PLAIN, backend="cute"
            ),
            scaled,
            dtype,
        )


def test_of_quantized_operands():
    torch.manual_seed(2)
    a, of_a = cutegemm.quantize(torch.randn(100, 384), E4M3, "blocks", backend="torch")
    b, of_b = cutegemm.quantize(torch.randn(512, 384), E4M3, "blocks", block=(128, 128), backend="torch")
    config = "sm90/128x256x128/coop2/c1x1/s3/serp8/pdl/half"
    compared(
        lambda epilogue: cutegemm.gemm(
            a, b.T, scale_a=of_a, scale_b=of_b.T, epilogue=epilogue, config=config, backend="cute"
        ),
        swiglu,
        E4M3,
    )


@pytest.mark.parametrize("config", [GATED, "sm90/128x256x64/coop2/c1x2/s3/serp16/zig/streamk/pdl"])
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_groups_of_rows(config):
    """Rows of no group stay as they are, in both results."""
    torch.manual_seed(4)
    a, b = torch.randn(420, 192).bfloat16(), torch.randn(4, 512, 192).bfloat16().mT
    ends = torch.tensor([130, 130, 131, 400], dtype=torch.int32)
    weight = torch.randn(420, 1)

    def call(epilogue: Any, **given: Any) -> Any:
        return cutegemm.grouped_gemm(
            a, b, ends, epilogue=epilogue, operands=(weight,), config=config, backend="cute", **given
        )

    def body(acc: Any, weight: Any) -> Any:
        return ops.cast(ops.swiglu(acc) * weight, torch.bfloat16)

    compared(call, body, E4M3, slice(0, 400))
    values, scales = torch.full((420, 256), 7.0).to(E4M3), torch.full((420, 2), -7.0)
    apart = torch.full((420, 4), -7.0)[:, ::2]
    for target in (scales, apart):
        got = call(lambda *given: ops.quantize(body(*given), E4M3), out=(values, target))
        assert got[1] is target
        assert (values[400:].float() == 7).all()
        assert (target[400:] == -7).all()
        assert (target[:400] > 0).all()
    assert torch.equal(scales, apart)


def test_masked_groups():
    torch.manual_seed(5)
    a, b = torch.randn(2, 140, 64).bfloat16(), torch.randn(2, 256, 64).bfloat16().mT
    counts = torch.tensor([131, 5], dtype=torch.int32)

    def call(epilogue: Any) -> Any:
        return cutegemm.grouped_gemm(a, b, counts=counts, epilogue=epilogue, config=PLAIN, backend="cute")

    for group, count in enumerate(counts.tolist()):
        compared(call, identity, E4M3, (group, slice(0, count)))


def test_tf32_and_what_the_choice_takes():
    torch.manual_seed(6)
    a, b = torch.randn(40, 100), torch.randn(208, 100).T
    compared(lambda epilogue: cutegemm.gemm(a, b, epilogue=epilogue, precision="tf32", backend="cute"), identity, E4M3)


@pytest.mark.parametrize("form", [False, True])
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_a_mixture(monkeypatch, form):
    """Its hidden layer is quantized by the first product or by a kernel of its own."""
    torch.manual_seed(7)
    more: dict[str, Any] = {}
    if form:
        more = {"interleaved": True, "activation": cutegemm.gating.ClampedSwiglu(7.0, 1.702, 1.0)}
        more |= {"b_gate_up": torch.randn(2, 256).bfloat16(), "b_down": torch.randn(2, 64).bfloat16()}
    weights = (torch.randn(2, *shape).bfloat16() / 8 for shape in ((256, 128), (64, 128)))
    layer = nn.Fp8MoE.from_weights(*weights, scaling="blocks", backend="cute", **more)
    x, experts = torch.randn(140, 128).bfloat16(), torch.stack((torch.zeros(140), torch.ones(140)), 1).long()
    experts[5:20, 0], experts[7, 1] = -1, 0
    shares, asked = torch.rand(140, 2), []
    real = quantized_mixing.grouped_gemm

    def seen(*given: Any, epilogue: Any, **options: Any) -> Any:
        asked.append(epilogue.quantizes)
        return real(*given, epilogue=epilogue, **options)

    monkeypatch.setattr(quantized_mixing, "grouped_gemm", seen)
    with torch.no_grad():
        found = layer(x, experts, shares)
        monkeypatch.setattr(quantized_mixing, "FUSED_ROWS", 1 << 40)
        apart = layer(x, experts, shares)
    assert asked == [True, False, False, False]
    torch.testing.assert_close(found, apart, rtol=0, atol=0)
    assert float(found.float().norm()) > 10


def test_a_gated_mlp(monkeypatch):
    asked, real = [], mlp_operator._quantizing
    monkeypatch.setattr(mlp_operator, "_quantizing", lambda *given: asked.append(given) or real(*given))
    torch.manual_seed(8)
    weights = (torch.randn(*shape).bfloat16() / 8 for shape in ((128, 64), (128, 64), (48, 128)))
    layer = nn.Fp8SwiGLU.from_weights(*weights, scaling="blocks", backend="cute")
    x = torch.randn(2, 130, 64).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer.down(layer.gate_up(x)), rtol=0, atol=0)
    assert len(asked) == 1
