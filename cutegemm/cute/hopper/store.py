"""Epilogues of the Hopper kernel: from the accumulators of one warpgroup to D. Each warpgroup works for itself.

A WGMMA leaves 64 rows in a warpgroup, 16 a warp. Thread `lane` of warp `w` holds, for each block of 8 columns j,

    rows 16 w + lane / 4 + 8 r (r = 0, 1), columns 8 j + 2 (lane % 4) + c (c = 0, 1)    in accumulator (c, r, j)

`TmaEpilogue` sends 16-bit results through stmatrix and a TMA store, the classes of `plain_store` others through plain
shared stores and TMA; `terms` adds C and the bias. `slab_store.SlabStore` takes everything else. With swapped operands
the rows of the accumulators are columns of D: the classes named `Transposed` turn them on the way into shared memory.

Of a gated program a thread holds gate and up of the same place of D: half of a tile's columns further on ("halves"),
with swapped operands half of a warpgroup's blocks of 64 rows, or side by side ("pairs"), in accumulators c = 0 and 1.
Then it holds one result in each row of a block of 8 columns, which are 4 of D. With swapped operands pairs lie in lanes
4 apart, which exchange half of their accumulators (`plain_store.TransposedPairsEpilogue`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Vector
from cutlass.cute.nvgpu import cpasync

from cutegemm.cute import types, whole
from cutegemm.cute.hopper import clip, grouping, terms
from cutegemm.cute.hopper.ahead import Ahead
from cutegemm.cute.hopper.config import BLOCK_ROWS, WARPGROUP, HopperConfig
from cutegemm.cute.hopper.memory import SharedMemory
from cutegemm.cute.hopper.output import Output
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.reduce import make_reductions
from cutegemm.cute.hopper.slab_store import up_offset
from cutegemm.cute.lowering import finish, rounded
from cutegemm.cute.source import sources, strides
from cutegemm.problem import Signature
from cutegemm.problem.program.graph import Node


def swizzle_bits(row_bytes: int) -> int:
    """log2 of the 16-byte pieces of a row. Rows of 128, 64, 32 bytes repeat their swizzle every 1024, 512, 256."""
    return (row_bytes // 16).bit_length() - 1


class TmaEpilogue:
    """The epilogue's program, rounded once, stored 64 rows x `columns` at a time.

    A warpgroup has two staging buffers for each result, or one. Before it fills one it makes sure that the store that
    last read it is done reading; nobody waits for stores to reach memory, so they overlap the next tile. All results
    have the first one's itemsize; they are computed together and fill buffers of the same number.
    """

    turn = ""
    """stmatrix's modifier that transposes each 8x8 matrix."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self.config, self.signature = config, signature
        self.block_rows = config.block_rows(signature)
        self.blocks = config.out_blocks(signature)
        self.block_step = config.block_step // BLOCK_ROWS * self.block_rows
        self.out_columns, self.up = config.out_columns(signature), up_offset(config, signature)
        self.clipped = grouping.clips_results(signature.work)
        self.results = [(number, name, types.NUMERIC[dtype]) for number, name, dtype, _ in signature.results]
        self.out_type = types.NUMERIC[signature.out_dtype]
        self.program, self.gated = whole.program_of(signature), signature.epilogue.gating is not None
        self.read = whole.reader(signature)
        # Results that a thread has of a block of 8 columns, which are `block` of results.
        self.neighbours, self.rows = terms.own_shape(config, signature)
        self.block = 4 * self.neighbours
        self.itemsize = self.out_type.width // 8
        self.columns = config.store_columns(self.itemsize, signature)
        self.row_bytes = self.itemsize * self.columns
        self.buffer_bytes = self.block_rows * self.row_bytes
        # A warpgroup's buffers of one result; those of the next follow.
        self.result_bytes = config.store_buffers * self.buffer_bytes
        self.group_bytes = len(self.results) * self.result_bytes
        self.sources = sources(signature)
        self.vectors = terms.make_vectors(config, signature)
        self.matrices = terms.make_matrices(config, signature)
        self.reductions = make_reductions(config, signature)
        self.staged = next((each for each in self.matrices.values() if each.staged), None)
        plan = config.through_ring(signature)
        self.ahead: Any = None if plan is None else Ahead(config, signature, plan, self)

    @property
    def swizzle_bits(self) -> int:
        """Of a staging buffer."""
        return swizzle_bits(self.row_bytes)

    def narrowed(self, columns: int) -> TmaEpilogue:
        """The same for the first so many columns of a tile, of accumulators of their own.

        What it keeps in shared memory lies where that of the whole tile does: another warpgroup may have a tile of
        another width at the same time.
        """
        found = type(self)(replace(self.config, bn=columns), self.signature)
        for name, vector in found.vectors.items():
            vector.stride = self.vectors[name].stride
        return found

    def box(self) -> tuple[int, int]:
        """(rows, columns) of D in one staging buffer."""
        return BLOCK_ROWS, self.columns

    def block_of(self, row, column) -> tuple:
        """(row, column) in boxes of the box whose first accumulator is (row, column) of the multiplication."""
        return row // BLOCK_ROWS, column // self.columns

    def buffer_layout(self, itemsize: int = 0):
        """The shared layout of one staging buffer, as TMA's swizzle has it; or of elements of another size."""
        width, size = self.row_bytes // self.itemsize, itemsize or self.itemsize
        atom = cute.make_composed_layout(
            cute.make_swizzle(swizzle_bits(width * size), 4, 3), 0, cute.make_layout((8, width), stride=(width, 1))
        )
        return cute.tile_to_shape(atom, self.box(), order=(0, 1))

    def make_atoms(self, args) -> tuple:
        """(copy atom, coordinate tensor) of TMA stores into each result, (m, n) row-major. On the host."""
        step = 16 // self.itemsize
        store = cpasync.CopyBulkTensorTileS2GOp()
        found, columns = [], args.n // 2 if self.gated else args.n
        for _, name, _ in self.results:
            row, matrix = (cute.assume(each, divby=step) for each in strides(args, name))
            layout = clip.results((args.m, columns, args.batch), (row, 1, matrix), step, self.clipped)
            tensor = cute.make_tensor(getattr(args, name), layout)
            found.append(cpasync.make_tiled_tma_atom(store, tensor, self.buffer_layout(), self.box()))
        return tuple(found)

    def start(self, output: Output, memory: SharedMemory, position: Position) -> None:
        """Binds to a launch's output, to the staging buffers of this warpgroup, and to this thread."""
        group, thread = position.group, position.own_thread
        self.args = output.args
        base = memory.staging + group * self.group_bytes
        self.copies = [
            self._copy(atom, tensor, base + number * self.result_bytes if number else base, self.results[number][2])
            for number, (atom, tensor) in enumerate(output.stores)
        ]
        self.barrier = position.group_barrier
        self.warp = cute.arch.make_warp_uniform(thread // 32)
        self.lane = thread % 32
        self.base = base.toint()
        self._start_addresses(self.base, self.lane)
        for vector in self.vectors.values():
            vector.start(memory.staging + self.config.consumers * self.group_bytes, group, thread)
        if self.staged is not None:
            self.staged.start(self.base, self.row_bytes, self.swizzle_bits, self.warp, self.lane)

    def _copy(self, atom, tensor, base, dtype) -> tuple:
        """(atom, buffers in shared memory from `base` on, tiles) of the stores into one result."""
        layout = self.buffer_layout()
        staged = cute.append(
            layout.outer, cute.make_layout(self.config.store_buffers, stride=self.buffer_bytes // self.itemsize)
        )
        pointer = cute.recast_ptr(base, layout.inner, dtype=dtype)
        tiles = clip.boxes(tensor, self.box(), self.clipped)
        shared, target = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(pointer, staged), 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        return atom, shared, target

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
    def store(self, accumulators, region):
        """Stores the warpgroup's blocks of 64 rows of a tile."""
        per_block = self.out_columns // self.columns
        parts = [(i, part) for i in range(self.blocks) for part in range(per_block)]
        # The first barrier below lies between the bias and its readers, the last between them and the next tile's.
        self._start_terms(region)
        fetched = self._fetch(self.box_corner(0, 0, region))
        for number in cutlass.range_constexpr(len(parts)):
            i, part = parts[number]
            buffer = number % self.config.store_buffers
            if self.warp == 0:
                # Of the stores before, one for each other buffer may still read; where a tile does not end with the
                # last buffer, its first store waits for all, which are long done.
                others = self.config.store_buffers - 1
                in_turn = len(parts) % self.config.store_buffers == 0 and not self.config.fits
                cute.arch.cp_async_bulk_wait_group(others if in_turn else min(number, others), read=True)
            cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
            corner = self.box_corner(i, part, region)
            after = parts[number + 1] if cutlass.const_expr(number + 1 < len(parts)) else None
            fetched = self._settle(fetched, corner, after, buffer, region)
            self._begin_reductions(part)
            if cutlass.const_expr(self.ahead is not None):
                self.ahead.wait(number, self.base + buffer * self.buffer_bytes)
            self._stage(accumulators, corner, i, part, buffer)
            self._end_reductions(i, part, per_block)
            cute.arch.fence_proxy("async.shared", space="cta")
            if cutlass.const_expr(self.ahead is not None):
                self.ahead.release(number)
            cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
            if self.warp == 0:
                place = self._place(i, part, region)
                for result in cutlass.range_constexpr(len(self.copies)):
                    atom, shared, target = self.copies[result]
                    cute.copy(atom, shared[None, buffer], target[place])
                cute.arch.cp_async_bulk_commit_group()

    def _place(self, i: int, part: int, region) -> tuple:
        if self.clipped:
            return None, *clip.place(self.box_corner(i, part, region), region.matrix, region.m)
        block = self.block_of(region.row + i * self.block_step, region.column + part * self.columns)
        return None, *block, region.matrix

    def place_of(self, step: int, region) -> tuple:
        """(row, column) of the box of that step of `store` among the boxes of a matrix (`clip.boxes`)."""
        i, part = divmod(step, self.out_columns // self.columns)
        if self.clipped:
            return self.box_corner(i, part, region)
        return self.block_of(region.row + i * self.block_step, region.column + part * self.columns)

    def box_corner(self, i: int, part: int, region) -> tuple:
        """(row, column) of D where a staging buffer's box begins."""
        return region.row + i * self.block_step, region.column + part * self.columns

    def own_corner(self, corner: tuple) -> tuple:
        """(row, column) of D of this thread's first accumulator in the box that begins at `corner`."""
        return corner[0] + self._own_row(), corner[1] + self.neighbours * (self.lane % 4)

    def _own_row(self):
        return terms.own_row(self.warp, self.lane, self.rows)

    def _start_terms(self, region) -> None:
        """Binds the operands to a tile."""
        self.region = region
        for name, source in self.sources.items():
            source.start(self.args, region.matrix)
            if name in self.vectors:
                extent = region.n if source.given.n else region.m
                self.vectors[name].load(source, region.row, region.column, self.block_step, extent)
            elif name in self.matrices:
                self.matrices[name].bind(source, region.m, region.n)

        for reduction in self.reductions:
            reduction.start(self.args, region, self.warp, self.lane)

    def _begin_reductions(self, part: int) -> None:
        for reduction in self.reductions if part == 0 else ():
            reduction.begin()

    def _end_reductions(self, block: int, part: int, parts: int) -> None:
        for reduction in self.reductions if part == parts - 1 else ():
            reduction.end(block)

    def _fetch(self, corner: tuple):
        """Pieces of a matrix operand that are loaded ahead for the box at `corner`; None where there are none."""
        return self.staged.fetch(corner) if self.staged is not None and self.staged.ahead else None

    def _settle(self, fetched, corner, after, buffer, region):
        """Writes the staged matrix of this box to its buffer; returns the pieces fetched for the box `after`."""
        if self.staged is None:
            return None
        if not self.staged.ahead:
            self.staged.bring(corner, buffer * self.buffer_bytes)
            return None
        self.staged.stage(fetched, buffer * self.buffer_bytes)
        return None if after is None else self._fetch(self.box_corner(after[0], after[1], region))

    def _values(self, accumulators, corner, i, part, first, count, address):
        """Results of `count` blocks of 8 columns from block `first` of a buffer, rounded: (c, r, j), c fastest."""
        finished, results = self._finished(accumulators, corner, i, part, first, count, address), []
        for reduction in self.reductions:
            reduction.add(finished[reduction.number], corner, self.own_corner(corner), first, count)
        size = self.rows * self.neighbours * count
        for number, _, dtype in self.results:
            result = cute.make_rmem_tensor(size, dtype)
            result.store(rounded(finished[number], dtype, size))
            results.append(result)
        return results

    def _finished(self, accumulators, corner, i, part, first, count, address):
        """Results of `count` blocks of 8 columns before rounding, in fp32: a vector for each result of the program.

        `corner`: (row, column) of D where the buffer's box begins. `address`: where this lane's matrix row of a staged
        operand stands, and where that of the result will stand.
        """
        size, block = self.rows * self.neighbours * count, part * (self.columns // self.block) + first
        sums = self._sums(accumulators.iterator + (i * (self.config.bn // 2) + 4 * block), size)
        # A staged operand is read before the program, whose first results may be waited for.
        staged = {
            name: matrix.fragment(address) if matrix.staged
            else matrix.fragment(self.ahead.address(name, address), self.ahead.row_bytes) if matrix.ringed
            else matrix.fragment(self.own_corner(corner), first, count, self.columns // 8)
            for name, matrix in self.matrices.items()
        }  # fmt: skip

        def leaf(node: Node) -> Any:
            if node.op == "acc":
                # One by one: loaded as a vector, they would be vectors in the main loop too.
                held = sums[1 if node.attribute else 0]
                values = Vector.from_elements([held[q] for q in range(size)], Float32)
                return self.read(cute.TensorSSA(values, size, Float32))
            if node.op != "input":
                return self._index(node.op, corner, first, size)
            assert isinstance(node.attribute, int)
            given = self.program.inputs[node.attribute]
            if given.by_value:
                return getattr(self.args, given.name)
            source = self.sources[given.name]
            if given.name in staged:
                return staged[given.name].load().to(source.wide)
            if given.name in self.vectors:
                return self.vectors[given.name].fragment(i, block, count)
            return source.number(0, 0)

        each = self.rows * self.neighbours
        rows = [q % 2 + q // each * 2 if self.config.swapped else q // self.neighbours % 2 for q in range(size)]
        return finish(self.program, size, leaf, rows)

    def _sums(self, begin, size: int) -> list[Any]:
        """The `size` accumulators of a thread's results from `begin` on; of a gated program those of gate and of up."""
        layout = cute.make_layout(size, stride=2 // self.neighbours)
        return [cute.make_tensor(begin + offset, layout) for offset in ((0, self.up) if self.gated else (0,))]

    def _index(self, axis: str, corner, first, size) -> Any:
        """Indices of the elements of `_values`."""
        if axis == "matrix":
            return Int32(self.region.matrix)
        values, own = cute.make_rmem_tensor(size, Int32), self.own_corner(corner)
        for q in range(size):
            j, r, c = q // (self.rows * self.neighbours), q // self.neighbours % self.rows, q % self.neighbours
            across, down = self.block * (first + j) + c, 8 * r
            row, column = (across, down) if self.config.swapped else (down, across)
            values[q] = Int32(own[0] + row if axis == "row" else own[1] + column)
        return values.load()

    def _stage(self, accumulators, corner, i, part, buffer) -> None:
        """Finishes this thread's values of one staging buffer and stores them with stmatrix, 16 columns at a time, and
        the last 8 where there are such."""
        for first in range(0, self.columns // 8, 2):
            count = min(2, self.columns // 8 - first)
            address = self._address(first // 2) + buffer * self.buffer_bytes
            for number, result in enumerate(self._values(accumulators, corner, i, part, first, count, address)):
                words = cute.recast_tensor(result, Int32)
                place = address + number * self.result_bytes if number else address
                taken = ", ".join(f"{{$r{1 + q}}}" for q in range(2 * count))
                cute.arch.inline_ptx(
                    f"stmatrix.sync.aligned.m8n8.x{2 * count}{self.turn}.shared.b16 [{{$r0}}], {{{taken}}};",
                    read_only_args=[place, *(words[q] for q in range(2 * count))],
                )

    @cute.jit
    def finish(self):
        """Waits until TMA has read the last buffers: shared memory must outlive its readers."""
        if self.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class TransposedTmaEpilogue(TmaEpilogue):
    """The same for swapped operands: a buffer holds `columns` rows of D, which are `block_rows` columns wide."""

    turn = ".trans"

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        super().__init__(config, signature)
        self.row_bytes = self.itemsize * self.block_rows

    def box(self) -> tuple[int, int]:
        return self.columns, self.block_rows

    def block_of(self, row, column) -> tuple:
        return column // self.columns, row // self.block_rows

    def box_corner(self, i, part, region) -> tuple:
        return region.column + part * self.columns, region.row + i * self.block_step

    def own_corner(self, corner: tuple) -> tuple:
        return corner[0] + 2 * (self.lane % 4), corner[1] + self._own_row()

    def _start_addresses(self, base, lane) -> None:
        # Matrix l / 8 holds accumulator rows 8 (l / 8 % 2) .. of this warp, which are 8 columns of D: one 16-byte
        # piece.
        row = (lane & 7) + 8 * (lane >> 4)
        piece = 2 * self.warp + ((lane >> 3) & 1)
        self.row_address = base + row * self.row_bytes + ((piece ^ (lane & 7)) << 4)

    def _address(self, pair: int):
        return self.row_address + pair * 16 * self.row_bytes
