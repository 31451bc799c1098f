"""Whether a program is act(alpha acc + beta C + bias), which backends know by these terms and share kernels for."""

from __future__ import annotations

from typing import NamedTuple

from cutegemm.problem.dtypes import TABLE
from cutegemm.problem.program.graph import Input, Program

Factor = float | int
"""A constant, or the number of the operand that is passed by value: an int."""


class Terms(NamedTuple):
    """alpha, beta: a float, or an int, the number of an operand. c, bias: the number of an operand, or None."""

    alpha: Factor
    beta: Factor
    c: int | None
    bias: int | None
    activation: str | None


def is_product(program: Program) -> bool:
    """Whether the only result is the accumulators as they are."""
    plain = not program.inputs and program.gating is None and len(program.outputs) == 1
    return plain and program.outputs[0].reduce is None and program.nodes[program.outputs[0].node].op == "acc"


def terms_of(program: Program, activations: tuple[str, ...]) -> Terms | None:
    """The terms of a program that has one result and is made of these, added up in this order; None for any other.

    The kernels compute ((alpha acc + beta C) + bias); another order rounds otherwise and is another program.
    """
    if program.gating or program.block_scales or len(program.outputs) != 1 or program.outputs[0].reduce:
        return None
    found = _Reader(program)
    node, activation = program.outputs[0].node, None
    if program.nodes[node].op in activations:
        activation, node = program.nodes[node].op, program.nodes[node].args[0]
    bias = None
    if (both := found.sum_with(node, found.vector)) is not None:
        node, bias = both
    c, beta = None, 0.0
    if (both := found.sum_with(node, lambda term: found.scaled(term, found.matrix))) is not None:
        node, (c, beta) = both
    alpha = found.scaled(node, found.accumulators)
    return None if alpha is None else Terms(alpha[1], beta, c, bias, activation)


class _Reader:
    def __init__(self, program: Program) -> None:
        self.program = program

    def input(self, node: int) -> tuple[int, Input] | None:
        found = self.program.nodes[node]
        if found.op != "input" or not isinstance(found.attribute, int):
            return None
        return found.attribute, self.program.inputs[found.attribute]

    def accumulators(self, node: int) -> int | None:
        return 0 if self.program.nodes[node].op == "acc" else None

    def vector(self, node: int) -> int | None:
        """The operand's number if the node is a bias along the columns."""
        found = self.input(node)
        fits = found is not None and _is_plain(found[1], "n") and not found[1].batched
        return found[0] if fits and found is not None else None

    def matrix(self, node: int) -> int | None:
        found = self.input(node)
        return found[0] if found is not None and _is_plain(found[1], "mn") else None

    def factor(self, node: int) -> Factor | None:
        """A constant, or the number of the operand that is an fp32 number passed by value."""
        constant = self.program.nodes[node].attribute
        if self.program.nodes[node].op == "const" and isinstance(constant, float):
            return constant
        found = self.input(node)
        return found[0] if found is not None and found[1].by_value and found[1].dtype == "fp32" else None

    def scaled(self, node: int, read) -> tuple[int, Factor] | None:
        """(what `read` says of one factor, the other) of a product, or with 1.0 of the node itself."""
        if (alone := read(node)) is not None:
            return alone, 1.0
        found = self.program.nodes[node]
        if found.op != "mul":
            return None
        for one, other in (found.args, found.args[::-1]):
            what, factor = read(one), self.factor(other)
            if what is not None and factor is not None:
                return what, factor
        return None

    def sum_with(self, node: int, read):
        """(the other summand, what `read` says of one) of a sum that has such a summand."""
        found = self.program.nodes[node]
        if found.op != "add":
            return None
        for one, other in (found.args, found.args[::-1]):
            if (what := read(one)) is not None:
                return other, what
        return None


def _is_plain(given: Input, varies: str) -> bool:
    return given.varies == varies and given.dtype in TABLE and not given.period
