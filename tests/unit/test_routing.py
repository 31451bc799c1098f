"""Slots of a mixture: which kernel sorts how many, torch's steps, which are the reference, and the sums of slots."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutegemm.cute.routing import config
from cutegemm.cute.routing.config import Tile
from cutegemm.hardware import arch as arch_table
from cutegemm.pytorch.combining import combine
from cutegemm.run import routing


@given(slots=st.integers(1, 1 << 22), experts=st.integers(1, config.MOST_EXPERTS))
def test_every_number_of_slots_has_a_tile(slots, experts):
    tile, ctas = config.choose(slots, experts)
    assert tile.why_invalid(arch_table.get("H200")) is None
    assert experts <= tile.experts < max(2 * experts, config.LEAST_EXPERTS + 1)
    assert (ctas - 1) * tile.slots < slots <= ctas * tile.slots
    assert (ctas == 1) == (slots <= config.MOST_OF_ONE)


@pytest.mark.parametrize(
    ("tile", "gpu", "why"),
    [
        (Tile(4, 48, 1), "H200", "a power of 2 experts, 32 to 1024"),
        (Tile(4, 16, 1), "H200", "a power of 2 experts"),
        (Tile(2, 128, 1), "H200", "each expert has threads"),
        (Tile(64, 128, 1), "H200", "at most 32 warps"),
        (Tile(32, 1024, 1), "sm_86", "it needs 139392 bytes of shared memory; sm_86 has"),
    ],
)
def test_tiles_that_cannot_run_are_told(tile, gpu, why):
    assert why in (tile.why_invalid(arch_table.get(gpu)) or "")


def test_old_gpus_are_told():
    old = replace(arch_table.get("sm_80"), capability=(7, 5))
    assert "needs compute capability 8.0 or newer" in (Tile(4, 128, 1).why_invalid(old) or "")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_order_is_stable_and_strange_experts_weigh_nothing(dtype):
    experts = torch.tensor([[2, 0], [0, -5], [7, 2]], dtype=dtype)
    weights = torch.tensor([[1.0, 2.0], [3.0, float("nan")], [5.0, 6.0]])
    ends, places, rows, sorted_weights, row_of = routing.by_torch(experts, weights, 4)
    assert ends.tolist() == [3, 3, 5, 6]
    assert places.tolist() == [1, 2, 3, 0, 5, 4]
    assert row_of.tolist() == [3, 0, 1, 2, 5, 4]
    assert rows.tolist() == [0, 1, 1, 0, 2, 2]
    assert sorted_weights.flatten().tolist() == [2.0, 3.0, 0.0, 1.0, 6.0, 0.0]
    assert routing.by_torch(experts, None, 4).weights is None
    ends, *others = routing.route(experts[:0], weights[:0], 4, "cute")
    assert ends.tolist() == [0] * 4
    assert [tuple(each.shape) for each in others] == [(0,), (0,), (0, 1), (0,)]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"experts": torch.ones(3, 2)}, TypeError, "experts: got dtype torch.float32, accepted are torch.int32"),
        ({"weights": torch.ones(3, 2).double()}, TypeError, "weights: got dtype torch.float64"),
        ({"weights": torch.ones(2, 2)}, ValueError, "got shapes (3, 2) and (2, 2), expected (tokens, top_k) of both"),
        ({"experts": torch.ones(3).int(), "weights": torch.ones(3)}, ValueError, "got shapes (3,) and (3,)"),
        ({"count": 0}, ValueError, "count: got 0 experts, accepted are 1 to 1024"),
        ({"count": 1025}, ValueError, "count: got 1025 experts"),
        ({"backend": "zz"}, ValueError, "zz"),
    ],
)
def test_the_operator_names_what_it_does_not_take(change, error, message):
    given = {"experts": torch.ones(3, 2).int(), "weights": torch.ones(3, 2), "count": 4, **change}
    with pytest.raises(error, match=re.escape(message)):
        torch.ops.cutegemm.route(**given)


def test_the_operator():
    experts, weights = torch.randint(0, 5, (6, 2)), torch.rand(6, 2)
    operator = torch.ops.cutegemm.route
    torch.library.opcheck(operator.default, (experts, weights, 5))
    for found, want in zip(operator(experts, weights, 5), routing.by_torch(experts, weights, 5), strict=True):
        assert torch.equal(found, want)


ROWS, TOKEN_OF = torch.randn(3, 5), torch.tensor([2, 0, 1, 0, 2, 1]).int()
ROW_OF = torch.tensor([1, 3, 2, 5, 0, 4]).int()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": ROWS.double()}, TypeError, "rows: got dtype torch.float64, accepted are torch.float32"),
        ({"rows": ROWS[None]}, ValueError, "rows: got shape (1, 3, 5), expected (tokens, columns)"),
        ({"token_of": TOKEN_OF.long()}, ValueError, "token_of: got torch.int64 of shape (6,), expected torch.int32"),
        ({"row_of": ROW_OF[:5]}, ValueError, "row_of: got torch.int32 of shape (5,)"),
        ({"top_k": 3}, ValueError, "token_of: got torch.int32 of shape (6,)"),
        ({"backend": "zz"}, ValueError, "zz"),
    ],
)
def test_the_operator_that_copies_names_what_it_does_not_take(change, error, message):
    given = {"rows": ROWS, "token_of": TOKEN_OF, "row_of": ROW_OF, "top_k": 2, **change}
    with pytest.raises(error, match=re.escape(message)):
        torch.ops.cutegemm.spread_rows(**given)


def test_the_operator_that_copies():
    operator = torch.ops.cutegemm.spread_rows
    torch.library.opcheck(operator.default, (ROWS, TOKEN_OF, ROW_OF, 2))
    assert torch.equal(operator(ROWS, TOKEN_OF, ROW_OF, 2), ROWS[TOKEN_OF.long()])


@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 17])
def test_rows_of_a_token_are_added_in_fp32_and_rounded_once(top_k, seed):
    """Of integers, whose sums bf16 does not hold. torch.compile adds up to sixteen rows one by one."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-255, 256, (5 * top_k, 7), generator=generator).bfloat16()
    row_of = torch.randperm(5 * top_k, generator=generator).int()
    want = rows[row_of].view(5, top_k, 7).double().sum(1).bfloat16()
    graphs: list[str] = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    assert torch.equal(combine(rows, row_of, top_k, "auto"), want)
    compiled = torch.compile(combine, fullgraph=True, backend=backend)
    assert torch.equal(compiled(rows, row_of, top_k, "auto"), want)
    assert any(".sum(" in code for code in graphs) == (top_k == 17)
