"""`Linear`, `Fp8Linear`, `SwiGLU`, `Fp8SwiGLU`, `MoE` and `Fp8MoE`: layers, gated MLPs and mixtures of them by these
kernels; `replace_linears`, `replace_mlps` and `replace_moe` put them into a model; `compare` tells how far a quantized
model is from the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cutegemm import replacing
from cutegemm.comparison import Comparison, LayerError, compare
from cutegemm.linear import as_rows, linear
from cutegemm.mixture import MoE, replace_moe
from cutegemm.moe_arguments import DTYPES
from cutegemm.problem import dtypes, request
from cutegemm.problem.quantization import INPUTS
from cutegemm.problem.reference import activate
from cutegemm.pytorch import autocast, mlp
from cutegemm.pytorch.sharded import is_distributed
from cutegemm.quantized_linear import FORWARDS, Fp8Linear, check_quantized, why_not_quantized
from cutegemm.quantized_mixture import Fp8MoE
from cutegemm.quantized_mlp import Fp8SwiGLU
from cutegemm.router import TopKRouter

__all__ = [
    "Comparison", "Fp8Linear", "Fp8MoE", "Fp8SwiGLU", "LayerError", "Linear", "MoE", "SwiGLU", "TopKRouter", "compare",
    "replace_linears", "replace_mlps", "replace_moe",
]  # fmt: skip


class Linear(torch.nn.Linear):
    """activation(x @ weight^T + bias), forward and backward by cutegemm's kernels.

    Parameters, their initial values, state_dict and repr are those of torch.nn.Linear, of which it is a subclass.

    Args:
        in_features, out_features, bias, device, dtype: as in torch.nn.Linear; `dtype` one that `cutegemm.gemm` accepts.
        activation: as in `cutegemm.gemm`, fused into the product.
        precision, backend: as in `cutegemm.gemm`.
        constant_weight: promises that no running kernel writes the weight when `forward` is called: as
            `cutegemm.gemm(..., constant="b")`, for inference.

    Raises:
        ValueError: no such activation, precision or backend.
        TypeError: constant_weight is not a bool.
    """

    activation: str | None = None
    precision: str | None = None
    backend: str = "auto"
    constant_weight: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        precision: str | None = None,
        backend: str = "auto",
        constant_weight: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._configure(activation, precision, backend, constant_weight)

    def _configure(self, activation: str | None, precision: str | None, backend: str, constant_weight: bool) -> None:
        request.check_activation(activation)
        replacing.check_options(precision, backend)
        replacing.check_constant("constant_weight", constant_weight)
        self.activation, self.precision, self.backend = activation, precision, backend
        self.constant_weight = constant_weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(
            input, self.weight, self.bias, self.activation, precision=self.precision, backend=self.backend,
            constant_weight=self.constant_weight,
        )  # fmt: skip

    def extra_repr(self) -> str:
        text = super().extra_repr()
        defaults = {"activation": None, "precision": None, "backend": "auto", "constant_weight": False}
        for name, default in defaults.items():
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)!r}"
        return text

    @classmethod
    def from_linear(
        cls,
        module: torch.nn.Linear,
        *,
        activation: str | None = None,
        precision: str | None = None,
        backend: str = "auto",
        constant_weight: bool = False,
    ) -> Linear:
        """A Linear with the very parameters (not copies), hooks and training mode of `module`.

        Raises:
            TypeError: `module` is no torch.nn.Linear, is of a subclass that may compute something else, or has a
                weight that no kernel takes: by its dtype, sparse, or of a subclass of Tensor that computes itself.
            ValueError: no such activation, precision or backend.
        """
        reason = _why_not(module)
        if reason is not None:
            raise TypeError(f"module: {reason}")
        made = cls.__new__(cls)
        made.__dict__.update({name: _own(value) for name, value in module.__dict__.items()})
        made._compiled_call_impl = None  # of a module compiled in place, which would call the old one
        made._configure(activation, precision, backend, constant_weight)
        for number, hook in made._load_state_dict_pre_hooks.items():
            if getattr(hook, "with_module", False):  # it would be called with the old module, or find that one gone
                made._load_state_dict_pre_hooks[number] = type(hook)(hook.hook, made)
        return made


FORWARDS.append(Linear.forward)


def replace_linears(
    model: torch.nn.Module,
    *,
    where: Callable[[str, torch.nn.Linear], bool] | None = None,
    precision: str | None = None,
    backend: str = "auto",
    constant_weights: bool = False,
    dtype: Any = None,
    scaling: str | tuple[str, str] = "rows",
    accumulate: str | None = None,
) -> torch.nn.Module:
    """Replaces every torch.nn.Linear in `model`, in place, by a `Linear` with the same parameters.

    With `dtype` ("fp8", "int8" or another one that `Fp8Linear` takes) the replacement is an `Fp8Linear`, whose weight
    is quantized now, with `scaling` and `accumulate` as there, and every `Linear` of ours is replaced, too; `precision`
    is then refused. The memory of a replaced weight is freed when nothing else holds it: a weight tied to an embedding
    stays. Layers that must be exact, often the last one, are left out by `where`.

    Left as they are: modules of subclasses of torch.nn.Linear (quantized ones, say), those with a dtype that no kernel
    takes, those whose weight is sparse or of a subclass of Tensor that computes itself (torchao's quantized weights;
    DTensors are taken), parametrized ones, with `dtype` those whose weight a hook makes (weight_norm, pruning) or that
    have parameters, buffers or children besides weight and bias, and those for which `where(name, module)` is false.
    Tied parameters stay tied, and a module that stands in several places is replaced by one.

    constant_weights=True promises that no running kernel writes a weight when its layer is called, so that a layer may
    fetch its weight while the kernel in front still runs: for inference with weights that stay as they are. Not for
    training, whose optimizer writes them, nor for FSDP, which gathers them; DTensors are refused.

    Returns:
        `model`, or its replacement when it is a torch.nn.Linear itself. A UserWarning says when nothing was replaced.

    Raises:
        TypeError: `model` is no module, `where` cannot be called, `constant_weights` is no bool, or there is no such
            dtype.
        ValueError: no such precision, backend, scaling or accumulate, or arguments that do not go together. After
            either error `model` is as it was.
    """
    replacing.check(model, where)
    replacing.check_options(precision, backend)
    replacing.check_constant("constant_weights", constant_weights)
    check_quantized(dtype, scaling, accumulate, precision, backend)
    made: dict[int, torch.nn.Module] = {}

    def is_chosen(name: str, module: torch.nn.Module) -> bool:
        if _why_not(module, dtype is not None) is not None or not replacing.is_chosen_by(where, name, module):
            return False
        return dtype is None or (module.weight.dtype in INPUTS and why_not_quantized(module) is None)

    def replacement(module: torch.nn.Module) -> torch.nn.Module:
        assert isinstance(module, torch.nn.Linear)
        if id(module) not in made:
            if dtype is None:
                made[id(module)] = Linear.from_linear(
                    module, precision=precision, backend=backend, constant_weight=constant_weights
                )
            else:
                made[id(module)] = Fp8Linear.from_linear(
                    module, dtype, scaling=scaling, accumulate=accumulate, backend=backend,
                    constant_weight=constant_weights,
                )  # fmt: skip
            replacing.share_hooks(made[id(module)], module)
        return made[id(module)]

    replaced = replacing.replace_modules(model, is_chosen, replacement, "replace_linears")
    _leave_fast_paths(replaced)
    return replaced


def _leave_fast_paths(model: torch.nn.Module) -> None:
    """Has torch's encoders call their layers; in inference they hand the weights to an operator of torch's.

    The flags are those by which torch says that an encoder layer's activation, or an encoder, has no such operator.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer) and any(
            isinstance(each, Linear | Fp8Linear) for each in module.modules()
        ):
            module.activation_relu_or_gelu = 0
        if isinstance(module, torch.nn.TransformerEncoder) and any(
            isinstance(each, Linear | Fp8Linear) for each in module.layers.modules()
        ):
            module.use_nested_tensor = False


class SwiGLU(replacing.Translating):
    """The gated MLP of Llama, Qwen, Mistral and Gemma: down(act(gate(x)) * up(x)), forward and backward by cutegemm.

    The gating is the epilogue of one product with the stacked weight [gate; up], and its derivative that of a product
    in the backward pass, so that neither the 2 * hidden columns of the product nor the gradient of the hidden layer
    take a pass through memory of their own.

    Parameters: `gate_up_weight` (2 * hidden_features, in_features), the rows of gate first, and `down_weight`
    (out_features, hidden_features); no biases. They are the names in state_dict. `load_state_dict` also takes the three
    weights of the models above, gate_proj.weight, up_proj.weight and down_proj.weight, and a `gate_up_weight` (2,
    hidden_features, in_features), which it is where `cutegemm.parallel.GatedParallel` has sharded the module.

    Args:
        out_features: by default in_features.
        activation: "silu" (SwiGLU), "gelu", "gelu_tanh" (Gemma) or "relu".
        precision, backend: as in `cutegemm.gemm`.
        constant_weights: promises that no running kernel writes the weights when `forward` is called, as
            `cutegemm.gemm(..., constant="b")` of both products, for inference. DTensors are refused then.

    Raises:
        TypeError: a size that is no integer; constant_weights is no bool.
        ValueError: a negative size; no such activation, precision or backend.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str = "silu",
        precision: str | None = None,
        backend: str = "auto",
        constant_weights: bool = False,
    ) -> None:
        super().__init__()
        in_features = replacing.as_size("in_features", in_features)
        hidden_features = replacing.as_size("hidden_features", hidden_features)
        out_features = in_features if out_features is None else replacing.as_size("out_features", out_features)
        options = {"device": device, "dtype": dtype}
        self._configure(
            torch.empty((2 * hidden_features, in_features), **options),
            torch.empty((out_features, hidden_features), **options),
            mlp.Settings(activation, precision, backend, constant_weights),
        )
        self.reset_parameters()

    def _configure(self, gate_up: torch.Tensor, down: torch.Tensor, settings: mlp.Settings) -> None:
        mlp.check_activation(settings.activation)
        replacing.check_options(settings.precision, settings.backend)
        replacing.check_constant("constant_weights", settings.constant_weights)
        self.gate_up_weight = torch.nn.Parameter(gate_up)
        self.down_weight = torch.nn.Parameter(down)
        self.settings = settings

    def _translate(self, state: dict[str, Any], prefix: str) -> None:
        mlp.stack_weights(self.gate_up_weight, state, prefix)

    def reset_parameters(self) -> None:
        """Draws the weights as torch.nn.Linear does: uniform within 1 / sqrt of the number of inputs."""
        replacing.draw(self.gate_up_weight)
        replacing.draw(self.down_weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: (..., in_features), fp16, bf16 or fp32. Returns (..., out_features). Gradients, autocast and
        torch.compile as `gemm`.

        Raises TypeError or ValueError for an input that is no such tensor.
        """
        if not torch.compiler.is_dynamo_compiling():
            weights = self._parameters.get("gate_up_weight"), self._parameters.get("down_weight")
            found = mlp.known(input, *weights, self.settings)
            if found is not None:
                return found
        replacing.check_input(input, self.gate_up_weight)
        columns = self.gate_up_weight.shape[-1]
        if input.dim() == 0 or input.shape[-1] != columns:
            raise ValueError(f"input: got shape {tuple(input.shape)}, expected (..., {columns})")
        if input.dtype not in DTYPES:
            raise TypeError(f"input: got dtype {input.dtype}, accepted are {', '.join(map(str, DTYPES))}")
        if input.dtype != (own := self.gate_up_weight.dtype) and not autocast.is_on(input.device.type):
            raise TypeError(f"input: got dtype {input.dtype}, expected that of gate_up_weight, {own}")
        rows = as_rows(input) if input.dim() != 2 else input
        result = mlp.gated_mlp(rows, self.gate_up_weight, self.down_weight, self.settings)
        return result.view(*input.shape[:-1], self.down_weight.shape[0])

    def extra_repr(self) -> str:
        rows, hidden = self.down_weight.shape
        text = f"in_features={self.gate_up_weight.shape[-1]}, hidden_features={hidden}, out_features={rows}"
        text += f", activation={self.settings.activation!r}"
        return text + (", constant_weights=True" if self.settings.constant_weights else "")

    @classmethod
    def from_weights(
        cls,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        *,
        activation: str = "silu",
        precision: str | None = None,
        backend: str = "auto",
        constant_weights: bool = False,
    ) -> SwiGLU:
        """A SwiGLU with copies of gate and up, each (hidden, in), stacked, and with `down`, (out, hidden), itself.

        Raises TypeError for what is no dense tensor in one of fp16, bf16 and fp32 for all, and a `constant_weights`
        that is no bool; ValueError for other shapes or devices, activation, precision or backend.
        """
        mlp.check_weights(gate, up, down)
        if gate.dtype not in DTYPES:
            raise TypeError(f"gate: got dtype {gate.dtype}, accepted are {', '.join(map(str, DTYPES))}")
        for name, each in (("up", up), ("down", down)):
            if each.dtype != gate.dtype:
                raise TypeError(f"{name}: got dtype {each.dtype}, expected that of gate, {gate.dtype}")
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        with torch.no_grad():
            stacked = torch.cat((gate, up))
        made._configure(stacked, down.detach(), mlp.Settings(activation, precision, backend, constant_weights))
        made.gate_up_weight.requires_grad_(gate.requires_grad or up.requires_grad)
        made.down_weight = down if isinstance(down, torch.nn.Parameter) else made.down_weight
        return made


def replace_mlps(
    model: torch.nn.Module,
    *,
    where: Callable[[str, torch.nn.Module], bool] | None = None,
    precision: str | None = None,
    backend: str = "auto",
    constant_weights: bool = False,
    dtype: Any = None,
    scaling: str | tuple[str, str] = "rows",
    accumulate: str | None = None,
) -> torch.nn.Module:
    """Replaces the MLPs of Hugging Face's Llama, Qwen, Mistral and Gemma models, in place, by `SwiGLU`.

    An MLP is a module whose children are gate_proj, up_proj and down_proj, each a torch.nn.Linear without a bias, and
    perhaps act_fn; act_fn is SiLU or a GELU (erf or tanh). It is replaced when down_proj(act_fn(gate_proj(x)) *
    up_proj(x)) is what it computes, which is tried on two random rows in its own dtype, one of them so large that a
    gate which is clamped is found, unless its weights are fake or on the meta device. Its gate and up are copied once,
    into one parameter, and so are their gradients: an optimizer made before holds the old ones, so make it afterwards.
    state_dict then has the names of `SwiGLU`, which loads both these and the old ones.

    These modules are left as they are: all others; those with a hook, or with a dtype that no kernel takes; those with
    sharded or sparse weights; those of whose gate and up only one requires grad, or one is tied to another weight; and
    those for which `where(name, module)` is false. Without `dtype` also those whose gate or up has a hook for its
    gradient, or a gradient that is sparse or of another dtype.

    constant_weights=True makes the promise of `SwiGLU`, as it does in `replace_linears`: for inference with weights
    that stay as they are.

    With `dtype` ("fp8", "int8" or another one that `Fp8Linear` takes) the replacement is an `Fp8SwiGLU`, with `scaling`
    and `accumulate` as there, and a `SwiGLU` is replaced, too; `precision` is then refused. A weight of down_proj that
    is tied to another stays as it is there, and the replacement has a quantized copy. Call it before
    `replace_linears(model, dtype=...)`, which replaces the other layers.

    Returns:
        `model`, or its replacement when it is such an MLP itself. A UserWarning says when nothing was replaced.

    Raises:
        TypeError: no module, a `where` that cannot be called, a `constant_weights` that is no bool, or no such dtype.
        ValueError: no such precision, backend, scaling or accumulate, or arguments that do not go together. After
            either error `model` is as it was.
    """
    replacing.check(model, where)
    replacing.check_options(precision, backend)
    replacing.check_constant("constant_weights", constant_weights)
    check_quantized(dtype, scaling, accumulate, precision, backend)
    tied, shared = replacing.tied(model), replacing.tied(model, by_place=False)

    def activation_in(module: torch.nn.Module) -> str | None:
        if type(module) is SwiGLU and dtype is not None:
            unlike = id(module.gate_up_weight) in shared or replacing.is_altered(module) or any(
                replacing.computes_itself(each) or is_distributed(each) for each in module.parameters()
            )  # fmt: skip
            return None if unlike else module.settings.activation
        found = _gated_activation(module)
        copied = () if found is None else (module.gate_proj, module.up_proj)
        lost = dtype is None and not all(replacing.can_be_stacked(each.weight) for each in copied)
        return None if lost or any(id(each.weight) in tied for each in copied) else found

    options: dict[str, Any] = {"constant_weights": constant_weights}
    if dtype is not None:
        options |= {"dtype": dtype, "scaling": scaling, "accumulate": accumulate}
    replaced = functools.partial(_replaced, **options)
    return replacing.replace_gated(model, where, precision, backend, activation_in, replaced, "replace_mlps")


def _gated_activation(module: torch.nn.Module) -> str | None:
    """The activation of a module that looks like a gated MLP, None for any other."""
    names = {"gate_proj", "up_proj", "down_proj"}
    if isinstance(module, torch.jit.ScriptModule):  # whose parts are no dict
        return None
    if set(module._modules) - {"act_fn"} != names or module._parameters or module._buffers:
        return None
    linears = [getattr(module, name) for name in names]
    if any(_why_not(each) is not None or each.bias is not None for each in linears):
        return None
    if any(type(each.weight) not in replacing.PARAMETERS for each in linears):
        return None
    if len({(each.weight.dtype, each.weight.device) for each in linears}) != 1:
        return None
    gate, up, down = (tuple(getattr(module, name).weight.shape) for name in ("gate_proj", "up_proj", "down_proj"))
    if len(gate) != 2 or gate != up or len(down) != 2 or down[1] != gate[0] or 0 in (*gate, *down):
        return None
    if any(replacing.is_altered(each) for each in (module, *module.children())):
        return None
    if module.gate_proj.weight.requires_grad != module.up_proj.weight.requires_grad:
        return None
    return replacing.activation_of(getattr(module, "act_fn", None))


def _replaced(module: Any, activation: str, precision: str | None, backend: str, **options: Any) -> torch.nn.Module:
    """The SwiGLU for a module, in 8 bits if the options have a dtype; the module where it computes something else."""
    if isinstance(module, SwiGLU):
        gate, up = module.gate_up_weight.flatten(0, -2).chunk(2)
        down = module.down_weight
    else:
        gate, up, down = module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight
        if replacing.has_values(gate) and not _is_like_ours(module, activation):
            return module
    made: SwiGLU | Fp8SwiGLU
    if "dtype" in options:
        if gate.dtype not in INPUTS:
            return module
        made = Fp8SwiGLU.from_weights(gate, up, down, activation=activation, backend=backend, **options)
    else:
        made = SwiGLU.from_weights(
            gate, up, down, activation=activation, precision=precision, backend=backend, **options
        )
        if any(each.grad is not None for each in (gate, up)):
            grads = [torch.zeros_like(each) if each.grad is None else each.grad.detach() for each in (gate, up)]
            made.gate_up_weight.grad = torch.cat(grads)
    return made.train(module.training)


def _is_like_ours(module: Any, activation: str) -> bool:
    """Whether a module computes the gated MLP of its weights."""

    def attempt(gate_proj_weight: Any, up_proj_weight: Any, down_proj_weight: Any) -> Any:
        x = replacing.probe(gate_proj_weight)
        gate, up = (x.float() @ each.float().t() for each in (gate_proj_weight, up_proj_weight))
        return (activate(gate, activation) * up) @ down_proj_weight.float().t(), (x,)

    return replacing.computes(module, attempt)


def _why_not(module: Any, ours_too: bool = False) -> str | None:
    """Why `Linear`, or where `ours_too` an `Fp8Linear`, cannot stand for this module, or None."""
    if type(module) is not torch.nn.Linear and not (ours_too and type(module) is Linear):
        return (
            f"got {type(module).__name__}, expected a torch.nn.Linear (no subclass, which may compute something else)"
        )
    if "forward" in module.__dict__:
        return "got a torch.nn.Linear whose forward was replaced"
    if module.weight.layout != torch.strided:
        return f"got a weight of layout {module.weight.layout}, expected a dense (strided) one"
    if replacing.computes_itself(module.weight):
        return f"got a weight of {type(module.weight).__name__}, which has products of its own"
    if dtypes.dtype_name(module.weight.dtype) is None:
        return f"got a weight of {module.weight.dtype}, accepted are {dtypes.ACCEPTED_TERMS}"
    if module.weight.dtype.itemsize == 1:
        return f"got a quantized weight, of {module.weight.dtype}; pass it to Fp8Linear.from_quantized with its scale"
    return None


def _own(value: Any) -> Any:
    """A module's registries (parameters, hooks) are copied, what they hold is shared."""
    return value.copy() if isinstance(value, dict) else value
