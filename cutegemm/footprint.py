"""What one CTA of a configuration does, in terms that every kernel family has: the cost model's view of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutegemm.cute.hopper_config import LINE
from cutegemm.cute.tile_order import HILBERT_LEVELS
from cutegemm.problem import ITEMSIZE

if TYPE_CHECKING:
    from cutegemm.arch import Arch
    from cutegemm.problem import Signature

WGMMA_ROWS = 64


@dataclass(frozen=True)
class Footprint:
    """One CTA of a configuration.

    family: key of its constants in `cost_model`. bm, bn, bk: CTA tile in D's orientation, elements. stages: of the
    ring. smem_step: bytes of shared memory read by a k step, over all warps. threads: of a CTA; ctas: resident on an
    SM. cluster: CTAs along M and N that share loads. parts: CTAs of a cluster that sum a part of K each and add up on
    chip. splits: of K, among clusters; serial: one CTA adds up all parts of a tile, they are not shared out. balanced:
    tiles that fill no round of all SMs are cut along K (stream-K). group: tile rows that the tile order walks together.
    overlapped: the epilogue runs beside the next tile's multiplications. pdl: programmatic dependent launch.
    copies: how many times more instructions narrow loads take than 16-byte ones. narrow: how many times as long a
    stage's TMA boxes take as if their rows were whole lines.
    curve: the tile order is a Hilbert curve. zig: waves of tiles walk K to and fro. segment: bytes of a row of D that
    the epilogue stores as one, a line of 128 at most. turned: the operands are exchanged, D is stored turned. beside:
    an SM has room for a CTA of the next launch, which may start early.
    """

    family: str
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
    pdl: bool = False
    copies: float = 1.0
    narrow: float = 1.0
    curve: bool = False
    zig: bool = False
    segment: int = LINE
    turned: bool = False
    beside: bool = False

    @property
    def unit(self) -> tuple[int, int]:
        """Rows and columns of D that a cluster computes together."""
        return self.bm * self.cluster[0], self.bn * self.cluster[1]

    @property
    def cluster_ctas(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.parts


def of(config: Any, backend: str, signature: Signature, arch: Arch) -> Footprint:
    """The footprint of a backend's configuration. Raises ValueError for a backend that has none."""
    describe = _DESCRIBE.get(backend)
    if describe is None:
        raise ValueError(f"backend: got {backend!r}, accepted are {', '.join(map(repr, _DESCRIBE))}")
    return describe(config, signature, arch)


def _cute(config: Any, signature: Signature, arch: Arch) -> Footprint:
    return _hopper(config, signature, arch) if config.family == "sm90" else _cute_warps(config, signature, arch)


def _hopper(config: Any, signature: Signature, arch: Arch) -> Footprint:
    bm, bn, bk = config.tile()
    size = ITEMSIZE[signature.dtype]
    # Each WGMMA reads its 64 rows of A and all of B.
    smem = config.bm // WGMMA_ROWS * (WGMMA_ROWS + config.bn) * bk * size
    cluster = config.cluster[::-1] if config.swapped else config.cluster
    # One consumer warpgroup keeps the registers it was compiled to, its accumulators and about 32 more; with several,
    # setmaxnreg deals out all.
    registers = min(config.accumulators + 32, 255) if config.consumers == 1 else 168
    ctas = resident(arch, config.smem_bytes(signature), config.threads, registers)
    pdl = "pdl" in config.options
    # A store of exchanged operands is 64 columns wide, whatever the tile.
    out = ITEMSIZE[signature.out_dtype]
    columns = WGMMA_ROWS if config.swapped else config.store_columns(out)
    return Footprint(
        "sm90/tf32" if signature.dtype == "fp32" else "sm90",
        bm,
        bn,
        bk,
        config.stages,
        smem,
        config.threads,
        ctas=1 if config.persistent else ctas,
        cluster=cluster,
        parts=config.cluster_k,
        splits=config.splits,
        serial=False,
        balanced="streamk" in config.options,
        group=order_rows(config.order),
        overlapped=config.ping_pong,
        pdl=pdl,
        curve=config.order == "hilbert",
        zig="zig" in config.options,
        segment=min(columns * out, LINE),
        narrow=_narrow(config, signature),
        turned=config.swapped,
        beside=pdl and ctas > 1,
    )


def _narrow(config: Any, signature: Signature) -> float:
    """A row of a box is what divides both a line and the tile, along K or along the operand's other side.

    What is narrower than a line takes as many times as long as there are CTAs that load it in common (row-major B on an
    H200; whole lines do not).
    """
    size, (cm, cn) = ITEMSIZE[signature.dtype], config.cluster
    majors = (signature.a_major, signature.b_major)[:: -1 if config.swapped else 1]
    rows = lines = 0.0
    for extent, sharers, major in zip((config.bm, config.bn), (cn, cm), majors, strict=True):
        width = math.gcd((config.bk if major == "k" else extent) * size, LINE)
        rows += extent * (1 if width == LINE else sharers) / width
        lines += extent / LINE
    return rows / lines


def _cute_warps(config: Any, signature: Signature, arch: Arch) -> Footprint:
    tf32 = config.family == "sm80" and signature.dtype == "fp32"
    return _warps(
        f"{config.family}/tf32" if tf32 else config.family,
        config.tile(),
        (config.wm, config.wn),
        config.stages,
        config.smem_bytes(signature),
        signature,
        arch,
        group=config.group,
        slices=getattr(config, "slices", 1),
    )


def _cutlass2x(config: Any, signature: Signature, arch: Arch) -> Footprint:
    family = "cutlass2x"
    if signature.dtype == "fp32":
        family += "/simt" if config.simt else f"/{signature.precision}"
    group = int(config.swizzle[2:]) if config.swizzle.startswith("id") else 1
    return _warps(
        family,
        config.threadblock,
        config.warp[:2],
        config.stages,
        config.smem_bytes(signature),
        signature,
        arch,
        group=group,
        splits=config.splits,
    )


def _legacy(config: Any, signature: Signature, arch: Arch) -> Footprint:
    bm, bn, bk = config.tile()
    p = config.parameters
    if "warps_m" in p:
        warp = bm // p["warps_m"], bn // p["warps_n"]
    elif "wm" in p:
        warp = p["wm"], p["wn"]
    else:
        warp = 4 * p.get("tm", 1), 8 * p.get("tn", 1)
    return _warps(
        "legacy/wmma" if config.spec.tensor_cores else "legacy",
        (bm, bn, bk),
        (min(warp[0], bm), min(warp[1], bn)),
        p.get("stages", 2),
        config.dynamic_smem(signature) + config.static_smem(),
        signature,
        arch,
        group=p.get("group", 1),
    )


def _warps(
    family: str,
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
) -> Footprint:
    """A kernel whose warps each read their own fragments of A and B from shared memory.

    `slices`: groups of warps that share the warp tiles, each reading its part of a stage's depth.
    """
    (bm, bn, bk), (wm, wn), size = tile, warp, ITEMSIZE[signature.dtype]
    warps = max(bm * bn // (wm * wn), 1)
    threads = 32 * warps * slices
    # Accumulators, double-buffered fragments, addresses; FFMA kernels hold longer fragments.
    accumulators = wm * wn // 32
    held = 2 * accumulators + 40 if signature.precision == "ieee" and size == 4 else (wm + wn) // 2 + 40
    registers = min(accumulators + held, arch.registers_per_thread)
    if slices > 1:
        # The compiler loads ahead into whatever one CTA may have.
        registers = min(224, arch.registers_per_sm // threads)
    narrowest = min(signature.align_a, signature.align_b)
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
        copies=16 / narrowest,
    )


def resident(arch: Arch, smem_bytes: int, threads: int, registers: int) -> int:
    """CTAs resident on an SM, at least 1: by shared memory, registers and threads."""
    by_smem = arch.smem_per_sm // (smem_bytes + arch.smem_reserved_per_cta)
    by_registers = arch.registers_per_sm // (threads * (-(-registers // 8) * 8))
    return max(1, min(by_smem, by_registers, arch.threads_per_sm // threads, arch.ctas_per_sm))


def order_rows(order: str) -> int:
    """Tile rows that a tile order walks together; see `cute.tile_order`."""
    found = re.fullmatch(r"(?:g|serp)(\d+)", order)
    if found:
        return int(found[1])
    return {"row": 1, "hilbert": 1 << HILBERT_LEVELS}.get(order, 64)


_DESCRIBE: dict[str, Callable[[Any, Signature, Arch], Footprint]] = {
    "cute": _cute,
    "cutlass2x": _cutlass2x,
    "legacy": _legacy,
}
