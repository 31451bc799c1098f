"""The public call for products in groups: many multiplications, whose sizes lie on the device, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cutegemm.problem.grouped_request import Sizes
from cutegemm.run import grouped


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    out_rows: int | None = None,
    bias: torch.Tensor | None = None,
    epilogue: Any = None,
    operands: Sequence[Any] = (),
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    backend: str = "auto",
    config: Any = None,
) -> Any:
    if epilogue is None:
        epilogue = _product
    sizes = Sizes(offsets, counts, rows, places, out_rows)
    return grouped.compute(a, b, sizes, epilogue, operands, out, out_dtype, precision, backend, config)


def _product(acc: Any) -> Any:
    return acc
