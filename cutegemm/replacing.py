"""What the modules of ours, and the functions that put them into a model, share."""

from __future__ import annotations

import operator
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor

from cutegemm import backend as backends
from cutegemm.problem import request
from cutegemm.pytorch.sharded import is_distributed
from cutegemm.torch_backend import cpu_rounds

_ACTIVATION_CLASSES = {
    "SiLUActivation": "silu", "PytorchGELUTanh": "gelu_tanh", "GELUTanh": "gelu_tanh", "GELUActivation": "gelu",
}  # fmt: skip
"""Names of classes in transformers, which need not be installed; what they compute is tried."""
FORWARD_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
_OTHER_HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
"""Registries of a module's hooks, of its forward pass and others."""


def check(model: Any, where: Any, name: str = "model") -> None:
    """Raises TypeError unless the model called `name` is a module, and `where` None or callable."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name}: got {_kind(model)}, expected a torch.nn.Module")
    if where is not None and not callable(where):
        raise TypeError(f"where: got {_kind(where)}, expected a function of a name and a module, or None")


def check_constant(name: str, given: Any) -> None:
    """Raises TypeError unless the argument `name`, say a promise about weights, is a bool."""
    if not isinstance(given, bool):
        raise TypeError(f"{name}: got {type(given).__name__}, accepted are True and False")


def check_options(precision: Any, backend: Any) -> None:
    """Raises ValueError for an unknown precision or backend."""
    request.check_precision(precision)
    backends.check_name(backend)


def check_input(input: Any, weight: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless a layer's input is a dense tensor where its weight is."""
    request.check_type("input", input)
    if input.is_nested or input.layout != torch.strided:
        what = "a nested tensor" if input.is_nested else f"layout {input.layout}"
        raise TypeError(f"input: got {what}, expected a dense (strided) torch.Tensor")
    request.check_device("input", input, weight.device, "the weight")
    if not torch.compiler.is_dynamo_compiling() and input.is_neg():
        raise ValueError("input: it is a lazily negated view; call .resolve_neg()")


def draw(weight: torch.Tensor, generator: torch.Generator | None = None, bias: torch.Tensor | None = None) -> None:
    """Draws a weight, and a bias, as torch.nn.Linear does: uniform within 1 / sqrt of the number of inputs."""
    bound = max(weight.shape[-1], 1) ** -0.5
    for each in (weight, bias):
        if each is not None:
            torch.nn.init.uniform_(each, -bound, bound, generator)


@torch.no_grad()
def probe(gate: torch.Tensor) -> torch.Tensor:
    """Two random rows, by which a module with the weight `gate` (columns, inputs) shows what it computes.

    The second has gates of 64: a clamp that belongs to an activation is at 7 to 30 in the models that have one.
    """
    generator = torch.Generator(gate.device).manual_seed(0)
    x = torch.randn((2, gate.shape[1]), dtype=torch.float32, device=gate.device, generator=generator)
    x[1] *= 64 / (x[1] @ gate.float().t()).abs().amax().clamp(min=1e-3)
    return x.to(gate.dtype)


Attempt = Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
"""attempt(**parameters) -> (what a module with these should give, (2, columns) in fp32; the inputs, x first)"""


@torch.no_grad()
def computes(module: Any, attempt: Attempt, draws: bool = False) -> bool:
    """Whether a module computes what `attempt` says of its parameters, which it gets with underscores in place of dots,
    up to the rounding of results on their way, as torch does it: in training and in evaluation, whose mode it keeps.

    Where that is zero, as with weights that are zero before training, other weights are tried; with `draws` everywhere.
    """
    own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    drawn: dict[str, torch.Tensor] | None = None
    want, inputs = attempt(**_as_arguments(own))
    if draws or not want.abs().amax(1).all():
        drawn = {name: torch.empty_like(each) for name, each in own.items()}
        generator = torch.Generator(want.device).manual_seed(0)
        for each in drawn.values():
            draw(each, generator)
        want, inputs = attempt(**_as_arguments(drawn))
    limits = _rounding(inputs[0]) * want.abs().amax(1)
    modes = [(each, each.training) for each in module.modules()]
    # A dropout draws random numbers, which those of the caller do not depend on.
    with torch.random.fork_rng([want.device] if want.is_cuda else []):
        try:
            for training in (True, False):
                for each, _ in modes:
                    each.training = training
                found = (torch.func.functional_call(module, drawn, inputs) if drawn else module(*inputs)).float()
                if found.shape != want.shape or not bool(((found - want).abs().amax(1) <= limits).all()):
                    return False
        except Exception:  # whatever it is called with, it is not what was looked for
            return False
        finally:
            for each, training in modes:
                each.training = training
    return True


def _as_arguments(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace(".", "_"): each.detach() for name, each in parameters.items()}


def _rounding(x: torch.Tensor) -> float:
    """The part of a row's largest element by which torch's own results may differ; of fp32 it may be told to round."""
    if x.dtype == torch.float32 and x.is_cuda:
        return 0.005
    if x.dtype == torch.float32:
        return 0.02 if cpu_rounds() else 1e-4
    return 0.005 if x.dtype == torch.float16 else 0.02


def as_size(name: str, value: Any, least: int = 0, most: int | None = None, what: str = "") -> int:
    """The value as an int. Raises TypeError or ValueError naming it unless it is an integer within the bounds."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    if found < least or (most is not None and found > most):
        accepted = f"{least} or more" if most is None else f"{least} to {most}{what}"
        raise ValueError(f"{name}: got {found}, accepted are {accepted}")
    return found


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


_REASONS = 4
"""Reasons that the warning gives at most."""


def replace_modules(
    model: torch.nn.Module,
    is_chosen: Callable[[str, torch.nn.Module], bool],
    replacement: Callable[[torch.nn.Module], torch.nn.Module],
    caller: str,
    depth: int = 3,
    why: Callable[[torch.nn.Module], str] = lambda module: "",
) -> torch.nn.Module:
    """Puts replacement(module) in the place of every module that is chosen, in place; returns what stands for `model`
    itself. `is_chosen` is called for every place of a module that stands in several, and for all modules before the
    first one is replaced. Where none is replaced it warns in the name of `caller`, a function of `cutegemm.nn` whose
    caller is `depth` calls away. `why` says why a module that looks like one of those is none; "" of others.
    """
    places = [
        (parent, name, child, is_chosen(f"{prefix}.{name}" if prefix else name, child))
        for prefix, parent in model.named_modules(remove_duplicate=True)
        for name, child in parent._modules.items()
        if child is not None and not is_compiled(parent)  # which calls the module that it was made of
    ]
    whole, is_replaced = is_chosen("", model), False
    todo = [(parent, name, child) for parent, name, child, chosen in reversed(places) if chosen]
    del places
    while todo:  # one after the other, so that the memory of what was replaced is free for the next one
        parent, name, child = todo.pop()
        made = replacement(child)
        is_replaced = is_replaced or made is not child
        setattr(parent, name, made)
        del child
    result = replacement(model) if whole else model
    if not is_replaced and result is model:
        first: dict[str, str] = {}  # the module that has each reason
        for name, module in model.named_modules():
            first.setdefault(why(module), name or "`model` itself")
        first.pop("", None)
        shown = "".join(f"; {name}: {reason}" for reason, name in list(first.items())[:_REASONS])
        warnings.warn(
            f"{caller}: nothing was replaced: it takes none of the {sum(1 for _ in model.modules())} modules of "
            f"`model` (help(cutegemm.nn.{caller}) says which it takes){shown}",
            stacklevel=depth,
        )
    return result


def is_chosen_by(where: Callable[[str, Any], bool] | None, name: str, module: torch.nn.Module) -> bool:
    """What `where` says of a module; all are chosen without it. Raises TypeError for an answer that is not one."""
    if where is None:
        return True
    answer = where(name, module)
    try:
        return bool(answer)
    except Exception as why:
        raise TypeError(f"where: got {_kind(answer)} for the module {name!r}, expected True or False") from why


def replace_gated(
    model: torch.nn.Module,
    where: Callable[[str, torch.nn.Module], bool] | None,
    precision: str | None,
    backend: str,
    gate_in: Callable[[torch.nn.Module], Any],
    replaced: Callable[[Any, Any, str | None, str], torch.nn.Module],
    caller: str,
    why: Callable[[torch.nn.Module], str] = lambda module: "",
) -> torch.nn.Module:
    """`replace_modules` of those with a gate that `where` chooses; each is looked at once.

    Args:
        gate_in: the activation, or what else is to be known, of a module that can be replaced; None for any other.
        replaced: makes the replacement of such a module, from the module, what was known, precision and backend.
        why: as of `replace_modules`, of modules for which gate_in gives None or replaced gives the module itself.

    The caller has checked the arguments: `check`, and `check_options` or more.
    """
    found: dict[int, Any] = {}
    made: dict[int, torch.nn.Module] = {}

    def is_chosen(name: str, module: torch.nn.Module) -> bool:
        if id(module) not in found:
            gate = gate_in(module)
            found[id(module)] = gate if gate is not None and is_chosen_by(where, name, module) else None
        return found[id(module)] is not None

    def replacement(module: torch.nn.Module) -> torch.nn.Module:
        if id(module) not in made:
            made[id(module)] = replaced(module, found[id(module)], precision, backend)
        return made[id(module)]

    return replace_modules(model, is_chosen, replacement, caller, 4, why)


def share_hooks(made: torch.nn.Module, module: torch.nn.Module) -> None:
    """Gives `made` the very hook registries of the module in whose place it comes, so that the handle of a hook, which
    knows the registry, removes it there too. What quantizes has those of its forward pass alone. Registries without a
    hook stay apart, since no handle knows them; so do all of a module whose weight a hook makes, which a function such
    as remove_weight_norm takes away. Hooks that run before load_state_dict are registered anew by
    `cutegemm.nn.Linear.from_linear`.
    """
    if "weight" in module._parameters:
        for name in (*FORWARD_HOOKS, *(_OTHER_HOOKS if isinstance(made, torch.nn.Linear) else ())):
            if module.__dict__[name]:
                made.__dict__[name] = module.__dict__[name]


def parts_besides(module: torch.nn.Module, *known: str) -> list[str]:
    """The names of a module's parameters, buffers and children, without those known and without parametrizations."""
    parts = {**module._parameters, **module._buffers, **module._modules}
    return [name for name, part in parts.items() if part is not None and name not in (*known, "parametrizations")]


def keep_attributes(made: torch.nn.Module, module: torch.nn.Module) -> None:
    """Gives `made` the attributes that somebody has set on `module`, whose place it takes: a hook may read them.

    Not those that `made` has a meaning of its own for, the options of a `cutegemm.nn.Linear`, and methods of `module`,
    which would keep its weight in memory.
    """
    options = ("activation", "precision", "backend", "constant_weight")
    for name, value in module.__dict__.items():
        if not (hasattr(made, name) or name in options or getattr(value, "__self__", None) is module):
            made.__dict__[name] = value


class Translating(torch.nn.Module):
    """A module that makes its own entries of those of other modules before it loads them."""

    def _translate(self, state: dict[str, Any], prefix: str) -> None:
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any) -> None:
        # No hook: that of a shallow copy would be the original's.
        self._translate(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)


def give_buffer(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replaces a buffer. A shallow copy of the module, which shares the dict of the buffers, keeps the old one."""
    module._buffers = {**module._buffers, name: tensor}


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether it is what `torch.compile(module)` returned. (Dynamo is not imported for that.)"""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def is_altered(module: torch.nn.Module) -> bool:
    """Whether somebody's hook, or somebody's own forward on the instance, would be lost with the module. `Fp8SwiGLU`
    asks it in every call."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks) or "forward" in module.__dict__


def has_values(weight: torch.Tensor) -> bool:
    """Whether something can be computed of it: not on the meta device, and not of a fake tensor."""
    return not (weight.is_meta or isinstance(weight, FakeTensor))


PARAMETERS = (torch.nn.Parameter, FakeTensor)
"""The classes of parameters that are no subclass of somebody's."""


def can_be_stacked(weight: torch.Tensor) -> bool:
    """Whether another parameter can take a weight's gradient: nobody's hook would be lost, and what there is is dense
    and of the weight's dtype.
    """
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return False
    if weight.is_leaf and getattr(weight, "grad_dtype", weight.dtype) != weight.dtype:
        return False
    return weight.grad is None or (weight.grad.layout == torch.strided and weight.grad.dtype == weight.dtype)


def computes_itself(weight: torch.Tensor) -> bool:
    """Whether a weight's class handles operators in a way of its own. Ours know that of DTensors and fake tensors."""
    if type(weight).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    return not (is_distributed(weight) or isinstance(weight, FakeTensor))


def tied(model: torch.nn.Module, by_place: bool = True) -> set[int]:
    """The ids of the parameters that a model holds under several names, whether or not of one and the same module.

    The names of modules below a module that stands in several places count once. by_place: False: a module that stands
    in several places itself counts once, too.
    """
    children = (child for parent in model.modules() for child in parent._modules.values() if child is not None)
    modules = (model, *children) if by_place else model.modules()
    places = Counter(id(each) for module in modules for each in module._parameters.values())
    return {number for number, count in places.items() if count > 1}


def activation_of(act: Any) -> str | None:
    """The name that `act_fn` of a Hugging Face model has here; None for one that no gating has."""
    if isinstance(act, torch.nn.GELU):
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    if isinstance(act, torch.nn.SiLU) or act is torch.nn.functional.silu:
        return "silu"
    return _ACTIVATION_CLASSES.get(type(act).__name__)
