"""From accumulators to D: a warp stages 16 rows at a time through shared memory and stores whole vectors.

Tensor-core fragments hold 2 neighbouring outputs a thread, so storing them directly would touch 16-byte pieces of
each row. Instead every warp owns a small fp32 slab of shared memory (`SLAB_ROWS` rows of its wn columns): it writes a
slice of its accumulators there, and reads it back so that a thread holds `chunk` neighbouring outputs of one row.
In that form C is read and D is written in vectors as wide as their alignment allows, and

    D = act(alpha * acc + beta * C + bias)

is computed in fp32 and rounded once. Only the warp itself touches its slab: no CTA barrier is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute import types
from cutegemm.cute.launch_config import SLAB_PAD, SLAB_ROWS
from cutegemm.problem import Signature
from cutegemm.problem.epilogue import formula_of

if TYPE_CHECKING:
    from cutegemm.cute.warps.config import TileConfig


class SlabEpilogue:
    """The epilogue of one warp; see the module docstring.

    `start` binds it to the warp's place in D; then, for every 16 rows of the warp tile, the kernel fills `slab`
    and calls `store_rows`.
    """

    def __init__(self, config: TileConfig, signature: Signature, late_bias: bool = False) -> None:
        """`late_bias`: the bias along columns is loaded by each `store_rows`, when the slab holds the accumulators."""
        self.wn = config.wn
        self.late_bias = late_bias
        self.epilogue = signature.epilogue
        self.out_type = types.NUMERIC[signature.out_dtype]
        self.out_bytes = self.out_type.width // 8
        self.chunk = min(16 // self.out_bytes, self.wn)
        self.lanes_per_row = self.wn // self.chunk
        self.rows_per_pass = 32 // self.lanes_per_row
        self.passes = SLAB_ROWS // self.rows_per_pass
        self.vector = max(min(signature.align_d // self.out_bytes, self.chunk), 1)
        self.pitch = self.wn + SLAB_PAD
        self.c_vector = 0
        if self.epilogue.c_dtype:
            self.c_type = types.NUMERIC[self.epilogue.c_dtype]
        if self.epilogue.c_dtype and signature.align_c:
            itemsize = self.c_type.width // 8
            self.c_vector = max(min(signature.align_c // itemsize, self.chunk), 1)

    def start(self, memory, matrix, row, column, m, n, warp, lane, operands) -> None:
        """Binds to the warp tile whose first output is (row, column) of (m, n) matrix number `matrix`.

        `memory` is a shared fp32 pointer with room for one slab a warp, `operands` are the kernel's arguments by name.
        Addresses of C and D are made here, after the main loop, where registers are free again.
        """
        base = memory + warp * (SLAB_ROWS * self.pitch)
        self.slab = cute.make_tensor(base, cute.make_layout((SLAB_ROWS, self.wn), stride=(self.pitch, 1)))
        self.row, self.m, self.n = row, m, n
        self.lane_row = lane // self.lanes_per_row
        self.lane_column = (lane % self.lanes_per_row) * self.chunk
        self.column = column + self.lane_column
        self.operands = operands
        self.d = operands.d + Int64(matrix) * operands.d_batch
        if self.epilogue.c_dtype:
            self.c = operands.c + Int64(matrix) * operands.c_batch
        self.bias: Any = None
        if self._has_column_bias() and not self.late_bias:
            self.bias = self._load_bias_columns()

    def _has_column_bias(self) -> bool:
        return self.epilogue.bias_dtype is not None and self.epilogue.bias_axis == "n"

    def _load_bias_columns(self):
        """The bias of this thread's columns, the same for every row; beyond the edge that of the last column."""
        bias = cute.make_rmem_tensor(self.chunk, Float32)
        for j in range(self.chunk):
            bias[j] = self._element(self.operands.bias, Int64(cutlass.min(self.column + j, self.n - 1)))
        return bias

    def _element(self, pointer, offset) -> Float32:
        return cute.make_tensor(pointer + offset, cute.make_layout(1))[0].to(Float32)

    @cute.jit
    def store_rows(self, first: cutlass.Constexpr):
        """Finishes rows first .. first + 15 of the warp tile, which lie in the slab, and stores them."""
        cute.arch.sync_warp()
        if cutlass.const_expr(self.late_bias and self._has_column_bias()):
            self.bias = self._load_bias_columns()
        for p in cutlass.range_constexpr(self.passes):
            slab_row = self.lane_row + p * self.rows_per_pass
            row = self.row + first + slab_row
            if row < self.m:
                self._store_chunk(slab_row, row)
        # The next slice may overwrite the slab only after every lane has read it.
        cute.arch.sync_warp()

    def _accumulated(self, slab_row):
        """This thread's chunk of a slab row."""
        values = cute.make_rmem_tensor(self.chunk, Float32)
        source = self.slab.iterator + slab_row * self.pitch + self.lane_column
        cute.autovec_copy(cute.make_tensor(aligned(source, 16), cute.make_layout(self.chunk)), values)
        return values.load()

    @cute.jit
    def _store_chunk(self, slab_row: Int32, row: Int32):
        sums, terms = self._accumulated(slab_row), (partial(self._c_vector, row), partial(self._bias_vector, row))
        result = cute.make_rmem_tensor(self.chunk, self.out_type)
        result.store(finish(sums, self.epilogue, self.operands, *terms).to(self.out_type))
        target = self.d + (Int64(row) * self.operands.ldd + Int64(self.column))
        vectors = cute.logical_divide(result, cute.make_layout(self.vector))
        for v in cutlass.range_constexpr(self.chunk // self.vector):
            if self.column + v * self.vector < self.n:
                place = aligned(target + v * self.vector, self.vector * self.out_bytes)
                cute.autovec_copy(vectors[None, v], cute.make_tensor(place, cute.make_layout(self.vector)))

    def _c_vector(self, row):
        return self._load_c(row).load()

    def _bias_vector(self, row):
        return self._element(self.operands.bias, Int64(row)) if self.bias is None else self.bias.load()

    @cute.jit
    def _load_c(self, row: Int32):
        """C at this thread's chunk of a row, in fp32; 0 beyond the edge."""
        c_type = self.c_type
        raw = cute.make_rmem_tensor(self.chunk, c_type)
        raw.fill(0)
        start = self.c + (Int64(row) * self.operands.c_row + Int64(self.column) * self.operands.c_col)
        width = self.c_vector if cutlass.const_expr(self.c_vector > 0) else 1
        vectors = cute.logical_divide(raw, cute.make_layout(width))
        for v in cutlass.range_constexpr(self.chunk // width):
            if self.column + v * width < self.n:
                if cutlass.const_expr(self.c_vector > 0):
                    place = aligned(start + v * width, width * (c_type.width // 8))
                    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(width)), vectors[None, v])
                else:
                    raw[v] = cute.make_tensor(start + Int64(v) * self.operands.c_col, cute.make_layout(1))[0]
        values = cute.make_rmem_tensor(self.chunk, Float32)
        values.store(raw.load().to(Float32))
        return values


def aligned(pointer, align: int):
    """The same pointer with the promise that `align` bytes divide it (`Pointer.align` would round it up)."""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=align)


def finish(sums, epilogue, operands, c: Callable[[], Any], bias: Callable[[], Any]):
    """act(alpha * sums + beta * C + bias): the formula of the epilogue, in fp32, for the kernels of all families.

    Args:
        sums: a vector of accumulators (TensorSSA).
        epilogue: says which terms there are.
        operands: the kernel's arguments by name.
        c, bias: give the same elements of C and of the bias, as a vector or a number, in fp32. Each is called where the
            sum needs it, and only if there is such a term: loads made earlier would hold registers longer.
    """
    z = sums * operands.alpha
    if epilogue.c_dtype is not None:
        z = z + c() * operands.beta
    if epilogue.bias_dtype is not None:
        z = z + bias()
    return activate(z, epilogue.activation)


def activate(z, activation: str | None):
    """The activation of an fp32 vector (TensorSSA), as z times a factor in [0, 1]: no cancellation.

    silu(z) = z s(z), and gelu_tanh(z) = z/2 (1 + tanh(u)) = z s(2u), u = sqrt(2/pi) (z + 0.044715 z^3), where s(x) is
    1 / (1 + 2^(-x log2(e))). gelu(z) = z/2 (1 + erf(z / sqrt(2))) takes erf from M. Abramowitz, I. Stegun, "Handbook
    of Mathematical Functions", 7.1.26, whose absolute error is 1.5e-7. With ex2.approx and rcp.approx (relative errors
    2^-22 and 2^-23, PTX ISA) no factor is further off than 8 * 2^-24.

    Raises ValueError for a name that has no formula here.
    """
    return formula_of(activation, _FORMULAS)(z)


def _relu(z):
    return cute.where(z > 0.0, z, cute.where(z != z, z, cute.zeros_like(z)))


def _silu(z):
    return z * _reciprocal(1.0 + _exp2(z * -1.4426950408889634))


def _gelu_tanh(z):
    return z * _reciprocal(1.0 + _exp2(z * (z * z * -0.10294324 - 2.3022082)))


def _gelu(z):
    t = _reciprocal(1.0 + 0.23164189 * cute.math.abs(z))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    tail = tail * _exp2(z * z * -0.72134752)
    return z * cute.where(z < 0.0, tail, 1.0 - tail)


_FORMULAS = {None: lambda z: z, "relu": _relu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}


def _exp2(x):
    """ex2.approx.ftz.f32 of each element: what `fastmath` means for this operation."""
    return cute.math.exp2(x, fastmath=True)


def _reciprocal(x):
    """rcp.approx.ftz.f32 of each element."""
    return cute.math.rcp(x, approx=True, ftz=True)
