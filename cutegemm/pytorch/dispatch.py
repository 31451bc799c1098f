"""Whether a call is for torch's dispatcher, or for more of torch than its autograd, to see."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from cutegemm.pytorch import sharding, transforms
from cutegemm.run.call import PLAIN

_dispatch_modes = torch._C._len_torch_dispatch_stack


def is_dispatched(*tensors: Any) -> bool:
    """Whether the call is for torch's dispatcher: a mode sees it, or a subclass of Tensor that handles operators, or
    its tensors have no memory.
    """
    if _dispatch_modes():
        return True
    special = []
    zeros = meta = plain = False
    for tensor in tensors:
        if tensor is not None and isinstance(tensor, torch.Tensor):
            if tensor.is_nested:  # handles operators, but not ours: the checks refuse it by name
                return False
            zeros = zeros or tensor._is_zerotensor()  # without memory, which forward mode makes
            meta, plain = meta or tensor.is_meta, plain or not tensor.is_meta
            if tensor.__class__ not in PLAIN:
                special.append(tensor)
    memoryless = zeros or (meta and not plain)  # some on the meta device: the checks refuse them by name
    if memoryless or not special:
        return memoryless
    sharding.needed()
    return torch.overrides.has_torch_function(special) or any(
        type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for tensor in special
    )


def is_beyond_autograd(*tensors: Any) -> bool:
    """Whether something other than plain autograd looks at the call, which then is made of differentiable products."""
    return (
        transforms.active(*tensors) or is_dispatched(*tensors) or torch._C._is_tracing()
        or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    )  # fmt: skip
