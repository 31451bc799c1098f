"""Making programs node by node: equal nodes are one, types are checked, and the result has one canonical numbering."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from cutegemm.problem.dtypes import TABLE
from cutegemm.problem.program.graph import (
    BLOCK_SCALE_OPS,
    BOOL,
    F32,
    GATINGS,
    I32,
    OPS,
    REDUCED,
    ROW_BLOCKS,
    Input,
    Node,
    Output,
    Program,
)

INT32 = (-(2**31), 2**31 - 1)
"""The least and the greatest int32."""
TYPE_NAMES = {F32: "fp32", I32: "int32", BOOL: "a condition"}
"""The types of values in words, for messages."""


def in_short(value: int) -> str:
    """An integer for a message, one of hundreds of digits by its size."""
    return str(value) if abs(value) < 10**30 else f"of {value.bit_length()} bits"


def fp32(value: float) -> float:
    """The number rounded to fp32; infinity where it is too large for one."""
    if value != value:
        return math.nan  # the one object: as a NaN equals itself only, programs with a NaN would differ
    with np.errstate(over="ignore"):
        return float(np.float32(value))


class Builder:
    """Nodes of a program in the making. Nodes are numbered as they are added; `program` numbers them anew."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self.inputs = tuple(inputs)
        self.nodes: list[Node] = []
        self.types: list[str] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    def add(self, op: str, *args: int, attribute: float | int | str | None = None) -> int:
        """The number of this node, a new one unless an equal one exists.

        Raises ValueError for arguments or an attribute that the operation does not take.
        """
        row = OPS.get(op)
        if row is None:
            raise ValueError(f"operation {op!r}, accepted are {', '.join(OPS)}")
        given = tuple(self.types[arg] for arg in args)
        if given != row.takes:
            wanted, got = (", ".join(TYPE_NAMES[each] for each in types) or "nothing" for types in (row.takes, given))
            raise ValueError(f"{op} takes ({wanted}), got ({got})")
        gives = row.gives
        if op == "input":
            if not isinstance(attribute, int) or not 0 <= attribute < len(self.inputs):
                raise ValueError(f"input {attribute!r}, there are {len(self.inputs)}")
            gives = self.inputs[attribute].type
        elif op == "const":
            gives = self._const_type(attribute)
        elif op == "cast" and attribute not in TABLE:
            raise ValueError(f"cast to {attribute!r}, accepted are {', '.join(TABLE)}")
        elif op == "acc" and attribute not in (None, 0, 1):
            raise ValueError(f"accumulator {attribute!r}, accepted are None, 0 and 1")
        elif op not in ("cast", "acc") and attribute is not None:
            raise ValueError(f"{op} has no attribute, got {attribute!r}")
        key = (op, args, type(attribute), repr(attribute))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.nodes)
            self.nodes.append(Node(op, args, attribute))
            self.types.append(gives)
        return number

    @staticmethod
    def _const_type(value: object) -> str:
        if isinstance(value, bool):
            return BOOL  # while a program is simplified; none is left in the result
        if isinstance(value, int):
            if not INT32[0] <= value <= INT32[1]:
                raise ValueError(f"the integer {in_short(value)} is not an int32")
            return I32
        if not isinstance(value, float):
            raise ValueError(f"constant {value!r}, accepted are float and int")
        return F32

    def const(self, value: float | int) -> int:
        """A constant, rounded to fp32 unless it is an int. Minus zero becomes the negative of zero: as a float the two
        are equal, so that programs with one and the other would be, too.
        """
        if isinstance(value, int):
            return self.add("const", attribute=value)
        value = fp32(value)
        if value == 0 and math.copysign(1.0, value) < 0:
            return self.add("neg", self.add("const", attribute=0.0))
        return self.add("const", attribute=value)

    def copy(self, node: Node, new: Sequence[int]) -> int:
        """The number here of a node of another program, whose earlier nodes are `new` here."""
        if node.op == "const" and isinstance(node.attribute, (int, float)):
            return self.const(node.attribute)
        return self.add(node.op, *(new[arg] for arg in node.args), attribute=node.attribute)

    def value(self, number: int) -> float | int | None:
        """The constant that a node stands for, minus zero included; None for any other node."""
        node = self.nodes[number]
        if node.op == "neg" and self.nodes[node.args[0]] == Node("const", (), 0.0):
            return -0.0
        return node.attribute if node.op == "const" and not isinstance(node.attribute, str) else None

    def program(self, outputs: Iterable[Output], gating: str | None = None) -> Program:
        """The program with these outputs, whose nodes are numbered as a walk from the outputs leaves them: arguments
        from left to right, then the node. Nodes that no output needs are left out.

        Raises ValueError for outputs or accumulators that do not fit.
        """
        outputs = tuple(outputs)
        order: dict[int, int] = {}
        for output in outputs:
            if self.types[output.node] != F32:
                raise ValueError(f"an output is fp32, got {TYPE_NAMES[self.types[output.node]]}")
            if output.dtype is not None and output.dtype not in TABLE:
                raise ValueError(f"an output's dtype {output.dtype!r}, accepted are {', '.join(TABLE)}")
            if output.reduce not in (None, *REDUCED):
                raise ValueError(f"reduction {output.reduce!r}, accepted are {', '.join(REDUCED)}")
            if output.reduce == ROW_BLOCKS and self.nodes[output.node].op not in BLOCK_SCALE_OPS:
                raise ValueError(f"{ROW_BLOCKS} takes {', '.join(BLOCK_SCALE_OPS)}, got {self.nodes[output.node].op}")
            self._walk(output.node, order)
        if gating is not None and gating not in GATINGS:
            raise ValueError(f"gating {gating!r}, accepted are {', '.join(GATINGS)}")
        nodes = [self.nodes[number] for number in order]
        if any(node.op == "acc" and (node.attribute is None) != (gating is None) for node in nodes):
            raise ValueError("a gated program reads the accumulators gate and up, every other one acc")
        renumbered = tuple(node._replace(args=tuple(order[arg] for arg in node.args)) for node in nodes)
        moved = tuple(output._replace(node=order[output.node]) for output in outputs)
        return Program(self.inputs, renumbered, moved, gating)

    def _walk(self, root: int, order: dict[int, int]) -> None:
        todo = [(root, False)]
        while todo:
            number, done = todo.pop()
            if number in order:
                continue
            if done:
                order[number] = len(order)
            else:
                todo.append((number, True))
                todo += ((arg, False) for arg in reversed(self.nodes[number].args))


def numbered(program: Program) -> Program:
    """The same program in canonical numbering: equal nodes are one, no output lacks use of a node. Raises ValueError
    for a program that is not well formed.
    """
    builder = Builder(program.inputs)
    new: list[int] = []
    for node in program.nodes:
        if any(not 0 <= arg < len(new) for arg in node.args):
            raise ValueError(f"node {len(new)} takes nodes {node.args}, accepted are earlier ones")
        new.append(builder.copy(node, new))
    return builder.program((out._replace(node=new[out.node]) for out in program.outputs), program.gating)
