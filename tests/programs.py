"""Random epilogue programs and operands for them, by seed."""

from __future__ import annotations

import random

import torch

from cutegemm.problem import torch_dtype
from cutegemm.problem.dtypes import TERMS
from cutegemm.problem.program.build import Builder
from cutegemm.problem.program.graph import (
    BLOCK_SCALE_OPS,
    F32,
    GATINGS,
    I32,
    OPS,
    PACKERS,
    REDUCTIONS,
    Input,
    Output,
    Program,
)
from cutegemm.problem.program.simplify import simplified

_PLAIN = ("neg", "abs", "relu", "tanh", "sigmoid", "erf", "gelu", "gelu_tanh", "silu")
"""Functions that give a usable number for every number."""
_GUARDED = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "reciprocal")
_SMOOTH = ("neg", "tanh", "sigmoid", "erf", "gelu", "gelu_tanh", "silu")
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")


class _Draw:
    """A program in the making. `smooth`: with derivatives everywhere, and no casts."""

    def __init__(self, seed: int, inputs: int, smooth: bool, wild: float) -> None:
        self.random = random.Random(seed)
        self.periods = random.Random(seed + 1)  # apart, so that a seed's program is otherwise what it always was
        self.smooth = smooth
        self.wild = wild
        self.builder = Builder([self.input(i) for i in range(self.random.randint(0, inputs))])
        self.gating = self.random.choice((None, None, None, *GATINGS))
        accumulators = [None] if self.gating is None else [0, 1]
        self.floats = [self.builder.add("acc", attribute=each) for each in accumulators]
        self.integers: list[int] = []
        self.conditions: list[int] = []
        for i, given in enumerate(self.builder.inputs):
            (self.floats if given.type == F32 else self.integers).append(self.builder.add("input", attribute=i))

    def input(self, i: int) -> Input:
        r = self.random
        if r.random() < 0.15:
            return Input(f"x{i}", r.choice(("fp32", "int32")), by_value=True)
        dtype = "int32" if r.random() < 0.1 else r.choice(TERMS)
        m, n = r.choice(((False, True), (True, False), (True, True), (True, True), (False, False)))
        period = self.periods.choice((2, 5, 8, 16, 24, 32, 64, 128)) if n and self.periods.random() < 0.2 else 0
        return Input(f"x{i}", dtype, m, n, r.random() < 0.3, period=period)

    def float(self) -> int:
        if self.random.random() < 0.15:
            return self.builder.const(self.random.choice((0.5, -1.5, 2.0, 1.0, 0.0, -0.0, 3.25, 0.1)))
        if self.random.random() < self.wild * 0.1:
            return self.builder.const(self.random.choice((float("inf"), float("-inf"), float("nan"), 1e38, 1e-40)))
        return self.random.choice(self.floats[-4:] if self.random.random() < 0.6 else self.floats)

    def integer(self) -> int:
        r = self.random
        if self.integers and r.random() < 0.6:
            return r.choice(self.integers)
        if r.random() < 0.3:
            return self.builder.const(r.randint(-3, 9))
        return self.builder.add(r.choice(("row", "column", "matrix")))

    def step(self) -> None:
        r, add = self.random, self.builder.add
        kind = r.random()
        if kind < 0.30:
            self.floats.append(add(r.choice(("add", "sub", "mul", "mul", "add")), self.float(), self.float()))
        elif kind < 0.36:
            bottom = self.float()
            if r.random() >= self.wild:
                bottom = add("add", add("mul", bottom, bottom), self.builder.const(0.75))
            self.floats.append(add("div", self.float(), bottom))
        elif kind < 0.52:
            self.floats.append(add(r.choice(_SMOOTH if self.smooth else _PLAIN), self.float()))
        elif kind < 0.64:
            self.floats.append(self.guarded(r.choice(_GUARDED)))
        elif kind < 0.70:
            if self.smooth:
                self.floats.append(add("tanh", self.float()))
            else:
                self.floats.append(add(r.choice(("minimum", "maximum")), self.float(), self.float()))
        elif kind < 0.78:
            self.where()
        elif kind < 0.84:
            op = r.choice(("iadd", "isub", "imul", "ifloordiv", "imod"))
            second = self.builder.const(r.randint(1, 5)) if op in ("ifloordiv", "imod") else self.integer()
            self.integers.append(add(op, self.integer(), second))
        elif kind < 0.88:
            self.floats.append(add("mul", add("float", self.integer()), self.builder.const(0.125)))
        elif kind < 0.92:
            self.floats.append(add("partner", self.float()))
        elif kind < 0.95:
            places = [add(op) for op in ("row", "column", "matrix")]
            self.floats.append(add("random", self.integer(), *places))
        elif not self.smooth:
            self.floats.append(add("cast", self.float(), attribute=r.choice(TERMS)))

    def guarded(self, op: str) -> int:
        """A function whose argument is kept where the result is an ordinary number, mostly."""
        add, const, x = self.builder.add, self.builder.const, self.float()
        if self.random.random() < self.wild:
            return add(op, x)
        if op in ("exp", "exp2"):
            return add(op, add("tanh", x) if self.smooth else add("minimum", x, const(4.0)))
        positive = add("mul", x, x) if self.smooth else add("abs", x)
        return add(op, add("add", positive, const(0.75)))

    def where(self) -> None:
        r, add = self.random, self.builder.add
        if r.random() < 0.5 or self.smooth:
            compared = add("i" + r.choice(_COMPARE), self.integer(), self.integer())
        else:
            compared = add(r.choice(_COMPARE), self.float(), self.float())
        if self.conditions and r.random() < 0.3:
            compared = add(r.choice(("and", "or")), compared, r.choice(self.conditions))
        if r.random() < 0.2:
            compared = add("not", compared)
        self.conditions.append(compared)
        self.floats.append(add("where", compared, self.float(), self.float()))

    def outputs(self, reductions: tuple[str, ...]) -> list[Output]:
        r, last = self.random, self.floats[-1]
        for i, given in enumerate(self.builder.inputs):  # whatever no node has read yet
            number = self.builder.add("input", attribute=i)
            last = self.builder.add("add", last, number if given.type == F32 else self.builder.add("float", number))
        found = [Output(last, r.choice((None, None, *TERMS)))]
        if r.random() < 0.35:
            found.append(Output(r.choice(self.floats), r.choice((None, *TERMS))))
        if reductions and r.random() < 0.35:
            found.append(Output(r.choice(self.floats), r.choice((None, None, *TERMS)), r.choice(reductions)))
        return found


def raw(seed: int, *, size: int = 10, inputs: int = 4, smooth: bool = False, wild: float = 0.1) -> Program:
    """A program as it is drawn, in canonical numbering, with every operand in use. See `program`."""
    draw = _Draw(seed, inputs, smooth, wild)
    for _ in range(draw.random.randint(0, size)):
        draw.step()
    return draw.builder.program(draw.outputs(("row_sum", "column_sum") if smooth else REDUCTIONS), draw.gating)


def program(seed: int, **options) -> Program:
    """A simplified random program.

    Args:
        size: steps at most, each of which adds one operation or a few. inputs: operands at most.
        smooth: only what has a derivative, no casts.
        wild: share of functions whose argument may leave their domain, and rate of infinite constants.
    """
    return simplified(raw(seed, **options))


def shape(given: Input, count: int | None, m: int, n: int) -> tuple[int, ...]:
    """The shape of an operand's tensor; count: the batch, None without one."""
    n = given.period or n
    if given.batched and count is not None:
        return count, m if given.m else 1, n if given.n else 1
    if given.m:
        return m, n if given.n else 1
    return (n,) if given.n else ()


def operands(of: Program, count: int | None, m: int, n: int, seed: int) -> list[torch.Tensor | float | int]:
    """Operands for a program: standard normal values, small integers. Without a batch `count` is None."""
    generator = torch.Generator().manual_seed(seed)
    found: list[torch.Tensor | float | int] = []
    for given in of.inputs:
        if given.by_value and given.type == I32:
            found.append(int(torch.randint(-5, 6, (), generator=generator)))
        elif given.by_value:
            found.append(float(torch.randn((), generator=generator)))
        elif given.type == I32:
            found.append(torch.randint(-5, 6, shape(given, count, m, n), generator=generator, dtype=torch.int32))
        else:
            values = torch.randn(shape(given, count, m, n), generator=generator)
            found.append(values.to(torch_dtype(given.dtype)))
    return found


def columns(of: Program, n: int) -> int:
    """The columns of the accumulators for n columns of D."""
    return 2 * n if of.gating else n


def every_operation(programs: list[Program]) -> set[str]:
    """The operations that no program has, but for those of derived programs and of quantized results alone."""
    return set(OPS) - {*PACKERS, *BLOCK_SCALE_OPS, "per_scale"} - {node.op for each in programs for node in each.nodes}
