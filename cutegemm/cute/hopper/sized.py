"""What follows from the sizes of one product: candidates whose tiles fill the SMs once or twice, and their order.

A tile of fixed size leaves SMs idle in the last wave. Here the columns of a tile follow from the sizes instead: they
are the fewest, in steps of 8 or 16, with which all tiles take one wave, or two. cuBLAS takes such tiles for hundreds of
rows: 128x136 for 402x4608x4096, 192x176 for 1203x3456x2560 (the kernels' names in torch's profiler, CUDA 13.0).

The order of tiles that are all computed at once decides which SMs ask for the same lines at about the same time, and
it seems that such requests are joined on their way to the L2 cache. 1024x1024x4096 by tiles of 64x128 in clusters of
1x2 took 14.4 us column by column on an H200, 15.7 in bands of eight rows and 18.8 row by row. `in_one_wave` takes the
order that was fastest for a cluster (docs/learning.md#tiles-made-for-the-sizes).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from cutegemm.cute.hopper import byte_candidates, candidates
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.work_count import works
from cutegemm.hardware.residency import resident_clusters
from cutegemm.problem import ITEMSIZE, scaling
from cutegemm.problem.work import DENSE

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem, Signature

LEAST_ROWS = 64
"""Products with no more rows or columns than this have none: there K is divided, and tiles are narrow."""
WAVES = (1, 2)
CLUSTERS = ((1, 1), (2, 1), (1, 2))
SCHEDULES = {64: ("coop1",), 128: ("coop2", "pp"), 192: ("coop3", "pp"), 256: ("coop2",)}
"""By BM. Ping-pong, whose warpgroups have a tile each, needs more than one wave."""
NARROWEST, WIDEST = 32, 256
"""Columns of a tile."""
WHOLE_STEP, HALF_STEP = 16, 8
"""Of its columns; the second for 16 bits with swapped operands (`validity.odd_eights`)."""
MOST_STAGES = 12
ORDER = "serp8"
"""That candidates are made with, and that winners of one wave get in more waves (`in_one_wave`)."""
SWAPPED_ORDERS = {(2, 1): "serp2", (4, 1): "serp2", (1, 2): "col", (1, 4): "col", (2, 2): "col"}
"""By cluster. 1x1 is left out: column by column it took 0.993 of the time in the mean, but 0.84 to 1.08 from tile to
tile. Without swapped operands all were fastest column by column."""
MOST = 1.2
"""Clocks of an SM, over those of the candidate that takes fewest: others are not compared. At 258 products of
fsm90-21 the fastest of those left takes 1.0001 of the time of the fastest of all, and they are a third as many."""
MULTIPLIED, LOADED = 32, 0.5
"""Of a k step of 128 bytes, in a clock of an SM: elements of a tile that tensor cores multiply (4096 flop in 16 bits,
NVIDIA H100 white paper), and rows of A and B that come from the L2 cache (64 bytes)."""

_Tile = tuple[int, int, str, tuple[int, int], bool]
"""BM, BN, schedule, cluster, and whether operands are swapped."""


def sized(signature: Signature, arch: Arch, m: int, n: int, k: int, batch: int) -> list[HopperConfig]:
    """The candidates for these sizes beside the listed ones.

    There are some for dense products of 16-bit operands, and of fp8 with promoted sums, whose epilogue has no C and no
    program but scales. Others were not timed with such tiles. With scales of blocks the fastest of them gained 0.2 % at
    45 shapes, so these products have none.
    """
    most_elements = WAVES[-1] * arch.sm_count * max(SCHEDULES) * WIDEST
    if min(m, n) <= LEAST_ROWS or not 0 < m * n * batch <= most_elements:
        return []
    tiles = _tiles_of(signature, arch)
    if tiles is None:
        return []
    found = tiles.filling(m, n, batch)
    most = MOST * min((clocks for clocks, _ in found), default=0)
    made = (tiles.configuration(tile) for clocks, tile in found if clocks <= most)
    return [config for config in made if config is not None]


def in_one_wave(
    config: HopperConfig, problem: Problem, arch: Arch, won_at: tuple[int, int, int] | None = None
) -> HopperConfig:
    """A candidate in the tile order that is faster for it where all tiles of a product are computed at once. A
    candidate in `ORDER` may get that order, and one in that order may get `ORDER`. One in a third order keeps it.

    Args:
        won_at: (M, N, K) at which it was the fastest, in its order. That says nothing of the order in one wave where
            it took more waves there, and nothing of more waves where it took one.
    """
    order = SWAPPED_ORDERS.get(config.cluster) if config.swapped else "col"
    timed = _tiles_of(problem.signature, arch) is not None and min(problem.m, problem.n) > LEAST_ROWS
    if order is None or not timed or config.parts > 1 or config.stream_k or config.order not in (ORDER, order):
        return config
    is_one = _is_one_wave(config, problem, arch)
    if won_at is None:
        return replace(config, order=order) if is_one and config.order == ORDER else config
    m, n, k = won_at
    if is_one == _is_one_wave(config, replace(problem, m=m, n=n, k=k), arch):
        return config
    return replace(config, order=order if is_one else ORDER)


def _is_one_wave(config: HopperConfig, problem: Problem, arch: Arch) -> bool:
    return works(config, problem) <= resident_clusters(arch, config.cluster_ctas)


class _Tiles:
    """The tiles that may be taken for products of a signature on a GPU."""

    def __init__(self, signature: Signature, arch: Arch) -> None:
        self._signature, self._arch, self._itemsize = signature, arch, ITEMSIZE[signature.dtype]
        self._made: dict[_Tile, HopperConfig | None] = {}
        self._kinds = [
            (bm, bm * down, across, resident_clusters(arch, down * across), (down, across))
            for bm, (down, across) in product(SCHEDULES, CLUSTERS)
        ]

    def filling(self, m: int, n: int, batch: int) -> list[tuple[float, _Tile]]:
        """(clocks, tile) of each tile whose columns are the fewest that need one or two waves. Clocks: the least that
        an SM takes for one k step of all its tiles.
        """
        found = []  # by plain arithmetic, since this is a fifth of the time of a choice
        for swapped, rows, columns in ((False, m, n), (True, n, m)):
            step = HALF_STEP if swapped and self._itemsize == 2 else WHOLE_STEP
            for bm, rows_down, ctas_across, places, cluster in self._kinds:
                clusters_down = -(-rows // rows_down) * batch
                for waves in WAVES:
                    across = waves * places // clusters_down * ctas_across
                    if across * WIDEST < columns:
                        continue
                    bn = -(-columns // (across * step)) * step
                    if bn < NARROWEST:
                        break
                    multiplied, loaded = bm * bn / MULTIPLIED, (bm + bn) / LOADED
                    clocks = waves * (multiplied if multiplied > loaded else loaded)
                    for schedule in SCHEDULES[bm] if waves > 1 else SCHEDULES[bm][:1]:
                        found.append((clocks, (bm, bn, schedule, cluster, swapped)))
        return found

    def configuration(self, tile: _Tile) -> HopperConfig | None:
        """That of a tile, with a ring as deep as fits, if it is valid."""
        if tile not in self._made:
            self._made[tile] = self._configuration(*tile)
        return self._made[tile]

    def _configuration(
        self, bm: int, bn: int, schedule: str, cluster: tuple[int, int], swapped: bool
    ) -> HopperConfig | None:
        options = (*(("swap",) if swapped else ()), *(("zig",) if bm == max(SCHEDULES) else ()), "pdl")
        config = HopperConfig(bm, bn, 128 // self._itemsize, schedule, cluster, MOST_STAGES, ORDER, options)
        config = replace(config, stages=min(candidates.most_stages(config, self._signature), MOST_STAGES))
        text = str(config) if self._itemsize > 1 else byte_candidates.form(str(config), self._signature)
        if text is None:
            return None
        config = HopperConfig.parse(text)
        return config if config.why_invalid(self._signature, self._arch) is None else None


@functools.lru_cache(maxsize=256)
def _tiles_of(signature: Signature, arch: Arch) -> _Tiles | None:
    epilogue = signature.epilogue
    plain = epilogue.c_dtype is None and (epilogue.custom is None or scaling.multiplies_alone(epilogue.custom))
    size, by_blocks = ITEMSIZE[signature.dtype], bool(epilogue.program.block_scales)
    kind = size == 2 or (size == 1 and signature.promotion is not None and not by_blocks)
    kind = kind and signature.parts is None
    return _Tiles(signature, arch) if plain and kind and signature.work == DENSE else None
