"""Matrices of one row or one column, contiguous, padded, offset and batched, through each kernel family."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from tests.problems import Case

SHAPES = [(72, 1, 64), (72, 1, 61), (1, 72, 64), (72, 80, 1), (71, 80, 1), (1, 1, 64), (1, 1, 1), (72, 1, 1)]
SM90, SM80 = "sm90/64x64x64/coop1/c1x1/s3/serp2", "sm80/32x32x32/w16x16/s3/g8"
SIMT = "simt/32x32x8/w16x32/s4/g8"


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_90a")


@pytest.mark.parametrize("majors", ["tt", "nn"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=str)
@pytest.mark.parametrize(("config", "dtype"), [(SM80, "bf16"), (SIMT, "fp32")])
@pytest.mark.product(keep=1)
def test_without_tma(m, n, k, config, dtype, majors, seed):
    epilogue = {"c": True, "beta": 0.5, "bias": True}
    Case.random(m, n, k, dtype, seed=seed, majors=majors, **epilogue).run(backend="cute", config=config)


@pytest.mark.parametrize(
    ("m", "n", "k", "majors"),
    [(72, 1, 64, "tt"), (72, 1, 64, "nt"), (72, 80, 1, "tt"), (72, 80, 1, "nn"), (1, 72, 64, "tt"), (72, 1, 8, "tt")],
)
@pytest.mark.parametrize(
    "options", [{"c": True, "beta": 0.5, "bias": True, "activation": "relu"}, {"batch": 3}], ids=str
)
@pytest.mark.product(keep=1)
def test_tma_loads_what_is_contiguous(m, n, k, majors, options, seed):
    """Before, a column counted as rows of one element, which TMA cannot load."""
    Case.random(m, n, k, "bf16", seed=seed, majors=majors, **options).run(backend="cute", config=SM90)


@pytest.mark.parametrize(("config", "dtype"), [(SM80, "bf16"), (SIMT, "fp32")])
@pytest.mark.parametrize(("m", "n", "k"), [(72, 1, 64), (72, 80, 1), (1, 72, 64)], ids=str)
@pytest.mark.parametrize(
    "layout", [{"pad": 8}, {"pad": 3, "offset": 1}, {"batch": 2, "pad": 8}, {"batch": 2, "offset": 8}], ids=str
)
@pytest.mark.product(keep=1)
def test_columns_of_wider_matrices(m, n, k, config, dtype, layout, seed):
    Case.random(m, n, k, dtype, seed=seed, majors="tt", **layout).run(backend="cute", config=config)


@pytest.mark.parametrize("config", [SM90, SM80])
@pytest.mark.parametrize("out", ["contiguous", "column of a matrix", "row of a matrix"])
@pytest.mark.product(keep=1)
def test_results_of_one_column(out, config, seed):
    wide = torch.zeros(72, 5, dtype=torch.bfloat16)
    into = {
        "contiguous": torch.empty(72, 1, dtype=torch.bfloat16),
        "column of a matrix": wide[:, 2:3],
        "row of a matrix": torch.zeros(3, 72, dtype=torch.bfloat16)[1:2].t(),
    }[out]
    case = Case.random(72, 1, 64, "bf16", seed=seed, majors="tt", c=True, beta=-1.0, bias=True, out=into)
    case.run(backend="cute", config=config)
    assert not wide[:, [0, 1, 3, 4]].any()


def test_c_in_place_of_one_column(seed):
    generator = torch.Generator().manual_seed(seed)
    c = torch.randn(72, 1, generator=generator).bfloat16()
    case = Case.random(72, 1, 64, "bf16", seed=seed, majors="tt")
    want = cutegemm.gemm(case.a, case.b, c.clone(), beta=1.0, backend="cute", config=SM90)
    got = cutegemm.gemm(case.a, case.b, c, beta=1.0, out=c, backend="cute", config=SM90)
    assert got is c
    assert torch.equal(got, want)
