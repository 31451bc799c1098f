"""The producer warp of the Hopper kernel: it brings the k tiles of A and B into the ring by TMA.

In a cluster each CTA loads a share of the tiles that it and its neighbours need, and multicasts it to them; `hopper`
says who needs what.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cutegemm.cute.kernels.hopper_pipeline import advance, source_matrix


class ProducerRole:
    """The role of that warp, for `HopperGemm` to inherit: what it calls is there."""

    config: Any
    ring: Any
    cluster_row: Any
    cluster_column: Any
    k_rank: Any
    first_work: Any
    works: Any
    work_step: Any
    place: Any
    part: Any

    @cute.jit
    def produce(self, atom_a, tensor_a, shared_a, atom_b, tensor_b, shared_b, a_batch, b_batch):
        """The producer warp: for each tile of this CTA, its k tiles into the ring."""
        config = self.config
        cm, cn = config.cluster
        # CTAs (row, *) receive this CTA's share of A, CTAs (*, column) that of B; rank = row + CM * column.
        mask_a = Int32(sum(1 << (cm * column) for column in range(cn))) << self.cluster_row
        mask_b = Int32((1 << cm) - 1) << (cm * self.cluster_column)
        if cutlass.const_expr(config.cluster_k > 1):
            mask_a, mask_b = mask_a << (cm * cn * self.k_rank), mask_b << (cm * cn * self.k_rank)
        source_a, target_a = self._partition(atom_a, tensor_a, shared_a, config.bm, self.cluster_column, cn)
        source_b, target_b = self._partition(atom_b, tensor_b, shared_b, config.bn, self.cluster_row, cm)
        stage, phase = Int32(0), Int32(1)
        for work in cutlass.range(self.first_work, self.works, self.work_step, unroll=1):
            tile, first, count = self.part(work)
            row, column, matrix = self.place(tile)
            matrix_a, matrix_b = source_matrix(matrix, a_batch), source_matrix(matrix, b_batch)
            k_tile, k_step = first, Int32(config.parts)
            if cutlass.const_expr("zig" in config.options):  # noqa: SIM102
                # Every other wave walks K backwards, and begins with the k tiles that the L2 cache still holds.
                if ((work - self.first_work) // self.work_step) & 1 == 1:
                    k_tile, k_step = first + (count - 1) * config.parts, Int32(-config.parts)
            if cutlass.const_expr("skew" in config.options):
                k_tile, end = first + tile % count * config.parts, first + count * config.parts
            for _ in cutlass.range(count, unroll=1):
                full = self.ring.acquire(stage, phase)
                place_a, place_b = (None, row, k_tile, matrix_a), (None, column, k_tile, matrix_b)
                self._load(atom_a, source_a[place_a], target_a[None, stage], full, mask_a, cn)
                self._load(atom_b, source_b[place_b], target_b[None, stage], full, mask_b, cm)
                stage, phase = advance(stage, phase, config.stages)
                k_tile = k_tile + k_step
                if cutlass.const_expr("skew" in config.options):  # noqa: SIM102
                    if k_tile >= end:
                        k_tile = first
        if cutlass.const_expr(cm * cn > 1):
            # Neighbours still arrive at this CTA's barriers, and this CTA's copies still land in their shared memory.
            self.ring.drain(stage, phase)

    def _partition(self, atom, tensor, shared, extent: int, place, sharers: int):
        """(source by tile, target by stage) of this CTA's share of an operand's tiles."""
        tiles = cute.local_tile(tensor, (extent, self.config.bk), (None, None, None))
        target, source = cpasync.tma_partition(
            atom, place, cute.make_layout(sharers), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return source, target

    def _load(self, atom, source, target, barrier, mask, sharers: int) -> None:
        if sharers == 1:
            cute.copy(atom, source, target, tma_bar_ptr=barrier)
        else:
            cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=cutlass.Int16(mask))
