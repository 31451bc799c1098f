"""What the modules of ours, and the functions that put them into a model, share."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

_ACTIVATION_CLASSES = {
    "SiLUActivation": "silu", "PytorchGELUTanh": "gelu_tanh", "GELUTanh": "gelu_tanh", "GELUActivation": "gelu",
}  # fmt: skip
"""Names of classes in transformers, which need not be installed; what they compute is tried."""


def check(model: Any, where: Any) -> None:
    """Raises TypeError unless `model` is a module, and `where` None or callable."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_kind(model)}, expected a torch.nn.Module")
    if where is not None and not callable(where):
        raise TypeError(f"where: got {_kind(where)}, expected a function of a name and a module, or None")


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


def replace_modules(
    model: torch.nn.Module, replacement: Callable[[str, torch.nn.Module], torch.nn.Module]
) -> torch.nn.Module:
    """Puts replacement(name, module) in the place of every module, in place; returns what stands for `model` itself.

    A module that stands in several places is asked for at each of them.
    """
    for prefix, parent in list(model.named_modules(remove_duplicate=True)):
        for name, child in list(parent._modules.items()):
            if child is not None:
                setattr(parent, name, replacement(f"{prefix}.{name}" if prefix else name, child))
    return replacement("", model)


def replace_gated(
    model: torch.nn.Module,
    where: Callable[[str, torch.nn.Module], bool] | None,
    activation_in: Callable[[torch.nn.Module], str | None],
    replaced: Callable[[Any, str], torch.nn.Module],
) -> torch.nn.Module:
    """`replace_modules` of those with an activation that `where` chooses; each is looked at once.

    Args:
        activation_in: the activation of a module that can be replaced, None for any other.
        replaced: of such a module and its activation, what stands in its place.
    """
    made: dict[int, torch.nn.Module] = {}

    def replacement(name: str, module: torch.nn.Module) -> torch.nn.Module:
        if id(module) not in made:
            activation = activation_in(module)
            chosen = activation is not None and (where is None or where(name, module))
            made[id(module)] = replaced(module, str(activation)) if chosen else module
        return made[id(module)]

    return replace_modules(model, replacement)


def is_altered(module: torch.nn.Module) -> bool:
    """Whether somebody's hook, or somebody's own forward on the instance, would be lost with the module."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks) or "forward" in module.__dict__


def activation_of(act: Any) -> str | None:
    """The name that `act_fn` of a Hugging Face model has here; None for one that no gating has."""
    if isinstance(act, torch.nn.GELU):
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    if isinstance(act, torch.nn.SiLU) or act is torch.nn.functional.silu:
        return "silu"
    return _ACTIVATION_CLASSES.get(type(act).__name__)
