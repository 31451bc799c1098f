"""`MoE`, the experts of a mixture as a module; `replace_moe` puts it, or `Fp8MoE`, into a Hugging Face model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cutegemm import replacing
from cutegemm.moe import DTYPES, check_precision, moe
from cutegemm.problem.grouped_request import MOST_GROUPS
from cutegemm.problem.reference import activate
from cutegemm.pytorch.mlp import check_activation, reshape_weight
from cutegemm.pytorch.sharded import is_distributed
from cutegemm.quantized_linear import check_quantized
from cutegemm.quantized_mixture import Fp8MoE
from cutegemm.router import check_fit, choose, fit, sized


class MoE(replacing.Translating):
    """A mixture of gated MLPs, forward and backward by `cutegemm.moe`: each token's sum over its experts e of weight *
    down_e(act(gate_e(x)) * up_e(x)).

    Parameters: `gate_up_proj` (num_experts, 2 * hidden_features, in_features), the rows of gate first, and `down_proj`
    (num_experts, out_features, hidden_features), by the names and in the layout of the stacked experts of Hugging
    Face's models; with `top_k`, also `router.weight` (num_experts, in_features).

    Args:
        top_k: makes a `TopKRouter`, which chooses so many experts for each token. Without it, and without `router`,
            `forward` is given the experts and weights.
        router: a module of yours in its place: called with the input, it returns (experts, weights) as `cutegemm.moe`
            takes them.
        out_features: by default in_features.
        activation, precision, backend: as in `cutegemm.moe`.

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
        activation: str = "silu",
        precision: str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype}
        *shapes, router = sized(in_features, hidden_features, num_experts, top_k, out_features, router, **options)
        gate_up, down = (torch.nn.Parameter(torch.empty(shape, **options)) for shape in shapes)
        self._configure(gate_up, down, router, activation, precision, backend)
        self.reset_parameters()

    def _configure(
        self, gate_up: torch.nn.Parameter, down: torch.nn.Parameter, router: torch.nn.Module | None, activation: str,
        precision: str | None, backend: str,
    ) -> None:  # fmt: skip
        check_activation(activation)
        _check_options(precision, backend)
        if router is not None and not isinstance(router, torch.nn.Module):
            raise TypeError(f"router: got {type(router).__name__}, expected a torch.nn.Module or None")
        self.gate_up_proj, self.down_proj, self.router = gate_up, down, router
        self.activation, self.precision, self.backend = activation, precision, backend

    def _translate(self, state: dict[str, Any], prefix: str) -> None:
        reshape_weight(state, f"{prefix}gate_up_proj", self.gate_up_proj)

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self.gate_up_proj.shape[0]

    def reset_parameters(self) -> None:
        """Draws the experts' weights as torch.nn.Linear does: uniform within 1 / sqrt of the number of inputs."""
        replacing.draw(self.gate_up_proj)
        replacing.draw(self.down_proj)

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
            input, experts, weights, self.gate_up_proj, self.down_proj, activation=self.activation,
            precision=self.precision, backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        count, rows, hidden = self.down_proj.shape
        text = f"in_features={self.gate_up_proj.shape[-1]}, hidden_features={hidden}, num_experts={count}"
        return f"{text}, out_features={rows}, activation={self.activation!r}"

    @classmethod
    def from_weights(
        cls,
        gate_up: torch.nn.Parameter,
        down: torch.nn.Parameter,
        *,
        router: torch.nn.Module | None = None,
        activation: str = "silu",
        precision: str | None = None,
        backend: str = "auto",
    ) -> MoE:
        """A MoE with these very parameters, (E, 2 F, in) and (E, out, F), not copies.

        Raises TypeError for what is no parameter, ValueError for other shapes, activation, precision or backend.
        """
        for name, each in (("gate_up", gate_up), ("down", down)):
            if not isinstance(each, torch.nn.Parameter):
                raise TypeError(f"{name}: got {type(each).__name__}, expected a torch.nn.Parameter")
        check_fit(gate_up, down)
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._configure(gate_up, down, router, activation, precision, backend)
        return made


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
    """Replaces the experts of Hugging Face's Mixtral, Qwen3-MoE and similar models, in place, by `MoE`.

    These are modules, since transformers 5, whose parameters are gate_up_proj (E, 2 F, H) and down_proj (E, H, F), in
    fp16, bf16 or fp32, with act_fn SiLU or a GELU, called with the tokens, their experts and the weights. One is
    replaced when it computes what `cutegemm.moe` does, which is tried on two random tokens, one of them so large that a
    gate which clamps its input is found, unless its weights are on the meta device. Parameters are kept, not
    copied, with their names in state_dict; the router stays the model's. Left as they are: other modules, experts with
    a bias, transposed, sharded (expert parallelism, DTensors), quantized, or with a hook, more than 1024 of them, and
    those for which `where(name, module)` is false.

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
    activation_in, options = _gated_activation, {}
    if dtype is not None:
        activation_in, options = _quantizable, {"dtype": dtype, "scaling": scaling, "accumulate": accumulate}
    replaced = functools.partial(_replaced, **options)
    return replacing.replace_gated(model, where, precision, backend, activation_in, replaced, "replace_moe")


def _check_options(precision: Any, backend: Any) -> None:
    """Raises ValueError for a precision that products in groups have not, with which every call would fail."""
    replacing.check_options(precision, backend)
    check_precision(precision)


def _gated_activation(module: torch.nn.Module) -> str | None:
    """The activation of a module that looks like stacked experts, None for any other."""
    if isinstance(module, torch.jit.ScriptModule):  # whose parts are no dict
        return None
    if set(module._parameters) != {"gate_up_proj", "down_proj"} or set(module._modules) - {"act_fn"}:
        return None
    gate_up, down = module.gate_up_proj, module.down_proj
    if any(type(each) not in replacing.PARAMETERS or each.dtype not in DTYPES for each in (gate_up, down)):
        return None
    shapes = tuple(gate_up.shape), tuple(down.shape)
    if not fit(*shapes) or shapes[0][2] != shapes[1][1] or not 1 <= shapes[0][0] <= MOST_GROUPS or 0 in shapes[0]:
        return None
    if module._buffers or any(replacing.is_altered(each) for each in (module, *module.children())):
        return None
    gating = getattr(module, "_apply_gate", None)  # transformers sets a default where a class has none of its own
    if getattr(gating, "__name__", "_default_apply_gate") != "_default_apply_gate":
        return None
    if isinstance(module, MoE) or getattr(module, "_is_expert_parallel", False):
        return None
    return replacing.activation_of(getattr(module, "act_fn", None))


def _quantizable(module: torch.nn.Module) -> str | None:
    """The activation of stacked experts, or of a MoE whose weights can be quantized; None for any other module."""
    if type(module) is not MoE:
        return _gated_activation(module)
    parts = module.gate_up_proj, module.down_proj
    unlike = replacing.is_altered(module) or any(
        replacing.computes_itself(x) or is_distributed(x) or x.dtype not in DTYPES or not x.numel() or x.is_neg()
        for x in parts
    )
    return None if unlike or not fit(*(tuple(x.shape) for x in parts)) else module.activation


def _replaced(module: Any, activation: str, precision: str | None, backend: str, **options: Any) -> torch.nn.Module:
    """The MoE for a module, an Fp8MoE if the options have a dtype; the module where it computes something else."""
    own = isinstance(module, MoE)
    if not own and replacing.has_values(module.gate_up_proj) and not _is_like_ours(module, activation):
        return module
    weights = module.gate_up_proj, module.down_proj
    made: MoE | Fp8MoE
    if options:
        router = module.router if own else None
        made = Fp8MoE.from_weights(*weights, router=router, activation=activation, backend=backend, **options)
    else:
        made = MoE.from_weights(*weights, activation=activation, precision=precision, backend=backend)
    made.training = module.training  # alone: a router has its own
    return made


def _is_like_ours(module: Any, activation: str) -> bool:
    """Whether a module computes what `cutegemm.moe` does, with the first and the last of its experts."""

    def attempt(gate_up_proj: Any, down_proj: Any) -> Any:
        x, experts = replacing.probe(gate_up_proj[0]), (0, gate_up_proj.shape[0] - 1)
        chosen = torch.tensor([experts] * 2, device=x.device)
        weights = torch.tensor([[0.75, 0.25], [0.5, 0.25]], dtype=x.dtype, device=x.device)
        want = torch.zeros(2, down_proj.shape[1], device=x.device)
        for expert, weight in zip(experts, weights.float().t(), strict=True):
            gate, up = (x.float() @ gate_up_proj[expert].float().t()).chunk(2, -1)
            want += (activate(gate, activation) * up) @ down_proj[expert].float().t() * weight[:, None]
        return want, (x, chosen, weights)

    return replacing.computes(module, attempt)
