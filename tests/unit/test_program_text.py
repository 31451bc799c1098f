"""Programs as text, and simplified: both keep the meaning, and equal meanings get one text."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import random
import subprocess
import sys
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cutegemm.problem import TABLE
from cutegemm.problem.program.build import Builder, numbered
from cutegemm.problem.program.evaluate import UNARY, evaluate
from cutegemm.problem.program.graph import F32, Input, Node, Output, Program
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import line, parse, pretty
from tests import programs
from tests.examples import examples

QUICK = settings(max_examples=examples(300), database=None)
SEEDS = st.integers(0, 2**32)
FP32 = torch.float32
EXAMPLES = (
    "def epilogue(acc): return acc",
    "def epilogue(acc, x0: bf16[N], x1: bf16[M, N], x2: fp32): t0 = acc + x0; return gelu(t0) * x2 + x1 / t0",
    "def epilogue(gate: halves[0], up: halves[1], x0: bf16[M, 1]) -> (None, fp16): t0 = silu(gate) * up; "
    "return t0 * x0, row_sum(t0)",
    "def epilogue(acc, x0: int32): return where(column() <= row() + x0, bf16(acc), -inf) + nan",
)


@given(SEEDS, st.floats(0, 1))
@QUICK
def test_a_program_is_read_as_it_was_written(seed, wild):
    for each in (programs.raw(seed, size=30, wild=wild), programs.program(seed, size=30, wild=wild)):
        assert parse(line(each)) == each == parse(pretty(each))
        assert "\n" not in line(each)
        assert line(parse(line(each))) == line(each)


def test_the_generator_draws_the_whole_language():
    drawn = [programs.raw(seed, size=30) for seed in range(300)]
    assert programs.every_operation(drawn) == set()
    assert {each.gating for each in drawn} == {None, "halves", "pairs"}
    assert len({out.reduce for each in drawn for out in each.outputs}) == 7


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_read_back(text):
    assert line(parse(text)) == text


def test_operands_of_every_kind_read_back():
    inputs = [
        Input(f"x{i}", dtype, *varies)
        for i, (dtype, varies) in enumerate(
            itertools.product((*TABLE, "int32"), itertools.product((True, False), repeat=3))
        )
    ]
    inputs += [Input("a", "fp32", by_value=True), Input("b", "int32", by_value=True)]
    whole = Program(tuple(inputs), (Node("acc"),), (Output(0),))
    assert parse(whole.text) == whole


@given(st.lists(st.floats(width=32) | st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8))
@QUICK
def test_constants_read_back_to_the_bit(values):
    builder = Builder(())
    floats = [
        number if builder.types[number] == F32 else builder.add("float", number)
        for number in map(builder.const, values)
    ]
    read = parse(line(builder.program(Output(each) for each in floats)))
    for out, value in zip(read.outputs, values, strict=True):
        node = read.nodes[out.node]
        sign = 1.0
        if node.op == "neg":
            node, sign = read.nodes[node.args[0]], -1.0
        node = read.nodes[node.args[0]] if node.op == "float" else node
        got = node.attribute * sign if sign < 0 else node.attribute
        assert type(got) is type(value)
        assert got == value or (math.isnan(got) and math.isnan(value))
        assert math.copysign(1, got) == math.copysign(1, value) or math.isnan(value)


def test_zeros_of_both_signs_are_two_programs():
    one, other = (parse(f"def epilogue(acc): return acc / {zero}") for zero in ("0.0", "-0.0"))
    assert one != other
    assert simplified(one) != simplified(other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "one Python function"),
        ("def epilogue(acc) return acc", "Python function"),
        ("import os", "one Python function"),
        ("def f(acc): return acc", "called 'epilogue'"),
        ("def epilogue(x): return x", "the first parameters"),
        ("def epilogue(gate: halves[0], up: pairs[1]): return up", "the first parameters"),
        ("def epilogue(acc, *more): return acc", "no defaults"),
        ("def epilogue(acc, x: bf16[N] = 1): return acc", "no defaults"),
        ("def epilogue(acc, x: bf17[N]): return acc", "dtype 'bf17'"),
        ("def epilogue(acc, x: bf16): return acc", "without a shape is a number"),
        ("def epilogue(acc, x: bf16[K]): return acc", r"shape \[K\]"),
        ("def epilogue(acc, t0: fp32): return acc", "operand 't0'"),
        ("def epilogue(acc, x: fp32, nan: fp32): return acc", "operand 'nan'"),
        ("def epilogue(acc): acc += 1; return acc", "accepted are 'name = expression'"),
        ("def epilogue(acc): x = acc; return x", "assigned"),
        ("def epilogue(acc): t0 = acc", "the last statement is 'return'"),
        ("def epilogue(acc): return t0", "'t0' is not defined"),
        ("def epilogue(acc): return __import__('os')", "the function '__import__' is not known"),
        ("def epilogue(acc): return acc.real", "'acc.real' is no expression"),
        ("def epilogue(acc): return exp(acc, acc)", "exp takes 1 arguments"),
        ("def epilogue(acc): return acc + 1", "float.* converts an int32"),
        ("def epilogue(acc): return acc < 1.0", "an output is fp32"),
        ("def epilogue(acc): return 0.0 < acc < 1.0", "no expression"),
        ("def epilogue(acc): return exp(row_sum(acc))", "row_sum is a result"),
        ("def epilogue(acc): return 3000000000 + row()", "not an int32"),
        ("def epilogue(acc): return acc + float(row() // 0)", r"in 'row\(\) // 0': division by zero"),
        ("def epilogue(acc): return acc + float(7 % 0)", "division by zero"),
        ("def epilogue(acc) -> bf17: return acc", "an output's dtype 'bf17'"),
        ("def epilogue(acc) -> (bf16, bf16): return acc", "2 dtypes for 1 results"),
        ("def epilogue(acc): return " + "(" * 150 + "acc" + ")" * 150 + "+" * 5000 + "acc", "."),
    ],
)
def test_a_bad_text_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_an_operand_without_a_usable_name_is_refused():
    for names in (("acc",), ("a b",), ("x", "x"), ("lambda",), ("t3",)):
        whole = Program(tuple(Input(name, "bf16") for name in names), (Node("acc"),), (Output(0),))
        with pytest.raises(ValueError, match="operand"):
            line(whole)


@pytest.mark.parametrize(
    ("text", "simple"),
    [
        ("acc * 1.0", "acc"),
        ("0.0 + acc - 0.0", "acc"),
        ("acc / 1.0", "acc"),
        ("-(-acc)", "acc"),
        ("acc * 0.0", "acc * 0.0"),
        ("acc - acc", "acc - acc"),
        ("acc / 8.0", "acc * 0.125"),
        ("acc / 3.0", "acc / 3.0"),
        ("1.0 / acc", "reciprocal(acc)"),
        ("acc / 0.75e-38", "acc / 7.500000213491535e-39"),  # a subnormal number
        ("2.0 * 3.0 + acc", "acc + 6.0"),
        ("0.1 + 0.2 + acc", "acc + 0.30000001192092896"),
        ("3e38 * 3e38 + acc", "acc + inf"),
        ("inf - inf + acc", "acc + nan"),
        ("bf16(bf16(acc))", "bf16(acc)"),
        ("fp16(bf16(acc))", "fp16(bf16(acc))"),
        ("fp32(bf16(acc))", "bf16(acc)"),
        ("bf16(x0) + acc", "acc + x0"),
        ("bf16(1.001) + acc", "acc + 1.0"),
        ("where(1.0 < 2.0, acc, x0)", "acc"),
        ("where(row() < column(), acc, acc)", "acc"),
        ("where(~(acc < x0), acc, 0.0)", "where(acc < x0, 0.0, acc)"),
        ("where(~(row() < 3), acc, 0.0)", "where(row() >= 3, acc, 0.0)"),
        ("where((1 == 1) & (acc > 0.0), acc, 0.0)", "where(acc > 0.0, acc, 0.0)"),
        ("where(x0 > acc, 1.0, 0.0)", "where(acc < x0, 1.0, 0.0)"),
        ("where(0.0 > acc, 1.0, 0.0)", "where(acc < 0.0, 1.0, 0.0)"),
        ("maximum(0.0, acc)", "relu(acc)"),
        ("acc + -x0", "acc - x0"),
        ("-acc + -2.0", "-(acc + 2.0)"),
        ("-2.0 - acc", "-(acc + 2.0)"),
        ("-x0 - acc", "-(acc + x0)"),
        ("x0 + exp(acc)", "exp(acc) + x0"),
        ("float(2147483647 + 1) + acc", "acc - 2147483648.0"),
        ("float(-7 // 2) + float(-7 % 4) + acc", "acc - 3.0"),
        ("acc + float(row() // -1) + float(row() % -1)", "float(0 - row()) + acc"),
        ("float(3 // (row() * 0)) + float(row() % (row() * 0)) + acc", "acc"),
        ("float((-2147483647 - 1) // -1) + acc", "acc - 2147483648.0"),
        ("partner(partner(acc))", "acc"),
        ("partner(2.0) + acc", "acc + 2.0"),
    ],
)
def test_rules(text, simple):
    head = "def epilogue(acc, x0: bf16[N]): return "
    assert simplified(parse(head + text)).text == head + simple


def test_a_cast_at_the_root_that_the_output_repeats_goes():
    assert (
        simplified(parse("def epilogue(acc) -> bf16: return bf16(acc)")).text == "def epilogue(acc) -> bf16: return acc"
    )


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bit for bit, except for the sign of zeros."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


ROUNDED = {name: lambda x, function=function: function(x.double()).to(x.dtype) for name, function in UNARY.items()}
"""The functions of `evaluate`, in float64 and rounded, as constants are folded. torch's own fp32 functions round
differently in a vector and in what is left over after the last one.
"""


def divides_by_zero(program: Program, acc: torch.Tensor, operands: list) -> bool:
    """Whether the sign of a zero, which a simpler program may change, decides between two infinities."""
    places = {"div": 1, "reciprocal": 0, "rsqrt": 0}
    below = [Output(node.args[places[node.op]]) for node in program.nodes if node.op in places]
    values = evaluate(Program(program.inputs, program.nodes, tuple(below), program.gating), acc, operands, dtype=FP32)
    return any(bool((value == 0).any()) for value in values)


@given(SEEDS)
@QUICK
def test_a_simplified_program_gives_the_same_bits(seed):
    """In fp32, with NaN, infinities, zeros of both signs, subnormal and large numbers among the accumulators."""
    raw = programs.raw(seed, size=16, wild=0.3)
    simple = simplified(raw)
    assert simplified(simple) == simple
    generator = torch.Generator().manual_seed(seed % 2**31)
    acc = torch.randn(2, 6, programs.columns(raw, 4), generator=generator)
    places = torch.randint(0, acc.numel(), (24,), generator=generator)
    acc.view(-1)[places] = torch.tensor([math.nan, math.inf, -math.inf, 1e-40, 3e38, -3e38, 0.0, -0.0]).repeat(3)
    given = programs.operands(raw, 2, 6, 4, seed % 2**31)
    with mock.patch.dict(UNARY, ROUNDED):
        assume(not divides_by_zero(raw, acc, given))
        want = evaluate(raw, acc, given, dtype=FP32, out_dtype=FP32)
        got = evaluate(simple, acc, given, dtype=FP32, out_dtype=FP32)
    for out, x, y in zip(raw.outputs, want, got, strict=True):
        assert same(x, y) or ("sum" in (out.reduce or "") and torch.allclose(x, y, equal_nan=True))


@given(SEEDS, SEEDS)
@QUICK
def test_the_order_in_which_a_program_was_made_does_not_matter(seed, shuffle):
    """Commuting arguments exchanged, comparisons turned, nodes in another order, operands renamed."""
    raw = programs.raw(seed, size=16)
    r = random.Random(shuffle)
    opposite = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "ilt": "igt", "igt": "ilt", "ile": "ige", "ige": "ile"}
    builder = Builder([each._replace(name=f"other{i}") for i, each in enumerate(raw.inputs)])
    new: dict[int, int] = {}
    while len(new) < len(raw.nodes):
        ready = [i for i, node in enumerate(raw.nodes) if i not in new and all(arg in new for arg in node.args)]
        number = r.choice(ready)
        op, args, attribute = raw.nodes[number]
        if len(args) == 2 and r.random() < 0.5:
            if op in ("add", "mul", "minimum", "maximum", "eq", "ne", "and", "or", "iadd", "imul", "ieq", "ine"):
                args = args[::-1]
            elif op in opposite:
                op, args = opposite[op], args[::-1]
        new[number] = builder.add(op, *(new[arg] for arg in args), attribute=attribute)
    other = builder.program((out._replace(node=new[out.node]) for out in raw.outputs), raw.gating)
    assert simplified(other) == simplified(raw)
    assert simplified(other).text == simplified(raw).text
    assert hash(simplified(other)) == hash(simplified(raw))


def test_what_is_not_well_formed_is_refused():
    x = (Input("x", "bf16"),)
    for bad in (
        Program((), (Node("exp", (0,)),), (Output(0),)),
        Program((), (Node("row"),), (Output(0),)),
        Program((), (Node("acc"), Node("nothing", (0,))), (Output(1),)),
        Program((), (Node("acc"), Node("exp", (0, 0))), (Output(1),)),
        Program((), (Node("acc"), Node("cast", (0,), "int4")), (Output(1),)),
        Program(x, (Node("input", (), 1),), (Output(0),)),
        Program((), (Node("acc"),), (Output(0, "int4"),)),
        Program((), (Node("acc"),), (Output(0, None, "row_mean"),)),
        Program((), (Node("acc"),), (Output(0),), "halves"),
        Program((), (Node("acc", (), 0),), (Output(0),)),
    ):
        with pytest.raises(ValueError):
            numbered(bad)


def test_a_copy_from_another_process_is_equal():
    """A hash of strings is a process's own, and a NaN equals itself only."""
    program = parse("def epilogue(acc) -> bf16: return maximum(acc, nan)")
    script = "import pickle, sys; found = pickle.loads(sys.stdin.buffer.read()); hash(found); found.text; "
    script += "sys.stdout.buffer.write(pickle.dumps(found))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(program), capture_output=True, check=True, env=environment
    )
    found = pickle.loads(done.stdout)
    assert found == program
    assert {program: 1}[found] == 1
