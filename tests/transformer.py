"""A small causal transformer with random weights, torch's linear layers against ours: logits and a training curve.

Hugging Face's Llama where `transformers` is installed, else one of plain torch modules. What is right is the same
model in float64; ours must be as close to it as the original is.
"""

from __future__ import annotations

import copy
import importlib.util
import statistics
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

import cutegemm

RUNS = 4
"""Of each model; the spread of the original is the yardstick."""
HUGGING_FACE = importlib.util.find_spec("transformers") is not None


@dataclass(frozen=True)
class Size:
    """layers, width (a multiple of 16 heads' width), hidden width of the MLP, vocabulary, and tokens of a batch."""

    layers: int = 3
    width: int = 128
    hidden: int = 352
    vocabulary: int = 512
    batch: int = 4
    length: int = 48


class Block(torch.nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = 4
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(size.width), torch.nn.LayerNorm(size.width)
        self.qkv = torch.nn.Linear(size.width, 3 * size.width)
        self.merge = torch.nn.Linear(size.width, size.width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(size.width, size.hidden), torch.nn.GELU(), torch.nn.Linear(size.hidden, size.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before_attention(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Plain(torch.nn.Module):
    """The stand-in for Hugging Face's: tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(size.vocabulary, size.width)
        self.position = torch.nn.Embedding(size.length, size.width)
        self.blocks = torch.nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = torch.nn.LayerNorm(size.width)
        self.head = torch.nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def build(size: Size, seed: int, plain: bool = not HUGGING_FACE) -> torch.nn.Module:
    """The model in float32 on the CPU, in training mode; without dropout."""
    torch.manual_seed(seed)
    if plain:
        return Plain(size)
    with warnings.catch_warnings():
        # What other packages deprecate is not ours to fail on.
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=size.length,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def replaced(model: torch.nn.Module, backend: str) -> torch.nn.Module:
    """A copy with our linear layers. Raises AssertionError when there was none to replace."""
    ours = cutegemm.nn.replace_linears(copy.deepcopy(model), backend=backend)
    kinds = [type(module) for module in ours.modules() if isinstance(module, torch.nn.Linear)]
    assert kinds
    assert set(kinds) == {cutegemm.nn.Linear}
    return ours


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    result: Any = model(tokens)
    return result if isinstance(result, torch.Tensor) else result.logits


def _tokens(size: Size, device: str) -> torch.Tensor:
    return torch.randint(size.vocabulary, (size.batch, size.length), device=device)


def compare_logits(size: Size, dtype: torch.dtype, device: str, seed: int, backend: str = "auto", **build_options: Any):
    """Root-mean-square errors of the logits in `dtype`, (the original's, ours), against float64."""
    model = build(size, seed, **build_options).to(device=device, dtype=dtype).eval()
    ours, exact = replaced(model, backend), copy.deepcopy(model).double()
    tokens = _tokens(size, device)
    with torch.no_grad():
        want = logits(exact, tokens)
        found = [(logits(m, tokens).double() - want).square().mean().sqrt().item() for m in (model, ours)]
    return found[0], found[1]


def curve(model: torch.nn.Module, tokens: torch.Tensor, steps: int, autocast: bool) -> list[float]:
    """The loss before each of `steps` steps of AdamW on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=autocast):
            found = logits(model, tokens)
        loss = functional.cross_entropy(
            found[:, :-1].flatten(0, 1).to(next(model.parameters()).dtype), tokens[:, 1:].flatten()
        )
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def compare_curves(
    size: Size, steps: int, device: str, seed: int, *, autocast: bool, backend: str = "auto", runs: int = RUNS,
    **build_options: Any,
) -> tuple[list[float], list[list[float]], list[list[float]]]:  # fmt: skip
    """Loss curves of the float64 model, of the original and of ours, from the same weights on the same batch.

    Rounding errors grow from step to step, by a factor that is another with every rounding: the original runs several
    times, and ours `runs` times, from weights that differ by a rounding error.
    """
    model = build(size, seed, **build_options).to(device)
    ours, exact = replaced(model, backend), copy.deepcopy(model).double()
    tokens = _tokens(size, device)
    theirs = [curve(_nudged(model, number), tokens, steps, autocast) for number in range(RUNS)]
    own = [curve(_nudged(ours, number), tokens, steps, autocast) for number in range(runs)]
    return curve(exact, tokens, steps, False), theirs, own


def _nudged(model: torch.nn.Module, number: int) -> torch.nn.Module:
    """A copy with every weight rounded another way, up or down by about an ulp of float32; number 0 as it is."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for weight in copied.parameters() if number else ():
            sign = torch.randint(-1, 2, weight.shape, generator=generator).to(weight.device)
            weight.mul_(1 + sign * torch.finfo(torch.float32).eps)
    return copied


def check_curves(exact: list[float], theirs: list[list[float]], ours: list[list[float]], fall: float = 0.5) -> str:
    """Raises AssertionError unless our curves are as close to float64's as the original's are and the loss falls.

    The middle one of ours is compared with the farthest of theirs: now and then one run strays, whosever it is.
    """

    def far(losses: list[float]) -> float:
        return max(abs(x - y) for x, y in zip(losses, exact, strict=True))

    spread, own = ([far(losses) for losses in runs] for runs in (theirs, ours))
    text = (
        f"loss {exact[0]:.4f} to {exact[-1]:.4f} in {len(exact)} steps; farthest from float64: "
        f"torch {min(spread):.2e} to {max(spread):.2e} in {len(spread)} runs, ours {min(own):.2e} to {max(own):.2e}"
    )
    assert exact[-1] < fall * exact[0], f"it does not learn: {text}"
    assert statistics.median(own) <= 3 * max(spread) + 1e-5 * exact[0], text
    return text
