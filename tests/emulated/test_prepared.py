"""Operands whose rows begin anywhere, packed by a kernel and multiplied by the one that loads through TMA, in the
emulator: exact copies, and products within the reference's bound.
"""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.backend import get
from cutegemm.cute.prepare import PIECE
from cutegemm.hardware import arch
from cutegemm.problem.operand import Matrix, begins
from cutegemm.problem.preparation import Preparation
from cutegemm.run import preparing
from tests.problems import MAJORS, Case, matrix

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("fresh_timing")

CONFIG = "sm90/64x64x64/coop1/c1x1/s3/row"
SPLIT = "sm90/64x64x64/coop1/c1x1/s3/row/k2"


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize("row_major", [True, False])
@pytest.mark.parametrize("matrices", [1, 3])
@pytest.mark.product(keep=6)
def test_pack_copies_every_byte(unit, row_major, matrices, seed):
    """Rows of less than a warp's piece, of exactly one, and of several with a rest; the rest of a row is zero."""
    generator = torch.Generator().manual_seed(seed)
    step = max(unit, 2)  # of bytes: an element has two
    for rows, length, gap in ((9, step, 3 * step), (5, PIECE - step, step), (2, PIECE, step), (3, 2 * PIECE + step, 0)):
        distance, batch = length + gap, rows * (length + gap) + step
        storage = torch.randint(0, 256, (unit + matrices * batch,), generator=generator, dtype=torch.uint8)
        source = storage.as_strided((matrices, rows, length), (batch, distance, 1), unit)
        pitch = -(-length // 16) * 16
        target_batch = rows * pitch if matrices > 1 else 0

        def lies(leading, of_batch, align, rows=rows, inner=length // 2):
            extents = (rows, inner, leading // 2, 1) if row_major else (inner, rows, 1, leading // 2)
            return Matrix(*extents, of_batch // 2, align)

        asked = Preparation(
            "pack", "a", lies(distance, batch, unit), lies(pitch, target_batch, 16), matrices, "bf16", "bf16"
        )
        kernel = get("cute").preparer(asked, arch.get("H200"))
        got = preparing._emulated(asked, kernel, source).view(torch.uint8).view(matrices, rows, pitch)
        assert torch.equal(got[:, :, :length], source)
        assert not got[:, :, length:].any()


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("config", [CONFIG, SPLIT])
@pytest.mark.product(keep=1)
def test_products_of_packed_operands(majors, config, seed):
    """Every pair of majors, at odd extents and offsets. Everything around the operands is NaN."""
    Case.random(67, 45, 139, "bf16", seed=seed, majors=majors, pad=3, offset=1).run(backend="cute", config=config)


@pytest.mark.slow
def test_batches_epilogues_and_a_column_major_result(seed):
    Case.random(35, 51, 73, "fp16", seed=seed, majors="nt", batch=3).run(backend="cute", config=CONFIG)
    out = torch.empty(51, 35, dtype=torch.bfloat16).t()
    case = Case.random(35, 51, 73, "bf16", seed=seed, offset=1, out=out, bias=True, activation="gelu", c=True, beta=0.5)
    case.run(backend="cute", config=CONFIG)
    generator = torch.Generator().manual_seed(seed)
    one, many = matrix(35, 73, torch.bfloat16, generator), matrix(73, 51, torch.bfloat16, generator, batch=2)
    Case(one, many).run(backend="cute", config=CONFIG)
    Case.random(35, 51, 73, "fp32", seed=seed, precision="tf32").run(
        backend="cute", config="sm90/64x64x32/coop1/c1x1/s3/row"
    )


def test_rows_that_begin_aligned_are_taken_as_they_lie(seed, capsys):
    """TMA ends at a row's end: padded rows of odd lengths need no copy. What lies behind the rows is NaN."""
    generator = torch.Generator().manual_seed(seed)
    a = matrix(67, 139, torch.bfloat16, generator, pad=5)
    b = matrix(139, 45, torch.bfloat16, generator, row_major=False, pad=5)
    Case(a, b).run(backend="cute", config=CONFIG)
    cutegemm.explain(a, b, backend="cute", config=CONFIG)
    assert "prepared first" not in capsys.readouterr().out
    row = matrix(1, 139, torch.bfloat16, generator)
    assert begins(2, 0, 2, 139, 1, 0) == 16
    Case(row, b).run(backend="cute", config=CONFIG)


def test_programs_and_gradients(seed):
    """An epilogue program reads packed operands as well, and the backward pass chooses for itself."""
    generator = torch.Generator().manual_seed(seed)
    a = matrix(33, 67, torch.bfloat16, generator).requires_grad_()
    b = matrix(67, 41, torch.bfloat16, generator)
    got = cutegemm.gemm(a, b, epilogue=lambda acc: ops.relu(acc) + 1.0, backend="cute", config=CONFIG)
    want = torch.relu(a.double() @ b.double()) + 1.0
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-2)
    plain = cutegemm.gemm(a, b, backend="cute", config=CONFIG)
    ones = torch.ones_like(plain)
    plain.backward(ones)
    torch.testing.assert_close(a.grad.double(), ones.double() @ b.double().t(), rtol=2**-8, atol=0.02)


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (129, {"config": CONFIG}),  # packed
        (128, {"config": SPLIT}),
        (128, {"config": SPLIT, "epilogue": ops.relu}),
    ],
    ids=["packed", "split", "program"],
)
@pytest.mark.product(keep=1)
def test_workspaces_are_in_memory_whatever_the_default_device(columns, options):
    """With torch.set_default_device("meta") they had no memory."""
    a, b = torch.ones(64, columns, dtype=torch.bfloat16), torch.ones(64, columns, dtype=torch.bfloat16).t()
    with torch.device("meta"):
        got = cutegemm.gemm(a, b, backend="cute", out_dtype=torch.float32, **options)
    assert torch.equal(got, torch.full((64, 64), float(columns)))
