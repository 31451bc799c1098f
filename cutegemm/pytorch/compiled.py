"""From a Python function to a program's text while torch.compile traces the call: dynamo runs it symbolically.

Dynamo follows the function as it follows the model around it, with the values of `trace` in place of numbers. So it
guards whatever the function reads (closures, globals, attributes), a function defined within the compiled region is as
good as any other, and a change compiles anew. Only what is easy to follow happens under dynamo's eyes: operations are
written down (`_Recorder`); `_text` makes the program of them out of its sight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from cutegemm.errors import EpilogueError
from cutegemm.problem import program_request
from cutegemm.problem.dtypes import TABLE, dtype_name
from cutegemm.problem.extents import varying
from cutegemm.problem.program.graph import F32, I32, OPS, Input, Program
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.trace import output_of
from cutegemm.problem.program.value import Reduction, Trace, Value, bind, fail, value_of

F = TypeVar("F")
Described = tuple[torch.dtype | str, bool, bool, bool]
"""An operand: its dtype ("float" or "int" for a number), and whether it varies along m, n and the batch."""


def _once_a_graph(function: F) -> F:
    """torch.compiler.assume_constant_result, without the second that importing dynamo takes."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def as_arguments(epilogue: Any, operands: Sequence[Any], like: torch.Tensor) -> tuple[str, Sequence[Any]]:
    """What an operator takes for an epilogue: the text of its program, and the operands. Floats that may change
    become tensors on the device of `like`. To be traced by dynamo. Raises as `text_of`.
    """
    operands = _floats_as_tensors(operands, like)
    return text_of(epilogue, operands), operands


def _floats_as_tensors(operands: Sequence[Any], like: torch.Tensor) -> Sequence[Any]:
    """The operands, with floats that may change as tensors of one number where `like` is.

    A float may change where dynamo has seen two values of it, and where it follows from a size or from `.item()`. As an
    argument of an operator it would be a constant of the graph, so that each value would compile anew. What fp32 does
    not hold is infinite in such a tensor, where a number is refused.
    """
    from torch.fx.experimental.symbolic_shapes import has_static_value  # which imports sympy

    found = []
    for operand in operands:
        if not isinstance(operand, float) or has_static_value(operand):
            found.append(operand)
        elif type(like) is torch.Tensor or type(like) is torch.nn.Parameter:
            found.append(torch.ones((), dtype=torch.float32, device=like.device) * operand)
        else:  # of DTensors one of their kind, which torch makes constant again
            found.append(like.new_ones((), dtype=torch.float32) * operand)
    return found


def text_of(epilogue: Any, operands: Sequence[Any]) -> str:
    """The text of the program that an epilogue means for these operands. To be traced by dynamo.

    Raises EpilogueError where the function is no epilogue, ValueError and TypeError for other operands than a Program
    has.
    """
    described = []
    for number, operand in enumerate(operands):
        if isinstance(operand, bool):
            raise TypeError(f"operands[{number}]: got bool, expected a torch.Tensor or a Python number")
        described.append(_described(operand))
    if isinstance(epilogue, Program):
        # Its parts: torch 2.11 makes no constant of a dataclass.
        return _text_of_program(epilogue.inputs, epilogue.nodes, epilogue.outputs, epilogue.gating, tuple(described))
    return text_for(epilogue, tuple(described))


def text_for(epilogue: Any, described: tuple[Described, ...]) -> str:
    """The text of the program that a function means for operands of this kind. To be traced by dynamo.

    Raises EpilogueError where the function is no epilogue.
    """
    recorded = _Recorded(described)
    arguments = []
    for number in range(len(described)):
        arguments.append(Value(recorded, recorded.builder.add("input", attribute=number)))
    result = epilogue(Value(recorded, recorded.acc), *arguments)
    outputs: list[tuple[int, str | None, str | None]] = []
    for each in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(each, Reduction):
            outputs.append((value_of(each.value, recorded)._number, each.dtype, each.kind))
        elif isinstance(each, Value):
            outputs.append((value_of(each, recorded)._number, None, None))
        else:
            raise EpilogueError("epilogue: it returns something else than values, reductions and tuples of them")
    recorder = recorded.recorder
    return _text(tuple(recorder.written), tuple(recorder.repeated), tuple(outputs), recorded.gating, described)


def _described(operand: Any) -> Described:
    if not isinstance(operand, torch.Tensor):
        return ("int" if isinstance(operand, int) else "float", False, False, False)
    batched, m, n = varying(operand.shape)
    return operand.dtype, m, n, batched


class _Recorder:
    """Stands in for `build.Builder`, which knows more than dynamo follows: writes down what is added."""

    def __init__(self, types: tuple[str, ...]) -> None:
        self.written: list[tuple[str, tuple[int, ...], Any]] = []
        self.repeated: list[tuple[int, slice]] = []
        self.types: list[str] = []
        self._inputs = types

    def add(self, op: str, *args: int, attribute: Any = None) -> int:
        if op == "input":
            gives = self._inputs[attribute]
        elif op == "const":
            gives = I32 if isinstance(attribute, int) else F32
        else:
            gives = OPS[op].gives
        # A number that dynamo takes for one that may change is made constant by a slice, and guarded.
        self.written.append((op, args, slice(attribute) if op == "const" else attribute))
        self.types.append(gives)
        return len(self.types) - 1

    def value(self, number: int) -> Any:
        op, _, attribute = self.written[number]
        return attribute.stop if op == "const" else None


class _Recorded(Trace):
    """A trace that dynamo follows."""

    def __init__(self, described: tuple[Described, ...] = (), apart: bool = False) -> None:
        types = []
        for dtype, *_ in described:
            types.append(I32 if dtype == "int" or dtype == torch.int32 else F32)
        self.recorder = _Recorder(tuple(types))
        self.builder = self.recorder  # type: ignore[assignment]
        self.gating = None
        self.acc = self.builder.add("acc")
        self.acc_is_read = False
        self.finished = False
        self.apart = apart

    def const(self, value: float | int) -> Value:
        return Value(self, self.builder.add("const", attribute=value))

    def repeated(self, operand: Value, columns: int) -> Value:
        number = operand._number
        if self.recorder.written[number][0] != "input":
            fail("repeated: the first argument is an operand as it was given, a parameter of the epilogue")
        self.recorder.repeated.append((number, slice(columns)))
        return operand

    def taken(self, given: Value) -> Value:
        theirs = given._trace
        if not isinstance(theirs, _Recorded) or not theirs.apart:
            fail("values of two epilogues in one expression")
        numbers = [self.acc]
        for op, args, attribute in theirs.recorder.written[1:]:
            own = [numbers[arg] for arg in args]
            numbers.append(self.builder.add(op, *own, attribute=attribute.stop if op == "const" else attribute))
        return Value(self, numbers[given._number])


def _apart() -> _Recorded:
    return _Recorded(apart=True)


bind(_apart)


def inputs_of(described: tuple[Described, ...]) -> tuple[Input, ...]:
    """The inputs of a program for operands of this kind. Raises TypeError for a dtype that no operand has."""
    found = []
    for number, (dtype, m, n, batched) in enumerate(described):
        if isinstance(dtype, str):
            found.append(Input(f"x{number}", "int32" if dtype == "int" else "fp32", by_value=True))
            continue
        name = "int32" if dtype == torch.int32 else dtype_name(dtype)
        if name is None:
            raise TypeError(f"operands[{number}]: got dtype {dtype}, accepted are {', '.join(TABLE)} and int32")
        found.append(Input(f"x{number}", name, m=m, n=n, batched=batched))
    return tuple(found)


@_once_a_graph
def _text_of_program(inputs: Any, nodes: Any, outputs: Any, gating: Any, described: tuple[Described, ...]) -> str:
    given = inputs_of(described)
    if len(inputs) == len(given):
        inputs = tuple(map(_taken, inputs, given))
    return program_request.traced(Program(inputs, nodes, outputs, gating), given).text


def _taken(own: Input, given: Input) -> Input:
    """An input of a program as the call gives it: a number may have become a tensor (`_floats_as_tensors`)."""
    single = not (given.by_value or given.m or given.n or given.batched)
    return own._replace(by_value=False) if own.by_value and single and own.dtype == given.dtype else own


@_once_a_graph
def _text(written: Any, repeated: Any, outputs: Any, gating: str | None, described: tuple[Described, ...]) -> str:
    """The text of what was recorded, checked and simplified as every traced program."""
    trace = Trace(inputs_of(described))
    trace.gating = gating
    numbers: list[int] = []
    for op, args, attribute in written:
        if op == "const":
            numbers.append(trace.const(attribute.stop)._number)
        else:
            numbers.append(trace.builder.add(op, *(numbers[arg] for arg in args), attribute=attribute))
    for number, columns in repeated:
        trace.repeated(Value(trace, numbers[number]), columns.stop)
    results = []
    for number, dtype, kind in outputs:
        value = Value(trace, numbers[number])
        results.append(output_of(value if kind is None else Reduction(value, kind, dtype), trace, "the epilogue"))
    program = trace.builder.program(results, gating)
    unused = {*range(len(described))} - {node.attribute for node in program.nodes if node.op == "input"}
    if unused:
        numbered = ", ".join(map(str, sorted(unused)))
        raise EpilogueError(f"no result depends on operand {numbered}: leave it out of the function and of operands=")
    return simplified(program).text
