"""How a program is written as text; `text` says what the text means and reads it.

Knows programs by their fields only, so that `graph` can import it.
"""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from cutegemm.problem.dtypes import TABLE

if TYPE_CHECKING:
    from cutegemm.problem.program.graph import Input, Program

BINARY: dict[str, type[ast.operator]] = {
    "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div,
    "iadd": ast.Add, "isub": ast.Sub, "imul": ast.Mult, "ifloordiv": ast.FloorDiv, "imod": ast.Mod,
    "and": ast.BitAnd, "or": ast.BitOr,
}  # fmt: skip
COMPARE: dict[str, type[ast.cmpop]] = {
    "lt": ast.Lt, "le": ast.LtE, "gt": ast.Gt, "ge": ast.GtE, "eq": ast.Eq, "ne": ast.NotEq,
}  # fmt: skip
COMPARE |= {"i" + name: symbol for name, symbol in tuple(COMPARE.items())}
UNARY: dict[str, type[ast.unaryop]] = {"neg": ast.USub, "not": ast.Invert}
SHAPES = {
    (False, False, False): "1", (False, True, False): "N", (True, False, False): "M, 1", (True, True, False): "M, N",
    (False, False, True): "L, 1, 1", (False, True, True): "L, 1, N", (True, False, True): "L, M, 1",
    (True, True, True): "L, M, N",
}  # fmt: skip
"""The shape of an operand by (m, n, batched)."""
SCALES = {
    (f"{operand}{rows}", batched): f"{'L, ' * batched}{operand.upper()}, {rows}, 128"
    for operand in "ab" for rows in (1, 128) for batched in (False, True)
}  # fmt: skip
"""The blocks of an operand that scales A or B by (`Input.scales`, batched)."""
NUMBERS = {"inf": math.inf, "nan": math.nan}
TEMPORARY = re.compile(r"t\d+", re.ASCII)
"""Names of values in a text."""
_LEAVES = ("acc", "input", "const", "row", "column", "matrix")
_DEEPEST = 12
"""Expressions of more levels are written in several statements."""


def line(program: Program) -> str:
    """The program on one line. Raises ValueError for operands that no text can have."""
    head, body = _written(program)
    return f"{head} {'; '.join(body)}"


def pretty(program: Program) -> str:
    """The program on several lines, for people. Raises ValueError for operands that no text can have."""
    head, body = _written(program)
    return "\n    ".join((head, *body))


def _written(program: Program) -> tuple[str, list[str]]:
    gating = program.gating
    parameters = [f"gate: {gating}[0]", f"up: {gating}[1]"] if gating else ["acc"]
    taken = ["gate", "up"] if gating else ["acc"]
    for given in program.inputs:
        check_name(given.name, taken)
        taken.append(given.name)
        parameters.append(f"{given.name}: {annotation(given)}")
    dtypes = [output.dtype or "None" for output in program.outputs]
    returns = "" if {*dtypes} <= {"None"} else f" -> {dtypes[0] if len(dtypes) == 1 else '(' + ', '.join(dtypes) + ')'}"
    return f"def epilogue({', '.join(parameters)}){returns}:", _statements(program)


def check_name(name: str, taken: Collection[str]) -> None:
    """Raises ValueError unless an operand may have this name beside those that are taken."""
    reserved = ("acc", "gate", "up", "int32", *NUMBERS, *TABLE)
    if not name.isidentifier() or keyword.iskeyword(name) or name in reserved or TEMPORARY.fullmatch(name):
        raise ValueError(f"operand {name!r}: accepted are names that mean nothing else in the text")
    if name in taken:
        raise ValueError(f"operand {name!r}: two have this name")


def annotation(given: Input) -> str:
    if given.dtype not in (*TABLE, "int32"):
        raise ValueError(f"operand {given.name}: dtype {given.dtype!r}, accepted are {', '.join(TABLE)} and int32")
    if given.scales:
        if (given.scales, given.batched) not in SCALES or given.dtype != "fp32" or given.m or given.n or given.by_value:
            raise ValueError(f"operand {given.name}: {given.scales!r} of {given.dtype}, accepted are scales in fp32")
        return f"{given.dtype}[{SCALES[given.scales, given.batched]}]"
    if not given.by_value:
        shape = SHAPES[given.m, given.n, given.batched]
        if given.period:
            if given.period < 2 or not given.n:
                raise ValueError(f"operand {given.name}: period {given.period}, accepted is a number of columns")
            shape = f"{shape[:-1]}{given.period}"
        return f"{given.dtype}[{shape}]"
    if given.m or given.n or given.batched or given.dtype not in ("fp32", "int32"):
        raise ValueError(f"operand {given.name}: a number that is passed by value is one fp32 or int32")
    return given.dtype


def _statements(program: Program) -> list[str]:
    uses = _uses(program)
    statements: list[str] = []
    written: list[ast.expr] = []
    depths: list[int] = []
    for number, node in enumerate(program.nodes):
        depth = 1 + max((depths[arg] for arg in node.args), default=0)
        expression = _expression(program, number, [written[arg] for arg in node.args])
        if node.op not in _LEAVES and (uses[number] > 1 or (depth >= _DEEPEST and uses[number])):
            name = f"t{len(statements)}"
            statements.append(f"{name} = {ast.unparse(expression)}")
            expression, depth = ast.Name(name), 1
        written.append(expression)
        depths.append(depth)
    results = [
        ast.unparse(written[out.node] if out.reduce is None else _call(out.reduce, [written[out.node]]))
        for out in program.outputs
    ]
    return [*statements, "return " + (", ".join(results) or "()")]


def _uses(program: Program) -> list[int]:
    """How often each node is needed; 0 for those that no output needs."""
    uses = [0] * len(program.nodes)
    for output in program.outputs:
        uses[output.node] += 1
    for number in reversed(range(len(uses))):
        for arg in program.nodes[number].args if uses[number] else ():
            uses[arg] += 1
    return uses


def _call(name: str, args: list[ast.expr]) -> ast.expr:
    return ast.Call(ast.Name(name), args, [])


def _expression(program: Program, number: int, args: list[ast.expr]) -> ast.expr:
    node = program.nodes[number]
    if node.op == "const":
        assert isinstance(node.attribute, (int, float))
        return _number(node.attribute)
    if node.op == "input":
        assert isinstance(node.attribute, int)
        return ast.Name(program.inputs[node.attribute].name)
    if node.op == "acc":
        return ast.Name("acc" if node.attribute is None else ("gate", "up")[int(node.attribute)])
    if node.op == "cast":
        return _call(str(node.attribute), args)
    if node.op in BINARY:
        return ast.BinOp(args[0], BINARY[node.op](), args[1])
    if node.op in COMPARE:
        return ast.Compare(args[0], [COMPARE[node.op]()], [args[1]])
    if node.op in UNARY and program.nodes[node.args[0]].op != "const":  # the sign of a constant is part of the number
        return ast.UnaryOp(UNARY[node.op](), args[0])
    return _call(node.op, args)


def _number(value: float | int) -> ast.expr:
    if value != value:
        return ast.Name("nan")
    size = ast.Name("inf") if math.isinf(value) else ast.Constant(abs(value))
    return ast.UnaryOp(ast.USub(), size) if math.copysign(1.0, value) < 0 else size
