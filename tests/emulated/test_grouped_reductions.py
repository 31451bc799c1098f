"""Reduced results of products in groups in the emulator: every work and store, and numbers that must not change."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, SCATTERED
from tests.groups import GroupCase

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("few_sms", "fresh_timing")


def rows(acc):
    """What is beyond the edge, or of another group, has other sums: it would show in each."""
    return acc, ops.row_sum(acc + 3.0), ops.row_max(acc - 500.0)


def columns(acc):
    return acc, ops.column_sum(acc + 3.0), ops.column_max_abs(acc + 500.0)


CONFIGS = [
    (RAGGED_M, "128x64x64/coop2/c2x1/s3/serp2", rows),
    (RAGGED_M, "64x48x64/coop1/c1x1/s3/row/swap", rows),
    (RAGGED_M, "128x48x64/coop2/c1x1/s3/row/swap/fit/streamk", rows),
    (RAGGED_M, "64x64x64/pp/c1x1/s3/row/slab", rows),
    (RAGGED_M, "64x32x64/pp/c1x1/s3/row/swap/slab", rows),
    (GATHERED, "64x64x64/coop1/c1x1/s3/row", rows),
    (SCATTERED, "64x32x64/coop1/c1x1/s3/row", rows),
    (SCATTERED, "64x32x64/coop1/c1x1/s3/row/swap", rows),
    (MASKED, "64x64x64/coop1/c1x1/s3/row", rows),
    (MASKED, "64x32x64/pp/c1x1/s3/row/swap", rows),
    (RAGGED_N, "64x64x64/coop1/c1x1/s3/row", columns),
    (RAGGED_N, "64x32x64/coop1/c1x1/s3/row/swap", columns),
    (RAGGED_K, "64x64x64/pp/c1x1/s3/row", rows),
    (RAGGED_K, "64x32x64/coop1/c1x1/s3/row/swap", columns),
]


@pytest.mark.parametrize(("work", "config", "epilogue"), CONFIGS)
@pytest.mark.product(keep=1)
def test_results_of_integers_are_exact_and_no_other_number_is_written(work, config, epilogue, seed):
    tail = 0 if work == MASKED else 5 if work == RAGGED_M else 7 + 6
    case = GroupCase.random(work, [5, 0, 37, 69, 1], 72, 80, 72, tail=tail, integers=True, seed=seed)
    case.epilogue = epilogue
    case.run(exact=True, backend="cute", config=f"sm90/{config}")


def test_results_of_another_dtype_or_layout(seed):
    """They are reduced apart, and numbers of no group stay all the same."""
    case = GroupCase.random(RAGGED_M, [9, 0, 30], 0, 40, 72, tail=5, integers=True, seed=seed)
    case.epilogue = simplified(parse("def epilogue(acc) -> (bf16, fp16, fp32): return acc, row_sum(acc), row_max(acc)"))
    wide = torch.full((44, 3), 5.0)
    outs = torch.empty(44, 40).bfloat16(), torch.full((44, 1), -3.0).half(), wide[:, 1:2]
    config = "sm90/64x32x64/coop1/c1x1/s3/row"
    case.call(backend="cute", config=config, out=outs)
    product = outs[0][:39].float()
    assert torch.equal(outs[1][:39], product.sum(1, keepdim=True).half())
    assert torch.equal(outs[2][:39], product.amax(1, keepdim=True))
    assert torch.equal(outs[1][39:], torch.full((5, 1), -3.0).half())
    assert torch.equal(wide[39:], torch.full((5, 3), 5.0))


@pytest.mark.parametrize("work", [RAGGED_M, SCATTERED])
def test_rows_of_no_columns(work):
    case = GroupCase.random(work, [3, 0, 4], 0, 0, 16, tail=2)
    case.epilogue = rows
    for backend in ("cute", "torch"):
        outs = case.options.get("out_rows", 9)
        outs = tuple(torch.full((outs, width), 77.0) for width in (0, 1, 1))
        case.call(backend=backend, out=(outs[0].bfloat16(), *outs[1:]))
        written = torch.arange(9) < 7
        if work == SCATTERED:
            known = torch.zeros(len(outs[1]), dtype=torch.bool)
            taken = case.index[:7].long()
            known[taken[taken < len(known)]] = True
            written = known
        assert torch.equal(outs[1][:, 0], torch.where(written, 0.0, 77.0))
        assert torch.equal(outs[2][:, 0], torch.where(written, -torch.inf, 77.0))


@pytest.mark.parametrize("backend", ["cute", "torch"])
@pytest.mark.parametrize(
    ("shapes", "results"), [(((0, 8), (8, 6)), ((2, 0, 6), (2, 1, 6))), (((2, 0, 8), (8, 6)), ((0, 6), (1, 6)))]
)
def test_columns_of_no_rows(shapes, results, backend):
    a, b = (torch.ones(shape).bfloat16() for shape in shapes)
    outs = [torch.full(results[0], 77.0).bfloat16(), *(torch.full(results[1], 77.0) for _ in range(2))]
    ends = torch.tensor([3, 6 if a.dim() == 3 else 8], dtype=torch.int32)
    cutegemm.grouped_gemm(
        a, b, ends, out=outs, backend=backend, epilogue=lambda acc: (acc, ops.column_sum(acc), ops.column_max(acc))
    )
    assert torch.equal(outs[1], torch.zeros(results[1]))
    assert torch.equal(outs[2], torch.full(results[1], -torch.inf))


@pytest.mark.parametrize("work", [RAGGED_M, GATHERED, SCATTERED])
@pytest.mark.parametrize("save", [None, "recompute"])
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_gradients_of_maxima_by_kernels(work, save, seed):
    """The elements that equal a maximum get its gradient, which the derived program then takes as a matrix."""
    case = GroupCase.random(work, [5, 0, 9], 0, 24, 16, "fp32", seed=seed)
    case.a.nan_to_num_(1)
    found = []
    for backend in ("cute", "torch"):
        leaves = [each.clone().requires_grad_() for each in (case.a, case.b)]
        results = cutegemm.grouped_gemm(
            *leaves, epilogue=lambda acc: (acc * acc, ops.row_max(acc), ops.row_max_abs(acc * 2.0)), save=save,
            backend=backend, **case.given,
        )  # fmt: skip
        named = slice(None)
        if work == SCATTERED:
            named = case.index[case.index < case.options["out_rows"]].long()
        torch.manual_seed(seed)
        total = sum((each[named] * torch.randn_like(each[named])).sum() for each in results)
        found.append(torch.autograd.grad(total, leaves))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_routing_weights_is_summed_by_the_kernel(seed):
    """`moe` on two backends: the sums over rows of dH * H / r come with dgate and dup."""
    generator = torch.Generator().manual_seed(seed)
    x, gate_up, down = (
        (0.5 * torch.randn(shape, generator=generator)).bfloat16() for shape in ((6, 32), (3, 48, 32), (3, 32, 24))
    )
    experts = torch.tensor([[0, 2], [2, 0], [2, 1], [0, 1], [1, 2], [7, 2]])
    weights = torch.rand(6, 2, generator=generator)
    found = []
    for backend in ("cute", "torch"):
        leaves = [each.clone().requires_grad_() for each in (x, weights, gate_up, down)]
        d = cutegemm.moe(leaves[0], experts, *leaves[1:], backend=backend)
        d.backward(torch.ones_like(d))
        found.append([each.grad.float() for each in leaves])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    assert found[0][1][5, 0] == 0
