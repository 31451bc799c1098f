"""Epilogues of the Hopper kernel: from the accumulators of one warpgroup to D. Each warpgroup works for itself.

A WGMMA leaves 64 rows in a warpgroup, 16 a warp. Thread `lane` of warp `w` holds, for each block of 8 columns j,

    rows 16 w + lane / 4 + 8 r (r = 0, 1), columns 8 j + 2 (lane % 4) + c (c = 0, 1)    in accumulator (c, r, j)

`TmaEpilogue` sends 16-bit results through stmatrix and a TMA store, `SlabStore` everything else through the slabs that
the other kernels use too (C and bias, fp32 results, any alignment). With swapped operands the rows of the accumulators
are columns of D: `TransposedTmaEpilogue` and `TransposedSlabStore` turn them on the way into shared memory.
"""

from __future__ import annotations

import types as python_types

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cutegemm.cute import types
from cutegemm.cute.config import SLAB_PAD, SLAB_ROWS
from cutegemm.cute.epilogue import SlabEpilogue, activate
from cutegemm.cute.hopper_config import STORE_BUFFERS, WARPGROUP, HopperConfig
from cutegemm.problem import Signature

BLOCK_ROWS = 64
FIRST_NAMED_BARRIER = 1
"""Named barrier of consumer warpgroup 0; 0 is the CTA's own."""


class TmaEpilogue:
    """D = act(alpha * acc), rounded once, stored 64 rows x `columns` at a time.

    A warpgroup has `STORE_BUFFERS` staging buffers. Before it fills one it makes sure that the store that last read it
    is done reading; nobody waits for stores to reach memory, so they overlap the next tile.
    """

    turn = ""
    """stmatrix's modifier that transposes each 8x8 matrix."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self.config = config
        self.out_type = types.NUMERIC[signature.out_dtype]
        self.activation = signature.epilogue.activation
        self.columns = config.store_columns(2)
        self.row_bytes = 2 * self.columns
        self.buffer_bytes = BLOCK_ROWS * self.row_bytes
        # log2 of the 16-byte pieces of a row: the swizzle's bits. Rows of 128, 64 or 32 bytes repeat it every 1024,
        # 512, 256.
        self.swizzle_bits = (self.row_bytes // 16).bit_length() - 1

    def box(self) -> tuple[int, int]:
        """(rows, columns) of D in one staging buffer."""
        return BLOCK_ROWS, self.columns

    def block_of(self, row, column) -> tuple:
        """(row, column) in boxes of the box whose first accumulator is (row, column) of the multiplication."""
        return row // BLOCK_ROWS, column // self.columns

    def buffer_layout(self):
        """The shared layout of one staging buffer, as TMA's swizzle has it."""
        width = self.row_bytes // 2
        atom = cute.make_composed_layout(
            cute.make_swizzle(self.swizzle_bits, 4, 3), 0, cute.make_layout((8, width), stride=(width, 1))
        )
        return cute.tile_to_shape(atom, self.box(), order=(0, 1))

    def make_atom(self, d, m, n, ldd, d_batch, batch):
        """(copy atom, coordinate tensor) of TMA stores into D, (m, n) row-major. On the host."""
        step = 16 // (self.out_type.width // 8)
        layout = cute.make_layout(
            (m, n, batch), stride=(cute.assume(ldd, divby=step), 1, cute.assume(d_batch, divby=step))
        )
        store = cpasync.CopyBulkTensorTileS2GOp()
        return cpasync.make_tiled_tma_atom(store, cute.make_tensor(d, layout), self.buffer_layout(), self.box())

    def start(self, atom, tensor, memory, group, thread) -> None:
        """Binds to the staging buffers at `memory` and to this thread of consumer warpgroup `group`."""
        self.atom = atom
        base = memory + group * (STORE_BUFFERS * self.buffer_bytes)
        layout = self.buffer_layout()
        staged = cute.append(layout.outer, cute.make_layout(STORE_BUFFERS, stride=self.buffer_bytes // 2))
        pointer = cute.recast_ptr(base, layout.inner, dtype=self.out_type)
        tiles = cute.local_tile(tensor, self.box(), (None, None, None))
        self.shared, self.target = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(pointer, staged), 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        self.barrier = group + FIRST_NAMED_BARRIER
        self.warp = cute.arch.make_warp_uniform(thread // 32)
        self._start_addresses(base.toint(), thread % 32)

    def _start_addresses(self, base, lane) -> None:
        # stmatrix: lane l gives the address of row l % 8 of 8x8 matrix l / 8; the matrices are (rows 0-7, 8-15) x 2.
        row = self.warp * 16 + (lane & 15)
        self.row_address = base + row * self.row_bytes
        self.row_swizzle = ((row * self.row_bytes) >> 7) & ((1 << self.swizzle_bits) - 1)
        self.half = lane >> 4

    def _address(self, pair: int):
        """Where this lane's matrix row lies for 16 accumulator columns, the `pair`-th of a buffer."""
        return self.row_address + (((2 * pair + self.half) ^ self.row_swizzle) << 4)

    @cute.jit
    def store(
        self, accumulators, row, column, matrix, m, n, operands, blocks: cutlass.Constexpr, row_step: cutlass.Constexpr
    ):
        """Stores `blocks` blocks of 64 rows, the first at `row`, the next `row_step` further on."""
        per_block = self.config.bn // self.columns
        for i in cutlass.range_constexpr(blocks):
            for part in cutlass.range_constexpr(per_block):
                number = i * per_block + part
                buffer = number % STORE_BUFFERS
                if self.warp == 0:
                    # The first store of a tile finds those of the tile before, in whatever buffer they ended, long
                    # done.
                    cute.arch.cp_async_bulk_wait_group(min(number, STORE_BUFFERS - 1), read=True)
                cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
                self._stage(accumulators, operands, i, part, buffer)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
                if self.warp == 0:
                    block = self.block_of(row + i * row_step, column + part * self.columns)
                    place = (None, *block, matrix)
                    cute.copy(self.atom, self.shared[None, buffer], self.target[place])
                    cute.arch.cp_async_bulk_commit_group()

    def _stage(self, accumulators, operands, i, part, buffer) -> None:
        """Rounds this thread's values of one staging buffer and stores them with stmatrix."""
        for pair in range(self.columns // 16):
            j = part * (self.columns // 8) + 2 * pair
            values = cute.make_rmem_tensor(8, Float32)
            for q in range(8):
                values[q] = accumulators[(q & 1, (q >> 1) & 1, j + (q >> 2)), i, 0]
            result = cute.make_rmem_tensor(8, self.out_type)
            result.store(activate(values.load() * operands.alpha, self.activation).to(self.out_type))
            words = cute.recast_tensor(result, Int32)
            cute.arch.inline_ptx(
                f"stmatrix.sync.aligned.m8n8.x4{self.turn}.shared.b16 "
                "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[self._address(pair) + buffer * self.buffer_bytes, *(words[q] for q in range(4))],
            )

    @cute.jit
    def finish(self):
        """Waits until TMA has read the last buffers: shared memory must outlive its readers."""
        if self.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class TransposedTmaEpilogue(TmaEpilogue):
    """The same for swapped operands: a buffer holds `columns` rows of D, 64 columns wide."""

    turn = ".trans"

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        super().__init__(config, signature)
        self.row_bytes = 2 * BLOCK_ROWS
        self.swizzle_bits = 3

    def box(self) -> tuple[int, int]:
        return self.columns, BLOCK_ROWS

    def block_of(self, row, column) -> tuple:
        return column // self.columns, row // BLOCK_ROWS

    def _start_addresses(self, base, lane) -> None:
        # Matrix l / 8 holds accumulator rows 8 (l / 8 % 2) .. of this warp, which are 8 columns of D: one 16-byte
        # piece.
        row = (lane & 7) + 8 * (lane >> 4)
        piece = 2 * self.warp + ((lane >> 3) & 1)
        self.row_address = base + row * self.row_bytes + ((piece ^ (lane & 7)) << 4)

    def _address(self, pair: int):
        return self.row_address + pair * 16 * self.row_bytes


class SlabStore:
    """The general epilogue: `epilogue.SlabEpilogue` on strips of columns, a slab a warp."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self.columns = config.slab_columns
        self.strips = config.bn // self.columns
        self.slabs = SlabEpilogue(python_types.SimpleNamespace(wn=self.columns), signature)  # type: ignore[arg-type]

    def start(self, memory, group, thread) -> None:
        self.warp = thread // 32
        self.lane = thread % 32
        words = 4 * SLAB_ROWS * (self.columns + SLAB_PAD)
        self.memory = cute.recast_ptr(memory, dtype=Float32) + group * words

    @cute.jit
    def store(
        self, accumulators, row, column, matrix, m, n, operands, blocks: cutlass.Constexpr, row_step: cutlass.Constexpr
    ):
        """Stores `blocks` blocks of 64 rows, the first at `row`, the next `row_step` further on."""
        for i in cutlass.range_constexpr(blocks):
            first = row + i * row_step + self.warp * SLAB_ROWS
            for strip in cutlass.range_constexpr(self.strips):
                self.slabs.start(
                    self.memory, matrix, first, column + strip * self.columns, m, n, self.warp, self.lane, operands
                )
                self._fill(accumulators, i, strip)
                self.slabs.store_rows(0)

    def _fill(self, accumulators, i, strip) -> None:
        slab = self.slabs.slab.iterator + (self.lane // 4) * self.slabs.pitch + 2 * (self.lane % 4)
        for j in range(self.columns // 8):
            for r in range(2):
                pair = cute.make_rmem_tensor(2, Float32)
                for c in range(2):
                    pair[c] = accumulators[(c, r, strip * (self.columns // 8) + j), i, 0]
                place = cute.make_tensor(slab + (8 * r * self.slabs.pitch + 8 * j), cute.make_layout(2))
                cute.autovec_copy(pair, place)

    def finish(self) -> None:
        """Nothing is in flight."""


class TransposedSlabStore(SlabStore):
    """The same for swapped operands: a strip of 16 accumulator columns is 16 rows of D, a warp's rows 16 columns."""

    @cute.jit
    def store(
        self, accumulators, row, column, matrix, m, n, operands, blocks: cutlass.Constexpr, row_step: cutlass.Constexpr
    ):
        for i in cutlass.range_constexpr(blocks):
            first = row + i * row_step + self.warp * SLAB_ROWS
            for strip in cutlass.range_constexpr(self.strips):
                self.slabs.start(
                    self.memory, matrix, column + strip * self.columns, first, m, n, self.warp, self.lane, operands
                )
                self._fill(accumulators, i, strip)
                self.slabs.store_rows(0)

    def _fill(self, accumulators, i, strip) -> None:
        pitch = self.slabs.pitch
        slab = self.slabs.slab.iterator + 2 * (self.lane % 4) * pitch + self.lane // 4
        for j in range(2):
            for r in range(2):
                for c in range(2):
                    place = slab + ((8 * j + c) * pitch + 8 * r)
                    cute.make_tensor(place, cute.make_layout(1))[0] = accumulators[(c, r, 2 * strip + j), i, 0]
