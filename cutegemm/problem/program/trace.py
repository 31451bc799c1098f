"""From a Python function to a program: the function is called once with symbolic values (`value.Value`).

`lookup` in `known` remembers what a function meant; `cutegemm.ops` has the functions that users write.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from cutegemm.errors import EpilogueError
from cutegemm.problem.program.graph import BOOL, F32, Input, Output, Program
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.value import RUNNING, Reduction, Trace, Value


def trace(function: Callable[..., Any], inputs: Sequence[Input]) -> Program:
    """The program that a Python function means: function(acc, *operands) with an operand for each of `inputs`.

    Returns the simplified program, whose operands are named x0, x1, ... in their order.

    Raises EpilogueError, which names the line of the function, for what an epilogue cannot contain, and for an operand
    that no result depends on.
    """
    if not callable(function):
        raise EpilogueError(f"epilogue: got {type(function).__name__}, accepted is a function of acc and the operands")
    names = _parameters(function, len(inputs))
    running = Trace([given._replace(name=f"x{i}") for i, given in enumerate(inputs)])
    builder = running.builder
    arguments = [Value(running, builder.add("input", attribute=i)) for i in range(len(inputs))]
    RUNNING.traces.append(running)
    try:
        result = function(Value(running, running.acc), *arguments)
    finally:
        RUNNING.traces.pop()
        running.finished = True
    where_is = _place(function)
    results = result if isinstance(result, (tuple, list)) else (result,)
    if not results:
        raise EpilogueError(f"{where_is}: the epilogue returns no result")
    outputs = [output_of(each, running, where_is) for each in results]
    program = builder.program(outputs, running.gating)
    read = {node.attribute for node in program.nodes if node.op == "input"}
    unused = [f"{i} ({name})" for i, name in enumerate(names) if i not in read]
    if unused:
        raise EpilogueError(
            f"{where_is}: no result depends on operand {', '.join(unused)}: leave it out, of operands= too"
        )
    return simplified(program)


def output_of(result: Any, running: Trace, where_is: str) -> Output:
    """One result of the function. A cast at the root says the output's dtype."""
    if isinstance(result, Reduction):
        kind, dtype, value = result.kind, result.dtype, result.value
    elif isinstance(result, Value):
        kind, dtype, value = None, None, result
    else:
        raise EpilogueError(
            f"{where_is}: the epilogue returns {type(result).__name__}, accepted are values, reductions such as "
            "ops.row_sum(x), and tuples of them"
        )
    if value._trace is not running:
        raise EpilogueError(f"{where_is}: the epilogue returns a value of another call")
    if value.type == BOOL:
        raise EpilogueError(f"{where_is}: the epilogue returns a condition: write ops.where(condition, 1.0, 0.0)")
    if running.gating and value._number == running.acc:
        raise EpilogueError(f"{where_is}: the epilogue returns acc, which ops.{running.gating}(acc) has divided")
    builder = running.builder
    number = value._number if value.type == F32 else builder.add("float", value._number)
    node = builder.nodes[number]
    if kind is None and node.op == "cast":
        return Output(node.args[0], str(node.attribute))
    return Output(number, dtype, kind)


def _place(function: Callable[..., Any]) -> str:
    """Where a function is written, for messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return f"epilogue {getattr(function, '__name__', type(function).__name__)}"
    return f"{code.co_filename}:{code.co_firstlineno}"


def _parameters(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the parameters for the operands. Raises EpilogueError where the function does not take so many."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return [f"x{i}" for i in range(count)]
    try:
        bound = signature.bind(*range(-1, count))
    except TypeError as error:
        raise EpilogueError(
            f"{_place(function)}: the epilogue is called with acc and {count} operands, and its parameters are "
            f"{signature}: {error}"
        ) from None
    names = {}
    for name, value in bound.arguments.items():
        if isinstance(value, tuple):
            names.update({each: f"{name}[{i}]" for i, each in enumerate(value)})
        else:
            names[value] = name
    return [names[i] for i in range(count)]
