"""float64 products on the GPU: against sums of twice the digits, exact on integers, against cuBLAS's error."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.problem import reference
from tests.problems import MAJORS, Case

pytestmark = pytest.mark.gpu

DOUBLE = torch.float64
SHAPES = ((1, 1, 1), (1, 257, 64), (255, 1, 33), (7, 11, 13), (129, 257, 65), (256, 256, 256), (300, 200, 1003))


@pytest.fixture
def configs() -> tuple[str, ...]:
    old = ("dmma/128x128x16/w64x32/s4/g8/i8x4", "dmma/32x32x32/w16x16/s2/g1/i8x4")
    if torch.cuda.get_device_capability() < (9, 0):
        return old
    return (
        *old,
        *(f"dmma/64x64x16/{name}" for name in ("w32x32/s3/g8/i16x4", "w32x32/s3/g8/i16x8", "w32x16/s3/g8/i16x16")),
    )


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_shapes_and_majors(shape, majors, seed):
    Case.random(*shape, "fp64", majors=majors, seed=seed, device="cuda").run(backend="cute")


def test_every_instruction(configs, seed):
    for config in configs:
        for options in ({}, {"majors": "nt", "c": True, "beta": 0.3, "alpha": 0.1, "bias": True, "batch": 3, "pad": 1}):
            Case.random(133, 260, 517, "fp64", seed=seed, device="cuda", **options).run(backend="cute", config=config)


def test_integers_below_2_to_the_53_are_exact(configs, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for k in (64, 4099):
        largest = int((2.0**53 / k) ** 0.5) - 1
        a, b = (
            torch.randint(-largest, largest + 1, shape, generator=generator, device="cuda").double()
            for shape in ((130, k), (k, 70))
        )
        # int64 products on the CPU: exact, as no sum leaves 2^53.
        want = (a.cpu().long() @ b.cpu().long()).double()
        for config in configs:
            assert torch.equal(cutegemm.gemm(a, b, backend="cute", config=config).cpu(), want)


@pytest.mark.parametrize("spread", [0, 40])
def test_the_error_is_no_larger_than_that_of_cublas(spread, seed):
    """Root mean square, relative to |A||B|, of normal numbers and of exponents over 2^-40 .. 2^40.

    K is short enough that cuBLAS does not split it: with K = 2048 it does, and each of four shorter sums errs by half.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator, device="cuda", dtype=DOUBLE) for shape in ((512, 512), (512, 384)))
    if spread:
        a *= 2.0 ** torch.randint(-spread, spread + 1, a.shape, generator=generator, device="cuda")
    want = reference.expected(a, b)
    magnitude = a.abs() @ b.abs()

    def error(d: torch.Tensor) -> float:
        return float((((d - want.value) / magnitude) ** 2).mean().sqrt())

    assert error(cutegemm.gemm(a, b, backend="cute")) <= 1.1 * error(torch.mm(a, b))


def test_special_numbers(seed):
    a, b = torch.randn(64, 64, device="cuda", dtype=DOUBLE), torch.randn(64, 64, device="cuda", dtype=DOUBLE)
    a[0, 0], a[1, 1], b[2, 2] = float("inf"), float("nan"), 5e-324
    got, want = cutegemm.gemm(a, b, backend="cute"), a.cpu() @ b.cpu()
    assert torch.equal(got.cpu().isnan(), want.isnan())
    assert torch.equal(got.cpu().isinf(), want.isinf())
    tiny = torch.full((8, 8), 2.0**-540, device="cuda", dtype=DOUBLE)
    assert (cutegemm.gemm(tiny, tiny, backend="cute") == 8 * 2.0**-1080 + 0.0).all()  # subnormal: 0 in fp64
    small = torch.full((8, 8), 2.0**-530, device="cuda", dtype=DOUBLE)
    assert (cutegemm.gemm(small, small, backend="cute") == 2.0**-1057).all()  # subnormal, and kept


def test_gradients():
    a, b = (torch.randn(s, device="cuda", dtype=DOUBLE, requires_grad=True) for s in ((5, 7), (7, 4)))
    assert torch.autograd.gradcheck(lambda a, b: cutegemm.gemm(a, b, backend="cute"), (a, b))
