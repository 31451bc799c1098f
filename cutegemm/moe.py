"""The experts of a mixture, forward and backward: `moe`.

With e the experts' numbers sorted, row i of the sorted order being slot places[i] = token * top_k + choice:

    H = r * act(X[rows] G_e^T) * (X[rows] U_e^T)      groups of gathered rows; r is the routing weight of each row
    Y = H W_e^T                                       groups of rows; the rows of a token's slots are added up

The weighting stands in the epilogue where H is made: a row's weight passes through the second product, H is what dW
needs, and the derivative with respect to r needs no product of its own (`mixing_gradients`).

Nothing waits for a size, and nothing is added up in an order that may change.
"""

from __future__ import annotations

from typing import Any

import torch

from cutegemm import gating, native
from cutegemm.mixing import Settings, by_tokens, routed
from cutegemm.mixing_gradients import Mixture, records
from cutegemm.moe_arguments import check
from cutegemm.problem.work import ROWS
from cutegemm.pytorch import autocast, sharded, sharding_programs
from cutegemm.pytorch.dispatch import is_beyond_autograd
from cutegemm.run import fused, routing


def moe(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    activation: str | gating.Function = "silu",
    interleaved: bool = False,
    precision: str | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """A mixture of gated MLPs: each token's sum over its experts e of weight * down_e(act(gate_e(x)) * up_e(x)).

    Tokens are sorted by expert on the device, and nothing is copied to the host: a captured CUDA graph replays with
    other experts. Two products in groups follow. The first gathers the tokens' rows (`grouped_gemm(rows=)`), or takes
    copies of them where it has many columns. Its epilogue is the gating times the weight. The rows of the second are
    added up for each token.

    Args:
        x: (..., H), fp16, bf16 or fp32; any number of tokens, also none.
        experts: (..., top_k) int64 or int32: the experts of each token, with the leading dimensions of x. An entry
            outside of 0 to E - 1 counts as the nearest expert, with a weight of 0. Where the row of x, or that expert,
            is not finite, the token's result is NaN all the same, and so are gradients of the expert's weights.
        weights: (..., top_k): the weight of each expert's result; fp32, fp16 or bf16, whatever x is.
        w_gate_up: (E, 2 F, H), the rows of gate first, as Hugging Face's models stack them, or (E, 2, F, H); dtype of
            x, 1 to 1024 experts. Any strides: of weights (E, H, 2 F) pass `w_gate_up.mT`.
        w_down: (E, H_out, F), dtype of x. Any strides: of weights (E, F, H_out) pass `w_down.mT`. No shape tells which
            way square ones lie.
        b_gate_up, b_down: (E, 2 F), in the order of w_gate_up's rows, and (E, H_out): biases of the two products; fp32,
            fp16 or bf16.
        activation: "silu" (SwiGLU), "gelu", "gelu_tanh" or "relu"; or a function of gate and up that returns the hidden
            layer, written as an epilogue is (`cutegemm.ops`). That of gpt-oss is
            `cutegemm.gating.ClampedSwiglu(limit=7.0, alpha=1.702, offset=1.0)`.
        interleaved: whether rows of gate and of up take turns in w_gate_up, gate first, as gpt-oss has them. No shape
            tells.
        precision: None or "ieee". backend: as of `grouped_gemm`.

    Returns:
        (..., H_out), of x's dtype (under autocast, of autocast's). Products are accumulated in fp32 and rounded to that
        dtype; a token's rounded results are added in fp32 and rounded once more.

    Gradients of x, weights, w_gate_up, w_down and biases are recorded, to any order, and deterministic. torch.compile
    takes the call into its graph, and other numbers of tokens compile nothing new with dynamic shapes. Autocast casts
    x, w_gate_up and w_down. Forward mode and torch.vmap are not supported. With biases, a function for `activation`, or
    `interleaved`, DTensors are refused.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted. EpilogueError,
            a TypeError, for a function that can be no epilogue.
        UnsupportedError, GemmError, NotImplementedError: as `grouped_gemm`.
    """
    form, biases = gating.Form(activation, interleaved), (b_gate_up, b_down)
    plain, tell = form.is_plain and b_gate_up is None and b_down is None, False
    if type(interleaved) is not bool:
        gating.check_form(activation, interleaved)
    number: Any = activation
    texts = None
    if not torch.compiler.is_dynamo_compiling() and (serves := native.mixture) is not None:
        if not plain:  # looked up once a call: what a function reads may change in between
            texts = gating.known_texts(form, weights, *biases)
            number = None if texts is None else gating.number_of(texts)
        if number is not None:
            found = serves(x, experts, weights, w_gate_up, w_down, *biases, None, None, number, precision, backend)
            if found is not None and not (tell := found is NotImplemented):
                return found
    check(x, experts, weights, w_gate_up, w_down, activation if plain else "silu", precision, backend)
    given = (x, weights, w_gate_up, w_down)
    if not plain:
        gating.check(form, w_gate_up, w_down, *biases)
        given += tuple(each for each in biases if each is not None)
    kind = x.device.type
    if autocast.is_on(kind):
        precision, (x, w_gate_up, w_down) = _cast(precision, x, w_gate_up, w_down)
        with torch.autocast(kind, enabled=False):
            return moe(
                x, experts, weights, w_gate_up, w_down, b_gate_up=b_gate_up, b_down=b_down, activation=activation,
                interleaved=interleaved, precision=precision, backend=backend,
            )  # fmt: skip
    if sharded.is_distributed(experts, *given):
        if not plain:
            raise ValueError("moe: with biases, interleaved=True or a function for activation it takes no DTensors")
        run = _outside_of_graphs if torch.compiler.is_dynamo_compiling() else _of_parts
        return run(x, experts, weights, w_gate_up, w_down, str(activation), precision, backend)
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in given)
    beyond = _is_beyond(experts, *given)
    settings = Settings(*(texts or gating.texts(form, weights, *biases)), interleaved, precision, backend)
    if not (beyond or recorded):
        if not torch.compiler.is_dynamo_compiling():
            told = (number, precision, backend) if tell else None
            return unrecorded(x, experts, weights, w_gate_up, w_down, *biases, settings, told)
        what = (activation, None) if plain else ("silu", settings.text)
        made: torch.Tensor = torch.ops.cutegemm.moe(
            x, experts, weights, w_gate_up, w_down, what[0], precision, backend, *biases, None, None, what[1]
        )
        return made
    groups, (tokens, chosen, scales) = w_gate_up.shape[0], by_tokens(x, experts, weights)
    if beyond or recorded:  # of one that no expert has the gradient is 0, too
        scales = scales.masked_fill(chosen != chosen.clamp(0, groups - 1), 0)
    operands = tokens, _stacked(w_gate_up), w_down, scales, *biases
    if beyond:
        result = settings.composed(routing.by_torch(chosen, None, groups), *operands)
    elif recorded and records(settings, x):
        result = Mixture.apply(*operands, *routed(chosen, scales.detach(), groups, backend), *settings)
    else:
        route = routed(chosen, scales.detach(), groups, backend)
        result = settings.composed(route._replace(weights=None) if recorded else route, *operands)
    return result.view(*x.shape[:-1], w_down.shape[1])


def _cast(precision: str | None, *tensors: torch.Tensor) -> tuple[str | None, list[torch.Tensor]]:
    """What autocast, which is on, makes of x and weights, and the precision that is left of the one asked for."""
    x = tensors[0]
    dtype = torch.get_autocast_dtype(x.device.type)
    narrowed = x.dtype == torch.float32 and dtype != torch.float32
    return None if narrowed else precision, [each.to(dtype) for each in tensors]


def _is_beyond(*tensors: torch.Tensor) -> bool:
    """Whether some other transform than autograd sees the call."""
    if torch.compiler.is_dynamo_compiling():  # within torch.func nothing says that it requires grad
        return torch._C._are_functorch_transforms_active()
    return is_beyond_autograd(*tensors)


def unrecorded(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    b_gate_up: torch.Tensor | None, b_down: torch.Tensor | None, settings: Settings, told: tuple[Any, ...] | None,
) -> torch.Tensor:  # fmt: skip
    """`moe` of plain tensors, of which no gradient is recorded.

    told: where the C++ part is to be told how the call is launched, its last three arguments as it knows them.
    """
    tokens, chosen, scales = by_tokens(x, experts, weights)
    operands, biases = (tokens, _stacked(w_gate_up), w_down), (b_gate_up, b_down)
    route = routing.route(chosen, scales.detach(), w_gate_up.shape[0], settings.backend)
    result: torch.Tensor = settings.composed(route, *operands, scales, *biases)
    if told is not None:
        with fused.planning():
            how = settings.launches(chosen, scales, *operands, *biases)
            native.tell("mixture", (x, experts, weights, w_gate_up, w_down, *biases, None, None, *told), how)
    return result.view(*x.shape[:-1], w_down.shape[1])


def _stacked(w_gate_up: torch.Tensor) -> torch.Tensor:
    """(E, 2 F, H) of that or of (E, 2, F, H)."""
    return w_gate_up.flatten(1, 2) if w_gate_up.dim() == 4 else w_gate_up


def _of_parts(
    x: Any,
    experts: Any,
    weights: Any,
    w_gate_up: Any,
    w_down: Any,
    activation: str,
    precision: str | None,
    backend: str,
) -> Any:
    """`moe` of DTensors: each rank has a part of the tokens, of the experts' hidden units, or of the result's columns.

    Raises ValueError where the experts themselves are sharded.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    tensors = {"x": x, "experts": experts, "weights": weights, "w_gate_up": w_gate_up, "w_down": w_down}
    mesh = sharded.mesh_of("cutegemm.moe", tensors)
    for name in ("w_gate_up", "w_down"):
        sharding_programs.refuse_sharded_groups(name, tensors[name], ROWS[0])
    ranks, everywhere, columns = mesh.size(), Replicate(), x.dim() - 1
    rules = [sharded.Rule((everywhere,) * 5, (everywhere,))]
    for dim, extent in enumerate(x.shape[:-1]):
        if extent >= ranks:
            rules.append(sharded.Rule((Shard(dim),) * 3 + (everywhere,) * 2, (Shard(dim),)))
    if w_gate_up.dim() == 4 and w_down.shape[2] >= ranks:
        rules.append(sharded.Rule((everywhere,) * 3 + (Shard(2), Shard(2)), (Partial(),)))
    if w_down.shape[1] >= ranks:
        rules.append(sharded.Rule((everywhere,) * 4 + (Shard(1),), (Shard(columns),)))

    def call(parts: list[Any], results: list[Any]) -> list[torch.Tensor]:
        return [moe(*parts, activation=activation, precision=precision, backend=backend)]

    shape = (*x.shape[:-1], w_down.shape[1])
    return sharded.compute(mesh, list(tensors.values()), rules, call, [shape])[0]


def _outside_of_graphs(*given: Any) -> Any:
    """`_of_parts` where torch.compile breaks its graph."""
    return torch.compiler.disable(_of_parts)(*given)


# What torch.compiler.disable would write; to call it here would import dynamo with the package, which takes a second.
_outside_of_graphs._torchdynamo_disable = True  # type: ignore[attr-defined]
