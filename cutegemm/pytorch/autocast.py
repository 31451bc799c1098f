"""Autocast: the operands as torch.mm would cast them."""

from __future__ import annotations

from typing import Any

import torch

from cutegemm.run.how import How


def is_on(kind: str) -> bool:
    """Whether autocast is on for a kind of device; for one that has none, such as meta, it is not."""
    return kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind)


def cast_operands(a: Any, b: Any, c: Any, bias: Any, out: Any, how: How) -> tuple[Any, Any, Any, Any, How]:
    """a, b, c, bias and `how` as autocast makes them: in its dtype, where torch.mm would cast them; none with `out`."""
    if out is not None or not isinstance(a, torch.Tensor):
        return a, b, c, bias, how
    device = a.device
    kind = device.type
    if not is_on(kind):
        return a, b, c, bias, how
    dtype = torch.get_autocast_dtype(kind)

    def cast(tensor: Any) -> Any:
        if tensor is None or not isinstance(tensor, torch.Tensor):
            return tensor
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        if tensor.element_size() == 1:
            return tensor  # fp8 is what its scale says, whatever the other operands are
        return tensor.to(dtype) if tensor.device == device or tensor.device.type == kind else tensor

    how.check()
    if how.precision is not None and a.dtype == torch.float32 and dtype != torch.float32:
        how = how._replace(precision=None)
    x, y = cast(a), cast(b)
    return x, y, cast(c), cast(bias), how.for_copies(("a",) * (x is not a) + ("b",) * (y is not b))
