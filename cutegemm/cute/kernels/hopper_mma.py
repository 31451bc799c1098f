"""WGMMA and the TMA loads of its operands as DSL operations; the DSL itself offers neither for tf32.

    fp16, bf16    m64nNk16, either major of both operands
    tf32          m64nNk8, K-major operands only. It reads fp32 words and ignores their low 13 bits: truncated operands
                  would be biased and twice as far off. So the tensor maps have the element type TFLOAT32, with which
                  TMA rounds fp32 to the nearest tf32 on the way into shared memory.

Either way one instruction multiplies 32 bytes of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, TFloat32
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.atom import make_atom
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.cpasync.copy import (
    CopyBulkTensorTileG2SMulticastNonExecTrait,
    CopyBulkTensorTileG2SNonExecTrait,
)
from cutlass.cute.nvgpu.warpgroup.mma import MmaTraits

from cutegemm.cute.hopper_config import BLOCK_ROWS

K_BYTES = 32
"""Of an operand's row that one WGMMA reads."""


class _Tf32Traits(MmaTraits):
    """The run-time state of a tf32 WGMMA: whether it accumulates."""


@dataclass(frozen=True)
class MmaTf32Op(warpgroup.MmaOp):
    """m64nNk8, tf32 operands in shared memory, fp32 accumulators."""

    descriptive_name = "warpgroup tf32 MMA operation"

    def _make_trait(self, *, loc: Any = None, ip: Any = None, **_: Any) -> MmaTraits:
        atom = cute_nvgpu.MmaAtomSM90Type.get(
            _pack_shape(self.shape_mnk, loc=loc, ip=ip).type.attribute,
            self.a_major_mode._to_ir(),
            self.b_major_mode._to_ir(),
            self.a_dtype.mlir_type,
            self.b_dtype.mlir_type,
            self.acc_dtype.mlir_type,
            self.a_src._to_ir(),
        )
        return _Tf32Traits(make_atom(atom, [Boolean(False).ir_value(loc=loc, ip=ip)], loc=loc, ip=ip))


def operand_type(dtype: type[cutlass.Numeric]) -> type[cutlass.Numeric]:
    """What the tensor cores take for operands that are `dtype` in global memory; TMA converts while it loads."""
    return TFloat32 if dtype is Float32 else dtype


def operation(dtype: type[cutlass.Numeric], n: int, a_k_major: bool, b_k_major: bool) -> warpgroup.MmaOp:
    """The WGMMA of 64 x n outputs for operands of `operand_type(dtype)`, both in shared memory."""
    source = warpgroup.OperandSource.SMEM
    majors = [OperandMajorMode.K if k_major else OperandMajorMode.MN for k_major in (a_k_major, b_k_major)]
    shape = (BLOCK_ROWS, n, K_BYTES * 8 // dtype.width)
    if dtype in (Float16, BFloat16):
        return warpgroup.MmaF16BF16Op(dtype, Float32, shape, source, *majors)
    return MmaTf32Op(TFloat32, TFloat32, Float32, shape, source, *majors)


def tma_load(tensor: cute.Tensor, layout: Any, tile: tuple[int, int], sharers: int) -> tuple[Any, Any]:
    """(copy atom, coordinate tensor) for loads of `tile` into shared memory laid out as `layout`, on the host.

    Each of `sharers` CTAs loads a share and multicasts it. fp32 elements arrive rounded to tf32.
    """
    op = cpasync.CopyBulkTensorTileG2SOp() if sharers == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    if tensor.element_type is not Float32:
        info = cpasync.make_tiled_tma_atom(op, tensor, layout, tile, num_multicast=sharers)
        return info.atom, info.tma_tensor
    made = cute_nvgpu.atom_make_non_exec_tiled_tma_load(
        tensor.value,
        layout.value,
        cute.composition(cute.make_identity_layout(tensor.shape), tile),
        op._to_ir(),
        num_multicast=sharers,
        tma_format=cute_nvgpu.TmaDataFormat.TF32_RN,
    )
    trait = CopyBulkTensorTileG2SNonExecTrait if sharers == 1 else CopyBulkTensorTileG2SMulticastNonExecTrait
    return cute.CopyAtom(op, trait(made[0])), made[1]
