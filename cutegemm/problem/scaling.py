"""The program that a product of scaled operands is: the caller's own, with scales before everything else.

Scales of a tensor and of rows are factors of the accumulators: operands of the program, which multiplies them before
anything else. Scales of blocks of K are multiplied by the kernel as it sums: inputs of the program that no node reads
(`Input.scales`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from cutegemm.problem.program.build import Builder
from cutegemm.problem.program.evaluate import columns_of
from cutegemm.problem.program.graph import Input, Output, Program
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.scales import SCALED, Recipe
from cutegemm.problem.work import DENSE, RAGGED_K, RAGGED_N, TABLE


def reads_a_matrix(program: Program) -> bool:
    """Whether a program has a matrix operand."""
    return any(given.m and given.n for given in program.inputs)


def multiplies_alone(program: Program) -> bool:
    """Whether D is the sum, times constants, numbers and vectors such as scales, and nothing else is done."""
    powers: list[int] = []  # of the sum in each node
    for node in program.nodes:
        if node.op not in ("acc", "input", "const", "mul"):
            return False
        powers.append(sum(powers[place] for place in node.args) if node.op == "mul" else int(node.op == "acc"))
    if len(program.outputs) != 1 or reads_a_matrix(program):
        return False
    return program.outputs[0].reduce is None and powers[program.outputs[0].node] == 1


@lru_cache(maxsize=512)
def scaled(program: Program, a: Input | None, b: Input | None) -> Program:
    """The program of scaled accumulators: with the inputs of A's and B's scales behind its own.

    Of a gated program the scales of B's columns are two inputs: gate's and up's.
    """
    inputs, factors = list(program.inputs), list[tuple[int, ...]]()
    for given in (a, b):
        if given is None:
            continue
        halves = 2 if program.gating and given.n else 1
        if not given.scales:
            factors.append(tuple(len(inputs) + i for i in range(halves)))
        inputs += [given._replace(name=f"x{len(inputs) + i}") for i in range(halves)]
    builder = Builder(inputs)
    new: list[int] = []
    for node in program.nodes:
        number = builder.copy(node, new)
        if node.op == "acc":
            for factor in factors:
                part = factor[int(node.attribute or 0) % len(factor)]
                number = builder.add("mul", number, builder.add("input", attribute=part))
        new.append(number)
    return simplified(builder.program((out._replace(node=new[out.node]) for out in program.outputs), program.gating))


def of_blocks(dtype: str, out_dtype: str, work: str = DENSE, program: Program | None = None) -> Program:
    """The program of a product of operands in blocks, 1 x 128 of A and 128 x 128 of B, as `gemm` and `grouped_gemm`
    make it; of groups of columns 128 x 128 of A and 128 x 1 of B.

    Args:
        dtype, out_dtype: names of the dtypes of A and B, and of D. work: a name of `problem.work.TABLE`.
        program: what is computed of the scaled product, into D of its own dtype; by default D is the product.

    Raises:
        ValueError: the dtype has no scales, or groups of the work have none of blocks.
    """
    if work == RAGGED_K:
        raise ValueError("scaling: got blocks for groups of K, which end within blocks")
    if dtype not in SCALED:
        raise ValueError(f"scaling: got operands of {dtype}; scales of blocks are for {', '.join(SCALED)}")
    if program is None:
        plain = Builder(())
        program = plain.program([Output(plain.add("acc"), out_dtype)])
    kinds = ("a128", "b1") if work == RAGGED_N else ("a1", "b128")
    return in_groups(scaled(program, *(Input("", "fp32", scales=scales) for scales in kinds)), work)


def in_groups(program: Program, work: str) -> Program:
    """The program with scales of blocks of K for each group of an operand that is one matrix a group."""
    if work == DENSE:
        return program
    inputs = (
        given._replace(batched=TABLE[work].matrices(given.scales[0], 2) > 1) if given.scales else given
        for given in program.inputs
    )
    return replace(program, inputs=tuple(inputs))


def operands_of(program: Program, scale_a: Any, scale_b: Any, a: Recipe | None, b: Recipe | None) -> tuple[Any, ...]:
    """The tensors of the inputs that `scaled` adds to `program`."""
    found = [] if a is None else [scale_a]
    if b is None:
        return tuple(found)
    if not program.gating or not b.input.n:
        return (*found, scale_b)
    return (*found, *columns_of(scale_b, program.gating))
