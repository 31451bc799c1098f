"""What `tuning.grouped --dtype e4m3` times: products of fp8 in groups with scales, and the same sizes in bf16.

    rows      a scale for each row of A and each column of B; beside torch._scaled_grouped_mm
    blocks    one for 1 x 128 elements of A and 128 x 128 of B; beside DeepGEMM, where it is installed (`bench_scaled`)

DeepGEMM takes groups whose rows are padded to multiples of 128, or for few rows a batch of matrices of which the first
rows count. Both are laid out before the call that is timed, and so are its scales of A, which it wants column by
column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from cutegemm.problem import reference, torch_dtype
from tuning import bench_providers
from tuning.grouped_ways import OURS, Draw, Kind, Way, Ways, forward, ours

BF16, TORCH, DEEP_GEMM = "cutegemm in bf16", "torch._scaled_grouped_mm", "deep_gemm"
BLOCK = 128
MASKED_ROWS = 64
"""Rows of a group on average below which DeepGEMM gets a batch: its tiles of padded groups have 128 rows."""
Product = Callable[[slice, int], reference.Expected]
"""What a group's product must be: (its rows of A, its number)."""


def scaled(draw: Draw, dtype: str = "e4m3", majors: str = "tn", recipe: str = "rows") -> Ways:
    """fp8 with random scales of a recipe into bf16; the same sizes in bf16 without scales."""
    entry, kind = draw.entry, torch_dtype(dtype)
    a, b = draw.normal(entry.rows, entry.k).to(kind), draw.weights(kind, majors)
    along_k, along_n = (-(-extent // BLOCK) if recipe == "blocks" else 1 for extent in (entry.k, entry.n))
    scale_a = draw.normal(entry.rows, along_k).exp()
    scale_b = draw.normal(entry.experts, along_k, along_n if recipe == "blocks" else entry.n).exp()
    out = torch.empty(entry.rows, entry.n, dtype=torch.bfloat16, device=a.device)

    def product(rows: slice, group: int) -> reference.Expected:
        return reference.expected(a[rows], b[group], scale_a=scale_a[rows], scale_b=scale_b[group])

    scaling = {"scale_a": scale_a, "scale_b": scale_b, "scaling": recipe}
    ways = {OURS: ours(a, b, out, partial(_parts, draw, out, None, product), draw.ends, scaling=scaling)}
    if recipe == "rows":

        def by_torch() -> torch.Tensor:
            scales = scale_a[:, 0], scale_b[:, 0]
            found: torch.Tensor = torch._scaled_grouped_mm(a, b, *scales, offs=draw.ends, out_dtype=torch.bfloat16)
            return found

        ways[TORCH] = ways[OURS]._replace(call=by_torch)
    elif bench_providers.installed(DEEP_GEMM):
        ways[DEEP_GEMM] = _by_deep_gemm(draw, a, b, scale_a, scale_b, product)
    ways[BF16] = forward(draw, "bf16", majors)[OURS]
    return ways


def _parts(
    draw: Draw, out: torch.Tensor, begins: list[int] | None, product: Product
) -> Iterator[tuple[torch.Tensor, reference.Expected]]:
    """The parts of the product. begins: of each group's rows in `out`, where they lie apart."""
    for group, rows in enumerate(draw.parts()):
        if rows.stop > rows.start:
            begin = rows.start if begins is None else begins[group]
            yield out[begin : begin + rows.stop - rows.start], product(rows, group)


def _by_deep_gemm(draw: Draw, a: Any, b: Any, scale_a: Any, scale_b: Any, product: Product) -> Way:
    """DeepGEMM's product, on operands that lie as it wants them."""
    import deep_gemm

    entry, masked = draw.entry, draw.entry.rows < MASKED_ROWS * draw.entry.experts
    most = -(-max(draw.sizes) // MASKED_ROWS) * MASKED_ROWS
    padded = [most if masked else -(-count // BLOCK) * BLOCK for count in draw.sizes]
    begins = [sum(padded[:group]) for group in range(len(padded))]
    values, scales = a.new_zeros(sum(padded), entry.k), scale_a.new_zeros(sum(padded), scale_a.shape[1])
    for rows, begin in zip(draw.parts(), begins, strict=True):
        to = slice(begin, begin + rows.stop - rows.start)
        values[to], scales[to] = a[rows], scale_a[rows]
    out = torch.empty(sum(padded), entry.n, dtype=torch.bfloat16, device=a.device)
    weights = b.mT.contiguous(), scale_b.mT.contiguous()
    if masked:
        in_batch = [each.view(entry.experts, most, -1) for each in (values, scales, out)]
        left = in_batch[0], deep_gemm.get_col_major_tma_aligned_tensor(in_batch[1])
        counts = torch.tensor(draw.sizes, dtype=torch.int32, device=a.device)
        expected = max(entry.rows // entry.experts, 1)
        call = partial(deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_masked, left, weights, in_batch[2], counts, expected)
    else:
        left = values, deep_gemm.get_col_major_tma_aligned_tensor(scales)
        groups = torch.arange(entry.experts, dtype=torch.int32, device=a.device)
        group_of = groups.repeat_interleave(torch.tensor(padded, device=a.device))
        call = partial(deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous, left, weights, out, group_of)
    return Way(call, out, partial(_parts, draw, out, begins, product))


SCALED = {recipe: Kind(partial(scaled, recipe=recipe), BF16, 1.5) for recipe in ("rows", "blocks")}
"""By recipe; a row of bf16 takes twice the bytes."""
