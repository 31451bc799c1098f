"""One warpgroup that loads and multiplies by itself: the Hopper kernel before it had roles, to measure what they bring.

    load k tile 0 | WGMMA | load k tile 1 | WGMMA | ... | store

Its first warp asks TMA for a k tile, everyone waits until it has arrived, multiplies, and waits for the result. The
ring and its barriers are those of the other schedules; a depth of one stage is enough.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cutegemm.cute.kernels.hopper_pipeline import advance, source_matrix


class SoloRole:
    """The role of that warpgroup, for `HopperGemm` to inherit: what it calls is there."""

    config: Any
    ring: Any
    first_work: Any
    works: Any
    work_step: Any
    _tiled_mma: Any
    _partition: Any
    _issue: Any
    place: Any
    part: Any
    store: Any

    @cute.jit
    def work_alone(self, atom_a, tensor_a, shared_a, atom_b, tensor_b, shared_b, a_batch, b_batch, thread):
        """All tiles of this CTA; its barriers and its epilogue have been started."""
        config = self.config
        mma = self._tiled_mma()
        part = mma.get_slice(0)
        fragment_a = mma.make_fragment_A(part.partition_A(shared_a))
        fragment_b = mma.make_fragment_B(part.partition_B(shared_b))
        accumulators = mma.make_fragment_C(part.partition_shape_C((config.bm, config.bn)))
        source_a, target_a = self._partition(atom_a, tensor_a, shared_a, config.bm, 0, 1)
        source_b, target_b = self._partition(atom_b, tensor_b, shared_b, config.bn, 0, 1)
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        stage, phase = Int32(0), Int32(0)
        for work in cutlass.range(self.first_work, self.works, self.work_step, unroll=1):
            tile, first, count = self.part(work)
            row, column, matrix = self.place(tile)
            matrix_a, matrix_b = source_matrix(matrix, a_batch), source_matrix(matrix, b_batch)
            # WGMMA adds from the first k tile on: peeling it would take a second copy of the loads.
            accumulators.fill(0.0)
            warpgroup.fence()
            for k_tile in cutlass.range(first, first + count, unroll=1):
                if warp == 0:
                    full = self.ring.acquire(stage, phase ^ 1)
                    cute.copy(atom_a, source_a[None, row, k_tile, matrix_a], target_a[None, stage], tma_bar_ptr=full)
                    cute.copy(atom_b, source_b[None, column, k_tile, matrix_b], target_b[None, stage], tma_bar_ptr=full)
                self.ring.wait(stage, phase)
                self._issue(mma, accumulators, fragment_a, fragment_b, stage, False)
                warpgroup.wait_group(0)
                self.ring.release(stage, lane)
                stage, phase = advance(stage, phase, config.stages)
            self.store(accumulators, row, column, matrix, Int32(0))
