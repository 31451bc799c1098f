"""Products in groups by the kernels without TMA in the emulator: mma.sync and CUDA cores, operands of any alignment."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.choice import prepared
from cutegemm.errors import UnsupportedError
from cutegemm.problem import grouped_request, packing
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, SCATTERED
from tests.groups import SKEWS, WORKS, GroupCase, sizes_of

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("fresh_timing")

MMA, SMALL, WIDE = "sm80/64x64x32/w32x32/s3/g8", "sm80/32x64x64/w16x32/s4/g1", "sm80/128x64x32/w64x32/s2/g4"
CORES, SLICED = "simt/64x64x16/w32x64/s2/g8/r6", "simt/32x32x64/w32x32/s3/g8/x8"
KINDS = [("bf16", MMA), ("fp16", SMALL), ("fp32", CORES), ("fp32", SLICED), ("tf32", WIDE)]


def case_of(work, sizes, m, n, k, dtype, **options) -> GroupCase:
    if dtype == "tf32":
        return GroupCase.random(work, sizes, m, n, k, "fp32", precision="tf32", **options)
    return GroupCase.random(work, sizes, m, n, k, dtype, **options)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("majors", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize(("dtype", "config"), KINDS)
@pytest.mark.product(keep=2)
def test_groups_of_any_sizes(work, majors, dtype, config, seed):
    """Extents of any number, so that no row but the first begins at 16 bytes; then integers, which are exact."""
    rng = random.Random(seed)
    tail = 0 if work == MASKED else 5
    sizes = sizes_of(rng.choice(SKEWS), rng.choice((1, 3, 34)), 130, rng)
    case_of(work, sizes, 130, 75, 43, dtype, tail=tail, majors=majors, seed=seed).run(backend="cute", config=config)
    case = case_of(
        work, [9, 0, 70, 1], 80, 40, 72, dtype, tail=tail, majors=majors, seed=seed, integers=True
    )  # fmt: skip
    case.run(exact=True, backend="cute", config=config)


def test_nothing_is_read_where_k_ends_within_a_vector():
    """Of a copy whose rows are padded: the last row's padding is not part of the tensor."""
    case = GroupCase.random(RAGGED_M, [9, 0, 30, 4], 45, 72, 43, "fp32", majors="nt", tail=3)
    case.run(backend="cute", config=CORES)
    case.run(backend="cute", config=SLICED)


@pytest.mark.parametrize("inner", [43, 45, 47])
@pytest.mark.product(keep=1)
def test_gathered_rows_that_begin_aligned_and_end_anywhere(inner, seed):
    """What lies behind K in their memory is multiplied by zeros where kernels load it: it may be infinite."""
    wide = torch.full((40, 48), torch.inf).bfloat16()
    wide[:, :inner] = torch.randn(40, inner, generator=torch.Generator().manual_seed(seed))
    case = GroupCase(
        GATHERED, wide[:, :inner], torch.randn(2, inner, 72).bfloat16(), torch.tensor([20, 40], dtype=torch.int32)
    )
    case.index = torch.randperm(40, generator=torch.Generator().manual_seed(seed)).int()
    case.run(backend="cute")
    case.run(backend="cute", config="sm90/64x32x64/coop1/c1x1/s2/row")


@pytest.mark.parametrize("work", [RAGGED_M, RAGGED_N, GATHERED, SCATTERED, MASKED])
@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
@pytest.mark.parametrize("recipe", ["rows", "groups", "blocks"])
@pytest.mark.product(keep=1)
def test_elements_of_one_byte_with_scales(work, dtype, recipe, seed, monkeypatch):
    """fp8 as GPUs of compute capability 8.9 compute it."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_89" if dtype == "e4m3" else "sm_80")
    case = GroupCase.random(
        work, [5, 0, 33, 26], 64, 72, 208, dtype, recipes=(recipe, recipe), seed=seed, out_dtype=torch.bfloat16
    )
    case.run(backend="cute", config="sm80/32x32x128/w16x16/s3/g8")


@pytest.mark.parametrize("config", [MMA, CORES])
@pytest.mark.parametrize("work", [RAGGED_M, GATHERED, SCATTERED, MASKED, RAGGED_N, RAGGED_K])
@pytest.mark.product(keep=1)
def test_programs_with_operands_and_reduced_results(work, config, seed):
    generator = torch.Generator().manual_seed(seed)
    dtype = "bf16" if config == MMA else "fp32"
    case = GroupCase.random(work, [5, 0, 37, 22], 64, 70, 43, dtype, seed=seed)
    e = case.extents
    if work in (RAGGED_N, RAGGED_K):
        case.epilogue = lambda acc, x: (acc * x + ops.matrix(), ops.column_sum(acc), ops.column_max(acc * x))
        case.operands = (torch.randn(e.groups, e.m, 1, generator=generator),)
    else:
        case.epilogue = lambda acc, x, y: (ops.swiglu(acc) * x, ops.row_sum(ops.swiglu(acc) + y), ops.row_max_abs(x))
        case.operands = (
            torch.randn(e.groups, 1, 35, generator=generator), torch.randn(e.m, 1, generator=generator).bfloat16()
        )  # fmt: skip
    case.run(backend="cute", config=config)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("config", [MMA, SLICED])
@pytest.mark.product(keep=1)
def test_sizes_that_nobody_should_pass_write_nothing_outside(work, config, seed):
    rng = random.Random(seed)
    case = GroupCase.random(work, [24, 24, 24], 72, 70, 43, "bf16" if config == MMA else "fp32", seed=seed)
    for each in (case.a, case.b):
        each.nan_to_num_(1)
    wild = (-(2**31), -1, 0, 5, 40, 72, 73, 2**30 + 7, 2**31 - 1)
    for _ in range(2):
        case.sizes = torch.tensor([rng.choice(wild) for _ in range(3)], dtype=torch.int32)
        case.run(backend="cute", config=config)
    if case.index is not None:
        case.index[::3] = torch.tensor([-7, 2**31 - 1], dtype=torch.int32).repeat(12)
        case.run(backend="cute", config=config)


@pytest.mark.parametrize("groups", [33, 1024])
@pytest.mark.parametrize("work", [RAGGED_M, RAGGED_K])
@pytest.mark.product(keep=1)
def test_many_groups(groups, work, seed):
    """A warp looks at 32 at a time; most CTAs of the grid have no tile."""
    sizes = [0] * groups
    for place in random.Random(seed).sample(range(groups), 5):
        sizes[place] = 3
    sizes[groups - 1] = 9
    case = GroupCase.random(work, sizes, 5, 7, 9, seed=seed, majors="tt")
    case.run(backend="cute", config="sm80/16x16x64/w16x16/s2/g8")


def test_nothing_to_sum_and_rows_of_nothing(seed):
    case = GroupCase.random(RAGGED_M, [7, 33], 0, 72, 0, seed=seed)
    case.run(backend="cute", config=MMA)
    a = torch.empty(0, 43).bfloat16()
    case = GroupCase(GATHERED, a, torch.randn(2, 43, 24).bfloat16(), torch.tensor([7, 40]).int())
    case.index = torch.randint(-3, 3, (40,)).int()
    case.run(backend="cute", config=MMA)
    case.run(backend="cute")


def test_what_tma_cannot_load_goes_to_mma_sync_or_is_packed(capsys, monkeypatch):
    case = GroupCase.random(RAGGED_M, [70, 0, 3, 47], 0, 75, 43, majors="tt")
    cutegemm.explain(case.a, case.b, backend="cute", **case.given)
    told = capsys.readouterr().out
    assert "not sm90, because TMA cannot load A" in told
    assert "configuration  sm80/" in told
    case.run(backend="cute")
    monkeypatch.setattr(prepared, "GAIN", math.inf)
    for work in WORKS:
        case = GroupCase.random(work, [9, 0, 30, 4], 45, 75, 43, majors="tn" if work == RAGGED_N else "nt")
        cutegemm.explain(case.a, case.b, backend="cute", **case.given)
        told = capsys.readouterr().out
        assert "prepared first: b  pack into" in told
        assert re.search(r"configuration +sm90/", told)
        case.run(backend="cute")


def test_operands_that_lie_along_a_ragged_k_are_copied_across(capsys, seed):
    for majors, names in (("tn", ["A", "B"]), ("nn", ["B"]), ("tt", ["A"]), ("nt", [])):
        case = GroupCase.random(RAGGED_K, [7, 0, 33, 1], 40, 24, 0, majors=majors, tail=3, seed=seed)
        cutegemm.explain(case.a, case.b, backend="cute", **case.given)
        told = capsys.readouterr().out
        assert [name for name in "AB" if f"copied first: {name.lower()}" in told] == names
        odd = GroupCase.random(RAGGED_K, [7, 0, 33], 45, 27, 0, majors=majors)
        sizes = grouped_request.Sizes(**odd.given)
        problem = grouped_request.describe(odd.a, odd.b, sizes, odd.program(), (), None, None, None).problem
        assert (problem.a.align, problem.b.align) == (2, 2)
        assert (problem.a.begins, problem.b.begins) == (16 * ("A" in names), 16 * ("B" in names))
        case.run(backend="cute", config="sm90/64x32x64/coop1/c1x1/s2/row")
        case.run(backend="cute", config=MMA)


@pytest.mark.slow
def test_older_gpus_compute_groups(monkeypatch, capsys):
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80")
    for work in WORKS:
        case = GroupCase.random(work, [70, 0, 3, 47], 120, 72, 72)
        cutegemm.explain(case.a, case.b, backend="cute", **case.given)
        assert "configuration  sm80/" in capsys.readouterr().out
        case.run(backend="cute")
    case = GroupCase.random(RAGGED_M, [70, 0, 3, 47], 0, 72, 80, "e4m3")
    with pytest.raises(UnsupportedError, match=r"mma\.sync multiplies fp8 from compute capability 8\.9 on"):
        case.run(backend="cute")


@pytest.mark.parametrize(
    ("work", "dtype", "config", "reason"),
    [
        (RAGGED_M, "bf16", f"{MMA}/k2", "2 splits of K; a ragged_m product has its K in one part"),
        (RAGGED_K, "int8", "sm80/32x32x128/w16x16/s3/g8", "and a group begins at no multiple of 16 bytes"),
        (MASKED, "fp32", "simt/64x64x16/w32x64/s3/g8/k3", "3 splits of K; a masked product"),
        (RAGGED_M, "fp32", "vector/1x32x128/w1x8/s2/g1", "vector computes dense products; this one is ragged_m"),
    ],
)
def test_what_they_do_not_compute_is_refused(work, dtype, config, reason):
    case = GroupCase.random(work, [8, 8], 16, 32, 48, dtype)
    with pytest.raises(UnsupportedError, match=reason):
        case.call(backend="cute", config=config)


@pytest.mark.parametrize("config", ["sm90/64x32x64/coop1/c1x1/s2/row", MMA])
def test_what_pads_the_rows_of_a_copy_is_not_multiplied(config, seed, monkeypatch):
    """Gathered rows came with it where K ends within 16 bytes: zeros times NaN."""
    case = GroupCase.random(GATHERED, [9, 0, 30, 4], 0, 80, 43, majors="nt", seed=seed)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *given, **options: torch.full(*given, -1, **options))
        copy = packing.copied("a", case.a, GATHERED)
    assert not copy.as_strided((copy.shape[0], copy.stride(0)), (copy.stride(0), 1))[:, 43:].any()
    monkeypatch.setattr(packing, "copied", lambda name, *given: copy)
    case.run(backend="cute", config=config)
