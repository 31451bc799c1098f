"""An epilogue program: a small typed expression graph over the accumulators of one element of the product.

A program holds no tensors. It is traced from a Python function (`trace`), written and read as text (`text`), evaluated
on torch tensors (`evaluate`), and lowered by every kernel family. All arithmetic is fp32, or int32 for indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from cutegemm.problem.program.writing import line

F32, I32, BOOL = "f32", "i32", "bool"
"""The types of a node's value."""


class Op(NamedTuple):
    """An operation: the types it takes and the type it gives, and whether its two arguments may be exchanged."""

    takes: tuple[str, ...]
    gives: str
    commutes: bool = False


PACKED = ("bf16", "fp16")
"""Dtypes of which two numbers can be packed into one of fp32's size."""
PACKERS = tuple(f"packed_{dtype}" for dtype in PACKED)
BLOCK_SCALE_OPS = {f"block_scale_{dtype}": dtype for dtype in ("e4m3", "e5m2", "int8")}
"""The operations that give the scale of a value's block, and the dtype that the scale is for: what `quantization` gives
the `SCALED` columns of a row of D that make up the block."""
SCALED = 128
"""Columns of D that share a scale where it is quantized: as `quantization.BLOCK`, of a module that imports torch."""
_FLOAT1 = (
    "neg", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "reciprocal", "tanh", "sigmoid", "erf", "abs", "relu", "gelu",
    "gelu_tanh", "silu",
)  # fmt: skip
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
_ROWS: dict[str, Op] = {
    **{name: Op((F32,), F32) for name in _FLOAT1},
    **{name: Op((F32, F32), F32, True) for name in ("add", "mul", "minimum", "maximum")},
    "sub": Op((F32, F32), F32),
    "div": Op((F32, F32), F32),
    **{name: Op((F32, F32), BOOL, name in ("eq", "ne")) for name in _COMPARE},
    "where": Op((BOOL, F32, F32), F32),
    "and": Op((BOOL, BOOL), BOOL, True),
    "or": Op((BOOL, BOOL), BOOL, True),
    "not": Op((BOOL,), BOOL),
    # The integers: indices of the element, and numbers made of them.
    **{name: Op((I32, I32), I32, True) for name in ("iadd", "imul")},
    **{name: Op((I32, I32), I32) for name in ("isub", "ifloordiv", "imod")},
    **{"i" + name: Op((I32, I32), BOOL, name in ("eq", "ne")) for name in _COMPARE},
    "float": Op((I32,), F32),
    # A number in [0, 1) from a counter-based generator: (seed, row, column, matrix).
    "random": Op((I32, I32, I32, I32), F32),
    # Leaves.
    "row": Op((), I32),
    "column": Op((), I32),
    "matrix": Op((), I32),
    "acc": Op((), F32),
    # With an attribute.
    "input": Op((), F32),  # attribute: index of the input; its type is that of the input
    "const": Op((), F32),  # attribute: a Python float, or an int for an int32
    "cast": Op((F32,), F32),  # attribute: name of the dtype that the value is rounded to
    "partner": Op((F32,), F32),  # the value at the neighbouring column: 2j and 2j + 1 exchanged
    # The bits of two numbers rounded to 16 bits, the first in the lower half. Derived programs alone have these.
    **{name: Op((F32, F32), F32) for name in PACKERS},
    # Of the block of a row of D that the element lies in; and a value times the reciprocal of a scale, rounded twice.
    **{name: Op((F32,), F32) for name in BLOCK_SCALE_OPS},
    "per_scale": Op((F32, F32), F32),
}
OPS: Mapping[str, Op] = MappingProxyType(_ROWS)
"""The operations by name. `acc` has an attribute in a gated program: 0 for the gate's accumulator, 1 for up's."""

REDUCTIONS = ("row_sum", "row_max", "row_max_abs", "column_sum", "column_max", "column_max_abs")
"""What an output may be reduced by. Over a row: D has one number for each row."""
ROW_BLOCKS = "row_blocks"
"""The other way to reduce: of `block_scale_...` alone, one number for each block."""
REDUCED = (*REDUCTIONS, ROW_BLOCKS)
"""All ways to reduce."""
GATINGS = ("halves", "pairs")
"""How the columns of a gated product belong together: j and N / 2 + j, or 2j and 2j + 1."""


SCALES = ("a1", "a128", "b1", "b128")
"""What an input may scale: A or B, in blocks of so many rows (A) or columns (B) by `SCALE_K` of K."""
SCALE_K = 128
"""Elements of K that a block's scale is for."""


class Input(NamedTuple):
    """An operand of a program.

    name: as the text has it. dtype: a name of `dtypes.TERMS`, or "int32". m, n, batched: whether it has an element of
    its own for each row, column and matrix of D. by_value: a Python number, passed with the launch as fp32 or int32.
    scales: one of `SCALES` for a matrix of numbers that A's or B's elements are multiplied by before they are summed,
    which no node reads. "" for all others. period: how many columns an operand has that repeat along the columns of D
    (column j of D takes column j % period); 0 where each column of D has its own.
    """

    name: str
    dtype: str
    m: bool = False
    n: bool = False
    batched: bool = False
    by_value: bool = False
    scales: str = ""
    period: int = 0

    @property
    def type(self) -> str:
        return I32 if self.dtype == "int32" else F32

    def columns(self, n: Any) -> Any:
        """The columns of its tensor where D has n, unless it has one for all of them."""
        return self.period or n

    @property
    def varies(self) -> str:
        """ "", "n", "m" or "mn": along which extents of D it varies; "k" for one that scales blocks of K."""
        if self.scales:
            return "k"
        return "m" * self.m + "n" * self.n


class Node(NamedTuple):
    """One value: an operation, the numbers of the nodes that it takes, and what a leaf or a cast needs to know."""

    op: str
    args: tuple[int, ...] = ()
    attribute: float | int | str | None = None


class Output(NamedTuple):
    """A result: the number of the node. dtype: what it is stored as, None for the call's `out_dtype` (for a reduction
    fp32). reduce: one of `REDUCTIONS`, `ROW_BLOCKS`, or None for a matrix.
    """

    node: int
    dtype: str | None = None
    reduce: str | None = None

    def extents(self, m: Any, n: Any) -> tuple[Any, Any]:
        """(rows, columns) of the result where D is (m, n)."""
        if self.reduce is None:
            return m, n
        if self.reduce == ROW_BLOCKS:
            return m, -(-n // SCALED)
        return (m, 1) if self.reduce.startswith("row") else (1, n)


def _restored(inputs: Any, nodes: tuple[Node, ...], outputs: Any, gating: str | None) -> Program:
    """A copied program. A NaN is equal to the same object only, so every program has `math.nan`."""
    nodes = tuple(each._replace(attribute=math.nan) if each.attribute != each.attribute else each for each in nodes)
    return Program(inputs, nodes, outputs, gating)


@dataclass(frozen=True)
class Program:
    """Inputs, nodes in an order in which each takes earlier ones only, and outputs.

    `gating` is one of `GATINGS` or None; with it D has half as many columns as the product. Two programs with the same
    meaning are equal once simplified (`simplify.simplified`), which every traced one is.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    gating: str | None = None

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The type of each node."""
        found: list[str] = []
        for node in self.nodes:
            if node.op == "input":
                assert isinstance(node.attribute, int)
                found.append(self.inputs[node.attribute].type)
            elif node.op == "const":
                found.append(I32 if isinstance(node.attribute, int) else F32)
            else:
                found.append(OPS[node.op].gives)
        return tuple(found)

    @cached_property
    def text(self) -> str:
        """The program on one line; see `text`."""
        return line(self)

    @cached_property
    def _hash(self) -> int:
        return hash((self.inputs, self.nodes, self.outputs, self.gating))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[..., Program], tuple[Any, ...]]:
        return _restored, (self.inputs, self.nodes, self.outputs, self.gating)  # a hash is this process's

    def __str__(self) -> str:
        return self.text

    @cached_property
    def block_scales(self) -> dict[str, Input]:
        """The inputs that scale blocks of A or B, by the operand: "a" and "b"."""
        return {given.scales[0]: given for given in self.inputs if given.scales}

    @cached_property
    def product(self) -> Program | None:
        """The program of the product alone: accumulators as they are, whose blocks of K have the same scales. None
        where no block has any.
        """
        scales = [given for given in self.inputs if given.scales]
        if not scales:
            return None
        inputs = tuple(given._replace(name=f"x{number}") for number, given in enumerate(scales))
        return Program(inputs, (Node("acc"),), (Output(0, self.outputs[0].dtype),))

    def uses(self, op: str) -> bool:
        """Whether some node is that operation."""
        return any(node.op == op for node in self.nodes)

    @cached_property
    def quantizes(self) -> bool:
        """Whether results are quantized with scales of blocks."""
        return any(node.op in BLOCK_SCALE_OPS or node.op == "per_scale" for node in self.nodes)
