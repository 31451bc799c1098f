"""Random mixtures of experts, and what they are in float64."""

from __future__ import annotations

import torch
from torch.nn import functional

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def exact(x, experts, weights, gate_up, down, activation="silu"):
    """By torch's operators in float64, expert by expert."""
    x, weights, gate_up, down = (each.double() for each in (x, weights, gate_up, down))
    result = x.new_zeros(*x.shape[:-1], down.shape[1])
    for number, (wide, narrow) in enumerate(zip(gate_up, down, strict=True)):
        gate, up = (x @ wide.t()).chunk(2, -1)
        share = torch.where(experts == number, weights, 0).sum(-1, keepdim=True)
        result = result + share * ((ACTIVATIONS[activation](gate) * up) @ narrow.t())
    return result


def drawn(tokens=(7,), top_k=2, count=5, columns=8, hidden=6, rows=None, dtype=torch.float32, seed=0, device="cpu"):
    """x, experts, weights, w_gate_up, w_down; one expert has no token, and the weights are of float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    empty = int(torch.randint(count, (), generator=generator)) if count > top_k else count
    keys = torch.rand((*tokens, count), generator=generator)
    keys[..., empty : empty + 1] = -1
    experts = keys.topk(top_k, -1).indices.to(device)
    weights = torch.rand((*tokens, top_k), generator=generator).to(device).requires_grad_()
    rows = columns if rows is None else rows
    return normal(*tokens, columns), experts, weights, normal(count, 2 * hidden, columns), normal(count, rows, hidden)


def leaves(given):
    """Of what `drawn` gives: the tensors that have a gradient."""
    return [given[0], *given[2:]]


def agree(got, want, tolerance):
    """Asserts that each element is right within a share of the largest."""
    assert got.shape == want.shape
    if got.numel():
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max() + 1e-30
