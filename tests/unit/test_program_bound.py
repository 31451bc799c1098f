"""Programs evaluated, and their bounds: what a device within `DEVICE` computes lies in them, and little else does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm.problem import TABLE, reference, torch_dtype
from cutegemm.problem.program import random
from cutegemm.problem.program.bound import bounds, check
from cutegemm.problem.program.derive import backward
from cutegemm.problem.program.evaluate import UNARY, Place, apply, evaluate, reduced
from cutegemm.problem.program.graph import F32, Program
from cutegemm.problem.program.interval import DEVICE, MINIMA, ROUNDOFF, TINY, Error
from cutegemm.problem.program.text import parse
from tests import programs
from tests.examples import examples

SEEDS = st.integers(0, 2**32)
DOUBLE = torch.float64


def device(program: Program, acc: torch.Tensor, operands, generator: torch.Generator) -> list[torch.Tensor]:
    """What a GPU might compute: fp32 values, each function off by up to its error, small numbers flushed at times."""

    def noise(x: torch.Tensor) -> torch.Tensor:
        return (
            torch.rand(x.shape, generator=generator, dtype=DOUBLE).mul(2).sub(1).mul(3).clamp(-1, 1)
        )  # often the worst

    place = Place(program, acc)
    accumulators = place.accumulators(acc.double(), program.gating)
    given = [place.operand(each, value, DOUBLE) for each, value in zip(program.inputs, operands, strict=True)]
    values: list[torch.Tensor] = []
    for node, kind in zip(program.nodes, program.types, strict=True):
        if node.op == "acc":
            values.append(accumulators[int(node.attribute or 0)])
            continue
        if node.op == "input":
            values.append(given[int(node.attribute)])
            continue
        args = [values[arg] for arg in node.args]
        value = apply(node, args, place, DOUBLE)
        if kind == F32 and node.op in DEVICE:
            error, size = DEVICE[node.op], args[0].abs()
            ordinary = Error(*error)._replace(relative=max(error.relative - ROUNDOFF, 0.0))
            relative = ordinary.relative + ordinary.argument * size
            absolute = max(ordinary.absolute - 2 * ROUNDOFF, 0.0) + ordinary.factor * size
            moved = value + 0.999 * noise(value) * (relative * value.abs() + absolute)
            value = torch.where(moved.isfinite(), moved, value).float().double()
            flush = (value.abs() < TINY) & (torch.rand(value.shape, generator=generator) < 0.5)
            value = torch.where(flush, 0.0, value)
        values.append(value)
    found = []
    for out in program.outputs:
        value = values[out.node].expand(place.shape).float()
        found.append(place.result(reduced(value, out.reduce), out))
    return found


def special(acc: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """acc with a NaN, infinities, zeros, subnormal and large numbers in some places."""
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 3e38, -3e38, 1e30], dtype=acc.dtype)
    acc = acc.clone()
    acc.view(-1)[torch.randint(0, acc.numel(), values.shape, generator=generator)] = values
    return acc


@given(SEEDS, st.booleans())
@settings(max_examples=examples(400), database=None)
def test_a_device_within_its_errors_is_within_the_bounds(seed, wild):
    program = programs.program(seed, size=14, wild=0.4 if wild else 0.05)
    generator = torch.Generator().manual_seed(seed % 2**31)
    exact = 3 * torch.randn(2, 6, programs.columns(program, 4), generator=generator, dtype=DOUBLE)
    exact = special(exact, generator) if wild else exact
    error = 2.0 ** (-12 if wild else -18) * exact.abs().nan_to_num(0, 0, 0)
    off = torch.rand(exact.shape, generator=generator, dtype=DOUBLE).mul(4).sub(2).clamp(-1, 1)
    acc = torch.where(exact.isfinite(), exact + 0.99 * error * off, exact).float()
    acc = torch.where((acc.double() - exact).abs() <= error, acc, exact.float())
    error = torch.maximum(error, (acc.double() - exact).abs().nan_to_num(0, 0, 0))
    given = programs.operands(program, 2, 6, 4, seed % 2**31)
    for output, got, want in zip(
        program.outputs, device(program, acc, given, generator), bounds(program, exact, error, given), strict=True
    ):
        for name in {"fp32", output.dtype or "bf16"}:
            verdict = check(got.to(torch_dtype(name)), want)
            assert verdict.ok, (program.text, verdict.message)


@given(SEEDS, st.booleans())
@settings(max_examples=examples(200), database=None)
def test_evaluation_in_fp32_is_within_the_bounds(seed, gradient):
    program = programs.program(seed, size=14, wild=0.0, smooth=gradient)
    program = backward(program).program if gradient else program
    generator = torch.Generator().manual_seed(seed % 2**31)
    acc = torch.randn(6, programs.columns(program, 4), generator=generator)
    given = programs.operands(program, None, 6, 4, seed % 2**31)
    wants = bounds(program, acc.double(), torch.zeros(acc.shape), given)
    for dtype in (None, torch.bfloat16):
        gots = evaluate(program, acc, given, dtype=torch.float32, out_dtype=dtype)
        for got, want in zip(gots, wants, strict=True):
            assert check(got, want).ok, (program.text, check(got, want).message)


def test_tame_programs_are_bounded_closely():
    """Of most programs something is known everywhere: the interval is small beside the values."""
    known = 0
    for seed in range(200):
        program = programs.program(seed, size=10, wild=0.0)
        generator = torch.Generator().manual_seed(seed)
        acc = torch.randn(6, programs.columns(program, 4), generator=generator, dtype=DOUBLE)
        given = programs.operands(program, None, 6, 4, seed)
        found = bounds(program, acc, 2.0**-20 * acc.abs(), given)
        known += all(float((each.bound / (each.value.abs() + 1)).median()) < 2.0**-10 for each in found)
    assert known > 180


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_are_bounded_as_closely_as_before(activation):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(40, 64, generator=generator).bfloat16()
    b = torch.randn(64, 48, generator=generator).bfloat16()
    bias, c = torch.randn(48, generator=generator).bfloat16(), torch.randn(40, 48, generator=generator).bfloat16()
    before = reference.expected(a, b, c, beta=0.5, bias=bias, activation=activation, out_dtype=torch.float32)
    program = parse(
        f"def epilogue(acc, x0: bf16[M, N], x1: bf16[N], x2: fp32): return {activation}(acc + x0 * x2 + x1)"
    )
    plain = reference.expected(a, b, out_dtype=torch.float32)
    accumulated = plain.bound - 2.0**-24 * (plain.value.abs() + plain.bound) - 2.0**-149
    (now,) = bounds(program, plain.value, accumulated, [c, bias, 0.5])
    torch.testing.assert_close(now.value, before.value)
    assert float((now.bound / before.bound).max()) < 1.0
    assert float((now.bound / before.bound).max()) > 0.5


def changed(text: str, values: torch.Tensor, off: float = 0.0, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the check takes values + off as the results of a program for these accumulators."""
    program = parse(f"def epilogue(acc): return {text}")
    (want,) = bounds(program, values.double(), torch.zeros(values.shape), [])
    return check((want.value + off).to(dtype), want).ok


@pytest.mark.parametrize(
    "text",
    [
        "acc",
        "acc + 1.0",
        "exp(acc)",
        "gelu(acc)",
        "tanh(acc)",
        "acc / (acc * acc + 1.0)",
        "sqrt(abs(acc))",
        "row_sum(acc)",
    ],
)
def test_what_is_further_off_is_refused(text):
    acc = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    assert changed(text, acc)
    assert not changed(text, acc, 1e-4)
    assert not changed(text, acc, -1e-4)
    assert not changed(text, acc, math.nan)
    assert not changed(text, acc, math.inf)
    assert changed(text, acc, dtype=torch.bfloat16)
    assert not changed(text, acc, 0.05, dtype=torch.bfloat16)


def allowed(text: str, acc: float, got: float, error: float = 0.0, dtype: torch.dtype = torch.float32) -> bool:
    program = parse(f"def epilogue(acc): return {text}")
    (want,) = bounds(program, torch.full((1, 2), acc, dtype=DOUBLE), torch.full((1, 2), error), [])
    return check(torch.full((1, 2), got, dtype=DOUBLE).to(dtype), want).ok


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("text", "acc", "may", "may_not"),
    [
        ("acc", NAN, [NAN], [0.0, INF, 1.0]),
        ("acc", INF, [INF], [NAN, -INF, 3e38]),
        ("acc + 1.0", -INF, [-INF], [NAN, INF, -3e38]),
        ("acc - acc", INF, [NAN], [0.0, INF]),
        ("acc * 0.0", INF, [NAN], [0.0, INF]),
        ("acc * 0.0", NAN, [NAN], [0.0]),
        ("acc * acc", 1e30, [INF], [NAN, -INF, 1.0]),
        ("0.0 / acc", 0.0, [NAN], [0.0, INF]),
        ("reciprocal(acc)", 0.0, [INF, -INF], []),
        ("rsqrt(acc)", -0.0, [INF, -INF], [NAN]),
        ("log(acc)", -1.0, [NAN], [0.0, INF]),
        ("log(acc)", 0.0, [-INF], [NAN, 0.0]),
        ("sqrt(acc)", -1.0, [NAN], [0.0]),
        ("sqrt(acc)", INF, [INF], [NAN]),
        ("exp(acc)", 200.0, [INF], [NAN, 1.0]),
        ("exp(acc)", -200.0, [0.0, 1e-39], [1e-37, NAN]),
        ("exp(acc)", -INF, [0.0], [NAN, 1.0]),
        ("gelu(acc)", -INF, [NAN, 0.0, -(2.0**-111)], [-INF, 1e-30, -1e-30]),
        ("silu(acc)", -INF, [NAN, -0.0], [-INF, 1e-30, -1e-30]),
        ("silu(acc)", INF, [INF], [NAN]),
        ("relu(acc)", NAN, [NAN], [0.0]),
        ("minimum(acc, 1.0)", NAN, [NAN], [1.0]),
        ("where(acc == acc, acc, 0.0)", NAN, [0.0], [NAN]),
        ("where(acc < 1.0, 2.0, 3.0)", NAN, [3.0], [2.0]),
        ("where(acc != acc, 2.0, 3.0)", NAN, [2.0], [3.0]),
        ("fp16(acc)", 1e5, [INF], [65504.0, NAN]),
        ("row_sum(acc)", INF, [INF], [NAN, -INF]),
        ("row_max(acc)", NAN, [NAN], [-INF, 0.0]),
        ("row_sum(where(column() == 0, acc, -acc))", INF, [NAN], [INF, 0.0]),
        ("row_sum(acc)", 3e38, [INF], [0.0, -INF]),
    ],
)
def test_nan_and_infinities(text, acc, may, may_not):
    if text.startswith("row"):
        may, may_not = [(each,) for each in may], [(each,) for each in may_not]
        program = parse(f"def epilogue(acc): return {text}")
        (want,) = bounds(program, torch.full((1, 2), acc, dtype=DOUBLE), torch.zeros(1, 2), [])
        for (each,), ok in [(each, True) for each in may] + [(each, False) for each in may_not]:
            assert check(torch.full((1, 1), each), want).ok == ok, each
        return
    for each in may:
        assert allowed(text, acc, each), each
    for each in may_not:
        assert not allowed(text, acc, each), each


def test_an_undecided_comparison_allows_both_branches_and_no_more():
    text = "where(acc < 1.0, 2.0, 3.0)"
    assert allowed(text, 1.0, 2.0, 1e-6)
    assert allowed(text, 1.0, 3.0, 1e-6)
    assert not allowed(text, 1.0, 3.5, 1e-6)
    assert not allowed(text, 1.0, 2.0)
    assert not allowed(text, 0.999, 3.0, 1e-6)
    assert allowed("log(acc)", 0.0, NAN, 1e-6)
    assert allowed("log(acc)", 0.0, -20.0, 1e-6)
    assert not allowed("log(acc)", 0.0, 1.0, 1e-6)
    assert allowed("gelu(acc)", -0.75, -0.1699714, 0.01)
    assert not allowed("gelu(acc)", -0.75, -0.1701, 0.01)
    assert allowed("fp16(acc)", 65519.9, 65504.0, 1.0)
    assert allowed("fp16(acc)", 65519.9, INF, 1.0)


def test_a_bound_that_knows_nothing_says_so():
    program = parse("def epilogue(acc, x0: fp32): return (acc - 1.0) / (acc - x0)")
    (want,) = bounds(program, torch.ones(2, 2, dtype=DOUBLE), torch.full((2, 2), 1e-6), [1.0])
    assert want.open == 1.0
    assert check(torch.ones(2, 2), want).message.endswith("nothing known of 100.0%")
    assert bool((want.bound == math.inf).all())


def test_minima_are_those_of_the_functions():
    for name, (place, least) in MINIMA.items():
        x = torch.linspace(place - 1e-5, place + 1e-5, 2001, dtype=DOUBLE)
        values = UNARY[name](x)
        assert 0 < float(values.min()) - least < 1e-7
        assert float(values[0]) > float(values.min()) < float(values[-1])


# Evaluation.


def test_philox_gives_random123s_answers():
    for counter, key, answer in (
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ):
        got = random.philox(*(torch.tensor([word]) for word in (*counter, key)))
        assert tuple(int(each) for each in got) == answer


def test_random_numbers_are_even_and_apart():
    i, j, matrix = torch.arange(200).view(-1, 1), torch.arange(300), torch.arange(3).view(-1, 1, 1)
    x = random.uniform(torch.tensor(-5), i, j, matrix)
    assert x.shape == (3, 200, 300)
    assert float(x.min()) >= 0
    assert float(x.max()) < 1
    counts = torch.histc(x.float(), 64, 0, 1).double()
    expected = x.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * math.sqrt(2 * 63)
    flat = x.view(3, -1)
    assert float(torch.corrcoef(torch.cat((flat, flat.roll(1, 1), flat.roll(300, 1)))).tril(-1).abs().max()) < 0.02
    assert x.equal((x * 2**24).long().double() / 2**24)


def test_operands_indices_and_pairs():
    acc = torch.arange(2.0 * 3 * 4).view(2, 3, 4)
    text = "def epilogue(acc, x0: bf16[N], x1: fp32[L, M, 1], x2: int32, x3: fp16[1]): return "
    given = [
        torch.tensor([1.0, 2, 3, 4]).bfloat16(),
        torch.tensor([[1.0], [2], [3]]).expand(2, 3, 1),
        -3,
        torch.tensor(2.0),
    ]
    cases = {
        "acc + x0 * x3": acc + given[0].float() * 2,
        "acc * x1": acc * given[1],
        "acc + float(x2 // 2 + x2 % 2)": acc - 1,
        "float(matrix() * 100 + row() * 10 + column())": torch.tensor(
            [[[100.0 * l + 10 * i + j for j in range(4)] for i in range(3)] for l in range(2)]
        ),
        "partner(acc)": acc[..., [1, 0, 3, 2]],
        "bf16(acc + 0.001)": (acc.double() + 0.001).bfloat16().float(),
        "row_sum(acc)": acc.sum(-1, keepdim=True),
        "column_max_abs(-acc)": acc.amax(-2, keepdim=True),
        "where(column() < row(), acc, 0.0)": acc.tril(-1),
    }
    for body, want in cases.items():
        (got,) = evaluate(parse(text + body), acc, given, dtype=torch.float32)
        assert got.equal(want), body
    halves = "def epilogue(gate: halves[0], up: halves[1]): return gate - up * 2.0"
    assert evaluate(parse(halves), acc, [])[0].equal(acc[..., :2].double() - 2 * acc[..., 2:])
    pairs = halves.replace("halves", "pairs")
    assert evaluate(parse(pairs), acc[0], [])[0].equal(acc[0, :, ::2].double() - 2 * acc[0, :, 1::2])
    bf16 = evaluate(
        parse("def epilogue(acc) -> (None, fp16, None): return acc, acc, row_sum(acc)"),
        acc,
        [],
        out_dtype=torch.bfloat16,
    )
    assert [each.dtype for each in bf16] == [torch.bfloat16, torch.float16, torch.float32]


def test_tensors_that_do_not_fit_are_refused():
    program = parse("def epilogue(acc, x0: bf16[N]): return partner(acc) + x0")
    acc, bias = torch.zeros(3, 4), torch.zeros(4)
    for bad, wrong, message in (
        (torch.zeros(4), [bias], "acc"),
        (torch.zeros(3, 5), [torch.zeros(5)], "columns belong together"),
        (acc, [torch.zeros(3)], "operand x0"),
        (acc, [], "operands: got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(program, bad, wrong)
        with pytest.raises(ValueError, match=message):
            bounds(program, bad, torch.zeros(bad.shape), wrong)
    with pytest.raises(ValueError, match="dtype"):
        evaluate(program, acc, [bias], dtype=torch.bfloat16)


def test_every_dtype_of_the_table_has_a_cast():
    for name in TABLE:
        assert allowed(f"{name}(acc)", 1.001, float(torch.tensor(1.001).to(torch_dtype(name))))
