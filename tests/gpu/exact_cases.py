"""Random configurations for exactness on integers, and the problems they run: each is drawn from a number alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cutegemm import backend
from cutegemm.cute import FAMILIES
from cutegemm.cute.hopper.config import K_CLUSTERS
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Problem, Signature
from legacy_cuda.rungs import RUNGS
from tests.problems import MAJORS

WAYS = ("split", "stream", "cluster", "cluster and split", "plain")
"""How a Hopper configuration shares out K; the configurations take turns."""

SIXTEEN = (("bf16", None), ("fp16", None))


@dataclass(frozen=True)
class Drawn:
    """What `exact.case` takes, and a kernel for it."""

    shape: tuple[int, int, int]
    dtype: str
    backend: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        precision = self.options.get("precision") or "ieee"
        majors = self.options["majors"]
        return Problem.of(*self.shape, self.dtype, majors=majors, out_dtype="fp32", precision=precision)

    @property
    def kernel(self) -> tuple[Signature, str, str]:
        """As `tuning.prebuild.compile_all` takes it."""
        return self.problem.signature, self.backend, self.config


def hopper(number: int, arch: Arch) -> Drawn:
    """Ragged, of 512 to 200,000 products an element; way `number` modulo 5."""
    rng, way = random.Random(f"hopper {number}"), WAYS[number % len(WAYS)]

    def attempt() -> Drawn:
        dtype, precision = rng.choice((*SIXTEEN, ("fp32", "tf32")))
        names = ("swap", "pdl", "zig", "skew")
        config = replace(
            rng.choice(_space("sm90", dtype)),
            order=rng.choice(("row", "col", "g4", "serp2", "hilbert")),
            options=tuple(name for name in names if rng.random() < 0.3) + ("streamk",) * (way == "stream"),
            splits=rng.randint(2, 32) if "split" in way else 1,
            cluster_k=1,
        )
        if "cluster" in way:
            cm, cn, parts = rng.choice(K_CLUSTERS)
            config = replace(config, cluster=(cm, cn), cluster_k=parts)
        m, n = (8 * rng.randint(1, 150) for _ in "mn")
        majors = "tn" if dtype == "fp32" else rng.choice(MAJORS)
        return _drawn((m, n, 8 * int(2 ** rng.uniform(6, 14.6))), dtype, config, majors, precision)

    return _first_valid(attempt, arch)


def warps(number: int, arch: Arch) -> Drawn:
    """sm80 and simt (sliced or not), any extents, 512 to 65,536 products an element."""
    rng = random.Random(f"warps {number}")

    def attempt() -> Drawn:
        family = ("sm80", "simt")[number % 2]
        dtype, precision = ("fp32", None) if family == "simt" else rng.choice((*SIXTEEN, ("fp32", "tf32")))
        config = rng.choice(_space(family, dtype))
        if family == "simt" and number % 4 == 1:
            config = rng.choice([other for other in _space(family, dtype) if other.slices > 1])
        if number % 3 == 2:
            config = replace(config, splits=rng.randint(2, 32))
        m, n = (rng.randint(1, 300) for _ in "mn")
        return _drawn((m, n, int(2 ** rng.uniform(9, 16))), dtype, config, rng.choice(MAJORS), precision)

    return _first_valid(attempt, arch)


def ladder() -> list[Drawn]:
    """Every rung in each of its dtypes at a deep, ragged problem."""
    found = [(name, dtype) for name, rung in RUNGS.items() for dtype in rung.dtypes]
    return [Drawn((70, 90, 20_001), dtype, "legacy", name, {"majors": "tt"}) for name, dtype in found]


@functools.cache
def _space(family: str, dtype: str) -> list[Any]:
    return list(FAMILIES[family].config.space(ITEMSIZE[dtype]))


def _drawn(shape: tuple[int, int, int], dtype: str, config: Any, majors: str, precision: str | None) -> Drawn:
    return Drawn(shape, dtype, "cute", str(config), {"majors": majors, "precision": precision})


def _first_valid(attempt: Callable[[], Drawn], arch: Arch) -> Drawn:
    cute = backend.get("cute")
    while True:
        drawn = attempt()
        try:
            config = cute.parse(drawn.config)
        except ValueError:
            continue
        if cute.check(config, drawn.problem, arch) is None:
            return drawn
