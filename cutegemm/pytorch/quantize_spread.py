"""The rows of a mixture's tokens quantized once, and written with their scales to the places of all their experts.

By one launch of the kernel of `cute.quantize` where that can be, else by `quantize` and copies of rows.
"""

from __future__ import annotations

from typing import Any

import torch

from cutegemm.problem import quantization_request
from cutegemm.problem.packing import as_bits
from cutegemm.problem.quantization import PITCH, new_values
from cutegemm.pytorch import combining


def quantized(
    x: torch.Tensor, token_of: torch.Tensor, row_of: torch.Tensor, top_k: int, dtype: torch.dtype, scaling: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(values, scales) as `quantize` gives them, of each place's row: (tokens * top_k, K) and (tokens * top_k, ...),
    or () for "tensor".

    Args:
        x: (tokens, K), fp16, bf16 or fp32. token_of: of each place its token, int32. row_of: of each slot = token *
            top_k + choice its place, int32. dtype, scaling, backend: as of `quantize`.
    """
    by_kernel = combining.by_kernel(x, row_of, backend)
    if by_kernel and _can_spread(x, top_k, dtype, scaling):
        from cutegemm.run import quantize_kernels

        values, scales = results(x, x.shape[0] * top_k, dtype, scaling)
        plan = plan_of(x, values, scales, scaling, top_k)
        quantize_kernels.run_spread(plan, x.detach(), values, scales, row_of.contiguous())
        return values, scales
    values, scales = torch.ops.cutegemm.quantize(x, dtype, scaling)
    of_places = scales if scaling == "tensor" else scales.index_select(0, token_of)
    return _copied(values, token_of, row_of, top_k, by_kernel), of_places


def _can_spread(x: torch.Tensor, top_k: int, dtype: torch.dtype, scaling: str) -> bool:
    """Whether one launch quantizes the rows of x and writes each to its places."""
    from cutegemm.run import quantize_kernels  # with the kernel families, when one is first needed

    group = _described(x, dtype, scaling).group
    assert group is not None
    return quantize_kernels.can_spread(x, group, top_k)


def launches(
    x: torch.Tensor, top_k: int, dtype: torch.dtype, scaling: str
) -> tuple[Any, tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] | None:
    """How the C++ part launches `quantized` of such rows: as `native.tell` has it, the launchers that copy
    the values behind it, and memory for the results; None where torch computes a part of it.
    """
    from cutegemm.run import combining as by_kernel
    from cutegemm.run import quantize_kernels, steps

    tokens, slots, copying = x.shape[0], x.shape[0] * top_k, tuple[Any, ...]()
    if _can_spread(x, top_k, dtype, scaling):
        made = results(x, slots, dtype, scaling)
        plan = plan_of(x, *made, scaling, top_k)
        how = quantize_kernels.told(plan, *made)
    elif scaling == "tensor":
        once = results(x, tokens, dtype, scaling)
        made = results(x, slots, dtype, scaling)
        how = quantize_kernels.told(plan_of(x, *once, scaling), *once)
        step = by_kernel.values_step_of(once[0], top_k)
        launchers = None if step is None else steps.launchers([step], x.device)
        if launchers is None:
            return None
        copying = launchers
    else:
        return None
    return None if how is None else (how, copying, made)


def plan_of(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, scaling: str, places: int = 0) -> Any:
    """As `quantize_kernels.plan_of`, of these results."""
    from cutegemm.run import quantize_kernels

    asked = _described(x, values.dtype, scaling)
    return quantize_kernels.plan_of(x, values, scales, asked.format, asked.group, places)


def _described(x: torch.Tensor, dtype: torch.dtype, scaling: str) -> quantization_request.Asked:
    return quantization_request.describe(x, dtype, scaling, -1, quantization_request.DEFAULT_BLOCK, None)


def results(x: torch.Tensor, rows: int, dtype: torch.dtype, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the values and scales of so many rows of x's width."""
    shape, group = (rows, x.shape[1]), _described(x, dtype, scaling).group
    assert group is not None
    scales = torch.empty(group.scales(shape), dtype=torch.float32, device=x.device)
    return new_values(shape, False, dtype, x.device), scales


def _copied(
    rows: torch.Tensor, token_of: torch.Tensor, row_of: torch.Tensor, top_k: int, by_kernel: bool
) -> torch.Tensor:
    """The values of each place's token, as `new_values` lays them out."""
    if by_kernel:
        from cutegemm.run.combining import spread_values

        found = spread_values(rows, row_of, top_k)
        if found is not None:
            return found
    if rows.shape[1] == 0:
        return new_values((len(token_of), 0), False, rows.dtype, rows.device)
    made = as_bits(rows).index_select(0, token_of)
    if rows.shape[1] % PITCH:
        made = torch.nn.functional.pad(made, (0, -rows.shape[1] % PITCH))[:, : rows.shape[1]]
    return made.view(rows.dtype)
