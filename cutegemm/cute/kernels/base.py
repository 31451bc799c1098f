"""What every kernel of this package shares: the host entry, its arguments, and the CTA's place in the problem.

The host entry takes plain addresses, sizes and 64-bit strides, no tensors: a call then needs no views, and nothing
about a tensor is promised to the compiler beyond its alignment class, which the plan has checked.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from cutegemm.cute import types
from cutegemm.cute.config import TileConfig
from cutegemm.cute.epilogue import Operands, SlabEpilogue
from cutegemm.cute.tile_order import Grouped
from cutegemm.problem import Signature


class Gemm:
    """Host entry and per-CTA set-up of a GEMM kernel; a family implements `compute_tile`.

    The grid is one-dimensional: batch x tile rows x tile columns, in the tile order. Every CTA computes one tile.
    """

    def __init__(self, config: TileConfig, signature: Signature) -> None:
        self.config: Any = config
        self.signature = signature
        self.ab_type = types.NUMERIC[signature.dtype]
        self.order = Grouped(config.group)
        self.epilogue = SlabEpilogue(config, signature)

    def fake_arguments(self) -> tuple:
        """Stand-ins that give `cute.compile` the types of the entry's arguments, and the alignment it may assume."""
        sig, epi = self.signature, self.signature.epilogue

        def pointer(dtype: str, align: int):
            return make_ptr(types.NUMERIC[dtype], 16, cute.AddressSpace.gmem, assumed_align=align)

        c_type, bias_type = epi.c_dtype or sig.out_dtype, epi.bias_dtype or sig.out_dtype
        pointers = (
            pointer(sig.dtype, sig.align_a),
            pointer(sig.dtype, sig.align_b),
            pointer(c_type, max(sig.align_c, types.NUMERIC[c_type].width // 8)),
            pointer(bias_type, types.NUMERIC[bias_type].width // 8),
            pointer(sig.out_dtype, sig.align_d),
        )
        sizes = (Int32(1),) * 4
        strides = (Int64(1),) * 9
        return (*pointers, Float32(1), Float32(0), make_fake_stream(), *sizes, *strides)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        c: cute.Pointer,
        bias: cute.Pointer,
        d: cute.Pointer,
        alpha: Float32,
        beta: Float32,
        stream: cuda.CUstream,
        m: Int32,
        n: Int32,
        k: Int32,
        batch: Int32,
        lda: Int64,
        ldb: Int64,
        ldd: Int64,
        a_batch: Int64,
        b_batch: Int64,
        d_batch: Int64,
        c_row: Int64,
        c_col: Int64,
        c_batch: Int64,
    ):
        """D = act(alpha A B + beta C + bias) for (m, n, k) and `batch` matrices; strides in elements."""
        tiles_m = cute.ceil_div(m, self.config.bm)
        tiles_n = cute.ceil_div(n, self.config.bn)
        self.kernel(
            a, b, c, bias, d, alpha, beta, m, n, k, tiles_m, tiles_n,
            lda, ldb, ldd, a_batch, b_batch, d_batch, c_row, c_col, c_batch,
        ).launch(
            grid=(tiles_m * tiles_n * batch, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        c: cute.Pointer,
        bias: cute.Pointer,
        d: cute.Pointer,
        alpha: Float32,
        beta: Float32,
        m: Int32,
        n: Int32,
        k: Int32,
        tiles_m: Int32,
        tiles_n: Int32,
        lda: Int64,
        ldb: Int64,
        ldd: Int64,
        a_batch: Int64,
        b_batch: Int64,
        d_batch: Int64,
        c_row: Int64,
        c_col: Int64,
        c_batch: Int64,
    ):
        """One CTA: find its tile, then load, multiply and store it."""
        matrix, row, column = self._place(cute.arch.block_idx()[0], tiles_m, tiles_n)
        self.operands = Operands(c, bias, d, alpha, beta, ldd, d_batch, c_row, c_col, c_batch)
        self.tiles_m, self.tiles_n, self.m, self.n = tiles_m, tiles_n, m, n
        a = a + Int64(matrix) * a_batch
        b = b + Int64(matrix) * b_batch
        self.compute_tile(a, b, lda, ldb, m, n, k, row, column)

    def _place(self, block, tiles_m, tiles_n):
        """(matrix of the batch, first row, first column) of the tile of CTA number `block`."""
        tiles = tiles_m * tiles_n
        matrix = block // tiles
        tile_m, tile_n = self.order.coordinates(block - matrix * tiles, tiles_m, tiles_n)
        return matrix, tile_m * self.config.bm, tile_n * self.config.bn

    def start_epilogue(self, memory, warp_m, warp_n, warp, lane) -> None:
        """Binds the epilogue to this warp's part of the tile; `memory` is the ring, which is free by now.

        The tile's place is computed a second time, from the CTA's number behind a move that the compiler cannot
        see through: kept since the start, it would take registers from the main loop, which uses every one.
        """
        number = cute.arch.block_idx()[0]
        block = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[number])
        matrix, row, column = self._place(block, self.tiles_m, self.tiles_n)
        row, column = row + warp_m * self.config.wm, column + warp_n * self.config.wn
        slab = cute.recast_ptr(memory, dtype=Float32)
        self.epilogue.start(slab, matrix, row, column, self.m, self.n, warp, lane, self.operands)

    def compute_tile(self, a, b, lda, ldb, m, n, k, row, column):
        """Computes and stores the tile whose first output is (row, column)."""
        raise TypeError(f"{type(self).__name__} does not implement compute_tile")
