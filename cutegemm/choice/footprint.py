"""What one CTA of a configuration does, in terms that every kernel family has: the cost model's view of it.

Each backend fills in the footprints of its own configurations (`Backend.footprint`); `of_warps` serves those whose
warps read their fragments from shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutegemm.hardware.arch import LINE
from cutegemm.problem import ITEMSIZE
from cutegemm.problem.dtypes import CUDA_CORES

if TYPE_CHECKING:
    from cutegemm.choice.cost_rates import CostFamily
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Signature

ALL_ROWS = 64
"""Tile rows that an order walks together which goes down the columns of D: more make no difference."""
QUARTERS = 4
"""Parts of an SM that issue instructions. Each has warps and registers of its own: 10 warps take as long as 12."""

NARROWEST, WAITED = 2, 2.5
"""Bytes of a load that is no cp.async, so that the thread waits for it; and how much longer a byte of it takes. With
that the model is within a factor of 1.2 (one standard deviation) of 346 times of sm80 with narrow rows on an H200."""


@dataclass(frozen=True)
class Footprint:
    """One CTA of a configuration.

    family: whose fitted constants apply.
    bm, bn, bk: CTA tile in D's orientation [elements].
    stages: of the ring of operand tiles.
    smem_step: shared memory that all warps read in a k step [bytes].
    threads: of a CTA. ctas: CTAs resident on an SM.
    cluster: CTAs along M and N that share loads. parts: CTAs of a cluster that sum a part of K each and add up on chip.
    splits: parts of K among clusters. serial: one CTA adds up all splits of a tile; else its CTAs share them out.
    balanced: tiles that fill no round of all SMs are cut along K (stream-K). fitted: tiles of a group whose size lies
    on the device share its rows evenly.
    group: tile rows that the tile order walks together. curve: the tile order is a Hilbert curve.
    zig: every other wave of tiles walks K backwards.
    overlapped: the epilogue runs under the next tile's multiplications.
    pdl: programmatic dependent launch. leaves_room: a CTA of the next launch, which may start early, fits the SM too.
    stays: a CTA computes one tile after the other, and loads the next one's first stages during an epilogue.
    early: without it, a launch that fills at most half of the places begins early all the same (`TileConfig`).
    copies: load instructions relative to loads of 16 bytes; 1.0 means none narrower.
    turned: bytes of a stage that are transposed on their way into shared memory.
    deep: bytes that warps read along K in a k step, which slices do of K-major operands.
    narrow: of A and of B, the bytes of a line over those that a row of a TMA box has; 1.0 means whole lines.
    outputs: accumulators of a thread, in families whose epilogues `Rates.thread` counts by them; else 0.
    segment: part of a row of D that the epilogue stores as one, at most a line [bytes].
    swapped: the kernel multiplies D^T = B^T A^T and stores D transposed.
    terms: products for each pair of elements, and itemsize: bytes that a stage holds of an element, where operands are
    split into parts (`problem.parts`). Splitting them takes as long whatever the configuration, and is not estimated.
    program: cycles that a custom program takes an SM for a tile; see `program_cost`.
    promoted: sums that a k step adds into registers by the CUDA cores (promoted accumulation), and exposed: the part of
    them under which no tensor core multiplies. scaled: they are scaled too, by scales of blocks of K.
    slower: how much longer it multiplies, and reads shared memory, than the model works out of all this.
    """

    family: CostFamily
    bm: int
    bn: int
    bk: int
    stages: int
    smem_step: int
    threads: int
    ctas: int = 1
    cluster: tuple[int, int] = (1, 1)
    parts: int = 1
    splits: int = 1
    group: int = 8
    overlapped: bool = False
    serial: bool = True
    balanced: bool = False
    fitted: bool = False
    pdl: bool = False
    early: bool = False
    copies: float = 1.0
    turned: int = 0
    deep: int = 0
    narrow: tuple[float, float] = (1.0, 1.0)
    curve: bool = False
    zig: bool = False
    outputs: int = 0
    segment: int = LINE
    swapped: bool = False
    leaves_room: bool = False
    stays: bool = False
    terms: int = 1
    itemsize: int | None = None
    program: float = 0.0
    promoted: float = 0.0
    exposed: float = 0.0
    scaled: bool = False
    slower: float = 1.0

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of D that a cluster computes together."""
        return self.bm * self.cluster[0], self.bn * self.cluster[1]

    @property
    def rows_between(self) -> int:
        """Rows of D's tiles that the tile order walks from a tile to its neighbour in the row, that row included.

        With swapped operands the order's rows are D's columns: several of them together are neighbours in a row.
        """
        if self.swapped:
            return 1 if self.group > 1 else ALL_ROWS
        return self.group

    @property
    def cluster_ctas(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.parts


def of_warps(
    family: CostFamily,
    tile: tuple[int, int, int],
    warp: tuple[int, int],
    stages: int,
    smem_bytes: int,
    signature: Signature,
    arch: Arch,
    *,
    group: int,
    splits: int = 1,
    slices: int = 1,
    bounded_for: int = 1,
) -> Footprint:
    """The footprint of a kernel whose warps each read their own fragments of A and B from shared memory.

    Args:
        tile: (M, N, K) of the CTA tile. warp: (M, N) of the warp tile. smem_bytes: shared memory of a CTA.
        group, splits: as in `Footprint`.
        slices: groups of warps that share the warp tiles, each reading its part of a stage's depth.
        bounded_for: CTAs of an SM for which the compiler bounds a thread's registers.
    """
    (bm, bn, bk), (wm, wn), size = tile, warp, ITEMSIZE[signature.dtype]
    warps = max(bm * bn // (wm * wn), 1)
    threads = 32 * warps * slices
    registers = registers_of_warps(warp, threads, signature, arch, slices, bounded_for)
    return Footprint(
        family,
        bm,
        bn,
        bk,
        stages,
        warps * (wm + wn) * bk * size,
        threads,
        ctas=resident(arch, smem_bytes, threads, registers),
        splits=splits,
        group=group,
        copies=(bm * narrowness(signature.align_a) + bn * narrowness(signature.align_b)) / (bm + bn),
    )


def narrowness(align: int) -> float:
    """Time of copying a byte of an operand of this alignment class, over that of a byte copied 16 at a time."""
    return 16 / align * (WAITED if align == NARROWEST else 1.0)


def registers_of_warps(
    warp: tuple[int, int], threads: int, signature: Signature, arch: Arch, slices: int, bounded_for: int
) -> int:
    """About how many registers a thread of such a kernel has; the arguments are those of `of_warps`."""
    if bounded_for > 1:
        # Each quarter of an SM has its own registers: 14 warps leave a thread as many as 16 do.
        warps = -(-threads * bounded_for // (32 * QUARTERS)) * QUARTERS
        return min(arch.registers_per_sm // (32 * warps) // 8 * 8, arch.registers_per_thread)
    if slices > 1:
        # The compiler loads ahead into whatever one CTA may have.
        return min(224, arch.registers_per_sm // threads)
    # Accumulators, double-buffered fragments, addresses; FFMA kernels hold longer fragments.
    accumulators = warp[0] * warp[1] // 32
    held = 2 * accumulators + 40 if signature.unit == CUDA_CORES else sum(warp) // 2 + 40
    return min(accumulators + held, arch.registers_per_thread)


def resident(arch: Arch, smem_bytes: int, threads: int, registers: int) -> int:
    """CTAs resident on an SM, at least 1: by shared memory, registers and threads."""
    by_smem = arch.smem_per_sm // (smem_bytes + arch.smem_reserved_per_cta)
    by_registers = arch.registers_per_sm // (threads * (-(-registers // 8) * 8))
    return max(1, min(by_smem, by_registers, arch.threads_per_sm // threads, arch.ctas_per_sm))
