"""int8 and fp8 by mma.sync compile to the tensor cores' instructions, without spills, on every architecture."""

from __future__ import annotations

import pytest

from cutegemm import backend
from cutegemm.cute import FAMILIES
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from tests.compile.test_fp8 import FULL, blocks
from tests.sass import opcodes, registers, spilled

CUTE = backend.get("cute")


def build(config: str, target: str, dtype: str, **given):
    problem, where = Problem.of(4096, 4096, 4096, dtype, **given), arch.get(target)
    chosen = CUTE.parse(config)
    if (refused := CUTE.check(chosen, problem, where)) is not None:
        return refused
    return CUTE.build(problem.signature, chosen, where)


@pytest.mark.parametrize(
    ("target", "dtype", "b_dtype", "ptx", "sass"),
    [
        ("sm_80", "int8", None, "satfinite.s32.s8.s8.s32", "IMMA.16832.S8.S8.SAT"),
        # What others here say too: the same instruction, or one operand of either kind.
        pytest.param("sm_90a", "int8", None, "satfinite.s32.s8.s8.s32", "IMMA.16832.S8.S8.SAT", marks=pytest.mark.slow),
        pytest.param("sm_89", "e4m3", None, "f32.e4m3.e4m3.f32", "QMMA.16832.F32.E4M3.E4M3", marks=pytest.mark.slow),
        ("sm_89", "e4m3", "e5m2", "f32.e4m3.e5m2.f32", "QMMA.16832.F32.E4M3.E5M2"),
        ("sm_89", "e5m2", "e4m3", "f32.e5m2.e4m3.f32", "QMMA.16832.F32.E5M2.E4M3"),
        ("sm_90a", "e5m2", None, "f32.e5m2.e5m2.f32", "HMMA.16816.F32"),
    ],
)
@pytest.mark.product(keep=1)
def test_instructions(target, dtype, b_dtype, ptx, sass):
    kernel = build("sm80/64x64x128/w32x32/s3/g8", target, dtype, b_dtype=b_dtype)
    names = opcodes(kernel.cubin)
    products = 4 * 2 * 4  # k steps, rows of m16, columns of n8
    assert kernel.ptx.count(f"mma.sync.aligned.m16n8k32.row.col.{ptx}") == products
    assert names[sass] == products * (2 if sass.startswith("HMMA") else 1)
    assert f".target {target}" in kernel.ptx
    for name in ("LDSM", "LDGSTS"):
        assert any(op.startswith(name) for op in names)
    # Promotion adds each sum of a k tile once, and the next one begins from zeros without an instruction; what ptxas
    # makes of fp8 on Hopper adds those of each instruction too.
    sums = 2 * 4 * 4
    assert names["FADD"] == {"IMMA": 0, "QMMA": sums, "HMMA": sums * (1 + 4)}[sass[:4]]


@pytest.mark.parametrize("epilogue", [FULL, blocks(), blocks(across=1), blocks(128, 1)], ids=["full", "b", "1", "a"])
@pytest.mark.parametrize("unit", ["int8", "float8"])
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("part", range(4))
@pytest.mark.product(keep=2)
def test_candidates_do_not_spill(part, target, unit, epilogue):
    """A fourth of a unit's candidates."""
    dtype = "int8" if unit == "int8" else "e4m3"
    problem, where = Problem.of(4096, 4096, 4096, dtype, epilogue=epilogue, out_dtype="bf16"), arch.get(target)
    texts = FAMILIES["sm80"].candidates(Problem.of(64, 64, 64, dtype).signature)
    valid = [text for text in texts if CUTE.check(CUTE.parse(text), problem, where) is None]
    assert len(valid) >= 3 or (target, unit) == ("sm_80", "float8")
    for text in valid[part::4]:
        kernel = CUTE.build(problem.signature, CUTE.parse(text), where)
        assert not spilled(kernel.cubin), text
        assert registers(kernel.cubin) * kernel.config.threads <= kernel.arch.registers_per_sm


@pytest.mark.parametrize(
    ("target", "config", "dtype", "epilogue"),
    [
        # The largest tiles of promoted sums that the rule allows.
        ("sm_89", "128x128x128/w64x32/s3/g8", "e4m3", FULL),
        ("sm_89", "256x64x128/w32x64/s2/g8", "e5m2", FULL),
        ("sm_89", "32x32x128/w32x32/s5/g8", "e4m3", blocks(across=1)),
        ("sm_80", "256x32x128/w64x16/s3/g8", "int8", blocks(across=1)),
        ("sm_90a", "64x128x128/w32x32/s4/g8", "e4m3", FULL),
        ("sm_90a", "32x256x128/w16x64/s3/g8", "e5m2", Epilogue()),
        ("sm_90a", "32x64x128/w16x32/s3/g8", "e4m3", blocks(across=1)),
    ],
)
@pytest.mark.product(keep=1)
def test_the_largest_promoted_tiles_do_not_spill(target, config, dtype, epilogue):
    kernel = build(f"sm80/{config}", target, dtype, epilogue=epilogue, out_dtype="bf16")
    assert not spilled(kernel.cubin)
