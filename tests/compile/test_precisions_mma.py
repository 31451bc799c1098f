"""mma.sync kernels of operands that are split into parts: their instructions, and that nothing spills."""

from __future__ import annotations

import random

import pytest

from cutegemm import backend
from cutegemm.cute import FAMILIES
from cutegemm.cute.ampere.config import AmpereConfig
from cutegemm.cute.ampere.steps import steps_of
from cutegemm.hardware import arch
from cutegemm.hardware.cubin import usage
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from tests.examples import examples
from tests.sass import opcodes, spilled

CUTE = backend.get("cute")
FULL = Epilogue(c_dtype="fp32", bias_dtype="fp32", activation="gelu")
PRECISIONS = ("tf32x3", "bf16x6", "bf16x9")
TARGETS = ("sm_80", "sm_89", "sm_90a")


def build(config, target: str, precision: str, majors: str = "nn", epilogue: Epilogue = FULL):
    """The kernel, or why the rule of validity refuses it."""
    problem = Problem.of(4096, 4096, 4096, "fp32", majors=majors, precision=precision, epilogue=epilogue)
    chosen, where = CUTE.parse(str(config)), arch.get(target)
    return CUTE.check(chosen, problem, where) or CUTE.build(problem.signature, chosen, where)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.product(keep=1)
def test_instructions(precision, target):
    """Two kernels in one module; every term is multiplied; each sum is promoted once a k tile; loads are reused."""
    kernel = build("sm80/64x64x32/w32x32/s2/g8", target, precision, epilogue=Epilogue())
    names, parts = opcodes(kernel.cubin), kernel.signature.parts
    instruction, k_steps = ("HMMA.1688.F32.TF32", 4) if parts.element == "fp32" else ("HMMA.16816.F32.BF16", 2)
    assert names[instruction] == len(parts.terms) * k_steps * 2 * 4  # rows of m16, columns of n8
    assert names["FADD"] >= 2 * 4 * 4
    # Fragments of the first step are loaded before the loop too; x4 loads those of two instructions. The compiler finds
    # that it may keep a fragment or two more.
    steps = steps_of(kernel.signature, k_steps)
    loads = 2 + sum(step.loads_a + step.loads_b for step in steps)
    assert 2 * 2 * k_steps * parts.count <= names["LDSM.16.M88.4"] <= 2 * loads
    rounding = "rna" if parts.element == "fp32" else "rn"
    assert f"cvt.{rounding}." in kernel.ptx
    assert f".target {target}" in kernel.ptx
    assert len(usage(kernel.cubin)) == 2


def test_loads_are_reused():
    for precision, loads in (("tf32x3", (3, 2)), ("bf16x6", (6, 4))):
        steps = steps_of(Problem.of(8, 8, 8, "fp32", precision=precision).signature, 1)
        assert (sum(step.loads_a for step in steps), sum(step.loads_b for step in steps)) == loads
    (one,) = {each[:2] for each in steps_of(Problem.of(8, 8, 8, "fp16").signature, 4)}
    assert one == (0, 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("splits", ["", "/k3"])
@pytest.mark.product(keep=1)
def test_candidates_do_not_spill(precision, target, part, splits):
    """Those that the heuristic may choose on that GPU, a fifth of them; whole and with K split."""
    built = 0
    for text in FAMILIES["sm80"].candidates(Problem.of(8, 8, 8, "fp32", precision=precision).signature)[part::5]:
        kernel = build(text + splits, target, precision)
        if not isinstance(kernel, str):
            built += 1
            assert not spilled(kernel.cubin), text + splits
    assert built


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "config",
    [
        "128x128x32/w64x32/s2/g8",
        "128x64x32/w32x64/s2/g8/k3",
        "64x128x32/w16x64/s2/g8/k3",
        "64x64x32/w64x32/s2/g8",
        "32x32x32/w32x32/s2/g8",
        "128x64x32/w16x32/s2/g8",
        "64x128x32/w32x16/s2/g8",
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.product(keep=1)
def test_the_largest_tiles_do_not_spill(precision, config, target):
    """The largest of each number of threads that the rule allows, those of 512 threads with tf32."""
    kernel = build(f"sm80/{config}", target, precision, "nt")
    if isinstance(kernel, str):
        wide = precision == "tf32x3" and "over 32 sums" in kernel
        assert wide or "shared memory" in kernel or "each must load one" in kernel
    else:
        assert not spilled(kernel.cubin)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.product(keep=1)
def test_what_the_rule_allows_compiles_without_spills(target, seed):
    """Random configurations of the tuner's space."""
    rng = random.Random(f"{seed}/{target}")
    space = [each for each in AmpereConfig.space(4) if each.bk == 32]
    for _ in range(examples(4)):
        precision, majors = rng.choice(PRECISIONS), rng.choice(("tn", "tt", "nn", "nt"))
        kernel: object = ""
        while isinstance(kernel, str):
            kernel = build(rng.choice(space), target, precision, majors)
        assert not spilled(kernel.cubin), kernel.config


def test_every_candidate_is_valid_where_it_fits():
    """On an A100 all of them; elsewhere those that shared memory has room for, the smallest anywhere."""
    for precision in PRECISIONS:
        for majors in ("tn", "nt"):
            problem = Problem.of(512, 512, 512, "fp32", majors=majors, precision=precision)
            listed = FAMILIES["sm80"].candidates(problem.signature)
            for text in listed:
                assert str(CUTE.parse(text)) == text
                assert CUTE.check(CUTE.parse(text), problem, arch.get("A100")) is None, text
                refused = CUTE.check(CUTE.parse(text), problem, arch.get("A6000"))
                assert refused is None or "shared memory" in refused
            assert CUTE.check(CUTE.parse(listed[-1]), problem, arch.get("A6000")) is None
