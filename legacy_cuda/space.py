"""The search space of the autotuned rungs, and the choice made when nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from cutegemm.arch import Arch
from cutegemm.problem import Problem, Signature
from legacy_cuda.config import LegacyConfig, why_invalid
from legacy_cuda.rungs import RUNGS

FAMILIES = ("thread_tile", "warp_tile")


def family(name: str, signature: Signature, arch: Arch) -> Iterator[LegacyConfig]:
    """The valid configurations of one autotuned rung: "thread_tile" varies BM, BN, BK, TM, TN of the double-buffered and
    the async-copy kernel; "warp_tile" also WM, WN, WNITER, stages and tile order. 16-bit: the warp tile and WMMA kernels.
    """
    if name not in FAMILIES:
        raise ValueError(f"family: got {name!r}, accepted are {', '.join(FAMILIES)}")
    if signature.dtype == "fp32":
        raw = _thread_tiles() if name == "thread_tile" else _warp_tiles()
    else:
        raw = iter(()) if name == "thread_tile" else _wmma_tiles()
    for rung, parameters in raw:
        config = _made(rung, parameters)
        if config is not None and why_invalid(config, signature, arch) is None and _worth_trying(config):
            yield config


def configs(signature: Signature, arch: Arch) -> Iterator[LegacyConfig]:
    """Both families, then every rung of the dtype's ladder with its defaults."""
    seen: set[LegacyConfig] = set()
    defaults = (LegacyConfig.of(rung.name) for rung in RUNGS.values() if signature.dtype in rung.dtypes)
    usable = (config for config in defaults if why_invalid(config, signature, arch) is None)
    for config in (*(c for name in FAMILIES for c in family(name, signature, arch)), *usable):
        if config not in seen:
            seen.add(config)
            yield config


def default(problem: Problem, arch: Arch) -> LegacyConfig:
    """The largest tile of the best rung that still fills the GPU; small tiles for small problems."""
    signature = problem.signature
    if signature.dtype != "fp32":
        candidates = [
            LegacyConfig.of("wmma_double_buffer", bm=bm, bn=bn, bk=32, warps_m=wm, warps_n=wn)
            for bm, bn, wm, wn in ((128, 128, 2, 4), (64, 64, 2, 2), (32, 32, 1, 1))
        ]
    else:
        candidates = [
            LegacyConfig.of("warp_tile_async"),
            LegacyConfig.of("warp_tile_async", bm=64, bn=64, wm=32, wn=32, wniter=1, tm=8, tn=4, stages=4),
            LegacyConfig.of("warp_tile_async", bm=32, bn=32, wm=32, wn=16, wniter=1, tm=4, tn=4, stages=4),
        ]
    usable = [config for config in candidates if why_invalid(config, signature, arch) is None]
    if not usable:
        usable = [c for c in configs(signature, arch)][-1:]
    for config in usable:
        bm, bn, _ = config.tile()
        if -(-problem.m // bm) * -(-problem.n // bn) * problem.batch >= arch.sm_count:
            return config
    return usable[-1]


def _made(rung: str, parameters: dict[str, int]) -> LegacyConfig | None:
    try:
        return LegacyConfig.of(rung, **parameters)
    except ValueError:
        return None


def _worth_trying(config: LegacyConfig) -> bool:
    """Enough multiply-adds per shared load, and threads enough to fill an SM's four schedulers."""
    return config.accumulators >= 32 and 64 <= config.threads <= 512


def _thread_tiles() -> Iterator[tuple[str, dict[str, int]]]:
    for bm, bn, bk, tm, tn in product((64, 128, 256), (64, 128, 256), (8, 16, 32), (4, 8, 16), (4, 8, 16)):
        for rung in ("double_buffer_shared", "async_copy"):
            yield rung, {"bm": bm, "bn": bn, "bk": bk, "tm": tm, "tn": tn}


def _warp_tiles() -> Iterator[tuple[str, dict[str, int]]]:
    shapes = product(
        (64, 128, 256), (64, 128, 256), (8, 16, 32), (32, 64, 128), (32, 64, 128), (1, 2, 4), (4, 8, 16), (4, 8)
    )
    for bm, bn, bk, wm, wn, wniter, tm, tn in shapes:
        tile = {"bm": bm, "bn": bn, "bk": bk, "wm": wm, "wn": wn, "wniter": wniter, "tm": tm, "tn": tn}
        yield "warp_tile", tile
        for stages in (2, 3, 4):
            yield "warp_tile_async", {**tile, "stages": stages, "group": 8}


def _wmma_tiles() -> Iterator[tuple[str, dict[str, int]]]:
    for bm, bn, bk, wm, wn in product((64, 128, 256), (64, 128, 256), (16, 32, 64), (1, 2, 4), (1, 2, 4)):
        for rung in ("wmma_warp_tile", "wmma_double_buffer"):
            yield rung, {"bm": bm, "bn": bn, "bk": bk, "warps_m": wm, "warps_n": wn}
