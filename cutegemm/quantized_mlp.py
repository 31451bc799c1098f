"""`Fp8SwiGLU`: a gated MLP whose weights are quantized once, as two layers of 8 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as modules

from cutegemm import ops, replacing
from cutegemm.gemm import gemm
from cutegemm.hardware.arch import Arch
from cutegemm.layer_operator import GATES as BY_NAME
from cutegemm.layer_operator import backend_of
from cutegemm.linear import as_rows
from cutegemm.problem.quantization import ACCEPTED_INPUTS, BLOCK, FORMATS, INPUTS
from cutegemm.pytorch import autocast
from cutegemm.pytorch.mlp import GATES, check_activation, check_weights
from cutegemm.quantize import quantize
from cutegemm.quantized_linear import SCALE_NAMES, Fp8Linear

FUSED_ROWS = 256
"""Rows from which on the first product quantizes the hidden layer. On an H200 it then took 0.78 to 0.97 of the time of
a product and `quantize`, with 64 and 128 rows 1.12 to 1.85 of it, since the fastest tiles of so few rows have operands
swapped (docs/fp8.md#a-hidden-layer-that-its-product-quantizes).
"""
FUSED_WORK = 10**10
"""The least rows times features times hidden features: kernels of so much work take longer than Python needs to launch
them. C++ launches the two layers by themselves, in less of the host's time."""


class Fp8SwiGLU(replacing.Translating):
    """down(act(gate(x)) * up(x)) with 8-bit operands: `SwiGLU` with weights that are quantized once.

    It is two `Fp8Linear`s: `gate_up`, whose weight is [gate; up] and whose epilogue is the gating, and `down`. So x is
    quantized once for gate and up, and their product is one. state_dict has the names of the two.

    `load_state_dict` also takes the state of a `SwiGLU`, the weights gate_proj, up_proj and down_proj of Hugging Face's
    models, which it quantizes, and the same weights in 8 bits with their scales under a name that `Fp8Linear` takes.
    Fixed scales of inputs are not taken.

    With scales of blocks the first product of `FUSED_ROWS` rows and `FUSED_WORK`, or more, gives the hidden layer in 8
    bits, with its scales (`ops.quantize`), where a kernel does so: on GPUs of compute capability 9.0, with in_features
    that 16 divides and hidden_features that 128 divides. Forward hooks keep it from doing so, and sizes that may change
    under torch.compile.

    Args:
        in_features, hidden_features, out_features, device, activation: as in `SwiGLU`.
        dtype, scaling, accumulate, backend: as in `Fp8Linear`, for both layers.
        constant_weights: promises that no running kernel writes the weights when `forward` is called.

    Gradients are refused, as by `Fp8Linear`.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        device: Any = None,
        dtype: Any = "fp8",
        *,
        activation: str = "silu",
        scaling: str | tuple[str, str] = "rows",
        accumulate: str | None = None,
        backend: str = "auto",
        constant_weights: bool = False,
    ) -> None:
        super().__init__()
        in_features = replacing.as_size("in_features", in_features)
        hidden_features = replacing.as_size("hidden_features", hidden_features)
        out_features = in_features if out_features is None else replacing.as_size("out_features", out_features)
        check_activation(activation)
        replacing.check_constant("constant_weights", constant_weights)
        options: dict[str, Any] = {
            "device": device, "dtype": dtype, "scaling": scaling, "accumulate": accumulate, "backend": backend,
            "constant_weight": constant_weights,
        }  # fmt: skip
        self._take(
            Fp8Linear(in_features, 2 * hidden_features, False, activation=GATES[activation].__name__, **options),
            Fp8Linear(hidden_features, out_features, False, **options),
        )

    def _take(self, gate_up: Fp8Linear, down: Fp8Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def _translate(self, state: dict[str, Any], prefix: str) -> None:
        _translate(self, state, prefix)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: (..., in_features), fp16, bf16 or fp32. Returns (..., out_features) of its dtype."""
        result: torch.Tensor = self._fused(input) if self._fuses(input) else self.down(self.gate_up(input))
        return result

    def _fuses(self, input: torch.Tensor) -> bool:
        """Whether the first product quantizes the hidden layer; what is wrong with a call the layers say."""
        first, second = self.gate_up, self.down
        return (
            type(first) is type(second) is Fp8Linear
            and first.settings.scaling[0] == second.settings.scaling[0] == "blocks"
            and _certainly(input.numel() >= FUSED_ROWS * first.in_features)
            and _certainly(input.numel() * second.in_features >= FUSED_WORK)
            and first.settings.activation in BY_NAME
            and second.settings.activation is None
            and second.bias is None
            and first.weight.dtype in FORMATS
            and second.weight.dtype in FORMATS
            and not any(replacing.is_altered(each) or each.input_scale is not None for each in (first, second))
            and not (modules._global_forward_hooks or modules._global_forward_pre_hooks)
            and type(input) is torch.Tensor
            and input.dim() > 0
            and input.shape[-1] == first.in_features
            and input.dtype in INPUTS
            and not (input.requires_grad and torch.is_grad_enabled())
            and not autocast.is_on(input.device.type)
            # Other hidden features leave tiles without whole blocks of columns of gate and up.
            and second.in_features % BLOCK == 0
            and first.in_features % 16 == 0
            and _quantizes(input.device, first.settings.backend)
        )

    def _fused(self, input: torch.Tensor) -> torch.Tensor:
        """By two products, the first of which quantizes."""
        first, second = self.gate_up, self.down
        replacing.check_input(input, first.weight)
        epilogue_of = _epilogue if torch.compiler.is_dynamo_compiling() else _remembered
        hidden = epilogue_of(str(first.settings.activation), input.dtype, second.weight.dtype)
        with torch.no_grad():
            by = backend_of(first.settings.backend)
            values, scale = quantize(as_rows(input), first.weight.dtype, "blocks", backend=by)
            values, scale = _product(first, values, scale, epilogue=hidden)
            d = _product(second, values, scale, out_dtype=input.dtype)
        return d.view(*input.shape[:-1], d.shape[-1])

    @classmethod
    def from_weights(
        cls,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        dtype: Any = "fp8",
        *,
        activation: str = "silu",
        scaling: str | tuple[str, str] = "rows",
        accumulate: str | None = None,
        backend: str = "auto",
        constant_weights: bool = False,
    ) -> Fp8SwiGLU:
        """The MLP with the quantized weights gate and up, each (hidden, in), and down, (out, hidden).

        Raises TypeError or ValueError for weights of other shapes or dtypes, and as the constructor.
        """
        check_weights(gate, up, down)
        for name, weight in (("gate", gate), ("up", up), ("down", down)):
            if weight.dtype not in INPUTS:
                raise TypeError(f"{name}: got dtype {weight.dtype}, accepted are {ACCEPTED_INPUTS}")
        check_activation(activation)
        replacing.check_constant("constant_weights", constant_weights)
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        with torch.no_grad():
            stacked = torch.cat((gate, up))
        layers = [
            Fp8Linear.from_linear(
                _linear(weight), dtype, scaling=scaling, activation=own, accumulate=accumulate, backend=backend,
                constant_weight=constant_weights,
            )
            for weight, own in ((stacked, GATES[activation].__name__), (down, None))
        ]  # fmt: skip
        made._take(*layers)
        return made


def _epilogue(activation: str, to: torch.dtype, dtype: torch.dtype) -> Callable[[Any], Any]:
    """The epilogue that gates, rounds to a dtype and quantizes. It captures no tensor: then it is traced once."""
    gate = BY_NAME[activation]
    return lambda acc: ops.quantize(ops.cast(gate(acc), to), dtype)


_remembered = functools.lru_cache(maxsize=64)(_epilogue)


def _product(layer: Fp8Linear, values: torch.Tensor, scale: torch.Tensor, **options: Any) -> Any:
    """Quantized rows times the weight of a layer."""
    of_weight = layer.weight_scale.t() if layer.weight_scale.dim() else layer.weight_scale
    how = layer.settings.how._asdict()
    return gemm(values, layer.weight.t(), scale_a=scale, scale_b=of_weight, **how, **options)


def _certainly(holds: Any) -> bool:
    """Whether a condition on sizes holds; False under torch.compile where sizes may change: no guard is set on it."""
    if torch.compiler.is_dynamo_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(holds)
    return bool(holds)


def _quantizes(device: torch.device, backend: str) -> bool:
    """Whether kernels for this device quantize results; on the CPU only with backend="cute", in the emulator."""
    if device.type != "cuda":
        return backend == "cute"
    return backend in ("auto", "cute") and Arch.of_device(device.index).capability == (9, 0)


_quantizes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    """A layer that has this weight."""
    made = torch.nn.Linear(1, 1, bias=False, device="meta")
    made.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    return made


def _translate(module: Fp8SwiGLU, state: dict[str, Any], prefix: str) -> None:
    """Makes the entries of the two layers of those of a `SwiGLU`, and of three weights with or without scales."""
    for ours in ("gate_up", "down"):
        if isinstance(state.get(f"{prefix}{ours}_weight"), torch.Tensor):
            weight = state.pop(f"{prefix}{ours}_weight")
            state[f"{prefix}{ours}.weight"] = weight.flatten(0, 1) if weight.dim() == 3 else weight
    names = {name: [key for key in state if key.startswith(f"{prefix}{name}_proj.")] for name in ("gate", "up", "down")}
    for key in names["down"]:
        state[f"{prefix}down.{key.rpartition('.')[2]}"] = state.pop(key)
    gate, up = ({key.rpartition(".")[2]: state[key] for key in names[name]} for name in ("gate", "up"))
    if not all(isinstance(each, torch.Tensor) for each in (gate.get("weight"), up.get("weight"))):
        return  # torch refuses them, by name
    _check_alike("weight", gate["weight"], up["weight"])
    hidden = gate["weight"].shape[0]
    for name in {"weight", *SCALE_NAMES} & {*gate} & {*up}:
        both = [gate[name], up[name]]
        if name != "weight":
            both = [_of_rows(each, hidden) for each in both]
            _check_alike(name, *both)
            if both[0].shape[0] != hidden and hidden % BLOCK:
                raise ValueError(
                    f"state_dict: got {name} of gate_proj and up_proj for blocks of {BLOCK} rows, which {hidden} rows "
                    "of each are not a multiple of"
                )
        state[f"{prefix}gate_up.{name}"] = torch.cat(both)
        for key in (f"{prefix}gate_proj.{name}", f"{prefix}up_proj.{name}"):
            del state[key]


def _of_rows(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales of one matrix or of its rows as (rows, 1); those of blocks as they are."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1)
    return scale.reshape(rows, 1) if scale.dim() == 1 and scale.numel() == rows else scale


def _check_alike(name: str, gate: torch.Tensor, up: torch.Tensor) -> None:
    """Raises ValueError for entries that, stacked, could fit, but do not belong together."""
    kinds = [(each.shape, each.dtype, each.layout, each.device) for each in (gate, up)]
    if kinds[0] != kinds[1]:
        one, other = (
            f"{str(dtype).removeprefix('torch.')} {tuple(shape)}, {layout} on {device}"
            for shape, dtype, layout, device in kinds
        )
        raise ValueError(f"state_dict: got gate_proj.{name} ({one}) and up_proj.{name} ({other}), expected them alike")
