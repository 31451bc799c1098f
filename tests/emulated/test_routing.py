"""The kernels that sort by expert, in the emulator: to the bit what torch's stable sort gives."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.cute.routing import config
from cutegemm.cute.routing.config import Tile
from cutegemm.cute.routing.kernel import NUMBERS, POINTERS
from cutegemm.emulator.bridge import emulate
from cutegemm.emulator.errors import EmulationError
from cutegemm.emulator.mutate import mutations
from cutegemm.run import routing, routing_kernels

pytest.importorskip("llvmlite")
CASES = {
    "one token": (1, 8, 128, torch.int64, torch.float32),
    "several slots a thread": (300, 2, 60, torch.int32, torch.float16),
    "few experts": (37, 2, 8, torch.int64, torch.bfloat16),
    "one expert": (33, 1, 1, torch.int32, torch.float32),
    "the most experts": (5, 3, 1024, torch.int64, torch.bfloat16),
    "several CTAs": (1025, 1, 40, torch.int64, torch.float32),
    "several CTAs, threads that share an expert": (400, 4, 33, torch.int32, torch.bfloat16),
}


def drawn(tokens, top_k, experts, index, weight, seed, kind="uniform"):
    """Numbers of experts, some of them out of bounds, and weights; neither is contiguous."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-2, experts + 2, (top_k, tokens), generator=generator).to(index).t()
    if kind == "alike":
        numbers = torch.full_like(numbers, experts // 2)
    elif kind == "far":
        numbers = torch.where(numbers < experts // 2, torch.iinfo(index).min, torch.iinfo(index).max).to(index)
    weights = torch.randn(tokens, 2 * top_k, generator=generator).to(weight)[:, ::2]
    return numbers, weights


def assert_right(numbers, weights, experts):
    found, want = routing.route(numbers, weights, experts, "cute"), routing.by_torch(numbers, weights, experts)
    for mine, theirs in zip(found, want, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["uniform", "alike", "far"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.product(keep=4)
def test_bits(name, kind, seed):
    tokens, top_k, experts, index, weight = CASES[name]
    assert_right(*drawn(tokens, top_k, experts, index, weight, seed, kind), experts)


@pytest.mark.parametrize("tile", [Tile(2, 32, 4), Tile(8, 64, 1)], ids=str)
@pytest.mark.product(keep=1)
def test_more_ctas_than_threads_share(tile, monkeypatch, seed):
    """Nine to seventeen CTAs, more than the threads of an expert."""
    slots = 2 * 500
    monkeypatch.setattr(config, "choose", lambda *_: (tile, -(-slots // tile.slots)))
    assert_right(*drawn(500, 2, 20, torch.int64, torch.float32, seed), 20)


def test_a_gpu_without_the_shared_memory_sorts_by_torch(monkeypatch, seed):
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_86")
    numbers, weights = drawn(5, 3, 1024, torch.int64, torch.float32, seed)
    assert routing_kernels.plan_of(numbers, weights, 1024) is None
    assert_right(numbers, weights, 1024)
    assert routing_kernels.plan_of(numbers, weights, 200) is not None


class Call:
    """A call whose experts the kernel in front still writes, and what it should give."""

    def __init__(self, tokens, top_k, seed):
        self.experts, self.seed = 40, seed
        numbers, weights = drawn(tokens, top_k, self.experts, torch.int64, torch.float32, seed)
        self.before, self.numbers, self.weights = numbers, numbers.contiguous(), weights.contiguous()
        self.later, _ = drawn(tokens, top_k, self.experts, torch.int64, torch.float32, seed + 1)
        self.plan = routing_kernels.plan_of(self.numbers, self.weights, self.experts)
        self.want = routing.by_torch(self.later, self.weights, self.experts)

    def is_right(self, ptx):
        """Whether it is, when its kernels are these texts. Raises what the emulator finds."""
        self.numbers.copy_(self.before)
        made = [torch.full_like(each, -1) for each in self.want]
        counts = torch.full((self.plan.ctas * self.experts,), -7, dtype=torch.int32)
        tensors = dict(zip(POINTERS, (self.numbers, self.weights, *made, counts), strict=True))
        top_k = self.numbers.shape[1]
        given = self.numbers.numel(), top_k, self.experts, self.plan.ctas, top_k, 1, top_k, 1, 1
        assert len(given) == len(NUMBERS)
        for kernel, text in zip(self.plan.kernels, ptx, strict=True):
            launches = kernel.captured(*(each.data_ptr() for each in tensors.values()), 0, *given)
            front = lambda: self.numbers.copy_(self.later)  # noqa: E731
            emulate(text, launches, tensors, outputs=set(POINTERS[2:]), seed=self.seed, in_front=front)
        return all(torch.equal(mine, theirs) for mine, theirs in zip(made, self.want, strict=True))


@pytest.mark.parametrize(("tokens", "top_k"), [(20, 2), (1025, 1)])
def test_nothing_is_read_before_the_kernel_in_front_has_ended(tokens, top_k, seed):
    call = Call(tokens, top_k, seed)
    assert call.plan.early
    assert call.is_right([kernel.ptx for kernel in call.plan.kernels])


@pytest.mark.parametrize(("tokens", "top_k", "number"), [(300, 2, 0), (1025, 1, 0), (1025, 1, 1)])
@pytest.mark.product(keep=2)
def test_every_synchronization_is_needed(tokens, top_k, number, seed):
    """But for what lets the next kernel begin, none can be taken away without being noticed."""
    call = Call(tokens, top_k, seed)
    texts = [kernel.ptx for kernel in call.plan.kernels]
    broken = [each for each in mutations(texts[number]) if "launch_dependents" not in each.text]
    assert len(broken) >= 4
    for mutation in broken:
        try:
            noticed = not call.is_right([*texts[:number], mutation.ptx, *texts[number + 1 :]])
        except EmulationError:
            noticed = True
        assert noticed, mutation


def test_a_mixture_is_the_same_by_either(monkeypatch, seed):
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    generator = torch.Generator().manual_seed(seed)
    x, gate_up, down = (torch.randint(-1, 2, shape, generator=generator).bfloat16()
                        for shape in ((21, 16), (3, 16, 16), (3, 24, 8)))  # fmt: skip
    numbers, weights = drawn(21, 2, 3, torch.int64, torch.float32, seed)
    by_kernels = cutegemm.moe(x, numbers, weights, gate_up, down, activation="relu", backend="cute")
    with monkeypatch.context() as patched:
        patched.setattr(routing_kernels, "plan_of", lambda *_: None)
        by_torch = cutegemm.moe(x, numbers, weights, gate_up, down, activation="relu", backend="cute")
    assert torch.equal(by_kernels, by_torch)
