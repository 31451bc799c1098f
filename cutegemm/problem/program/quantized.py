"""Programs whose first result is quantized with scales of blocks, as kernels compute them: a program of the value, and
what becomes of it (`ops.quantize`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cutegemm.problem.program.build import Builder
from cutegemm.problem.program.graph import BLOCK_SCALE_OPS, ROW_BLOCKS, Output, Program
from cutegemm.problem.program.simplify import simplified


class Quantized(NamedTuple):
    """program: gives the value in fp32. dtype: of D. scales: the number of the result that has the scales, or None."""

    program: Program
    dtype: str
    scales: int | None


@lru_cache(maxsize=256)
def read(program: Program) -> Quantized | None:
    """The program in this form; None for one that has any other result or quantizes anything else."""
    first, *rest = program.outputs
    root = program.nodes[first.node]
    if root.op != "per_scale" or first.reduce is not None or len(rest) > 1:
        return None
    value, scale = root.args
    found = program.nodes[scale]
    if found.args != (value,) or BLOCK_SCALE_OPS.get(found.op) != first.dtype:
        return None
    if any((each.node, each.reduce) != (scale, ROW_BLOCKS) for each in rest):
        return None
    nodes = program.nodes[: value + 1]
    if any(node.op in BLOCK_SCALE_OPS for node in nodes):
        return None
    own = Program(program.inputs, nodes, (Output(value),), program.gating)
    return Quantized(own, str(first.dtype), 1 if rest else None)


@lru_cache(maxsize=256)
def quantizing(program: Program, rounded: str, dtype: str) -> Program:
    """The program whose only result is quantized after it was rounded: its values in a dtype, and their scales."""
    builder = Builder(program.inputs)
    new: list[int] = []
    for node in program.nodes:
        new.append(builder.copy(node, new))
    value = builder.add("cast", new[program.outputs[0].node], attribute=rounded)
    scale = builder.add(f"block_scale_{dtype}", value)
    outputs = Output(builder.add("per_scale", value, scale), dtype), Output(scale, "fp32", ROW_BLOCKS)
    return simplified(builder.program(outputs, program.gating))


def why_other(program: Program) -> str | None:
    """None where it is in this form, else a sentence."""
    if read(program) is not None:
        return None
    return "the kernel gives the two results of ops.quantize, in their order, and no others beside them"
