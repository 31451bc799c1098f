"""Derived programs against torch.autograd, in float64: of random programs, to the second order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm import ops
from cutegemm.problem.program.derive import Backward, Source, backward, saving
from cutegemm.problem.program.evaluate import UNARY, Place, evaluate, summed
from cutegemm.problem.program.graph import F32, Output, Program
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from cutegemm.problem.program.trace import trace
from tests import programs
from tests.examples import examples

SEEDS = st.integers(0, 2**32)
M, N = 6, 4


def tensors(program: Program, count: int | None, seed: int) -> tuple[torch.Tensor, list]:
    """Accumulators and operands in float64 that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    batch = () if count is None else (count,)
    acc = torch.randn(*batch, M, programs.columns(program, N), generator=generator, dtype=torch.float64)
    operands = []
    for value, each in zip(programs.operands(program, count, M, N, seed), program.inputs, strict=True):
        wanted = each.type == F32 and isinstance(value, torch.Tensor)
        operands.append(value.double().requires_grad_() if wanted else value)
    return acc.requires_grad_(), operands


def derived(found: Backward, program: Program, acc, operands, upstream) -> list[torch.Tensor]:
    """The outputs of a derived program for the tensors of the forward pass."""
    place = Place(program, acc)
    parts = [place.result(each, Output(0)) for each in place.accumulators(acc.detach(), program.gating)]
    given = {"operand": operands, "acc": parts, "upstream": upstream}
    values = [given[source.kind][source.number] for source in found.reads]
    values = [each.detach() if isinstance(each, torch.Tensor) else each for each in values]
    return list(evaluate(found.program, parts[0], values))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the constants of the derivatives, which are fp32 (2^-24 off) and sums of which may cancel."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(1 + want.abs().max()))


def check(program: Program, count: int | None, seed: int) -> None:
    """The derived program's gradients are torch's."""
    acc, operands = tensors(program, count, seed)
    outputs = evaluate(program, acc, operands)
    generator = torch.Generator().manual_seed(seed + 1)
    upstream = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in outputs]
    leaves = [acc, *(each for each in operands if isinstance(each, torch.Tensor) and each.requires_grad)]
    reached = [(out, up) for out, up in zip(outputs, upstream, strict=True) if out.requires_grad]
    wants = [torch.zeros_like(leaf) for leaf in leaves]
    if reached:
        ends, weights = zip(*reached, strict=True)
        wants = list(torch.autograd.grad(ends, leaves, weights, materialize_grads=True))
    found = backward(program, batched=count is not None)
    assert simplified(found.program) == found.program
    assert not found.program.uses("acc")
    gots = dict(zip(found.gives, derived(found, program, acc, operands, upstream), strict=True))

    place = Place(program, acc)
    parts = [place.result(each, Output(0)) for each in place.accumulators(wants[0], program.gating)]
    for number, want in enumerate(parts):
        close(gots.pop(Source("acc", number), torch.zeros_like(want)), want)
    wanted = iter(wants[1:])
    for number, value in enumerate(operands):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            want = next(wanted)
            got = gots.pop(Source("operand", number), None)
            got = torch.zeros_like(want) if got is None else summed(got, value.shape)
            close(got, want)
    assert not gots


@given(SEEDS, st.sampled_from((None, 2)), st.booleans())
@settings(max_examples=examples(250), database=None)
def test_gradients_are_those_of_autograd(seed, count, smooth):
    drawn = programs.program(seed, size=12, smooth=smooth, wild=0.0)
    outputs = tuple(out for out in drawn.outputs if not (out.reduce or "").endswith(("max", "abs")))
    program = simplified(Program(drawn.inputs, drawn.nodes, outputs, drawn.gating))
    if not program.uses("cast"):  # through which torch rounds gradients too
        check(program, count, seed % 2**31)


@given(SEEDS, st.sampled_from((None, 2)))
@settings(max_examples=examples(120), database=None)
def test_gradients_of_gradients_are_those_of_autograd(seed, count):
    program = programs.program(seed, size=6, smooth=True, wild=0.0)
    check(backward(program, batched=count is not None).program, count, seed % 2**31)


@pytest.mark.parametrize("function", sorted(UNARY))
def test_every_function_has_its_derivative(function):
    body = f"{function}(abs(acc) + 0.25)" if function in ("log", "log2", "sqrt", "rsqrt") else f"{function}(acc)"
    program = simplified(parse(f"def epilogue(acc): return {body}"))
    check(program, None, 3)
    check(backward(program).program, None, 3)


def test_texts_of_gradients():
    def text(program: Program) -> tuple[str, tuple, tuple]:
        found = backward(program, saved="bf16", upstream=["bf16"] * len(program.outputs))
        return found.program.text, tuple(map(tuple, found.reads)), tuple(map(tuple, found.gives))

    assert text(parse("def epilogue(acc, x0: bf16[N]): return acc + x0")) == (
        "def epilogue(acc, x0: bf16[M, N]): return x0, x0",
        (("upstream", 0),),
        (("acc", 0), ("operand", 0)),
    )
    assert text(trace(ops.reglu, ())) == (
        "def epilogue(acc, x0: bf16[M, N], x1: bf16[M, N], x2: bf16[M, N]): "
        "return where(x0 <= 0.0, 0.0, x1 * x2), relu(x0) * x2",
        (("acc", 0), ("acc", 1), ("upstream", 0)),
        (("acc", 0), ("acc", 1)),
    )
    assert text(parse("def epilogue(acc, x0: fp32[M, 1], x1: fp32): return bf16(acc) * x1, row_sum(acc * x0)")) == (
        "def epilogue(acc, x0: fp32[M, 1], x1: fp32, x2: bf16[M, N], x3: bf16[M, N], x4: bf16[M, 1]): "
        "return x0 * x4 + x1 * x3, x2 * x4",
        (("operand", 0), ("operand", 1), ("acc", 0), ("upstream", 0), ("upstream", 1)),
        (("acc", 0), ("operand", 0)),
    )


def test_what_has_no_gradient():
    for text in ("float(row())", "random(1, row(), column(), matrix())", "where(acc > 0.0, 1.0, 2.0)", "3.0"):
        found = backward(parse(f"def epilogue(acc): return {text}"))
        assert found.gives == ()
        assert found.program.outputs == ()
    for reduce in ("row_max", "column_max", "row_max_abs", "column_max_abs"):
        with pytest.raises(ValueError, match=f"output 1: {reduce} has no gradient"):
            backward(parse(f"def epilogue(acc): return acc, {reduce}(acc)"))


def test_kinks_have_the_derivatives_that_are_said():
    """Of a NaN as torch's, all of the gradient."""
    acc = torch.tensor([[-1.0, 0.0, 1.0, torch.nan]])
    for text, want in (
        ("relu(acc)", [0, 0, 1, 1]), ("abs(acc)", [-1, 0, 1, 0]), ("minimum(acc, 0.0)", [1, 0.5, 0, 1]),
        ("maximum(acc, 1.0)", [0, 0, 0.5, 1]), ("maximum(acc, 0.0)", [0, 0.5, 1, 1]),
    ):  # fmt: skip
        found = backward(parse(f"def epilogue(acc): return {text}"))
        values = {"acc": acc, "upstream": torch.ones(1, 4)}
        (got,) = evaluate(found.program, acc, [values[source.kind] for source in found.reads])
        assert got.tolist() == [want]


def test_a_product_that_makes_the_gradient_takes_the_program_as_its_epilogue():
    found = backward(trace(ops.swiglu, ())).accumulated(Source("upstream", 0))
    assert found.reads == (Source("acc", 0), Source("acc", 1))
    gate, up, grad = torch.randn(3, M, N, dtype=torch.float64)
    gate.requires_grad_()
    want = torch.autograd.grad(torch.nn.functional.silu(gate) * up, gate, grad)[0]
    got = evaluate(found.program, grad, [gate.detach(), up])
    torch.testing.assert_close(got[0], want)
    torch.testing.assert_close(got[1], torch.nn.functional.silu(gate.detach()) * grad)
    with pytest.raises(ValueError, match="is not read"):
        found.accumulated(Source("upstream", 0))
    with pytest.raises(ValueError, match="accumulators already"):
        found.accumulated(Source("acc", 0))


def test_the_forward_pass_saves_what_the_backward_pass_reads():
    for function, text, sources in (
        (ops.swiglu, "-> (None, bf16, bf16): return silu(gate) * up, gate, up", (Source("acc", 0), Source("acc", 1))),
        (lambda acc: ops.gelu(acc), "-> (None, bf16): return gelu(acc), acc", (Source("acc"),)),
        (lambda acc: acc * 2, ": return acc * 2.0", ()),
    ):
        program = trace(function, ())
        saved, what = saving(program, backward(program), "bf16")
        assert saved.text.endswith(text)
        assert what == sources
