"""GEMM in IEEE fp32 on CUDA cores: cp.async ring -> 16-byte shared loads -> FFMA.

A CTA tile is cut into warp tiles, a warp tile among 4 x 8 lanes; a lane owns wm/4 x wn/8 outputs in registers, as
groups of 4 neighbours along each side so that its fragments come in 16-byte loads:

    lane (i, j) of a 64 x 64 warp tile:   rows 4 i + 16 g + (0..3), g = 0..3     columns 4 j + 32 h + (0..3), h = 0..1

For each k it loads wm/4 values of A and wn/8 of B and adds their outer product. With 16 x 8 outputs a lane that is 6
loads for 128 FFMA; the loads of a warp touch 16 + 32 consecutive words (each word serves 8 or 4 lanes at once), so
shared memory is busy for a fraction of the time that the FFMA take, and one CTA of 8 warps with 255 registers a
thread is enough to keep the FMA pipes full. The fragments of k+1 are loaded while k is multiplied.

Shared tiles are [k][m] and [k][n]. An operand that lies so in memory comes by cp.async; a K-major one is transposed on
its way, through registers (`tile_load.TransposingLoader`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import math

from cutegemm.cute.entry import Gemm
from cutegemm.cute.launch_config import SLAB_ROWS
from cutegemm.cute.simt.config import SimtConfig
from cutegemm.cute.source import aligned
from cutegemm.cute.warps.copy_ring import CopyRing
from cutegemm.cute.warps.tile_load import TileLoader, loader_of
from cutegemm.problem import Signature

LANES_M, LANES_N = 4, 8


def place_of_lane(lane):
    """The lane's place i * LANES_N + j in the 4 x 8 arrangement: the bits of j and i alternate, j first.

    A 16-byte shared load takes a pass for each quarter of the warp, unless lanes that differ in bit 0 (or bit 1) alone
    read the same words. Here they do: neighbours share their rows of A, and lanes two apart their columns of B.
    """
    i = ((lane >> 1) & 1) | ((lane >> 2) & 2)
    j = (lane & 1) | ((lane >> 1) & 2) | ((lane >> 2) & 4)
    return i * LANES_N + j


def outer_product(accumulators, column, row) -> None:
    """Adds the outer product of a thread's fragments, (1, tm) of A and (1, tn) of B, to its sums (1, tm, tn).

    A quarter of an SM reads two registers a cycle, one with an even and one with an odd number, and an FFMA names
    three. It runs at full rate if one of them was kept from the FFMA before (`.reuse`), and the other two differ in
    parity. Rows are walked forwards and backwards in turn, so that each FFMA shares a value of A or B with the one
    before. The 16-byte loads of B put column j into a register of j's parity. The epilogue's 16-byte stores decide
    where the sums lie: in their natural order, the sum of column j would lie in a register of the same parity. With
    `TileConfig.crossed` it lies in one of the other (docs/performance.md#registers-have-two-banks).
    """
    tm, tn = cute.size(column), cute.size(row)
    for i in range(tm):
        for j in range(tn) if i % 2 == 0 else reversed(range(tn)):
            operands = (column[0, i], row[0, j], accumulators[0, i, j])
            accumulators[0, i, j] = Float32(math.fma(*(each.ir_value() for each in operands)))


class SimtGemm(Gemm):
    """The fp32 kernel on CUDA cores: a ring of stages filled by cp.async, fragments in registers, FFMA."""

    def __init__(self, config: SimtConfig, signature: Signature) -> None:
        super().__init__(config, signature)
        self.a = self._operand("a", signature.a_major == "k", config.bm, signature.align_a)
        self.b = self._operand("b", signature.b_major == "k", config.bn, signature.align_b, self.halves)
        self.ring = CopyRing(self.a, self.b, config.stages)
        # The copies of the tile ahead are spread over the first two k-steps, after which fetched values are settled:
        # early, so that their registers are free for most of the tile. They are not skipped at the end of K, where
        # they write zeros: a branch there lets the compiler sink FFMA of one step behind those of the next.
        self.copy_steps = 2

    def _operand(self, name: str, k_major: bool, extent: int, align: int, halves: int = 0) -> TileLoader:
        loader = loader_of(name, self.signature.work, transposes=k_major)
        given = (self.ab_type, extent, self.config.bk, k_major, align, self.config.threads)
        return loader(*given, halves=halves, thin_by_l1=True)  # no vector ends behind a row, in groups neither

    @cute.jit
    def compute_tile(self, a, b, lda, ldb, m, n, k, row, column):
        config = self.config
        tid = cute.arch.thread_idx()[0]
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        warp_m, warp_n = warp // config.warps[1], warp % config.warps[1]

        memory = cutlass.memory.SmemAllocator().allocate(config.smem_bytes(self.signature), byte_alignment=1024)
        self.a.find(self.args)
        self.ring.start(memory, a, b, lda, ldb, m, n, k, row, column, tid, self.await_front)

        ring_a, ring_b = self.ring.tensors()
        ring_a = cute.local_tile(ring_a, (config.wm, config.bk), (warp_m, 0, None))
        ring_b = cute.local_tile(ring_b, (config.wn, config.bk), (warp_n, 0, None))

        lanes = cute.make_layout((LANES_M, LANES_N, 1), stride=(LANES_N, 1, 0))
        four_rows = cute.make_layout((LANES_M, 4), stride=(4, 1))
        four_columns = cute.make_layout((LANES_N, 4), stride=(4, 1))
        mma = cute.make_tiled_mma(
            cute.nvgpu.MmaUniversalOp(Float32), lanes, permutation_mnk=(four_rows, four_columns, None)
        )
        thread_mma = mma.get_slice(place_of_lane(lane))
        source_a = thread_mma.partition_A(ring_a)
        source_b = thread_mma.partition_B(ring_b)
        fragment_a = mma.make_fragment_A(source_a[None, None, None, 0])
        fragment_b = mma.make_fragment_B(source_b[None, None, None, 0])
        accumulators = mma.make_fragment_C(thread_mma.partition_shape_C((config.wm, config.wn)))
        accumulators.fill(0.0)

        cute.arch.cp_async_wait_group(config.stages - 2)
        cute.arch.sync_threads()
        read, write = Int32(0), Int32(config.stages - 1)
        cute.autovec_copy(source_a[None, None, 0, read], fragment_a[None, None, 0])
        cute.autovec_copy(source_b[None, None, 0, read], fragment_b[None, None, 0])

        for k_tile in cutlass.range(self.ring.k_tiles, unroll=1):
            for step in cutlass.range_constexpr(config.bk):
                if cutlass.const_expr(step == config.bk - 1):
                    read = read + 1
                    if read == config.stages:
                        read = Int32(0)
                    self.ring.fetch(k_tile + config.stages)
                    cute.arch.cp_async_wait_group(config.stages - 2)
                    cute.arch.sync_threads()
                following = (step + 1) % config.bk
                cute.autovec_copy(source_a[None, None, following, read], fragment_a[None, None, following])
                cute.autovec_copy(source_b[None, None, following, read], fragment_b[None, None, following])
                if cutlass.const_expr(step < self.copy_steps):
                    self.ring.copy(k_tile + config.stages - 1, write, step, self.copy_steps)
                if cutlass.const_expr(step == self.copy_steps):
                    self.ring.settle(write)
                    cute.arch.cp_async_commit_group()
                    write = write + 1
                    if write == config.stages:
                        write = Int32(0)
                outer_product(accumulators, fragment_a[None, None, step], fragment_b[None, None, step])

        # The slabs of the epilogue reuse the ring: nothing may still be in flight or being read.
        cute.arch.cp_async_wait_group(0)
        if cutlass.const_expr(self.parts is None):
            cute.arch.sync_threads()
            self.start_epilogue(memory, warp_m, warp_n, warp, lane)
            slab = thread_mma.partition_C(self.epilogue.slab)
        else:
            part = self.start_parts(tid).part_of(warp)
        # Accumulators lie row-fastest in registers; a copy that is column-fastest stores 16 bytes at a time, in which
        # neighbours have changed places (`outer_product`).
        columns = config.wn // LANES_N
        rows = cute.make_rmem_tensor(cute.make_layout((1, 4, columns), stride=(0, columns, 1)), Float32)
        for i in cutlass.range_constexpr(config.wm // SLAB_ROWS):
            for r in cutlass.range_constexpr(4):
                for j in cutlass.range_constexpr(columns):
                    rows[0, r, j] = accumulators[0, 4 * i + r, j ^ 1]
            if cutlass.const_expr(self.parts is None):
                cute.autovec_copy(rows, slab)
                self.epilogue.store_rows(i * SLAB_ROWS)
            else:
                band = aligned(part + i * SLAB_ROWS * config.wn, 16)
                layout = cute.make_layout((SLAB_ROWS, config.wn), stride=(config.wn, 1))
                cute.autovec_copy(rows, thread_mma.partition_C(cute.make_tensor(band, layout)))
        if cutlass.const_expr(self.parts is not None):
            self.finish_parts(memory)
