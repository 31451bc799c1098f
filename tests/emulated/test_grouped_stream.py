"""Stream-K for products in groups in the emulator: which tiles are cut, the device finds out from the groups' sizes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.cute.compile import CuteKernel
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_M, RAGGED_N, SCATTERED
from tests.emulated.gpus import gpu_of
from tests.groups import SKEWS, GroupCase, sizes_of

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("fresh_timing")

ONE = "sm90/64x64x64/coop1/c1x1/s3/g2/streamk"
CONFIGS = [
    (RAGGED_M, "128x64x64/coop2/c1x1/s3/serp2/zig/streamk", "tn", 1),
    (RAGGED_M, "64x64x64/coop1/c1x2/s3/hilbert/streamk/pdl", "nt", 2),
    (RAGGED_M, "64x48x64/coop1/c2x1/s3/g2/swap/zig/streamk/fit", "tn", 2),
    (RAGGED_N, "64x64x64/coop1/c1x1/s3/g2/swap/streamk", "tt", 1),
    (MASKED, "128x32x64/coop2/c2x1/s3/g2/streamk/skew", "tn", 2),
    (GATHERED, "64x64x64/coop1/c2x1/s3/g2/streamk", "tn", 2),
    (SCATTERED, "64x16x64/coop1/c1x1/s3/g2/swap/streamk", "tt", 1),
]


def count(config: str, work: str, sizes: list[int], across: int) -> int:
    """Cluster tiles of groups of these sizes."""
    c = HopperConfig.parse(config)
    along, other = c.bm * c.cluster[0], c.bn * c.cluster[1]
    if c.swapped != (work == RAGGED_N):
        along, other = other, along
    return sum(-(-size // along) for size in sizes) * -(-across // other)


@pytest.mark.parametrize(("work", "config", "majors", "ctas"), CONFIGS)
@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.product(keep=1)
def test_groups_of_any_sizes(work, config, majors, ctas, integers, seed, monkeypatch):
    """A number of clusters that leaves tiles over, which are cut into two parts or three."""
    rng, config = random.Random(seed), f"sm90/{config}"
    sizes = [90, 0, 70, 1, 129]
    rng.shuffle(sizes)
    tiles = count(config, work, sizes, 144)
    clusters = next(c for c in (5, 6, 7, 8, 9) if 0 < 2 * (tiles % c) <= c < tiles)
    gpu_of(clusters * ctas, monkeypatch)
    if integers:
        m = 136 if work == MASKED else 144
        extents = m, 144, rng.choice((8 * 64 * 2 + 8, 8 * 64 * 3 + 8))
    else:
        sizes, extents = sizes_of(rng.choice(SKEWS), rng.choice((1, 3, 6)), 160, rng), (160, 72, 1032)
    tail = -sum(sizes) % 8 + 8
    case = GroupCase.random(work, sizes, *extents, seed=seed, tail=tail, majors=majors, integers=integers)
    case.run(integers, backend="cute", config=config)


@pytest.mark.slow
def test_cut_tiles_of_several_widths_have_room_of_their_own(seed, monkeypatch):
    """Seven tiles on five clusters: two are left over and cut in two, of 40 rows (48 columns) and of 20 (32 columns).

    Which parts would overwrite each other depends on the time, in one run of six.
    """
    gpu_of(5, monkeypatch)
    case = GroupCase.random(RAGGED_M, [48] * 5 + [40, 20], 0, 64, 1032, seed=seed, integers=True)
    for number in range(12):
        monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", str(number))
        case.run(True, backend="cute", config="sm90/64x48x64/coop1/c1x1/s3/g2/swap/streamk/fit")


def test_replays_with_other_sizes_share_a_workspace(seed, monkeypatch):
    """One capture, launched again and again, as a CUDA graph is: each launch leaves the words zero for the next."""
    gpu_of(5, monkeypatch)
    captured: list[Any] = []
    original = CuteKernel.capture

    def once(*given):
        if not captured:
            captured.append(original(*given))
        return captured[0]

    monkeypatch.setattr(CuteKernel, "capture", once)
    case = GroupCase.random(RAGGED_M, [100, 100, 100], 0, 72, 1032, seed=seed, integers=True)
    out = torch.empty(300, 72, dtype=torch.bfloat16)
    cut = []
    for ends in ([300, 300, 300], [0, 0, 0], [1, 2, 300], [10, 64, 192], [64, 65, 66], [0, 190, 299]):
        case.sizes.copy_(torch.tensor(ends))
        case.run(True, backend="cute", config=ONE, out=(out,))
        (workspace,) = captured[0].scratch.values()
        assert not workspace[:128].any(), "the state words"
        tiles = count(ONE, RAGGED_M, [end - begin for begin, end in zip((0, *ends), ends, strict=False)], 72)
        cut.append(tiles % 5 in (1, 2))
    assert {True, False} == set(cut)


@pytest.mark.slow
def test_the_same_bits_whoever_comes_last(seed, monkeypatch):
    gpu_of(7, monkeypatch)
    case = GroupCase.random(RAGGED_M, [70, 0, 3, 70], 0, 72, 1544, seed=seed)  # ten tiles: three are cut in two
    results = []
    for number in range(3):
        monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", str(seed // 2 + number))
        options = {"backend": "cute", "config": ONE, "out_dtype": torch.float32}
        results.append(cutegemm.grouped_gemm(case.a, case.b, case.sizes, **options))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("work", [RAGGED_M, MASKED])
@pytest.mark.product(keep=1)
def test_sizes_that_nobody_should_pass_write_nothing_outside(work, seed, monkeypatch):
    gpu_of(2, monkeypatch)
    rng = random.Random(seed)
    case = GroupCase.random(work, [24, 24, 24], 72, 72, 72, seed=seed)
    case.a.nan_to_num_(1)
    for _ in range(2):
        wild = [rng.choice((-(2**31), -1, 0, 5, 40, 72, 73, 2**31 - 1)) for _ in range(3)]
        case.sizes = torch.tensor(wild, dtype=torch.int32)
        case.run(backend="cute", config=ONE)


def test_many_groups(seed, monkeypatch):
    """More of them than a warp has lanes, most of them empty, but not the first lane's and its neighbours'."""
    gpu_of(3, monkeypatch)
    sizes = [0] * 70
    for place in (31, 32, 33, 64, *random.Random(seed).sample(range(30), 3)):
        sizes[place] = 17
    sizes[69] = 9
    case = GroupCase.random(RAGGED_M, sizes, 0, 8, 1032, seed=seed)
    case.run(backend="cute", config="sm90/64x16x64/coop1/c1x1/s3/g2/swap/streamk")


@pytest.mark.parametrize("k", [0, 8])
def test_too_little_k_to_cut(k, seed, monkeypatch):
    gpu_of(3, monkeypatch)
    nothing = torch.empty(0, dtype=torch.bfloat16)
    if k:
        case = GroupCase.random(RAGGED_M, [70, 0, 130], 0, 72, k, seed=seed)
    else:
        a, b = nothing.as_strided((200, 0), (8, 1)), nothing.as_strided((2, 0, 72), (8, 1, 8))
        case = GroupCase(RAGGED_M, a, b, torch.tensor([70, 200], dtype=torch.int32))
    case.run(backend="cute", config=ONE)


@pytest.mark.slow
def test_gate_and_up_and_operands_of_rows(seed, monkeypatch):
    gpu_of(3, monkeypatch)
    generator = torch.Generator().manual_seed(seed)
    case = GroupCase.random(GATHERED, [70, 0, 3, 130], 0, 144, 1032, majors="tt", seed=seed)
    rows = case.extents.m
    case.epilogue = lambda acc, row: ops.swiglu(acc) * row
    case.operands = (torch.randn(rows, 1, generator=generator),)
    case.run(backend="cute", config="sm90/64x64x64/coop1/c1x1/s3/g2/streamk")


def test_fewer_tiles_than_clusters_are_cut(seed, monkeypatch):
    """Two tiles of 25 k tiles on seven SMs: three parts each."""
    gpu_of(7, monkeypatch)
    case = GroupCase.random(RAGGED_M, [5, 0, 60], 0, 64, 1544, seed=seed, integers=True)
    case.run(True, backend="cute", config=ONE)


def test_a_workspace_wherever_the_device_may_cut():
    """With dense works it depends on the number of tiles; of groups no more than the most is known."""
    arch = replace(arch_table.get("sm_90a"), sm_count=4)
    config = HopperConfig.parse("sm90/128x64x64/coop2/c1x1/s3/row/streamk")

    def needs(rows: int) -> tuple[int, int]:
        return config.workspace_bytes(Problem.of(rows, 64, 256, "bf16", batch=2, work=RAGGED_M), arch)

    some = (128, 4 * 2 * 64 * 64 * 4)
    assert [needs(rows) for rows in (0, 1, 384, 385, 900)] == [(0, 0), some, some, some, some]
