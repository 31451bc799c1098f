"""`MoE`, the experts of a mixture as a module; `replace_moe` puts it, or `Fp8MoE`, into a Hugging Face model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cutegemm import gating, replacing
from cutegemm.moe import moe
from cutegemm.moe_arguments import DTYPES, check_precision
from cutegemm.problem.grouped_request import MOST_GROUPS
from cutegemm.pytorch.mlp import reshape_weight
from cutegemm.pytorch.sharded import is_distributed
from cutegemm.quantized_linear import check_quantized
from cutegemm.quantized_mixture import Fp8MoE
from cutegemm.router import as_used, check_fit, choose, fit, shown, sized


class MoE(replacing.Translating):
    """A mixture of gated MLPs, forward and backward by `cutegemm.moe`: each token's sum over its experts e of weight *
    down_e(act(gate_e(x)) * up_e(x)).

    Parameters: `gate_up_proj` (num_experts, 2 * hidden_features, in_features), the rows of gate first, and `down_proj`
    (num_experts, out_features, hidden_features), by the names and in the layout of the stacked experts of Hugging
    Face's models; with `bias`, also `gate_up_proj_bias` (num_experts, 2 * hidden_features) and `down_proj_bias`
    (num_experts, out_features); with `top_k`, `router.weight` (num_experts, in_features).

    Args:
        top_k: makes a `TopKRouter`, which chooses so many experts for each token. Without it, and without `router`,
            `forward` is given the experts and weights.
        router: a module of yours in its place: called with the input, it returns (experts, weights) as `cutegemm.moe`
            takes them.
        out_features: by default in_features.
        bias: whether both products have one.
        transposed: whether the weights lie the other way, (num_experts, in_features, 2 * hidden_features) and
            (num_experts, hidden_features, out_features), as those of gpt-oss.
        activation, interleaved, precision, backend: as in `cutegemm.moe`.

    Raises:
        TypeError: a size is no integer, or the router no module.
        ValueError: no such size, activation, precision, backend or top_k, or both of top_k and router.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        top_k: int | None = None,
        out_features: int | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        router: torch.nn.Module | None = None,
        bias: bool = False,
        activation: str | gating.Function = "silu",
        interleaved: bool = False,
        transposed: bool = False,
        precision: str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype}
        *shapes, router = sized(in_features, hidden_features, num_experts, top_k, out_features, router, **options)
        for name, given in (("bias", bias), ("transposed", transposed)):
            replacing.check_constant(name, given)
        biases = [shape[:2] if bias else None for shape in shapes]
        if transposed:
            shapes = [(count, columns, rows) for count, rows, columns in shapes]
        parts = [None if each is None else torch.nn.Parameter(torch.empty(each, **options)) for each in shapes + biases]
        form = gating.Form(activation, interleaved)
        self._configure(parts, router, form, transposed, precision, backend)
        self.reset_parameters()

    def _configure(
        self, parts: Sequence[torch.nn.Parameter | None], router: torch.nn.Module | None, form: gating.Form,
        transposed: bool, precision: str | None, backend: str,
    ) -> None:  # fmt: skip
        gating.check_form(*form)
        _check_options(precision, backend)
        if router is not None and not isinstance(router, torch.nn.Module):
            raise TypeError(f"router: got {type(router).__name__}, expected a torch.nn.Module or None")
        for place in (0, 2, 1, 3):  # the order of Hugging Face's, by which an optimizer's state knows them
            self.register_parameter(NAMES[place], parts[place])
        self.router, self.transposed = router, transposed
        self.activation, self.interleaved = form
        self.precision, self.backend = precision, backend

    def _translate(self, state: dict[str, Any], prefix: str) -> None:
        if not (self.transposed or self.interleaved):
            reshape_weight(state, f"{prefix}gate_up_proj", self.gate_up_proj)

    @property
    def is_plain(self) -> bool:
        """Whether it has neither biases, nor interleaved or transposed weights, nor a function for its activation."""
        biased = self.gate_up_proj_bias is not None or self.down_proj_bias is not None
        return gating.Form(self.activation, self.interleaved).is_plain and not (biased or self.transposed)

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self.gate_up_proj.shape[0]

    def reset_parameters(self) -> None:
        """Draws weights and biases as torch.nn.Linear does: uniform within 1 / sqrt of the number of inputs."""
        biases = self.gate_up_proj_bias, self.down_proj_bias
        for weight, bias in zip(as_used(self.gate_up_proj, self.down_proj, self.transposed), biases, strict=True):
            replacing.draw(weight, bias=bias)

    def forward(
        self, input: torch.Tensor, experts: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input: (..., in_features); experts and weights: (..., top_k), instead of the router's. Returns (...,
        out_features). Gradients, autocast and torch.compile as `cutegemm.moe`.

        Raises ValueError where experts and weights are given apart, or neither is and there is no router; TypeError
        where the router returns something else.
        """
        experts, weights = choose(self.router, input, experts, weights)
        return moe(
            input, experts, weights, *as_used(self.gate_up_proj, self.down_proj, self.transposed),
            b_gate_up=self.gate_up_proj_bias, b_down=self.down_proj_bias, activation=self.activation,
            interleaved=self.interleaved, precision=self.precision, backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return shown(self, *as_used(self.gate_up_proj, self.down_proj, self.transposed))

    @classmethod
    def from_weights(
        cls,
        gate_up: torch.nn.Parameter,
        down: torch.nn.Parameter,
        *,
        b_gate_up: torch.nn.Parameter | None = None,
        b_down: torch.nn.Parameter | None = None,
        router: torch.nn.Module | None = None,
        activation: str | gating.Function = "silu",
        interleaved: bool = False,
        transposed: bool = False,
        precision: str | None = None,
        backend: str = "auto",
    ) -> MoE:
        """A MoE with these very parameters, (E, 2 F, in) and (E, out, F) (the other way if transposed), and biases
        (E, 2 F) and (E, out), not copies.

        Raises TypeError for what is no parameter, ValueError for other shapes, activation, precision or backend.
        """
        parts = {"gate_up": gate_up, "down": down, "b_gate_up": b_gate_up, "b_down": b_down}
        for number, (name, each) in enumerate(parts.items()):
            if not isinstance(each, torch.nn.Parameter) and (number < 2 or each is not None):
                raise TypeError(f"{name}: got {type(each).__name__}, expected a torch.nn.Parameter")
        replacing.check_constant("transposed", transposed)
        check_fit(gate_up, down, transposed)
        form = gating.Form(activation, interleaved)
        gating.check(form, *as_used(gate_up, down, transposed), b_gate_up, b_down)
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._configure(list(parts.values()), router, form, transposed, precision, backend)
        return made


NAMES = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
"""The parameters of a MoE, and of Hugging Face's stacked experts."""


class Stacked(NamedTuple):
    """How a module computes a mixture with stacked weights."""

    form: gating.Form
    transposed: bool = False
    biased: bool = False


def replace_moe(
    model: torch.nn.Module,
    *,
    where: Callable[[str, torch.nn.Module], bool] | None = None,
    precision: str | None = None,
    backend: str = "auto",
    dtype: Any = None,
    scaling: str | tuple[str, str] = "rows",
    accumulate: str | None = None,
) -> torch.nn.Module:
    """Replaces the experts of Hugging Face's Mixtral, Qwen3-MoE, gpt-oss and similar models, in place, by `MoE`.

    These are modules, since transformers 5, whose parameters are gate_up_proj (E, 2 F, H) and down_proj (E, H, F), or
    transposed, in fp16, bf16 or fp32, and gate_up_proj_bias and down_proj_bias or neither, called with the tokens,
    their experts and the weights. Their act_fn is SiLU or a GELU; or they have a gating of their own, with a limit as
    gpt-oss, MiniMax-M3 and DeepSeek-V4 do (`cutegemm.ops.clamped_swiglu`). One is replaced when it computes what
    `cutegemm.moe` does. A gating of its own is tried below its limit and beyond. Then the whole module is tried on two
    random tokens, unless its weights are on the meta device. One of the two is so large that a gate which clamps its
    input is found. The model calls the replacement by position, as those of transformers do. Parameters are kept, not
    copied, in their order and with their names in state_dict; the router stays the model's. Left as they are: other
    modules, experts that are sharded (expert parallelism, DTensors), quantized, or with a hook, more than 1024 of them,
    and those for which `where(name, module)` is false.

    With `dtype` ("fp8", "int8" or another one that `Fp8Linear` takes) the replacement is an `Fp8MoE`, whose weights are
    quantized now, with `scaling` and `accumulate` as there, and a `MoE` is replaced, too; `precision` is then refused.

    Returns:
        `model`, or its replacement when it is such a module itself. A UserWarning says when nothing was replaced.

    Raises:
        TypeError: no module, a `where` that cannot be called, or no such dtype.
        ValueError: no such precision, backend, scaling or accumulate, or arguments that do not go together. After
            either error `model` is as it was.
    """
    replacing.check(model, where)
    _check_options(precision, backend)
    check_quantized(dtype, scaling, accumulate, precision, backend)
    stacked_in, options = _stacked_experts, {}
    if dtype is not None:
        stacked_in, options = _quantizable, {"dtype": dtype, "scaling": scaling, "accumulate": accumulate}
    replaced, why = functools.partial(_replaced, **options), functools.partial(_why_kept, dtype is not None)
    return replacing.replace_gated(model, where, precision, backend, stacked_in, replaced, "replace_moe", why)


def _check_options(precision: Any, backend: Any) -> None:
    """Raises ValueError for a precision that products in groups have not, with which every call would fail."""
    replacing.check_options(precision, backend)
    check_precision(precision)


def _stacked_experts(module: torch.nn.Module) -> Stacked | None:
    """How a module computes, if its parameters look like stacked experts; None for any other module."""
    found = _examined(module)
    return found if isinstance(found, Stacked) else None


def _examined(module: torch.nn.Module) -> Stacked | str:
    """How a module computes, if its parameters look like stacked experts. Else why it is not replaced; "" for one that
    is no experts at all.
    """
    if isinstance(module, (MoE, Fp8MoE)):
        return f"it is {'a MoE' if isinstance(module, MoE) else 'an Fp8MoE'} already"
    # The parts of a module of TorchScript are no dict.
    if isinstance(module, torch.jit.ScriptModule) or NAMES[0] not in module._parameters:
        return ""
    own = {name: each for name, each in module._parameters.items() if each is not None}
    biased = len(own) == len(NAMES)
    if set(own) != set(NAMES if biased else NAMES[:2]) or set(module._modules) - {"act_fn"}:
        parts = ", ".join((*own, *module._modules))
        return f"it has {parts}; expected {NAMES[0]} and {NAMES[1]}, both with a _bias or neither, and act_fn"
    if any(type(x) not in replacing.PARAMETERS or x.dtype not in DTYPES for x in own.values()):
        return "its parameters are not all plain ones of fp16, bf16 or fp32"
    weights = module.gate_up_proj, module.down_proj
    shapes = [tuple(each.shape) for each in own.values()]
    misfit = f"its parameters have shapes {', '.join(map(str, shapes))}, expected those of 1 to {MOST_GROUPS} experts"
    if any(each.dim() != 3 for each in weights):
        return misfit
    transposed = not fit(*(tuple(each.shape) for each in weights))
    gate_up, down = (tuple(each.shape) for each in as_used(*weights, transposed))
    if not fit(gate_up, down) or gate_up[2] != down[1] or not 1 <= gate_up[0] <= MOST_GROUPS or 0 in gate_up:
        return misfit
    if biased and (module.gate_up_proj_bias.shape != gate_up[:2] or module.down_proj_bias.shape != down[:2]):
        return misfit
    if module._buffers or any(replacing.is_altered(each) for each in (module, *module.children())):
        return "it has buffers or hooks, or something was put over its methods"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are sharded over GPUs"
    activation = _activation_of(module)
    if activation is None:
        return "its act_fn, or a gating of its own with or without a limit, is none that is known"
    return Stacked(gating.Form(activation, getattr(module, "is_concatenated", True) is False), transposed, biased)


def _why_kept(quantizes: bool, module: torch.nn.Module) -> str:
    """Why a module was not replaced; "" for one that is no experts."""
    if quantizes and isinstance(module, MoE):
        return "it is a MoE that is sharded, changed or without elements, or `where` is false"
    found = _examined(module)
    return found if isinstance(found, str) else "on two random tokens it computes something else, or `where` is false"


def _activation_of(module: torch.nn.Module) -> str | gating.Function | None:
    """The activation that a module of transformers names by its attributes; None for one that is not known here."""
    own = getattr(module, "_apply_gate", None)  # transformers sets a default where a class has none of its own
    if getattr(own, "__name__", "_default_apply_gate") == "_default_apply_gate":
        return replacing.activation_of(getattr(module, "act_fn", None))
    limit, alpha = (
        next((found for name in names if type(found := getattr(module, name, None)) in (int, float)), None)
        for names in (("limit", "swiglu_limit"), ("alpha", "swiglu_alpha"))
    )
    if limit is None or not limit > 0:
        return None
    found = gating.ClampedSwiglu(limit) if alpha is None else gating.ClampedSwiglu(limit, alpha, 1.0)
    return found if _gates_alike(own, gating.Form(found, getattr(module, "is_concatenated", True) is False)) else None


@torch.no_grad()
def _gates_alike(own: Any, form: gating.Form) -> bool:
    """Whether a module's own gating, which needs no weights, computes what a form does, below its limit and beyond."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, 64, dtype=torch.float32, generator=generator)
    both[1] *= 2 * abs(getattr(form.activation, "limit", 1.0))
    want = form.function()(*gating.divided(both, form.interleaved))
    try:
        found = own(both)
        return bool(((found - want).abs() <= 1e-5 * want.abs().amax(1, keepdim=True)).all())
    except Exception:  # whatever it takes, it is not gate and up
        return False


def _quantizable(module: torch.nn.Module) -> Stacked | None:
    """The same of stacked experts, or of a MoE, whose weights can be quantized; None for any other module."""
    if type(module) is not MoE:
        return _stacked_experts(module)
    form, parts = gating.Form(module.activation, module.interleaved), (module.gate_up_proj, module.down_proj)
    biases = [each for each in (module.gate_up_proj_bias, module.down_proj_bias) if each is not None]
    unlike = replacing.is_altered(module) or any(
        replacing.computes_itself(x) or is_distributed(x) or x.dtype not in DTYPES or not x.numel() or x.is_neg()
        for x in (*parts, *biases)
    )
    fits = fit(*(tuple(x.shape) for x in as_used(*parts, module.transposed)))
    return None if unlike or not fits else Stacked(form, module.transposed, bool(biases))


def _replaced(module: Any, stacked: Stacked, precision: str | None, backend: str, **options: Any) -> torch.nn.Module:
    """The MoE for a module, an Fp8MoE if the options have a dtype; the module where it computes something else."""
    own = isinstance(module, MoE)
    if not own and replacing.has_values(module.gate_up_proj) and not _is_like_ours(module, stacked):
        return module
    (activation, interleaved), biases = stacked.form, (None, None)
    if stacked.biased:
        biases = module.gate_up_proj_bias, module.down_proj_bias
    make: Any = MoE.from_weights
    if options:
        make, options["router"] = Fp8MoE.from_weights, module.router if own else None
    else:
        options["precision"] = precision
    made: MoE | Fp8MoE = make(
        module.gate_up_proj, module.down_proj, b_gate_up=biases[0], b_down=biases[1], activation=activation,
        interleaved=interleaved, transposed=stacked.transposed, backend=backend, **options,
    )  # fmt: skip
    made.training = module.training  # alone: a router has its own
    return made


def _is_like_ours(module: Any, stacked: Stacked) -> bool:
    """Whether a module computes what `cutegemm.moe` does, with the first and the last of its experts."""
    form = stacked.form

    def attempt(gate_up_proj: Any, down_proj: Any, **biases: Any) -> Any:
        wide, narrow = as_used(gate_up_proj, down_proj, stacked.transposed)
        x, experts = replacing.probe(wide[0]), (0, wide.shape[0] - 1)
        chosen = torch.tensor([experts] * 2, device=x.device)
        weights = torch.tensor([[0.75, 0.25], [0.5, 0.25]], dtype=x.dtype, device=x.device)
        want = torch.zeros(2, narrow.shape[1], dtype=torch.float32, device=x.device)
        for expert, weight in zip(experts, weights.float().t(), strict=True):
            of_both, of_down = (biases[name][expert].float() if biases else 0.0 for name in NAMES[2:])
            both = x.float() @ wide[expert].float().t() + of_both
            gate, up = gating.divided(both, form.interleaved)
            want += (form.function()(gate, up) @ narrow[expert].float().t() + of_down) * weight[:, None]
        return want, (x, chosen, weights)

    # A bias, where weights are small, may be all that shows of a result.
    return replacing.computes(module, attempt, draws=stacked.biased)
