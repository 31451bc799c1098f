"""WGMMA: the instruction for each kind of operand, and the main loop of a consumer warpgroup.

    fp16, bf16    m64nNk16, either major of both operands
    fp8           m64nNk32, e4m3 and e5m2 in any combination, K-major operands only
    int8          m64nNk32, K-major operands only, int32 accumulators
    tf32          m64nNk8, K-major operands only. It ignores the low 13 bits of fp32 words, which `operand` has rounded
                  before. The DSL itself does not offer this instruction.

Either way one instruction multiplies 32 bytes of K.

`Products` is how products are formed and accumulated: the tensor cores add every k tile to the same fp32 accumulators.
Another way is another class with these methods: `promoted.PromotedProducts` adds partial sums of a few k tiles into
registers of their own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float8E5M2, Float16, Float32, Int8, Int32, TFloat32
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.atom import make_atom
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup.mma import MmaTraits

from cutegemm.cute.hopper.config import BLOCK_ROWS, WARPGROUP, HopperConfig
from cutegemm.cute.hopper.operand import Operand
from cutegemm.cute.hopper.pipeline import Ring, Turns, advance
from cutegemm.cute.hopper.position import Position

K_BYTES = 32
"""Bytes of K that one WGMMA reads of each row of an operand."""


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


def operation(
    dtype: type[cutlass.Numeric], b_dtype: type[cutlass.Numeric], n: int, a_k_major: bool, b_k_major: bool
) -> warpgroup.MmaOp:
    """The WGMMA of 64 x n outputs for operands of `operand_type` of these dtypes, both in shared memory."""
    source = warpgroup.OperandSource.SMEM
    majors = [OperandMajorMode.K if k_major else OperandMajorMode.MN for k_major in (a_k_major, b_k_major)]
    shape = (BLOCK_ROWS, n, K_BYTES * 8 // dtype.width)
    if dtype in (Float16, BFloat16):
        return warpgroup.MmaF16BF16Op(dtype, Float32, shape, source, *majors)
    if dtype is Float32:
        return MmaTf32Op(TFloat32, TFloat32, Float32, shape, source, *majors)
    if dtype in (Float8E4M3FN, Float8E5M2):
        return warpgroup.MmaF8Op(dtype, b_dtype, Float32, shape, source, *majors)
    if dtype is Int8:
        return warpgroup.MmaI8Op(dtype, b_dtype, Int32, shape, source, *majors)
    raise TypeError(f"dtype: got {dtype}, expected Float16, BFloat16, Float32, Float8E4M3FN, Float8E5M2 or Int8")


class Products:
    """The products of a consumer warpgroup; `start` binds it to the operands' stages, `accumulators` holds the sums.

    target: the registers that WGMMA adds to, here the accumulators. columns: the n of a WGMMA. prefetches: whether
    `prefetch` is to be called for each tile, before the epilogue of the one before.
    """

    prefetches = False

    def __init__(self, config: HopperConfig, ring: Ring, turns: Turns) -> None:
        self.config, self.ring, self.turns = config, ring, turns
        self.columns = config.bn

    def start(self, a: Operand, b: Operand, position: Position, args: Any, work: Any, memory: Any) -> None:
        """For the warpgroup at that position, and operands that have been started.

        args, work, memory: the kernel's arguments by name, the works of the CTA, its shared memory.
        """
        config, self.group, self.lane = self.config, position.group, position.lane
        # A warpgroup's slice of a tiled MMA begins at its first thread; its descriptors are the same for all threads.
        first_thread = 0 if config.solo or config.ping_pong else position.group * WARPGROUP
        op = operation(a.dtype, b.dtype, self.columns, a.k_major, b.k_major)
        sharers = 1 if config.ping_pong else config.consumers
        self.new_mma = partial(cute.make_tiled_mma, cute.make_mma_atom(op), (sharers, 1, 1))
        self.new_operation = partial(operation, a.dtype, b.dtype, a_k_major=a.k_major, b_k_major=b.k_major)
        self.sharers, self.first_thread = sharers, first_thread
        self.mma = self.new_mma()
        part = self.mma.get_slice(first_thread)
        self.fragment_a = self.mma.make_fragment_A(part.partition_A(a.shared))
        self.fragment_b = self.mma.make_fragment_B(part.partition_B(b.shared))
        self.accumulators = self.mma.make_fragment_C(part.partition_shape_C((config.bm, config.bn)))
        self.target = self.accumulators
        if cutlass.const_expr(self.target.element_type is Int32):
            self.accumulators = cute.recast_tensor(self.target, Float32)  # see `whole`

    def narrowed(self, columns: int) -> Products:
        """The products of the first so many columns of a tile, with accumulators of their own.

        The operands' descriptors are those of the whole tile: they do not depend on the n of a WGMMA.
        """
        found = copy.copy(self)
        found.columns = columns
        atom = cute.make_mma_atom(self.new_operation(n=columns))
        found.mma = cute.make_tiled_mma(atom, (self.sharers, 1, 1))
        shape = found.mma.get_slice(self.first_thread).partition_shape_C((self.config.bm, columns))
        found.accumulators = found.target = found.mma.make_fragment_C(shape)
        return found

    def prefetch(self, tile) -> None:
        """Loads what the first k tiles of `tile` need besides the operands."""

    def clear(self) -> None:
        """Zeros for the accumulators."""
        self.accumulators.fill(0.0)

    @cute.jit
    def add_up(self, stage, phase, tile):
        """The sum over the k tiles of `tile`, which begin at that stage of the ring; returns where the ring goes on.

        One WGMMA group stays in flight: a stage is released when the group of the next one has been issued and its own
        is done. In ping-pong the other warpgroup gets its turn when the last group has been issued.
        """
        overwrite = True
        if cutlass.const_expr("zero" in self.config.options):
            overwrite = False
            self.clear()
        self.ring.wait(stage, phase)
        warpgroup.fence()
        self.issue(stage, overwrite)
        before = stage
        stage, phase = advance(stage, phase, self.ring.stages)
        for _ in cutlass.range(tile.k_tiles - 1, unroll=1):
            self.ring.wait(stage, phase)
            self.issue(stage, False)
            warpgroup.wait_group(1)
            self.ring.release(before, self.lane)
            before = stage
            stage, phase = advance(stage, phase, self.ring.stages)
        if cutlass.const_expr(self.config.ping_pong):
            self.turns.hand_over(self.group, self.lane)
        warpgroup.wait_group(0)
        self.ring.release(before, self.lane)
        return stage, phase

    def issue(self, stage, overwrite: bool) -> None:
        """One k tile's WGMMA as a group; the first of a tile may overwrite `target`."""
        for step in range(cute.size(self.fragment_a, mode=[2])):
            self.mma.set(warpgroup.Field.ACCUMULATE, not (overwrite and step == 0))
            place = (None, None, step, stage)
            cute.gemm(self.mma, self.target, self.fragment_a[place], self.fragment_b[place], self.target)
        warpgroup.commit_group()
