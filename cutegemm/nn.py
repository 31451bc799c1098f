"""`Linear`: torch.nn.Linear by these kernels, and `replace_linears`, which puts it into a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cutegemm import backend as backends
from cutegemm.linear import linear
from cutegemm.problem import dtypes, request


class Linear(torch.nn.Linear):
    """activation(x @ weight^T + bias), forward and backward by cutegemm's kernels.

    Parameters, their initial values, state_dict and repr are those of torch.nn.Linear, of which it is a subclass.

    Args:
        in_features, out_features, bias, device, dtype: as in torch.nn.Linear; `dtype` one that `cutegemm.gemm` accepts.
        activation: as in `cutegemm.gemm`, fused into the product.
        precision, backend: as in `cutegemm.gemm`.

    Raises:
        ValueError: no such activation, precision or backend.
    """

    activation: str | None = None
    precision: str | None = None
    backend: str = "auto"

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
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._configure(activation, precision, backend)

    def _configure(self, activation: str | None, precision: str | None, backend: str) -> None:
        _check(activation, precision, backend)
        self.activation, self.precision, self.backend = activation, precision, backend

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, self.activation, precision=self.precision, backend=self.backend)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        for name, default in (("activation", None), ("precision", None), ("backend", "auto")):
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
    ) -> Linear:
        """A Linear with the very parameters (not copies), hooks and training mode of `module`.

        Raises:
            TypeError: `module` is no torch.nn.Linear, is of a subclass that may compute something else, or has a
                dtype that no kernel takes.
            ValueError: no such activation, precision or backend.
        """
        reason = _why_not(module)
        if reason is not None:
            raise TypeError(f"module: {reason}")
        made = cls.__new__(cls)
        made.__dict__.update({name: _own(value) for name, value in module.__dict__.items()})
        made._configure(activation, precision, backend)
        return made


def replace_linears(
    model: torch.nn.Module,
    *,
    where: Callable[[str, torch.nn.Linear], bool] | None = None,
    precision: str | None = None,
    backend: str = "auto",
) -> torch.nn.Module:
    """Replaces every torch.nn.Linear in `model`, in place, by a `Linear` with the same parameters.

    Left as they are: modules of subclasses of torch.nn.Linear (quantized ones, say), those with a dtype that no kernel
    takes, parametrized ones, and those for which `where(name, module)` is false. Tied parameters stay tied, and a
    module that stands in several places is replaced by one.

    Returns:
        `model`, or its replacement when it is a torch.nn.Linear itself.

    Raises:
        ValueError: no such precision or backend; `model` is left as it was.
    """
    _check(None, precision, backend)
    made: dict[int, Linear] = {}

    def replacement(name: str, module: torch.nn.Module) -> torch.nn.Module:
        if _why_not(module) is not None or (where is not None and not where(name, module)):
            return module
        if id(module) not in made:
            made[id(module)] = Linear.from_linear(module, precision=precision, backend=backend)
        return made[id(module)]

    for prefix, parent in list(model.named_modules(remove_duplicate=True)):
        for name, child in list(parent._modules.items()):
            if child is not None:
                setattr(parent, name, replacement(f"{prefix}.{name}" if prefix else name, child))
    return replacement("", model)


def _check(activation: Any, precision: Any, backend: Any) -> None:
    request.check_activation(activation)
    request.check_precision(precision)
    backends.check_name(backend)


def _why_not(module: Any) -> str | None:
    """Why `Linear` cannot stand for this module, or None."""
    if type(module) is not torch.nn.Linear:
        return (
            f"got {type(module).__name__}, expected a torch.nn.Linear (no subclass, which may compute something else)"
        )
    if "forward" in module.__dict__:
        return "got a torch.nn.Linear whose forward was replaced"
    if dtypes.dtype_name(module.weight.dtype) is None:
        return f"got a weight of {module.weight.dtype}, accepted are {dtypes.ACCEPTED}"
    return None


def _own(value: Any) -> Any:
    """A module's registries (parameters, hooks) are copied, what they hold is shared."""
    return value.copy() if isinstance(value, dict) else value
