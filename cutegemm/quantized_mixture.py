"""`Fp8MoE`: the experts of a mixture, whose weights are quantized once and whose tokens are quantized on the way.

    values, scales = quantize(x)                each token once, and written to the rows of all its experts
    H = r * act(X G_e^T) * (X U_e^T)            groups of rows, with the scales
    values, scales = quantize(H)                with scales of blocks and many rows by the first product
    Y = H W_e^T                                                      the rows of a token's slots are added up

Sorting, gating and weighting are those of `moe`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cutegemm import gating, native, quantized_mixing, replacing
from cutegemm.moe_arguments import check_chosen, check_types
from cutegemm.problem import request
from cutegemm.problem.grouped_request import MOST_GROUPS
from cutegemm.problem.quantization import ACCEPTED_INPUTS, INPUTS
from cutegemm.pytorch import autocast
from cutegemm.pytorch.dispatch import is_beyond_autograd
from cutegemm.pytorch.sharded import is_distributed
from cutegemm.quantized_linear import Settings, default_dtype, keeping
from cutegemm.quantized_mixing import Computed, Experts
from cutegemm.quantized_mixture_state import NAMES, forms_of, of_both, translate
from cutegemm.quantized_weights import padded, quantized
from cutegemm.router import as_used, check_fit, choose, shown, sized

_OWN = tuple(f"{name}{end}" for end in ("", "_bias", "_scale") for name in NAMES)
"""The tensors of a layer in the order of `Experts`."""


class Fp8MoE(replacing.Translating):
    """A mixture of gated MLPs with 8-bit operands: `MoE` with weights that are quantized once, for inference.

    Buffers, which are what state_dict has: `gate_up_proj` (num_experts, 2 * hidden_features, in_features), the rows of
    gate first or in turn, and `down_proj` (num_experts, out_features, hidden_features), fp8 or int8;
    `gate_up_proj_scale` and `down_proj_scale`, fp32, each (), one for all experts, or (num_experts, rows, 1), or
    (num_experts, ceil(rows / 128), ceil(columns / 128)). `.to(dtype)`, `.half()` and the like leave them in their
    types. With `bias`, also `gate_up_proj_bias` (num_experts, 2 * hidden_features) and `down_proj_bias` (num_experts,
    out_features), which are not quantized.

    With `top_k` there is a parameter too, `router.weight`. It has torch's default dtype, or fp32 where torch's default
    is none of fp16, bf16 and fp32. `.to(dtype)` converts it.

    `load_state_dict` takes such a state, that of a `MoE`, whose weights it quantizes, and quantized weights whose
    scales are named `gate_up_proj_scale_inv` and `down_proj_scale_inv`, as Hugging Face names them. It also takes
    weights in MXFP4, named `gate_up_proj_blocks`, `gate_up_proj_scales`, `down_proj_blocks` and `down_proj_scales`.
    Those become e4m3 without a rounding where powers of two of MXFP4 that share a scale of this layer are at most a
    factor of 2^14 apart (e5m2: 2^28).

    Args:
        in_features, hidden_features, num_experts, top_k, out_features, device, router, bias, activation, interleaved:
            as in `MoE`.
        transposed: whether weights that are not quantized lie the other way in states that it loads, as in `MoE`.
        dtype, scaling, accumulate, backend: as in `Fp8Linear`, for both products.

    Gradients are refused.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted.
    """

    gate_up_proj: torch.Tensor
    gate_up_proj_scale: torch.Tensor
    down_proj: torch.Tensor
    down_proj_scale: torch.Tensor
    gate_up_proj_bias: torch.Tensor | None
    down_proj_bias: torch.Tensor | None

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
        bias: bool = False,
        activation: str | gating.Function = "silu",
        interleaved: bool = False,
        transposed: bool = False,
        scaling: str | tuple[str, str] = "rows",
        accumulate: str | None = None,
        backend: str = "auto",
    ) -> None:
        settings = Settings.of(dtype, scaling, None, accumulate, backend)
        super().__init__()
        options = {"device": device, "dtype": default_dtype()}
        *shapes, router = sized(in_features, hidden_features, num_experts, top_k, out_features, router, **options)
        replacing.check_constant("bias", bias)
        weights = [torch.empty(shape, device=device) for shape in shapes]
        biases = [torch.empty(shape[:2], **options) if bias else None for shape in shapes]
        for weight, each in zip(weights, biases, strict=True):
            replacing.draw(weight, bias=each)
        pairs = [quantized(weight, settings.dtype, settings.scaling[1]) for weight in weights]
        self._take(pairs, biases, router, gating.Form(activation, interleaved), transposed, settings)

    def _take(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], biases: Sequence[torch.Tensor | None], router: Any,
        form: gating.Form, transposed: bool, settings: Settings,
    ) -> None:  # fmt: skip
        replacing.check_constant("transposed", transposed)
        gating.check(form, pairs[0][0], pairs[1][0], biases[0], biases[1], "gate_up")
        self._kinds = dict.fromkeys(NAMES, settings.scaling[1])  # the shape of a scale does not always say its kind
        if router is not None and not isinstance(router, torch.nn.Module):
            raise TypeError(f"router: got {type(router).__name__}, expected a torch.nn.Module or None")
        for name, (values, scale) in zip(NAMES, pairs, strict=True):
            self.register_buffer(name, values)
            self.register_buffer(f"{name}_scale", scale)
        for name, bias in zip(NAMES, biases, strict=True):
            self.register_buffer(f"{name}_bias", None if bias is None else bias.detach().clone())
        self.router, self.transposed, self.settings = router, transposed, settings
        self.activation, self.interleaved = form

    def _translate(self, state: dict[str, Any], prefix: str) -> None:
        translate(self, state, prefix)

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
        computed, tell = None, False
        if not torch.compiler.is_dynamo_compiling() and (serves := native.mixture) is not None:
            computed = self._computed(shares, gating.known_texts)  # once a call: what a function reads may change
            if computed is not None:
                found = serves(*self._native_arguments(input, chosen, shares, computed))
                if found is not None and not (tell := found is NotImplemented):
                    return found
        check_types({"input": input, "experts": chosen, "weights": shares})
        own = self._experts
        biases = {f"{name}_bias": each for name, each in zip(NAMES, (own.b_gate_up, own.b_down), strict=True)}
        gating.check_biases(self.gate_up_proj, self.down_proj, biases, "gate_up_proj")
        if is_distributed(input, chosen, shares, *self.buffers()):
            raise ValueError("Fp8MoE: it takes no DTensors; shard the experts of a MoE, or replicate the tokens")
        if input.dim() == 0 or input.shape[-1] != self.gate_up_proj.shape[-1]:
            raise ValueError(f"input: got shape {tuple(input.shape)}, expected (..., {self.gate_up_proj.shape[-1]})")
        check_chosen("input", input, chosen, shares)
        of_router = "weights of the router" if experts is None else "weights"
        for name, each in (("input", input), (of_router, shares), *zip(_OWN, own, strict=True)):
            if each is not None and each.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name}: got a tensor that requires grad, and Fp8MoE passes no gradient on (a straight-through "
                    "estimate belongs to the trainer); run the model under torch.no_grad() or torch.inference_mode()"
                )
        kind = input.device.type
        by_autocast = autocast.is_on(kind)
        if by_autocast:
            input = input.to(torch.get_autocast_dtype(kind))
        # Autocast has had its say: it would cast values of 8 bits as it casts other numbers.
        without = torch.autocast(kind, enabled=False) if by_autocast else contextlib.nullcontext()
        with torch.no_grad(), without:
            computed = computed or self._computed(shares)
            assert computed is not None
            by, compiling = (computed.precision, computed.backend), torch.compiler.is_dynamo_compiling()
            if compiling and torch._C._are_functorch_transforms_active():
                raise NotImplementedError(
                    "Fp8MoE: it passes no gradient on, and takes no other transform of torch.func; call it outside"
                )
            if compiling or is_beyond_autograd(input, chosen, shares):
                made: torch.Tensor = torch.ops.cutegemm.moe(
                    input, chosen, shares, own.gate_up, own.down, "silu", *by, *own[2:], computed.text
                )
                return made
            told = (gating.number_of(computed), *by) if tell else None
            return quantized_mixing.unrecorded(input, chosen, shares, own, computed, told)

    @property
    def _experts(self) -> Experts:
        own = self._buffers  # a module takes ten times as long to find an attribute there
        try:
            return Experts(*[own[each] for each in _OWN])
        except KeyError:  # somebody's parameter, or parametrized
            return Experts(*[getattr(self, each) for each in _OWN])

    def _computed(self, weights: torch.Tensor, find: Callable[..., Any] = gating.texts) -> Computed | None:
        """What a call with these weights of slots computes; None where `find` finds no texts."""
        given, form, own = self.settings, gating.Form(self.activation, self.interleaved), self._experts
        texts = find(form, weights, own.b_gate_up, own.b_down)
        if texts is None:
            return None
        first, second = texts
        kinds = given.scaling[0], self._kinds[NAMES[0]], self._kinds[NAMES[1]]
        return Computed(first, second, self.interleaved, given.dtype, kinds, given.how.precision, given.backend)

    def _native_arguments(self, input: Any, experts: Any, weights: Any, computed: Computed) -> tuple[Any, ...]:
        """The arguments of `native.mixture`."""
        by = computed.precision, computed.backend
        return input, experts, weights, *self._experts, gating.number_of(computed), *by

    def extra_repr(self) -> str:
        return f"{shown(self, self.gate_up_proj, self.down_proj)}, {self.settings.text}"

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
        b_gate_up: torch.Tensor | None = None,
        b_down: torch.Tensor | None = None,
        router: torch.nn.Module | None = None,
        activation: str | gating.Function = "silu",
        interleaved: bool = False,
        transposed: bool = False,
        scaling: str | tuple[str, str] = "rows",
        accumulate: str | None = None,
        backend: str = "auto",
    ) -> Fp8MoE:
        """The mixture with the quantized weights gate_up, (E, 2 F, in), and down, (E, out, F), of fp16, bf16 or fp32,
        the other way if transposed. Biases, (E, 2 F) and (E, out), are copied as they are; either may be None.

        On the meta device nothing is quantized: load_state_dict(..., assign=True) gives the numbers. Raises TypeError
        or ValueError for weights of other shapes or dtypes, and as the constructor.
        """
        for name, weight in (("gate_up", gate_up), ("down", down)):
            if not isinstance(weight, torch.Tensor) or weight.dtype not in INPUTS:
                got = weight.dtype if isinstance(weight, torch.Tensor) else type(weight).__name__
                raise TypeError(f"{name}: got {got}, accepted are tensors of {ACCEPTED_INPUTS}")
        replacing.check_constant("transposed", transposed)
        _check_shapes(gate_up, down, transposed)
        settings = Settings.of(dtype, scaling, None, accumulate, backend)
        request.check_device("down", down, gate_up.device, "gate_up")
        weights = as_used(gate_up, down, transposed)
        form, biases = gating.Form(activation, interleaved), (b_gate_up, b_down)
        gating.check(form, *weights, *biases, "gate_up")
        with torch.no_grad():
            pairs = [quantized(weight, settings.dtype, settings.scaling[1]) for weight in weights]
        return cls._made(pairs, biases, router, form, transposed, settings)

    @classmethod
    def from_quantized(
        cls,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        *,
        b_gate_up: torch.Tensor | None = None,
        b_down: torch.Tensor | None = None,
        router: torch.nn.Module | None = None,
        activation: str | gating.Function = "silu",
        interleaved: bool = False,
        scaling: str | None = None,
        accumulate: str | None = None,
        backend: str = "auto",
    ) -> Fp8MoE:
        """The mixture with weights that are quantized already: gate_up (E, 2 F, in), down (E, out, F), fp8 or int8.

        Args:
            gate_up_scale, down_scale: what the weights are multiplied by, any floating dtype: one element; one for each
                expert, E elements, which become those of rows; (E, rows) or (E, rows, 1); (E, ceil(rows / 128),
                ceil(columns / 128)) or (E, rows, ceil(columns / 128)). Both weights have scales of one kind. Those of
                gate_up may also be (E, 2), one for gate and one for up, which become those of rows.
            b_gate_up, b_down, activation, interleaved: as of `cutegemm.moe`.
            scaling: of x and of the hidden layer; by default as the weights': "tensor", "rows" or "blocks".

        Raises TypeError or ValueError naming the argument.
        """
        gate_up_scale = of_both(gate_up_scale, gate_up, interleaved)
        given = (("gate_up", gate_up, gate_up_scale), ("down", down, down_scale))
        forms = [forms_of(*each) for each in given]
        _check_shapes(gate_up, down)
        kind = next((kind for kind in forms[0] if kind in forms[1]), None)
        if kind is None or (gate_up.dtype == torch.int8) != (down.dtype == torch.int8):
            kinds = [next(iter(each)) for each in forms]
            raise ValueError(
                f"down: got {down.dtype} with scales of {kinds[1]}, expected those of gate_up, {gate_up.dtype} with "
                f"scales of {kinds[0]}"
            )
        request.check_device("down", down, gate_up.device, "gate_up")
        of_input = kind if scaling is None else scaling
        settings = Settings.of(gate_up.dtype, (of_input, kind), None, accumulate, backend)
        pairs = [(padded(weight.detach()), each[kind]) for (_, weight, _), each in zip(given, forms, strict=True)]
        form, biases = gating.Form(activation, interleaved), (b_gate_up, b_down)
        return cls._made(pairs, biases, router, form, False, settings)

    @classmethod
    def _made(
        cls, pairs: list[tuple[torch.Tensor, torch.Tensor]], biases: Sequence[torch.Tensor | None], router: Any,
        form: gating.Form, transposed: bool, settings: Settings,
    ) -> Fp8MoE:  # fmt: skip
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._take(pairs, biases, router, form, transposed, settings)
        return made


def _check_shapes(gate_up: torch.Tensor, down: torch.Tensor, transposed: bool = False) -> None:
    """Raises ValueError unless these are the weights of one mixture; transposed: as of `check_fit`."""
    check_fit(gate_up, down, transposed)
    if not 1 <= gate_up.shape[0] <= MOST_GROUPS:
        raise ValueError(f"gate_up: got {gate_up.shape[0]} experts, accepted are 1 to {MOST_GROUPS}")
