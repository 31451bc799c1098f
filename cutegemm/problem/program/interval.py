"""Sets of fp32 numbers that a kernel may have at a node, elementwise, and the operations on them.

A set is an interval, NaN, or both. Every operation gives a set that contains what a kernel may compute from members of
its arguments' sets: the exact result, moved by the rounding or by the error of the device's function (`DEVICE`). A
product and a sum that a compiler fuses lie within these sets too, as one rounding less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cutegemm.problem.dtypes import OUTPUTS
from cutegemm.problem.program.evaluate import UNARY, rounded
from cutegemm.problem.program.graph import ROW_BLOCKS, SCALED

ROUNDOFF = 2.0**-24
"""Unit roundoff of fp32."""
TINY = 2.0**-126
"""The smallest normal fp32. What is smaller may count as 0: the device's approximate functions flush it."""
LARGEST = (2 - 2.0**-23) * 2.0**127
"""The largest finite fp32."""
_DOUBLE = 2.0**-50
"""What float64 is off by, relatively, in computing the ends of an interval: 8 units in the last place."""


class Error(NamedTuple):
    """How far a kernel's function may be from the exact one at the same argument x, besides `TINY`.

    relative: times |result|. absolute: as it is. argument: times |x| |result|. factor: times |x|.
    """

    relative: float = 0.0
    absolute: float = 0.0
    argument: float = 0.0
    factor: float = 0.0


DEVICE = {
    # Rounded to nearest.
    **dict.fromkeys(("add", "sub", "mul"), Error(ROUNDOFF)),
    "per_scale": Error(ROUNDOFF),  # of the reciprocal, and of the product
    # div.full.f32 has 2 units in the last place, 2^-22 relatively (PTX ISA); a product with rcp.approx less.
    "div": Error(2.0**-22),
    # The approximate instructions, by the PTX ISA: ex2 2^-22, rcp 2^-23, rsqrt 2^-22.9; sqrt 2^-23 or x rsqrt(x);
    # lg2 2^-22 absolutely near 1 and relatively elsewhere.
    "exp2": Error(2.0**-22),
    "reciprocal": Error(2.0**-23),
    "rsqrt": Error(2.0**-22.9),
    "sqrt": Error(2.0**-22),
    "log2": Error(2.0**-22, 2.0**-22),
    # exp(x) = ex2(x log2(e)): the constant and the product are rounded, which moves the exponent by 2^-23 |x|.
    "exp": Error(2.0**-22, argument=2.0**-23),
    # log(x) = lg2(x) ln(2): the constant and the product are rounded.
    "log": Error(2.0**-22 + 2.0**-23, 2.0**-22),
    # Formulas of ex2 and rcp (tanh(x) = 2 sigmoid(2x) - 1): 8 * 2^-24.
    **dict.fromkeys(("tanh", "sigmoid"), Error(absolute=2.0**-21)),
    "erf": Error(2.0**-22),
    # z times a factor that is known to 8 * 2^-24, and that product rounded (cutegemm/cute/lowering.py).
    **dict.fromkeys(("gelu_tanh", "silu"), Error(ROUNDOFF, factor=2.0**-21)),
    # Where it vanishes the kernel's has -2^-110.
    "gelu": Error(ROUNDOFF, 2.0**-110, factor=2.0**-21),
}
"""All that is assumed of the device: the error of each operation that is not exact. Lowering must stay within it."""

MINIMA = {"gelu": (-0.751791, -0.16997121), "gelu_tanh": (-0.752462, -0.17004076), "silu": (-1.278465, -0.27846455)}
"""Where these functions have their minimum, to six digits, and a number just below it."""


class Interval(NamedTuple):
    """lo, hi: float64. real: whether it may be a number at all (where not, lo and hi mean nothing). nan: whether it may
    be NaN. All broadcast to the same shape.
    """

    lo: Tensor
    hi: Tensor
    real: Tensor
    nan: Tensor

    @property
    def size(self) -> Tensor:
        """The greatest magnitude."""
        return torch.maximum(self.lo.abs(), self.hi.abs())

    def contains(self, value: float) -> Tensor:
        return self.real & (self.lo <= value) & (self.hi >= value)

    @property
    def infinite(self) -> Tensor:
        """Whether an infinity is among its numbers."""
        return self.real & (self.lo.isinf() | self.hi.isinf())

    def each(self, change: Callable[[Tensor], Tensor]) -> Interval:
        """With an operation that moves elements applied to every part."""
        return Interval(*(change(part) for part in self))


class Choice(NamedTuple):
    """What a condition may be."""

    true: Tensor
    false: Tensor


def exactly(value: Tensor) -> Interval:
    """One number each, or NaN."""
    value = value.double()
    return Interval(value, value, ~value.isnan(), value.isnan())


def around(value: Tensor, error: Tensor) -> Interval:
    """[value - error, value + error]. What is infinite or NaN is that; an error that is neither finite nor of such a
    value leaves everything open.
    """
    value, error = torch.broadcast_tensors(value.double(), error.double())
    known = value.isfinite()
    error = torch.where(known, torch.where(error.isfinite(), error, math.inf), 0.0)
    found = Interval(value - error, value + error, ~value.isnan(), value.isnan() | (known & error.isinf()))
    return _within_fp32(found)


def _within_fp32(x: Interval) -> Interval:
    """A number beyond fp32's range may be the infinity or, as errors may pull it back, the largest number."""
    lo = torch.where(x.lo.isfinite(), x.lo.clamp(max=LARGEST), x.lo)
    hi = torch.where(x.hi.isfinite(), x.hi.clamp(min=-LARGEST), x.hi)
    lo = torch.where(x.lo < -LARGEST, -math.inf, lo)
    hi = torch.where(x.hi > LARGEST, math.inf, hi)
    return Interval(lo, hi, x.real, x.nan)


def _moved(x: Interval, error: Error, argument: Tensor | None = None) -> Interval:
    """x with its ends moved out by the error of an operation. argument: the greatest |x| of its argument."""
    relative: Tensor | float = error.relative + _DOUBLE
    pad: Tensor | float = error.absolute + TINY
    if argument is not None and error.argument:
        # Where e^x is an ordinary number |x| is under 128; beyond it is 0 or infinite whatever the error.
        relative = relative + error.argument * argument.clamp(max=128.0)
    if argument is not None and error.factor:
        pad = pad + error.factor * torch.where(argument.isfinite(), argument, LARGEST)
    lo = torch.where(x.lo.isfinite(), x.lo - relative * x.lo.abs() - pad, x.lo)
    hi = torch.where(x.hi.isfinite(), x.hi + relative * x.hi.abs() + pad, x.hi)
    return _within_fp32(Interval(lo, hi, x.real, x.nan))


def unary(op: str, x: Interval) -> Interval:
    """A function of one number."""
    if op == "neg":
        return Interval(-x.hi, -x.lo, x.real, x.nan)
    if op == "abs":
        least = torch.where(x.contains(0.0), 0.0, torch.minimum(x.lo.abs(), x.hi.abs()))
        return Interval(least, x.size, x.real, x.nan)
    if op == "relu":
        return Interval(x.lo.clamp(min=0.0), x.hi.clamp(min=0.0), x.real, x.nan)
    if op in MINIMA:
        return _with_minimum(op, x)
    if op == "reciprocal":
        one = torch.ones_like(x.lo)
        return divided(exactly(one), x, DEVICE[op])
    if op in ("log", "log2", "sqrt", "rsqrt"):
        x = _flushed(x)
        nan, real = x.nan | (x.real & (x.lo < 0)), x.real & (x.hi >= 0)
        positive = Interval(x.lo.clamp(min=0.0), x.hi.clamp(min=0.0), real, nan)
        if op == "rsqrt":  # falls; 1 / sqrt(-0) is minus infinity
            lo = torch.where(positive.contains(0.0), -math.inf, UNARY[op](positive.hi))
            return _moved(Interval(lo, UNARY[op](positive.lo.abs()), real, nan), DEVICE[op])
        x = positive
    return _moved(Interval(UNARY[op](x.lo), UNARY[op](x.hi), x.real, x.nan), DEVICE[op], x.size)


def _with_minimum(op: str, x: Interval) -> Interval:
    """A function that falls to its minimum and rises from there; of minus infinity it is its limit 0, or NaN."""
    place, least = MINIMA[op]
    ends = [torch.where(end.isinf() & (end < 0), 0.0, UNARY[op](end)) for end in (x.lo, x.hi)]
    lo, hi = torch.minimum(*ends), torch.maximum(*ends)
    lo = torch.where((x.lo <= place + 1e-5) & (x.hi >= place - 1e-5), lo.clamp(max=least), lo)
    lowest = x.lo == -math.inf
    size = torch.where(x.hi == -math.inf, 0.0, x.size)
    return _moved(Interval(lo, hi, x.real, x.nan | (x.real & lowest)), DEVICE[op], size)


def _flushed(x: Interval) -> Interval:
    """x with 0 as well if a subnormal number is in it."""
    lo = torch.where((x.lo > 0) & (x.lo < TINY), 0.0, x.lo)
    return x._replace(lo=lo, hi=torch.where((x.hi < 0) & (x.hi > -TINY), 0.0, x.hi))


def binary(op: str, x: Interval, y: Interval, same: bool) -> Interval:
    """A function of two numbers. same: whether they are one and the same value."""
    real, nan = x.real & y.real, x.nan | y.nan
    if op in ("minimum", "maximum"):
        pick = torch.minimum if op == "minimum" else torch.maximum
        return Interval(pick(x.lo, y.lo), pick(x.hi, y.hi), real, nan)
    if op == "div":
        return divided(x, y, DEVICE[op], same)
    if op == "per_scale":
        return _product(x, divided(exactly(torch.ones_like(y.lo)), y, DEVICE[op]), False)
    if op == "mul":
        return _product(x, y, same)
    y = unary("neg", y) if op == "sub" else y
    if op == "sub" and same:
        zero = torch.zeros_like(x.lo)
        return Interval(zero, zero, real & ~(x.lo.isinf() & (x.lo == x.hi)), nan | x.infinite)
    lo, hi = x.lo + y.lo, x.hi + y.hi  # NaN of opposite infinities
    plus, minus = (torch.stack([each.hi == math.inf, each.lo == -math.inf]) for each in (x, y))
    opposite = real & ((plus[0] & minus[1]) | (plus[1] & minus[0]))
    certain = ((x.lo == math.inf) & (y.hi == -math.inf)) | ((x.hi == -math.inf) & (y.lo == math.inf))
    lo, hi = torch.where(lo.isnan(), -math.inf, lo), torch.where(hi.isnan(), math.inf, hi)
    return _moved(Interval(lo, hi, real & ~certain, nan | opposite), DEVICE[op])


def _product(x: Interval, y: Interval, same: bool) -> Interval:
    real, nan = x.real & y.real, x.nan | y.nan
    if same:
        size = unary("abs", x)
        return _moved(Interval(size.lo * size.lo, size.hi * size.hi, real, nan), DEVICE["mul"])
    lo, hi = _corners(torch.mul, x, y)
    undefined = (x.contains(0.0) & y.infinite) | (y.contains(0.0) & x.infinite)
    zero_x, zero_y = (x.lo == 0) & (x.hi == 0), (y.lo == 0) & (y.hi == 0)
    always_x, always_y = x.lo.isinf() & (x.lo == x.hi), y.lo.isinf() & (y.lo == y.hi)
    certain = (zero_x & always_y) | (zero_y & always_x)
    # A number that may be flushed to 0 times infinity.
    undefined |= real & (((x.lo.abs() < TINY) & y.infinite) | ((y.lo.abs() < TINY) & x.infinite))
    return _moved(Interval(lo, hi, real & ~certain, nan | undefined), DEVICE["mul"])


def _corners(operation: Callable[[Tensor, Tensor], Tensor], x: Interval, y: Interval) -> tuple[Tensor, Tensor]:
    """The least and the greatest result at the ends; one that is undefined (0 times infinity) counts as 0."""
    corners = [operation(a, b) for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
    stacked = torch.stack(torch.broadcast_tensors(*(torch.where(each.isnan(), 0.0, each) for each in corners)))
    return stacked.amin(0), stacked.amax(0)


def divided(x: Interval, y: Interval, error: Error, same: bool = False) -> Interval:
    """x / y. Where y may be 0 the result may be anything, as the sign of the zero is not known."""
    y = _flushed(y)
    real, nan = x.real & y.real, x.nan | y.nan
    by_zero = y.contains(0.0)
    lo, hi = _corners(torch.div, x, y)
    if same:
        lo, hi, by_zero = torch.ones_like(lo), torch.ones_like(hi), by_zero & False
    nan = nan | (real & ((y.contains(0.0) & _flushed(x).contains(0.0)) | (x.infinite & y.infinite)))
    lo, hi = torch.where(by_zero, -math.inf, lo), torch.where(by_zero, math.inf, hi)
    for special in (0.0, math.inf):  # 0 / 0, and infinity over infinity
        real = real & ~((x.lo == x.hi) & (x.lo.abs() == special) & (y.lo == y.hi) & (y.lo.abs() == special))
    return _moved(Interval(lo, hi, real, nan), error)


def compared(op: str, x: Interval, y: Interval, same: bool) -> Choice:
    """A comparison, all of which but `ne` are false for NaN."""
    if op in ("gt", "ge"):
        return compared("lt" if op == "gt" else "le", y, x, same)
    if op == "ne":
        equal = compared("eq", x, y, same)
        return Choice(equal.false, equal.true)
    real, nan = x.real & y.real, x.nan | y.nan
    if same:
        holds = op != "lt"
        return Choice(real & holds, nan | (real & (not holds)))
    if op == "lt":
        return Choice(real & (x.lo < y.hi), nan | (real & (x.hi >= y.lo)))
    if op == "le":
        return Choice(real & (x.lo <= y.hi), nan | (real & (x.hi > y.lo)))
    points = (x.lo == x.hi) & (y.lo == y.hi)
    return Choice(real & (x.lo <= y.hi) & (y.lo <= x.hi), nan | (real & ~(points & (x.lo == y.lo))))


def chosen(condition: Choice, x: Interval, y: Interval) -> Interval:
    """`where`: both branches where the condition is open."""
    from_x, from_y = condition.true & x.real, condition.false & y.real
    lo = torch.minimum(torch.where(from_x, x.lo, math.inf), torch.where(from_y, y.lo, math.inf))
    hi = torch.maximum(torch.where(from_x, x.hi, -math.inf), torch.where(from_y, y.hi, -math.inf))
    return Interval(lo, hi, from_x | from_y, (condition.true & x.nan) | (condition.false & y.nan))


def cast(x: Interval, dtype: str) -> Interval:
    """Rounded to a dtype: rounding keeps order, so the rounded ends are the ends of what is rounded."""
    if OUTPUTS[dtype].is_integer:  # of which NaN becomes 0
        lo = torch.where(x.nan, torch.where(x.real, x.lo.clamp(max=0.0), 0.0), x.lo)
        hi = torch.where(x.nan, torch.where(x.real, x.hi.clamp(min=0.0), 0.0), x.hi)
        return Interval(rounded(lo, dtype), rounded(hi, dtype), x.real | x.nan, x.nan & False)
    return Interval(rounded(x.lo, dtype), rounded(x.hi, dtype), x.real, x.nan)


def block_scale(x: Interval, dtype: str, scale_of: Callable[[Tensor, str], Tensor]) -> Interval:
    """The scale of the block of each element. It rises with the block's largest magnitude, so that the least and the
    greatest magnitudes give its ends. scale_of(magnitudes, dtype): gives scales. A NaN does not count, except for int8,
    where the scale is then NaN.
    """
    size = unary("abs", x)
    least = torch.where(x.nan | ~x.real, 0.0, size.lo)
    most = torch.where(x.real, size.hi, 0.0)
    lo, hi = scale_of(least, dtype).double(), scale_of(most, dtype).double()
    none = torch.zeros_like(lo, dtype=torch.bool)
    if dtype != "int8":
        return Interval(lo, hi, ~none, none)
    may = scale_of(torch.where(x.nan, math.nan, 0.0).to(torch.float32), dtype).isnan()
    must = scale_of(torch.where(x.nan & ~x.real, math.nan, 0.0).to(torch.float32), dtype).isnan()
    return Interval(lo, hi, ~must, may)


def reduced(x: Interval, reduce: str) -> Interval:
    """The sum, the maximum or the maximum of magnitudes over a row or a column; the additions in any order. Of blocks
    the first number, as they all have the same.
    """
    if reduce == ROW_BLOCKS:
        return x.each(lambda part: part[..., ::SCALED])
    dim = -1 if reduce.startswith("row") else -2
    real, nan = x.real.all(dim, keepdim=True), x.nan.any(dim, keepdim=True)
    if not reduce.endswith("sum"):
        x = unary("abs", x) if reduce.endswith("abs") else x
        return Interval(x.lo.amax(dim, keepdim=True), x.hi.amax(dim, keepdim=True), real, nan)
    lo, hi = (torch.where(end.isfinite(), end, 0.0) for end in (x.lo, x.hi))
    count = x.lo.shape[dim]
    nu = count * ROUNDOFF
    size = torch.maximum(lo.abs(), hi.abs()).sum(dim, keepdim=True)
    pad = nu / (1 - nu) * size + count * TINY if nu < 1 else torch.full_like(size, math.inf)
    always_plus, always_minus = ((x.lo == math.inf).any(dim, keepdim=True), (x.hi == -math.inf).any(dim, keepdim=True))
    # An infinity of either sign: among the terms, or of a partial sum.
    plus = (x.hi == math.inf).any(dim, keepdim=True) | (hi.clamp(min=0).sum(dim, keepdim=True) + pad > LARGEST)
    minus = (x.lo == -math.inf).any(dim, keepdim=True) | (lo.clamp(max=0).sum(dim, keepdim=True) - pad < -LARGEST)
    lo, hi = lo.sum(dim, keepdim=True) - pad, hi.sum(dim, keepdim=True) + pad
    lo = torch.where(minus, -math.inf, torch.where(always_plus, math.inf, lo))
    hi = torch.where(plus, math.inf, torch.where(always_minus, -math.inf, hi))
    real = real & ~(always_plus & always_minus)
    return _within_fp32(Interval(lo, hi, real, nan | (x.real.all(dim, keepdim=True) & plus & minus)))
