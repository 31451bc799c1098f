"""Kernels of operands that are split into parts: their instructions, and that nothing spills."""

from __future__ import annotations

import pytest

from cutegemm import backend
from cutegemm.cute.hopper import part_candidates, promotion
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from tests.sass import opcodes, spilled

HOPPER, CUTE = arch.get("sm_90a"), backend.get("cute")
FULL = Epilogue(c_dtype="fp32", bias_dtype="fp32", activation="gelu")
PRECISIONS = ("tf32x3", "bf16x6", "bf16x9")


@pytest.mark.parametrize(("place", "splits"), [(0, 1), (2, 1), (3, 1), (4, 1), (6, 1), (9, 1), (4, 4), (10, 3)])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.product(keep=1)
def test_nothing_spills_and_every_term_is_multiplied(precision, place, splits):
    """Two kernels in one module: what splits the operands, and what multiplies their parts."""
    problem = Problem.of(4096, 4096, 4096, "fp32", majors="nn", precision=precision, epilogue=FULL)
    text = part_candidates.listed(problem.signature)[place]
    if splits > 1:
        text = text.replace("/serp8", f"/serp8/k{splits}")
    config = CUTE.parse(text)
    if refused := CUTE.check(config, problem, HOPPER):
        assert splits > 1
        pytest.skip(refused)
    kernel = CUTE.build(problem.signature, config, HOPPER)
    assert not spilled(kernel.cubin)
    found = opcodes(kernel.cubin)
    parts = problem.signature.parts
    steps = config.bk * (4 if parts.element == "fp32" else 2) // 32
    blocks = config.group_rows // 64
    assert sum(n for name, n in found.items() if name.startswith("HGMMA")) == len(parts.terms) * steps * blocks


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.product(keep=1)
def test_wgmma_of_compensated_sums_stay_under_way(precision):
    """ptxas waits after every WGMMA where it cannot tell which registers are in use: here it waits twice a k tile."""
    problem = Problem.of(512, 512, 4096, "fp32", precision=precision)
    config = CUTE.parse("sm90/128x64x32/coop2/c1x1/s4/serp8/pdl")
    assert promotion.compensates(config, problem.signature)
    found = opcodes(CUTE.build(problem.signature, config, HOPPER).cubin)
    assert sum(n for name, n in found.items() if name.startswith("WARPGROUP.DEPBAR")) == 2


def test_every_candidate_is_valid():
    for precision in PRECISIONS:
        for majors in ("tn", "nt"):
            problem = Problem.of(512, 512, 512, "fp32", majors=majors, precision=precision)
            for text in part_candidates.listed(problem.signature):
                config = CUTE.parse(text)
                assert CUTE.check(config, problem, HOPPER) is None, text
                assert str(config) == text
