"""GEMM on Ampere-class tensor cores: cp.async ring -> ldmatrix -> mma.sync (all types but fp64).

Every warp does everything; what overlaps is asynchronous. A CTA holds `stages` k tiles of A and B in shared memory:

    global memory --cp.async--> ring of stages --ldmatrix--> registers (2 k-steps) --mma.sync--> accumulators

Timeline of one k tile (4 k-steps of 16, three stages); each line runs beside the others:

    cp.async   | tile t+2 -> the stage that tile t-1 has left |
    ldmatrix   | step 1 | step 2 | step 3 | wait for tile t+1; its step 0 |
    mma.sync   | step 0 | step 1 | step 2 | step 3                       |

So a fragment is loaded one k-step before it is used, and a tile stages-1 tiles before. One barrier a k tile does both
jobs: it publishes tile t+1 (each thread has waited for its own copies) and it says that no warp reads tile t-1 any
more. Shared tiles are XOR-swizzled so that the eight rows of an ldmatrix lie in different banks (`swizzle_of`).

A CTA tile is cut into warp tiles, a warp tile into instructions (`mma`), m16n8k16 in 16 bits. The arithmetic intensity
at shared memory, which bounds mma.sync kernels, is that of the warp tile: 64x64 reads (64 + 64) 2-byte rows for 2 * 64
* 64 flops each k, 32 flops a byte.

Sums of fp8, of scaled blocks and of parts are promoted: the mma.sync of a k tile add to registers of their own
(`promoted`).

fp32 operands that are split into parts (`problem.parts`) are K-major matrices of parts when this kernel begins: one in
front of it has made them (`cute.splitter`). A stage holds a k tile of all parts of an operand. The k tile is then
multiplied in as many rounds as there are terms, the smallest first (`steps`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp as warp_ops

from cutegemm.cute import types
from cutegemm.cute.ampere.config import AmpereConfig
from cutegemm.cute.ampere.mma import K_BYTES, operation
from cutegemm.cute.ampere.promoted import promotion_of
from cutegemm.cute.ampere.steps import steps_of
from cutegemm.cute.entry import Gemm
from cutegemm.cute.launch_config import SLAB_ROWS
from cutegemm.cute.splitter import Splitter, matrices
from cutegemm.cute.warps.copy_ring import CopyRing
from cutegemm.cute.warps.tile_load import PartLoader, TileLoader, loader_of
from cutegemm.problem import Signature
from cutegemm.run import arguments


def swizzle_of(dtype_width: int, inner: int, ldmatrix: bool) -> tuple[int, int, int]:
    """(bits, base, shift): byte offset bits [base, base+bits) are XORed with bits [base+shift, base+shift+bits).

    `inner` is the contiguous extent of the tile. With ldmatrix the 16-byte pieces of 8 successive rows must differ in
    their bank group: rows of 128 bytes XOR their number into the three bits above a piece; rows of 64 bytes need
    only two, the third bit already alternates. A tf32 operand that is not K-major is read by 32-bit loads of 8
    neighbours in 4 rows, so there whole 32-byte pieces move.
    """
    if not ldmatrix:
        return (2, 5, 2)
    return (3, 4, 3) if inner * dtype_width >= 1024 else (2, 4, 3)


def place_of(stage: Any, part: int, count: int) -> Any:
    """Where a part's tile lies in the ring, see `PartLoader.ring`."""
    return stage if count == 1 else stage * count + part


class AmpereGemm(Gemm):
    """The kernel for the tensor cores of compute capability 8.0 on: a ring filled by cp.async, ldmatrix, mma.sync."""

    def __init__(self, config: AmpereConfig, signature: Signature) -> None:
        # What multiplies sees operands as it reads them: parts are K-major whatever the operand's major.
        self.given, split = signature, signature.parts
        if split is not None:
            signature = replace(signature, a_major="k", b_major="k", align_a=16, align_b=16)
        super().__init__(config, signature)
        self.splitter = None if split is None else Splitter(self.given, split, "rna")
        self.count = 1 if split is None else split.count
        self.tf32 = signature.precision == "tf32"
        if split is not None:
            self.ab_type = types.NUMERIC[split.element]
        if self.ab_type is Float32:
            self.ab_type = cutlass.TFloat32
        b_type = types.NUMERIC[signature.b_dtype] if signature.b_dtype else self.ab_type
        self.mma_op = operation(self.ab_type, b_type)
        self.k_step = K_BYTES * 8 // self.ab_type.width
        self.steps = steps_of(signature, config.bk // self.k_step)
        self.a = self._operand("a", self.ab_type, signature.a_major == "k", config.bm, signature.align_a)
        self.b = self._operand("b", b_type, signature.b_major == "k", config.bn, signature.align_b, self.halves)
        self.ring = CopyRing(self.a, self.b, config.stages)
        self.promotion: Any = promotion_of(config, signature)

    def _operand(self, name: str, dtype, k_major: bool, extent: int, align: int, halves: int = 0) -> Any:
        bk, work = self.config.bk, self.signature.work
        swizzle = swizzle_of(dtype.width, bk if k_major else extent, k_major or not self.tf32)
        given = dtype, extent, bk, k_major, align, self.config.threads, swizzle, halves
        if self.splitter is not None:
            return PartLoader(self.count, *given)
        return loader_of(name, work)(*given, work=work, zeros=True)

    def _shared_to_registers(self, loader: TileLoader):
        """The copy atom of one operand: ldmatrix, transposing unless K-major; 32-bit loads where it cannot."""
        if self.tf32 and not loader.k_major:
            return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), loader.dtype, num_bits_per_copy=32)
        return cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(not loader.k_major, 4), loader.dtype)

    def arguments(self) -> tuple[arguments.Argument, ...]:
        if self.splitter is None:
            return super().arguments()
        return arguments.host(self.given, ("early", arguments.WORKSPACE, "operand_lines"))

    @property
    def host_only(self) -> tuple[str, ...]:
        if self.splitter is None:
            return super().host_only
        return ("stream", "operand_lines", *(() if self.config.splits > 1 else (arguments.WORKSPACE,)))

    def launch(self, args) -> None:
        """Launches the kernel; where operands are split, after the kernel that does it."""
        if self.splitter is not None:
            (a, _, lda, size_a, _), (b, _, ldb, size_b, _) = self.splitter.launch(args)
            a_batch, b_batch = unless_zero(args.a_batch, size_a), unless_zero(args.b_batch, size_b)
            args = args._replace(a=a, b=b, lda=lda, ldb=ldb, a_batch=a_batch, b_batch=b_batch)
        super().launch(args)

    @cute.jit
    def compute_tile(self, a, b, lda, ldb, m, n, k, row, column):
        config = self.config
        tid = cute.arch.thread_idx()[0]
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        warp_m, warp_n = warp // config.warps[1], warp % config.warps[1]

        memory = cutlass.memory.SmemAllocator().allocate(config.smem_bytes(self.signature), byte_alignment=1024)
        if cutlass.const_expr(self.splitter is not None):
            self.a.lie_apart(matrices(self.args.batch, self.args.a_batch) * lda * m)
            self.b.lie_apart(matrices(self.args.batch, self.args.b_batch) * ldb * n)
        self.a.find(self.args)
        self.ring.start(memory, a, b, lda, ldb, m, n, k, row, column, tid, self.await_front)

        # This warp's part of the ring, and its fragments.
        ring_a, ring_b = self.ring.tensors()
        ring_a = cute.local_tile(ring_a, (config.wm, config.bk), (warp_m, 0, None))
        ring_b = cute.local_tile(ring_b, (config.wn, config.bk), (warp_n, 0, None))
        mma = cute.make_tiled_mma(self.mma_op, permutation_mnk=(16, 16, self.k_step))
        thread_mma = mma.get_slice(lane)
        fragment_a = mma.make_fragment_A(thread_mma.partition_A(ring_a[None, None, 0]))
        fragment_b = mma.make_fragment_B(thread_mma.partition_B(ring_b[None, None, 0]))
        accumulators = mma.make_fragment_C(thread_mma.partition_shape_C((config.wm, config.wn)))
        target = accumulators
        if cutlass.const_expr(self.promotion is not None):
            accumulators = cute.make_rmem_tensor(target.layout, Float32)
            self.promotion.start(self, warp_m, warp_n, lane)
        accumulators.fill(0)
        load_a = cute.make_tiled_copy_A(self._shared_to_registers(self.a), mma)
        load_b = cute.make_tiled_copy_B(self._shared_to_registers(self.b), mma)
        source_a = load_a.get_slice(lane).partition_S(ring_a)
        source_b = load_b.get_slice(lane).partition_S(ring_b)
        target_a = load_a.get_slice(lane).retile(fragment_a)
        target_b = load_b.get_slice(lane).retile(fragment_b)
        steps, count = self.steps, self.count
        # The copies of the tile ahead are spread over the first half of the steps, between the mma.
        copy_steps = len(steps) // 2

        cute.arch.cp_async_wait_group(config.stages - 2)
        cute.arch.sync_threads()
        read, write = Int32(0), Int32(config.stages - 1)
        place_a, place_b = place_of(read, steps[0].a, count), place_of(read, steps[0].b, count)
        cute.copy(load_a, source_a[None, None, 0, place_a], target_a[None, None, 0])
        cute.copy(load_b, source_b[None, None, 0, place_b], target_b[None, None, 0])

        for k_tile in cutlass.range(self.ring.k_tiles, unroll=1):
            for step in cutlass.range_constexpr(len(steps)):
                if cutlass.const_expr(step == len(steps) - 1):
                    read = read + 1
                    if read == config.stages:
                        read = Int32(0)
                    cute.arch.cp_async_wait_group(config.stages - 2)
                    cute.arch.sync_threads()
                following = steps[(step + 1) % len(steps)]
                if cutlass.const_expr(following.loads_a):
                    place_a = place_of(read, following.a, count)
                    cute.copy(load_a, source_a[None, None, following.k, place_a], target_a[None, None, following.k])
                if cutlass.const_expr(following.loads_b):
                    place_b = place_of(read, following.b, count)
                    cute.copy(load_b, source_b[None, None, following.k, place_b], target_b[None, None, following.k])
                if cutlass.const_expr(step < copy_steps):
                    self.ring.copy(k_tile + config.stages - 1, write, step, copy_steps)
                if cutlass.const_expr(step == copy_steps - 1):
                    cute.arch.cp_async_commit_group()
                    write = write + 1
                    if write == config.stages:
                        write = Int32(0)
                own = steps[step].k
                if cutlass.const_expr(self.tf32):
                    round_to_tf32(fragment_a[None, None, own])
                    round_to_tf32(fragment_b[None, None, own])
                if cutlass.const_expr(self.promotion is not None and step == 0):
                    self.promotion.fetch(k_tile)
                    target.fill(0)
                cute.gemm(mma, target, fragment_a[None, None, own], fragment_b[None, None, own], target)
            if cutlass.const_expr(self.promotion is not None):
                self.promotion.add(accumulators, target)

        if cutlass.const_expr(accumulators.element_type is Int32):
            accumulators = cute.recast_tensor(accumulators, Float32)  # see `whole`
        # The slabs of the epilogue reuse the ring: nothing may still be in flight or being read.
        cute.arch.cp_async_wait_group(0)
        if cutlass.const_expr(self.parts is None):
            cute.arch.sync_threads()
            self.start_epilogue(memory, warp_m, warp_n, warp, lane)
            slab = thread_mma.partition_C(self.epilogue.slab)
            for i in cutlass.range_constexpr(config.wm // SLAB_ROWS):
                cute.autovec_copy(accumulators[None, i, None], slab[None, 0, None])
                self.epilogue.store_rows(i * SLAB_ROWS)
        else:
            layout = cute.make_layout((config.wm, config.wn), stride=(config.wn, 1))
            part = cute.make_tensor(self.start_parts(tid).part_of(warp), layout)
            cute.autovec_copy(accumulators, thread_mma.partition_C(part))
            self.finish_parts(memory)


@cute.jit
def unless_zero(own: Int64, size: Int64):
    """The distance of matrices of parts, `size` elements each: 0, where the operand's is, for one that serves all."""
    distance = size
    if own == 0:
        distance = Int64(0)
    return distance


@cute.jit
def round_to_tf32(fragment: cute.Tensor):
    """Rounds fp32 bits to the nearest tf32 (10 mantissa bits); mma.sync alone would cut the low bits off."""
    values = cute.recast_tensor(fragment, Float32)
    bits = cute.recast_tensor(fragment, Int32)
    for i in cutlass.range_constexpr(cute.size(values)):
        bits[i] = Int32(cute.arch.cvt_f32_tf32(values[i]))
