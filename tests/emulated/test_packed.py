"""Two results packed into one of fp32's size, which derived programs store gate and up in turn by, in the emulator."""

from __future__ import annotations

import math

import pytest
import torch

import cutegemm
from cutegemm.problem import torch_dtype
from cutegemm.pytorch.program_operator import program_of
from tests.emulated.gpus import gpu_of

pytest.importorskip("llvmlite")
CONFIGS = (
    "sm90/64x48x64/coop1/c1x1/s3/g2",
    "sm90/128x96x64/coop2/c2x1/s3/g2/zig",
    "sm90/64x160x64/pp/c1x1/s5/g2",
    "sm90/64x48x64/pp/c1x1/s3/g2/swap",
    "sm80/64x64x32/w32x32/s3/g8",
)
FORM = (
    "def epilogue(acc, x0: {0}[M, N], x1: fp32[M, 1]) -> ({1}): t0 = acc * x0; t1 = acc + x1; return {2}, row_sum(t0)"
)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("n", [72, 68])
@pytest.mark.product(keep=1)
def test_they_have_the_bits_of_two_results(config, dtype, n, seed, monkeypatch):
    """Also an infinity beside a number, which would be a NaN of fp32, and NaNs. 68 columns of 16 bits have no TMA."""
    gpu_of(4, monkeypatch, "H200")
    generator = torch.Generator().manual_seed(seed)
    kind = torch_dtype(dtype)
    a, b = (torch.randn(shape, generator=generator).to(kind) for shape in ((70, 40), (40, n)))
    x, y = torch.randn(70, n, generator=generator).to(kind), torch.randn(70, 1, generator=generator)
    y[3], y[4], x[5, 6] = math.inf, math.nan, -math.inf
    packing = program_of(FORM.format(dtype, "fp32, fp32", f"packed_{dtype}(t0, t1)"))
    apart = program_of(FORM.format(dtype, "None, None, fp32", "t0, t1"))
    options = {"operands": (x, y), "backend": "cute", "config": config}
    packed, sums = cutegemm.gemm(a, b, epilogue=packing, **options)
    one, other, again = cutegemm.gemm(a, b, epilogue=apart, **options)
    assert packed.dtype == torch.float32
    assert torch.equal(packed.view(torch.int16), torch.stack((one, other), -1).view(torch.int16).flatten(1))
    torch.testing.assert_close(sums, again, equal_nan=True)  # of slabs, and of TMA: in another order
    by_torch, _ = cutegemm.gemm(a, b, epilogue=packing, operands=(x, y), backend="torch")
    near, want = by_torch.view(kind).float(), packed.view(kind).float()
    torch.testing.assert_close(near, want, rtol=0.02, atol=0.02, equal_nan=True)
