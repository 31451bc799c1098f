"""What tests of quantized results share: epilogues, and the comparison with two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cutegemm
from cutegemm import ops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def identity(acc: Any) -> Any:
    return acc


def swiglu(acc: Any) -> Any:
    return ops.cast(ops.swiglu(acc), torch.bfloat16)


def swiglu_pairs(acc: Any) -> Any:
    return ops.cast(ops.swiglu_pairs(acc), torch.bfloat16)


def scaled(acc: Any, row: Any, column: Any) -> Any:
    return acc * row + column


def same(got: Any, whole: torch.Tensor, dtype: torch.dtype) -> None:
    values, scales = cutegemm.quantize(whole, dtype, "blocks", backend="torch")
    assert torch.equal(got[1].nan_to_num(-1.0), scales.nan_to_num(-1.0))
    assert torch.equal(got[0].contiguous().view(torch.uint8), values.contiguous().view(torch.uint8))


def compared(call: Callable[..., Any], body: Callable[..., Any], dtype: torch.dtype, rows: Any = slice(None)) -> None:
    """call(epilogue): the product with an epilogue. rows: those that belong to a group."""
    got = call(lambda *given: ops.quantize(body(*given), dtype))
    whole = call(lambda *given: ops.cast(body(*given), torch.float32))
    same([each[rows] for each in got], whole[rows], dtype)
