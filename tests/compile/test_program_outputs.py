"""Kernels of programs with several and with reduced results: TMA stores where they are aligned, nothing spills."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutegemm import backend
from cutegemm.choice import heuristics
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from tests.sass import opcodes, spilled

CUTE = backend.get("cute")
HOPPER = arch.get("sm_90a")
TWO = "def epilogue(acc, x0: bf16[N]): t0 = acc + x0; return gelu(t0), t0"
THREE = "def epilogue(acc, x0: bf16[N]): t0 = acc + x0; return gelu(t0), t0, sigmoid(t0)"
SQUARES = "def epilogue(acc, x0: bf16[M, N]): t0 = acc + x0; return t0, row_sum(t0 * t0)"
BOTH_WAYS = (
    "def epilogue(acc, x0: bf16[N]): t0 = gelu(acc + x0); return t0, acc, row_sum(t0), row_max(acc), column_sum(t0)"
)

IN_TURN = (
    "def epilogue(acc, x0: bf16[M, 1], x1: bf16[M, N], x2: bf16[M, N]): t0 = acc * x0; "
    "return packed_bf16(silu(t0) * x1, t0 * x2), row_sum(t0)"
)
DROPOUT = (
    "def epilogue(acc, x0: int32): return where(random(x0, row(), column(), matrix()) >= 0.10000000149011612, "
    "acc * 1.1111111640930176, 0.0)"
)


def problem(text: str, out: str = "bf16", size: int = 4096) -> Problem:
    """A square product whose operands and results are all aligned."""
    program = simplified(parse(text))
    outputs = tuple(each._replace(dtype="fp32" if each.reduce else out) for each in program.outputs)
    matrices = sum(each.varies == "mn" for each in program.inputs) + sum(not each.reduce for each in outputs) - 1
    epilogue = Epilogue(custom=replace(program, outputs=outputs), aligns=(16,) * matrices)
    plain = Problem.of(size, size, size, out_dtype=out)
    return replace(plain, epilogue=epilogue, outputs=(plain.d,) * len(epilogue.more_outputs))


@pytest.mark.parametrize(
    ("text", "config", "out", "results"),
    [
        (TWO, "sm90/128x192x64/pp/c1x2/s4/g8/pdl", "bf16", 2),
        (TWO, "sm90/128x256x64/coop2/c2x1/s3/hilbert", "bf16", 2),
        (TWO, "sm90/128x208x64/pp/c1x1/s3/g8", "fp32", 2),
        (THREE, "sm90/256x208x64/coop2/c1x1/s2/g8", "bf16", 3),
        (SQUARES, "sm90/128x160x64/pp/c1x1/s4/g8", "bf16", 1),
        (SQUARES, "sm90/256x208x64/coop2/c1x1/s2/g8", "bf16", 0),
        (BOTH_WAYS, "sm90/128x128x64/pp/c1x1/s3/g8", "bf16", 2),
        (BOTH_WAYS, "sm90/256x128x64/coop2/c1x1/s2/g8", "fp32", 2),
        (BOTH_WAYS, "sm90/128x176x64/pp/c1x1/s3/g8", "fp32", 0),
        (BOTH_WAYS, "sm90/128x128x64/coop2/c1x1/s3/row/swap", "bf16", 2),
        (BOTH_WAYS, "sm80/128x128x32/w64x64/s4/g8", "bf16", 0),
        (IN_TURN, "sm90/128x160x64/coop2/c1x2/s5/serp8/pdl", "fp32", 1),
        (IN_TURN, "sm90/128x192x64/coop2/c1x2/s4/serp8/zig/pdl", "fp32", 1),
        (DROPOUT, "sm90/128x192x64/pp/c1x2/s4/g8/pdl", "bf16", 0),
        (DROPOUT, "sm90/64x192x64/pp/c1x4/s5/serp8/pdl", "bf16", 1),
    ],
)
@pytest.mark.product(keep=1)
def test_nothing_spills(text, config, out, results):
    """`results`: those that TMA stores, as many boxes of each."""
    signature, chosen = problem(text, out).signature, CUTE.parse(config)
    assert CUTE.check(chosen, problem(text, out), HOPPER) is None
    cubin = CUTE.build(signature, chosen, HOPPER).cubin
    names = opcodes(cubin)
    stores = sum(count for name, count in names.items() if name.startswith("UTMASTG"))
    if results:
        boxes = chosen.group_rows // 64 * chosen.bn // chosen.store_columns(2 if out == "bf16" else 4, signature)
        assert stores == results * boxes
    else:
        assert stores == 0
    assert not spilled(cubin)


@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("text", [TWO, THREE, SQUARES, BOTH_WAYS])
def test_the_heuristic_finds_configurations_with_room(text, out):
    for size in (64, 512, 4096):
        asked = problem(text, out, size)
        _, config, _ = heuristics.choose(asked, HOPPER, "cute")
        assert config.family == "sm90"
        assert CUTE.check(config, asked, HOPPER) is None


def test_estimates_see_further_results():
    """They cost memory traffic, and a longer epilogue where nothing hides it."""
    one, three = (
        heuristics.terms(problem(text), "sm90/128x128x64/coop2/c1x1/s3/g8", "cute", HOPPER)
        for text in ("def epilogue(acc, x0: bf16[N]): return gelu(acc + x0)", THREE)
    )
    assert three.memory > one.memory
    assert three.epilogue > one.epilogue
