"""The kernel that quantizes or dequantizes a tile; see `config.py` for its passes, `problem/quantization.py` for what
it computes, to the bit.

Loads are never predicated: an address beyond the end of a row or of the rows is clamped to the last one, of the same
group, whose maximum it does not change. Only stores ask what is inside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from cutegemm.cute import types
from cutegemm.cute.quantize.config import POINTERS, WARP, Signature, Tile
from cutegemm.cute.quantize.scale import larger, of_largest, reciprocal
from cutegemm.cute.source import aligned, element
from cutegemm.cute.standalone_operator import StandaloneOperator
from cutegemm.problem.quantization import NAMED

NUMBERS: tuple[tuple[str, Any], ...] = (
    *((name, Int32) for name in ("rows", "k", "matrices", "parts", "ctas")),
    *((f"{name}_{axis}", Int64) for name in "xs" for axis in ("row", "k", "matrix")),
    ("v_row", Int64),
    ("v_matrix", Int64),
    ("early", Int32),
)
"""The entry's numbers behind the stream: extents, strides in elements.

parts: partial maxima of a row, or of all. early: whether the launch may begin before the kernel in front has ended.
"""


class Corner(NamedTuple):
    """The first element of a tile."""

    matrix: Any
    row: Any
    k: Any


class Quantize(StandaloneOperator):
    """Host entry and kernel; `config` is the tile."""

    POINTERS, NUMBERS = POINTERS, NUMBERS

    def __init__(self, config: Tile, signature: Signature) -> None:
        self.config, self.signature = config, signature
        self.type: Any = types.NUMERIC[signature.dtype]
        self.format = NAMED[signature.values]
        self.integer = signature.values == "int8"
        self.per_row = signature.group.rows == 1

    def pointee(self, name: str) -> tuple[Any, int]:
        width, size = self.signature.width, self.type.width // 8
        if name == "x":
            return self.type, size * width if self.signature.along_k else size
        if name == "p" and self.signature.places:
            return Int32, 4
        return (Uint8, width) if name == "v" else (Float32, 4)

    @cute.kernel
    def kernel(self, args):
        self.args = args
        self.thread = cute.arch.thread_idx()[0]
        if cutlass.const_expr(self.signature.along_k):
            self.thread_r, self.thread_k = self.thread // self.config.threads_k, self.thread % self.config.threads_k
        else:
            self.thread_r, self.thread_k = self.thread % self.config.threads_r, self.thread // self.config.threads_r
        tiles_r, tiles_k = cute.ceil_div(args.rows, self.config.rows), cute.ceil_div(args.k, self.config.k)
        number = cute.arch.block_idx()[0]
        if cutlass.const_expr(self.signature.does == "parts"):
            # What the first launch read last is still in the L2 cache: this one begins there.
            number = cute.arch.grid_dim()[0] - 1 - number
        self.await_front()
        if cutlass.const_expr(self.signature.does == "amax"):
            self._find_maxima(number, tiles_r, tiles_k)
        elif cutlass.const_expr(self.signature.does == "back"):
            self._restore(self._corner(number // tiles_k, tiles_r, number % tiles_k))
        else:
            self._quantize(self._corner(number // tiles_k, tiles_r, number % tiles_k))

    def _corner(self, line, tiles_r, tile_k) -> Corner:
        """The first element of a tile: `tile_k` of row of tiles `line`, counted over all matrices."""
        matrix = line // tiles_r
        return Corner(matrix, (line - matrix * tiles_r) * self.config.rows, tile_k * self.config.k)

    # -- places of this thread
    def _row(self, corner: Corner, i: int) -> Any:
        return corner.row + (i * self.config.threads_r + self.thread_r)

    def _k(self, corner: Corner, j: int) -> Any:
        return corner.k + (j * self.config.threads_k + self.thread_k) * self.config.vector

    def _inside(self, row) -> Any:
        return cutlass.min(row, self.args.rows - 1)

    def _x_row(self, corner: Corner, row) -> Any:
        """The pointer to the first element of a row of x."""
        return self.args.x + (Int64(corner.matrix) * self.args.x_matrix + Int64(row) * self.args.x_row)

    def _v_row(self, corner: Corner, row) -> Any:
        """The same of the values."""
        return self.args.v + (Int64(corner.matrix) * self.args.v_matrix + Int64(row) * self.args.v_row)

    def _load(self, corner: Corner, i: int, j: int) -> Any:
        """Vector (i, j) of this thread, as it lies in memory."""
        width, vector = self.signature.width, self.config.vector
        start = self._x_row(corner, self._inside(self._row(corner, i)))
        raw = cute.make_rmem_tensor(vector, self.type)
        pieces = cute.logical_divide(raw, cute.make_layout(width))
        for piece in range(vector // width):
            at = cutlass.min(self._k(corner, j) + piece * width, self.args.k - width)
            if self.signature.along_k:
                place = aligned(start + Int64(at), width * self.type.width // 8)
                cute.autovec_copy(cute.make_tensor(place, cute.make_layout(width)), pieces[None, piece])
            else:
                for e in range(width):
                    raw[piece * width + e] = element(start, Int64(at + e) * self.args.x_k)
        return raw

    def _load_row(self, corner: Corner, i: int) -> list[Any]:
        return [self._load(corner, i, j) for j in range(self.config.deep_k)]

    def _load_all(self, corner: Corner) -> list[list[Any]]:
        """The vectors of this thread by rows."""
        return [self._load_row(corner, i) for i in range(self.config.deep_r)]

    # -- maxima
    def _magnitude(self, vectors, so_far) -> Any:
        """The largest magnitude of some vectors and of what was found so far."""
        for vector in vectors:
            values = cute.make_rmem_tensor(self.config.vector, Float32)
            values.store(cute.math.abs(vector.load().to(Float32)))
            for e in range(self.config.vector):
                so_far = larger(self.format, so_far, values[e])
        return so_far

    def _over_lanes(self, value, count: int) -> Any:
        """The maximum of `count` neighbouring lanes, a power of 2; all of them get it."""
        step = 1
        while step < count:
            value = larger(self.format, value, cute.arch.shuffle_sync_bfly(value, step))
            step *= 2
        return value

    @cute.jit
    def _over_row(self, value):
        """The maximum of the threads of a row; all of them get it."""
        threads_r, threads_k = self.config.threads_r, self.config.threads_k
        if cutlass.const_expr(self.signature.along_k):
            value = self._over_lanes(value, min(threads_k, WARP))
            if cutlass.const_expr(threads_k > WARP):
                warps = threads_k // WARP
                found = self._exchange(value, self.thread // WARP, self.thread % WARP == 0, self.config.threads // WARP)
                lane = self.thread % WARP
                value = self._over_lanes(found[self.thread_r * warps + lane % warps], warps)
        else:
            found = self._exchange(value, self.thread, True, self.config.threads)
            for each in cutlass.range_constexpr(threads_k):
                value = larger(self.format, value, found[each * threads_r + self.thread_r])
        return value

    @cute.jit
    def _over_all(self, value):
        """The maximum of all threads of the CTA; all of them get it."""
        warps = self.config.threads // WARP
        found = self._exchange(self._over_lanes(value, WARP), self.thread // WARP, self.thread % WARP == 0, warps)
        for each in cutlass.range_constexpr(warps):
            value = larger(self.format, value, found[each])
        return value

    @cute.jit
    def _exchange(self, value, place, writes, count: cutlass.Constexpr):
        """Shared memory with `count` numbers, of the threads that write."""
        memory = cutlass.memory.SmemAllocator().allocate_array(Float32, count)
        found = cute.make_tensor(memory, cute.make_layout(count))
        if writes:
            found[place] = value
        cute.arch.sync_threads()
        return found

    @cute.jit
    def _find_maxima(self, number, tiles_r, tiles_k):
        """Writes the maxima of the tiles of CTA `number`, one of `parts`: of each of its rows where groups lie in rows,
        else one.
        """
        parts, amax = self.args.parts, Float32(0)
        if cutlass.const_expr(self.per_row):
            line, part = number // parts, number % parts
            for tile in cutlass.range(part, tiles_k, parts):
                amax = self._tile_maximum(self._corner(line, tiles_r, tile), amax)
            amax = self._over_row(amax)
            corner = self._corner(line, tiles_r, 0)
            row = self._row(corner, 0)
            place = self.args.p + ((Int64(corner.matrix) * self.args.rows + row) * parts + part)
            if (self.thread_k == 0) & (row < self.args.rows):
                cute.make_tensor(place, cute.make_layout(1))[0] = amax
        else:
            for tile in cutlass.range(number, tiles_r * tiles_k * self.args.matrices, parts):
                amax = self._tile_maximum(self._corner(tile // tiles_k, tiles_r, tile % tiles_k), amax)
            amax = self._over_all(amax)
            place = self.args.p + number
            if self.thread == 0:
                cute.make_tensor(place, cute.make_layout(1))[0] = amax

    def _tile_maximum(self, corner: Corner, amax) -> Any:
        return self._magnitude([vector for row in self._load_all(corner) for vector in row], amax)

    @cute.jit
    def _found_maximum(self, matrix, row):
        """The maximum of the partial ones of a row, or of the tensor."""
        parts, amax = self.args.parts, Float32(0)
        if cutlass.const_expr(self.per_row):
            start = self.args.p + (Int64(matrix) * self.args.rows + self._inside(row)) * parts
            for part in cutlass.range(parts):
                amax = larger(self.format, amax, element(start, part))
        else:
            for part in cutlass.range(self.thread % WARP, parts, WARP):
                amax = larger(self.format, amax, element(self.args.p, part))
            amax = self._over_lanes(amax, WARP)
        return amax

    # -- scales
    def _scale_at(self, matrix, row, k) -> Any:
        """The pointer to the scale of element (row, k)."""
        place = Int64(matrix) * self.args.s_matrix
        for index, extent, stride in zip((row, k), self.signature.group, (self.args.s_row, self.args.s_k), strict=True):
            if extent:
                place = place + Int64(index // extent) * stride
        return self.args.s + place

    def _put_scale(self, scale, corner: Corner, targets, writes) -> None:
        """Writes the scale of a row, or of all, to each of its `_targets`."""
        for target, row in targets:
            self._put_number(scale, self._scale_at(corner.matrix, target, corner.k), writes & (row < self.args.rows))

    @cute.jit
    def _put_number(self, number, place, writes):
        if writes:
            cute.make_tensor(place, cute.make_layout(1))[0] = number

    def _targets(self, row) -> list[tuple[Any, Any]]:
        """(row of the values, row of x) of each row that a row of x becomes; the latter is none where the former is."""
        places, rows = self.signature.places, self.args.rows
        if not places:
            return [(row, row)]
        first, found = Int64(self._inside(row)) * places, []
        for choice in range(places):
            place = element(self.args.p, first + choice)
            exists = (place >= 0) & (Int64(place) < Int64(rows) * places)
            found.append((place, cutlass.select_(exists, row, rows)))
        return found

    def _given_scales(self, matrix, row, k) -> list[Any]:
        """The scale of each element of a vector; one number stands for all where they share it."""
        row, last = self._inside(row), self.args.k - 1
        count = self.config.vector if self.signature.group.k == 1 else 1
        return [element(self._scale_at(matrix, row, cutlass.min(k + e, last)), 0) for e in range(count)]

    # -- values
    def _quantize(self, corner: Corner) -> None:
        """Loads the tile, finds its scales, and writes both."""
        vectors = self._load_all(corner)
        if self.signature.does == "given":
            for i, row in enumerate(vectors):
                for j, vector in enumerate(row):
                    scales = self._given_scales(corner.matrix, self._row(corner, i), self._k(corner, j))
                    inverses = [reciprocal(scale) for scale in scales]
                    self._store(corner, i, j, vector, inverses, self._targets(self._row(corner, i)))
        elif self.per_row:
            for i, row in enumerate(vectors):
                targets = self._targets(self._row(corner, i))
                self._store_row(corner, i, row, self._scale_of_row(corner, i, row, targets), targets)
        else:
            inverse = self._scale_of_all(corner, [vector for row in vectors for vector in row])
            for i, row in enumerate(vectors):
                self._store_row(corner, i, row, inverse, self._targets(self._row(corner, i)))

    def _scale_of_row(self, corner: Corner, i: int, vectors, targets) -> Any:
        """The reciprocal of the scale of row i of this thread; the row's first thread writes the scale."""
        row = self._row(corner, i)
        if self.signature.does == "whole":  # the CTA has all of a group along K
            amax, first = self._over_row(self._magnitude(vectors, Float32(0))), self.thread_k == 0
        else:
            amax, first = self._found_maximum(corner.matrix, row), self._k(corner, 0) == 0
        scale = of_largest(self.format, amax)
        self._put_scale(scale, corner, targets, first)
        return reciprocal(scale)

    def _scale_of_all(self, corner: Corner, vectors) -> Any:
        """The reciprocal of the scale of all this thread's vectors; one thread of those that share it writes it."""
        first = self.thread == 0
        if self.signature.does == "whole":
            amax = self._over_all(self._magnitude(vectors, Float32(0)))
        else:
            amax = self._found_maximum(corner.matrix, 0)
            first = first & (corner.matrix == 0) & (corner.row == 0) & (corner.k == 0)
        scale = of_largest(self.format, amax)
        self._put_scale(scale, corner, [(corner.row, corner.row)], first)
        return reciprocal(scale)

    def _store_row(self, corner: Corner, i: int, vectors, inverse, targets) -> None:
        for j, vector in enumerate(vectors):
            self._store(corner, i, j, vector, [inverse], targets)

    def _store(self, corner: Corner, i: int, j: int, raw, inverses, targets) -> None:
        """Writes the values of vector (i, j): its elements times the reciprocals of their scales, rounded."""
        count = self.config.vector
        scaled = cute.make_rmem_tensor(count, Float32)
        scaled.store(raw.load().to(Float32))
        in_bytes = cute.make_rmem_tensor(count, Uint8)
        words = cute.recast_tensor(in_bytes, Uint32)
        for word in range(count // 4):
            places = range(4 * word, 4 * word + 4)
            words[word] = self._rounded([scaled[e] * inverses[e % len(inverses)] for e in places])
        elements = words if self.signature.width % 4 == 0 else in_bytes
        for target, row in targets:
            self._put(elements, self._v_row(corner, target), row, self._k(corner, j), 1)

    @cute.jit
    def _put(self, elements, start, row, k, size: cutlass.Constexpr):
        """Writes the elements of a vector, of `size` bytes, to their places in a row that begins at `start`."""
        width = self.signature.width
        layout = cute.make_layout(width * size * 8 // elements.element_type.width)
        pieces = cute.logical_divide(elements, layout)
        for piece in cutlass.range_constexpr(self.config.vector // width):
            place = aligned(start + Int64(k + piece * width), min(width * size, 16))
            if (row < self.args.rows) & (k + piece * width < self.args.k):
                cute.autovec_copy(
                    pieces[None, piece], cute.make_tensor(cute.recast_ptr(place, dtype=elements.element_type), layout)
                )

    def _rounded(self, four) -> Any:
        """Four numbers as the bytes of a word, the first one lowest."""
        if self.integer:
            code = " ".join(f"cvt.rni.s32.f32 {name}, {{$r{number}}};" for number, name in enumerate("abcd"))
            code = (
                f"{{ .reg .b32 a, b, c, d; {code} cvt.pack.sat.s8.s32.b32 c, d, c, 0; "
                "cvt.pack.sat.s8.s32.b32 {$w0}, b, a, c; }"
            )
        else:
            cvt = f"cvt.rn.satfinite.{self.format.name}x2.f32"
            code = (
                f"{{ .reg .b16 l, h; {cvt} l, {{$r1}}, {{$r0}}; {cvt} h, {{$r3}}, {{$r2}}; "
                "mov.b32 {$w0}, {l, h}; }"
            )
        return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=list(four))

    # -- back
    def _restore(self, corner: Corner) -> None:
        """Writes the values times their scales."""
        for i in range(self.config.deep_r):
            for j in range(self.config.deep_k):
                self._restore_vector(corner, i, j)

    def _restore_vector(self, corner: Corner, i: int, j: int) -> None:
        count, width = self.config.vector, self.signature.width
        row, k = self._row(corner, i), self._k(corner, j)
        start = self._v_row(corner, self._inside(row))
        in_bytes = cute.make_rmem_tensor(count, Uint8)
        words = cute.recast_tensor(in_bytes, Uint32)
        accesses = words if width % 4 == 0 else in_bytes
        layout = cute.make_layout(width * 8 // accesses.element_type.width)
        pieces = cute.logical_divide(accesses, layout)
        for piece in range(count // width):
            place = aligned(start + Int64(cutlass.min(k + piece * width, self.args.k - width)), width)
            place = cute.recast_ptr(place, dtype=accesses.element_type)
            cute.autovec_copy(cute.make_tensor(place, layout), pieces[None, piece])
        scales = self._given_scales(corner.matrix, row, k)
        found = cute.make_rmem_tensor(count, Float32)
        for word in range(count // 4):
            for e, number in enumerate(self._numbers(words[word]), start=4 * word):
                found[e] = number * scales[e % len(scales)]
        result = cute.make_rmem_tensor(count, self.type)
        result.store(found.load().to(self.type))
        self._put(result, self._x_row(corner, row), row, k, self.type.width // 8)

    def _numbers(self, word) -> Any:
        """The four values in the bytes of a word, in fp32."""
        if self.integer:
            code = " ".join(f"bfe.s32 t, {{$r0}}, {8 * e}, 8; cvt.rn.f32.s32 {{$w{e}}}, t;" for e in range(4))
            code = f"{{ .reg .b32 t; {code} }}"
        else:
            cvt = f"cvt.rn.f16x2.{self.format.name}x2"
            code = (
                "{ .reg .b16 l, h, p, q; .reg .b32 f; mov.b32 {l, h}, {$r0}; "
                f"{cvt} f, l; mov.b32 {{p, q}}, f; cvt.f32.f16 {{$w0}}, p; cvt.f32.f16 {{$w1}}, q; "
                f"{cvt} f, h; mov.b32 {{p, q}}, f; cvt.f32.f16 {{$w2}}, p; cvt.f32.f16 {{$w3}}, q; }}"
            )
        return cute.arch.inline_ptx(code, write_only_types=[Float32] * 4, read_only_args=[word])
