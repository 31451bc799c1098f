"""The kernels for thin results in the emulator: each thin side, majors, alignment, slices, splits and epilogues."""

from __future__ import annotations

import random

import pytest
import torch

import cutegemm
from cutegemm import backend
from cutegemm.cute.vector.config import VectorConfig
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from tests import exact
from tests.problems import MAJORS, Case
from tests.sass import opcodes, spilled

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("fresh_timing")

ALONG_K, ACROSS = "vector/2x32x128/w2x8/s2/g1/x2", "vector/2x128x8/w2x128/s2/g1/x4"
COLUMNS_ALONG_K, COLUMNS_ACROSS = "vector/32x8x128/w8x8/s1/g1/x2", "vector/128x8x4/w128x8/s3/g1/x2"
REDUCED = "def epilogue(acc, x0: fp32[M, N]): t0 = acc + x0; return t0, row_sum(acc + 3.0), column_max(t0 - 500.0)"


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("shape", [(2, 100, 332), (3, 67, 149)], ids=["aligned", "odd"])
@pytest.mark.parametrize("splits", ["", "/k3"])
@pytest.mark.product(keep=1)
def test_few_rows(majors, shape, splits, seed):
    config = (ALONG_K if majors[1] == "n" else ACROSS) + splits
    exact.run(exact.case(*shape, "fp32", seed=seed, majors=majors), backend="cute", config=config)
    # Rows of 16 bytes stay so, and both products are of one kernel.
    Case.random(*shape, "fp32", seed=seed, majors=majors, pad=4).run(backend="cute", config=config)


@pytest.mark.parametrize("majors", ["tn", "nt"])
@pytest.mark.parametrize("shape", [(136, 8, 332), (67, 3, 149)], ids=["aligned", "odd"])
@pytest.mark.product(keep=1)
def test_few_columns(majors, shape, seed):
    config = COLUMNS_ALONG_K if majors[0] == "t" else COLUMNS_ACROSS
    Case.random(*shape, "fp32", seed=seed, majors=majors, batch=2).run(backend="cute", config=config + "/k2")


@pytest.mark.parametrize("k", [0, 1, 7])
@pytest.mark.parametrize("splits", ["", "/k2"])
@pytest.mark.product(keep=1)
def test_little_to_sum_and_the_whole_epilogue(splits, k, seed):
    options = {"c": True, "beta": 2.0, "alpha": 0.5, "bias": True, "activation": "silu", "batch": 3}
    if splits:
        case = Case.random(1, 130, k, "fp32", seed=seed, **options)
        along_k = case.problem().signature.b_major == "k"
        case.run(backend="cute", config=("vector/1x32x128/w1x8/s2/g1" if along_k else ACROSS) + splits)
    else:
        options["out_dtype"] = torch.bfloat16
        Case.random(1, 70, k, "fp32", seed=seed, majors="tt", **options).run(backend="cute", config=ACROSS)


@pytest.mark.parametrize("config", [ALONG_K + "/k2", COLUMNS_ALONG_K])
@pytest.mark.product(keep=1)
def test_results_and_reductions_of_programs(config):
    program = simplified(parse(REDUCED))
    generator = torch.Generator().manual_seed(1)
    m, n = (2, 70) if config.startswith("vector/2") else (70, 6)
    a, b, x = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((m, 144), (n, 144), (m, n)))
    got = cutegemm.gemm(a, b.t(), epilogue=program, operands=(x,), config=config, backend="cute")
    for result, value in zip(got, evaluate(program, a.double() @ b.t().double(), (x,)), strict=True):
        assert torch.equal(result.double(), value)


def test_a_column_goes_to_the_kernel_for_a_row(seed, capsys):
    case = Case.random(200, 1, 260, "fp32", seed=seed)
    cutegemm.explain(case.a, case.b, backend="cute")
    assert "vector/1x" in capsys.readouterr().out
    case.run(backend="cute")


@pytest.mark.parametrize("majors", ["tn", "nt"])
@pytest.mark.product(keep=1)
def test_the_rule_accepts_what_compiles_without_spills_and_runs(majors, seed):
    """A configuration of the space, drawn anew; loads of the matrix are as wide as its alignment."""
    rng, target, cute = random.Random(seed), arch.get("sm_90a"), backend.get("cute")
    space = [config for config in VectorConfig.space() if config.stages < 3 or config.thin > 2]
    found = 0
    while found < 1:
        config, k = rng.choice(space), rng.choice((512, 510))
        problem = Problem.of(512, 512, k, "fp32", majors=majors)
        if config.why_invalid(problem.signature, target) is not None:
            continue
        found += 1
        kernel = cute.build(problem.signature, config, target)
        assert not spilled(kernel.cubin)
        names = opcodes(kernel.cubin)
        bits = 32 * config.vectors(problem.signature)
        across, depth = config.held(config.along_k(problem.signature))
        loads = sum(count for name, count in names.items() if name.startswith("LDG.E.NA"))
        assert loads == 2 * config.stages * across * depth * 32 // bits, names
        shape = (config.bm + 1, config.bn + 1, 140 if k == 512 else 138)
        Case.random(*shape, "fp32", seed=seed, majors=majors).run(backend="cute", config=str(config))
