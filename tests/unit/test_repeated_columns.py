"""`ops.repeated`: operands whose columns repeat along those of D, traced, refused, computed and differentiated."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import cutegemm
from cutegemm import EpilogueError, ops
from cutegemm.problem.epilogue import ACTIVATIONS, Epilogue
from cutegemm.problem.problem import Problem
from cutegemm.problem.program.terms import terms_of
from cutegemm.problem.program.text import parse
from cutegemm.problem.text import parse as parse_problem


def scaled(acc, x):
    return acc * ops.repeated(x, 16)


def drawn(*shape: int, **options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, **options)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((40, 16), "M, 16"),
        ((16,), "16"),
        ((3, 40, 16), "L, M, 16"),
        ((3, 1, 16), "L, 1, 16"),
        ((40, 1), "M, 1"),
        ((), "1"),
    ],
)
def test_the_text_says_how_many_columns_repeat(shape, kind):
    program = cutegemm.trace_epilogue(scaled, operands=(torch.zeros(shape),))
    assert f"x0: fp32[{kind}]" in program.text
    assert parse(program.text) == program
    program = replace(program, outputs=(program.outputs[0]._replace(dtype="fp32"),))
    posed = Problem.of(40, 64, 32, "fp32", batch=3, epilogue=Epilogue(custom=program))
    assert parse_problem(str(posed)) == posed


@pytest.mark.parametrize("shape", ["M, 1, 16", "N, 16", "0", "-3", "M, 16.0", "M, 99999999999"])
def test_no_other_text_is_read(shape):
    with pytest.raises(ValueError, match="shape"):
        parse(f"def epilogue(acc, x0: bf16[{shape}]): return acc + x0")


@pytest.mark.parametrize("n", [64, 50, 16, 8])
@pytest.mark.parametrize("shape", [(24, 16), (16,), (2, 24, 16), (2, 1, 16), (24, 1)])
def test_it_is_what_torch_repeats(n, shape):
    a, b, x = drawn(2, 24, 32), drawn(32, n), drawn(*shape)
    whole = x.repeat(*[1] * (x.dim() - 1), math.ceil(n / 16))[..., :n] if shape[-1] == 16 else x
    torch.testing.assert_close(cutegemm.gemm(a, b, epilogue=scaled, operands=(x,)), (a @ b) * whole)


@pytest.mark.parametrize("shape", [(24, 16), (16,), (24, 1)])
@pytest.mark.parametrize("n", [48, 40])
def test_gradients_of_columns_that_repeat_are_added_up(shape, n):
    a, b, x = (each.requires_grad_() for each in (drawn(24, 8), drawn(8, n), drawn(*shape)))

    def product(a, b, x):
        return cutegemm.gemm(a, b, epilogue=lambda acc, x: ops.tanh(acc) * ops.repeated(x, 16) + x * x, operands=(x,))

    y = product(a, b, x)
    whole = x.repeat(*[1] * (x.dim() - 1), math.ceil(n / 16))[..., :n] if shape[-1] == 16 else x
    want = torch.tanh(a @ b) * whole + whole * whole
    torch.testing.assert_close(y, want)
    upstream = drawn(24, n)
    for got, wanted in zip(
        torch.autograd.grad(y, (a, b, x), upstream), torch.autograd.grad(want, (a, b, x), upstream), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_under_compile_and_vmap():
    a, b, x = drawn(24, 8), drawn(8, 48), drawn(24, 16)
    want = cutegemm.gemm(a, b, epilogue=scaled, operands=(x,))

    def call(a, b, x):
        return cutegemm.gemm(a, b, epilogue=scaled, operands=(x,))

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(a, b, x), want)
    mapped = torch.func.vmap(call, in_dims=(None, None, 0))(a, b, torch.stack((x, 2 * x)))
    torch.testing.assert_close(mapped, torch.stack((want, 2 * want)))


@pytest.mark.parametrize("backend", ["auto", "cute"])
@pytest.mark.parametrize("save", ["outputs", "recompute"])
@pytest.mark.parametrize("shape", [(24, 1), (1,), (24, 16)])
@pytest.mark.product(keep=3)
def test_a_program_traced_with_more_columns_than_an_operand_has(shape, save, backend, monkeypatch):
    """What is derived from it, for the backward pass and under vmap, has operands as they are."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80")
    program = cutegemm.trace_epilogue(lambda acc, x: acc * acc * ops.repeated(x, 16), operands=(torch.zeros(24, 16),))
    a, b, x = drawn(24, 8).requires_grad_(), drawn(8, 40), drawn(*shape).requires_grad_()
    y = cutegemm.gemm(a, b, epilogue=program, operands=(x,), backend=backend, save=save)
    whole = x.repeat(1, 3)[:, :40] if shape[-1] == 16 else x
    want = (a @ b).square() * whole
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    for got, wanted in zip(torch.autograd.grad(y.sum(), (a, x)), torch.autograd.grad(want.sum(), (a, x)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
    mapped = torch.func.vmap(lambda a: cutegemm.gemm(a, b, epilogue=program, operands=(x,)))(torch.stack((a, 2 * a)))
    torch.testing.assert_close(mapped, torch.stack((want, 4 * want)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("m", "n"), [(0, 48), (4, 0), (0, 0)])
def test_gradients_of_nothing(m, n):
    a, b, x = torch.zeros(m, 8, requires_grad=True), torch.zeros(8, n), torch.ones(16, requires_grad=True)
    cutegemm.gemm(a, b, epilogue=scaled, operands=(x,)).sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize("work", ["rows", "gathered", "masked"])
def test_products_in_groups(work):
    ends = torch.tensor([5, 24]).int()
    a, b, x = drawn(24, 8), drawn(2, 8, 48), drawn(16)
    group = torch.tensor([0] * 5 + [1] * 19)
    if work == "masked":
        stacked = a.expand(2, 24, 8)
        got = cutegemm.grouped_gemm(stacked, b, counts=ends, epilogue=scaled, operands=(x,))
        want = (stacked @ b) * x.repeat(3)
        for g, count in enumerate(ends.tolist()):
            torch.testing.assert_close(got[g, :count], want[g, :count])
        return
    rows = torch.arange(24).flip(0).int() if work == "gathered" else None
    got = cutegemm.grouped_gemm(a, b, ends, rows=rows, epilogue=scaled, operands=(x,))
    own = a if rows is None else a[rows.long()]
    torch.testing.assert_close(got, torch.bmm(own[:, None], b[group])[:, 0] * x.repeat(3))


def test_gate_and_up():
    a, b, x = drawn(24, 8), drawn(8, 96), drawn(24, 16)
    gate, up = (a @ b).chunk(2, -1)
    got = cutegemm.gemm(a, b, epilogue=lambda acc, x: ops.swiglu(acc) * ops.repeated(x, 16), operands=(x,))
    torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up * x.repeat(1, 3))


def test_sharding_needs_whole_periods():
    from cutegemm.pytorch import sharding_programs

    program = cutegemm.trace_epilogue(scaled, operands=(torch.zeros(24, 16),))
    tensors, settings = {"a": torch.zeros(24, 8)}, sharding_programs.Settings(2, False, True)
    for n, served in ((64, True), (48, False), (32, True), (16, False)):
        tensors["b"] = torch.zeros(8, n)
        found = sharding_programs.of_product(program, tensors, [torch.zeros(24, 16)], settings, (24, n))
        by_columns = [rule for rule in found if rule.given[1].is_shard(1)]
        assert bool(by_columns) == served, n
        assert all(not rule.given[2].is_shard(1) for rule in found)


@pytest.mark.parametrize("columns", [1, 0, -16, True, 16.0, None, "16"])
def test_only_numbers_of_columns_repeat(columns):
    with pytest.raises(EpilogueError, match=r"repeated: got .* columns, accepted is a Python int from 2 on"):
        cutegemm.trace_epilogue(lambda acc, x: acc + ops.repeated(x, columns), operands=(torch.zeros(4, 16),))


def test_what_is_refused():
    x = torch.zeros(4, 16)
    with pytest.raises(EpilogueError, match="repeated: the first argument is an operand as it was given"):
        cutegemm.trace_epilogue(lambda acc, x: acc + ops.repeated(x * 2.0, 16), operands=(x,))
    with pytest.raises(EpilogueError, match="repeated: the first argument is an operand as it was given"):
        cutegemm.trace_epilogue(lambda acc, x: ops.repeated(acc, 16) + x, operands=(x,))
    with pytest.raises(EpilogueError, match="repeated: got 8 columns of an operand that has 16 of them elsewhere"):
        cutegemm.trace_epilogue(lambda acc, x: acc + ops.repeated(x, 16) + ops.repeated(x, 8), operands=(x,))
    with pytest.raises(EpilogueError, match="repeated: got float; the first argument is an operand"):
        cutegemm.trace_epilogue(lambda acc, x: acc + x + ops.repeated(2.0, 8), operands=(x,))
    a, b = drawn(4, 8), drawn(8, 48)
    for shape in ((4, 48), (4, 8), (3, 16), (2, 4, 16)):
        with pytest.raises(ValueError, match=r"operands\[0\]: got shape .*, expected \(4, 16\) or one that broadcasts"):
            cutegemm.gemm(a, b, epilogue=scaled, operands=(torch.zeros(shape),))
    with pytest.raises(ValueError, match=r"operands\[0\]: got shape \(4, 16\), expected \(4, 48\)"):
        cutegemm.gemm(a, b, epilogue=lambda acc, x: acc + x, operands=(x,))


def test_a_bias_that_repeats_is_no_bias():
    """Kernels for terms read one number a column of D."""
    for operand in (torch.zeros(16), torch.zeros(40, 16)):
        program = cutegemm.trace_epilogue(lambda acc, x: acc + ops.repeated(x, 16), operands=(operand,))
        assert terms_of(program, ACTIVATIONS) is None


def test_heads_rotate_alike():
    a, b, cos, sin = drawn(24, 8), drawn(8, 96), drawn(24, 16), drawn(24, 16)
    whole = tuple(each.repeat(1, 6) for each in (cos, sin))
    want = cutegemm.gemm(a, b, epilogue=ops.rope, operands=whole)
    got = cutegemm.gemm(a, b, epilogue=lambda acc, c, s: ops.rope(acc, c, s, head=16), operands=(cos, sin))
    torch.testing.assert_close(got, want)


def test_a_head_has_an_even_number_of_columns():
    with pytest.raises(EpilogueError, match="rope: got head=15, accepted are even numbers"):
        cutegemm.trace_epilogue(lambda acc, c, s: ops.rope(acc, c, s, head=15), operands=(torch.zeros(4, 15),) * 2)


def test_rope_serves_models_that_rotate_columns_half_a_head_apart():
    """As transformers' apply_rotary_pos_emb rotates them, with the reordering that the docstring of `rope` tells."""
    head, heads, rows, depth = 8, 3, 5, 16
    x, weight, angle = drawn(rows, depth), drawn(heads * head, depth), drawn(rows, head // 2)
    cos, sin = (torch.cat((each, each), -1) for each in (angle.cos(), angle.sin()))
    plain = (x @ weight.t()).unflatten(-1, (heads, head))
    left, right = plain.chunk(2, -1)
    want = plain * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]

    def reordered(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)

    tables = (each[:, : head // 2].repeat_interleave(2, dim=1) for each in (cos, sin))
    got = cutegemm.gemm(x, reordered(weight).t(), epilogue=partial(ops.rope, head=head), operands=tuple(tables))
    torch.testing.assert_close(got, reordered(want.flatten(1).t()).t())
