"""Programs that are act(alpha acc + beta C + bias) are known as such, and nothing else is."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm import backend as backends
from cutegemm import ops
from cutegemm.hardware import arch
from cutegemm.problem import Problem, program_request
from cutegemm.problem.epilogue import ACTIVATIONS, Epilogue
from cutegemm.problem.program.terms import Terms, terms_of

VECTOR, MATRIX = torch.ones(24), torch.ones(8, 24)
BIAS, C = (VECTOR,), (MATRIX,)


@pytest.mark.parametrize(
    ("function", "operands", "terms"),
    [
        (lambda acc: acc, (), Terms(1.0, 0.0, None, None, None)),
        (lambda acc: ops.gelu(acc), (), Terms(1.0, 0.0, None, None, "gelu")),
        (lambda acc: acc * 0.5, (), Terms(0.5, 0.0, None, None, None)),
        (lambda acc, s: s * acc, (2.0,), Terms(0, 0.0, None, None, None)),
        (lambda acc, x: ops.relu(x + acc), BIAS, Terms(1.0, 0.0, None, 0, "relu")),
        (lambda acc, x: acc + x, C, Terms(1.0, 1.0, 0, None, None)),
        (lambda acc, x, s, y: ops.silu(acc + s * x + y), (MATRIX, 3.0, VECTOR), Terms(1.0, 1, 0, 2, "silu")),
    ],
)
def test_terms_are_read_off(function, operands, terms):
    assert terms_of(cutegemm.trace_epilogue(function, operands), ACTIVATIONS) == terms


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        (lambda acc, x, y: (acc + y) + x, (MATRIX, VECTOR)),  # added up in another order
        (lambda acc, x: ops.gelu(acc) + x, C),
        (lambda acc, x: acc * x, BIAS),
        (lambda acc, x: acc + x * x, C),
        (lambda acc: (acc, acc), ()),
        (lambda acc, x: acc + x, (torch.ones(8, 1),)),
        (lambda acc, x: acc + x, (torch.ones(24, dtype=torch.int32),)),
        (lambda acc, x: acc + x, (2.0,)),
        (lambda acc: ops.tanh(acc), ()),
        (ops.swiglu, ()),
    ],
)
def test_others_are_programs(function, operands):
    assert terms_of(cutegemm.trace_epilogue(function, operands), ACTIVATIONS) is None


def described(function, operands):
    a, b = torch.ones(8, 16), torch.ones(16, 24)
    return program_request.describe(a, b, function, operands, None, None, None)


def test_an_empty_program_is_the_plain_problem():
    """So that it has the plain kernel: the same machine code, the same measured winner."""
    asked = described(lambda acc: acc, ())
    assert asked.problem.epilogue == Epilogue()
    assert asked.problem.signature == Problem.of(8, 24, 16, "fp32", majors="tt").signature


def test_a_bias_that_is_not_contiguous_stays_a_program():
    assert described(lambda acc, x: acc + x, (torch.ones(48)[::2],)).problem.epilogue.custom is not None


def test_a_beta_of_zero_still_reads_the_operand():
    """`gemm(beta=0)` never reads C; an epilogue says 0 * x, which is NaN for an infinity."""
    poisoned = torch.full((8, 24), float("inf"))
    for backend in ("torch", "cute"):
        a, b = torch.ones(8, 16), torch.ones(16, 24)
        got = cutegemm.gemm(a, b, epilogue=lambda acc, x: acc + 0.0 * x, operands=(poisoned,), backend=backend)
        assert bool(got.isnan().all())


@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_terms_give_what_the_function_says(scale):
    a, b = torch.randn(8, 16), torch.randn(16, 24)

    def function(acc, c, beta, bias):
        return ops.relu(acc * 0.5 + c * beta + bias)

    operands = (torch.randn(8, 24), scale, torch.randn(24))
    want = torch.relu(a @ b * 0.5 + operands[0] * scale + operands[2])
    for backend in ("torch", "cute"):
        got = cutegemm.gemm(a, b, epilogue=function, operands=operands, backend=backend)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_backends_without_programs_serve_their_own_terms():
    h200 = arch.get("H200")
    biased, added = described(lambda acc, x: ops.relu(acc + x), BIAS), described(lambda acc, x: 2.0 * acc + x, C)
    assert backends.get("cutlass2x").supports(biased.problem, h200) is None
    assert backends.get("legacy").supports(added.problem, h200) is None
    other = described(lambda acc, x: acc * x, C).problem
    for name in ("cutlass2x", "legacy"):
        assert "computes no epilogue programs" in str(backends.get(name).supports(other, h200))
