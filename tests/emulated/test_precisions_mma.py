"""fp32 products by mma.sync from parts of the operands, in the emulator, as on an A100, on Ada and on Hopper.

tests/emulated/test_precisions.py asks this kernel too for integers, infinities and the ends of the range.
"""

from __future__ import annotations

import random

import pytest
import torch

import cutegemm
from cutegemm import backend
from cutegemm.choice import plan
from cutegemm.cute.ampere.config import AmpereConfig
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch
from cutegemm.problem import Problem, reference
from cutegemm.problem.dtypes import TABLE
from tests.examples import examples
from tests.problems import Case
from tuning import part_sums
from tuning.precision import INPUTS, by_sgemm, error, inputs

pytest.importorskip("llvmlite")

PRECISIONS = ("tf32x3", "bf16x6", "bf16x9")
SMALL = "sm80/64x32x32/w32x16/s2/g8"
CUTE = backend.get("cute")


def computed(a: torch.Tensor, b: torch.Tensor, precision: str, config: str | None = SMALL, **options) -> torch.Tensor:
    return cutegemm.gemm(a, b, precision=precision, backend="cute", config=config, **options)


def expected(a: torch.Tensor, b: torch.Tensor, precision: str) -> reference.Expected:
    """With the bound of sums that are promoted as often as these kernels do it."""
    return reference.expected(a, b, precision=precision, promotion=TABLE["fp32"].promoted[precision])


@pytest.mark.parametrize(
    ("target", "precision", "config", "options"),
    [
        ("sm_80", "bf16x6", "128x64x32/w64x32/s3/g8", {"majors": "tn", "pad": 1}),
        ("sm_80", "bf16x6", "64x64x32/w32x32/s2/g1/k3", {"majors": "nt", "batch": 2, "offset": 1}),
        ("sm_80", "bf16x9", "64x32x32/w32x16/s4/g8", {"majors": "tt", "c": True, "beta": -1.5, "bias": True}),
        ("sm_80", "tf32x3", "64x64x32/w32x32/s2/g8/k2", {"majors": "nn", "pad": 2, "activation": "silu"}),
        ("A6000", "tf32x3", "32x64x32/w16x32/s3/g8", {"majors": "nt", "alpha": -0.5, "batch": 3}),
        ("sm_89", "bf16x6", "32x32x32/w16x16/s5/g8/k5", {"majors": "tn", "c": True, "beta": 0.5, "offset": 3}),
        ("sm_89", "tf32x3", "128x64x32/w64x32/s2/g8", {"majors": "tt", "bias": True, "pad": 4}),
        ("H200", "bf16x6", "64x128x32/w64x32/s2/g8", {"majors": "nn", "pad": 3, "activation": "gelu"}),
        ("H200", "tf32x3", "64x32x32/w32x16/s8/g4/k3", {"majors": "nt", "batch": 2, "pad": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.product(keep=1)
def test_layouts_and_forms(target, precision, config, options, seed, monkeypatch):
    """Every major and alignment, batches, divided K, epilogues, on each GPU; ragged on every side."""
    monkeypatch.setenv("CUTEGEMM_ARCH", target)
    case = Case.random(137, 107, 91, "fp32", seed=seed, precision=precision, **options)
    case.run(backend="cute", config=f"sm80/{config}")


@pytest.mark.parametrize("config", [SMALL, f"{SMALL}/k3"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.product(keep=1)
def test_one_matrix_serves_a_batch_and_any_k(precision, config, seed, monkeypatch):
    """B is split once for all of the batch, A where it has no unit stride is copied first; nothing behind K is used,
    although rows of parts are padded with what nobody writes.
    """
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80")
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(3, 70, 80, generator=generator)[:, :, ::2]
    b = torch.randn(40, 33, generator=generator)
    for k in (0, 1, 31, 33):
        got, want = computed(a[..., :k], b[:k], precision, config), expected(a[..., :k], b[:k], precision)
        verdict = reference.check(got, want)
        assert verdict, (k, verdict.message)


@pytest.mark.slow
def test_programs_and_gradients(seed, monkeypatch):
    """Gate and up, with columns of both halves of B in one tile; gradients have the precision of their product."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80")
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(70, 36, generator=generator), torch.randn(36, 66, generator=generator)

    def gated(acc):
        gate, up = cutegemm.ops.halves(acc)
        return cutegemm.ops.silu(gate) * up

    for config in (SMALL, f"{SMALL}/k2"):
        got = cutegemm.gemm(a, b, epilogue=gated, precision="bf16x6", backend="cute", config=config)
        gate, up = (a.double() @ b.double()).chunk(2, -1)
        torch.testing.assert_close(got, (torch.nn.functional.silu(gate) * up).float(), rtol=1e-5, atol=1e-5)
    grad = torch.randn(70, 66, generator=generator)
    x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
    computed(x, y, "bf16x6", None).backward(grad)
    for found, left, right in ((x.grad, grad, b.T), (y.grad, a.T, grad)):
        verdict = reference.check(found, expected(left, right, "bf16x6"))
        assert verdict, verdict.message


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.product(keep=1)
def test_error_beside_sgemm(kind, seed, monkeypatch):
    """Largest and root mean square relative to |A||B|, beside a sum of fused multiply-adds in the order of K.

    bf16x6 has less error for every kind of input; tf32x3 about as much for uniform numbers and wide exponents, and less
    for the others: an A100's step of tf32 adds half as many products as Hopper's, so that it truncates twice as often.
    """
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80")
    a, b = inputs(kind, 64, 64, 264, seed)
    baseline = error(by_sgemm(a, b), a, b)
    near = 1.25 if kind in ("uniform", "exponents") else 0.9
    for precision, share in (("tf32x3", near), ("bf16x6", 0.9)):
        got = computed(a, b, precision)
        verdict = reference.check(got, expected(a, b, precision))
        assert verdict, verdict.message
        for mine, theirs in zip(error(got, a, b), baseline, strict=True):
            assert mine <= share * theirs


@pytest.mark.parametrize("target", ["sm_80", "H200"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.product(keep=1)
def test_the_model_of_the_sums_has_the_bits(precision, target, seed, monkeypatch):
    """`tuning.part_sums`, with one promotion a k tile and its smallest products first."""
    monkeypatch.setenv("CUTEGEMM_ARCH", target)
    for kind in ("normal", "exponents"):
        a, b = inputs(kind, 40, 24, 200, seed)
        tiles = part_sums.Tiles(a.numpy(), b.numpy(), precision, "mma", "hopper" if target == "H200" else "ampere")
        assert torch.equal(computed(a, b, precision), torch.from_numpy(part_sums.WAYS["plain"](tiles)))


@pytest.mark.parametrize("target", ["sm_80", "A6000", "sm_89", "H200"])
@pytest.mark.product(keep=1)
def test_what_the_rule_allows_is_right(target, seed, monkeypatch):
    """Random configurations of the tuner's space: those that the rule of validity takes compile and are right."""
    monkeypatch.setenv("CUTEGEMM_ARCH", target)
    rng, where = random.Random(f"{seed}/{target}"), arch.get(target)
    for number in range(examples(3)):
        precision, majors = rng.choice(PRECISIONS), rng.choice(("tn", "tt", "nn", "nt"))
        case = Case.random(
            *(rng.randint(1, 100) for _ in range(3)), "fp32", seed=seed + number, precision=precision, majors=majors,
            pad=rng.choice((0, 1, 4)), batch=rng.choice((None, 2)),
        )  # fmt: skip
        taken = [each for each in AmpereConfig.space(4) if CUTE.check(each, case.problem(), where) is None]
        splits = rng.choice(("", "", "/k2", "/k7"))
        case.run(backend="cute", config=f"{rng.choice(taken)}{splits}")


@pytest.mark.parametrize(
    ("config", "given", "reason"),
    [
        ("64x64x64/w32x32/s2/g8", {}, "bk is 64; sums promoted every 32 of K need a k tile of 32"),
        ("64x64x16/w32x32/s2/g8", {"precision": "tf32x3"}, "bk is 16; sums promoted every 32"),
        ("128x128x32/w64x64/s2/g8", {}, "128 threads with warp tiles 64x64; over 64 sums, promoted in as many more"),
        ("128x128x32/w32x32/s2/g8", {}, "512 threads with warp tiles 32x32; over 16 sums, promoted in as many more"),
        ("64x32x32/w64x32/s2/g8", {"precision": "tf32x3"}, "32 threads with warp tiles 64x32; over 32 sums, promoted"),
        ("128x64x32/w32x64/s2/g8", {"precision": "tf32x3"}, "128 threads with warp tiles 32x64; over 32 sums, promot"),
        ("128x128x32/w64x32/s4/g8", {}, "196608 B of shared memory; A100 gives a CTA 166912"),
        ("64x64x32/w32x32/s2/g8", {"out_dtype": "e4m3"}, "round no value to a type of one byte"),
    ],
)
def test_what_the_rule_refuses(config, given, reason):
    problem = Problem.of(4096, 4096, 4096, "fp32", **{"precision": "bf16x6", **given})
    assert reason in str(CUTE.check(CUTE.parse(f"sm80/{config}"), problem, arch.get("A100")))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.product(keep=1)
def test_who_gets_it(precision, monkeypatch):
    """GPUs before Hopper without asking; Hopper where a call names a configuration. `explain` says where none pays."""
    a = torch.randn(72, 64)
    for target, family, faster in (("A100", "sm80", None), ("A6000", "sm80", "38.7"), ("RTX 4090", "sm80", "82.6")):
        problem = Problem.of(1024, 1024, 1024, "fp32", precision=precision)
        choice = plan.choose(problem, arch.get(target), "cute")
        assert choice.config.family == family
        said = CUTE.passed_over(problem, arch.get(target))
        assert said is None if faster is None else f"precision='ieee' has up to {faster}" in str(said)
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    found = CUTE.candidates(Problem.of(64, 64, 64, "fp32", precision=precision).signature, arch.get("H200"))
    assert {config.family for config, _ in found} == {"sm90"}
    assert reference.check(computed(a, a.T, precision), expected(a, a.T, precision))
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.0"):
        plan.choose(Problem.of(64, 64, 64, "fp32", precision=precision), arch.from_properties(_Old()), "cute")


class _Old:
    """A V100, as torch describes it."""

    name, major, minor, multi_processor_count = "Tesla V100-SXM2-32GB", 7, 0, 80
