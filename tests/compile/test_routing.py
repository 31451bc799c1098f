"""The kernels that sort by expert: ballots, coalesced loads under way together, no spills, no atomics."""

from __future__ import annotations

import pytest

from cutegemm.cute.routing import config
from cutegemm.cute.routing.config import Signature, Tile
from cutegemm.hardware import arch
from cutegemm.run.routing_kernels import build
from tests.sass import opcodes, registers, spilled


@pytest.mark.parametrize("does", config.PASSES)
@pytest.mark.parametrize("tile", [Tile(4, 128, 1), Tile(16, 128, 2), Tile(32, 1024, 4)], ids=str)
@pytest.mark.parametrize("gpu", ["sm_80", "sm_90a"])
@pytest.mark.product(keep=2)
def test_machine_code(does, tile, gpu):
    where = arch.get(gpu)
    kernel = build(Signature(does, "int64", "bf16"), tile, where)
    names = opcodes(kernel.cubin)
    assert not spilled(kernel.cubin)
    assert registers(kernel.cubin) * tile.threads <= where.registers_per_sm
    votes = sum(count for name, count in names.items() if name.startswith("VOTE"))
    assert votes >= tile.deep * (tile.experts.bit_length() - 1)
    assert not any(name.startswith(("ATOM", "RED", "MATCH")) for name in names)
    assert names["LDG.E.64"] == tile.deep
