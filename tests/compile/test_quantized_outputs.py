"""The machine code of results that are quantized with scales of blocks."""

from __future__ import annotations

import pytest

from cutegemm import backend as backends
from cutegemm.hardware.arch import get as arch
from cutegemm.problem import Problem, scaling
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.quantized import quantizing
from cutegemm.problem.program.text import parse
from tests import sass

CUTE, H200 = backends.get("cute"), arch("H200")
PLAIN = "def epilogue(acc): return acc"
GATED = "def epilogue(gate: halves[0], up: halves[1], x0: fp32[M, 1]): return silu(gate) * up * x0"
PAIRS = (
    "def epilogue(gate: pairs[0], up: pairs[1], x0: fp32[M, 1], x1: bf16[L, 1, N], x2: bf16[L, 1, N]): t0 = "
    "minimum(gate + x1, 7.0); return t0 * sigmoid(1.702 * t0) * (minimum(maximum(up + x2, -7.0), 7.0) + 1.0) * x0"
)
INSTRUCTION = {"e4m3": "F2FP.SATFINITE.E4M3", "e5m2": "F2FP.SATFINITE.E5M2", "int8": "F2I.S8"}


@pytest.mark.parametrize("text", [PLAIN, GATED, PAIRS], ids=["plain", "gated", "pairs"])
@pytest.mark.parametrize(
    ("work", "rest"),
    [
        ("ragged_m", "c1x2/s4/serp16/zig/pdl"), ("dense", "c1x2/s4/serp8/zig/pdl"), ("dense", "c1x1/s4/serp8/zig/pdl"),
        ("dense", "c1x2/s4/serp8/zig/streamk/pdl"),
    ],
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_nothing_spills_behind_scales_of_blocks(text, work, rest):
    """The tile that layers of 8 bits take."""
    program = quantizing(parse(text), "bf16", "e4m3")
    whole = scaling.of_blocks("e4m3", "e4m3", work, program)
    problem = Problem.of(
        8192, 5632, 2048, "e4m3", batch=1 if work == "dense" else 8, out_dtype="e4m3",
        epilogue=Epilogue(custom=whole), work=work,
    )  # fmt: skip
    kernel = CUTE.build(problem.signature, CUTE.parse(f"sm90/128x256x128/coop2/{rest}/half"), H200)
    assert sass.spilled(kernel.cubin) == 0


@pytest.mark.parametrize("config", ["128x128x64/coop2/c2x1/s4", "128x256x64/coop2/c1x2/s4", "64x256x64/pp/c1x1/s4"])
@pytest.mark.parametrize("text", [PLAIN, GATED, PAIRS], ids=["plain", "gated", "pairs"])
@pytest.mark.parametrize("values", INSTRUCTION)
@pytest.mark.product(keep=1)
def test_nothing_spills_and_conversions_are_of_pairs(text, config, values):
    program = quantizing(parse(text), "bf16", values)
    if text != PLAIN and "x128x" in config:
        config = config.replace("x128x", "x256x")
    problem = Problem.of(4096, 4096, 2048, "bf16", out_dtype=values, epilogue=Epilogue(custom=program))
    kernel = CUTE.build(problem.signature, CUTE.parse(f"sm90/{config}/serp8/zig/pdl"), H200)
    assert sass.spilled(kernel.cubin) == 0
    found = sass.opcodes(kernel.cubin)
    assert any(each.startswith(INSTRUCTION[values]) for each in found)
    assert not any(each.startswith("F2F.") for each in found)
