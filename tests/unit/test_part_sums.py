"""Sums of parts: which tiles are compensated and taken for small results, and their error in the model of the sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cutegemm.choice import heuristics
from cutegemm.cute.hopper import candidates, promotion
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from tuning import part_sums
from tuning.precision import INPUTS, error, inputs

H200 = arch.get("H200")


def chosen(m: int, n: int, k: int, precision: str, majors: str = "tn") -> HopperConfig:
    problem = Problem.of(m, n, k, "fp32", majors=majors, precision=precision)
    found = heuristics.untuned(problem, H200, "cute")
    assert found is not None
    return found[1]


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x6", "bf16x9"])
def test_small_results_take_compensated_tiles(precision):
    signature = Problem.of(8, 8, 8, "fp32", precision=precision).signature
    for majors in ("tn", "tt", "nn", "nt"):
        for m, n, k in ((520, 392, 64), (520, 392, 4096), (520, 392, 65536), (128, 4096, 4096), (1, 8, 100)):
            assert promotion.compensates(chosen(m, n, k, precision, majors), signature)
    assert not promotion.compensates(chosen(4096, 4096, 4096, precision), signature)
    named = candidates.shortlist(signature, H200, 1024, 512, 65536, 1)
    assert any(split for _, split in named)
    assert all(promotion.compensates(HopperConfig.parse(text), signature) for text, _ in named)
    for large in ((1024, 512, 65536, 2), (1024, 1024, 1024, 1)):  # which other tiles compute faster
        named = candidates.shortlist(signature, H200, *large)
        assert named
        assert not any(promotion.compensates(HopperConfig.parse(text), signature) for text, _ in named)
    assert not candidates.shortlist(signature, H200, 32, 32768, 4096, 1)  # all of them
    assert not promotion.compensates(chosen(1024, 1024, 1024, precision), signature)


def test_other_products_are_not_compensated():
    config = HopperConfig.parse("sm90/64x64x128/coop1/c1x1/s4/serp8/pdl")
    assert not promotion.compensates(config, Problem.of(64, 64, 64, "e4m3").signature)
    assert not promotion.compensates(config, Problem.of(64, 64, 64, "fp32", precision="tf32").signature)


@pytest.mark.parametrize(("k", "way", "shares"), [(1024, "compensated", 4), (4096, "compensated, 2 parts of K", 16)])
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.product(keep=4)
def test_half_of_the_error_of_sgemm(kind, k, way, shares):
    """Root mean square: bf16x6 at most half of SGEMM's with as many shares of K as an H200's errors tell, tf32x3 all.

    Of positive numbers two thirds: the rounding of the result itself is a third.
    """
    a, b = inputs(kind, 48, 32, k, 0)
    x, y = a.numpy(), np.ascontiguousarray(b.numpy())
    baseline = error(torch.from_numpy(part_sums.sgemm(x, y, shares)), a, b)[1]
    for precision, share in (("tf32x3", 1.0), ("bf16x6", 0.67 if kind == "uniform" else 0.5)):
        got = part_sums.WAYS[way](part_sums.Tiles(x, y, precision))
        assert error(torch.from_numpy(got), a, b)[1] <= share * baseline


def test_the_parts_of_the_model_add_up(seed):
    x = inputs("exponents", 8, 8, 64, seed)[0].numpy()
    for precision, missing in (("tf32x3", 2.0**-23), ("bf16x6", 0.0)):
        rest = np.abs(x - sum(part.astype(np.float64) for part in part_sums.split(x, precision)))
        assert (rest <= missing * np.abs(x)).all()
        assert (
            len(part_sums.split(x, precision)) == Problem.of(8, 8, 8, "fp32", precision=precision).signature.parts.count
        )


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(part_sums, "SIZES", {64: (8, 8)})
    monkeypatch.setattr("sys.argv", ["part_sums", "--k", "64", "--inputs", "powers"])
    part_sums.main()
    shown = capsys.readouterr().out
    assert all(way in shown for way in part_sums.WAYS)
