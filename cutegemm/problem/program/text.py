"""The text of a program: a Python function, on one line (the key of kernels) or on several (for people).

    def epilogue(acc, x0: bf16[N], x1: bf16[M, N], x2: fp32): t0 = acc + x0; return gelu(t0) * x2 + x1

An operand's annotation is its dtype and its shape as torch broadcasts it: `bf16[1]` (a 0-dim tensor), `bf16[N]`,
`bf16[M, 1]`, `bf16[M, N]`, and with a batch `bf16[L, 1, 1]`, `bf16[L, 1, N]`, `bf16[L, M, 1]`, `bf16[L, M, N]`. Without
a shape it is a Python number, `fp32` or `int32`. A gated program has `gate: halves[0], up: halves[1]` (or `pairs`)
in place of `acc`. `bf16(t0)` rounds a value; `row_sum(t0)` as a result reduces. Where an output has a dtype of its own
the function has a return annotation, `-> bf16` or `-> (None, bf16)`. Everything else is Python.

`parse` reads a program with `ast`; nothing is executed.
"""

from __future__ import annotations

import ast
import keyword
import math
import re

from cutegemm.problem.dtypes import TABLE
from cutegemm.problem.program.build import TYPE_NAMES, Builder, numbered
from cutegemm.problem.program.graph import F32, GATINGS, I32, OPS, REDUCTIONS, Input, Output, Program

_BINARY: dict[str, type[ast.operator]] = {
    "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div,
    "iadd": ast.Add, "isub": ast.Sub, "imul": ast.Mult, "ifloordiv": ast.FloorDiv, "imod": ast.Mod,
    "and": ast.BitAnd, "or": ast.BitOr,
}  # fmt: skip
_COMPARE: dict[str, type[ast.cmpop]] = {
    "lt": ast.Lt, "le": ast.LtE, "gt": ast.Gt, "ge": ast.GtE, "eq": ast.Eq, "ne": ast.NotEq,
}  # fmt: skip
_COMPARE |= {"i" + name: symbol for name, symbol in tuple(_COMPARE.items())}
_UNARY: dict[str, type[ast.unaryop]] = {"neg": ast.USub, "not": ast.Invert}
_SYMBOLS = {*_BINARY, *_COMPARE, "not"}
_LEAVES = ("acc", "input", "const", "row", "column", "matrix")
_CALLED = {name for name in OPS if name not in (*_SYMBOLS, "acc", "input", "const", "cast")}
"""The operations that are written as calls. `neg` is one of them for a constant, whose sign is part of the number."""
_NUMBERS = {"inf": math.inf, "nan": math.nan}
_RESERVED = {"acc", "gate", "up", *_NUMBERS, *TABLE, *REDUCTIONS, *_CALLED, "int32", "L", "M", "N", *GATINGS}
_TEMPORARY = re.compile(r"t\d+", re.ASCII)
_SHAPES = {
    Input("", "", m, n, batched): shape
    for m, n, batched, shape in (
        (False, False, False, "1"), (False, True, False, "N"), (True, False, False, "M, 1"), (True, True, False, "M, N"),
        (False, False, True, "L, 1, 1"), (False, True, True, "L, 1, N"), (True, False, True, "L, M, 1"),
        (True, True, True, "L, M, N"),
    )
}  # fmt: skip
_INPUTS = {shape: given for given, shape in _SHAPES.items()}
_DEEPEST = 12
"""Expressions of more levels are written in several statements."""


def line(program: Program) -> str:
    """The program on one line. Equal texts mean equal programs. Raises ValueError for one that is not well formed."""
    head, body = _written(program)
    return f"{head} {'; '.join(body)}"


def pretty(program: Program) -> str:
    """The program on several lines, for people. `parse` reads it too."""
    head, body = _written(program)
    return "\n    ".join((head, *body))


def _written(program: Program) -> tuple[str, list[str]]:
    program = numbered(program)
    parameters = _accumulators(program.gating)
    for given in program.inputs:
        _check_name(given.name, [each.split(":")[0] for each in parameters])
        parameters.append(f"{given.name}: {annotation(given)}")
    dtypes = [output.dtype or "None" for output in program.outputs]
    returns = "" if {*dtypes} <= {"None"} else f" -> {dtypes[0] if len(dtypes) == 1 else '(' + ', '.join(dtypes) + ')'}"
    head = f"def epilogue({', '.join(parameters)}){returns}:"
    return head, _statements(program)


def _accumulators(gating: str | None) -> list[str]:
    return [f"gate: {gating}[0]", f"up: {gating}[1]"] if gating else ["acc"]


def annotation(given: Input) -> str:
    """What the text says of an operand: "bf16[M, 1]", "fp32". Raises ValueError for one that is not well formed."""
    if given.dtype not in (*TABLE, "int32"):
        raise ValueError(f"operand {given.name}: dtype {given.dtype!r}, accepted are {', '.join(TABLE)} and int32")
    if not given.by_value:
        return f"{given.dtype}[{_SHAPES[Input('', '', given.m, given.n, given.batched)]}]"
    if given.m or given.n or given.batched or given.dtype not in ("fp32", "int32"):
        raise ValueError(f"operand {given.name}: a number that is passed by value is one fp32 or int32")
    return given.dtype


def _check_name(name: str, taken: list[str]) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or name in _RESERVED or _TEMPORARY.fullmatch(name):
        raise ValueError(f"operand {name!r}: the name is none that a text can have")
    if name in taken:
        raise ValueError(f"operand {name!r}: two have this name")


def _statements(program: Program) -> list[str]:
    uses = [0] * len(program.nodes)
    for number in (*(arg for node in program.nodes for arg in node.args), *(out.node for out in program.outputs)):
        uses[number] += 1
    statements: list[str] = []
    written: list[ast.expr] = []
    depths: list[int] = []
    for number, node in enumerate(program.nodes):
        depth = 1 + max((depths[arg] for arg in node.args), default=0)
        expression = _expression(program, number, [written[arg] for arg in node.args])
        if node.op not in _LEAVES and (uses[number] > 1 or depth >= _DEEPEST):
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
    if node.op in _BINARY:
        return ast.BinOp(args[0], _BINARY[node.op](), args[1])
    if node.op in _COMPARE:
        return ast.Compare(args[0], [_COMPARE[node.op]()], [args[1]])
    if node.op in _UNARY and program.nodes[node.args[0]].op != "const":
        return ast.UnaryOp(_UNARY[node.op](), args[0])
    return _call(node.op, args)


def _number(value: float | int) -> ast.expr:
    if value != value:
        return ast.Name("nan")
    size = ast.Name("inf") if math.isinf(value) else ast.Constant(abs(value))
    return ast.UnaryOp(ast.USub(), size) if value < 0 else size


def parse(text: str) -> Program:
    """The program that a text is, in canonical numbering: `parse(line(program)) == program` for every simplified one.

    Raises ValueError naming what is wrong.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"an epilogue's text is a Python function, got {text[:200]!r}: {error}") from error
    if len(module.body) != 1 or not isinstance(module.body[0], ast.FunctionDef):
        raise ValueError(f"an epilogue's text is one Python function, got {text[:200]!r}")
    try:
        return _Reader(module.body[0]).read()
    except RecursionError as error:
        raise ValueError("an expression has too many levels: name its parts") from error


class _Reader:
    """Reads one function definition."""

    def __init__(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        if function.name != "epilogue" or function.decorator_list:
            raise ValueError(f"the function is called 'epilogue', without decorators; got {function.name!r}")
        more = (*arguments.posonlyargs, *arguments.kwonlyargs, *arguments.defaults, arguments.vararg, arguments.kwarg)
        if any(each is not None for each in more):
            raise ValueError("the parameters are names with annotations: no defaults, no * and no /")
        self.function = function
        parameters = [(each.arg, "" if each.annotation is None else _text(each.annotation)) for each in arguments.args]
        self.gating = _gating(parameters)
        count = 1 if self.gating is None else 2
        taken = [name for name, _ in parameters[:count]]
        inputs = []
        for name, note in parameters[count:]:
            _check_name(name, taken)
            taken.append(name)
            inputs.append(_input(name, note))
        self.builder = Builder(inputs)
        self.names = {name: self.builder.add("input", attribute=i) for i, name in enumerate(taken[count:])}
        for i, name in enumerate(taken[:count]):
            self.names[name] = self.builder.add("acc", attribute=None if self.gating is None else i)

    def read(self) -> Program:
        *assignments, last = self.function.body
        for statement in assignments:
            if not (
                isinstance(statement, ast.Assign)
                and len(statement.targets) == 1
                and isinstance(statement.targets[0], ast.Name)
            ):
                raise ValueError(f"{_text(statement)!r}: accepted are 'name = expression', and 'return' at the end")
            name = statement.targets[0].id
            if not _TEMPORARY.fullmatch(name) or name in self.names:
                raise ValueError(f"{name!r} is assigned: accepted are t0, t1, ..., each once")
            self.names[name] = self.expression(statement.value)
        if not isinstance(last, ast.Return) or last.value is None:
            raise ValueError(f"{_text(last)!r}: the last statement is 'return' with the results")
        results = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        dtypes = self.dtypes(len(results))
        outputs = [self.output(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]
        return self.builder.program(outputs, self.gating)

    def dtypes(self, count: int) -> list[str | None]:
        returns = self.function.returns
        if returns is None:
            return [None] * count
        named = [_text(each) for each in (returns.elts if isinstance(returns, ast.Tuple) else [returns])]
        for name in named:
            if name not in ("None", *TABLE):
                raise ValueError(f"an output's dtype {name!r}, accepted are None, {', '.join(TABLE)}")
        if len(named) != count:
            raise ValueError(f"'-> {_text(returns)}' has {len(named)} dtypes for {count} results")
        return [None if name == "None" else name for name in named]

    def output(self, result: ast.expr, dtype: str | None) -> Output:
        name = _called(result)
        if name not in REDUCTIONS:
            return Output(self.expression(result), dtype)
        (arg,) = self.arguments(result, name, 1)
        return Output(arg, dtype, name)

    def arguments(self, call: ast.expr, name: str, count: int) -> list[int]:
        assert isinstance(call, ast.Call)
        if call.keywords or len(call.args) != count:
            raise ValueError(f"{_text(call)!r}: {name} takes {count} arguments, by place")
        return [self.expression(arg) for arg in call.args]

    def expression(self, node: ast.expr) -> int:
        """The number of a value."""
        number = _literal(node)
        if number is not None:
            return self.builder.const(number)
        try:
            found = self.compound(node)
        except ValueError as error:
            if str(error).startswith("in '"):
                raise
            raise ValueError(f"in {_text(node)!r}: {error}") from error
        if found is None:
            raise ValueError(f"{_text(node)!r} is no expression of an epilogue")
        return found

    def compound(self, node: ast.expr) -> int | None:
        if isinstance(node, ast.Name):
            if node.id not in self.names:
                raise ValueError(f"the name {node.id!r} is not defined")
            return self.names[node.id]
        if isinstance(node, ast.BinOp):
            return self.typed(_BINARY, type(node.op), self.expression(node.left), self.expression(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.expression(node.left), self.expression(node.comparators[0])
            return self.typed(_COMPARE, type(node.ops[0]), left, right)
        if isinstance(node, ast.UnaryOp):
            return self.typed(_UNARY, type(node.op), self.expression(node.operand))
        name = _called(node)
        if name in TABLE:
            return self.builder.add("cast", *self.arguments(node, name, 1), attribute=name)
        if name in _CALLED:
            return self.builder.add(name, *self.arguments(node, name, len(OPS[name].takes)))
        if name in REDUCTIONS:
            raise ValueError(f"{name} is a result, and no part of an expression")
        if name is not None:
            raise ValueError(f"the function {name!r} is not known")
        return None

    def typed(self, symbols: dict, symbol: type, *args: int) -> int | None:
        """The operation with this symbol for arguments of these types."""
        names = [name for name, each in symbols.items() if each is symbol]
        types = tuple(self.builder.types[arg] for arg in args)
        for name in names:
            if OPS[name].takes == types:
                return self.builder.add(name, *args)
        if not names:
            return None
        given = " and ".join(TYPE_NAMES[each] for each in types)
        hint = "; float(...) converts an int32" if {F32, I32} <= {*types} else ""
        raise ValueError(f"no such operation on {given}{hint}")


def _gating(parameters: list[tuple[str, str]]) -> str | None:
    if parameters and parameters[0] == ("acc", ""):
        return None
    for gating in GATINGS:
        if parameters[:2] == [("gate", f"{gating}[0]"), ("up", f"{gating}[1]")]:
            return gating
    raise ValueError(
        "the first parameters are 'acc', 'gate: halves[0], up: halves[1]' or 'gate: pairs[0], up: pairs[1]'"
    )


def _input(name: str, note: str) -> Input:
    dtype, bracket, shape = note.partition("[")
    if dtype not in (*TABLE, "int32"):
        raise ValueError(f"operand {name}: dtype {dtype!r}, accepted are {', '.join(TABLE)} and int32")
    if not bracket:
        if dtype not in ("fp32", "int32"):
            raise ValueError(f"operand {name}: {note!r} without a shape is a number, which is fp32 or int32")
        return Input(name, dtype, by_value=True)
    found = _INPUTS.get(shape.removesuffix("]"))
    if found is None:
        raise ValueError(f"operand {name}: shape [{shape}, accepted are {', '.join(f'[{each}]' for each in _INPUTS)}")
    return found._replace(name=name, dtype=dtype)


def _literal(node: ast.expr) -> float | int | None:
    """The number that is written there, with a sign or without; None where none is."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        size = None if isinstance(node.operand, ast.UnaryOp) else _literal(node.operand)
        return None if size is None else -size
    if isinstance(node, ast.Name):
        return _NUMBERS.get(node.id)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        assert isinstance(node.value, (int, float))
        return node.value
    return None


def _called(node: ast.expr) -> str | None:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _text(node: ast.AST) -> str:
    return ast.unparse(node)
