"""How wide the boxes of the Hopper kernel's loads are: what the cost model takes them for (`Footprint.narrow`)."""

from __future__ import annotations

import pytest

from cutegemm import backend
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import LINE
from tests.emulated.gpus import gpu_of
from tests.problems import Case

pytest.importorskip("llvmlite")

M, N, K = 136, 264, 72
CASES = [
    ("128x192x64/coop2/c2x1/s3/row", "bf16", "tn"),
    ("128x64x32/coop2/c1x1/s3/row", "fp16", "tn"),  # 32 elements along K are half a line
    ("128x144x64/coop2/c1x1/s3/row", "bf16", "tt"),
    ("128x144x64/coop2/c2x1/s3/row", "bf16", "tt"),
    ("64x96x64/coop1/c2x1/s3/row", "fp16", "tt"),
    ("128x192x64/coop2/c1x4/s3/row", "bf16", "nt"),
    ("128x48x64/coop2/c2x1/s3/row/swap", "bf16", "nn"),
    ("128x64x32/coop2/c2x1/s3/row", "fp32", "tn"),
]


@pytest.mark.parametrize(("text", "dtype", "majors"), CASES)
@pytest.mark.product(keep=1)
def test_rows_of_the_boxes_are_as_wide_as_the_cost_model_thinks(text, dtype, majors, seed, monkeypatch):
    from cutegemm.emulator.ops import tma

    rows: dict[tuple[int, int], int] = {}
    look_up = tma.tensor_map_at

    def spy(*about):
        found = look_up(*about)
        rows[found.dims[:2]] = found.box[0] * found.element_bytes
        return found

    monkeypatch.setattr(tma, "tensor_map_at", spy)
    gpu_of(4, monkeypatch)
    options = {"precision": "tf32"} if dtype == "fp32" else {}
    case = Case.random(M, N, K, dtype, seed=seed, majors=majors, **options)
    case.run(backend="cute", config=f"sm90/{text}")
    width_a = rows[(K, M) if majors[0] == "t" else (M, K)]
    width_b = rows[(K, N) if majors[1] == "n" else (N, K)]

    config = backend.get("cute").parse(f"sm90/{text}")
    narrow = backend.get("cute").footprint(config, case.problem().signature, arch_table.get("H200")).narrow
    assert narrow == (LINE / width_a, LINE / width_b)
