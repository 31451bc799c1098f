"""`TopKRouter`, which chooses among the experts of a mixture, and the arguments that mixtures have in common."""

from __future__ import annotations

from typing import Any

import torch

from cutegemm import replacing
from cutegemm.linear import linear
from cutegemm.problem.grouped_request import MOST_GROUPS
from cutegemm.pytorch import autocast, sharded


class TopKRouter(torch.nn.Module):
    """Chooses the experts of each token: the top_k largest of softmax(x @ weight^T), which is computed in fp32.

    Parameter: `weight` (num_experts, in_features).

    Args:
        normalize: whether a token's weights are divided by their sum, as Mixtral and Qwen3-MoE do.

    Raises:
        TypeError, ValueError: a size is no integer or none that is accepted; top_k is not 1 to num_experts.
    """

    def __init__(
        self, in_features: int, num_experts: int, top_k: int, device: Any = None, dtype: Any = None, *,
        normalize: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        num_experts = replacing.as_size("num_experts", num_experts, 1, MOST_GROUPS)
        replacing.check_constant("normalize", normalize)
        self.top_k, self.normalize = replacing.as_size("top_k", top_k, 1, num_experts, ", num_experts"), normalize
        in_features = replacing.as_size("in_features", in_features)
        self.weight = torch.nn.Parameter(torch.empty((num_experts, in_features), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight as torch.nn.Linear does."""
        replacing.draw(self.weight)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """input: (..., in_features). Returns the experts, int64, and their weights, fp32, each (..., top_k)."""
        replacing.check_input(input, self.weight)
        if input.dim() == 0 or input.shape[-1] != self.weight.shape[1]:
            raise ValueError(f"input: got shape {tuple(input.shape)}, expected (..., {self.weight.shape[1]})")
        casts = autocast.is_on(input.device.type) and input.is_floating_point() and input.dtype != torch.float64
        if input.dtype != self.weight.dtype and not casts:
            expected = f"that of the router's weight, {self.weight.dtype}"
            raise TypeError(f"input: got dtype {input.dtype}, expected {expected}")
        shares = linear(input, self.weight).float().softmax(-1)
        weights, experts = shares.topk(self.top_k, -1)
        if sharded.is_distributed(shares):  # of whose topk torch 2.11 has no gradient
            weights = shares.gather(-1, experts)
        return experts, weights / weights.sum(-1, keepdim=True) if self.normalize else weights

    def extra_repr(self) -> str:
        count, columns = self.weight.shape
        text = f"in_features={columns}, num_experts={count}, top_k={self.top_k}"
        return text if self.normalize else f"{text}, normalize=False"


def sized(
    in_features: int, hidden_features: int, num_experts: int, top_k: int | None, out_features: int | None,
    router: torch.nn.Module | None, **options: Any,
) -> tuple[tuple[int, int, int], tuple[int, int, int], torch.nn.Module | None]:  # fmt: skip
    """The shapes of gate and up and of down, and the router of a mixture: the one given, or a `TopKRouter` made with
    the options. Raises TypeError or ValueError naming the argument.
    """
    if top_k is not None:
        if router is not None:
            raise ValueError(f"top_k: got {top_k} beside a router, which says it; leave one away")
        router = TopKRouter(in_features, num_experts, top_k, **options)
    num_experts = replacing.as_size("num_experts", num_experts, 1, MOST_GROUPS)
    in_features = replacing.as_size("in_features", in_features)
    hidden_features = replacing.as_size("hidden_features", hidden_features)
    rows = in_features if out_features is None else replacing.as_size("out_features", out_features)
    return (num_experts, 2 * hidden_features, in_features), (num_experts, rows, hidden_features), router


def fit(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether weights of these shapes, (E, 2 F, in) and (E, out, F), are those of one mixture."""
    return len(gate_up) == len(down) == 3 and gate_up[0] == down[0] and gate_up[1] == 2 * down[2]


def check_fit(gate_up: torch.Tensor, down: torch.Tensor, transposed: bool = False) -> None:
    """Raises ValueError unless these weights, (E, 2 F, in) and (E, out, F), are those of one mixture.

    transposed: their last two extents lie the other way.
    """
    shapes = tuple(gate_up.shape), tuple(down.shape)
    turned = [(*shape[:-2], *shape[:-3:-1]) for shape in shapes]
    if not fit(*(turned if transposed else shapes)):
        expected = "(E, in, 2 F), (E, F, out)" if transposed else "(E, 2 F, in), (E, out, F)"
        fits_else = fit(*(shapes if transposed else turned))
        hint = f"; with transposed={not transposed} they would fit" if fits_else else ""
        raise ValueError(f"gate_up, down: got shapes {shapes[0]}, {shapes[1]}, expected {expected}{hint}")


def as_used(gate_up: torch.Tensor, down: torch.Tensor, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights as `cutegemm.moe` takes them."""
    return (gate_up.mT, down.mT) if transposed else (gate_up, down)


def shown(mixture: Any, gate_up: torch.Tensor, down: torch.Tensor) -> str:
    """What a `MoE` or `Fp8MoE` with these weights, as `cutegemm.moe` takes them, has in its repr."""
    count, rows, hidden = down.shape
    text = f"in_features={gate_up.shape[-1]}, hidden_features={hidden}, num_experts={count}, out_features={rows}"
    biased = mixture.gate_up_proj_bias is not None or mixture.down_proj_bias is not None
    has = {"bias": biased, "interleaved": mixture.interleaved, "transposed": mixture.transposed}
    return ", ".join([text, f"activation={mixture.activation!r}", *(f"{name}=True" for name in has if has[name])])


def choose(router: torch.nn.Module | None, input: Any, experts: Any, weights: Any) -> tuple[Any, Any]:
    """The experts and weights of a call: those given to it, or what the router says of the input.

    Raises ValueError where they are given apart, or neither is and there is no router; TypeError where the router
    returns something else.
    """
    if experts is None and weights is None and router is not None:
        found = router(input)
        if not isinstance(found, tuple | list) or len(found) != 2:
            what = f"{len(found)} values" if isinstance(found, tuple | list) else type(found).__name__
            raise TypeError(f"router: it returned {what}, expected (experts, weights)")
        experts, weights = found
    if experts is None or weights is None:
        given = "neither, and this module has no router" if experts is weights else "one of them"
        raise ValueError(f"experts, weights: got {given}; pass both, or make the module with top_k")
    return experts, weights
