"""Programs with the same meaning made equal: constants folded, identities removed, one order of arguments.

No rule changes a result beyond the sign of a zero: NaN and infinities stay what they are (x * 0 is no constant), and
sums are not taken in another order. Constants are folded in fp32 (functions in float64, rounded once); two conditions
that are constant decide their `where`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from cutegemm.problem.program.build import Builder, numbered
from cutegemm.problem.program.evaluate import UNARY, rounded
from cutegemm.problem.program.graph import BOOL, OPS, Program

_ROUNDS = 50
"""More passes than a program of any size was seen to need; each removes or moves something."""


def simplified(program: Program) -> Program:
    """The canonical program of the same meaning: operands are named x0, x1, ... and stay declared though no node reads
    them any more; equal nodes are one. `simplified(simplified(p)) == simplified(p)`.
    """
    inputs = tuple(given._replace(name=f"x{i}") for i, given in enumerate(program.inputs))
    program = numbered(Program(inputs, program.nodes, program.outputs, program.gating))
    for _ in range(_ROUNDS):
        simpler = _ordered(_reduced(program))
        if simpler == program:
            break
        program = simpler
    return program


def _reduced(program: Program) -> Program:
    rules = _Rules(program.inputs)
    new: list[int] = []
    for node in program.nodes:
        new.append(rules.make(node.op, tuple(new[arg] for arg in node.args), node.attribute))
    outputs = []
    for out in program.outputs:
        root = rules.nodes[new[out.node]]
        if out.reduce is None and root.op == "cast" and root.attribute == out.dtype:
            outputs.append(out._replace(node=root.args[0]))
        else:
            outputs.append(out._replace(node=new[out.node]))
    return rules.program(outputs, program.gating)


class _Rules(Builder):
    """A builder that adds what a node simplifies to."""

    def make(self, op: str, args: tuple[int, ...], attribute: float | int | str | None = None) -> int:
        """The number of a node of the same value."""
        if op == "const":
            assert isinstance(attribute, (int, float))
            return self.const(attribute)
        folded = self._folded(op, args, attribute)
        if folded is not None:
            return self.const(folded)
        rule = _RULES.get(op)
        found = None if rule is None else rule(self, *args, attribute) if op == "cast" else rule(self, *args)
        return self.add(op, *args, attribute=attribute) if found is None else found

    def _folded(self, op: str, args: tuple[int, ...], attribute: float | int | str | None) -> float | int | None:
        values = [self.value(arg) for arg in args]
        known = [value for value in values if value is not None]
        if not args or len(known) < len(args):
            return None
        if op == "where":
            return known[1] if known[0] else known[2]
        if op in ("cast", *UNARY):
            value = torch.tensor(float(known[0]), dtype=torch.float32, device="cpu")
            return float(rounded(value, str(attribute)) if op == "cast" else UNARY[op](value.double()))
        if op in _FOLDED:
            numbers = [np.float32(value) if isinstance(value, float) else value for value in known]
            with np.errstate(all="ignore"):
                result = _FOLDED[op](*numbers)
            return bool(result) if OPS[op].gives == BOOL else float(result)
        if op in _FOLDED_INTEGERS:
            result = _FOLDED_INTEGERS[op](*known)
            return result if isinstance(result, bool) else wrapped(result)
        return None

    def is_op(self, number: int, op: str) -> tuple[int, ...] | None:
        """The arguments of a node if it is this operation."""
        node = self.nodes[number]
        return node.args if node.op == op else None

    def constant(self, number: int, *values: float) -> bool:
        """Whether a node is a constant that equals one of these."""
        return self.value(number) in values

    # Rules: the number of a simpler node, or None where there is none.

    def neg(self, x: int) -> int | None:
        if (inner := self.is_op(x, "neg")) is not None:
            return inner[0]
        if (inner := self.is_op(x, "sub")) is not None:
            return self.make("sub", inner[::-1])
        return None

    # Of the rules for sums each looks at both orders before the next one does: the order of arguments must not matter.

    def add_(self, x: int, y: int) -> int | None:
        orders = ((x, y), (y, x))
        for a, b in orders:
            if self.constant(b, 0.0):
                return a
        for a, b in orders:
            if self._is_negative(b):
                return self.make("sub", (a, self._negative(b)))
        first, second = self.is_op(x, "neg"), self.is_op(y, "neg")
        if first is not None and second is not None:
            return self.make("neg", (self.make("add", (first[0], second[0])),))
        for a, b in orders:
            if (inner := self.is_op(b, "neg")) is not None:
                return self.make("sub", (a, inner[0]))
        return None

    def sub(self, x: int, y: int) -> int | None:
        if self.constant(y, 0.0):
            return x
        if self.constant(x, 0.0):
            return self.make("neg", (y,))
        if self._is_negative(y):
            return self.make("add", (x, self._negative(y)))
        if (inner := self.is_op(y, "neg")) is not None:
            return self.make("add", (x, inner[0]))
        if self._is_negative(x):
            return self.make("neg", (self.make("add", (self._negative(x), y)),))
        if (inner := self.is_op(x, "neg")) is not None:
            return self.make("neg", (self.make("add", (inner[0], y)),))
        return None

    def _is_negative(self, number: int) -> bool:
        value = self.value(number)
        return value is not None and value < 0

    def _negative(self, number: int) -> int:
        value = self.value(number)
        assert value is not None
        return self.const(-value)

    def mul(self, x: int, y: int) -> int | None:
        for a, b in ((x, y), (y, x)):
            if self.constant(b, 1.0):
                return a
            if self.constant(b, -1.0):
                return self.make("neg", (a,))
            inner, value = self.is_op(a, "neg"), self.value(b)
            if inner is not None and value is not None and self.value(a) is None:
                return self.make("mul", (inner[0], self.const(-value)))
        return self._of_negatives("mul", x, y)

    def div(self, x: int, y: int) -> int | None:
        if self.constant(y, 1.0):
            return x
        if self.constant(x, 1.0):
            return self.make("reciprocal", (y,))
        value = self.value(y)
        if value is not None and math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5 and abs(value) <= 2.0**126:
            inverse = 1.0 / value
            if abs(inverse) <= 2.0**127:
                return self.make("mul", (x, self.const(inverse)))  # exact: a power of two
        return self._of_negatives("div", x, y)

    def _of_negatives(self, op: str, x: int, y: int) -> int | None:
        first, second = self.is_op(x, "neg"), self.is_op(y, "neg")
        if first is None or second is None or self.value(x) is not None or self.value(y) is not None:
            return None
        return self.make(op, (first[0], second[0]))

    def absolute(self, x: int) -> int | None:
        inner = self.is_op(x, "neg")
        if inner is not None:
            return self.make("abs", inner)
        return x if self.is_op(x, "abs") or self.is_op(x, "relu") else None

    def relu(self, x: int) -> int | None:
        return x if self.is_op(x, "relu") or self.is_op(x, "abs") else None

    def maximum(self, x: int, y: int) -> int | None:
        for a, b in ((x, y), (y, x)):
            if self.constant(b, 0.0):
                return self.make("relu", (a,))
        return x if x == y else None

    def minimum(self, x: int, y: int) -> int | None:
        return x if x == y else None

    def cast(self, x: int, dtype: float | int | str | None) -> int | None:
        node = self.nodes[x]
        if dtype == "fp32" or (node.op == "cast" and node.attribute == dtype):
            return x
        return x if node.op == "input" and self.inputs[int(node.attribute or 0)].dtype == dtype else None

    def partner(self, x: int) -> int | None:
        if (inner := self.is_op(x, "partner")) is not None:
            return inner[0]
        node = self.nodes[x]
        same = self.value(x) is not None or (node.op == "input" and not self.inputs[int(node.attribute or 0)].n)
        return x if same else None

    def where(self, condition: int, x: int, y: int) -> int | None:
        value = self.value(condition)
        if value is not None:
            return x if value else y
        if x == y:
            return x
        inner = self.is_op(condition, "not")
        return None if inner is None else self.make("where", (inner[0], y, x))

    def both(self, x: int, y: int) -> int | None:
        for a, b in ((x, y), (y, x)):
            if (value := self.value(b)) is not None:
                return a if value else b
        return x if x == y else None

    def either(self, x: int, y: int) -> int | None:
        for a, b in ((x, y), (y, x)):
            if (value := self.value(b)) is not None:
                return b if value else a
        return x if x == y else None

    def inverted(self, x: int) -> int | None:
        if (inner := self.is_op(x, "not")) is not None:
            return inner[0]
        opposite = _OPPOSITES.get(self.nodes[x].op)
        return None if opposite is None else self.make(opposite, self.nodes[x].args)

    def iadd(self, x: int, y: int) -> int | None:
        for a, b in ((x, y), (y, x)):
            if self.constant(b, 0):
                return a
            value = self.value(b)
            if isinstance(value, int) and -(2**31) < value < 0:
                return self.make("isub", (a, self.const(-value)))
        return None

    def isub(self, x: int, y: int) -> int | None:
        if self.constant(y, 0):
            return x
        value = self.value(y)
        if isinstance(value, int) and -(2**31) < value < 0:
            return self.make("iadd", (x, self.const(-value)))
        return self.const(0) if x == y else None

    def imul(self, x: int, y: int) -> int | None:
        for a, b in ((x, y), (y, x)):
            if self.constant(b, 1):
                return a
            if self.constant(b, 0):
                return b
        return None

    def ifloordiv(self, x: int, y: int) -> int | None:
        if self.constant(y, 0):
            return y
        if self.constant(y, -1):
            return self.make("isub", (self.const(0), x))
        return x if self.constant(y, 1) else None

    def imod(self, x: int, y: int) -> int | None:
        return self.const(0) if self.constant(y, -1, 0, 1) else None


_RULES: dict[str, Callable[..., int | None]] = {
    "neg": _Rules.neg, "add": _Rules.add_, "sub": _Rules.sub, "mul": _Rules.mul, "div": _Rules.div,
    "abs": _Rules.absolute, "relu": _Rules.relu, "maximum": _Rules.maximum, "minimum": _Rules.minimum,
    "cast": _Rules.cast, "partner": _Rules.partner, "where": _Rules.where, "and": _Rules.both, "or": _Rules.either,
    "not": _Rules.inverted, "iadd": _Rules.iadd, "isub": _Rules.isub, "imul": _Rules.imul,
    "ifloordiv": _Rules.ifloordiv, "imod": _Rules.imod,
}  # fmt: skip
_OPPOSITES = {
    "eq": "ne", "ne": "eq",  # of floats only these two: with a NaN both a < b and a >= b are false
    "ilt": "ige", "ile": "igt", "igt": "ile", "ige": "ilt", "ieq": "ine", "ine": "ieq",
}  # fmt: skip
_SWAPPED = {"gt": "lt", "ge": "le", "igt": "ilt", "ige": "ile", "lt": "gt", "le": "ge", "ilt": "igt", "ile": "ige"}
_GREATER = ("gt", "ge", "igt", "ige")


def wrapped(value: int) -> int:
    """The int32 with the same low 32 bits."""
    return (value + 2**31) % 2**32 - 2**31


def _greater(x: np.float32, y: np.float32) -> np.float32:
    """The greater of two, NaN if one is NaN; minus zero is less than zero, whichever comes first."""
    if x == y:
        return y if math.copysign(1.0, x) < 0 else x
    return np.maximum(x, y)


_FOLDED: dict[str, Callable] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "minimum": lambda x, y: -_greater(-x, -y),
    "maximum": lambda x, y: _greater(x, y),
    "float": lambda x: x,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
    "not": lambda x: not x,
}
_FOLDED_INTEGERS: dict[str, Callable] = {
    "iadd": lambda x, y: x + y,
    "isub": lambda x, y: x - y,
    "imul": lambda x, y: x * y,
    "ifloordiv": lambda x, y: x // y if y else 0,
    "imod": lambda x, y: x % y if y else 0,
    **{"i" + name: _FOLDED[name] for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}


def _ordered(program: Program) -> Program:
    """The arguments of commuting operations, and of comparisons, in one order that no numbering enters."""
    keys = _keys(program)
    builder = Builder(program.inputs)
    new: list[int] = []
    for node in program.nodes:
        op, args = node.op, node.args
        if OPS[op].commutes and keys[args[1]] < keys[args[0]]:
            args = args[::-1]
        elif op in _SWAPPED:
            first_is_const, second_is_const = (program.nodes[arg].op == "const" for arg in args)
            if first_is_const or (op in _GREATER and not second_is_const):
                op, args = _SWAPPED[op], args[::-1]
        new.append(builder.add(op, *(new[arg] for arg in args), attribute=node.attribute))
    return builder.program((out._replace(node=new[out.node]) for out in program.outputs), program.gating)


_CLASSES = {"acc": 1, "input": 2, "row": 3, "column": 3, "matrix": 3, "const": 4}
_COMPOUND = 0

_Key = tuple[int, int, int]


def _keys(program: Program) -> list[_Key]:
    """For each node a key that orders the nodes of one program by their form alone: first what is made of others,
    the deepest first, then accumulators, operands, indices, constants.
    """
    depths: list[int] = []
    for node in program.nodes:
        depths.append(1 + max((depths[arg] for arg in node.args), default=-1))
    keys: list[_Key] = [(0, 0, 0)] * len(depths)
    for depth in range(max(depths, default=-1) + 1):
        forms: dict[tuple, list[int]] = {}
        for number, node in enumerate(program.nodes):
            if depths[number] != depth:
                continue
            args = tuple(keys[arg] for arg in node.args)
            args = tuple(sorted(args)) if OPS[node.op].commutes else args
            attribute = node.attribute
            number_first = attribute if isinstance(attribute, (int, float)) and attribute == attribute else 0
            form = (node.op, args, number_first, str(type(attribute)), repr(attribute))
            forms.setdefault(form, []).append(number)
        for rank, form in enumerate(sorted(forms)):
            for number in forms[form]:
                keys[number] = (_CLASSES.get(program.nodes[number].op, _COMPOUND), -depth, rank)
    return keys
