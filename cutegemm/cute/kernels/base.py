"""What every kernel of this package shares: the host entry, its arguments, and the CTA's place in the problem.

The host entry takes plain addresses, sizes and 64-bit strides, no tensors: a call then needs no views, and nothing
about a tensor is promised to the compiler beyond its alignment class, which the plan has checked.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from cutegemm.cute import types
from cutegemm.cute.config import TileConfig
from cutegemm.cute.epilogue import Operands, SlabEpilogue
from cutegemm.cute.tile_order import Grouped
from cutegemm.problem import Signature


class Gemm:
    """Host entry and per-CTA set-up of a GEMM kernel; a family implements `mainloop_and_store`.

    The grid is one-dimensional: batch x tile rows x tile columns, in the tile order. Every CTA computes one tile.
    """

    def __init__(self, config: TileConfig, signature: Signature) -> None:
        self.config = config
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
        block = cute.arch.block_idx()[0]
        tiles = tiles_m * tiles_n
        matrix = block // tiles
        tile_m, tile_n = self.order.coordinates(block - matrix * tiles, tiles_m, tiles_n)
        row, column = tile_m * self.config.bm, tile_n * self.config.bn

        a = a + Int64(matrix) * a_batch
        b = b + Int64(matrix) * b_batch
        d = d + Int64(matrix) * d_batch
        if cutlass.const_expr(self.signature.epilogue.c_dtype is not None):
            c = c + Int64(matrix) * c_batch
        operands = Operands(c, bias, d, alpha, beta, ldd, c_row, c_col)
        self.compute_tile(a, b, lda, ldb, m, n, k, row, column, operands)

    def compute_tile(self, a, b, lda, ldb, m, n, k, row, column, operands):
        """Computes and stores the tile whose first output is (row, column)."""
        raise NotImplementedError
