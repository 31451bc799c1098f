"""Rounding to an element type as every kernel does it: to nearest, ties to even.

Types of one byte and integers saturate: a number beyond the largest becomes the largest, as quantization wants it, and
as `cvt.satfinite` and `cvt.sat` do on the device. torch's own conversion to e4m3 gives NaN there. Of an integer type
NaN becomes 0.
"""

from __future__ import annotations

import torch

from cutegemm.problem.dtypes import TYPES, torch_dtype


def rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The tensor with its elements in the dtype of that name, one of `dtypes.TYPES`."""
    row = TYPES[dtype]
    if row.is_integer:
        info = torch.iinfo(torch_dtype(dtype))
        return x.double().nan_to_num(0.0).round().clamp(info.min, info.max).to(torch_dtype(dtype))
    if row.largest is not None:
        x = x.clamp(-row.largest, row.largest)
    return x.to(torch_dtype(dtype))
