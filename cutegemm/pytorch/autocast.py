"""Autocast: the operands as torch.mm would cast them."""

from __future__ import annotations

from typing import Any

import torch


def cast_operands(a: Any, b: Any, c: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The call as autocast makes it: operands in its dtype, where torch.mm would cast them; none with `out`."""
    if options["out"] is not None or not isinstance(a, torch.Tensor) or not torch.is_autocast_enabled(a.device.type):
        return a, b, c, options
    kind, dtype = a.device.type, torch.get_autocast_dtype(a.device.type)

    def cast(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != kind or not tensor.is_floating_point():
            return tensor
        return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)

    options = {**options, "bias": cast(options["bias"])}
    if a.dtype == torch.float32 and dtype != torch.float32:
        options["precision"] = None
    return cast(a), cast(b), cast(c), options
