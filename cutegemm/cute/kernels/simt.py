"""GEMM in IEEE fp32 on CUDA cores: cp.async ring -> 16-byte shared loads -> FFMA.

A CTA tile is cut into warp tiles, a warp tile among 4 x 8 lanes: a lane owns wm/4 x wn/8 outputs in registers. K is
walked in blocks of 4, and within a block in groups of 16 rows of the warp tile, 4 rows a lane:

    for block of 4 k:                 load B:  wn/8 columns x 4 k
        for group of 4 rows (lane):   load A:  4 rows x 4 k
            4 k x 4 rows x wn/8 columns FFMA

The fragments of the next group (and block) are loaded while this one is multiplied. A block of 4 k makes both majors load 16
bytes at a time, without transposing anything: where K is contiguous a load brings 4 k of one row, else 4 rows of one k. What
differs is which rows a lane owns, so that the lanes of a load hit different banks:

    M-major, tile [k][m]:   lane i owns rows 4 i + 16 g + (0..3)         neighbours in memory
    K-major, tile [m][k]:   lane i owns rows i + 16 g + (0, 4, 8, 12)    and 16-byte pieces of a row XORed with the row

With 16 x 8 outputs a lane that is 24 loads for 512 FFMA, and each word loaded serves 8 or 4 lanes at once, so shared memory
is busy for a fraction of the time that the FFMA take: one CTA of 8 warps with 255 registers a thread is enough to keep the
FMA pipes full.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutegemm.cute.config import SLAB_ROWS, SimtConfig
from cutegemm.cute.epilogue import aligned
from cutegemm.cute.kernels.base import Gemm
from cutegemm.cute.tile_load import TileLoader
from cutegemm.problem import Signature

LANES_M, LANES_N = 4, 8
K_BLOCK = 4


def place_of_lane(lane):
    """The lane's place i * LANES_N + j in the 4 x 8 arrangement: the bits of j and i alternate, j first.

    A 16-byte shared load takes a pass for each quarter of the warp, unless lanes that differ in bit 0 (or bit 1) alone
    read the same words. Here they do: neighbours share their rows of A, lanes two apart their columns of B.
    """
    i = ((lane >> 1) & 1) | ((lane >> 2) & 2)
    j = (lane & 1) | ((lane >> 1) & 2) | ((lane >> 2) & 4)
    return i * LANES_N + j


def swizzle_of(bk: int) -> tuple[int, int, int]:
    """The swizzle of a K-major tile: rows of 32, 64 or 128 bytes XOR their number into 1, 2 or 3 bits."""
    return ({8: 1, 16: 2}.get(bk, 3), 4, 3)


class FragmentLoader:
    """Shared memory -> registers for one operand: `load` brings this lane's rows x 4 k, 16 bytes at a time.

    Addresses are a register for the lane and a constant: of a K-major row's number, the lane's bits and those that are
    the same for every lane do not mix, so the swizzle's XOR falls apart into one of the lane's place (`lane_offsets`, an
    offset for each k block) and one of the block's number. CuTe's swizzled tensors compute it anew for each load.
    """

    def __init__(self, tile: TileLoader, lanes: int) -> None:
        self.tile = tile
        self.k_major = tile.k_major
        self.lanes = lanes
        self.blocks = tile.bk // K_BLOCK

    def fragment(self, count: int):
        """Registers for `count` rows x 4 k, contiguous as the loads are: along k, or along the rows."""
        stride = (0, K_BLOCK, 1) if self.k_major else (0, 1, count)
        return cute.make_rmem_tensor(cute.make_layout((1, count, K_BLOCK), stride=stride), Float32)

    def start(self, memory, first, lane) -> None:
        """Binds to the rows of the warp that begin at `first`; `lane` is this lane's place among `lanes`."""
        self.words = cute.recast_ptr(memory, dtype=Float32)
        if self.k_major:
            line = (first + lane) * self.tile.bk
            own = self._xor_of_row(lane)
            self.lane_offsets = [line + K_BLOCK * (own ^ block) for block in range(self.blocks)]
        else:
            self.lane_offsets = [first + 4 * lane] * self.blocks

    def _xor_of_row(self, row):
        bits, base, shift = self.tile.swizzle
        return ((row * self.tile.row_bytes()) >> (base + shift)) & ((1 << bits) - 1)

    def load(self, fragment, group: int, block: int, stage) -> None:
        """Loads groups of 4 rows beginning with `group`, as many as `fragment` has, at k block `block`."""
        base = stage * (self.tile.stage_bytes // 4)
        count = cute.size(fragment, mode=[1])
        for q in range(count):
            if self.k_major:
                row = (4 * group + q) * self.lanes
                offset = self.lane_offsets[block ^ self._xor_of_row(row)] + row * self.tile.bk
                self._load_four(fragment[0, q, None], base + offset)
            else:
                # q counts the loads: 4 rows of one k each.
                k, part = q % K_BLOCK, q // K_BLOCK
                row = (group + part) * 4 * self.lanes
                offset = self.lane_offsets[0] + (block * K_BLOCK + k) * self.tile.extent + row
                target = cute.logical_divide(fragment[0, None, k], cute.make_layout(4))
                self._load_four(target[None, part], base + offset)

    def _load_four(self, target, offset) -> None:
        place = aligned(self.words + offset, 16)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), target)


class SimtGemm(Gemm):
    """See the module docstring."""

    def __init__(self, config: SimtConfig, signature: Signature) -> None:
        super().__init__(config, signature)
        self.a = self._operand(signature.a_major == "k", config.bm, signature.align_a)
        self.b = self._operand(signature.b_major == "k", config.bn, signature.align_b)
        self.load_a, self.load_b = FragmentLoader(self.a, LANES_M), FragmentLoader(self.b, LANES_N)
        self.groups = config.wm // SLAB_ROWS
        self.columns = config.wn // LANES_N

    def _operand(self, k_major: bool, extent: int, align: int) -> TileLoader:
        bk = self.config.bk
        return TileLoader(self.ab_type, extent, bk, k_major, align, self.config.threads, swizzle_of(bk) if k_major else None)

    def _thread_mma(self, place):
        """FFMA by the lane at `place` on its outputs of a warp tile; see the module docstring for which they are."""
        lanes = cute.make_layout((LANES_M, LANES_N, 1), stride=(LANES_N, 1, 0))
        rows = LANES_M * 4 if self.a.k_major else cute.make_layout((LANES_M, 4), stride=(4, 1))
        columns = LANES_N * 4 if self.b.k_major else cute.make_layout((LANES_N, 4), stride=(4, 1))
        mma = cute.make_tiled_mma(cute.nvgpu.MmaUniversalOp(Float32), lanes, permutation_mnk=(rows, columns, None))
        return mma, mma.get_slice(place)

    @cute.jit
    def compute_tile(self, a, b, lda, ldb, m, n, k, row, column, operands):
        config = self.config
        tid = cute.arch.thread_idx()[0]
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        warp_m, warp_n = warp // config.warps[1], warp % config.warps[1]

        memory = cutlass.memory.SmemAllocator().allocate(config.smem_bytes(self.signature), byte_alignment=1024)
        memory_b = memory + config.stages * self.a.stage_bytes
        base_a, base_b = memory.toint(), memory_b.toint()
        self.a.start(a, lda, row, m, k, tid)
        self.b.start(b, ldb, column, n, k, tid)
        k_tiles = cute.ceil_div(k, config.bk)

        # Fill all stages but one. Copies past the last k tile write zeros and read nothing.
        for stage in cutlass.range_constexpr(config.stages - 1):
            self.a.copy(Int32(stage), base_a + stage * self.a.stage_bytes)
            self.b.copy(Int32(stage), base_b + stage * self.b.stage_bytes)
            cute.arch.cp_async_commit_group()

        place = place_of_lane(lane)
        mma, thread_mma = self._thread_mma(place)
        self.load_a.start(memory, warp_m * config.wm, place // LANES_N)
        self.load_b.start(memory_b, warp_n * config.wn, place % LANES_N)
        # Two fragments of each operand: one is multiplied while the other is loaded.
        fragments_a = [self.load_a.fragment(4) for _ in range(2)]
        fragments_b = [self.load_b.fragment(self.columns) for _ in range(2)]
        layout = cute.make_layout((1, 4, self.groups, self.columns), stride=(0, 1, 4, 4 * self.groups))
        accumulators = cute.make_rmem_tensor(layout, Float32)
        accumulators.fill(0.0)

        cute.arch.cp_async_wait_group(config.stages - 2)
        cute.arch.sync_threads()
        read, write = Int32(0), Int32(config.stages - 1)
        self.load_a.load(fragments_a[0], 0, 0, read)
        self.load_b.load(fragments_b[0], 0, 0, read)

        blocks = config.bk // K_BLOCK
        steps = blocks * self.groups
        # Copies of the tile ahead are spread over the first half of the steps: all at once, their addresses are
        # live together and spill. They are not skipped at the end of K, where they write zeros: a branch here
        # lets the compiler sink FFMA of one step behind those of the next, each waiting for the other.
        copy_steps = max(steps // 2, 1)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            for step in cutlass.range_constexpr(steps):
                block, group = step // self.groups, step % self.groups
                if cutlass.const_expr(step == steps - 1):
                    read = read + 1
                    if read == config.stages:
                        read = Int32(0)
                    cute.arch.cp_async_wait_group(config.stages - 2)
                    cute.arch.sync_threads()
                next_block, next_group = (step + 1) % steps // self.groups, (step + 1) % self.groups
                self.load_a.load(fragments_a[(step + 1) % 2], next_group, next_block, read)
                if cutlass.const_expr(next_group == 0):
                    self.load_b.load(fragments_b[(block + 1) % 2], 0, next_block, read)
                if cutlass.const_expr(step < copy_steps):
                    ahead = k_tile + config.stages - 1
                    self.a.copy(ahead, base_a + write * self.a.stage_bytes, step, copy_steps)
                    self.b.copy(ahead, base_b + write * self.b.stage_bytes, step, copy_steps)
                if cutlass.const_expr(step == copy_steps - 1):
                    cute.arch.cp_async_commit_group()
                    write = write + 1
                    if write == config.stages:
                        write = Int32(0)
                part = accumulators[None, None, group, None]
                for i in cutlass.range_constexpr(K_BLOCK):
                    fragment_a, fragment_b = fragments_a[step % 2], fragments_b[block % 2]
                    cute.gemm(mma, part, fragment_a[None, None, i], fragment_b[None, None, i], part)

        # The slabs of the epilogue reuse the ring: nothing may still be in flight or being read.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.epilogue.start(
            cute.recast_ptr(memory, dtype=Float32),
            row + warp_m * config.wm,
            column + warp_n * config.wn,
            m, n, warp, lane, operands,
        )  # fmt: skip
        slab = thread_mma.partition_C(self.epilogue.slab)
        # Accumulators lie row-fastest in registers; a copy that is column-fastest stores 16 bytes at a time.
        rows = cute.make_rmem_tensor(cute.make_layout((1, 4, self.columns), stride=(0, self.columns, 1)), Float32)
        for group in cutlass.range_constexpr(self.groups):
            for r in cutlass.range_constexpr(4):
                for j in cutlass.range_constexpr(self.columns):
                    rows[0, r, j] = accumulators[0, r, group, j]
            cute.autovec_copy(rows, slab)
            self.epilogue.store_rows(group * SLAB_ROWS)
