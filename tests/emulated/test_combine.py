"""The kernel that adds up the rows of a mixture's tokens, and gathers rows, in the emulator."""

from __future__ import annotations

import pytest
import torch

from cutegemm.cute.combine.config import MOST_UNROLLED, POINTERS
from cutegemm.cute.combine.kernel import NUMBERS
from cutegemm.emulator.bridge import emulate
from cutegemm.emulator.errors import BeforeTheWait
from cutegemm.problem import packing
from cutegemm.pytorch import combining
from cutegemm.run import combining as by_kernel
from cutegemm.run.combining import step_of
from tests.sass import opcodes, spilled

pytest.importorskip("llvmlite")


def drawn(tokens: int, top_k: int, columns: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of integers, and the row of each slot."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-255, 256, (tokens * top_k, columns), generator=generator).to(dtype)
    return rows, torch.randperm(tokens * top_k, generator=generator).int()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [1, 7, 10, 36, 520])
@pytest.mark.parametrize("top_k", [1, 2, 8, MOST_UNROLLED, MOST_UNROLLED + 1])
@pytest.mark.product(keep=4)
def test_sums_are_exact_and_rounded_once(dtype, columns, top_k, seed):
    """Vectors of 2 to 16 bytes; a last CTA that is not full."""
    rows, row_of = drawn(9, top_k, columns, dtype, seed)
    want = rows[row_of].view(9, top_k, columns).double().sum(1).to(dtype)
    assert torch.equal(combining.combine(rows, row_of, top_k, "cute"), want)
    assert torch.equal(combining.by_torch(rows, row_of, top_k), want)


def test_rows_are_added_in_the_order_of_the_choices():
    """In fp32, where the order of these decides."""
    rows = torch.tensor([[1.0], [2.0**24], [-(2.0**24)], [0.5]])
    row_of = torch.tensor([1, 0, 2, 3, 3, 1, 2, 0]).int()
    rows = torch.cat((rows, rows))
    assert combining.combine(rows, row_of, 4, "cute").tolist() == [[0.5], [1.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [1, 7, 10, 36, 520])
@pytest.mark.parametrize("layout", ["rows", "within wider rows", "at an odd address", "columns"])
@pytest.mark.product(keep=4)
def test_rows_are_gathered_as_they_are(dtype, columns, layout, seed):
    """Each bit of them, of NaN too. An index of no row gives zeros where it may be one."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    rows = torch.randint(-(2**15), 2**15, (11, columns + 3), generator=generator).to(bits)
    place = {"rows": slice(columns), "within wider rows": slice(columns), "at an odd address": slice(1, columns + 1)}
    rows = rows.t()[:columns].t() if layout == "columns" else rows[:, place[layout]]
    rows = rows.contiguous() if layout == "rows" else rows.t().contiguous().t() if layout == "columns" else rows
    index = torch.randint(0, 11, (23,), generator=generator).int()
    assert (by_kernel.spread_step_of(rows.view(dtype), 1) is None) is (layout == "columns" and columns > 1)
    wild = index.clone()
    wild[::3] = torch.tensor([-1, 11, -(2**31), 2**31 - 1, 12, -2, 100, -100]).int()
    for given in (index, wild):
        within = (given >= 0) & (given < 11)
        want = torch.where(within[:, None], rows[given.clamp(0, 10).long()], 0)
        for made in (by_kernel.in_order(rows.view(dtype), given), packing.in_order(rows.view(dtype), given)):
            assert torch.equal(made.view(bits), want)
            assert made.stride() == (packing.pitch_of(columns, dtype.itemsize), 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [1, 7, 36, 520])
@pytest.mark.parametrize("top_k", [1, 2, 8, MOST_UNROLLED + 1])
@pytest.mark.product(keep=8)
def test_rows_are_spread_to_their_places(dtype, columns, top_k, seed):
    """Each bit of them; rows within wider ones."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    rows = torch.randint(-(2**15), 2**15, (9, columns + 1), generator=generator).to(bits)[:, 1:]
    row_of = torch.randperm(9 * top_k, generator=generator).int()
    token_of = torch.empty_like(row_of)
    token_of[row_of.long()] = torch.arange(9).repeat_interleave(top_k).int()
    want = rows[token_of.long()]
    assert torch.equal(by_kernel.spread(rows.view(dtype), row_of, top_k).view(bits), want)
    for backend in ("cute", "torch"):
        found = combining.spread(rows.view(dtype), token_of, row_of, top_k, backend)
        assert torch.equal(found.view(bits), want)
    # A place that there is not is nobody's: the emulator would tell of a store beyond the end.
    row_of[0], row_of[-1] = -1, 9 * top_k
    kept = torch.ones(9 * top_k, dtype=torch.bool)
    kept[row_of[1:-1].long()] = False
    found = by_kernel.spread(rows.view(dtype), row_of, top_k).view(bits)
    assert torch.equal(found[~kept], want[~kept])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("columns", [1, 7, 36, 144])
@pytest.mark.parametrize("top_k", [1, 3, MOST_UNROLLED + 1])
@pytest.mark.product(keep=3)
def test_values_are_spread_into_rows_that_begin_at_multiples_of_16_bytes(dtype, columns, top_k, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-128, 128, (9, columns + 16), generator=generator).to(torch.int8)[:, :columns]
    row_of = torch.randperm(9 * top_k, generator=generator).int()
    want = torch.empty(9 * top_k, columns, dtype=torch.int8)
    want[row_of.long()] = rows.repeat_interleave(top_k, 0)
    found = by_kernel.spread_values(rows.view(dtype), row_of, top_k)
    assert torch.equal(found.view(torch.int8), want)
    assert found.dtype == dtype
    assert found.stride() == (-(-columns // 16) * 16, 1)
    assert by_kernel.spread_values(rows[:0].view(dtype), row_of[:0], top_k) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [1, 7, 36, 520])
@pytest.mark.parametrize(
    "ends",
    [[5], [3, 3, 9], [0, 0], [23], [30, 40], [9, 4], [-3, 2], [*range(1, 20), *[19] * 60, 21], [2**31 - 1, 1]],
    ids=str,
)
@pytest.mark.product(keep=16)
def test_rows_behind_the_last_group_are_cleared(dtype, columns, ends):
    """No other ones; ends that decrease, or that lie elsewhere."""
    made = torch.full((23, columns), float("nan"), dtype=dtype)
    given = torch.tensor([ends, ends], dtype=torch.int32).t()[:, 0]
    assert by_kernel.clear_behind(made, given)
    last = min(max(*ends, 0), 23)
    assert torch.isnan(made[:last]).all()
    assert not made[last:].any()


def test_what_is_not_cleared():
    assert not by_kernel.clear_behind(torch.ones(4, 0), torch.tensor([1]).int())
    assert not by_kernel.clear_behind(torch.ones(0, 4), torch.tensor([1]).int())


def test_a_kernel_that_clears_has_no_more_threads_than_the_gpu(seed):
    made, ends = torch.full((40_000, 64), 7.0).bfloat16(), torch.tensor([39_000]).int()
    step = by_kernel._step(made, len(made), 1, "clear", 64)
    ctas = dict(zip((name for name, _ in NUMBERS), step.numbers, strict=True))["ctas"]
    assert ctas == by_kernel.steps.arch_of(made.device).sm_count
    assert not spilled(step.kernel.cubin)
    assert by_kernel.clear_behind(made, ends)
    assert (made[:39_000] == 7).all()
    assert not made[39_000:].any()


def test_nothing_is_read_before_the_kernel_in_front_has_ended(seed):
    rows, row_of = drawn(40, 2, 64, torch.bfloat16, seed)
    later, _ = drawn(40, 2, 64, torch.bfloat16, seed + 1)
    given, sums = rows.clone(), torch.full((40, 64), 7.0).bfloat16()
    step = step_of(given, 2)
    assert dict(zip((name for name, _ in NUMBERS), step.numbers, strict=True))["early"] == 1
    tensors = dict(zip(POINTERS, (given, row_of, sums), strict=True))
    launches = step.kernel.captured(*(each.data_ptr() for each in tensors.values()), 0, *step.numbers)
    front = lambda: given.copy_(later)  # noqa: E731
    emulate(step.kernel.ptx, launches, tensors, outputs={"made"}, seed=seed, in_front=front)
    assert torch.equal(sums, combining.by_torch(later, row_of, 2))
    without = step.kernel.ptx.replace("griddepcontrol.wait;", "")
    with pytest.raises(BeforeTheWait, match="a read of 'row_of' before"):
        emulate(without, launches, tensors, outputs={"made"}, seed=seed, in_front=front)


@pytest.mark.parametrize(("columns", "instruction"), [(4096, "LDG.E.128"), (4098, "LDG.E"), (4097, "LDG.E.U16")])
@pytest.mark.product(keep=1)
def test_all_loads_of_a_token_are_under_way_together(columns, instruction):
    step = step_of(torch.empty(16, columns, dtype=torch.bfloat16), 8)
    assert not spilled(step.kernel.cubin)
    found = opcodes(step.kernel.cubin)
    assert sum(count for name, count in found.items() if name.startswith(instruction)) >= 8


def test_what_torch_adds_up(seed):
    """Gradients are recorded; rows that are not contiguous; GPUs that are too old."""
    rows, row_of = drawn(5, 2, 8, torch.float32, seed)
    leaf = rows.clone().requires_grad_()
    found = combining.combine(leaf, row_of, 2, "cute")
    (gradient,) = torch.autograd.grad(found, leaf, torch.ones_like(found))
    assert torch.equal(gradient, torch.ones_like(rows))
    assert step_of(rows.t().contiguous().t(), 2) is None
    assert torch.equal(combining.combine(rows.t().contiguous().t(), row_of, 2, "cute"), found)
    assert combining.combine(rows[:0], row_of[:0], 2, "cute").shape == (0, 8)
    assert combining.spread(rows[:0], row_of[:0], row_of[:0], 2, "cute").shape == (0, 8)
    assert by_kernel.in_order(rows[:, :0], row_of).shape == (10, 0)
    token_of = row_of.long().argsort().int()
    (gradient,) = torch.autograd.grad(combining.spread(leaf, token_of, row_of, 1, "cute").sum(), leaf)
    assert torch.equal(gradient, torch.ones_like(rows))
    negated = torch._neg_view(rows)
    assert torch.equal(combining.combine(negated, row_of, 2, "cute"), combining.by_torch(-rows, row_of, 2))
    assert torch.equal(combining.spread(negated, token_of, row_of, 1, "cute"), -rows[token_of.long()])
    apart = torch.stack((row_of, row_of.flip(0)), 1)[:, 0]
    assert torch.equal(combining.spread(rows, token_of, apart, 1, "cute"), rows[token_of.long()])
