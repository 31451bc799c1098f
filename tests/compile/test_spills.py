"""Programs that make a real kernel spill registers: it is refused by name, and a lighter one is chosen in its place.

The pairs were found by compiling what `tests.fuzz_programs` draws. A kernel that changes may spill no more: then
another pair must be found.
"""

from __future__ import annotations

import pytest

import cutegemm
from cutegemm.choice import plan
from cutegemm.errors import UnsupportedError
from cutegemm.hardware.cubin import usage
from cutegemm.run import fused
from cutegemm.run.how import How
from tests.fuzz_programs import draw

PAIRS = [
    (5, "simt/64x128x16/w32x64/s3/g8/r3", 32),
    (28, "sm90/128x256x32/coop2/c1x1/s3/serp8/pdl", 32),
    (87, "sm90/256x192x64/coop2/c1x1/s3/serp8/pdl", 8),
]
"""Seed of a program with its operands, a configuration, and the bytes that a thread of that kernel spills."""


@pytest.mark.parametrize(("seed", "config", "count"), PAIRS)
@pytest.mark.product(keep=1)
def test_a_kernel_that_spills_is_refused_by_name_and_replaced_where_chosen(seed, config, count, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    program, a, b, operands, precision = draw(seed, "cpu")
    options = {"epilogue": program, "operands": operands, "precision": precision, "backend": "cute"}
    with pytest.raises(UnsupportedError, match=rf"config {config} .* spills {count} bytes of registers"):
        cutegemm.prepare(a, b, config=config, **options)
    choice = "cute", plan.backends.get("cute").parse(config), "chosen"
    monkeypatch.setattr(plan, "_best_known", lambda *of: choice)
    fused.memo.clear()
    found = fused.plan_of(a, b, program, operands, None, None, How(precision, "cute"))
    fused.memo.clear()
    assert str(found.choice.config) != config
    assert f"{config} by {count} bytes a thread" in found.choice.why
    assert found.choice.why.endswith("the next cheapest lighter candidate spills none")
    assert [kernel.stack for kernel in usage(found.kernel.cubin)] == [0]
