"""The fp64 kernels in the emulator: instructions, majors, alignment, epilogue; exact on integers below 2^53."""

from __future__ import annotations

import random

import pytest
import torch

import cutegemm
from cutegemm import backend
from cutegemm.cute.dmma.config import DmmaConfig
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from tests.problems import MAJORS, Case
from tests.sass import opcodes, registers, spilled

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("fresh_timing")

CONFIGS = (
    "dmma/64x32x16/w32x16/s3/g8/i16x8", "dmma/32x32x32/w16x16/s2/g1/i8x4", "dmma/32x64x16/w16x32/s4/g8/i16x16",
    "dmma/32x32x16/w16x16/s3/g8/i16x4",
)  # fmt: skip
FULL = Epilogue(c_dtype="fp64", bias_dtype="fp64")


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("shape", [(72, 40, 70), (67, 45, 35)], ids=["aligned", "odd"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.product(keep=1)
def test_integers_below_2_to_the_53_are_exact(config, shape, majors, seed):
    case = Case.random(*shape, "fp64", seed=seed, majors=majors, pad=seed % 3)
    generator = torch.Generator().manual_seed(seed)
    largest = int((2.0**53 / shape[2]) ** 0.5) - 1  # beyond what fp32 and TF32 hold
    for operand in (case.a, case.b):
        operand.copy_(torch.randint(-largest, largest + 1, operand.shape, generator=generator))
    # 2^53 is beyond the sums of int64 products by far: they are the reference.
    want = (case.a.long()[:, :, None] * case.b.long()[None]).sum(1).double()
    got = cutegemm.gemm(case.a, case.b, backend="cute", config=config)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "options",
    [
        {"c": True, "beta": -0.3, "alpha": 0.1, "bias": True},
        {"c": True, "beta": 2.0, "batch": 3, "pad": 3, "offset": 1},
        {"bias": True, "batch": 2, "majors": "nt"},
    ],
    ids=["terms", "batch", "bias"],
)
@pytest.mark.product(keep=1)
def test_the_terms_are_computed_in_fp64(options, seed):
    Case.random(40, 37, 50, "fp64", seed=seed, **options).run(backend="cute", config=CONFIGS[0])


def test_sizes_and_a_transposed_result(seed):
    for shape in ((1, 1, 1), (33, 1, 7), (8, 8, 0)):
        Case.random(*shape, "fp64", seed=seed).run(backend="cute")
    out = torch.empty(36, 40, dtype=torch.float64).t()
    Case.random(40, 36, 20, "fp64", seed=seed, out=out, bias=True).run(backend="cute")


def test_gradients_through_the_kernels(seed):
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((9, 20), (20, 12)))
    grad = torch.randn(9, 12, dtype=torch.float64)
    got = torch.autograd.grad(cutegemm.gemm(a, b, backend="cute"), (a, b), grad)
    for mine, wanted in zip(got, torch.autograd.grad(a @ b, (a, b), grad), strict=True):
        assert (mine - wanted).abs().max() < 1e-13


@pytest.mark.parametrize(("target", "name"), [("sm_90a", "DMMA.16"), ("sm_80", "DMMA.884")])
@pytest.mark.product(keep=1)
def test_what_the_rule_accepts_has_the_instruction_and_no_spills(target, name, seed):
    rng, gpu = random.Random(seed), arch.get(target)
    problem = Problem.of(510, 512, 513, "fp64", majors=rng.choice(MAJORS), epilogue=FULL)
    space = [config for config in DmmaConfig.space() if config.why_invalid(problem.signature, gpu) is None]
    assert {config.instruction for config in space} == (
        {"8x4"} if target == "sm_80" else {"8x4", "16x4", "16x8", "16x16"}
    )
    wanted = [config for config in space if (config.instruction == "8x4") == (target == "sm_80")]
    config = rng.choice(wanted)
    kernel = backend.get("cute").build(problem.signature, config, gpu)
    names = opcodes(kernel.cubin)
    blocks = config.wm * config.wn * config.bk // (8 * config.step[0] * config.step[1])
    assert sum(count for each, count in names.items() if each.startswith(name)) == blocks
    assert not spilled(kernel.cubin)
    assert registers(kernel.cubin) * config.threads <= gpu.registers_per_sm
