"""Constant operands on a GPU: chains of products whose weights nobody writes, eager and captured."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from tests import exact
from tuning import decode

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

CONFIGS = (
    None,
    "sm90/64x16x128/coop1/c1x1/s8/row/swap/once/pdl",
    "sm90/64x16x128/coop1/c1x1x2/s5/row/k2/swap/pdl",
    "sm90/64x64x64/coop1/c2x1/s4/row/k4/pdl",
    "sm90/64x128x64/pp/c1x2/s4/serp8/pdl",
)


def chain(config: str | None, tokens: int, seed: int, length: int = 12):
    """A chain of products of integers, and what it must give: each result is reduced to -1, 0 and 1 again."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.empty(tokens, 1024, device="cuda", dtype=torch.bfloat16)
    weights = [torch.empty(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(length)]
    for each in (x, *weights):
        exact.fill(each, 1, generator)

    def ours() -> torch.Tensor:
        y = x
        for weight in weights:
            y = cutegemm.gemm(y, weight.t(), backend="cute", config=config, constant="b").sign_()
        return y

    want = x
    for weight in weights:
        want = (want.float() @ weight.float().t()).sign().to(torch.bfloat16)
    return ours, want


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("config", CONFIGS)
def test_chains_behind_other_kernels(config, tokens, seed):
    ours, want = chain(config, tokens, seed)
    for _ in range(20):
        got = ours()
    assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours()
    for _ in range(20):
        captured.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, want)


@pytest.mark.parametrize("tokens", decode.TOKENS)
def test_chains_of_products_alone(tokens):
    """Each product reads what the kernel just in front writes, which may still run when the weights are fetched."""
    made = decode.Chain.draw(tokens, torch.bfloat16, 1)
    for name, product in decode.ways().items():
        for _ in range(5):
            assert made.check(product) == "ok", name


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("scaling", ["mlp", "rows", "tensor", "blocks"])
def test_layers_behind_other_kernels(scaling, tokens, seed):
    """Chains of gated MLPs, and of linears in fp8, whose inputs are written just in front."""
    torch.manual_seed(seed)
    config = {"device": "cuda", "backend": "cute"}
    if scaling == "mlp":
        layers = [cutegemm.nn.SwiGLU(1024, 2816, dtype=torch.bfloat16, **config) for _ in range(6)]
    else:
        layers = [
            cutegemm.nn.Fp8Linear(1024, 1024, scaling=scaling, bias_dtype=torch.bfloat16, **config) for _ in range(12)
        ]
    x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
    name = "constant_weights" if scaling == "mlp" else "constant_weight"

    def chain(promised: bool) -> torch.Tensor:
        y = x
        for layer in layers:
            layer.settings = layer.settings._replace(**{name: promised})
            y = torch.nn.functional.rms_norm(layer(y), (1024,))  # squares of small numbers vanish
        return y

    with torch.inference_mode():
        want = chain(False).clone()
        close = {"rtol": 0.05, "atol": 0.05 * float(want.abs().max())}  # another ring may split K elsewhere
        for _ in range(20):
            torch.testing.assert_close(chain(True), want, **close)
        first = chain(True).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(True)
        for _ in range(20):
            captured.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, first)


def test_weights_that_were_written_long_before(seed):
    """An update, then other kernels, then the product: the kernel just in front writes no weight."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    a, weight = (torch.empty(64, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    exact.fill(a, 1, generator)
    for _ in range(50):
        exact.fill(weight, 1, generator)
        first = cutegemm.gemm(a, a.t())
        got = cutegemm.gemm(a, weight.t(), constant="b", out_dtype=torch.float32)
        assert torch.equal(got, a.float() @ weight.float().t())
        del first
