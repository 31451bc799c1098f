"""Split-K of the kernels without TMA, in the emulator: parts of any size, every epilogue, one order of the sum."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.emulator import engine
from cutegemm.hardware import arch as arch_table
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from tests import exact
from tests.problems import Case

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.usefixtures("fresh_timing")

SIMT, SLICED = "simt/64x64x8/w32x32/s3/g8/k3", "simt/32x32x32/w32x32/s3/g1/x2/k2"
SM80 = "sm80/64x32x32/w32x16/s3/g8/k4"
EVERYTHING = (
    "def epilogue(acc, x0: fp32[M, N]): t0 = acc + x0; return t0, -acc, row_sum(acc + 3.0), column_max(t0 - 500.0)"
)


@pytest.mark.parametrize(
    ("config", "dtype", "majors", "shape"),
    [
        (SIMT, "fp32", "tn", (72, 40, 136)), (SIMT, "fp32", "nt", (67, 45, 83)),
        (SLICED, "fp32", "nn", (72, 40, 136)),
        (SM80, "fp16", "nt", (67, 45, 83)), (SM80, "bf16", "nn", (33, 35, 97)),
    ],
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_majors_and_alignment(config, dtype, majors, shape, seed):
    exact.run(exact.case(*shape, dtype, seed=seed, majors=majors), backend="cute", config=config)
    Case.random(*shape, dtype, seed=seed, majors=majors).run(backend="cute", config=config)


@pytest.mark.parametrize("k", [0, 1, 8, 9, 17])
@pytest.mark.product(keep=1)
def test_fewer_k_tiles_than_splits(k, seed):
    """Some parts of the sum are then of nothing."""
    options = {"c": True, "beta": 2.0, "bias": True, "activation": "silu", "batch": 3, "pad": 3, "offset": 1}
    Case.random(33, 36, k, "fp32", seed=seed, **options).run(backend="cute", config=SIMT.replace("k3", "k5"))


@pytest.mark.parametrize("config", [SIMT, SLICED])
@pytest.mark.product(keep=1)
def test_results_and_reductions_of_programs(config):
    program = simplified(parse(EVERYTHING))
    generator = torch.Generator().manual_seed(1)
    a, b, x = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((70, 44), (44, 72), (70, 72)))
    got = cutegemm.gemm(a, b, epilogue=program, operands=(x,), config=config, backend="cute")
    for result, value in zip(got, evaluate(program, a.double() @ b.double(), (x,)), strict=True):
        assert torch.equal(result.double(), value)


@pytest.mark.parametrize(("config", "dtype"), [(SLICED, torch.float32), (SM80, torch.bfloat16)])
@pytest.mark.parametrize("gated", [ops.swiglu, ops.swiglu_pairs])
@pytest.mark.product(keep=1)
def test_gated_programs(config, dtype, gated):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((36, 64), (64, 80)))
    got = cutegemm.gemm(a, b, epilogue=gated, config=config, backend="cute")
    assert torch.equal(got, cutegemm.gemm(a, b, epilogue=gated, config=config, backend="cute"))
    want = cutegemm.gemm(a, b, epilogue=gated, backend="torch")
    assert (got.double() - want.double()).abs().max() <= want.abs().max() * (
        2.0**-7 if dtype != torch.float32 else 1e-5
    )


def test_the_parts_are_added_in_their_order_whoever_comes_last(monkeypatch):
    """Each part's sum is one number, of which no two orders of addition have the same rounded sum. Fewer CTAs run at a
    time than a tile has parts, so that slices are abandoned."""
    monkeypatch.setattr(engine, "RESIDENT_CTAS", 0)
    monkeypatch.setattr(engine, "WAVE_THREADS", 5 * 128)
    parts = torch.tensor([1.0, 2.0**24, 1.0, -(2.0**24), 0.5, 2.0**25, -1.0, 3.0])
    a = torch.zeros(72, 64)
    a[:, ::8] = parts
    expected, backwards = torch.zeros(()), torch.zeros(())
    for part in parts:
        expected = expected + part
    for part in parts.flip(0):
        backwards = backwards + part
    assert expected != backwards
    for timing in ("1", "2"):
        monkeypatch.setenv("CUTEGEMM_EMULATOR_SEED", timing)
        got = cutegemm.gemm(a, torch.ones(64, 40), backend="cute", config=SIMT.replace("k3", "k8"))
        assert torch.equal(got, expected.expand(72, 40))


@pytest.mark.parametrize("abandoned", [False, True])
@pytest.mark.product(keep=1)
def test_more_parts_than_a_state_word_has_slices(abandoned, monkeypatch, seed):
    """The first 32 splits add up all parts; the others leave, and the last to arrive takes what was abandoned."""
    if abandoned:
        monkeypatch.setattr(engine, "RESIDENT_CTAS", 0)
        monkeypatch.setattr(engine, "WAVE_THREADS", 5 * 128)
    config = SIMT.replace("k3", "k37")
    k = 37 * 8 - 3
    exact.run(exact.case(67, 40, k, "fp32", seed=seed, majors="tn"), backend="cute", config=config)
    a = torch.zeros(64, k)
    a[:, ::8] = torch.tensor([1.0, 2.0**24, 1.0, -(2.0**24)] * 9 + [0.5])
    expected = torch.zeros(())
    for part in a[0, ::8]:
        expected = expected + part
    got = cutegemm.gemm(a, torch.ones(64, k).t(), backend="cute", config=config)
    assert torch.equal(got, expected.expand(64, 64))


def test_what_configurations_say_of_splits():
    arch = arch_table.get("sm_90a")
    cute = cutegemm.backend.get("cute")
    for text in (SIMT, SLICED, SM80):
        config = cute.parse(text)
        assert str(config) == text
        assert config.splits > 1
    problem = Case.random(100, 130, 64, "fp32", seed=0).problem()
    words, parts = cute.parse(SIMT).workspace_bytes(problem, arch)
    assert (words, parts) == (128, 2 * 3 * 3 * 64 * 64 * 4)
    assert "129 splits of K; accepted are 1 to 128" in cute.check(cute.parse(SIMT[:-1] + "129"), problem, arch)
