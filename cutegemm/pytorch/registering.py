"""How the operators torch.ops.cutegemm.* are registered, and what several of them have alike.

They are defined with torch.library's define and impl, which cost less a call than `custom_op`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from cutegemm import native
from cutegemm.problem import quantization_request, request
from cutegemm.pytorch import sharding

LIBRARY = torch.library.Library("cutegemm", "FRAGMENT")
DEVICES = ("CPU", "CUDA")
BELOW_AUTOGRAD = torch._C._after_autograd_keyset


def define(schema: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines an operator; `compute` runs it on CPU and CUDA tensors, `fake` says what fake ones become."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in DEVICES:
        LIBRARY.impl(name, compute, device)
    torch.library.register_fake(f"cutegemm::{name}", fake, lib=LIBRARY)


def check_arguments(tensors: Mapping[str, Any], out_dtype: Any, how: Any) -> None:
    """Raises TypeError or ValueError, in the terms of the call, for what an operator's schema would refuse in torch's.

    tensors: those of the call by name, None for one that is not there. how: the `How` of the call.
    """
    for name, each in tensors.items():
        if each is not None:
            request.check_type(name, each)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype: got {request.shown(out_dtype)}, expected a torch.dtype")
    how.check()


def define_autocast(name: str, function: Callable[..., Any]) -> None:
    """Has autocast call the function, of the operator's arguments."""
    for device in DEVICES:
        LIBRARY.impl(name, function, f"Autocast{device}")


def below_autograd(call: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a forward pass runs: `call` below autograd, with the modes as they are now.

    Recording switches grad mode and forward mode off. The next level of torch.func must find them as they were: there
    a gradient is recorded, and a tangent is computed or refused, which would be dropped otherwise.
    """
    grad, forward_mode = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()

    def run(*given: Any) -> Any:
        with (
            torch.set_grad_enabled(grad),
            forward_ad._set_fwd_grad_enabled(forward_mode),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            return call(*given)

    return run


def refuse_gradients(
    name: str, refuse: Callable[[str, torch.Tensor], None] = quantization_request.refuse_gradient
) -> Callable[..., Any]:
    """Has an operator refuse inputs that require grad or carry a tangent. Returns what autograd's key calls.

    refuse: is called with the name of an input and its tensor, and raises an error where it is refused.
    """
    operator = getattr(torch.ops.cutegemm, name).default
    inputs = [each.name if each.alias_info is None else None for each in operator._schema.arguments]

    def refused_or_run(keyset: Any, *arguments: Any, **named: Any) -> Any:
        for argument, tensor in zip(inputs, arguments, strict=False):
            if argument and isinstance(tensor, torch.Tensor):
                refuse(argument, tensor)
                if type(tensor) is not torch.Tensor:
                    sharding.needed()
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & BELOW_AUTOGRAD, *arguments, **named)

    LIBRARY.impl(name, refused_or_run, "Autograd", with_keyset=True)
    return refused_or_run


def serve_natively(name: str, compute: Callable[..., Any], recorded: Callable[..., Any]) -> None:
    """Has the C++ extension leave its calls of an operator to Python.

    compute: called below autograd, as compute(*arguments, tell=tell). recorded: called as autograd's key does, with the
        keys in front of the arguments.
    """

    def left_to_python(keys: Any, tell: bool, *arguments: Any) -> Any:
        if keys is None:
            return compute(*arguments, tell=tell)
        return recorded(torch._C.DispatchKeySet.from_raw_repr(keys), *arguments)

    native.in_python[name] = left_to_python


def refuse_derivatives(name: str, refuse_tangents: Callable[..., None], call: str = "gemm") -> None:
    """Has an operator that writes into its argument `out` refuse gradients, which nothing would compute, and tangents.

    call: the function that a message names.
    """
    operator = getattr(torch.ops.cutegemm, name).default
    arguments = operator._schema.arguments
    place = [argument.name for argument in arguments].index("out")
    lists = [number for number, argument in enumerate(arguments) if isinstance(argument.type, torch.ListType)]

    def refused_or_run(keyset: Any, *given: Any) -> None:
        # AOTInductor's runtime gives None for an empty list.
        given = tuple(() if each is None and number in lists else each for number, each in enumerate(given))
        tensors = [
            tensor
            for each in given
            for tensor in (each if isinstance(each, (tuple, list)) else (each,))
            if isinstance(tensor, torch.Tensor)
        ]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(
                "out: a tensor requires grad, and no gradient is recorded of what is written into a tensor; "
                f"call {call} under torch.no_grad(), or leave out away"
            )
        refuse_tangents(*tensors)
        torch.autograd.graph.increment_version(given[place])  # also of fake or meta tensors, which nothing below writes
        with torch._C._AutoDispatchBelowAutograd():
            operator.redispatch(keyset & BELOW_AUTOGRAD, *given)

    LIBRARY.impl(name, refused_or_run, "Autograd", with_keyset=True)


def carried_scaling(scaling: Any) -> list[str] | None:
    """`scaling` of `gemm` as an operator carries it: the empty text for None."""
    if scaling is None:
        return None
    return [each or "" for each in (scaling if isinstance(scaling, (tuple, list)) else (scaling, scaling))]


def scaling_of(carried: Any) -> tuple[str | None, ...] | None:
    """What `carried_scaling` was made of."""
    return None if carried is None else tuple(each or None for each in carried)


def many(results: Any) -> list[torch.Tensor]:
    """The results of a call as an operator returns them: always a list."""
    return [results] if isinstance(results, torch.Tensor) else list(results)


def few(results: list[torch.Tensor]) -> Any:
    """What `many` was made of: a single result stands for itself."""
    return tuple(results) if len(results) > 1 else results[0]


def flops(a_shape, b_shape, *rest, out_shape=None, **options) -> int:
    """2 L M N K, for torch's FlopCounterMode."""
    la, lb = (shape[0] if len(shape) == 3 else 1 for shape in (a_shape, b_shape))
    return 2 * (la if lb == 1 else lb) * a_shape[-2] * a_shape[-1] * b_shape[-1]
