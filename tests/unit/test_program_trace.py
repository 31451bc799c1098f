"""Python functions traced to programs, `cutegemm.ops`, and what is remembered of a function."""

from __future__ import annotations

import functools
import itertools
import math
import re
import timeit
import types

import numpy as np
import pytest
import torch

import cutegemm
from cutegemm import ops
from cutegemm.errors import EpilogueError
from cutegemm.problem.program import known
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.problem.program.graph import Input
from cutegemm.problem.program.text import parse
from cutegemm.problem.program.trace import trace

N, MN = Input("bias", "bf16", n=True), Input("res", "bf16", m=True, n=True)
FP32, INT32 = Input("s", "fp32", by_value=True), Input("i", "int32", by_value=True)


@pytest.mark.parametrize(
    ("function", "inputs", "text"),
    [
        (lambda acc: acc, (), "(acc): return acc"),
        (
            lambda acc, b, r: ops.gelu(acc + b) + r,
            (N, MN),
            "(acc, x0: bf16[N], x1: bf16[M, N]): return gelu(acc + x0) + x1",
        ),
        (ops.swiglu, (), "(gate: halves[0], up: halves[1]): return silu(gate) * up"),
        (ops.reglu_pairs, (), "(gate: pairs[0], up: pairs[1]): return relu(gate) * up"),
        (
            lambda acc, r: (v := acc + r, ops.cast(v, torch.bfloat16), ops.cast(ops.row_sum(v * v), "fp16")),
            (MN,),
            "(acc, x0: bf16[M, N]) -> (None, bf16, fp16): t0 = acc + x0; return t0, t0, row_sum(t0 * t0)",
        ),
        (lambda acc: ops.cast(ops.cast(acc, "bf16"), "fp32"), (), "(acc) -> fp32: return bf16(acc)"),
        (lambda acc: 1 - acc / 2 + 2 * -acc, (), "(acc): return 1.0 - acc * 0.5 + acc * -2.0"),
        (lambda acc: np.float32(2) * acc + np.int64(3), (), "(acc): return acc * 2.0 + 3.0"),
        (lambda acc: acc**3 + acc**-1 + acc**0.5, (), "(acc): return acc * acc * acc + reciprocal(acc) + sqrt(acc)"),
        (lambda acc, i: ops.row() // 2 + i, (INT32,), "(acc, x0: int32): return float(row() // 2 + x0)"),
        (
            lambda acc: acc * ops.row() + abs(-ops.column()),
            (),
            "(acc): return abs(float(0 - column())) + float(row()) * acc",
        ),
        (
            lambda acc: ops.where((ops.row() >= ops.column()) & ~(acc != acc) | (ops.matrix() > 1.5), acc, 0),
            (),
            "(acc): return where((acc == acc) & (column() <= row()) | (float(matrix()) > 1.5), acc, 0.0)",
        ),
        (ops.causal, (), "(acc): return where(column() <= row(), acc, -inf)"),
        (
            functools.partial(ops.dropout, p=0.5, seed=7),
            (),
            "(acc): return where(random(7, row(), column(), matrix()) >= 0.5, acc * 2.0, 0.0)",
        ),
    ],
)
def test_programs_of_functions(function, inputs, text):
    program = trace(function, inputs)
    want = f"def epilogue{text}"
    assert program.text == want
    assert parse(want) == program


def outer_function(acc):
    first, second = acc
    return first + second


class Thing:
    scale = 2.0


ERRORS = [
    (lambda acc: acc if acc > 0 else 0, (), r"ops\.where\(condition, a, b\)"),
    (lambda acc: acc > 0 and acc < 1, (), "&"),
    (lambda acc: 0 < acc < 1, (), "&"),
    (lambda acc: max(acc, 0), (), r"ops\.maximum"),
    (lambda acc: math.exp(acc), (), r"ops\.exp"),
    (lambda acc: float(acc), (), "no Python number"),
    (lambda acc: torch.exp(acc), (), r"torch's 'exp'.*cutegemm\.ops"),
    (lambda acc: np.exp(acc), (), r"numpy.*cutegemm\.ops"),
    (lambda acc: np.ones(3) * acc, (), "numpy"),
    (lambda acc: np.asarray(acc), (), "numpy"),
    (lambda acc: acc + torch.ones(3), (), "operands="),
    (lambda acc: torch.ones(3) * acc, (), "operands="),
    (lambda acc: torch.ones(3).add(acc), (), "operands="),
    (lambda acc: acc.relu(), (), r"no attribute 'relu'.*cutegemm\.ops"),
    (outer_function, (), r"ops\.partner"),
    (lambda acc: acc[0], (), "has no others"),
    (lambda acc: setattr(acc, "x", 1), (), "to set"),
    (lambda acc: acc @ acc, (), "no such operator"),
    (lambda acc: acc // 2, (), "int32 only"),
    (lambda acc: ops.row() % 0 + acc, (), "by zero"),
    (lambda acc: 2**acc, (), r"ops\.exp2"),
    (lambda acc: acc**1.5, (), r"ops\.exp2"),
    (lambda acc: acc * 1e300, (), "too large"),
    (lambda acc: acc + 2**40, (), "int32"),
    (lambda acc: acc * 10**5000, (), r"the integer of 16610 bits is not an int32\n"),
    (lambda acc: acc + "a", (), "got str"),
    (lambda acc: acc + (acc > 0), (), r"ops\.where\(condition, 1\.0, 0\.0\)"),
    (lambda acc: (acc > 0) & acc, (), "parentheses"),
    (lambda acc: ops.where(acc, 1, 0), (), "condition"),
    (lambda acc: ops.cast(acc, torch.int16), (), r"torch\.int16.*accepted"),
    (lambda acc: ops.row_sum(acc) + 1, (), "return it as it is, behind a matrix"),
    (lambda acc: ops.exp(ops.row_sum(acc)), (), "return it as it is"),
    (lambda acc: ops.where(ops.row_max(acc) == 1.0, acc, 0.0), (), "return it as it is"),
    (lambda acc: ops.where(ops.row_max(acc) != ops.row_max(acc), acc, 0.0), (), "return it as it is"),
    (lambda acc: acc if ops.row_max(acc) == 0.5 else 3 * acc, (), "return it as it is"),
    (lambda acc: ops.row_max(acc) % 2, (), "return it as it is"),
    (lambda acc: acc * int(ops.row_max(acc)), (), "return it as it is"),
    (lambda acc: ops.row_max(acc)[0], (), "return it as it is"),
    (lambda acc: ops.logical_not(acc), (), "is for conditions"),
    (lambda acc: ops.random(acc), (), "seed"),
    (lambda acc: ops.dropout(acc, 1.0, 1), (), "0 <= p < 1"),
    (lambda acc: ops.swiglu(acc) + acc, (), "divided"),
    (lambda acc: acc * 2 + ops.swiglu(acc), (), "another use|divided"),
    (lambda acc: ops.halves(acc * 2)[0], (), r"acc itself.*gate, up = ops\.halves\(acc\)"),
    (lambda acc: ops.swiglu(acc) + ops.swiglu_pairs(acc), (), "one of the two"),
    (lambda acc: (ops.swiglu(acc), acc), (), "divided"),
    (lambda acc: acc > 0, (), "condition"),
    (lambda acc: None, (), "NoneType"),
    (lambda acc: 1.0, (), "float"),
    (lambda acc: (), (), "no result"),
    (lambda acc: {"y": acc}, (), "dict"),
    (lambda acc, bias: acc, (N,), r"operand 0 \(bias\)"),
    (lambda acc, bias, res: (acc + bias, ops.exp(res))[0], (N, MN), r"operand 1 \(res\)"),
    (lambda acc: acc, (N,), "acc and 1 operands"),
    (lambda acc, bias, res: acc, (N,), "missing a required argument: 'res'"),
]


@pytest.mark.parametrize(("function", "inputs", "message"), ERRORS)
def test_an_error_names_the_line_and_what_to_write(function, inputs, message):
    with pytest.raises(EpilogueError, match=message) as caught:
        trace(function, inputs)
    place = re.match(r"(.*?):(\d+): ", str(caught.value))
    assert place is not None
    assert place[1] == __file__
    first = function.__code__.co_firstlineno
    assert first <= int(place[2]) <= first + 2


def test_a_value_that_outlives_its_function_is_refused():
    kept = []
    trace(lambda acc: kept.append(acc) or acc, ())
    with pytest.raises(EpilogueError, match="after its function has returned"):
        kept[0] + 1
    with pytest.raises(EpilogueError, match=r"another call|two epilogues"):
        trace(lambda acc: acc + kept[0], ())
    for function in (ops.row, lambda: ops.random(1)):
        with pytest.raises(EpilogueError, match="only within an epilogue"):
            function()
    with pytest.raises(EpilogueError, match="accepted is a function"):
        trace(3, ())


def attention(acc, slopes):
    return ops.causal(ops.alibi(acc * 0.125, slopes))


def test_ready_programs_compute_what_they_say():
    generator = torch.Generator().manual_seed(0)
    acc = torch.randn(3, 6, 8, generator=generator, dtype=torch.float64)
    i, j = torch.arange(6)[:, None], torch.arange(8)
    slopes = torch.tensor([0.5, 0.25, 0.125]).view(3, 1, 1)
    (got,) = evaluate(trace(attention, (Input("", "fp32", batched=True),)), acc, [slopes])
    want = (acc * 0.125 - slopes * (i - j).abs()).masked_fill(j > i, -math.inf)
    torch.testing.assert_close(got, want)

    angles = torch.randn(6, 4, generator=generator).double().repeat_interleave(2, -1)
    whole = Input("", "fp32", True, True)
    (got,) = evaluate(trace(ops.rope, (whole, whole)), acc, [angles.cos(), angles.sin()])
    turned = torch.view_as_complex(acc.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones(6, 4, dtype=torch.float64), angles[:, ::2].contiguous()
    )
    torch.testing.assert_close(got, torch.view_as_real(turned).flatten(-2))

    for gated, activation in (
        (ops.swiglu, torch.nn.functional.silu),
        (ops.geglu, torch.nn.functional.gelu),
        (ops.geglu_tanh, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        (ops.reglu, torch.relu),
    ):
        want = activation(acc[..., :4]) * acc[..., 4:]
        torch.testing.assert_close(evaluate(trace(gated, ()), acc, [])[0], want)
        interleaved = torch.stack(acc.chunk(2, -1), -1).flatten(-2)
        other = getattr(ops, gated.__name__ + "_pairs")
        torch.testing.assert_close(evaluate(trace(other, ()), interleaved, [])[0], want)
        torch.testing.assert_close(gated(acc), want)

    rows, columns = torch.randn(6, 1, generator=generator), torch.randn(8, generator=generator)
    scaled = trace(ops.scaled, (Input("", "fp32", m=True), Input("", "fp32", n=True)))
    torch.testing.assert_close(evaluate(scaled, acc, [rows, columns])[0], acc * rows * columns)


def test_dropout_keeps_a_share_and_its_bits():
    acc = torch.ones(2, 64, 64)
    program = trace(lambda acc, seed: ops.dropout(acc, 0.25, seed), (INT32,))
    (one,), (same,), (other,) = (evaluate(program, acc, [seed]) for seed in (1, 1, 2))
    assert one.equal(same)
    assert not one.equal(other)
    assert not one[0].equal(one[1])
    assert {float(each) for each in one.unique()} == {0.0, float(np.float32(1) / np.float32(0.75))}
    assert abs(float((one != 0).double().mean()) - 0.75) < 5 * math.sqrt(0.25 * 0.75 / acc.numel())


@pytest.mark.parametrize(
    "name", [name for name in ops.__all__ if name not in ("cast", "random", "row", "column", "matrix")]
)
def test_functions_compute_on_tensors_what_the_program_computes(name):
    if name in ("dropout", "causal", "alibi", "rope"):
        with pytest.raises(EpilogueError, match="only within an epilogue"):
            getattr(ops, name)(torch.ones(2, 2), *[0.5] * {"dropout": 2, "causal": 0, "alibi": 1, "rope": 2}[name])
        return
    if name == "repeated":
        with pytest.raises(EpilogueError, match="got Tensor; the first argument is an operand"):
            ops.repeated(torch.ones(2, 2), 2)
        return
    x = torch.randn(6, 8, dtype=torch.float64).abs() + 0.1
    operands = {
        "minimum": [1.0],
        "maximum": [1.0],
        "clamp": [0.5, 1.0],
        "scaled": [2.0, 3.0],
        "clamped_swiglu": [0.7, 1.0, 1.7, 1.0],
        "quantize": ["int8"],
    }.get(name, [])
    function = getattr(ops, name)
    if name == "where":
        assert ops.where(x > 1, x, 0.0).equal(evaluate(trace(lambda acc: ops.where(acc > 1, acc, 0.0), ()), x, [])[0])
    elif name == "logical_not":
        program = trace(lambda acc: ops.where(ops.logical_not(acc > 1), acc, 0.0), ())
        assert program == trace(lambda acc: ops.where(~(acc > 1), acc, 0.0), ())
        assert torch.where(ops.logical_not(x > 1), x, 0.0).equal(evaluate(program, x, [])[0])
    elif name == "quantize":
        values, scales = evaluate(trace(lambda acc: function(acc, "int8"), ()), x, [], dtype=torch.float32)
        assert function(x, "int8")[0].equal(values.round().to(torch.int8))
        assert function(x, "int8")[1].equal(scales)
    elif name in ("halves", "pairs"):
        assert function(x)[1].equal(evaluate(trace(lambda acc: function(acc)[1], ()), x, [])[0])
    else:
        (want,) = evaluate(trace(lambda acc: function(acc, *operands), ()), x, [])
        torch.testing.assert_close(function(x, *operands), want)


# What is remembered.

scale = 2.0
thing = Thing()
listed = [2.0]
module = types.ModuleType("module")
module.scale = 2.0  # type: ignore[attr-defined]


def helper(x):
    return x * scale


@pytest.fixture
def calls(monkeypatch):
    """How often a function was traced."""
    known.forget()
    found = []
    monkeypatch.setattr(known, "trace", lambda function, inputs: found.append(function) or trace(function, inputs))
    yield found
    known.forget()


def looked_up(function, *inputs):
    return known.lookup(function, inputs).text.partition("return ")[2]


def test_a_function_is_traced_once(calls):
    def scaled(by, kind=float):
        return lambda acc, bias: ops.gelu(acc * by + bias)

    assert [looked_up(scaled(by), N) for by in (2.0, 2.0, 3.0, 3.0, 2.0)] == [
        f"gelu(acc * {by} + x0)" for by in (2.0, 2.0, 3.0, 3.0, 2.0)
    ]
    assert len(calls) == 2
    looked_up(scaled(2.0), Input("", "fp16", n=True))
    assert len(calls) == 3
    for _ in range(3):
        looked_up(ops.swiglu)
        looked_up(lambda acc: cutegemm.ops.cast(helper(acc), torch.float16))
        looked_up(functools.partial(ops.dropout, p=0.5, seed=1))
    assert len(calls) == 6


def test_numbers_that_are_equal_and_differ_are_told_apart(calls):
    def of(value):
        return lambda acc: ops.row() * value + acc / (ops.column() + value)

    values = (1, 1.0, 0, 0.0, -0.0, 2, 2.0)
    texts = [looked_up(of(value)) for value in values]
    assert texts == [trace(of(value), ()).text.partition("return ")[2] for value in values]
    assert [looked_up(of(value)) for value in values] == texts


def test_a_changed_global_is_seen(calls, monkeypatch):
    def direct(acc):
        return acc * scale

    def nested(acc):
        return (lambda x: x * scale)(acc)

    def recursive(acc, depth=2):
        return acc * scale if depth == 0 else recursive(acc, depth - 1)

    functions = (direct, nested, lambda acc: helper(acc), recursive)
    for value in (2.0, 3.0, 3.0, 2.0, 5):
        monkeypatch.setitem(globals(), "scale", value)
        for function in functions:
            assert looked_up(function) == f"acc * {float(value)}"
    assert len(calls) == 3 * len(functions)
    monkeypatch.setitem(globals(), "helper", lambda x: x + 1)
    assert looked_up(functions[2]) == "acc + 1.0"


def test_a_changed_builtin_is_seen(calls, monkeypatch):
    def function(acc):
        return acc * float(3)

    assert looked_up(function) == "acc * 3.0"
    monkeypatch.setitem(globals(), "float", lambda x: 4.0)
    assert looked_up(function) == "acc * 4.0"
    monkeypatch.undo()
    assert looked_up(function) == "acc * 3.0"


def test_a_changed_closure_or_default_is_seen(calls):
    by = 2.0

    def closed(acc):
        return acc * by

    def given(acc, factor=2.0, *, offset=1.0):
        return acc * factor + offset

    assert looked_up(closed) == "acc * 2.0"
    by = 3.0
    assert looked_up(closed) == "acc * 3.0"
    assert looked_up(given) == "acc * 2.0 + 1.0"
    given.__defaults__ = (4.0,)
    assert looked_up(given) == "acc * 4.0 + 1.0"
    given.__kwdefaults__["offset"] = 5.0
    assert looked_up(given) == "acc * 4.0 + 5.0"
    given.__code__ = (lambda acc, factor=1, *, offset=1: acc - factor - offset).__code__
    assert looked_up(given) == "acc - 4.0 - 5.0"


def test_a_changed_helper_is_seen(calls):
    def inner(x, factor=2.0):
        return x * factor

    function = lambda acc: inner(acc)  # noqa: E731
    assert looked_up(function) == looked_up(function) == "acc * 2.0"
    assert len(calls) == 1
    inner.__defaults__ = (3.0,)
    assert looked_up(function) == "acc * 3.0"
    inner.__code__ = (lambda x, factor=1: x - factor).__code__
    assert looked_up(function) == "acc - 3.0"


def test_a_changed_partial_is_seen(calls):
    def inner(x, factor):
        return x * factor

    partial = functools.partial(inner, factor=2.0)
    outer = lambda acc, by=partial: by(acc)  # noqa: E731
    assert looked_up(partial) == looked_up(partial) == looked_up(outer) == looked_up(outer) == "acc * 2.0"
    partial.keywords["factor"] = 3.0
    assert looked_up(partial) == looked_up(outer) == "acc * 3.0"


def test_what_may_change_is_traced_every_time(calls, monkeypatch):
    def attribute(acc):
        return acc * thing.scale

    def element(acc):
        return acc * listed[0]

    def of_module(acc):
        return acc * module.scale

    def of_class(acc):
        return acc * Thing.scale

    def of_function(acc):
        return acc * helper.scale

    def looked(acc):
        return acc * globals()["thing"].scale

    def closed(acc, holder=[2.0]):  # noqa: B006
        return acc * holder[0]

    def imported(acc):
        from tests.unit import test_program_trace as here

        return acc * here.thing.scale

    def of_torch(acc):
        return acc * (2.0 if torch.get_default_dtype() == torch.float32 else 3.0)

    class Callable:
        scale = 2.0

        def __call__(self, acc):
            return acc * self.scale

        def method(self, acc):
            return acc * self.scale

    count = itertools.count(2)

    def stateful(acc):
        return acc * next(count)

    called = Callable()
    monkeypatch.setattr(helper, "scale", 2.0, raising=False)
    functions = [attribute, element, of_module, of_class, of_function, looked, closed, imported, of_torch]
    functions += [called, called.method, stateful]
    for function in functions:
        assert looked_up(function) == "acc * 2.0", function
    monkeypatch.setattr(thing, "scale", 3.0, raising=False)
    monkeypatch.setattr(Thing, "scale", 3.0)
    monkeypatch.setattr(module, "scale", 3.0)
    monkeypatch.setattr(helper, "scale", 3.0, raising=False)
    monkeypatch.setattr(Callable, "scale", 3.0)
    listed[0] = 3.0
    closed.__defaults__[0][0] = 3.0
    torch.set_default_dtype(torch.float64)
    try:
        for function in functions:
            assert looked_up(function) == "acc * 3.0", function
    finally:
        torch.set_default_dtype(torch.float32)
        listed[0] = 2.0


def test_a_known_program_is_found_in_a_microsecond():
    known.forget()
    inputs = (N, MN)
    function = lambda acc, bias, res: ops.gelu(acc + bias) + res  # noqa: E731
    known.lookup(function, inputs)
    count = 100  # blocks so short that one of them has the core to itself
    seconds = min(timeit.repeat(lambda: known.lookup(function, inputs), number=count, repeat=1000)) / count
    assert seconds < 3e-6  # 0.55 us on an idle core


def test_operands_of_a_trace_are_a_tuple():
    with pytest.raises(TypeError, match="operands: got int, expected a tuple of tensors and Python numbers"):
        cutegemm.trace_epilogue(lambda acc: acc, operands=3)
