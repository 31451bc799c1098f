"""The experts of a mixture, forward and backward: `moe`.

With e the experts' numbers sorted, row i of the sorted order being slot places[i] = token * top_k + choice:

    H = r * act(X[rows] G_e^T) * (X[rows] U_e^T)      groups of gathered rows; r is the routing weight of each row
    Y = H W_e^T                                       groups of rows; the rows of a token's slots are added up

The weighting stands in the epilogue where H is made: a row's weight passes through the second product, H is what dW
needs, and the derivative with respect to r needs no product of its own. Backward, with dY[i] = dO[rows[i]]:

    dH = dY W_e is never stored: the epilogue makes [dgate, dup], next to each other in one buffer, and the sums of
    dH * H / r over rows, which are dr. Then dX = [dgate, dup] [G; U], added up like Y, and the groups of K d[G; U] =
    [dgate, dup]^T X[rows] and dW = dY^T H.

Nothing waits for a size, and nothing is added up in an order that may change.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from cutegemm import gating, native
from cutegemm.grouped import by_operator, grouped_gemm
from cutegemm.moe_arguments import check
from cutegemm.problem import packing
from cutegemm.problem.dtypes import dtype_name
from cutegemm.problem.grouped_request import Sizes
from cutegemm.problem.program.derive import Source
from cutegemm.problem.program.graph import Input, Program
from cutegemm.problem.program.known import lookup
from cutegemm.problem.work import ROWS
from cutegemm.pytorch import autocast, autograd, mlp, sharded, sharding_programs
from cutegemm.pytorch.combining import Combine, Spread, combine, spread
from cutegemm.pytorch.dispatch import is_beyond_autograd
from cutegemm.pytorch.grouped_autograd import PRODUCT
from cutegemm.pytorch.program_gradients import ACC, needed, recording
from cutegemm.pytorch.program_operator import program_of
from cutegemm.pytorch.routing_operator import route as route_operator
from cutegemm.run import fused, grouped, routing
from cutegemm.run.routing import Routing

WEIGHT = Source("operand", 0)


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
            outside of 0 to E - 1 counts for nothing: its weight is taken as 0. Where the row of x is not finite, the
            token's result is NaN all the same, and so are gradients of an expert's weights.
        weights: (..., top_k): the weight of each expert's result; fp32, fp16 or bf16, whatever x is.
        w_gate_up: (E, 2 F, H), the rows of gate first, as Hugging Face's models stack them, or (E, 2, F, H); dtype of
            x, 1 to 1024 experts. Any strides: of weights (E, H, 2 F) pass `w_gate_up.mT`.
        w_down: (E, H_out, F), dtype of x, any strides.
        b_gate_up, b_down: (E, 2 F), in the order of w_gate_up's rows, and (E, H_out): biases of the two products; fp32,
            fp16 or bf16.
        activation: "silu" (SwiGLU), "gelu", "gelu_tanh" or "relu"; or a function of gate and up that returns the hidden
            layer, written as an epilogue is (`cutegemm.ops`). That of gpt-oss is
            `lambda gate, up: ops.clamped_swiglu(gate, up, limit=7.0, alpha=1.702, offset=1.0)`.
        interleaved: whether rows of gate and of up take turns in w_gate_up, gate first, as gpt-oss has them.
        precision: None or "ieee". backend: as of `grouped_gemm`.

    Returns:
        (..., H_out), of x's dtype (under autocast, of autocast's). Products are accumulated in fp32 and rounded to that
        dtype; a token's rounded results are added in fp32 and rounded once more.

    Gradients of x, weights, w_gate_up, w_down and biases are recorded, to any order, and deterministic. torch.compile
    takes the call into its graph, and other numbers of tokens compile nothing new with dynamic shapes. Autocast casts
    x, w_gate_up and w_down. Forward mode and torch.vmap are not supported. With biases, a function for `activation`, or
    `interleaved`, a call is made of two `grouped_gemm`s, in Python, and DTensors are refused.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted. EpilogueError,
            a TypeError, for a function that can be no epilogue.
        UnsupportedError, GemmError, NotImplementedError: as `grouped_gemm`.
    """
    form = gating.Form(activation, interleaved)
    if not (form.is_plain and b_gate_up is None and b_down is None):
        biases = b_gate_up, b_down
        return _by_calls(x, experts, weights, w_gate_up, w_down, *biases, form, precision, backend)
    assert isinstance(activation, str)
    tell = False
    if not torch.compiler.is_dynamo_compiling() and (serves := native.mixture) is not None:
        found = serves(x, experts, weights, w_gate_up, w_down, activation, precision, backend)
        if found is not None and not (tell := found is NotImplemented):
            return found
    check(x, experts, weights, w_gate_up, w_down, activation, precision, backend)
    kind = x.device.type
    if autocast.is_on(kind):
        precision, (x, w_gate_up, w_down) = _cast(precision, x, w_gate_up, w_down)
        with torch.autocast(kind, enabled=False):
            return moe(
                x, experts, weights, w_gate_up, w_down, activation=activation, precision=precision, backend=backend
            )
    if sharded.is_distributed(x, experts, weights, w_gate_up, w_down):
        run = _outside_of_graphs if torch.compiler.is_dynamo_compiling() else _of_parts
        return run(x, experts, weights, w_gate_up, w_down, Settings(activation, precision, backend))
    settings, groups = Settings(activation, precision, backend), w_gate_up.shape[0]
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in (x, weights, w_gate_up, w_down))
    beyond = _is_beyond(x, experts, weights, w_gate_up, w_down)
    if not (beyond or recorded):
        if torch.compiler.is_dynamo_compiling():
            made: torch.Tensor = torch.ops.cutegemm.moe(x, experts, weights, w_gate_up, w_down, *settings)
            return made
        return unrecorded(x, experts, weights, w_gate_up, w_down, settings, tell)
    tokens, chosen, scales = by_tokens(x, experts, weights)
    scales = scales.masked_fill(chosen != chosen.clamp(0, groups - 1), 0)
    operands = tokens, _stacked(w_gate_up), w_down
    if beyond:
        result = settings.composed(routing.by_torch(chosen, None, groups), *operands, scales)
    else:
        result = Mixture.apply(*operands, scales, *routed(chosen, scales.detach(), groups, backend), *settings)
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


def _by_calls(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    b_gate_up: torch.Tensor | None, b_down: torch.Tensor | None, form: gating.Form, precision: str | None, backend: str,
) -> torch.Tensor:  # fmt: skip
    """`moe` of any form, by calls that know every order of derivative."""
    check(x, experts, weights, w_gate_up, w_down, "silu", precision, backend)
    gating.check(form, w_gate_up, w_down, b_gate_up, b_down)
    biases = [each for each in (b_gate_up, b_down) if each is not None]
    if sharded.is_distributed(x, experts, weights, w_gate_up, w_down, *biases):
        raise ValueError("moe: with biases, interleaved=True or a function for activation it takes no DTensors")
    kind = x.device.type
    if autocast.is_on(kind):
        precision, (x, w_gate_up, w_down) = _cast(precision, x, w_gate_up, w_down)
        with torch.autocast(kind, enabled=False):
            return _by_calls(x, experts, weights, w_gate_up, w_down, b_gate_up, b_down, form, precision, backend)
    settings, groups, top_k = Settings("silu", precision, backend), w_gate_up.shape[0], experts.shape[-1]
    tokens, chosen, scales = by_tokens(x, experts, weights)
    route = routed(chosen, scales.detach(), groups, backend)
    weight = route.weights
    if weight is None or torch.is_grad_enabled():  # those have no gradient
        weight = _of_rows(scales.masked_fill(chosen != chosen.clamp(0, groups - 1), 0), route)
    given = (x, weights, w_gate_up, w_down, *biases)
    # A product's own gradient of gathered rows sorts them, and reads them anew for that of the weights.
    apart = torch.is_grad_enabled() and any(each.requires_grad for each in given) and not _is_beyond(*given, experts)
    places = route.rows, route.row_of, top_k, backend
    if apart:
        tokens, route = Spread.apply(tokens, *places), route._replace(rows=None)
    of_gate_up = [] if b_gate_up is None else [each[:, None] for each in form.divided(b_gate_up)]
    epilogue = form.first_epilogue(b_gate_up is not None)
    h = settings.hidden(tokens, _stacked(w_gate_up), weight, route, epilogue, of_gate_up)
    text, operands = (PRODUCT, ()) if b_down is None else (gating.second_epilogue, (weight, b_down[:, None]))
    rows = settings.product(h, w_down.mT, route.ends, text=text, operands=operands)
    result = Combine.apply(rows, *places) if apart else combine(rows, route.row_of, top_k, backend)
    return result.view(*x.shape[:-1], w_down.shape[1])


def unrecorded(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    settings: Settings, tell: bool,
) -> torch.Tensor:  # fmt: skip
    """`moe` of plain tensors, of which no gradient is recorded.

    tell: whether to tell the C++ part how it is launched.
    """
    tokens, chosen, scales = by_tokens(x, experts, weights)
    operands = tokens, _stacked(w_gate_up), w_down
    route = routing.route(chosen, scales.detach(), w_gate_up.shape[0], settings.backend)
    result: torch.Tensor = settings.composed(route, *operands, scales)
    if tell:
        with fused.planning():
            how = settings.launches(chosen, scales, *operands)
            native.install_mixture((x, experts, weights, w_gate_up, w_down, *settings), how)
    return result.view(*x.shape[:-1], w_down.shape[1])


def by_tokens(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with their leading dimensions merged."""
    # Not shape.numel(), which makes a symbolic size a number; nor -1, which an empty tensor does not say.
    return [each.reshape(math.prod(each.shape[:-1]), each.shape[-1]) for each in tensors]


def _stacked(w_gate_up: torch.Tensor) -> torch.Tensor:
    """(E, 2 F, H) of that or of (E, 2, F, H)."""
    return w_gate_up.flatten(1, 2) if w_gate_up.dim() == 4 else w_gate_up


def _of_parts(x: Any, experts: Any, weights: Any, w_gate_up: Any, w_down: Any, settings: Settings) -> Any:
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
        return [moe(*parts, **settings._asdict())]

    shape = (*x.shape[:-1], w_down.shape[1])
    return sharded.compute(mesh, list(tensors.values()), rules, call, [shape])[0]


def _outside_of_graphs(*given: Any) -> Any:
    """`_of_parts` where torch.compile breaks its graph."""
    return torch.compiler.disable(_of_parts)(*given)


# What torch.compiler.disable would write; to call it here would import dynamo with the package, which takes a second.
_outside_of_graphs._torchdynamo_disable = True  # type: ignore[attr-defined]


def routed(experts: torch.Tensor, weights: torch.Tensor, count: int, backend: str) -> Routing:
    """Sorts the slots of (tokens, top_k) numbers of experts; the order of those of one expert stays."""
    if torch.compiler.is_dynamo_compiling() or is_beyond_autograd(experts, weights):
        return Routing(*route_operator(experts, weights, count, backend))
    return routing.route(experts, weights, count, backend)


class Settings(NamedTuple):
    """The arguments of one call besides its tensors."""

    activation: str
    precision: str | None
    backend: str

    def product(
        self, a: Any, b: Any, ends: Any, *, text: Any = PRODUCT, operands: Any = (), rows: Any = None, out: Any = None
    ) -> Any:
        """`grouped_gemm` with these settings and the program of this text, or an epilogue."""
        options: dict[str, Any] = {"precision": self.precision, "backend": self.backend}
        if not isinstance(text, str):
            return grouped_gemm(a, b, ends, rows=rows, epilogue=text, operands=operands, out=out, **options)
        if torch.compiler.is_dynamo_compiling():
            sizes = Sizes(ends, None, rows)
            return by_operator(a, b, sizes, text, operands, out, None, {**options, "config": None}, None)
        return grouped_gemm(a, b, ends, rows=rows, epilogue=program_of(text), operands=operands, out=out, **options)

    def hidden(self, x: Any, gate_up: Any, weight: Any, route: Routing, text: Any, biases: Any = ()) -> Any:
        """H, (tokens * top_k, F) in sorted order, and what else the program gives; weight: of each row, (rows, 1)."""
        rows = route.rows
        symbolic = torch.compiler.is_dynamo_compiling() or is_beyond_autograd(x, gate_up)
        if rows is not None and not symbolic and _spreads_first(x, len(rows), gate_up):
            x, rows = spread(x, rows, route.row_of, len(rows) // x.shape[0], self.backend), None
        return self.product(x, gate_up.mT, route.ends, text=text, operands=(weight, *biases), rows=rows)

    def combined(self, rows: Any, b: Any, route: Routing, top_k: int) -> Any:
        """rows @ b in groups, and each token's rows added up: (tokens, columns of b)."""
        return combine(self.product(rows, b, route.ends), route.row_of, top_k, self.backend)

    def launches(self, experts: Any, weights: Any, x: Any, gate_up: Any, down: Any) -> tuple[Any, ...] | None:
        """How the C++ part launches the kernels of a call that was computed (`native.install_mixture`); None where
        torch computes a part of it. To be called while no plan is made or forgotten (`fused.planning`).
        """
        from cutegemm.run import combining, routing_kernels, steps

        slots, count = experts.numel(), gate_up.shape[0]
        sorting = routing_kernels.plan_of(experts, weights, count) if self.backend in ("auto", "cute") else None
        if sorting is None:
            return None
        sort = steps.launchers(routing_kernels.steps_of(sorting, experts, weights, count), x.device)

        def like(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=kind, device=x.device)

        ends, rows = like(torch.int32, count), like(torch.int32, slots)
        text = programs_of(self.activation, weights.dtype, x.dtype, (False, False))[0]
        by = self.precision, self.backend
        spreading: tuple[Any, ...] | None = ()
        sizes, arrays = Sizes(ends, None, rows, None), [(2, 0), (3, 0)]
        if _spreads_first(x, slots, gate_up):
            step = combining.spread_step_of(x, experts.shape[1])
            spreading = None if step is None else steps.launchers([step], x.device)
            x, sizes, arrays = like(x.dtype, slots, x.shape[1]), Sizes(ends), [(2, 0)]
        hidden = grouped.launch_of(
            x, gate_up.mT, sizes, program_of(text), (like(weights.dtype, slots, 1),), *by, arrays, 5
        )
        h = like(x.dtype, slots, down.shape[2])
        result = grouped.launch_of(h, down.mT, Sizes(ends), program_of(PRODUCT), (), *by, ((2, 0),), 5)
        adding = combining.step_of(like(x.dtype, slots, down.shape[1]), experts.shape[1])
        add = None if adding is None else steps.launchers([adding], x.device)
        how = sort, routing_kernels.counts_of(sorting, count), spreading, hidden, result, add
        return None if None in how else how

    def composed(self, route: Routing, x: Any, gate_up: Any, down: Any, weights: Any) -> Any:
        """The mixture by calls that know every order of derivative."""
        text = programs_of(self.activation, weights.dtype, x.dtype, (False, False))[0]
        weight = _of_rows(weights, route) if route.weights is None else route.weights
        rows = self.hidden(x, gate_up, weight, route, text)
        return self.combined(rows, down.mT, route, weights.shape[1])


def _spreads_first(x: Any, slots: int, gate_up: Any) -> bool:
    """Whether the tokens' rows are copied to their places in front of the first product."""
    groups, columns, _ = gate_up.shape
    return packing.gathers_first(x.shape[0], slots, groups, columns, x.element_size())


def _of_rows(weights: torch.Tensor, route: Routing) -> torch.Tensor:
    """(rows, 1) of (tokens, top_k) weights, in sorted order."""
    return weights.reshape(-1, 1).index_select(0, route.places)


def programs_of(
    activation: str, weight: torch.dtype, dtype: torch.dtype, wants: tuple[bool, bool]
) -> tuple[str, str, tuple[Source, ...]]:
    """The texts of two programs, and what the second takes.

    The first makes H. Where gradients of the accumulators, or of the weights, are wanted it also gives gate and up, in
    `dtype`. The second makes them of the accumulators of dH: dgate and dup, and those of the weights, one a row; where
    the latter are wanted alone, elementwise, since a first result is no reduction.
    """
    return _texts(activation, weight, dtype, wants)


programs_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # dynamo need not look at how programs are made


@lru_cache(maxsize=64)
def _texts(
    activation: str, weight: torch.dtype, dtype: torch.dtype, wants: tuple[bool, bool]
) -> tuple[str, str, tuple[Source, ...]]:
    gated = mlp.GATES[activation]
    inputs = (Input("x0", str(dtype_name(weight)), m=True, n=False, batched=False),)
    program = lookup(lambda acc, weight: gated(acc) * weight, inputs)
    if not any(wants):
        return program.text, "", ()
    needs = needed(program, (0,), wants[0], (0,) if wants[1] else ())
    assert needs.backward is not None
    name = str(dtype_name(dtype))
    forward, saved = recording(program, needs, name)
    derived = needs.backward.accumulated(Source("upstream", 0))
    assert saved == ACC
    assert derived.gives == (*(ACC if wants[0] else ()), *((WEIGHT,) if wants[1] else ()))
    stored = tuple(
        each._replace(dtype=name) if source in ACC else each
        for source, each in zip(derived.reads, derived.program.inputs, strict=True)
    )
    *outputs, last = derived.program.outputs
    if wants[1]:  # fp16 may not hold what is added up
        last = last._replace(dtype="fp32", reduce="row_sum" if wants[0] else None)
    return forward.text, Program(stored, derived.program.nodes, (*outputs, last)).text, derived.reads


class Mixture(torch.autograd.Function):
    """apply(x, gate_up, down, weights, *routing, *settings)."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, gate_up: Any, down: Any, weights: Any, ends: Any, places: Any, rows: Any, weight: Any,
        row_of: Any, activation: str, precision: str | None, backend: str,
    ) -> torch.Tensor:  # fmt: skip
        route, settings = Routing(ends, places, rows, weight, row_of), Settings(activation, precision, backend)
        needs = ctx.needs_input_grad
        ctx.settings, ctx.wants = settings, (needs[0] or needs[1], needs[3])
        text = programs_of(activation, weights.dtype, x.dtype, ctx.wants)[0]
        results = settings.hidden(x, gate_up, weight, route, text)
        h, gate, up = results if any(ctx.wants) else (results, None, None)
        ctx.save_for_backward(x, gate_up, down, weights, *route, h if needs[2] else None, gate, up)
        return settings.combined(h, down.mT, route, weights.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, gate_up, down, weights, ends, places, rows, weight, row_of, h, gate, up = ctx.saved_tensors
        settings: Settings = ctx.settings
        # Without the sorted weights, which have no gradient.
        route, needs, nothing = Routing(ends, places, rows, None, row_of), ctx.needs_input_grad, (None,) * 8
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
            composed = partial(settings.composed, route)
            return *autograd.recorded_gradients(composed, (x, gate_up, down, weights), needs[:4], grad), *nothing
        dx = dgate_up = ddown = dweights = None
        at_places = partial(spread, token_of=rows, row_of=row_of, top_k=weights.shape[1], backend=settings.backend)
        dy = at_places(grad)
        if needs[2]:
            ddown = settings.product(dy.mT, h, ends)
        if any(ctx.wants):
            both, dweight = _of_hidden(settings, ctx.wants, dy, down, ends, gate, up, weight)
            if needs[0]:
                dx = settings.combined(both, gate_up, route, weights.shape[1])
            if needs[1]:
                dgate_up = settings.product(both.mT, at_places(x), ends)
            if needs[3]:
                dweights = combine(dweight, row_of, 1, settings.backend).view(weights.shape)
        return dx, dgate_up, ddown, dweights, *nothing


def _of_hidden(
    settings: Settings, wants: tuple[bool, bool], dy: Any, down: Any, ends: Any, gate: Any, up: Any, weight: Any
) -> tuple[Any, Any]:
    """([dgate, dup] in one buffer, (rows, 2 F); the gradient of each row's weight), None for what is not wanted."""
    _, text, reads = programs_of(settings.activation, weight.dtype, gate.dtype, wants)
    count, hidden = gate.shape
    both = gate.new_empty((count, 2 * hidden)) if wants[0] else None
    outs = [] if both is None else [both[:, :hidden], both[:, hidden:]]
    if wants[1]:
        outs.append(gate.new_empty((count, 1 if wants[0] else hidden), dtype=torch.float32))
    values = {ACC[0]: gate, ACC[1]: up, WEIGHT: weight}
    settings.product(dy, down, ends, text=text, operands=[values[each] for each in reads], out=tuple(outs))
    if not wants[1]:
        return both, None
    sums = outs[-1] if wants[0] else outs[-1].sum(1, keepdim=True)
    return both, sums.to(weight.dtype)
