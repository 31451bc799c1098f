"""`Fp8Linear`: a linear layer whose weight is quantized once and whose input is quantized on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.utils.parametrize import is_parametrized

from cutegemm import backend as backends
from cutegemm import native, replacing
from cutegemm.layer_operator import GATES, check_terms, composed
from cutegemm.problem import quantization_request, request
from cutegemm.problem.quantization import (
    ACCEPTED,
    ACCEPTED_INPUTS,
    BLOCK,
    FORMATS,
    INPUTS,
    NAMED,
)  # fmt: skip
from cutegemm.pytorch import autocast
from cutegemm.pytorch.mlp import check_one
from cutegemm.pytorch.scaled import ACCUMULATIONS
from cutegemm.quantize import dequantize
from cutegemm.quantized_weights import check_pair, padded, quantized
from cutegemm.run.how import How

SCALINGS = quantization_request.SCALINGS
DTYPES = {"fp8": NAMED["e4m3"].dtype, **{name: format.dtype for name, format in NAMED.items()}}
"""Names of dtypes that `replace_linears` takes."""
SCALE_NAMES = ("weight_scale", "weight_scale_inv", "scale_weight")
INPUT_SCALE_NAMES = ("input_scale", "activation_scale", "scale_input")
"""Names in checkpoints, ours first: compressed-tensors, Hugging Face's fp8 and DeepSeek's, ComfyUI's. All of them are
factors that the values are multiplied by."""
FORWARDS: list[Any] = [torch.nn.Linear.forward]
"""The forward methods of what `Fp8Linear` can stand for; cutegemm.nn adds that of its `Linear`, with an activation."""
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class Settings(NamedTuple):
    """What a layer is made with. scaling: of the input, and of weights that are still to be quantized."""

    dtype: torch.dtype
    scaling: tuple[str, str]
    activation: str | None
    accumulate: str | None
    backend: str
    constant_weight: bool = False

    @property
    def how(self) -> How:
        """How the product is computed."""
        precision = "fast" if self.accumulate == "fast" else None
        return How(precision, self.backend, None, "b" if self.constant_weight else None)

    @property
    def text(self) -> str:
        """As a layer's text shows them."""
        scaling = self.scaling[0] if self.scaling[0] == self.scaling[1] else self.scaling
        text = f"dtype={FORMATS[self.dtype].name}, scaling={scaling!r}"
        defaults = {"activation": None, "accumulate": None, "backend": "auto", "constant_weight": False}
        for name, default in defaults.items():
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)!r}"
        return text

    @classmethod
    def of(
        cls, dtype: Any, scaling: Any, activation: Any, accumulate: Any, backend: Any, constant_weight: Any = False
    ) -> Settings:
        """Checked. Raises TypeError or ValueError naming the argument."""
        chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if not isinstance(chosen, torch.dtype) or chosen not in FORMATS:
            names = ", ".join(map(repr, DTYPES))
            raise TypeError(f"dtype: got {request.shown(dtype)}, accepted are {names} and {ACCEPTED}")
        both = (scaling, scaling) if isinstance(scaling, str) else scaling
        if not isinstance(both, tuple) or len(both) != 2 or not all(request.is_one_of(each, SCALINGS) for each in both):
            accepted = ", ".join(map(repr, SCALINGS))
            raise ValueError(
                f"scaling: got {request.shown(scaling)}, accepted are {accepted} and a pair, for inputs and weights"
            )
        check_terms(activation, None)
        known = accumulate is None or request.is_one_of(accumulate, ACCUMULATIONS)
        if not known or (accumulate == "fast" and chosen == torch.int8):
            raise ValueError(
                f"accumulate: got {request.shown(accumulate)}, accepted are None, 'promoted' and, for fp8, 'fast'"
            )
        if accumulate == "fast" and "blocks" in both:
            raise ValueError(
                f"accumulate: got 'fast' with scaling {request.shown(scaling)}; scales of blocks are applied where "
                "sums are promoted; leave it away"
            )
        backends.check_name(backend)
        replacing.check_constant("constant_weight", constant_weight)
        return cls(chosen, both, activation, accumulate, backend, constant_weight)


class Fp8Linear(replacing.Translating):
    """activation(x @ weight^T + bias) with 8-bit operands: the weight is quantized once, x in every call.

    Buffers, which are what state_dict has: `weight` (out_features, in_features), fp8 or int8; `weight_scale`, fp32, ()
    or (out_features, 1) or (ceil(out / 128), ceil(in / 128)); `input_scale`, fp32, only where the scale of x is fixed.
    `bias` is a parameter that needs no gradient. `.to(dtype)`, `.half()` and the like convert the bias alone: the
    weight and the scales keep their types.

    `load_state_dict` takes such a state, that of a torch.nn.Linear, whose weight it quantizes, and those of other
    libraries: see `from_quantized`.

    Args:
        in_features, out_features, bias, device: as in torch.nn.Linear. The weight is drawn as there, and quantized.
        dtype: torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, or "fp8", "e4m3", "e5m2", "int8".
        scaling: "rows", "tensor" or "blocks", or a pair of them for x and for the weight. Blocks are 1 x 128 of x and
            128 x 128 of the weight.
        bias_dtype: of the bias, fp16, bf16 or fp32; by default torch's default dtype, or fp32 where that is another.
        activation, backend: as in `cutegemm.gemm`. accumulate: "promoted" or "fast", as there. The activation may also
            be "swiglu", "geglu", "geglu_tanh" or "reglu", where the rows of the weight are those of gate and then those
            of up: act(gate) * up has out_features / 2 columns. Such a layer has no bias.
        constant_weight: promises that no running kernel writes the weight when `forward` is called, as
            `cutegemm.gemm(..., constant="b")`. The scales may be written by the kernel in front.

    Gradients are refused: an input or a bias that requires grad raises RuntimeError under autograd. The bias that a
    layer is made with does not require it.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what was given and what is accepted.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = "fp8",
        *,
        scaling: str | tuple[str, str] = "rows",
        bias_dtype: torch.dtype | None = None,
        activation: str | None = None,
        accumulate: str | None = None,
        backend: str = "auto",
        constant_weight: bool = False,
    ) -> None:
        settings = Settings.of(dtype, scaling, activation, accumulate, backend, constant_weight)
        if bias_dtype is not None and not isinstance(bias_dtype, torch.dtype):
            raise TypeError(f"bias_dtype: got {request.shown(bias_dtype)}, expected a torch.dtype or None")
        if bias_dtype is not None and bias_dtype not in INPUTS:
            raise TypeError(f"bias_dtype: got {bias_dtype}, accepted are None, {ACCEPTED_INPUTS}")
        in_features = replacing.as_size("in_features", in_features)
        out_features = replacing.as_size("out_features", out_features)
        if activation in GATES and out_features % 2:
            raise ValueError(
                f"out_features: got {out_features}, expected an even number with activation {activation!r}"
            )
        linear = torch.nn.Linear(in_features, out_features, bias, device, bias_dtype or default_dtype())
        super().__init__()
        self._fill(linear.weight, linear.bias, settings)

    def _fill(self, weight: torch.Tensor, bias: torch.Tensor | None, settings: Settings) -> None:
        """Takes the quantized weight of a linear layer, and its bias."""
        values, scale = quantized(weight, settings.dtype, settings.scaling[1])
        self._take(values, scale, bias, None, settings)

    def _take(
        self, values: torch.Tensor, scale: torch.Tensor, bias: Any, input_scale: torch.Tensor | None, settings: Settings
    ) -> None:
        check_terms(settings.activation, bias)
        if settings.activation in GATES and values.shape[0] % 2:
            raise ValueError(
                f"out_features: got {values.shape[0]}, expected an even number with activation {settings.activation!r}"
            )
        self.settings = settings
        self.out_features, self.in_features = values.shape
        self.register_buffer("weight", values)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", input_scale)
        kept = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", kept)

    def _translate(self, state: dict[str, Any], prefix: str) -> None:
        _translate(self, state, prefix)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: (..., in_features), fp16, bf16 or fp32. Returns (..., out_features) of its dtype; under autocast of
        autocast's.
        """
        settings, tensors, tell = self.settings, self._tensors(), False
        # Dynamo is asked first, and so guards on nothing of `native`: else the extension's coming would compile again.
        if not _is_dynamo_compiling() and (serves := native.quantized_linear) is not None:
            d: torch.Tensor | None = serves(input, *tensors, settings.scaling[0], settings.activation, *settings.how)
            if d is not None and not (tell := d is NotImplemented):
                return d
        replacing.check_input(input, self.weight)
        if torch.is_grad_enabled():
            for name, tensor in (("input", input), ("bias", self.bias)):
                if tensor is not None and tensor.requires_grad:
                    raise RuntimeError(
                        f"{name}: it requires grad, and Fp8Linear passes no gradient on (a straight-through estimate "
                        "belongs to the trainer); run the model under torch.no_grad() or torch.inference_mode()"
                    )
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(f"input: got shape {tuple(input.shape)}, expected (..., {self.in_features})")
        kind = input.device.type
        by_autocast = autocast.is_on(kind)
        if by_autocast:
            input = input.to(torch.get_autocast_dtype(kind))
        if input.dtype not in INPUTS:
            raise TypeError(f"input: got dtype {input.dtype}, accepted are {ACCEPTED_INPUTS}")
        if _is_dynamo_compiling():
            by_operator: torch.Tensor = torch.ops.cutegemm.quantized_linear(
                input, *tensors, settings.scaling[0], settings.activation, *settings.how
            )
            return by_operator
        # Autocast has had its say: it would cast values of 8 bits as it casts other numbers.
        without = torch.autocast(kind, enabled=False) if by_autocast else contextlib.nullcontext()
        with torch.no_grad(), without:
            return composed(input, *tensors, settings.scaling[0], settings.activation, settings.how, tell)

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The weight, its scale, the fixed scale of the input, and the bias."""
        own: Any = self._buffers  # a module takes ten times as long to find an attribute there
        try:
            return own["weight"], own["weight_scale"], own["input_scale"], self._parameters["bias"]
        except KeyError:  # somebody's parameter, or parametrized
            return self.weight, self.weight_scale, self.input_scale, self.bias

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The weight that the layer computes with, (out_features, in_features)."""
        return dequantize(self.weight, self.weight_scale, dtype)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{text}, {self.settings.text}" + (", fixed input_scale" if self.input_scale is not None else "")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Linear:
        """Moves as torch.nn.Module does, but leaves the values and scales in their types."""
        super()._apply(keeping(fn, (self.weight, self.weight_scale, self.input_scale)), recurse)
        return self

    @classmethod
    def from_linear(
        cls,
        module: torch.nn.Linear,
        dtype: Any = "fp8",
        *,
        scaling: str | tuple[str, str] = "rows",
        activation: str | None = None,
        accumulate: str | None = None,
        backend: str = "auto",
        constant_weight: bool = False,
    ) -> Fp8Linear:
        """The layer with the quantized weight of `module`, the memory of its bias, its forward hooks, attributes that
        somebody has set on `module`, and its training mode.

        activation: None means that of a `cutegemm.nn.Linear`.

        On the meta device nothing is quantized: load_state_dict(..., assign=True) gives the numbers.
        Raises TypeError for a module that is no torch.nn.Linear of fp16, bf16 or fp32, may compute something else, or
        has parameters, buffers or children besides weight and bias; else as the constructor.
        """
        reason = why_not_quantized(module)
        if reason is not None:
            raise TypeError(f"module: {reason}")
        if activation is None and type(module).forward is not torch.nn.Linear.forward:
            activation = module.activation
        settings = Settings.of(dtype, scaling, activation, accumulate, backend, constant_weight)
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._fill(module.weight, module.bias, settings)
        for name in replacing.FORWARD_HOOKS:
            getattr(made, name).update(getattr(module, name))
        replacing.keep_attributes(made, module)
        return made.train(module.training)

    @classmethod
    def from_quantized(
        cls,
        weight: torch.Tensor,
        scale: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        scaling: str | None = None,
        activation: str | None = None,
        accumulate: str | None = None,
        backend: str = "auto",
        constant_weight: bool = False,
    ) -> Fp8Linear:
        """The layer with a weight that is quantized already, as checkpoints have it.

        Args:
            weight: (out_features, in_features), fp8 e4m3 or e5m2, or int8; or torchao's Float8Tensor, which brings its
                scale.
            scale: what weight is multiplied by, any floating dtype: one element; (ceil(out / 128), ceil(in / 128)) or
                (out_features, ceil(in / 128)); or out_features elements in another shape.
            bias: (out_features,). input_scale: one element, the fixed scale of x; None: x gets scales in every call.
            scaling: of x; by default "tensor" with a scale of one element, "blocks" with blocks, else "rows".

        Raises:
            TypeError, ValueError: naming the argument.
        """
        if scale is None and hasattr(weight, "qdata") and hasattr(weight, "scale"):
            weight, scale = weight.qdata, weight.scale
        if scale is None:
            raise ValueError("scale: got None; pass what the weight is to be multiplied by")
        values, scale = _checked(weight, scale)
        if bias is not None:
            _check_bias(bias, values)
        by_shape = _scaling_of(values, scale)
        of_input = by_shape if scaling is None else scaling
        settings = Settings.of(values.dtype, (of_input, by_shape), activation, accumulate, backend, constant_weight)
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._take(values, scale, bias, None if input_scale is None else _one("input_scale", input_scale), settings)
        return made


def default_dtype() -> torch.dtype:
    """Torch's default dtype, or fp32 where that is none that is quantized."""
    found = torch.get_default_dtype()
    return found if found in INPUTS else torch.float32


def keeping(fn: Callable[[torch.Tensor], torch.Tensor], own: tuple[Any, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """`fn` for Module._apply; it leaves the tensors `own` in their types."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        result = fn(tensor)
        is_own = any(tensor is each for each in own)
        return tensor.to(result.device) if is_own and result.dtype != tensor.dtype else result

    return moved


def why_not_quantized(module: Any) -> str | None:
    """Why `Fp8Linear` cannot stand for this module, or None."""
    if not isinstance(module, torch.nn.Linear):
        return f"got {type(module).__name__}, expected a torch.nn.Linear"
    if type(module).forward not in FORWARDS or "forward" in module.__dict__:
        return f"got {type(module).__name__} with a forward of its own, which may compute something else"
    if "weight" not in module._parameters and not is_parametrized(module, "weight"):
        return (
            "got a weight that is no parameter: a hook makes it in every call; make it a parameter first "
            "(torch.nn.utils.remove_weight_norm, torch.nn.utils.prune.remove)"
        )
    if more := replacing.parts_besides(module, "weight", "bias"):
        return f"got {', '.join(more)} besides weight and bias, for which the quantized layer has no place"
    if module.weight.dim() != 2 or module.weight.is_neg():
        what = "a lazily negated view" if module.weight.is_neg() else f"of shape {tuple(module.weight.shape)}"
        return f"got a weight that is {what}, expected (out_features, in_features) with memory of its own"
    if module.weight.dtype not in INPUTS:
        return f"got a weight of {module.weight.dtype}, accepted are {ACCEPTED_INPUTS}"
    return None


def check_quantized(dtype: Any, scaling: Any, accumulate: Any, precision: str | None, backend: str) -> None:
    """Raises TypeError or ValueError for arguments of layers of 8 bits, where there are to be such, and without."""
    if dtype is not None:
        Settings.of(dtype, scaling, None, accumulate, backend)
        if precision is not None:
            raise ValueError(f"precision: got {precision!r} beside dtype={dtype!r}, which says it; leave one away")
    elif not request.is_one_of(scaling, ("rows",)):
        raise ValueError(f"scaling: got {scaling!r} without dtype; pass dtype='fp8' or 'int8', or leave scaling away")
    elif accumulate is not None:
        raise ValueError(f"accumulate: got {accumulate!r} without dtype; pass dtype='fp8', or leave accumulate away")


def _checked(weight: Any, scale: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scale) of a quantized weight as the layer keeps them."""
    scale = check_pair(weight, scale, 2, "weight", "scale")
    rows, k = weight.shape
    of_rows, of_k = -(-rows // BLOCK), -(-k // BLOCK)
    if scale.numel() == 1:
        scale = scale.reshape(())
    elif tuple(scale.shape) in ((of_rows, of_k), (rows, of_k)):
        pass  # before the rows: there are as many blocks as rows where, for one, K is 16384
    elif scale.numel() == rows:
        scale = scale.reshape(rows, 1)
    else:
        raise ValueError(
            f"scale: got shape {tuple(scale.shape)} for a weight of shape {(rows, k)}, accepted are 1 or {rows} "
            f"elements, {(of_rows, of_k)}, for blocks of {BLOCK} x {BLOCK}, and {(rows, of_k)}, for 1 x {BLOCK}"
        )
    return padded(weight.detach()), scale


def _scaling_of(values: torch.Tensor, scale: torch.Tensor) -> str:
    """Which scales those of `_checked` are."""
    return "tensor" if scale.dim() == 0 else "rows" if scale.shape[1] == 1 != values.shape[1] else "blocks"


def _check_bias(bias: Any, values: torch.Tensor) -> None:
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias: got {type(bias).__name__}, expected a torch.Tensor or None")
    if bias.layout != torch.strided:
        raise TypeError(f"bias: got layout {bias.layout}, expected a dense (strided) tensor; call .to_dense()")
    if bias.dtype not in INPUTS:
        raise TypeError(f"bias: got dtype {bias.dtype}, accepted are {ACCEPTED_INPUTS}")
    if tuple(bias.shape) != (values.shape[0],):
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, expected ({values.shape[0]},)")


def _one(name: str, scale: Any) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor) or scale.is_nested:
        raise TypeError(f"{name}: got {type(scale).__name__}, expected a dense torch.Tensor of one element")
    if scale.numel() != 1:
        raise ValueError(f"{name}: got shape {tuple(scale.shape)}, accepted is one element")
    return scale.detach().to(torch.float32).reshape(())


def _translate(module: Fp8Linear, state: dict[str, Any], prefix: str) -> None:
    """Makes the entries of an `Fp8Linear` of those that other layers have, and room for scales of another shape."""

    def taken(names: tuple[str, ...]) -> Any:
        keys = [prefix + name for name in names if prefix + name in state]
        check_one(keys)
        return state.pop(keys[0]) if keys else None

    weight: Any = state.get(f"{prefix}weight")
    if weight is not None and not isinstance(weight, torch.Tensor):
        return  # torch refuses it, by name
    scale, fixed = taken(SCALE_NAMES), taken(INPUT_SCALE_NAMES)
    if weight is not None and scale is None and hasattr(weight, "qdata"):  # torchao's Float8Tensor
        weight, scale = weight.qdata, weight.scale
    if weight is not None and scale is None and weight.dtype not in FORMATS and weight.is_floating_point():
        home = weight if module.weight.is_meta else weight.to(module.weight.device)
        weight, scale = quantized(home, module.settings.dtype, module.settings.scaling[1])
    elif weight is not None and scale is not None:
        # Blocks that are a whole row, or a whole weight, look like scales of rows, or of one matrix.
        is_own = isinstance(scale, torch.Tensor) and scale.shape == module.weight_scale.shape
        checked = _checked(weight, scale)
        kept = is_own and checked[0].shape == module.weight.shape
        weight, scale = checked[0], checked[1].reshape(scale.shape) if kept else checked[1]
    # Torch refuses a weight of another shape, and then the layer must be what it was.
    fits = weight is not None and weight.shape == module.weight.shape
    if fits and scale is not None:
        of_input, *others = module.settings[1:]
        of_weight = of_input[1] if scale.shape == module.weight_scale.shape else _scaling_of(weight, scale)
        module.settings = Settings.of(weight.dtype, (of_input[0], of_weight), *others)
    if fits and scale is not None and weight.dtype != module.weight.dtype:
        replacing.give_buffer(module, "weight", torch.empty_like(module.weight, dtype=weight.dtype))
    if weight is not None:
        state[f"{prefix}weight"] = weight
    if scale is not None:
        state[f"{prefix}weight_scale"] = scale
        if fits and scale.shape != module.weight_scale.shape:
            room = torch.empty(scale.shape, dtype=torch.float32, device=module.weight_scale.device)
            replacing.give_buffer(module, "weight_scale", room)
    if fixed is not None and (fits or weight is None or module.input_scale is not None):
        state[f"{prefix}input_scale"] = _one("input_scale", fixed)
        if module.input_scale is None:
            room = torch.empty((), dtype=torch.float32, device=module.weight_scale.device)
            replacing.give_buffer(module, "input_scale", room)
