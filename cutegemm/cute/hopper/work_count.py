"""The host's side of `work`: how many works a launch has, how many clusters take them, and what they must share.

Here is no DSL: choosing a configuration and launching a kernel from the store import none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutegemm.hardware.arch import Arch
from cutegemm.hardware.residency import resident_clusters
from cutegemm.problem import Problem
from cutegemm.problem.work import TABLE as WORKS

if TYPE_CHECKING:
    from cutegemm.cute.hopper.config import HopperConfig


def works(config: HopperConfig, problem: Problem) -> int:
    """Cluster tiles of all products, times the splits of K; where the device knows the sizes, the most it may find."""
    rows, columns = config.bm * config.cluster[0], config.bn * config.cluster[1]
    tiles = problem.tiles(columns, rows) if config.swapped else problem.tiles(rows, columns)
    return tiles * config.splits


def clusters(config: HopperConfig, problem: Problem, arch: Arch) -> int:
    """Clusters of the grid: one a work, or of persistent CTAs as many as the GPU holds at a time, or a few less
    (`narrowed`). Where the device knows the sizes, large cooperative tiles leave clusters idle themselves.
    """
    count = works(config, problem)
    most = resident_clusters(arch, config.cluster_ctas)
    counted = bool(WORKS[problem.work].arrays)
    if config.stream_k and counted and count:
        return most  # of fewer tiles than clusters each is cut
    if not config.persistent or count <= most:
        return count
    if config.stream_k or config.parts > 1 or counted:
        return most
    return narrowed(count, most)


def narrowed(tiles: Any, clusters: Any, smallest: Callable[[Any, Any], Any] = min) -> Any:
    """How many of the clusters that the GPU holds compute that many tiles, which each takes whole.

    512 tiles take four waves on 132 SMs, and on 128 as well: then 128 compute. No SM has more to do, and fewer share
    the L2 cache and the power (in DeepGEMM too; docs/performance.md has what it gains). Not fewer than 15/16 of them:
    tiles that wait for memory would have less of it. Arithmetic as that of `whole_tiles`.
    """
    waves = (tiles - smallest(tiles, 1)) // clusters + 1
    fewest = (tiles + waves - 1) // waves
    enough = smallest(16 * fewest // (15 * clusters), 1)
    return clusters - enough * (clusters - fewest)


def shares(config: HopperConfig, problem: Problem, arch: Arch) -> tuple[int, int]:
    """(shares of D whose sum over K meets in a workspace, parts of each); (0, 0) where none does.

    A share is a warpgroup's rows of a CTA tile. With split-K all tiles have `splits` parts. With stream-K those tiles
    that are cut have two; there is room for a cut behind each cluster. Where the device knows the sizes, a cluster has
    one part of a cut tile at most.
    """
    if config.splits == 1 and not config.stream_k:
        return 0, 0
    if config.stream_k:
        resident, tiles = resident_clusters(arch, config.cluster_ctas), works(config, problem)
        if WORKS[problem.work].arrays:
            divided, parts = (resident, 1) if tiles else (0, 0)
        else:
            divided, parts = (resident, 2) if whole_tiles(tiles, resident) < tiles else (0, 0)
    else:
        divided, parts = works(config, problem) // config.splits, config.splits
    return divided * (config.cluster_ctas * config.consumers), parts


def whole_tiles(tiles: Any, clusters: Any, smallest: Callable[[Any, Any], Any] = min) -> Any:
    """How many tiles, from the first on, stream-K does not cut: all but the last whole wave and what is left beyond it.

    With nothing left over, or fewer tiles than clusters, all of them. Arithmetic without branches, for plain integers,
    or device integers with their own min.
    """
    left = tiles % clusters
    cuts = smallest(left, 1) * smallest(tiles // clusters, 1)
    return tiles - cuts * (left + clusters)
