"""Autocast: the operands as torch.mm would cast them."""

from __future__ import annotations

from typing import Any

import torch


def cast_operands(a: Any, b: Any, c: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The call as autocast makes it: operands in its dtype, where torch.mm would cast them; none with `out`."""
    if options["out"] is not None or not isinstance(a, torch.Tensor):
        return a, b, c, options
    device = a.device
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return a, b, c, options
    dtype = torch.get_autocast_dtype(kind)

    def cast(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        if tensor.element_size() == 1:
            return tensor  # fp8 is what its scale says, whatever the other operands are
        return tensor.to(dtype) if tensor.device == device or tensor.device.type == kind else tensor

    options = {**options, "bias": cast(options["bias"])}
    if a.dtype == torch.float32 and dtype != torch.float32:
        options["precision"] = None
    given = {"a": a, "b": b}
    a, b = cast(a), cast(b)
    if (promised := options.get("constant")) in given and given[promised] is not {"a": a, "b": b}[promised]:
        options["constant"] = None  # what was cast is written by the kernel just in front
    return a, b, cast(c), options
