"""Sums of int8 products: exact int32, which travel as their 32 bits in fp32 registers and fp32 workspaces.

Slabs, staging buffers and the exchange of parts of K move accumulators without looking at them, and know fp32 alone.
Only what adds two accumulators, and what reads one for the epilogue, asks here. A program computes in fp32, so that a
sum of more than 24 bits is rounded when it is read; D in int32 has no program and gets the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import Float32, Int32

from cutegemm.cute.lowering import FP8, opaque
from cutegemm.problem import Signature
from cutegemm.problem.dtypes import TYPES
from cutegemm.problem.program.graph import Node, Output, Program

Adder = Callable[[Any, Any], Any]
"""From two vectors of accumulators to their sum."""
_AS_IT_IS = Program((), (Node("acc"),), (Output(0),))


def is_whole(signature: Signature) -> bool:
    """Whether the accumulators are the bits of int32. Scaled blocks of K are summed in fp32."""
    return TYPES[signature.dtype].is_integer and not signature.epilogue.program.block_scales


def program_of(signature: Signature) -> Program:
    """The program that a kernel computes: none for D in int32."""
    return _AS_IT_IS if signature.out_dtype == "int32" else signature.epilogue.program


def reader(signature: Signature) -> Callable[[Any], Any]:
    """From a vector of accumulators to the numbers that `program_of` takes."""
    if not is_whole(signature):
        return lambda sums: sums
    if signature.out_dtype == "int32":
        return lambda sums: sums.bitcast(Int32)
    if {dtype for _, _, dtype, _ in signature.results} & FP8:
        return lambda sums: opaque(sums.bitcast(Int32).to(Float32))
    return lambda sums: sums.bitcast(Int32).to(Float32)


def adder(signature: Signature) -> Adder:
    """The sum of two vectors of accumulators."""
    if not is_whole(signature):
        return lambda x, y: x + y
    return lambda x, y: (x.bitcast(Int32) + y.bitcast(Int32)).bitcast(Float32)
