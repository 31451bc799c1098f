"""A program evaluated on torch tensors: what the kernels compute, in float64 or fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from cutegemm.problem import quantization, rounding
from cutegemm.problem.extents import is_one
from cutegemm.problem.program import random
from cutegemm.problem.program.graph import (
    BLOCK_SCALE_OPS,
    I32,
    PACKERS,
    ROW_BLOCKS,
    SCALED,
    Input,
    Node,
    Output,
    Program,
)
from cutegemm.problem.reference import activate

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "abs": torch.abs,
    **{name: partial(activate, activation=name) for name in ("relu", "gelu", "gelu_tanh", "silu")},
}
"""The functions of one number. sqrt and log of a negative number are NaN, as on the device."""

_COMPARE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}  # fmt: skip


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """Rounded down, 0 where y is 0; -2^31 // -1 wraps."""
    undefined = _is_undefined(y)
    return torch.div(x, torch.where(undefined, 1, y), rounding_mode="floor") * torch.where(undefined, y, 1)


def _remainder(x: Tensor, y: Tensor) -> Tensor:
    """With the sign of y; 0 where y is 0 or -1."""
    return torch.remainder(x, torch.where(_is_undefined(y), 1, y))


def _is_undefined(divisor: Tensor) -> Tensor:
    """Whether C++, and with it torch, leaves an integer division by it undefined: of any integer, or of -2^31."""
    return (divisor == 0) | (divisor == -1)


_MANY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "minimum": torch.minimum, "maximum": torch.maximum,  # NaN if one of the two is NaN
    "where": torch.where, "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "iadd": torch.add, "isub": torch.sub, "imul": torch.mul, "ifloordiv": _quotient,
    "imod": _remainder,
    **_COMPARE, **{"i" + name: function for name, function in _COMPARE.items()},
}  # fmt: skip


def rounded(x: Tensor, dtype: str) -> Tensor:
    """x with its elements rounded to a dtype of `dtypes.TABLE`, in x's dtype."""
    return rounding.rounded(x, dtype).to(x.dtype)


def columns_of(acc: Tensor, gating: str | None) -> tuple[Tensor, ...]:
    """The accumulators as a tuple: one tensor, or those of gate and those of up."""
    if gating == "halves":
        half = acc.shape[-1] // 2
        return acc[..., :half], acc[..., half:]
    return (acc[..., 0::2], acc[..., 1::2]) if gating == "pairs" else (acc,)


class Place:
    """Where the elements are: the shape of D and of its operands, and the indices.

    acc: (M, N) or (L, M, N) of accumulators; N is twice D's where the program is gated.
    Raises ValueError where N must be even and is not.
    """

    def __init__(self, program: Program, acc: Tensor) -> None:
        if acc.dim() not in (2, 3):
            raise ValueError(f"acc: expected (M, N) or (L, M, N), got {tuple(acc.shape)}")
        self.batched = acc.dim() == 3
        self.count, self.m, columns = (1, *acc.shape) if acc.dim() == 2 else acc.shape
        self.n = columns // 2 if program.gating else columns
        if (program.gating or program.uses("partner")) and columns % 2:
            raise ValueError(f"acc: columns belong together by two, and it has {columns} of them")
        self.shape = (self.count, self.m, self.n)
        self.device = acc.device

    def accumulators(self, acc: Tensor, gating: str | None) -> tuple[Tensor, ...]:
        """(L, M, N) for each accumulator that the program reads."""
        return columns_of(acc if acc.dim() == 3 else acc[None], gating)

    def index(self, op: str) -> Tensor:
        """The index of that name, as int32 that broadcasts to (L, M, N)."""
        axis = ("matrix", "row", "column").index(op)
        shape = [1, 1, 1]
        shape[axis] = -1
        return torch.arange(self.shape[axis], dtype=torch.int32, device=self.device).view(shape)

    def operand(self, given: Input, value: Tensor | float | int, dtype: torch.dtype) -> Tensor:
        """An operand in fp32 or float64 (or int32), of three dimensions. Raises ValueError for one of another shape."""
        kind = torch.int32 if given.type == I32 else dtype
        if isinstance(value, torch.SymInt):  # as_tensor asks for its value, by which a graph would be specialized
            tensor = torch.scalar_tensor(value, dtype=torch.int64, device=self.device)
        else:
            # A float is fp32, as a kernel's argument is, whatever torch's default dtype.
            number = torch.float32 if isinstance(value, float) else None
            tensor = torch.as_tensor(value, dtype=number, device=self.device)
        if given.by_value and given.type != I32:
            tensor = tensor.float()
        tensor = tensor.to(kind)
        while tensor.dim() < 3:  # a reshape would ask a gradient for sizes, which torch.compile then cannot place
            tensor = tensor.unsqueeze(0)
        whole = (self.count, self.m, given.columns(self.n))
        want = tuple(each if own else 1 for each, own in zip(whole, (given.batched, given.m, given.n), strict=True))
        if any(not (is_one(own) or own == each) for own, each in zip(tensor.shape, want, strict=True)):
            got = tuple(tensor.shape)
            raise ValueError(f"operand {given.name}: got shape {got}, expected one that broadcasts to {want}")
        if given.period and not is_one(tensor.shape[-1]):
            tensor = tensor[..., torch.arange(self.n, device=self.device) % given.period]
        return tensor

    def read(self, given: Input, value: Tensor | float | int, dtype: torch.dtype) -> Tensor:
        """`operand`; 1 for one that scales blocks of A or B, which the accumulators know already."""
        if given.scales:
            return torch.ones((1, 1, 1), dtype=dtype, device=self.device)
        return self.operand(given, value, dtype)

    def exchanged(self, x: Tensor) -> Tensor:
        """x with columns 2j and 2j + 1 exchanged."""
        if is_one(x.shape[-1]) and not is_one(self.n):
            return x
        return torch.stack((x[..., 1::2], x[..., 0::2]), -1).reshape(x.shape)  # batches of gradients have no unflatten

    def block_scale(self, x: Tensor, dtype: str) -> Tensor:
        """The scale of the block of each element of x, in fp32."""
        group = quantization.Group(1, SCALED)
        scale = quantization.scale_of(x.expand(self.shape), quantization.NAMED[dtype], group)
        return quantization.expanded(scale, self.shape)

    def result(self, x: Tensor, output: Output) -> Tensor:
        """As the caller sees it: (M, N), or as `Output.extents` says of a reduced one; with the batch if acc has it."""
        x = x.expand(self.count, *output.extents(self.m, self.n))
        return x if self.batched else x[0]


def evaluate(
    program: Program,
    acc: Tensor,
    operands: Sequence[Tensor | float | int],
    *,
    dtype: torch.dtype = torch.float64,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of a program.

    Args:
        acc: (M, N) or (L, M, N) of accumulators; for a gated program N is twice D's.
        operands: one for each of `program.inputs`: a tensor that broadcasts to (L, M, N), with the extents that the
            input says, or a number.
        dtype: torch.float64 or torch.float32: what is computed in. Casts within the program are done in both.
        out_dtype: None leaves the outputs in `dtype`. Otherwise each is rounded: to its own dtype, to fp32 if it is a
            reduction without one, to this one else.

    Returns:
        (M, N) for a matrix, (M, 1) for what is reduced over a row, (1, N) over a column, (M, ceil(N / 128)) for scales
        of blocks; with a batch if acc has it.

    Raises ValueError for tensors that do not fit the program.
    """
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"dtype: got {dtype}, accepted are torch.float64 and torch.float32")
    place = Place(program, acc)
    if len(operands) != len(program.inputs):
        raise ValueError(f"operands: got {len(operands)}, the program takes {len(program.inputs)}")
    accumulators = place.accumulators(acc.to(dtype), program.gating)
    given = [place.read(each, value, dtype) for each, value in zip(program.inputs, operands, strict=True)]
    values: list[Tensor] = []
    for node in program.nodes:
        if node.op == "acc":
            values.append(accumulators[int(node.attribute or 0)])
        elif node.op == "input":
            values.append(given[int(node.attribute or 0)])
        else:
            values.append(apply(node, [values[arg] for arg in node.args], place, dtype))
    outputs = []
    for out in program.outputs:
        value = reduced(values[out.node].expand(place.shape), out.reduce)
        if out_dtype is not None:
            own = torch.float32 if out.reduce else out_dtype
            value = value.to(own) if out.dtype is None else rounding.rounded(value, out.dtype)
        outputs.append(place.result(value, out))
    return tuple(outputs)


def apply(node: Node, args: Sequence[Tensor], place: Place, dtype: torch.dtype) -> Tensor:
    """The value of a node that is no accumulator and no operand."""
    op = node.op
    if op in UNARY:
        return UNARY[op](args[0])
    if op in _MANY:
        return _MANY[op](*args)
    if op == "const":
        assert isinstance(node.attribute, (int, float))
        kind = torch.int32 if isinstance(node.attribute, int) else dtype
        return torch.full((1, 1, 1), node.attribute, dtype=kind, device=place.device)
    if op in ("row", "column", "matrix"):
        return place.index(op)
    if op == "float":
        return args[0].to(torch.float32).to(dtype)
    if op == "cast":
        return rounded(args[0], str(node.attribute))
    if op == "partner":
        return place.exchanged(args[0])
    if op == "random":
        return random.uniform(*args).to(dtype)
    if op in BLOCK_SCALE_OPS:
        return place.block_scale(args[0], BLOCK_SCALE_OPS[op]).to(dtype)
    if op == "per_scale":
        return args[0] * (1 / args[1])
    if op in PACKERS:
        parts = torch.broadcast_tensors(*(rounding.rounded(arg, op.removeprefix("packed_")) for arg in args))
        return torch.stack(parts, -1).view(torch.float32).squeeze(-1).to(dtype)
    raise AssertionError(f"operation {op!r} has no row here")


def reduced(x: Tensor, reduce: str | None) -> Tensor:
    """x (L, M, N) reduced as an output says; sums of nothing are 0, maxima of nothing minus infinity."""
    if reduce is None:
        return x
    if reduce == ROW_BLOCKS:
        return x[..., ::SCALED]
    dim = -1 if reduce.startswith("row") else -2
    if reduce.endswith("sum"):
        return x.sum(dim, keepdim=True)
    x = x.abs() if reduce.endswith("abs") else x
    if x.shape[dim] == 0:
        return torch.full((*x.shape[:dim], 1, *x.shape[dim:][1:]), -math.inf, dtype=x.dtype, device=x.device)
    return x.amax(dim, keepdim=True)


def summed(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x (..., M, N) summed to the shape of an operand: over what it broadcasts, and over columns of its that repeat.
    Sums are in fp32, of float64 in float64; no copy of x is made in that dtype.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    columns = shape[-1] if len(shape) else 1
    if not is_one(columns) and columns != x.shape[-1]:
        times = -(-x.shape[-1] // columns)
        whole = torch.nn.functional.pad(x, (0, times * columns - x.shape[-1]))
        x = whole.reshape(*whole.shape[:-1], times, columns).sum(-2, dtype=wide)
    more = x.dim() - len(shape)
    repeated = [
        more + place for place, extent in enumerate(shape) if is_one(extent) and not is_one(x.shape[more + place])
    ]
    axes = (*range(more), *repeated)
    return (x.sum(axes, keepdim=True, dtype=wide) if axes else x.to(wide)).reshape(tuple(shape))
