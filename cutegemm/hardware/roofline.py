"""Bounds and quantization: how fast a multiplication can be, and what a grid of tiles makes of it.

Williams, Waterman, Patterson, "Roofline", CACM 2009; tile and wave quantization as in NVIDIA's "Matrix Multiplication
Background".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem


@dataclass(frozen=True)
class Roofline:
    """Lower bounds of one problem on one architecture.

    flop_s: seconds of the arithmetic at the peak rate. byte_s: seconds of the compulsory bytes at full bandwidth.
    intensity: flop per compulsory byte.
    """

    flop_s: float
    byte_s: float
    intensity: float

    @property
    def bound_s(self) -> float:
        """Seconds that no kernel can beat."""
        return max(self.flop_s, self.byte_s)

    @property
    def limit(self) -> str:
        return "arithmetic" if self.flop_s >= self.byte_s else "memory"

    def share(self, seconds: float) -> float:
        """The bound over a measured time: 1 is perfect. Raises ValueError unless the time is positive."""
        if not seconds > 0:
            raise ValueError(f"seconds: got {seconds!r}, expected a positive time")
        return self.bound_s / seconds


def roofline(problem: Problem, arch: Arch) -> Roofline:
    """The bounds of `problem` on `arch`, every operand read once and D written once."""
    parts = problem.signature.parts
    peak = arch.peak(problem.signature.unit) * 1e12 / (1 if parts is None else len(parts.terms))
    intensity = problem.flops / problem.min_bytes if problem.min_bytes else 0.0
    return Roofline(problem.flops / peak, problem.min_bytes / arch.hbm_bytes_per_s, intensity)


@dataclass(frozen=True)
class Quantization:
    """What a grid of tiles makes of a shape.

    tiles: CTAs of the grid. tile_share: share of the tiles' area that lies inside D.
    waves: CTAs of the grid over CTAs in flight at once. wave_share: share of the slots of all waves that hold a CTA.
    """

    tiles: int
    tile_share: float
    waves: float
    wave_share: float


def parts_of(config: Any) -> int:
    """How many CTAs sum parts of K of one tile, in a configuration of any backend."""
    return getattr(config, "parts", getattr(config, "splits", 1))


def quantization(m: int, n: int, tile_m: int, tile_n: int, in_flight: int, batch: int = 1) -> Quantization:
    """Tile and wave quantization of an (m, n) output in tiles of (tile_m, tile_n) with `in_flight` CTAs resident at
    once.

    Raises ValueError when a tile extent or `in_flight` is not positive, or a size is negative.
    """
    if tile_m < 1 or tile_n < 1 or in_flight < 1 or min(m, n, batch) < 0:
        raise ValueError(
            f"quantization: got m={m}, n={n}, tile={tile_m}x{tile_n}, in_flight={in_flight}, batch={batch}"
        )
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n) * batch
    waves = tiles / in_flight
    return Quantization(
        tiles,
        m * n * batch / (tiles * tile_m * tile_n) if tiles else 1.0,
        waves,
        waves / math.ceil(waves) if tiles else 1.0,
    )
