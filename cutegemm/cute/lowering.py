"""From an epilogue program to instructions: every operation on vectors of one thread's elements, in fp32 or int32.

A kernel family says where a leaf comes from (`Leaf`); the operations are the same for all. Nothing hides what a large
tile's epilogue computes, so instructions count: ex2.approx and rcp.approx take the time of eight others each. With
y = |z|, no activation has a sum that cancels:

    gelu(z) = max(z, 0) - y Phi(-y)
    silu(z) = max(z, 0) - y s(-y), gelu_tanh(z) = max(z, 0) - y s(-2 u), u = sqrt(2/pi) (y + 0.044715 y^3)

where Phi(-y) is 2 to a polynomial (`LOG2_PHI`), and s(-x) = e / (1 + e), e = 2^(-x log2(e)), whose reciprocals are
taken four at a time (`_reciprocals`). y is cut off where y e is nothing, so that an infinity gives the limit. With
ex2.approx and rcp.approx (relative errors 2^-22 and 2^-23, PTX ISA) no factor is further off than 8 * 2^-24. erf is a
polynomial up to 0.9 and 1 - 2^polynomial beyond (`ERF`, `LOG2_ERFC`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int8, Int32

from cutegemm.cute import types
from cutegemm.problem.program.graph import I32, OPS, PACKED, Node, Program
from cutegemm.problem.program.random import KEY_STEP, MATRIX_STEP, MULTIPLIER, ROUNDS

Leaf = Callable[[Node], Any]
"""leaf(node): the elements of a leaf ("acc", "input", "row", "column", "matrix") as a vector (TensorSSA), or one number
for all of them. It is called where the first operation needs it: loads made earlier would hold registers longer.
"""
LEAVES = ("acc", "input", "row", "column", "matrix")


PHI_END = 14.125
LOG2_PHI = (-0.99999994, -1.1511275, -0.45899925, -0.05313024, 0.00792677, -0.0007334777, 3.0361323e-05)
"""Coefficients, of 1 first, of a polynomial in y = 0 .. PHI_END for log2(Phi(-y)), Phi the normal distribution.

They minimize the largest error of Phi, 2^-21.8, where its relative error is at most 2^-14 for y <= 3, 2^-13 to 4.2,
2^-10 to 5, 2^-9 to 5.5, 2^-8 to 6 and 2^-7 to 7. The polynomial falls to PHI_END, where it is -114.3.
"""

ERF = (1.1283791, -0.37612224, 0.11279123, -0.026672991, 0.0048606726, -0.000533572)
"""Coefficients, the constant first, of a polynomial in x^2 for erf(x) / x below `ERF_END`: 2^-24.1 off, relatively."""

ERF_END, ERFC_END = 0.9, 4.0
LOG2_ERFC = (-0.0026289586, -1.6163924, -0.93840647, -0.1317509, 0.022581859, -0.001819789)
"""Coefficients, the constant first, of a polynomial in y = ERF_END .. ERFC_END for log2(1 - erf(y)).

The relative error of erf is 2^-25.1 with it. From ERFC_END on erf rounds to 1.
"""


def finish(program: Program, size: int, leaf: Leaf, rows: Sequence[int] = ()) -> list[Any]:
    """The program's outputs for `size` elements, as vectors in fp32, before they are rounded or reduced.

    rows: a number for the row of D of each element, where not all are of one: no bit depends on what is in other rows.
    """
    values: list[Any] = []
    groups, in_fp8 = _groups(rows or [0] * size), _has_fp8(program)
    for node in program.nodes:
        if node.op in LEAVES:
            values.append(leaf(node))
        elif node.op == "const":
            values.append(node.attribute)
        else:
            found = _apply(node, [values[i] for i in node.args], size, groups)
            of_integers = node.op == "float" or node.attribute == "int8"
            values.append(opaque(found) if in_fp8 and of_integers else found)
    return [_vector(values[output.node], size, Float32) for output in program.outputs]


FP8 = frozenset(("e4m3", "e5m2"))


def _has_fp8(program: Program) -> bool:
    """Whether a value is rounded to fp8."""
    casts = {node.attribute for node in program.nodes if node.op == "cast"}
    return bool(FP8 & {output.dtype for output in program.outputs} or FP8 & casts)


def opaque(values: Any) -> Any:
    """The vector of fp32, of which the compiler does not know what it was made of: it would convert an integer to fp8
    in one step, which no instruction does, and of an int8 take the bits.
    """
    size = cute.size(values.shape)
    given, found = _elements(values, size, Float32), cute.make_rmem_tensor(size, Float32)
    for i in range(size):
        found[i] = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[given[i]])
    return found.load()


def _groups(rows: Sequence[int]) -> list[list[int]]:
    """The elements of each row, four together."""
    own = [[place for place, each in enumerate(rows) if each == row] for row in dict.fromkeys(rows)]
    return [each[first : first + 4] for each in own for first in range(0, len(each), 4)]


def _apply(node: Node, args: list[Any], size: int, groups: list[list[int]]) -> Any:
    if not any(isinstance(arg, cute.TensorSSA) for arg in args):
        args[0] = _vector(args[0], size, Int32 if OPS[node.op].takes[0] == I32 else Float32)
    if node.op == "cast":
        name = str(node.attribute)
        if name in PACKED and size % 2 == 0:
            return _cast_in_pairs(args[0], name, size)
        return widened(rounded(args[0], types.NUMERIC[name], size), size)
    if node.op == "partner":
        return _reordered(args[0], [element ^ 1 for element in range(size)])
    if node.op == "random":
        return _random(args, size)
    if node.op in _PACKED:
        return _packed(args, size, _PACKED[node.op])
    if node.op == "where":
        return cute.where(args[0], *(_vector(arg, size, Float32) for arg in args[1:]))
    if node.op in _SHARING:
        return _SHARING[node.op](args[0], groups)
    return _OPERATIONS[node.op](*args)


def rounded(values: Any, dtype: Any, size: int) -> Any:
    """A vector of fp32 rounded to `dtype`, to nearest even; types of one byte saturate."""
    if dtype is not Int8:
        return values.to(dtype)
    given, found = _elements(values, size, Float32), cute.make_rmem_tensor(size, Int8)
    for i in range(size):
        whole = cute.arch.inline_ptx(
            "cvt.rni.sat.s8.f32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[given[i]]
        )
        found[i] = whole.to(Int8)
    return found.load()


def widened(values: Any, size: int) -> Any:
    """The vector in fp32."""
    return values.to(Float32)


def _vector(value: Any, size: int, dtype: Any) -> Any:
    """The value as a vector: a number stands for all its elements."""
    return value if isinstance(value, cute.TensorSSA) else cute.full((size,), dtype(value), dtype)


def _elements(value: Any, size: int, dtype: Any) -> Any:
    """The elements of a vector, one by one."""
    place = cute.make_rmem_tensor(size, dtype)
    place.store(_vector(value, size, dtype))
    return place


def _reordered(value: Any, order: list[int]) -> Any:
    source, target = (cute.make_rmem_tensor(len(order), Float32) for _ in range(2))
    source.store(value)
    for place, element in enumerate(order):
        target[place] = source[element]
    return target.load()


def _relu(z):
    return cute.where(z > 0.0, z, cute.where(z != z, z, cute.zeros_like(z)))


def _silu(z, groups):
    y = _size(z, 100.0)
    return _gated(z, y, y * -1.4426950408889634, groups)


def _gelu_tanh(z, groups):
    y = _size(z, 12.0)
    return _gated(z, y, y * (y * y * -0.10294324 - 2.3022082), groups)


def _gated(z, y, exponent, groups):
    """max(z, 0) - y e / (1 + e), e = 2^exponent <= 1."""
    part = _exp2(exponent)
    return _positive(z) - (y * part) * _reciprocals(1.0 + part, groups)


def _gelu(z):
    y = cute.math.min(cute.math.abs(z), cute.full_like(z, PHI_END), propagate_nan=True)
    return _positive(z) - y * _exp2(_polynomial(LOG2_PHI, y))


def _positive(z):
    """max(z, 0), NaN of NaN, by one instruction."""
    return cute.math.max(z, cute.zeros_like(z), propagate_nan=True)


def _size(z, end: float):
    """min(|z|, end), end of NaN, by one instruction."""
    size = cute.size(z.shape)
    given, found = _elements(cute.math.abs(z), size, Float32), cute.make_rmem_tensor(size, Float32)
    for i in range(size):
        found[i] = cute.math.min(given[i], Float32(end), ftz=True)
    return found.load()


def _reciprocals(x, groups):
    """1 / x of numbers in [1, 2], the elements of a group by one rcp.approx of their product."""
    size = cute.size(x.shape)
    given, found = _elements(x, size, Float32), cute.make_rmem_tensor(size, Float32)
    for group in groups:
        own = [given[i] for i in group]
        inverse = cute.math.rcp(_product(own), approx=True, ftz=True)
        for i, value in zip(group, _shares(own, inverse), strict=True):
            found[i] = value
    return found.load()


def _product(x):
    half = len(x) // 2
    return _product(x[:half]) * _product(x[half:]) if half else x[0]


def _shares(x, inverse):
    """1 / x of each number in a list, from that of their product."""
    half = len(x) // 2
    if not half:
        return [inverse]
    return _shares(x[:half], inverse * _product(x[half:])) + _shares(x[half:], inverse * _product(x[:half]))


def _polynomial(coefficients, x):
    """c0 + c1 x + c2 x^2 ... by Horner's rule."""
    *lower, value = coefficients
    for coefficient in reversed(lower):
        value = value * x + coefficient
    return value


def _exp2(x):
    """ex2.approx.ftz.f32 of each element: what `fastmath` means for this operation."""
    return cute.math.exp2(x, fastmath=True)


def _reciprocal(x):
    """rcp.approx.ftz.f32 of each element."""
    return cute.math.rcp(x, approx=True, ftz=True)


def _sigmoid(x):
    return _reciprocal(1.0 + _exp2(x * -1.4426950408889634))


def _tanh(x):
    """1 - 2 / (1 + e^2x): no larger error than 2^-22, absolutely."""
    return 1.0 - _reciprocal(0.5 + 0.5 * _exp2(x * 2.8853900817779268))


def _erf(x):
    """Within 2^-22, relatively, with the largest errors that its instructions may have."""
    y = cute.math.abs(x)
    near = y * _polynomial(ERF, y * y)
    end = cute.full_like(y, ERFC_END)
    far = 1.0 - _exp2(_polynomial(LOG2_ERFC, cute.math.min(y, end, propagate_nan=True)))
    size = cute.where(y < ERF_END, near, far)
    return cute.where(x < 0.0, -size, size)


def _divided(x, y):
    """div.full.ftz.f32 of each element: no numbers are out of its range, and it calls no function."""
    size = cute.size((x if isinstance(x, cute.TensorSSA) else y).shape)
    over, under = _elements(x, size, Float32), _elements(y, size, Float32)
    found = cute.make_rmem_tensor(size, Float32)
    for i in range(size):
        found[i] = cute.math.div(over[i], under[i], full=True, ftz=True)
    return found.load()


def _minimum(x, y):
    """NaN if one is, by one instruction."""
    return cute.math.min(_like(x, y), _like(y, x), propagate_nan=True)


def _maximum(x, y):
    return cute.math.max(_like(x, y), _like(y, x), propagate_nan=True)


def _ifloordiv(x, y):
    """x // y, 0 where y is 0; -2^31 // -1 wraps."""
    divisor, factor = _guarded(x, y)
    return x // divisor * factor


def _imod(x, y):
    """With the sign of y, as Python's; the DSL's own % has that of x. 0 where y is 0."""
    if isinstance(y, int) and y > 0 and y & (y - 1) == 0:
        return x & (y - 1)
    divisor, _ = _guarded(x, y)
    return x - x // divisor * divisor


def _guarded(x, y):
    """(divisor, factor) with which x // y is x // divisor * factor and x % y is x % divisor.

    LLVM leaves x / 0 and -2^31 / -1 undefined, and removes code that is reached with such a divisor only. So the kernel
    divides by 1 instead of 0 and -1. Other constants need no such care.
    """
    if isinstance(y, int) and y not in (0, -1):
        return y, 1
    y = _like(y, x)
    undefined, one = (y == 0) | (y == -1), cute.full_like(y, 1)
    return cute.where(undefined, one, y), cute.where(undefined, y, one)


def _like(value, other):
    return value if isinstance(value, cute.TensorSSA) else cute.full_like(other, value)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "relu": _relu,
    "gelu": _gelu,
    "neg": operator.neg,
    "exp": lambda x: _exp2(x * 1.4426950408889634),
    "exp2": _exp2,
    "log": lambda x: cute.math.log2(x, fastmath=True) * 0.6931471805599453,
    "log2": lambda x: cute.math.log2(x, fastmath=True),
    "sqrt": lambda x: cute.math.sqrt(x, fastmath=True),
    "rsqrt": lambda x: cute.math.rsqrt(x, fastmath=True),
    "reciprocal": _reciprocal,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "erf": _erf,
    "abs": lambda x: cute.math.abs(x),
    "add": operator.add,
    "mul": operator.mul,
    "sub": operator.sub,
    "div": _divided,
    "minimum": _minimum,
    "maximum": _maximum,
    "and": operator.and_,
    "or": operator.or_,
    "not": lambda x: x == False,  # noqa: E712  a vector has no `not`
    "iadd": operator.add,
    "isub": operator.sub,
    "imul": operator.mul,
    "ifloordiv": _ifloordiv,
    "imod": _imod,
    "float": lambda x: x.to(Float32),
}
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _OPERATIONS[_name] = _OPERATIONS["i" + _name] = getattr(operator, _name)


_SHARING: dict[str, Callable[..., Any]] = {"gelu_tanh": _gelu_tanh, "silu": _silu}
"""Functions of a vector and of the groups of elements that are computed together."""


_PACKED = {"packed_bf16": "cvt.rn.bf16x2.f32", "packed_fp16": "cvt.rn.f16x2.f32"}
"""The instructions that round two numbers, the first of which comes into the upper half."""


def _packed(args: list[Any], size: int, instruction: str) -> Any:
    lower, upper = (_elements(arg, size, Float32) for arg in args)
    bits = cute.make_rmem_tensor(size, Int32)
    for i in range(size):
        bits[i] = cute.arch.inline_ptx(
            f"{instruction} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[upper[i], lower[i]]
        )
    return bits.load().bitcast(Float32)


def _cast_in_pairs(values: Any, dtype: str, size: int) -> Any:
    """A vector rounded to 16 bits and widened again, by one conversion for two numbers: ptxas would take one for each,
    by the unit of the special functions.
    """
    given, found = _elements(values, size, Float32), cute.make_rmem_tensor(size, Float32)
    rounds = f"{_PACKED[f'packed_{dtype}']} w, {{$r1}}, {{$r0}};"
    if dtype == "bf16":
        widens = "shl.b32 l, w, 16; and.b32 h, w, 0xffff0000; mov.b32 {$w0}, l; mov.b32 {$w1}, h;"
    else:
        widens = "mov.b32 {l, h}, w; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h;"
    registers = f".reg .b32 w; .reg .b{32 if dtype == 'bf16' else 16} l, h;"
    for i in range(0, size, 2):
        found[i], found[i + 1] = cute.arch.inline_ptx(
            f"{{ {registers} {rounds} {widens} }}",
            write_only_types=[Float32] * 2,
            read_only_args=[given[i], given[i + 1]],
        )
    return found.load()


def _random(args: list[Any], size: int) -> Any:
    """`cutegemm.problem.program.random` of (seed, row, column, matrix), element by element."""
    places = [_elements(arg, size, Int32) for arg in args]
    found = cute.make_rmem_tensor(size, Float32)
    for i in range(size):
        seed, row, column, matrix = (place[i] for place in places)
        key, first, second = seed ^ matrix * _signed(MATRIX_STEP), column, row
        for _ in range(ROUNDS):
            high = cute.arch.inline_ptx(
                "mul.hi.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32],
                read_only_args=[first, Int32(_signed(MULTIPLIER))],
            )  # fmt: skip
            first, second = high ^ key ^ second, first * _signed(MULTIPLIER)
            key = key + _signed(KEY_STEP)
        bits = cute.arch.inline_ptx("shr.u32 {$w0}, {$r0}, 8;", write_only_types=[Int32], read_only_args=[first])
        found[i] = bits.to(Float32) * 2.0**-24
    return found.load()


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned number."""
    return word - 2**32 if word >= 2**31 else word
