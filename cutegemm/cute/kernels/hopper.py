"""GEMM on Hopper: TMA -> ring of shared tiles -> WGMMA, by warps with roles (fp16, bf16, tf32).

    warpgroup W (last)   one warp of it loads: TMA brings k tiles of A and B into the ring     few registers
    warpgroups 0 .. W-1  multiply (WGMMA reads shared memory itself) and store their rows      many registers

A CTA stays and computes tile after tile; both roles walk the same tiles in the same order and meet only at the
barriers of the ring (`hopper_pipeline`), so that the loads of the next tile run under the last multiplications and the
epilogue of this one:

    producer     | load tile 0 .......... | load tile 1 ..........      | load tile 2 ...
    cooperative    | WGMMA tile 0 ......... | store | WGMMA tile 1 .........| store |
    ping-pong  0   | WGMMA tile 0 | store          | WGMMA tile 2 | store
               1                  | WGMMA tile 1 | store            | WGMMA tile 3 |

Cooperative warpgroups share a tile by blocks of 64 rows; in ping-pong each has a tile of its own and one stores while
the other multiplies. One WGMMA group is kept in flight: the stage before is released when the next one has been
issued. The first WGMMA of a tile overwrites the accumulators.

In a cluster of CM x CN CTAs the CTAs of a row need the same tile of A: each loads a share and multicasts it to the
row, and likewise B along the columns. So every CTA's full barrier counts whole tiles, whoever sent them.

With split-K a tile's k tiles are divided among works, for whatever CTA takes one (`hopper_split`); in a cluster along K
among CTAs that meet in shared memory (`hopper_cluster_sum`). The epilogue adds C and the bias in registers and stores
by TMA wherever D allows (`hopper_epilogue`).

Edges: TMA writes zeros for what lies beyond the operands; the epilogue stores what lies in D. K = 0: a tile beyond K.

README.md beside this package follows a tile from one end to the other: roles, barriers, phases, timeline.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_ptr

from cutegemm.cute import tile_order, types
from cutegemm.cute.epilogue import Operands
from cutegemm.cute.hopper_config import BLOCK_ROWS, WARPGROUP, HopperConfig
from cutegemm.cute.kernels import hopper_mma
from cutegemm.cute.kernels.base import Gemm
from cutegemm.cute.kernels.hopper_cluster_sum import ClusterSum
from cutegemm.cute.kernels.hopper_epilogue import make_store
from cutegemm.cute.kernels.hopper_fragment import FragmentStore
from cutegemm.cute.kernels.hopper_pipeline import Ring, Turns, advance, skip
from cutegemm.cute.kernels.hopper_producer import ProducerRole
from cutegemm.cute.kernels.hopper_solo import SoloRole
from cutegemm.cute.kernels.hopper_split import make_sum
from cutegemm.cute.kernels.hopper_stream import PartJoin, Stretches
from cutegemm.problem import Signature


class HopperGemm(ProducerRole, SoloRole, Gemm):
    """See the module docstring. The entry's arguments are those of `base.Gemm`, and the number of clusters."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self.config = config
        self.signature = signature
        self.ab_type = types.NUMERIC[signature.dtype]
        self.itemsize = self.ab_type.width // 8
        self.operand_type = hopper_mma.operand_type(self.ab_type)
        self.tile_order = tile_order.parse(config.order)
        # "a" and "b" are the WGMMA's operands: those of the problem, or exchanged.
        k_major = (signature.a_major == "k", signature.b_major == "k")
        self.a_k_major, self.b_k_major = reversed(k_major) if config.swapped else k_major
        self.cluster_size = config.cluster_ctas
        readers = 1 if config.ping_pong else config.consumers
        self.ring = Ring(
            config.stages, config.stage_bytes(signature), readers, config.cluster, every_thread="fat" in config.options
        )
        self.turns = Turns()
        self.tma_store = config.uses_tma_store(signature)
        self.rows_out = make_store(config, signature)
        # A warpgroup's blocks of 64 rows lie apart by those of its fellows.
        self.blocks = config.group_rows // BLOCK_ROWS
        self.block_step = BLOCK_ROWS if config.ping_pong else BLOCK_ROWS * config.consumers
        if config.parts > 1:
            fragments = FragmentStore(config, signature, self.block_step)
            if config.cluster_k > 1:
                self.cluster_sum = ClusterSum(config, fragments)
            if config.splits > 1:
                self.split_sum = make_sum(config, self.cluster_sum if config.cluster_k > 1 else fragments)
        self.stretches = Stretches()
        self.part_join = PartJoin(config.accumulators // 4)

    def fake_arguments(self) -> tuple:
        workspace = make_ptr(Float32, 16, cute.AddressSpace.gmem, assumed_align=16)
        return (*super().fake_arguments(), Int32(1), workspace)

    # -- host -------------------------------------------------------------------------------------------------------
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
        clusters: Int32,
        workspace: cute.Pointer,
    ):
        """D = act(alpha A B + beta C + bias) for (m, n, k) and `batch` matrices; strides in elements."""
        config = self.config
        cm, cn = config.cluster
        layout_a, layout_b = self.stage_layout(config.bm, self.a_k_major), self.stage_layout(config.bn, self.b_k_major)
        rows, columns = m, n
        if cutlass.const_expr(config.swapped):
            rows, columns = n, m
            a, b, lda, ldb, a_batch, b_batch = b, a, ldb, lda, b_batch, a_batch
        atom_a, tensor_a = self._load_atom(a, rows, k, lda, a_batch, batch, self.a_k_major, layout_a, config.bm, cn)
        atom_b, tensor_b = self._load_atom(b, columns, k, ldb, b_batch, batch, self.b_k_major, layout_b, config.bn, cm)
        atom_d, tensor_d = None, None
        if cutlass.const_expr(self.tma_store):
            atom_d, tensor_d = self.rows_out.make_atom(d, m, n, ldd, d_batch, batch)
        tiles_m = cute.ceil_div(rows, config.bm * cm)
        tiles_n = cute.ceil_div(columns, config.bn * cn)
        self.kernel(
            atom_a, tensor_a, atom_b, tensor_b, atom_d, tensor_d, c, bias, d, alpha, beta, m, n, k, batch,
            tiles_m, tiles_n,
            clusters, workspace, a_batch, b_batch, ldd, d_batch, c_row, c_col, c_batch,
        ).launch(
            grid=(clusters * self.cluster_size, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(self.cluster_size, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl="pdl" in config.options,
        )  # fmt: skip

    def stage_layout(self, extent: int, k_major: bool):
        """The shared layout (extent, bk) of an operand tile: the widest swizzle that divides its contiguous side."""
        bk = self.config.bk
        span = (bk if k_major else extent) * self.itemsize
        bits = next(bits for bits in (3, 2, 1) if span % (16 << bits) == 0)
        width = (16 << bits) // self.itemsize
        lines = (
            cute.make_layout((8, width), stride=(width, 1))
            if k_major
            else cute.make_layout((width, 8), stride=(1, width))
        )
        atom = cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, lines)
        return cute.tile_to_shape(atom, (extent, bk), order=(0, 1) if k_major else (1, 0))

    def _load_atom(self, pointer, rows, k, leading, batch_stride, batch, k_major, layout, extent, sharers):
        """(copy atom, coordinate tensor) of an operand as (rows, k, matrices); `sharers` CTAs load a tile together."""
        step = 16 // self.itemsize
        leading = cute.assume(leading, divby=step)
        batch_stride = cute.assume(batch_stride, divby=step)
        strides = (leading, 1, batch_stride) if k_major else (1, leading, batch_stride)
        # A descriptor has no empty dimensions; with K = 0 nothing of this one element is read.
        shape = (rows, cutlass.max(k, Int32(1)), batch)
        tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))
        return hopper_mma.tma_load(tensor, layout, (extent, self.config.bk), sharers)

    def _tiled_mma(self):
        op = hopper_mma.operation(self.ab_type, self.config.bn, self.a_k_major, self.b_k_major)
        sharers = 1 if self.config.ping_pong else self.config.consumers
        return cute.make_tiled_mma(cute.make_mma_atom(op), (sharers, 1, 1))

    # -- device -----------------------------------------------------------------------------------------------------
    @cute.kernel
    def kernel(
        self,
        atom_a: cute.CopyAtom,
        tensor_a: cute.Tensor,
        atom_b: cute.CopyAtom,
        tensor_b: cute.Tensor,
        atom_d: cute.CopyAtom | None,
        tensor_d: cute.Tensor | None,
        c: cute.Pointer,
        bias: cute.Pointer,
        d: cute.Pointer,
        alpha: Float32,
        beta: Float32,
        m: Int32,
        n: Int32,
        k: Int32,
        batch: Int32,
        tiles_m: Int32,
        tiles_n: Int32,
        clusters: Int32,
        workspace: cute.Pointer,
        a_batch: Int64,
        b_batch: Int64,
        ldd: Int64,
        d_batch: Int64,
        c_row: Int64,
        c_col: Int64,
        c_batch: Int64,
    ):
        """One CTA: set up the barriers, then take a role."""
        config = self.config
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        warp = cute.arch.make_warp_uniform(thread // 32)
        block = cute.arch.block_idx()[0]
        rank = block % self.cluster_size
        self.cluster_row, self.cluster_column = rank % config.cluster[0], rank // config.cluster[0]
        first = None
        if cutlass.const_expr(config.cluster_k > 1):
            plane = config.cluster[0] * config.cluster[1]
            self.cluster_column = self.cluster_column % config.cluster[1]
            self.k_rank = rank // plane
            first = self.k_rank * plane
        self.cluster = block // self.cluster_size
        self.tiles_m, self.tiles_n = tiles_m, tiles_n
        # This cluster's works: a tile each, or one of its splits, or with stream-K an item of its stretch.
        self.first_work, self.works, self.work_step = self.cluster, tiles_m * tiles_n * batch * config.splits, clusters
        self.rank = rank
        self.m, self.n, self.k = m, n, k
        self.all_k_tiles = cute.ceil_div(k, config.bk)
        if cutlass.const_expr(config.stream_k):
            k_tiles = cutlass.max(self.all_k_tiles, Int32(1))
            self.first_work, self.work_step = Int32(0), Int32(1)
            self.works = self.stretches.start(self.works, clusters, self.cluster, k_tiles)
        self.operands = Operands(c, bias, d, alpha, beta, ldd, d_batch, c_row, c_col, c_batch)

        memory = cutlass.memory.SmemAllocator().allocate(config.smem_bytes(self.signature), byte_alignment=1024)
        ring_bytes = config.stages * config.stage_bytes(self.signature)
        epilogue_memory = memory + ring_bytes
        barriers = epilogue_memory + config.epilogue_bytes(self.signature)
        self.ring.start(barriers, self.cluster_row, self.cluster_column, first)
        self.turns.start(barriers + 2 * config.stages * 8)
        scratch = barriers + 2 * config.stages * 8 + 16
        meeting = scratch + 16
        shared_a = self._shared(memory, config.bm, self.a_k_major)
        shared_b = self._shared(
            memory + config.stages * config.bm * config.bk * self.itemsize, config.bn, self.b_k_major
        )

        if warp == 0:
            cpasync.prefetch_descriptor(atom_a)
            cpasync.prefetch_descriptor(atom_b)
            with cute.arch.elect_one():
                self.ring.initialize()
                if cutlass.const_expr(config.ping_pong):
                    self.turns.initialize()
                if cutlass.const_expr(config.cluster_k > 1):
                    self.cluster_sum.initialize(meeting)
            cute.arch.mbarrier_init_fence()
        self._meet()
        if cutlass.const_expr("pdl" in config.options):
            # Nothing before this line reads or writes what an earlier kernel may still be working on.
            cute.arch.griddepcontrol_wait()
            # The next kernel's CTAs may take this one's places as they fall free; they wait in the same way.
            cute.arch.griddepcontrol_launch_dependents()

        if cutlass.const_expr(config.solo):
            self.start_store(atom_d, tensor_d, epilogue_memory, group, thread)
            self.work_alone(atom_a, tensor_a, shared_a, atom_b, tensor_b, shared_b, a_batch, b_batch, thread)
            self.rows_out.finish()
        else:
            if group == config.consumers:
                if cutlass.const_expr(config.registers is not None):
                    cute.arch.setmaxregister_decrease(config.registers[0])
                if warp == config.consumers * 4:
                    self.produce(atom_a, tensor_a, shared_a, atom_b, tensor_b, shared_b, a_batch, b_batch)
            else:
                if cutlass.const_expr(config.registers is not None):
                    cute.arch.setmaxregister_increase(config.registers[1])
                if cutlass.const_expr(config.stream_k):
                    cuts = clusters * (self.cluster_size * config.consumers)
                    self.part_join.start(workspace, cuts, scratch, group, thread % WARPGROUP)
                if cutlass.const_expr(config.cluster_k > 1):
                    self.cluster_sum.start(memory, meeting, rank, group, thread % WARPGROUP)
                if cutlass.const_expr(config.splits > 1):
                    shares = self.works // config.splits * (self.cluster_size * config.consumers)
                    self.split_sum.start(workspace, shares, scratch, group, thread % WARPGROUP)
                elif cutlass.const_expr(config.cluster_k == 1):
                    self.start_store(atom_d, tensor_d, epilogue_memory, group, thread)
                self.consume(shared_a, shared_b, group, thread)
                if cutlass.const_expr(config.parts == 1):
                    self.rows_out.finish()

    def start_store(self, atom_d, tensor_d, memory, group, thread) -> None:
        """Binds the epilogue to this thread of a warpgroup."""
        target = (atom_d, tensor_d) if self.tma_store else ()
        self.rows_out.start(*target, memory, group, thread % WARPGROUP)

    def _meet(self) -> None:
        """All threads of the cluster see the barriers initialized."""
        if self.cluster_size > 1:
            # What a relaxed arrival leaves out, the fence of the initialization has done.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def _shared(self, memory, extent: int, k_major: bool):
        """The ring of one operand as a tensor (extent, bk, stages)."""
        layout = self.stage_layout(extent, k_major)
        staged = cute.append(layout.outer, cute.make_layout(self.config.stages, stride=extent * self.config.bk))
        return cute.make_tensor(cute.recast_ptr(memory, layout.inner, dtype=self.operand_type), staged)

    def place(self, tile):
        """(tile row, tile column, matrix) of this CTA's tile of cluster tile `tile`."""
        tiles = self.tiles_m * self.tiles_n
        matrix = tile // tiles
        row, column = self.tile_order.coordinates(tile - matrix * tiles, self.tiles_m, self.tiles_n)
        cm, cn = self.config.cluster
        return row * cm + self.cluster_row, column * cn + self.cluster_column, matrix

    @cute.jit
    def part(self, work):
        """(cluster tile, first k tile, how many) of `work`; one k tile beyond K where there is nothing to sum.

        Parts of K take its tiles by turns: CTAs side by side then read the same DRAM pages.
        """
        tile, first, count = work, Int32(0), self.all_k_tiles
        if cutlass.const_expr(self.config.stream_k):
            tile, first, count = self.stretches.item(work)
        elif cutlass.const_expr(self.config.parts > 1):
            tile = work // self.config.splits
            part = work - tile * self.config.splits
            if cutlass.const_expr(self.config.cluster_k > 1):
                part = part * self.config.cluster_k + self.k_rank
            first = part
            count = (self.all_k_tiles - part + (self.config.parts - 1)) // self.config.parts
        if (count == 0) | (self.all_k_tiles == 0):
            first = self.all_k_tiles + 1
            count = Int32(1)
        return tile, first, count

    @cute.jit
    def consume(self, shared_a, shared_b, group, thread):
        """A consumer warpgroup: for each of its tiles, multiply and store."""
        config = self.config
        mma = self._tiled_mma()
        # A warpgroup's slice of the tiled MMA begins at its first thread; its descriptors are the same for all threads.
        slice_of = mma.get_slice(0 if cutlass.const_expr(config.ping_pong) else group * WARPGROUP)
        fragment_a = mma.make_fragment_A(slice_of.partition_A(shared_a))
        fragment_b = mma.make_fragment_B(slice_of.partition_B(shared_b))
        accumulators = mma.make_fragment_C(slice_of.partition_shape_C((config.bm, config.bn)))
        lane = thread % 32
        row_offset = Int32(0) if cutlass.const_expr(config.ping_pong) else group * BLOCK_ROWS

        stage, phase = Int32(0), Int32(0)
        first, step, done = self.first_work, self.work_step, Int32(0)
        if cutlass.const_expr(config.ping_pong):
            first = first + group * step
            step = 2 * step
            stage, phase = skip(stage, phase, group * self.part(Int32(0))[2], config.stages)
        for work in cutlass.range(first, self.works, step, unroll=1):
            tile, first_k, count = self.part(work)
            tile_row, tile_column, matrix = self.place(tile)
            if cutlass.const_expr(config.ping_pong):
                self.turns.wait(group, done)
            stage, phase = self.multiply(mma, accumulators, fragment_a, fragment_b, stage, phase, count, group, lane)
            if cutlass.const_expr(config.ping_pong):
                stage, phase = skip(stage, phase, count, config.stages)
                done = done + 1
            if cutlass.const_expr(config.cluster_k > 1):
                sums = self.cluster_sum.exchange(accumulators)
            else:
                sums = accumulators
            if cutlass.const_expr(config.splits > 1):
                share = (tile * self.cluster_size + self.rank) * config.consumers + group
                slices = self.split_sum.settle(sums, share, work % config.splits)
                state = self.split_sum.leave(share)
                for number in cutlass.range(config.splits, unroll=1):
                    if (slices >> number) & 1 == 1:
                        self.store_slice(share, number, tile_row, tile_column, matrix, row_offset)
                self.split_sum.clear(share, state)
            elif cutlass.const_expr(config.stream_k):
                complete = Int32(1)
                if count != self.stretches.k_tiles:
                    # A cut lies behind cluster c's last item, before its first one behind cluster c - 1's.
                    part = Int32(0)
                    if first_k != 0:
                        part = Int32(1)
                    cut = (self.cluster - part) * self.cluster_size + self.rank
                    complete = self.part_join.join(accumulators, cut * config.consumers + group, part)
                if complete != 0:
                    self.store(accumulators, tile_row, tile_column, matrix, row_offset)
            elif cutlass.const_expr(config.cluster_k > 1):
                row, column = tile_row * config.bm + row_offset, tile_column * config.bn
                self.cluster_sum.store_all(sums, row, column, matrix, self.m, self.n, self.operands)
            else:
                self.store(accumulators, tile_row, tile_column, matrix, row_offset)

    def store_slice(self, share, number, tile_row, tile_column, matrix, row_offset) -> None:
        """Adds up and stores one slice of this warpgroup's rows of a tile."""
        row, column = tile_row * self.config.bm + row_offset, tile_column * self.config.bn
        self.split_sum.add_up(share, number, row, column, matrix, self.m, self.n, self.operands)

    def store(self, accumulators, tile_row, tile_column, matrix, row_offset) -> None:
        """The epilogue of this warpgroup's rows of a tile."""
        self.rows_out.store(
            accumulators,
            tile_row * self.config.bm + row_offset,
            tile_column * self.config.bn,
            matrix,
            self.m,
            self.n,
            self.operands,
            self.blocks,
            self.block_step,
        )

    @cute.jit
    def multiply(self, mma, accumulators, fragment_a, fragment_b, stage, phase, count, group, lane):
        """The `count` k tiles of one tile; returns where the ring goes on. One WGMMA group stays in flight."""
        overwrite = True
        if cutlass.const_expr("zero" in self.config.options):
            overwrite = False
            accumulators.fill(0.0)
        self.ring.wait(stage, phase)
        warpgroup.fence()
        self._issue(mma, accumulators, fragment_a, fragment_b, stage, overwrite)
        before = stage
        stage, phase = advance(stage, phase, self.config.stages)
        for _ in cutlass.range(count - 1, unroll=1):
            self.ring.wait(stage, phase)
            self._issue(mma, accumulators, fragment_a, fragment_b, stage, False)
            warpgroup.wait_group(1)
            self.ring.release(before, lane)
            before = stage
            stage, phase = advance(stage, phase, self.config.stages)
        if cutlass.const_expr(self.config.ping_pong):
            self.turns.hand_over(group, lane)
        warpgroup.wait_group(0)
        self.ring.release(before, lane)
        return stage, phase

    def _issue(self, mma, accumulators, fragment_a, fragment_b, stage, overwrite: bool) -> None:
        """One k tile's WGMMA as a group; the first of a tile may overwrite the accumulators."""
        for step in range(cute.size(fragment_a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, not (overwrite and step == 0))
            place = (None, None, step, stage)
            cute.gemm(mma, accumulators, fragment_a[place], fragment_b[place], accumulators)
        warpgroup.commit_group()
