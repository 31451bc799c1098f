"""Calls with an epilogue program that once went wrong, on backend "torch" or without a kernel."""

import pytest
import torch

import cutegemm

A, B = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)


def scale(acc, s):
    return acc * s


def test_an_int_beyond_int32_is_refused_after_a_call_with_a_small_one():
    assert torch.equal(cutegemm.gemm(A, B, epilogue=scale, operands=(3,), backend="torch"), 3 * (A @ B))
    with pytest.raises(ValueError, match=r"operands\[0\]: got 1099511627776, which int32 cannot hold"):
        cutegemm.gemm(A, B, epilogue=scale, operands=(2**40,), backend="torch")
