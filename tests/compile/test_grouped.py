"""Kernels of products in groups spill nothing: large tiles, the whole epilogue, gate and up, gathered rows."""

from __future__ import annotations

import pytest

from cutegemm import backend, ops
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program import known
from tests.sass import opcodes, spilled

CUTE, HOPPER = backend.get("cute"), arch.get("sm_90a")
FULL = Epilogue(c_dtype="bf16", bias_dtype="bf16", activation="gelu")


def gated() -> Epilogue:
    program = known.lookup(ops.swiglu, ())
    outputs = tuple(output._replace(dtype="bf16") for output in program.outputs)
    return Epilogue(custom=type(program)(program.inputs, program.nodes, outputs, program.gating))


@pytest.mark.parametrize(
    ("config", "work", "majors", "epilogue"),
    [
        ("256x192x64/coop2/c2x1/s3/serp8/zig/pdl", "ragged_m", "tn", FULL),
        ("128x208x64/pp/c1x1/s4/g8/pdl", "ragged_m", "tt", None),
        ("256x64x64/coop2/c1x1/s4/g8/swap/pdl", "ragged_m", "tt", gated()),
        ("256x192x64/coop2/c1x2/s3/serp8/zig", "ragged_k", "nt", FULL),
        ("128x256x64/coop2/c2x1/s4/g8", "gathered_m", "tn", gated()),
        ("256x192x64/coop2/c1x1/s3/g8", "scattered_m", "tn", FULL),
        ("256x192x64/coop2/c1x2/s3/serp8/zig/streamk/pdl", "ragged_m", "tn", None),
        ("256x128x64/coop2/c2x1/s4/serp8/swap/zig/streamk/pdl", "ragged_m", "tn", None),
        ("128x256x64/coop2/c2x1/s4/serp8/zig/streamk/pdl", "gathered_m", "tn", gated()),
        ("128x256x64/coop2/c1x2/s4/hilbert/zig/streamk/pdl", "scattered_m", "tt", None),
    ],
)
@pytest.mark.product(keep=2)
def test_nothing_is_spilled(config, work, majors, epilogue):
    problem = Problem.of(4096, 4096, 4096, majors=majors, batch=8, work=work, epilogue=epilogue)
    chosen = CUTE.parse(f"sm90/{config}")
    assert CUTE.check(chosen, problem, HOPPER) is None
    kernel = CUTE.build(problem.signature, chosen, HOPPER)
    assert not spilled(kernel.cubin)
    assert any(name.startswith("HGMMA") for name in opcodes(kernel.cubin))
