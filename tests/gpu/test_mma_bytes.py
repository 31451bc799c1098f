"""int8 and fp8 by mma.sync on a GPU: int8 from compute capability 8.0 on, fp8 from 8.9 on, Hopper included."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.cute.ampere.config import OLDEST_FP8
from tests.scaled import check, operand

pytestmark = pytest.mark.gpu

SHAPES = ((517, 776, 4100), (130, 264, 384), (1, 512, 130), (300, 24, 35))
WHOLE = (None, None)
BYTES = (
    "sm80/128x64x128/w32x32/s3/g8", "sm80/64x64x128/w32x32/s4/g8/k3", "sm80/32x128x128/w16x64/s3/g1",
    "sm80/64x32x128/w32x16/s4/g8",
)  # fmt: skip
BLOCKS = ("sm80/64x32x128/w32x16/s4/g8", "sm80/32x64x128/w16x32/s3/g8/k2", "sm80/64x64x128/w16x32/s3/g1")
"""Those that take fp8 with scales of blocks on Hopper too."""
INT8 = (*BYTES, "sm80/256x128x64/w64x64/s3/g8", "sm80/128x128x64/w64x64/s3/g8/k4", "sm80/64x64x64/w32x32/s5/g8")


def needs_fp8() -> None:
    """A GPU whose mma.sync multiplies fp8."""
    if torch.cuda.get_device_capability() < OLDEST_FP8:
        pytest.skip("needs a GPU of compute capability 8.9 or newer")


@pytest.mark.parametrize("config", INT8)
def test_sums_of_int8_are_exact(config, seed):
    given = {"recipes": WHOLE, "seed": seed, "device": "cuda", "backend": "cute", "config": config}
    for shape in SHAPES:
        check(*shape, a="int8", **given)
    check(130, 264, 1000, a="int8", batch=3, majors="nt", gaps=(5, 3), **given)


@pytest.mark.parametrize("config", INT8)
def test_scaled_int8(config, seed):
    given = {"seed": seed, "device": "cuda", "backend": "cute", "config": config, "a": "int8"}
    for shape in SHAPES:
        check(*shape, recipes=("rows", "tensor"), options={"bias": True, "activation": "silu"}, **given)
        if config in BYTES:
            check(*shape, recipes=("blocks128", "blocks"), out_dtype=torch.float32, **given)


@pytest.mark.parametrize("kinds", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")])
@pytest.mark.parametrize("config", BYTES)
def test_fp8(config, kinds, seed):
    needs_fp8()
    given = {"seed": seed, "device": "cuda", "backend": "cute", "config": config, "a": kinds[0], "b": kinds[1]}
    for shape in SHAPES:
        check(*shape, recipes=("rows", "rows"), options={"bias": True, "alpha": -0.5}, **given)
        check(*shape, recipes=WHOLE, whole=True, out_dtype=torch.float32, **given)
        check(*shape, recipes=WHOLE, accumulate="fast", out_dtype=torch.float32, **given)


@pytest.mark.parametrize("recipes", [("blocks", "blocks128"), ("blocks", "blocks"), ("rows", "blocks")])
@pytest.mark.parametrize("config", BLOCKS)
def test_scales_of_blocks(config, recipes, seed):
    needs_fp8()
    given = {"recipes": recipes, "seed": seed, "device": "cuda", "backend": "cute", "config": config, "b": "e5m2"}
    for shape in SHAPES:
        check(*shape, out_dtype=torch.float32, **given)


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize("kinds", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2")])
def test_fp8_has_the_bits_of_the_emulator(kinds, accumulate, seed, monkeypatch):
    """What `emulator.tensor_cores` reads from machine code (Hopper), and takes from a publication (Ada)."""
    needs_fp8()
    target = {(8, 9): "sm_89", (9, 0): "sm_90"}.get(torch.cuda.get_device_capability())
    if target is None:
        pytest.skip("the emulator has no such architecture")
    monkeypatch.setenv("CUTEGEMM_ARCH", target)
    generator = torch.Generator().manual_seed(seed)
    a, b = (operand(rows, 264, kind, generator) for rows, kind in zip((72, 80), kinds, strict=True))
    given = {
        "backend": "cute", "config": "sm80/64x64x128/w32x32/s3/g8", "out_dtype": torch.float32,
        "accumulate": accumulate,
    }  # fmt: skip
    got, want = cutegemm.gemm(a.cuda(), b.cuda().mT, **given).cpu(), cutegemm.gemm(a, b.mT, **given)
    same = (got.view(torch.int32) == want.view(torch.int32)) | want.isnan()
    assert same.all(), (
        f"{int((~same).sum())} of {same.numel()} differ; GPU {got[~same][:3]}, emulator {want[~same][:3]}"
    )


def test_what_the_heuristic_chooses(seed):
    """On Ampere and Ada the mma.sync kernel, on Hopper WGMMA."""
    a = torch.ones(256, 512, dtype=torch.int8, device="cuda")
    assert (cutegemm.gemm(a, a.t(), backend="cute") == 512).all()
    if torch.cuda.get_device_capability() >= OLDEST_FP8:
        x = a.to(torch.float8_e4m3fn)
        scales = {"scale_a": torch.full((256, 1), 0.5, device="cuda"), "scale_b": torch.tensor(2.0, device="cuda")}
        assert (cutegemm.gemm(x, x.t(), backend="cute", **scales) == 512).all()
