"""The symbolic values that a user's epilogue is called with, and what the functions of `cutegemm.ops` make of them."""

from __future__ import annotations

import linecache
import numbers
import operator
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from cutegemm.errors import EpilogueError
from cutegemm.problem.dtypes import ACCEPTED, TABLE, torch_dtype
from cutegemm.problem.program.build import INT32, TYPE_NAMES, Builder, fp32, in_short
from cutegemm.problem.program.graph import BOOL, F32, I32, ROW_BLOCKS, Input

_INNER = (str(Path(__file__).parents[2]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
"""Where no user's function is: this package and torch."""

Number = float | int
_DTYPES = {torch_dtype(name): name for name in TABLE}


def fail(message: str) -> NoReturn:
    """Raises EpilogueError with the place in the user's function: the innermost frame outside of the package."""
    if torch.compiler.is_dynamo_compiling():
        raise EpilogueError(message)  # torch.compile shows the place, and follows no frames
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INNER):
            line = linecache.getline(name, frame.f_lineno).strip()
            shown = f"\n    {line}" if line else ""
            raise EpilogueError(f"{name}:{frame.f_lineno}: {message}{shown}")
        frame = frame.f_back  # type: ignore[assignment]
    raise EpilogueError(message)


class Trace:
    """One call of a user's function.

    apart: it is of no call yet: torch.compile met a value that is made of no other, and `taken` brings it into a call.
    """

    apart = False

    def __init__(self, inputs: Sequence[Input]) -> None:
        self.builder = Builder(inputs)
        self.gating: str | None = None
        self.acc = self.builder.add("acc")
        self.acc_is_read = False
        self.finished = False

    def add(self, op: str, *args: int, attribute: Number | str | None = None) -> Value:
        if self.finished:
            fail("a value of an epilogue is used after its function has returned: it stands for no tensor")
        if self.acc in args:
            self.reads_acc()
        return Value(self, self.builder.add(op, *args, attribute=attribute))

    def reads_acc(self) -> None:
        if self.gating:
            fail(f"acc is read, and ops.{self.gating}(acc) has divided it: use the two values that it gave")
        self.acc_is_read = True

    def divided(self, gating: str) -> tuple[Value, Value]:
        """The accumulators of a gated program."""
        if self.gating not in (None, gating):
            fail(f"ops.{gating}(acc) after ops.{self.gating}(acc): a program has one of the two")
        if self.acc_is_read:
            fail(f"ops.{gating}(acc) after another use of acc: use the two values that it gives")
        self.gating = gating
        return self.add("acc", attribute=0), self.add("acc", attribute=1)

    def repeated(self, operand: Value, columns: int) -> Value:
        """The operand, whose `columns` columns repeat from now on. Raises EpilogueError for any other value."""
        node = self.builder.nodes[operand._number]
        if node.op != "input" or not isinstance(node.attribute, int):
            fail("repeated: the first argument is an operand as it was given, a parameter of the epilogue")
        inputs = list(self.builder.inputs)
        given = inputs[node.attribute]
        if given.n and not given.by_value:  # what has one column needs no other
            if given.period not in (0, columns):
                fail(f"repeated: got {columns} columns of an operand that has {given.period} of them elsewhere")
            inputs[node.attribute] = given._replace(period=columns)
            self.builder.inputs = tuple(inputs)
        return operand

    def taken(self, given: Value) -> Value:
        """A value of another trace as one of this one. Raises EpilogueError where that is of another call."""
        fail("values of two epilogues in one expression")

    def const(self, value: Number) -> Value:
        if isinstance(value, int) and not isinstance(value, bool):
            if not INT32[0] <= value <= INT32[1]:
                as_float = ": write it as a float" if abs(value) < 2**127 else ""
                fail(f"the integer {in_short(value)} is not an int32{as_float}")
        elif value == value and abs(value) != float("inf") and abs(fp32(value)) == float("inf"):
            fail(f"the number {value!r} is too large for fp32")
        return Value(self, self.builder.const(value))


_Method = Callable[["Value", Any], "Value"]


def _operator(make: Callable[[Any, Any], Value]) -> tuple[_Method, _Method]:
    """The methods of an operator: with a value on the left, and on the right."""
    return make, lambda self, other: make(other, self)


class Value:
    """A symbolic number or condition: what the parameters of an epilogue are while it is traced.

    Arithmetic is fp32; of two int32 (indices, int32 operands, Python ints with these) it is int32, and an int32 with an
    fp32 is converted. Comparisons give conditions, for `&`, `|`, `~` and `ops.where`.
    """

    __slots__ = ("_number", "_trace")
    _trace: Trace
    _number: int

    def __init__(self, trace: Trace, number: int) -> None:
        object.__setattr__(self, "_trace", trace)
        object.__setattr__(self, "_number", number)

    @property
    def type(self) -> str:
        """F32, I32 or BOOL of `graph`."""
        return self._trace.builder.types[self._number]

    def __repr__(self) -> str:
        return f"<{TYPE_NAMES[self.type]} value of an epilogue>"

    __add__, __radd__ = _operator(lambda x, y: arithmetic("add", x, y))
    __sub__, __rsub__ = _operator(lambda x, y: arithmetic("sub", x, y))
    __mul__, __rmul__ = _operator(lambda x, y: arithmetic("mul", x, y))
    __truediv__, __rtruediv__ = _operator(lambda x, y: function("div", x, y))
    __floordiv__, __rfloordiv__ = _operator(lambda x, y: integer("ifloordiv", "//", x, y))
    __mod__, __rmod__ = _operator(lambda x, y: integer("imod", "%", x, y))
    __and__, __rand__ = _operator(lambda x, y: condition("and", "&", x, y))
    __or__, __ror__ = _operator(lambda x, y: condition("or", "|", x, y))

    __lt__ = _operator(lambda x, y: arithmetic("lt", x, y))[0]
    __le__ = _operator(lambda x, y: arithmetic("le", x, y))[0]
    __gt__ = _operator(lambda x, y: arithmetic("gt", x, y))[0]
    __ge__ = _operator(lambda x, y: arithmetic("ge", x, y))[0]
    __eq__ = _operator(lambda x, y: arithmetic("eq", x, y))[0]  # type: ignore[assignment]
    __ne__ = _operator(lambda x, y: arithmetic("ne", x, y))[0]  # type: ignore[assignment]

    __hash__ = None  # type: ignore[assignment]

    def __pow__(self, exponent: Any) -> Value:
        return power(self, exponent)

    def __rpow__(self, base: Any) -> NoReturn:
        fail("a number to the power of a value: write ops.exp2(x * log2(base)), or ops.exp(x)")

    def __neg__(self) -> Value:
        return integer("isub", "-", 0, self) if self.type == I32 else function("neg", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return function("abs", self)

    def __invert__(self) -> Value:
        return condition("not", "~", self)

    # What a symbolic value cannot do.

    def __bool__(self) -> NoReturn:
        fail(
            "Python's `if`, `and`, `or`, `not`, `max` and `a < b < c` cannot depend on a value of an epilogue: write "
            "ops.where(condition, a, b), `&`, `|`, `~`, ops.maximum"
        )

    def _no_number(self) -> NoReturn:
        fail("a value of an epilogue is no Python number: write ops.exp(x) for math.exp(x), and so on")

    __float__ = __int__ = __index__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = _no_number

    def _no_container(self, *args: Any) -> NoReturn:
        fail(
            "a value of an epilogue is one element and has no others: ops.halves(acc), ops.pairs(acc) and "
            "ops.partner(x) reach other columns, ops.row_sum(x) and the like add them up"
        )

    __iter__ = __len__ = __getitem__ = __setitem__ = __contains__ = _no_container

    def _no_operator(self, *args: Any) -> NoReturn:
        fail("an epilogue has no such operator: accepted are + - * / // % ** abs, comparisons, & | ~")

    __matmul__ = __rmatmul__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _no_operator
    __divmod__ = __rdivmod__ = _no_operator

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        fail(f"a value of an epilogue has no attribute {name!r}: write it by operators and functions of cutegemm.ops")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        fail(f"a value of an epilogue has no attribute {name!r} to set")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        fail("numpy cannot compute with a value of an epilogue: use the functions of cutegemm.ops")

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Value:
        """An operator whose left side is a numpy number; nothing else of numpy."""
        symbol = _NUMPY_OPERATORS.get(function.__name__)
        if symbol is None or method != "__call__" or not all(isinstance(each, (Value, numbers.Real)) for each in args):
            fail("numpy cannot compute with a value of an epilogue: use the functions of cutegemm.ops")
        return symbol(*(each if isinstance(each, Value) else each.item() for each in args))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = getattr(func, "__name__", str(func))
        fail(
            f"torch's {name!r} cannot compute with a value of an epilogue: use the functions of cutegemm.ops, and pass "
            "tensors by operands="
        )


_NUMPY_OPERATORS: dict[str, Callable[..., Value]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "less": operator.lt, "less_equal": operator.le,
    "greater": operator.gt, "greater_equal": operator.ge, "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip


class Reduction:
    """A result of an epilogue that is reduced over a row or a column: `ops.row_sum(x)` and the like."""

    __slots__ = ("dtype", "kind", "value")

    def __init__(self, value: Value, kind: str, dtype: str | None = None) -> None:
        self.value, self.kind, self.dtype = value, kind, dtype

    def _no_value(self, *args: Any) -> NoReturn:
        what = f"ops.{self.kind}(...) is a result of its own, known after the whole row or column"
        if self.kind == ROW_BLOCKS:
            what = "the scales of ops.quantize are a result of their own, known after 128 columns"
        fail(f"{what}: return it as it is, behind a matrix, and compute with it in the epilogue of the next product")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _no_value
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __matmul__ = __rmatmul__ = __rpow__ = _no_value
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __neg__ = __pos__ = __abs__ = _no_value
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _no_value
    __bool__ = __float__ = __int__ = __index__ = __iter__ = __len__ = __getitem__ = __contains__ = _no_value
    __hash__ = None  # type: ignore[assignment]


def value_of(given: Any, trace: Trace, what: str = "an epilogue") -> Value:
    """A value or Python number as a value of this trace. Raises EpilogueError for anything else."""
    if isinstance(given, Value):
        return given if given._trace is trace else trace.taken(given)
    if isinstance(given, bool):
        fail(f"{what} got {given}: a condition is made by comparing values")
    if isinstance(given, numbers.Integral):
        return trace.const(int(given))
    if isinstance(given, numbers.Real):
        return trace.const(float(given))
    if isinstance(given, torch.Tensor):
        fail(f"{what} got a tensor: pass it by operands=, and name a parameter of the function for it")
    if isinstance(given, torch.SymInt):
        fail(f"{what} got a size that may change: pass it by operands=, and name a parameter of the function for it")
    if isinstance(given, Reduction):
        given._no_value()
    fail(f"{what} got {type(given).__name__}: accepted are values of the epilogue and Python numbers")


def values_of(*given: Any, what: str) -> list[Value]:
    """Values of the same trace, for arguments one of which is a value."""
    traces = [each._trace for each in given if isinstance(each, Value)]
    bound = [each for each in traces if not each.apart] or traces
    trace = bound[0] if bound else _running(f"ops.{what}")
    return [value_of(each, trace, what) for each in given]


def as_float(value: Value, what: str) -> Value:
    """The value in fp32. Raises EpilogueError for a condition."""
    if value.type == BOOL:
        fail(f"{what} got a condition: write ops.where(condition, 1.0, 0.0)")
    if value.type == F32:
        return value
    constant = value._trace.builder.value(value._number)
    return value._trace.add("float", value._number) if constant is None else value._trace.const(float(constant))


def function(op: str, *given: Any) -> Value:
    """An operation on fp32."""
    what = op if len(given) == 1 or op in ("minimum", "maximum") else "arithmetic"
    values = [as_float(each, what) for each in values_of(*given, what=what)]
    return values[0]._trace.add(op, *(each._number for each in values))


def arithmetic(op: str, *given: Any) -> Value:
    """An operation that int32 have too."""
    values = values_of(*given, what="arithmetic" if op in ("add", "sub", "mul") else "a comparison")
    if all(each.type == I32 for each in values):
        return values[0]._trace.add("i" + op, *(each._number for each in values))
    return function(op, *values)


def integer(op: str, symbol: str, *given: Any) -> Value:
    """An operation that only int32 have."""
    values = values_of(*given, what=symbol)
    if any(each.type != I32 for each in values):
        fail(f"{symbol} is for int32 only (indices, int32 operands): fp32 has + - * /")
    if op in ("ifloordiv", "imod") and values[1]._trace.builder.value(values[1]._number) == 0:
        fail(f"{symbol} by zero; accepted are other constants, and int32 operands")
    return values[0]._trace.add(op, *(each._number for each in values))


def condition(op: str, symbol: str, *given: Any) -> Value:
    """An operation on conditions."""
    values = values_of(*given, what=symbol)
    if any(each.type != BOOL for each in values):
        advice = "put comparisons in parentheses, (a < b) & c" if len(given) > 1 else "compare it first, as in x > 0"
        fail(f"{symbol} is for conditions, and one of these is a number: {advice}")
    return values[0]._trace.add(op, *(each._number for each in values))


def power(base: Value, exponent: Any) -> Value:
    """A value to the power of a Python number that products and roots make."""
    if torch.compiler.is_dynamo_compiling() and isinstance(exponent, numbers.Real):
        exponent = _constant(slice(exponent))
    size = float(exponent) if isinstance(exponent, numbers.Real) else 0.0
    if size in (0.5, -0.5, -1.0):
        return function({0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}[size], base)
    if size in range(1, 9):
        result, square, left = None, base, int(size)
        while left:
            if left % 2:
                result = square if result is None else result * square
            square, left = (square * square if left > 1 else square), left // 2
        assert result is not None
        return result
    fail(f"** {exponent!r}: accepted are 1 to 8, 0.5, -0.5 and -1; else write ops.exp2(y * ops.log2(x))")


def _constant(given: slice) -> Any:
    """What the slice holds: torch.compile, which calls this, makes a constant of a number in it, and guards it."""
    return given.stop


_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def where(chosen: Any, x: Any, y: Any) -> Value:
    """x where the condition holds, else y."""
    if isinstance(chosen, bool | np.bool_):
        if torch.compiler.is_dynamo_compiling():
            # Of a value and a number that may change dynamo takes x == n for False and x != n for True, without a word.
            fail(
                f"where: the first argument is {chosen}: torch.compile makes that of a comparison with a number that "
                "may change, such as a size; pass such a number by operands=, or write Python's `if` for a flag"
            )
        return x if chosen else y
    first, *rest = values_of(chosen, x, y, what="where")
    if first.type != BOOL:
        fail("where: the first argument is a condition, such as x > 0")
    values = [as_float(each, "where") for each in rest]
    return first._trace.add("where", first._number, *(each._number for each in values))


def cast(x: Any, dtype: torch.dtype | str) -> Any:
    """A value rounded to a dtype; a reduction stored in it. Raises EpilogueError for a dtype that no kernel has."""
    name = name_of(dtype)
    if name not in TABLE:
        fail(f"cast: dtype {dtype!r}, accepted are {', '.join(TABLE)} and {ACCEPTED}")
    if isinstance(x, Reduction):
        return Reduction(x.value, x.kind, name)
    value = as_float(values_of(x, what="cast")[0], "cast")
    return value._trace.add("cast", value._number, attribute=name)


def name_of(dtype: torch.dtype | str) -> str:
    """The name of a dtype, "" for what is none. Not by `dtype_name`: torch.compile warns of functions that remember."""
    if isinstance(dtype, str):
        return dtype
    return _DTYPES.get(dtype, "") if isinstance(dtype, torch.dtype) else ""


def quantized(x: Any, dtype: str) -> tuple[Value, Reduction]:
    """A value in 8 bits, and the scales of its blocks."""
    given = as_float(values_of(x, what="quantize")[0], "quantize")
    scale = given._trace.add(f"block_scale_{dtype}", given._number)
    return cast(given._trace.add("per_scale", given._number, scale._number), dtype), Reduction(scale, ROW_BLOCKS)


def reduction(kind: str, x: Any) -> Reduction:
    """A reduced result."""
    return Reduction(as_float(values_of(x, what=kind)[0], kind), kind)


def divided(gating: str, acc: Any) -> tuple[Value, Value]:
    """The two accumulators of a gated program. Raises EpilogueError for anything but acc."""
    if not isinstance(acc, Value) or acc._number != acc._trace.acc:
        fail(
            f"ops.{gating}: the argument is acc itself, the epilogue's first parameter, unchanged: write "
            f"gate, up = ops.{gating}(acc), and add a bias to each of these"
        )
    return acc._trace.divided(gating)


def repeated(operand: Any, columns: Any) -> Value:
    """An operand whose columns repeat. Raises EpilogueError for another value, and for what is no number of columns."""
    if isinstance(columns, torch.SymInt):
        fail("repeated: the number of columns is a size that may change, and each makes a kernel: pass a Python int")
    if torch.compiler.is_dynamo_compiling() and isinstance(columns, numbers.Integral):
        columns = _constant(slice(columns))
    if isinstance(columns, bool) or not isinstance(columns, int) or not 1 < columns < 2**31:
        fail(f"repeated: got {columns!r} columns, accepted is a Python int from 2 on")
    if not isinstance(operand, Value):
        fail(f"repeated: got {type(operand).__name__}; the first argument is an operand, a parameter of the epilogue")
    return operand._trace.repeated(operand, columns)


def leaf(op: str) -> Value:
    """An index: a value of the trace that is running."""
    return _running(f"ops.{op}()").add(op)


def random(seed: Any) -> Value:
    """Random numbers of the elements; see `program.random`."""
    trace = seed._trace if isinstance(seed, Value) else _running("ops.random(seed)")
    value = value_of(seed, trace, "random")
    if value.type != I32:
        fail("random: the seed is a Python int or an int32 operand")
    places = [trace.builder.add(op) for op in ("row", "column", "matrix")]
    return trace.add("random", value._number, *places)


class _Running(threading.local):
    """The traces that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []


RUNNING = _Running()
_apart: Callable[[], Trace]


def bind(apart: Callable[[], Trace]) -> None:
    """Sets what makes a trace of no call: a class of pytorch/compiled.py, which imports this module."""
    global _apart
    _apart = apart


def _running(what: str) -> Trace:
    if torch.compiler.is_dynamo_compiling():
        # Nothing that says which trace runs can be written: not in a checkpointed region, nor in torch.cond's branches.
        return _apart()
    if not RUNNING.traces:
        fail(f"{what} has a meaning only within an epilogue")
    return RUNNING.traces[-1]
