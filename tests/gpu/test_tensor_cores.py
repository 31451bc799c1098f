"""Whether the emulator's tensor cores add as the GPU's do: the same bits from the same kernels and operands.

This settles what `cutegemm.emulator.tensor_cores` takes from publications. `test_ptx_snippets` compares single
instructions of mma.sync.
"""

from __future__ import annotations

import pytest
import torch

import cutegemm
from tests import needs
from tests.problems import DTYPES

pytestmark = pytest.mark.gpu

INPUTS = ("normal", "uniform", "exponents", "subnormal", "special")
CONFIGS = {
    "wgmma": "sm90/64x64x{bk}/coop1/c1x1/s4/row",
    "mma": "sm80/64x64x{bk}/w32x32/s3/g8",
}


def operand(shape: tuple[int, int], kind: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "uniform":
        x = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind == "exponents":
        spread = 6 if dtype is torch.float16 else 60
        x = x * 2.0 ** torch.randint(-spread, spread + 1, shape, generator=generator)
    if kind == "subnormal":  # products under the normal range of fp32, and operands under that of fp16
        x = x * (2.0**-16 if dtype is torch.float16 else 2.0**-66)
    if kind == "special":
        chosen = torch.rand(shape, generator=generator)
        x = torch.where(chosen < 0.01, torch.inf, torch.where(chosen > 0.99, torch.nan, x))
    return x.to(dtype)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("instruction", CONFIGS)
def test_same_bits(instruction, dtype, inputs, seed, monkeypatch):
    """Products of 72 x 80 x 264 with fp32 results, which are stored as the tensor cores left them."""
    needs.hopper()
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    generator = torch.Generator().manual_seed(seed)
    a = operand((72, 264), inputs, DTYPES[dtype], generator)
    b = operand((80, 264), inputs, DTYPES[dtype], generator).T
    config = CONFIGS[instruction].format(bk=32 if dtype == "fp32" else 64)
    options = {
        "backend": "cute",
        "config": config,
        "out_dtype": torch.float32,
        "precision": "tf32" if dtype == "fp32" else None,
    }
    got, want = cutegemm.gemm(a.cuda(), b.cuda(), **options).cpu(), cutegemm.gemm(a, b, **options)
    assert torch.equal(got.isnan(), want.isnan())
    same = (got.view(torch.int32) == want.view(torch.int32)) | want.isnan()
    at = tuple(int(i) for i in (~same).nonzero()[0]) if not same.all() else None
    assert same.all(), f"{int((~same).sum())} of {same.numel()} differ; at {at}: GPU {got[at]!r}, emulator {want[at]!r}"
