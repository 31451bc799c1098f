"""The cost of an epilogue program for a tile, besides the bytes that it moves: instructions, and waits for operands.

The instructions of an element were counted in the machine code of Hopper kernels (silu 9.5, gelu(acc + bias) + residual
15.5, a rotation 10 of which half load operands). Those of the special function unit, which is an eighth as wide as the
others, weigh 4: half of what they take alone, since other warps compute meanwhile. `WAIT` was read off times on an H200
at 4096x6144x4096 and 4096^3, at 1.455 GHz: 22 to 25 ns for each accumulator of a thread and each such operand with 128
accumulators, 23 to 62 with 192. An operand in the ring costs a cooperative kernel its bytes alone, 2 us at 4096^3.
In ping-pong it takes stages from the other warpgroup's tile, and counts as an operand that is waited for: a rotation at
4096x6144x4096 was measured to take 20 us. These numbers are no fit. They count for programs only: C, bias and
activations are part of the fitted constants.
"""

from __future__ import annotations

from cutegemm.problem.program.graph import BLOCK_SCALE_OPS, Program

INSTRUCTIONS = {
    "const": 0, "acc": 0, "row": 0, "column": 0, "matrix": 0,
    "exp": 5, "exp2": 4, "log": 5, "log2": 4, "sqrt": 4, "rsqrt": 4, "reciprocal": 4, "div": 9, "sigmoid": 10,
    "tanh": 11, "silu": 13, "gelu_tanh": 15, "erf": 21, "gelu": 13, "ifloordiv": 12, "imod": 14, "random": 60,
    **dict.fromkeys(BLOCK_SCALE_OPS, 3),
}  # fmt: skip
"""Of an element, by operation; 1 for all others."""
LANES = 128
"""Instructions of single threads that an SM issues in a cycle; half of them where one warpgroup works on a tile."""
WAIT = 32.0
"""Cycles that a warp waits for an operand that nobody loads ahead, for each accumulator of a thread; twice as long with
more than `FEW` accumulators, which leave registers for two loads at a time."""
FEW = 160


def cycles(program: Program, elements: int, accumulators: int, waited_for: int, alone: bool = False) -> float:
    """Cycles that the program takes an SM for one tile.

    Args:
        elements: accumulators of the tile. accumulators: of a thread.
        waited_for: matrix operands that are not loaded before they are needed.
        alone: whether only one warpgroup works on the tile, as in ping-pong.
    """
    count = sum(INSTRUCTIONS.get(node.op, 1) for node in program.nodes)
    return elements * count * (2 if alone else 1) / LANES + waited_for * accumulators * WAIT * (
        1 if accumulators <= FEW else 2
    )
