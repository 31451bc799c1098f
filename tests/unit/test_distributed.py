"""DTensor: the sharding rules by themselves, and in two processes with gloo (tests/distributed_checks.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import distributed_checks


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return distributed_checks.run("cpu")


@pytest.mark.parametrize("name", distributed_checks.CHECKS)
def test_two_processes(said, name):
    assert not said[name], said[name]


def test_processes_that_die_leave_what_they_said(monkeypatch, capsys):
    def start(work, arguments, count, **options):
        first = next(iter(distributed_checks.CHECKS))
        for rank in range(count):
            Path(arguments[1], f"{first}.{rank}.said").write_text("")
        why = torch.multiprocessing.ProcessExitedException("process 0 ended", 0, 0, 1)
        return SimpleNamespace(processes=[], join=Mock(side_effect=why))

    monkeypatch.setattr(distributed_checks.mp, "start_processes", start)
    first, *others = distributed_checks.run("cpu").values()
    assert first == ""
    assert all("did not end" in each for each in others)
    assert "process 0 ended" in capsys.readouterr().err


def shares(tensor, placement, ranks: int):
    """What each rank has of a tensor."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if tensor is None:
        assert placement is None
        return [None] * ranks
    if isinstance(placement, Shard):
        return list(tensor.chunk(ranks, placement.dim))
    if isinstance(placement, Partial):
        return [tensor] + [torch.zeros_like(tensor)] * (ranks - 1)
    assert isinstance(placement, Replicate)
    return [tensor] * ranks


@given(
    m=st.sampled_from([1, 2, 3, 7]), n=st.sampled_from([1, 3, 6]), k=st.sampled_from([0, 1, 3, 8]),
    batches=st.sampled_from([(None, None), (4, 4), (4, None), (None, 4), (1, 4), (4, 1), (1, None)]),
    c=st.sampled_from([None, (0, 0, 0), (1, 1), (0, 1), (1, 0), (1,), (1, 1, 1), (1, 0, 1), ()]), bias=st.booleans(),
    activation=st.sampled_from([None, "relu"]), beta=st.sampled_from([0.0, 2.0]), ranks=st.sampled_from([2, 3]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_every_rule_gives_the_whole(m, n, k, batches, c, bias, activation, beta, ranks, seed):
    """Of every rule: each rank computes with its shares, and the placement of D says how the parts make up the result.

    Integers in fp32, so that every order of a sum gives the same.
    """
    from torch.distributed.tensor import Partial, Shard

    import cutegemm
    from cutegemm.pytorch.sharding import rules

    generator = torch.Generator().manual_seed(seed)

    def integers(*shape):
        return torch.randint(-3, 4, shape, generator=generator).float()

    def matrix(batch, *shape):
        return integers(*(() if batch is None else (batch,)), *shape)

    a, b = matrix(batches[0], m, k), matrix(batches[1], k, n)
    result = cutegemm.gemm(a, b).shape
    if c is not None:
        extents = [extent if varies else 1 for varies, extent in zip(c, result[len(result) - len(c) :], strict=False)]
        c = integers(*extents[-len(result) :])
    elif beta:
        beta = 0.0
    vector = integers(n) if bias else None
    want = cutegemm.gemm(a, b, c, beta=beta, bias=vector, activation=activation)
    found = rules(a, b, c, 1.0, beta, vector, activation, None, None, "auto", None, None)
    assert len(found) == 1 + (m > 1) + (n > 1) + (4 in batches) + (k > 1 and activation is None)
    for (of_d,), given_placements in found:
        assert len(given_placements) == len(torch.ops.cutegemm.gemm.default._schema.arguments)
        placed = [given_placements[place] for place in (0, 1, 2, 5)]
        parts = [shares(tensor, place, ranks) for tensor, place in zip((a, b, c, vector), placed, strict=True)]
        count = min(map(len, parts))
        if count < ranks and any(len(each) < ranks for each in parts):
            continue  # an extent of fewer elements than ranks, which DTensor does not shard
        ds = [
            cutegemm.gemm(x, y, z, beta=beta, bias=v, activation=activation)
            for x, y, z, v in zip(*parts, strict=True)
        ]  # fmt: skip
        if isinstance(of_d, Shard):
            got = torch.cat(ds, of_d.dim)
        else:
            got = torch.stack(ds).sum(0) if isinstance(of_d, Partial) else ds[0]
        assert torch.equal(got, want), (of_d, placed)


def test_another_way_to_register_is_named(monkeypatch):
    """A torch that keeps the arguments of rules elsewhere gets an error, not results of other options."""
    import torch.distributed.tensor as dtensor
    import torch.distributed.tensor.experimental  # noqa: F401  before DTensor is another

    from cutegemm.errors import GemmError
    from cutegemm.pytorch import sharding

    monkeypatch.setattr(sharding, "_registered", False)
    hidden = SimpleNamespace(sharding_propagator=SimpleNamespace(register_op_strategy=lambda *_: None))
    monkeypatch.setattr(dtensor.DTensor, "_op_dispatcher", hidden)
    with pytest.raises(GemmError, match="registers sharding rules in a way that cutegemm does not know"):
        sharding.needed()


def test_an_operand_that_may_be_gathered_is_not_constant():
    from cutegemm.pytorch import sharding

    a, b = SimpleNamespace(shape=(4, 8)), SimpleNamespace(shape=(8, 6))
    options = (None, None, "auto", None)
    assert sharding.rules(a, b, None, 1.0, 0.0, None, None, *options, None)
    for given_ in ({"constant": "b"}, {}):
        with pytest.raises(ValueError, match="constant: got 'b' with DTensors"):
            sharding.rules(a, b, None, 1.0, 0.0, None, None, *options, *(() if given_ else ("b",)), **given_)
