"""`ops.quantize`: its two results, its text, its bounds, and which kernels give them."""

from __future__ import annotations

import math
import re

import pytest
import torch

import cutegemm
from cutegemm import backend as backends
from cutegemm import ops
from cutegemm.errors import EpilogueError, UnsupportedError
from cutegemm.hardware.arch import get as arch
from cutegemm.problem import Problem, quantization
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program import bound, evaluate, quantized, text
from cutegemm.problem.program.graph import Input
from cutegemm.problem.program.trace import trace

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
CUTE, H200 = backends.get("cute"), arch("H200")


def same(got: tuple[torch.Tensor, torch.Tensor], value: torch.Tensor, dtype: torch.dtype) -> bool:
    values, scales = cutegemm.quantize(value, dtype, "blocks", backend="torch")
    as_bytes = [each.contiguous().view(torch.uint8) for each in (got[0], values)]
    return torch.equal(*as_bytes) and torch.equal(got[1].nan_to_num(-1.0), scales.nan_to_num(-1.0))


@pytest.mark.parametrize("dtype", FORMATS.values())
@pytest.mark.parametrize("columns", [1, 127, 128, 129, 300])
def test_a_product_and_its_quantization_in_one_call(dtype, columns):
    torch.manual_seed(columns)
    a, b = torch.randn(7, 20), torch.randn(20, columns)
    whole = cutegemm.gemm(a, b, backend="torch")
    got = cutegemm.gemm(a, b, epilogue=lambda acc: ops.quantize(acc, dtype), backend="torch")
    assert got[0].dtype == dtype
    assert got[1].shape == (7, -(-columns // 128))
    assert same(got, whole, dtype)
    assert same(ops.quantize(whole, dtype), whole, dtype)


def test_numbers_that_are_none():
    x = torch.tensor([[math.nan, 1.0, -3.0], [math.inf, 1.0, 2.0], [0.0, -0.0, 0.0]])
    for dtype in FORMATS.values():
        got = cutegemm.gemm(
            x, torch.eye(3), epilogue=lambda acc, x, to=dtype: ops.quantize(x, to), operands=(x,), backend="torch"
        )
        assert same(got, x, dtype)


def test_the_text_says_the_program():
    program = trace(lambda acc: ops.quantize(ops.silu(acc), "e4m3"), ())
    assert program.text == (
        "def epilogue(acc) -> (e4m3, None): t0 = silu(acc); t1 = block_scale_e4m3(t0); return per_scale(t0, t1), "
        "row_blocks(t1)"
    )
    assert text.parse(program.text) == program
    with pytest.raises(ValueError, match="row_blocks takes block_scale_e4m3"):
        text.parse("def epilogue(acc): return acc, row_blocks(acc)")


def test_what_kernels_read_of_it():
    found = quantized.read(trace(lambda acc: ops.quantize(ops.silu(acc), "e5m2"), ()))
    assert found is not None
    assert (found.program.text, found.dtype, found.scales) == ("def epilogue(acc): return silu(acc)", "e5m2", 1)
    alone = quantized.read(trace(lambda acc: ops.quantize(acc, "int8")[0], ()))
    assert alone is not None
    assert alone.scales is None
    others = (
        lambda acc: (*ops.quantize(acc, "int8"), ops.row_sum(acc)),
        lambda acc: (acc, ops.quantize(acc, "int8")[1]),
        lambda acc: ops.quantize(acc, "int8")[0] * 2.0,
        lambda acc: (ops.cast(ops.quantize(acc, "int8")[0], "e4m3"), ops.quantize(acc, "int8")[1]),
        lambda acc: ops.quantize(ops.quantize(acc, "int8")[0], "int8"),
    )
    assert all(quantized.read(trace(each, ())) is None for each in others)


def test_a_scale_of_ones_own_is_no_block():
    """A program that a text alone can say: kernels refuse it, and it records no gradient."""
    program = text.parse("def epilogue(acc) -> fp32: return per_scale(acc, 2.0)")
    a, b = torch.ones(4, 64).half(), torch.ones(64, 128).half()
    assert torch.equal(cutegemm.gemm(a, b, epilogue=program, backend="torch"), torch.full((4, 128), 32.0))
    with pytest.raises(UnsupportedError, match=r"the two results of ops[.]quantize"):
        cutegemm.gemm(a, b, epilogue=program, backend="cute")
    with pytest.raises(ValueError, match="have no gradient"):
        cutegemm.gemm(a.requires_grad_(), b, epilogue=program)


def test_a_program_that_rounds_first():
    program = trace(lambda acc, x: acc * x, (Input("x0", "fp32", n=True),))
    made = quantized.quantizing(program, "bf16", "e4m3")
    asked = trace(lambda acc, x: ops.quantize(ops.cast(acc * x, "bf16"), "e4m3"), (Input("x0", "fp32", n=True),))
    assert [each.node for each in made.outputs] == [each.node for each in asked.outputs]
    assert made.nodes == asked.nodes


@pytest.mark.parametrize("dtype", FORMATS)
def test_bounds_enclose_what_a_kernel_may_give(dtype):
    torch.manual_seed(3)
    program = trace(lambda acc: ops.quantize(acc, dtype), ())
    acc, error = torch.randn(6, 300).double() * 100, torch.full((6, 300), 1e-3).double()
    acc[2, 5], acc[3, :] = math.nan, 0.0
    values, scales = bound.bounds(program, acc, error, ())
    for seed in range(5):
        torch.manual_seed(seed)
        moved = (acc + error * (2 * torch.rand(6, 300) - 1)).float()
        got = evaluate.evaluate(program, moved, (), dtype=torch.float32)
        stored = quantization.values_of(moved, got[1], quantization.NAMED[dtype])
        assert bound.check(stored, values).ok
        assert bound.check(got[1], scales).ok
    assert not bound.check(got[1] * 1.01, scales).ok


def problem(program, **extents):
    return Problem.of(
        256, 512, 256, epilogue=Epilogue(custom=program), out_dtype=str(program.outputs[0].dtype), **extents
    )


def test_which_configurations_give_it():
    plain = quantized.quantizing(trace(lambda acc: acc, ()), "bf16", "e4m3")
    gated = quantized.quantizing(trace(ops.swiglu, ()), "bf16", "e4m3")

    def why(text: str, program=plain) -> str | None:
        return CUTE.check(CUTE.parse(text), problem(program), H200)

    assert why("sm90/128x128x64/coop2/c1x1/s4/serp8/pdl") is None
    assert why("sm90/128x256x64/coop2/c1x1/s4/serp8/pdl", gated) is None
    assert "64 columns of results" in str(why("sm90/128x64x64/coop2/c1x1/s4/serp8/pdl"))
    assert "64 columns of results" in str(why("sm90/128x128x64/coop2/c1x1/s4/serp8/pdl", gated))
    assert "no swap" in str(why("sm90/128x128x64/coop2/c1x1/s4/serp8/swap/pdl"))
    assert "without parts of K" in str(why("sm90/128x128x64/coop2/c1x1/s4/row/k2"))
    assert "only sm90 has kernels for ops.quantize" in str(why("sm80/128x128x32/w64x64/s3/g4"))


def test_programs_that_no_kernel_gives():
    assert quantized.why_other(quantized.quantizing(trace(lambda acc: acc, ()), "bf16", "e4m3")) is None
    more = trace(lambda acc: (*ops.quantize(acc, "e4m3"), ops.row_sum(acc)), ())
    assert "no others" in str(quantized.why_other(more))


@pytest.mark.parametrize(
    ("dtype", "columns", "operand", "said"),
    [
        (torch.bfloat16, 136, None, "ops.quantize needs rows of D of 16-byte multiples"),
        (torch.bfloat16, 128, torch.zeros(4, 128), "ops.quantize beside the matrix operand x0"),
        (torch.float32, 128, None, "only sm90 has kernels for ops.quantize"),
    ],
)  # fmt: skip
def test_a_call_that_no_kernel_serves_says_why(dtype, columns, operand, said):
    a, b = torch.ones(4, 64, dtype=dtype), torch.ones(columns, 64, dtype=dtype).t()

    def epilogue(acc, *more):
        return ops.quantize(acc + more[0] if more else acc, "e4m3")

    operands = () if operand is None else (operand,)
    with pytest.raises(UnsupportedError, match=re.escape(said)):
        cutegemm.gemm(a, b, epilogue=epilogue, operands=operands, backend="cute", precision="ieee")


def test_what_is_refused():
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    with pytest.raises(EpilogueError, match=r"quantize: dtype torch[.]float16, accepted are e4m3, e5m2, int8"):
        cutegemm.gemm(a, b, epilogue=lambda acc: ops.quantize(acc, torch.float16))
    with pytest.raises(EpilogueError, match=r"the scales of ops[.]quantize are a result of their own"):
        cutegemm.gemm(a, b, epilogue=lambda acc: (q := ops.quantize(acc, torch.int8), q[1] * 2)[1])
    with pytest.raises(ValueError, match=r"ops[.]quantize have no gradient"):
        cutegemm.gemm(a.requires_grad_(), b, epilogue=lambda acc: ops.quantize(acc, torch.int8))
    ends = torch.tensor([2, 6], dtype=torch.int32)
    for place in (slice(None), slice(1)):
        with pytest.raises(ValueError, match=r"ops[.]quantize takes blocks of 128 columns of a row"):
            cutegemm.grouped_gemm(
                torch.randn(2, 4, 8), b, ends, epilogue=lambda acc, place=place: ops.quantize(acc, torch.int8)[place]
            )
    with pytest.raises(EpilogueError, match=r"quantize: x has shape \(5,\), accepted are"):
        ops.quantize(torch.ones(5), torch.int8)
    with pytest.raises(UnsupportedError, match=r"need 16 bytes|16-byte aligned"):
        cutegemm.gemm(a.detach().half(), b.half(), epilogue=lambda acc: ops.quantize(acc, torch.int8), backend="cute")
