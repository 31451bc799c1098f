"""The kernels of preparations compile without a GPU to the instructions they are made of."""

from __future__ import annotations

import pytest

from cutegemm import backend
from cutegemm.cute.prepare import UNITS
from cutegemm.hardware import arch
from cutegemm.problem.operand import Matrix
from cutegemm.problem.preparation import Preparation
from tests.sass import opcodes, registers, spilled


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.product(keep=2)
def test_pack(unit):
    """All loads of a piece are under way together, 16 bytes are stored at once, and nothing is spilled."""
    lies = Matrix(64, 1001, 1001, 1, 0, unit), Matrix(64, 1001, 1024, 1, 0, 16)
    kernel = backend.get("cute").preparer(Preparation("pack", "b", *lies, 1, "bf16", "bf16"), arch.get("sm_90a"))
    assert not spilled(kernel.cubin)
    assert registers(kernel.cubin) <= 32  # so that an SM holds all the threads that it can
    found = opcodes(kernel.cubin)
    loads = sum(count for name, count in found.items() if name.startswith("LDG"))
    stores = {name: count for name, count in found.items() if name.startswith("STG")}
    assert loads == 16 // unit
    assert list(stores.values()) == [1]
    assert "128" in next(iter(stores))
