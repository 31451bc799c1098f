"""From accumulators to D: a warp stages 16 rows at a time through shared memory and stores whole vectors.

Tensor-core fragments hold 2 neighbouring outputs a thread, so storing them directly would touch 16-byte pieces of
each row. Instead every warp owns a small fp32 slab of shared memory (`SLAB_ROWS` rows of its wn columns): it writes a
slice of its accumulators there, and reads it back so that a thread holds `chunk` neighbouring outputs of one row.
In that form operands are read and D is written in vectors as wide as their alignment allows, and the epilogue's program
is computed in fp32 and rounded once. Only the warp itself touches its slab: no CTA barrier is needed.

Of a gated program a slab row holds the accumulators of gate and up: each half of it, or neighbouring columns.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutegemm.cute import whole
from cutegemm.cute.launch_config import SLAB_PAD, SLAB_ROWS, slab_chunk
from cutegemm.cute.lowering import finish, rounded
from cutegemm.cute.reduction import partials
from cutegemm.cute.source import aligned, sources, targets
from cutegemm.problem import Signature
from cutegemm.problem.program.graph import Node
from cutegemm.problem.work import SCATTERED

if TYPE_CHECKING:
    from cutegemm.cute.warps.config import TileConfig


class SlabEpilogue:
    """The epilogue of one warp; see the module docstring.

    `start` binds it to the warp's place in D; then, for every 16 rows of the warp tile, the kernel fills `slab`
    and calls `store_rows`.
    """

    def __init__(self, config: TileConfig, signature: Signature, late_bias: bool = False) -> None:
        """`late_bias`: vectors along columns are loaded by each `store_rows`, when the slab holds the accumulators."""
        self.wn, self.crossed = config.wn, config.crossed
        self.late_bias = late_bias
        self.epilogue = signature.epilogue
        self.program, self.read = whole.program_of(signature), whole.reader(signature)
        self.fold = 2 if self.epilogue.gating else 1
        # A pass has 16 rows at most: two lanes or more share a row.
        self.chunk = slab_chunk(signature, self.wn // self.fold)
        self.targets = targets(signature, self.chunk)
        self.scatters = signature.work == SCATTERED
        self.lanes_per_row = self.wn // self.fold // self.chunk
        self.rows_per_pass = 32 // self.lanes_per_row
        self.passes = SLAB_ROWS // self.rows_per_pass
        self.pitch = self.wn + SLAB_PAD
        self.sources = sources(signature)
        self.partials = partials(signature)
        self.pieces = (SLAB_ROWS, self.wn // self.fold)

    def start(self, memory, matrix, row, column, m, n, warp, lane, operands) -> None:
        """Binds to the warp tile whose first result is (row, column) of D, (m, n), number `matrix`.

        `memory` is a shared fp32 pointer with room for one slab a warp, `operands` are the kernel's arguments by name.
        Addresses of C and D are made here, after the main loop, where registers are free again.
        """
        base = memory + warp * (SLAB_ROWS * self.pitch)
        self.slab = cute.make_tensor(base, cute.make_layout((SLAB_ROWS, self.wn), stride=(self.pitch, 1)))
        self.row, self.m, self.n, self.matrix = row, m, n, matrix
        self.lane_row = lane // self.lanes_per_row
        self.lane_column = (lane % self.lanes_per_row) * self.chunk
        self.column = column + self.lane_column
        self.operands = operands
        for target in self.targets:
            target.start(operands, matrix)
        self.across: dict[str, Any] = {}
        for source in self.sources.values():
            source.start(operands, matrix)
        if not self.late_bias:
            self._load_across()
        for partial in self.partials:
            rows, columns = self.pieces
            over, extent = (n, m) if partial.of_rows else (m, n)
            partial.start(operands, matrix, cute.ceil_div(over, columns if partial.of_rows else rows), extent)

    def _load_across(self) -> None:
        """The operands of this thread's columns that are the same for every row; beyond the edge the last column's."""
        for name, source in self.sources.items():
            if source.given.varies == "n":
                values = cute.make_rmem_tensor(self.chunk, source.wide)
                for j in range(self.chunk):
                    values[j] = source.number(0, cutlass.min(self.column + j, self.n - 1))
                self.across[name] = values

    @cute.jit
    def store_rows(self, first: cutlass.Constexpr):
        """Finishes rows first .. first + 15 of the warp tile, which lie in the slab, and stores them."""
        cute.arch.sync_warp()
        if cutlass.const_expr(self.late_bias):
            self._load_across()
        self._begin_columns()
        for p in cutlass.range_constexpr(self.passes):
            slab_row = self.lane_row + p * self.rows_per_pass
            row = self.row + first + slab_row
            self._begin_rows()
            if row < self.m:
                self._store_chunk(slab_row, row)
            self._end_rows(row, row < self.m)
        self._end_columns(self.row + first, True)
        # The next slice may overwrite the slab only after every lane has read it.
        cute.arch.sync_warp()

    def _accumulated(self, slab_row, first, count: int):
        """`count` accumulators of a slab row from column `first` on."""
        values = self._stored(self.slab.iterator + slab_row * self.pitch + first, count)
        if not self.crossed:
            return values
        kept, found = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
        kept.store(values)
        for j in range(count):
            found[j] = kept[j ^ 1]
        return found.load()

    def _stored(self, begin, count: int):
        """The `count` words from `begin` on."""
        values = cute.make_rmem_tensor(count, Float32)
        cute.autovec_copy(cute.make_tensor(aligned(begin, min(4 * count, 16)), cute.make_layout(count)), values)
        return values.load()

    def _sums(self, slab_row, part: Any):
        """This thread's chunk of a slab row; of a gated program the `part` of gate (0) or up (1)."""
        gating = self.epilogue.gating
        if gating is None:
            return self._accumulated(slab_row, self.lane_column, self.chunk)
        if gating == "halves":
            return self._accumulated(slab_row, self.lane_column + part * (self.wn // 2), self.chunk)
        both = cute.make_rmem_tensor(2 * self.chunk, Float32)
        both.store(self._accumulated(slab_row, 2 * self.lane_column, 2 * self.chunk))
        own = cute.make_rmem_tensor(self.chunk, Float32)
        for j in range(self.chunk):
            own[j] = both[2 * j + part]
        return own.load()

    @cute.jit
    def _store_chunk(self, slab_row: Int32, row: Int32):
        values = finish(self.program, self.chunk, functools.partial(self._leaf, slab_row, row))
        place, limit = row, self.n
        if cutlass.const_expr(self.scatters):
            place, limit = self._scattered(row)
        for i in cutlass.range_constexpr(len(self.targets)):
            self._put(self.targets[i], values[self.targets[i].number], place, limit)
        self._reduce(values)

    @cute.jit
    def _scattered(self, row: Int32):
        """(row of the results that a row of the product goes to, columns of it): none where the index names no row."""
        place = cute.make_tensor(self.operands.index + row, cute.make_layout(1))[0]
        limit = self.n
        if (place < 0) | (place >= self.operands.index_rows):
            place, limit = Int32(0), Int32(0)
        return place, limit

    # -- reduced results. Lanes exchange what they have behind the rows' branch, which lanes may leave out.
    def _begin_columns(self) -> None:
        self.totals = {each.number: each.empty(self.chunk) for each in self.partials if not each.of_rows}

    def _begin_rows(self) -> None:
        self.totals |= {each.number: each.empty(1) for each in self.partials if each.of_rows}

    def _reduce(self, values) -> None:
        """Combines this thread's chunk of a row."""
        for partial in self.partials:
            elements, totals = partial.elements(values[partial.number], self.chunk), self.totals[partial.number]
            for j in range(self.chunk):
                if partial.of_rows:
                    own = partial.inside(elements[j], self.column + j < self.n)
                    totals[0] = partial.combine(totals[0], own)
                else:
                    totals[j] = partial.combine(totals[j], elements[j])

    def _end_rows(self, row, inside) -> None:
        """Combines the lanes of a row, and writes its piece where the row is `inside`."""
        steps = [1 << bit for bit in range(5) if 1 << bit < self.lanes_per_row]
        for partial in self.partials:
            if partial.of_rows:
                total = partial.over_lanes(self.totals[partial.number][0], steps)
                self._put_row(partial, row, inside, total)

    @cute.jit
    def _put_row(self, partial: cutlass.Constexpr, row, inside, total):
        column = self.column - self.lane_column
        if cutlass.const_expr(self.scatters):
            columns = Int32(0)
            if inside:
                row, columns = self._scattered(row)
            inside = columns > 0
        place = partial.at(column // self.pieces[1], row)
        if inside & (self.lane_column == 0) & (column < self.n):
            cute.make_tensor(place, cute.make_layout(1))[0] = total

    def _end_columns(self, first, inside) -> None:
        """Combines the rows from `first` on, and writes the columns' pieces where they are `inside`."""
        steps = [1 << bit for bit in range(5) if 1 << bit >= self.lanes_per_row]
        for partial in self.partials:
            if not partial.of_rows:
                for j in range(self.chunk):
                    total = partial.over_lanes(self.totals[partial.number][j], steps)
                    self._put_column(partial, first, inside, self.column + j, total)

    @cute.jit
    def _put_column(self, partial: cutlass.Constexpr, first, inside, column, total):
        place = partial.at(first // self.pieces[0], column)
        if inside & (first < self.m) & (self.lane_row == 0) & (column < self.n):
            cute.make_tensor(place, cute.make_layout(1))[0] = total

    def _leaf(self, slab_row, row, node: Node) -> Any:
        if node.op == "acc":
            return self.read(self._sums(slab_row, node.attribute))
        if node.op == "input":
            assert isinstance(node.attribute, int)
            return self._operand(self.program.inputs[node.attribute], row)
        return self._index(node.op, row)

    @cute.jit
    def _put(self, target: cutlass.Constexpr, values, row: Int32, limit: Int32):
        result = cute.make_rmem_tensor(self.chunk, target.type)
        result.store(rounded(values, target.type, self.chunk))
        begin = target.at(row, self.column)
        vectors = cute.logical_divide(result, cute.make_layout(target.vector))
        for v in cutlass.range_constexpr(self.chunk // target.vector):
            if self.column + v * target.vector < limit:
                place = aligned(begin + v * target.vector, target.vector * target.bytes)
                cute.autovec_copy(vectors[None, v], cute.make_tensor(place, cute.make_layout(target.vector)))

    def _index(self, axis: str, row) -> Any:
        if axis == "row":
            return Int32(row)
        if axis == "matrix":
            return Int32(self.matrix)
        columns = cute.make_rmem_tensor(self.chunk, Int32)
        for j in range(self.chunk):
            columns[j] = Int32(self.column + j)
        return columns.load()

    def _operand(self, given, row) -> Any:
        """An operand at this thread's chunk of a row: a vector, or one number for all of it."""
        if given.by_value:
            return getattr(self.operands, given.name)
        source = self.sources[given.name]
        if given.varies == "mn":
            self.source = source
            return self._load_matrix(row).load()
        return self.across[given.name].load() if given.varies == "n" else source.number(row, 0)

    def _place_in_row(self, row, ahead: int):
        """The pointer to the element of `source` that is `ahead` columns behind this thread's first."""
        if self.source.given.period:
            return self.source.at(row, self.column + ahead)
        return self.place + (ahead if self.source.vector else self.source.offset(0, ahead))

    @cute.jit
    def _load_matrix(self, row: Int32):
        """The matrix operand `source` at this thread's chunk of a row; 0 beyond the edge."""
        raw = cute.make_rmem_tensor(self.chunk, self.source.dtype)
        raw.fill(0)
        self.place = self.source.at(row, self.column)
        width = min(self.source.vector, self.chunk) if cutlass.const_expr(self.source.vector > 0) else 1
        vectors = cute.logical_divide(raw, cute.make_layout(width))
        for v in cutlass.range_constexpr(self.chunk // width):
            if self.column + v * width < self.n:
                place = self._place_in_row(row, v * width)
                if cutlass.const_expr(self.source.vector > 0):
                    place = aligned(place, width * (self.source.dtype.width // 8))
                    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(width)), vectors[None, v])
                else:
                    raw[v] = cute.make_tensor(place, cute.make_layout(1))[0]
        values = cute.make_rmem_tensor(self.chunk, self.source.wide)
        values.store(raw.load().to(self.source.wide))
        return values
