"""mma.sync: the instruction for each kind of operand.

    fp16, bf16    m16n8k16
    tf32          m16n8k8
    int8          m16n8k32, int32 accumulators
    fp8           m16n8k32, e4m3 and e5m2 in any combination, on compute capability 8.9 and newer. For 9.0 ptxas makes
                  fp16 of the operands, and of each instruction two HMMA and additions in fp32

Either way one instruction multiplies 32 bytes of K. Elements of one byte must lie along K: ldmatrix transposes elements
of 16 bits. The DSL itself offers no operation for int8, and none for two different types of fp8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int8, Int32, TFloat32
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.atom import MmaOp, Trait, make_atom
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.cutlass_dsl import T

K_BYTES = 32
"""Bytes of K that one instruction reads of each row of an operand."""


@dataclass(frozen=True)
class MmaOfBytes(MmaOp):
    """m16n8k32: int8 with int32 accumulators, or fp8 of any two types with fp32 accumulators."""

    a_dtype: type[cutlass.Numeric]
    b_dtype: type[cutlass.Numeric]

    def _make_trait(self, *, loc: Any = None, ip: Any = None, **_: Any) -> Trait:
        shape = _pack_shape((16, 8, K_BYTES), loc=loc, ip=ip).type.attribute
        if self.a_dtype is Int8:  # the types of the DSL say nothing of a sign
            atom = cute_nvgpu.MmaAtomSM80Type.get(shape, T.si8(), T.si8(), Int32.mlir_type)
        else:
            types = self.a_dtype.mlir_type, self.b_dtype.mlir_type, Float32.mlir_type
            atom = cute_nvgpu.MmaAtomSM89Type.get(shape, *types)
        return Trait(make_atom(atom, loc=loc, ip=ip))

    def _verify_fragment_A(self, *_: Any, **__: Any) -> None:
        """Nothing that the type of the atom does not check."""

    def _verify_fragment_B(self, *_: Any, **__: Any) -> None:
        """Nothing that the type of the atom does not check."""


def operation(dtype: type[cutlass.Numeric], b_dtype: type[cutlass.Numeric]) -> MmaOp:
    """The instruction for operands of these dtypes; `TFloat32` for fp32 that is rounded to tf32."""
    if dtype.width == 8:
        return MmaOfBytes(dtype, b_dtype)
    if dtype is TFloat32:
        return warp_ops.MmaTF32Op((16, 8, 8))
    return warp_ops.MmaF16BF16Op(dtype, Float32, (16, 8, 16))  # refuses other types
