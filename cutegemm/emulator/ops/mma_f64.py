"""mma.sync on fp64 operands: m8n8k4, and m16n8k4, m16n8k8, m16n8k16 of sm_90.

Each output is a chain of fused multiply-adds in the order of k, each rounded to nearest. The PTX ISA asks for IEEE
arithmetic of products and sums and leaves their order open; tensor cores of sm_80 were found to round so (Fasi, Higham,
Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021).

Fragments (PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f64 floating point type" and the following sections), lane
= 4 * group + member:

    A   row group (+ 8 in every other register, of 16 rows), k = member + 4 * (register pair)
    B   k = member + 4 * register, column group
    D   row group (+ 8 in the second pair), columns 2 * member and 2 * member + 1
"""

from __future__ import annotations

import numpy as np

from cutegemm.emulator import numerics
from cutegemm.emulator.ptx import Instr, Vec
from cutegemm.emulator.translate import Gen, runtime

SHAPES = {"m8n8k4": (8, 4), "m16n8k4": (16, 4), "m16n8k8": (16, 8), "m16n8k16": (16, 16)}


def emit(g: Gen, i: Instr) -> None:
    """Generates one instruction. Raises `Unsupported` for another shape or number of registers."""
    shape = next((part for part in i.parts if part in SHAPES), None)
    if shape is None or not (i.has("row") and i.has("col")) or list(i.parts[-4:]) != ["f64"] * 4:
        raise g.unsupported("fp64 products have shapes m8n8k4, m16n8k4, m16n8k8, m16n8k16 with row.col operands")
    rows, k = SHAPES[shape]
    d, a, b, c = (o.items if isinstance(o, Vec) else (o,) for o in i.operands)
    if (len(a), len(b), len(c), len(d)) != (rows * k // 32, k // 4, rows // 4, rows // 4):
        raise g.unsupported("the number of registers does not fit the shape")
    given = ("(" + ", ".join(g.src(o, "f8") for o in regs) + ",)" for regs in (a, b, c))
    found = g.let(f"mma_f64({', '.join(given)}, {rows}, X.shape)")
    for number, o in enumerate(d):
        g.assign(o, f"{found}[{number}]", "f8")


def _stacked(registers, shape) -> np.ndarray:
    """Registers as (register, warp, group, member)."""
    count = shape[0] * shape[1]
    return np.stack([np.broadcast_to(each, shape) for each in registers]).reshape(-1, count, 8, 4)


@runtime
def mma_f64(a, b, c, rows, shape):
    halves = rows // 8
    a = _stacked(a, shape)  # registers of a k group: rows + 0, rows + 8
    a = a.reshape(-1, halves, *a.shape[1:]).transpose(2, 1, 3, 0, 4)  # warp, half, group, k group, member
    a = a.reshape(a.shape[0], rows, -1)
    b = _stacked(b, shape).transpose(1, 2, 0, 3)  # warp, column, k group, member
    b = b.reshape(*b.shape[:2], -1)
    c = _stacked(c, shape).reshape(halves, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1)  # warp, half, group, member, element
    total = np.ascontiguousarray(c).reshape(c.shape[0], rows, 8)
    for k in range(a.shape[2]):
        total = numerics.fma_f64(a[:, :, None, k], b[:, None, :, k], total)
    out = total.reshape(-1, halves, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(2 * halves, *shape)
    return list(out)
