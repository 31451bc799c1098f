"""The search space of the autotuned rungs, and the choice made when nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product

from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, Signature
from legacy_cuda.config import LegacyConfig, why_invalid
from legacy_cuda.rungs import RUNGS

FAMILIES = ("thread_tile", "warp_tile")

SEEDS = (
    "double_buffer_shared/bm256/bn128/bk16/tm16/tn8",
    "double_buffer_shared/bm128/bn128/bk8/tm8/tn8",
    "async_copy/bm128/bn128/bk16/tm8/tn8",
    "warp_tile/bm128/bn128/bk8/wm128/wn32/wniter2/tm4/tn4",
    "warp_tile/bm128/bn128/bk8/wm128/wn32/wniter4/tm4/tn4",
    "warp_tile_async/bm64/bn128/bk8/wm32/wn128/wniter2/tm4/tn4/stages3/group8",
    "wmma_double_buffer/bm128/bn128/bk32/warps_m2/warps_n4",
)
"""Configurations that were fast on an H200 at 8192^3: a search begins with them."""


def family(name: str, signature: Signature, arch: Arch) -> Iterator[LegacyConfig]:
    """The valid configurations of one autotuned rung: "thread_tile" varies BM, BN, BK, TM, TN of the double-buffered
    and the async-copy kernel; "warp_tile" also WM, WN, WNITER, stages and tile order. 16-bit: the warp tile and WMMA
    kernels.
    """
    if name not in FAMILIES:
        raise ValueError(f"family: got {name!r}, accepted are {', '.join(FAMILIES)}")
    raw = _thread_tiles() if name == "thread_tile" else chain(_warp_tiles(), _wmma_tiles())
    for rung, parameters in raw:
        if signature.dtype not in RUNGS[rung].dtypes:
            continue
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


def candidates(signature: Signature, arch: Arch) -> list[LegacyConfig]:
    """Configurations of the best rungs, the largest tile first; what to choose among when nothing was measured."""
    listed = [
        *(
            LegacyConfig.of("wmma_double_buffer", bm=bm, bn=bn, bk=32, warps_m=wm, warps_n=wn)
            for bm, bn, wm, wn in ((128, 128, 2, 4), (64, 64, 2, 2), (32, 32, 1, 1))
        ),
        LegacyConfig.of("double_buffer_shared", bm=256, tm=16),
        LegacyConfig.of("double_buffer_shared", bk=8),
        LegacyConfig.of("warp_tile_async", bm=64, bn=64, wm=32, wn=32, wniter=1, tm=8, tn=4, stages=4),
        LegacyConfig.of("warp_tile_async", bm=32, bn=32, wm=32, wn=16, wniter=1, tm=4, tn=4, stages=4),
    ]
    usable = [config for config in listed if why_invalid(config, signature, arch) is None]  # of the dtype's rungs
    return usable or list(configs(signature, arch))[-1:]


def default(problem: Problem, arch: Arch) -> LegacyConfig:
    """The largest tile of the best rung that still fills the GPU; small tiles for small problems."""
    usable = candidates(problem.signature, arch)
    for config in usable:
        bm, bn, _ = config.tile()
        if -(-problem.m // bm) * -(-problem.n // bn) * problem.batch >= arch.sm_count:
            return config
    return usable[-1]


def promise(config: LegacyConfig, problem: Problem, arch: Arch) -> float:
    """How fast a configuration may be, 0..1, from what it issues and how it fills the GPU: an order, no forecast."""
    p, signature = config.parameters, problem.signature
    if str(config) in SEEDS:
        return 1.0
    bm, bn, bk = config.tile()
    if config.spec.tensor_cores:
        rows, cols = bm // p.get("warps_m", 1), bn // p.get("warps_n", p.get("warps", 1))
        work, overhead = rows * cols / 16, float(rows + cols)
        registers = config.accumulators + 60
    else:
        if "wm" in p:
            lanes_n = p["wn"] // p["wniter"] // p["tn"]
            rows, cols = p["wm"] * lanes_n // 32, p["wn"] // lanes_n
        else:
            rows, cols = p.get("tm", 1), p.get("tn", 1)
        copies = (bm + bn) / config.threads
        work, overhead = float(rows * cols), (rows + cols) / 4 + copies + 12 / bk
        registers = config.accumulators + 2 * (rows + cols) + 40
    smem = config.dynamic_smem(signature) + config.static_smem() + arch.smem_reserved_per_cta
    ctas = min(arch.registers_per_sm // (config.threads * min(registers, 255)), arch.smem_per_sm // smem)
    if ctas < 1 or registers > 290:
        return 0.0
    tiles = -(-problem.m // bm) * -(-problem.n // bn) * problem.batch
    # The last wave runs as fast as its CTAs let it: half full, each has twice the SM.
    waves = tiles / (ctas * arch.sm_count)
    filled = waves / (waves + 0.5 / ctas)
    latency = min(1.0, ctas * config.threads / 256)
    traffic = 1 - 8 / min(bm, bn)
    return work / (work + overhead) * filled * (0.5 + 0.5 * latency) * traffic


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
    # WNITER, TM and TN only say how the lanes of a warp are laid out: what gives the same layout gives the same code.
    shapes = product((64, 128, 256), (64, 128, 256), (8, 16, 32), (32, 64, 128), (32, 64, 128), (2, 4, 8, 16))
    for bm, bn, bk, wm, wn, lanes_n in shapes:
        if wn % (4 * lanes_n):
            continue
        tile = {"bm": bm, "bn": bn, "bk": bk, "wm": wm, "wn": wn, "wniter": wn // (4 * lanes_n), "tm": 4, "tn": 4}
        yield "warp_tile", tile
        for stages in (2, 3, 4):
            yield "warp_tile_async", {**tile, "stages": stages, "group": 8}


def _wmma_tiles() -> Iterator[tuple[str, dict[str, int]]]:
    for bm, bn, bk, wm, wn in product((64, 128, 256), (64, 128, 256), (16, 32, 64), (1, 2, 4), (1, 2, 4)):
        for rung in ("wmma_warp_tile", "wmma_double_buffer"):
            yield rung, {"bm": bm, "bn": bn, "bk": bk, "warps_m": wm, "warps_n": wn}
