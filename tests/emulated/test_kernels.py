"""Every CuTe kernel, dtype and pair of majors runs in the emulator on ragged problems, checked against the reference.

Each run draws its own timing; a failure prints the seed, and CUTEGEMM_TEST_SEED repeats it.
"""

from __future__ import annotations

import pytest
import torch

from tests.problems import MAJORS, Case

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("fresh_timing")

# Extents that no tile divides: aligned to 16 bytes, and odd ones whose rows start at any element.
ALIGNED, ODD = (72, 40, 136), (67, 45, 83)
CUTE = (("fp16", "ieee"), ("bf16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32"))
CONFIGS = {
    ("fp16", "ieee"): "sm80/64x32x32/w32x16/s3/g8",
    ("bf16", "ieee"): "sm80/32x64x64/w16x32/s2/g1",
    ("fp32", "tf32"): "sm80/64x64x16/w32x32/s4/g4",
    ("fp32", "ieee"): "simt/64x64x8/w32x32/s3/g8",
}


def options(dtype: str, precision: str) -> dict[str, str]:
    return {"precision": precision} if dtype == "fp32" else {}


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("shape", [ALIGNED, ODD], ids=["aligned", "odd"])
@pytest.mark.parametrize(("dtype", "precision"), CUTE)
@pytest.mark.product(keep=1)
def test_cute(dtype, precision, majors, shape, seed):
    case = Case.random(*shape, dtype, seed=seed, majors=majors, **options(dtype, precision))
    case.run(backend="cute", config=CONFIGS[dtype, precision])


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 64, 40), (33, 1, 7)])
@pytest.mark.parametrize(("dtype", "precision"), CUTE)
@pytest.mark.product(keep=2)
def test_cute_default_configuration_of_tiny_problems(dtype, precision, shape, seed):
    Case.random(*shape, dtype, seed=seed, **options(dtype, precision)).run(backend="cute")


@pytest.mark.parametrize(("dtype", "precision"), CUTE)
@pytest.mark.parametrize(
    "epilogue",
    [
        {"c": True, "beta": -0.5, "alpha": 1.5},
        {"bias": True, "activation": "relu"},
        {"c": True, "beta": 2.0, "bias": True, "activation": "gelu"},
        {"out_dtype": torch.float32, "activation": "silu", "bias": True},
    ],
    ids=["c", "bias-relu", "c-bias-gelu", "fp32-silu"],
)
@pytest.mark.product(keep=1)
def test_cute_epilogues(dtype, precision, epilogue, seed):
    Case.random(40, 72, 48, dtype, seed=seed, **options(dtype, precision), **epilogue).run(backend="cute")


@pytest.mark.parametrize("majors", ["tn", "nt"])
@pytest.mark.product(keep=1)
def test_cute_batches_and_padded_rows(majors, seed):
    Case.random(40, 24, 56, "fp16", seed=seed, majors=majors, batch=3, pad=8).run(backend="cute")
    Case.random(40, 24, 56, "fp32", seed=seed, majors=majors, batch=2, pad=3, offset=1).run(backend="cute")


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("config", ["simt/64x64x8/w32x32/s2/g8", "sm90/64x64x64/coop1/c1x1/s3/row"])
@pytest.mark.product(keep=1)
def test_activations_of_every_size_of_number(activation, config):
    """K = 1 and A = 1: what is activated is B itself. The factor of z is right to a few units, for any z."""
    spread = torch.logspace(-37, 38, 752)
    near = torch.linspace(-9, 9, 1496)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 3.4e38])
    values = torch.cat([spread, -spread, near, special])
    if config.startswith("simt"):
        Case(torch.ones(64, 1), values.reshape(1, -1), {"activation": activation}).run(backend="cute", config=config)
        return
    # TMA wants rows of 16 bytes.
    a, b = torch.zeros(64, 8, dtype=torch.bfloat16), torch.zeros(8, values.numel(), dtype=torch.bfloat16)
    a[:, 0], b[0] = 1, values.nan_to_num(1.0, 1.0, 1.0).bfloat16()
    options = {"activation": activation, "out_dtype": torch.float32}
    Case(a, b, options).run(backend="cute", config=config)
