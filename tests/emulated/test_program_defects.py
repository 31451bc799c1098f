"""Epilogue programs whose kernels once went wrong."""

import pytest
import torch

import cutegemm

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
