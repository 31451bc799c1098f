"""Global memory -> shared memory: how a CTA's threads bring one operand tile into a stage of the ring.

An operand tile is a set of `outer` rows of `inner` contiguous elements. For a K-major operand the rows run along M
(or N) and a row along K; for the other major the rows run along K. Each thread copies `passes` vectors with
cp.async, all at the same place in their rows:

    thread t:  inner vector t % (inner / vector),  row t / (inner / vector) + p * rows_per_pass,  p = 0 .. passes-1

Edges cost nothing in the main loop. Beyond M or N a thread re-reads the last valid row of a K-major operand (the
garbage lands in outputs that are never stored). Of the other major it re-reads the last vector, or copies zeros. Beyond
K a copy ignores its source and writes zeros.

cp.async moves 4, 8 or 16 bytes. Operands whose alignment is only 2 bytes go through registers instead. K-major rows of
elements of one byte, and of products in groups, begin at multiples of 16 bytes and may end anywhere: a copy reads what
is left of K and writes zeros behind it.

Of a gated program ("halves") the columns of B are gate's and then up's, half of the limit each. A tile has both for
every warp: of its wn columns the first half comes from gate, the second from the same columns of up.

The CUDA-core kernel wants its tiles as [k][m] whatever the operand's major: `TransposingLoader` turns K-major ones.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutegemm.cute.warps.config import TRANSPOSE_PAD
from cutegemm.problem.work import DENSE, TABLE


class TileLoader:
    """Copies (extent x bk) tiles of one operand, see the module docstring.

    Args:
        dtype: element type of the operand. extent: bm or bn. bk: depth of the tile.
        k_major: whether K is the contiguous dimension.
        align: alignment class in bytes. threads: of the CTA.
        swizzle: (bits, base, shift): byte offset bits [base, base + bits) within a tile are XORed with the bits
            `shift` above them; None for a plain tile.
        halves: 0, or of a gated program the columns of B that a warp takes from each half.
        thin_by_l1: an operand of at most `extent` rows comes through L1, as far as cp.async copies 16 bytes of it. All
            CTAs read the same of it, and would wait for one another at the few slices of the L2 that hold it (28 us
            became 16 on an H200 at 27296x16x184 with both row-major; through L1 always, larger products took 1 to 4 %
            longer).
        work: that of the signature, where in groups K may end within a vector. Of CUDA-core kernels it may not.
        zeros: of an operand that lies across K, lanes beyond its edge copy zeros. The lanes of a warp share a row there
            and would read its last vector together: an H200 took 47 us for 518x2944x520 in copies of 4 bytes, because
            writing one word to many places takes them one by one. It takes a register.
    """

    def __init__(
        self, dtype, extent, bk, k_major, align, threads, swizzle=None, halves=0, thin_by_l1=False, work=DENSE,
        zeros=False,
    ):  # fmt: skip
        self.halves = halves
        self.dtype = dtype
        self.itemsize = dtype.width // 8
        self.k_major = k_major
        self.inner = bk if k_major else extent
        self.outer = extent if k_major else bk
        self.extent = extent
        self.bk = bk
        self.threads = threads
        self.swizzle = swizzle
        self.vector = max(align // self.itemsize, 1)
        while self.outer * self.inner < self.vector * threads:
            self.vector //= 2
        self.bytes = self.vector * self.itemsize
        self.vectors_per_row = self.inner // self.vector
        # A row may have more vectors than lanes that share it: then a pass covers a part of it. There are lanes enough
        # that a pass has no more rows than the tile.
        lanes = max(self._lanes_per_row(), threads // self.outer)
        self.row_parts = max(self.vectors_per_row // lanes, 1)
        self.rows_per_pass = threads * self.row_parts // self.vectors_per_row
        self.passes = self.outer * self.inner // (self.vector * threads)
        self.thin_by_l1 = thin_by_l1 and self.bytes == 16
        self.zeros = zeros and not k_major
        self.ends_anywhere = work != DENSE
        self.cuts = self.itemsize == 1 or (self.ends_anywhere and k_major and self.bytes > 2)
        if self.cuts:
            self.ptx = _cut_copy_instruction(self.bytes)
        else:
            self.ptx = _copy_instruction(self.bytes, extent if self.thin_by_l1 else 0)

    def _lanes_per_row(self) -> int:
        return self.threads

    def find(self, args) -> None:
        """Binds to what a launch's arguments say of the operand's rows. Call it before `start`."""

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
        if self.zeros:
            self.depths = [Int32(cutlass.select_(self._inside(p), k, Int32(0))) for p in range(self.row_parts)]

    def copy(self, k_tile, stage_base, part: int = 0, parts: int = 1) -> None:
        """Starts the copy of k tile `k_tile` into the stage at shared address `stage_base` (bytes).

        With `parts`, only share `part` of the passes: a kernel spreads them over its k-steps.
        """
        step = Int64(self.bk) if self.k_major else Int64(self.bk) * self.leading
        tile = self.base + Int64(k_tile) * step
        for p in range(self.passes * part // parts, self.passes * (part + 1) // parts):
            source = (tile + self._source_offset(p)).toint()
            target = stage_base + self._shared_offset(p)
            left = self._left(k_tile, p)
            if self.cuts and self.itemsize > 1:
                left = cutlass.min(left, self.vector) * self.itemsize
            given = [target, source, left]
            if self.thin_by_l1 and not self.cuts:
                given.append(self.limit)
            cute.arch.inline_ptx(self.ptx, read_only_args=given)

    def fetch(self, k_tile, room: int = 0) -> None:
        """Nothing: `copy` does it all."""

    def settle(self, stage_base, room: int = 0) -> None:
        """Nothing: `copy` does it all."""

    def _place(self, p):
        """(row, inner element) of pass p within the tile."""
        row = self.tid_outer + (p // self.row_parts) * self.rows_per_pass
        inner = self.tid_inner + (p % self.row_parts) * (self.inner // self.row_parts)
        return row, inner

    def _source_offset(self, p):
        """Offset in elements of pass p's vector at k tile 0, clamped to the last valid row or vector."""
        row, inner = self._place(p)
        if self.halves:
            if self.k_major:
                return Int64(self._in_halves(row, 1)) * self.leading + Int64(inner)
            return Int64(row) * self.leading + Int64(self._in_halves(inner, self.vector))
        if self.k_major:
            return Int64(cutlass.min(self.first + row, self.limit - 1)) * self.leading + Int64(inner)
        column = cutlass.min(self.first + inner, self.limit - self.vector)
        return Int64(row) * self.leading + Int64(column)

    def _inside(self, p):
        """Whether pass p's vector of a row along K lies within the limit."""
        inner = self._place(p)[1]
        return self._of_half(inner) < self.limit // 2 if self.halves else self.first + inner < self.limit

    def _of_half(self, place):
        """The column of gate or of up that belongs at `place` of the tile."""
        return self.first // 2 + (place // self.halves // 2 * self.halves + place % self.halves)

    def _in_halves(self, place, count: int):
        """The column of B that belongs at `place` of the tile, clamped to the last `count` of its half."""
        limit = self.limit // 2
        return cutlass.min(self._of_half(place), limit - count) + place // self.halves % 2 * limit

    def _shared_offset(self, p):
        """Byte offset of pass p's vector within a stage."""
        if p and self.row_parts == 1 and self.rows_per_pass % self._period() == 0:
            # The swizzle repeats: whole periods further on is a constant further on.
            return self.shared_offset_0 + p * self.rows_per_pass * self.row_bytes()
        row, inner = self._place(p)
        if self.swizzle is None:
            return row * self.row_bytes() + inner * self.itemsize
        bits, base, shift = self.swizzle
        width = self.row_bytes() // self.itemsize
        byte = ((inner // width) * (self.outer * width) + row * width + inner % width) * self.itemsize
        return byte ^ (((byte >> (base + shift)) & ((1 << bits) - 1)) << base)

    def _period(self) -> int:
        """Rows after which the swizzle repeats, at least 8."""
        return max(8, (1 << sum(self.swizzle)) // self.row_bytes()) if self.swizzle else 8

    def row_bytes(self) -> int:
        """Distance between rows of the shared tile; a swizzled one is cut into blocks 128 bytes wide."""
        if self.swizzle is None:
            return self.inner * self.itemsize
        return min(self.inner * self.itemsize, 128)

    def ring(self, base, stages: int):
        """The shared tensor (extent, bk, stages) at shared pointer `base`, as `copy` lays it out."""
        width = self.row_bytes() // self.itemsize
        inner = cute.make_layout((width, self.inner // width), stride=(1, self.outer * width))
        outer = cute.make_layout(self.outer, stride=width)
        depth = cute.make_layout(stages, stride=self.outer * self.inner)
        modes = (outer, inner, depth) if self.k_major else (inner, outer, depth)
        layout = cute.make_layout(tuple(mode.shape for mode in modes), stride=tuple(mode.stride for mode in modes))
        swizzle = cute.make_swizzle(*self.swizzle) if self.swizzle else None
        return cute.make_tensor(cute.recast_ptr(base, swizzle, dtype=self.dtype), layout)

    @property
    def stage_bytes(self) -> int:
        return self.extent * self.bk * self.itemsize

    def _left(self, k_tile, p):
        """How many elements (K-major) or rows lie between pass p's vector and the end of K; <= 0: none."""
        row, inner = self._place(p)
        depth = self.depths[p % self.row_parts] if self.zeros else self.k
        return depth - k_tile * self.bk - (inner if self.k_major else row)


class TransposingLoader(TileLoader):
    """Brings K-major fp32 tiles into shared memory as [k][m], through registers.

    A 4-byte cp.async could store any element anywhere, but each row of the operand that a warp touches costs it a pass
    through shared memory (8.8 passes a copy, measured). Here a thread reads vectors along K (`fetch`) and later
    stores each element to its k-row (`settle`). A kernel fetches just before the barrier that ends a k tile, because
    there the compiler cannot move the loads down to their use, and settles early in the next tile.

    The lanes of a store are neighbours along m, but for the two that share a row: their vectors are 4 k-rows apart, and
    `PAD` words after each k-row make that 16 banks.
    """

    PAD = TRANSPOSE_PAD

    def _lanes_per_row(self) -> int:
        return 2

    def start(self, base, leading, first, limit, k, tid) -> None:
        super().start(base, leading, first, limit, k, tid)
        self.held: dict[int, cute.Tensor] = {}

    def copy(self, k_tile, stage_base, part: int = 0, parts: int = 1) -> None:
        """Nothing: see `fetch` and `settle`."""

    def fetch(self, k_tile, room: int = 0) -> None:
        """Loads this thread's vectors of k tile `k_tile` into its set of registers number `room`."""
        if room not in self.held:
            self.held[room] = cute.make_rmem_tensor((self.vector, self.passes), Float32)
        tile = self.base + Int64(k_tile) * Int64(self.bk)
        for p in range(self.passes):
            source = (tile + self._source_offset(p)).toint()
            loaded = cute.arch.inline_ptx(
                _load_instruction(self.vector),
                write_only_types=[Float32] * self.vector,
                read_only_args=[source, self._left(k_tile, p)],
            )
            for i, value in enumerate(loaded if self.vector > 1 else (loaded,)):
                self.held[room][i, p] = value

    def settle(self, stage_base, room: int = 0) -> None:
        """Stores what `fetch` loaded into set `room` of registers into the stage at shared address `stage_base`."""
        pitch = self.extent + self.PAD
        for p in range(self.passes):
            row, inner = self._place(p)
            for i in range(self.vector):
                target = stage_base + ((inner + i) * pitch + row) * self.itemsize
                cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[target, self.held[room][i, p]])

    def ring(self, base, stages: int):
        pitch = self.extent + self.PAD
        layout = cute.make_layout((self.extent, self.bk, stages), stride=(1, pitch, pitch * self.bk))
        return cute.make_tensor(cute.recast_ptr(base, dtype=self.dtype), layout)

    @property
    def stage_bytes(self) -> int:
        return (self.extent + self.PAD) * self.bk * self.itemsize


class _Gathering(TileLoader):
    """Brings the rows of a K-major operand that an index names; zeros for an entry that names none."""

    def find(self, args) -> None:
        """Binds to the index and to the number of rows of the operand."""
        self.index, self.rows = args.index, args.index_rows

    def start(self, base, leading, first, limit, k, tid) -> None:
        super().start(base, leading, first, limit, k, tid)
        # Of each row that this thread copies the number, -1 for none.
        self.taken = cute.make_rmem_tensor(-(-self.passes // self.row_parts), Int32)
        for p in range(0, self.passes, self.row_parts):
            place = cutlass.min(first + self._place(p)[0], limit - 1)
            number = cute.make_tensor(self.index + place, cute.make_layout(1))[0]
            named = (number >= 0) & (number < self.rows)
            self.taken[p // self.row_parts] = Int32(cutlass.select_(named, number, Int32(-1)))

    def _source_offset(self, p):
        number = cutlass.max(self.taken[p // self.row_parts], Int32(0))
        return Int64(number) * self.leading + Int64(self._place(p)[1])

    def _left(self, k_tile, p):
        left = super()._left(k_tile, p)
        return Int32(cutlass.select_(self.taken[p // self.row_parts] < 0, Int32(0), left))


class GatheringLoader(_Gathering, TileLoader):
    """`TileLoader` of rows that an index names."""


class GatheringTransposer(_Gathering, TransposingLoader):
    """`TransposingLoader` of rows that an index names."""


def loader_of(operand: str, work: str, transposes: bool = False) -> type[TileLoader]:
    """The class of the loader of operand "a" or "b"; rows that an index names lie along K."""
    if TABLE[work].indexed == operand == "a":
        return GatheringTransposer if transposes else GatheringLoader
    return TransposingLoader if transposes else TileLoader


class PartLoader(TileLoader):
    """Copies tiles of an operand that is split into `count` parts (`cute.operand_parts`), each a K-major matrix.

    A stage of the ring holds a k tile of each part, one behind the other. Rows of parts are whole 16 bytes, of which
    nobody writes what lies behind K: a copy reads what is left of K, and writes zeros behind it.
    """

    def __init__(self, count, *args):
        super().__init__(*args)
        self.count, self.ptx = count, _cut_copy_instruction(self.bytes)

    def lie_apart(self, distance) -> None:
        """Binds to the operand's parts, which lie `distance` elements (Int64) apart. Call it before `start`."""
        self.distance = distance

    def copy(self, k_tile, stage_base, part: int = 0, parts: int = 1) -> None:
        """As `TileLoader.copy`, of every part of the operand; `part` and `parts` share out the passes of all."""
        all_passes, tile, last = self.count * self.passes, None, None
        for number in range(all_passes * part // parts, all_passes * (part + 1) // parts):
            which, p = divmod(number, self.passes)
            if which != last:
                tile, last = self._tile(k_tile, which), which
            source = tile + self._source_offset(p) * self.itemsize
            target = stage_base + (self._shared_offset(p) + which * super().stage_bytes)
            left = cutlass.min(self._left(k_tile, p), self.vector) * self.itemsize
            cute.arch.inline_ptx(self.ptx, read_only_args=[target, source, left])

    def _tile(self, k_tile, which: int):
        """The address of a k tile of part `which`, behind a move that LLVM cannot see through.

        It would add the distance of the parts to each pass's offset, and keep these sums in registers of their own.
        """
        place = self.base + (Int64(k_tile) * Int64(self.bk) + which * self.distance)
        return cute.arch.inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[place.toint()])

    def ring(self, base, stages: int):
        """The shared tensor (extent, bk, stages x parts) at shared pointer `base`, the parts of a stage together."""
        return super().ring(base, stages * self.count)

    @property
    def stage_bytes(self) -> int:
        return self.count * super().stage_bytes


def _copy_instruction(bytes_per_copy: int, thin: int = 0) -> str:
    """PTX that copies so many bytes, or zeros when nothing is left of K.

    Operands: shared address, global address, elements left. An alignment class divides the extent it is
    contiguous in, so a vector lies wholly before or wholly beyond the end. With `thin`, which takes 16 bytes, there is
    a fourth: the rows of the operand, which comes through L1 if they are no more than that.
    """
    if bytes_per_copy == 2:
        return (
            "{ .reg .pred valid; .reg .b16 value; setp.gt.s32 valid, {$r2}, 0; mov.b16 value, 0; "
            "@valid ld.global.b16 value, [{$r1}]; st.shared.b16 [{$r0}], value; }"
        )
    # cp.async.cg goes past L1, and exists for 16 bytes only.
    past, through = (
        f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {bytes_per_copy}, beyond;" for cache in ("cg", "ca")
    )
    if thin:
        chosen = f"setp.gt.s32 many, {{$r3}}, {thin}; @many {past} @!many {through}"
        return f"{{ .reg .pred beyond, many; setp.le.s32 beyond, {{$r2}}, 0; {chosen} }}"
    return f"{{ .reg .pred beyond; setp.le.s32 beyond, {{$r2}}, 0; {past if bytes_per_copy == 16 else through} }}"


def _cut_copy_instruction(bytes_per_copy: int) -> str:
    """The same where K may end within a vector: it reads no byte behind the end of K, and writes zeros for it.

    Operands: shared address, global address, bytes left.
    """
    cache = "cg" if bytes_per_copy == 16 else "ca"
    return (
        f"{{ .reg .b32 left; max.s32 left, {{$r2}}, 0; min.s32 left, left, {bytes_per_copy}; "
        f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {bytes_per_copy}, left; }}"
    )


def _load_instruction(vector: int) -> str:
    """PTX that loads `vector` fp32 values, or zeros when nothing is left of K. Operands: address, elements left."""
    outputs = [f"{{$w{i}}}" for i in range(vector)]
    zeros = " ".join(f"mov.f32 {output}, 0f00000000;" for output in outputs)
    kind = f"v{vector}.f32 {{{', '.join(outputs)}}}" if vector > 1 else f"f32 {outputs[0]}"
    return f"{{ .reg .pred valid; setp.gt.s32 valid, {{$r1}}, 0; {zeros} @valid ld.global.{kind}, [{{$r0}}]; }}"
