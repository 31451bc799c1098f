"""How many clusters run at a time, as far as it is known without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware import residency
from cutegemm.hardware.residency import resident_clusters
from cutegemm.problem import Problem
from cutegemm.problem.work import RAGGED_M

H200 = arch_table.get("H200")


@pytest.fixture
def unused(monkeypatch):
    """No GPU is in use."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.mark.parametrize(("size", "clusters"), [(1, 132), (2, 66), (4, 30), (8, 15)])
def test_an_h200_that_is_not_in_use(size, clusters, unused):
    assert resident_clusters(H200, size) == clusters
    assert resident_clusters(arch_table.get("sm_90a"), size) == clusters


def test_a_gpu_that_nobody_asked_has_what_its_sms_allow(unused):
    other = replace(H200, sm_count=114)
    assert [resident_clusters(other, size) for size in (1, 2, 4, 8)] == [114, 57, 28, 14]
    assert resident_clusters(replace(H200, sm_count=4), 8) == 1


@pytest.mark.parametrize(("answer", "clusters"), [(29, 29), (40, 33), (0, 1)])
def test_a_gpu_in_use_is_asked(answer, clusters, monkeypatch):
    """More than its SMs allow, or none, is not believed."""
    monkeypatch.setattr(residency, "_is_in_use", lambda arch: True)
    monkeypatch.setattr(residency, "_asked", lambda device, size: answer)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    assert resident_clusters(H200, 4) == clusters
    assert resident_clusters(H200, 2) == 66


def test_a_launch_has_as_many_clusters_as_run_at_a_time(unused):
    problem = Problem.of(8192, 8192, 4096, "bf16")
    for text, clusters in (
        ("128x128x64/coop2/c2x2/s4/serp8", 30),
        ("128x128x64/coop2/c2x2/s4/serp8/once", 32 * 32),
        ("128x128x64/coop2/c2x1/s4/serp8", 64),
        ("128x128x64/coop2/c2x2x2/s4/serp8", 32 * 32),  # a CTA of a cluster along K computes one tile
        ("128x128x64/coop2/c2x1x2/s4/serp8/k2", 2 * 32 * 64),
    ):
        config = HopperConfig.parse(f"sm90/{text}")
        assert config.launch_arguments(problem, H200) == {"clusters": clusters}, text


@pytest.mark.parametrize(
    ("text", "m", "n", "clusters"),
    [
        ("128x256x64/coop2/c1x1/s4/serp8", 4096, 4096, 128),  # 512 tiles: four waves of 132 or of 128
        ("128x128x64/coop2/c1x1/s4/serp8", 2048, 1152, 132),  # 144 tiles: two waves of 72 would be a third fewer SMs
        ("128x128x64/coop2/c1x1/s4/serp8", 2048, 2048, 128),  # 256 tiles: two waves of 128
        ("128x128x64/coop2/c1x1/s4/serp8", 2048, 1920, 132),  # 240 tiles: two waves of 120 are less than 15/16
        ("128x128x64/coop2/c1x1/s4/serp8", 1408, 1536, 132),  # 132 tiles
        ("128x128x64/coop2/c1x1/s4/serp8", 1024, 1024, 64),
        ("128x256x64/coop2/c1x1/s4/serp8/streamk", 4096, 4096, 132),  # stretches of K have no waves
    ],
)  # fmt: skip
def test_as_many_clusters_as_waves_need(text, m, n, clusters, unused):
    config = HopperConfig.parse(f"sm90/{text}")
    assert config.launch_arguments(Problem.of(m, n, 4096, "bf16"), H200)["clusters"] == clusters


def test_groups_have_as_many_clusters_as_run_at_a_time(unused):
    """How many tiles they have is known on the device."""
    config = HopperConfig.parse("sm90/128x128x64/coop2/c1x1/s4/serp8")
    problem = Problem.of(4096, 4096, 4096, "bf16", work=RAGGED_M, batch=8)
    assert config.launch_arguments(problem, H200) == {"clusters": 132}
