"""Operands and results whose rows begin anywhere: what the kernels ask the memory for, in the emulator's profile."""

from __future__ import annotations

import pytest
import torch

from cutegemm import backend
from cutegemm.emulator.workload import Workload
from cutegemm.hardware import arch
from tests.problems import Case

pytest.importorskip("llvmlite")

CUTE = backend.get("cute")


def profile_of(case: Case, config: str, name: str):
    kernel = CUTE.build(case.problem().signature, CUTE.parse(config), arch.get(name))
    verdict, (report,) = Workload.of(case.problem(), kernel, seed=1).run(seed=0, profile=True)
    assert verdict.ok, verdict.message
    return report


@pytest.mark.parametrize(
    ("config", "name", "dtype", "out_dtype"),
    [
        ("sm90/64x64x64/coop1/c1x1/s3/row", "sm_90a", "bf16", None),
        ("sm90/64x64x64/coop1/c1x1/s3/row/swap", "sm_90a", "bf16", None),
        ("sm90/64x32x64/coop1/c1x1/s3/row", "sm_90a", "fp16", torch.float32),
        ("sm80/64x64x32/w32x32/s3/g8", "sm_80", "bf16", None),
        ("sm80/64x128x32/w32x64/s3/g8", "sm_80", "fp16", None),
    ],
)
@pytest.mark.parametrize(("n", "most"), [(61, 3.8), (62, 2.0)])
@pytest.mark.product(keep=1)
def test_lanes_store_narrow_rows_of_d_side_by_side(config, name, dtype, out_dtype, n, most):
    """Were each lane to store eight neighbours one by one, every element would take a sector of its own."""
    case = Case.random(64, n, 64, dtype, seed=3, out_dtype=out_dtype)
    report = profile_of(case, config, name)
    stores = [row for row in report.lines.values() if "st.global" in row.text]
    sectors, ideal = (sum(getattr(row, each) for row in stores) for each in ("sectors", "sectors_ideal"))
    assert 0 < sectors <= most * ideal


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ("sm80/128x64x32/w64x32/s3/g8", "bf16"),
        ("sm80/64x128x64/w32x64/s3/g8", "fp16"),
        ("sm80/128x128x32/w64x32/s3/g8", "tf32"),
    ],
)
@pytest.mark.parametrize("majors", ["nt", "nn", "tt"])
@pytest.mark.parametrize("shape", [(130, 66, 70), (34, 130, 33), (129, 65, 40)])
@pytest.mark.product(keep=1)
def test_nothing_is_read_beyond_the_rows_of_operands_that_lie_across_k(config, dtype, majors, shape):
    """Lanes beyond M or N copy zeros: of such an operand each CTA reads what it has of it, and nothing twice."""
    m, n, k = shape
    dtype, precision = ("fp32", "tf32") if dtype == "tf32" else (dtype, None)
    case = Case.random(m, n, k, dtype, seed=4, majors=majors, precision=precision)
    report = profile_of(case, config, "sm_80")
    bm, bn = (int(each) for each in config.split("/")[1].split("x")[:2])
    size = case.a.element_size()
    # A K-major operand repeats its last row beyond the edge.
    rows = m if majors[0] == "n" else -(-m // bm) * bm
    columns = n if majors[1] == "t" else -(-n // bn) * bn
    asked = (rows * -(-n // bn) + columns * -(-m // bm)) * k * size
    read = report.bytes.get("cp.async", 0) + report.bytes.get("global read", 0)
    assert read == asked
