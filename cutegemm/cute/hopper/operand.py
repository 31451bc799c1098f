"""An operand of the Hopper kernel: its k tiles on their way from global memory through TMA into the ring.

On the host `Operand` makes the tensor map, on the device it holds the operand's part of the ring, and a `Loader` asks
TMA for tiles. In a cluster of CM x CN CTAs those of a row need the same tile of A, those of a column the same tile of
B. Each of the sharers loads a part of the tile and multicasts it to all of them.

Of a gated program ("halves") the columns of B are gate's and then up's, F of each. A tile has as many columns of the
one as of the other, gate's first. The tensor map has the halves as a dimension of its own, so that TMA clips each at F.

tf32: WGMMA reads fp32 words and ignores their low 13 bits. Truncated operands would be biased and twice as far off as
rounded ones. So the tensor maps have the element type TFLOAT32, with which TMA rounds fp32 to the nearest tf32 on the
way into shared memory. The DSL itself does not offer such loads.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, TFloat32
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.cpasync.copy import (
    CopyBulkTensorTileG2SMulticastNonExecTrait,
    CopyBulkTensorTileG2SNonExecTrait,
)

from cutegemm.cute.hopper import clip
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.position import Position


@cute.jit
def source_matrix(matrix: Int32, batch_stride: Int64):
    """Which matrix of an operand belongs to matrix number `matrix` of D: with stride 0 one serves the whole batch."""
    source = matrix
    if batch_stride == 0:
        source = Int32(0)
    return source


def operand_type(dtype: type[cutlass.Numeric]) -> type[cutlass.Numeric]:
    """What the tensor cores take for operands that are `dtype` in global memory; TMA converts while it loads."""
    return TFloat32 if dtype is Float32 else dtype


def tma_load(tensor: cute.Tensor, layout: Any, tile: tuple[int, ...], sharers: int) -> tuple[Any, Any]:
    """(copy atom, coordinate tensor) for loads of `tile` into shared memory laid out as `layout`, on the host.

    Each of `sharers` CTAs loads a share and multicasts it. fp32 elements arrive rounded to tf32.
    """
    op = cpasync.CopyBulkTensorTileG2SOp() if sharers == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    if tensor.element_type is not Float32:
        info = cpasync.make_tiled_tma_atom(op, tensor, layout, tile, num_multicast=sharers)
        return info.atom, info.tma_tensor
    made = cute_nvgpu.atom_make_non_exec_tiled_tma_load(
        tensor.value,
        layout.value,
        cute.composition(cute.make_identity_layout(tensor.shape), tile),
        op._to_ir(),
        num_multicast=sharers,
        tma_format=cute_nvgpu.TmaDataFormat.TF32_RN,
    )
    trait = CopyBulkTensorTileG2SNonExecTrait if sharers == 1 else CopyBulkTensorTileG2SMulticastNonExecTrait
    return cute.CopyAtom(op, trait(made[0])), made[1]


class Operand:
    """One side of the multiplication: the rows of A, or the columns of B as rows, times K.

    extent: rows of a tile. sharers: CTAs of a cluster that need the same tile. k_major: whether K is contiguous.
    halves: whether a tile consists of matching rows of the operand's two halves.
    groups: what the groups of the work divide: "rows", "k", or None for nothing (`grouping`).
    parts: K-major matrices that make up the operand (`problem.parts`): a stage of the ring holds a tile of each. They
    lie behind one another as all matrices of part 0, all of part 1, ...
    """

    def __init__(
        self,
        config: HopperConfig,
        dtype: type[cutlass.Numeric],
        extent: int,
        sharers: int,
        k_major: bool,
        halves: bool = False,
        groups: str | None = None,
        parts: int = 1,
    ) -> None:
        self.dtype, self.extent, self.sharers, self.k_major, self.halves = dtype, extent, sharers, k_major, halves
        self.bk, self.stages, self.parts = config.bk, config.stages * parts, parts
        self.itemsize = dtype.width // 8
        self.groups = groups
        # Whether the ends of groups are clipped: they divide what lies in rows in memory.
        self.clipped = groups == ("rows" if k_major else "k")

    @property
    def ring_bytes(self) -> int:
        """Bytes of the operand's tiles in all stages. `stages` counts each part's."""
        return self.stages * self.extent * self.bk * self.itemsize

    def _swizzle(self) -> tuple[int, int]:
        """(bits, elements of a line) of the widest swizzle that divides the contiguous side of a box."""
        span = (self.bk if self.k_major else self.extent // (2 if self.halves else 1)) * self.itemsize
        bits = next(bits for bits in (3, 2, 1) if span % (16 << bits) == 0)
        return bits, (16 << bits) // self.itemsize

    def stage_layout(self):
        """The shared layout (extent, bk) of a tile."""
        bits, width = self._swizzle()
        lines = (
            cute.make_layout((8, width), stride=(width, 1))
            if self.k_major
            else cute.make_layout((width, 8), stride=(1, width))
        )
        atom = cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, lines)
        return cute.tile_to_shape(atom, (self.extent, self.bk), order=(0, 1) if self.k_major else (1, 0))

    def box(self) -> tuple[int, ...]:
        """What TMA loads: (rows, K), or (rows of a half, halves, K)."""
        return (self.extent // 2, 2, self.bk) if self.halves else (self.extent, self.bk)

    def _box_layout(self):
        """`stage_layout` with the modes of `box`."""
        if not self.halves:
            return self.stage_layout()
        (bits, width), half = self._swizzle(), self.extent // 2
        if self.k_major:
            layout = cute.make_layout(
                (half, 2, (width, self.bk // width)), stride=(width, half * width, (1, self.extent * width))
            )
        else:
            layout = cute.make_layout(
                ((width, half // width), 2, self.bk), stride=((1, self.bk * width), half * self.bk, width)
            )
        return cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, layout)

    def load_atom(self, pointer, rows, k, leading, batch_stride, batch):
        """(copy atom, coordinate tensor) of the operand as (rows, k, matrices); strides in elements. On the host."""
        step = 16 // self.itemsize
        leading = cute.assume(leading, divby=step)
        batch_stride = cute.assume(batch_stride, divby=step)
        strides: tuple[Any, ...] = (leading, 1, batch_stride) if self.k_major else (1, leading, batch_stride)
        # A descriptor has no empty dimensions; with K = 0 nothing of this one element is read.
        shape: tuple[Any, ...] = (rows, cutlass.max(k, Int32(1)), batch)
        if self.clipped:
            extents, more = clip.dimensions(leading, step)
            shape = (clip.ROWS, shape[1]) if self.k_major else (rows, clip.ROWS)
            shape, strides = (*shape, batch, *extents), (*strides, *more)
        if self.halves:
            # As validity asks, 16 bytes divide the distance of the halves.
            half = Int64(rows // 2) * (leading if self.k_major else 1)
            shape = (rows // 2, 2, *shape[1:])
            strides = (strides[0], cute.assume(half, divby=step), *strides[1:])
        tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))
        return tma_load(tensor, self._box_layout(), self.box(), self.sharers)

    def start(self, atom, tensor, batch_stride, memory, matrices: Any = None) -> None:
        """Binds to what `load_atom` made, and to `ring_bytes` of shared memory. matrices: of each part, if several."""
        self.atom, self.tensor, self.batch_stride, self.matrices = atom, tensor, batch_stride, matrices
        layout = self.stage_layout()
        depth = cute.make_layout(self.stages, stride=self.extent * self.bk)
        pointer = cute.recast_ptr(memory, layout.inner, dtype=operand_type(self.dtype))
        self.shared = cute.make_tensor(pointer, cute.append(layout.outer, depth))
        self.boxes = cute.make_tensor(pointer, cute.append(self._box_layout().outer, depth))

    def prefetch(self) -> None:
        """One thread: brings the tensor map into its cache."""
        cpasync.prefetch_descriptor(self.atom)


class Loader:
    """Loads a CTA's share of the tiles of an operand that has been started.

    share: which of the sharers' parts this CTA loads. mask: the ranks of the sharers as bits; None without others.
    """

    def __init__(self, operand: Operand, share: Any, mask: Any) -> None:
        self.operand, self.mask = operand, mask
        self.multicasts = mask is not None
        self.share = share
        self.target, self.source = self._partition(operand.tensor)

    def _partition(self, tensor) -> tuple:
        """(stages, tiles) of a coordinate tensor, as this CTA's share of them."""
        operand, box = self.operand, self.operand.box()
        tiles = cute.local_tile(tensor, box, (None,) * cute.rank(tensor))
        return cpasync.tma_partition(
            operand.atom,
            self.share,
            cute.make_layout(operand.sharers),
            cute.group_modes(operand.boxes, 0, len(box)),
            cute.group_modes(tiles, 0, len(box)),
        )

    def place(self, row, tile) -> tuple:
        """(tiles of this operand, the row of tiles, the coordinates behind K) for a tile of D, as `load` takes them."""
        operand = self.operand
        matrix = source_matrix(tile.matrix, operand.batch_stride)
        if operand.groups is None:
            return self.source, row, (matrix,)
        begin, behind = tile.begin, ()
        if operand.clipped:
            begin, behind = clip.row(tile.begin, tile.end), clip.coordinates(tile.end)
        corner = (begin, Int32(0)) if operand.groups == "rows" else (Int32(0), begin)
        none = (Int32(0),) * (cute.rank(operand.tensor) - 2)
        return self._partition(cute.domain_offset((*corner, *none), operand.tensor))[1], row, (matrix, *behind)

    def load(self, place: tuple, k_tile, stage, barrier) -> None:
        """Asks TMA for a k tile at that place into a stage; `barrier` counts its bytes."""
        tiles, row, behind = place
        if self.operand.parts == 1:
            self._load(tiles, row, behind, k_tile, stage, barrier)
            return
        for part in range(self.operand.parts):
            matrix = (behind[0] + part * self.operand.matrices,)
            self._load(tiles, row, matrix, k_tile, stage * self.operand.parts + part, barrier)

    def _load(self, tiles, row, behind: tuple, k_tile, stage, barrier) -> None:
        tile = (None, row, 0, k_tile, *behind) if self.operand.halves else (None, row, k_tile, *behind)
        source, target = tiles[tile], self.target[None, stage]
        if self.multicasts:
            cute.copy(self.operand.atom, source, target, tma_bar_ptr=barrier, mcast_mask=cutlass.Int16(self.mask))
        else:
            cute.copy(self.operand.atom, source, target, tma_bar_ptr=barrier)


def loaders(config: HopperConfig, position: Position, a: Operand, b: Operand) -> tuple[Loader, Loader]:
    """The loaders of A and B for the CTA at that position: A goes to CTAs (row, *), B to CTAs (*, column)."""
    cm, cn = config.cluster
    mask_a = Int32(sum(1 << (cm * column) for column in range(cn))) << position.row
    mask_b = Int32((1 << cm) - 1) << (cm * position.column)
    if config.cluster_k > 1:
        mask_a, mask_b = mask_a << position.k_first, mask_b << position.k_first
    return (
        Loader(a, position.column, mask_a if a.sharers > 1 else None),
        Loader(b, position.row, mask_b if b.sharers > 1 else None),
    )
