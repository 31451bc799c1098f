"""How far a kernel's outputs may be from the exact ones: a program evaluated in float64 on intervals.

The accumulators are known to an error e (`reference`: gamma_K of the products' magnitudes). Each operation takes the
interval of its arguments to one that holds every fp32 result that a kernel may have; `interval.DEVICE` is the table of
what is assumed of the device. There is no other constant, and no tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from cutegemm.problem.dtypes import output_name
from cutegemm.problem.program import interval
from cutegemm.problem.program.evaluate import Place, apply, evaluate
from cutegemm.problem.program.graph import BLOCK_SCALE_OPS, BOOL, F32, PACKERS, Node, Program
from cutegemm.problem.program.interval import DEVICE, Choice, Interval
from cutegemm.problem.reference import Verdict

__all__ = ["DEVICE", "Bounds", "bounds", "check"]

_Known: TypeAlias = "Interval | Choice | Tensor"
"""What is known of a node: an interval of fp32, what a condition may be, the int32."""


class Bounds(NamedTuple):
    """What an output may be, elementwise, before it is rounded to the dtype that it is stored in.

    value: the exact result in float64. lo, hi: the least and greatest number that a kernel may have. real: whether it
    may have a number; nan: whether it may have a NaN.
    """

    value: Tensor
    lo: Tensor
    hi: Tensor
    real: Tensor
    nan: Tensor

    @property
    def bound(self) -> Tensor:
        """The greatest |result - value|: 0 where the value must be met (infinities, NaN), infinite where nothing is
        known.
        """
        error = torch.maximum(self.hi - self.value, self.value - self.lo)
        met = (self.real & (self.lo == self.hi) & (self.value == self.lo)) | (~self.real & self.value.isnan())
        return torch.where(met, 0.0, torch.where(error.isnan() | (self.nan & self.real), math.inf, error))

    @property
    def open(self) -> float:
        """The share of elements of which nothing is known, so that no check can fail."""
        free = self.nan & self.real & (self.lo == -math.inf) & (self.hi == math.inf)
        return float(free.double().mean()) if free.numel() else 0.0


def bounds(
    program: Program, acc: Tensor, error: Tensor, operands: Sequence[Tensor | float | int]
) -> tuple[Bounds, ...]:
    """What a kernel's outputs may be.

    Args:
        acc: exact accumulators in float64, (M, N) or (L, M, N). error: how far a kernel's may be off, alike.
        operands: as of `evaluate`.

    Raises ValueError for tensors that do not fit the program.
    """
    values = evaluate(program, acc.double(), operands)
    place = Place(program, acc)
    accumulators = [
        interval.around(*each)
        for each in zip(
            place.accumulators(acc, program.gating),
            place.accumulators(error.expand(acc.shape), program.gating),
            strict=True,
        )
    ]
    given = [place.read(each, value, torch.float64) for each, value in zip(program.inputs, operands, strict=True)]
    last = {arg: number for number, node in enumerate(program.nodes) for arg in node.args}
    kept = {output.node for output in program.outputs}
    known: dict[int, _Known] = {}
    for number, (node, kind) in enumerate(zip(program.nodes, program.types, strict=True)):
        if node.op == "acc":
            known[number] = accumulators[int(node.attribute or 0)]
        elif node.op == "input":
            value = given[int(node.attribute or 0)]
            known[number] = interval.exactly(value) if kind == F32 else value
        else:
            known[number] = _applied(node, kind, [known[arg] for arg in node.args], place)
        for arg in {*node.args} - kept:
            if last[arg] == number:  # matrices of a large D: nobody reads this one again
                del known[arg]
    found = []
    for output, value in zip(program.outputs, values, strict=True):
        result = known[output.node]
        assert isinstance(result, Interval)
        result = result.each(lambda part: part.expand(place.shape))
        if output.reduce is not None:
            result = interval.reduced(result, output.reduce)
        found.append(Bounds(value, *(place.result(part, output) for part in result)))
    return tuple(found)


def _applied(node: Node, kind: str, args: list[_Known], place: Place) -> _Known:
    """What is known of a node from what is known of its arguments."""
    op, intervals = node.op, [arg for arg in args if isinstance(arg, Interval)]
    same = len(node.args) == 2 and node.args[0] == node.args[1]
    if op in ("and", "or", "not"):
        return _logic(op, [arg for arg in args if isinstance(arg, Choice)])
    if op == "where":
        assert isinstance(args[0], Choice)
        return interval.chosen(args[0], intervals[0], intervals[1])
    if op == "cast":
        return interval.cast(intervals[0], str(node.attribute))
    if op == "partner":
        return intervals[0].each(place.exchanged)
    if op in BLOCK_SCALE_OPS:
        return interval.block_scale(intervals[0], BLOCK_SCALE_OPS[op], place.block_scale)
    if op in PACKERS:  # bits, which no interval holds
        return interval.around(torch.zeros_like(intervals[0].lo + intervals[1].lo), torch.tensor(math.inf))
    if not intervals:  # indices, constants, random numbers: exact
        exact = apply(node, [arg for arg in args if isinstance(arg, Tensor)], place, torch.float64)
        if kind == BOOL:
            return Choice(exact, ~exact)
        return interval.exactly(exact) if kind == F32 else exact
    if len(intervals) == 1:
        return interval.unary(op, intervals[0])
    x, y = intervals
    return (interval.compared if kind == BOOL else interval.binary)(op, x, y, same)


def _logic(op: str, args: list[Choice]) -> Choice:
    if op == "not":
        return Choice(args[0].false, args[0].true)
    x, y = args
    if op == "and":
        return Choice(x.true & y.true, x.false | y.false)
    return Choice(x.true | y.true, x.false & y.false)


def check(got: Tensor, want: Bounds) -> Verdict:
    """Whether an output, in the dtype that it is stored in, may be a kernel's: lo and hi rounded to that dtype enclose
    it, or it is a NaN where one may be. `ratio` is the largest error in units of the bound, inf for what may not be.
    """
    if got.shape != want.value.shape:
        return Verdict(False, math.inf, f"shape {tuple(got.shape)}, expected {tuple(want.value.shape)}")
    if got.numel() == 0:
        return Verdict(True, 0.0, "empty")
    dtype = str(output_name(got.dtype))
    stored = interval.cast(interval.Interval(want.lo, want.hi, want.real, want.nan), dtype)
    lo, hi, result = stored.lo, stored.hi, got.double()
    good = torch.where(result.isnan(), stored.nan, stored.real & (lo <= result) & (result <= hi))
    error = (result - want.value).abs()
    room = torch.maximum(hi - want.value, want.value - lo)
    ratio = torch.where(good & room.isfinite() & (room > 0) & error.isfinite(), (error / room).clamp(max=1.0), 0.0)
    ratio = torch.where(good, ratio, math.inf)
    worst = float(ratio.max())
    if worst <= 1.0:
        return Verdict(True, worst, f"largest error {worst:.3f} of the bound, nothing known of {want.open:.1%}")
    index = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    allowed = f"[{float(lo[index])!r}, {float(hi[index])!r}]" if want.real[index] else "no number"
    allowed += " or NaN" if want.nan[index] else ""
    return Verdict(
        False,
        worst,
        f"{int((~good).sum())} of {good.numel()} elements outside the bound; worst at {index}: got "
        f"{float(result[index])!r}, expected {float(want.value[index])!r}, allowed {allowed}",
    )
