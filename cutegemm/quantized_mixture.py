"""`Fp8MoE`: the experts of a mixture, whose weights are quantized once and whose tokens are quantized on the way.

    values, scales = quantize(x)                each token once, and written to the rows of all its experts
    H = r * act(X G_e^T) * (X U_e^T)            groups of rows, with the scales
    values, scales = quantize(H)
    Y = H W_e^T                                                      the rows of a token's slots are added up

Sorting, gating and weighting are those of `moe`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cutegemm import gating, mxfp4, native, quantized_mixing, replacing
from cutegemm.moe_arguments import check_chosen, check_types
from cutegemm.problem import request
from cutegemm.problem.grouped_request import MOST_GROUPS
from cutegemm.problem.quantization import ACCEPTED_INPUTS, BLOCK, FORMATS, INPUTS
from cutegemm.pytorch import autocast
from cutegemm.pytorch.dispatch import is_beyond_autograd
from cutegemm.pytorch.sharded import is_distributed
from cutegemm.quantized_linear import Settings, check_one, default_dtype, keeping
from cutegemm.quantized_mixing import Experts
from cutegemm.quantized_mixing import Settings as Computed
from cutegemm.quantized_weights import check_pair, padded, quantized
from cutegemm.router import as_used, check_fit, choose, shown, sized

NAMES = ("gate_up_proj", "down_proj")
_OWN = tuple(f"{name}{end}" for end in ("", "_bias", "_scale") for name in NAMES)
"""The tensors of a layer in the order of `Experts`."""
SCALE_ENDINGS = ("_scale", "_scale_inv")
"""Of the names of scales in a state, behind those of the weights: ours, and those of Hugging Face's fp8 experts. Both
are factors that the values are multiplied by."""


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
    scales are named `gate_up_proj_scale_inv` and `down_proj_scale_inv`, as Hugging Face names them. Weights in MXFP4,
    `gate_up_proj_blocks` and `gate_up_proj_scales` and so on, become fp8 without a rounding where the powers of two of
    those that share a scale lie within 2^14 of each other.

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
        _translate(self, state, prefix)

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
                found = serves(*self._asked(input, chosen, shares, computed))
                if found is not None and not (tell := found is NotImplemented):
                    return found
        check_types({"input": input, "experts": chosen, "weights": shares})
        biases = {f"{name}_bias": getattr(self, f"{name}_bias") for name in NAMES}
        gating.check_biases(self.gate_up_proj, self.down_proj, biases, "gate_up_proj")
        if is_distributed(input, chosen, shares, *self.buffers()):
            raise ValueError("Fp8MoE: it takes no DTensors; shard the experts of a MoE, or replicate the tokens")
        if input.dim() == 0 or input.shape[-1] != self.gate_up_proj.shape[-1]:
            raise ValueError(f"input: got shape {tuple(input.shape)}, expected (..., {self.gate_up_proj.shape[-1]})")
        check_chosen("input", input, chosen, shares)
        of_router = "weights of the router" if experts is None else "weights"
        tensors = zip(_OWN, self._experts, strict=True)
        for name, each in (("input", input), (of_router, shares), *tensors):
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
            own, by = self._experts, (computed.precision, computed.backend)
            if torch.compiler.is_dynamo_compiling() or is_beyond_autograd(input, chosen, shares):
                if torch.compiler.is_dynamo_compiling() and torch._C._are_functorch_transforms_active():
                    raise NotImplementedError(
                        "Fp8MoE: it passes no gradient on, and takes no other transform of torch.func; call it outside"
                    )
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

    def _asked(self, input: Any, experts: Any, weights: Any, computed: Computed) -> tuple[Any, ...]:
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
        gate_up_scale = _of_both(gate_up_scale, gate_up, interleaved)
        given = (("gate_up", gate_up, gate_up_scale), ("down", down, down_scale))
        forms = [_forms(*each) for each in given]
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


def _forms(name: str, weight: Any, scale: Any) -> dict[str, torch.Tensor]:
    """What the scales of a quantized weight may be by their shape, the likeliest kind first: "tensor", (), one for all
    experts; "blocks", (E, blocks, blocks) or (E, rows, blocks); "rows", (E, rows, 1).
    """
    scale = check_pair(weight, scale, 3, name, f"{name}_scale")
    (count, rows, columns), shape = weight.shape, tuple(scale.shape)
    of_rows, of_columns = -(-rows // BLOCK), -(-columns // BLOCK)
    found: dict[str, torch.Tensor] = {}
    if scale.numel() == 1:
        found["tensor"] = scale.reshape(())
    if shape == (count, of_rows, of_columns) or (shape == (count, rows, of_columns) and of_columns > 1):
        found["blocks"] = scale
    if shape in ((count, rows), (count, rows, 1)):
        found["rows"] = scale.reshape(count, rows, 1)
    elif shape in ((count,), (count, 1), (count, 1, 1)):
        found["rows"] = scale.reshape(count, 1, 1).expand(count, rows, 1).contiguous()
    if not found:
        raise ValueError(
            f"{name}_scale: got shape {shape} for a weight of shape {tuple(weight.shape)}, accepted are 1 or {count} "
            f"elements, {(count, rows)}, {(count, rows, 1)}, {(count, of_rows, of_columns)}, for blocks of {BLOCK} x "
            f"{BLOCK}, and {(count, rows, of_columns)}, for 1 x {BLOCK}"
        )
    return found


def _of_both(scale: Any, weight: Any, interleaved: bool) -> Any:
    """The scales of the rows of gate and up, (E, 2 F), where there is one for each of both, (E, 2); else as given."""
    known = isinstance(scale, torch.Tensor) and isinstance(weight, torch.Tensor) and weight.dim() == 3
    if not known or tuple(scale.shape) != (weight.shape[0], 2) or weight.shape[1] % 2:
        return scale
    count = weight.shape[1] // 2
    return scale.repeat(1, count) if interleaved else scale.repeat_interleave(count, 1)


class _Loaded(NamedTuple):
    """A weight of a state, and what its scales may be; `Fp8MoE` takes the first of them that suits."""

    weight: torch.Tensor
    forms: dict[str, torch.Tensor]


def _translate(module: Fp8MoE, state: dict[str, Any], prefix: str) -> None:
    """Makes the entries of an `Fp8MoE` of those of a `MoE` and of Hugging Face's, and room for other scales. Raises
    TypeError, ValueError or RuntimeError for what does not fit, and then the module is what it was.
    """
    found: dict[str, _Loaded] = {}
    for name in NAMES:
        _unpack(module, state, prefix, name)
        keys = [key for end in SCALE_ENDINGS if (key := f"{prefix}{name}{end}") in state]
        check_one(keys)
        scales = [state.pop(key) for key in keys]
        loaded = _loaded(module, name, state.get(f"{prefix}{name}"), scales)
        if loaded is not None:
            found[name] = loaded
        elif scales:
            state[f"{prefix}{name}_scale"] = scales[0]
    for name, (weight, _) in found.items():  # before torch copies the weight that fits
        shapes = tuple(weight.shape), tuple(getattr(module, name).shape)
        if shapes[0] != shapes[1]:
            raise RuntimeError(
                f"state_dict: size mismatch for {prefix}{name}: got shape {shapes[0]}, expected {shapes[1]}"
            )
    dtypes = {name: found[name].weight.dtype if name in found else getattr(module, name).dtype for name in NAMES}
    if len({dtype == torch.int8 for dtype in dtypes.values()}) > 1:
        given = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"state_dict: got {given}; accepted are two weights of fp8, or two of int8")
    kinds = dict(module._kinds)
    for name, (weight, forms) in found.items():
        other = found.get(NAMES[1 - NAMES.index(name)])
        own = module._kinds[name]
        if not (own in forms and forms[own].shape == getattr(module, f"{name}_scale").shape):
            own = next((kind for kind in forms if other and kind in other.forms), next(iter(forms)))
        kinds[name] = own
        state[f"{prefix}{name}"], state[f"{prefix}{name}_scale"] = weight, forms[own]
    _make_room(module, found, kinds)


def _unpack(module: Fp8MoE, state: dict[str, Any], prefix: str, name: str) -> None:
    """Puts a weight in bf16 in the place of one in MXFP4."""
    key = f"{prefix}{name}"
    keys = [key + end for end in mxfp4.ENDINGS if key + end in state]
    if not keys:
        return
    check_one([key for key in (key, keys[0]) if key in state])
    if len(keys) == 1:
        missing = next(key + end for end in mxfp4.ENDINGS if key + end not in state)
        raise RuntimeError(f"state_dict: got {keys[0]} without {missing}")
    blocks, scales = (state.pop(each) for each in keys)
    home: torch.Tensor = getattr(module, name)
    if isinstance(blocks, torch.Tensor) and not home.is_meta:
        blocks = blocks.to(home.device)
    weight = mxfp4.unpacked(blocks, scales, key)
    state[key] = weight.mT if module.transposed else weight  # blocks lie along K whatever other weights do


def _loaded(module: Fp8MoE, name: str, weight: Any, scales: list[Any]) -> _Loaded | None:
    """A weight of a state, quantized if it was not; None for what torch is to refuse by name."""
    if not isinstance(weight, torch.Tensor):
        return None
    own: torch.Tensor = getattr(module, name)
    weight = weight.flatten(1, 2) if weight.dim() == 4 else weight
    if scales:
        forms = _forms(name, weight, scales[0])
        return _Loaded(padded(weight), forms)
    if weight.is_floating_point() and weight.dtype not in FORMATS:
        home = weight if own.is_meta else weight.to(own.device)
        home = home.mT if module.transposed and home.dim() == 3 else home
        values, scale = quantized(home, module.settings.dtype, module.settings.scaling[1], name)
        return _Loaded(values, {module.settings.scaling[1]: scale})
    if weight.dtype != own.dtype:
        raise TypeError(f"{name}: got {weight.dtype} without its scales, which the module's {own.dtype} has")
    return None


def _make_room(module: Fp8MoE, found: dict[str, _Loaded], kinds: dict[str, str]) -> None:
    """For weights of another dtype, and scales of another kind, than the module has."""
    for name, (weight, forms) in found.items():
        own, of_own, scale = getattr(module, name), getattr(module, f"{name}_scale"), forms[kinds[name]]
        if weight.dtype != own.dtype:
            replacing.give_buffer(module, name, torch.empty_like(own, dtype=weight.dtype))
        if scale.shape != of_own.shape:
            room = torch.empty(scale.shape, dtype=torch.float32, device=of_own.device)
            replacing.give_buffer(module, f"{name}_scale", room)
    of_input, *others = module.settings[1:]
    dtype = module.settings.dtype
    if dtype not in (each := [getattr(module, name).dtype for name in NAMES]):
        dtype = each[0]
    module.settings = Settings.of(dtype, (of_input[0], kinds[NAMES[0]]), *others)
    module._kinds = kinds
