"""The tensor operands of a program in the Hopper epilogue, where the accumulators are: in a thread's registers.

`store` says which accumulators a thread holds. Rows and columns below are those of the accumulators; with
swapped operands they are the columns and rows of D. All addresses are clamped to the operands' edge, so that nothing
is read beyond it: what is computed there is never stored.

    AcrossBias    one number a column: those of a tile lie in shared memory in fp32, a row a warpgroup, because the
                  accumulators leave no registers for them
    DownBias      one number a row: two for each block of 64 rows
    PairedC       a matrix in fragments straight from global memory, 2 neighbouring columns at a time (one with swapped
                  operands): for fp32, of which a quad of lanes reads 32 bytes, and for an fp32 result
    RingC         a matrix that the producer has loaded into the ring (`ahead`)
    StagedC       one 16-bit matrix: 16-byte pieces of whole rows into the staging buffer that D takes next, and
                  fragments from there with ldmatrix, the mirror image of the way out
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutegemm.cute import types
from cutegemm.cute.hopper.config import WARPGROUP, HopperConfig
from cutegemm.cute.source import Source, aligned
from cutegemm.problem import ITEMSIZE, Signature
from cutegemm.problem.program.graph import I32, Input


def own_shape(config: HopperConfig, signature: Signature) -> tuple[int, int]:
    """(c, r): results that a thread has side by side in a block of 8 columns of accumulators, and rows of them."""
    if signature.epilogue.gating != "pairs":
        return 2, 2
    return (2, 1) if config.swapped else (1, 2)


def own_row(warp, lane, rows: int) -> Any:
    """A thread's first row of results in a block; it has `rows`.

    One is with gate and up in pairs of swapped operands. Lanes 4 apart have a row of gate and one of up each, and share
    them out: the lower lane takes those of accumulators r = 0, the upper those of r = 1, which are 4 results on.
    """
    return 16 * warp + lane // 4 if rows == 2 else 8 * warp + (lane >> 3) + (lane & 4)


def make_vectors(config: HopperConfig, signature: Signature) -> dict[str, Any]:
    """The strategy for each vector operand of the signature's epilogue, by name."""
    found: dict[str, Any] = {}
    across, own = 0, own_shape(config, signature)
    for given in config.vectors(signature):
        if config.lies_across(given):
            found[given.name] = AcrossBias(config, given, across, config.out_columns(signature), own)
            across += 1
        else:
            found[given.name] = DownBias(config.out_blocks(signature), own)
    return found


def make_matrices(config: HopperConfig, signature: Signature) -> dict[str, Any]:
    """The strategy for each matrix operand of the signature's epilogue, by name."""
    plan = config.through_ring(signature)
    ringed = () if plan is None else plan.operands
    given, staged = config.matrices(signature), config.staged_matrix(signature)
    roomy, by_matrix = config.loads_ahead(signature), ITEMSIZE[signature.out_dtype] == 2
    return {
        each.name: RingC(config, each, roomy, by_matrix)
        if each in ringed
        else StagedC(config, each, roomy, config.store_columns(2, signature))
        if each.name == staged
        else PairedC(config, each, roomy)
        for each in given
    }


class AcrossBias:
    """An operand with one number for each column of the accumulators, in shared memory."""

    def __init__(self, config: HopperConfig, given: Input, number: int, columns: int, own: tuple[int, int]) -> None:
        """`number`: of the operand among those that lie across, each of which has rows of its own of `columns`. `own`:
        see `own_shape`.
        """
        self.wide: Any = Int32 if given.type == I32 else Float32
        # Rows lie `stride` numbers apart: those of a narrow tile as far as those of the whole one.
        self.columns = self.stride = columns
        self.first, (self.neighbours, self.rows) = number * config.consumers, own

    def start(self, memory, group, thread) -> None:
        """Binds to the rows of 32-bit numbers at shared pointer `memory`, one a warpgroup for each operand."""
        self.memory = cute.recast_ptr(memory, dtype=self.wide) + (group + self.first) * self.stride
        self.thread = thread
        self.quad_column = self.neighbours * (thread % 4)

    def load(self, source: Source, row, column, row_step, extent) -> None:
        """The operand along a tile's columns, from `column` on; `extent` entries exist. A barrier must follow."""
        self.source = source
        self._load(column, extent)

    @cute.jit
    def _load(self, column, extent):
        for i in cutlass.range_constexpr(-(-self.columns // WARPGROUP)):
            own = self.thread + i * WARPGROUP
            if own < self.columns:
                self._put(own, self.source.along(cutlass.min(column + own, extent - 1)))

    def _put(self, own, source) -> None:
        value = cute.make_tensor(source, cute.make_layout(1))[0].to(self.wide)
        cute.make_tensor(self.memory + own, cute.make_layout(1))[0] = value

    def fragment(self, block: int, first: int, count: int):
        """A vector for `count` blocks of 8 columns from block `first` of the tile: (c, r, j), c fastest."""
        own = self.neighbours
        found = cute.make_rmem_tensor((own, count), self.wide)
        for j in range(count):
            place = aligned(self.memory + (4 * own * (first + j) + self.quad_column), 4 * own)
            cute.autovec_copy(cute.make_tensor(place, cute.make_layout(own)), found[None, j])
        all_rows = cute.make_layout((own, self.rows, count), stride=(1, 0, own))
        return cute.make_tensor(found.iterator, all_rows).load().reshape(self.rows * own * count)


class DownBias:
    """An operand with one number for each row of the accumulators, in registers."""

    stride = 0

    def __init__(self, blocks: int, own: tuple[int, int]) -> None:
        """`own`: see `own_shape`."""
        self.blocks, (self.neighbours, self.rows) = blocks, own

    def start(self, memory, group, thread) -> None:
        """Binds to this thread of a warpgroup; no shared memory is needed."""
        self.own_row = own_row(thread // 32, thread % 32, self.rows)

    def load(self, source, row, column, row_step, extent):
        """The operand along this thread's rows; the tile's first is `row`, blocks lie `row_step` apart."""
        count = self.rows * self.blocks
        self.values = cute.make_rmem_tensor(count, source.wide)
        for i in range(count):
            place = cutlass.min(row + self.own_row + (i // self.rows * row_step + 8 * (i % self.rows)), extent - 1)
            self.values[i] = cute.make_tensor(source.along(place), cute.make_layout(1))[0].to(source.wide)

    def fragment(self, block: int, first: int, count: int):
        """A vector for `count` blocks of 8 columns of the block of rows: (c, r, j), c fastest."""
        size = self.rows * self.neighbours * count
        values = cute.make_rmem_tensor(size, self.values.element_type)
        for q in range(size):
            values[q] = self.values[self.rows * block + q // self.neighbours % self.rows]
        return values.load()


class _C:
    """A matrix operand in a tile: where it lies, and whether registers allow to load far ahead."""

    staged = ringed = False

    def __init__(self, config: HopperConfig, given: Input, roomy: bool) -> None:
        """`roomy`: see `HopperConfig.loads_ahead`."""
        self.dtype = types.NUMERIC[given.dtype]
        self.swapped, self.roomy = config.swapped, roomy

    @property
    def ahead(self) -> bool:
        """Whether pieces for the next buffer are loaded while this one is worked on."""
        return self.staged and self.roomy

    def bind(self, source, rows, columns) -> None:
        """`source`: the operand, bound to this matrix of the batch; (rows, columns) like D."""
        self.source = source
        self.rows, self.columns = rows, columns

    def _at(self, row, column):
        return self.source.in_row(row, column)


class PairedC(_C):
    """A matrix operand in fragments straight from global memory, up to two neighbouring columns at a time."""

    def fragment(self, corner, first: int, count: int, per_box: int):
        """C for `count` blocks of 8 columns from block `first` of a box that has `per_box`.

        They are loaded in chunks that hide the latency of each other, when the first of a chunk is asked for. `corner`:
        (row, column) of D of this thread's first accumulator in the box.
        """
        chunk = min(per_box, 8 if self.roomy else 2)
        if first % chunk == 0:
            self.chunk = self._load(corner, first, chunk)
        return cute.make_tensor(self.chunk.iterator + 4 * (first % chunk), cute.make_layout(4 * count))

    def _load(self, corner, first: int, count: int):
        row, column = corner
        raw = cute.make_rmem_tensor(4 * count, self.dtype)
        for j in range(count):
            for r in range(2):
                pair = cute.make_tensor(raw.iterator + (4 * j + 2 * r), cute.make_layout(2))
                if self.swapped:
                    x = cutlass.min(column + 8 * r, self.columns - 1)
                    for i in range(2):
                        y = cutlass.min(row + (8 * (first + j) + i), self.rows - 1)
                        pair[i] = cute.make_tensor(self._at(y, x), cute.make_layout(1))[0]
                else:
                    y = cutlass.min(row + 8 * r, self.rows - 1)
                    x = cutlass.min(column + 8 * (first + j), self.columns - 2)
                    place = aligned(self._at(y, x), self.dtype.width // 4)
                    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(2)), pair)
        return raw


class StagedC(_C):
    """A 16-bit matrix operand, by the staging buffer. A warp moves its own 16 rows x `columns` accumulators."""

    staged = True

    def __init__(self, config: HopperConfig, given: Input, roomy: bool, box_columns: int) -> None:
        """`box_columns`: of accumulators, in a staging buffer."""
        super().__init__(config, given, roomy)
        self.box_columns = box_columns
        self.pieces = self.box_columns // 16
        """Of 16 bytes a lane."""
        self.turn = ".trans" if self.swapped else ""

    def start(self, base, row_bytes: int, swizzle_bits: int, warp, lane) -> None:
        """Binds to the first staging buffer at shared address `base`."""
        self.base, self.row_bytes, self.mask = base, row_bytes, (1 << swizzle_bits) - 1
        self.warp, self.lane = warp, lane

    def _place(self, i: int):
        """(row, 16-byte piece) in the box of this lane's piece i."""
        number = 32 * i + self.lane
        if self.swapped:
            return number // 2, 2 * self.warp + number % 2
        per_row = self.box_columns // 8
        return 16 * self.warp + number // per_row, number % per_row

    def fetch(self, corner, pieces=None):
        """This lane's `pieces` (all by default) of the box of C that begins at `corner`, (row, column) of D."""
        pieces = pieces or range(self.pieces)
        raw = cute.make_rmem_tensor(4 * len(pieces), Int32)
        for at, i in enumerate(pieces):
            row, piece = self._place(i)
            y = cutlass.min(corner[0] + row, self.rows - 1)
            x = cutlass.min(corner[1] + 8 * piece, self.columns - 8)
            place = aligned(cute.recast_ptr(self._at(y, x), dtype=Int32), 16)
            target = cute.make_tensor(raw.iterator + 4 * at, cute.make_layout(4))
            cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), target)
        return raw

    def stage(self, raw, buffer_offset, pieces=None) -> None:
        """Writes what was fetched to the buffer at that offset, where D will stand."""
        for at, i in enumerate(pieces or range(self.pieces)):
            row, piece = self._place(i)
            swizzle = ((row * self.row_bytes) >> 7) & self.mask
            address = self.base + row * self.row_bytes + ((piece ^ swizzle) << 4) + buffer_offset
            cute.arch.inline_ptx(
                "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[address, *(raw[4 * at + q] for q in range(4))],
            )
        if not pieces or pieces[-1] == self.pieces - 1:
            cute.arch.sync_warp()

    def bring(self, corner, buffer_offset) -> None:
        """`fetch` and `stage`, two pieces at a time."""
        for first in range(0, self.pieces, 2):
            pieces = range(first, min(first + 2, self.pieces))
            self.stage(self.fetch(corner, pieces), buffer_offset, pieces)

    def fragment(self, address):
        """The fragment of two blocks of 8 columns, whose matrix rows lie at this lane's `address`.

        D may be written over it afterwards.
        """
        found = _load_matrices(address, self.turn)
        cute.arch.sync_warp()
        return _as_fragment(found, self.dtype)


class RingC(_C):
    """A matrix operand that the producer has loaded into the ring."""

    ringed = True

    def __init__(self, config: HopperConfig, given: Input, roomy: bool, by_matrix: bool) -> None:
        """`by_matrix`: whether D's elements have 16 bits, as the operand's then have."""
        super().__init__(config, given, roomy)
        self.by_matrix = by_matrix

    def fragment(self, address, row_bytes: int):
        """As `StagedC.fragment`; where D is of 32 bits, of one block of 8 columns, of two rows 8 apart."""
        if self.by_matrix:
            return _as_fragment(_load_matrices(address, ".trans" if self.swapped else ""), self.dtype)
        words: list[Any] = []
        for r in range(2):
            place = address + 8 * r * row_bytes
            if self.dtype.width == 16:
                load = "ld.shared.b32 {$w0}, [{$r0}];"
                words.append(cute.arch.inline_ptx(load, write_only_types=[Int32], read_only_args=[place]))
                continue
            load = "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];"
            words += cute.arch.inline_ptx(load, write_only_types=[Int32] * 2, read_only_args=[place])
        return _as_fragment(words, self.dtype)


def _load_matrices(address, turn: str):
    """ldmatrix of two blocks of 8 columns: four words."""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{turn}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def _as_fragment(found, dtype):
    """Words as numbers."""
    words = cute.make_rmem_tensor(len(found), Int32)
    for q, word in enumerate(found):
        words[q] = word
    return cute.recast_tensor(words, dtype)
