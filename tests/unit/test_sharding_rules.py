"""Sharding rules of epilogue programs and quantization by themselves: every rank's part, put together, is the whole.

No processes: a rank's part is cut by hand. What two processes do with them is in tests/distributed_operators.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutegemm
from cutegemm import ops
from cutegemm.problem.quantization_request import describe
from cutegemm.pytorch import sharding_programs, sharding_quantize
from cutegemm.pytorch.sharding_programs import Settings, begins_of, is_linear, of_product, with_begins
from tests.unit.test_distributed import shares

PROGRAMS = {
    "plain": (lambda acc: acc, True),
    "scaled": (lambda acc, x: acc * x + 2 * acc, True),
    "masked": (lambda acc, x: ops.where(ops.column() <= ops.row() + ops.matrix(), -acc / x, 0.0), True),
    "affine": (lambda acc, x: acc + x, False),
    "squared": (lambda acc: acc * acc, False),
    "random": (lambda acc, x: acc * x + ops.where(ops.random(5) > 0.5, 1.0, ops.row() * 2.0), False),
    "reduced": (lambda acc, x: (acc, ops.row_sum(acc * x), ops.column_sum(acc)), True),
    "maxima": (lambda acc, x: (acc * x, ops.row_max(acc), ops.column_max_abs(acc)), False),
    "partner": (lambda acc: ops.partner(acc), False),
    "pairs": (lambda acc: ops.reglu_pairs(acc), False),
}  # fmt: skip
"""The program, and whether it is linear in the accumulators."""


def powers(generator, *shape):
    """1, 2, 4 or 8: sums and quotients of these are exact."""
    return 2.0 ** torch.randint(0, 4, shape, generator=generator)


def combined(placement, parts):
    """The whole of the ranks' parts."""
    if placement.is_partial():
        stacked = torch.stack(parts)
        return stacked.amax(0) if placement.reduce_op == "max" else stacked.sum(0)
    return torch.cat(parts, placement.dim) if placement.is_shard() else parts[0]


@given(
    name=st.sampled_from(list(PROGRAMS)), m=st.sampled_from([1, 2, 5]), n=st.sampled_from([2, 4, 12]),
    k=st.sampled_from([1, 5]), batches=st.sampled_from([(None, None), (3, 3), (None, 3), (1, 3)]),
    varies=st.sampled_from([(1, 1), (0, 1), (1, 0), (0,), (), (1, 1, 1), (1, 0, 0)]), ranks=st.sampled_from([1, 2, 3]),
    recorded=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=150)
def test_every_rule_of_a_program_gives_the_whole(name, m, n, k, batches, varies, ranks, recorded, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        powers(generator, *(() if batch is None else (batch,)), *shape)
        for batch, shape in zip(batches, ((m, k), (k, n)), strict=True)
    )
    function, linear = PROGRAMS[name]
    columns = n // 2 if name == "pairs" else n
    whole = (*([max(each or 1 for each in batches)] if b.dim() == 3 else []), m, columns)
    extents = whole[len(whole) - min(len(varies), len(whole)) :]
    operands = []
    if function.__code__.co_argcount == 2:
        operands = [powers(generator, *(e if v else 1 for v, e in zip(varies[-len(whole) :], extents, strict=True)))]
    program = cutegemm.trace_epilogue(function, operands)
    assert is_linear(program) == linear
    want = cutegemm.gemm(a, b, epilogue=program, operands=operands)
    want = want if isinstance(want, tuple) else (want,)
    found = of_product(program, {"a": a, "b": b}, operands, Settings(ranks, recorded, True), whole)
    local, read = with_begins(program)
    for rule in found:
        parts = [shares(each, place, ranks) for each, place in zip((a, b, *operands), rule.given, strict=True)]
        for each, place in zip((a, b, *operands), rule.given, strict=True):
            assert not place.is_shard() or each.shape[place.dim] >= ranks, rule
        if min(map(len, parts)) < ranks:
            continue  # four rows, chunked for three ranks of which the third has none
        begins, results = [0] * len(whole), []
        for own_a, own_b, *own in zip(*parts, strict=True):
            given_ = [*own, *begins_of(read, tuple(begins))]
            got = cutegemm.gemm(own_a, own_b, epilogue=local, operands=given_)
            results.append(got if isinstance(got, tuple) else (got,))
            if rule.gives[0].is_shard():
                begins[rule.gives[0].dim] += results[-1][0].shape[rule.gives[0].dim]
        for number, placement in enumerate(rule.gives):
            assert torch.equal(combined(placement, [each[number] for each in results]), want[number]), rule
            assert not (recorded and placement.is_partial() and placement.reduce_op == "max")
    kinds = {rule.gives[0] for rule in found}
    assert len(kinds) == len(found)  # each places the result in another way
    if ranks == 2 and m > 1 and not (recorded and name == "maxima"):
        assert any(each.is_shard(len(whole) - 2) for each in kinds)
    assert any(each.is_partial() for each in kinds) == (linear and k >= ranks)


@pytest.mark.parametrize("gating", [None, "pairs"])
@pytest.mark.parametrize(("columns", "ranks"), [(512, 2), (384, 3), (300, 2)])
def test_quantized_results_are_sharded_by_whole_blocks(gating, columns, ranks):
    generator = torch.Generator().manual_seed(3)
    a, b = powers(generator, 6, 5), powers(generator, 5, columns * (2 if gating else 1))
    program = cutegemm.trace_epilogue(lambda acc: ops.quantize(ops.reglu_pairs(acc) if gating else acc, "int8"))
    want = cutegemm.gemm(a, b, epilogue=program)
    found = of_product(program, {"a": a, "b": b}, [], Settings(ranks, False, True), (6, columns))
    for rule in found:
        parts = [shares(each, place, ranks) for each, place in zip((a, b), rule.given, strict=True)]
        results = [cutegemm.gemm(*own, epilogue=program) for own in zip(*parts, strict=True)]
        for number, placement in enumerate(rule.gives):
            assert torch.equal(combined(placement, [each[number] for each in results]), want[number]), rule
    assert any(rule.gives[0].is_shard(0) and rule.gives[1].is_shard(0) for rule in found)
    assert any(rule.gives[0].is_shard(1) and rule.gives[1].is_shard(1) for rule in found) == (columns != 300)


def test_partial_sums_are_not_made_in_8_bits():
    a, b = torch.ones(4, 8), torch.ones(8, 4)
    program = cutegemm.trace_epilogue(lambda acc: acc * 0.5)
    for is_summed in (True, False):
        found = of_product(program, {"a": a, "b": b}, [], Settings(2, False, is_summed), (4, 4))
        assert any(rule.gives[0].is_partial() for rule in found) == is_summed


def test_halves_are_sharded_where_the_weight_is_sharded_as_halves():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    program = cutegemm.trace_epilogue(ops.swiglu)
    a = torch.ones(4, 8)
    halves = _StridedShard(1, split_factor=2)
    for placements, columns, served in (
        ((halves,), 12, True), ((Shard(1),), 12, False), ((Replicate(),), 12, False), ((halves,), 10, False),
        ((_StridedShard(1, split_factor=4),), 12, False), ((halves, Shard(1)), 12, False),
    ):  # fmt: skip
        b = SimpleNamespace(placements=placements, dim=lambda: 2)
        found = of_product(program, {"a": a, "b": b}, [], Settings(2, False, True), (4, columns // 2))
        assert any(rule.gives[0] == Shard(1) for rule in found) == served, placements


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shape", [(256, 512), (2, 130, 260)])
@pytest.mark.parametrize("scaling", ["rows", "tensor", (1, 128), (128, 128)])
@pytest.mark.parametrize("dim", [-1, -2])
def test_every_rule_of_quantization_gives_the_whole(ranks, shape, scaling, dim):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    options = {"scaling": scaling} if isinstance(scaling, str) else {"scaling": "blocks", "block": scaling}
    values, scales = want = cutegemm.quantize(x, torch.int8, dim=dim, **options)
    assert scales.shape == describe(x, torch.int8, options["scaling"], dim, options.get("block", (1, 128)), None).scales
    for is_given in (False, True):
        for of_x, of_scale in sharding_quantize._placements(shape, tuple(scales.shape), ranks, is_given):
            parts, own = shares(x, of_x, ranks), shares(scales, of_scale, ranks)
            if len(parts) < ranks:
                continue
            found = [
                cutegemm.quantize(part, torch.int8, dim=dim, **({"scale": scale} if is_given else options))
                for part, scale in zip(parts, own, strict=True)
            ]
            assert torch.equal(combined(of_x, [each[0] for each in found]), values)
            if not is_given:
                assert torch.equal(combined(of_scale, [each[1] for each in found]), want[1])


def test_begins_are_operands_where_positions_are_read():
    program = cutegemm.trace_epilogue(lambda acc, x: acc + x, (torch.ones(4),))
    assert with_begins(program) == (program, ())
    moved, read = with_begins(cutegemm.trace_epilogue(lambda acc: ops.where(ops.column() < ops.row(), acc, 0.0)))
    assert read == ("row", "column")
    assert [each.dtype for each in moved.inputs] == ["int32", "int32"]
    assert begins_of(read, (3, 4)) == [3, 4]
    assert begins_of(("matrix", "row"), (2, 3, 4)) == [2, 3]
    assert sharding_programs.with_begins(moved)[0].inputs[:2] == moved.inputs
