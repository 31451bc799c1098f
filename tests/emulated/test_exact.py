"""Integers at a large K in the emulator: every kernel family and every way of splitting K gives the exact product."""

from __future__ import annotations

from typing import Any

import pytest

from legacy_cuda.rungs import RUNGS
from tests import exact

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("few_sms", "fresh_timing")

HOPPER = {
    "cooperative": "64x64x64/coop1/c1x1/s4/g8",
    "two consumers, cluster": "128x32x64/coop2/c2x1/s3/serp2",
    "ping-pong": "64x32x64/pp/c1x2/s3/g2/pdl",
    "swapped": "64x32x64/coop1/c1x1/s4/g8/swap",
    "swapped, wide": "128x144x64/coop2/c1x1/s3/g8/swap",
    "split-K": "64x64x64/coop1/c1x1/s3/row/k4",
    "split-K in 7, swapped, cluster": "64x32x64/coop1/c2x1/s3/g8/k7/swap",
    "split-K by arrival": "64x64x64/coop1/c1x1/s3/row/k4/arrival",
    "cluster along K": "64x32x64/coop1/c1x1x4/s2/row",
    "cluster along K, two consumers": "128x64x64/coop2/c2x1x2/s2/g2/pdl",
    "cluster along K and split-K, swapped": "64x16x64/coop1/c1x1x4/s3/g2/k2/swap",
    "stream-K": "64x32x64/coop1/c1x1/s3/row/streamk",
    "stream-K, cluster, zigzag": "64x64x64/coop1/c2x1/s3/hilbert/streamk/zig",
}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sm90 tf32": ("sm90/64x64x32/coop1/c1x1/s3/row", "fp32", {"precision": "tf32"}),
    "sm90 tf32, split-K": ("sm90/64x64x32/coop1/c1x1/s3/row/k4", "fp32", {"precision": "tf32"}),
    "sm80 fp16": ("sm80/64x64x32/w32x32/s3/g8", "fp16", {}),
    "sm80 bf16": ("sm80/64x64x32/w32x32/s4/g8", "bf16", {"majors": "nt"}),
    "sm80 tf32": ("sm80/64x64x16/w32x32/s4/g8", "fp32", {"precision": "tf32"}),
    "simt": ("simt/64x64x8/w32x32/s3/g8", "fp32", {"majors": "nt"}),
    "simt, registers bounded": ("simt/64x64x8/w32x32/s3/g8/r4", "fp32", {}),
    "simt, sliced": ("simt/32x32x32/w32x32/s4/g1/x8", "fp32", {}),
    "simt, sliced, small tile": ("simt/16x32x64/w16x32/s2/g1/x4", "fp32", {"majors": "nt"}),
}


@pytest.mark.parametrize("name", HOPPER)
@pytest.mark.product(keep=1)
def test_hopper(name, seed):
    """2 to 10 tiles of 2000 to 3000 products an element, K ragged."""
    problem = exact.case(72, 136, 2000 + 8 * (seed % 128), "bf16", seed=seed)
    exact.run(problem, backend="cute", config=f"sm90/{HOPPER[name]}")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.product(keep=4)
def test_other_families(name, seed):
    config, dtype, options = OTHERS[name]
    problem = exact.case(72, 40, 1000 + 4 * (seed % 256), dtype, seed=seed, **options)
    exact.run(problem, backend="cute", config=config)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.product(keep=1)
def test_ladder(rung, seed):
    problem = exact.case(36, 40, 500 + seed % 100, RUNGS[rung].dtypes[0], seed=seed, majors="tt")
    exact.run(problem, backend="legacy", config=rung)
