"""A mixture's products by the Hopper kernels in the emulator, forward and backward."""

from __future__ import annotations

import pytest
import torch

import cutegemm

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("few_sms", "fresh_timing")
SMS = 3


@pytest.mark.parametrize(
    ("tokens", "top_k"), [(21, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1), (0, 2)))]
)
def test_forward_and_backward_by_the_kernels(tokens, top_k, seed):
    """Small integers and relu: sums are exact, so that the kernels and torch round the same numbers."""
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
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    assert not tokens or found[0][0].abs().max() > 0
