"""Epilogue programs whose kernels once went wrong."""

import pytest
import torch

import cutegemm
from cutegemm import ops

A, B = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_program_that_reads_a_bias_takes_a_single_number(shape, monkeypatch):
    """It was read as a contiguous bias of N numbers."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80")
    program = cutegemm.trace_epilogue(lambda acc, bias: acc + bias, operands=(torch.ones(8),))
    for backend in ("torch", "cute"):
        got = cutegemm.gemm(A, B, epilogue=program, operands=(torch.full(shape, 2.0),), backend=backend)
        assert torch.equal(got, A @ B + 2)


def test_the_remainder_has_the_sign_of_the_divisor(monkeypatch):
    """Kernels gave -7 % 3 as -1."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80")
    x = torch.tensor([-(2**31), -7, -1, 0, 5, 6, 2**30, 2**31 - 1], dtype=torch.int32)
    y = torch.tensor([3, -3, 2**31 - 1, -(2**31), 7, -7, 1, -2], dtype=torch.int32)[:, None]

    def remainders(acc, x, y):
        return acc + x % y, acc + x % 8, acc + -7 % y

    a, b = torch.zeros(8, 16), torch.zeros(16, 8)
    results = cutegemm.gemm(a, b, epilogue=remainders, operands=(x, y), backend="cute")
    for got, want in zip(results, (x % y, (x % 8).expand(8, 8), (-7 % y).expand(8, 8)), strict=True):
        assert torch.equal(got, want.float())


ENDS = [-(2**31), -7, -1, 0, 1, 7, 2**31 - 1, 100]
QUOTIENTS = (
    lambda x, y: (x // y + 2**31) % 2**32 - 2**31 if y else 0,
    lambda x, y: x % y if y else 0,
    lambda x, y: 7 // y if y else 0,
    lambda x, y: 7 % y if y else 100,
)
"""What `_quotients` gives, of Python's numbers."""


def _quotients(acc, x, y):
    return acc + x // y, acc + x % y, acc + 7 // y, ops.where(y == 0, 100.0, ops.cast(7 % y, torch.float32))


def _quotients_by_zero(acc, x):
    return _quotients(acc, x, 2 * ops.row() - ops.row() - ops.row())  # LLVM finds out that this is 0


@pytest.mark.parametrize("backend", ["torch", "cute"])
@pytest.mark.parametrize("of", ["tensor", "number", "zero"])
@pytest.mark.product(keep=2)
def test_a_division_of_integers_by_zero_is_defined(of, backend, monkeypatch):
    """Kernels left it to LLVM, which took the divisor for another number in the whole epilogue: `y == 0` was false, and
    where the divisor was surely 0, nothing was stored. -2^31 // -1 was undefined too.
    """
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80")
    x = torch.tensor(ENDS, dtype=torch.int32)
    calls = {
        "tensor": [(_quotients, (x, x[:, None]), ENDS)],
        "number": [(_quotients, (x, y), [y] * 8) for y in (0, -1, 3)],
        "zero": [(_quotients_by_zero, (x,), [0] * 8)],
    }
    a, b = torch.zeros(8, 16), torch.zeros(16, 8)
    for epilogue, operands, divisors in calls[of]:
        results = cutegemm.gemm(a, b, epilogue=epilogue, operands=operands, backend=backend)
        for got, want in zip(results, QUOTIENTS, strict=True):
            assert torch.equal(got, torch.tensor([[float(want(each, y)) for each in ENDS] for y in divisors]))


@pytest.mark.parametrize("shape", [(32,), (8, 1), ()])
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(
    "program", [lambda acc, x: acc * x, lambda acc, x: ops.cast(acc * x, torch.float32), lambda acc, x: acc + x]
)
@pytest.mark.product(keep=2)
def test_gradients_that_are_summed_may_be_larger_than_fp16_holds(program, groups, shape, seed):
    """The elements of what is summed were stored in fp16, where 4096 times an accumulator is infinite."""
    torch.manual_seed(seed)
    a, b = torch.randn(8, 256).half(), torch.randn(256, 32).half()
    found = []
    for backend in ("cute", "torch"):
        x = torch.full(shape, 0.01, requires_grad=True)
        options = {"epilogue": program, "operands": (x,), "backend": backend}
        ends = torch.tensor([8], dtype=torch.int32)
        d = cutegemm.grouped_gemm(a, b[None], ends, **options) if groups else cutegemm.gemm(a, b, **options)
        found += torch.autograd.grad(d, x, torch.full_like(d, 4096.0))
    assert bool(found[0].isfinite().all())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3 * float(found[1].abs().max()))
