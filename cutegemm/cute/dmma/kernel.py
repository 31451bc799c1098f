"""GEMM in IEEE fp64 on the tensor cores: cp.async ring -> 8-byte shared loads -> mma.sync (m8n8k4, m16n8k*).

The ring of stages is that of the other kernels without TMA. A lane (group g of 8, member t of 4) has of the
instructions' operands rows (columns) g and k = t + 4 i, so that a fragment comes element by element, in loads of 8
bytes; ldmatrix moves 16 bits at a time and has nothing for them. The tensor cores take 8 clocks for an m16n8k8 of an
SM's, in which its shared memory could deliver 1 KB: a warp tile of 64 x 32 wants 6 KB for 16 of them.

The first fragments of a stage are loaded before the products of the last step of the stage before, so that the tensor
cores have work while a CTA waits for a stage: with two sets of fragments, the largest warp tiles have room for the
fragments of an m16n8k4 only. (4096^3 on an H200: 2564 us; with m16n8k8 and one set of fragments 2811.)

Both majors have one swizzle: bits 5 and 6 of a byte's offset are XORed with bits 7 and 8. A row of a tile is 128 bytes,
16 elements (a tile that is wider is cut into such blocks), and the 16 lanes whose loads go together have 4 neighbours
in each of 4 rows: 32 bytes each, in four different quarters of the 32 banks.

    K-major   row g, elements t + 4 i       offset(g) ^ 32 i
    else      row t + 4 i, elements g + 8 j   offset(t) ^ 64 j, + 512 i

Products and sums are IEEE operations of fp64, each rounded to nearest. alpha, beta, C and the bias are fp64 too, and a
lane stores what it holds, two neighbours of a row: 64 bytes of a row are stored together.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float64, Int32, Int64

from cutegemm.cute.dmma.config import DmmaConfig
from cutegemm.cute.entry import Gemm
from cutegemm.cute.source import aligned, element
from cutegemm.cute.warps.copy_ring import CopyRing
from cutegemm.cute.warps.tile_load import TileLoader
from cutegemm.problem import Signature

SWIZZLE = (2, 5, 2)
LINE = 128
"""Bytes of a row of a swizzled tile, and elements."""
IN_LINE = LINE // 8


def instruction(rows: int, depth: int) -> str:
    """PTX of one product: A, B and C follow D among the operands."""
    counts = {"w": rows // 4, "a": rows * depth // 32, "b": depth // 4, "c": rows // 4}
    names, number = [], 0
    for kind, count in counts.items():
        first = 0 if kind == "w" else number
        names.append(", ".join(f"{{${'w' if kind == 'w' else 'r'}{first + i}}}" for i in range(count)))
        number += 0 if kind == "w" else count
    operands = ", ".join(f"{{{each}}}" for each in names)
    return f"mma.sync.aligned.m{rows}n8k{depth}.row.col.f64.f64.f64.f64 {operands};"


class Fragments:
    """One operand's part of a stage as a lane reads it.

    Args:
        loader: of the operand. warp: its extent of a warp tile. rows: of the instruction along it.
    """

    def __init__(self, loader: TileLoader, warp: int, rows: int, depth: int) -> None:
        self.loader, self.warp, self.depth = loader, warp, depth
        self.eights, self.blocks = rows // 8, warp // rows
        self.count = self.blocks * self.eights * (depth // 4)

    def start(self, base, warp, lane) -> None:
        """Binds to the ring at shared address `base`, and to warp number `warp` along the operand."""
        group, member = lane // 4, lane % 4
        first = warp * self.warp
        if self.loader.k_major:
            row = first + group
            self.place = row * LINE + ((member * 8) ^ ((group & 3) << 5))
        else:
            block = first // IN_LINE * (self.loader.bk * LINE)
            self.place = block + member * LINE + ((group * 8) ^ (member << 5))
        self.base = base

    def load(self, stage_base, step: int) -> list[list[Any]]:
        """For each block of the instruction's rows its registers, at k step `step` of the stage."""
        return [
            [
                self._element(stage_base, block * self.eights + eight, step * self.depth // 4 + four)
                for four in range(self.depth // 4)
                for eight in range(self.eights)
            ]
            for block in range(self.blocks)
        ]

    def _element(self, stage_base, eight: int, four: int) -> Any:
        """The lane's element of 8 rows number `eight` of the warp's, and 4 k number `four` of the stage."""
        if self.loader.k_major:
            flip, further = four % 4 * 32, eight * 8 * LINE + four // 4 * (self.loader.extent * LINE)
        else:
            flip, further = eight % 2 * 64, eight // 2 * (self.loader.bk * LINE) + four * 4 * LINE
        address = stage_base + ((self.place ^ flip) + further)
        return cute.arch.inline_ptx(
            "ld.shared.f64 {$w0}, [{$r0}];", write_only_types=[Float64], read_only_args=[address]
        )


class DmmaGemm(Gemm):
    """The fp64 kernel on the tensor cores: a ring filled by cp.async, fragments element by element, mma.sync."""

    def __init__(self, config: DmmaConfig, signature: Signature) -> None:
        super().__init__(config, signature)
        rows, depth = config.step
        self.ptx = instruction(rows, depth)
        self.a = self._operand(signature.a_major == "k", config.bm, signature.align_a)
        self.b = self._operand(signature.b_major == "k", config.bn, signature.align_b)
        self.ring = CopyRing(self.a, self.b, config.stages)
        self.rows = Fragments(self.a, config.wm, rows, depth)
        self.columns = Fragments(self.b, config.wn, 8, depth)

    def _operand(self, k_major: bool, extent: int, align: int) -> TileLoader:
        return TileLoader(self.ab_type, extent, self.config.bk, k_major, align, self.config.threads, SWIZZLE)

    @cute.jit
    def compute_tile(self, a, b, lda, ldb, m, n, k, row, column):
        config = self.config
        rows, depth = config.step
        tid = cute.arch.thread_idx()[0]
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        warp_m, warp_n = warp // config.warps[1], warp % config.warps[1]
        memory = cutlass.memory.SmemAllocator().allocate(config.smem_bytes(self.signature), byte_alignment=1024)
        self.ring.start(memory, a, b, lda, ldb, m, n, k, row, column, tid, self.await_front)
        self.rows.start(self.ring.base_a, warp_m, lane)
        self.columns.start(self.ring.base_b, warp_n, lane)

        blocks_m, blocks_n, held = self.rows.blocks, self.columns.blocks, rows // 4
        accumulators = cute.make_rmem_tensor((held, blocks_m, blocks_n), Float64)
        accumulators.fill(0.0)
        steps = config.bk // depth
        read, write = Int32(0), Int32(config.stages - 1)
        cute.arch.cp_async_wait_group(config.stages - 2)
        cute.arch.sync_threads()
        # The first fragments of a stage, loaded before the products of the last step of the stage before.
        ahead = cute.make_rmem_tensor(self.rows.count + self.columns.count, Float64)
        self._keep(ahead, self._load(read, 0))
        for k_tile in cutlass.range(self.ring.k_tiles, unroll=1):
            following = self._kept(ahead)
            for step in cutlass.range_constexpr(steps):
                fragments = following
                if cutlass.const_expr(step == 0):
                    self.ring.copy(k_tile + config.stages - 1, write)
                    cute.arch.cp_async_commit_group()
                    write = write + 1
                    if write == config.stages:
                        write = Int32(0)
                if cutlass.const_expr(step == steps - 1):
                    read = read + 1
                    if read == config.stages:
                        read = Int32(0)
                    cute.arch.cp_async_wait_group(config.stages - 2)
                    cute.arch.sync_threads()
                following = self._load(read, (step + 1) % steps)
                self._multiply(accumulators, *fragments)
            self._keep(ahead, following)
        cute.arch.cp_async_wait_group(0)
        self._store(accumulators, row + warp_m * config.wm, column + warp_n * config.wn, lane)

    def _load(self, stage, step: int) -> tuple[list[list[Any]], list[list[Any]]]:
        """The fragments of A and B of a k step of a stage."""
        stage_a = self.ring.base_a + stage * self.a.stage_bytes
        stage_b = self.ring.base_b + stage * self.b.stage_bytes
        return self.rows.load(stage_a, step), self.columns.load(stage_b, step)

    def _keep(self, kept, fragments) -> None:
        elements = [each for of_operand in fragments for block in of_operand for each in block]
        for place, each in enumerate(elements):
            kept[place] = each

    def _kept(self, kept) -> tuple[list[list[Any]], list[list[Any]]]:
        """What `_keep` stored."""
        places = iter(range(self.rows.count + self.columns.count))
        of_a, of_b = (
            [[kept[next(places)] for _ in range(each.count // each.blocks)] for _ in range(each.blocks)]
            for each in (self.rows, self.columns)
        )
        return of_a, of_b

    def _multiply(self, accumulators, of_a: list[list[Any]], of_b: list[list[Any]]) -> None:
        held = self.config.step[0] // 4
        for i, left in enumerate(of_a):
            for j, right in enumerate(of_b):
                sums = [accumulators[q, i, j] for q in range(held)]
                found = cute.arch.inline_ptx(
                    self.ptx, write_only_types=[Float64] * held, read_only_args=[*left, *right, *sums]
                )
                for q in range(held):
                    accumulators[q, i, j] = found[q]

    # -- the epilogue
    @cute.jit
    def _store(self, accumulators, row, column, lane):
        """Stores alpha acc + beta C + bias of a warp tile whose first output is (row, column)."""
        args, rows = self.args, self.config.step[0]
        matrix, _, _ = self._place(self._number(), args.tiles_m, args.tiles_n)
        self.d = args.d + Int64(matrix) * args.d_batch
        if cutlass.const_expr(self.signature.epilogue.c_dtype is not None):
            self.c = args.c + Int64(matrix) * args.c_batch
        own_row, own_column = row + lane // 4, column + lane % 4 * 2
        for i in cutlass.range_constexpr(self.rows.blocks):
            for eight in cutlass.range_constexpr(rows // 8):
                for j in cutlass.range_constexpr(self.columns.blocks):
                    pair = cute.make_rmem_tensor(2, Float64)
                    for q in cutlass.range_constexpr(2):
                        pair[q] = accumulators[2 * eight + q, i, j]
                    self._store_pair(pair, own_row + (i * rows + eight * 8), own_column + j * 8)

    @cute.jit
    def _store_pair(self, pair, row, column):
        place = self.d + (Int64(row) * self.args.ldd + Int64(column))
        if cutlass.const_expr(self.signature.align_d == 16):
            if (row < self.args.m) & (column < self.args.n):
                for q in cutlass.range_constexpr(2):
                    pair[q] = self._finished(pair[q], row, column + q)
                cute.autovec_copy(pair, cute.make_tensor(aligned(place, 16), cute.make_layout(2)))
        else:
            for q in cutlass.range_constexpr(2):
                if (row < self.args.m) & (column + q < self.args.n):
                    cute.make_tensor(place + q, cute.make_layout(1))[0] = self._finished(pair[q], row, column + q)

    def _finished(self, acc, row, column) -> Any:
        args, epilogue = self.args, self.signature.epilogue
        z = args.alpha * acc
        if epilogue.c_dtype:
            z = z + args.beta * element(self.c, Int64(row) * args.c_row + Int64(column) * args.c_col)
        if epilogue.bias_dtype:
            z = z + element(args.bias, Int64(row if epilogue.bias_axis == "m" else column))
        return z
