"""Stream-K of the Hopper kernel in the emulator: tiles cut along K between neighbouring clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cutegemm
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.work_count import whole_tiles
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from tests.emulated.gpus import gpu_of
from tests.problems import Case

pytest.importorskip("llvmlite")


@pytest.mark.parametrize("sms", [3, 4, 5, 11])
@pytest.mark.parametrize("config", ["64x64x64/coop1/c1x1/s3/row/streamk", "128x32x64/coop2/c1x1/s3/serp2/zig/streamk"])
@pytest.mark.product(keep=1)
def test_tiles_that_fill_no_wave(config, sms, seed, monkeypatch):
    """35 and 36 tiles on 3 to 11 SMs: none, one and several left over; ragged on every side."""
    gpu_of(sms, monkeypatch)
    Case.random(392, 264, 200, "bf16", seed=seed).run(backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize("cluster", ["2x1", "1x2"])
@pytest.mark.product(keep=1)
def test_clusters(cluster, seed, monkeypatch):
    gpu_of(6, monkeypatch)
    config = f"sm90/64x64x64/coop1/c{cluster}/s3/hilbert/streamk/pdl"
    Case.random(392, 200, 328, "fp16", seed=seed, c=True, beta=-1.5, bias=True).run(backend="cute", config=config)
    Case.random(200, 264, 72, "bf16", seed=seed, batch=3, activation="gelu").run(backend="cute", config=config)


@pytest.mark.parametrize("k", [0, 8, 64])
def test_too_little_k_to_cut(k, seed, monkeypatch):
    """With one k tile, or none, items are whole tiles all the same."""
    gpu_of(4, monkeypatch)
    case = Case.random(200, 264, k, "bf16", seed=seed, pad=8, bias=True)
    case.run(backend="cute", config="sm90/64x64x64/coop1/c1x1/s3/row/streamk")


def test_the_same_bits_whoever_comes_last(seed, monkeypatch):
    gpu_of(4, monkeypatch)
    case = Case.random(136, 200, 520, "bf16", seed=seed)
    results = []
    for timing in range(4):
        monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", str(seed // 2 + timing))
        config = "sm90/64x64x64/coop1/c1x1/s3/row/streamk"
        results.append(cutegemm.gemm(case.a, case.b, out_dtype=torch.float32, backend="cute", config=config))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_whole_tiles():
    assert [whole_tiles(tiles, 4) for tiles in (3, 4, 5, 7, 8, 9, 14)] == [3, 4, 0, 0, 8, 4, 8]


def test_workspace_only_where_tiles_are_cut():
    arch = replace(arch_table.get("sm_90a"), sm_count=4)
    config = HopperConfig.parse("sm90/128x64x64/coop2/c1x1/s3/row/streamk")
    tiles = {1: (0, 0), 4: (0, 0), 6: (128, 4 * 2 * 2 * 64 * 64 * 4), 8: (0, 0)}
    for count, want in tiles.items():
        assert config.workspace_bytes(Problem.of(128 * count, 64, 256, "bf16"), arch) == want
