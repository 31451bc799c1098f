"""`Fp8MoE`: the experts of a mixture, whose weights are quantized once and whose tokens are quantized on the way.

    values, scales = quantize(x)                                     each token once, however many experts it has
    H = r * act(X[rows] G_e^T) * (X[rows] U_e^T)                     groups of gathered rows, which bring their scales
    values, scales = quantize(H)
    Y[places] = H W_e^T                                              scattered to slots; a token's slots are added up

Sorting, gating and weighting are those of `moe`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from cutegemm import replacing
from cutegemm.grouped import grouped_gemm
from cutegemm.moe import by_tokens, check_chosen, check_types, programs_of, routed
from cutegemm.problem import request
from cutegemm.problem.grouped_request import MOST_GROUPS, Sizes
from cutegemm.problem.quantization import ACCEPTED, ACCEPTED_INPUTS, BLOCK, FORMATS, INPUTS
from cutegemm.pytorch import autocast, grouped_scaled
from cutegemm.pytorch.grouped_autograd import PRODUCT
from cutegemm.pytorch.mlp import check_activation
from cutegemm.pytorch.program_operator import program_of
from cutegemm.quantize import quantize
from cutegemm.quantized_linear import Settings, keeping, padded, quantized
from cutegemm.router import TopKRouter, choose

NAMES = ("gate_up_proj", "down_proj")
SCALE_ENDINGS = ("_scale", "_scale_inv")
"""Of the names of scales in a state, behind those of the weights: ours, and those of Hugging Face's fp8 experts. Both
are factors that the values are multiplied by."""


class Fp8MoE(torch.nn.Module):
    """A mixture of gated MLPs with 8-bit operands: `MoE` with weights that are quantized once, for inference.

    Buffers, which are what state_dict has: `gate_up_proj` (num_experts, 2 * hidden_features, in_features), the rows of
    gate first, and `down_proj` (num_experts, out_features, hidden_features), fp8 or int8; `gate_up_proj_scale` and
    `down_proj_scale`, fp32, each () or (num_experts, rows, 1) or (num_experts, ceil(rows / 128), ceil(columns / 128)).
    `.to(dtype)`, `.half()` and the like leave them in their types. With `top_k`, also `router.weight`.

    `load_state_dict` takes such a state, that of a `MoE`, whose weights it quantizes, and quantized weights whose
    scales are named `gate_up_proj_scale_inv` and `down_proj_scale_inv`, as Hugging Face names them.

    Args:
        in_features, hidden_features, num_experts, top_k, out_features, device, router, activation: as in `MoE`.
        dtype, scaling, accumulate, backend: as in `Fp8Linear`, for both products.

    Gradients are refused.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted.
    """

    gate_up_proj: torch.Tensor
    gate_up_proj_scale: torch.Tensor
    down_proj: torch.Tensor
    down_proj_scale: torch.Tensor

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        top_k: int | None = None,
        out_features: int | None = None,
        device: Any = None,
        dtype: Any = "fp8",
        *,
        router: torch.nn.Module | None = None,
        activation: str = "silu",
        scaling: str | tuple[str, str] = "rows",
        accumulate: str | None = None,
        backend: str = "auto",
    ) -> None:
        settings = Settings.of(dtype, scaling, None, accumulate, backend)
        check_activation(activation)
        super().__init__()
        if top_k is not None:
            if router is not None:
                raise ValueError(f"top_k: got {top_k} beside a router, which says it; leave one away")
            router = TopKRouter(in_features, num_experts, top_k, device=device)
        num_experts = replacing.as_size("num_experts", num_experts, 1, MOST_GROUPS)
        in_features = replacing.as_size("in_features", in_features)
        hidden_features = replacing.as_size("hidden_features", hidden_features)
        rows = in_features if out_features is None else replacing.as_size("out_features", out_features)
        weights = [
            torch.empty(shape, device=device)
            for shape in ((num_experts, 2 * hidden_features, in_features), (num_experts, rows, hidden_features))
        ]
        for weight in weights:
            replacing.draw(weight)
        self._take([quantized(weight, settings) for weight in weights], router, activation, settings)

    def _take(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], router: Any, activation: str, settings: Settings
    ) -> None:
        if router is not None and not isinstance(router, torch.nn.Module):
            raise TypeError(f"router: got {type(router).__name__}, expected a torch.nn.Module or None")
        for name, (values, scale) in zip(NAMES, pairs, strict=True):
            self.register_buffer(name, values)
            self.register_buffer(f"{name}_scale", scale)
        self.router, self.activation, self.settings = router, activation, settings
        self.register_load_state_dict_pre_hook(_translate)

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self.gate_up_proj.shape[0]

    def forward(
        self, input: torch.Tensor, experts: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input: (..., in_features), fp16, bf16 or fp32; experts and weights: (..., top_k), instead of the router's, as
        `cutegemm.moe` takes them. Returns (..., out_features) of the input's dtype; under autocast of autocast's.

        Raises as `MoE.forward`, and RuntimeError for an input, or weights, that require grad under autograd.
        """
        replacing.check_input(input, self.gate_up_proj)
        chosen, shares = choose(self.router, input, experts, weights)
        check_types({"input": input, "experts": chosen, "weights": shares})
        if input.dim() == 0 or input.shape[-1] != self.gate_up_proj.shape[-1]:
            raise ValueError(f"input: got shape {tuple(input.shape)}, expected (..., {self.gate_up_proj.shape[-1]})")
        check_chosen("input", input, chosen, shares)
        for name, each in (("input", input), ("weights", shares)):
            if each.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name}: it requires grad, and Fp8MoE passes no gradient on (a straight-through estimate belongs "
                    "to the trainer); run the model under torch.no_grad() or torch.inference_mode()"
                )
        kind = input.device.type
        by_autocast = autocast.is_on(kind)
        if by_autocast:
            input = input.to(torch.get_autocast_dtype(kind))
        # Autocast has had its say: it would cast values of 8 bits as it casts other numbers.
        without = torch.autocast(kind, enabled=False) if by_autocast else contextlib.nullcontext()
        with torch.no_grad(), without:
            return self._mixture(input, chosen, shares)

    def _mixture(self, input: Any, experts: Any, weights: Any) -> torch.Tensor:
        tokens, chosen, shares = by_tokens(input, experts, weights)
        route, top_k = routed(chosen, shares, self.num_experts, self.settings.backend), chosen.shape[1]
        text = programs_of(self.activation, weights.dtype, input.dtype, (False, False))[0]
        hidden = self._product("gate_up_proj", tokens, text, (route.weights,), Sizes(route.ends, rows=route.rows))
        slots = self._product("down_proj", hidden, PRODUCT, (), Sizes(route.ends, places=route.places))
        if top_k > 1:
            slots = slots.view(slots.shape[0] // top_k, top_k, slots.shape[1]).sum(1)
        return slots.view(*input.shape[:-1], slots.shape[1])

    def _product(self, name: str, x: Any, text: str, operands: Any, sizes: Sizes) -> Any:
        """x, quantized, times a weight of each group, by the program of that text."""
        settings = self.settings
        values, scale = quantize(x, settings.dtype, settings.scaling[0])
        weight, of_weight = getattr(self, name), getattr(self, f"{name}_scale")
        of_weight = of_weight.mT if of_weight.dim() else of_weight
        options: dict[str, Any] = {"precision": settings.how.precision, "backend": settings.backend, "config": None}
        if torch.compiler.is_dynamo_compiling():
            given = grouped_scaled.Scaling(scale, of_weight, settings.scaling)
            return grouped_scaled.by_operator(values, weight.mT, sizes, text, operands, given, None, x.dtype, options)
        return grouped_gemm(
            values, weight.mT, sizes.offsets, rows=sizes.rows, places=sizes.places, epilogue=program_of(text),
            operands=operands, out_dtype=x.dtype, scale_a=scale, scale_b=of_weight, scaling=settings.scaling, **options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        (count, rows, hidden), settings = self.down_proj.shape, self.settings
        scaling = settings.scaling[0] if settings.scaling[0] == settings.scaling[1] else settings.scaling
        text = f"in_features={self.gate_up_proj.shape[-1]}, hidden_features={hidden}, num_experts={count}"
        text += f", out_features={rows}, activation={self.activation!r}"
        return f"{text}, dtype={FORMATS[settings.dtype].name}, scaling={scaling!r}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8MoE:
        """Moves as torch.nn.Module does, but leaves the values and scales in their types."""
        own = (self.gate_up_proj, self.gate_up_proj_scale, self.down_proj, self.down_proj_scale)
        super()._apply(keeping(fn, own), recurse)
        return self

    @classmethod
    def from_weights(
        cls,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        dtype: Any = "fp8",
        *,
        router: torch.nn.Module | None = None,
        activation: str = "silu",
        scaling: str | tuple[str, str] = "rows",
        accumulate: str | None = None,
        backend: str = "auto",
    ) -> Fp8MoE:
        """The mixture with the quantized weights gate_up, (E, 2 F, in), and down, (E, out, F), of fp16, bf16 or fp32.

        On the meta device nothing is quantized: load_state_dict(..., assign=True) gives the numbers. Raises TypeError
        or ValueError for weights of other shapes or dtypes, and as the constructor.
        """
        for name, weight in (("gate_up", gate_up), ("down", down)):
            if not isinstance(weight, torch.Tensor) or weight.dtype not in INPUTS:
                got = weight.dtype if isinstance(weight, torch.Tensor) else type(weight).__name__
                raise TypeError(f"{name}: got {got}, accepted are tensors of {ACCEPTED_INPUTS}")
        _check_shapes(gate_up, down)
        settings = Settings.of(dtype, scaling, None, accumulate, backend)
        with torch.no_grad():
            return cls._made([quantized(weight, settings) for weight in (gate_up, down)], router, activation, settings)

    @classmethod
    def from_quantized(
        cls,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        *,
        router: torch.nn.Module | None = None,
        activation: str = "silu",
        scaling: str | None = None,
        accumulate: str | None = None,
        backend: str = "auto",
    ) -> Fp8MoE:
        """The mixture with weights that are quantized already: gate_up (E, 2 F, in), down (E, out, F), fp8 or int8.

        Args:
            gate_up_scale, down_scale: what the weights are multiplied by, any floating dtype: one element; one for each
                expert, E elements; (E, rows) or (E, rows, 1); (E, ceil(rows / 128), ceil(columns / 128)). Both alike.
            scaling: of x and of the hidden layer; by default as the weights': "tensor", "rows" or "blocks".

        Raises TypeError or ValueError naming the argument.
        """
        pairs = [
            (weight, _checked(name, weight, scale))
            for name, weight, scale in (("gate_up", gate_up, gate_up_scale), ("down", down, down_scale))
        ]
        _check_shapes(gate_up, down)
        kinds = [_scaling_of(scale, weight) for weight, scale in pairs]
        if gate_up.dtype != down.dtype or kinds[0] != kinds[1]:
            raise ValueError(
                f"down: got {down.dtype} with scales of {kinds[1]}, expected those of gate_up, {gate_up.dtype} with "
                f"scales of {kinds[0]}"
            )
        settings = Settings.of(gate_up.dtype, (scaling or kinds[0], kinds[0]), None, accumulate, backend)
        return cls._made([(padded(weight.detach()), scale) for weight, scale in pairs], router, activation, settings)

    @classmethod
    def _made(
        cls, pairs: list[tuple[torch.Tensor, torch.Tensor]], router: Any, activation: str, settings: Settings
    ) -> Fp8MoE:
        check_activation(activation)
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._take(pairs, router, activation, settings)
        return made


def _check_shapes(gate_up: torch.Tensor, down: torch.Tensor) -> None:
    """Raises ValueError unless these are the weights of one mixture."""
    shapes = tuple(gate_up.shape), tuple(down.shape)
    fit = len(shapes[0]) == len(shapes[1]) == 3 and shapes[0][0] == shapes[1][0] and shapes[0][1] == 2 * shapes[1][2]
    if not fit:
        raise ValueError(f"gate_up, down: got shapes {shapes[0]}, {shapes[1]}, expected (E, 2 F, in), (E, out, F)")
    if not 1 <= shapes[0][0] <= MOST_GROUPS:
        raise ValueError(f"gate_up: got {shapes[0][0]} experts, accepted are 1 to {MOST_GROUPS}")


def _checked(name: str, weight: Any, scale: Any) -> torch.Tensor:
    """The scales of a quantized weight as the module keeps them: of one matrix, of rows, or of blocks."""
    if not isinstance(weight, torch.Tensor) or weight.dtype not in FORMATS or weight.dim() != 3:
        got = f"{weight.dtype} of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight)
        raise TypeError(f"{name}: got {got}, accepted are three dimensions of {ACCEPTED}")
    if not isinstance(scale, torch.Tensor) or not scale.is_floating_point():
        raise TypeError(f"{name}_scale: got {request.shown(scale)}, expected a tensor of a floating dtype")
    scale = scale.detach().to(device=weight.device, dtype=torch.float32)
    count, rows, columns = weight.shape
    blocks = (count, -(-rows // BLOCK), -(-columns // BLOCK))
    if scale.numel() == 1:
        return scale.reshape(())
    if tuple(scale.shape) == blocks and blocks[1:] != (1, 1):
        return scale
    if tuple(scale.shape) in ((count, rows), (count, rows, 1)):
        return scale.reshape(count, rows, 1)
    if tuple(scale.shape) in ((count,), (count, 1), (count, 1, 1)):
        return scale.reshape(count, 1, 1).expand(count, rows, 1).contiguous()
    raise ValueError(
        f"{name}_scale: got shape {tuple(scale.shape)} for a weight of shape {tuple(weight.shape)}, accepted are 1 or "
        f"{count} elements, {(count, rows)}, {(count, rows, 1)} and {blocks}, for blocks of {BLOCK} x {BLOCK}"
    )


def _scaling_of(scale: torch.Tensor, weight: torch.Tensor) -> str:
    """Which scales those of `_checked` are."""
    if scale.dim() == 0:
        return "tensor"
    return "rows" if tuple(scale.shape) == (*weight.shape[:2], 1) else "blocks"


def _translate(module: Fp8MoE, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Makes the entries of an `Fp8MoE` of those of a `MoE` and of Hugging Face's, and room for other scales."""
    for name in NAMES:
        own: torch.Tensor = getattr(module, name)
        keys = [f"{prefix}{name}{ending}" for ending in SCALE_ENDINGS if f"{prefix}{name}{ending}" in state]
        weight, scales = state.get(f"{prefix}{name}"), [state.pop(key) for key in keys]
        if not isinstance(weight, torch.Tensor):
            if scales:  # torch then says what is wrong with the weight
                state[f"{prefix}{name}_scale"] = scales[0]
            continue
        weight = weight.flatten(1, 2) if weight.dim() == 4 else weight
        if not scales and weight.dtype not in FORMATS and weight.is_floating_point():
            home = weight if own.is_meta else weight.to(own.device)
            weight, scale = quantized(home, module.settings)
        elif scales and weight.dtype in FORMATS and weight.dim() == 3:
            weight, scale = padded(weight), _checked(name, weight, scales[0])
        else:  # torch says what is missing
            state |= {f"{prefix}{name}_scale": each for each in scales}
            continue
        state[f"{prefix}{name}"], state[f"{prefix}{name}_scale"] = weight, scale
        # Torch refuses a weight of another shape, and then the module must be what it was.
        if weight.shape == own.shape:
            _make_room(module, name, weight, scale)


def _make_room(module: Fp8MoE, name: str, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """For a weight of another dtype, and scales of another kind, than the module has."""
    own, of_own = getattr(module, name), getattr(module, f"{name}_scale")
    of_input, *others = module.settings[1:]
    module.settings = Settings.of(weight.dtype, (of_input[0], _scaling_of(scale, weight)), *others)
    if weight.dtype != own.dtype:
        setattr(module, name, torch.empty_like(own, dtype=weight.dtype))
    if scale.shape != of_own.shape:
        setattr(module, f"{name}_scale", torch.empty(scale.shape, dtype=torch.float32, device=of_own.device))
