"""A mixture of experts on a Hopper GPU: results, gradients that are the same each time, graphs whose experts change."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.gating import ClampedSwiglu
from cutegemm.nn import Fp8MoE
from cutegemm.run import routing
from tests.mixtures import agree, clamped, drawn, drawn_biases, exact, leaves

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "top_k", "count", "hidden"),
    [(1, 8, 128, 136), (16, 8, 128, 136), (3000, 2, 8, 136), (700, 1, 33, 136), (0, 2, 8, 136), (1100, 2, 8, 4096)],
)
def test_results_and_gradients(tokens, top_k, count, hidden, dtype, seed):
    """The same to the bit each time, and near those of float64. The last gathers rows in a pass of their own."""
    given = drawn((tokens,), top_k, count, 264, hidden, 520, dtype, seed, "cuda")
    with torch.no_grad():
        given[3].mul_(264**-0.5)
        given[4].mul_(hidden**-0.5)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    upstream = torch.randn(tokens, 520, device="cuda", generator=generator).to(dtype)
    found = []
    for _ in range(2):
        d = cutegemm.moe(*given, backend="cute")
        found.append([d, *torch.autograd.grad(d, leaves(given), upstream)])
    d = exact(*given)
    want = [d, *torch.autograd.grad(d, leaves(given), upstream.double())]
    for first, second, right in zip(*found, want, strict=True):
        assert torch.equal(first, second)
        agree(first, right, 2 * torch.finfo(dtype).eps)
    with torch.no_grad():
        alone = [cutegemm.moe(*given, backend="cute") for _ in range(2)]
    # Without gradients the first product stores less, so that other configurations are chosen, which round otherwise.
    assert torch.equal(*alone)
    agree(alone[0], d, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("tokens", "top_k", "count", "hidden"), [(1, 4, 32, 144), (33, 4, 32, 144), (700, 2, 8, 136), (0, 2, 8, 136)]
)
def test_biases_and_a_gate_that_clamps(tokens, top_k, count, hidden, interleaved, seed):
    """As gpt-oss's experts are, whose weights lie the other way. No number here is near the limit, where the derivative
    jumps: which side an accumulator is on depends on its rounding.
    """
    given = list(drawn((tokens,), top_k, count, 264, hidden, 520, torch.bfloat16, seed, "cuda"))
    for place, columns in ((3, 264), (4, hidden)):
        given[place] = (given[place].detach() * columns**-0.5).mT.contiguous().mT.requires_grad_()
    biases = drawn_biases(*given[3:], torch.bfloat16, seed)
    options = {"b_gate_up": biases[0], "b_down": biases[1], "activation": ClampedSwiglu(9.0, 1.702, 1.0)}
    generator = torch.Generator(device="cuda").manual_seed(seed)
    upstream = torch.randn(tokens, 520, device="cuda", generator=generator).bfloat16()
    inputs, found = [*leaves(given), *biases], []
    for _ in range(2):
        d = cutegemm.moe(*given, **options, interleaved=interleaved, backend="cute")
        found.append([d, *torch.autograd.grad(d, inputs, upstream)])
    d = exact(*given, lambda gate, up: clamped(gate, up, 9.0), biases, interleaved)
    want = [d, *torch.autograd.grad(d, inputs, upstream.double())]
    for first, second, right in zip(*found, want, strict=True):
        assert torch.equal(first, second)
        agree(first, right, 3 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "count"),
    [(1, 8, 128), (7, 2, 8), (128, 8, 128), (1025, 1, 40), (700, 2, 1000), (8192, 8, 128), (70000, 8, 60)],
)
def test_slots_are_sorted_as_torch_sorts_them(tokens, top_k, count, index, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for alike in (False, True):
        experts = torch.randint(-1, count + 1, (top_k, tokens), device="cuda", generator=generator).to(index).t()
        if alike:
            experts = experts[:1, :1].expand(tokens, top_k)
        weights = torch.randn(tokens, 2 * top_k, device="cuda", generator=generator).bfloat16()[:, ::2]
        found = [routing.route(experts, weights, count, "cute") for _ in range(2)]
        want = routing.by_torch(experts, weights, count)
        for *mine, theirs in zip(*found, want, strict=True):
            assert all(torch.equal(each, theirs) for each in mine)


def test_a_step_waits_for_nothing(seed):
    given = drawn((200,), 2, 8, 64, 32, None, torch.bfloat16, seed, "cuda")
    for mode in (0, "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            d = cutegemm.moe(*given, backend="cute")
            torch.autograd.grad(d, leaves(given), torch.ones_like(d))
        finally:
            torch.cuda.set_sync_debug_mode(0)


def test_replays_with_other_experts(seed):
    """A captured training step holds neither the choice of experts nor how many tokens each has."""
    given = drawn((160,), 2, 8, 64, 32, None, torch.bfloat16, seed, "cuda")
    upstream = torch.randn(160, 64, device="cuda").bfloat16()

    def step():
        d = cutegemm.moe(*given, backend="cute")
        return [d.detach(), *torch.autograd.grad(d, leaves(given), upstream)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for most in (8, 1, 3, 9) * 50:  # 8 is no expert
        given[1].random_(0, most, generator=generator)
        graph.replay()
        for mine, want in zip(kept, step(), strict=True):
            assert torch.equal(mine, want)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does that itself
def test_compiled_with_any_number_of_tokens(seed):
    torch._dynamo.reset()
    compiled = torch.compile(cutegemm.moe, fullgraph=True, dynamic=True)
    for tokens in (17, 300, 2100):
        given = drawn((tokens,), 2, 8, 64, 32, None, torch.bfloat16, seed, "cuda")
        found = []
        for call in (compiled, cutegemm.moe):
            d = call(*given)
            found.append([d, *torch.autograd.grad(d, leaves(given), torch.ones_like(d))])
        for mine, theirs in zip(*found, strict=True):
            agree(mine, theirs.double(), 0.02)


def test_a_model_whose_router_is_ours(seed):
    torch.manual_seed(seed)
    made = cutegemm.nn.MoE(64, 32, 8, 2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(3, 50, 64, device="cuda").bfloat16()
    agree(made(x), exact(x, *made.router(x), made.gate_up_proj, made.down_proj), 0.03)


@pytest.mark.parametrize("scaling", ["rows", "blocks", "tensor"])
@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
@pytest.mark.parametrize("other", [False, True])
def test_experts_in_8_bits(other, dtype, scaling, seed):
    """As torch computes them; captured, with other experts in the replay, and without waiting for the GPU.

    other: experts as those of gpt-oss.
    """
    x, experts, weights, gate_up, down = (
        each.detach() for each in drawn((300,), 2, 8, 256, 144, 272, torch.bfloat16, seed, "cuda")
    )
    biases = [each.detach() for each in drawn_biases(gate_up, down, torch.bfloat16, seed)]
    form = {"activation": ClampedSwiglu(7.0, 1.702, 1.0), "interleaved": True} if other else {}
    form |= {"b_gate_up": biases[0], "b_down": biases[1]} if other else {}
    made, plain = (
        Fp8MoE.from_weights(gate_up / 16, down / 12, dtype, scaling=scaling, backend=backend, **form)
        for backend in ("cute", "torch")
    )

    def check(found):
        """Compares with torch. Hidden numbers, and scales of tensors, may be rounded to their neighbours.

        With two of a hundred hidden numbers one step of bf16 apart, a token differs by up to 0.07 on the CPU, and all
        of them by up to 0.026 (24 seeds).
        """
        want = plain(x, experts, weights).float()
        assert ((found - want).norm(dim=1) <= 0.15 * want.norm(dim=1)).all()
        assert (found - want).norm() <= 0.05 * want.norm()

    check(made(x, experts, weights))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made(x, experts, weights)
    for _ in range(3):
        experts.copy_(torch.rand((300, 8), device="cuda").topk(2).indices)
        graph.replay()
        check(found)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made(x, experts, weights)
    finally:
        torch.cuda.set_sync_debug_mode(0)
