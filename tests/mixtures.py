"""Random mixtures of experts, and what they are in float64."""

from __future__ import annotations

import copy

import torch
from torch.nn import functional

from cutegemm.nn import MoE, replace_moe

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def exact(x, experts, weights, gate_up, down, activation="silu", biases=(0, 0), interleaved=False):
    """By torch's operators in float64, expert by expert. activation: a name, or a function of gate and up."""
    x, weights, gate_up, down = (each.double() for each in (x, weights, gate_up, down))
    of_both, of_down = (each.double() if isinstance(each, torch.Tensor) else [0] * len(down) for each in biases)
    result = x.new_zeros(*x.shape[:-1], down.shape[1])
    for number, (wide, narrow) in enumerate(zip(gate_up, down, strict=True)):
        both = x @ wide.t() + of_both[number]
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        hidden = ACTIVATIONS[activation](gate) * up if isinstance(activation, str) else activation(gate, up)
        share = torch.where(experts == number, weights, 0).sum(-1, keepdim=True)
        result = result + share * (hidden @ narrow.t() + of_down[number])
    return result


def clamped(gate, up, limit=0.7, alpha=1.702, offset=1.0):
    """What `ops.clamped_swiglu` computes, by torch's operators as gpt-oss's experts have them."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + offset) * (gate * torch.sigmoid(gate * alpha))


def drawn_biases(gate_up, down, dtype=torch.float32, seed=0):
    """(b_gate_up, b_down) for these weights."""
    generator = torch.Generator().manual_seed(seed + 1)
    shapes = gate_up.shape[:2], down.shape[:2]
    return [torch.randn(shape, generator=generator).to(down.device, dtype).requires_grad_() for shape in shapes]


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


def check_replaced(model):
    """Asserts that a language model of transformers, with small random weights, gives the same logits, loss and
    gradients after `replace_moe`, and has the same parameters in the same order.
    """
    ours = replace_moe(copy.deepcopy(model))
    assert all(isinstance(layer.mlp.experts, MoE) for layer in ours.model.layers)
    assert list(ours.state_dict()) == list(model.state_dict())
    ids = torch.randint(0, 64, (2, 9))
    found = [each(ids, labels=ids) for each in (ours, model)]
    torch.testing.assert_close(found[0].logits, found[1].logits, rtol=1e-4, atol=1e-5)
    for each in found:
        each.loss.backward()
    for (key, mine), theirs in zip(ours.named_parameters(), model.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 1e-4 * theirs.grad.abs().max(), key
