"""float64 operands: the reference of twice as many digits, what goes with them, gradients, torch's backend."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

import cutegemm
from cutegemm.choice import heuristics
from cutegemm.hardware import arch
from cutegemm.problem import Problem, double_double, reference
from cutegemm.problem import text as problem_text
from cutegemm.problem.epilogue import Epilogue
from tests.problems import Case

DOUBLE = torch.float64


def exact(a: torch.Tensor, b: torch.Tensor) -> list[list[Fraction]]:
    rows, columns = ([[Fraction(x) for x in row] for row in each.tolist()] for each in (a, b.t()))
    return [[sum((x * y for x, y in zip(row, column, strict=True)), Fraction()) for column in columns] for row in rows]


def test_sums_have_twice_the_digits(seed):
    """Of numbers of any size that nearly cancel, against rational arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator, dtype=DOUBLE) for shape in ((5, 40), (40, 4)))
    a *= 2.0 ** torch.randint(-30, 31, a.shape, generator=generator)
    a[:, 20:], b[20:] = -a[:, :20], b[:20] * (1 + 2.0**-45)
    got, plain = double_double.matmul(a, b), a @ b
    u, k = 2.0**-53, 40
    magnitude = a.abs() @ b.abs()
    wrong = 0
    for i, row in enumerate(exact(a, b)):
        for j, value in enumerate(row):
            allowed = u * abs(value) + Fraction((k * u) ** 2) * 2 * Fraction(magnitude[i, j].item())
            assert abs(Fraction(got[i, j].item()) - value) <= allowed
            wrong += abs(Fraction(plain[i, j].item()) - value) > allowed
    assert wrong > 10  # which a plain product does not reach


def test_the_bound_holds_what_it_must_and_no_more(seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator, dtype=DOUBLE) for shape in ((8, 200), (200, 8)))
    want = reference.expected(a, b, alpha=0.1)
    assert reference.check(0.1 * (a @ b), want)
    assert not reference.check((a.float() @ b.float()).double() * 0.1, want)
    assert not reference.check(0.1 * (a @ b) + 1e-11, want)
    assert (want.bound < 1e-12).all()
    a[0, 0] = float("inf")
    special = reference.expected(a, b)
    assert torch.equal(special.value[0], (a @ b)[0])


def test_torch_serves_float64_in_float64(seed):
    options = {"c": True, "beta": 0.3, "alpha": 0.1, "bias": True, "batch": 2}
    Case.random(9, 7, 33, "fp64", seed=seed, **options).run()
    a = torch.full((3, 3), 2.0**-30, dtype=DOUBLE) + 1
    assert torch.equal(cutegemm.gemm(a, torch.eye(3, dtype=DOUBLE)), a)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activation": "gelu"}, ValueError, "activation: got 'gelu'; .* with float64 operands accepted is None"),
        ({"epilogue": lambda acc: acc * 2.0}, TypeError, "programs compute in fp32"),
        ({"out_dtype": torch.float32}, TypeError, "out_dtype: .* with operands of torch.float64 is torch.float64"),
        ({"bias": torch.ones(4)}, TypeError, "bias: got dtype torch.float32, accepted with"),
        ({"c": torch.ones(4, 4), "beta": 1.0}, TypeError, "c: got dtype torch.float32, accepted with"),
        ({"out": torch.ones(4, 4)}, TypeError, "out: got dtype torch.float32, accepted with"),
        ({"precision": "tf32"}, ValueError, "precision: got 'tf32' for fp64 operands"),
        ({"backend": "cutlass2x"}, cutegemm.UnsupportedError, "fp64"),
        ({"backend": "cute", "config": "simt/64x64x8/w32x32/s3/g8"}, cutegemm.UnsupportedError, "fp64"),
    ],
)  # fmt: skip
def test_what_goes_with_float64(options, error, message):
    a = torch.ones(4, 4, dtype=DOUBLE)
    with pytest.raises(error, match=message):
        cutegemm.gemm(a, a, **options)


def test_float64_goes_with_nothing_else():
    a, wide = torch.ones(4, 4), torch.ones(4, 4, dtype=DOUBLE)
    for options in ({"c": wide, "beta": 1.0}, {"bias": wide[0]}, {"out": wide}, {"out_dtype": DOUBLE}):
        with pytest.raises(TypeError, match=r"accepted are torch.float16, torch.bfloat16, torch.float32"):
            cutegemm.gemm(a, a, **options)
    with pytest.raises(ValueError, match=r"out_dtype: got torch.float64 with operands of torch.float32"):
        Problem.of(4, 4, 4, "fp32", out_dtype="fp64")
    with pytest.raises(ValueError, match="activations are computed in fp32"):
        Problem.of(4, 4, 4, "fp64", epilogue=Epilogue(activation="relu"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_gradients_in_both_modes():
    torch.manual_seed(0)
    a, b, c, bias = (torch.randn(s, dtype=DOUBLE, requires_grad=True) for s in ((3, 5), (5, 4), (1, 4), (4,)))

    def product(a, b, c, bias):
        return cutegemm.gemm(a, b, c, alpha=0.7, beta=-1.3, bias=bias)

    assert torch.autograd.gradcheck(product, (a, b, c, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, (a, b, c, bias))


def test_the_choice_follows_the_instructions_of_the_gpu():
    problem = Problem.of(4096, 4096, 4096, "fp64")
    assert problem_text.parse(str(problem)) == problem
    for gpu, instruction in (("H200", "i16x4"), ("A100", "i8x4")):
        backend, config, _ = heuristics.untuned(problem, arch.get(gpu))
        assert (backend, str(config).split("/")[-1]) == ("cute", instruction)
    cute = cutegemm.backend.get("cute")
    wide = cute.parse("dmma/64x64x16/w32x32/s3/g8/i16x8")
    assert cute.parse(str(wide)) == wide
    assert "8x4" in cute.check(wide, problem, arch.get("A100"))
    with pytest.raises(ValueError, match=r"dmma/.*iINSTRUCTION, INSTRUCTION one of"):
        cute.parse("dmma/64x64x16/w32x32/s3/g8")
