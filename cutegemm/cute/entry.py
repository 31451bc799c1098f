"""What every kernel of this package shares: the host entry, its arguments, and the CTA's place in the problem.

With splits of K several CTAs have one tile, side by side in the grid; each multiplies its part (`warps.part_sum`).

The host entry takes plain addresses, sizes and 64-bit strides, no tensors: a call then needs no views, and nothing
about a tensor is promised to the compiler beyond its alignment class, which the plan has checked.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from cutegemm.cute import types
from cutegemm.cute.early_launch import BeginsEarly
from cutegemm.cute.epilogue import SlabEpilogue
from cutegemm.cute.tile_order import Grouped
from cutegemm.cute.warps.group_tiles import GroupTiles, Place
from cutegemm.cute.warps.part_sum import PartSum
from cutegemm.problem import Signature
from cutegemm.problem.work import DENSE
from cutegemm.run import arguments

_NUMBERS: dict[str, Any] = {"int32": Int32, "int64": Int64, "float32": Float32, "float64": Float64}


ALL_SHARED = 100
"""Per cent of an SM's memory that is to be shared memory rather than L1."""


class Gemm(BeginsEarly):
    """Host entry and per-CTA set-up of a GEMM kernel; a family implements `compute_tile`, which calls `await_front`
    when it has worked out where its operands lie.

    The grid is one-dimensional: batch x tile rows x tile columns, in the tile order, x splits of K. Every CTA computes
    one tile, or its part of it. Of products in groups each CTA finds its tile on the GPU (`warps.group_tiles`).

    own: the tile of this CTA, where it found it so.
    """

    own: Place | None = None

    def __init__(self, config: Any, signature: Signature) -> None:
        self.config: Any = config
        self.signature = signature
        self.ab_type = types.NUMERIC[signature.dtype]
        self.order = Grouped(config.group)
        if signature.dtype != "fp64":  # whose kernel has an epilogue of its own
            self.epilogue = SlabEpilogue(config, signature)
        # Of B: see `warps.tile_load`.
        self.halves = config.wn // 2 if signature.epilogue.gating == "halves" else 0
        self.parts = PartSum(config, signature) if config.splits > 1 else None
        self.groups = None if signature.work == DENSE else GroupTiles(config, signature, self.order)

    def arguments(self) -> tuple[arguments.Argument, ...]:
        """The host entry's arguments in order."""
        return arguments.host(self.signature, self.config.extra_arguments)

    @property
    def host_only(self) -> tuple[str, ...]:
        """Which of them the kernel on the GPU does not take."""
        return ("stream", "batch") if self.config.splits == 1 and self.groups is None else ("stream",)

    def fake_arguments(self) -> tuple:
        """Stand-ins that give `cute.compile` the types of the entry's arguments, and the alignment it may assume."""
        return tuple(_stand_in(argument.type) for argument in self.arguments())

    @cute.jit
    def __call__(self, *values):
        """D = act(alpha A B + beta C + bias) for (m, n, k) and `batch` matrices; strides in elements."""
        self.launch(arguments.named([argument.name for argument in self.arguments()], values))

    def launch(self, args) -> None:
        """Launches the kernel. `args`: the host entry's arguments by name."""
        tiles_m = cute.ceil_div(args.m, self.config.bm)
        tiles_n = cute.ceil_div(args.n, self.config.bn)
        tiles = tiles_m * tiles_n * args.batch if self.groups is None else self.groups.most(args, tiles_m, tiles_n)
        self.kernel(arguments.device(args, host_only=self.host_only, tiles_m=tiles_m, tiles_n=tiles_n)).launch(
            grid=(tiles * self.config.splits, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=self.config.resident,
            # Else the DSL asks a GPU for it, which the machine that compiles need not have.
            preferred_smem_carveout=ALL_SHARED if self.config.resident > 1 else None,
            stream=args.stream,
            use_pdl=args.early if self.programmatic else False,
        )

    @cute.kernel
    def kernel(self, args):
        """One CTA: find its tile, then load, multiply and store it."""
        self.args = args
        if cutlass.const_expr(self.groups is None):
            matrix, row, column = self.corner()
            a = args.a + Int64(matrix) * args.a_batch
            b = args.b + Int64(matrix) * args.b_batch
            a, b, k = self._part(a, b, args.k)
            self.compute_tile(a, b, args.lda, args.ldb, args.m, args.n, k, row, column)
        else:
            self._compute_of_group()

    @cute.jit
    def _compute_of_group(self):
        """Computes this CTA's tile of a group, if there is one."""
        args = self.args
        assert self.groups is not None
        self.await_front()  # the kernel in front may write the sizes
        own, exists = self.groups.find(args, cute.arch.block_idx()[0])
        self.own = own
        if exists:
            a = args.a + Int64(own.matrix) * args.a_batch
            b = args.b + Int64(own.matrix) * args.b_batch
            a, b = self._from_k(a, b, own.first_k) if cutlass.const_expr(self.groups.along == "k") else (a, b)
            self.compute_tile(a, b, args.lda, args.ldb, args.m, args.n, own.k, own.row, own.column)

    def corner(self) -> tuple[Any, Any, Any]:
        """(matrix, first row, first column) of this CTA's tile."""
        if self.own is not None:
            return self.own.matrix, self.own.row, self.own.column
        return self._place(self._share(cute.arch.block_idx()[0]), self.args.tiles_m, self.args.tiles_n)

    def _share(self, block) -> Any:
        """The tile that CTA number `block` computes, or a part of."""
        return block if self.parts is None else block // self.config.splits

    def _part(self, a, b, k) -> tuple[Any, Any, Any]:
        """(A, B, K) of the part of the sum that falls to this CTA: some k tiles, the last ones fewer or none."""
        if self.parts is None:
            return a, b, k
        bk, splits = self.config.bk, self.config.splits
        own = cute.ceil_div(cute.ceil_div(k, bk), splits) * bk
        first = cute.arch.block_idx()[0] % splits * own
        left = cutlass.max(cutlass.min(k - first, own), 0)
        return *self._from_k(a, b, first), left

    def _from_k(self, a, b, first) -> tuple[Any, Any]:
        """(A, B) from their `first` k on."""
        step_a = 1 if self.signature.a_major == "k" else self.args.lda
        step_b = 1 if self.signature.b_major == "k" else self.args.ldb
        return a + Int64(first) * step_a, b + Int64(first) * step_b

    def first_k_tile(self) -> Any:
        """The number of the first k tile of this CTA's part of the sum."""
        splits = self.config.splits
        tiles = cute.ceil_div(cute.ceil_div(self.args.k, self.config.bk), splits)
        return 0 if splits == 1 else cute.arch.block_idx()[0] % splits * tiles

    def start_parts(self, tid) -> Any:
        """Binds the sum of parts to this CTA's; returns it. Its place is worked out anew, as in `start_epilogue`."""
        assert self.parts is not None
        block, splits = self._number(), self.config.splits
        self.parts.start(self.args, block // splits, block % splits, tid)
        return self.parts

    @cute.jit
    def finish_parts(self, memory):
        """Adds up and stores what falls to this CTA of its tile; `memory`: shared, with a word that is free."""
        assert self.parts is not None
        tiles = _hidden(self.args.tiles_m), _hidden(self.args.tiles_n)
        matrix, row, column = self._place(self._share(self._number()), *tiles)
        self.parts.finish(memory, matrix, row, column)

    def _number(self) -> Any:
        """The CTA's number, hidden, see `start_epilogue`."""
        return _hidden(cute.arch.block_idx()[0])

    def _place(self, block, tiles_m, tiles_n):
        """(matrix of the batch, first row, first column) of the tile of CTA number `block`."""
        tiles = tiles_m * tiles_n
        matrix = block // tiles
        tile_m, tile_n = self.order.coordinates(block - matrix * tiles, tiles_m, tiles_n)
        return matrix, tile_m * self.config.bm, tile_n * self.config.bn

    def start_epilogue(self, memory, warp_m, warp_n, warp, lane) -> None:
        """Binds the epilogue to this warp's part of the tile; `memory` is the ring, which is free by now.

        The tile's place is computed a second time, from the CTA's number behind a move that the compiler cannot
        see through: kept since the start, it would take registers from the main loop, which uses every one.
        """
        if self.own is None:
            matrix, row, column = self._place(self._number(), self.args.tiles_m, self.args.tiles_n)
        else:
            matrix, row, column = self.corner()
        row, column = row + warp_m * self.config.wm, column + warp_n * self.config.wn
        slab = cute.recast_ptr(memory, dtype=Float32)
        m, n = self.ends()
        self.epilogue.start(slab, matrix, row, self.in_d(column), m, self.in_d(n), warp, lane, self.args)

    def ends(self) -> tuple[Any, Any]:
        """Before which row, and column of the product, the results end that this CTA stores."""
        return (self.args.m, self.args.n) if self.own is None else (self.own.m, self.own.n)

    def in_d(self, columns) -> Any:
        """So many columns of the product in columns of D: of a gated program half."""
        return columns // 2 if self.signature.epilogue.gating else columns

    def compute_tile(self, a, b, lda, ldb, m, n, k, row, column):
        """Computes and stores the tile whose first output is (row, column)."""
        raise TypeError(f"{type(self).__name__} does not implement compute_tile")


def _hidden(number) -> Any:
    """An Int32 behind a move that the compiler cannot see through, so that it keeps nothing worked out before."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[number])


def _stand_in(kind: str | arguments.Pointer) -> Any:
    if isinstance(kind, arguments.Pointer):
        return make_ptr(types.NUMERIC[kind.dtype], 16, cute.AddressSpace.gmem, assumed_align=kind.align)
    return make_fake_stream() if kind == "stream" else _NUMBERS[kind](1)
