"""The text of a program: a Python function, on one line (the key of kernels) or on several (for people).

    def epilogue(acc, x0: bf16[N], x1: bf16[M, N], x2: fp32): t0 = acc + x0; return gelu(t0) * x2 + x1

An operand's annotation is its dtype and its shape as torch broadcasts it: `bf16[1]` (a 0-dim tensor), `bf16[N]`,
`bf16[M, 1]`, `bf16[M, N]`, and with a batch `bf16[L, 1, 1]`, `bf16[L, 1, N]`, `bf16[L, M, 1]`, `bf16[L, M, N]`. A
number in the place of N, as in `bf16[M, 128]`, says that so many columns repeat. Without a shape it is a Python number
(`fp32`, `int32`). A gated program has `gate: halves[0], up: halves[1]` (or `pairs`) in place of `acc`. `bf16(t0)`
rounds a value; `row_sum(t0)` as a result reduces. Where an output has a dtype of its own the function has a return
annotation, `-> bf16` or `-> (None, bf16)`. Everything else is Python.

`line` and `pretty` write, `parse` reads with `ast`: nothing is executed.
"""

from __future__ import annotations

import ast

from cutegemm.problem.dtypes import TABLE
from cutegemm.problem.program.build import TYPE_NAMES, Builder
from cutegemm.problem.program.graph import F32, GATINGS, I32, OPS, REDUCED, Input, Output, Program
from cutegemm.problem.program.writing import (
    BINARY,
    COMPARE,
    NUMBERS,
    SCALES,
    SHAPES,
    TEMPORARY,
    UNARY,
    check_name,
    line,
    pretty,
)

__all__ = ["line", "parse", "pretty"]

_CALLED = {name for name in OPS if name not in (*BINARY, *COMPARE, "not", "acc", "input", "const", "cast")}
"""The operations that are written as calls. `neg` is one of them for a constant, whose sign is part of the number."""
_INPUTS = {shape: extents for extents, shape in SHAPES.items()}
_BLOCKS = {shape: blocks for blocks, shape in SCALES.items()}


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
            check_name(name, taken)
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
            if not TEMPORARY.fullmatch(name) or name in self.names:
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
        if name not in REDUCED:
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
            return self.typed(BINARY, type(node.op), self.expression(node.left), self.expression(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.expression(node.left), self.expression(node.comparators[0])
            return self.typed(COMPARE, type(node.ops[0]), left, right)
        if isinstance(node, ast.UnaryOp):
            return self.typed(UNARY, type(node.op), self.expression(node.operand))
        name = _called(node)
        if name in TABLE:
            return self.builder.add("cast", *self.arguments(node, name, 1), attribute=name)
        if name in _CALLED:
            return self.builder.add(name, *self.arguments(node, name, len(OPS[name].takes)))
        if name in REDUCED:
            raise ValueError(f"{name} is a result, and no part of an expression")
        if name:
            raise ValueError(f"the function {name!r} is not known")
        return None

    def typed(self, symbols: dict, symbol: type, *args: int) -> int | None:
        """The operation with this symbol for arguments of these types."""
        names = [name for name, each in symbols.items() if each is symbol]
        types = tuple(self.builder.types[arg] for arg in args)
        for name in names:
            if OPS[name].takes == types:
                if name in ("ifloordiv", "imod") and self.builder.value(args[1]) == 0:
                    raise ValueError("division by zero")
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
    blocks = _BLOCKS.get(shape.removesuffix("]"))
    if blocks is not None and dtype == "fp32":
        return Input(name, dtype, batched=blocks[1], scales=blocks[0])
    *before, last = shape.removesuffix("]").split(", ")
    period = int(last) if last.isascii() and last.isdecimal() and 1 < int(last) < 2**31 else 0
    found = _INPUTS.get(", ".join((*before, "N")) if period else shape.removesuffix("]"))
    if found is None:
        raise ValueError(
            f"operand {name}: shape [{shape}, accepted are {', '.join(f'[{each}]' for each in _INPUTS)}, and a number "
            "of columns that repeat in the place of N"
        )
    return Input(name, dtype, *found, period=period)


def _literal(node: ast.expr) -> float | int | None:
    """The number that is written there, with a sign or without; None where none is."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        size = None if isinstance(node.operand, ast.UnaryOp) else _literal(node.operand)
        return None if size is None else -size
    if isinstance(node, ast.Name):
        return NUMBERS.get(node.id)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        assert isinstance(node.value, (int, float))
        return node.value
    return None


def _called(node: ast.expr) -> str:
    """The name of the function that is called there, "" where none is."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _text(node: ast.AST) -> str:
    return ast.unparse(node)
