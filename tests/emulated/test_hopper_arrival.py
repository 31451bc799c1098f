"""Split-K in the order of arrival: right whoever comes first, and a workspace that is zero again after each launch.

The pretended GPU has 4 SMs: with more splits than that, those that come first must give up their slices.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cutegemm import backend
from cutegemm.emulator.workload import Workload
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue

pytest.importorskip("llvmlite")

ARCH = replace(arch_table.get("sm_90a"), sm_count=4)
CONFIGS = [
    ("64x64x64/coop1/c1x1/s3/g2/k2/arrival", (136, 72, 328)),
    ("128x64x64/coop2/c2x1/s3/hilbert/k3/arrival", (200, 136, 1032)),
    ("64x16x64/coop1/c1x2/s3/g2/k7/swap/arrival", (24, 136, 520)),
    ("192x48x64/coop3/c1x1/s3/g2/k5/once/arrival/pdl", (200, 72, 200)),
    ("128x64x64/coop2/c1x1x2/s4/g2/k3/arrival", (136, 72, 520)),
]


@pytest.mark.parametrize("timing", range(3))
@pytest.mark.parametrize(("config", "shape"), CONFIGS)
@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.product(keep=1)
def test_ragged_shapes(config, shape, with_c, timing, run):
    if with_c:
        run(config, (72, 40, 72), timing=timing, batch=2, c=True, beta=0.5)
    else:
        run(config, shape, timing=timing)


@pytest.mark.parametrize(
    "config", ["64x64x64/coop1/c1x1/s3/g2/k3/arrival", "64x16x64/coop1/c1x1/s3/g2/k3/swap/arrival"]
)
@pytest.mark.parametrize("case", ["whole", "fp32", "turned", "small"])
@pytest.mark.product(keep=1)
def test_the_whole_epilogue(config, case, run, seed):
    shape = (136, 72, 264)
    if case == "whole":
        run(config, shape, c=True, beta=2.0, bias=True, activation="gelu", alpha=-0.5)
    elif case == "fp32":
        run(config, shape, "fp16", bias=True, activation="relu", batch=2, out_dtype=torch.float32)
    elif case == "turned":
        run(config, shape, c=torch.randn(72, 136, generator=torch.Generator().manual_seed(seed)).t(), beta=1.0)
    else:
        run(config, (7, 24, 40), majors="tt")


def test_tf32(run):
    run("128x64x32/coop2/c1x1/s3/g2/k3/arrival", (200, 136, 84), "fp32", precision="tf32", c=True, beta=0.5)


def test_more_splits_than_k_tiles(run):
    for k in (0, 8, 136):
        run("64x64x64/coop1/c1x1/s3/g2/k4/arrival", (136, 72, k), pad=8, bias=True, alpha=2.0)


@pytest.mark.parametrize(("config", "shape"), CONFIGS)
@pytest.mark.product(keep=1)
def test_launches_on_one_workspace(config, shape, seed):
    """Every launch finds zeros and leaves them."""
    cute = backend.get("cute")
    problem = Problem.of(*shape, "bf16", majors="tn", epilogue=Epilogue(bias_dtype="bf16"))
    parsed = cute.parse(f"sm90/{config}")
    zero, anything = parsed.workspace_bytes(problem, ARCH)
    kernel = cute.build(problem.signature, parsed, ARCH)
    work = Workload.of(problem, kernel, seed=seed)
    memory = work.operations.scratch["workspace"]
    assert memory.numel() == zero
    assert anything == 0
    for launch in range(3):
        verdict, _ = work.run(seed=seed // 2 + launch)
        assert verdict.ok, verdict.message
        assert not memory.any()
