"""Global memory -> shared memory: how a CTA's threads bring one operand tile into a stage of the ring.

An operand tile is a set of `outer` rows of `inner` contiguous elements. For a K-major operand the rows run along M
(or N) and a row along K; for the other major the rows run along K. Each thread copies `passes` vectors with
cp.async, all at the same place in their rows:

    thread t:  inner vector t % (inner / vector),  row t / (inner / vector) + p * rows_per_pass,  p = 0 .. passes-1

Edges cost nothing in the main loop. Beyond M or N a thread re-reads the last valid row or vector (the garbage lands in
outputs that are never stored). Beyond K the copy's source size shrinks, and cp.async fills the rest with zeros.

cp.async moves 4, 8 or 16 bytes. Operands whose alignment is only 2 bytes go through registers instead.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


class TileLoader:
    """Copies (extent x bk) tiles of one operand, see the module docstring.

    Args:
        dtype: element type of the operand. extent: bm or bn. bk: depth of the tile.
        k_major: whether K is the contiguous dimension.
        align: alignment class in bytes. threads: of the CTA.
        transpose: store K-major rows transposed, element by element (the CUDA-core kernel wants its operands
            m- or n-contiguous in shared memory).
        pitch: distance in elements between rows of the shared tile when it is not swizzled.
        swizzle: (bits, base, shift) over the byte offset within a tile, or None.
    """

    def __init__(self, dtype, extent, bk, k_major, align, threads, *, transpose=False, pitch=None, swizzle=None):
        self.dtype = dtype
        self.itemsize = dtype.width // 8
        self.k_major = k_major
        self.transpose = transpose and k_major
        self.inner = bk if k_major else extent
        self.outer = extent if k_major else bk
        self.extent = extent
        self.bk = bk
        self.threads = threads
        self.swizzle = swizzle
        self.pitch = pitch
        bytes_per_copy = self.itemsize if self.transpose else align
        self.vector = max(bytes_per_copy // self.itemsize, 1)
        while self.outer * self.inner < self.vector * threads:
            self.vector //= 2
        self.bytes = self.vector * self.itemsize
        self.vectors_per_row = self.inner // self.vector
        # Passes that go along a row need no address register of their own. A row has more than one part when
        # it has more vectors than there are threads, and when it is transposed: there 4 lanes along K and 8 rows
        # a warp read half sectors, and halve the registers for row addresses.
        self.row_parts = max(self.vectors_per_row // threads, bk // 4 if self.transpose else 1)
        self.rows_per_pass = threads * self.row_parts // self.vectors_per_row
        self.passes = self.outer * self.inner // (self.vector * threads)
        self.ptx = _copy_instruction(self.bytes)

    def start(self, base, leading, first, limit, k, tid) -> None:
        """Binds the loader to a CTA's rows (or columns) `first` .. of an operand with `limit` of them.

        `base` points to the operand's matrix of this batch, `leading` is its leading dimension (Int64), `k` its
        K, `tid` the thread. All are run-time values; they are the same for every k tile.
        """
        per_row = self.vectors_per_row // self.row_parts
        self.tid_inner = (tid % per_row) * self.vector
        self.tid_outer = tid // per_row
        self.base, self.leading = base, leading
        self.first, self.limit, self.k = first, limit, k
        self.shared_offset_0 = self._shared_offset(0)

    def copy(self, k_tile, stage_base, part: int = 0, parts: int = 1) -> None:
        """Starts the copy of k tile `k_tile` into the stage at shared address `stage_base` (bytes).

        With `parts`, only share `part` of the passes: a kernel spreads them over its k-steps.
        """
        step = Int64(self.bk) if self.k_major else Int64(self.bk) * self.leading
        tile = self.base + Int64(k_tile) * step
        for p in range(self.passes * part // parts, self.passes * (part + 1) // parts):
            source = (tile + self._source_offset(p)).toint()
            target = stage_base + self._shared_offset(p)
            size = self._valid_bytes(k_tile, p)
            cute.arch.inline_ptx(self.ptx, read_only_args=[target, source, size])

    def _place(self, p):
        """(row, inner element) of pass p within the tile."""
        row = self.tid_outer + (p // self.row_parts) * self.rows_per_pass
        inner = self.tid_inner + (p % self.row_parts) * (self.inner // self.row_parts)
        return row, inner

    def _source_offset(self, p):
        """Offset in elements of pass p's vector at k tile 0, clamped to the last valid row or vector."""
        row, inner = self._place(p)
        if self.k_major:
            return Int64(cutlass.min(self.first + row, self.limit - 1)) * self.leading + Int64(inner)
        column = cutlass.min(self.first + inner, self.limit - self.vector)
        return Int64(row) * self.leading + Int64(column)

    def _shared_offset(self, p):
        """Byte offset of pass p's vector within a stage."""
        if p and not self.transpose and self.row_parts == 1 and self.rows_per_pass % 8 == 0:
            # The swizzle repeats every 8 rows: whole groups of 8 further on is a constant further on.
            return self.shared_offset_0 + p * self.rows_per_pass * self.row_bytes()
        if p and self.transpose:
            part = (p % self.row_parts) * (self.inner // self.row_parts) * self.pitch
            return self.shared_offset_0 + (part + (p // self.row_parts) * self.rows_per_pass) * self.itemsize
        row, inner = self._place(p)
        if self.transpose:
            return (inner * self.pitch + row) * self.itemsize
        if self.swizzle is None:
            return row * self.row_bytes() + inner * self.itemsize
        bits, base, shift = self.swizzle
        width = self.row_bytes() // self.itemsize
        byte = ((inner // width) * (self.outer * width) + row * width + inner % width) * self.itemsize
        return byte ^ (((byte >> (base + shift)) & ((1 << bits) - 1)) << base)

    def row_bytes(self) -> int:
        """Distance between rows of the shared tile; a swizzled one is cut into blocks 128 bytes wide."""
        if self.swizzle is None:
            return self.pitch * self.itemsize
        return min(self.inner * self.itemsize, 128)

    def _valid_bytes(self, k_tile, p):
        """How many bytes of pass p's vector lie before the end of K."""
        row, inner = self._place(p)
        if self.k_major:
            left = self.k - k_tile * self.bk - inner
            return cutlass.max(cutlass.min(left, Int32(self.vector)), Int32(0)) * self.itemsize
        left = self.k - k_tile * self.bk - row
        return cutlass.max(cutlass.min(left, Int32(1)), Int32(0)) * self.bytes


def _copy_instruction(bytes_per_copy: int) -> str:
    """PTX that copies that many bytes; operands: shared address, global address, bytes to read (the rest is 0)."""
    if bytes_per_copy == 2:
        return (
            "{ .reg .pred in_k; .reg .b16 value; setp.ne.s32 in_k, {$r2}, 0; mov.b16 value, 0; "
            "@in_k ld.global.b16 value, [{$r1}]; st.shared.b16 [{$r0}], value; }"
        )
    # cp.async.cg goes past L1, and exists for 16 bytes only.
    cache = "cg" if bytes_per_copy == 16 else "ca"
    return f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {bytes_per_copy}, {{$r2}};"
