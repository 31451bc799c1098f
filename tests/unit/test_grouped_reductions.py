"""Reduced results of products in groups by torch: their gradients, what is refused, and what graphs are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from cutegemm.problem.work import GATHERED, MASKED, RAGGED_K, RAGGED_M, RAGGED_N, SCATTERED
from tests.groups import WORKS, GroupCase


def along(work: str) -> bool:
    """Whether rows are reduced, not columns."""
    return work != RAGGED_N


def of_rows(acc, x):
    return acc, ops.row_sum(acc * x), ops.row_max(acc), ops.row_max_abs(acc * x)


def of_columns(acc, x):
    return acc, ops.column_sum(acc * x), ops.column_max(acc), ops.column_max_abs(acc * x)


@pytest.mark.parametrize("work", WORKS)
def test_results_and_what_is_not_written(work, seed):
    case = GroupCase.random(work, [3, 0, 7, 2], 12, 6, 5, "fp32", tail=0 if work == MASKED else 3, seed=seed)
    e = case.extents
    case.epilogue = of_rows if along(work) else of_columns
    case.operands = (torch.randn(e.groups, 1, e.n) if along(work) else torch.randn(e.groups, e.m, 1),)
    case.run(backend="torch")


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("save", [None, "recompute"])
def test_gradients_are_those_of_torch(work, save, seed):
    """Of sums and of maxima, first and second ones."""
    case = GroupCase.random(work, [3, 0, 7, 2], 12, 6, 5, "fp32", seed=seed)
    torch.manual_seed(seed)
    e = case.extents
    shape = (e.groups, 1, e.n) if along(work) else (e.groups, e.m, 1)
    inputs = [torch.randn(each.shape).requires_grad_() for each in (case.a, case.b)]
    inputs.append(torch.randn(shape).requires_grad_())
    a, b, x = inputs
    got = cutegemm.grouped_gemm(
        a, b, epilogue=of_rows if along(work) else of_columns, operands=(x,), save=save, **case.given
    )
    # The same of the plain product, which torch reduces.
    whole, known = cutegemm.grouped_gemm(a, b, **case.given), slice(None)
    if work in (RAGGED_M, GATHERED, SCATTERED):
        groups = torch.repeat_interleave(torch.arange(4), case.sizes.diff(prepend=torch.zeros(1).int()))
        factor = x[groups, 0]
        if work == SCATTERED:
            known = case.index[case.index < e.results].long()
            factor = factor[case.index < e.results]
    elif work == RAGGED_N:
        factor = x[torch.repeat_interleave(torch.arange(4), case.sizes.diff(prepend=torch.zeros(1).int())), :, 0].t()
    else:
        factor = x.expand(whole.shape)
    dim = -1 if along(work) else -2
    if work == MASKED:
        rows = torch.arange(e.m)[None, :, None] < case.sizes[:, None, None]
        whole, got = torch.where(rows, whole, 0), [torch.where(rows, each, 0) for each in got]
    whole, got = whole[known], [each[known] for each in got]
    scaled = whole * factor
    want = [
        whole, scaled.sum(dim, keepdim=True), whole.amax(dim, keepdim=True), scaled.abs().amax(dim, keepdim=True)
    ]  # fmt: skip
    for _ in range(2):
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        upstream = [torch.randn_like(each) for each in want]
        first, second = (torch.autograd.grad(d, inputs, upstream, create_graph=True) for d in (got, want))
        for mine, theirs in zip(first, second, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        got, want = ([(each**2).sum() for each in grads] for grads in (first, second))


@pytest.mark.parametrize(
    ("work", "epilogue", "message"),
    [
        (RAGGED_M, lambda acc: (acc, ops.column_sum(acc)), "column_sum with groups of rows, .* accepted are row_sum"),
        (MASKED, lambda acc: (acc, ops.column_max(acc)), "column_max with groups of rows"),
        (RAGGED_N, lambda acc: (acc, ops.row_max_abs(acc)), "row_max_abs with groups of columns, .* are column_sum"),
        (RAGGED_M, ops.row_sum, "its first result is a reduction; return a matrix first"),
    ],
)
def test_what_belongs_to_many_groups_is_not_reduced(work, epilogue, message):
    case = GroupCase.random(work, [3, 0, 7, 2], 12, 6, 5)
    case.epilogue = epilogue
    with pytest.raises(ValueError, match=message):
        case.call()


def test_graphs_are_told_the_shapes():
    torch._dynamo.reset()
    case = GroupCase.random(RAGGED_K, [3, 0, 7, 2], 4, 6, 5, "fp32")

    def product(a, b):
        d, rows, columns = cutegemm.grouped_gemm(
            a, b, case.sizes, epilogue=lambda acc: (acc, ops.row_sum(acc), ops.column_sum(acc))
        )
        return d + rows + columns

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(case.a, case.b), product(case.a, case.b))
    arguments = (case.a, case.b, case.sizes, None, None, None, None, [], [], [])
    text = cutegemm.trace_epilogue(lambda acc: (acc, ops.row_sum(acc), ops.column_sum(acc))).text
    torch.library.opcheck(torch.ops.cutegemm.grouped_gemm, (*arguments, text))
    outs = [torch.empty(shape) for shape in ((4, 4, 6), (4, 4, 1), (4, 1, 6))]
    torch.library.opcheck(torch.ops.cutegemm.grouped_gemm_out, (*arguments, text, None, "auto", None, outs))
    with pytest.raises(ValueError, match=r"out\[1\]: got shape \(4, 4\), expected \(4, 4, 1\)"):
        cutegemm.grouped_gemm(
            case.a, case.b, case.sizes, out=[outs[0], torch.empty(4, 4), outs[2]],
            epilogue=lambda acc: (acc, ops.row_sum(acc), ops.column_sum(acc)),
        )  # fmt: skip


def test_the_bytes_of_results_of_groups_count_once():
    """D of groups of rows is one matrix, whatever the number of groups."""
    text = "def epilogue(acc) -> (bf16, bf16, fp32): return acc, -acc, row_sum(acc)"
    epilogue = Epilogue(custom=simplified(parse(text)), aligns=(16,))
    plain = Problem.of(4096, 512, 256, batch=8, work=RAGGED_M)
    whole = replace(plain, epilogue=epilogue, outputs=(plain.d,))
    assert whole.min_bytes - plain.min_bytes == 4096 * 512 * 2 + 4096 * 4
