"""The cost model's formula (`cost_model`): seconds of a launch from its terms. `compiled` makes machine code of it."""

from __future__ import annotations

import math

from cutegemm.problem.work import LARGE_SHARE

BEYOND, BEYOND_FITTED = 0.5, 0.1
"""Tiles that a large group counts beyond its rows divided by those of a tile; the second with option `fit`."""
NARROWEST = 0.6
"""What a tile with option `fit` counts at least: its narrowest main loop has some 0.55 to 0.67 of its columns."""


def tiles_seconds(
    rounds: float, steps: int, step: float, latency: float, stages: int, epilogue: float, partial: float = 0.0,
    stays: bool = False,
) -> float:  # fmt: skip
    """Seconds of rounds of tiles: each k step takes `step`, or `latency` where the wait for its loads is longer.

    The first `stages` loads are all under way before a stage is needed again, so that they wait only once. From one
    round on, the result grows with every argument but `stages` and `stays`.

    Args:
        epilogue: what is not hidden of it, in each round. partial: seconds of a last round of fewer CTAs an SM.
        stays: a CTA stays for the next tile, whose first loads are under way during the epilogue.
    """
    if latency > step:
        overlapped = (latency - step) * (steps if steps < stages else stages)
        found = rounds * (steps * latency + epilogue) + partial - overlapped
        if stays and rounds > 1:
            found -= (rounds - 1) * (overlapped if overlapped < epilogue else epilogue)
        return found
    return rounds * (steps * step + epilogue) + partial


def launch_seconds(
    tiles: float, memory: float, fixed: float, power: float, overlap: float, counted: float = 0.0, early: float = 0.0
) -> float:
    """Seconds of a launch from its terms, each in seconds: the longer of tiles and memory hides most of the other.

    Args:
        overlap: share that is not hidden. counted: share of the time up to which the power limit is left out.
        early: seconds that an early start saves, where `fixed` is without them.
    """
    time = (tiles + overlap * memory if tiles > memory else memory + overlap * tiles) + fixed - early
    if power > counted * time:
        time = fourth_mean(time, power)
    return time


def fourth_mean(one: float, other: float) -> float:
    """About the larger of the two, and more where they are close: 1.19 times as much where they are equal."""
    return math.sqrt(math.sqrt(one**4 + other**4))


def tiles_along(extent: int, tile: int, more: float, fitted: bool) -> float:
    """Tiles along rows or columns.

    more: tiles that a large group counts beyond those that its share of the rows fills, because its size is known on
    the device alone; 0 for extents that are known on the host. A tile larger than the share holds some groups whole and
    others not, depending on how unequal they are: half of the excess over one tile counts.
    fitted: tiles have option `fit`. One that is larger than the share then computes little more than the share.
    """
    if more and extent >= LARGE_SHARE:
        found = extent / tile + more
        if tile > extent:
            if fitted:
                found -= 0.5 * more
                return found if found > NARROWEST else NARROWEST
            found = 0.5 + 0.5 * found if found > 1 else 1.0
        return found
    return -(-extent // tile)
