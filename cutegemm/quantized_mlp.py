"""`Fp8SwiGLU`: a gated MLP whose weights are quantized once, as two layers of 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as modules

from cutegemm import native, replacing
from cutegemm.layer_operator import GATES as GATES_BY_NAME
from cutegemm.mlp_operator import composed
from cutegemm.problem.quantization import ACCEPTED_INPUTS, BLOCK, INPUTS
from cutegemm.pytorch import autocast
from cutegemm.pytorch.dispatch import is_beyond_autograd
from cutegemm.pytorch.mlp import GATES, check_activation, check_one, check_weights
from cutegemm.pytorch.sharded import is_distributed
from cutegemm.quantized_linear import SCALE_NAMES, Fp8Linear


class Fp8SwiGLU(replacing.Translating):
    """down(act(gate(x)) * up(x)) with 8-bit operands: `SwiGLU` with weights that are quantized once.

    It is two `Fp8Linear`s: `gate_up`, whose weight is [gate; up] and whose epilogue is the gating, and `down`. So x is
    quantized once for gate and up, and their product is one. state_dict has the names of the two.

    `load_state_dict` also takes the state of a `SwiGLU`, the weights gate_proj, up_proj and down_proj of Hugging Face's
    models, which it quantizes, and the same weights in 8 bits with their scales under a name that `Fp8Linear` takes.
    Fixed scales of inputs are not taken.

    It is computed as one: one call of the C++ part, and one operator under torch.compile. With scales of blocks the
    first product gives the hidden layer in 8 bits, with its scales (`ops.quantize`), from `mlp_operator.FUSED_ROWS`
    rows on, if its tiles number `FUSED_SHARE` of the SMs and a kernel can do so: on GPUs of compute capability 9.0,
    with in_features that 16 divides and hidden_features that 128 divides. If a layer has a forward hook, or was
    replaced by one of another class, the two layers run separately.

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
        asked = self._as_one()
        compiling, tell = torch.compiler.is_dynamo_compiling(), False
        if asked is not None and not compiling and (serves := native.quantized_mlp) is not None:
            d: torch.Tensor | None = serves(input, *asked)
            if d is not None and not (tell := d is NotImplemented):
                return d
        if asked is None or not self._is_plain(input):
            apart: torch.Tensor = self.down(self.gate_up(input))  # which also say what is wrong with it
            return apart
        replacing.check_input(input, asked[0])
        if compiling or is_beyond_autograd(input):
            made: torch.Tensor = torch.ops.cutegemm.quantized_mlp(input, *asked)
            return made
        with torch.no_grad():
            return composed(input, *asked, tell=tell)

    def _as_one(self) -> tuple[Any, ...] | None:
        """The arguments of the operator behind x; None where the two layers are not what they were made as."""
        first, second = self._modules.get("gate_up"), self._modules.get("down")
        if type(first) is not Fp8Linear or type(second) is not Fp8Linear:
            return None
        one, other = first.settings, second.settings
        *of_first, fixed, bias = first._tensors()
        *of_second, others_fixed, others_bias = second._tensors()
        if (
            one.scaling[0] != other.scaling[0]
            or (how := one.how) != other.how
            or one.activation not in GATES_BY_NAME
            or other.activation is not None
            or not (fixed is others_fixed is bias is others_bias is None)
            or replacing.is_altered(first)
            or replacing.is_altered(second)
            or modules._global_forward_hooks
            or modules._global_forward_pre_hooks
        ):
            return None
        return (*of_first, *of_second, one.scaling[0], one.activation, *how)

    def _is_plain(self, input: torch.Tensor) -> bool:
        """Whether the layers would take this input as it is."""
        return (
            isinstance(input, torch.Tensor)
            and not input.is_nested
            and input.dim() > 0
            and input.shape[-1] == self.gate_up.in_features
            and input.dtype in INPUTS
            and not (input.requires_grad and torch.is_grad_enabled())
            and not (autocast.is_on(input.device.type) or is_distributed(input))
        )

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


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    """A layer that has this weight."""
    made = torch.nn.Linear(1, 1, bias=False, device="meta")
    made.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    return made


def _translate(module: Fp8SwiGLU, state: dict[str, Any], prefix: str) -> None:
    """Makes the entries of the two layers of those of a `SwiGLU`, and of three weights with or without scales."""
    for ours, theirs in (("gate_up", "gate"), ("gate_up", "up"), ("down", "down")):
        named = (f"{prefix}{ours}_weight", f"{prefix}{ours}.weight", f"{prefix}{theirs}_proj.weight")
        check_one([name for name in named if name in state])
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
