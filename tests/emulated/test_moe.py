"""A mixture's products by the Hopper kernels in the emulator, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import cutegemm
from cutegemm import gating, ops, torch_grouped
from cutegemm.nn import Fp8MoE
from cutegemm.problem import packing
from cutegemm.run import combining, grouped

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("few_sms", "fresh_timing")
SMS = 3


@pytest.mark.parametrize(
    ("tokens", "top_k", "gathers"),
    [
        (21, 2, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((21, 2, True), (1, 1, False), (0, 2, False))),
    ],
)
def test_forward_and_backward_by_the_kernels(tokens, top_k, gathers, seed, monkeypatch):
    """Small integers and relu: sums are exact, so that the kernels and torch round the same numbers.

    gathers: the tokens' rows are copied to their places in front of the first product.
    """
    if gathers:
        monkeypatch.setattr(packing, "GATHERED_ROWS", 2)
        monkeypatch.setattr(packing, "GATHERED_COLUMNS", 16)
    grouped.memo.clear()
    passes = []
    spread = combining.spread
    monkeypatch.setattr(combining, "spread", lambda *given: passes.append(given) or spread(*given))
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape, most=1):
        return torch.randint(-most, most + 1, shape, generator=generator).bfloat16().requires_grad_()

    x, gate_up, down = integers(tokens, 16), integers(3, 16, 16), integers(3, 24, 8)
    experts = torch.rand((tokens, 3), generator=generator).topk(top_k).indices
    experts[experts == 1] = 2  # one has no token, a token may name one twice
    experts[:1, 1:] = -1
    weights = torch.randint(1, 3, (tokens, top_k), generator=generator).float().requires_grad_()
    upstream = integers(tokens, 24).detach()
    found = []
    for backend in ("cute", "torch"):
        d = cutegemm.moe(x, experts, weights, gate_up, down, activation="relu", backend=backend)
        found.append([d, *torch.autograd.grad(d, (x, weights, gate_up, down), upstream)])
    grouped.memo.clear()
    assert len(passes) == (2 + gathers if tokens else 0)  # of x and of the gradient in the backward pass
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    assert not tokens or found[0][0].abs().max() > 0


@pytest.mark.parametrize("interleaved", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_biases_and_a_function_of_gate_and_up(interleaved, seed):
    """As gpt-oss's experts are, with weights that lie the other way; exact as above."""
    grouped.memo.clear()
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape, most=1):
        return torch.randint(-most, most + 1, shape, generator=generator).bfloat16().requires_grad_()

    x, gate_up, down = integers(21, 16), integers(3, 16, 32), integers(3, 16, 24)
    biases = integers(3, 32, most=2), integers(3, 24, most=2)
    experts = torch.rand((21, 3), generator=generator).topk(2).indices
    experts[:1, 1:] = -1
    weights = torch.randint(1, 3, (21, 2), generator=generator).bfloat16().requires_grad_()
    upstream, inputs = integers(21, 24).detach(), (x, weights, gate_up, down, *biases)
    found = []
    for backend in ("cute", "torch"):
        d = cutegemm.moe(
            x, experts, weights, gate_up.mT, down.mT, b_gate_up=biases[0], b_down=biases[1], interleaved=interleaved,
            activation=lambda gate, up: ops.relu(ops.minimum(gate, 3.0)) * (ops.clamp(up, -2.0, 2.0) + 1.0),
            backend=backend,
        )  # fmt: skip
        found.append([d, *torch.autograd.grad(d, inputs, upstream)])
    grouped.memo.clear()
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    assert found[0][0].abs().max() > 0


def test_a_gradient_that_is_lazily_negated(seed):
    torch.manual_seed(seed)
    x, weights = torch.randn(5, 16).bfloat16().requires_grad_(), torch.rand(5, 2).requires_grad_()
    experts = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    gate_up, down = torch.randn(3, 16, 16).bfloat16(), torch.randn(3, 1, 8).bfloat16()
    upstream = torch.randn(5, 1).bfloat16()
    found = cutegemm.moe(x, experts, weights, gate_up, down, backend="cute")
    mine, theirs = (
        torch.autograd.grad(found, (x, weights), each, retain_graph=True)
        for each in (torch._neg_view(upstream), -upstream)
    )
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize(("scaling", "other"), [("rows", False), ("blocks", False), ("rows", True), ("blocks", True)])
@pytest.mark.product(keep=1)
def test_experts_in_8_bits_by_the_kernels(scaling, other, seed):
    """Sums of such integers are exact, and what is quantized in between is the same."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (13, 32), generator=generator).bfloat16()
    gate_up = torch.randint(-2, 3, (3, 32, 32), generator=generator).bfloat16()
    down = torch.randint(-2, 3, (3, 32, 16), generator=generator).bfloat16()
    x[:, 0], gate_up[..., 0], down[..., 0] = 7, 7, 7  # scales that are powers of two, but for the format's own factor
    experts = torch.rand((13, 3), generator=generator).topk(2).indices
    experts[experts == 1], experts[0, 1] = 2, -1
    weights = torch.randint(1, 3, (13, 2), generator=generator).float()
    options = {"scaling": scaling, "activation": "relu"}
    if other:  # as gpt-oss's are
        biases = [torch.randint(-2, 3, (3, 32), generator=generator).bfloat16() for _ in range(2)]
        options |= {"b_gate_up": biases[0], "b_down": biases[1], "interleaved": True}
        options["activation"] = gating.ClampedSwiglu(7.0, 1.702, 1.0)
    found = [
        Fp8MoE.from_weights(gate_up, down, backend=backend, **options)(x, experts, weights)
        for backend in ("cute", "torch")
    ]
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0.02 * found[1].abs().max().item())


@pytest.mark.parametrize("capability", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("dtype", "width", "hidden"), [(torch.float32, 33, 21), (torch.bfloat16, 33, 21), (torch.float16, 40, 17)]
)
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_every_width_and_float32_run_by_kernels(capability, dtype, width, hidden, monkeypatch, seed):
    """Also on GPUs without TMA, forward and backward: nothing goes to torch, which would wait for the sizes."""
    monkeypatch.setenv("CUTEGEMM_ARCH", capability)
    monkeypatch.setattr(torch_grouped, "accumulators", None)
    generator = torch.Generator().manual_seed(seed)
    shapes = (11, width), (3, 2 * hidden, width), (3, width, hidden)
    x, gate_up, down = ((0.4 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes)
    experts = torch.randint(0, 3, (11, 2), generator=generator)
    given = [each.requires_grad_() for each in (x, torch.rand(11, 2, generator=generator), gate_up, down)]
    upstream = torch.randn(11, width, generator=generator)
    found = cutegemm.moe(given[0], experts, *given[1:], backend="cute")
    own = torch.autograd.grad(found, given, upstream.to(dtype))
    exact = [each.detach().double().requires_grad_() for each in given]
    x, weights, gate_up, down = exact
    want = torch.zeros(11, width, dtype=torch.float64)
    for choice in range(2):
        gate, up = torch.einsum("th,tfh->tf", x, gate_up[experts[:, choice]]).chunk(2, -1)
        hidden_rows = torch.nn.functional.silu(gate) * up
        rows = torch.einsum("tf,thf->th", hidden_rows, down[experts[:, choice]])
        want = want + weights[:, choice, None] * rows
    theirs = torch.autograd.grad(want, exact, upstream.to(dtype).double())
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    for mine, right in zip((found, *own), (want, *theirs), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=bound, atol=bound)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace. is deprecated:DeprecationWarning")
def test_a_traced_mixture_is_added_up_by_torch(seed):
    """torch.jit.trace gives sizes as tensors, and would keep nothing of our launch."""
    generator = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(6, 16, generator=generator), torch.rand(6, 2, generator=generator)
    experts = torch.randint(0, 3, (6, 2), generator=generator)
    gate_up, down = (torch.randn(shape, generator=generator) for shape in ((3, 16, 16), (3, 16, 8)))
    traced = torch.jit.trace(
        lambda *given: cutegemm.moe(*given, backend="cute"), (x, experts, weights, gate_up, down), check_trace=False
    )
    want = cutegemm.moe(x + 1, experts, weights, gate_up, down, backend="torch")
    torch.testing.assert_close(traced(x + 1, experts, weights, gate_up, down), want, rtol=1e-4, atol=1e-4)


def test_experts_in_8_bits_are_an_operator_where_tensors_are_not_real(seed):
    """A sort that was launched then read address 0, and a graph kept nothing of it."""
    torch.manual_seed(seed)
    layer = Fp8MoE.from_weights(torch.randn(3, 32, 16), torch.randn(3, 16, 16), backend="cute")
    x, weights, experts = torch.randn(6, 16), torch.rand(6, 2), torch.randint(0, 3, (6, 2))
    with torch.no_grad():
        graph = make_fx(lambda *given: layer(given[0], experts=given[1], weights=given[2]))(x, experts, weights)
        targets = [str(node.target) for node in graph.graph.nodes]
        assert [target for target in targets if "cutegemm" in target] == ["cutegemm.moe.default"]
        assert torch.equal(graph(x + 1, experts, weights), layer(x + 1, experts=experts, weights=weights))
