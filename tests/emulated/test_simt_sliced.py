"""Sliced K of the CUDA-core kernel, in the emulator: every way a slice can be ragged, and the sum's fixed order."""

from __future__ import annotations

import pytest
import torch

from tests.problems import MAJORS, Case

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("fresh_timing")

# Fragments one after the other and double-buffered; one chunk a slice; a tile of 16 rows; several warp tiles.
DOUBLE, SINGLE = "simt/32x32x64/w32x32/s3/g8/x8", "simt/32x32x32/w32x32/s3/g1/x8"
LOW, MANY = "simt/16x32x64/w16x32/s2/g1/x4", "simt/64x64x32/w32x32/s2/g4/x2"


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.product(keep=1)
def test_majors_and_alignment(majors, seed):
    for shape in ((72, 40, 136), (34, 38, 66), (67, 45, 83)):
        Case.random(*shape, "fp32", seed=seed, majors=majors).run(backend="cute", config=DOUBLE)


@pytest.mark.parametrize("majors", ["tn", "nt"])
@pytest.mark.parametrize("config", [SINGLE, LOW, MANY])
@pytest.mark.product(keep=1)
def test_configurations(config, majors, seed):
    for shape in ((72, 40, 136), (67, 45, 83)):
        Case.random(*shape, "fp32", seed=seed, majors=majors).run(backend="cute", config=config)


@pytest.mark.parametrize("config", [DOUBLE, SINGLE])
@pytest.mark.parametrize("k", [0, 1, 4, 15, 31, 32, 63, 64, 65, 128, 260])
@pytest.mark.product(keep=1)
def test_depths_beside_those_of_a_chunk_a_slice_and_a_stage(config, k, seed):
    Case.random(33, 36, k, "fp32", seed=seed).run(backend="cute", config=config)


@pytest.mark.parametrize("config", [DOUBLE, SINGLE, LOW])
@pytest.mark.parametrize(
    "epilogue",
    [
        {"c": True, "beta": -0.5, "alpha": 1.5, "out_dtype": torch.bfloat16},
        {"bias": True, "activation": "gelu", "out_dtype": torch.float16},
        {"c": True, "beta": 2.0, "bias": True, "activation": "silu", "batch": 3, "pad": 3, "offset": 1},
    ],
    ids=["c", "bias", "batch"],
)
@pytest.mark.product(keep=1)
def test_epilogues(config, epilogue, seed):
    Case.random(40, 72, 48, "fp32", seed=seed, **epilogue).run(backend="cute", config=config)


def test_slices_are_added_in_their_order(monkeypatch):
    """Each slice's sum is one number, of which no two orders of addition have the same rounded sum."""
    parts = torch.tensor([1.0, 2.0**24, 1.0, -(2.0**24), 0.5, 2.0**25, -1.0, 3.0])
    a = torch.zeros(32, 32)
    a[:, ::4] = parts
    expected = torch.zeros(())
    for part in parts:
        expected = expected + part
    backwards = torch.zeros(())
    for part in parts.flip(0):
        backwards = backwards + part
    assert expected != backwards
    from cutegemm import gemm

    for timing in ("1", "2", "3"):
        monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", timing)
        got = gemm(a, torch.ones(32, 32), backend="cute", config=SINGLE)
        assert torch.equal(got, expected.expand(32, 32))
