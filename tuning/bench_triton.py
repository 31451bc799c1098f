"""A Triton GEMM in the usual style, to stand beside ours: grouped tiles, masked loads, autotuned a shape."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILES = (
    (128, 256, 64, 8, 3, 8),
    (256, 128, 64, 8, 3, 8),
    (128, 128, 64, 8, 4, 4),
    (128, 128, 64, 8, 4, 8),
    (128, 64, 64, 8, 4, 4),
    (64, 128, 64, 8, 4, 4),
    (64, 64, 64, 8, 5, 4),
    (64, 32, 128, 8, 4, 4),
    (32, 64, 128, 8, 4, 4),
    (16, 64, 128, 8, 5, 4),
    (16, 128, 128, 8, 4, 4),
)
"""(BLOCK_M, BLOCK_N, BLOCK_K, GROUP, stages, warps)"""


def _timed(call: Any, quantiles: Any) -> Any:
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


@triton.autotune(
    configs=[
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": g}, num_stages=stages, num_warps=warps)
        for m, n, k, g, stages, warps in _TILES
    ],
    key=["m", "n", "k"],
    do_bench=_timed,
)
@triton.jit
def _kernel(
    a, b, d, m, n, k, a_row, a_col, b_row, b_col, d_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    band = tile // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    within = tile % (GROUP * tiles_n)
    rows = (band * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Rows beyond D are computed from others and not stored.
    from_a = a + ((rows % m).to(tl.int64)[:, None] * a_row + depth[None, :] * a_col)
    from_b = b + (depth[:, None] * b_row + (columns % n).to(tl.int64)[None, :] * b_col)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        left = k - step * BLOCK_K
        values_a = tl.load(from_a, mask=depth[None, :] < left, other=0.0)
        values_b = tl.load(from_b, mask=depth[:, None] < left, other=0.0)
        total = tl.dot(values_a, values_b, total, input_precision=PRECISION)
        from_a += BLOCK_K * a_col
        from_b += BLOCK_K * b_row
    to = d + rows.to(tl.int64)[:, None] * d_row + columns[None, :]
    tl.store(to, total.to(d.dtype.element_ty), mask=(rows[:, None] < m) & (columns[None, :] < n))


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, precision: str = "ieee") -> torch.Tensor:
    """out (M, N) row-major = a (M, K) @ b (K, N), fp32 accumulation; the first call of a shape autotunes."""
    (m, k), n = a.shape, b.shape[1]

    def grid(meta: Any) -> tuple[int]:
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    _kernel[grid](
        a, b, out, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1), out.stride(0), PRECISION=precision
    )
    return out


def chosen() -> str:
    """The configuration that the last call ran."""
    return str(_kernel.best_config)
