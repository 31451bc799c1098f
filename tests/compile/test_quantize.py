"""The kernels that quantize: wide accesses, the conversion instructions, no spills where a thread holds most."""

from __future__ import annotations

import pytest

from cutegemm.cute.quantize import build, config
from cutegemm.cute.quantize.config import Signature
from cutegemm.hardware import arch
from cutegemm.problem.quantization import ROWS, Group
from tests.sass import opcodes, registers, spilled


@pytest.mark.parametrize(
    ("signature", "k", "load", "store", "convert"),
    [
        (Signature("whole", "bf16", "e4m3", ROWS, True, 8), 32768, "LDG.E.128", "STG.E.64", "F2FP.SATFINITE.E4M3"),
        (Signature("whole", "fp32", "int8", Group(128, 128), True, 4), 4096, "LDG.E.128", "STG.E", "F2IP.S8"),
        (Signature("whole", "fp32", "e5m2", Group(128, 128), False, 16), 4096, "LDG.E", "STG.E.128", "F2FP"),
        (Signature("whole", "bf16", "e4m3", ROWS, True, 8, 10), 32768, "LDG.E.128", "STG.E.64", "F2FP.SATFINITE.E4M3"),
        (Signature("whole", "bf16", "e4m3", Group(1, 128), True, 8, 8), 4096, "LDG.E.128", "STG.E.64", "F2FP.SATFIN"),
        (Signature("back", "bf16", "e4m3", ROWS, True, 8), 4096, "LDG.E.64", "STG.E.128", "F2FP.F16.E4M3"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_machine_code(signature, k, load, store, convert):
    where = arch.get("sm_90a")
    tile = config.choose(signature, 4096, k, 1, 132)
    kernel = build.build(signature, tile, where)
    names = opcodes(kernel.cubin)
    assert not spilled(kernel.cubin)
    assert registers(kernel.cubin) * tile.threads <= where.registers_per_sm
    per_thread = tile.deep_r * tile.deep_k * (1 if signature.along_k else tile.vector)
    assert names[load] >= per_thread
    assert names[store] >= tile.deep_r * tile.deep_k * max(signature.places, 1)
    assert any(op.startswith(convert) for op in names)
    assert not any(op.startswith(("LDG.E.U8", "STG.E.U8")) for op in names)
