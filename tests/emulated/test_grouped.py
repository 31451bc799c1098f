"""Products in groups by the Hopper kernel in the emulator: every work, sizes of every kind, and what must not change.

The pretended GPU has few SMs, so that a persistent CTA walks over many groups. Each run draws its own timing.
"""

from __future__ import annotations

import random

import pytest
import torch

import cutegemm
from cutegemm import cute, ops
from cutegemm.emulator import bridge
from cutegemm.emulator.errors import MisalignedAccess
from cutegemm.emulator.ops import bulk, tma
from cutegemm.errors import UnsupportedError
from cutegemm.problem import packing
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, SCATTERED
from tests.emulated.gpus import gpu_of
from tests.groups import SKEWS, GroupCase, sizes_of

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("few_sms", "fresh_timing")
SMS = 3


CONFIGS = [
    (RAGGED_M, "128x64x64/coop2/c1x1/s3/serp2", "tn"),
    (RAGGED_M, "128x64x64/coop2/c2x1/s3/serp2/zig", "tn"),
    (RAGGED_M, "64x64x64/pp/c2x1/s3/g2/zig/pdl", "nt"),
    (RAGGED_M, "64x16x64/coop1/c2x1/s3/g2/swap/skew", "tn"),
    (RAGGED_M, "128x144x64/coop2/c1x1/s3/g2/swap", "tt"),
    (RAGGED_M, "128x64x64/coop2/c1x2/s3/serp2/swap/zig/fit", "tn"),
    (RAGGED_M, "64x48x64/pp/c1x1/s3/g2/swap/fit/pdl", "tt"),
    (RAGGED_N, "128x16x64/coop2/c1x1/s3/hilbert/swap", "tt"),
    (RAGGED_K, "128x64x64/coop2/c1x2/s3/g2/zig", "nt"),
    (RAGGED_K, "64x32x32/coop1/c2x1/s3/g2/swap", "nt"),
    (RAGGED_K, "64x64x64/pp/c1x2/s3/g2/zig/pdl", "nt"),
    (RAGGED_K, "64x32x32/pp/c1x1/s2/g2/swap", "nt"),
    (MASKED, "64x16x64/pp/c1x1/s3/g2/swap/once", "tt"),
    (GATHERED, "128x64x64/coop2/c2x1/s3/g2", "tn"),
    (GATHERED, "64x64x128/pp/c1x1/s2/serp2/pdl", "tt"),
    (GATHERED, "64x16x32/coop1/c1x2/s3/g2/swap", "tn"),
    (GATHERED, "64x32x64/coop1/c1x1/s3/g2/swap/fit", "tn"),
    (SCATTERED, "64x16x64/pp/c1x1/s3/g2/swap", "tt"),
    (SCATTERED, "128x32x64/coop2/c2x1/s3/g2/swap/fit", "tn"),
    (SCATTERED, "64x160x64/pp/c1x1/s3/g2/swap", "tn"),
]


@pytest.mark.parametrize(("work", "config", "majors"), CONFIGS)
@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.product(keep=1)
def test_groups_of_any_sizes(work, config, majors, integers, seed):
    """The contiguous extents of operands are multiples of 8."""
    rng = random.Random(seed)
    if integers:
        case = GroupCase.random(work, [9, 0, 70, 1], 80, 40, 72, majors=majors, integers=True, seed=seed)
    else:
        sizes = sizes_of(rng.choice(SKEWS), rng.choice((1, 3, 6)), 160, rng)
        tail = -sum(sizes) % 8 + 8
        case = GroupCase.random(work, sizes, 160, 72, 136, seed=seed, tail=tail, majors=majors)
    case.run(exact=integers, backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize(
    ("work", "config", "majors", "ctas", "extents"),
    [
        (RAGGED_M, "256x80x64/coop2/c1x1/s3/g2/swap/streamk", "tn", 1, (0, 768, 72)),
        (RAGGED_M, "256x80x64/coop2/c2x1/s3/g2/swap/zig", "tn", 2, (0, 1536, 72)),
        (GATHERED, "256x80x64/coop2/c1x1/s3/g2/swap", "tn", 1, (0, 768, 72)),
        (RAGGED_K, "128x144x64/coop2/c1x1/s2/g2", "nt", 1, (128, 432, 0)),
    ],
)
@pytest.mark.product(keep=1)
def test_a_cluster_that_the_waves_do_not_need_computes_nothing(work, config, majors, ctas, extents, seed, monkeypatch):
    """Thirty tiles on 16 clusters take two waves, and so they do on 15: as many bytes are loaded as by one cluster."""
    sizes = [80, 40, 0, 160, 80, 1, 80, 81, 79]  # ten tiles of 80 rows
    if work == RAGGED_K:
        sizes = [9, 70, 0, 1, 64, 5, 0, 100, 3, 2]
    case = GroupCase.random(work, sizes, *extents, seed=seed, majors=majors, integers=True, tail=8)
    loaded, asking = [], []

    def emulate(*given, **named):
        (report,) = original(*given, **named, profile=True)
        loaded.append(report.bytes["bulk load"])
        return [report]

    class Asker(bulk.Asker):
        def __init__(self, *given):
            super().__init__(*given)
            asking[-1].add((self.wave, self.c))

    original = bridge.emulate
    monkeypatch.setattr(bridge, "emulate", emulate)
    monkeypatch.setattr(tma, "Asker", Asker)
    for clusters, order in ((16, "g2"), (1, "row")):
        gpu_of(clusters * ctas, monkeypatch)
        asking.append(set())
        case.run(exact=True, backend="cute", config=f"sm90/{config.replace('g2', order)}")
    assert loaded[0] == loaded[1] > 0
    assert [len(each) for each in asking] == [15 * ctas, ctas]


@pytest.mark.parametrize(
    ("work", "majors", "config"),
    [
        (RAGGED_M, "nt", "64x16x64/coop1/c2x2/s2/row/zig/streamk/pdl"),
        (SCATTERED, "nn", "128x48x64/coop1/c2x1/s3/g2/swap"),
        (GATHERED, "nt", "64x32x64/coop1/c1x1/s3/g2/swap"),
        (RAGGED_N, "nt", "128x96x32/coop2/c1x2/s2/hilbert/slab/pdl"),
    ],
)
@pytest.mark.product(keep=1)
def test_groups_within_contiguous_rows(work, majors, config, seed):
    """TMA cannot begin at any element of a contiguous row, so the operand that groups divide is copied along K."""
    case = GroupCase.random(work, [1, 2, 17, 0, 5], 40, 72, 40, majors=majors, seed=seed)
    case.run(backend="cute", config=f"sm90/{config}")


def test_a_box_begins_at_16_bytes(monkeypatch):
    """An H200 stopped with an illegal instruction where groups divided an M-major A that was not copied."""
    monkeypatch.setattr(packing, "divided", lambda name, tensor, matrix, *rest: matrix)
    monkeypatch.setattr(cute, "_division_refused", lambda signature: None)
    case = GroupCase.random(RAGGED_M, [8, 9], 0, 72, 40, majors="nt", tail=7)
    case.run(backend="cute", config="sm90/64x16x64/coop1/c1x1/s2/row")
    case.sizes.copy_(torch.tensor([9, 17]))
    with pytest.raises(MisalignedAccess, match="begins at element 9 of 2 bytes in its rows, no multiple of 16 bytes"):
        case.run(backend="cute", config="sm90/64x16x64/coop1/c1x1/s2/row")


@pytest.mark.parametrize("work", [RAGGED_M, RAGGED_K, MASKED])
@pytest.mark.product(keep=1)
def test_sizes_that_nobody_should_pass_write_nothing_outside(work, seed):
    """Descending, negative, too large: the emulator finds accesses outside of the tensors, `run` wrong elements."""
    rng = random.Random(seed)
    majors = "nt" if work == RAGGED_K else "tn"
    case = GroupCase.random(work, [24, 24, 24], 72, 72, 72, majors=majors, seed=seed)
    case.a.nan_to_num_(1)
    wild = (-(2**31), -1, 0, 5, 40, 72, 73, 2**30 + 7, 2**31 - 1)
    for _ in range(2):
        case.sizes = torch.tensor([rng.choice(wild) for _ in range(3)], dtype=torch.int32)
        case.run(backend="cute", config="sm90/64x64x64/coop1/c1x1/s3/g2")


@pytest.mark.parametrize("groups", [33, 1024])
@pytest.mark.product(keep=1)
def test_many_groups(groups, seed):
    """More of them than a warp has lanes: works are found behind runs of empty groups too."""
    sizes = [0] * groups
    for place in random.Random(seed).sample(range(groups), 5):
        sizes[place] = 3
    sizes[groups - 1] = 9
    case = GroupCase.random(RAGGED_M, sizes, 0, 8, 8, seed=seed)
    case.run(backend="cute", config="sm90/64x16x64/coop1/c1x1/s3/g2/swap")


@pytest.mark.parametrize("groups", [1, 2, 70])
def test_ping_pong_looks_for_the_other_warpgroups_work_in_any_number_of_groups(groups, seed):
    """A group a tile: one work, two, and more than a warp has lanes, with long and empty groups in turn."""
    rng = random.Random(seed)
    sizes = [rng.choice((0, 0, 8, 64, 136)) for _ in range(groups - 1)] + [72]
    case = GroupCase.random(RAGGED_K, sizes, 64, 32, 8, majors="nt", seed=seed)
    case.run(backend="cute", config="sm90/64x32x32/pp/c1x1/s3/row/zig")


def test_the_sizes_are_read_at_each_launch(seed):
    """One plan, one kernel; only the numbers on the device change."""
    case = GroupCase.random(RAGGED_M, [24, 24, 24], 0, 72, 72, seed=seed)
    for ends in ([72, 72, 72], [0, 0, 0], [1, 2, 71]):
        case.sizes.copy_(torch.tensor(ends))
        case.run(backend="cute", config="sm90/64x64x64/coop1/c1x1/s3/g2")


def test_nothing_to_sum(seed):
    nothing = torch.empty(0, dtype=torch.bfloat16)
    a, b = nothing.as_strided((40, 0), (8, 1)), nothing.as_strided((2, 0, 72), (8, 1, 8))
    case = GroupCase(RAGGED_M, a, b, torch.tensor([7, 40], dtype=torch.int32))
    case.run(backend="cute", config="sm90/64x64x64/pp/c1x1/s3/g2")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((24, 0), (2, 0, 32)),
        ((24, 16), (2, 16, 0)),
        ((1, 0), (2, 0, 32)),
        ((2, 24, 0), (2, 0, 32)),
        ((0, 24), (24, 32)),
    ],
    ids=str,
)
@pytest.mark.product(keep=2)
def test_operands_without_elements(a, b):
    """As torch lays them out; the last is a product of groups of K without rows."""
    x = torch.empty(*a).bfloat16() if a[0] else torch.empty(a[1], 0).bfloat16().t()
    ends = torch.tensor([3, 24] if a[0] != 1 else [0, 1], dtype=torch.int32)
    sizes = {"counts": ends} if len(a) == 3 else {"offsets": ends}
    d = cutegemm.grouped_gemm(x, torch.empty(b).bfloat16(), backend="cute", **sizes)
    groups = (2,) if len(a) == 3 or len(b) == 2 else ()
    assert d.shape == (*groups, a[-2], b[-1])
    if not d.numel() or len(a) == 2:
        assert bool((d == 0).all())


def test_the_backward_pass_of_one_row():
    x = torch.linspace(-1.0, 1.0, 16).bfloat16().view(1, 16).requires_grad_()
    w = torch.linspace(-1.0, 1.0, 1024).bfloat16().view(2, 16, 32).requires_grad_()
    cutegemm.grouped_gemm(x, w, torch.tensor([0, 1]).int(), backend="cute").float().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    torch.testing.assert_close(x.grad.float(), w[1].float().sum(1)[None], atol=0.05, rtol=0.01)
    torch.testing.assert_close(w.grad[1].float(), x.float().t().expand(16, 32), atol=0.01, rtol=0.01)


def test_the_backward_pass_of_one_number():
    """Of its operand in the groups of K nothing says which way it lies."""
    x = torch.tensor([[3.0]]).bfloat16().requires_grad_()
    w = torch.tensor([[[5.0]], [[7.0]]]).bfloat16().requires_grad_()
    cutegemm.grouped_gemm(x, w, torch.tensor([0, 1]).int(), backend="cute").float().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert x.grad.tolist() == [[7.0]]
    assert w.grad.tolist() == [[[0.0]], [[3.0]]]


@pytest.mark.parametrize("k", [1, 3, 17])
def test_the_last_row_of_a_packed_copy_is_gathered(k, seed):
    """Kernels load whole 16 bytes, of what pads that row too."""
    torch.manual_seed(seed)
    a, b = torch.randn(k, 16).bfloat16().t(), torch.randn(3, k, 24).bfloat16()
    rows, ends = torch.arange(15, -1, -1).int(), torch.tensor([5, 9, 16]).int()
    mine, theirs = (cutegemm.grouped_gemm(a, b, ends, rows=rows, backend=name) for name in ("cute", "torch"))
    torch.testing.assert_close(mine, theirs, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("config", ["128x64x64/coop2/c1x1/s3/g2", "128x32x64/coop1/c1x1/s3/g2/swap"])
@pytest.mark.parametrize("work", [RAGGED_M, GATHERED])
@pytest.mark.product(keep=1)
def test_gate_and_up_of_stacked_weights(work, config, seed):
    generator = torch.Generator().manual_seed(seed)
    case = GroupCase.random(work, [70, 0, 3, 55], 0, 144, 72, majors="tt", seed=seed)
    case.epilogue = lambda acc, row, group: (ops.swiglu(acc) * row, ops.halves(acc)[0] + group)
    case.operands = (torch.randn(128, 1, generator=generator), torch.randn(4, 1, 72, generator=generator).bfloat16())
    case.run(backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize("work", [RAGGED_N, SCATTERED])
@pytest.mark.product(keep=1)
def test_operands_of_the_epilogue(work, seed):
    """Terms of gemm, and a program with one matrix a group, a matrix like D, indices."""
    generator = torch.Generator().manual_seed(seed)
    case = GroupCase.random(work, [70, 0, 3, 47], 72, 72, 72, seed=seed)
    m, n = (120, 72) if work != RAGGED_N else (72, 120)
    like, across = torch.randn(m, n, generator=generator).bfloat16(), torch.randn(n, generator=generator)
    group = torch.randn((4, 72, 1) if work == RAGGED_N else (4, 1, 72), generator=generator)
    case.epilogue, case.operands = lambda acc, c, bias: acc * 0.5 + c * 2.0 + bias, (like, across)
    case.run(backend="cute", config="sm90/64x64x64/coop1/c1x1/s3/g2")
    case.epilogue = lambda acc, x, y: acc * x + y + ops.where(ops.row() < 40, ops.matrix(), 1)
    case.operands = (group, like)
    case.run(backend="cute", config="sm90/64x32x64/coop1/c1x1/s3/g2/swap")


def test_results_of_any_layout(seed):
    """Rows at any element are stored by the slabs; a column-major `out` keeps what belongs to no group."""
    case = GroupCase.random(RAGGED_M, [70, 0, 3, 47], 0, 72, 72, tail=8, seed=seed)
    for out in (torch.empty(128, 81).bfloat16()[:, 3:75], torch.empty(72, 128).bfloat16().t()):
        case.run(backend="cute", config="sm90/64x64x64/coop1/c1x1/s3/g2", out=(out,))


def test_gradients_by_the_kernels(seed):
    """Integers: the products of the backward pass are exact, and so are sums over a group's rows."""
    case = GroupCase.random(RAGGED_M, [70, 0, 3, 47], 0, 72, 72, integers=True, seed=seed, tail=8)
    leaves = [case.a.nan_to_num(1).requires_grad_(), case.b.clone().requires_grad_(),
              torch.ones(4, 1, 72, dtype=torch.bfloat16, requires_grad=True)]  # fmt: skip
    upstream = torch.randint(-1, 2, (128, 72)).bfloat16()
    found = []
    for backend in ("cute", "torch"):
        d = cutegemm.grouped_gemm(
            leaves[0], leaves[1], case.sizes, epilogue=lambda acc, x: acc + x, operands=(leaves[2],), backend=backend
        )
        found.append(torch.autograd.grad(d, leaves, upstream))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("config", "sizes", "widths"),
    [
        ("64x64x64/coop1/c1x1", [65, 1, 0, 49, 130], [48, 48, 48, 64, 48, 48, 48]),  # 33 and 32; 1; 49; 44, 44 and 42
        ("64x64x64/coop1/c1x2", [65, 1, 0, 49, 130], [48, 48, 48, 48, 48, 48, 48, 48, 48, 48]),  # pairs
        ("64x96x64/coop1/c1x1", [97, 150, 96, 1, 200], [64, 64, 80, 80, 96, 64, 80, 80, 80]),
    ],
)
@pytest.mark.product(keep=1)
def test_fitted_tiles_divide_a_group_evenly_and_are_as_narrow_as_its_rows_allow(
    config, sizes, widths, seed, monkeypatch
):
    """Each width is the least that has the tile's rows, of more than half of the whole."""
    found, original = [], bridge.emulate

    def emulate(*given, **named):
        (report,) = original(*given, **named, profile=True)
        found.append(report.bytes["wgmma operands"])
        return [report]

    monkeypatch.setattr(bridge, "emulate", emulate)
    case = GroupCase.random(RAGGED_M, sizes, 0, 64, 64, seed=seed, integers=True)
    case.run(exact=True, backend="cute", config=f"sm90/{config}/s3/g2/swap/fit")
    assert found == [sum(64 + n for n in widths) * 32 * (64 // 16)]


@pytest.mark.parametrize(
    ("config", "k"), [("64x48x32/pp/c1x1/s2/g2/swap/fit", 96), ("128x48x32/coop2/c1x1/s2/g2/swap/fit", 64)]
)
@pytest.mark.product(keep=1)
def test_operands_of_tiles_of_two_widths_lie_apart(config, k, seed, monkeypatch):
    """A warpgroup is still at a tile of 48 rows when the other one begins with the next, of 20: a number for each row
    lies in shared memory.
    """
    case = GroupCase.random(RAGGED_M, [48, 20, 48, 9], 0, 128, k, seed=seed, integers=True)
    case.epilogue = lambda acc, row: acc * row
    case.operands = (torch.arange(125).remainder(5).bfloat16()[:, None],)
    for number in range(3):
        monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", str(number))
        case.run(exact=True, backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize(
    ("config", "work", "reason"),
    [
        ("64x32x64/coop1/c1x1/s3/g2/fit", RAGGED_M, "accepted is fit with swap"),
        ("64x32x64/coop1/c1x1/s3/g2/swap/fit", MASKED, "this product is masked, accepted: ragged_m, gathered_m"),
        ("64x32x64/coop1/c1x1/s3/g2/swap/fit", RAGGED_N, "this product is ragged_n, accepted: ragged_m, gathered_m"),
        ("64x40x64/coop1/c1x1/s3/g2/swap/fit", RAGGED_M, "bn is 40, no multiple of 16"),
    ],
)
def test_what_cannot_be_fitted_is_refused(config, work, reason):
    case = GroupCase.random(work, [8, 8], 16, 72, 72, majors="tt" if work == RAGGED_N else "tn")
    with pytest.raises(UnsupportedError, match=reason):
        case.run(backend="cute", config=f"sm90/{config}")


def test_what_no_kernel_serves_is_refused_with_the_reason():
    case = GroupCase.random(RAGGED_K, [70, 0, 3, 47], 72, 72, 0)
    with pytest.raises(UnsupportedError, match="with a ragged K they differ from group to group"):
        case.run(backend="cute", config="sm90/64x64x64/coop1/c1x1/s3/g2/streamk")
    for config, work, reason in (
        ("64x64x64/coop1/c1x1/s3/g2/k2", RAGGED_M, "no splits or clusters along K"),
        ("64x64x64/coop1/c1x2/s3/g2", GATHERED, "each CTA gathers its rows of A by itself"),
        ("256x64x128/coop2/c1x1/s2/g2", GATHERED, "would gather 32 rows of a tile"),
        ("64x64x64/solo/c1x1/s3/g2", SCATTERED, "solo is a lesson in dense products"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            GroupCase.random(work, [8, 8], 16, 72, 72).run(backend="cute", config=f"sm90/{config}")


def test_fp8_with_scales_of_rows_and_of_a_groups_columns(seed):
    """Sums are promoted as in dense products; the scales are operands of the epilogue."""
    generator = torch.Generator().manual_seed(seed)
    case = GroupCase.random(RAGGED_M, [70, 0, 3, 55], 0, 72, 272, seed=seed, out_dtype=torch.bfloat16)
    case.a, case.b = case.a.to(torch.float8_e4m3fn), case.b.to(torch.float8_e4m3fn)
    case.epilogue = lambda acc, row, column: acc * row * column
    case.operands = (torch.rand(128, 1, generator=generator), torch.rand(4, 1, 72, generator=generator))
    case.run(backend="cute", config="sm90/64x16x128/coop1/c1x1/s3/g2/swap")


@pytest.mark.parametrize("config", [None, "sm90/64x64x64/coop1/c1x1/s2/row"])
def test_no_rows_at_all_are_scattered(config):
    """A grid of no CTAs cannot be launched."""
    a, b = torch.zeros(0, 72, dtype=torch.bfloat16), torch.ones(3, 72, 40, dtype=torch.bfloat16)
    ends, places, out = torch.zeros(3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.full((9, 40), 77.0)
    out = out.bfloat16()
    got = cutegemm.grouped_gemm(
        a, b, offsets=ends, places=places, out_rows=9, out=out, backend="cute", config=config
    )  # fmt: skip
    assert got is out
    assert (out == 77).all()
